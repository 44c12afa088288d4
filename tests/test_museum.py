"""The museum: famous bugs of this field. Each exhibit rebuilds a bug in miniature, shows the wrong
result, and asserts that minRAGEN does not give it. Its docstring names where the bug was seen."""

import copy
import itertools
import zlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_chat import family
from torch.nn.functional import pad, scaled_dot_product_attention
from toys import puppet, sampled, scripted, tiny

from minragen import cache, envs, models, starpo
from minragen import config as settings
from minragen import train as trainer
from minragen.config import Config
from minragen.envs import EnvGroups, Observation
from minragen.models import Policy, token_logprobs
from minragen.more.estimators import bi_level_gae
from minragen.rollout import Rules, collect
from minragen.run import bundled, runs
from minragen.run.load import load_policy
from minragen.train import Learner
from minragen.trajectory import StopReason, Trajectory, make_batch


def written(*rows):
    """A batch of one-turn trajectories (group, return, tokens of the reply) after equal prompts."""
    trajectories = []
    for member, (group, episode_return, length) in enumerate(rows):
        t = Trajectory("frozenlake", group, group, member, turn_rewards=[episode_return],
                               turns=[SimpleNamespace(observation=Observation(""))])
        t.add_prompt([3, 4, 5])
        t.add_reply([*range(10, 10 + length)], [0.0] * length, 0)
        trajectories.append(t)
    return make_batch(trajectories)


def with_targets(batch):
    """The batch with all that the losses need."""
    return trainer.compute_targets(Learner(*tiny(), None), batch, Config())[0]


def student():
    """A learner with a copy of the untrained tiny policy."""
    policy, frame = tiny()
    policy = Policy("tiny", copy.deepcopy(policy.model), policy.tokenizer)
    return Learner(policy, frame, models.AdamW(policy.model.parameters(), 0.0))


def mask_by_headers(tokens, header):
    """RAGEN's rule: what follows the third, fifth, ... <|im_start|> is the model's."""
    before = itertools.accumulate((token == header for token in tokens[:-1]), initial=0)
    return [count % 2 == 1 and count > 1 for count in before]


class TestMask:
    def test_only_sampled_tokens_are_trained(self):
        """RAGEN ctx_manager.py:38 counts headers: it trains the role word, the forced prefix and
        the next header (RAGEN#141), and observations once the model samples a header (RAGEN#71)."""
        header = puppet()[1].encode("<|im_start|>")[0]
        for reply, wrong in (
                ([40, 41, 42], "assistant\n<think><|im_end|>\n<|im_start|>assistant\n<think>"),
                ([40, header, 41], "assistant\n<think>user\nReward: -0.1\nNo valid action")):
            t, frame, _ = scripted(reply, turns=2)
            theirs, (row,) = mask_by_headers(t.tokens, header), t.sequences
            extra = [i for i, m, ours in zip(t.tokens, theirs, row.response_mask) if m and not ours]
            assert frame.tokenizer.decode(extra).startswith(wrong)
            assert sampled(row) == [*reply, 0, 0, 0]

    def test_observations_are_not_in_the_loss(self):
        """Search-R1 masks what it retrieves (Jin et al. 2025, section 3.1; Search-R1#108). Without
        a mask, most of the loss is about text that the environment wrote."""
        t, frame, start = scripted([40, 41, 42], turns=2)
        batch = with_targets(make_batch([t]))
        after_the_prompt = torch.arange(len(t.tokens))[None] >= start
        observed = after_the_prompt & ~batch.response_mask
        assert starpo.loss_weights(after_the_prompt)[observed].sum() > 0.8
        assert starpo.loss_weights(batch.response_mask)[observed].sum() == 0

    def test_the_sampled_end_of_turn_is_trained_even_where_it_is_the_padding_token(self):
        """tiny-grpo train.py:108 masks the padding token, which ends the turn in SmolLM2's
        tokenizer; minimind train_agent.py:123 drops it. The model never learns to stop."""
        tokenizer = copy.deepcopy(tiny()[0].tokenizer)
        end, tokenizer.pad_token = tokenizer.eos_token_id, tokenizer.eos_token
        t, _, _ = scripted([40, end], tokenizer=tokenizer)
        assert [i for i in sampled(t.sequences[0]) if i != tokenizer.pad_token_id] == [40]
        batch = with_targets(make_batch([t]))
        assert batch.tokens[batch.response_mask].tolist() == [40, end]


