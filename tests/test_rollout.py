"""Multi-turn generation: tokens in = tokens out, recorded masks, caches that change nothing."""

import copy
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from test_families import family
from torch.nn.utils.rnn import pad_sequence
from toys import Lottery, prompt_length, puppet, sampled, scripted, tiny

from minragen import cache, models
from minragen.chat import ChatFrame
from minragen.envs import EnvGroups
from minragen.fast import llama, prefix_tree
from minragen.models import Policy
from minragen.more.described import DescribedTurn
from minragen.rollout import Rules, collect, sample_tokens
from minragen.run import proof
from minragen.run.groups import PatientGroups
from minragen.run.proof import prove
from minragen.support.noise import uniforms
from minragen.trajectory import StopReason, make_batch


def play(policy, frame, groups, first_seed=0, max_new_tokens=12, max_context=400, **rules):
    rules = Rules(max_new_tokens=max_new_tokens, max_context=max_context, **rules)
    sampled = []
    played = collect(policy, frame, groups, first_seed, rules, sampled.append)
    assert sum(sampled) == sum(t.response_tokens for t in played)  # what the progress bar counts
    return played


def varied(groups=2, size=4, **rules):
    """FrozenLake with replies of many lengths."""
    policy, frame = tiny()[0], copy.copy(tiny()[1])
    frame.end_ids = set(range(0, len(frame.tokenizer), 9))
    return play(policy, frame, EnvGroups("frozenlake", groups, size), **rules)


class TestTokens:
    """FrozenLake episodes of two turns, played by a puppet: every id is known in advance."""

    @pytest.mark.parametrize("pieces, stop", [
        ([" a</think><answer> Up", "</answer>"], "answer"),
        ([" a</think><answer>", *"</answer>"], "answer"),
        # As vllm#52393, sglang#33152 and Search-R1#151 report it, this ended in the thought.
        ([" <answer> a</answer> b</think><answer> Up</answer>"], "answer"),
        ([" a", "<|im_end|>"], "end_of_turn"), ([" player"] * 7, "max_new_tokens")],
        ids=["answer", "answer byte by byte", "a thought quotes an answer", "end of turn", "cap"])
    def test_they_are_prompt_reply_framing_reply_with_mask_and_turn_of_replies(self, pieces, stop):
        """A reply ends where it should; framing adds an end of turn only if none was sampled."""
        ids = [i for piece in pieces for i in tiny()[1].encode(piece)]
        cap, more = (7, []) if stop == "max_new_tokens" else (12, [40, 40])
        t, frame, _ = scripted([*ids, *more], turns=2, cap=cap)
        first, second = t.turns
        expected = [(frame.first_prompt_ids(t.system, first.observation), -1), (ids, 0),
                    (frame.next_prompt_ids(ids[-1], second.observation), -1), ([0] * cap, 1)]
        (row,) = t.sequences
        assert row.tokens == [i for ids, _ in expected for i in ids]
        assert row.turn_ids == [turn for ids, turn in expected for _ in ids]
        assert row.response_mask == [turn >= 0 for turn in row.turn_ids]
        assert first.stop.value == stop and first.text == "".join(pieces).removesuffix("<|im_end|>")
        assert first.reply.answer == ("Up" if "Up" in first.text else "")


class TestStops:
    def test_a_full_context_ends_the_episode_and_is_never_exceeded(self):
        """RAGEN gives 3,778 tokens to a model of 3,600; a ValueError ends the run (RAGEN#116)."""
        for room in (1, 7, 8):
            t, _, start = scripted([40] * 7, turns=2, room=room)
            assert t.stop is StopReason.CONTEXT and len(t.tokens) == start + min(room, 7)
            assert (t.turns[0].stop is StopReason.CONTEXT) == (room <= 7)

    def test_an_observation_that_leaves_no_room_for_a_reply_ends_the_episode(self, monkeypatch):
        """Nothing is fed beyond the context: the model may have no position there."""
        (free,) = play(*tiny(), EnvGroups("frozenlake", 1, 1))
        second, lengths, real = free.sequences[-1].turn_ids.index(1), [], Policy.extend
        monkeypatch.setattr(Policy, "extend", lambda self, slots, *given: (
            real(self, slots, *given), lengths.append(int(slots.lengths.max())))[0])
        for room, turns in ((0, 1), (1, 2), (5, 2)):
            (t,) = play(*tiny(), EnvGroups("frozenlake", 1, 1), max_context=second + room)
            assert t.stop is StopReason.CONTEXT and len(t.turns) == turns
            assert max(lengths) < second + room

    def test_a_first_prompt_that_overflows_the_context_is_refused_with_both_numbers(self):
        groups = EnvGroups("frozenlake", 1, 1)
        length = prompt_length(tiny()[1], groups)
        with pytest.raises(ValueError, match=rf"has {length} tokens and max_context is {length}"
                                             r".*Raise --max-context"):
            play(*tiny(), groups, max_context=length)


