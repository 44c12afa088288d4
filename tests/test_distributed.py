"""Several processes are one process: the same episodes, gradients, weights and files; and they end
together. What several processes do with every other choice is in test_step.py::TestPairs.
"""

import dataclasses
import faulthandler
import itertools
import os
import shlex
import signal
import time
from unittest import mock

import pytest
import test_step
import torch
from safetensors.torch import load_file
from several import several
from test_step import KEEP_ALL, assert_equal, configured, rules_of, small_policy, small_tokenizer
from training import metrics
from transformers import AutoModelForCausalLM

from minragen import eval as evaluation
from minragen import train as trainer
from minragen.chat import ChatFrame
from minragen.look import diagnostics, report
from minragen.look.diagnostics import score_matrix
from minragen.models import Policy
from minragen.rollout import collect
from minragen.run import bundled, distributed, start
from minragen.run import runs as storage

real = test_step.real
# Mixture, filter, resampling, both KLs, and for ppo a critic and whitening.
EVERYTHING = KEEP_ALL | dict(
    env="toys:Lottery=2,toys:Raffle=3", val_size=2, resample=2, kl_coef=0.1, kl_reward_coef=0.1,
    credit="episode", steps=3)
LOTTERY = shlex.split(
    "--env toys:Lottery --model tiny --warmup-steps 0 --num-groups 4 --group-size 4 --val-size 3 "
    "--max-new-tokens 8 --mini-batch 8 --lr 1e-3 --diagnose-every 0 --save-every 2")


class TestProgress:
    def test_long_parts_of_runs_and_evaluations_are_told(self, runs, tmp_path, monkeypatch, capfd):
        monkeypatch.setattr(distributed, "SELDOM", 0)
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))  # so that there is a warm-up
        start.main([*LOTTERY, "--env", "bandit", "--steps", "1", "--warmup-steps", "2", "--run",
                      "a", "--filter", "none"])
        evaluation.main(["--run", "a", "--size", "2"])
        told = capfd.readouterr().err
        for part in ("steps of warm-up:  50%", "validation on val: tokens sampled: ",
                     "step 1: tokens sampled: ", "step 1: rows trained on: ",
                     "validation on test: tokens", "evaluation on test: tokens sampled: "):
            assert f"\r{part}" in told, part


class TestBegin:
    def test_each_process_of_a_machine_takes_a_gpu_of_its_own(self, monkeypatch):
        taken, joined = [], []
        monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2",
                                            "LOCAL_RANK": "1", "RANK": "3"})
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        monkeypatch.setattr(distributed.dist, "init_process_group", lambda kinds, timeout: (
            joined.append((kinds, timeout))))
        distributed.begin(torch.device("cuda"))
        assert (taken, joined) == ([1], [("cpu:gloo,cuda:nccl", distributed.PATIENCE)])
        for device, said in (("cuda:1", "take --device cpu or cuda, got cuda:1"),
                             ("mps", "take --device cpu or cuda, got mps")):
            with pytest.raises(ValueError, match=said):
                distributed.begin(torch.device(device))
        os.environ["LOCAL_WORLD_SIZE"] = "3"
        with pytest.raises(ValueError, match="got 3 processes for 2 GPUs"):
            distributed.begin(torch.device("cuda"))

    def test_process_0_fills_a_cache_before_the_others_read_it(self):
        def times():
            with distributed.main_process_first():
                began = time.monotonic()
                time.sleep(0.1)
            return began, time.monotonic()

        (_, first), *others = several(3, times)
        assert all(began > first - 0.05 for began, _ in others)


@pytest.mark.usefixtures("float64")
class TestEpisodes:
    @pytest.mark.parametrize("processes", [2, 4])
    def test_members_are_dealt_out_and_episodes_are_those_of_one_process(self, processes):
        config = configured(env="toys:Lottery=2,toys:Raffle=3", val_size=2)

        def play():
            policy, groups = small_policy(config), start.build_groups(config)["train"]
            frame = ChatFrame(policy.tokenizer)
            mine = collect(policy, frame, groups, 7, rules_of(config))
            return ([(t.group_id, t.member) for t in mine], len(groups.envs),
                    [(t.env, t.seed, t.member, t.turn_rewards, t.sequences)
                     for t in trainer.in_order(distributed.world(), mine)])

        expected = play()[2]
        for rank, (mine, environments, together) in enumerate(several(processes, play)):
            everyone = list(itertools.product(range(5), range(config.group_size)))
            assert mine == everyone[rank::processes]
            assert environments == len(mine) and together == expected

    def test_each_pair_of_the_diagnostics_is_scored_by_one_process_and_all_know_it(self):
        policy, fed, real = small_policy(configured()), [], Policy.logprobs
        prompts, said = [[3, 4, 5], [6, 7], [8]], [[9, 10], [11]]

        def score():
            with mock.patch.object(Policy, "logprobs", lambda self, tokens, *rest: (
                    fed.append(len(tokens)), real(self, tokens, *rest))[1]):
                return score_matrix(policy, prompts, said, world=distributed.world()), sum(fed)

        alone = score()
        shares = several(2, lambda: (fed.clear(), score())[1])
        assert alone[1] == 6 and sum(fed for _, fed in shares) == 6
        for scores, fed in shares:
            assert torch.allclose(scores, alone[0]) and fed > 0

    def test_more_processes_than_episodes_are_refused_with_a_sentence(self, capfd):
        few = [*LOTTERY, "--num-groups", "1", "--group-size", "2"]
        assert several(3, lambda: start.main(few)) == [None] * 3
        assert ("num_groups: got 1 of 2 episodes, expected at least one episode for each of the 3 "
                "processes."
                in capfd.readouterr().err)