class TestTokens:
    def test_a_reply_is_trained_in_the_ids_that_were_sampled(self):
        """RAGEN ctx_manager.py:209 (trl#5224, rllm#272) encodes decoded text: 7 ids become one."""
        in_bytes = tiny()[0].tokenizer.convert_tokens_to_ids(list("Ġplayer"))
        t, frame, start = scripted(in_bytes)
        assert t.turns[0].text == " player" and len(frame.encode(t.turns[0].text)) == 1
        assert t.tokens[start:] == in_bytes

    def test_the_forced_prefix_does_not_merge_with_the_reply(self):
        """Qwen2.5 has a token for ">\\n". If "<think>" and a reply that begins with a new line are
        encoded as one text (SkyRL#2092), the prefix takes its first token."""
        tokenizer = copy.deepcopy(tiny()[0].tokenizer)
        tokenizer.add_tokens([">\n"])
        reply = tokenizer.convert_tokens_to_ids(["Ċ", "U", "p"])
        t, frame, start = scripted(reply, tokenizer=tokenizer)
        as_one_text = frame.encode(tokenizer.decode(t.tokens))
        assert tokenizer.convert_ids_to_tokens(as_one_text)[-3:] == [">\n", "U", "p"]
        assert tokenizer.convert_ids_to_tokens(t.tokens[start - 1:]) == ["<think>", "Ċ", "U", "p"]

    def test_the_thoughts_of_earlier_turns_stay(self):
        """Qwen3's template drops them, so the next prompt is a new one (verl#6854, gem#44)."""
        tokenizer, _ = family("qwen3")
        reply = tokenizer(" plan A</think><answer> Up</answer>")["input_ids"]
        t, frame, start = scripted(reply, turns=2, room=900, tokenizer=tokenizer)
        system, user, assistant, observation, _ = t.messages()
        assistant["content"] = f"<think>{assistant['content']}"
        rendered = tokenizer.apply_chat_template([system, user, assistant, observation],
                                                 tokenize=False, add_generation_prompt=True)
        first_turn = t.tokens[:start + len(reply)]
        assert frame.encode(rendered)[:len(first_turn)] != first_turn and "plan" not in rendered
        appended = tokenizer.decode(t.tokens[:-len(reply)])
        assert appended.startswith(tokenizer.decode(first_turn))
        assert appended.endswith(rendered[rendered.index(observation["content"]):] + "<think>")


class TestLogprobs:
    def test_sampler_and_learner_use_one_temperature(self):
        """TRL's GRPO applied it in sampling only (trl#3029, trl#4159): most ratios are clipped."""
        groups = EnvGroups("frozenlake", 4, 1, budgets=dict(max_turns=1))
        batch = make_batch(collect(*tiny(), groups, 0, Rules(0.25, max_new_tokens=12)))
        learner, config = Learner(*tiny(), None), Config(temperature=0.25)
        batch, _ = trainer.compute_targets(learner, batch, config)
        with torch.no_grad():
            at_one, _ = token_logprobs(learner.policy.model, batch.tokens, batch.response_mask)
            _, measured = trainer.policy_losses(
                learner.policy, trainer.add_loss_weights(batch, config), config)
        ratio = (at_one - batch.sample_logprobs)[batch.response_mask].exp()
        assert ((ratio < 0.8) | (ratio > 1.28)).float().mean() > 0.7
        assert measured["logprob_gap"] < 1e-5 and measured["clip_fraction"] == 0

    def test_a_second_turn_attends_to_all_of_its_history(self):
        """scaled_dot_product_attention(is_causal=True), as in GRPO-Zero qwen2_model.py:143, aligns
        its triangle to the top left: the first token after a cache sees one key only."""
        q, k, v = torch.randn(3, 1, 1, 9, 8)
        appended = scaled_dot_product_attention(q[:, :, 6:], k, v, is_causal=True)
        assert appended[0, 0, 0].tolist() == pytest.approx(v[0, 0, 0].tolist())
        policy, tokens = tiny()[0], torch.arange(3, 15)[None]
        slots = cache.KVSlots(policy.model, 1, 12)
        policy.extend(slots, tokens[:, :9], torch.tensor([9]))
        logits = policy.extend(slots, tokens[:, 9:], torch.tensor([3]))
        expected = policy.model(tokens).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    def test_rotary_frequencies_are_not_rounded(self, tmp_path):
        """model.to(bfloat16) rounds them: SmolLM2's logits move by up to 1.85 at 512 tokens."""
        policy, _ = tiny()
        cast = copy.deepcopy(policy.model).to(torch.bfloat16).model.rotary_emb.inv_freq
        angles = 512 * (cast.float() - policy.model.model.rotary_emb.inv_freq)
        assert angles.abs().max() > 0.09  # radians
        bundled.save_folder(policy, tmp_path)
        loaded = load_policy(str(tmp_path), "meta").model
        assert loaded.dtype == torch.bfloat16
        assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
        assert load_policy(tmp_path, "meta", stored_dtype=True).model.dtype == torch.float32