class Counts(Lottery):
    """Succeeds in the first of three turns; reports a different number of everything in each."""

    def step(self, answer):
        self._turns += 1
        info = {"success": float(self._turns == 1), "valid": float(self._turns > 1),
                "effective": self._turns / 4, "found": 10.0**self._turns}
        return "Go on", self._turns / 10, False, self._turns == 3, info


class TestEpisodes:
    def test_shares_are_averaged_over_turns_counts_are_summed_and_success_once_is_success(self):
        groups = EnvGroups("test_rollout:Counts", 1, 1)
        groups.envs[0].alias = "counts"
        (t,) = play(*tiny(), groups)
        assert t.metrics == {"success": 1.0, "valid": pytest.approx(2 / 3),
                             "effective": pytest.approx(0.5), "found": 1110.0}
        assert t.success and t.stop is StopReason.TRUNCATED and t.env == "counts"
        assert t.turn_rewards == [0.1, 0.2, 0.3] and t.episode_return == pytest.approx(0.6)
        assert t.response_tokens == len(sampled(t.sequences[0])) == 3 * 12
        assert [m["role"] for m in t.messages()] == ["system"] + ["user", "assistant"] * 3

    def test_an_environment_that_cannot_score_a_description_ends_only_its_own_trajectory(self):
        policy, _ = tiny()
        frame = ChatFrame(policy.tokenizer, "grounding_worldmodeling")
        groups = PatientGroups("test_rollout:Counts", 3, 1)
        groups.turn = DescribedTurn(frame.parts, turn=groups.turn)
        for env, results in zip(groups.envs, ([ValueError("no words")], [0.5, KeyError("box")])):
            env.score_description = mock.Mock(side_effect=results)
        assert [t.error for t in play(policy, frame, groups)] == [
            "ValueError: no words", "KeyError: 'box'", ""]

    def test_one_that_pays_more_than_float32_can_square_has_failed(self):
        groups = PatientGroups("test_rollout:Counts", 1, 1)
        groups.envs[0].step = lambda answer: ("Go on", 1e20, False, True, {})
        (rich,) = play(*tiny(), groups)
        assert rich.stop is StopReason.ENV_ERROR and "1e+20" in rich.error


