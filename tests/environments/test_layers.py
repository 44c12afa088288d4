"""Layers: the contract of the ten environments inside two of them, and what each layer does."""

import itertools
from collections import Counter
from unittest.mock import Mock

import pytest
from conftest import begin, message, parsed
from scipy.stats import binomtest, chi2_contingency, chisquare
from test_env_contract import *  # noqa: F403  the classes that it names, for ENV_NAMES
from test_env_contract import play, random_player
from test_readme import code_blocks
from toys import tiny
from training import metrics, run

from minragen import eval as evaluation
from minragen.__main__ import main as command
from minragen.environments.layers import Layer
from minragen.envs import REGISTRY, EnvGroups, Outcome, image_of, make
from minragen.look import play as on_screen
from minragen.run import bundled, measure
from minragen.run.groups import env_groups
from minragen.run.runs import read_config
from minragen.trajectory import Reply, Trajectory, Turn

NOISE = "action_noise,probability=0.3"
# What the contract is about; one layer alone is in tests/long/test_at_length.py.
ENV_NAMES = [f"{name} {NOISE} {NOISE}" for name in sorted(REGISTRY)]


class Dark(Layer):
    def render_text(self):
        return "Dark."

    def image(self):
        image = self.env.image()
        return None if image is None else 0 * image


class TestLayer:
    def test_an_instance_and_what_the_environment_draws_are_the_same_inside_layers(self):
        for name, options in (("frozenlake", {"slip": 0.5}), ("bandit", {})):
            for seed, member in itertools.product(range(20), range(2)):
                plain, inside = (make(name, layers=layers, **options) for layers in (
                    (), ("action_noise,probability=0",) * 2))
                one, other = (play(env, seed, random_player(seed), member)
                              for env in (plain, inside))
                assert (one.rewards, one.ends) == (other.rewards, other.ends)
                assert plain.instance() == inside.instance()

    def test_each_member_and_each_layer_has_luck_of_its_own(self):
        env = begin("sokoban", layers=(NOISE, NOISE))
        drawn = set()
        for member in range(3):
            env.reset(seed=5, options={"member": member})
            again = env.luck.random(), env.env.luck.random()
            env.reset(seed=5, options={"member": member})
            assert (env.luck.random(), env.env.luck.random()) == again
            drawn |= {*again, env.dynamics.random()}
        assert len(drawn) == 9

    def test_what_it_does_not_write_is_the_environments(self):
        plain, env = (begin("frozenlake", seed=3, view="image+text", layers=layers)
                      for layers in ((), (NOISE, NOISE)))
        assert env.solve() == plain.solve() and env.note() == plain.note()
        assert (env.budget, env.split, env.actions) == (plain.budget, "train", plain.actions)
        assert env.score_description(env.describe()) == 1.0
        assert (env.image() == plain.image()).all() and env.render() == plain.render()
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = env.nothing

    def test_the_system_message_tells_what_each_layer_does(self):
        env = begin("sokoban", layers=("action_noise,probability=0.2", NOISE))
        assert env.system_prompt.splitlines()[-2:] == [
            f"With probability 0.{p} an action is replaced by another one." for p in (2, 3)]
        assert begin("lean", layers=[NOISE]).system_prompt.endswith("0.3 an action is lost.")

    def test_the_model_sees_what_it_shows(self):
        env = begin("sokoban", view="image+text", layers=["test_layers:Dark"])
        observation, *_ = env.step("Up")
        assert "Dark." in observation and "Targets" not in observation
        assert not image_of(observation).any()

    @pytest.mark.parametrize("layer, said", [
        ("action_nois", "unknown layer 'action_nois': did you mean 'action_noise'? Known: "),
        ("action_noise,probabilty=1", "of ActionNoise 'probabilty': did you mean 'probability'"),
        ("action_noise,0.2", "bad option of a layer '0.2': expected name=value"),
        ("action_noise,probability=1.5", "of ActionNoise: got 1.5, expected 0 to 1."),
        ("no_such:x", "layer no_such:x: there is no module 'no_such'"),
        ("minragen.envs:TextEnv", "there is no such subclass of Layer")])
    def test_one_that_cannot_be_is_refused(self, layer, said):
        assert said in message("--print-config", "--layer", layer)

    def test_none_fits_around_an_environment_that_writes_its_own_step(self):
        assert "no layer fits around Lottery: it writes its own step()" in message(
            "--print-config", "--env", "toys:Lottery", "--layer", NOISE)