class TestEpisodes:
    def test_an_episode_is_terminated_or_truncated_and_never_both(self):
        """RAGEN es_manager.py:211 sets both flags in a hole and when the actions run out."""
        def theirs(done, actions_left, success):
            return done or not actions_left, (done or not actions_left) and not success

        assert theirs(True, 3, False) == theirs(False, 0, False) == (True, True)
        env = envs.make("frozenlake", budget=envs.Budget(max_turns=2, max_actions_per_turn=2))
        env.reset(seed=0)
        assert [env.step("nothing")[2:4] for _ in range(2)] == [(False, False), (False, True)]
        env.reset(seed=0)
        env.holes[:] = True
        assert env.step("Left || Right")[2:4] == (True, False)

    def test_a_conversation_that_outgrows_the_context_ends_by_itself(self):
        """RAGEN gives 3,778 tokens to a model of 3,600; a ValueError ends the run (RAGEN#116)."""
        def generate(prompt, longest):
            if len(prompt) > longest:
                raise ValueError(f"Prompt length of {len(prompt)} is longer than {longest}.")

        t, frame, start = scripted([40] * 10, turns=2, room=20)
        with pytest.raises(ValueError, match="is longer than"):
            generate(t.tokens + frame.between(40, t.turns[0].observation), start + 20)
        assert (t.stop, len(t.tokens)) == (StopReason.CONTEXT, start + 10)


def instance_seeds(learner, rounds, seed=0):
    """The seeds of the instances that a learner plays in its next rounds of four groups."""
    config = Config(env="bandit", seed=seed, num_groups=4, max_new_tokens=1)
    groups = EnvGroups("bandit", 4, 1)
    return [t.seed for _ in range(rounds) for t in trainer.roll_out(learner, groups, config)]


