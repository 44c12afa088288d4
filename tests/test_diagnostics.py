"""Collapse seen early: information, retrieval, regimes, warnings, gradients by bucket."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from toys import tiny
from transformers import LlamaConfig, LlamaForCausalLM

from minragen import diagnostics, models
from minragen.diagnostics import (
    Pair,
    buckets,
    collapse_metrics,
    distinct_ngrams,
    first_turns,
    gradient_metrics,
    information,
    plot_gradients,
    reasoning_pairs,
    regime,
    reply_metrics,
    retrieval,
    score_matrix,
    trajectory_uniform,
    warnings_of,
)
from minragen.envs import EnvGroups
from minragen.models import AdamW, ChatFrame, Policy, token_logprobs
from minragen.rollout import Sampling, Trajectory, collect

RUNS = sorted((Path(__file__).parent.parent / "runs").glob("readme-*/metrics.jsonl"))


def spoken(frame, group, *turns, prompt="state"):
    """A trajectory of the given replies; the prompt of turn k is `prompt` and all before it."""
    t = Trajectory("toy", group, group, 0)
    t.given(frame.encode(f"{prompt}<think>"))
    for k, reply in enumerate(turns):
        ids = frame.encode(reply) if isinstance(reply, str) else reply
        t.sampled(ids, [0.0] * len(ids), k)
        t.given(frame.encode("next<think>"))
    return t


def text_of(frame, pairs):
    return [frame.tokenizer.decode(p.reasoning) for p in pairs]


class TestReasoning:
    def test_it_is_the_sampled_ids_before_the_closing_tag(self):
        _, frame = tiny()
        thought, rest = frame.encode(" player (0, 1)"), frame.encode("</think><answer> Up</answer>")
        t = spoken(frame, 0, thought + rest)
        (pair,), turns = reasoning_pairs(frame, [t])
        assert pair.reasoning == tuple(thought) and turns == 1
        assert pair.prompt == tuple(frame.encode("state<think>"))

    def test_the_prompt_of_a_later_turn_is_everything_before_its_first_sampled_id(self):
        _, frame = tiny()
        t = spoken(frame, 0, " a</think> b", " c</think> d")
        second = reasoning_pairs(frame, [t])[0][1]
        assert list(second.prompt) == frame.encode(
            "state<think> a</think> bnext<think>") and second.turn == 1

    def test_a_token_that_shares_a_character_with_the_tag_is_left_out(self):
        """A tokenizer that merges "ok</" and ">x": only what lies wholly before the tag counts."""
        pieces = ["so ", "ok", ".</", "think", ">x", "</think>", "a<", "/thi", "nk", "> y"]
        frame = toy_frame(pieces)
        for words, kept in ((["so ", "ok", ".</", "think", ">x"], 2),
                            (["so ", "ok", "</think>"], 2),
                            (["so ", "a<", "/thi", "nk", "> y"], 1),
                            ([".</", "think", ">x"], 0),
                            (["so ", "ok", "think", ">x"], 0),
                            (["so ", "</think>", "ok", "</think>"], 1)):
            ids = [pieces.index(w) for w in words]
            pairs, turns = reasoning_pairs(frame, [sampled_only(ids)])
            assert [p.reasoning for p in pairs] == ([tuple(ids[:kept])] if kept else [])
            assert turns == 1

    def test_a_tag_spelt_in_bytes_is_a_tag(self):
        policy, frame = tiny()
        tag = [policy.tokenizer.convert_tokens_to_ids(c) for c in "</think>"]
        thought = frame.encode(" goal")
        pairs, _ = reasoning_pairs(frame, [spoken(frame, 0, thought + tag)])
        assert pairs[0].reasoning == tuple(thought)

    def test_blank_and_unclosed_reasoning_is_none(self):
        _, frame = tiny()
        t = spoken(frame, 0, "</think>", " \n</think>", " never closed", " a</think>")
        pairs, turns = reasoning_pairs(frame, [t])
        assert text_of(frame, pairs) == [" a"] and turns == 4
        assert reply_metrics(frame, [t])["valid_thinking"] == 0.25

    def test_structured_reasoning_goes_up_to_the_closing_tag(self):
        _, frame = tiny()
        inner = "<observation> player</observation><reasoning> goal</reasoning>"
        pairs, _ = reasoning_pairs(frame, [spoken(frame, 0, inner + "</think><answer> Up")])
        assert text_of(frame, pairs) == [inner]

    def test_turn_wise_samples_are_read_one_by_one(self):
        _, frame = tiny()
        whole = spoken(frame, 0, " a</think>", " c</think>")
        second = Trajectory("toy", 0, 0, 0)
        second.given(frame.encode("summary<think>"))
        second.sampled(frame.encode(" c</think>"), [0.0] * 2, 1)
        pairs, turns = reasoning_pairs(frame, [SimpleNamespace(samples=[whole, second])])
        assert [p.turn for p in pairs] == [0, 1, 1] and turns == 3
        assert list(pairs[2].prompt) == frame.encode("summary<think>")

    def test_a_format_without_thinking_has_nothing_to_measure(self):
        policy, _ = tiny()
        with pytest.raises(ValueError, match="nothing to measure"):
            reasoning_pairs(ChatFrame(policy.tokenizer, "no_think"), [])


def toy_frame(pieces):
    """A frame whose tokenizer joins the given pieces."""
    return SimpleNamespace(thinks=True, may_close=torch.tensor([">" in p for p in pieces]),
                           tokenizer=SimpleNamespace(
                               decode=lambda ids: "".join(pieces[i] for i in ids)))


def sampled_only(ids):
    t = Trajectory("toy", 0, 0, 0)
    t.given([0])
    t.sampled(ids, [0.0] * len(ids), 0)
    return t


class TestSamplers:
    PAIRS = [Pair(i, k, (i, k), (1,)) for i in range(10) for k in range(1 + i % 4)]

    @pytest.mark.parametrize("draw", [first_turns, trajectory_uniform])
    @pytest.mark.parametrize("num_samples", [0, 1, 7, 100])
    def test_no_pair_is_drawn_twice(self, draw, num_samples):
        drawn = draw(self.PAIRS, num_samples, np.random.default_rng(0))
        available = [p for p in self.PAIRS if p.turn == 0] if draw is first_turns else self.PAIRS
        assert len(set(drawn)) == len(drawn) == min(num_samples or 100, len(available))
        assert set(drawn) <= set(available)

    def test_a_trajectory_counts_the_same_however_many_turns_it_has(self):
        rng = np.random.default_rng(0)
        pairs = [Pair(0, k, (), ()) for k in range(9)] + [Pair(1, 0, (), ())]
        share = np.mean([trajectory_uniform(pairs, 1, rng)[0].trajectory for _ in range(2000)])
        assert abs(share - 0.5) < 0.04

    def test_they_touch_no_global_generator_and_depend_on_the_seed_alone(self):
        np.random.seed(3)
        before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
        policy, frame = tiny()
        played = [spoken(frame, g, " a b</think>", prompt=f"({g}, {g})") for g in range(5)]
        twice = [collapse_metrics(policy, frame, played, {}, seed=4, num_samples=3)
                 for _ in range(2)]
        assert all(twice[0][k] == twice[1][k] for k in twice[0] if not k.endswith("seconds"))
        assert (np.random.get_state()[1] == before).all()
        assert torch_before.equal(torch.get_rng_state())


class TestScores:
    PROMPTS = [(5, 6, 7), (9,), (4, 8, 9, 10, 11, 12, 3), (5, 6, 8)]
    REASONINGS = [(20, 21, 22), (23,), (20, 24), (25, 26, 27, 28, 29)]

    @staticmethod
    def slow(model, prompts, reasonings, temperature=1.0):
        """One plain forward pass for every pair."""
        scores = torch.zeros(len(reasonings), len(prompts))
        for i, z in enumerate(reasonings):
            for j, x in enumerate(prompts):
                logits = model(torch.tensor([[*x, *z]]), use_cache=False).logits[0] / temperature
                log_p = logits.log_softmax(-1)
                scores[i, j] = sum(log_p[len(x) - 1 + t, token] for t, token in enumerate(z))
        return scores.double()

    @pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
    def test_shared_prompts_and_reasonings_side_by_side_equal_one_pass_for_every_pair(self, kind):
        model, _ = small_model(kind)
        scores, tokens = score_matrix(model, self.PROMPTS, self.REASONINGS, 0.7)
        with torch.no_grad():
            expected = self.slow(model, self.PROMPTS, self.REASONINGS, 0.7)
        assert torch.allclose(scores, expected, atol=1e-4)
        assert tokens == 14 + 4 * 7  # prompts once, and all but the last token of each reasoning

    @pytest.mark.parametrize("budget", [1, 6, 17, 10**6])
    def test_the_token_budget_changes_nothing_and_holds(self, budget, monkeypatch):
        model, _ = small_model("llama")
        whole, _ = score_matrix(model, self.PROMPTS, self.REASONINGS)
        sizes, original = [], model.model.forward
        monkeypatch.setattr(model.model, "forward", lambda **kw: (
            sizes.append(kw["input_ids"].numel()), original(**kw))[1])
        small, _ = score_matrix(model, self.PROMPTS, self.REASONINGS, token_budget=budget)
        assert torch.allclose(small, whole, atol=1e-5)
        # What cannot be cut, one prompt or one reasoning, may exceed it.
        assert max(sizes) <= max(budget, 7)

    def test_a_matched_score_is_the_sum_of_the_logprobs_recorded_while_sampling(self):
        policy, frame = tiny()
        model = copy.deepcopy(policy.model)
        close = policy.tokenizer.convert_tokens_to_ids("</think>")
        with torch.no_grad():  # an untrained model that does close its tag now and then
            model.model.embed_tokens.weight[close] *= 4
        played = collect(Policy("closes", model, policy.tokenizer), frame,
                         EnvGroups("frozenlake", 3, 4), 0, Sampling(), max_new_tokens=16)
        pairs, _ = reasoning_pairs(frame, played)
        assert len(pairs) > 5
        for p in pairs:
            t = played[p.trajectory]
            start = len(p.prompt)
            recorded = sum(t.sample_logprobs[start:start + len(p.reasoning)])
            score = score_matrix(model, [p.prompt], [p.reasoning])[0]
            assert abs(float(score) - recorded) < 1e-4


def small_model(kind):
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, max_position_embeddings=128)
    kinds = {"llama": (LlamaConfig, dict(num_key_value_heads=2)),
             "qwen3": (transformers.Qwen3Config, dict(num_key_value_heads=2, head_dim=8)),
             "gpt_neox": (transformers.GPTNeoXConfig, {})}
    config, extra = kinds[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config(**sizes, **extra), attn_implementation="sdpa").eval()
        for p in model.parameters():
            p.data.add_(torch.randn_like(p), alpha=0.1)
    return model, config


class TestInformation:
    def test_independent_scores_carry_none(self):
        scores = torch.randn(30, 1).double().expand(30, 5)
        found = information(scores, torch.arange(30) % 5)
        assert abs(found["mi"]) < 1e-12 and abs(found["mi_zscore"]) < 1e-12
        assert math.isclose(found["reasoning_entropy"], found["conditional_entropy"])

    def test_a_reasoning_that_names_its_prompt_carries_the_logarithm_of_their_number(self):
        found = information(torch.where(torch.eye(7) > 0, -2.0, -90.0), torch.arange(7))
        assert math.isclose(found["mi"], math.log(7))
        assert math.isclose(found["conditional_entropy"], 2.0)
        assert found["marginal_std"] < 1e-12
        assert math.isclose(found["mi_zscore"], math.log(7) / diagnostics.ZSCORE_EPS)

    def test_the_chain_rule_holds(self):
        found = information(-5 * torch.rand(40, 6).double(), torch.randint(6, (40,)))
        assert math.isclose(found["reasoning_entropy"],
                            found["mi"] + found["conditional_entropy"])

    def test_prompts_weigh_as_much_as_their_rows(self):
        """Two prompts, three rows of one and one of the other, every reasoning certain: the
        information is the entropy of (3/4, 1/4). Columns that all weigh the same give log 2."""
        own = torch.tensor([0, 0, 0, 1])
        scores = torch.where(own[:, None] == torch.arange(2), 0.0, -99.0)
        expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
        assert math.isclose(information(scores, own)["mi"], expected) and expected < math.log(2)

    def test_the_estimate_equals_the_exact_information_of_a_known_channel(self):
        """Enumerate: every (x, z) as many rows as its probability in twentieths."""
        channel = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
        rows = [(x, z) for x in range(2) for z in range(3)
                for _ in range(round(20 * float(channel[x, z])))]
        scores = torch.stack([channel[:, z].log() for _, z in rows])
        mixture = channel.mean(0)
        exact = float((channel * (channel / mixture).log()).sum() / 2)
        assert math.isclose(information(scores, torch.tensor([x for x, _ in rows]))["mi"], exact)


class TestRetrieval:
    def test_a_perfect_score_is_one_and_a_reversed_one_is_zero(self):
        right = retrieval(torch.eye(9), torch.arange(9))
        wrong = retrieval(-torch.eye(9), torch.arange(9))
        assert right["retrieval"] == 1 and wrong["retrieval"] == 0 == wrong["retrieval@8"]

    def test_ties_everywhere_score_at_chance_whatever_the_columns_order(self):
        own = torch.tensor([0, 0, 3, 8, 8])
        # Rounding noise that favours column 0.
        scores = torch.zeros(5, 9)
        scores[:, 0] += 1e-7
        found = retrieval(scores, own)
        for at in ("", "@2", "@4", "@8"):
            assert math.isclose(found[f"retrieval{at}"], found[f"retrieval_chance{at}"],
                                rel_tol=1e-6)

    def test_a_tie_of_some_is_the_expectation_over_random_orders(self):
        found = retrieval(torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]]), torch.tensor([1]))
        assert found["retrieval"] == 0
        assert math.isclose(found["retrieval@2"], 1 / 3, rel_tol=1e-6)
        assert found["retrieval@4"] == 1

    def test_ranks_that_every_column_reaches_are_left_out(self):
        assert set(retrieval(torch.eye(3), torch.arange(3))) == {
            "retrieval", "retrieval_chance", "retrieval@2", "retrieval_chance@2"}


def deaf(policy):
    """The policy with attention that adds nothing: a bigram, which cannot see its prompt."""
    model = copy.deepcopy(policy.model)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return Policy("deaf", model, policy.tokenizer)


def naming(policy, names):
    """A hand-built Llama that says the name it finds in its context, whichever that is.

    The hidden state is [what I am | what I copied], one-hot. Attention with zero queries averages
    all that is visible; its values copy the left half, for names only, into the right half, which
    is all that the output layer reads.
    """
    size = len(policy.tokenizer)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=size, hidden_size=2 * size, intermediate_size=1, num_hidden_layers=1,
        num_attention_heads=1, head_dim=2 * size, max_position_embeddings=512,
        tie_word_embeddings=False)).eval()
    layer, one = model.model.layers[0], torch.eye(size)
    with torch.no_grad():
        for p in (layer.self_attn.q_proj.weight, layer.self_attn.v_proj.weight,
                  layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            p.zero_()
        model.model.embed_tokens.weight[:] = torch.cat([one, 0 * one], dim=1)
        layer.self_attn.v_proj.weight[names, names] = 1000.0
        layer.self_attn.o_proj.weight[size:, :size] = one
        model.lm_head.weight[:] = torch.cat([0 * one, 10 * one], dim=1)
    return Policy("naming", model, policy.tokenizer)


class TestPolicies:
    """Real forward passes of policies of which the answer is known beforehand."""

    PLACES = [f" ({r}, {c})" for r in range(4) for c in range(2)]

    def played(self, frame, members=2):
        return [spoken(frame, g, f"{place}</think>", prompt=f"player{place} goal")
                for g, place in enumerate(self.PLACES) for _ in range(members)]

    def test_one_that_ignores_its_input_has_no_information_and_retrieves_at_chance(self):
        policy, frame = tiny()
        found = collapse_metrics(deaf(policy), frame, self.played(frame), {})
        assert abs(found["first_turn/mi"]) < 1e-6
        assert abs(found["first_turn/mi_per_token"]) < 1e-6
        assert math.isclose(found["first_turn/retrieval"], 1 / 8)
        assert math.isclose(found["first_turn/retrieval@4"], 4 / 8)

    def test_one_that_names_its_input_has_all_of_it_and_retrieves_always(self):
        policy, frame = tiny()
        names = [frame.encode(place)[0] for place in self.PLACES]
        assert len(set(names)) == 8
        for members in (1, 3):
            found = collapse_metrics(naming(policy, names), frame, self.played(frame, members), {})
            for sampler in ("first_turn", "trajectory"):
                assert abs(found[f"{sampler}/mi"] - math.log(8)) < 1e-3
                assert math.isclose(found[f"{sampler}/mi_upper_bound"], math.log(8))
                assert found[f"{sampler}/retrieval"] == 1 and found[f"{sampler}/columns"] == 8
                assert found[f"{sampler}/rows"] == 8 * members

    def test_a_single_prompt_gives_no_metrics_and_no_reasoning_gives_none_either(self):
        policy, frame = tiny()
        ema = {}
        alike = [spoken(frame, 0, " goal</think>") for _ in range(4)]
        blank = [spoken(frame, g, "</think>", prompt=f"({g}, 0)") for g in range(4)]
        assert collapse_metrics(policy, frame, alike, ema) == {} == ema
        assert collapse_metrics(policy, frame, blank, ema) == {} == ema
        assert reply_metrics(frame, blank) == {"valid_thinking": 0.0}
        assert reply_metrics(frame, []) == {"valid_thinking": 0.0}

    def test_the_averaged_spread_is_carried_by_the_caller(self):
        policy, frame = tiny()
        ema = {"first_turn/marginal_std": 5.0}
        found = collapse_metrics(policy, frame, self.played(frame), ema)
        expected = 0.9 * 5.0 + 0.1 * found["first_turn/marginal_std"]
        assert math.isclose(ema["first_turn/marginal_std"], expected)
        assert math.isclose(found["first_turn/marginal_std_ema"], expected)
        assert math.isclose(found["first_turn/mi_zscore_ema"],
                            found["first_turn/mi"] / (expected + 1e-3))
        # A name that was not there starts at its first value.
        assert ema["trajectory/marginal_std"] == found["trajectory/marginal_std"]
        assert json.loads(json.dumps(ema)) == ema

    def test_the_numbers_in_the_documentation_are_the_constants(self):
        assert (diagnostics.NGRAM, diagnostics.NGRAM_DRAWS) == (3, 256)
        assert (diagnostics.EMA, diagnostics.ZSCORE_EPS) == (0.9, 0.001)
        assert diagnostics.RETRIEVAL_RANKS == (1, 2, 4, 8)


class TestDistinctNgrams:
    def test_the_closed_form_is_the_average_over_draws(self):
        rng = np.random.default_rng(0)
        grams = [(g,) for g in rng.integers(0, 30, 120).tolist()]
        drawn = [len({grams[i] for i in rng.choice(120, 40, replace=False)}) / 40
                 for _ in range(3000)]
        assert abs(distinct_ngrams(grams, 1, 40) - np.mean(drawn)) < 0.005

    def test_the_size_of_the_batch_does_not_drive_it(self):
        rng = np.random.default_rng(1)
        said = [tuple(rng.integers(0, 8, 12).tolist()) for _ in range(2000)]
        small, large = distinct_ngrams(said[:100]), distinct_ngrams(said)
        plain = [len({s[k:k + 3] for s in part for k in range(10)}) / (10 * len(part))
                 for part in (said[:100], said)]
        assert abs(small - large) < 0.02 and plain[0] > 5 * plain[1]

    def test_one_text_for_all_is_low_and_different_texts_are_one(self):
        assert distinct_ngrams([(1, 2, 3, 4, 5)] * 100) < 0.02
        apart = [tuple(range(10 * i, 10 * i + 10)) for i in range(50)]
        assert math.isclose(distinct_ngrams(apart), 1)
        assert distinct_ngrams([(1,), (1,), (2,)]) == 2 / 3 and distinct_ngrams([]) == 0


def measured(mi, entropy, retrieved, columns=16, thinking=1.0):
    return {"first_turn/mi": mi, "first_turn/conditional_entropy_per_token": entropy,
            "first_turn/retrieval": retrieved, "first_turn/retrieval_chance": 1 / columns,
            "first_turn/rows": 64, "first_turn/columns": columns, "valid_thinking": thinking}


class TestRegimes:
    FIRST = measured(2.0, 0.4, 0.9)

    @pytest.mark.parametrize("now, label", [
        (measured(1.8, 0.5, 0.8), "diverse"),
        (measured(0.3, 0.5, 0.4), "template collapse"),
        (measured(1.8, 0.5, 0.1), "template collapse"),  # within two errors of chance
        (measured(2.0, 0.1, 1.0), "compressed"),
        (measured(0.1, 0.1, 0.06), "low-entropy collapse"),
        (measured(1.8, 0.5, 0.8, thinking=0.4), "undetermined"),
        (measured(1.8, 0.5, 0.8, columns=3), "undetermined"),
        ({"valid_thinking": 1.0}, "undetermined")])
    def test_each_is_recognised(self, now, label):
        assert regime(self.FIRST, now) == label

    def test_reasoning_that_was_deterministic_from_the_start_is_compressed_and_not_diverse(self):
        first = measured(2.0, 0.01, 1.0)
        assert regime(first, first) == regime(first, measured(2.0, 0.004, 1.0)) == "compressed"
        assert regime(first, measured(0.1, 0.02, 0.1)) == "low-entropy collapse"
        assert regime(first, measured(0.1, 0.3, 0.1)) == "template collapse"

    def test_the_first_measurement_of_a_policy_that_ignores_its_input_is_a_collapse_already(self):
        blind = measured(0.0, 0.4, 1 / 16)
        assert regime(blind, blind) == "template collapse"


def history(steps=60, **series):
    """A healthy run, in which the given metrics are functions of the step."""
    healthy = dict(success=lambda s: 0.3 + 0.008 * s, reward_std=lambda s: 0.4 - 0.003 * s,
                   entropy=lambda s: 0.4 * 0.985**s, grad_norm=lambda s: 0.5 + 0.3 * (s % 3),
                   distinct_3=lambda s: 0.6 - 0.003 * s, valid=lambda s: 0.9)
    wobble = np.random.default_rng(0).uniform(0.9, 1.1, (steps + 1, 6))
    return [{"step": s} | {name: f(s) * w for (name, f), w in
                           zip((healthy | series).items(), wobble[s].tolist())}
            for s in range(1, steps + 1)]


def told(run):
    """{step: warnings} of a whole run."""
    steps = {run[k - 1]["step"]: warnings_of(run[:k]) for k in range(1, len(run) + 1)}
    return {step: sentences for step, sentences in steps.items() if sentences}


class TestWarnings:
    def test_a_healthy_run_has_none(self):
        assert told(history()) == {}

    @pytest.mark.parametrize("words, broken", [
        ("reward spread", dict(reward_std=lambda s: 0.4 if s < 30 else 0.01)),
        ("stopped exploring", dict(entropy=lambda s: 0.4 if s < 30 else 0.02)),
        ("incoherent", dict(entropy=lambda s: 0.4 if s < 30 else 2.0)),
        ("gradient norm", dict(grad_norm=lambda s: 0.5 if s < 30 else 5.0)),
        ("lost the response format", dict(valid=lambda s: 0.9 if s < 30 else 0.2)),
        ("repeat each other", dict(distinct_3=lambda s: 0.6 if s < 30 else 0.1))])
    def test_each_is_given_once_when_its_condition_becomes_true(self, words, broken):
        found = told(history(**broken))
        assert len(found) == 1
        (step, sentences), = found.items()
        assert 30 <= step <= 40 and len(sentences) == 1 and words in sentences[0]
        assert sentences[0].endswith(".")

    def test_a_run_that_dies_at_once_is_told_before_any_window_is_full(self):
        (step, (sentence,)), = told(history(12, valid=lambda s: float(s < 2))).items()
        assert step == 4 and "lost the response format" in sentence

    def test_a_solved_run_is_not_an_echo_trap(self):
        def after(before, then):
            return lambda s: before if s < 30 else then

        quiet = dict(reward_std=after(0.4, 0.0), entropy=after(0.4, 0.01),
                     distinct_3=after(0.6, 0.05))
        assert told(history(**quiet, success=lambda s: min(1.1, s / 25))) == {}
        assert len(sum(told(history(**quiet)).values(), [])) == 3

    def test_a_single_large_gradient_is_no_spike(self):
        assert told(history(grad_norm=lambda s: 2.0 if s == 30 else 0.5)) == {}

    def test_one_that_comes_back_after_a_long_silence_is_given_again(self):
        found = told(history(100, grad_norm=lambda s: 5.0 if s in (30, 31, 32, 80, 81, 82) else 1))
        assert len(found) == 2

    def test_template_collapse_is_told_at_the_measurement_that_shows_it(self):
        run = history(40)
        for s in (1, 11, 21, 31):
            run[s - 1] |= measured(2.0, 0.4, 0.9) if s < 21 else measured(0.1, 0.4, 0.1)
        (step, (sentence,)), = told(run).items()
        assert step == 21 and sentence.startswith("template collapse: the reasoning no longer")

    def test_missing_none_and_infinite_values_are_passed_over(self):
        run = history()
        for line in run[::3]:
            line |= {"grad_norm": None, "entropy": math.nan}
        for line in run[::4]:
            del line["distinct_3"]
        run = [{"step": 0, "val/success": 0.1}, *run, {"step": 60, "test/success": 0.2}]
        assert told(run) == {}
        assert warnings_of([]) == []

    @pytest.mark.parametrize("path", RUNS, ids=lambda p: p.parent.name)
    def test_the_runs_of_the_readme_have_none(self, path):
        assert told([json.loads(line) for line in path.read_text().splitlines()]) == {}


class Bowl(torch.nn.Module):
    """Per-token losses with gradients that are easy to take one by one: rows of 1, 2 or 3
    tokens."""

    def __init__(self, rows=14):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(3, generator=generator))
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.x = torch.randn(rows, 3, 3, generator=generator)
        self.tokens = torch.arange(rows) % 3 + 1

    def components(self, rows):
        y = torch.cat([self.x[r, :self.tokens[r]] @ self.weight for r in rows.tolist()])
        return {"task": (y**2).sum(), "entropy": -0.1 * y.sin().sum(),
                "kl": torch.zeros(())}, int(self.tokens[rows].sum())


def bucket_metrics(num_buckets=3, piece=2):
    bowl, group_ids = Bowl(), torch.tensor([9, 9, 4, 4, 7, 7, 2, 2, 5, 5, 3, 3, 8, 8])
    # In the order of group id: 2, 3, 4, 5, 7, 8, 9.
    spread = torch.tensor([0.3, 0.1, 0.9, 0.0, 0.5, 0.2, 0.7])
    return gradient_metrics(list(bowl.parameters()), bowl.components, spread, group_ids,
                            lambda rows: rows.split(piece), num_buckets), bowl


class TestGradients:
    # Spread ascending: groups 5, 3, 8 | 2, 7 | 9, 4.
    ROWS = {"bucket_1": [8, 9, 10, 11, 12, 13], "bucket_2": [4, 5, 6, 7], "bucket_3": [0, 1, 2, 3],
            "all": range(14)}

    @staticmethod
    def slow(bowl, rows, part):
        """The gradient of the bucket's token mean, at once."""
        sums, tokens = bowl.components(torch.tensor(list(rows)))
        (sums[part] / tokens).backward()
        gradient, bowl.weight.grad = bowl.weight.grad, None
        return gradient

    def test_each_buckets_norm_is_that_of_its_own_token_mean(self):
        metrics, bowl = bucket_metrics()
        for bucket, rows in self.ROWS.items():
            assert metrics[f"gradient/{bucket}/tokens"] == bowl.tokens[list(rows)].sum()
            assert metrics[f"gradient/{bucket}/rows"] == len(rows)
            for part in ("task", "entropy"):
                expected = float(self.slow(bowl, rows, part).norm())
                assert math.isclose(metrics[f"gradient/{bucket}/{part}"], expected, rel_tol=1e-5)

    def test_the_buckets_add_up_to_the_whole_by_their_tokens(self):
        _, bowl = bucket_metrics()
        total = sum(self.slow(bowl, rows, "task") * int(bowl.tokens[rows].sum())
                    for name, rows in self.ROWS.items() if name != "all")
        assert math.isclose(bucket_metrics()[0]["gradient/all/task"],
                            float(total.norm()) / int(bowl.tokens.sum()), rel_tol=1e-5)

    def test_the_split_into_micro_batches_does_not_matter(self):
        assert bucket_metrics(piece=1)[0] == pytest.approx(bucket_metrics(piece=99)[0], rel=1e-5)

    def test_spread_and_sizes_of_a_bucket_are_reported(self):
        metrics, _ = bucket_metrics()
        got = [metrics[f"gradient/bucket_1/{n}"] for n in
               ("groups", "reward_std", "reward_std_min", "reward_std_max")]
        assert got == pytest.approx([3, 0.1, 0.0, 0.2])

    def test_buckets_are_ascending_and_as_equal_as_can_be(self):
        spread = torch.rand(8)
        parts = buckets(spread, 6)
        assert [len(p) for p in parts] == [2, 2, 1, 1, 1, 1]  # RAGEN: 1, 1, 1, 1, 1, 3
        assert torch.equal(torch.cat(parts), spread.argsort())
        assert [len(p) for p in buckets(spread[:2], 6)] == [1, 1]

    def test_one_group_is_one_bucket_and_an_empty_one_has_sizes_and_no_norms(self):
        bowl, one = Bowl(2), torch.tensor([3, 3])
        metrics = gradient_metrics(bowl.parameters(), bowl.components, torch.tensor([0.4]), one,
                                   lambda rows: [rows])
        assert metrics["gradient/bucket_1/task"] == metrics["gradient/all/task"] > 0
        silent = gradient_metrics(bowl.parameters(), lambda rows: ({}, 0), torch.tensor([0.4]), one,
                                  lambda rows: [rows])
        assert silent["gradient/bucket_1/rows"] == 2
        assert "gradient/bucket_1/task" not in silent
        none = gradient_metrics(bowl.parameters(), bowl.components, torch.zeros(0),
                                torch.zeros(0, dtype=torch.int64), lambda rows: [rows])
        assert none == {"gradient/all/groups": 0, "gradient/all/rows": 0,
                        "gradient/all/tokens": 0}

    def test_a_spread_for_other_groups_is_refused(self):
        with pytest.raises(ValueError, match="got 1 spreads, expected one for each of the 2"):
            gradient_metrics([], None, torch.zeros(1), torch.tensor([0, 1]), None)

    def test_a_policys_gradients_leave_nothing_behind(self, monkeypatch):
        """In bfloat16 the masters of the optimizer are filled by hooks, which must not fire; and
        the chunks of the output layer, computed again in each backward pass, must allow several."""
        policy, _ = tiny()
        model = copy.deepcopy(policy.model).bfloat16()
        optimizer = AdamW(model.parameters(), 1e-3)
        before = copy.deepcopy(model.state_dict())
        tokens = torch.randint(3, 200, (4, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(4, 9, dtype=torch.bool)
        mask[:, 0] = False

        def components(rows):
            logprobs, entropy = token_logprobs(model, tokens[rows], mask[rows])
            return {"task": -logprobs.sum(), "entropy": -entropy.sum()}, int(mask[rows].sum())

        args = (list(model.parameters()), components, torch.tensor([0.1, 0.2]),
                torch.tensor([0, 0, 1, 1]), lambda rows: rows.split(2))
        whole = gradient_metrics(*args)
        monkeypatch.setattr(models, "LOGIT_BUDGET", 5 * model.config.vocab_size)
        assert gradient_metrics(*args) == pytest.approx(whole, rel=0.05)
        assert all(p.grad is None for p in [*model.parameters(), *optimizer.masters])
        assert not optimizer.inner.state
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    def test_the_figure_is_drawn(self, tmp_path):
        plot_gradients(bucket_metrics()[0], tmp_path / "gradients.png")
        assert (tmp_path / "gradients.png").stat().st_size > 5000
