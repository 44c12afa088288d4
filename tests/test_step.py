"""Rollout and update equal those of slow.py: tokens, gradients, metrics and weights.

Rollouts use the warm-started model on FrozenLake. Updates are compared in float64 at every
optimizer step of the real `train`, with a small untrained network and a lottery.
"""

import contextlib
import copy
import dataclasses
import itertools
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import slow
import torch
from several import several
from toys import Lottery, Raffle
from transformers import LlamaConfig, LlamaForCausalLM

from minragen import config as settings
from minragen import train as trainer
from minragen.config import ALGOS, Config, preset
from minragen.fast.policies import faster
from minragen.look import report
from minragen.models import Policy
from minragen.more import lora
from minragen.run import bundled, log, runs, start
from minragen.run.groups import collect, env_groups
from minragen.run.load import load_policy
from minragen.run.tiny import tiny_tokenizer
from minragen.support.checks import estimator_kind
from minragen.train import rules_of

pytestmark = pytest.mark.usefixtures("float64")

# Several optimizer steps that move the weights far enough for every clip to matter.
BASE = dict(num_groups=5, group_size=3, max_new_tokens=6, max_context=104, mini_batch=4, lr=0.04,
            temperature=0.7, entropy_coef=0.05, diagnose_every=0, val_size=1, steps=1, seed=80,
            warmup_steps=0, kl_coef=0.0)
real_build, real_optimizer_step = start.build_learner, trainer.AdamW.step
EPISODES = {}  # of `collect_once`


def configured(env="toys:Lottery", algo="grpo", **options):
    """The Config of a preset with some options. Raises ValueError where `check` refuses it."""
    base = preset(env, algo, "tiny", options.get("response_format", "free_think"))
    config = dataclasses.replace(base, **{**BASE, **options})
    settings.check(config)
    return config


@cache
def small_model(response_format, seed=0):
    """An untrained decoder whose distributions are far from uniform."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(small_tokenizer(response_format)), hidden_size=16, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.4,
        max_position_embeddings=512)).double().eval()


@cache
def small_tokenizer(response_format):
    return tiny_tokenizer([Lottery(), Raffle()], response_format)


def small_policy(config, seed=0):
    return Policy("tiny", copy.deepcopy(small_model(config.response_format, seed)),
                  small_tokenizer(config.response_format))


def reference(config):
    """Another network: with the policy's own weights the KL would have no gradient at first."""
    return small_policy(config, 1)


@cache
def warm_policy():
    """The bundled model after its warm-up on FrozenLake, which closes its tags."""
    config = preset("frozenlake")
    policy = faster(load_policy(bundled.resolve(
        "tiny", lambda *size: env_groups(config, *size), max_new_tokens=config.max_new_tokens,
        steps=config.warmup_steps, say=lambda line: None)))
    policy.model.double()
    return policy


def collect_once(policy, frame, groups, first_seed, rules, progress=None):
    """`collect`, remembered: at the first step all tests have the same policy."""
    key = (*groups.names, *groups.places[:2], len(groups), first_seed, str(groups.envs[0].options),
           str(groups.envs[0].budget), str(frame.system_message.keywords), rules, str(groups.turn),
           type(frame), not frame.appends and (frame.context, frame.window))
    if key not in EPISODES:
        EPISODES[key] = collect(policy, frame, groups, first_seed, rules)
    return copy.deepcopy(EPISODES[key])


@pytest.fixture
def real(monkeypatch, tmp_path):
    """real(config): gradients, metrics and what a Learner is after one step of the real `train`."""
    def run(config, play=collect_once, processes=1):
        if config.lora_rank:
            pytest.importorskip("peft")
        built, gradients, lines = [], [], []

        def build(*arguments):
            learner = real_build(*arguments)
            if learner.critic is not None:
                give_head(learner.critic)
            if learner.reference is not None:
                learner.reference = faster(reference(config), config.attention)
            built.append(learner)
            return learner

        def optimizer_step(optimizer, max_grad_norm):
            gradients.append([m.grad.clone() for m in optimizer.masters])
            return real_optimizer_step(optimizer, max_grad_norm)

        for module, name, stub in (
                (start, "build_learner", build), (start, "collect", play),
                (start, "load_policy", lambda *_, **__: small_policy(config)),
                (trainer, "validate", lambda *_: {}), (trainer.AdamW, "step", optimizer_step),
                (bundled, "resolve", lambda *_: None), (bundled, "source_of", lambda name: None),
                (runs, "RUNS", tmp_path / str(len(list(tmp_path.iterdir())))),
                (runs, "save_checkpoint", lambda *_: None), (report, "write", id),
                (log.Log, "write", lambda _, line: lines.append(line))):
            monkeypatch.setattr(module, name, stub)

        def result():
            start.run(config, say=lambda line: None)
            weights = [p.detach() for p in trained(built[0].policy.model)]
            return (gradients, next(line for line in lines if "groups_kept" in line),
                    SimpleNamespace(weights=weights, lines=lines))

        if processes == 1:
            return result()
        first, *others = several(processes, result)
        for other in others:
            assert all(map(torch.equal, first[2].weights, other[2].weights))
        return first
    return run


