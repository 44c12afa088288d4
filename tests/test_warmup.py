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
from minragen.models import ChatFrame, Policy, load_policy
from minragen.warmup import ASSETS, demonstrate, warm_key, warm_start, warm_up


def fresh(env="bandit", name="tiny"):
    """The untrained tiny policy with weights of its own, and its frame."""
    policy, frame = tiny(env)
    return Policy(name, copy.deepcopy(policy.model), policy.tokenizer), frame


class TestDemonstrations:
    @pytest.mark.parametrize("env", ["frozenlake", "countdown"])
    def test_a_reply_is_true_before_and_after_its_answer_and_of_a_training_instance(self, env):
        """Where nothing has a place, as in countdown, the description is the note."""
        policy = load_policy("tiny", envs=[make(env)], response_format="grounding_worldmodeling")
        frame = ChatFrame(policy.tokenizer, "grounding_worldmodeling")
        played = demonstrate(frame, env, 4, 3) + demonstrate(frame, env, 4, 4)
        assert len({t.seed for t in played}) == 8  # every step has instances of its own
        for t in played:
            world = make(env, "train")
            conversation = frame.open(world.system_prompt, world.reset(seed=t.seed)[0])
            for turn, reward in enumerate(t.turn_rewards):
                ids = [i for i, k in zip(t.tokens, t.turn_ids) if k == turn]
                reply = frame.parse(policy.tokenizer.decode(ids))
                assert reply.valid and reply.reasoning == world.note()
                assert reply.observation == warmup.description(world)
                observation, paid, *ended, _ = world.step(reply.answer)
                assert reply.prediction == warmup.description(world) and paid == reward
                conversation += ids
                conversation += [] if any(ended) else frame.between(ids[-1], observation)
            assert t.tokens == conversation and any(ended) and world.instance_split() == "train"
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
        for name, peak in (("tiny", 3e-3), ("a/pretrained-model", 1e-4)):
            rates.clear()
            warm_up(*fresh(name=name), "bandit", 20)
            falling = [1 - k / 20 for k in range(1, 20)]
            assert rates == pytest.approx([peak * x for x in (0.5, *falling)])

    def test_a_step_has_fewer_demonstrations_for_long_episodes_and_large_models(self):
        for name, turns, count in (("tiny", 6, 64), ("tiny", 7, 32), ("smollm2", 7, 4)):
            found = warmup.batch_size(fresh(name=name)[0], "frozenlake", None, {"max_turns": turns})
            assert found == count

    def test_models_that_cannot_write_the_form_are_warmed_up_and_a_users_is_not(self):
        steps = [warmup.default_steps(name) for name in ("tiny", "smollm2", "some/folder")]
        assert steps[0] > steps[1] > steps[2] == 0

    def test_an_environment_that_cannot_be_imitated_is_refused_with_what_to_write(self):
        with pytest.raises(ValueError, match=r"toys:Lottery imitates its solve.*--warmup-steps 0"):
            warm_start(*fresh(), f"{Lottery.__module__}:Lottery", 2)


class TestShippedWeights:
    def test_redoing_the_first_steps_gives_the_same_weights(self):
        record = warm_up(*fresh("frozenlake"), "frozenlake", 400, stop_after=2)
        with safe_open(next(ASSETS.glob("tiny-frozenlake-*")), "pt") as file:
            shipped = {name: json.loads(text) for name, text in file.metadata().items()}
        assert record["loss"] == pytest.approx(shipped["loss"][:2], rel=1e-4)
        assert record["probe"] == pytest.approx(shipped["probe"], rel=1e-3, abs=1e-3)

    def test_other_settings_have_another_key(self):
        """So have other weights of a pretrained model, which its name does not tell."""
        policies = [fresh(name="folder") for _ in range(2)]
        policies[0][0].model.model.norm.weight.data[3] += 1
        changes = ({}, dict(steps=3), dict(options={"reversed": True}),
                   dict(budgets={"max_turns": 2}))
        keys = [warm_key(*fresh(), "bandit", **{"steps": 2} | change) for change in changes]
        keys += [warm_key(*pair, "bandit", 2) for pair in policies]
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
        warm_start(policy, frame, "bandit", 0)
        assert made[2] == warmup.probe(policy.model)

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
        with safe_open(path, "pt") as file:
            loss = json.loads(file.metadata()["loss"])
        assert loss[-1] < 0.2 * loss[0]
