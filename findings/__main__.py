"""Train what the findings need, judge them and write docs/findings.md and docs/findings/.

    python -m findings                       (or: make findings)
    python -m findings echo-trap filtering   (or: make findings F="echo-trap filtering")
    python -m findings --quick               the first four, two seeds of 30 steps; not written

An arm is a configuration; findings share arms. Its runs are ordinary runs, runs/findings-ARM-sSEED:
one that was interrupted goes on. A GPU is used if there is one; twenty runs of `tiny` can share it.
In the end the curves of an arm are in runs/findings-ARM.json, and the pages are made from these
files alone. What is stored there, or has ended, is not repeated unless --again is given; a change
of the code does not count, one of the arm's options does.

Reading order: `main`, `train_all`, `row_of`; what is tested is in table.py, how it is judged in
statistics.py, the pages in page.py.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from findings import page, policies
from findings.arms import ARMS
from findings.table import FINDINGS, METRICS, seeds_of
from minragen import config as settings
from minragen.options import nearest
from minragen.run import runs

QUICK = (4, 2, 30)  # the first findings, the first seeds, steps


def main(argv=None):
    parser = argparse.ArgumentParser(prog="findings", description=__doc__.split("\n")[0])
    parser.add_argument("finding", nargs="*", help=f"{', '.join(FINDINGS)} [all]")
    parser.add_argument("--quick", action="store_true",
                        help="the first four findings, two short runs of each arm")
    parser.add_argument("--seeds", nargs="+", type=int,
                        help="instead of the finding's; judged but not written")
    parser.add_argument("--again", action="store_true", help="forget the stored runs of these")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plan", action="store_true", help="say how long it takes, and stop")
    args = parser.parse_args(argv)
    for name in args.finding:
        if name not in FINDINGS:
            parser.error(nearest("finding", name, list(FINDINGS)))
    chosen, steps, most = args.finding or list(FINDINGS), None, None
    if args.quick:
        chosen, most, steps = chosen[:QUICK[0]], *QUICK[1:]
    seeds = seeds_of(chosen)
    if args.quick or args.seeds:  # without the controls
        seeds = {arm: (args.seeds or seeds[arm])[:most]
                 for name in chosen for arm in FINDINGS[name].arms}
    asked = [(arm, seed, steps) for arm in seeds for seed in seeds[arm]]
    rows = {} if args.again else {task: row for task in asked if (row := stored_row(*task))}
    if args.again and not args.plan:
        for task in asked:
            shutil.rmtree(runs.RUNS / options_of(*task)["run"], ignore_errors=True)
    tasks = missing([task for task in asked if task not in rows])
    print(forecast(tasks, len(asked), args.workers), flush=True)
    if args.plan:
        return
    train_all(tasks, args.workers)
    by_arm = {arm: [rows.get((arm, seed, steps)) or row_of(arm, seed, steps)
                    for seed in seeds[arm]] for arm in seeds}
    if not args.seeds and not steps:
        for arm in seeds:
            store(arm, by_arm[arm])
        page.write()
    for name in chosen:
        print(page.judged(FINDINGS[name], by_arm))


# ---- Runs ----------------------------------------------------------------------------------------
def options_of(arm, seed, steps=None):
    """The options {name: value} of an arm's run, as the command line gives them. `steps`: of a
    shorter run than the arm's, which has another name."""
    shorter = {"steps": steps, "run": f"findings-{arm}-s{seed}-steps{steps}"} if steps else {}
    own = {name: value.format(seed=seed) if isinstance(value, str) else value
           for name, value in ARMS[arm].items()}
    return {"model": "tiny", "threads": 1, **own, "seed": seed, "run": f"findings-{arm}-s{seed}",
            **shorter}


def command_of(options):
    """The words behind `python -m minragen.train` of a run."""
    return [word for name, value in options.items()
            for each in (value if isinstance(value, tuple) else (value,))
            for word in (f"--{name.replace('_', '-')}", str(each))]


def ended(arm, seed, steps=None):
    """Whether the run has ended; one of the same name with other settings has not."""
    config = settings.from_options(options_of(arm, seed, steps))
    with contextlib.suppress(ValueError, OSError, IndexError):
        return (runs.read_config(runs.RUNS / config.run) == config
                and "elapsed" in lines_of(config.run)[-1])
    return False


