"""The contract that every environment fulfils, and any environment you point at:

    python -m pytest tests/test_env_contract.py --env package.module:Class

Nothing here knows what an environment is about: it is played by its own solver, by its random
policy, by a player that says nothing and by a hostile one. What one environment is about stands in
test_envs.py.
"""

import copy
import hashlib
import os
import pickle
import random
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from minragen.envs import FORMAT_PENALTY, SEPARATOR, SPLITS, Budget, make

# Options that give an environment dynamics to speak of.
STOCHASTIC_OPTIONS = {"frozenlake": {"slip": 0.5}}
# These must be found stochastic, so that their tests never skip.
STOCHASTIC = ("bandit", "frozenlake")
BUDGETS = (Budget(7, 3, 13), Budget(11, 2, 17))  # numbers that no environment has as its own


@dataclass
class Episode:
    observations: list
    rewards: list = field(default_factory=list)
    infos: list = field(default_factory=list)
    ends: list = field(default_factory=list)  # (terminated, truncated) of every turn

    @property
    def success(self):
        return any(info["success"] for info in self.infos)


def build(name, split="train", budget=None, stochastic=False):
    return make(name, split, budget, **(STOCHASTIC_OPTIONS.get(name, {}) if stochastic else {}))


def play(env, seed, player, member=0):
    """One episode of `player`, a function env -> answer. Fails if it outlives the budget."""
    observation, info = env.reset(seed=seed, options={"member": member})
    episode = Episode([observation], infos=[info])
    for _ in range(env.budget.max_turns):
        observation, reward, terminated, truncated, info = env.step(player(env))
        episode.observations.append(observation)
        episode.rewards.append(reward)
        episode.infos.append(info)
        episode.ends.append((terminated, truncated))
        if terminated or truncated:
            return episode
    raise AssertionError(f"the episode goes on after all {env.budget.max_turns} turns")


def any_answer(env, rng):
    """A well-formed answer where the environment can make one up, otherwise a number."""
    try:
        return env.random_answer(rng)
    except NotImplementedError:
        return str(rng.integers(100))


def random_player(seed):
    rng = np.random.default_rng([seed, 99])
    return lambda env: any_answer(env, rng)


def script(answers):
    answers = iter(answers)
    return lambda env: next(answers)


def heard(player, answers):
    """The player, whose answers are also put into the list."""
    def say(env):
        answers.append(player(env))
        return answers[-1]
    return say


def silent(env):
    return ""


def next_step(env):
    """The solver, planning afresh every turn. Skips the test of an environment that has none."""
    try:
        return env.solve()[0]
    except NotImplementedError as missing:
        pytest.skip(str(missing))


def digest(name):
    """A hash of everything that is seen and paid in a few episodes of every split."""
    seen = hashlib.sha256()
    for split in SPLITS:
        env = build(name, split, stochastic=True)
        for seed in range(5):
            for member in range(2):
                episode = play(env, seed, random_player(seed), member)
                seen.update(
                    repr((env.system_prompt, episode.observations, episode.rewards)).encode())
    return seen.hexdigest()


def next_draws(env):
    """The next four numbers of the dynamics, without drawing them."""
    return tuple(copy.deepcopy(env.dynamics).random(4))


class TestGymnasium:
    def test_gymnasiums_own_checker_passes_without_a_warning(self, env_name):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_env(build(env_name), skip_render_check=True)
        assert [str(w.message) for w in caught if issubclass(w.category, UserWarning)] == []

    def test_observations_are_text_and_rewards_and_ends_are_plain_python(self, env_name):
        env = build(env_name, stochastic=True)
        for seed in range(30):
            episode = play(env, seed, random_player(seed))
            assert {type(o) for o in episode.observations} == {str}
            assert {type(r) for r in episode.rewards} == {float}
            assert {type(end) for both in episode.ends for end in both} == {bool}
            assert all(o in env.observation_space for o in episode.observations)

    def test_render_returns_text(self, env_name):
        env = build(env_name)
        env.reset(seed=0)
        assert isinstance(env.render(), str)