def adapt(policy, config):
    """Put slow.py's adapters beside the linear layers, with the first A of lora.py's."""
    other = small_policy(config)
    lora.add_adapters(other, config.lora_rank, config.seed)
    policy.model.requires_grad_(False)
    for name, layer in other.model.named_modules():
        if hasattr(layer, "lora_A"):
            A = layer.lora_A["default"].weight.detach()
            policy.model.set_submodule(name, slow.Adapted(policy.model.get_submodule(name), A))


def give_head(critic):
    """Give a critic a head that is not zero, as it is at first: 0s would hide who reads them."""
    width = critic.head.in_features
    critic.head.load_state_dict({"weight": torch.linspace(-0.5, 0.5, width)[None],
                                 "bias": torch.tensor([0.3])})


def trained(*modules):
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def slow_learner(config):
    policy = small_policy(config)
    if config.lora_rank:
        adapt(policy, config)
    critic = SimpleNamespace(trunk=copy.deepcopy(policy.model.base_model),
                             head=torch.nn.Linear(policy.model.config.hidden_size, 1))
    give_head(critic)
    return SimpleNamespace(
        policy=policy, rounds=0,
        critic=critic if estimator_kind(config) == "critic" else None,
        reference=reference(config).model if config.kl_coef or config.kl_reward_coef else None,
        optimizer=torch.optim.AdamW(trained(policy.model), weight_decay=0.01),
        critic_optimizer=torch.optim.AdamW(trained(critic.trunk, critic.head), weight_decay=0.01))


@cache
def slow_step(config):
    """The same for the slow step, on the same episodes."""
    learner = slow_learner(config)
    frame = start.frame_of(config, learner.policy)
    groups = env_groups(config, "train", config.num_groups, config.group_size, config.env,
                        paid=True)

    def play(learner, frame, groups, first_seed, config):
        return collect_once(learner.policy, frame, groups, first_seed, rules_of(config))

    return *slow.train_step(learner, frame, groups, config, 1, play), learner


def assert_equal(real, config, processes=1):
    """Gradients of all optimizer steps, metrics, and the weights that result."""
    (ours, metrics, learner), (exact, expected, oracle) = (
        real(config, processes=processes), slow_step(config))
    assert len(ours) == len(exact)
    for one, other in zip(ours, exact):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    for name, value in expected.items():
        if name != "kl_ref" or config.kl_coef:
            assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for a, b in zip(learner.weights, trained(oracle.policy.model), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-9)
    return ours


def differ(one, other):
    """Whether two lists of gradients differ anywhere."""
    return len(one) != len(other) or any(
        a.shape != b.shape or not torch.allclose(a, b, rtol=1e-6, atol=1e-12)
        for x, y in zip(one, other) for a, b in zip(x, y))


LAKE = dict(env="frozenlake", num_groups=2, group_size=2, max_turns=2, max_new_tokens=24,
            max_context=512, max_rows=3)
LONG = dict(context="limited", window=3, max_turns=4)
# No reply is finished. 300 tokens leave no room for some replies to three turns, 162 none for some
# and one token for others.
SHORT = dict(max_new_tokens=7, max_context=300)