def lines_of(run):
    lines = (runs.RUNS / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def forecast(tasks, total, workers):
    """How long the missing runs take, from the minutes of those that are stored."""
    known = {arm: np.mean([row["minutes"] for row in file["seeds"]])
             for arm, *_ in tasks if (file := page.stored(arm))}
    shares = {arm: (steps or ARMS[arm]["steps"]) / ARMS[arm]["steps"] for arm, _, steps in tasks}
    minutes = sum(known.get(arm, 0) * shares[arm] for arm, *_ in tasks) / workers
    unknown = sum(arm not in known for arm, *_ in tasks)
    return (f"{len(tasks)} of {total} runs to train, {workers} at a time: about {minutes:.0f} "
            f"minutes" + (f", and {unknown} runs that were never measured" if unknown else ""))


def missing(tasks):
    """Those of the tasks that have not ended, behind the runs that they begin with or learn from:
    of these only numbers are stored."""
    left = [task for task in tasks if not ended(*task)]
    sources = dict.fromkeys(source for task in left if (source := source_of(*task)))
    return [*dict.fromkeys([*(s for s in sources if not ended(*s)), *left])]


def source_of(arm, seed, steps=None):
    """The task whose run an arm's run begins with or learns from; None if there is none."""
    given = ARMS[arm].get("init_from") or ARMS[arm].get("teacher") or ""
    name, end = given.removeprefix("findings-"), "-s{seed}"
    return (name.removesuffix(end), seed, None) if name.endswith(end) else None


def train_all(tasks, workers):
    """Train (arm, seed, steps) tasks, `workers` processes at a time, seed by seed, so that all arms
    share a busy hour. Ctrl-C ends them after their step, with a checkpoint."""
    policies.make({ARMS[arm].get("init_from") for arm, *_ in tasks} & {*policies.MAKERS}, workers)
    sources = {source_of(*task) for task in tasks}
    for first in (True, False):
        train_each(sorted([task for task in tasks if (task in sources) == first],
                          key=lambda task: task[1]), workers)


def train_each(tasks, workers):
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(train_one, *task) for task in tasks]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                print(f"{number:4d}/{len(tasks)}  {future.result()}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_one(arm, seed, steps=None):
    """Train a run to its end in a process, from its last checkpoint if it has one. Returns a line
    about it. Raises RuntimeError with the end of what it said if it fails; to diverge is a result.
    """
    options = options_of(arm, seed, steps)
    words, folder = command_of(options), runs.RUNS / options["run"]
    resumable = False
    with contextlib.suppress(ValueError, OSError):
        resumable = (runs.read_config(folder) == settings.from_options(options)
                     and runs.find_checkpoint(folder))
    if resumable:
        words = ["--run", options["run"], "--resume"]
    elif folder.exists():
        with runs.locked(folder):  # nobody else trains it
            shutil.rmtree(folder)
    done = subprocess.run([sys.executable, "-m", "minragen.train", *words], capture_output=True,
                          text=True, check=False)
    if done.returncode and "the policy has diverged" not in done.stderr:
        raise RuntimeError(f"{options['run']}: {(done.stdout + done.stderr)[-500:]}")
    last = next(line for line in reversed(lines_of(options["run"])) if "success" in line)
    return f"{options['run']:40} success {last['success']:.2f}, step {last['step']}"


# ---- Results -------------------------------------------------------------------------------------
def stored_row(arm, seed, steps=None):
    """The row of a run in runs/findings-ARM.json, if its options are those of today; or None."""
    file = None if steps else page.stored(arm)
    if not file or file["options"] != json.loads(json.dumps(ARMS[arm])):
        return None
    return next((row for row in file["seeds"] if row["seed"] == seed), None)


def row_of(arm, seed, steps=None):
    """{"seed", "minutes", "steps", "test/success", metric: list over steps 0 to the Config's last}.

    None where a step did not measure a metric, and for the test of a run that diverged. A run that
    ended early keeps its last values.
    """
    config = settings.from_options(options_of(arm, seed, steps))
    lines = lines_of(config.run)
    final = lines.pop() if "elapsed" in lines[-1] else {}
    by_step = {line["step"]: line for line in lines}
    row = {"seed": seed, "steps": lines[-1]["step"], "test/success": final.get("test/success"),
           "minutes": round(max(final.get("elapsed", 0),  # of a resumed run: since then
                                sum(line.get("seconds", 0) for line in lines)) / 60, 2)}
    for metric in dict.fromkeys(key for line in lines for key in line if METRICS.fullmatch(key)):
        values = [by_step.get(step, {}).get(metric) for step in range(config.steps + 1)]
        last = next((v for v in reversed(values) if v is not None), None)
        values[row["steps"] + 1:] = [last] * (config.steps - row["steps"])
        row[metric] = [v if v is None else float(f"{v:.4g}") for v in values]
    return row


def store(arm, rows):
    """Write runs/findings-ARM.json, one line a seed."""
    text = json.dumps({"arm": arm, "options": ARMS[arm], "seeds": rows})
    page.file_of(arm).write_text(text.replace(' {"seed"', '\n{"seed"') + "\n")


if __name__ == "__main__":
    main()