class TestSeeds:
    def test_runs_rounds_and_groups_share_no_instance(self):
        """RAGEN's es_manager.py adds seed, counter and group; a reset advances the counter by 1."""
        theirs = [sum(parts) for parts in itertools.product(range(2), range(3), range(4))]
        ours = [s for run in range(2) for s in instance_seeds(Learner(*tiny(), None), 3, run)]
        assert len(set(theirs)) == 7 and len(set(ours)) == len(ours) == len(theirs)
        assert min(ours) > Config().val_size  # validation's seeds begin at 0

    def test_members_of_a_group_sample_with_noise_of_their_own(self):
        """verl#6857: members were counted within a worker's chunk; two chunks had equal seeds."""
        chunks = [("prompt", "prompt"), ("prompt", "prompt")]
        assert len({(prompt, n) for chunk in chunks for n, prompt in enumerate(chunk)}) == 2
        played = collect(*tiny(), EnvGroups("bandit", 1, 4), 0, Rules(max_new_tokens=6, max_rows=2))
        assert len({tuple(t.tokens) for t in played}) == 4

    def test_members_share_their_instance_and_not_their_luck(self):
        """RAGEN's Bandit adds a counter of constructions to the seed: a group has several prompts.
        RAGEN's FrozenLake seeds the slips like the map: equal actions slip equally."""
        counter, env = itertools.count(), envs.make("bandit")
        assert len({env.reset(seed=7 + next(counter))[0] for _ in range(16)}) > 4
        observations = EnvGroups("bandit", 2, 16).reset(7)
        assert [len(set(observations[:16])), len(set(observations[16:]))] == [1, 1]
        lakes = EnvGroups("frozenlake", 1, 16, options={"slip": 0.6})
        for reset, slips in ((lambda: [env.reset(seed=3) for env in lakes.envs], [1]),
                             (lambda: lakes.reset(3), range(2, 17))):
            reset()
            assert len({env.step("Up || Down")[0] for env in lakes.envs}) in slips

    def test_instances_do_not_depend_on_the_salt_of_hash(self):
        """RAGEN's FrozenLake and Sokoban use hash(str(seed)), which differs in every process
        (VAGEN#45). The salts below stand for processes."""
        theirs, ours, env = set(), set(), envs.make("frozenlake")
        for salt in ("a", "b"):
            with mock.patch("builtins.hash", lambda x, s=salt: zlib.crc32((s + str(x)).encode())):
                theirs.add(hash(str(3)))
                ours.add(tuple(env.reset(seed=seed)[0] for seed in range(20)))
        assert len(theirs) == 2 and len(ours) == 1

    def test_a_resumed_run_plays_no_batch_twice(self, tmp_path):
        """nano-aha-moment nano_r1_script.py:883 skips one batch too few when it resumes."""
        last = 2  # iterations 0, 1 and 2 are done
        assert [0, 1, 2, *itertools.islice(itertools.count(), last, last + 2)] == [0, 1, 2, 2, 3]
        stopped, resumed = student(), student()
        begun = instance_seeds(stopped, 3)
        runs.save_checkpoint(tmp_path, stopped)
        runs.load_trainer_state(runs.find_checkpoint(tmp_path), resumed)
        assert begun + instance_seeds(resumed, 2) == instance_seeds(student(), 5)


def bi_level_by_reward(rewards, mask, discount):
    """RAGEN's bi-level GAE for values of 0: a turn ends where the reward is not 0."""
    ends, worth = [t for t, reward in enumerate(rewards) if reward], {}
    for end, following in zip(ends[::-1], [None, *ends[:0:-1]]):
        worth[end] = rewards[end] + discount * worth.get(following, 0.0)
    return [worth[[e for e in ends if e >= t][0]] if m else 0.0 for t, m in enumerate(mask)]


class TestAdvantages:
    def test_a_turn_ends_where_it_ends_and_not_where_a_reward_is(self):
        """RAGEN core_algos.py:128. A turn without reward loses its discount, a last one raises an
        IndexError, and with a penalty on each token each token is a turn."""
        turn_ids = torch.tensor([[0, 0, -1, 1, 1]])
        with pytest.raises(IndexError):
            bi_level_by_reward([0, 1, 0, 0, 0], [1, 1, 0, 1, 1], 0.5)
        late, penalised = [0, 0, 0, 0, 1], [-0.1, -0.1, 0, -0.1, 1]
        for rewards, theirs, ours in ((late, [1, 1, 0, 1, 1], [0.5, 0.5, 0, 1, 1]),
                                   (penalised, [-0.05, 0.1, 0, 0.4, 1], [0.3, 0.4, 0, 0.9, 1])):
            assert bi_level_by_reward(rewards, [1, 1, 0, 1, 1], 0.5) == pytest.approx(theirs)
            got, _ = bi_level_gae(torch.tensor([rewards]).float(), torch.zeros(1, 5),
                                  turn_ids >= 0, turn_ids, gamma_turn=0.5)
            assert got[0].tolist() == pytest.approx(ours, abs=1e-6)

    def test_a_time_limit_is_worth_nothing(self):
        """Pardo et al. 2018 bootstrap: they add the value of the state at a time limit. Here V = 0
        after it. This is a choice: the limit is part of the task, and the prompt names it."""
        rewards, values, value_at_the_limit = torch.zeros(1, 2), torch.full((1, 2), 0.5), 0.5
        following = pad(values, (0, 1), value=value_at_the_limit)[:, 1:]
        assert (rewards + following - values).tolist() == [[0, 0]]
        got, _ = starpo.masked_gae(rewards, values, torch.ones(1, 2).bool(), lam=0.0)
        assert got.tolist() == [[0, -0.5]]


