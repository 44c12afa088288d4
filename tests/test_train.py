"""The loop around the step: what is measured, what is kept on disk, and how a run goes on."""

import contextlib
import copy
import dataclasses
import inspect
import io
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import message, parsed
from toys import Lottery, tiny

from minragen import diagnostics, reproduce
from minragen import train as trainer
from minragen.envs import REGISTRY, ServerGone, make
from minragen.models import token_logprobs
from minragen.rollout import Rules, StopReason, Trajectory, collect, make_batch
from minragen.runs import (
    TIMES,
    Log,
    begin,
    damage,
    find_checkpoint,
    keep_advantages,
    load_trainer_state,
    locked,
    read_config,
    run_folder,
    texts_of,
)
from minragen.train import main

pytestmark = pytest.mark.usefixtures("runs")

# Episodes of one turn, where it does not matter what is played.
BRIEF = shlex.split("--env bandit --num-groups 2 --group-size 4 --val-size 4 --val-every 2 "
                    "--save-every 2 --mini-batch 4")
# Every field of `Rules` but the temperature differs from its default.
RULES = shlex.split("--response-format grounding_worldmodeling --grounding-reward 0.5 --seed 5 "
                    "--worldmodeling-reward 0.25 --top-k 3 --top-p 0.9 --max-rows 7 --window 2 "
                    "--max-new-tokens 9 --max-context 300 --context limited --token-budget 99")


def run(line, *more):
    main([*line.split(), *more])


def interrupted(line, *more):
    """A run in which somebody presses Ctrl-C."""
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        run(line, *more)
    assert "stopped. If the run has a checkpoint, --run NAME --resume" in printed.getvalue()


def assert_resumed_alike(runs, monkeypatch, options):
    """A run that is killed in its second step and resumed stores what an uninterrupted one does."""
    run("--run straight", *options)
    real = trainer.roll_out

    def roll_out(learner, *arguments):
        if learner.step == 1:
            raise KeyboardInterrupt
        return real(learner, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "roll_out", roll_out)
        interrupted("--run stopped", *options)
    run("--run stopped --resume")
    assert metrics(runs / "straight") == metrics(runs / "stopped")
    for file in ("checkpoint/model.safetensors", "reference.pt", "trajectories.jsonl"):
        one, other = ((runs / name / file).read_bytes() for name in ("straight", "stopped"))
        assert one == other, file


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder):
    return [{k: v for k, v in line.items() if k not in TIMES}
            for line in read_lines(folder / "metrics.jsonl")]


