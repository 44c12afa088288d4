"""The loop around the step: what is measured, what is kept on disk, and how a run goes on."""

import copy
import dataclasses
import inspect
import math
import re
import shlex
import shutil
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import message, parsed
from toys import tiny
from training import BRIEF, metrics, read_lines, run

from minragen import cache
from minragen import train as trainer
from minragen.environments import layers
from minragen.envs import REGISTRY, Observation, make
from minragen.fast import llama, prefix_tree
from minragen.look import diagnostics
from minragen.more.described import DescribedTurn
from minragen.rollout import Rules, collect
from minragen.run import bundled, start
from minragen.run.groups import RUN_METRICS, PatientGroups
from minragen.run.load import load_policy
from minragen.run.log import TIMES, Log, keep_advantages, texts_of
from minragen.run.runs import run_folder
from minragen.support.metrics import episode_metrics, waiting_metrics
from minragen.train import QUIET
from minragen.trajectory import StopReason, Trajectory, make_batch

pytestmark = pytest.mark.usefixtures("runs")

# Every field of `Rules` but the temperature differs from its default.
RULES = shlex.split("--response-format grounding_worldmodeling --description-reward 0.5 --seed 5 "
                    "--top-k 3 --top-p 0.9 --max-rows 7 --window 2 "
                    "--max-new-tokens 9 --max-context 300 --context limited --token-budget 99")


def build(*argv):
    """Config, Learner and training groups."""
    config = parsed(*argv)
    groups = start.build_groups(config)
    return config, start.build_learner(config, groups, say=lambda line: None), groups["train"]


def played(*argv):
    """Config, Learner and the batch of its first rollout."""
    config, learner, groups = build(*argv)
    return config, learner, make_batch(trainer.roll_out(learner, groups, config))


def updated(config, learner, batch, *models):
    """Metrics of the batch's first update, and the names of the weights that it moved by model."""
    before = [copy.deepcopy(model.state_dict()) for model in models]
    batch, _ = trainer.compute_targets(learner, batch, config)
    metrics = trainer.update(learner, batch, config, 1)
    return metrics, [{name for name, x in model.state_dict().items()
                      if not torch.equal(x, old[name])} for model, old in zip(models, before)]


def episode(env="lake", rewards=(0.0, 1.0), tokens=(2, 3), stop=StopReason.TERMINATED, **metrics):
    """A trajectory written by hand: turns of so many sampled tokens after one of a prompt each."""
    trajectory = Trajectory(env, 1, 0, 0, turn_rewards=rewards, stop=stop,
                            turns=[SimpleNamespace(observation=Observation("")) for _ in rewards],
                            success=rewards[-1] == 1, metrics=metrics)
    for k, count in enumerate(tokens):
        trajectory.add_prompt([9])
        trajectory.add_reply([1] * count, [-0.5] * count, k)
    return trajectory


EPISODES = [episode(valid=0.5, f1=0.25),
            episode(rewards=(-0.1,), tokens=(4,), valid=0.0, f1=0.75, stop=StopReason.CONTEXT),
            dataclasses.replace(episode("shop", rewards=(0.5,), tokens=(1,), valid=1.0),
                                stop=StopReason.ENV_ERROR, error="OSError: gone")]


