"""Write docs/findings.md, a page and a figure for each finding, all from runs/findings-*.json.

    docs/findings.md         the table of verdicts, between `<!-- begin summary -->` and its end;
                             the rest is written by hand
    docs/findings/NAME.md    claim, arms, predictions, verdict, figure and command; what stands
                             between the heading "What it means" and the command is written by hand
    docs/findings/NAME.png   the figure

tests/long/test_findings.py checks that the pages say what this module would write.
"""

import json
import math
from pathlib import Path

import numpy as np

from benchmarks.figure import table, written_into
from findings.statistics import bootstrap, overall, verdict
from findings.table import FINDINGS
from minragen.config import preset

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "runs"
PAGE = ROOT / "docs" / "findings.md"
FOLDER = ROOT / "docs" / "findings"  # one page and one figure for each finding
PARTS = """\
# {title}

{result}

## What it means

{meaning}

{command}
"""


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


# ---- The pages -----------------------------------------------------------------------------------
def pages():
    """{path: the text that the page should have}, of the overview and of each finding."""
    texts, summary = {}, []
    for finding in FINDINGS.values():
        path, rows = FOLDER / f"{finding.name}.md", rows_of_all(finding)
        link = f"[{finding.title}](findings/{finding.name}.md)"
        if rows is None:
            summary.append([link, finding.source, "not run yet", "", ""])
            result = claim(finding) + "\n\nNot run yet."
        else:
            results, whole = judge(finding, rows)
            minutes = sum(row["minutes"] for arm in rows.values() for row in arm)
            held = sum(v == "reproduced" for *_, v in results)
            summary.append([link, finding.source, f"**{whole}**", f"{held} of {len(results)}",
                            f"{minutes:.0f}"])
            result = result_of(finding, results, whole)
        texts[path] = PARTS.format(title=finding.title, result=result, command=command_of(finding),
                                   meaning=meaning_of(path.read_text() if path.exists() else ""))
    head = ("finding", "source", "verdict", "predictions that hold", "core minutes")
    return {PAGE: written_into(PAGE.read_text(), {"summary": table(head, summary)})} | texts


def meaning_of(page):
    """The part of a finding's page that is written by hand."""
    return page.partition("## What it means\n")[2].rpartition("`make findings")[0].strip()


def claim(finding):
    return f"**Claim** ({finding.source}): {finding.claim}"


def result_of(finding, results, whole):
    """Claim, arms, predictions with the difference of each seed, verdict, figure."""
    head = ("prediction", "margin", f"seeds {finding.seeds[0]} to {finding.seeds[-1]}",
            "mean, 95 % interval", "verdict")
    rows = [[text, f"{p.margin:g}", ", ".join(f"{d:.2f}" for d in found),
             f"{mean:.2f} [{low:.2f}, {high:.2f}]", v]
            for text, (p, found, (mean, low, high), v) in grouped(results)]
    return "\n\n".join([
        claim(finding), arms_list(finding), table(head, rows),
        f"[Verdict](../findings.md#how-verdicts-are-made): **{whole}**.",
        f"![{finding.name}]({finding.name}.png)"])


def arms_list(finding):
    """What each arm changes in its preset. Arms that earlier findings describe are only linked,
    if the finding has no others."""
    first = {arm: other for other in reversed(FINDINGS.values()) for arm in other.arms}
    described = dict.fromkeys(first[arm].name for arm in finding.arms)
    if finding.name not in described:
        return "\n".join(["Arms, listed elsewhere:\n", *(
            f"- [{FINDINGS[name].title}]({name}.md): " + ", ".join(
                f"`{arm}`" for arm in finding.arms if first[arm].name == name)
            for name in described)])
    changed = {arm: differences(stored(arm)["options"]) for arm in finding.arms}
    common = shared(changed.values())
    own = {arm: [x for x in changed[arm] if x not in common] for arm in finding.arms}
    return "\n".join(["Arms (changes to the preset):\n", f"- all: {', '.join(common)}", *(
        f"- `{arm}`: {', '.join(options) or 'nothing more'}"
        for arm, options in (crossed(own) or own).items())])


def shared(lists):
    """What all lists have, in the order of the first."""
    first, *others = lists
    return [x for x in first if all(x in other for other in others)]


def crossed(own):
    """{"TASK-...": its options, "...-RULE": its options} if the arms are all pairs of more than one
    task with more than one rule, and each has the options of its task and of its rule; else None.
    """
    tasks, rules = ({arm.split("-", 1)[part]: None for arm in own if "-" in arm}
                    for part in (0, 1))
    if len(tasks) < 2 or len(rules) < 2 or {*own} != {f"{a}-{b}" for a in tasks for b in rules}:
        return None
    found = ({f"{a}-...": shared([own[f"{a}-{b}"] for b in rules]) for a in tasks}
             | {f"...-{b}": shared([own[f"{a}-{b}"] for a in tasks]) for b in rules})
    exact = all(own[f"{a}-{b}"] == found[f"{a}-..."] + found[f"...-{b}"]
                for a in tasks for b in rules)
    return found if exact else None


def grouped(results):
    """[(text of the prediction, its result), ...]: predictions that differ only in the arm before
    the colon follow each other, and the later ones have the arm alone as text."""
    same = {}
    for result in results:
        arm, colon, text = result[0].text.rpartition("`: ")
        same.setdefault(text, []).append((arm + colon.strip(" :"), result))
    return [((f"{arm}: {text}" if arm and not i else arm or text).replace("|", r"\|"), result)
            for text, results in same.items() for i, (arm, result) in enumerate(results)]


def command_of(finding):
    """How to repeat the finding."""
    return f"`make findings F={finding.name}` ({len(finding.arms) * len(finding.seeds)} runs)"


def differences(options):
    """What an arm changes in its preset, as `name=value`; an environment's own options in full."""
    base = preset(*(options.get(name, usual) for name, usual in (
        ("env", "frozenlake"), ("algo", "grpo"), ("model", "tiny"),
        ("response_format", "free_think"))))
    changed = {k: v for k, v in options.items()
               if k in ("env", "algo", "model", "response_format") or getattr(base, k) != v}
    return [f"`{text}`" for k, v in changed.items()
            for text in (v if k == "env_arg" else [f"{k}={v}"])]


def write():
    """Write the pages and the figures."""
    FOLDER.mkdir(exist_ok=True)
    for finding in FINDINGS.values():
        if rows := rows_of_all(finding):
            drawn = {arm: [curves_of(row) for row in rows[arm]] for arm in finding.arms}
            finding.draw(drawn).savefig(FOLDER / f"{finding.name}.png", dpi=100)
    for path, text in pages().items():
        path.write_text(text)