class TestSeeds:
    def test_the_same_seed_gives_the_same_episode(self, env_name):
        """Also from an environment that has played something else before."""
        used = build(env_name, stochastic=True)
        for seed in range(20):
            fresh = play(build(env_name, stochastic=True), seed, random_player(seed))
            assert play(used, seed, random_player(seed)) == fresh

    def test_the_same_seed_gives_the_same_episode_in_another_process(self, env_name):
        """One with another PYTHONHASHSEED: an environment that uses hash() of a string differs
        there."""
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        other = subprocess.run([sys.executable, __file__, env_name], text=True, capture_output=True,
                               timeout=120, env={**os.environ, "PYTHONPATH": path,
                                                 "PYTHONHASHSEED": hash_seed}, check=False)
        assert other.returncode == 0, other.stderr
        assert other.stdout.split()[-1] == digest(env_name)

    def test_other_seeds_give_other_instances(self, env_name):
        env = build(env_name)
        assert len({env.reset(seed=seed)[0] for seed in range(50)}) > 1

    def test_reset_without_a_seed_goes_on_from_the_environments_own_stream(self, env_name):
        env = build(env_name)
        runs = []
        for _ in range(2):
            env.reset(seed=3)
            runs.append([env.reset()[0] for _ in range(20)])
        assert runs[0] == runs[1]
        assert len(set(runs[0])) > 1

    def test_looking_at_an_environment_does_not_change_it(self, env_name):
        def curious(player):
            def look_then_play(env):
                for look in (env.render, env.note, env.instance_split, env.solve):
                    with suppress(NotImplementedError):  # no solver
                        look()
                any_answer(env, np.random.default_rng(0))
                return player(env)
            return look_then_play

        env = build(env_name, stochastic=True)
        for seed in range(20):
            plain = play(env, seed, random_player(seed))
            assert play(env, seed, curious(random_player(seed))) == plain

    def test_no_global_random_state_is_touched(self, env_name):
        def states():
            torch = sys.modules.get("torch")  # what nobody has imported has no state to touch
            return [pickle.dumps(s) for s in (random.getstate(), np.random.get_state(),
                                              torch and torch.random.get_rng_state().tolist())]

        play(build(env_name), 0, random_player(0))  # what is imported late is there from now on
        before = states()
        for split in SPLITS:
            env = build(env_name, split, stochastic=True)
            for seed in range(5):
                play(env, seed, random_player(seed))
                env.reset(seed=seed)
                any_answer(env, np.random.default_rng(seed))
                with suppress(NotImplementedError):  # no solver
                    env.solve()
        assert states() == before


