"""The museum: famous bugs of this field in miniature, and that we do not have them.

Each exhibit names where it was seen. Most were found in public code by reading or running it.
"""

import subprocess
import sys

import pytest
import torch
from toys import puppet, tiny

from minragen import envs, starpo
from minragen.envs import EnvGroups
from minragen.models import CHAT_TEMPLATE, ChatFrame, token_logprobs
from minragen.rollout import KVSlots, Sampling, collect, forward_slots, make_batch


def episodes(groups=2, size=2, **options):
    policy, frame = tiny()
    return collect(policy, frame, EnvGroups("frozenlake", groups, size), 0, Sampling(), 0,
                   **{**dict(max_new_tokens=10, max_context=500), **options})


class TestMasks:
    def test_role_headers_forced_prefixes_and_next_turn_markers_are_not_trained(self):
        """RAGEN rebuilds the mask by counting <|im_start|> (ctx_manager.py; RAGEN#141): the role
        word, the forced <think> and the next turn's <|im_start|> were in the loss although nobody
        sampled them."""
        policy, frame = tiny()
        tokenizer = policy.tokenizer
        for t in episodes():
            sampled = [i for i, m in zip(t.tokens, t.response_mask) if m]
            assert sum(len([1 for k in t.turn_ids if k == turn])
                       for turn in range(len(t.turns))) == len(sampled)
            for position, mask in enumerate(t.response_mask):
                header = tokenizer.decode(t.tokens[max(0, position - 3):position + 1])
                assert not (mask and header == "<|im_start|>assistant\n<think>")
            counted = rebuilt_by_parity(t.tokens, tokenizer.convert_tokens_to_ids("<|im_start|>"))
            assert counted != t.response_mask  # what counting headers would have trained

    def test_a_sampled_marker_inside_a_reply_does_not_shift_the_mask(self):
        """Any mask that is rebuilt from special tokens breaks when the model samples one (RAGEN#71,
        #62)."""
        policy, frame = puppet()
        start_id = policy.tokenizer.convert_tokens_to_ids("<|im_start|>")
        groups = EnvGroups("frozenlake", 1, 1, budgets=dict(max_turns=2))
        start = len(frame.open(groups.envs[0].system_prompt, groups.reset(0)[0]))
        policy.model.script = {start: start_id, start + 1: start_id}
        t = collect(policy, frame, groups, 0, Sampling(), 0, 5, 500)[0]
        assert t.tokens[start:start + 2] == [start_id] * 2 and all(t.response_mask[start:start + 5])
        assert t.response_mask.index(True) == start and sum(t.response_mask) == 10

    def test_the_end_of_turn_that_was_sampled_is_trained_even_where_pad_equals_eos(self):
        """tiny-grpo (train.py:108) masks every eos because pad = eos; such a model never learns to
        stop. SmolLM2's tokenizer has pad = eos too. Padding is a matter of position here, not of
        id."""
        policy, frame = puppet()
        policy.tokenizer.pad_token = policy.tokenizer.eos_token
        try:
            groups = EnvGroups("frozenlake", 1, 1, budgets=dict(max_turns=1))
            start = len(frame.open(groups.envs[0].system_prompt, groups.reset(0)[0]))
            policy.model.script = {start: frame.encode(" a")[0], start + 1: frame.end_of_turn}
            batch = make_batch(collect(policy, frame, groups, 0, Sampling(), 0, 5, 500))
        finally:
            policy.tokenizer.pad_token = "<|pad|>"
        assert batch.tokens[0, start + 1] == frame.end_of_turn and batch.loss_mask[0, start + 1]


def rebuilt_by_parity(tokens, start_id):
    """RAGEN's rule: between odd and even header, counted along the sequence."""
    count, mask = 0, []
    for token in tokens:
        count += token == start_id
        mask.append(count % 2 == 1 and count > 1)
    return mask