class TestCaching:
    """Cached turns equal a full pass in every family: test_families.py. (In GRPO-Zero's, is_causal
    aligns its triangle to the top left, and a first token sees one key: qwen2_model.py:143.)"""

    @pytest.mark.parametrize("shift", [-1, 1], ids=["a key too many", "a key too few"])
    @pytest.mark.parametrize("name", ["Mistral, window", "Gemma 3", "gpt-oss"])
    def test_the_proof_refuses_a_window_that_is_wrong_by_one_key(self, name, shift, monkeypatch):
        policy, right = family(name), cache.attention_masks
        assert "equal a full pass" in prove(policy, 320)
        monkeypatch.setattr(cache, "attention_masks", lambda model, visible, queries, keys: (
            right(model, visible, queries + shift, keys)))
        with pytest.raises(RuntimeError, match="nats in torch.float32"):
            prove(policy, 320)

    def test_the_proof_runs_in_the_policys_own_dtype_too(self, monkeypatch):
        policy, right = family("Mistral, window"), cache.attention_masks
        policy.model.bfloat16()
        assert "equal a full pass" in prove(policy, 320)
        monkeypatch.setattr(cache, "attention_masks", lambda model, visible, *positions: right(
            model, visible | (model.dtype == torch.bfloat16), *positions))
        with pytest.raises(RuntimeError, match="nats in torch.bfloat16"):
            prove(policy, 320)

    def test_the_proof_reaches_beyond_the_window_or_says_that_it_does_not(self, monkeypatch):
        policy, missed = family("Mistral, window"), "its window of 24 was not reached"
        monkeypatch.setattr(proof, "PROOF_TOKENS", 24)
        assert missed not in prove(policy, 320)
        monkeypatch.setattr(proof, "PROOF_BUDGET", {"cpu": 0})
        assert missed in prove(policy, 320) and missed not in prove(policy, 24)

    @pytest.mark.parametrize("owner, function, wrong", [
        (llama, "_rotate", lambda right, x, cos, sin: right(x, cos, -sin)),
        (prefix_tree, "neighbours", lambda right, *rows: (
            right(*rows)[0], right(*rows)[1] + (right(*rows)[1] > 1))),
        (cache.KVSlots, "update", lambda right, self, keys, values, layer: right(
            self, values, keys, layer)),
        (models, "output_layer", lambda right, *given: right(*given).roll(1, -1)),
        (models, "token_logprobs", lambda right, *given: (right(*given)[0] - 1, None))],
        ids=["both", "the learner's", "the cached one", "errors of mean 0", "only lower ones"])
    def test_the_proof_refuses_a_pass_that_differs(self, owner, function, wrong, monkeypatch):
        policy, right = family("Llama"), getattr(owner, function)
        assert "equal a full pass" in prove(policy, 320)
        monkeypatch.setattr(owner, function, lambda *arguments: wrong(right, *arguments))
        with pytest.raises(RuntimeError, match="differs between cached turns and a full pass"):
            prove(policy, 320)

    def test_padding_never_asks_for_a_position_that_the_model_lacks(self):
        """The longer row has 79 of GPT-2's 80 tokens when the other one gets five more."""
        policy, tokens = family("GPT-2, longer"), torch.randint(3, 300, (2, 80))
        model = policy.model
        slots = cache.KVSlots(model, 2, 90)
        for counts in torch.tensor([[79, 60], [1, 5]]):
            starts = slots.lengths.tolist()
            fresh = [row[start:start + n] for row, start, n in zip(tokens, starts, counts)]
            logits = policy.extend(slots, pad_sequence(fresh, batch_first=True), counts)
        assert torch.allclose(logits[1], model(tokens[1:, :65]).logits[0, -1], atol=1e-4)

    def test_no_token_is_fed_twice_and_a_groups_prompt_only_once(self, monkeypatch):
        fed, original = [], Policy.extend
        monkeypatch.setattr(Policy, "extend", lambda self, slots, tokens, counts, *rows: (
            fed.append(int(counts.sum())), original(self, slots, tokens, counts, *rows))[1])
        played = varied(3, 4)
        prompts = [t.sequences[-1].response_mask.index(True) for t in played]
        # The last id needs no forward.
        after_prompt = sum(len(t.tokens) - p - 1 for t, p in zip(played, prompts))
        assert sum(fed) == sum(prompts[::4]) + after_prompt

    def test_slots_that_nothing_was_written_to_add_nothing(self, monkeypatch):
        """0 * nan is nan. The second row never wrote the places that it shares with the first."""
        monkeypatch.setattr(torch.Tensor, "new_empty",
                            lambda x, *shape: x.new_full(shape, math.nan))
        model, tokens = tiny()[0].model, torch.randint(3, 200, (2, 10))
        slots = cache.KVSlots(model, 2, 12)
        cache.last_hidden(model, slots, tokens[:1, :9], torch.tensor([9]))
        cache.last_hidden(model, slots, tokens[1:, :4], torch.tensor([4]), 1)
        old, slots = slots, cache.regather([(slots, [1]), (slots, [0])], 16)
        states = cache.last_hidden(model, slots, tokens[:, 9:], torch.tensor([1, 1]))
        assert states.isfinite().all() and not old.layers  # which were freed one by one


class TestIndependence:
    """A trajectory is a function of its seed and member, not of its company."""

    def test_a_long_prompt_and_a_long_observation_in_one_batch_change_nothing(self):
        """The observation is fed beside the prompt, so its padding needs room behind it."""
        groups = EnvGroups("test_rollout:Counts", 2, 1)
        prompted, observed = groups.envs
        prompted.render = lambda: " a" * 300
        observed.step = lambda answer: (" a" * 290, *Counts.step(observed, answer)[1:])
        one, many = ([t.tokens for t in play(*tiny(), groups, max_new_tokens=2, max_context=1200,
                                             max_rows=rows)] for rows in (1, 2))
        assert one == many

    def test_prompts_and_observations_are_fed_in_parts_of_the_token_budget(self, monkeypatch):
        shapes, passes, real = [], [], Policy.extend
        monkeypatch.setattr(Policy, "extend", lambda self, slots, tokens, *rest: (
            shapes.append(tokens.shape), real(self, slots, tokens, *rest))[1])
        expected = [t.tokens for t in varied()]
        for budget in (8192, 270, 1):
            shapes.clear()
            assert [t.tokens for t in varied(token_budget=budget)] == expected
            fed = [(n, q) for n, q in shapes if q > 1]
            assert all(n == 1 or n * q <= budget for n, q in fed)
            passes.append(len(fed))
        assert passes[0] < passes[1] < passes[2]


