"""The findings: statistics against slow twins, verdicts, the runner end to end, the pages."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import parsed
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import findings.__main__ as runner
from findings import arms, page, policies, predictions, statistics, table
from findings.predictions import Prediction, beats
from findings.table import Control, Finding
from minragen import config as config_of
from minragen.environments.layers import wrapped
from minragen.envs import make
from minragen.run import bundled, start, tiny

NUMBERS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=4, max_size=30)


class TestStatistics:
    @pytest.mark.parametrize("differences", [(0.1, 0.3, 0.2, 0.5), (-1.0, 0.0, 0.0, 2.0, 7.0)])
    def test_the_bootstrap_is_that_of_all_resamples(self, differences):
        means = [np.mean(drawn) for drawn in
                 itertools.product(differences, repeat=len(differences))]
        assert statistics.bootstrap(differences) == pytest.approx(
            np.quantile(means, (0.025, 0.975)), abs=0.03 * np.ptp(differences))
        assert statistics.bootstrap(differences[:1]) == (differences[0], differences[0])

    @pytest.mark.parametrize(("differences", "verdict"), [
        ((0.2, 0.3, 0.25, 0.2, 0.3), "reproduced"),
        ((0.01, 0.02, 0.0, 0.01, 0.02), "not reproduced"),  # surely positive, and too small
        ((-0.2, -0.3, -0.25, -0.2, -0.3), "not reproduced"),
        ((0.5, -0.3, 0.2, 0.4, -0.1), "inconclusive"),
        ((0.3,), "inconclusive"), ((), "inconclusive")])
    def test_a_verdict_needs_an_interval_on_one_side(self, differences, verdict):
        assert statistics.verdict(differences, margin=0.1) == verdict

    def test_a_claim_holds_if_all_its_predictions_do(self):
        yes, no, unknown = "reproduced", "not reproduced", "inconclusive"
        assert statistics.overall([yes, yes]) == yes
        assert statistics.overall([yes, unknown, no]) == no
        assert statistics.overall([yes, unknown]) == unknown
        assert statistics.overall([unknown, "not testable", yes]) == "not testable"

    @settings(deadline=None)
    @given(NUMBERS, st.integers(1, 4))
    def test_windows_are_means_of_what_was_measured(self, values, width):
        curve = np.array([5.0, *(np.nan if v > 8 else v for v in values)])
        slow = []
        for k in range(1, len(curve) - width + 1):
            known = [v for v in curve[k:k + width] if not np.isnan(v)]
            slow.append(sum(known) / len(known) if known else np.nan)
        assert statistics.windows(curve, width) == pytest.approx(slow, abs=1e-9, nan_ok=True)

    def test_a_fall_is_from_the_best_window_to_the_last(self):
        curve = np.array([0.0] + [0.2] * 10 + [0.8] * 10 + [0.3] * 10)
        assert statistics.fall(curve) == pytest.approx(0.5)
        assert statistics.last(curve) == pytest.approx(0.3)

    @settings(deadline=None)
    @given(NUMBERS, st.sampled_from((1, -1)))
    def test_an_onset_splits_into_two_constants_with_the_least_error(self, values, sign):
        curve, errors = np.array([np.nan, *np.repeat(values, 5)]), {}
        for k in range(1, len(values)):
            before, after = np.array(values[:k]), np.array(values[k:])
            if sign * (after.mean() - before.mean()) > 0:
                errors[5 * k + 1] = before.var() * len(before) + after.var() * len(after)
        found, all_error = statistics.onset(curve, sign), np.var(values) * len(values)
        if found < len(curve):
            assert errors[found] == pytest.approx(min(errors.values()), abs=1e-6)
            assert errors[found] < all_error / 2 + 1e-6
        else:
            assert min(errors.values(), default=all_error) > all_error / 2 - 1e-6

    def test_an_onset_needs_a_clear_change_with_its_sign_and_four_measurements(self):
        curve = np.array([np.nan, *np.repeat([3, 3, 1, 1], 5)])
        curve[[2, 7, 12]] = np.nan  # not measured
        assert statistics.onset(curve, -1) == 11
        assert statistics.onset(curve, 1) == statistics.onset(curve, -1, 3) == len(curve)
        noise = np.random.default_rng(0).normal(size=(200, 101))
        assert np.mean([statistics.onset(curve, 1) < 101 for curve in noise]) < 0.05

    def test_a_spike_is_measured_against_what_was_before(self):
        solved = np.array([np.nan, *[1.0] * 30, *[0.001] * 30])  # falls to almost nothing
        assert statistics.worst_spike(solved) == pytest.approx(0)
        assert statistics.worst_spike(np.array([np.nan, *[1.0] * 30, 1000, *[1.0] * 9])) == 0
        assert statistics.worst_spike(np.array([np.nan, *[1.0] * 30, *[8.0] * 3, 1, 1])) == 3
        diverged = np.array([np.nan, *[1.0] * 30, 8, 8, np.nan])
        assert statistics.worst_spike(diverged) == 3


class TestPredictions:
    def test_growth_compares_the_buckets_that_have_a_signal(self):
        row = {f"gradient/bucket_{k}/{name}": np.array([np.nan, value * first, value])
               for k, values, first in (
                   (1, (0.0, 0.0, 5.0, 5.0), 1), (2, (0.1, 1.0, 2.0, 2.0), 1),
                   (3, (0.4, 8.0, 4.0, 4.0), 0.5))
               for name, value in zip(("reward_std", "task", "kl", "entropy"), values)}
        assert predictions.growth(row, "kl") == pytest.approx(3 - 1)  # 8 times, 2 times
        row["gradient/bucket_3/entropy"][1] = 8.0  # at step 1: 4 and 4 times
        assert predictions.growth(row, "entropy") == pytest.approx((0 + 3 - 1) / 2)

    def test_indicators_are_looked_at_from_where_success_was_best(self):
        steps = np.arange(61)
        row = {name: np.where(steps < when, 1.0, 0.0) for name, when in
               (("success", 45), ("reward_std", 40), ("valid", 99))}
        row["success"][1:11] = 0.5  # learnt first
        rising = {name: np.where(steps < 50, 0.0, 1.0) for name in ("entropy", "grad_norm")}
        flat = {name: np.ones(61) for name in ("first_turn/mi", "distinct_3")}
        found = predictions.onsets(row | rising | flat)
        assert (found["reward_std"], found["success"], found["entropy"]) == (41, 46, 51)
        assert found["valid"] == found["distinct_3"] == 61
        row["success"] = np.ones(61)
        assert np.isnan(predictions.onsets(row | rising | flat)["reward_std"])

    @settings(deadline=None)
    @given(st.lists(st.integers(-5, 5), min_size=3, max_size=20), st.randoms())
    def test_a_rank_correlation_is_that_of_the_mean_ranks(self, a, random):
        b = random.sample(range(100), len(a))  # no ties here, many in a
        order, ranks = sorted(a), [sorted(b).index(x) for x in b]
        mean_ranks = [np.mean([k for k, y in enumerate(order) if y == x]) for x in a]
        if len(set(a)) > 1:
            row = {"x": np.array(a, float), "success": np.array(b, float)}
            assert predictions.correlation("x", row) == pytest.approx(
                np.corrcoef(mean_ranks, ranks)[0, 1])

    def test_of_equal_windows_the_first_is_the_best(self):
        """Their means may differ in the last bit, since the order of the ten values differs."""
        for usual, other in itertools.product((0.1, 0.2, 0.3, 0.7), (0.4, 0.6, 0.8)):
            ten = [usual] * 9 + [other]
            success = np.array([np.nan, *ten, *[0.0] * 10, *reversed(ten)])
            assert predictions.best_window({"success": success}) == 0

    def test_template_collapse_needs_reasoning(self):
        mi = np.array([np.nan, *[2.0] * 10, *[1.0] * 10])
        assert predictions.mi_falls({"valid_thinking": np.ones(21), "first_turn/mi": mi}) == 1
        assert np.isnan(predictions.mi_falls({"valid_thinking": np.zeros(21), "first_turn/mi": mi}))

    def test_a_correlation_is_over_the_steps_that_measured_both(self):
        rows = [{"x": np.array([np.nan, 1.0, np.nan, 3.0]), "success": np.array([np.nan, 2, 9, 6])},
                {"x": np.array([5.0, 2.0, 4.0, np.nan]), "success": np.array([np.nan, 4, 8, 0])}]
        assert predictions.correlation("x", *rows) == pytest.approx(1)
        rows[0]["success"][3] = 1
        assert predictions.correlation("x", *rows) == pytest.approx(0.4)

    def test_a_collapse_is_deeper_or_comes_back_or_saves_time(self):
        def row(*success, **more):
            return {"success": np.array([np.nan, *np.repeat(success, 10)]), **more}

        fallen, flat = row(0.3, 0.9, 0.1), row(0.5, 0.5, 0.5)
        assert predictions.deeper("success", "a", "b").difference(fallen, flat) == pytest.approx(
            0.8)
        stays = predictions.stays_collapsed("a", "b", "c")
        assert stays.difference(fallen, row(0.5, 0.2), row(0.1, 0.3)) == pytest.approx(0.4 - 0.1)
        assert np.isnan(stays.difference(flat, flat, fallen))
        quick, slow = ({"seconds": np.array([np.nan, 9, s, s, s])} for s in (1.0, 4.0))
        assert predictions.saves_time("a", "b", 0.5).difference(quick, slow) == 0.75
        assert predictions.leads_by_more("ab", "cd").difference(
            row(0.3), row(0.1), row(0.9), row(0.9)) == pytest.approx(1)
        tested = predictions.tested_better("a", "b")
        assert tested.difference({"test/success": 0.7}, {"test/success": 0.5}) == pytest.approx(0.2)
        assert np.isnan(tested.difference({"test/success": None}, {"test/success": 0.5}))

    def test_shortening_is_of_tokens_per_turn(self):
        row = {"response_tokens": np.array([np.nan, *[40.0] * 10, *[10.0] * 10]),
               "turns": np.array([np.nan, *[2.0] * 10, *[1.0] * 10])}
        assert predictions.shortening(row) == pytest.approx(1)


class TestTable:
    def test_every_arm_is_a_config_that_can_be_run_and_belongs_to_a_finding(self):
        used = {arm for finding in table.FINDINGS.values() for arm in finding.arms}
        controls = {arm for control in table.CONTROLS for arm in control.prediction.arms}
        assert used | controls == set(arms.ARMS)
        for arm, options in arms.ARMS.items():
            config = parsed(*runner.command_of(runner.options_of(arm, 0)))
            assert vars(config).items() >= {
                k: v.format(seed=0) if isinstance(v, str) else v for k, v in options.items()
                if k != "env_arg"}.items()

    def test_predictions_compare_arms_of_their_finding(self):
        unjudged = {f"{task}-stale-1{end}" for task in arms.STALE for end in ("", "-tis")}
        unjudged |= {"pair-ppo", "pair-grpo"}
        for finding in table.FINDINGS.values():
            assert {arm for p in finding.predictions for arm in p.arms} == set(
                finding.arms) - unjudged


class TestRunner:
    """A miniature: two arms of a few steps, real runs."""

    @pytest.fixture
    def mini(self, tmp_path, monkeypatch):
        sizes = dict(env="bandit", warmup_steps=0, steps=12, num_groups=2, group_size=2, val_size=2,
                     diagnose_every=0, filter="none")
        mini_arms = {"slow": sizes | {"lr": 1e-5},
                     "fast": sizes | {"init_from": "findings-slow-s{seed}"}}
        for module in (arms, page, runner):
            monkeypatch.setattr(module, "ARMS", mini_arms)
        finding = Finding("mini", "Mini", "nobody", "Fast is better.", ("slow", "fast"),
                          (beats("fast", "slow"),), table.FINDINGS["echo-trap"].draw, (0, 1))
        controls = (Control("nothing", beats("slow", "fast"), 9.0, {"mini": ""}),)
        for module in (runner, page, table):
            monkeypatch.setattr(module, "FINDINGS", {"mini": finding})
        for module in (page, table):
            monkeypatch.setattr(module, "CONTROLS", controls)
        for name in ("STORED", "FOLDER"):
            monkeypatch.setattr(page, name, tmp_path)
        monkeypatch.setattr(page, "PAGE", tmp_path / "findings.md")
        (tmp_path / "findings.md").write_text("".join(
            f"<!-- begin {part} -->\n<!-- end {part} -->\n" for part in ("claims", "controls")))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("minragen.run.runs.RUNS", Path("runs"))
        monkeypatch.setenv("PYTHONPATH", str(Path(page.__file__).parent.parent))
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path / "cache"))
        return tmp_path

    def test_it_trains_judges_and_writes_and_repeats_nothing(self, mini, capsys, monkeypatch):
        runner.main(["mini", "--workers", "2"])
        printed = capsys.readouterr().out
        assert "4 of 4 runs to train, 2 at a time" in printed and "mini: " in printed
        stored = json.loads((mini / "findings-fast.json").read_text())
        assert [row["seed"] for row in stored["seeds"]] == [0, 1]
        assert len(stored["seeds"][0]["success"]) == 13
        assert (mini / "mini.png").stat().st_size > 5000
        overview = (mini / "findings.md").read_text()
        assert "[Mini](findings/mini.md)" in overview and "| 0 of 2 |" in overview
        assert "Fast is better." in (mini / "mini.md").read_text()
        runner.main(["mini"])
        assert "0 of 4 runs to train" in capsys.readouterr().out
        shutil.rmtree(mini / "runs")  # the stored numbers are enough, but not to begin with a run
        runner.main(["mini", "--plan"])
        assert "0 of 4 runs to train" in capsys.readouterr().out
        assert runner.missing([("fast", 7, None)]) == [("slow", 7, None), ("fast", 7, None)]
        runner.main(["mini", "--plan", "--again"])
        assert "4 of 4 runs to train" in capsys.readouterr().out
        runner.train_one("slow", 0)
        # A run that was interrupted goes on; one with other settings begins again.
        lines, path = runner.lines_of("findings-slow-s0"), mini / "runs" / "findings-slow-s0"
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
        assert not runner.ended("slow", 0)
        runner.train_one("slow", 0)
        assert runner.ended("slow", 0) and runner.lines_of(path.name)[:-1] == lines[:-1]
        monkeypatch.setitem(arms.ARMS, "slow", arms.ARMS["slow"] | {"lr": 1e-4})
        assert not runner.ended("slow", 0)
        runner.train_one("slow", 0)
        assert runner.ended("slow", 0)

    def test_a_run_that_fails_says_why_and_the_others_are_not_begun(self, mini, monkeypatch):
        monkeypatch.setitem(arms.ARMS, "slow", arms.ARMS["slow"] | {"max_context": 40})
        with pytest.raises(RuntimeError, match="max_context"):
            runner.train_all([("slow", seed) for seed in range(3)], 1)
        assert not list((mini / "runs").glob("findings-slow-s2"))


class TestPolicies:
    def test_a_broad_warm_up_resumes_and_is_what_an_arm_begins_with(self, tmp_path, monkeypatch):
        monkeypatch.setattr("minragen.run.runs.RUNS", tmp_path)
        monkeypatch.setattr(policies, "STEPS", 4)
        monkeypatch.setattr(policies, "SAVE_EVERY", 2)
        save, envs = policies.save, ("bandit", "metamathqa")

        def stop(*given):
            save(*given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(policies, "save", stop)
            policies.broad(envs, tmp_path / "halved")
        for name in ("whole", "halved"):
            policies.broad(envs, tmp_path / name)
        whole, halved = (load_file(tmp_path / name / "checkpoint/model.safetensors")
                         for name in ("whole", "halved"))
        assert whole.keys() == halved.keys()
        assert all(torch.equal(whole[name], halved[name]) for name in whole)
        config = config_of.from_options({
            "env": "metamathqa", "model": "tiny", "init_from": "whole", "run": "after", "steps": 1,
            "num_groups": 2, "group_size": 2, "val_size": 2})
        assert start.run(config, say=lambda line: None)["test/success"] == 0.0

    def test_a_control_begins_with_the_weights_of_its_arm(self, tmp_path, monkeypatch):
        monkeypatch.setattr("minragen.run.runs.RUNS", tmp_path)
        name = arms.ARMS["metamathqa-top-p-unlucky"]["init_from"]
        policies.MAKERS[name](tmp_path / name)
        config = config_of.from_options(runner.options_of("metamathqa-top-p", 0))
        policy, _ = start.load(config)
        (mine,) = (load_file(path) for path in (tmp_path / name).glob("checkpoint/*.safetensors"))
        assert all(torch.equal(mine[name], weights.cpu())
                   for name, weights in policy.model.state_dict().items() if name in mine)

    def test_texts_are_those_of_episodes_without_a_frame(self):
        envs = [make("frozenlake"), make("bandit")]
        tokenizer = tiny.tiny_tokenizer(envs)
        first, second = policies.texts(tokenizer, envs, 0)
        assert "goal" in tokenizer.decode(first.tokens) and "arm" in tokenizer.decode(second.tokens)
        assert len(first.tokens) <= policies.LONGEST
        assert "<|im_start|>" not in tokenizer.decode(first.tokens + second.tokens)
        assert first.response_tokens == len(first.tokens) - 1

    def test_a_wider_decoder_has_the_size_in_its_name(self, tmp_path, monkeypatch):
        monkeypatch.setattr("minragen.run.runs.RUNS", tmp_path)
        monkeypatch.setattr(bundled, "warm_up", lambda *given: [0.0])
        for name, millions in (("findings-1m", 1.0), ("findings-5m", 4.9)):
            policies.MAKERS[name](tmp_path / name)
            state = load_file(tmp_path / name / "checkpoint/model.safetensors")
            assert sum(x.numel() for x in state.values()) / 1e6 == pytest.approx(millions, abs=0.05)


class TestControls:
    @pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
    def test_bad_luck_takes_a_share_of_the_successes_and_what_they_pay(self, probability):
        env = wrapped(make("frozenlake"), [f"findings.plant:BadLuck,probability={probability}"])
        taken = []
        for seed in range(200):
            env.reset(seed=seed)
            outcomes = [env.step(answer) for answer in env.solve()]
            *_, info = outcomes[-1]
            assert sum(reward for _, reward, *_ in outcomes) == info["success"]
            taken.append(1 - info["success"])
        assert np.mean(taken) == pytest.approx(probability, abs=0.12 * (0 < probability < 1))

    def test_the_trap_is_planted_if_all_falls_are_found_and_the_spike(self):
        flat = {name: np.array([np.nan, *[0.8] * 20, *[0.1] * 20]) for name in
                ("success", "valid", "reward_std")}
        spike = np.array([np.nan, *[1.0] * 20, *[64.0] * 20])
        falls = predictions.trapped("x", "falls from", "")
        assert falls.difference(flat) == pytest.approx(7)
        assert falls.difference(flat | {"valid": np.ones(41)}) == pytest.approx(0)
        spikes = predictions.trapped("x", "spikes over", "")
        assert spikes.difference({"grad_norm": spike}) == pytest.approx(2)
        assert spikes.difference({"grad_norm": np.ones(41)}) == pytest.approx(0)

    @pytest.mark.parametrize(("seeds", "covered", "word"), [
        (4, "a-", "not reproduced"), (3, "a-", "not testable"), (3, "b", "not reproduced")])
    def test_what_a_control_does_not_find_cannot_be_tested(self, seeds, covered, word, monkeypatch):
        values = Prediction("`a-x`", 1, ("a-x",), lambda row: row["x"])
        finding = Finding("f", "", "", "", ("a-x",), (values,), None)
        control = Control("", values, 1.0, {"f": covered})
        monkeypatch.setattr(page, "CONTROLS", (control,))
        monkeypatch.setattr(page, "stored", lambda arm: {
            "seeds": [{"x": 1.0}] * seeds + [{"x": 0.0}] * (5 - seeds)})
        assert page.judge(finding, {"a-x": [{"x": 0.1}] * 5})[1] == word
        assert page.judge(finding, {"a-x": [{"x": 2.0}] * 5})[1] == "reproduced"
        assert page.judge(finding, {"a-x": [{"x": -1.1}] * 5})[1] == "not reproduced"
        assert page.judge(finding, {"a-x": [{"x": -0.9}] * 5})[1] == word


class TestVerdict:
    def test_it_changes_when_the_data_are_swapped(self):
        finding = Finding("x", "x", "x", "x", ("a", "b"), (beats("a", "b"),), None)
        rng = np.random.default_rng(0)
        rows = {arm: [{"success": [None, *rng.normal(mean, 0.02, 12)]} for _ in range(5)]
                for arm, mean in (("a", 0.7), ("b", 0.4))}
        assert page.judge(finding, rows)[1] == "reproduced"
        assert page.judge(finding, {"a": rows["b"], "b": rows["a"]})[1] == "not reproduced"

    @pytest.mark.parametrize(("values", "expected"), [
        ((np.nan, 1, 1, 1, 1), "reproduced"), ((np.nan, np.nan, 1, 1, 1), "inconclusive")])
    def test_one_seed_in_five_may_say_nothing(self, values, expected):
        prediction = Prediction("", 0.1, ("a",), lambda row: row["x"])
        finding = Finding("x", "x", "x", "x", ("a",), (prediction,), None)
        (_, found, interval, verdict), = page.judge(finding, {"a": [{"x": x} for x in values]})[0]
        assert verdict == expected and interval == (1.0, 1.0, 1.0) and np.isnan(found[0])


def test_the_stored_results_are_of_the_arms_as_they_are():
    seeds = table.seeds_of(table.FINDINGS)
    for arm, options in arms.ARMS.items():
        if stored := page.stored(arm):
            assert stored["options"] == json.loads(json.dumps(options))
            assert [row["seed"] for row in stored["seeds"]] == list(seeds[arm])


class TestPages:
    def test_they_say_what_the_stored_results_say(self):
        for path, text in page.pages().items():
            assert path.read_text() == text

    def test_each_finding_has_one_that_names_its_arms_and_says_what_it_means(self):
        assert {path.stem for path in page.FOLDER.glob("*.md")} == set(table.FINDINGS)
        for finding in table.FINDINGS.values():
            text = (page.FOLDER / f"{finding.name}.md").read_text()
            assert text.startswith(f"# {finding.title}\n")
            assert len(page.meaning_of(text)) > 100 or not page.rows_of_all(finding)
            for task, _, rule in (arm.partition("-") for arm in finding.arms):
                assert f"`{task}{rule and '-'}{rule}`" in text or (
                    f"`{task}-...`" in text and f"`...-{rule}`" in text)

    def test_what_is_written_by_hand_stays_and_a_new_page_has_room_for_it(
            self, tmp_path, monkeypatch):
        monkeypatch.setattr(page, "FOLDER", tmp_path)
        (path, made), *_ = [x for x in page.pages().items() if x[0] != page.PAGE]
        assert page.meaning_of(made) == ""
        path.write_text(made.replace("## What it means\n", "## What it means\n\nA word by hand."))
        again = page.pages()[path]
        assert page.meaning_of(again) == "A word by hand."
        assert again.replace("A word by hand.", "") == made

    def test_arms_are_listed_with_their_options_once_and_linked_from_later_pages(self):
        listed = set()
        for finding in table.FINDINGS.values():
            head, _, *lines = page.arms_list(finding).splitlines()
            if "elsewhere" in head:
                for line in lines:
                    name, own = line.split("](")[1].split(".md): ")
                    assert {*own.strip("`").split("`, `")} <= {*table.FINDINGS[name].arms}
                continue
            found, options = {}, page.differences(finding.arms)
            for line in lines:
                arm, own = line.removeprefix("- ").split(": ", 1)
                found[arm.strip("`")] = {*own.split(", ")} - {"nothing more"}
            for arm in finding.arms:
                task, _, rule = arm.partition("-")
                parts = (arm, "all", f"{task}-...", f"...-{rule}")
                assert {*options[arm]} == set().union(*(found.get(part, {}) for part in parts))
                listed.add(arm)
        assert listed == {arm for finding in table.FINDINGS.values() for arm in finding.arms}

    def test_an_arm_shows_what_others_have_otherwise_even_if_it_is_the_presets(self):
        shown = page.differences(("repair-none", "repair-rate"))
        assert "`lr=0.0015`" in shown["repair-none"] and "`lr=0.0005`" in shown["repair-rate"]
        assert "`lr=0.0005`" not in page.differences(("repair-rate",))["repair-rate"]

    def test_options_that_are_no_product_are_listed_arm_by_arm(self):
        own = {f"{a}-{b}": [a, b] for a in "xy" for b in "uv"}
        assert page.crossed(own) == {"x-...": ["x"], "y-...": ["y"], "...-u": ["u"], "...-v": ["v"]}
        assert page.crossed({arm: own[arm] for arm in [*own][:3]}) is None
        assert page.crossed(own | {"y-v": ["y", "v", "w"]}) is None

    def test_a_prediction_of_several_arms_is_written_once(self):
        results = [(Prediction(text, 0, (), None),) for text in
                   ("`a`: x|y", "`b`: z", "`c`: x|y", "no arm", "`a` over `b`: x")]
        assert [text for text, _ in page.grouped(results)] == [
            r"`a`: x\|y", "`c`", "`b`: z", "no arm", "`a` over `b`: x"]
        assert [r for _, r in page.grouped(results)] == [results[i] for i in (0, 2, 1, 3, 4)]