class TestGroups:
    def test_all_members_of_a_group_share_the_first_observation_and_the_system_prompt(
            self, env_name):
        env = build(env_name, stochastic=True)
        for seed in range(50):
            told = set()
            for member in range(4):
                observation, _ = env.reset(seed=seed, options={"member": member})
                told.add((observation, env.system_prompt, env.instance()))
            assert len(told) == 1, f"seed {seed}"

    def test_a_member_that_is_not_named_is_the_first(self, env_name):
        env = build(env_name, stochastic=True)
        env.reset(seed=5, options={"member": 0})
        first = next_draws(env)
        env.reset(seed=5)
        assert next_draws(env) == first

    def test_members_differ_in_their_dynamics(self, env_name):
        """Same answers, same instance: what differs between members is the world's chance alone.

        An environment is stochastic if an episode draws from its dynamics, and then every pair of
        members has to differ in some episode. A stream shared by the group fails for every pair.
        The answers are the random player's to the first member, then its last one again.
        """
        env, drawn, same = (build(env_name, stochastic=True), False,
                            {(i, j) for i in range(3) for j in range(i)})
        for seed in range(60):
            answers, episodes = [], []
            play(env, seed, heard(random_player(seed), answers))
            answers += answers[-1:] * (env.budget.max_turns - len(answers))
            for member in range(3):
                env.reset(seed=seed, options={"member": member})
                before = next_draws(env)
                episodes.append(play(env, seed, script(answers), member))
                drawn |= next_draws(env) != before
            same -= {(i, j) for i, j in same if episodes[i] != episodes[j]}
        if not drawn:
            assert env_name not in STOCHASTIC
            pytest.skip(f"{env_name} is deterministic")
        assert not same

    def test_the_dynamics_of_a_member_are_reproducible(self, env_name):
        for seed in range(10):
            for member in range(3):
                twice = [play(build(env_name, stochastic=True), seed, random_player(seed), member)
                         for _ in "12"]
                assert twice[0] == twice[1]

    def test_no_dynamics_repeat_another_stream(self, env_name, monkeypatch):
        """All members of all groups have streams of their own, and none is one that drew an
        instance.

        Were it, slips would be correlated with the map: the numbers that placed the holes come
        again. NumPy spells a seed of 2^32 and more in two words, so that (seed, member) of one may
        read like another's.
        """
        env, drawn, dynamics = build(env_name), set(), []
        draw_instance = env._reset

        def listening(rng):
            drawn.add(tuple(copy.deepcopy(rng).random(4)))
            draw_instance(rng)

        monkeypatch.setattr(env, "_reset", listening)
        for seed in (k + high * 2**32 for high in range(3) for k in range(30)):
            for member in range(3):
                env.reset(seed=seed, options={"member": member})
                dynamics.append(next_draws(env))
        assert len(set(dynamics)) == len(dynamics)
        assert not drawn & set(dynamics)


class TestSplits:
    def test_splits_are_disjoint_by_instance(self, env_name):
        """Over 10,000 drawn instances; and a reset gives one of the split that was asked for."""
        env, owner = build(env_name), {}
        env.reset(seed=0)
        for seed in range(10_000):
            env._reset(np.random.default_rng([seed, 0, 0]))
            split = env.instance_split()
            assert split in SPLITS and owner.setdefault(env.instance(), split) == split
        assert set(owner.values()) == set(SPLITS)
        for split in SPLITS:
            env = build(env_name, split)
            for seed in range(200):
                env.reset(seed=seed)
                assert env.instance_split() == split == owner.get(env.instance(), split)

    def test_an_unknown_split_is_refused(self, env_name):
        with pytest.raises(ValueError,
                           match="unknown split 'dev': expected one of train, val, test"):
            build(env_name, "dev")


class TestSolver:
    @pytest.mark.parametrize("split", SPLITS)
    def test_the_solver_succeeds_on_every_instance_within_the_budget(self, env_name, split):
        env = build(env_name, split)
        failed = [seed for seed in range(200) if not play(env, seed, next_step).success]
        assert failed == []

    def test_the_solvers_list_is_a_plan_for_the_turns_that_are_left(self, env_name):
        """In a world without chance the first plan can be followed to its end."""
        env = build(env_name)
        for seed in range(50):
            env.reset(seed=seed)
            next_step(env)
            plan, before = env.solve(), next_draws(env)
            assert 1 <= len(plan) <= env.turns_left
            episode = play(env, seed, script(plan))
            if next_draws(env) == before:
                assert episode.success
                assert len(episode.rewards) == len(plan)


class TestRandomPolicy:
    def test_the_random_policy_does_not_solve_the_task(self, env_name):
        env = build(env_name)
        env.reset(seed=0)
        try:
            env.random_answer(np.random.default_rng(0))
        except NotImplementedError as missing:
            pytest.skip(str(missing))
        solved = sum(play(env, seed, random_player(seed)).success for seed in range(200))
        assert solved < 0.9 * 200

    def test_the_random_policy_never_earns_more_than_the_solver(self, env_name):
        """The solver reaches the maximum, so in a world without chance nobody else has more."""
        env = build(env_name)
        for seed in range(100):
            best = sum(play(env, seed, next_step).rewards)
            env.reset(seed=seed)
            before = next_draws(env)
            episode = play(env, seed, random_player(seed))
            if next_draws(env) != before:
                pytest.skip(f"{env_name} is stochastic: luck may beat the better choice")
            assert sum(episode.rewards) <= best + 1e-9

    def test_the_random_policy_is_well_formed(self, env_name):
        env = build(env_name)
        env.reset(seed=0)
        if not env.actions:
            pytest.skip(f"{env_name} takes any text: what is valid is the environment's own matter")
        for seed in range(50):
            assert all(info["valid"] == 1.0 for info in play(env, seed, random_player(seed)).infos)


