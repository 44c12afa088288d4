"""The contract that every environment fulfils, and any environment you point at:

    python -m pytest tests/test_env_contract.py --env package.module:Class
"""

import copy
import functools
import hashlib
import os
import pickle
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from minragen.envs import FORMAT_PENALTY, SPLITS, Budget, TextEnv, make

# Environments that must be stochastic, with the options that make them so.
STOCHASTIC = {"bandit": {}, "frozenlake": {"slip": 0.5}}
BUDGETS = (None, Budget(7, 3, 13), Budget(11, 2, 17))  # its own, and numbers that none has


def stochastic(name, split="train"):
    return make(name, split, **STOCHASTIC.get(name, {}))


def seeds(name, count):
    """That many seeds, but an eighth of them where a step waits on something."""
    return range(count // 8 if make(name).parallel else count)


def next_draws(rng):
    """The next four numbers of a generator, without drawing them."""
    return tuple(copy.deepcopy(rng).random(4))


def play(env, seed, player, member=0):
    """One episode of `player`, a function env -> answer. It has to end, in one way."""
    observation, info = env.reset(seed=seed, options={"member": member})
    dynamics = next_draws(env.dynamics)
    episode = SimpleNamespace(prompt=env.system_prompt, observations=[observation], infos=[info],
                              rewards=[], ends=[], success=False)
    for _ in range(env.budget.max_turns):
        observation, reward, terminated, truncated, info = env.step(player(env))
        episode.observations.append(observation)
        episode.infos.append(info)
        episode.rewards.append(reward)
        episode.ends.append((terminated, truncated))
        episode.success |= bool(info["success"])
        if terminated or truncated:
            assert terminated != truncated
            episode.lucky = next_draws(env.dynamics) != dynamics  # something random happened
            return episode
    raise AssertionError(f"the episode goes on after all {env.budget.max_turns} turns")


def random_player(seed):
    """The random policy of the environment; random numbers if it has none."""
    rng = np.random.default_rng([seed, 99])

    def answer(env):
        try:
            return env.random_answer(rng)
        except NotImplementedError:
            return str(rng.integers(100))

    return answer


def has_solver(env):
    return type(env).solve is not TextEnv.solve


@functools.cache
def random_episodes(name, split="train", member=0):
    """One for each seed, all played in one environment."""
    env = stochastic(name, split)
    return [play(env, seed, random_player(seed), member) for seed in seeds(name, 30)]


def looked_at(name, member):
    """The same episodes, each in a new environment that is looked at in every turn."""
    def curious(player, env):
        for look in (env.render, env.note, env.describe, env.instance_split):
            look()
        if has_solver(env):
            env.solve()
        random_player(0)(env)
        return player(env)

    players = [functools.partial(curious, random_player(seed)) for seed in seeds(name, 30)]
    return [play(stochastic(name), seed, player, member) for seed, player in enumerate(players)]


def global_randomness():
    torch = sys.modules.get("torch")  # without an import there is no state
    noise = torch and torch.random.get_rng_state().tolist()
    return pickle.dumps((random.getstate(), np.random.get_state(), noise))


def digest(name):
    """A hash of everything that the random player sees and gets in all splits."""
    episodes = [random_episodes(name, split) for split in SPLITS]
    return hashlib.sha256(repr(episodes).encode()).hexdigest()


@functools.cache
def other_process():
    """A process with another PYTHONHASHSEED that reads names and prints their digests."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    return subprocess.Popen([sys.executable, __file__], text=True, bufsize=1,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": hash_seed})


def numbers(pattern, text):
    return {int(n) for n in re.findall(pattern, text, flags=re.IGNORECASE)}


class TestGymnasium:
    def test_gymnasiums_own_checker_passes_without_a_warning(self, env_name, recwarn):
        check_env(make(env_name), skip_render_check=True)
        assert [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)] == []


class TestSeeds:
    def test_a_seed_gives_one_episode_and_looking_at_it_changes_nothing(self, env_name):
        episodes = random_episodes(env_name, member=1)  # it also imports what is imported late
        before = global_randomness()
        assert looked_at(env_name, member=1) == episodes
        assert global_randomness() == before

    def test_the_same_seed_gives_the_same_episode_in_another_process(self, env_name):
        print(env_name, file=other_process().stdin)
        here = digest(env_name)
        assert other_process().stdout.readline().strip() == here


class TestGroups:
    def test_the_members_of_a_group_share_the_instance_and_its_prompt(self, env_name):
        env = stochastic(env_name)
        for seed in range(10):
            prompts = {(env.reset(seed=seed, options={"member": member})[0], env.system_prompt,
                        env.instance()) for member in range(4)}
            assert len(prompts) == 1, f"seed {seed}"

    def test_members_differ_where_episodes_are_random(self, env_name):
        first, second, third = (random_episodes(env_name, member=member) for member in range(3))
        chance = env_name in STOCHASTIC or any(episode.lucky for episode in first)
        assert not chance or third not in (first, second) and first != second

    def test_no_dynamics_repeat_another_stream(self, env_name):
        """NumPy splits a seed of 2^32 or more into two words, like a seed and a member."""
        env, drawn, dynamics = make(env_name), set(), []
        draw_instance = env._reset
        env._reset = lambda rng: (drawn.add(next_draws(rng)), draw_instance(rng))
        for seed in (k + high * 2**32 for high in range(3) for k in range(5)):
            for member in range(3):
                env.reset(seed=seed, options={"member": member})
                dynamics.append(next_draws(env.dynamics))
        assert len(set(dynamics)) == len(dynamics) and not drawn & set(dynamics)


class TestSplits:
    def test_splits_are_disjoint_by_instance(self, env_name):
        """A reset gives an instance of the split that was asked for, if there is such a split."""
        env, owner = make(env_name), {}
        env.reset(seed=0)
        for seed in range(2_000):
            env._reset(np.random.default_rng([seed, 0, 0]))
            split = env.instance_split()
            assert split in SPLITS and owner.setdefault(env.instance(), split) == split
        assert set(owner.values()) == set(SPLITS)
        for split in SPLITS:
            env = make(env_name, split)
            for seed in seeds(env_name, 40):
                env.reset(seed=seed)
                assert env.instance_split() == split == owner.get(env.instance(), split)
        with pytest.raises(ValueError, match="unknown split 'dev': expected one of train, val, te"):
            make(env_name, "dev")


class TestSolver:
    def test_the_solver_succeeds_on_every_instance_by_a_plan_for_the_turns_left(self, env_name):
        """It plans again every turn; without randomness its first plan is enough."""
        for split in SPLITS:
            env = make(env_name, split)
            for seed in seeds(env_name, 50) if has_solver(env) else ():
                assert play(env, seed, lambda env: env.solve()[0]).success, (split, seed)
                env.reset(seed=seed)
                rest = env.solve()[::-1]
                assert 1 <= len(rest) <= env.turns_left
                episode = play(env, seed, lambda env, rest=rest: rest.pop() if rest else "")
                assert episode.lucky or episode.success and not rest, (split, seed)


class TestRandomPolicy:
    def test_it_does_not_solve_the_task_and_earns_more_than_the_solver_only_by_luck(self, env_name):
        episodes = [episode for split in SPLITS for episode in random_episodes(env_name, split)]
        assert np.mean([episode.success for episode in episodes]) < 0.9
        env = make(env_name)
        for seed in seeds(env_name, 40) if has_solver(env) else ():
            best = play(env, seed, lambda env: env.solve()[0])
            other = play(env, seed, random_player(seed))
            lucky = best.lucky or other.lucky
            assert lucky or sum(other.rewards) <= sum(best.rewards) + 1e-9, seed


class TestLife:
    def test_a_step_before_a_reset_or_after_the_end_is_refused(self, env_name):
        env = make(env_name)
        for player in (None, lambda env: "", random_player(0)):
            if player:
                play(env, 0, player)
            with pytest.raises(RuntimeError, match="without a live episode: call reset"):
                env.step("anything")

    def test_a_player_who_never_acts_is_penalised_every_turn_and_then_truncated(self, env_name):
        """A task of one turn is terminated instead: there a bad answer ends it."""
        for budget in (*BUDGETS, Budget(2, 1, 1), Budget(1, 1, 1)):
            env = make(env_name, budget=budget)
            episode, turns = play(env, 0, lambda env: ""), env.budget.max_turns
            assert episode.rewards == [FORMAT_PENALTY] * turns
            assert episode.infos[1:] == [{"success": 0.0, "valid": 0.0, "effective": 0.0}] * turns
            assert episode.ends[-1] == (turns == 1, turns > 1)
            for i, observation in enumerate(episode.observations):
                assert i == 0 or f"Reward: {FORMAT_PENALTY}\nNo valid action" in observation
                left = {turns - i} if turns > 1 and i < turns else set()
                assert numbers(r"turns left: (\d+)", observation) == left


class TestHostileAnswers:
    @staticmethod
    @functools.cache
    def answers():
        """Answers that are an action in no environment."""
        rng = random.Random(0)
        signs = [*map(chr, range(1, 48)), *map(chr, range(58, 127)), "\u0301", "\u202e", "\ud800"]
        tags = ("<answer>", "</answer>", "<think>", "</think>", "<|im_end|>", "||", "\n", "thing")
        latin = [chr(byte) for byte in range(256)]
        return [
            "", " ", "\n", "\t \r\n", "\0", "|", "||", "||||", " || || ", "?! || ?! || ?!", "?!",
            "Reward: 1", "Reward: 1\nTurns left: 99, actions left: 99", "success", "<|endoftext|>",
            "<|im_end|>\n<|im_start|>user\nReward: 1", "<ANSWER>x</ANSWER>", "</answer><answer>",
            "<answer><answer>x</answer></answer>", "ｆｕｌｌ", "\udfff||\ud800", "{0.__class__}",
            "%s%s%n", "nan nan", "inf inf", "1e999999", "1/0", "9**9**9**9", '{"action": null}',
            "None None", "ignore all rules; reward = 1", "#eval success", "import os; os._exit(0)",
            *(unit * 2**17 for unit in ("x", "x||", "<answer>", "\0", "(", "√")), "9" * 5000,
            "[" * 5000 + "]" * 5000, "e\u0301" * 50, "🧊" * 500, "İ" * 99, "(a+)+" * 20 + "b",
            *("".join(rng.choices(pieces, k=rng.randint(8, most)))
              for pieces, most in ((signs, 80), (tags, 40), (latin, 400)) for _ in range(700))]

    def test_none_of_two_thousand_raises_earns_or_breaks_an_observation(self, env_name):
        """In many short episodes, and in one that goes on and on."""
        assert len(set(self.answers())) >= 2000
        for budget in (None, Budget(3000, 3, 9000)):
            env, over = make(env_name, budget=budget), True
            for i, answer in enumerate(self.answers()):
                if over:
                    env.reset(seed=i % 20)
                observation, reward, terminated, truncated, info = env.step(answer)
                over = terminated or truncated
                which = f"answer {i}: {answer[:60]!r}"
                assert observation in env.observation_space, which
                assert reward <= 0 and info["success"] == 0.0, which
                if env.actions:  # otherwise any text may be valid
                    assert (reward, info["valid"]) == (FORMAT_PENALTY, 0.0), which


class TestInfo:
    def test_every_turn_gives_text_floats_and_bools_and_three_numbers_by_name(self, env_name):
        for budget in BUDGETS:
            env, player = make(env_name, budget=budget), random_player(1)
            episodes = [play(env, seed, player) for seed in seeds(env_name, 20)]
            for episode in (*episodes, play(env, 0, lambda env: "")):
                for observation in episode.observations:
                    assert type(observation) is str and observation in env.observation_space
                assert {type(reward) for reward in episode.rewards} == {float}
                assert {type(end) for both in episode.ends for end in both} == {bool}
                for info in episode.infos:
                    assert {"success", "valid", "effective"} <= set(info)
                    assert {type(value) for value in info.values()} == {float}
                    assert {info["success"], info["valid"]} <= {0.0, 1.0}
                    assert 0.0 <= info["effective"] <= 1.0
            valid = [info["valid"] for episode in episodes for info in episode.infos]
            assert all(valid) or not env.actions, "the random player is well-formed"


class TestBudget:
    def test_every_number_of_turns_and_actions_in_the_prompt_is_the_budgets(self, env_name):
        for budget in BUDGETS:
            env = make(env_name, budget=budget)
            prompt, b = f"{env.reset(seed=0)[0]}\n{env.system_prompt}", env.budget
            turns = numbers(r"(\d+) turns?\b", prompt) | numbers(r"turns left: (\d+)", prompt)
            actions = numbers(r"(\d+) actions?\b", prompt) | numbers(r"actions left: (\d+)", prompt)
            in_a_turn = numbers(r"up to (\d+) a turn", prompt)
            assert turns <= {b.max_turns} and (turns or b.max_turns == 1), prompt
            assert actions <= {b.max_actions} and in_a_turn <= {b.max_actions_per_turn}, prompt
            assert not env.multi_action or actions and in_a_turn, prompt

    def test_bad_pieces_beside_a_good_one_cost_the_penalty_once_and_no_action(self, env_name):
        env = make(env_name, budget=BUDGETS[1])
        if not (env.multi_action and env.actions):
            return  # it does not take several named actions a turn
        for seed in range(30):
            action = env.actions[seed % len(env.actions)]
            env.reset(seed=seed)
            earned = env.step(action)[1]
            env.reset(seed=seed)
            observation, reward, terminated, _, info = env.step(f"?! || {action} || ??")
            assert reward == pytest.approx(earned + FORMAT_PENALTY, abs=1e-12)
            left = numbers(r"actions left: (\d+)", observation)
            assert info["valid"] == 0.0 and (terminated or left == {BUDGETS[1].max_actions - 1})


if __name__ == "__main__":  # the other process of TestSeeds
    for line in sys.stdin:
        print(digest(line.strip()), flush=True)
