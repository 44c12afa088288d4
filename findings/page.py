"""Write docs/findings.md, a page and a figure for each finding, all from runs/findings-*.json.

    docs/findings.md         the tables of claims and of controls, between `<!-- begin claims -->`
                             and its end, and so on; the rest is written by hand
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
from findings.arms import ARMS
from findings.statistics import bootstrap, overall, verdict
from findings.table import CONTROLS, FINDINGS, seeds_of
from minragen.config import preset

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "runs"
PAGE = ROOT / "docs" / "findings.md"
FOLDER = ROOT / "docs" / "findings"  # one page and one figure for each finding
VERDICTS = ("reproduced", "not reproduced", "inconclusive", "not testable", "not run yet")
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
    verdict. What would not be reproduced is "not testable" if a control does not find its effect,
    but for the opposite of the claim by more than the margin, which no noise hides.

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
        word = verdict(known if enough else [], prediction.margin)
        if (word == "not reproduced" and interval[2] > -prediction.margin
                and is_hidden(finding, prediction)):
            word = "not testable"
        results.append((prediction, found, interval, word))
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
    results = {name: rows and judge(finding, rows) for name, finding in FINDINGS.items()
               for rows in [rows_of_all(finding)]}
    texts = {PAGE: written_into(PAGE.read_text(), {"claims": claims_table(results),
                                                   "controls": controls_table()})}
    for finding in FINDINGS.values():
        path, found = FOLDER / f"{finding.name}.md", results[finding.name]
        texts[path] = PARTS.format(
            title=finding.title, command=command_of(finding),
            result=result_of(finding, *(found or unknown(finding))),
            meaning=(meaning_of(path.read_text() if path.exists() else "")
                     or ("" if found else "Not run yet.")))
    return texts


def claims_table(results):
    """A row a claim, the surest first: the verdicts of each model and the first prediction.

    results: {finding: what `judge` returns, None if it was not run}
    """
    models = list(dict.fromkeys(finding.model for finding in FINDINGS.values()))
    lines = []
    for finding in FINDINGS.values():
        if finding.row:
            continue
        same = {finding.model: finding} | {other.model: other for other in FINDINGS.values()
                                           if other.row == finding.name}
        verdicts = [verdict_cell(same[model], results[same[model].name]) if model in same else ""
                    for model in models]
        controls = [counts(control) for control in CONTROLS if finding.name in control.covers]
        lines.append((sureness(results[finding.name]), [
            f"[{finding.title}](findings/{finding.name}.md). {finding.claim}", finding.source,
            *verdicts, headline(results[finding.name]), "; ".join(controls)]))
    head = ("claim", "source", *models, "first prediction", "control")
    return table(head, [line for _, line in sorted(lines, key=lambda pair: pair[0])])


def verdict_cell(finding, found):
    """The verdict with its share of predictions; that of another model links to its page."""
    if not found:
        return "not run yet"
    held = sum(v == "reproduced" for *_, v in found[0])
    text = f"**{found[1]}**, {held} of {len(found[0])}"
    return f"[{text}](findings/{finding.name}.md)" if finding.row else text


def sureness(found):
    """A key that sorts the surest first: by verdict, then by the share of predictions that are
    decided."""
    decided = found and np.mean([v not in ("inconclusive", "not testable") for *_, v in found[0]])
    return VERDICTS.index(found[1] if found else "not run yet"), -(decided or 0)


def headline(found):
    """The difference of the first prediction, its interval and margin."""
    if not found:
        return ""
    p, _, (mean, low, high), _ = found[0][0]
    return f"{p.text}: {mean:.2f} [{low:.2f}, {high:.2f}], margin {p.margin:g}".replace("|", r"\|")


# ---- Controls ------------------------------------------------------------------------------------
def found_by(control):
    """[(difference, whether it is the planted effect), ...] by seed; None if it was not run."""
    files = [stored(arm) for arm in control.prediction.arms]
    if None in files:
        return None
    rows = [[curves_of(row) for row in file["seeds"]] for file in files]
    return [(value, bool(value >= control.least)) for each in zip(*rows)
            for value in [control.prediction.difference(*each)]]


def is_hidden(finding, prediction):
    """Whether a control of this prediction finds its planted effect in fewer than four fifths of
    the seeds."""
    return any(sum(found for _, found in seeds) < 0.8 * len(seeds)
               for control in CONTROLS if finding.name in control.covers
               and control.covers[finding.name] in prediction.text
               for seeds in [found_by(control)] if seeds)


def counts(control):
    """In how many seeds a control found its effect."""
    seeds = found_by(control)
    return f"{sum(found for _, found in seeds)} of {len(seeds)}" if seeds else "not run yet"


def controls_table():
    """A row a control."""
    lines = []
    for control in CONTROLS:
        titles = (f"[{FINDINGS[name].title}](findings/{name}.md)" for name in control.covers)
        differences = ", ".join(f"{value:.2f}" for value, _ in found_by(control) or ())
        lines.append([control.planted, control.prediction.text, f"{control.least:g}", differences,
                      counts(control), ", ".join(titles)])
    head = ("planted", "measured", "found from", "difference by seed", "found in", "for")
    return table(head, lines)


def meaning_of(page):
    """The part of a finding's page that is written by hand."""
    return page.partition("## What it means\n")[2].rpartition("`make findings")[0].strip()