class TestSampling:
    def test_each_draw_inverts_the_exact_cumulative_distribution_of_200_000_tokens(self):
        """A float32 sum of so many is off by whole tokens, and a GPU adds in no fixed order."""
        logits = torch.randn(200_000)
        exact = (logits.double() / 0.7).softmax(0).cumsum(0)
        u = uniforms(torch.arange(80), torch.zeros(1, dtype=torch.int64))
        tokens, _ = sample_tokens(logits.expand(80, -1), u, Rules(temperature=0.7))
        edges = torch.nn.functional.pad(exact, (1, 0))  # token i is drawn from edges[i] to [i + 1]
        rounding = 2e-8  # a token has 5e-6 in the mean
        assert (edges[tokens] - rounding <= u).all() and (u < edges[tokens + 1] + rounding).all()

    def test_top_k_and_top_p_never_leave_their_sets(self):
        logits = torch.randn(200, 30)
        ranked = logits.argsort(-1, descending=True)
        # The smallest set with that share of what top_k leaves: all of it is drawn, and no more.
        even = (torch.arange(2000) + 0.5) / 2000
        for row, best in zip(logits[:100], ranked):
            for k in (0, 5):
                rules, p = Rules(top_k=k, top_p=0.6), row[best[:k or 30]].softmax(-1)
                count = int((p.cumsum(0) < 0.6).sum()) + 1
                drawn = sample_tokens(row.expand(2000, 30), even, rules)[0].unique()
                assert drawn.equal(best[:count].sort().values)

    def test_a_uniform_at_either_end_never_falls_off_the_distribution(self):
        logits = torch.where(torch.arange(1000) == 7, 0.0, -100.0)[None]
        for u in (2**-24, 0.5, 1 - 2**-24):
            assert sample_tokens(logits, torch.tensor([u]), Rules())[0].item() == 7

    def test_logits_that_are_not_finite_are_an_error_and_not_a_token(self):
        diverged, frame = puppet()
        broken = torch.arange(len(frame.tokenizer)) == 3  # one logit of them all
        diverged.model.get_output_embeddings = lambda: lambda hidden: torch.where(
            broken, float("nan"), hidden)
        for temperature in (1.0, 0.0):
            with pytest.raises(FloatingPointError, match="the policy has diverged"):
                play(diverged, frame, EnvGroups("bandit", 1, 2), temperature=temperature)


class TestNoise:
    def test_uniforms_are_uniform_and_uncorrelated_along_positions_and_keys(self):
        keys = torch.arange(300)[:, None].expand(300, 300).reshape(-1)
        u = uniforms(keys, torch.arange(300).repeat(300)).view(300, 300).double()
        assert u.min() > 0 and u.max() < 1
        assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
        for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
            assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 0.015


class TestBatch:
    def test_sums_over_an_episode_are_in_each_of_its_rows_also_of_one_alone(self):
        batch = make_batch(play(*tiny(), EnvGroups("toys:Lottery", 1, 1)))
        assert batch.episode_sums(torch.tensor([3.0])).tolist() == [3.0]
        batch = replace(batch, episode_ids=torch.tensor([4, 9, 4]))
        assert batch.episode_sums(torch.tensor([1.0, 2.0, 4.0])).tolist() == [5.0, 2.0, 5.0]

    def test_taking_rows_cuts_to_the_longest_of_them(self):
        batch = make_batch(play(*tiny(), EnvGroups("toys:Lottery", 4, 3)))
        short, middle, *longer = batch.lengths.unique().tolist()
        rows = torch.tensor([batch.lengths.tolist().index(n) for n in (short, middle)])
        assert batch.take(rows).tokens.shape == (2, middle) and longer
