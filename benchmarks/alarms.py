"""How often the warnings of a run are right, and how early, over the stored runs.

    python -m benchmarks.alarms      prints the table of docs/metrics.md, which `make figure` writes

All runs of at least MIN_STEPS steps are replayed: runs/readme-*/metrics.jsonl, and the curves in
runs/findings-*.json. A run of the findings collapses if it loses LOSS of its best success, in means
of ten steps. A warning is in time if it comes by the step at which a third of that is lost. The
thresholds in look/diagnostics.py were chosen on even seeds and are reported on odd ones. Later ones
nobody had seen: eight arms were trained with seed 5 (runs/findings-fresh.json has the curves that
this needs), and the arm `collapsed` has seeds 5 to 9. Two kinds of runs of the findings are left
out, in which chance is larger: SmolLM2's, with 32 or 64 episodes a step, and those of repair that
begin collapsed (seven of the ten that do not learn at all lose LOSS).
"""

import json
from pathlib import Path
from statistics import median

import numpy as np

from findings.statistics import WINDOW, windows
from minragen.look.diagnostics import VARIED, warnings_of

RUNS = Path(__file__).resolve().parent.parent / "runs"
LOSS, MIN_STEPS = 0.25, 20
DRAWS = 200  # flat curves for each collapse
SIGNS = ("reward_std", "entropy", VARIED, "turns")  # a warning begins with its metric


def stored_runs():
    """(name, seed, lines of its training steps) of every stored run."""
    for path in sorted(RUNS.glob("readme-*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        seed = json.loads((path.parent / "config.json").read_text())["seed"]
        yield path.parent.name, seed, [line for line in lines if "reward_std" in line]
    for path in sorted(RUNS.glob("findings-*.json")):
        arm = json.loads(path.read_text())
        if arm["arm"].startswith(("smollm2-", "repair-")):
            continue
        for row in arm["seeds"]:
            yield f"{row.get('arm', arm['arm'])}-s{row['seed']}", row["seed"], [
                {"step": step} | {key: values[step] for key, values in row.items()
                                  if isinstance(values, list) and values[step] is not None}
                for step in range(1, row["steps"] + 1)]


def deepest_fall(success):
    """The largest share of an earlier best that success loses, and the step at which a third of it
    is lost, in means of ten steps."""
    means = windows(np.array([np.nan, *success], dtype=float)).round(9)
    best = np.maximum.accumulate(means)
    loss = 1 - means / np.maximum(best, 1e-9)
    low = int(loss.argmax())
    top = int(means[:low + 1].argmax())
    third = means[top] - (means[top] - means[low]) / 3
    return float(loss[low]), top + int((means[top:] <= third).argmax()) + WINDOW


def fall_by_chance(success):
    """The fall that 95 % of flat curves do not exceed: normal noise around the mean of a run, as
    large as its own (the standard deviation of the differences of successive steps, over the root
    of 2)."""
    noise = np.diff(success).std() / 2 ** 0.5
    curves = np.random.default_rng(0).normal(np.mean(success), noise, (DRAWS, len(success)))
    return float(np.quantile([deepest_fall(curve)[0] for curve in curves], 0.95))


def first_warnings(lines):
    """{sign: step of its first warning} of a run; "any": of whichever came first."""
    found = {}
    for k, line in enumerate(lines, 1):
        for sentence in warnings_of(lines[:k]):
            for sign in (sentence.split()[0], "any"):
                found.setdefault(sign, line["step"])
    return found


def replayed():
    """A dict for each run: name, seed, loss, `third` (a step), warned, and its kind: "results",
    "collapse", or "other" of the findings."""
    runs = []
    for name, seed, lines in stored_runs():
        if len(lines) >= MIN_STEPS:
            success = [line["success"] for line in lines]
            loss, third = deepest_fall(success)
            kind = ("results" if name.startswith("readme-") else
                    "collapse" if loss >= LOSS else "other")
            runs.append({"name": name, "seed": seed, "loss": loss, "third": third,
                         "warned": first_warnings(lines), "kind": kind, "success": success})
    return runs


def table_row(half, sign, runs):
    of = {kind: [run["warned"].get(sign) for run in runs if run["kind"] == kind]
          for kind in ("collapse", "other", "results")}
    ahead = [run["third"] - run["warned"][sign] for run in runs
             if run["kind"] == "collapse" and sign in run["warned"]]
    in_time = sum(steps >= 0 for steps in ahead)
    cells = (half, sign, f"{in_time} of {len(of['collapse'])}", len(ahead) - in_time,
             of["collapse"].count(None), round(median(ahead)) if ahead else "",
             *(f"{len(of[kind]) - of[kind].count(None)} of {len(of[kind])}"
               for kind in ("other", "results")))
    return f"| {' | '.join(map(str, cells))} |"


def table():
    """The table as markdown, how many collapses are larger than chance, and the runs in which the
    warnings are wrong."""
    runs = replayed()
    head = ("seeds", "warning", "collapses warned in time", "later", "never", "steps ahead",
            "other runs of findings warned", "runs of other pages warned")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for half, seeds in (("even", (0, 2, 4)), ("odd", (1, 3)), ("5 to 9", range(5, 10))):
        lines += [table_row(half, sign, [run for run in runs if run["seed"] in seeds])
                  for sign in (*SIGNS, "any")]
    collapses = [run for run in runs if run["kind"] == "collapse"]
    beyond = sum(run["loss"] > fall_by_chance(run["success"]) for run in collapses)
    lines += ["", f"Of the {len(collapses)} collapses {beyond} lose more than 95 % of flat curves "
                  "with the noise of the same run."]
    for title, wrong in (
            ("No warning, and the share of success that was lost",
             [run for run in collapses if not run["warned"]]),
            ("A warning, but no collapse",
             [run for run in runs if run["kind"] != "collapse" and run["warned"]])):
        told = (f"`{run['name']}` ({run['loss']:.2f})" for run in wrong)
        lines += ["", f"{title}: {', '.join(told)}."]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