class TestLoop:
    """That a request to stop saves, and leaves a validation to the resumed run: test_runs.py."""

    @pytest.mark.parametrize("options, given, expected", [
        ("--steps 5 --val-every 2 --save-every 9", {},  # the first is the best, all are equal
         "v0 w0 w1 v2 w2 b2 w3 v4 w4 v5 w5 s5 t5 w5"),
        ("--steps 5 --val-every 2 --save-every 3", dict(successes={2: math.nan, 4: 0.5, 5: 0.5}),
         "v0 w0 w1 v2 w2 w3 s3 v4 w4 b4 v5 w5 s5 t5 w5"),
        ("--steps 9 --val-every 9 --save-every 9", {},  # RAGEN's early stop
         "v0 w0 w1 w2 w3 w4 w5 w6 v7 w7 b7 stopped: bor t7 w7"),
        ("--steps 9 --val-every 9 --save-every 9", dict(empty=5),
         "v0 w0 v1 w1 b1 stopped: in  t1 w1"),
        ("--steps 9 --val-every 1 --save-every 1", dict(skipped=5), "v0 w0 w1 Float"),
        ("--steps 9 --val-every 2 --save-every 9", dict(gone=2), "v0 w0 w1 v2 w2 Conne")])
    def test_it_validates_saves_and_ends_as_its_lines_say(
            self, monkeypatch, options, given, expected):
        """Validations are "v" and their step, "w" written lines, "s" checkpoints, "b" the best."""
        calls, config = [], parsed("--env", "bandit", *shlex.split(options))
        callbacks = SimpleNamespace(
            say=lambda line: calls.append(line[:12]), episodes=lambda *_: None,
            write=lambda line: calls.append(f"w{line['step']}"), stop_requested=lambda: False,
            save=lambda learner, best: calls.append(f"{'b' if best else 's'}{learner.step}"),
            early_stop=lambda line: "bored." if line["step"] == 7 else "")

        def step(learner, *_):
            learner.step += 1
            learner.skipped, learner.empty_steps = given.get("skipped", 0), given.get("empty", 0)
            return {"step": learner.step}, []

        def validate(learner, split, *_):
            calls.append(f"{split[0]}{learner.step}")
            if learner.step == given.get("gone"):
                raise ConnectionError
            return {f"{split}/success": given.get("successes", {}).get(learner.step, 0.0)}

        monkeypatch.setattr(trainer, "train_step", step)
        monkeypatch.setattr(trainer, "validate", validate)
        try:
            trainer.train(trainer.Learner(*tiny(), None),
                          {s: s for s in ("train", "val", "test")}, config, callbacks)
        except (FloatingPointError, ConnectionError) as error:
            calls.append(type(error).__name__[:5])
        assert " ".join(calls) == expected


class TestDescribe:
    def test_a_clock_that_stands_still_divides_nothing_by_zero(self):
        t = episode()
        t.turns = [SimpleNamespace(times=(5.0, 5.0, 5.0))]
        assert waiting_metrics([t]) == {"rollout_idle": 0.0, "waited": 0.0}

    def test_means_are_over_episodes_and_a_mixture_also_gets_them_per_environment(self):
        lake = {"success": 0.5, "episode_return": pytest.approx(0.45), "turns": 1.5,
                "response_tokens": 4.5, "context_full": 0.5, "env_errors": 0, "valid": 0.25,
                "f1": 0.5, "pass@G": 1.0}
        shop = {"success": 0.0, "episode_return": 0.5, "turns": 1.0, "response_tokens": 1.0,
                "context_full": 0.0, "env_errors": 0, "valid": 1.0, "pass@G": 0.0}
        bought = dataclasses.replace(EPISODES[2], stop=StopReason.TRUNCATED, error="")
        assert episode_metrics(EPISODES[:2]) == lake
        assert episode_metrics([*EPISODES[:2], bought]) == {
            "success": pytest.approx(1 / 3), "episode_return": pytest.approx(1.4 / 3),
            "turns": pytest.approx(4 / 3), "response_tokens": pytest.approx(10 / 3),
            "context_full": pytest.approx(1 / 3), "env_errors": 0, "valid": 0.5,  # f1: not of all
            "pass@G": 1.0,  # all three have the same group_id
            **{f"lake/{name}": value for name, value in lake.items()},
            **{f"shop/{name}": value for name, value in shop.items()}}

    def test_episodes_whose_environment_failed_are_counted_and_in_no_other_number(self):
        lake = episode_metrics(EPISODES[:2])
        assert episode_metrics(EPISODES) == {
            **lake, "env_errors": 1, **{f"lake/{name}": value for name, value in lake.items()},
            "shop/env_errors": 1}
        assert episode_metrics(EPISODES[2:]) == {"env_errors": 1}


