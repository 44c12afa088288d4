"""The museum: famous bugs of this field. Each exhibit rebuilds a bug in miniature, shows the wrong
result, and asserts that minRAGEN does not give it. Its docstring names where the bug was seen."""

import copy
import itertools

import pytest
import torch
from toys import puppet, sampled, scripted, tiny

from minragen import config as settings
from minragen import starpo
from minragen.config import Config
from minragen.envs import EnvGroups
from minragen.run import bundled
from minragen.run.load import load_policy
from minragen.train import Learner, roll_out
from minragen.trajectory import make_batch


def mask_by_headers(tokens, header):
    """RAGEN's rule: what follows the third, fifth, ... <|im_start|> is the model's."""
    before = itertools.accumulate((token == header for token in tokens[:-1]), initial=0)
    return [count % 2 == 1 and count > 1 for count in before]


class TestMask:
    """Search-R1 masks what it retrieves (Jin et al. 2025, section 3.1; Search-R1#108); without a
    mask, most of the loss is about text that the environment wrote: test_step.py."""

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

    def test_the_sampled_end_of_turn_is_trained_even_where_it_is_the_padding_token(self):
        """tiny-grpo train.py:108 masks the padding token, which ends the turn in SmolLM2's
        tokenizer; minimind train_agent.py:123 drops it. The model never learns to stop."""
        tokenizer = copy.deepcopy(tiny()[0].tokenizer)
        end, tokenizer.pad_token = tokenizer.eos_token_id, tokenizer.eos_token
        t, _, _ = scripted([40, end], tokenizer=tokenizer)
        assert [i for i in sampled(t.sequences[0]) if i != tokenizer.pad_token_id] == [40]
        batch = make_batch([t])
        assert batch.tokens[batch.response_mask].tolist() == [40, end]


class TestTokens:
    """Qwen3's template drops old thoughts, so prompts are new (verl#6854, gem#44): test_chat.py."""

    def test_a_reply_is_trained_in_the_ids_that_were_sampled(self):
        """RAGEN ctx_manager.py:209 (trl#5224, rllm#272) encodes decoded text: 7 ids become one.
        Qwen2.5 has a token for ">\\n". If "<think>" and a reply that begins with a new line are
        encoded as one text (SkyRL#2092), the prefix takes its first token."""
        in_bytes = tiny()[0].tokenizer.convert_tokens_to_ids(list("Ġplayer"))
        t, frame, start = scripted(in_bytes)
        assert t.turns[0].text == " player" and len(frame.encode(t.turns[0].text)) == 1
        assert t.tokens[start:] == in_bytes


class TestLogprobs:
    """TRL's GRPO applied the temperature in sampling only (trl#3029, trl#4159), so that most ratios
    were clipped: test_step.py, at a temperature of .7."""

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


class TestSeeds:
    def test_runs_rounds_and_groups_share_no_instance(self):
        """RAGEN's es_manager.py adds seed, counter and group; a reset advances the counter by 1. (A
        resumed run of nano-aha-moment, nano_r1_script.py:883, skips one batch too few: ours
        equals one that was not stopped, test_runs.py.)"""
        theirs = [sum(parts) for parts in itertools.product(range(2), range(3), range(4))]
        ours = []
        for run in range(2):
            learner, groups = Learner(*tiny(), None), EnvGroups("bandit", 4, 1)
            config = Config(env="bandit", seed=run, num_groups=4, max_new_tokens=1)
            ours += [t.seed for _ in range(3) for t in roll_out(learner, groups, config)]
        assert len(set(theirs)) == 7 and len(set(ours)) == len(ours) == len(theirs)
        assert min(ours) > Config().val_size  # validation's seeds begin at 0


class TestLoss:
    """Other bugs of sums over tokens are shown by test_step.py, which compares each of them with
    plain loops:

    RAGEN core_algos.py:128 ends a turn where the reward is not 0. A turn without reward loses its
    discount, a last one raises an IndexError, and with a penalty on each token each token is a turn
    (TestAlgorithms). Pardo et al. 2018 bootstrap: they add the value of the state at a time limit.
    Here it is 0, since the limit is part of the task, and the prompt names it (TestAlgorithms).
    nano-aha-moment utils.py:190 counts the ignored labels of prompt and padding, and verl divides
    "seq-mean-token-sum-norm" by the width of the padded batch (TestOptions). verl's agg_loss
    averages each micro-batch, and GRPO-Zero grpo.py:220 logs the last loss (TestPairs).
    """

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
