"""What a prediction computes from the rows of runs; most claims are made of these.

A row is what page.curves_of returns: {metric: array over steps 0 to N}, and single numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy

from findings.arms import FIVE
from findings.statistics import WINDOW, fall, last, onset, windows, worst_spike


class Prediction(NamedTuple):
    """What a claim says about numbers: the difference is positive, and larger than the margin."""

    text: str
    margin: float
    arms: tuple
    difference: Callable  # (row of each arm, of one seed) -> float; nan if it cannot be said


def beats(arm, other, margin=0.05):
    """The prediction that an arm ends with more success than another."""
    return Prediction(f"`{arm}` over `{other}`: more success at the end", margin, (arm, other),
                      lambda a, b: last(a["success"]) - last(b["success"]))


def tested_better(arm, other, margin=0.05):
    """The prediction that an arm has more success in the test after training: for arms that differ
    in their number of steps or of training prompts."""
    return Prediction(f"`{arm}` over `{other}`: more success in the test", margin, (arm, other),
                      lambda a, b: tested(a) - tested(b))


def tested(row):
    """Success in the test, nan for a run that diverged."""
    return np.nan if row["test/success"] is None else row["test/success"]


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


def collapses(arm):
    """The predictions of the Echo Trap."""
    return (Prediction(f"`{arm}`: success falls from its best {WINDOW} steps to the last", 0.1,
                       (arm,), lambda row: fall(row["success"])),
            falls_with_success(arm, "valid", 0.1), falls_with_success(arm, "reward_std", 0.1),
            Prediction(f"`{arm}`: the gradient norm spikes over the median before, log2", 3.0,
                       (arm,), lambda row: worst_spike(row["grad_norm"])))


def deeper(metric, arm, other):
    """The prediction that a metric falls further from its best window in one arm than in the other.
    """
    return Prediction(f"`{arm}` over `{other}`: {metric} falls further", 0.1, (arm, other),
                      lambda a, b: fall(a[metric]) - fall(b[metric]))


def stays_collapsed(before, frozen, arm):
    """The prediction that a run which begins with a collapsed policy gets back less than half of
    the success that was lost; nan if that was less than 0.1. frozen: an arm that does not learn, on
    the same prompts"""
    def difference(collapsed, still, later):
        lost = fall(collapsed["success"])
        gained = last(later["success"]) - last(still["success"])
        return lost / 2 - gained if lost >= 0.1 else np.nan

    return Prediction(f"`{arm}` gets back less than half of the success that `{before}` lost",
                      0.0, (before, frozen, arm), difference)


def saves_time(arm, other, share):
    """The prediction that the median step of an arm takes less time, by `share`."""
    return Prediction(f"`{arm}` against `{other}`: share of a step's time that is saved", share,
                      (arm, other),
                      lambda a, b: 1 - np.nanmedian(a["seconds"]) / np.nanmedian(b["seconds"]))


def relative_lead(rows):
    """How far the first of two rows ends above the second, over the mean of both."""
    a, b = (last(row["success"]) for row in rows)
    return 2 * (a - b) / (a + b)


def leads_by_more(pair, other):
    """The prediction that the first of two arms leads by more than the first of two others does."""
    return Prediction("`{}` leads `{}` by more than `{}` leads `{}`, over their means".format(
        *pair, *other), 0.1, (*pair, *other),
        lambda *rows: relative_lead(rows[:2]) - relative_lead(rows[2:]))


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
    one above 0, less the same of another term; mean over the steps that measured it. At step 1 the
    policy is its own reference and the KL's gradient is rounding, so for "kl" it begins later."""
    names = sorted({key.split("/")[1] for key in row if key.startswith("gradient/")})
    stds, task, other = (np.array([row[f"gradient/{name}/{what}"] for name in names])
                         for what in ("reward_std", "task", term))
    found, measured = [], np.flatnonzero((stds > 1e-6).sum(axis=0) > 1)
    for step in measured[measured > 1] if term == "kl" else measured:
        low = int(np.argmax(stds[:, step] > 1e-6))  # buckets are in ascending order
        found.append(np.log2(task[-1, step] / task[low, step] * other[low, step]
                             / other[-1, step]))
    return float(np.mean(found)) if found else np.nan


def grows(arm, term):
    """The prediction that the task's gradient grows with reward std, and that of a term less so."""
    return Prediction(f"`{arm}`: the task's gradient grows more than {term}'s from the lowest "
                      f"bucket to the highest, log2", 1.0, (arm,), partial(growth, term=term))


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


def at_most_below(arm, other, what=""):
    """The prediction that an arm ends with at most 0.05 less success than another."""
    return Prediction(f"`{arm}` ends at most 0.05 below {what}`{other}`", 0.0, (arm, other),
                      lambda a, b: last(a["success"]) - last(b["success"]) + 0.05)


def distils(task):
    """The predictions that a fresh policy with a teacher is soon ahead of RL, and nearly as good as
    its teacher."""
    arms = f"{task}-distilled", f"{task}-by-episode"
    return (Prediction("`{}` over `{}`: more success in steps 21 to 30".format(*arms), 0.05, arms,
                       lambda d, rl: last(d["success"]) - windows(rl["success"])[20]),
            at_most_below(*arms, "its teacher "))


def costs(task, stale, less):
    """The prediction that older samples end with less success."""
    return Prediction(f"`{task}-{stale}` below `{task}-{less}`: less success at the end", 0.03,
                      (f"{task}-{stale}", f"{task}-{less}"),
                      lambda a, b: last(b["success"]) - last(a["success"]))


# ---- Controls ------------------------------------------------------------------------------------
def unlucky_tasks():
    """What bad luck costs in the mean over FIVE environments."""
    arms = tuple(f"{task}-top-p{end}" for end in ("", "-unlucky") for task in FIVE)
    return over_tasks("top-p", "top-p-unlucky")._replace(arms=arms)


def trapped(arm, sign, said):
    """The signs of the Echo Trap whose text has `sign`: the least of them, in margins."""
    signs = [p for p in collapses(arm) if sign in p.text]
    return Prediction(f"`{arm}`: {said}, in margins", 1.0, (arm,),
                      lambda row: min(sign.difference(row) / sign.margin for sign in signs))


def shortens(arm):
    """The prediction that replies get shorter."""
    return Prediction(f"`{arm}`: tokens per turn fall, log2", 0.15, (arm,), shortening)
