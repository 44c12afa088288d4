"""What is tested: the arms (configurations), and the findings with their claims and predictions.

Predictions were written down before their reported seeds were run (exceptions: docs/history.md,
"the papers' findings"), each with a margin: the smallest effect that would matter. Settings were
chosen on seeds from 100 on, which are not reported.

Sources: V1 is RAGEN (Wang et al. 2025, arXiv:2504.20073), V2 its second version's code and docs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy

from findings import figures
from findings.statistics import WINDOW, fall, last, onset, windows, worst_spike

SEEDS = (0, 1, 2, 3, 4)
# What is kept of metrics.jsonl.
METRICS = re.compile(
    r"success|valid|reward_std|grad_norm|entropy|distinct_3|valid_thinking|response_tokens|turns"
    r"|grounding|worldmodeling|echo_loss|kl_ref"
    r"|first_turn/(mi|retrieval|conditional_entropy_per_token)"
    r"|val/success|gradient/bucket_\d/(task|entropy|kl|reward_std)")


class Prediction(NamedTuple):
    """What a claim says about numbers: the difference is positive, and larger than the margin."""

    text: str
    margin: float
    arms: tuple
    difference: Callable  # (row of each arm, of one seed) -> float; nan if it cannot be said


@dataclass(frozen=True)
class Finding:
    """A claim, the arms that test it, what would count for it, and its figure."""

    name: str
    title: str
    source: str
    claim: str
    arms: tuple
    predictions: tuple
    draw: Callable  # {arm: [row with arrays, ...]} -> matplotlib Figure
    seeds: tuple = SEEDS


def beats(arm, other):
    """The prediction that an arm ends with more success than another."""
    return Prediction(f"`{arm}` over `{other}`: more success at the end", 0.05, (arm, other),
                      lambda a, b: last(a["success"]) - last(b["success"]))


# ---- Arms ----------------------------------------------------------------------------------------
# V1's vanilla setting: 8 x 16 episodes, no filter, clip 0.2 on both sides, KL and entropy 0.001,
# GAE(1, 1). The learning rate is three times that of tiny's presets, at which nothing collapses;
# MetaMathQA is where most goes wrong, and cheap.
NO_KL = dict(kl_coef=0.0, kl_estimator="k2")  # the estimator is the preset's: it has no effect
VANILLA = dict(env="metamathqa", filter="none", num_groups=8, group_size=16, mini_batch=32,
               clip_high=0.2, kl_coef=0.001, kl_estimator="k3", entropy_coef=0.001, lr=1.5e-3,
               lr_final=1.0, steps=100, val_every=50, val_size=128, diagnose_every=5)
AS_PPO = dict(algo="ppo", lam=1.0, credit="episode")
PPO = VANILLA | AS_PPO


def keep(share):
    """Train on this share of the groups. With V1's mini-batch of fixed size it is also this share
    of the optimizer steps: an arm of fewer, larger ones shows what that does alone."""
    return dict(filter="top_k", filter_value=share, filter_include_zero=True)


ARMS = {
    "grpo": VANILLA,
    "ppo": PPO,
    "ppo-keep-75": PPO | keep(0.75),
    "ppo-keep-50": PPO | keep(0.5),
    "ppo-keep-25": PPO | keep(0.25),
    "ppo-fewer-updates": PPO | dict(mini_batch=128),
    "grpo-keep-25": VANILLA | keep(0.25),
    "grpo-clip-higher": VANILLA | dict(clip_high=0.28),
    "grpo-no-kl": VANILLA | NO_KL,
    "starpo-s": PPO | keep(0.25) | dict(clip_high=0.28) | NO_KL,
}
HARD = tuple(ARMS)
ARMS["frozenlake-grpo"] = VANILLA | dict(env="frozenlake", steps=80, val_every=40)
ARMS["frozenlake-ppo"] = ARMS["frozenlake-grpo"] | AS_PPO
BANDIT = dict(env="bandit", steps=30, val_every=30, val_size=128)
for reversed_arms in (False, True):
    for style in ("free_think", "no_think"):
        ARMS["bandit-" + ("reversed-" if reversed_arms else "") + style.replace("_", "-")] = (
            BANDIT | dict(response_format=style,
                          env_arg=("mixed=False", f"reversed={reversed_arms}")))
# The stored runs have what the presets were then: FrozenLake in groups of 16, and k3.
EARLIER = dict(group_size=16, kl_estimator="k3")
FIVE = {"bandit": dict(steps=15), "metamathqa": dict(steps=40),
        "countdown": dict(steps=25, num_groups=8, kl_estimator="k3"),
        "frozenlake": dict(steps=30, num_groups=8, **EARLIER),
        "deepcoder": dict(steps=25, num_groups=8)}
FILTERS = {"top-p": dict(filter="top_p", filter_value=0.9),
           "top-k": dict(filter="top_k", filter_value=0.25),
           "min-p": dict(filter="min_p", filter_value=0.5), "none": dict(filter="none")}
for task, sizes in FIVE.items():
    for rule, options in FILTERS.items():
        ARMS[f"{task}-{rule}"] = dict(env=task, val_every=100, val_size=64, diagnose_every=0,
                                      **sizes, **options)
# VAGEN's ablation in small: FrozenLake as a picture.
SEEING = dict(env="frozenlake", model="tiny-vlm", num_groups=8, steps=100, val_every=50,
              diagnose_every=0, **EARLIER)
TOLD = SEEING | dict(response_format="grounding_worldmodeling")
# At VAGEN's weights five described turns pay up to 5 and the goal 1; at these up to 0.3.
PAID_LESS = TOLD | dict(grounding_reward=0.03, worldmodeling_reward=0.03)
ARMS |= {"seeing-no-think": SEEING | dict(response_format="no_think"),
         "seeing-free-think": SEEING, "seeing-told": TOLD,
         "seeing-paid": TOLD | dict(grounding_reward=0.5, worldmodeling_reward=0.5),
         "seeing-paid-less": PAID_LESS, "seeing-gae": PAID_LESS | dict(algo="ppo"),
         "seeing-bi-level": PAID_LESS | dict(algo="bi-level")}
GRADIENTS = dict(env="frozenlake", filter="none", num_groups=48, gradients_every=5, kl_coef=0.01,
                 steps=10, val_every=10, val_size=64, diagnose_every=0, **EARLIER)
ARMS |= {"gradients": GRADIENTS, "gradients-no-std": GRADIENTS | dict(norm_by_std=False)}
# What the field found since, against the presets, in two environments with several turns.
SHORT = dict(steps=60, val_every=60, diagnose_every=0)
DISTILLED = SHORT | dict(zero_task=True, kl_coef=1.0, entropy_coef=0.0, filter="none", steps=30,
                         val_every=30)
for task in ("frozenlake", "sokoban"):
    ARMS[f"{task}-by-episode"] = SHORT | dict(env=task)
    ARMS[f"{task}-gigpo"] = SHORT | dict(env=task, algo="gigpo")
    # The teacher is the run above with the same seed.
    ARMS[f"{task}-distilled"] = DISTILLED | dict(
        env=task, teacher=f"findings-{task}-by-episode-s{{seed}}")
ARMS["frozenlake-echo"] = SHORT | dict(env="frozenlake", echo_coef=0.03)
STALE = {"bandit": dict(steps=60, val_every=60), "metamathqa": dict(steps=80, val_every=80)}
LATE = {"fresh": {}} | {f"stale-{k}{end}": dict(stale=k, **cap) for k in (1, 4, 16)
                        for end, cap in (("", {}), ("-tis", dict(tis_cap=2.0)))}
for task, sizes in STALE.items():
    for name, options in LATE.items():
        ARMS[f"{task}-{name}"] = dict(env=task, diagnose_every=0, **sizes, **options)


# ---- What is computed from a run -----------------------------------------------------------------
MI, H = "first_turn/mi", "first_turn/conditional_entropy_per_token"  # of reasoning Z, prompt X
# Which way each indicator turns in a collapse.
WORSE = {"reward_std": -1, "entropy": 1, "grad_norm": 1, "first_turn/mi": -1, "distinct_3": -1,
         "valid": -1}


def best_window(row):
    """The index k of the window in which success is best: steps k+1 to k+WINDOW. Rounded, so that
    of equal windows it is the first: sums in another order may differ in their last bit."""
    return int(np.nanargmax(windows(row["success"]).round(9)))


def falls_with_success(arm, metric, margin):
    """The prediction that a metric is lower in the last steps than where success was best."""
    def difference(row):
        means = windows(row[metric])
        return means[best_window(row)] - means[-1]

    return Prediction(f"`{arm}`: {metric} falls from where success was best to the last steps",
                      margin, (arm,), difference)


def onsets(row):
    """{indicator: step at which it turned for the worse, not before the best window of success},
    the step after the last if it did not; all nan if success never fell by 0.1."""
    if fall(row["success"]) < 0.1:
        return dict.fromkeys(("success", *WORSE), np.nan)
    first = 1 + best_window(row)
    return {name: onset(row[name], sign, first) for name, sign in {"success": -1, **WORSE}.items()}


def turns(arm, name, other):
    """The prediction that an indicator turns before another one; one that never turns counts as
    the step after the last, and where neither does, or success never fell, it is nan."""
    def difference(row):
        found = onsets(row)
        never = len(row["success"])
        return np.nan if found[name] == found[other] == never else found[other] - found[name]

    return Prediction(f"`{arm}`: {name} turns before {other}, in steps", 3, (arm,), difference)


def growth(row, term):
    """log2 of the task's gradient in the bucket of the highest reward std over that in the lowest
    one above 0, less the same of another term; mean over the steps that measured it."""
    names = sorted({key.split("/")[1] for key in row if key.startswith("gradient/")})
    stds, task, other = (np.array([row[f"gradient/{name}/{what}"] for name in names])
                         for what in ("reward_std", "task", term))
    found = []
    for step in np.flatnonzero((stds > 1e-6).sum(axis=0) > 1):
        low = int(np.argmax(stds[:, step] > 1e-6))  # buckets are in ascending order
        found.append(np.log2(task[-1, step] / task[low, step] * other[low, step]
                             / other[-1, step]))
    return float(np.mean(found)) if found else np.nan


def early(curve):
    """The mean of the first three measurements."""
    return curve[~np.isnan(curve)][:3].mean()


def mi_falls(row):
    """nan where half of the replies have no reasoning any more: then it is another collapse."""
    if last(row["valid_thinking"]) < 0.5:
        return np.nan
    return early(row["first_turn/mi"]) - last(row["first_turn/mi"])


def entropy_stays(row):
    """How far H(Z|X) ends above 0.1 nats per token less than at first."""
    entropy = row[H]
    return last(entropy) - early(entropy) + 0.1


def shortening(row):
    """log2 of the sampled tokens per turn in the first steps over those in the last ones."""
    length = row["response_tokens"] / row["turns"]
    return np.log2(early(length) / last(length))


def correlation(metric, *rows):
    """Spearman's rank correlation of a metric with success, over all steps of several runs that
    measured it."""
    known = [~np.isnan(row[metric]) & ~np.isnan(row["success"]) for row in rows]
    return float(scipy.stats.spearmanr(*(
        np.concatenate([row[name][k] for row, k in zip(rows, known)])
        for name in (metric, "success"))).statistic)


def over_tasks(rule, other):
    """The prediction that a filter beats another in the mean over FIVE environments."""
    def difference(*rows):
        ends = [last(row["success"]) for row in rows]
        return float(np.mean(ends[:len(FIVE)]) - np.mean(ends[len(FIVE):]))

    return Prediction(f"`{rule}` over `{other}`: more success at the end, mean of 5 environments",
                      0.02, tuple(f"{task}-{name}" for name in (rule, other) for task in FIVE),
                      difference)


def learns_faster(arm, other):
    """The prediction that an arm has more success than another in the mean over all steps."""
    return Prediction(f"`{arm}` over `{other}`: more success in the mean over all steps", 0.02,
                      (arm, other), lambda a, b: float(a["success"][1:].mean()
                                                       - b["success"][1:].mean()))


def distils(task):
    """The predictions that a fresh policy with a teacher is soon ahead of RL, and nearly as good as
    its teacher."""
    arms = f"{task}-distilled", f"{task}-by-episode"
    return (Prediction("`{}` over `{}`: more success in steps 21 to 30".format(*arms), 0.05, arms,
                       lambda d, rl: last(d["success"]) - windows(rl["success"])[20]),
            Prediction("`{}` ends at most 0.05 below its teacher `{}`".format(*arms), 0.0, arms,
                       lambda d, rl: last(d["success"]) - last(rl["success"]) + 0.05))


def costs(task, stale, less):
    """The prediction that older samples end with less success."""
    return Prediction(f"`{task}-{stale}` below `{task}-{less}`: less success at the end", 0.03,
                      (f"{task}-{stale}", f"{task}-{less}"),
                      lambda a, b: last(b["success"]) - last(a["success"]))


# ---- Findings ------------------------------------------------------------------------------------
HEALTH = ("success", "valid", "reward_std", "grad_norm")
LONG = ("bandit-free-think", "bandit-reversed-free-think", "frozenlake-ppo", "frozenlake-grpo")
VANILLAS = ("ppo", "grpo", "frozenlake-ppo", "frozenlake-grpo")
_findings = (
    Finding("echo-trap", "The Echo Trap", "V1, section 4.1, figure 5",
            "Vanilla PPO and GRPO first learn, then collapse: success, valid replies and reward "
            "std fall together, and the gradient norm spikes.",
            VANILLAS,
            tuple(p for arm in VANILLAS for p in (
                Prediction(f"`{arm}`: success falls from its best {WINDOW} steps to the last", 0.1,
                           (arm,), lambda row: fall(row["success"])),
                falls_with_success(arm, "valid", 0.1), falls_with_success(arm, "reward_std", 0.1),
                Prediction(f"`{arm}`: the gradient norm spikes over the median before, log2", 3.0,
                           (arm,), lambda row: worst_spike(row["grad_norm"])))),
            partial(figures.curves, HEALTH)),
    Finding("indicators", "Which indicator moves first", "V1, section 4.1",
            "In a collapse reward std falls and entropy rises before success falls; the gradient "
            "norm spikes after it.",
            ("ppo", "grpo"),
            tuple(turns(arm, *names) for arm in ("ppo", "grpo")
                  for names in (("reward_std", "success"), ("entropy", "success"),
                                ("success", "grad_norm"))),
            partial(figures.onsets, onsets)),
    Finding("filtering", "Filtering by reward std", "V1, section 4.2, figure 7",
            "Training on the groups of the highest reward std alone (75, 50, 25 %) delays or "
            "prevents the collapse of PPO.",
            ("ppo", "ppo-keep-75", "ppo-keep-50", "ppo-keep-25", "ppo-fewer-updates"),
            (*(beats(f"ppo-keep-{share}", "ppo") for share in (75, 50, 25)),
             beats("ppo-keep-25", "ppo-fewer-updates")),
            partial(figures.curves, HEALTH)),
    Finding("starpo-s", "StarPO-S and its parts", "V1, section 4.2, figures 8 and 9",
            "StarPO-S (filter, critic, clip-higher, no KL) does not collapse where vanilla GRPO "
            "does, and each part alone helps.",
            ("grpo", "grpo-keep-25", "ppo", "grpo-clip-higher", "grpo-no-kl", "starpo-s"),
            (Prediction("`starpo-s` falls less than `grpo` from its best success", 0.05,
                        ("starpo-s", "grpo"), lambda s, g: fall(g["success"]) - fall(s["success"])),
             *(beats(arm, "grpo") for arm in ("starpo-s", "grpo-keep-25", "ppo",
                                              "grpo-clip-higher", "grpo-no-kl"))),
            partial(figures.curves, HEALTH)),
    Finding("thinking", "Thinking or not", "V1, section 4.4",
            "With a thought before its answer an agent learns Bandit better, also with reversed "
            "arms.",
            tuple(name for name in ARMS if name.startswith("bandit-") and "think" in name),
            (beats("bandit-free-think", "bandit-no-think"),
             beats("bandit-reversed-free-think", "bandit-reversed-no-think")),
            partial(figures.curves, ("success", "valid", "response_tokens"))),
    Finding("template-collapse", "Template collapse", "V2, docs on collapse detection",
            "The mutual information between prompt and reasoning falls while the entropy of the "
            "reasoning does not: it varies at random and no longer depends on the prompt.",
            ("ppo", "grpo"),
            tuple(p for arm in ("ppo", "grpo") for p in (
                Prediction(f"`{arm}`: mutual information of first turns falls, in nats", 0.5,
                           (arm,), mi_falls),
                Prediction(f"`{arm}`: H(Z|X) falls by less than 0.1 nats per token", 0.0, (arm,),
                           entropy_stays))),
            partial(figures.curves, (MI, "first_turn/retrieval", H, "success"))),
    Finding("filters", "Top-p against top-k, min-p and none", "V2, figure of the filters",
            "Top-p on reward std beats top-k, which is unstable late, and no filter.",
            tuple(f"{task}-{rule}" for task in FIVE for rule in FILTERS),
            tuple(over_tasks("top-p", other) for other in ("top-k", "min-p", "none")),
            figures.final_success),
    Finding("gradients", "The gradient's signal grows with reward std", "V2, gradient analysis",
            "The task's gradient grows with the reward std of a group, that of the regularisers "
            "does not.",
            ("gradients", "gradients-no-std"),
            tuple(Prediction(f"`{arm}`: the task's gradient grows more than {term}'s from the "
                             f"lowest bucket to the highest, log2", 1.0, (arm,),
                             partial(growth, term=term))
                  for arm in ("gradients", "gradients-no-std") for term in ("entropy", "kl")),
            figures.buckets),
    Finding("shorter-reasoning", "Reasoning gets shorter and less grounded",
            "V1, section 4.4, figure 11",
            "Under a reward for outcomes alone, replies get shorter and the reasoning says less "
            "about the state.",
            LONG,
            (*(Prediction(f"`{arm}`: tokens per turn fall, log2", 0.15, (arm,), shortening)
               for arm in LONG),
             *(Prediction(f"`{arm}`: the reasoning tells less often which prompt it is of", 0.1,
                          (arm,), lambda row: early(row["first_turn/retrieval"])
                          - last(row["first_turn/retrieval"])) for arm in VANILLAS[2:])),
            partial(figures.curves, ("response_tokens", "turns", "success"))),
    Finding("seeing", "Saying what is seen", "VAGEN, tables on formats and on bi-level GAE",
            "An agent that sees learns more with a thought than without, more with descriptions of "
            "what it sees and expects, more if these are paid, and more with bi-level GAE.",
            tuple(name for name in ARMS if name.startswith("seeing-")),
            (beats("seeing-free-think", "seeing-no-think"),
             beats("seeing-told", "seeing-free-think"), beats("seeing-paid", "seeing-told"),
             beats("seeing-paid-less", "seeing-told"), beats("seeing-bi-level", "seeing-gae")),
            partial(figures.curves, ("success", "grounding", "worldmodeling", "response_tokens")),
            seeds=SEEDS[:3]),
    Finding("correlation", "Mutual information and entropy against success",
            "V2, docs on collapse detection",
            "Mutual information is correlated with success, and more so than entropy is.", HARD,
            (Prediction("Spearman's correlation of mutual information with success", 0.2, HARD,
                        partial(correlation, MI)),
             Prediction("the same, less that of H(Z|X) without its sign", 0.1, HARD,
                        lambda *rows: correlation(MI, *rows) - abs(correlation(H, *rows)))),
            partial(figures.scatter, (MI, H))),
    Finding("step-credit", "Credit per step without a critic",
            "GiGPO (Feng et al. 2025), tables 1 and 2",
            "Comparing the turns of a group that began in the same state, besides whole episodes, "
            "is learnt from faster and ends with more success.",
            tuple(f"{task}-{rule}" for task in ("frozenlake", "sokoban")
                  for rule in ("by-episode", "gigpo")),
            tuple(rule(f"{task}-gigpo", f"{task}-by-episode") for task in ("frozenlake", "sokoban")
                  for rule in (beats, learns_faster)),
            partial(figures.curves, ("success", "reward_std", "entropy"))),
    Finding("echo", "Predicting what the environment answers",
            "ECHO (Shrivastava et al. 2026), figure 1",
            "The cross-entropy of observations as a second loss speeds learning and raises "
            "success, at no cost in samples.",
            ("frozenlake-by-episode", "frozenlake-echo"),
            (beats("frozenlake-echo", "frozenlake-by-episode"),
             learns_faster("frozenlake-echo", "frozenlake-by-episode")),
            partial(figures.curves, ("success", "echo_loss", "entropy"))),
    Finding("distillation", "A teacher in place of a reward",
            "GKD (Agarwal et al. 2024); on-policy distillation",
            "A fresh policy that moves towards a trained one on its own samples needs fewer steps "
            "than RL did, and gets nearly as good.",
            tuple(f"{task}-{rule}" for task in ("frozenlake", "sokoban")
                  for rule in ("by-episode", "distilled")),
            (*distils("frozenlake"), *distils("sokoban")),
            partial(figures.curves, ("success", "kl_ref", "entropy"))),
    Finding("stale", "Samples of older weights", "asynchronous trainers; ScaleRL, figure 4",
            "Samples that are a few steps old cost success, more the older they are, and truncated "
            "importance sampling gets it back.",
            tuple(f"{task}-{name}" for task in STALE for name in LATE),
            tuple(p for task in STALE for p in (
                costs(task, "stale-4", "fresh"), costs(task, "stale-16", "stale-4"),
                *(beats(f"{task}-stale-{k}-tis", f"{task}-stale-{k}") for k in (4, 16)))),
            figures.final_success, seeds=SEEDS[:3]),
)
FINDINGS = {finding.name: finding for finding in _findings}
