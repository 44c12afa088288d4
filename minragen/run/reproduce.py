"""Train a run again from its config.json, and say where the two differ first, if they do.

    python -m minragen reproduce my-run     (or: make reproduce RUN=my-run)

The new run is runs/my-run-again. On the same machine, with the same packages and number of
processes, all lines of metrics.jsonl are equal but for times (docs/running.md).
"""

import dataclasses
import sys

from minragen.config import check
from minragen.look.faults import Parser
from minragen.run import log, runs, start


def main(argv):
    """The command. Exits with 1 if the runs differ."""
    parser = Parser(prog="minragen reproduce", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="a folder under runs/")
    name = parser.parse_args(argv).run
    again = f"{name}-again"
    config = check(dataclasses.replace(runs.resumed_config({"run": name}), run=again, log=""))
    if start.run(config) is None:
        sys.exit(130)  # stopped; nothing to compare
    lines, new = ([*map(log.without_times, runs.read_lines(runs.RUNS / run / "metrics.jsonl")[0])]
                  for run in (name, again))
    difference = first_difference(lines, new)
    print(difference + (". This was one process; with several, rounding differs." if difference else
                        f"{name} is reproduced: its {len(lines)} lines are equal but for times"))
    sys.exit(1 if difference else 0)


def first_difference(lines, again):
    """Where a run's lines are not repeated, in words; "" if all are. Metrics that the run's version
    did not measure are passed over."""
    known = {key for line in lines for key in line}
    for number, line in enumerate(lines, 1):
        if len(again) < number:
            return f"line {number} is missing in the new run"
        new = again[number - 1]
        for key in known & (line.keys() | new.keys()):
            # A run resumed with more --steps also validated at its earlier last step.
            if line.get(key) != new.get(key) and (key in new or not key.startswith("val/")):
                return (f"line {number} (step {line['step']}) differs in {key}: "
                        f"{line.get(key)}, now {new.get(key)}")
    return ""