class TestTokens:
    def test_a_reply_that_is_no_canonical_tokenisation_is_trained_as_it_was_sampled(self):
        """Decode, parse, render, encode (RAGEN ctx_manager.py:209; trl#5224; rllm#272): the ids
        change without the text changing, and the ratio starts far from 1."""
        policy, frame = puppet()
        # One word as seven byte tokens.
        spelt = policy.tokenizer.convert_tokens_to_ids(list("Ġplayer"))
        groups = EnvGroups("frozenlake", 1, 1, budgets=dict(max_turns=1))
        start = len(frame.open(groups.envs[0].system_prompt, groups.reset(0)[0]))
        policy.model.script = dict(enumerate(spelt, start))
        t = collect(policy, frame, groups, 0, Sampling(), 0, len(spelt), 500)[0]
        assert t.turns[0].text == " player" and frame.encode(t.turns[0].text) != spelt
        assert t.tokens[start:] == spelt

    def test_thoughts_of_earlier_turns_stay_although_the_template_would_drop_them(self):
        """Qwen3's template removes old <think> blocks, so turn n+1 does not extend turn n
        (verl#6854, gem#44)."""
        tokenizer = tiny()[0].tokenizer
        old, tokenizer.chat_template = tokenizer.chat_template, CHAT_TEMPLATE.replace(
            "m.content }}",
            "(m.content if m.role != 'assistant' else m.content.split('</think>')[-1]) }}", 1)
        try:
            frame = ChatFrame(tokenizer)
            first = frame.open("s", "one") + frame.encode(" plan A</think><answer> Up</answer>")
            second = first + frame.between(None, "two")
        finally:
            tokenizer.chat_template = old
        assert second[:len(first)] == first and "plan A" in tokenizer.decode(second)


class TestNormalisation:
    def test_prompt_tokens_do_not_dilute_the_loss(self):
        """nano-aha-moment overwrote its ignore markers through a view, so that the normaliser
        counted prompt and padding: 8 instead of 3 in its toy batch. Ours is the number of response
        tokens, and the inputs are what they were."""
        batch = make_batch(episodes())
        before = [v.clone() for v in (batch.tokens, batch.response_mask, batch.sample_logprobs)]
        logprobs, _ = token_logprobs(tiny()[0].model, batch.tokens, batch.response_mask)
        weights = starpo.loss_weights(batch.loss_mask)
        assert torch.isclose(starpo.aggregate(torch.ones_like(logprobs), weights),
                             torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(
            before, (batch.tokens, batch.response_mask, batch.sample_logprobs)))

    def test_entropy_is_the_entropy_and_not_minus_the_mean_logprob(self):
        """nano-aha-moment logs -mean(logprob of what was sampled) as entropy, and divides it
        twice."""
        batch = make_batch(episodes())
        logprobs, entropy = token_logprobs(tiny()[0].model, batch.tokens, batch.response_mask)
        mask = batch.response_mask
        assert not torch.allclose(entropy[mask], -logprobs[mask], atol=0.1)
        exact = token_entropy(tiny()[0].model, batch.tokens, mask)
        assert torch.allclose(entropy[mask], exact, atol=1e-4)

    def test_the_advantage_does_not_overwrite_the_reward(self):
        """GRPO-Zero (grpo.py:128) stores the normalised advantage in `reward`, so the name lies
        afterwards."""
        batch = make_batch(episodes())
        before = batch.episode_returns.clone()
        starpo.group_advantages(batch.episode_returns, batch.group_ids, batch.response_mask)
        assert torch.equal(before, batch.episode_returns)

    def test_equal_prompts_in_different_groups_stay_different_groups(self):
        """GRPO-Zero groups by the prompt's text, so two groups with the same prompt merge into
        one."""
        policy, frame = tiny("bandit")
        played = collect(policy, frame, EnvGroups("bandit", 40, 2), 0, Sampling(), 0, 5, 300)
        prompts = {tuple(t.tokens[:t.response_mask.index(True)]) for t in played}
        assert len(prompts) <= 12 and make_batch(played).group_ids.unique().numel() == 40


def token_entropy(model, tokens, mask):
    log_p = model(tokens, use_cache=False).logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.nn.functional.pad(entropy[:, :-1], (1, 0))[mask]


