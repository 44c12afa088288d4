"""The diagnostics: information, retrieval, regimes, warnings, gradients by bucket.

Their scores are compared with full passes in test_families.py.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import tiny

from lab import archive
from minragen import models
from minragen.chat import ChatFrame
from minragen.config import Config
from minragen.envs import REGISTRY
from minragen.look import diagnostics
from minragen.look.diagnostics import VARIED, Pair, collapse_metrics, gradient_metrics, score_matrix
from minragen.models import AdamW, token_logprobs
from minragen.trajectory import Batch, Trajectory


def episode(frame, group, *turns, prompt="state"):
    """A trajectory of these replies; the prompt of turn k is `prompt` and all before the turn."""
    t = Trajectory("toy", group, group, 0)
    t.add_prompt(frame.encode(f"{prompt}<think>"))
    for k, reply in enumerate(turns):
        ids = frame.encode(reply) if isinstance(reply, str) else reply
        t.add_reply(ids, [0.0] * len(ids), k)
        t.add_prompt(frame.encode("next<think>"))
    return t


class TestReasoning:
    def test_the_prompt_of_a_turn_is_all_of_its_sequence_before_its_first_sampled_id(self):
        _, frame = tiny()
        whole = episode(frame, 0, " a</think> b", " c</think> d")
        windows = Trajectory("toy", 0, 0, 0, sequences=[
            *whole.sequences, *episode(frame, 0, " c</think>", prompt="summary").sequences])
        pairs, turns = diagnostics.reasoning_pairs(frame, [whole, windows])
        assert turns == 5 and [p.turn for p in pairs] == [0, 1, 0, 1, 0]
        thought, prompt = tuple(frame.encode(" c")), "state<think> a</think> bnext<think>"
        assert pairs[3] == Pair(1, 1, tuple(frame.encode(prompt)), thought)
        assert pairs[4] == Pair(1, 0, tuple(frame.encode("summary<think>")), thought)

    def test_a_token_that_shares_a_character_with_the_tag_is_left_out(self):
        """A tokenizer may merge ".</" and ">x": only what lies wholly before the tag counts."""
        tokenizer = copy.deepcopy(tiny()[0].tokenizer)
        tokenizer.add_tokens(["so", "ok", ".</", "think", ">x", "a<", "/thi", "nk", ">y"])
        frame = ChatFrame(tokenizer)
        for words, kept in ((["so", "ok", ".</", "think", ">x"], 2), (["so", "ok", "</think>"], 2),
                            (["so", "a<", "/thi", "nk", ">y"], 1), ([".</", "think", ">x"], 0),
                            (["so", "ok", "think", ">x"], 0),
                            (["so", "</think>", "ok", "</think>"], 1)):
            ids = tokenizer.convert_tokens_to_ids(words)
            pairs, _ = diagnostics.reasoning_pairs(frame, [episode(frame, 0, ids)])
            assert [p.reasoning for p in pairs] == ([tuple(ids[:kept])] if kept else []), words

    def test_blank_and_unclosed_reasoning_is_none(self):
        _, frame = tiny()
        inner = "<observation> player</observation><reasoning> goal</reasoning>"
        t = episode(frame, 0, "</think>", " \n</think>", " not closed", f"{inner}</think><answer>")
        (pair,), turns = diagnostics.reasoning_pairs(frame, [t])
        assert frame.tokenizer.decode(pair.reasoning) == inner and turns == 4


class TestDistinctNgrams:
    def test_it_is_the_expected_share_among_256_trigrams_drawn_without_replacement(self):
        """Of two draws from a, a, b, c one pair in six is a, a; the others differ."""
        assert math.isclose(diagnostics.distinct_ngrams(["a", "a", "b", "c"], 1, 2), 11 / 12)
        alike, apart = [(1, 2, 3, 4, 5)] * 100, [tuple(range(8 * i, 8 * i + 8)) for i in range(50)]
        for texts, share in ((alike, 3 / 256), (apart, 1), ([(1,), (1,), (2,)], 2 / 3), ([], 0)):
            assert math.isclose(diagnostics.distinct_ngrams(texts), share)


class TestSamplers:
    def test_no_pair_is_drawn_twice(self):
        pairs = [Pair(i, k, (i, k), (1,)) for i in range(10) for k in range(1 + i % 4)]
        for draw, available in ((diagnostics.first_turns, [p for p in pairs if p.turn == 0]),
                                (diagnostics.trajectory_uniform, pairs)):
            for num_samples in (1, 7, 100):
                drawn = draw(pairs, num_samples, np.random.default_rng(0))
                assert set(drawn) <= set(available)
                assert len(set(drawn)) == len(drawn) == min(num_samples, len(available))

    def test_a_trajectory_counts_the_same_however_many_turns_it_has(self):
        rng = np.random.default_rng(0)
        pairs = [Pair(0, k, (), ()) for k in range(9)] + [Pair(1, 0, (), ())]
        for draw in (diagnostics.first_turns, diagnostics.trajectory_uniform):
            drawn = [draw(pairs, 1, rng)[0] for _ in range(2000)]
            assert abs(np.mean([p.trajectory for p in drawn]) - 0.5) < 0.04, draw
        last = np.mean([p.turn == 8 for p in drawn if p.trajectory == 0])
        assert abs(last - 1 / 9) < 0.04  # turns are uniform, too


class TestInformation:
    def test_the_estimates_equal_the_exact_values_of_a_known_channel(self):
        """The first prompt has half or three quarters of the rows, the last none. The reasonings of
        the second channel tell nothing of the prompt, those of the third all."""
        for joint in ([[5, 3, 2], [1, 1, 8]], [[6, 6, 3], [2, 2, 1]], [[15, 0, 0], [0, 2, 3]]):
            p = torch.tensor([*joint, [0, 0, 0]]).double() / 20
            rows = [(x, z) for x in range(2) for z in range(3) for _ in range(joint[x][z])]
            channel, mixture = p / p.sum(1, keepdim=True).clamp(min=1e-9), p.sum(0)
            found = diagnostics.information(torch.stack([channel[:, z].log() for _, z in rows]),
                                            torch.tensor([x for x, _ in rows]))
            prompt_entropy, z_entropy, both = (
                float(torch.special.entr(q).sum()) for q in (p.sum(1), mixture, p))
            std = np.std([math.log(mixture[z]) for _, z in rows])
            mi = prompt_entropy + z_entropy - both
            assert found == pytest.approx({
                "mi": mi, "conditional_entropy": both - prompt_entropy, "marginal_std": std,
                "reasoning_entropy": z_entropy, "mi_zscore": mi / (std + 1e-3)}, abs=1e-9)


class TestRetrieval:
    def test_it_is_the_mean_over_all_orders_of_equal_scores_for_every_k_below_their_number(self):
        """Scores that differ by rounding are equal."""
        whole, own = torch.randint(3, (20, 5)), torch.randint(5, (20,))
        ranks = [sorted(order, key=lambda j, row=row: -row[j]).index(column)
                 for row, column in zip(whole.tolist(), own.tolist())
                 for order in itertools.permutations(range(5))]
        expected = {}
        for at, k in (("", 1), ("@2", 2), ("@4", 4)):
            expected |= {f"retrieval{at}": np.mean([rank < k for rank in ranks]),
                         f"retrieval_chance{at}": k / 5}
        noisy = whole + 1e-6 * torch.rand(20, 5)
        assert diagnostics.retrieval(noisy, own) == pytest.approx(expected)


class TestCollapseMetrics:
    def test_seconds_are_the_difference_of_two_times_whatever_the_clock_began_with(
            self, monkeypatch):
        ticks = iter([1.0, 4.0, 5.0, 15.5])
        monkeypatch.setattr(diagnostics, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        monkeypatch.setattr(diagnostics, "score_matrix", lambda *_: torch.randn(4, 4).double())
        found = collapse_metrics(None, [Pair(i, 0, (i,), (i,)) for i in range(4)], {})
        assert (found["first_turn/seconds"], found["trajectory/seconds"]) == (3.0, 10.5)

    SAID = [(0, " Left"), (0, " Left"), (1, " Left Up goal"), (1, " Down"), (2, " Up Up"),
            (1, " Down")]  # prompts and reasonings repeat

    def pairs(self, frame):
        return diagnostics.reasoning_pairs(frame, [
            episode(frame, g, f"{z}</think>", prompt=f"({g}, {g})") for g, z in self.SAID])[0]

    def test_they_are_those_of_the_rows_scores_in_total_and_per_token(self):
        policy, frame = tiny()
        ema = {"first_turn/marginal_std": 5.0}
        found = collapse_metrics(policy, self.pairs(frame), ema, temperature=0.7)
        prompts = [frame.encode(f"({g}, {g})<think>") for g in range(3)]
        said, own = [frame.encode(z) for _, z in self.SAID], torch.tensor([0, 0, 1, 1, 2, 1])
        scores = score_matrix(policy, prompts, said, 0.7)
        per_token = scores / torch.tensor([[len(z)] for z in said])
        whole, share = (diagnostics.information(m, own) for m in (scores, per_token))
        averaged = 0.9 * 5.0 + 0.1 * whole["marginal_std"]
        expected = whole | {f"{name}_per_token": value for name, value in share.items()}
        expected |= diagnostics.retrieval(per_token, own) | {
            "rows": 6, "columns": 3,
            "mi_upper_bound": math.log(2) / 2 + math.log(3) / 3 + math.log(6) / 6,
            "marginal_std_ema": averaged, "mi_zscore_ema": whole["mi"] / (averaged + 1e-3),
            "marginal_std_ema_per_token": share["marginal_std"],  # starts at its first value
            "mi_zscore_ema_per_token": share["mi_zscore"]}
        for name, value in expected.items():
            assert found[f"first_turn/{name}"] == pytest.approx(value, abs=1e-4), name
        assert ema["first_turn/marginal_std"] == pytest.approx(averaged)
        # Six trajectories of one turn each: the samplers agree.
        assert found["trajectory/mi"] == pytest.approx(found["first_turn/mi"])

    def test_the_draw_depends_on_the_seed_alone(self, monkeypatch):
        (policy, frame), budgets = tiny(), set()
        monkeypatch.setattr(diagnostics, "score_matrix",
                            lambda *args: budgets.add(args[4]) or score_matrix(*args))
        first, again, other = (
            collapse_metrics(policy, self.pairs(frame), {}, seed, 3, token_budget=300)
            for seed in (4, 4, 6))
        assert budgets == {300}
        assert first["first_turn/mi"] == again["first_turn/mi"] != other["first_turn/mi"]
        assert first["first_turn/rows"] == first["trajectory/rows"] == 3

    def test_a_single_prompt_gives_no_metrics_and_no_reasoning_gives_none_either(self):
        alike = [Pair(i, 0, (5,), (i,)) for i in range(4)]
        assert collapse_metrics(None, alike, {}) == collapse_metrics(None, [], {}) == {}


def measured(mi, entropy, retrieved, columns=16, thinking=1.0):
    found = {"mi": mi, "conditional_entropy_per_token": entropy, "retrieval": retrieved,
             "retrieval_chance": 1 / columns, "rows": 64, "columns": columns}
    return {f"first_turn/{k}": v for k, v in found.items()} | {"valid_thinking": thinking}


class TestRegimes:
    def test_information_and_entropy_are_compared_with_the_first_measurement(self):
        """At 64 rows and 16 columns two standard errors above chance are 0.123."""
        usual, quiet, blind = (2.0, 0.4, 0.9), (2.0, 0.06, 0.9), (0.0, 0.4, 1 / 16)
        for first, now, label in (
                (usual, (0.51, 0.21, 0.13), "diverse"),
                (usual, (0.49, 0.21, 0.13), "template collapse"),
                (usual, (0.51, 0.21, 0.12), "template collapse"),
                (usual, (0.51, 0.19, 0.13), "compressed"),
                (usual, (0.49, 0.19, 0.13), "low-entropy collapse"),
                (usual, (0.51, 0.19, 0.12), "low-entropy collapse"),
                # What is nearly deterministic from the start is never diverse.
                (quiet, (2.0, 0.049, 1.0), "compressed"), (quiet, (2.0, 0.051, 1.0), "diverse"),
                # The first measurement can be a collapse already.
                (blind, blind, "template collapse")):
            assert diagnostics.regime(measured(*first), measured(*now)) == label, (first, now)

    def test_with_too_little_reasoning_or_too_few_prompts_there_is_none(self):
        first = measured(2.0, 0.4, 0.9)
        assert diagnostics.regime(first, measured(1.8, 0.3, 0.8, 4, 0.5)) == "diverse"
        for now in (measured(1.8, 0.3, 0.8, thinking=0.49), measured(1.8, 0.3, 0.8, columns=3),
                    measured(1.8, None, 0.8), {"valid_thinking": 1.0}):
            assert diagnostics.regime(first, now) == "undetermined", now


HEALTHY = {"success": 0.5, "reward_std": 0.4, "entropy": 0.4, VARIED: 0.3}


def history(steps=60, **factors):
    """A run whose metrics change at the given steps only, to so many times the healthy value."""
    run, now = [], HEALTHY
    for step in range(1, steps + 1):
        now = now | {name: HEALTHY[name] * at[step] for name, at in factors.items() if step in at}
        run.append({"step": step} | now)
    return run


def given(run):
    """{step: warnings} of a whole run."""
    found = {run[k - 1]["step"]: diagnostics.warnings_of(run[:k]) for k in range(1, len(run) + 1)}
    return {step: sentences for step, sentences in found.items() if sentences}


class TestWarnings:
    @pytest.mark.parametrize("metric, warns, silent, words", [
        ("reward_std", 0.59, 0.61, "earn alike"), ("entropy", 1.51, 1.49, "incoherent"),
        (VARIED, 3.1, 2.9, "varies more and helps no more")])
    def test_each_is_given_once_when_its_threshold_is_passed(self, metric, warns, silent, words):
        (found, (sentence,)), = given(history(**{metric: {30: warns}, "success": {9: 0.9}})).items()
        assert found == 34 and words in sentence and sentence.endswith(" mini_batch.")
        assert sentence.startswith(f"{metric} is {warns * HEALTHY[metric]:.3g} over the last 5 "
                                   f"steps, it began at {HEALTHY[metric]:.3g}, and success has "
                                   f"changed by -0.05: ")
        assert given(history(**{metric: {30: silent}})) == {}

    @pytest.mark.parametrize("changes, steps", [
        # The first five steps count, however slowly a change came, and no step is in both means.
        ({"reward_std": {10: 0.9, 20: 0.8, 30: 0.7, 40: 0.5}}, {42}),
        ({"entropy": {10: 1.2, 20: 1.4, 30: 1.6}}, {32}),
        ({VARIED: {10: 1.5, 20: 2.0, 30: 2.5, 40: 2.9, 50: 3.5}}, {50}),
        ({"reward_std": {6: 0.0}}, {10}),
        # A group that learns agrees, too; entropy may rise a little with success.
        ({"reward_std": {30: 0.0}, "success": {20: 1.0}}, {32}),
        ({"reward_std": {30: 0.0}, "success": {20: 1.02}}, set()),
        ({"entropy": {30: 9.0}, VARIED: {30: 9.0}, "success": {20: 1.18}}, {30, 31}),
        ({"entropy": {30: 9.0}, VARIED: {30: 9.0}, "success": {20: 1.22}}, set()),
        # A single step, and a rise from almost no entropy, are nothing.
        ({"reward_std": {30: 0.0, 31: 1.0}, "entropy": {30: 3.0, 31: 1.0}}, set()),
        ({"entropy": {1: 0.05, 30: 0.175}, VARIED: {1: 0.05, 30: 0.46}}, set()),
        ({"entropy": {1: 0.05, 30: 0.2}}, {34}), ({VARIED: {1: 0.05, 30: 0.54}}, {34}),
        # A solved run is no Echo Trap.
        ({"reward_std": {30: 0.0}, "entropy": {30: 2.0}, "success": {1: 1.82}}, set()),
        ({"reward_std": {30: 0.0}, "entropy": {30: 2.0}, "success": {1: 1.78}}, {32}),
        # Again only after twenty steps without it.
        ({"reward_std": {30: 0.1, 35: 1.0, 54: 0.1}}, {32}),
        ({"reward_std": {30: 0.1, 35: 1.0, 55: 0.1}}, {32, 57})])
    def test_they_come_at_these_steps(self, changes, steps):
        assert set(given(history(**changes))) == steps

    def test_missing_values_and_lines_of_other_splits_are_passed_over(self):
        run = history(reward_std={30: 0.4})
        for line in run:
            line[VARIED] = None
        for line in run[::3]:
            line |= {"success": None, "entropy": math.nan}
        for line in run[::4]:
            del line["entropy"]
        run.insert(33, {"step": "val", "val/success": 0.2})  # behind the step that warns
        assert set(given([{"step": 0, "val/success": 0.1}, *run])) == {33}


class TestFirstLook:
    @pytest.mark.parametrize("valid, returns, options, line, words", [
        (0.75, (1.0, 0.0, 0.0, 0.0), {}, "valid replies 0.75, success 0.25, groups with different "
                                         "returns 1 of 2", ""),
        (0.04, (1.0, 0.0, 0.0, 0.0), {}, "valid replies 0.04", "reinforce what is sometimes done"),
        (0.75, (0.1, 0.0, 0.0, 0.0), {}, "success 0.00", "Begin with --warmup-steps 40"),
        (0.75, (1.0, 1.0, 0.0, 0.0), {}, "returns 0 of 2", "Take harder instances"),
        (0.75, (1.0, 1.0, 0.0, 0.0), {"filter": "none"}, "0 of 2", "Take harder instances"),
        (0.75, (1.0, 1.0, 0.0, 0.0), {"advantages": "gae"}, "0 of 2", "Take harder instances"),
        # Nothing compares the members.
        (0.75, (1.0, 1.0, 0.0, 0.0), {"filter": "none", "advantages": "reinforce"}, "0 of 2", "")])
    def test_it_says_what_the_policy_does_and_whether_rl_can_begin(
            self, valid, returns, options, line, words):
        played = [SimpleNamespace(metrics={"valid": valid}, success=reward == 1, group_id=k // 2,
                                  episode_return=reward) for k, reward in enumerate(returns)]
        said, *warning = diagnostics.first_look(played, Config(**options))
        assert said.startswith("start     before the first update: ") and line in said
        assert words in "".join(warning) and bool(words) == bool(warning)


class TestStoredRuns:
    def test_no_run_of_the_results_warns(self):
        """How early warnings came in runs that collapsed is in lab/results/warnings.csv."""
        names = archive.names("*-grpo-s[0-9]")
        assert len(names) >= 3 * len(REGISTRY)
        for name in names:
            lines = [line for line in archive.metrics(name) if "success" in line]
            for k in range(1, len(lines) + 1):
                assert not diagnostics.warnings_of(lines[:k]), name


def gradient_batch(tokens, mask, group_ids):
    """Rows whose loss weights are those of a mean over the tokens in `mask`."""
    zeros, there = torch.zeros(mask.shape), mask | (torch.arange(mask.shape[1]) == 0)
    return Batch(tokens, there, mask, zeros, zeros, zeros, group_ids, group_ids, zeros[:, 0], zeros,
                 mask & False, loss_weights=mask / mask.sum())


def first_stop(metrics, untrained=()):
    """The first step at which RAGEN's trainer would stop, or None.

    metrics: {name: values from step 0 on}      untrained: steps whose filter kept nothing
    """
    lines = [{"step": k, "groups_kept": 4 * (k > 0 and k not in untrained), **dict(zip(metrics, v))}
             for k, v in enumerate(zip(*metrics.values()))]
    return next((k for k in range(len(lines)) if diagnostics.early_stop(lines[:k + 1])), None)


class TestEarlyStop:
    HIGH, LOW = [1.0] * 10, [0.09] * 10

    def test_it_is_at_the_first_step_at_which_ragens_trainer_would_stop(self):
        high, low = self.HIGH, self.LOW
        for values, expected in ((high + low, 20), (high * 2 + low, 30), (high + [0.11] + low, 21),
                                 (high + [0.2] * 30, None), (low * 4, None),
                                 (high + low[:5] + [1.0] + low, 26),
                                 ([1.0] * 9 + [math.nan] + [1.0] + low, 21)):
            assert first_stop({"reward_std": [math.nan, *values]}) == expected, values
        # At step 0 nothing has been trained.
        for values, expected in (([0.0] * 9, 5), ([0.0] + [0.02] * 9, None),
                                 ([0.0, 0.5] + [0.04] * 5, 6), ([0.0, 0.5] + [0.06] * 5, None),
                                 ([0.0, 0.5] + [0.04] * 4 + [0.1] + [0.0] * 5, 11)):
            assert first_stop({"val/success": values}) == expected, values

    def test_a_step_that_trained_on_no_group_does_not_count(self):
        stds = {"reward_std": [math.nan, *self.HIGH, *[0.0] * 4, *self.LOW]}
        assert first_stop(stds) == 20
        assert first_stop(stds, untrained=range(11, 15)) == 24
        assert first_stop({"val/success": [0.0] * 9}, untrained=(2, 3)) == 7

    def test_of_a_mixture_one_environment_is_enough_and_the_mean_does_not_count(self):
        for mean, solved, other, expected in ((0.5, 0.9, [0.0] * 7, 5),
                                              (0.5, 0.9, [0.0, 0.5, *[0.04] * 5], 6),
                                              (0.0, 0.9, [0.5] * 7, None)):
            metrics = {"val/success": [mean] * 7, "val/a/success": [solved] * 7,
                       "val/b/success": other}
            assert first_stop(metrics) == expected, other


class TestGradients:
    def test_a_buckets_norm_is_that_of_its_own_token_mean_however_it_is_cut(self):
        """Buckets have as many groups as can be; RAGEN's last one has all that is left over. Here
        the last has no token in the loss, so it has sizes only."""
        torch.manual_seed(0)
        x, mask = torch.randn(14, 3, 3), torch.arange(3) < torch.arange(14)[:, None] % 3 + 1
        mask[2:4] = False
        model = torch.nn.ParameterList([torch.randn(3), torch.ones(2), torch.ones(2)])
        model[2].requires_grad, weight = False, model[0]

        def losses_of(part):
            y = x[part.tokens[:, 0], :part.tokens.shape[1]] @ weight
            return {"task": (y**2 * part.loss_weights).sum(),
                    "entropy": -0.1 * (y.sin() * part.loss_weights).sum(), "kl": torch.zeros(())}

        batch = gradient_batch(torch.arange(14)[:, None].expand(14, 3), mask,
                               torch.tensor([9, 4, 7, 2, 5, 3, 8]).repeat_interleave(2))
        # 9: groups that a filter has dropped.
        reward_std = torch.tensor([9, 9, 0.3, 0.1, 0.9, 0.0, 9, 0.5, 0.2, 0.7])
        by_row, at_once = (gradient_metrics(model, batch, losses_of, reward_std, budget, 4)
                           for budget in (1, 10**6))
        expected = {}
        for name, groups in (("bucket_1", [5, 3]), ("bucket_2", [8, 2]), ("bucket_3", [7, 9]),
                             ("bucket_4", [4]), ("all", [2, 3, 4, 5, 7, 8, 9])):
            rows, stds = torch.isin(batch.group_ids, torch.tensor(groups)), reward_std[groups]
            y = x[rows][mask[rows]] @ weight
            found = {"groups": len(groups), "rows": rows.sum(), "tokens": len(y), "reward_std":
                     stds.mean(), "reward_std_min": stds.min(), "reward_std_max": stds.max()}
            losses = {"task": (y**2).mean(), "entropy": -0.1 * y.sin().mean()} if len(y) else {}
            found |= {term: torch.autograd.grad(loss, weight, retain_graph=True)[0].norm()
                      for term, loss in losses.items()}
            expected |= {f"gradient/{name}/{key}": float(value) for key, value in found.items()}
        assert by_row == pytest.approx(expected, rel=1e-5) == at_once

    def test_a_policys_gradients_leave_nothing_behind(self, monkeypatch):
        """No hook fires, and recomputed chunks of logits allow several backward passes."""
        model = copy.deepcopy(tiny()[0].model).bfloat16()
        optimizer, before = AdamW(model.parameters(), 1e-3), copy.deepcopy(model.state_dict())
        batch = gradient_batch(torch.arange(36).view(4, 9), torch.arange(9).expand(4, 9) > 0,
                               torch.tensor([0, 0, 1, 1]))

        def losses_of(part):
            logprobs, entropy = token_logprobs(model, part.tokens, part.response_mask)
            return {"task": -(logprobs * part.loss_weights).sum(),
                    "entropy": -(entropy * part.loss_weights).sum()}

        args = model, batch, losses_of, torch.tensor([0.1, 0.2]), 16
        whole = gradient_metrics(*args)
        monkeypatch.setattr(models, "LOGIT_BUDGET", 5 * model.config.vocab_size)
        assert gradient_metrics(*args) == pytest.approx(whole, rel=0.05)
        assert all(p.grad is None for p in [*model.parameters(), *optimizer.masters])
        assert not optimizer.inner.state
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
