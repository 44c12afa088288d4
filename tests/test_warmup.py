"""The warm-up of the model in the box: demonstrations, schedule, and weights that are shipped."""

import copy
import json
import types

import numpy as np
import pytest
import torch
from safetensors import safe_open
from toys import Lottery, tiny

from minragen import warmup
from minragen.config import PRESETS, preset, warmup_steps
from minragen.envs import REGISTRY, EnvGroups, make
from minragen.models import ChatFrame, Policy, load_policy
from minragen.warmup import ASSETS, demonstrate, warm_key, warm_start, warm_up


def fresh(env="bandit", name="tiny"):
    """The untrained tiny policy with weights of its own, and its frame."""
    policy, frame = tiny(env)
    return Policy(name, copy.deepcopy(policy.model), policy.tokenizer), frame


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


class TestDemonstrations:
    @pytest.mark.parametrize("env", ["frozenlake", "countdown"])
    def test_a_reply_is_true_before_and_after_its_answer_and_of_a_training_instance(self, env):
        """Where nothing has a place, as in countdown, the description is the note."""
        policy = load_policy("tiny", envs=[make(env)], response_format="grounding_worldmodeling")
        frame = ChatFrame(policy.tokenizer, "grounding_worldmodeling")
        first, again, other = (demonstrate(frame, env, 4, step) for step in (3, 3, 4))
        assert [t.tokens for t in first] == [t.tokens for t in again]
        assert len({t.seed for t in first + other}) == 8
        for t in first + other:
            world = make(env, "train")
            conversation = frame.open(world.system_prompt, world.reset(seed=t.seed)[0])
            assert world.instance_split() == "train"
            for turn, reward in enumerate(t.turn_rewards):
                ids = [i for i, k in zip(t.tokens, t.turn_ids) if k == turn]
                reply = frame.parse(policy.tokenizer.decode(ids))
                assert reply.valid and reply.reasoning == world.note()
                assert reply.observation == warmup.description(world)
                observation, paid, *ended, _ = world.step(reply.answer)
                assert reply.prediction == warmup.description(world) and paid == reward
                conversation += ids
                if not any(ended):
                    conversation += frame.between(ids[-1], observation)
            assert t.tokens == conversation and any(ended)
        assert ("none" in warmup.description(world)) == (world.relations() == [])

    def test_the_expert_and_the_habit_have_their_stated_shares(self):
        rng = np.random.default_rng(0)
        env = types.SimpleNamespace(expert=0.3, habit="Right", multi_action=True,
                                    solve=lambda: ["Up"], random_answer=lambda rng: "Left || Down")
        answers = [warmup.weak_answer(env, rng) for _ in range(4000)]
        shares = {answer: answers.count(answer) / 4000 for answer in set(answers)}
        rest = 0.7 / 4  # each of the two actions is the habit with probability 1/2
        assert shares == pytest.approx({
            "Up": 0.3, "Right || Right": rest, "Right || Down": rest, "Left || Right": rest,
            "Left || Down": rest}, abs=0.03)
        env.multi_action, env.habit, env.expert = False, "", 0.0
        assert warmup.weak_answer(env, rng) == "Left || Down"