class Calls(list):
    """A `collect` that keeps the arguments of its calls and returns the first two episodes."""

    def __call__(self, *arguments):
        self.append(inspect.signature(collect).bind(*arguments).arguments)
        return copy.deepcopy(EPISODES[:2])


class TestValidation:
    def test_it_plays_its_splits_first_instances_with_the_noise_of_seed_0_and_no_state_reward(self):
        """It reports success, return and form."""
        config, logged = parsed(*RULES, "--val-size", "3", "--val-temperature", "0.3"), []
        groups = start.build_groups(config)["test"]
        assert (groups.split, groups.num_groups, groups.group_size) == ("test", 3, 1)
        assert groups.turn == DescribedTurn(("observation", "reasoning", "prediction", "answer"),
                                             turn=PatientGroups.turn)
        log = SimpleNamespace(progress=QUIET.progress, episodes=lambda *entry: logged.append(entry))
        learner = trainer.Learner(*tiny(), None, step=7, collect=Calls())
        assert trainer.validate(learner, groups, config, log) == {
            "test/success": 0.5, "test/episode_return": pytest.approx(0.45), "test/valid": 0.25,
            "test/env_errors": 0}
        (call,) = learner.collect
        assert call["rules"] == Rules(0.3, 0, 1.0, 9, 300, 7, 1.0, 99)
        assert call["groups"] is groups and call["first_seed"] == 0
        assert [(step, split, len(played)) for step, split, played in logged] == [(7, "test", 2)]