def claim(finding):
    return f"**Claim** ({finding.source}): {finding.claim}"


def unknown(finding):
    """What `judge` would return of a finding that was not run."""
    return [(p, [], (math.nan,) * 3, "") for p in finding.predictions], "not run yet"


def result_of(finding, results, whole):
    """Claim, arms, predictions with the difference of each seed, verdict, figure."""
    head = ("prediction", "margin", f"seeds {finding.seeds[0]} to {finding.seeds[-1]}",
            "mean, 95 % interval", "verdict")
    rows = [[text, f"{p.margin:g}", ", ".join(f"{d:.2f}" for d in found),
             f"{mean:.2f} [{low:.2f}, {high:.2f}]" if found else "", v]
            for text, (p, found, (mean, low, high), v) in grouped(results)]
    figure = f"![{finding.name}]({finding.name}.png)" if results[0][1] else ""
    return "\n\n".join(filter(None, [
        claim(finding), arms_list(finding), table(head, rows),
        f"[Verdict](../findings.md#how-verdicts-are-made): **{whole}**.", figure]))


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
    changed = differences(finding.arms)
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
    count = sum(map(len, seeds_of([finding.name]).values()))
    return f"`make findings F={finding.name} ARGS=--again` ({count} runs, controls included)"


def differences(arms):
    """{arm: what it changes in its preset, as `name=value`}: environment options in full, and what
    other arms of the finding have otherwise, even if it is the preset's."""
    presets = {arm: preset(*(ARMS[arm].get(name, usual) for name, usual in (
        ("env", "frozenlake"), ("algo", "grpo"), ("model", "tiny"),
        ("response_format", "free_think")))) for arm in arms}

    def value(arm, name):
        return ARMS[arm].get(name, getattr(presets[arm], name))

    def shown(arm, name):
        return (name in ("env", "algo", "model", "response_format")
                or getattr(presets[arm], name) != ARMS[arm][name]
                or any(ARMS[other].get("env") == ARMS[arm].get("env") and value(other, name)
                       != value(arm, name) for other in arms))

    return {arm: [f"`{text}`" for name, given in ARMS[arm].items() if shown(arm, name)
                  for text in (given if name == "env_arg" else [f"{name}={given}"])]
            for arm in arms}


def write():
    """Write the pages and the figures."""
    FOLDER.mkdir(exist_ok=True)
    for finding in FINDINGS.values():
        if rows := rows_of_all(finding):
            drawn = {arm: [curves_of(row) for row in rows[arm]] for arm in finding.arms}
            finding.draw(drawn).savefig(FOLDER / f"{finding.name}.png", dpi=100)
    for path, text in pages().items():
        path.write_text(text)
