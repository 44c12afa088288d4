"""The command `minragen train` before PyTorch is loaded: refusals, the first line, processes."""

import json
import os
import subprocess
import sys

import pytest

from minragen.run import command, start

# A fresh process, which runs each command in a fork, so that Python and minRAGEN start once.
SEEN = """
import atexit, json, os, sys, minragen.run.command
from minragen.__main__ import main
for argv in json.loads(sys.argv[1]):
    if os.fork() == 0:
        atexit.register(lambda: print("torch" in sys.modules))
        sys.exit(main(["train", *argv.split()]))
    os.wait()
    for stream in sys.stdout, sys.stderr:
        print("----", file=stream, flush=True)
"""
REFUSED = {
    "--env bandit --stpes 3": "unknown option '--stpes': did you mean '--steps'?",
    "--env bandt": "unknown env 'bandt': did you mean 'bandit'?",
    "--env bandit,frozenlak": "unknown env 'frozenlak': did you mean 'frozenlake'?",
    "--env bandit --algo grop": "unknown algo 'grop': did you mean 'grpo'?",
    "--env bandit --steps many": "invalid int value: 'many'",
    "--env bandit --nproc 0": "--nproc: got '0', expected a number of processes",
    "--resume": "--resume needs --run NAME."}


class TestRefusals:
    def test_a_mistyped_name_is_refused_before_pytorch_is_loaded(self):
        done = subprocess.run([sys.executable, "-c", SEEN, json.dumps([*REFUSED])], text=True,
                              capture_output=True, env=os.environ | {"CI": "1"}, check=True)
        printed, said = (text.split("----\n")[:-1] for text in (done.stdout, done.stderr))
        assert printed == ["False\n"] * len(REFUSED)
        for sentence, error in zip(REFUSED.values(), said, strict=True):
            assert sentence in error and "Traceback" not in error


class TestFirstLine:
    def test_it_says_what_is_trained_and_in_how_many_processes(self, monkeypatch, capsys):
        calls = []  # instead of a run: the arguments, and whether the first line was said
        monkeypatch.setattr(start, "main", lambda argv, begun: calls.append((argv, begun)))
        monkeypatch.setattr(command, "launch", lambda count, run: calls.append(count) or run())
        command.train(["--env", "bandit", "--nproc", "1", "--algo", "ppo", "--seed", "3"])
        command.train(["--env", "bandit", "--nproc", "3"])
        command.train(["--resume", "--run", "mine"])
        command.train(["--env", "bandit", "--print-config"])
        assert capsys.readouterr().out.splitlines() == [
            "minragen  bandit with ppo, seed 3", "minragen  bandit with grpo, seed 0; 3 processes",
            "minragen  continues mine"]
        assert calls == [(["--env", "bandit", "--algo", "ppo", "--seed", "3"], True),
                         3, (["--env", "bandit"], True), (["--resume", "--run", "mine"], True),
                         (["--env", "bandit", "--print-config"], True)]


class TestProcesses:
    @pytest.mark.parametrize("cores, more, expected", [
        (8, {}, 4), (2, {}, 2), (8, {"model": "smollm2"}, 1),
        (8, {"num_groups": 1, "group_size": 3}, 3), (8, {"resume": True}, 1),
        (8, {"plain": True}, 1), (None, {}, 1), (8, {"CI": "true"}, 1), (8, {"gpu": True}, 1),
        (8, {"gpu": True, "device": "cpu"}, 4), (8, {"device": "mps"}, 1)])
    def test_auto_is_one_for_each_core_where_that_helps(self, cores, more, expected, monkeypatch):
        monkeypatch.delenv("CI", raising=False)
        if "CI" in more:
            monkeypatch.setenv("CI", more["CI"])
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os.path, "exists", lambda path: more.get("gpu", False))
        config = command.settings.unchecked({"env": "bandit", "model": "tiny"} | {
            k: v for k, v in more.items() if k not in ("resume", "CI", "gpu")})
        assert command.processes("auto", config, more.get("resume", False)) == expected
        assert command.processes("5", config) == 5