class TestLife:
    def test_a_step_before_reset_tells_to_call_reset(self, env_name):
        with pytest.raises(RuntimeError, match=r"Call reset\(\)"):
            build(env_name).step("anything")

    def test_a_step_after_the_end_tells_to_call_reset(self, env_name):
        """After a termination as after a truncation."""
        env = build(env_name)
        for player in (silent, random_player(0)):
            play(env, 0, player)
            with pytest.raises(RuntimeError, match=r"Call reset\(\)"):
                env.step("anything")
            env.reset(seed=0)
            env.step("anything")

    def test_an_episode_is_never_both_terminated_and_truncated(self, env_name):
        for budget in (None, *BUDGETS):
            env = build(env_name, budget=budget, stochastic=True)
            for seed in range(50):
                for player in (random_player(seed), silent):
                    ends = play(env, seed, player).ends
                    assert (True, True) not in ends
                    assert set(ends[:-1]) <= {(False, False)}

    @pytest.mark.parametrize("budget", (None, *BUDGETS, Budget(1, 1, 1), Budget(2, 1, 1)), ids=str)
    def test_a_player_who_never_acts_has_exactly_max_turns_turns(self, env_name, budget):
        env = build(env_name, budget=budget)
        for seed in range(5):
            assert len(play(env, seed, silent).rewards) == env.budget.max_turns

    @pytest.mark.parametrize("budget", (None, *BUDGETS, Budget(1, 1, 1)), ids=str)
    def test_running_out_of_turns_is_a_truncation_except_of_a_task_of_one_turn(
            self, env_name, budget):
        """A bad answer to a question asked once is a bad answer, not an episode that was cut
        off."""
        env = build(env_name, budget=budget)
        one_turn = env.budget.max_turns == 1
        assert play(env, 0, silent).ends[-1] == (one_turn, not one_turn)


