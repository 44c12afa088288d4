"""The base of the model in the box: weak on purpose, the same everywhere, and never remade in
secret."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from toys import tiny

from minragen import warmup
from minragen.config import PRESETS, preset, warmup_steps
from minragen.envs import REGISTRY, make
from minragen.models import ChatFrame, Policy, load_policy
from minragen.warmup import (
    ASSETS,
    EXPERT,
    HABIT,
    PIECE_STEPS,
    batch_size,
    demonstrate,
    warm_key,
    warm_start,
    warm_up,
)


def fresh(env):
    """Untrained weights of one's own; the tokenizer, which takes much longer to make, is
    everybody's."""
    policy, frame = tiny(env)
    return Policy(policy.name, copy.deepcopy(policy.model), policy.tokenizer), frame


class TestDemonstrations:
    def test_they_come_from_the_training_split_only(self):
        held_out = set()
        for split in ("val", "test"):
            env = make("frozenlake", split)
            for seed in range(300):
                env.reset(seed=seed)
                held_out.add(env.instance())
        policy, frame = fresh("frozenlake")
        env = make("frozenlake", "train")
        for t in demonstrate(frame, "frozenlake", 50, step=3):
            env.reset(seed=t.seed)
            assert env.instance_split() == "train" and env.instance() not in held_out

    def test_every_reply_is_in_the_form_and_truthful(self):
        policy, frame = fresh("frozenlake")
        for t in demonstrate(frame, "frozenlake", 20, step=0):
            env, turn = make("frozenlake"), 0
            env.reset(seed=t.seed)
            while turn < len(t.turn_rewards):
                ids = [i for i, k in zip(t.tokens, t.turn_ids) if k == turn]
                reply = frame.parse(policy.tokenizer.decode(ids))
                assert reply.valid and reply.reasoning == env.note()
                assert env.step(reply.answer)[1] == t.turn_rewards[turn]
                turn += 1

    @pytest.mark.parametrize("env", ["frozenlake", "sokoban"])
    def test_a_description_is_true_of_the_state_before_and_after_the_answer(self, env):
        policy = load_policy("tiny", envs=[make(env)], response_format="grounding_worldmodeling")
        frame = ChatFrame(policy.tokenizer, "grounding_worldmodeling")
        for t in demonstrate(frame, env, 10, step=0):
            world = make(env)
            world.reset(seed=t.seed)
            for turn in range(len(t.turn_rewards)):
                ids = [i for i, k in zip(t.tokens, t.turn_ids) if k == turn]
                reply = frame.parse(policy.tokenizer.decode(ids))
                assert reply.valid and reply.reasoning == world.note()
                assert world.description_f1(reply.observation, world.relations()) == 1.0
                world.step(reply.answer)
                assert world.description_f1(reply.prediction, world.relations()) == 1.0

    @pytest.mark.parametrize("env", ["bandit", "countdown"])
    def test_where_nothing_has_a_place_a_description_is_the_note(self, env):
        policy = load_policy("tiny", envs=[make(env)], response_format="grounding_worldmodeling")
        frame = ChatFrame(policy.tokenizer, "grounding_worldmodeling")
        for t in demonstrate(frame, env, 10, step=0):
            world = make(env)
            world.reset(seed=t.seed)
            reply = frame.parse(policy.tokenizer.decode(
                [i for i, k in zip(t.tokens, t.turn_ids) if k == 0]))
            assert reply.valid and reply.observation == reply.reasoning == world.note()
            world.step(reply.answer)
            assert reply.prediction == world.note()

    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_a_reply_fits_into_the_presets_tokens(self, env):
        policy, frame = tiny(env)
        # The very ones of the warm-up's first steps, which are played below as well: on Lean that
        # is half of the proofs to check.
        count = batch_size(policy, env)
        longest = max(np.bincount(np.array(t.turn_ids)[np.array(t.response_mask)]).max()
                      for step in range(PIECE_STEPS)
                      for t in demonstrate(frame, env, count, step))
        assert longest <= PRESETS[env]["max_new_tokens"]

    def test_the_expert_and_the_habit_have_their_stated_shares(self):
        env, rng = make("frozenlake"), np.random.default_rng(0)
        env.reset(seed=1)
        # Best is Up: neither habit nor first in the list.
        env.goal, env.player, env._policy = (0, 0), (3, 0), None
        env.holes[:] = False
        firsts = [warmup.weak_answer(env, rng).split(" || ")[0] for _ in range(20_000)]
        share = {a: firsts.count(a) / len(firsts) for a in env.actions}
        uniform = (1 - EXPERT) * (1 - HABIT) / 4
        assert abs(share["Up"] - (EXPERT + uniform)) < 0.015
        assert abs(share["Right"] - ((1 - EXPERT) * HABIT + uniform)) < 0.015
        assert abs(share["Left"] - uniform) < 0.01


class TestCarriedWeights:
    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_the_presets_weights_are_carried_under_their_key(self, env):
        policy, frame = tiny(env)
        key = warm_key(policy, frame, env, warmup_steps(preset(env, model="tiny")))
        assert [p.name for p in ASSETS.glob(f"tiny-{env}-*")] == [f"tiny-{env}-{key}.safetensors"]

    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_redoing_a_piece_of_the_warm_up_gives_the_same_weights(self, env):
        policy, frame = fresh(env)
        steps = warmup_steps(preset(env, model="tiny"))
        record = warm_up(policy, frame, env, steps, stop_after=PIECE_STEPS)
        with safe_open(next(ASSETS.glob(f"tiny-{env}-*")), "pt") as file:
            carried = {name: json.loads(text) for name, text in file.metadata().items()}
        assert record["loss"] == pytest.approx(carried["loss"][:PIECE_STEPS], rel=1e-4)
        assert record["probe"] == pytest.approx(carried["probe"], rel=1e-3, abs=1e-3)
        assert carried["loss"][-1] < 0.2 * carried["loss"][0]

    def test_the_warm_up_is_deterministic_to_the_bit(self):
        results = []
        for _ in range(2):
            policy, frame = fresh("bandit")
            warm_up(policy, frame, "bandit", 50, stop_after=2)
            results.append([p.detach().clone() for p in policy.model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results))

    @pytest.mark.parametrize("change", [dict(steps=3), dict(options={"reversed": True}),
                                        dict(budgets={"max_turns": 2})])
    def test_other_settings_have_another_key_and_are_made_and_cached(self, change, tmp_path,
                                                                     monkeypatch):
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        policy, frame = fresh("bandit")
        arguments = dict(steps=2, options=None, budgets=None) | change
        keys = {warm_key(policy, frame, "bandit", 2),
                warm_key(policy, frame, "bandit", **arguments)}
        assert len(keys) == 2
        said = []
        warm_start(policy, frame, "bandit", say=said.append,
                   **{**arguments, "steps": min(3, arguments["steps"])})
        made = [p.detach().clone() for p in policy.model.parameters()]
        again, frame = fresh("bandit")
        warm_start(again, frame, "bandit", say=said.append,
                   **{**arguments, "steps": min(3, arguments["steps"])})
        assert "made now" in said[0] and "from the cache" in said[1]
        assert all(torch.equal(a, b) for a, b in zip(made, again.model.parameters()))

    def test_no_steps_means_no_warm_up(self):
        policy, frame = fresh("bandit")
        before = [p.detach().clone() for p in policy.model.parameters()]
        warm_start(policy, frame, "bandit", 0)
        assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))