class TestRollOut:
    def test_training_scores_descriptions_and_plays_as_the_settings_say(self):
        config, calls = parsed(*RULES), Calls()
        groups = start.build_groups(config)["train"]
        frame = start.frame_of(config, tiny()[0])
        trainer.roll_out(trainer.Learner(tiny()[0], frame, None, collect=calls), groups, config)
        turn = DescribedTurn(frame.parts, 0.5, PatientGroups.turn)
        assert calls[0]["groups"] is groups and groups.turn == turn
        assert calls[0]["rules"] == Rules(1.0, 3, 0.9, 9, 300, 7, 1.0, 99, 5)
        assert (frame.context, frame.window) == ("limited", 2)

    def test_dynamic_sampling_asks_for_more_groups_until_enough_have_std(self):
        rounds = iter(2 * [[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 2.0, 2.0]])  # two groups of two
        seeds = []

        def play(policy, frame, groups, first_seed, *rest):
            seeds.append(first_seed - trainer.TRAIN_SEED)
            return [dataclasses.replace(episode(rewards=(reward,), tokens=(1,)), group_id=i // 2)
                    for i, reward in enumerate(next(rounds))]

        config = parsed("--algo", "dapo", "--num-groups", "2", "--group-size", "2")
        learner = trainer.Learner(*tiny(), None, collect=play)
        for _ in range(2):
            trajectories = trainer.roll_out(learner, None, config)
            assert [t.group_id for t in trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert seeds == [0, 2, 4, 6]


class TestLearner:
    def test_it_is_built_as_the_options_and_the_model_say(self, monkeypatch):
        def load(*given, **named):
            policy = load_policy(*given, **named)
            policy.model.generation_config.eos_token_id = [3, 4]
            return policy

        monkeypatch.delenv("OMP_NUM_THREADS")
        lengths, threads, warmed, real = [], [], [], bundled.resolve
        monkeypatch.setattr(start, "load_policy", load)
        monkeypatch.setattr(start, "prove", lambda policy, length: lengths.append(length))
        monkeypatch.setattr(torch, "set_num_threads", threads.append)
        monkeypatch.setattr(bundled, "resolve", lambda *given: (
            warmed.append(given[2:5]), real(*given))[1])
        _, learner, _ = build(*BRIEF, *shlex.split(
            "--algo ppo --max-context 345 --response-format no_think "
            "--max-new-tokens 17 --warmup-steps 0 --activation-checkpointing true"))
        assert {3, 4} < learner.frame.end_ids
        assert (lengths, threads, warmed) == ([345], [1], [("no_think", 17, 0)])
        assert all(layer.gradient_checkpointing for trunk in (
            learner.policy.model.base_model, learner.critic.trunk) for layer in trunk.layers)

    def test_old_logprobs_are_the_samplers_only_if_exact(self):
        """In bfloat16 they are computed again."""
        config, learner, batch = played(*BRIEF, "--temperature", "0.7")
        batch, _ = trainer.compute_targets(learner, batch, config)
        assert batch.old_logprobs is batch.sample_logprobs
        learner.policy.model.to(torch.bfloat16)
        batch, _ = trainer.compute_targets(learner, batch, config)
        again, _ = learner.policy.logprobs(batch.tokens, batch.response_mask, 0.7)
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
        trainer.update(learner, bad, config, 3)
        with pytest.raises(FloatingPointError, match="6 updates in a row had a gradient that is"):
            trainer.nothing_to_learn(learner, config)
        assert all(torch.equal(before[k], v) for k, v in learner.policy.model.state_dict().items())
        assert trainer.update(learner, good, config, 3)["updates_skipped"] == learner.skipped == 0


class TestPlain:
    """With `--plain true` nothing that is only faster runs, and all else is the same."""

    # In float64: the rounding of float32 would now and then choose another token, by processor.
    # Adam divides a gradient by its size, and rounding would decide where a weight moves whose
    # gradient is almost 0: by up to lr. With a large eps it moves by less.
    STEPS = shlex.split("--num-groups 1 --group-size 3 --mini-batch 2 --val-size 1 --filter none "
                        "--diagnose-every 0 --max-rows 2 --lr 1e-5 --plain")

    def three_steps(self, env, plain):
        """Which functions run, the trajectories of three steps, and the weights after them."""
        config, learner, groups = build("--env", env, *self.STEPS, plain)
        learner.optimizer = trainer.AdamW(learner.policy.model.double().parameters(), config.lr)
        learner.optimizer.inner.param_groups[0]["eps"] = 1e-4
        if learner.reference:
            learner.reference.model.double()
        steps = [trainer.train_step(learner, groups, config) for _ in range(3)]
        assert all(metrics["grad_norm"] for metrics, _ in steps)
        policy = learner.policy
        return ((policy.last_hidden, policy.hidden_before, policy.micro_batches, learner.collect,
                 groups.threads), [t for _, played in steps for t in played],
                policy.model.state_dict())

    @pytest.mark.parametrize("env", REGISTRY)
    def test_three_steps_have_the_same_tokens_and_up_to_rounding_the_same_weights(
            self, env, monkeypatch):
        folder, real = [], bundled.resolve  # one for both
        monkeypatch.setattr(bundled, "resolve", lambda *given: (
            folder or folder.append(real(*given)), folder[0])[1])
        functions, played, weights = self.three_steps(env, "false")
        plain_functions, plain, plain_weights = self.three_steps(env, "true")
        assert functions == (llama.last_hidden, prefix_tree.hidden_before,
                             prefix_tree.micro_batches, start.collect, True)
        assert plain_functions == (cache.last_hidden, cache.hidden_before, cache.micro_batches,
                                   collect, False)
        for one, other in zip(played, plain, strict=True):
            assert one.messages() == other.messages() and one.turn_rewards == other.turn_rewards
            for ours, theirs in zip(one.sequences, other.sequences, strict=True):
                assert (ours.tokens, ours.turn_ids) == (theirs.tokens, theirs.turn_ids)
                assert ours.sample_logprobs == pytest.approx(theirs.sample_logprobs, abs=1e-5)
        for name, weight in weights.items():
            assert torch.allclose(weight, plain_weights[name], rtol=0, atol=1e-6), name


class TestRuns:
    def test_a_run_leaves_config_metrics_trajectories_a_checkpoint_and_a_report(self, drawn, runs):
        run("--run a --steps 2", *BRIEF)
        finished = runs / "a"
        assert {p.name for p in finished.iterdir()} == {
            "config.json", "metrics.jsonl", "trajectories.jsonl", "checkpoint", "checkpoint.best",
            "lock", "report.html"}
        lines = metrics(finished)
        assert [line["step"] for line in lines] == [0, 1, 2, 2]
        assert {"val/success"} <= lines[0].keys() & lines[2].keys() - lines[1].keys()
        assert "test/success" in lines[-1]
        assert all(isinstance(v, (int, float)) for line in lines for name, v in line.items()
                   if name != "regime")
        entries = read_lines(finished / "trajectories.jsonl")
        assert [m["role"] for m in entries[0]["messages"]] == ["system", "user", "assistant"]
        assert Counter((e["step"], e["split"]) for e in entries) == {
            (0, "val"): 4, (1, "train"): 4, (2, "val"): 4, (2, "train"): 4, (2, "test"): 4}

    def test_training_shows_members_of_a_trained_group_with_the_tokens_of_their_replies(self, runs):
        config, learner, groups = build(*BRIEF, "--filter", "none")
        learner.rounds = 1  # in whose groups rewards differ
        trajectories = trainer.roll_out(learner, groups, config)
        batch = make_batch(trajectories)
        rows = (batch.group_ids == 1).nonzero()[:, 0]  # group 0 is not trained on
        batch, _ = trainer.compute_targets(learner, batch.take(rows), config)
        keep_advantages(trajectories, rows, batch)
        Log(runs / "a", config, learner).episodes(1, "train", trajectories)
        entries = read_lines(runs / "a" / "trajectories.jsonl")
        ranked = sorted(trajectories[4:8], key=lambda t: -t.episode_return)
        assert [(e["group"], e["member"]) for e in entries] == [(1, t.member) for t in ranked]
        advantages = [reply["advantages"] for e in entries for reply in e["replies"]]
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
                                  ("return", "episode_return", ".3f"),
                                  ("val", "val/success", ".3f"), ("ent", "entropy", ".3f"),
                                  ("grad", "grad_norm", ".3f"), ("kept", "groups_kept", "2d")):
            assert f"{label} {line[name]:{form}}" in step
        assert re.search(r"  gap \S+  +\d+ tok/s  \d+\.\d\d s  val ", step)

    def test_warnings_are_told_and_diagnoses_compared_to_the_first(self, runs, capsys, monkeypatch):
        """Diagnoses have their own rows, moving averages go on, no collapse ends a run unasked."""
        compared, history, diagnosed, real = [], [], [], diagnostics.collapse_metrics
        monkeypatch.setattr(diagnostics, "collapse_metrics", lambda *given, **named: (
            diagnosed.append((*given, named)), real(*given, **named))[1])
        monkeypatch.setattr(diagnostics, "regime", lambda *pair: compared.append(pair) or "here")
        monkeypatch.setattr(diagnostics, "warnings_of", lambda lines: (
            history.append([line["step"] for line in lines]) or ["take care"] * (len(lines) == 3)))
        monkeypatch.setattr(diagnostics, "early_stop", lambda lines: "it collapsed.")
        run("--run a --steps 4 --diagnose-every 2 --token-budget 999 "
            "--temperature 0.9 --seed 5", *BRIEF)
        assert [(given[3], given[4]["temperature"], given[4]["token_budget"])
                for given in diagnosed] == [
            (zlib.crc32(f"(5, {step})".encode()), 0.9, 999) for step in (1, 2, 4)]
        assert all(given[2] is diagnosed[0][2] for given in diagnosed)
        assert history == [[0], *([*range(k)] for k in (2, 3, 4, 5)), [0, 1, 2, 3, 4, 4]]
        assert capsys.readouterr().out.count("warning   take care\n") == 1
        lines = metrics(runs / "a")
        first = [pair[0].get("first_turn/mi") for pair in compared]
        assert first == [pytest.approx(lines[1]["first_turn/mi"], abs=1e-5)] * 3
        assert [line.get("regime") for line in lines] == [None, "here", "here", None, "here", None]
        assert ["first_turn/mi" in line for line in lines] == [False, True, True, False, True,
                                                              False]

    def test_a_run_whose_filter_stays_empty_stops_for_good_and_says_why(self, runs, capsys):
        run("--env toys:Lottery --run a --steps 9 --num-groups 2 --group-size 4 --val-size 1 "
            "--warmup-steps 0 --env-arg prize=0.0 --max-turns 1 --reward success")
        printed = capsys.readouterr().out
        assert "the filter (top_p) kept no group" in printed
        assert printed.count("kept  0/2, no update  ") == 5
        before = metrics(runs / "a")
        assert [line["step"] for line in before] == [0, 1, 2, 3, 4, 5, 5]
        run("--run a --resume")
        assert metrics(runs / "a") == before

    def test_an_existing_run_is_not_overwritten_and_each_without_a_name_is_new(self, runs, begun):
        before = (begun / "metrics.jsonl").read_text()
        said = message("--run", "a", *BRIEF)
        assert ("run 'a' exists already. Choose another name, or continue it with --run a "
                "--resume (make resume RUN=a).") in said
        assert (begun / "metrics.jsonl").read_text() == before
        shutil.copytree(begun, runs / "bandit-grpo-tiny-s0")
        assert run_folder(parsed(*BRIEF), False).name == "bandit-grpo-tiny-s0-2"

    def test_failed_episodes_are_counted_told_and_written_and_stop_no_run(
            self, runs, capsys, monkeypatch):
        """What is trained on: test_step.py."""
        diagnosed = []
        monkeypatch.setattr(diagnostics, "diagnose", lambda learner, config, step, played, lines: (
            diagnosed.extend(played)) or {})
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
        assert len(diagnosed) == 32 - one["env_errors"] - two["env_errors"]
        assert not any(t.error for t in diagnosed)
        assert (f"env error {one['env_errors']} train episodes failed in their environment and are "
                "left out: OSError: the server is gone") in capsys.readouterr().out

    def test_a_run_whose_environments_all_fail_says_what_they_raised_and_stops(self, runs, capsys):
        run("--env toys:Gone --run a --steps 9 --val-size 2 --warmup-steps 0 --num-groups 2 "
            "--group-size 2 --max-context 200 --algo dapo")
        printed = capsys.readouterr().out
        assert "16 train episodes failed in their environment and are left out: Conn" in printed
        assert "or every environment failed" in printed
        lines = metrics(runs / "a")
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 5]
        assert lines[1:5] == [
            {"step": step, "env_errors": 16, "rollouts": 4} for step in (1, 2, 3, 4)]
        assert len(read_lines(runs / "a" / "trajectories.jsonl")) == 5 * 4 + 3 * 2


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
        for found, written in ((r"(val|test)/(bandit|frozenlake)/.*", "SPLIT/ENV/METRIC"),
                               (r"(val|test)/", "SPLIT/"),
                               (r"(bandit|frozenlake)/.*", "ENV/METRIC"),
                               (r"gradient/bucket_(?!1/)\d+/", "gradient/bucket_2/")):
            key = re.sub(f"^{found}", written, key)
        return key

    def test_the_documented_keys_are_the_logged_ones(self, runs):
        small = "--group-size 2 --val-size 2 --steps 1"
        run(f"--env frozenlake --run c --num-groups 16 --echo-coef 0.1 {small}")
        small += " --num-groups 2 --max-turns 1 --warmup-steps 0 --diagnose-every 0"
        run(f"--env frozenlake --run a {small} --algo ppo --kl-coef 0.1 --kl-reward-coef 0.1 "
            "--overlong 0.5 --gradients-every 1 --response-format grounding_worldmodeling "
            "--filter none")
        run(f"--env bandit,frozenlake --run b {small} --resample 1 --filter-value 1")
        logged = {key for name in "abc" for line in metrics(runs / name) for key in line}
        logged |= TIMES | {"first_turn/seconds", "trajectory/seconds"}
        ours = {key for key in logged if "/" not in key} - {"success", "valid", "effective"}
        assert ours | {"reply_tokens", "val", "test", "first_turn", "trajectory", "gradient"} == {
            *RUN_METRICS}
        # What single environments and the layers report.
        for module in (layers, *(inspect.getmodule(type(make(name))) for name in REGISTRY)):
            source = inspect.getsource(module)
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