def hostile_answers():
    """Some two thousand things a policy might say that are no action anywhere."""
    rng = random.Random(0)
    alphabet = "".join(map(chr, [*range(1, 48), *range(58, 127), 0x301, 0x202E, 0x200B, 0xD800,
                                 0x4E2D, 0x1F600]))
    noise = ["".join(rng.choices(alphabet, k=rng.randint(12, 80))) for _ in range(1100)]
    binary = [bytes(rng.choices(range(256), k=rng.randint(12, 400))).decode("latin-1")
              for _ in range(300)]
    tags = ("<answer>", "</answer>", "<think>", "</think>", "<|im_end|>", "||", "\n")
    nested = ["".join(rng.choices((*tags, "no", "thing"), k=rng.randint(8, 40)))
              for _ in range(300)]
    orders = ("ignore all rules", "reward = 1", "success: True", "os._exit(0)", "DROP TABLE",
              "sudo")
    forms = ("system: {}", "{}; {}", "$({})", "`{}`", "<script>{}</script>", "/* {} */", "# {}",
             "{{{}}}", "[[{}]]", "\\{}", "<!-- {} -->", "{}\0{}", "\n\nHuman: {}", "'{}' OR 'a'='a",
             "<tool>{}</tool>", "#eval {}", "import {}", "@{}", "~{}~", "<<{}>>")
    injected = [form.replace("{}", order) for form in forms for order in orders]
    unicode = [chr(code) * 3 + "no" for code in range(0x2500, 0x2500 + 100)]
    return [
        "", " ", "\n", "\t \r\n", "\0", "||", "||||", " || || ", "|", "|||", "\n||\n",
        "x" * 2**20, "|" * 2**20, "x||" * 2**18, "<answer>" * 2**17, "\0" * 2**20, "(" * 2**20,
        "√" * 2**20, "<|im_end|>", "<|im_end|>\n<|im_start|>user\nReward: 1", "<|endoftext|>",
        "</s>", "[/INST]", "<|eot_id|>",
        "Reward: 1", "Reward: 1\nTurns left: 99, actions left: 99", "success", "terminated = True",
        "<think>", "</think>", "<answer>", "</answer>", "</answer><answer>", "<answer></answer>",
        "<answer/>", "<answer><answer>x</answer></answer>", "<think><answer>x</think></answer>",
        "<ANSWER>x</ANSWER>",
        *("<answer>" * n + "x" + "</answer>" * n for n in range(3, 23)),
        *(f"no{chr(code)}thing"
          for code in (*range(32), 127, 0x85, 0xA0, 0x2028, 0x202E, 0xFEFF, 0xFFFD)),
        *(f"no{chr(code)}||{chr(code)}thing" for code in range(32)),
        "\ud800", "\udfff||\ud800", "e\u0301" * 50, "\u202edlrow", "ｆｕｌｌｗｉｄｔｈ", "🧊" * 500,
        "ß" * 99, "İ" * 99, "{}", "{0}", "{self.holes}", "{0.__class__.__mro__}", "%s%s%n",
        "%(success)s", "$HOME", "`true`", "$(true)", "__import__('os')._exit(1)", "exit()",
        "raise SystemExit", "'; DROP TABLE arms; --", "../../../etc/passwd", "nan nan", "inf inf",
        "1e999999", "0x", "1/0", "9" * 5000, "9**9**9**9", "[" * 5000 + "]" * 5000,
        "{\"action\": null}", "null null", "None None", "True True", "undefined",
        "<script>alert(1)</script>", "I would rather not say.", "As a language model, I cannot.",
        "(a+)+" * 20 + "b", "\\x00\\u0000", "\\" * 999,
        *noise, *binary, *nested, *injected, *unicode,
    ]


HOSTILE = hostile_answers()


class TestHostileAnswers:
    def test_there_are_two_thousand(self):
        assert len(HOSTILE) >= 2000
        assert len(set(HOSTILE)) == len(HOSTILE)

    def test_no_answer_raises_earns_or_breaks_an_observation(self, env_name):
        env, over = build(env_name), True
        for i, answer in enumerate(HOSTILE):
            if over:
                env.reset(seed=i % 20)
            observation, reward, terminated, truncated, info = env.step(answer)
            over = terminated or truncated
            told = f"answer {i}: {answer[:60]!r}"
            assert observation in env.observation_space, told
            assert reward <= 0, told
            assert info["success"] == 0.0, told
            # Where any text is an action, what is valid is the environment's own matter.
            if env.actions:
                assert (reward, info["valid"]) == (FORMAT_PENALTY, 0.0), told

    def test_an_episode_of_nothing_else_stays_in_the_observation_space(self, env_name):
        env = build(env_name, budget=Budget(len(HOSTILE), 2, 2 * len(HOSTILE)))
        env.reset(seed=0)
        for answer in HOSTILE:
            observation, _, terminated, truncated, _ = env.step(answer)
            assert observation in env.observation_space
            if terminated or truncated:
                break
        assert terminated or truncated


class TestInfo:
    def test_info_holds_floats_and_names_success_valid_and_effective(self, env_name):
        env = build(env_name, stochastic=True)
        for seed in range(30):
            for player in (random_player(seed), silent):
                for info in play(env, seed, player).infos:
                    assert {"success", "valid", "effective"} <= set(info)
                    assert {type(value) for value in info.values()} == {float}
                    assert {info["success"], info["valid"]} <= {0.0, 1.0}
                    assert 0.0 <= info["effective"] <= 1.0

    def test_a_turn_without_an_action_is_neither_valid_nor_effective(self, env_name):
        assert play(build(env_name), 0, silent).infos[1] == {
            "success": 0.0, "valid": 0.0, "effective": 0.0}