class TestAttention:
    def test_appending_a_turn_attends_to_all_of_the_history(self):
        """With more keys than queries, scaled_dot_product_attention(is_causal=True) aligns its
        triangle to the top left (torch 2.13): the second turn's first token would see only the
        first token of the prompt."""
        q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 9, 8)
        wrong = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        right = torch.nn.functional.scaled_dot_product_attention(
            q, k, k, attn_mask=torch.ones(3, 9).tril(6).bool())
        assert (wrong - right).abs().max() > 0.1
        policy, _ = tiny()
        tokens = torch.randint(3, 200, (1, 12))
        slots = KVSlots(policy.model, 1, 12)
        forward_slots(policy.model, slots, tokens[:, :9], torch.tensor([9]))
        appended = forward_slots(policy.model, slots, tokens[:, 9:], torch.tensor([3]))
        assert torch.allclose(appended, policy.model(tokens, use_cache=False).logits[:, -1],
                              atol=1e-5)

    def test_a_model_cast_after_loading_would_round_its_rotary_frequencies(self):
        """model.to(bfloat16) rounds inv_freq as well (logits of SmolLM2 differ by 1.85 at 512
        tokens); models are loaded in their dtype instead, so the frequencies stay float32."""
        import copy
        model = copy.deepcopy(tiny()[0].model)
        exact = model.model.rotary_emb.inv_freq.clone()
        assert exact.dtype == torch.float32
        assert not torch.equal(model.to(torch.bfloat16).model.rotary_emb.inv_freq.float(), exact)


class TestGroups:
    def test_members_share_their_instance(self):
        """RAGEN's Bandit adds a construction counter to the seed: 16 members, several different
        prompts."""
        groups = EnvGroups("bandit", 3, 16)
        observations = groups.reset(7)
        assert all(len(set(observations[16 * g:16 * g + 16])) == 1 for g in range(3))

    def test_members_do_not_share_their_luck(self):
        """RAGEN's FrozenLake seeds the slips like the map: equal actions slip equally in all 16
        members, and validation repeats the same slips for ever."""
        groups = EnvGroups("frozenlake", 1, 16, options={"slip": 0.6})
        groups.reset(3)
        ends = {str([groups.envs[m].step("Up || Down")[0] for _ in range(1)]) for m in range(16)}
        assert len(ends) > 1

    def test_instances_do_not_depend_on_pythons_salted_hash(self):
        """RAGEN's FrozenLake and Sokoban retry with hash(str(seed)), which differs in every process
        (VAGEN#45)."""
        code = ("from minragen import envs; e = envs.make('frozenlake'); "
                "print([e.reset(seed=s)[0] for s in range(20)])")
        outputs = {subprocess.run([sys.executable, "-c", code],
                                  env={"PYTHONHASHSEED": salt, "PATH": ""},
                                  capture_output=True, text=True, check=True).stdout
                   for salt in ("1", "2")}
        assert len(outputs) == 1

    def test_the_corner_in_the_prompt_is_the_boards_own(self):
        """RAGEN's CoordFrozenLake tells the model that a 4x4 board ends at (5, 5)."""
        assert "(3, 3)" in envs.make("frozenlake").system_prompt
        assert "(7, 7)" in envs.make("frozenlake", size=8).system_prompt

    def test_the_penalty_for_bad_form_is_in_the_turns_reward(self):
        """RAGEN drops its format penalty as soon as rewards are given per turn
        (use_turn_scores)."""
        env = envs.make("frozenlake")
        env.reset(seed=0)
        assert env.step("nonsense")[1] == envs.FORMAT_PENALTY


class TestOptions:
    def test_an_unknown_option_is_never_dropped(self):
        """nano-vllm silently ignores unknown keyword arguments: LLM(max_modle_len=...) does
        nothing."""
        with pytest.raises(ValueError, match="did you mean 'size'"):
            envs.make("frozenlake", siz=5)
        with pytest.raises(TypeError):
            Sampling(temprature=1.0)

    def test_k1_as_a_loss_is_refused(self):
        """RAGEN's KL sweeps use k1 as a loss; its expected gradient is zero, so they measured
        noise."""
        with pytest.raises(ValueError, match="expectation 0"):
            starpo.kl_loss(torch.zeros(1), torch.zeros(1), "k1")
