"""The findings' figures. Each function takes {arm: [row, ...]}, rows with arrays, and returns a
matplotlib Figure; what a finding chooses beforehand comes first and is bound with `partial`.
"""

from functools import partial
from operator import itemgetter

import numpy as np
from matplotlib.figure import Figure

from findings.statistics import WINDOW, bootstrap, fall, last, windows

FEW = 4  # arms whose bands can be told apart


def curves(metrics, rows):
    """Metrics over steps, in means of WINDOW steps: each arm's mean over the seeds, in a band from
    lowest to highest where there are few arms. An arm without the metric is left out."""
    figure = Figure(figsize=(2.7 * len(metrics), 2.6), layout="constrained")
    for axis, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
        for number, (arm, members) in enumerate(rows.items()):
            if metric not in members[0]:
                continue
            values = np.array([windows(row[metric]) for row in members])
            steps, color = WINDOW + np.arange(values.shape[1]), f"C{number}"
            axis.plot(steps, values.mean(axis=0), lw=1, label=arm, color=color)
            if len(rows) <= FEW:
                axis.fill_between(steps, values.min(axis=0), values.max(axis=0), alpha=0.15, lw=0,
                                  color=color)
        if metric == "grad_norm":
            axis.set_yscale("log")
        labelled(axis, metric, "step")
    if len(rows) <= FEW:
        figure.axes[0].legend(fontsize=7)
    else:  # no room among the curves
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper",
                      fontsize=7)
    return figure


def ends(label, value, rows):
    """A number of each run, such as its success at the end: a dot a seed, and the mean of each arm
    with its interval.

    value: row -> the number, None if the run has none
    """
    figure = Figure(figsize=(7, 0.8 + 0.25 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for height, members in enumerate(rows.values()):
        values = [number for row in members if (number := value(row)) is not None]
        low, high = bootstrap(values) if values else (np.nan, np.nan)
        axis.plot(values, [height] * len(values), "o", color="tab:blue", alpha=0.4, ms=4)
        axis.plot([low, high], [height] * 2, color="black", lw=1)
        axis.plot(np.mean(values), height, "|", color="black", ms=10)
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    labelled(axis, "", label)
    return figure


final_success = partial(ends, "success in the last steps", lambda row: last(row["success"]))
test_success = partial(ends, "success in the test", itemgetter("test/success"))
step_seconds = partial(ends, "seconds of the median step",
                       lambda row: float(np.nanmedian(row["seconds"])))


def breadth(metrics, breadths, rows):
    """How far metrics fall from their best steps to the last ones, and those of validation from
    before RL to its end, against what the policy knew before RL: an axis a metric, a line an
    algorithm in an environment, a dot a run.

    breadths: {prefix of an arm's name: breadth}
    """
    def depth(row, metric):
        measured = [value for value in row[metric] if value is not None]
        return measured[0] - measured[-1] if metric.startswith("val/") else fall(row[metric])

    figure = Figure(figsize=(3.2 * len(metrics), 2.8), layout="constrained")
    arms = list(dict.fromkeys(arm.split("-", 1)[1] for arm in rows))
    for axis, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
        for number, arm in enumerate(arms):
            falls = {width: [depth(row, metric) for row in rows[f"{name}-{arm}"]]
                     for name, width in breadths.items() if f"{name}-{arm}" in rows}
            color = f"C{number}"
            axis.plot([*falls], [np.mean(values) for values in falls.values()], lw=1, label=arm,
                      color=color)
            for width, values in falls.items():
                axis.plot([width] * len(values), values, "o", ms=3, alpha=0.4, color=color)
        axis.set_xscale("log")
        labelled(axis, f"fall of {metric}", "environments x formats before RL")
    figure.axes[0].legend(fontsize=7)
    return figure


def buckets(rows):
    """Gradient norm per token of each term against the reward std of its bucket, an axis an arm."""
    figure = Figure(figsize=(3.5 * len(rows), 2.8), layout="constrained")
    axes = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for axis, (arm, members) in zip(axes, rows.items()):
        names = sorted({key.split("/")[1] for key in members[0] if key.startswith("gradient/")})
        for term in ("task", "entropy", "kl"):
            points = np.array([[np.nanmean([np.nanmean(row[f"gradient/{name}/{what}"])
                                            for row in members]) for what in ("reward_std", term)]
                               for name in names])
            axis.plot(*points.T, "o-", ms=3, lw=1, label=term)
        axis.set_yscale("log")
        labelled(axis, arm, "reward std of the bucket")
    figure.axes[0].legend(fontsize=7)
    figure.axes[0].set_ylabel("gradient norm per token", fontsize=8)
    return figure


def scatter(metrics, rows):
    """Success against a metric, an axis a metric: a dot a step that measured both."""
    figure = Figure(figsize=(3.5 * len(metrics), 2.8), layout="constrained")
    axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axis, metric in zip(axes, metrics):
        for arm, members in rows.items():
            points = np.array([(row[metric], row["success"]) for row in members])  # (S, 2, N + 1)
            axis.plot(*points.swapaxes(0, 1).reshape(2, -1), "o", ms=2, alpha=0.4, label=arm)
        labelled(axis, metric, "")
    axes[0].set_ylabel("success", fontsize=8)
    axes[-1].legend(fontsize=5)
    return figure


def onsets(onsets_of, rows):
    """When each indicator changed: a dot a run.

    onsets_of: row -> {indicator: step; the one after the last if it never turned, nan if the run
        takes no part}
    """
    found = [onsets_of(row) for members in rows.values() for row in members]
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axis = figure.subplots()
    for height, name in enumerate(found[0]):
        steps = [each[name] for each in found]
        axis.plot(steps, [height] * len(steps), "o", alpha=0.5, ms=5)
    axis.set_yticks(range(len(found[0])), found[0])
    axis.invert_yaxis()
    labelled(axis, "", "step of the change")
    return figure


def labelled(axis, title, steps):
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(steps, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
