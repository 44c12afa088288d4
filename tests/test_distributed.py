"""Several processes are one process: the same episodes, gradients, weights and files; and they end
together. What several processes do with every other choice is in test_step.py::TestPairs.
"""

import dataclasses
import os
import shlex
import signal
import socket
import sys
import time

import pytest
import test_step
import torch
from safetensors.torch import load_file
from several import TORCHRUN, Launched, free_port, several
from test_step import KEEP_ALL, assert_equal, configured, rules_of, small_policy, small_tokenizer
from test_train import TIMES, metrics, read_lines
from torch.nn.utils import get_total_norm
from transformers import AutoModelForCausalLM

from minragen import bundled, distributed, runs
from minragen import train as trainer
from minragen.chat import ChatFrame
from minragen.models import Policy
from minragen.rollout import collect

float64, real = test_step.float64, test_step.real
# Mixture, filter, resampling, both KLs, and for ppo a critic and whitening.
EVERYTHING = KEEP_ALL | dict(
    env="toys:Lottery=2,toys:Raffle=3", val_size=2, resample=2, kl_coef=0.1, kl_reward_coef=0.1,
    kl_target=0.01, kl_horizon=50.0, credit="episode", reward_norm="mean_std",
    reward_norm_over="batch", steps=3)
LOTTERY = shlex.split(
    "--env toys:Lottery --model tiny --warmup-steps 0 --num-groups 4 --group-size 4 --val-size 3 "
    "--max-new-tokens 8 --mini-batch 8 --lr 1e-3 --diagnose-every 0 --save-every 2")
# `--`: torchrun takes --run for an abbreviation of an option of its own.
TRAIN = ["minragen.train", *LOTTERY, "--run"]
RUN = ["-m", "--", *TRAIN]
SEVERAL = [sys.executable, "-m", "minragen.distributed"]
SHORT, LONG = shlex.split("--steps 2 --val-every 1"), shlex.split("--steps 900 --val-every 900")


def without_times(lines):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.mark.usefixtures("float64")
class TestEpisodes:
    @pytest.mark.parametrize("processes", [2, 4])
    def test_groups_are_dealt_out_and_episodes_are_those_of_one_process(self, processes):
        config = configured(env="toys:Lottery=2,toys:Raffle=3", val_size=2)

        def play():
            policy, groups = small_policy(config), trainer.build_groups(config)["train"]
            frame = ChatFrame(policy.tokenizer)
            mine = collect(policy, frame, groups, 7, rules_of(config))
            return ([t.group_id for t in mine], len(groups.envs),
                    [(t.env, t.seed, t.member, t.turn_rewards, t.sequences)
                     for t in trainer.in_order(mine)])

        expected = play()[2]
        for rank, (mine, environments, together) in enumerate(several(processes, play)):
            assert set(mine) == set(range(5)[rank::processes])
            assert environments == len(mine) and together == expected

    def test_more_processes_than_groups_are_refused_with_a_sentence(self, capfd):
        assert several(3, lambda: trainer.main([*LOTTERY, "--num-groups", "2"])) == [None] * 3
        assert ("num_groups: got 2, expected at least one for each of the 3 processes."
                in capfd.readouterr().err)


class TestLearning:
    @pytest.mark.parametrize("algo", ["grpo", "ppo"])
    def test_three_steps_end_with_the_weights_and_metrics_of_one_process(self, real, float64, algo):
        config = configured(algo=algo, **EVERYTHING)
        _, _, learner = real(config, play=collect)
        for processes in (2, 4):
            _, _, other = real(config, play=collect, processes=processes)
            for a, b in zip(other.weights, learner.weights, strict=True):
                assert float((a - b).abs().max()) < 1e-9
            for line, expected in zip(*map(without_times, (other.lines, learner.lines))):
                assert line == pytest.approx(expected, rel=1e-6, abs=1e-9)

    def test_in_float32_gradients_differ_by_1e_5_of_their_norm_at_most(self, real, monkeypatch):
        network = test_step.network
        monkeypatch.setattr(test_step, "network", lambda *choice: network(*choice).float())
        config = configured(algo="ppo", kl_coef=0.1)
        (policy, critic, *_), _, _ = real(config, play=collect)
        for processes in (2, 4):
            others, _, _ = real(config, play=collect, processes=processes)
            for gradient, other in zip((policy, critic), others):
                assert gradient[0].dtype == other[0].dtype == torch.float32
                difference = get_total_norm([a - b for a, b in zip(gradient, other)])
                assert difference < 1e-5 * get_total_norm(gradient)

    def test_a_mini_batch_may_have_fewer_rows_than_there_are_processes(self, real, float64):
        assert_equal(real, configured(mini_batch=2), processes=4)

    @pytest.mark.parametrize("processes", [2, 4])
    def test_as_many_processes_repeat_themselves_bit_for_bit(self, real, float64, processes):
        one, other = (real(configured(algo="ppo"), play=collect, processes=processes)[2]
                      for _ in range(2))
        assert all(map(torch.equal, one.weights, other.weights))
        assert without_times(one.lines) == without_times(other.lines)

    def test_resumed_by_another_number_of_processes_it_goes_on_as_if_never_stopped(
            self, float64, monkeypatch, tmp_path):
        config = configured(algo="ppo", **EVERYTHING)

        def policy(source, *_):
            model = source and AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
            return Policy("tiny", model, small_tokenizer("free_think")) if source else (
                small_policy(config))

        for module, name, stub in ((trainer, "load_policy", policy), (runs, "RUNS", tmp_path),
                                   (trainer, "validate", lambda *_: {}),
                                   (bundled, "resolve", lambda *_: None)):
            monkeypatch.setattr(module, name, stub)

        def train(name, steps, processes, resume=False):
            stage = dataclasses.replace(config, run=name, steps=steps)
            done = several(processes, lambda: trainer.train(stage, resume, lambda line: None))
            assert [line["step"] for line in done] == [steps] * processes
            return load_file(tmp_path / name / "checkpoint/model.safetensors")

        expected = train("whole", 3, 1)
        for steps, processes in ((1, 2), (2, 1), (3, 4)):
            weights = train("parts", steps, processes, resume=steps > 1)
        for name, weight in weights.items():
            assert float((weight - expected[name]).abs().max()) < 1e-9