class TestActionNoise:
    def test_it_replaces_that_share_by_each_of_the_others_alike_and_independently(self):
        env, done = begin("frozenlake", layers=["action_noise,probability=0.2"]), []
        env.unwrapped._act = lambda action: done.append(action) or Outcome(0.0)
        for seed in range(800):
            play(env, seed, lambda _: "Up || Up")
        kept = [action == "Up" for action in done]
        assert binomtest(kept.count(False), len(done), 0.2).pvalue > 0.01
        others = Counter(action for action in done if action != "Up")
        assert len(others) == 3 and chisquare([*others.values()]).pvalue > 0.01
        pairs = Counter(zip(kept, kept[1:]))
        assert chi2_contingency([[pairs[a, b] for b in (0, 1)] for a in (0, 1)]).pvalue > 0.01

    @pytest.mark.parametrize("name", ["countdown", "searchqa"])
    def test_where_actions_are_not_just_names_it_is_lost_and_counts(self, name):
        env = begin(name, layers=["action_noise,probability=1"], **(
            {"hops": 2} if name == "searchqa" else {}))
        before, left = env.render(), env.actions_left
        _, reward, _, _, info = env.step(env.solve()[0])
        assert env.render() == before and env.actions_left == left - 1 and reward == 0
        assert info == {"success": 0.0, "valid": 1.0, "effective": 0.0, "replaced": 1.0}

    def test_the_metric_counts_what_was_replaced_and_no_text_that_is_not_an_action(self):
        env = begin("sokoban", layers=["action_noise,probability=1"])
        info = env.step("Up || Jump")[4]
        assert (info["replaced"], info["valid"]) == (1.0, 0.0)
        env = begin("sokoban", layers=["action_noise,probability=0"])
        assert env.step("Up")[4]["replaced"] == 0.0
        layers = [f"action_noise,probability={p}" for p in (1, 0, 1)]
        assert begin("sokoban", layers=layers).step("Up")[4]["replaced"] == 2.0


class TestRandomReward:
    def test_an_episode_pays_by_chance_alone_at_its_end_and_looks_as_without_it(self):
        plain, env = (begin("frozenlake", layers=x) for x in ((), ["random_reward,probability=.3"]))
        paid = {0: [], 1: []}  # seeds of the random player, of the solver
        for seed in range(400):
            solver = seed % 2 and (lambda env: env.solve()[0])
            one, same = (play(e, seed, solver or random_player(seed)) for e in (env, plain))
            assert (one.observations, one.infos) == (same.observations, same.infos)
            *before, last = one.rewards
            assert not any(before) and last in (0.0, 1.0)
            paid[seed % 2].append(last)
        for lasts in paid.values():
            assert binomtest(int(sum(lasts)), len(lasts), 0.3).pvalue > 1e-4
        assert begin("frozenlake", layers=["random_reward"]).system_prompt == plain.system_prompt


class TestRuns:
    """A run keeps its layers: the page's, of ten lines, and one of ours."""

    SMALL = ("--num-groups 2 --group-size 2 --val-size 2 --val-every 1 --save-every 1 "
             "--warmup-steps 2 --max-turns 2 --filter none")
    LAYERS = ("--layer", "fog:Fog,every=3", "--layer", NOISE)

    @pytest.fixture
    def fog(self, runs, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("")
        *_, lines = code_blocks("add-an-environment.md", "python")
        assert len([line for line in lines[2:] if line]) <= 10
        (tmp_path / "fog.py").write_text("\n".join(lines))
        return runs

    def test_it_trains_resumes_and_is_measured_inside_its_layers(self, fog, capsys):
        run(f"--run a --steps 1 {self.SMALL}", *self.LAYERS)
        assert "fog:Fog,every=3" in capsys.readouterr().out  # what differs from the preset
        run("--run a --resume --steps 2")
        run(f"--run b --steps 2 {self.SMALL}", *self.LAYERS)
        one, other = ([line for line in metrics(fog / name) if "policy_loss" in line]
                      for name in "ab")
        assert len(one) == 2 and one == other and one[0]["grad_norm"] > 0
        assert read_config(fog / "a").layer == self.LAYERS[1::2]
        assert "keeps the run's settings: layer was" in message(
            "--run", "a", "--resume", "--layer", NOISE)
        capsys.readouterr()
        command(["play", "--run", "a"])
        assert capsys.readouterr().out.count("Fog.") >= 3  # the second turn of each episode

    def test_an_episode_is_played_again_inside_the_layers_for_its_boards(self, fog):
        config = parsed("--layer", NOISE, "--layer", "fog:Fog", "--env-arg", "frozen=1.0")
        env, turns, boards, over = env_groups(config, "val").envs[0], [], [], False
        observation, _ = env.reset(seed=3, options={"member": 1})
        while not over:
            turns.append(Turn(observation, "", Reply(answer="Up || Down"), 0.0, None))
            boards.append(env.grid())
            observation, _, *ends, _ = env.step("Up || Down")
            over = any(ends)
        assert len({*boards}) > 2  # without noise there are two
        t = Trajectory("frozenlake", 3, 0, 1, turns=turns)
        assert on_screen.boards_of(env, t) == [*boards, env.grid()]

    def test_a_model_or_a_person_plays_inside_of_the_given_ones(self, capsys):
        (_, config, _), = measure.subjects(evaluation.arguments(
            ["--env", "bandit", "--model", "tiny", "--layer", NOISE, "--layer", "random_reward"]))
        assert config.layer == (NOISE, "random_reward")
        on_screen.play("sokoban", "train", 0, {"layers": ["test_layers:Dark"]},
                       Mock(side_effect=["Up"] * 3 + [EOFError]))
        assert capsys.readouterr().out.count("Dark.") == 1 + 3

    def test_weights_that_were_warmed_up_without_layers_are_not_taken(self, fog):
        """Also if the first demonstrations do not show the layers, as in bandit's only turn."""
        (fog.parent / "silent.py").write_text("from minragen.environments.layers import Layer\n"
                                              "class Silent(Layer):\n    pass\n")
        keys = set()
        for layers in ((), ("silent:Silent",), ("silent:Silent",) * 2):
            groups = EnvGroups("bandit", 4, 1, layers=layers)
            keys.add(bundled.warmup_key(*tiny("bandit"), groups, 1))
        assert len(keys) == 3
