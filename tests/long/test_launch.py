"""Processes that are launched as users launch them: several, on several machines, killed."""

import os
import shlex
import signal
import socket
import sys
import time
from types import SimpleNamespace

import pytest
from several import TORCHRUN, Launched, free_port
from test_distributed import LOTTERY
from training import metrics

from minragen.run import command

# `--`: torchrun takes --run for an abbreviation of an option of its own.
RUN = ["-m", "--", "minragen.train", *LOTTERY, "--run"]
SEVERAL = [sys.executable, "-m", "minragen", "train", "--nproc"]
LONG = shlex.split("--steps 900 --val-every 900")


def steps_done(folder, name):
    path = folder / "runs" / name / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def wait_for_step(step, folder, name, *launched):
    while steps_done(folder, name) < step:
        assert all(one.process.poll() is None for one in launched), launched[0].errors.read_text()
        time.sleep(0.05)


def assert_gone(pids):
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launched")


class TestLaunch:
    def test_the_processes_of_one_machine_talk_where_no_other_can_listen(self, monkeypatch):
        """They exchange pickles."""
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(command.signal, "signal", lambda *given: None)
        monkeypatch.setattr(command.logging, "disable", lambda level: None)
        monkeypatch.setattr("torch.multiprocessing.start_processes", lambda *given, **named: (
            SimpleNamespace(processes=[], join=lambda grace_period: True)))
        command.launch(2, None)
        name = os.environ["GLOO_SOCKET_IFNAME"]
        assert name in ("lo", "lo0") and name in [name for _, name in socket.if_nameindex()]

    def test_a_killed_process_ends_all_with_a_sentence_and_the_run_resumes(self, folder):
        launched = Launched(folder, *SEVERAL, "2", *LOTTERY, "--run", "two", *LONG)
        wait_for_step(3, folder, "two", launched)
        pids = launched.workers()
        os.kill(pids[0], signal.SIGKILL)
        assert launched.process.wait(20) != 0
        assert_gone(pids)
        assert "error: process 0 was ended by signal 9" in launched.errors.read_text()
        for number, interrupt in (("1", signal.SIGTERM), ("2", signal.SIGINT)):
            reached = steps_done(folder, "two")
            launched = Launched(folder, *SEVERAL, number, "--run", "two", "--resume")
            wait_for_step(reached + 3, folder, "two", launched)
            pids = launched.workers()
            launched.process.send_signal(interrupt)
            assert launched.process.wait(20) != 0
            assert_gone(pids)
            assert "Traceback" not in launched.errors.read_text()

    def test_two_machines_repeat_one_with_two_processes_and_end_together(self, folder):
        place = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        machines = [Launched(folder, *TORCHRUN, *place, f"--node-rank={rank}", *RUN, "far", *LONG)
                    for rank in (0, 1)]
        wait_for_step(2, folder, "far", *machines)
        pids = [machine.workers()[-1] for machine in machines]
        os.kill(pids[1], signal.SIGKILL)
        assert all(machine.process.wait(20) != 0 for machine in machines)
        assert_gone(pids)
        far, two = (metrics(folder / "runs" / run)[:3] for run in ("far", "two"))
        assert far == two
