"""The picture of all findings, docs/findings.png, and their count, from lab/results/findings.csv.

    python -m lab.scoreboard

A row of the CSV is an effect: a mean over seeds with its 95 % interval, the margin that says how
large it would have to be to matter, and a verdict on it. Effects have different units, so each is
drawn in margins: from the tick on an effect matters. Claims are counted by `verdict`; what only we
compared is drawn hollow and counts for none. Where a claim is that a loss is at most 0.05 (or 0.1)
the pages of commit 3f4b272 added that to the effect; the CSV does not (five rows).
"""

import csv
from collections import Counter
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROOT = Path(__file__).resolve().parent.parent
EFFECTS = ROOT / "lab" / "results" / "findings.csv"
PICTURE = ROOT / "docs" / "findings.png"
OURS = "our own comparison"  # in the column `claim`: no paper claims this effect
# Okabe and Ito's, which the colour-blind tell apart.
COLOURS = {"confirmed": "#009E73", "partly": "#E69F00", "no effect seen here": "#0072B2",
           "opposite": "#D55E00", "no power": "#888888"}
UNIT = 0.05  # of an effect whose margin is 0: success that matters elsewhere
EDGE = -30, 50  # margins; what is larger is cut off


def main():
    effects = read()
    print("claims: ", dict(count(effects)))
    print("effects:", dict(Counter(e["verdict"] for e in effects if e["claim"] != OURS)))
    draw(effects).savefig(PICTURE, dpi=110)


def read():
    """[{column: text, but a float for mean, low, high and margin}, ...], a row an effect."""
    with EFFECTS.open(encoding="utf-8", newline="") as file:
        return [row | {name: float(row[name]) for name in ("mean", "low", "high", "margin")}
                for row in csv.DictReader(file)]


def verdict(words):
    """The verdict on a claim from those on its effects.

    >>> verdict(["confirmed", "confirmed"]), verdict(["confirmed", "no power"])
    ('confirmed', 'partly')
    >>> verdict(["opposite", "opposite", "confirmed"])  # more than half
    'opposite'
    """
    if {*words} == {"confirmed"}:
        return "confirmed"
    if words.count("opposite") > len(words) / 2:
        return "opposite"
    if "confirmed" in words or {*words} == {"partly"}:
        return "partly"
    return "no power" if {*words} == {"no power"} else "no effect seen here"


def count(effects):
    """How many findings have which verdict. A finding that no paper claims has none."""
    claimed = [e for e in effects if e["claim"] != OURS]
    return Counter(verdict([e["verdict"] for e in group])
                   for _, group in groupby(claimed, itemgetter("finding")))


# ---- The picture ---------------------------------------------------------------------------------
def draw(effects):
    """A column of sections that are about as long as those of the other column together."""
    columns, height = ([], []), 0
    for _, section in groupby(effects, itemgetter("section")):
        rows = list(section)
        columns[height >= len(effects) / 2].extend(rows)
        height += len(rows)
    figure = Figure(figsize=(12, 11), layout="constrained")
    for axis, rows in zip(figure.subplots(1, 2), columns):
        draw_column(axis, rows)
    marks = [Line2D([], [], marker="o", ls="", color=colour, label=word)
             for word, colour in COLOURS.items()]
    marks += [Line2D([], [], marker="o", ls="", mfc="white", color="black", label=OURS),
              Line2D([], [], marker="|", ls="", color="black", label="margin")]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=11,
                  frameon=False, columnspacing=1, handletextpad=0.2)
    return figure


def draw_column(axis, effects):
    """A line an effect, in blocks of findings, below the names of their sections."""
    y, names = 0, {}
    for section, rows in groupby(effects, itemgetter("section")):
        y += 2
        axis.text(EDGE[0], y - 0.5, f" {section}", fontweight="bold", fontsize=12)
        for finding, group in groupby(rows, itemgetter("finding")):
            names[y + 0.5] = finding
            axis.axhline(y - 0.1, color="lightgray", lw=0.5)
            for effect in group:
                draw_effect(axis, y := y + 1, effect)
            y += 0.7
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(EDGE)
    axis.set_xticks([-10, -1, 0, 1, 10], ["-10", "-1", "0", "1", "10"])
    axis.axvline(0, color="gray", lw=0.5)
    axis.set_ylim(y + 1, 0)
    axis.set_yticks([k + 0.5 for k in names], names.values(), fontsize=11)
    axis.set_xlabel("effect in margins, logarithmic beyond 1", fontsize=11)


def draw_effect(axis, y, effect):
    """Mean and interval, and the tick from which on the effect matters."""
    unit, colour = abs(effect["margin"]) or UNIT, COLOURS[effect["verdict"]]
    axis.plot([effect["low"] / unit, effect["high"] / unit], [y, y], color=colour, lw=1)
    axis.plot(effect["mean"] / unit, y, "o", color=colour, ms=4,
              mfc="white" if effect["claim"] == OURS else colour)
    axis.plot(effect["margin"] / unit, y, "|", color="black", ms=5)


if __name__ == "__main__":
    main()
