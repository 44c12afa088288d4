"""docs/findings.md and its figures, made from runs/findings-*.json alone.

Blocks between `<!-- begin NAME -->` and `<!-- end NAME -->` are written here; the text around them
is written by hand. tests/long/test_findings.py checks that the page says what this module would
write.
"""

import json
import math
import re
from pathlib import Path

import numpy as np

from benchmarks.figure import table, written_into
from findings.statistics import bootstrap, overall, verdict
from findings.table import FINDINGS
from minragen.config import preset

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "runs"
PAGE = ROOT / "docs" / "findings.md"
FIGURES = ROOT / "docs" / "findings"


def file_of(arm):
    return STORED / f"findings-{arm}.json"


def stored(arm):
    """{"options": ..., "seeds": [row, ...]} of an arm; None if it was not run."""
    return json.loads(file_of(arm).read_text()) if file_of(arm).exists() else None


def curves_of(row):
    """The row with its lists as arrays, nan for None."""
    return {key: np.array(value, dtype=float) if isinstance(value, list) else value
            for key, value in row.items()}


def rows_of_all(finding):
    """{arm: [row, ...]} from the stored files; None if an arm has none."""
    files = {arm: stored(arm) for arm in finding.arms}
    return None if None in files.values() else {arm: f["seeds"] for arm, f in files.items()}


# ---- Judging -------------------------------------------------------------------------------------
def judge(finding, rows):
    """[(prediction, its differences by seed, (mean, low, high), verdict), ...] and the overall
    verdict.

    rows: {arm: [row, ...]}, the same seeds in the same order for each arm
    """
    rows = {arm: [curves_of(row) for row in rows[arm]] for arm in finding.arms}
    seeds = range(len(rows[finding.arms[0]]))
    results = []
    for prediction in finding.predictions:
        found = [prediction.difference(*(rows[arm][i] for arm in prediction.arms)) for i in seeds]
        known = [d for d in found if not math.isnan(d)]
        interval = (np.mean(known), *bootstrap(known)) if known else (math.nan,) * 3
        enough = len(known) >= 0.8 * len(found)  # one of five seeds may say nothing
        results.append((prediction, found, interval,
                        verdict(known if enough else [], prediction.margin)))
    return results, overall([v for *_, v in results])


def judged(finding, rows):
    """The verdicts as text for the console."""
    results, whole = judge(finding, rows)
    return "\n".join([f"\n{finding.name}: {whole}", *(
        f"  {v:15} {mean:7.3f} [{low:.3f}, {high:.3f}], margin {p.margin}: {p.text}"
        for p, _, (mean, low, high), v in results)])


# ---- The page ------------------------------------------------------------------------------------
def blocks():
    """{name of a block: its text}."""
    texts, summary = {}, []
    for finding in FINDINGS.values():
        rows = rows_of_all(finding)
        if rows is None:
            summary.append([finding.title, finding.source, "not run yet", "", ""])
            texts[finding.name] = f"Not run yet: `make findings F={finding.name}`."
            continue
        results, whole = judge(finding, rows)
        minutes = sum(row["minutes"] for arm in rows.values() for row in arm)
        held = sum(v == "reproduced" for *_, v in results)
        summary.append([f"[{finding.title}](#{slug(finding.title)})", finding.source,
                        f"**{whole}**", f"{held} of {len(results)}", f"{minutes:.0f}"])
        texts[finding.name] = block(finding, results, whole, minutes)
    head = ("finding", "source", "verdict", "predictions that hold", "minutes of one core")
    return {"summary": table(head, summary)} | texts


def slug(title):
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def block(finding, results, whole, minutes):
    """Claim, arms, predictions with their differences, figure, command."""
    changed = {arm: differences(stored(arm)["options"]) for arm in finding.arms}
    common = set.intersection(*map(set, changed.values()))
    arms = [["all", ", ".join(x for x in changed[finding.arms[0]] if x in common)], *(
        [f"`{arm}`", ", ".join(x for x in own if x not in common)]
        for arm, own in changed.items())]
    rows = [[p.text, f"{p.margin:g}", ", ".join(f"{d:.2f}" for d in found),
             f"{mean:.2f} [{low:.2f}, {high:.2f}]", v]
            for p, found, (mean, low, high), v in results]
    head = ("prediction", "margin", f"seeds {finding.seeds[0]} to {finding.seeds[-1]}",
            "mean, 95 % interval", "verdict")
    return "\n\n".join([
        f"**{finding.source}:** {finding.claim}",
        table(("arm", "differs from the preset in"), arms), table(head, rows),
        f"**Verdict: {whole}.** `make findings F={finding.name}` trains "
        f"{len(finding.arms) * len(finding.seeds)} runs in {minutes:.0f} minutes of one core.",
        f"![{finding.title}](findings/{finding.name}.png)"])


def differences(options):
    """What an arm changes in its preset, as options of the command line."""
    base = preset(*(options.get(name, usual) for name, usual in (
        ("env", "frozenlake"), ("algo", "grpo"), ("model", "tiny"),
        ("response_format", "free_think"))))
    return [f"`{k.replace('_', '-')} {' '.join(v) if isinstance(v, list) else v}`"
            for k, v in options.items()
            if k in ("env", "algo", "model", "response_format") or getattr(base, k) != v]


def write():
    """Write the blocks and the figures."""
    FIGURES.mkdir(exist_ok=True)
    for finding in FINDINGS.values():
        if rows := rows_of_all(finding):
            drawn = {arm: [curves_of(row) for row in rows[arm]] for arm in finding.arms}
            finding.draw(drawn).savefig(FIGURES / f"{finding.name}.png", dpi=100)
    PAGE.write_text(written_into(PAGE.read_text(), blocks()))