class TestLearning:
    def test_a_mini_batch_may_have_fewer_rows_than_there_are_processes(self, real, float64):
        assert_equal(real, configured(mini_batch=2), processes=4)

    def test_another_number_of_processes_resumes_it_exactly(self, float64, monkeypatch, tmp_path):
        config = configured(algo="ppo", **EVERYTHING)

        def policy(source, *_):
            model = source and AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
            return Policy("tiny", model, small_tokenizer("free_think")) if source else (
                small_policy(config))

        for module, name, stub in ((start, "load_policy", policy), (storage, "RUNS", tmp_path),
                                   (trainer, "validate", lambda *_: {}),
                                   (report, "write", lambda folders: "report.html"),
                                   (bundled, "resolve", lambda *_: None)):
            monkeypatch.setattr(module, name, stub)

        def train(name, steps, processes, resume=False):
            stage = dataclasses.replace(config, run=name, steps=steps)
            done = several(processes, lambda: start.run(stage, resume, lambda line: None))
            assert [line["step"] for line in done] == [steps] * processes
            return load_file(tmp_path / name / "checkpoint/model.safetensors")

        expected = train("whole", 3, 1)
        for steps, processes in ((1, 2), (2, 1), (3, 4)):
            weights = train("parts", steps, processes, resume=steps > 1)
        for name, weight in weights.items():
            assert float((weight - expected[name]).abs().max()) < 1e-9


class TestEnd:
    """In processes without a launcher, which would end them too."""

    def test_an_early_stop_or_a_request_to_one_process_stops_all_together(self, runs, monkeypatch):
        roll_out = trainer.roll_out

        def asked(learner, *given):
            if (learner.step, distributed.rank()) == (1, 1):
                os.kill(os.getpid(), signal.SIGTERM)
            return roll_out(learner, *given)

        def train(*options):
            faulthandler.dump_traceback_later(30, exit=True)  # else they might wait for ever
            try:
                start.main([*LOTTERY, "--steps", "5", "--save-every", "5", *options])
            except SystemExit as stop:
                return stop.code

        monkeypatch.setattr(diagnostics, "early_stop", lambda history: "bored." * (
            len(history) == 3))
        assert several(2, lambda: train("--run", "b", "--early-stop", "true")) == [None, None]
        assert [line["step"] for line in metrics(runs / "b")] == [0, 1, 2, 2]
        monkeypatch.setattr(trainer, "roll_out", asked)
        assert several(2, lambda: train("--run", "a")) == [130, 130]
        assert storage.step_of(runs / "a" / "checkpoint") == metrics(runs / "a")[-1]["step"] == 2

    def test_an_error_in_one_process_is_printed_and_ends_all(self, runs, capfd, monkeypatch):
        monkeypatch.setattr("toys.Lottery._reset", broken_in_process_1)
        assert several(3, lambda: start.main([*LOTTERY, "--run", "a"])) == [None] * 3
        said = capfd.readouterr().err
        assert "error in process 1: OSError: no such city (" in said
        assert "in broken_in_process_1).\n" in said and said.count("Traceback") == 1

    def test_a_taken_name_is_refused_and_the_run_announced_once(self, runs, capfd):
        (runs / "taken").mkdir(parents=True)
        assert several(2, lambda: start.main([*LOTTERY, "--run", "taken"])) == [None] * 2
        printed, said = capfd.readouterr()
        assert said.count("run 'taken' exists already") == printed.count("minragen  toys:") == 1


def broken_in_process_1(env, rng):
    if distributed.rank() == 1:
        raise OSError("no such city")
    env.number, env.luck = 1, rng
