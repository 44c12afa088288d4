"""A training process is killed at random instants, or its disk is full: no whole checkpoint is ever
lost, and the resumed run is the run that was never stopped. Several processes: test_launch.py.

    python -m pytest tests/long/test_kill.py     (4 kills; with MINRAGEN_KILLS=100, 100)
"""

import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import metrics, state_text

from minragen.look import report
from minragen.run.runs import find_checkpoint, step_of, write_whole
from minragen.run.start import main

KILLS = int(os.environ.get("MINRAGEN_KILLS", "4"))
# A critic and a reference: everything that a checkpoint holds.
OPTIONS = shlex.split(
    "--env toys:Lottery --model tiny --warmup-steps 0 --num-groups 2 --group-size 2 --val-size 2 "
    "--max-new-tokens 8 --lr 1e-3 --diagnose-every 2 --save-every 1 "
    "--val-every 2 --steps 6 --algo ppo --filter none --kl-coef 0.1 --kl-reward-coef 0.1")


@pytest.fixture
def place(tmp_path, tmp_path_factory, monkeypatch):
    """The current folder of the killed processes, with a cache of models that outlives them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    return tmp_path


def train(*argv):
    """Train without figures, which take longer than steps; their replacement is written, too."""
    report.write = lambda folders: write_whole(folders[0] / "report.html", "a page") or "a page"
    main([*argv])


def started(*argv):
    """A process that runs this command. It is forked, since importing torch takes seconds."""
    def body():
        with open("output", "a") as sys.stdout:  # of the current folder
            sys.stderr = sys.stdout
            try:
                train(*argv)
            except SystemExit as end:  # its sentence, while the file is open
                print(end)
                sys.exit(1)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    return process


def finished(*argv):
    process = started(*argv)
    process.join()
    assert process.exitcode == 0, Path("output").read_text()


def kill(process, folder, rng, seconds):
    """Kill a process in its first `seconds` or during a checkpoint. False if it ended by itself."""
    until = time.monotonic() + rng.uniform(0, seconds)
    if rng.random() < 0.6:
        while process.is_alive() and not (folder / "checkpoint.new").exists():
            time.sleep(1e-4)
        until = time.monotonic() + rng.uniform(0, 0.03)
    while process.is_alive() and time.monotonic() < until:
        time.sleep(1e-4)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def state_of(folder):
    """Everything that a run leaves but its times."""
    return (metrics(folder), (folder / "trajectories.jsonl").read_text(), state_text(folder),
            (folder / "checkpoint" / "model.safetensors").read_bytes())


def survived(folder, known):
    """The step of the newest checkpoint, which is whole and no older than `known`; -1 if none was
    written yet, and then the run has to begin again."""
    if known < 0 and not list(folder.glob("checkpoint*/manifest.json")):
        shutil.rmtree(folder, ignore_errors=True)
        return -1
    step = step_of(find_checkpoint(folder))
    assert step >= known
    return step


def test_a_run_killed_at_any_instant_goes_on_as_if_it_had_not_been(place):
    began = time.monotonic()
    finished("--run", "straight", *OPTIONS)
    seconds, straight = time.monotonic() - began, state_of(place / "runs" / "straight")
    rng, kills, folder, known = random.Random(0), 0, place / "runs" / "killed", -1
    while kills < KILLS or known >= 0:
        process = started("--run", "killed", *(["--resume"] if known >= 0 else OPTIONS))
        if kills < KILLS and kill(process, folder, rng, seconds):
            kills, known = kills + 1, survived(folder, known)
            continue
        process.join()
        assert process.exitcode == 0, Path("output").read_text()
        assert state_of(folder) == straight
        shutil.rmtree(folder)
        known = -1


def test_a_full_disk_takes_no_checkpoint_and_ends_the_run_with_a_sentence(place):
    """A small disk of a mount namespace. Calls that fail once: test_runs.py::TestPowerCut."""
    own = ["unshare", "-rm"]
    if not shutil.which("unshare") or subprocess.run([*own, "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run([*own, sys.executable, __file__, str(KILLS)], check=False,
                          capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    trials = [*map(json.loads, done.stdout.splitlines())]
    for trial in trials:
        assert "Traceback" not in trial["said"] and trial["step"] >= 6, trial
        assert trial["step"] == 8 if trial["exit"] == 0 else "runs/a/" in trial["said"].partition(
            "\nerror: ")[2], trial
    assert len(trials) == KILLS and (trials[0]["exit"], trials[-1]["exit"]) == (1, 0)


def mount(size):
    """A disk of so many bytes as runs/, holding the run of 6 steps."""
    subprocess.run(["umount", "-q", "runs"], check=False)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", "runs"], check=True)
    if Path("saved").exists():
        shutil.copytree("saved", "runs/a")


def trial(name):
    """Train on to step 8. Print whether the newest checkpoint is whole, and what was said."""
    Path("output").write_text("\n")
    process = started("--run", "a", "--resume", "--steps", "8")
    process.join()
    print(json.dumps({"trial": name, "exit": process.exitcode,
                      "step": step_of(find_checkpoint(Path("runs/a"))),
                      "said": Path("output").read_text()}), flush=True)


if __name__ == "__main__":  # in a mount namespace of its own; prints a line for each trial
    os.makedirs("runs")
    mount(2**28)
    finished("--run", "a", *OPTIONS)
    shutil.copytree("runs/a", "saved")
    used, trials = shutil.disk_usage("runs").used, int(sys.argv[1])
    for k in range(trials):  # from no room to more than the run needs
        room = used * k // trials  # a new checkpoint beside the others takes a third of it
        mount(used + room)
        trial(f"{room} bytes are free")
