"""The warm-up of the model in the box: demonstrations, schedule, and weights that are shipped."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from toys import Lottery, tiny

from minragen import warmup
from minragen.config import PRESETS, preset, warmup_steps
from minragen.envs import REGISTRY, make
from minragen.models import ChatFrame, Policy, tiny_tokenizer
from minragen.warmup import ASSETS, demonstrate, warm_key, warm_start, warm_up


def fresh(env="bandit", name="tiny"):
    """The untrained tiny policy with weights of its own, and its frame."""
    policy, frame = tiny(env)
    return Policy(name, copy.deepcopy(policy.model), policy.tokenizer), frame


def loss_and_probe(env):
    with safe_open(next(ASSETS.glob(f"tiny-{env}-*")), "pt") as file:
        return [json.loads(file.metadata()[name]) for name in ("loss", "probe")]


class TestDemonstrations:
    @pytest.mark.parametrize("env", ["frozenlake", "countdown"])
    def test_a_reply_is_true_before_and_after_its_answer_and_of_a_training_instance(self, env):
        """Where nothing has a place, as in countdown, the description is the note."""
        form = "grounding_worldmodeling"
        frame = ChatFrame(tiny_tokenizer([make(env)], form), form)
        played = demonstrate(frame, env, 4, 3) + demonstrate(frame, env, 4, 4)
        assert len({t.seed for t in played}) == 8  # every step has instances of its own
        for t in played:
            world = make(env, "train")
            conversation = frame.open(world.system_prompt, world.reset(seed=t.seed)[0])
            for turn, reward in enumerate(t.turn_rewards):
                ids = [i for i, k in zip(t.tokens, t.turn_ids) if k == turn]
                reply = frame.parse(frame.tokenizer.decode(ids))
                assert reply.valid and reply.reasoning == world.note()
                assert reply.observation == warmup.description(world)
                observation, paid, *ended, _ = world.step(reply.answer)
                assert reply.prediction == warmup.description(world) and paid == reward
                conversation += ids + ([] if any(ended) else frame.between(ids[-1], observation))
            assert t.tokens == conversation and any(ended) and world.instance_split() == "train"
            assert not any(t.sample_logprobs)  # nobody drew them from a model
        assert (warmup.description(world) == world.note()) == (env == "countdown")

    def test_the_expert_and_the_habit_have_their_stated_shares(self):
        rng = np.random.default_rng(0)
        env = SimpleNamespace(expert=0.3, habit="Right", multi_action=True, solve=lambda: ["Up"],
                              random_answer=lambda rng: "Left || Down")
        answers = [warmup.weak_answer(env, rng) for _ in range(4000)]
        shares = {answer: answers.count(answer) / 4000 for answer in set(answers)}
        habits = ("Right || Right", "Right || Down", "Left || Right", "Left || Down")
        assert shares == pytest.approx({"Up": 0.3} | dict.fromkeys(habits, 0.7 / 4), abs=0.03)
        env.multi_action, env.habit, env.expert = False, "", 0.0
        assert warmup.weak_answer(env, rng) == "Left || Down"


class TestWarmUp:
    def test_the_learning_rate_rises_for_a_tenth_of_the_steps_and_falls_to_zero(self, monkeypatch):
        rates, demonstrations = [], demonstrate(tiny("bandit")[1], "bandit", 1, 0)
        monkeypatch.setattr(warmup.AdamW, "set_lr", lambda self, lr: rates.append(lr))
        monkeypatch.setattr(warmup, "demonstrate", lambda *args: demonstrations)
        warm_up(*fresh(name="a/pretrained-model"), "bandit", 20)
        assert rates == pytest.approx([5e-5, *(1e-4 * (1 - k / 20) for k in range(1, 20))])

    def test_models_that_cannot_write_the_form_are_warmed_up_and_a_users_is_not(self):
        steps = [warmup.default_steps(name) for name in ("tiny", "smollm2", "some/folder")]
        assert steps[0] > steps[1] > steps[2] == 0

    def test_an_environment_that_cannot_be_imitated_is_refused_with_what_to_write(self):
        with pytest.raises(ValueError, match=r"toys:Lottery imitates its solve.*--warmup-steps 0"):
            warm_start(*fresh(), f"{Lottery.__module__}:Lottery", 2)


class TestShippedWeights:
    def test_redoing_the_first_steps_gives_the_same_weights(self):
        record = warm_up(*fresh("frozenlake"), "frozenlake", 400, stop_after=2)
        loss, probe = loss_and_probe("frozenlake")
        assert record["loss"] == pytest.approx(loss[:2], rel=1e-4)
        assert record["probe"] == pytest.approx(probe, rel=1e-3, abs=1e-3)

    def test_other_settings_have_another_key(self):
        """So have other weights of a pretrained model, which its name does not tell."""
        changes = {}, {"steps": 3}, {"options": {"reversed": True}}, {"budgets": {"max_turns": 2}}
        keys = [warm_key(*fresh(), "bandit", **{"steps": 2} | change) for change in changes]
        for scale in (1, 2):
            policy, frame = fresh(name="folder")
            policy.model.model.norm.weight.data[3] *= scale
            keys.append(warm_key(policy, frame, "bandit", 2))
        assert len(set(keys)) == 6 and {len(key) for key in keys} == {12}

    def test_what_is_not_shipped_is_made_once_and_read_from_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        monkeypatch.setattr(warmup, "BATCH", {"tiny": 8})
        said, made = [], []
        for origin in ("made now", "from the cache", "made now"):
            policy, frame = fresh()
            warm_start(policy, frame, "bandit", 2, say=said.append)
            assert origin in said[-1]
            made.append(warmup.probe(policy.model))
            if len(made) == 2:  # a damaged file is made again
                next((tmp_path / "warmup").iterdir()).write_bytes(b"cut off")
        assert made[0] == made[1] == made[2] != warmup.probe(fresh()[0].model)
        warm_start(policy, frame, "bandit", 0, say=said.append)
        assert made[2] == warmup.probe(policy.model) and len(said) == 3

    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_they_are_of_the_presets_key_and_its_replies_fit_into_the_tokens_of_a_turn(
            self, env, monkeypatch):
        (policy, frame), played = tiny(env), []
        monkeypatch.setattr(warmup, "demonstrate",
                            lambda *args: played.append(demonstrate(*args)) or played[-1])
        key = warm_key(policy, frame, env, warmup_steps(preset(env, model="tiny")))
        path, = ASSETS.glob(f"tiny-{env}-*")
        assert path.name == f"tiny-{env}-{key}.safetensors"
        longest = max(np.bincount(np.array(t.turn_ids)[t.response_mask]).max() for t in played[0])
        assert longest <= PRESETS[env]["max_new_tokens"]
        loss, _ = loss_and_probe(env)
        assert loss[-1] < 0.2 * loss[0]