class TestLoss:
    def test_prompt_and_padding_are_not_counted(self):
        """nano-aha-moment utils.py:190 counts ignored labels too: 10 tokens and not 3. verl divides
        "seq-mean-token-sum-norm" by the width of the padded batch, Dr. GRPO by a constant."""
        batch = with_targets(written((0, 1.0, 1), (0, 0.0, 2)))
        labels = torch.where(batch.response_mask, batch.tokens, -100)
        labels[:][labels == -100] = 0
        assert (labels != -100).sum() == 10
        weights = starpo.loss_weights(batch.response_mask)
        assert weights.unique().tolist() == pytest.approx([0, 1 / 3])
        for padding, theirs in ((0, 0.3), (5, 0.15)):
            mask = pad(batch.response_mask, (0, padding))
            assert mask.sum(dim=1).float().mean() / mask.shape[1] == pytest.approx(theirs)
            weights = starpo.loss_weights(mask, "seq-mean-token-sum-norm", 5)
            assert starpo.aggregate(torch.ones(mask.shape), weights) == pytest.approx(0.3)

    def test_micro_batches_change_neither_the_gradient_nor_the_log(self):
        """verl's agg_loss averages each micro-batch; GRPO-Zero grpo.py:220 logs the last loss."""
        batch = written((0, 1.0, 1), (0, 0.0, 4))
        batch.sample_logprobs = token_logprobs(tiny()[0].model, batch.tokens,
                                               batch.response_mask)[0].detach()
        short, long = -0.5, 0.5  # losses per token; the longest row is trained last
        mean_of_means, last, ours = (short + long) / 2, long, (1 * short + 4 * long) / 5
        assert (mean_of_means, last, ours) == (0, 0.5, 0.3)
        norms = []
        for token_budget in (1, 1000):  # one row at a time, and both at once
            config = Config(norm_by_std=False, entropy_coef=0.0, lr=0.0, token_budget=token_budget)
            learner = student()
            targets, _ = trainer.compute_targets(learner, batch, config)
            measured = trainer.update(learner, targets, config, 1)
            assert measured["policy_loss"] == pytest.approx(ours)
            norms.append(measured["grad_norm"])
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)

    def test_one_rare_token_is_not_the_update(self):
        """k3, `low_var_kl` in verl and TRL: of a thousand tokens one has become 1,100 times less
        likely than before RL. Its derivative 1 - exp(d) is nine tenths of all. With k2 it is d."""
        drift = torch.full((1000,), 0.1)
        drift[-1] = 7.0  # log ref - log pi
        shares = {}
        for name in ("k2", "k3"):
            logprobs = torch.zeros(1000, requires_grad=True)
            starpo.kl_estimate(logprobs, drift, name).sum().backward()
            shares[name] = float(logprobs.grad[-1] / logprobs.grad.sum())
        assert shares["k3"] > 0.9 and shares["k2"] < 0.07
        assert Config.kl_estimator == "k2"

    def test_the_kl_in_the_loss_has_a_gradient(self):
        """RAGEN's `kl_loss_type: kl` is k1 = log pi - log ref. As a loss its expected gradient is
        E[grad log pi] = 0 whatever the reference is; k2 has the gradient of KL(pi || ref), k3 that
        of KL(ref || pi). The expectations are exact: sums over three outcomes."""
        logits = torch.tensor([0.5, -1.0, 1.5]).double().requires_grad_()
        ref = torch.tensor([-0.2, 0.4, 0.9]).double().log_softmax(0)
        log_p = logits.log_softmax(0)
        p = log_p.exp()

        def gradient(x):
            return torch.autograd.grad(x.sum(), logits, retain_graph=True)[0].tolist()

        reverse, forward = gradient(p * (log_p - ref)), gradient(ref.exp() * (ref - log_p))
        for name, expected in (("k1", [0, 0, 0]), ("k2", reverse), ("k3", forward)):
            estimate = starpo.kl_estimate(log_p, ref, name)
            assert gradient(p.detach() * estimate) == pytest.approx(expected, abs=1e-12), name
        with pytest.raises(ValueError, match="unknown kl_estimator 'k1': .*Known: k2, k3"):
            settings.check(Config(kl_coef=0.1, kl_estimator="k1"))