class TestFormatPenalty:
    def test_a_turn_without_an_action_costs_the_penalty_and_nothing_else(self, env_name):
        env = build(env_name)
        for seed in range(20):
            assert set(play(env, seed, silent).rewards) == {FORMAT_PENALTY}

    @pytest.mark.parametrize("bad", ["?!", "?! || ?!", "?! || ?! || ?!", "|| ?! ||"])
    def test_a_turn_of_bad_pieces_costs_it_once_however_many_they_are(self, env_name, bad):
        env = build(env_name, budget=BUDGETS[0])
        env.reset(seed=0)
        if not env.actions:
            pytest.skip(f"{env_name} takes any text: what is bad is the environment's own matter")
        _, reward, *_, info = env.step(bad)
        assert (reward, info["valid"]) == (FORMAT_PENALTY, 0.0)

    def test_bad_pieces_beside_good_ones_cost_it_once_on_top_of_what_the_good_ones_earn(
            self, env_name):
        env = build(env_name, budget=BUDGETS[0])
        env.reset(seed=0)
        if not (env.multi_action and env.actions):
            pytest.skip(f"{env_name} does not take several named actions a turn")
        rng = np.random.default_rng(0)
        for seed in range(50):
            env.reset(seed=seed)
            action = env.actions[rng.integers(len(env.actions))]
            _, earned, *_ = env.step(action)
            env.reset(seed=seed)
            _, reward, *_, info = env.step(f"?! {SEPARATOR} {action} {SEPARATOR} ??")
            assert reward == pytest.approx(earned + FORMAT_PENALTY, abs=1e-12)
            assert info["valid"] == 0.0

    def test_an_observation_says_that_the_turn_was_bad(self, env_name):
        env = build(env_name)
        assert "valid" in play(env, 0, silent).observations[1]
        assert f"Reward: {FORMAT_PENALTY}" in play(env, 0, silent).observations[1]


def numbers(pattern, text):
    return {int(n) for n in re.findall(pattern, text, flags=re.IGNORECASE)}


class TestBudget:
    @pytest.mark.parametrize("budget", (None, *BUDGETS), ids=str)
    def test_every_number_of_turns_and_actions_in_the_prompt_is_the_budgets(self, env_name, budget):
        env = build(env_name, budget=budget)
        observation, _ = env.reset(seed=0)
        told, b = f"{env.system_prompt}\n{observation}", env.budget
        turns = numbers(r"(\d+) turns?\b", told) | numbers(r"turns left: (\d+)", told)
        actions = numbers(r"(\d+) actions?\b", told) | numbers(r"actions left: (\d+)", told)
        assert turns <= {b.max_turns}, told
        assert turns or b.max_turns == 1, told
        assert actions <= {b.max_actions}, told
        assert numbers(r"up to (\d+) a turn", told) <= {b.max_actions_per_turn}, told
        if env.multi_action:
            assert actions and numbers(r"up to (\d+) a turn", told), told

    @pytest.mark.parametrize("budget", BUDGETS, ids=str)
    def test_the_turns_left_are_counted_down_to_the_end(self, env_name, budget):
        told = [numbers(r"turns left: (\d+)", text)
                for text in play(build(env_name, budget=budget), 0, silent).observations]
        assert told == [{left} for left in range(budget.max_turns, 0, -1)] + [set()]

    def test_the_actions_left_are_counted_down_by_the_actions_that_were_executed(self, env_name):
        env = build(env_name, budget=BUDGETS[0])
        env.reset(seed=0)
        if not (env.multi_action and env.actions):
            pytest.skip(f"{env_name} does not take several named actions a turn")
        for seed in range(20):
            env.reset(seed=seed)
            observation, *_, terminated, truncated, _ = env.step(f"{env.actions[0]} {SEPARATOR} ?!")
            if not (terminated or truncated):
                assert numbers(r"actions left: (\d+)", observation) == {BUDGETS[0].max_actions - 1}


if __name__ == "__main__":  # the other process of TestSeeds
    print(digest(sys.argv[1]))