class TestCollect:
    """Replies of a model that can play FrozenLake: one token after the other from the slow loop."""

    @pytest.mark.parametrize("options", [
        dict(temperature=0.5, max_rows=1), dict(temperature=1.3, max_rows=256),
        dict(temperature=1.3, top_k=4),
        dict(temperature=1.3, top_p=0.7), dict(temperature=1.3, top_k=4, top_p=0.7),
        LONG | dict(context="single_turn"), LONG | SHORT | dict(context="single_turn"),
        LONG | SHORT, LONG | SHORT | dict(max_context=162),
        dict(max_new_tokens=7), dict(max_context=170), dict(temperature=0.0)],
        ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()))
    def test_tokens_masks_logprobs_and_rewards_are_those_of_the_slow_loop(self, options):
        """Temperature 0, which training refuses, is greedy."""
        config = dataclasses.replace(configured(**LAKE), **{"temperature": 1.0, **options})
        policy, groups = warm_policy(), env_groups(config, "train", 2, 2)
        frame = start.frame_of(config, policy)
        fast = collect(policy, frame, groups, 7, rules_of(config))
        expected = slow.collect(SimpleNamespace(policy=policy), frame, groups, 7, config)
        for one, other in zip(fast, expected, strict=True):
            assert one.turn_rewards == other.turn_rewards
            for a, b in zip(one.sequences, other.sequences, strict=True):
                assert a.tokens == b.tokens and a.turn_ids == b.turn_ids
                assert a.response_mask == [turn >= 0 for turn in b.turn_ids]
                assert a.sample_logprobs == pytest.approx(b.sample_logprobs, abs=1e-6)

    @pytest.mark.parametrize("options", [
        dict(algo="ppo", epochs=2, kl_reward_coef=0.1, lr_final=0.5),
        dict(stale=2), dict(stale=2, tis_cap=1.1, lora_rank=2),
        dict(algo="ppo", stale=2, tis_cap=1.1)], ids=str)
    def test_four_steps_of_training_are_those_of_the_slow_loop(self, real, options):
        """Each step plays with the weights of the step before, or of `stale` steps before it."""
        config = configured(steps=4, num_groups=2, kl_coef=0.1, lr=0.02, **options)
        gradients, *_ = real(config, play=collect)
        oracle, past = slow_learner(config), []
        frame = start.frame_of(config, oracle.policy)
        groups = env_groups(config, "train", 2, 3)

        def play(learner, *given):
            past.append(copy.deepcopy(learner.policy.model))
            older = SimpleNamespace(model=past[-1 - config.stale:][0],
                                    tokenizer=learner.policy.tokenizer)
            return slow.collect(SimpleNamespace(policy=older), *given)

        expected = [g for step in (1, 2, 3, 4) for g in slow.train_step(
            oracle, frame, groups, config, step, play)[0]]
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)  # float32 logprobs
        if config.stale:
            fresh = dataclasses.replace(config, stale=0, tis_cap=0.0)
            assert differ(gradients, real(fresh, play=collect)[0])


class TestAlgorithms:
    @pytest.mark.parametrize("algo", ALGOS)
    def test_every_algorithm_has_the_gradients_of_the_slow_step(self, real, algo):
        assert_equal(real, configured(algo=algo))
        assert_equal(real, configured(algo=algo, env="toys:Faulty"))
        in_reward = 0.2 * (algo != "maxrl")  # which refuses it
        assert_equal(real, configured(algo=algo, kl_coef=0.1, kl_reward_coef=in_reward))

    def test_the_episodes_compared_are_ragged_cut_off_and_of_some_groups_without_std(self):
        EPISODES.clear()
        gradients, metrics, _ = slow_step.__wrapped__(configured())
        (played,) = EPISODES.values()
        assert len(gradients) == 3  # three mini-batches of three rows, which may have four
        assert metrics["groups_kept"] == 3 and metrics["groups_zero_std"] == 1
        assert {len(t.turns) for t in played} == {1, 2, 3}
        assert {t.stop.value for t in played} == {"terminated", "truncated", "context"}
        EPISODES.clear()
        slow_step.__wrapped__(configured(**FAULTY))
        (played,) = EPISODES.values()
        sizes = Counter(t.group_id for t in played if not t.error)
        assert sorted(sizes.values()) == [1, 1, 2, 3]  # of five groups of three


