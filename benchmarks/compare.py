"""Every preset of config.ALGOS on two environments, three seeds, short runs, side by side.

    python -m benchmarks.compare              (or: make compare)
    python -m benchmarks.compare --workers 2 --algos gspo --write

Trains in a scratch folder, with one thread a run. `--write` stores the rows in
runs/readme-compare.json (those of the chosen algorithms are replaced) and the table in
docs/algorithms.md; tests/test_readme.py checks that the page says what this script would write.
"""

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
from pathlib import Path
from unittest import mock

from benchmarks.figure import of_seeds, with_interval, written_into
from minragen import config as settings
from minragen.run import runs, start

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "runs" / "readme-compare.json"
PAGE = ROOT / "docs" / "algorithms.md"
SEEDS = (0, 1, 2)
STEPS = {"bandit": 15, "frozenlake": 12}
VAL_SIZE = 256


def measure(task):
    """One short run. Returns its row: success before and after, seconds of the run's steps."""
    env, algo, seed, steps, size = task
    said = []
    with (tempfile.TemporaryDirectory() as scratch,
          mock.patch.object(runs, "RUNS", Path(scratch))):
        config = dataclasses.replace(
            settings.preset(env, algo), run="x", seed=seed, model="tiny", device="cpu", threads=1,
            steps=steps, val_every=steps, save_every=steps, val_size=size)
        settings.check(config)
        start.run(config, say=said.append)
        lines = [json.loads(line) for line in
                 (Path(scratch) / "x" / "metrics.jsonl").read_text().splitlines()]
    val = [line["val/success"] for line in lines if "val/success" in line]
    return dict(env=env, algo=algo, seed=seed, steps=steps, size=size, before=val[0], after=val[-1],
                seconds=round(sum(line.get("seconds", 0.0) for line in lines), 1),
                warnings=[line for line in said if line.startswith(("warning", "stopped"))])


def table(rows):
    """The rows as markdown: one line a preset."""
    of = {env: [row for row in rows if row["env"] == env] for env in STEPS}
    firsts = [mine[0] for mine in of.values()]
    head = " | ".join(f"{row['env']}, {row['steps']} steps: success | seconds" for row in firsts)
    before = "".join(f" {with_interval(row['before'], row['size'])} | |" for row in firsts)
    lines = [f"| `--algo` | {head} |", "|---" * (1 + 2 * len(of)) + "|", f"| before RL |{before}"]
    for algo in settings.ALGOS:
        cells = []
        for rows_of_env in of.values():
            mine = [row for row in rows_of_env if row["algo"] == algo]
            if mine:
                seconds = [row["seconds"] for row in mine]
                cells += [of_seeds([row["after"] for row in mine], mine[0]["size"]),
                          f"{min(seconds):.0f} to {max(seconds):.0f}"]
        if cells:
            lines.append(f"| `{algo}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--algos", nargs="+", choices=list(settings.ALGOS), metavar="ALGO",
                        default=list(settings.ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help=f"of each run [{STEPS}]")
    parser.add_argument("--val-size", type=int, default=VAL_SIZE)
    parser.add_argument("--write", action="store_true", help="store rows and table")
    args = parser.parse_args()
    tasks = [(env, algo, seed, args.steps or steps, args.val_size)
             for algo in args.algos for env, steps in STEPS.items() for seed in args.seeds]
    if args.workers == 1:
        fresh = [measure(task) for task in tasks]
    else:
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            fresh = pool.map(measure, tasks, chunksize=1)
    kept = json.loads(STORED.read_text()) if STORED.exists() else []
    rows = [row for row in kept if row["algo"] not in args.algos] + fresh
    if args.write and len({(row["env"], row["steps"], row["size"]) for row in rows}) > len(STEPS):
        raise SystemExit("error: the stored rows of other algorithms have other steps or another "
                         "val-size. Make all of them again, or leave --write out.")
    if args.write:
        STORED.parent.mkdir(exist_ok=True)
        STORED.write_text("[" + ",\n ".join(json.dumps(row) for row in rows) + "]\n")
        PAGE.write_text(written_into(PAGE.read_text(), {"compare": table(rows)}))
    print(table(rows))


if __name__ == "__main__":
    main()
