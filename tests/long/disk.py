"""What a run does when its disk is full, read-only or gone. Prints a JSON line for each trial.

    unshare -rm .venv/bin/python tests/long/disk.py 5

in a mount namespace of its own. Trials: disks that are full after some bytes more each time, from
none to more than the run needs; a disk that becomes read-only and a folder that is moved while the
run trains.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[:3])  # long, tests, the project

from test_kill import OPTIONS, started  # noqa: E402

from minragen.run.runs import find_checkpoint, step_of  # noqa: E402

RUN, DISK, SAVED = Path("runs/a"), "runs", Path("saved")


def mount(size):
    """A disk of so many bytes as runs/, holding the run of 6 steps."""
    subprocess.run(["umount", "-q", DISK], check=False)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", DISK], check=True)
    if SAVED.exists():
        shutil.copytree(SAVED, RUN)


def trial(name, during=lambda: None):
    """Train on to step 8 while something happens. Is the newest checkpoint whole, and what was
    said?"""
    Path("output").write_text("")
    process = started("--run", "a", "--resume", "--steps", "8")
    during()
    process.join()
    said = Path("output").read_text()
    step = -1
    if RUN.exists():
        step = step_of(find_checkpoint(RUN))
    print(json.dumps({"trial": name, "exit": process.exitcode, "step": step,
                      "warnings": said.count("warning   cannot write"),
                      "traceback": "Traceback" in said, "said": said[-2000:]}), flush=True)


def at_next_line(action):
    """Do something as soon as another step is in metrics.jsonl."""
    lines = (RUN / "metrics.jsonl").stat().st_size
    while (RUN / "metrics.jsonl").stat().st_size == lines:
        time.sleep(0.001)
    action()


if __name__ == "__main__":
    os.makedirs(DISK)
    mount(2**28)
    process = started("--run", "a", *OPTIONS)
    process.join()
    shutil.copytree(RUN, SAVED)
    used, trials = shutil.disk_usage(DISK).used, int(sys.argv[1])
    for k in range(trials):
        room = used * k // trials  # a new checkpoint beside the others takes a third of it
        mount(used + room)
        trial(f"{room} bytes are free")
    mount(2**28)
    trial("read-only", lambda: at_next_line(lambda: subprocess.run(
        ["mount", "-o", "remount,ro", DISK], check=True)))
    mount(2**28)
    trial("gone", lambda: at_next_line(lambda: RUN.rename("runs/elsewhere")))
