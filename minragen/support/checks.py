"""Which options do not go together, and which would change nothing: rules for `config.check`.

Tests: `python -m pytest tests/test_config.py`.
"""

def estimator_kind(config):
    """What the advantage estimator needs: "group", "reward" or "critic". Raises ValueError."""
    from minragen import starpo  # with PyTorch: see config.choices_of

    entry = starpo.ESTIMATORS[config.advantages]
    match entry:
        case "group" | "reward" | "critic" as kind, _:
            return kind
    raise ValueError(f"advantages {config.advantages}: got {entry} in starpo.ESTIMATORS, expected "
                     f"(kind, function) with kind group, reward or critic.")


# (whether a Config contradicts itself, the message)
CONTRADICTIONS = (
    (lambda c: estimator_kind(c) == "group" and c.advantages != "brpo" and c.group_size < 2,
     "{advantages} compares the members of a group: got group_size 1, expected at least 2."),
    (lambda c: c.group_size < 2 and c.filter != "none",
     "group_size 1 has no reward std: expected at least 2, or filter none."),
    (lambda c: estimator_kind(c) == "group" and c.credit == "turn",
     "{advantages} compares whole episodes: got credit turn, expected episode, or an estimator of "
     "token rewards (gae, reinforce, ...)."),
    (lambda c: c.advantages in ("bi_level_gae", "turn_gae") and c.context != "full",
     "{advantages} needs all turns in one row: got context {context}, expected full."),
    (lambda c: c.resample and (c.filter, c.filter_value) != ("top_p", 1.0),
     "resample replaces groups of reward std 0: expected the filter that drops just those, filter "
     "top_p with filter_value 1."),
    (lambda c: c.ratio == "sequence" and (estimator_kind(c) != "group" or c.advantages == "gigpo"),
     "ratio sequence needs one advantage per row: got {advantages}, expected grpo, rloo, brpo, "
     "maxrl or reinforce_pp_baseline."),
    (lambda c: c.advantages == "maxrl" and (c.reward, c.kl_reward_coef, c.overlong)
     != ("success", 0.0, 0.0),
     "maxrl compares success and failure: expected reward success, no kl_reward_coef and no "
     "overlong."),
    (lambda c: c.tis_cap and (c.top_k or c.top_p < 1),
     "tis_cap weights by probabilities before truncation: expected no top_k and no top_p."),
    (lambda c: c.reward == "success" and (c.description_reward
                                          or "random_reward" in " ".join(c.layer)),
     "--reward success pays for nothing else: expected no description_reward and no layer "
     "random_reward."),
    (lambda c: c.echo_coef and c.context != "full",
     "echo_coef needs the reply before an observation in the same row: got context {context}, "
     "expected full."),
    (lambda c: c.dual_clip and c.dual_clip <= 1,
     "dual_clip: got {dual_clip}, expected more than 1, or 0 for none."),
)
OURS = ("none", "grpo", "rloo", "brpo", "maxrl", "gigpo", "reinforce", "reinforce_pp", "gae",
        "reinforce_pp_baseline", "bi_level_gae", "turn_gae")  # a user's may read what these ignore
_CRITIC = (lambda c: estimator_kind(c) == "critic", "an estimator with a critic")
_FAST = (lambda c: not c.plain, "plain false")
# option -> (whether it has an effect, what it needs for one)
NEEDS = {
    "attention": _FAST, "feed_share": _FAST, "compile": _FAST,
    "norm_by_std": (lambda c: c.advantages in ("grpo", "gigpo"), "advantages grpo or gigpo"),
    "dual_clip": (lambda c: c.ratio != "detached", "a ratio that is not detached"),
    "teacher": (lambda c: c.kl_coef > 0 or c.kl_reward_coef > 0, "a kl_coef or kl_reward_coef"),
    "tis_cap": (lambda c: c.stale or c.model not in ("tiny", "tiny-vlm"),
                "stale samples, or a sampler that rounds otherwise than the learner (bfloat16)"),
    "gamma": (lambda c: estimator_kind(c) == "reward" and c.advantages != "none"
              or c.advantages in ("gae", "bi_level_gae"),
              "advantages gae, bi_level_gae or a REINFORCE"),
    "gamma_turn": (lambda c: c.advantages in ("gigpo", "bi_level_gae", "turn_gae")
                   or c.context != "full" and c.credit == "turn",
                   "advantages gigpo, bi_level_gae or turn_gae, or credit turn and a "
                   "context other than full"),
    "lam": _CRITIC, "critic_lr": _CRITIC,
    "window": (lambda c: c.context != "full", "context limited or single_turn"),
    "kl_estimator": (lambda c: c.kl_coef > 0, "a kl_coef"),
    "filter_value": (lambda c: c.filter != "none", "a filter"),
}


def check_together(config, base):
    """Raise ValueError for options that contradict each other, or have no effect but differ from
    the Config `base`."""
    import torch

    from minragen import starpo

    for name, (has_effect, needed) in NEEDS.items():
        value, usual = getattr(config, name), (getattr(base, name), getattr(type(config), name))
        own = config.advantages not in OURS and name in ("norm_by_std", "gamma", "gamma_turn")
        if value not in usual and not (own or has_effect(config)):
            raise ValueError(f"{name}: got {value}, but it has no effect here. It needs {needed}.")
    for refused, sentence in CONTRADICTIONS:
        if refused(config):
            raise ValueError(sentence.format_map(vars(config)))
    starpo.filter_groups(torch.zeros(1), config.filter_value, config.filter)  # refuses bad values