def run_apart(tmp_path_factory, line, *more):
    """Train with these options, as `run` takes them, and return the run's folder."""
    folder = tmp_path_factory.mktemp("apart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minragen.runs.RUNS", folder)
        patch.setenv("MINRAGEN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        run(f"--run a {line}", *more)
    return folder / "a"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run of two steps that several tests copy."""
    return run_apart(tmp_path_factory, "--steps 2", *BRIEF)


@pytest.fixture
def begun(finished, runs):
    """A copy of that run as runs/a."""
    shutil.copytree(finished, runs / "a")
    return runs / "a"


def build(*argv):
    """Config, Learner and training groups."""
    config = parsed(*argv)
    groups = trainer.build_groups(config)
    return config, trainer.build(config, groups, say=lambda line: None), groups["train"]


def played(*argv):
    """Config, Learner and the batch of its first rollout."""
    config, learner, groups = build(*argv)
    return config, learner, make_batch(trainer.roll_out(learner, groups, config))


def episode(env="lake", rewards=(0.0, 1.0), tokens=(2, 3), stop=StopReason.TERMINATED, **metrics):
    """A trajectory written by hand: turns of so many sampled tokens after one of a prompt each."""
    trajectory = Trajectory(env, 1, 0, 0, turn_rewards=rewards, turns=[None] * len(rewards),
                            stop=stop, success=rewards[-1] == 1, metrics=metrics)
    for k, count in enumerate(tokens):
        trajectory.add_prompt([9])
        trajectory.add_reply([1] * count, [-0.5] * count, k)
    return trajectory


EPISODES = [episode(valid=0.5, f1=0.25),
            episode(rewards=(-0.1,), tokens=(4,), valid=0.0, f1=0.75, stop=StopReason.CONTEXT),
            dataclasses.replace(episode("shop", rewards=(0.5,), tokens=(1,), valid=1.0),
                                stop=StopReason.ENV_ERROR, error="OSError: gone")]


class TestDescribe:
    def test_means_are_over_episodes_and_a_mixture_also_gets_them_per_environment(self):
        lake = {"success": 0.5, "episode_return": pytest.approx(0.45), "turns": 1.5,
                "response_tokens": 4.5, "context_full": 0.5, "env_errors": 0, "valid": 0.25,
                "f1": 0.5}
        shop = {"success": 0.0, "episode_return": 0.5, "turns": 1.0, "response_tokens": 1.0,
                "context_full": 0.0, "env_errors": 0, "valid": 1.0}
        bought = dataclasses.replace(EPISODES[2], stop=StopReason.TRUNCATED, error="")
        assert diagnostics.describe(EPISODES[:2]) == lake
        assert diagnostics.describe([*EPISODES[:2], bought]) == {
            "success": pytest.approx(1 / 3), "episode_return": pytest.approx(1.4 / 3),
            "turns": pytest.approx(4 / 3), "response_tokens": pytest.approx(10 / 3),
            "context_full": pytest.approx(1 / 3), "env_errors": 0, "valid": 0.5,  # f1: not of all
            **{f"lake/{name}": value for name, value in lake.items()},
            **{f"shop/{name}": value for name, value in shop.items()}}

    def test_episodes_whose_environment_failed_are_counted_and_in_no_other_number(self):
        lake = diagnostics.describe(EPISODES[:2])
        assert diagnostics.describe(EPISODES) == {
            **lake, "env_errors": 1, **{f"lake/{name}": value for name, value in lake.items()},
            "shop/env_errors": 1}
        assert diagnostics.describe(EPISODES[2:]) == {"env_errors": 1}


@pytest.fixture
def calls(monkeypatch):
    """Every call of `collect`, which returns the first two episodes above; one if greedy."""
    seen = []

    def play(*arguments, **named):
        seen.append(inspect.signature(collect).bind(*arguments, **named).arguments)
        greedy = seen[-1]["rules"].temperature == 0
        return copy.deepcopy(EPISODES[:1] if greedy else EPISODES[:2])

    for module in (trainer, diagnostics):
        monkeypatch.setattr(module, "collect", play)
    return seen


class TestValidation:
    def test_it_reports_success_return_and_form_sampled_and_greedy(self, calls):
        groups, logged = SimpleNamespace(split="val"), []
        log = SimpleNamespace(trajectories=lambda *entry: logged.append(entry))
        learner = trainer.Learner(*tiny(), None, step=7)
        assert trainer.validate(learner, groups, parsed("--val-temperature", "0.3"), log) == {
            "val/success": 0.5, "val/episode_return": pytest.approx(0.45), "val/valid": 0.25,
            "val/success_greedy": 1.0, "val/episode_return_greedy": 1.0, "val/valid_greedy": 0.5,
            "val/env_errors": 0, "val/env_errors_greedy": 0}
        assert [(step, split, len(played)) for step, split, played in logged] == [(7, "val", 2)]

    def test_it_plays_the_first_instances_of_its_split_with_the_noise_of_seed_0_and_no_state_reward(
            self, calls):
        config = parsed(*RULES, "--val-size", "3", "--val-temperature", "0.3")
        groups = trainer.build_groups(config)["test"]
        assert (groups.split, groups.num_groups, groups.group_size) == ("test", 3, 1)
        log = SimpleNamespace(trajectories=lambda *entry: None)
        trainer.validate(trainer.Learner(*tiny(), None), groups, config, log)
        assert [call["rules"] for call in calls] == [
            Rules(t, 0, 1.0, 9, 300, 7, 99, "limited", 2) for t in (0.3, 0.0)]
        assert all(call["groups"] is groups and call["first_seed"] == 0 for call in calls)


class TestRollOut:
    def test_training_scores_descriptions_and_plays_as_the_settings_say(self, calls):
        groups = object()
        trainer.roll_out(trainer.Learner(*tiny(), None), groups, parsed(*RULES))
        assert calls[0]["groups"] is groups
        assert calls[0]["rules"] == Rules(1.0, 3, 0.9, 9, 300, 7, 99, "limited", 2, 0.5, 0.25, 5)

    def test_dynamic_sampling_asks_for_more_groups_until_enough_have_std(self, monkeypatch):
        rounds = iter([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 2.0, 2.0]])  # two groups of two
        monkeypatch.setattr(trainer, "collect", lambda *arguments: [
            dataclasses.replace(episode(rewards=(reward,), tokens=(1,)), group_id=i // 2)
            for i, reward in enumerate(next(rounds))])
        config = parsed("--algo", "dapo", "--num-groups", "2", "--group-size", "2")
        learner = trainer.Learner(*tiny(), None)
        trajectories = trainer.roll_out(learner, None, config)
        assert [t.group_id for t in trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
        kept, _ = trainer.choose_groups(learner, make_batch(trajectories), config)
        assert kept.tolist() == [False, True, True, False]


class TestInstances:
    def test_no_round_of_any_run_plays_the_instances_of_another(self, calls):
        """2**41 + seed * 2**24 + round * num_groups, written out."""
        for seed in "01":
            learner = trainer.Learner(*tiny(), None)
            for _ in range(3):
                trainer.roll_out(learner, None, parsed("--num-groups", "16", "--seed", seed))
        assert [call["first_seed"] for call in calls] == [
            2199023255552, 2199023255568, 2199023255584,
            2199040032768, 2199040032784, 2199040032800]


class TestLearner:
    def test_reference_and_critic_exist_only_when_used(self):
        _, plain, _ = build(*BRIEF)
        _, with_critic, _ = build(*BRIEF, "--algo", "ppo", "--kl-coef", "0.1")
        _, kl_reward, _ = build(*BRIEF, "--algo", "reinforce-pp")
        assert plain.reference is None and plain.critic is None
        assert with_critic.reference is not None and with_critic.critic is not None
        assert kl_reward.reference is not None and kl_reward.critic is None
        assert not any(p.requires_grad for p in kl_reward.reference.parameters())
        assert kl_reward.kl_reward_coef == 0.001

    def test_in_bfloat16_old_logprobs_are_computed_again_and_in_float32_they_are_the_samplers(self):
        config, learner, batch = played(*BRIEF, "--temperature", "0.7")
        batch, _ = trainer.compute_targets(learner, batch, config)
        assert batch.old_logprobs is batch.sample_logprobs
        learner.policy.model.to(torch.bfloat16)
        batch, _ = trainer.compute_targets(learner, batch, config)
        again, _ = token_logprobs(learner.policy.model, batch.tokens, batch.response_mask, 0.7)
        assert torch.allclose(batch.old_logprobs, again, atol=1e-2)
        assert not batch.old_logprobs.equal(batch.sample_logprobs)

    def test_updates_without_a_finite_gradient_are_skipped_and_five_in_a_row_stop_the_run(self):
        config, learner, batch = played(*BRIEF, "--filter", "none")
        before = copy.deepcopy(learner.policy.model.state_dict())
        good, _ = trainer.compute_targets(learner, batch, config)
        bad = dataclasses.replace(good, advantages=torch.full_like(good.advantages, math.nan))
        for step in (1, 2):  # of two mini-batches each
            assert trainer.update(learner, bad, config, step)["updates_skipped"] == 2
            assert learner.skipped == 2 * step
        with pytest.raises(RuntimeError, match="5 updates in a row had a gradient that is"):
            trainer.update(learner, bad, config, 3)
        assert all(torch.equal(before[k], v) for k, v in learner.policy.model.state_dict().items())
        assert trainer.update(learner, good, config, 3)["updates_skipped"] == learner.skipped == 0

    def test_out_of_memory_halves_the_token_budget_once_and_loses_nothing(
            self, monkeypatch, capsys):
        options = (*BRIEF, "--filter", "none", "--algo", "ppo", "--token-budget", "120")
        config, learner, batch = played(*options)
        _, other, _ = played(*options)
        batch, _ = trainer.compute_targets(learner, batch, config)
        sampled = batch.response_mask
        batch.advantages[sampled] = torch.linspace(-1, 1, int(sampled.sum()))
        mini = next(trainer.optimizer_steps(batch, config, 1))
        expected, real, calls = trainer.gradients(learner, mini, config), trainer.backward, []

        def backward(*given):  # fails after it has added to the gradients
            shares = real(*given)
            calls.append(given)
            if len(calls) in failing:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return shares

        monkeypatch.setattr(trainer, "backward", backward)
        failing = {1}
        found = trainer.gradients(other, mini, config)
        assert {k: float(v) for k, v in found.items()} == pytest.approx(
            {k: float(v) for k, v in expected.items()}, rel=1e-4, abs=1e-7)
        assert "going on with token_budget 60" in capsys.readouterr().out and other.halved
        for one, two in zip(learner.policy.model.parameters(), other.policy.model.parameters()):
            assert one.grad.abs().max() > 0 and torch.allclose(one.grad, two.grad, atol=1e-5)
        failing = {len(calls) + 1}
        with pytest.raises(RuntimeError, match="ran out of memory again"):
            trainer.gradients(other, mini, config)


class TestRuns:
    def test_a_plain_run_imports_no_optional_package(self, tmp_path):
        program = (
            "import sys, minragen.train, minragen.eval\n"
            f"minragen.train.main({[*BRIEF, '--run', 'a', '--steps', '1', '--model', 'tiny']})\n"
            "sys.exit(' '.join({'peft', 'tensorboard', 'wandb', 'datasets', 'reasoning_gym', "
            "'openenv', 'fastapi', 'websockets', 'openai', 'trl'} & sys.modules.keys()) or 0)")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              check=False, cwd=tmp_path,
                              env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)})
        assert done.stderr.strip() == "" and done.returncode == 0

    def test_a_run_leaves_config_metrics_trajectories_a_checkpoint_and_a_report(self, finished):
        assert {p.name for p in finished.iterdir()} == {
            "config.json", "metrics.jsonl", "trajectories.jsonl", "checkpoint", "checkpoint.best",
            "lock", "report.html", "figures"}
        lines = metrics(finished)
        assert [line["step"] for line in lines] == [0, 1, 2, 2]
        assert {"val/success_greedy"} <= lines[0].keys() & lines[2].keys() - lines[1].keys()
        assert "test/success" in lines[-1]
        assert all(isinstance(v, (int, float)) for line in lines for name, v in line.items()
                   if name != "regime")
        entries = read_lines(finished / "trajectories.jsonl")
        assert [m["role"] for m in entries[0]["messages"]] == ["system", "user", "assistant"]
        assert Counter((e["step"], e["split"]) for e in entries) == {
            (0, "val"): 4, (1, "train"): 4, (2, "val"): 4, (2, "train"): 4, (2, "test"): 4}

    def test_training_shows_members_of_one_trained_group_with_the_tokens_of_their_replies(
            self, runs):
        config, learner, batch = played(*BRIEF, "--filter", "none")
        trajectories = trainer.roll_out(learner, trainer.build_groups(config)["train"], config)
        batch = make_batch(trajectories)
        rows = (batch.group_ids == 1).nonzero()[:, 0]  # group 0 is not trained on
        batch, _ = trainer.compute_targets(learner, batch.take(rows), config)
        keep_advantages(trajectories, rows, batch)
        log = begin(runs / "a", config, learner, False)
        for step in (1, 2):
            log.trajectories(step, "train", trajectories)
        entries = read_lines(runs / "a" / "trajectories.jsonl")
        ranked = sorted(trajectories[4:8], key=lambda t: -t.episode_return)
        assert [(e["step"], e["group"], e["member"]) for e in entries] == [
            (step, 1, t.member) for step in (1, 2) for t in ranked]
        advantages = [reply["advantages"] for e in entries[:4] for reply in e["replies"]]
        assert [len({*x}) for x in advantages] == [1] * 4 and len({x[0] for x in advantages}) > 1
        for e, t in zip(entries, ranked):
            texts = [m["content"] for m in e["messages"] if m["role"] == "assistant"]
            for reply, text in zip(e["replies"], texts, strict=True):
                assert "".join(reply["tokens"]).startswith(text) and len(reply["tokens"]) == len(
                    reply["logprobs"]) == len(reply["advantages"])
            assert e["replies"][0]["logprobs"] == pytest.approx(
                [x for x, ours in zip(t.sequences[0].sample_logprobs, t.sequences[0].response_mask)
                 if ours], abs=6e-4)
        text = "∀ h : p → q, é"
        ids = learner.frame.encode(text)
        assert len(ids) > len(text) / 2 and "".join(texts_of(ids, learner.frame.tokenizer)) == text

    def test_the_console_has_the_names_and_numbers_of_the_metrics(self, runs, capsys):
        run("--run a --steps 1", *BRIEF)
        printed = capsys.readouterr().out
        assert "memory    about" in printed and "settings  the preset of bandit, " in printed
        line, step = metrics(runs / "a")[1], re.search(r"^step +1/1 .*$", printed, re.M)[0]
        for label, name, form in (("success", "success", ".3f"), ("valid", "valid", ".2f"),
                                  ("return", "episode_return", "6.3f"),
                                  ("val", "val/success", ".3f"), ("entropy", "entropy", ".3f"),
                                  ("greedy", "val/success_greedy", ".3f"),
                                  ("grad", "grad_norm", "6.3f"), ("kept", "groups_kept", "2d")):
            assert f"{label} {line[name]:{form}}" in step

    def test_the_same_seed_gives_the_same_run_and_another_one_another(self, runs):
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
            run(f"--run {name} --seed {seed} --steps 1", *BRIEF)
        a, b, c = (metrics(runs / n) for n in "abc")
        assert a == b and a[1:] != c[1:]

    def test_warnings_are_printed_and_diagnoses_compared_with_the_first(
            self, runs, capsys, monkeypatch):
        compared, history = [], []
        monkeypatch.setattr(trainer.report, "write", lambda folders: None)
        monkeypatch.setattr(diagnostics, "regime", lambda *pair: compared.append(pair) or "here")
        monkeypatch.setattr(diagnostics, "warnings_of", lambda lines: (
            history.append([line["step"] for line in lines]) or ["take care"] * (len(lines) == 3)))
        run("--run a --steps 4", *BRIEF, "--diagnose-every", "2")
        assert history == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
        assert capsys.readouterr().out.count("warning   take care\n") == 1
        lines = metrics(runs / "a")
        first = [pair[0].get("first_turn/mi") for pair in compared]
        assert first == [pytest.approx(lines[1]["first_turn/mi"], abs=1e-5)] * 3
        assert [line.get("regime") for line in lines] == [None, "here", "here", None, "here", None]
        assert ["first_turn/mi" in line for line in lines] == [False, True, True, False, True,
                                                              False]

    def test_a_run_whose_filter_stays_empty_stops_says_why_and_plays_no_step_when_resumed(
            self, runs, capsys):
        run("--env toys:Lottery --run a --steps 9 --num-groups 2 --group-size 4 --val-size 1 "
            "--warmup-steps 0 --env-arg prize=0.0 --max-turns 1 --filter-metric entropy_std "
            "--filter top_k_abs --filter-value 1 --temperature 0.0001")
        assert "the filter (top_k_abs of entropy_std) kept no group" in capsys.readouterr().out
        before = metrics(runs / "a")
        assert [line["step"] for line in before] == [0, 1, 2, 3, 4, 5, 5]
        run("--run a --resume")
        assert metrics(runs / "a") == before

    def test_it_stops_early_only_if_asked_with_the_reason_and_a_last_validation(
            self, runs, monkeypatch, capsys):
        monkeypatch.setattr(diagnostics, "early_stop", lambda history: (
            "it collapsed." if history and history[-1]["step"] == 2 else ""))
        for name, option, last in (("a", "true", 2), ("b", "false", 3)):
            run(f"--run {name} --steps 3 --early-stop {option}", *BRIEF, "--val-every", "9")
            lines = metrics(runs / name)
            assert [line["step"] for line in lines] == [*range(last + 1), last]
            assert "val/success" in lines[-2]
            assert ("stopped: it collapsed. Read" in capsys.readouterr().out) == (name == "a")

    def test_an_existing_run_is_not_overwritten_and_without_a_name_each_gets_a_new_one(
            self, runs, begun):
        before = (begun / "metrics.jsonl").read_text()
        said = message("--run", "a", *BRIEF)
        assert "run 'a' exists already. Continue it with --run a --resume" in said
        assert (begun / "metrics.jsonl").read_text() == before
        shutil.copytree(begun, runs / "bandit-grpo-tiny-s0")
        assert run_folder(parsed(*BRIEF), False).name == "bandit-grpo-tiny-s0-2"

    def test_failures_of_the_environment_are_counted_told_and_written_and_do_not_stop_the_run(
            self, runs, capsys):
        small = ("--num-groups 4 --group-size 4 --steps 2 --val-size 9 --warmup-steps 0 "
                 "--max-new-tokens 6 --max-context 200")
        run(f"--env toys:Faulty --run a {small}")
        _, one, two, _ = lines = metrics(runs / "a")
        entries = [e for e in read_lines(runs / "a" / "trajectories.jsonl") if e["error"]]
        assert {(e["error"], e["stop"]) for e in entries} == {
            ("OSError: the server is gone", "env_error")}
        failures = {(0, "val"): lines[0]["val/env_errors"], (1, "train"): one["env_errors"],
                    (2, "train"): two["env_errors"], (2, "val"): two["val/env_errors"],
                    (2, "test"): lines[3]["test/env_errors"]}
        assert Counter((e["step"], e["split"]) for e in entries) == {
            place: min(4, n) for place, n in failures.items()} and one["grad_norm"] > 0
        assert (f"env error {one['env_errors']} train episodes failed in their environment and are "
                "left out: OSError: the server is gone") in capsys.readouterr().out

    def test_what_an_environment_raises_cannot_speak_to_the_terminal(self, capsys):
        failed = Trajectory("bandit", 0, 0, 0)
        failed.fail(OSError("\x1b]0;title\x07 gone"))
        quiet = SimpleNamespace(writes=True, append=lambda *_: None, tokenizer=None)
        Log.trajectories(quiet, 1, "val", [failed])
        said = capsys.readouterr().out.strip()
        assert "]0;title gone" in said and said.isprintable()

    def test_a_run_in_which_every_environment_fails_says_what_they_raised_and_stops(
            self, runs, capsys):
        run("--env test_train:Gone --run a --steps 9 --val-size 2 --warmup-steps 0 --num-groups 2 "
            "--group-size 2 --max-context 200 --algo dapo")
        printed = capsys.readouterr().out
        assert "16 train episodes failed in their environment and are left out: Conn" in printed
        assert "or every environment failed" in printed
        lines = metrics(runs / "a")
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 5]
        assert lines[1] == {"step": 1, "env_errors": 16, "rollouts": 4}
        assert len(read_lines(runs / "a" / "trajectories.jsonl")) == 5 * 4 + 3 * 4

    def test_an_environment_that_cannot_begin_is_refused_before_there_is_a_folder(self, runs):
        assert "test_train:Late does not begin: ConnectionError: not yet" in message(
            "--env", "test_train:Late", "--warmup-steps", "0", "--run", "a")
        assert not (runs / "a").exists()

    def test_a_context_that_a_prompt_fills_is_refused_before_there_is_a_folder(self, runs):
        assert "no room for a reply" in message("--run", "a", *BRIEF, "--max-context", "40")
        assert not (runs / "a").exists()


class Gone(Lottery):
    """Answers the random policy, from whose episodes the tokenizer is made, and nobody else."""

    def step(self, answer):
        if answer == self.random_answer(None):
            return super().step(answer)
        raise ConnectionError("no answer")


class Late(Lottery):
    """Knows the instances from which the tokenizer is made, and none of training."""

    def reset(self, *, seed=None, options=None):
        if seed >= trainer.TRAIN_SEED:
            raise ConnectionError("not yet")
        return super().reset(seed=seed, options=options)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The folder of a run with a Gymnasium id of another package and an environment that fails."""
    return run_apart(
        tmp_path_factory, "--env test_envs:words/Guess-v0,toys:Faulty --num-groups 4 --group-size "
        "4 --steps 2 --val-size 8 --warmup-steps 0 --max-new-tokens 6 --filter none")


class TestMixture:
    def test_an_id_of_gymnasium_trains_beside_another_environment(self, mixed):
        lines, entries = metrics(mixed), read_lines(mixed / "trajectories.jsonl")
        assert [line["step"] for line in lines] == [0, 1, 2, 2]
        guess = "test_envs:words/Guess-v0"
        assert all(line[f"{guess}/turns"] == 4 and line[f"{guess}/env_errors"] == 0
                   and line["grad_norm"] > 0 for line in lines[1:3])
        prompts = {e["messages"][0]["content"].partition("\nReply")[0]
                   for e in entries if e["env"] == guess}
        assert prompts == {make(guess).system_prompt}

    def test_the_package_datasets_reads_every_episode_as_it_was_written(self, mixed, tmp_path):
        datasets = pytest.importorskip("datasets")
        path = mixed / "trajectories.jsonl"
        entries = read_lines(path)
        read = datasets.load_dataset("json", data_files=str(path), split="train",
                                     cache_dir=str(tmp_path))
        assert [*read] == entries
        assert len({(e["env"], e["split"], bool(e["error"])) for e in entries}) == 9


class TestServerGone:
    def test_a_run_whose_tool_does_not_come_back_saves_and_goes_on_later(self, begun, runs,
                                                                       monkeypatch):
        """Of dynamic sampling's second round, whose first must be played again."""
        sampling = ("--filter-value", "1", "--resample", "1", "--save-every", "9")
        run("--run b --steps 3", *BRIEF, *sampling)
        real, rounds = trainer.collect, []

        def collect(*given):
            rounds.append(given[3])
            if len(rounds) == failing:
                raise ServerGone("the retriever gave no results")
            return real(*given)

        monkeypatch.setattr(trainer, "collect", collect)
        failing = 0
        run("--run c --steps 3", *BRIEF, *sampling)
        failing, rounds = len(rounds), []
        assert message("--run", "d", "--steps", "3", *BRIEF, *sampling) == (
            "error: the retriever gave no results")
        assert json.loads((runs / "d/checkpoint/manifest.json").read_text())["step"] == 2
        run("--run d --resume")
        assert metrics(runs / "d") == metrics(runs / "c") == metrics(runs / "b")


    @pytest.mark.parametrize("call, step", [(1, 0), (2, 2), (3, 2)])  # before, at step 2, at last
    def test_a_server_that_goes_in_a_validation_costs_no_step(self, runs, monkeypatch, call, step):
        real, calls = trainer.validate, []

        def validate(*given):
            calls.append(given)
            if len(calls) == call:
                raise ServerGone("the server is gone")
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(trainer, "validate", validate)
            assert message("--run", "a", "--steps", "2", *BRIEF) == "error: the server is gone"
        assert json.loads((runs / "a/checkpoint/manifest.json").read_text())["step"] == step
        run("--run a --resume")
        run("--run b --steps 2", *BRIEF)
        ours, theirs = metrics(runs / "a"), metrics(runs / "b")
        missing = [{*other} - {*line} for line, other in zip(ours, theirs, strict=True)]
        assert all(line.items() <= other.items() for line, other in zip(ours, theirs))
        assert [any(names) for names in missing] == [False, False, call == 2, False]


class TestOptimizerSteps:
    def test_the_mini_batches_of_an_epoch_are_as_equal_as_can_be_and_hold_every_row_once(self):
        rows = make_batch([episode(tokens=(1,), rewards=(0.0,))] * 208)  # 13 groups of 16
        rows.loss_mask, rows.returns = rows.response_mask, torch.arange(208)
        parts = list(trainer.optimizer_steps(rows, parsed("--epochs", "2"), 1))
        assert [len(part) for part in parts] == [52] * 8  # not 64, 64, 64 and 16
        for epoch in (parts[:4], parts[4:]):
            assert sorted(torch.cat([part.returns for part in epoch]).tolist()) == [*range(208)]
        assert not parts[0].returns.equal(parts[4].returns)


class TestResume:
    def test_steps_added_to_a_run_keep_the_last_learning_rate(self, runs, monkeypatch):
        rates, real = [], trainer.AdamW.set_lr
        monkeypatch.setattr(trainer.AdamW, "set_lr", lambda self, lr: (
            rates.append(lr), real(self, lr)))
        run("--run a --steps 3 --lr 0.01 --lr-final 0.1 --filter none", *BRIEF)
        run("--run a --resume --steps 5")
        run("--run a --resume --steps 6")
        # The first run may have made its warm-up, which sets rates of its own.
        assert rates[-6:] == pytest.approx([0.01, 0.0055, 0.001, 0.001, 0.001, 0.001])

    def test_a_killed_run_goes_on_bit_for_bit_with_everything_that_adapts(self, runs, monkeypatch):
        options = shlex.split(
            "--env frozenlake --num-groups 3 --group-size 3 --steps 3 --val-size 1 --save-every 1 "
            "--algo ppo --kl-coef 0.01 --kl-reward-coef 0.1 --kl-target 0.001 --kl-horizon 50 "
            "--diagnose-every 1 --diagnose-samples 4 --context limited --window 2 --lr-final 0.1 "
            "--filter-value 1 --resample 1")
        run("--run straight", *options)
        real, killed = trainer.roll_out, mock.Mock(side_effect=KeyboardInterrupt)
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "roll_out", lambda learner, *arguments: (
                killed if learner.step == 1 else real)(learner, *arguments))  # in step 2
            interrupted("--run stopped", *options)
        with open(runs / "stopped" / "metrics.jsonl", "a") as file:
            file.write('{"step": 2, "success": 1.0}\n{"step": 3, "succ')
        run("--run stopped --resume")
        one, two = metrics(runs / "straight"), metrics(runs / "stopped")
        assert [line["step"] for line in one] == [line["step"] for line in two] == [0, 1, 2, 3, 3]
        assert not {name for a, b in zip(one, two) for name in a | b if a.get(name) != b.get(name)}
        assert len({line["kl_reward_coef"] for line in one if "kl_reward_coef" in line}) == 3
        played, weights, state = ([(runs / name / file).read_bytes() for name in (
            "straight", "stopped")] for file in (
            "trajectories.jsonl", "checkpoint/model.safetensors", "checkpoint/trainer.pt"))
        stored = [json.dumps(torch.load(io.BytesIO(x), weights_only=True), sort_keys=True,
                             default=lambda t: t.tolist()) for x in state]
        same = [one == other for one, other in (played, weights, stored)]
        assert same == [True, True, True] and '"first_turn/marginal_std"' in stored[0]

    def test_only_steps_and_a_larger_context_may_change(self, begun, runs):
        for argv, said in ((["--lr", "0.5"], "lr was 0.0003, got 0.5"),
                           (["--temperature", "0.5"], "temperature was 1.0, got 0.5"),
                           (["--max-context", "200"], "cannot reduce max_context: it was 256"),
                           (["--steps", "1"], "cannot reduce steps: it was 2")):
            assert said in message("--run", "a", "--resume", *argv)
        run("--run a --resume --steps 3 --max-context 300 --seed 0")
        assert [line["step"] for line in metrics(begun)] == [0, 1, 2, 3, 3]
        assert read_config(begun).max_context == 300

    def test_a_damaged_checkpoint_is_refused_by_name(self, begun):
        for file in ("model.safetensors", "trainer.pt", "tokenizer.json", "manifest.json"):
            path = begun / "checkpoint" / file
            data = path.read_bytes()
            flipped = bytearray(data)
            flipped[len(data) // 2] ^= 1
            for broken in (data[:len(data) // 2], bytes(flipped), None):
                path.unlink() if broken is None else path.write_bytes(broken)
                said = message("--run", "a", "--resume", "--steps", "3")
                assert "damaged" in said or (file == "manifest.json" and "no checkpoint" in said)
            path.write_bytes(data)
        assert find_checkpoint(begun) == begun / "checkpoint"

    def test_pickled_trainer_state_runs_nothing(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return Path.touch, (tmp_path / "it ran",)

        torch.save({"step": Evil()}, tmp_path / "trainer.pt")
        learner = SimpleNamespace(policy=SimpleNamespace(device="cpu"))
        with pytest.raises(pickle.UnpicklingError):
            load_trainer_state(tmp_path, learner)
        assert not (tmp_path / "it ran").exists()

    def test_a_manifest_of_another_form_is_refused(self, runs):
        (runs / "a" / "checkpoint").mkdir(parents=True)
        for text in ("[]", "null", '{"files": []}', '{"files": {"a": 1}}', "{}"):
            (runs / "a" / "checkpoint" / "manifest.json").write_text(text)
            with pytest.raises(ValueError, match="is damaged"):
                find_checkpoint(runs / "a")

    def test_a_kill_during_a_save_leaves_a_whole_checkpoint(self, begun, monkeypatch):
        (begun / "checkpoint").rename(begun / "checkpoint.new")  # between its two renames
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", mock.Mock(side_effect=KeyboardInterrupt))
            interrupted("--run a --resume --steps 3")  # and the next
        run("--run a --resume")
        assert metrics(begun)[-1]["step"] == 3 and (begun / "checkpoint").exists()
        assert {p.name for p in begun.glob("checkpoint*")} == {
            "checkpoint", "checkpoint.old", "checkpoint.best"}

    def test_instead_of_a_damaged_checkpoint_the_one_before_is_taken_and_that_is_said(
            self, begun, runs, capsys):
        shutil.copytree(begun, runs / "b")
        for name in "ab":
            run(f"--run {name} --resume --steps 3")
        (begun / "checkpoint" / "trainer.pt").write_bytes(b"")
        capsys.readouterr()
        run("--run a --resume --steps 4")
        printed = capsys.readouterr().out
        assert "trainer.pt has changed: going on from checkpoint.old" in printed
        assert "resumed   after step 2" in printed
        run("--run b --resume --steps 4")
        one, two = ((metrics(folder)[-1], (folder / "checkpoint/model.safetensors").read_bytes())
                    for folder in (begun, runs / "b"))
        assert one == two

    def test_a_run_is_trained_by_one_process_at_a_time(self, begun):
        with locked(begun):
            assert f"run 'a' is being trained by process {os.getpid()}" in message(
                "--run", "a", "--resume", "--steps", "3")
        run("--run a --resume --steps 3")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_asked_to_stop_it_finishes_the_step_saves_and_says_how_to_go_on(
            self, begun, runs, monkeypatch, capsys, number):
        run("--run b --steps 5", *BRIEF)
        real, handler = trainer.roll_out, signal.getsignal(number)
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "roll_out", lambda *given: (
                os.kill(os.getpid(), number) or real(*given)))
            with pytest.raises(SystemExit) as stop:
                run("--run a --resume --steps 5")
        printed = capsys.readouterr().out
        assert stop.value.code == 130
        assert "stopped   after step 3; go on with: make resume RUN=a" in printed
        run("--run a --resume")
        assert metrics(begun) == metrics(runs / "b")
        assert signal.getsignal(number) == handler

    def test_a_second_request_stops_it_at_once(self, begun, monkeypatch):
        monkeypatch.setattr(trainer, "roll_out", lambda *_: [
            os.kill(os.getpid(), signal.SIGTERM) or time.sleep(1.1) for _ in "ab"])
        interrupted("--run a --resume --steps 5")

    def test_other_versions_of_the_packages_are_named(self, begun, capsys):
        path = begun / "checkpoint" / "manifest.json"
        path.write_text(path.read_text().replace(torch.__version__, "1.0"))
        run("--run a --resume --steps 3")
        assert f"torch was 1.0, is {torch.__version__}" in capsys.readouterr().out

    def test_a_run_may_begin_with_the_weights_of_another_and_keeps_nothing_else_of_it(
            self, begun, runs):
        run("--run b --steps 1 --lr 0 --init-from a", *BRIEF)
        one, two = ((folder / "checkpoint" / "model.safetensors").read_bytes()
                    for folder in (begun, runs / "b"))
        assert one == two and [line["step"] for line in metrics(runs / "b")] == [0, 1, 1]
        assert "unknown run 'c'" in message("--env", "bandit", "--init-from", "c")

    def test_the_checkpoint_of_the_best_validation_is_kept(self, begun, monkeypatch):
        successes = iter([0.5, math.nan, 2 / 3, 2 / 3])
        monkeypatch.setattr(trainer, "validate", lambda _, groups, *__: {
            f"{groups.split}/success": next(successes, 0.0)})
        run("--run b --steps 3", *BRIEF, "--val-every", "1")
        kept = begun.parent / "b" / "checkpoint.best"
        assert json.loads((kept / "manifest.json").read_text())["step"] == 2
        assert not damage(kept)


class TestLearning:
    def test_bandit_learns_the_better_arm_of_known_pairs_in_the_order_not_trained_on(self, runs):
        """The whole algorithm at work: from noisy demonstrations to the better arm."""
        run("--env bandit --run learns --steps 12 --val-every 12 --val-size 64 --diagnose-every 0")
        before, *_, after, _ = (line.get("val/success") for line in metrics(runs / "learns"))
        assert before < 0.75 and after > 0.85


class TestMetrics:
    def documented(self):
        """The keys in the first columns of docs/metrics.md, SAMPLER and BUCKET filled in."""
        page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
        cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
        keys = {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}
        for word, names in (("SAMPLER", ("first_turn", "trajectory")),
                            ("BUCKET", ("all", "bucket_1", "bucket_2"))):
            keys = {key.replace(word, name) for key in keys for name in names}
        return keys

    def pattern(self, key):
        """The key as the page writes it."""
        for found, written in ((r"(val|test)/(bandit|frozenlake)/", "SPLIT/ENV/"),
                               (r"(val|test)/", "SPLIT/"),
                               (r"(bandit|frozenlake)/.*", "ENV/METRIC"),
                               (r"gradient/bucket_(?!1/)\d+/", "gradient/bucket_2/")):
            key = re.sub(f"^{found}", written, key)
        return key

    def test_the_documented_keys_are_the_logged_ones(self, runs):
        small = "--group-size 2 --val-size 2 --steps 1"
        run(f"--env frozenlake --run c --num-groups 16 {small}")
        small += " --num-groups 2 --max-turns 1 --warmup-steps 0 --diagnose-every 0"
        run(f"--env frozenlake --run a {small} --algo ppo --kl-coef 0.1 --kl-reward-coef 0.1 "
            "--overlong 0.5 --gradients-every 1 --response-format grounding_worldmodeling "
            "--filter none")
        run(f"--env bandit,frozenlake --run b {small} --resample 1 --filter-value 1")
        logged = {key for name in "abc" for line in metrics(runs / name) for key in line} | TIMES
        for name in REGISTRY:  # what single environments report
            source = inspect.getsource(inspect.getmodule(type(make(name))))
            for found in re.findall(r"metrics=\{(.*?)\}", source, re.DOTALL):
                logged |= set(re.findall(r'"(\w+)":', found))
        env, over = make("webshop"), False  # and what webshop reports of a purchase
        env.reset(seed=1)
        while not over:
            *_, over, _, info = env.step(env.solve()[0])
        logged |= info.keys()
        seen = {self.pattern(key) for key in logged}
        assert {key.partition("/")[2] for key in logged if key.startswith("bandit/")} <= logged
        assert seen == self.documented()


class TestReproduce:
    def test_it_repeats_a_run_or_says_where_it_first_differs(self, begun, capsys):
        def reproduced():
            with pytest.raises(SystemExit) as end:
                reproduce.main(["a"])
            shutil.rmtree(begun.parent / "a-again")
            return end.value.code, capsys.readouterr().out.splitlines()[-1]

        assert reproduced() == (0, "a is reproduced: its 4 lines are equal but for times")
        path = begun / "metrics.jsonl"
        lines = read_lines(path)
        changed = [*lines[:2], lines[2] | {"entropy": 9.0}, lines[3] | {"test/success": 9.0}]
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        assert reproduced() == (1, f"line 3 (step 2) differs in entropy: 9.0, now "
                                   f"{lines[2]['entropy']}")
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[-1]]))
        assert reproduced() == (1, "line 5 is missing in the new run")
        with pytest.raises(SystemExit, match="error: unknown run 'b'"):
            reproduce.main(["b"])
