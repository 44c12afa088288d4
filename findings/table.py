"""What is tested: the findings, with their claims, arms, predictions and figures.

Predictions were written down before their reported seeds were run (docs/findings.md has the
exceptions), each with a margin: the smallest effect that would matter. Settings were chosen on
seeds from 100 on, which are not reported.

Sources: V1 is RAGEN (Wang et al. 2025, arXiv:2504.20073), V2 its second version's code and docs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from findings import arms, figures
from findings.predictions import (
    MI,
    H,
    Prediction,
    at_most_below,
    beats,
    collapses,
    correlation,
    costs,
    deeper,
    distils,
    early,
    entropy_stays,
    grows,
    leads_by_more,
    learns_faster,
    mi_falls,
    onsets,
    over_tasks,
    saves_time,
    shortens,
    stays_collapsed,
    tested_better,
    trapped,
    turns,
    unlucky_tasks,
)
from findings.statistics import fall, last

SEEDS = (0, 1, 2, 3, 4)
# What is kept of metrics.jsonl.
METRICS = re.compile(
    r"success|valid|reward_std|grad_norm|entropy|distinct_3|valid_thinking|response_tokens|turns"
    r"|grounding|worldmodeling|echo_loss|kl_ref|explained_variance|(rollout_)?seconds"
    r"|first_turn/(mi|retrieval|conditional_entropy_per_token)"
    r"|val/success|gradient/bucket_\d/(task|entropy|kl|reward_std)")


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
    model: str = "tiny"
    row: str = ""  # the finding whose claim this one tests with another model


class Control(NamedTuple):
    """A planted effect. What is not found in four of five seeds makes the predictions that it
    covers untestable.

    least: the difference from which a seed counts as one that finds it
    covers: {finding: what the text of the predictions has that it covers; "" covers all}
    """

    planted: str
    prediction: Prediction
    least: float
    covers: dict


# ---- Findings ------------------------------------------------------------------------------------
HEALTH = ("success", "valid", "reward_std", "grad_norm")
LONG = ("bandit-free-think", "bandit-reversed-free-think", "frozenlake-ppo", "frozenlake-grpo")
_findings = (
    Finding("echo-trap", "The Echo Trap", "V1, section 4.1, figure 5",
            "Vanilla PPO and GRPO first learn, then collapse: success, valid replies and reward "
            "std fall together, and the gradient norm spikes.",
            arms.VANILLAS,
            tuple(p for arm in arms.VANILLAS for p in collapses(arm)),
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
            arms.THOUGHTS,
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
            tuple(f"{task}-{rule}" for task in arms.FIVE for rule in arms.FILTERS),
            tuple(over_tasks("top-p", other) for other in ("top-k", "min-p", "none")),
            figures.final_success),
    Finding("gradients", "The gradient's signal grows with reward std", "V2, gradient analysis",
            "The task's gradient grows with the reward std of a group, that of the regularisers "
            "does not.",
            ("gradients", "gradients-no-std"),
            tuple(grows(arm, term) for arm in ("gradients", "gradients-no-std")
                  for term in ("entropy", "kl")),
            figures.buckets),
    Finding("shorter-reasoning", "Reasoning gets shorter and less grounded",
            "V1, section 4.4, figure 11",
            "Under a reward for outcomes alone, replies get shorter and the reasoning says less "
            "about the state.",
            LONG,
            (*(shortens(arm) for arm in LONG),
             *(Prediction(f"`{arm}`: the reasoning tells less often which prompt it is of", 0.1,
                          (arm,), lambda row: early(row["first_turn/retrieval"])
                          - last(row["first_turn/retrieval"])) for arm in arms.VANILLAS[2:])),
            partial(figures.curves, ("response_tokens", "turns", "success"))),
    Finding("seeing", "Saying what is seen", "VAGEN, tables on formats and on bi-level GAE",
            "An agent that sees learns more with a thought than without, more with descriptions of "
            "what it sees and expects, more if these are paid, and more with bi-level GAE.",
            arms.SEEN,
            (beats("seeing-free-think", "seeing-no-think"),
             beats("seeing-told", "seeing-free-think"), beats("seeing-paid", "seeing-told"),
             beats("seeing-paid-less", "seeing-told"), beats("seeing-bi-level", "seeing-gae")),
            partial(figures.curves, ("success", "grounding", "worldmodeling", "response_tokens")),
            seeds=SEEDS[:3]),
    Finding("correlation", "Mutual information and entropy against success",
            "V2, docs on collapse detection",
            "Mutual information is correlated with success, and more so than entropy is.",
            arms.HARD,
            (Prediction("Spearman's correlation of mutual information with success", 0.2, arms.HARD,
                        partial(correlation, MI)),
             Prediction("the same, less that of H(Z|X) without its sign", 0.1, arms.HARD,
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
            tuple(f"{task}-{name}" for task in arms.STALE for name in arms.LATE),
            tuple(p for task in arms.STALE for p in (
                costs(task, "stale-4", "fresh"), costs(task, "stale-16", "stale-4"),
                *(beats(f"{task}-stale-{k}-tis", f"{task}-stale-{k}") for k in (4, 16)))),
            figures.final_success, seeds=SEEDS[:3]),
    Finding("members", "Members per prompt", "V1, section 4.3, table on task diversity",
            "Of batches of equally many trajectories those with four members per prompt, and so "
            "with the most different prompts, generalise best.",
            tuple(f"{task}-members-{size}" for task in ("frozenlake", "metamathqa")
                  for size in arms.MEMBERS),
            tuple(tested_better(f"{task}-members-4", f"{task}-members-{size}", 0.04)
                  for task in ("frozenlake", "metamathqa") for size in arms.MEMBERS[1:]),
            figures.test_success),
    Finding("actions", "Actions per turn", "V1, section 4.3, table on the action budget",
            "Agents that may do five or six actions in a turn learn more than those that may do "
            "one or two, and than those that may do more.",
            tuple(f"sokoban-cap-{cap}" for cap in arms.CAPS),
            tuple(beats("sokoban-cap-5", f"sokoban-cap-{cap}") for cap in arms.CAPS if cap != 5),
            partial(figures.curves, ("success", "turns", "response_tokens"))),
    Finding("fresh", "Fresh rollouts against reused ones", "V1, section 4.3, figure 10",
            "A policy that samples new trajectories for every update ends with more success than "
            "one that trains on a batch five or ten times.",
            tuple(f"{task}-{rule}" for task in ("frozenlake", "sokoban")
                  for rule in ("by-episode", "reused-5", "reused-10", "reused-5-long")),
            tuple(tested_better(f"{task}-by-episode", f"{task}-{rule}")
                  for task in ("frozenlake", "sokoban")
                  for rule in ("reused-5", "reused-10", "reused-5-long")),
            figures.test_success),
    Finding("time", "The time that filters save", "V1, figure 7; summaries of V2",
            "With a quarter of the groups a step takes less than half of the time (V1); top-p "
            "saves a quarter to two fifths of it (V2).",
            tuple(f"{task}-timed-{rule}" for task in arms.TIMED for rule in arms.TIMED_FILTERS),
            tuple(saves_time(f"{task}-timed-{rule}", f"{task}-timed-none", share)
                  for task in arms.TIMED for rule, share in (("top-k", 0.5), ("top-p", 0.26))),
            figures.step_seconds),
    Finding("slippery", "A critic on slippery ice", "V1, section 4.1",
            "Where the ice is slippery, values are hard to estimate: GRPO, which has no critic, "
            "does better than PPO there.",
            (*(slip := ("slippery-by-episode", "slippery-critic")),
             *(firm := ("frozenlake-by-episode", "frozenlake-critic"))),
            (beats(*slip), leads_by_more(slip, firm)),
            partial(figures.curves, ("success", "reward_std", "entropy"))),
    Finding("repair", "Out of the trap again", "V1, section 4.1",
            "A collapse is irreversible: a run that goes on does not get back what it lost, also "
            "with a lower learning rate, a filter, or fewer updates.",
            ("collapsed", "repair-frozen", *(f"repair-{name}" for name in arms.REPAIRS)),
            tuple(stays_collapsed("collapsed", "repair-frozen", f"repair-{name}")
                  for name in arms.REPAIRS),
            partial(figures.curves, HEALTH), seeds=tuple(range(10))),
    Finding("std", "Dividing by the std", "derived from Dr. GRPO (Liu et al. 2025)",
            "GRPO's division by the std of a group is a bias: without it a policy learns more "
            "where the better choice pays seldom, and as much where it pays for sure.",
            ("bandit-none", "bandit-no-std", "sure-none", "sure-no-std"),
            (beats("bandit-no-std", "bandit-none"), at_most_below("sure-no-std", "sure-none")),
            partial(figures.curves, ("success", "reward_std", "entropy"))),
    Finding("size", "Larger models", "V2, main table",
            "A larger model ends with more success, and a filter helps at every size.",
            tuple(f"{size}-{rule}" for size in arms.SIZES for rule in ("none", "top-p")),
            (beats("5m-none", "0.2m-none"),
             *(beats(f"{size}-top-p", f"{size}-none") for size in arms.SIZES)),
            partial(figures.curves, ("success", "valid", "reward_std"))),
    Finding("echo-trap-broad", "The Echo Trap of a broad policy", "V1, section 4.1, figure 5",
            "The same of a policy that knows ten environments and five formats before RL.",
            tuple(f"broad-{arm}" for arm in arms.VANILLAS),
            tuple(p for arm in arms.VANILLAS for p in collapses(f"broad-{arm}")),
            partial(figures.curves, HEALTH), model="broad tiny", row="echo-trap"),
    Finding("echo-trap-smollm2", "The Echo Trap of a pretrained model", "V1, section 4.1, figure 5",
            "The same of SmolLM2-135M.",
            ("smollm2-bandit-ppo", "smollm2-bandit-grpo", "smollm2-lake-grpo"),
            tuple(p for arm in ("smollm2-bandit-ppo", "smollm2-bandit-grpo", "smollm2-lake-grpo")
                  for p in collapses(arm)),
            partial(figures.curves, HEALTH), model="SmolLM2", row="echo-trap"),
    Finding("filters-smollm2", "Filters and StarPO-S with a pretrained model",
            "V1, section 4.2, figures 7 to 9; V2",
            "SmolLM2-135M ends with more success with a filter than without, and with StarPO-S "
            "than with vanilla GRPO or PPO.",
            tuple(f"smollm2-{arm}" for arm in ("bandit-grpo", "bandit-ppo", "bandit-top-p",
                                               "bandit-starpo-s", "lake-grpo", "lake-top-p")),
            tuple(beats(f"smollm2-{arm}", f"smollm2-{other}", 0.1) for arm, other in (
                ("bandit-starpo-s", "bandit-grpo"), ("bandit-starpo-s", "bandit-ppo"),
                ("bandit-top-p", "bandit-grpo"), ("lake-top-p", "lake-grpo"))),
            partial(figures.curves, HEALTH), model="SmolLM2", row="starpo-s"),
    Finding("std-smollm2", "Dividing by the std, with a pretrained model",
            "derived from Dr. GRPO (Liu et al. 2025)",
            "GRPO's division by the std of a group is why SmolLM2 does not learn Bandit.",
            ("smollm2-bandit-grpo", "smollm2-bandit-no-std"),
            (beats("smollm2-bandit-no-std", "smollm2-bandit-grpo", 0.1),),
            partial(figures.curves, HEALTH), model="SmolLM2", row="std"),
    Finding("breadth", "Something to lose", "a question to V1, section 4.1",
            "A policy that knows more tasks and formats before RL has more to lose: its collapse "
            "is deeper, and includes the form of its replies.",
            tuple(arm for vanilla in arms.VANILLAS for breadth in arms.BREADTHS
                  if (arm := f"{breadth}-{vanilla}") in arms.ARMS),
            tuple(deeper(metric, f"broad-{arm}", f"narrow-{arm}") for metric in
                  ("success", "valid") for arm in arms.VANILLAS),
            partial(figures.breadth, ("val/success", "success", "valid", "reward_std"),
                    arms.BREADTHS)),
)
FINDINGS = {finding.name: finding for finding in _findings}


# ---- Controls ------------------------------------------------------------------------------------
LUCK = "of the successes are turned into failures"
PENALTY = "long replies are penalised (`overlong=0.9`)"


def unlucky(arm, covers, predicts=beats):
    """The control that bad luck costs an arm half of the margin or more."""
    prediction, share = predicts(arm, f"{arm}-unlucky"), 100 * arms.UNLUCKY[arm]
    return Control(f"{share:.3g} % {LUCK}", prediction, prediction.margin / 2, covers)


CONTROLS = (
    *(Control("samples sixteen steps old, ratios that are not clipped", trapped(arm, sign, said),
              1.0, dict.fromkeys(names, sign))
      for arm, names in (("bandit-trapped", ("echo-trap", "echo-trap-broad")),
                         ("smollm2-bandit-trapped", ("echo-trap-smollm2",)))
      for sign, said in (("falls from", "the least fall of success, valid and reward std"),
                         ("spikes over", "the gradient norm spikes"))),
    *(Control(PENALTY, shortens(arm), 0.15, {"shorter-reasoning": task}) for arm, task in (
        ("bandit-free-think-brief", "bandit"), ("frozenlake-grpo-brief", "frozenlake"))),
    Control("advantages are not divided by the std", grows("gradients-no-std", "kl"), 1.0,
            {"gradients": ""}),
    unlucky("ppo", {"filtering": ""}), unlucky("grpo", {"starpo-s": ""}),
    unlucky("bandit-free-think", {"thinking": "", "std": ""}),
    unlucky("seeing-free-think", {"seeing": ""}),
    Control(f"2 to 6 % {LUCK}", unlucky_tasks(), 0.01, {"filters": ""}),
    *(unlucky(f"{task}-by-episode", {"step-credit": task, "distillation": task} | more)
      for task, more in (("frozenlake", {"echo": ""}), ("sokoban", {}))),
    unlucky("frozenlake-by-episode", {"step-credit": "", "echo": ""}, learns_faster),
    *(unlucky(f"{task}-by-episode", {"fresh": task}, tested_better)
      for task in ("frozenlake", "sokoban")),
    *(unlucky(f"{task}-members-16", {"members": task}, partial(tested_better, margin=0.04))
      for task in ("frozenlake", "metamathqa")),
    unlucky("sokoban-cap-5", {"actions": ""}), unlucky("0.2m-none", {"size": ""}),
    unlucky("slippery-by-episode", {"slippery": ""}),
    unlucky("smollm2-bandit-grpo", {"filters-smollm2": "smollm2-bandit", "std-smollm2": ""},
            partial(beats, margin=0.1)),
)


def seeds_of(names):
    """{arm: seeds} of the findings with these names and of their controls."""
    controls = [control for control in CONTROLS if {*control.covers} & {*names}]
    return ({arm: FINDINGS[next(iter(control.covers))].seeds for control in controls
             for arm in control.prediction.arms}
            | {arm: FINDINGS[name].seeds for name in names for arm in FINDINGS[name].arms})