class TestEnd:
    """In processes without a launcher, which would end them too."""

    def test_an_error_in_one_process_is_printed_and_ends_all(self, capfd, monkeypatch, tmp_path):
        monkeypatch.setattr(runs, "RUNS", tmp_path)
        monkeypatch.setattr("toys.Lottery._reset", broken_in_process_1)
        assert several(3, lambda: trainer.main([*LOTTERY, "--run", "a"])) == [None] * 3
        said = capfd.readouterr().err
        assert "error in process 1: no such city\n" in said
        assert "Traceback" not in said

    def test_a_taken_name_is_refused_once_and_what_was_said_before_is_not_lost(
            self, capfd, monkeypatch, tmp_path):
        monkeypatch.setattr(runs, "RUNS", tmp_path)
        (tmp_path / "taken").mkdir()

        def start():
            with open(tmp_path / f"out-{distributed.rank()}", "w") as sys.stdout:  # no terminal
                trainer.main([*LOTTERY, "--run", "taken"])

        assert several(2, start) == [None] * 2
        assert capfd.readouterr().err.count("run 'taken' exists already") == 1
        assert "minragen  toys:Lottery" in (tmp_path / "out-0").read_text()
        assert (tmp_path / "out-1").read_text() == ""

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_a_killed_process_ends_those_that_are_busy(self, rank):
        def work():
            distributed.all_gather(0)
            if distributed.rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

        began = time.time()
        assert several(3, work) == [None] * 3
        assert time.time() - began < 20


def broken_in_process_1(env, rng):
    if distributed.rank() == 1:
        raise OSError("no such city")
    env.number, env.luck = 1, rng


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


@pytest.fixture(scope="module")
def plain(folder):
    """The folder of a run by one process, without torchrun."""
    assert Launched(folder, sys.executable, "-m", *TRAIN, "plain", *SHORT).process.wait(60) == 0
    return folder / "runs" / "plain"


class TestLaunch:
    def test_one_process_of_torchrun_is_the_plain_run_bit_for_bit(self, folder, plain):
        assert Launched(folder, *TORCHRUN, *RUN, "one", *SHORT).process.wait(60) == 0
        one = folder / "runs" / "one"
        assert metrics(one) == metrics(plain)
        for file in ("trajectories.jsonl", "checkpoint/model.safetensors"):
            assert (one / file).read_bytes() == (plain / file).read_bytes()

    def test_four_processes_write_what_one_process_writes_and_once(self, folder, plain):
        launched = Launched(folder, *TORCHRUN, "--nproc-per-node=4", *RUN, "four", *SHORT)
        assert launched.process.wait(90) == 0
        four = folder / "runs" / "four"
        assert sorted(p.name for p in four.iterdir()) == sorted(p.name for p in plain.iterdir())
        lines, expected = metrics(four), metrics(plain)
        assert [line["step"] for line in lines] == [0, 1, 2, 2]
        assert lines[0] == expected[0]
        assert lines[1] == pytest.approx(expected[1], rel=1e-3, abs=1e-6)
        said = launched.output.read_text()
        for line in ("minragen ", "settings", "step    1/2", "step    2/2 | success", "done"):
            assert said.count(line) == 1
        assert "; 4 processes" in said
        one, other = ([t for t in read_lines(run / "trajectories.jsonl") if t["step"] == 0
                       or (t["step"], t["split"]) == (1, "train")] for run in (four, plain))
        assert one == other and {t["split"] for t in one} == {"val", "train"}

    def test_the_processes_of_one_machine_talk_where_no_other_can_listen(self, monkeypatch):
        """They exchange pickles."""
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(distributed.run, "main", lambda words: None)
        monkeypatch.setattr(distributed.logging, "disable", lambda level: None)
        distributed.launch(2, [])
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