# option -> (the base of the comparison, another value of the option), ...
PPO, BI_LEVEL, TURNS = dict(algo="ppo"), dict(algo="bi-level"), dict(algo="turn-ppo")
ARPO, KEEP_ALL, LIMITED = dict(algo="arpo"), dict(filter_value=1.0), dict(context="limited")
FLIPS = {
    "env": [(dict(val_size=2), "toys:Lottery=1,toys:Raffle=4")], "seed": [({}, 4)],
    "env_arg": [({}, ("prize=2.0",))], "max_turns": [({}, 2)],
    "response_format": [({}, "no_think")], "num_groups": [({}, 6)], "group_size": [({}, 4)],
    "temperature": [({}, 1.0)], "top_k": [({}, 5)], "top_p": [({}, 0.8)],
    "max_new_tokens": [({}, 5)], "max_context": [({}, 78)],
    "context": [({}, "limited"), ({}, "single_turn"),
                (dict(advantages="reinforce_pp_baseline"), "limited")],
    "window": [(dict(context="single_turn"), 1), (dict(context="limited"), 1)],
    "filter": [({}, "none"), ({}, "top_k"), ({}, "top_p_softmax"),
               (dict(filter_value=0.6), "min_p"), (dict(filter_value=1.0), "top_k_abs")],
    "filter_value": [({}, 0.5)],
    "resample": [(KEEP_ALL, 2)],
    "credit": [(ARPO, "turn"), (ARPO | LIMITED, "turn")],
    "overlong": [({}, 0.5)],
    "kl_reward_coef": [({}, 0.1), (PPO, 0.1)], "lr": [({}, 0.01)],
    "critic_lr": [(PPO, 0.02), (PPO, 0.5)],
    "advantages": [({}, "reinforce_pp_baseline"), ({}, "rloo"), ({}, "reinforce_pp"),
                   (LIMITED, "rloo"), (LIMITED, "brpo"), (dict(kl_coef=0.1), "none")],
    "norm_by_std": [({}, False), (dict(algo="gigpo"), False), (LIMITED, False)],
    "reward": [({}, "success")],
    "echo_coef": [({}, 0.3), (dict(token_budget=125), 0.3)],
    "gamma": [(PPO, 0.9), (ARPO, 0.9), (BI_LEVEL, 0.9), (dict(algo="reinforce-pp"), 0.9)],
    "lam": [(PPO, 0.5), (BI_LEVEL, 0.5), (TURNS, 0.5)],
    "gamma_turn": [(BI_LEVEL, 0.5), (TURNS, 0.5), (dict(algo="gigpo"), 0.5),
                   (dict(algo="gigpo", context="limited"), 0.5),
                   (ARPO | dict(context="limited", credit="turn"), 0.5)],
    "ratio": [({}, "sequence"), (dict(clip_high=0.01, epochs=2), "detached"),
              (dict(filter="none"), "detached")],  # where no advantage is, nothing is clipped
    "clip_low": [({}, 0.9)],
    "clip_high": [(dict(epochs=2), 0.01)], "dual_clip": [({}, 1.1)],
    "aggregation": [({}, "seq-mean-token-sum"), ({}, "seq-mean-token-mean"),
                    ({}, "seq-mean-token-sum-norm"), (PPO, "seq-mean-token-mean")],
    "entropy_coef": [({}, 0.0)],
    "kl_coef": [({}, 0.1)], "kl_estimator": [(dict(kl_coef=0.1), "k3")], "epochs": [({}, 2)],
    "mini_batch": [({}, 5)], "max_grad_norm": [({}, 0.1)],
    "lora_rank": [(dict(epochs=2), 3), (PPO | dict(epochs=2, kl_coef=0.1), 3)],
}
ELSEWHERE = {
    # They choose the machine, the first weights, what is measured or when a run ends,
    "run", "model", "device", "init_from", "warmup_steps", "val_size",
    "val_temperature", "val_every", "diagnose_every", "gradients_every",
    "save_every", "early_stop", "log",
    # are compared by other tests of this file,
    "algo", "max_rows", "token_budget", "steps", "lr_final", "attention",
    "activation_checkpointing", "stale", "tis_cap",
    # by test_train.py, test_attention.py, test_rows.py, test_runs.py and test_distil.py,
    "plain", "compile", "feed_share", "teacher",
    # or belong to other files: environments/test_examples.py, test_layers.py and test_relations.py,
    # test_envs.py and test_vision.py.
    "example", "layer", "description_reward",
    "max_actions_per_turn", "max_actions"}