class TestWarmUp:
    def test_the_learning_rate_rises_for_a_tenth_of_the_steps_and_falls_to_zero(self, monkeypatch):
        rates = []
        monkeypatch.setattr(warmup.AdamW, "set_lr", lambda self, lr: rates.append(lr))
        demonstrations = demonstrate(tiny("bandit")[1], "bandit", 1, 0)
        monkeypatch.setattr(warmup, "demonstrate", lambda *args: demonstrations)
        for name, peak in (("tiny", 3e-3), ("a/pretrained-model", 1e-4)):
            rates.clear()
            record = warm_up(*fresh(name=name), "bandit", 20)
            falling = [1 - k / 20 for k in range(1, 20)]
            assert rates == pytest.approx([peak * x for x in (0.5, *falling)])
            assert len(record["loss"]) == 20

    def test_a_step_has_fewer_demonstrations_for_long_episodes_and_large_models(self):
        for name, turns, count in (("tiny", 6, 64), ("tiny", 7, 32), ("smollm2", 6, 8),
                                   ("smollm2", 7, 4)):
            policy = types.SimpleNamespace(name=name)
            assert warmup.batch_size(policy, "frozenlake", None, {"max_turns": turns}) == count

    def test_models_that_cannot_write_the_form_are_warmed_up_and_a_users_is_not(self):
        steps = [warmup.default_steps(name) for name in ("tiny", "smollm2", "some/folder")]
        assert steps[0] > steps[1] > steps[2] == 0
        policy, frame = fresh()
        warm_start(policy, frame, "bandit", 0)
        assert torch.equal(weights(policy), weights(tiny("bandit")[0]))

    def test_an_environment_that_cannot_be_imitated_is_refused_with_what_to_write(self):
        with pytest.raises(ValueError, match=r"toys:Lottery imitates its solve.*--warmup-steps 0"):
            warm_start(*fresh(), f"{Lottery.__module__}:Lottery", 2)


class TestShippedWeights:
    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_they_are_of_the_presets_key_and_their_replies_fit_into_its_tokens(self, env,
                                                                               monkeypatch):
        policy, frame = tiny(env)
        played = []
        monkeypatch.setattr(warmup, "demonstrate",
                            lambda *args: played.append(demonstrate(*args)) or played[-1])
        key = warm_key(policy, frame, env, warmup_steps(preset(env, model="tiny")))
        path, = ASSETS.glob(f"tiny-{env}-*")
        assert path.name == f"tiny-{env}-{key}.safetensors"
        longest = max(np.bincount(np.array(t.turn_ids)[t.response_mask]).max() for t in played[0])
        assert longest <= PRESETS[env]["max_new_tokens"]
        with safe_open(path, "pt") as file:
            loss = json.loads(file.metadata()["loss"])
        assert loss[-1] < 0.2 * loss[0]

    def test_redoing_the_first_steps_gives_the_same_weights(self):
        policy, frame = fresh("frozenlake")
        record = warm_up(policy, frame, "frozenlake", 400, stop_after=2)
        with safe_open(next(ASSETS.glob("tiny-frozenlake-*")), "pt") as file:
            shipped = {name: json.loads(text) for name, text in file.metadata().items()}
        assert record["loss"] == pytest.approx(shipped["loss"][:2], rel=1e-4)
        assert record["probe"] == pytest.approx(shipped["probe"], rel=1e-3, abs=1e-3)

    def test_other_settings_have_another_key_and_are_made_once_and_cached(self, tmp_path,
                                                                          monkeypatch):
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        monkeypatch.setattr(warmup, "BATCH", {"tiny": 8, "pretrained": 2})
        usual = dict(steps=2, options=None, budgets=None)
        changed, other = fresh(name="folder"), fresh(name="folder")
        weights(other[0])
        other[0].model.model.norm.weight.data[3] += 1
        keys = {warm_key(*fresh(), "bandit", **usual | change) for change in (
            {}, {"steps": 3}, {"options": {"reversed": True}}, {"budgets": {"max_turns": 2}})}
        keys |= {warm_key(*pair, "bandit", **usual) for pair in (changed, other)}
        assert len(keys) == 6 and all(len(key) == 12 for key in keys)

        said, made = [], []
        for damaged in (False, False, True):
            path, = (tmp_path / "warmup").glob("tiny-bandit-*") if said else (None,)
            if damaged:
                path.write_bytes(path.read_bytes()[:1000])
            policy, frame = fresh()
            warm_start(policy, frame, "bandit", **usual, say=said.append)
            made.append(weights(policy))
        for line, origin in zip(said, ("made now", "from the cache", "made now"), strict=True):
            assert origin in line
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        assert not torch.equal(made[0], weights(fresh()[0]))