class TestOptions:
    def test_every_option_is_compared_or_changes_no_update(self):
        assert FLIPS.keys() | ELSEWHERE == {f.name for f in dataclasses.fields(Config)}
        assert not FLIPS.keys() & ELSEWHERE

    @pytest.mark.parametrize("option", FLIPS)
    def test_an_option_changes_the_gradients_as_it_does_in_the_slow_step(self, real, option):
        for base, value in FLIPS[option]:
            ours = assert_equal(real, configured(**{**base, option: value}))
            assert differ(ours, slow_step(configured(**base))[0]), (base, value)


FAULTY = dict(env="toys:Faulty")
FACTORS = {
    "context": [dict(context="limited", window=2), dict(context="single_turn", window=2)],
    "critic": [PPO, BI_LEVEL, TURNS], "kl_in_loss": [dict(kl_coef=0.1)],
    "kl_in_reward": [dict(kl_reward_coef=0.1)], "filter": [dict(filter="top_k", filter_value=0.5)],
    "resample": [KEEP_ALL | dict(resample=2)],
    "mixture": [dict(env="toys:Lottery=2,toys:Raffle=3", val_size=2)],
    "overlong": [dict(overlong=0.5)],
    "epochs": [dict(epochs=2)], "micro_batches": [dict(token_budget=125)],
    "failures": [FAULTY],
    # Usually one process computes what rows have in common once and keeps all activations.
    "whole_rows": [dict(attention="sdpa")],
    "checkpointing": [dict(activation_checkpointing=True)], "processes": [dict(processes=2)],
    "lora": [dict(lora_rank=3)],
    "gigpo": [dict(advantages="gigpo", gamma_turn=0.9)],
    "maxrl": [dict(advantages="maxrl", reward="success")], "cispo": [dict(ratio="detached")],
    "echo": [dict(echo_coef=0.3)],
    "stale": [dict(stale=2, tis_cap=2.0)], "teacher": [dict(teacher="./other", kl_coef=0.1)],
}
REFUSED = {("context", "critic"): "needs all turns in one row",
           ("filter", "resample"): "expected the filter that drops just those",
           ("context", "echo"): "needs the reply before an observation in the same row",
           ("kl_in_reward", "maxrl"): "no kl_reward_coef", ("overlong", "maxrl"): "no overlong",
           **{(one, other): "compares whole episodes"
              for one in ("critic",) for other in ("gigpo", "maxrl")}}


# Values that are tried in one step: more of them take fewer steps, but one may hide another.
MEET = 8


def accepted(*values):
    """The Config of several values of FACTORS, None if `check` refuses it or values contradict."""
    options = {}
    for name, i in values:
        value = FACTORS[name][i]
        if any(options.get(option, x) != x for option, x in value.items()):
            return None
        options |= value
    options.pop("processes", None)
    with contextlib.suppress(ValueError):
        return configured(**options)


def covering(pairs):
    """Steps of up to MEET values in which each of the pairs meets, greedily."""
    left, steps = dict.fromkeys(map(frozenset, pairs)), []
    while left:
        count, step = Counter(itertools.chain(*left)), sorted(next(iter(left)))
        for value in sorted(count, key=lambda v: (-count[v], v)):
            new = value not in step and any(frozenset((value, x)) in left for x in step)
            if len(step) < MEET and new and accepted(*step, value):
                step.append(value)
        steps.append(step)
        for pair in itertools.combinations(step, 2):
            left.pop(frozenset(pair), None)
    return steps


TWICE = {("mixture", "failures"), ("gigpo", "maxrl")}  # both set one option
VALUES = [(name, i) for name, values in FACTORS.items() for i in range(len(values))]
PAIRS = [pair for pair in itertools.combinations(VALUES, 2) if pair[0][0] != pair[1][0]]


class TestPairs:
    @pytest.mark.parametrize("values", covering([*filter(lambda p: accepted(*p), PAIRS)]),
                             ids=lambda values: "-".join(name for name, _ in values))
    def test_what_may_meet_equals_the_slow_step(self, real, values):
        assert assert_equal(real, accepted(*values), 1 + (("processes", 0) in values))

    def test_the_others_are_refused_with_a_sentence(self):
        for one, other in PAIRS:
            pair = one[0], other[0]
            try:
                configured(**{k: v for name, i in (other, one) for k, v in FACTORS[name][i].items()
                              if k != "processes"})
            except ValueError as refusal:
                assert REFUSED[pair] in str(refusal)
            else:
                assert accepted(one, other) or pair in TWICE
                assert pair not in REFUSED or pair[0] == "context" and other == ("critic", 0)
