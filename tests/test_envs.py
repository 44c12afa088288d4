"""What each environment is about, the registry, and the groups; what all environments share stands
in test_env_contract.py, and `TestContract` below shows that it refuses environments that break it.
"""

import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from functools import cache
from itertools import product

import gymnasium
import numpy as np
import pytest
import test_env_contract as contract
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import envs
from minragen.envs import (
    FORMAT_PENALTY,
    Bandit,
    Budget,
    EnvGroups,
    FrozenLake,
    Outcome,
    TextEnv,
    make,
    parse_mixture,
)

ACTIONS = FrozenLake.actions
STEP = dict(zip(ACTIONS, ((0, -1), (1, 0), (0, 1), (-1, 0))))


def lake(*rows, **options):
    """The lake of a drawing: P player, G goal, O hole, _ ice."""
    env = FrozenLake(size=len(rows), **options)
    env.reset(seed=0)
    cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    env.holes = np.array([[mark == "O" for mark in row] for row in rows])
    env.start = env.player = next(cell for cell, mark in cells.items() if mark == "P")
    env.goal = next(cell for cell, mark in cells.items() if mark == "G")
    return env


def drawing(env):
    """The map as Gymnasium's FrozenLake takes it."""
    n = env.options["size"]
    return ["".join("S" if (r, c) == env.start else "G" if (r, c) == env.goal else
                    "H" if env.holes[r, c] else "F" for c in range(n)) for r in range(n)]


def gymnasium_outcomes(oracle, cell, action):
    """{(next cell, reward, over): probability} from Gymnasium's own transition table."""
    outcomes = {}
    for p, state, reward, over in oracle.P[cell[0] * oracle.ncol + cell[1]][ACTIONS.index(action)]:
        key = (divmod(state, oracle.ncol), float(reward), over)
        outcomes[key] = outcomes.get(key, 0.0) + p
    return {key: p for key, p in outcomes.items() if p > 0}


def our_outcome(env, cell, action):
    env.player = cell
    outcome = env._act(action)
    assert outcome.success == (outcome.reward == 1.0)
    assert outcome.effective == (env.player != cell)
    return env.player, outcome.reward, outcome.terminated


def walkable(env):
    return [cell for cell in product(range(env.options["size"]), repeat=2)
            if not env.holes[cell] and cell != env.goal]


def shortest_path_length(env):
    """Breadth-first search over Gymnasium's drawing; no line shared with the environment."""
    chart, queue = drawing(env), [(env.start, 0)]
    seen = {env.start}
    for cell, steps in queue:
        if cell == env.goal:
            return steps
        for down, right in STEP.values():
            r, c = cell[0] + down, cell[1] + right
            if (0 <= r < len(chart) and 0 <= c < len(chart) and chart[r][c] != "H"
                    and (r, c) not in seen):
                seen.add((r, c))
                queue.append(((r, c), steps + 1))
    return math.inf


def best_values(env, discount):
    """A slow dynamic program over Gymnasium's table: (V, Q), functions of the actions left and a
    cell.

        Q_k(s, a) = sum_s' p(s'|s,a) (r + discount * V_{k-1}(s') [s' is no end])
    """
    oracle = FrozenLakeEnv(desc=drawing(env), is_slippery=True,
                           success_rate=1 - env.options["slip"])

    @cache
    def q(k, cell, action):
        return sum(p * (reward + (0.0 if over else discount * v(k - 1, there)))
                   for (there, reward, over), p in gymnasium_outcomes(oracle, cell, action).items())

    @cache
    def v(k, cell):
        return max(q(k, cell, action) for action in ACTIONS) if k else 0.0

    return v, q


class TestFrozenLakeDynamics:
    @pytest.mark.parametrize("size", [4, 8])
    def test_without_slip_every_cell_and_action_does_what_gymnasiums_does(self, size):
        env = FrozenLake(size=size, frozen=0.7)
        for seed in range(10):
            env.reset(seed=seed)
            oracle = FrozenLakeEnv(desc=drawing(env), is_slippery=False)
            for cell, action in product(walkable(env), ACTIONS):
                assert gymnasium_outcomes(oracle, cell, action) == {
                    our_outcome(env, cell, action): 1.0}

    @pytest.mark.parametrize("slip", [0.2, 2 / 3])
    def test_with_slip_every_cell_and_action_has_gymnasiums_probabilities(self, slip):
        """Pearson's chi-square over all cells and actions, five standard deviations above its mean
        at most."""
        env, draws, chi_square, degrees = FrozenLake(frozen=0.7, slip=slip), 500, 0.0, 0
        env.reset(seed=1)
        oracle = FrozenLakeEnv(desc=drawing(env), is_slippery=True, success_rate=1 - slip)
        for cell, action in product(walkable(env), ACTIONS):
            expected = gymnasium_outcomes(oracle, cell, action)
            counts = dict.fromkeys(expected, 0)
            for _ in range(draws):
                # KeyError: what cannot happen has happened.
                counts[our_outcome(env, cell, action)] += 1
            chi_square += sum((counts[key] - draws * p) ** 2 / (draws * p)
                              for key, p in expected.items())
            degrees += len(expected) - 1
        assert degrees > 50
        assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)

    def test_without_slip_nothing_is_drawn(self):
        env = FrozenLake()
        env.reset(seed=0)
        before = contract.next_draws(env)
        env.step("Left || Up")
        assert contract.next_draws(env) == before

    def test_slips_do_not_depend_on_the_map(self):
        """With one stream for both, a hole in the corner means that the first step of member 0
        never slips."""
        env, slipped = FrozenLake(slip=0.5, frozen=0.6), []
        for seed in range(4000):
            env.reset(seed=seed)
            if env.holes[0, 0]:
                env.player = (2, 2)
                env._act("Right")
                slipped.append(env.player != (2, 3))
        assert len(slipped) > 1000
        assert abs(np.mean(slipped) - 0.5) < 4 * math.sqrt(0.25 / len(slipped))

    def test_walking_into_the_border_stays_and_is_not_effective(self):
        env = lake("P__", "___", "__G")
        _, reward, terminated, truncated, info = env.step("Left || Down")
        assert env.player == (1, 0)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert info == {"success": 0.0, "valid": 1.0, "effective": 0.5}

    def test_the_goal_pays_one_and_ends_the_episode(self):
        env = lake("PG", "__")
        _, reward, terminated, truncated, info = env.step("Right")
        assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, 1.0)

    def test_a_hole_pays_nothing_and_ends_the_episode(self):
        env = lake("PO", "_G")
        _, reward, terminated, truncated, info = env.step("Right")
        assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, 0.0)


class TestFrozenLakeInstances:
    @pytest.mark.parametrize("options", [{}, {"size": 8}, {"frozen": 0.5}, {"slip": 0.2}], ids=str)
    def test_start_and_goal_are_ice_and_joined_within_the_action_budget(self, options):
        env = FrozenLake(**options)
        for seed in range(200):
            env.reset(seed=seed)
            assert env.player == env.start != env.goal
            assert not env.holes[env.start] and not env.holes[env.goal]
            assert shortest_path_length(env) <= env.budget.max_actions

    @pytest.mark.parametrize("budget", [Budget(2, 2, 10), Budget(5, 1, 10), Budget(1, 3, 10)],
                             ids=str)
    def test_every_map_can_be_solved_where_the_turns_and_not_the_actions_are_scarce(self, budget):
        env = FrozenLake(budget=budget)
        unsolved = [seed for seed in range(100)
                    if not contract.play(env, seed, contract.next_step).success]
        assert unsolved == []

    def test_start_goal_and_holes_are_drawn_everywhere(self):
        env, starts, goals, holes = FrozenLake(), set(), set(), np.zeros((4, 4), bool)
        for seed in range(300):
            env.reset(seed=seed)
            starts.add(env.start)
            goals.add(env.goal)
            holes |= env.holes
        assert len(starts) == len(goals) == holes.sum() == 16

    def test_frozen_is_the_share_of_ice(self):
        """Before a start, a goal and a path are asked for, a tile is a hole with probability 1 -
        frozen."""
        env = FrozenLake(size=16, frozen=0.7)
        share = np.mean([env.reset(seed=seed) and env.holes.mean() for seed in range(30)])
        assert share == pytest.approx(0.3, abs=0.03)

    def test_the_same_map_has_the_same_split_in_every_view_and_in_every_symbol_set(self):
        views = [FrozenLake(view="coord"), FrozenLake(view="grid"), FrozenLake(view="grid_coord"),
                 FrozenLake(view="grid", symbols="abcdef"), FrozenLake(slip=0.2)]
        for seed in range(50):
            observations = {env.reset(seed=seed)[0] for env in views}
            assert len({(env.instance(), env.instance_split()) for env in views}) == 1
            assert len(observations) == 4  # slip is told in the instruction

    @pytest.mark.parametrize("options", [{"size": 1}, {"frozen": 0.0}, {"frozen": 1.5},
                                         {"slip": -0.1}, {"slip": 1.1}, {"slip": math.nan},
                                         {"view": "text"}, {"symbols": "P_OGX"},
                                         {"symbols": "PPOGX√"}, {"symbols": "P_OGX√√"}], ids=str)
    def test_an_option_that_makes_no_sense_is_refused_when_the_lake_is_built(self, options):
        with pytest.raises(ValueError, match=f"{next(iter(options))}.*expected"):
            FrozenLake(**options)


class TestFrozenLakeViews:
    ROWS = ("P_O", "___", "OG_")

    def test_coordinates(self):
        assert lake(*self.ROWS).render().splitlines() == [
            "Start: (0, 0)", "Goal: (2, 1)", "Player: (0, 0)", "Holes: (0, 2) (2, 0)"]

    def test_a_lake_without_holes_has_no_line_for_them(self):
        assert lake("P_", "_G").render().splitlines() == [
            "Start: (0, 0)", "Goal: (1, 1)", "Player: (0, 0)"]

    def test_grid(self):
        assert lake(*self.ROWS, view="grid").render() == "\n".join(self.ROWS)

    def test_grid_and_coordinates_say_the_same(self):
        both = lake(*self.ROWS, view="grid_coord").render()
        assert both == f"{lake(*self.ROWS).render()}\n{lake(*self.ROWS, view='grid').render()}"

    def test_the_start_is_ice_once_the_player_has_left_it(self):
        env = lake(*self.ROWS, view="grid_coord")
        env.step("Down")
        assert env.render().splitlines() == ["Start: (0, 0)", "Goal: (2, 1)", "Player: (1, 0)",
                                             "Holes: (0, 2) (2, 0)", "__O", "P__", "OG_"]

    @pytest.mark.parametrize("symbols", ["P_OGX√", "@.#*!+"])
    def test_a_player_in_a_hole_and_one_on_the_goal_have_symbols_of_their_own(self, symbols):
        player, ice, hole, goal, drowned, arrived = symbols
        env = lake("PG", "_O", view="grid_coord", symbols=symbols)
        assert env.render().splitlines()[-2:] == [player + goal, ice + hole]
        observation, *_ = env.step("Down || Right")
        assert observation.splitlines()[-2:] == [ice + goal, ice + drowned]
        assert "Player in a hole: (1, 1)" in observation
        env = lake("PG", "_O", view="grid_coord", symbols=symbols)
        observation, *_ = env.step("Right")
        assert observation.splitlines()[-2:] == [ice + arrived, ice + hole]
        assert "Player on the goal: (0, 1)" in observation

    @pytest.mark.parametrize("view", ["grid", "grid_coord"])
    def test_the_instruction_explains_every_symbol_of_a_grid(self, view):
        told = FrozenLake(view=view, symbols="@.#*!+").instruction
        for meaning in ("@ player", ". ice", "# hole", "* goal", "! player in a hole",
                        "+ player on the goal"):
            assert meaning in told

    def test_the_instruction_of_coordinates_has_no_symbols(self):
        assert "Symbols" not in FrozenLake(view="coord").instruction

    def test_symbols_of_any_alphabet_stay_in_the_observation_space(self):
        env = FrozenLake(view="grid", symbols="☺❄●⚑☠★")
        observation, _ = env.reset(seed=0)
        assert observation in env.observation_space

    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_the_corner_in_the_instruction_is_the_boards_own(self, size):
        """RAGEN says (5, 5) whatever the board; the model then looks for a corner that is not
        there."""
        corners = contract.numbers(r"\((\d+), \d+\)", FrozenLake(size=size).instruction)
        assert corners == {0, size - 1}

    @pytest.mark.parametrize(("slip", "told"), [(0.2, "probability 0.2 "),
                                                (2 / 3, "probability 0.667 ")])
    def test_the_instruction_says_how_slippery_the_ice_is(self, slip, told):
        assert told in FrozenLake(slip=slip).instruction
        assert "slip" not in FrozenLake().instruction


class TestFrozenLakeSolver:
    @pytest.mark.parametrize("size", [4, 8])
    def test_without_slip_its_plan_is_a_shortest_path(self, size):
        env = FrozenLake(size=size, frozen=0.75)
        for seed in range(150):
            env.reset(seed=seed)
            plan = " || ".join(env.solve()).split(" || ")
            assert len(plan) == shortest_path_length(env)

    def test_it_plans_from_where_the_player_is(self):
        env = lake("P___", "_OO_", "_OO_", "___G")
        env.step("Down || Down")
        assert env.solve() == ["Down || Right", "Right || Right"]

    @pytest.mark.parametrize("slip", [0.2, 2 / 3, 0.9])
    def test_with_slip_its_next_action_is_optimal_for_the_actions_left(self, slip):
        """Value iteration against a slow dynamic program over Gymnasium's table, for every cell and
        time."""
        env = FrozenLake(slip=slip, frozen=0.7)
        for seed in range(4):
            env.reset(seed=seed)
            v, q = best_values(env, discount=0.999)
            for k, cell in product(range(1, env.budget.max_actions + 1), walkable(env)):
                env.player, env._actions = cell, env.budget.max_actions - k
                action = env.solve()[0].split(" || ")[0]
                assert q(k, cell, action) == pytest.approx(v(k, cell), abs=1e-12)

    def test_with_slip_and_one_action_a_turn_it_succeeds_as_often_as_is_possible(self):
        """The chance itself, not the plan: wins against the exact value of the starts that were
        played."""
        env, possible, wins = FrozenLake(slip=0.5, frozen=0.7, budget=Budget(10, 1, 10)), [], []
        for seed in range(300):
            env.reset(seed=seed)
            possible.append(best_values(env, discount=1.0)[0](10, env.start))
            wins.append(contract.play(env, seed, contract.next_step).success)
        sigma = math.sqrt(sum(p * (1 - p) for p in possible)) / len(possible)
        assert 0.3 < np.mean(possible) < 0.95  # otherwise nothing would be tested
        assert abs(np.mean(wins) - np.mean(possible)) < 3.5 * sigma


def slow_turn(env, answer):
    """The rules of a turn, spelt out. Returns (player, reward, valid, actions left)."""
    player, left, reward, valid = env.player, env.actions_left, 0.0, True
    room = (env.turns_left - 1) * env.budget.max_actions_per_turn  # what the later turns can hold
    pieces = [piece.strip() for piece in answer.split("||") if piece.strip() != ""]
    if len(pieces) == 0:
        return player, FORMAT_PENALTY, False, min(left, room)
    for number, piece in enumerate(pieces):
        if number in (env.budget.max_actions_per_turn, env.actions_left):
            break
        name = piece.lower().capitalize()
        if name not in STEP:
            valid = False
            continue
        row, column = player[0] + STEP[name][0], player[1] + STEP[name][1]
        if 0 <= row < env.options["size"] and 0 <= column < env.options["size"]:
            player = row, column
        left -= 1
        if player == env.goal:
            reward = 1.0
        if env.holes[player] or reward:
            break
    return player, reward + (0.0 if valid else FORMAT_PENALTY), valid, min(left, room)


class TestMultiActionTurns:
    OPEN = ("P__", "___", "__G")

    def test_actions_are_split_on_two_bars_and_run_in_order(self):
        env = lake("P_O", "__O", "_GO")
        env.step("Down||Right")
        assert env.player == (1, 1)

    @pytest.mark.parametrize("answer", ["down || RIGHT", "  Down  ||\nrIGHT\t",
                                        "|| Down |||| Right ||"])
    def test_case_and_space_and_empty_pieces_do_not_matter(self, answer):
        env = lake(*self.OPEN)
        *_, info = env.step(answer)
        assert env.player == (1, 1)
        assert info["valid"] == 1.0

    @pytest.mark.parametrize("answer", ["Down, Right", "Down | Right", "Down Right", "Go Down",
                                        "Down.", "D"])
    def test_nothing_is_guessed(self, answer):
        env = lake(*self.OPEN)
        _, reward, *_, info = env.step(answer)
        assert (env.player, reward, info["valid"]) == ((0, 0), FORMAT_PENALTY, 0.0)

    @pytest.mark.parametrize("answer", ["jump || Down", "Down || jump", "jump || Down || swim"])
    def test_an_unknown_piece_is_dropped_and_the_rest_is_executed_for_one_penalty(self, answer):
        env = lake(*self.OPEN, budget=Budget(5, 3, 10))
        observation, reward, *_, info = env.step(answer)
        assert (env.player, reward, info["valid"]) == ((1, 0), FORMAT_PENALTY, 0.0)
        assert "No valid action was given, or not all were valid." in observation
        assert env.actions_left == 9

    def test_a_penalty_does_not_hide_the_goal(self):
        env = lake("PG", "__")
        _, reward, terminated, *_, info = env.step("jump || Right")
        assert (reward, terminated, info["success"]) == (1.0 + FORMAT_PENALTY, True, 1.0)

    def test_actions_over_the_cap_of_a_turn_are_ignored_without_a_penalty(self):
        env = lake(*self.OPEN)
        _, reward, *_, info = env.step("Down || Right || Right || Down")
        assert (env.player, reward, info["valid"], env.actions_left) == ((1, 1), 0.0, 1.0, 8)

    def test_actions_over_the_cap_of_the_episode_are_ignored_and_end_it(self):
        env = lake(*self.OPEN, budget=Budget(5, 2, 3))
        env.step("Down || Right")
        _, _, terminated, truncated, info = env.step("Right || Down")
        assert env.player == (1, 2)
        assert (terminated, truncated, info["success"]) == (False, True, 0.0)

    def test_the_last_allowed_action_may_still_win(self):
        env = lake("P__", "___", "_G_", budget=Budget(5, 2, 3))
        env.step("Down || Down")
        _, reward, terminated, truncated, _ = env.step("Right || Left")
        assert (reward, terminated, truncated) == (1.0, True, False)

    @pytest.mark.parametrize(("rows", "reward"), [(("PO", "_G"), 0.0), (("PG", "__"), 1.0)])
    def test_a_turn_stops_at_the_first_action_that_ends_the_episode(self, rows, reward):
        env = lake(*rows)
        _, earned, terminated, _, info = env.step("Right || Left")
        assert (env.player, earned, terminated, env.actions_left) == ((0, 1), reward, True, 8)
        assert info["effective"] == 1.0

    def test_no_more_actions_are_promised_than_the_turns_left_can_hold(self):
        env = lake(*self.OPEN)
        for left in (8, 6, 4, 2):
            assert f"actions left: {left}" in env.step("Left")[0]

    def test_what_follows_the_end_is_not_judged(self):
        _, reward, *_, info = lake("PG", "__").step("Right || jump")
        assert (reward, info["valid"]) == (1.0, 1.0)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(answers=st.lists(st.lists(st.sampled_from([*ACTIONS, "left", "UP", "jump", "", " "]),
                                     max_size=5), min_size=1, max_size=6),
           seed=st.integers(0, 20),
           budget=st.sampled_from([Budget(), Budget(5, 2, 10), Budget(4, 3, 5)]))
    def test_a_turn_is_what_its_rules_say(self, answers, seed, budget):
        """Against `slow_turn`, over random answers of good, bad, empty and surplus pieces."""
        env = FrozenLake(budget=budget, frozen=0.7)
        env.reset(seed=seed)
        for turn, pieces in enumerate(answers, start=1):
            answer = " || ".join(pieces)
            expected = slow_turn(env, answer)
            _, reward, terminated, truncated, info = env.step(answer)
            assert (env.player, reward, bool(info["valid"])) == expected[:3]
            assert env.actions_left == expected[3]
            assert terminated == (env.player == env.goal or bool(env.holes[env.player]))
            assert truncated == (not terminated and (turn == budget.max_turns or expected[3] == 0))
            if terminated or truncated:
                break

    def test_the_example_in_the_prompt_keeps_to_the_cap_beside_it(self):
        """With one action a turn the prompt must not show two."""
        prompt = FrozenLake(budget=Budget(10, 1, 10)).system_prompt
        assert "||" not in prompt

    def test_the_prompt_announces_no_more_actions_than_the_turns_can_hold(self):
        """RAGEN announces budgets that its own caps make unreachable."""
        env = FrozenLake(budget=Budget(2, 2, 10))
        observation, _ = env.reset(seed=0)
        told = f"{env.system_prompt}\n{observation}"
        assert (contract.numbers(r"(\d+) actions\b", told)
                | contract.numbers(r"actions left: (\d+)", told)) == {4}


class TestBanditArms:
    def pairs(self, split, seeds=600):
        env, seen = Bandit(split), set()
        for seed in range(seeds):
            env.reset(seed=seed)
            seen.add(env.actions)
        return seen

    def test_train_has_every_known_pair_in_one_order_and_val_in_the_other(self):
        train, val = self.pairs("train"), self.pairs("val")
        assert {frozenset(pair) for pair in train} == {frozenset(pair) for pair in Bandit.KNOWN}
        assert len(train) == len(Bandit.KNOWN)
        assert val == {pair[::-1] for pair in train}

    def test_test_has_names_that_training_never_shows(self):
        shown = {name for pair in self.pairs("train") | self.pairs("val") for name in pair}
        unseen = self.pairs("test")
        assert {frozenset(pair) for pair in unseen} == {frozenset(pair) for pair in Bandit.UNSEEN}
        assert len(unseen) == 2 * len(Bandit.UNSEEN)  # in both orders
        assert not shown & {name for pair in unseen for name in pair}

    def test_the_position_of_an_arm_says_little_about_it(self):
        safe = {pair[0] for pair in Bandit.KNOWN}
        first = sum(pair[0] in safe for pair in self.pairs("train"))
        assert len(Bandit.KNOWN) / 4 <= first <= 3 * len(Bandit.KNOWN) / 4

    def test_all_names_are_different_ignoring_case(self):
        names = [name.lower() for pair in Bandit.KNOWN + Bandit.UNSEEN for name in pair]
        assert len(set(names)) == len(names)

    def test_the_observation_names_the_arms_in_their_order_and_the_prompt_does_not(self):
        env = Bandit()
        observation, _ = env.reset(seed=0)
        first, second = env.actions
        assert observation == f"Two arms: {first} and {second}. Which pays more on average?"
        assert not any(name in env.system_prompt for name in env.actions)


class TestBanditPayouts:
    def pulls(self, arm, n=4000, **options):
        """Rewards and infos of `n` pulls of the `safe` or `risky` arm, members 0 to 3 in turn."""
        env, rewards, infos = Bandit(**options), [], []
        for i in range(n):
            env.reset(seed=i // 4, options={"member": i % 4})
            _, reward, terminated, truncated, info = env.step(getattr(env, arm).upper())
            assert (terminated, truncated, info["valid"]) == (True, False, 1.0)
            rewards.append(reward)
            infos.append(info["success"])
        return rewards, infos

    def test_the_safe_arm_pays_a_tenth(self):
        assert set(self.pulls("safe", 100)[0]) == {0.1}

    def test_the_risky_arm_pays_one_a_quarter_of_the_time_and_nothing_otherwise(self):
        rewards, _ = self.pulls("risky")
        assert set(rewards) == {0.0, 1.0}
        assert abs(np.mean(rewards) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(rewards))

    def test_every_member_has_that_chance(self):
        rewards, _ = self.pulls("risky")
        for member in range(4):
            mine = rewards[member::4]
            assert abs(np.mean(mine) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(mine))

    def test_success_is_the_better_arm_also_when_it_pays_nothing(self):
        rewards, successes = self.pulls("risky", 200)
        assert 0.0 in rewards
        assert set(successes) == {1.0}
        assert set(self.pulls("safe", 100)[1]) == {0.0}

    def test_reversed_swaps_the_names_against_the_payouts(self):
        rewards, successes = self.pulls("safe", reversed=True)
        assert set(rewards) == {0.0, 1.0}
        assert abs(np.mean(rewards) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(rewards))
        assert set(successes) == {1.0}
        rewards, successes = self.pulls("risky", 100, reversed=True)
        assert set(rewards) == {0.1}
        assert set(successes) == {0.0}

    @pytest.mark.parametrize("reversed_names", [False, True])
    def test_the_better_arm_follows_from_the_payouts(self, reversed_names):
        """0.25 * 1 = 0.25 on average: worse than a sure 0.3, better than a sure 0.2."""
        for low, better in ((0.3, "risky" if reversed_names else "safe"),
                            (0.2, "safe" if reversed_names else "risky")):
            env = Bandit(low_reward=low, reversed=reversed_names)
            env.reset(seed=0)
            assert env.solve() == [getattr(env, better)]
            assert set(self.pulls(better, 20, low_reward=low, reversed=reversed_names)[1]) == {1.0}

    def test_a_miss_pays_what_the_options_say(self):
        rewards, _ = self.pulls("risky", 400, high_reward=2.0, high_miss=-1.0, high_prob=0.5)
        assert set(rewards) == {2.0, -1.0}
        assert abs(np.mean(rewards) - 0.5) < 4 * 1.5 / math.sqrt(len(rewards))

    def test_the_observation_after_the_pull_says_what_was_paid(self):
        env = Bandit()
        env.reset(seed=0)
        observation, *_ = env.step(env.safe)
        assert observation == f"Reward: 0.1\n{env.safe} paid 0.1"


# ==================================================================================================
# Environments a user might write


class Dial(TextEnv):
    """Turn a dial to its mark. A user's environment: nothing but what the docstring of TextEnv asks
    for."""

    instruction = "Turn the dial to its mark."
    budget = Budget(max_turns=6, max_actions_per_turn=1, max_actions=6)
    actions = ("Less", "More")

    def _reset(self, rng):
        self.at = int(rng.integers(1000))
        self.mark = self.at + int(rng.choice([-4, -3, -2, -1, 1, 2, 3, 4]))

    def _act(self, action):
        self.at += 1 if action == "More" else -1
        return Outcome(float(self.at == self.mark), terminated=self.at == self.mark,
                       success=self.at == self.mark)

    def render(self):
        return f"Dial at {self.at}, mark at {self.mark}"

    def solve(self):
        return ["More" if self.mark > self.at else "Less"] * abs(self.mark - self.at)


class Question(TextEnv):
    """Any text is an answer, and there is neither a solver nor a random policy."""

    instruction = "Say the number."
    budget = Budget(max_turns=2, max_actions_per_turn=1, max_actions=2)

    def _reset(self, rng):
        self.number = int(rng.integers(1000))

    def _act(self, action):
        return (Outcome(1.0, True, True) if action == str(self.number) else
                Outcome(0.0, effective=False))

    def render(self):
        return f"The number is {self.number}."


class Flaky(Dial):
    """Less raises."""

    def _act(self, action):
        if action == "Less":
            raise ConnectionError("the dial is out of order")
        return super()._act(action)


class FlakyElsewhere(Flaky):
    parallel = True


class Stuck(Dial):
    """Less waits for `release`, as a server does that never answers (here it does, lest a failure
    hang the tests)."""

    parallel = True
    release = threading.Event()

    def _act(self, action):
        if action == "Less":
            self.release.wait(timeout=5)
        return super()._act(action)


class EchoText(gymnasium.Env):
    """A Gymnasium environment with Text spaces: repeat the word. A fifth of the time it
    mishears."""

    LETTERS = "abcdef"
    observation_space = action_space = spaces.Text(max_length=8, charset=LETTERS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list(self.LETTERS), size=6))
        return self.word, {}

    def step(self, action):
        heard = self.np_random.random() > 0.2
        return (self.word, float(heard and action == self.word), False, True,
                {"success": action == self.word})


def name_of(cls):
    return f"{__name__}:{cls.__name__}"


def run_python(*arguments):
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return subprocess.run([sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path},
                          text=True, capture_output=True, timeout=120, check=False)


# -- and what they might get wrong: the contract's test that must notice --------------------------


class UsesGlobalNoise(Dial):
    caught_by = contract.TestSeeds.test_no_global_random_state_is_touched

    def _reset(self, rng):
        super()._reset(rng)
        np.random.random()


class UsesHash(Dial):
    caught_by = contract.TestSeeds.test_the_same_seed_gives_the_same_episode_in_another_process

    def render(self):
        return f"{super().render()} {hash(str(self.mark)) % 1000}"


class Remembers(Dial):
    caught_by = contract.TestSeeds.test_the_same_seed_gives_the_same_episode
    games = 0

    def _reset(self, rng):
        super()._reset(rng)
        self.games += 1

    def render(self):
        return f"{super().render()}, game {self.games}"


class ChangesWhenLookedAt(Dial):
    caught_by = contract.TestSeeds.test_looking_at_an_environment_does_not_change_it

    def note(self):
        self.mark += 1
        return ""


class DrawsTheInstanceFromTheDynamics(Dial):
    caught_by = (contract.TestGroups
                 .test_all_members_of_a_group_share_the_first_observation_and_the_system_prompt)

    def _reset(self, rng):
        super()._reset(self.dynamics)


class SharesItsDynamics(Dial):
    caught_by = contract.TestGroups.test_members_differ_in_their_dynamics

    def _act(self, action):
        self.dynamics.random()  # drawn, but without consequence
        return super()._act(action)


class IgnoresItsSplit(Dial):
    caught_by = contract.TestSplits.test_splits_are_disjoint_by_instance

    def instance_split(self):
        return self.split


class CannotBeSolved(Dial):
    caught_by = contract.TestSolver.test_the_solver_succeeds_on_every_instance_within_the_budget
    budget = Budget(max_turns=3, max_actions_per_turn=1, max_actions=3)


class SolvesItself(Dial):
    caught_by = contract.TestRandomPolicy.test_the_random_policy_does_not_solve_the_task

    def _act(self, action):
        return Outcome(1.0, True, True)


class PaysForStalling(Dial):
    caught_by = contract.TestRandomPolicy.test_the_random_policy_never_earns_more_than_the_solver

    def _act(self, action):
        outcome = super()._act(action)
        return outcome if outcome.success else outcome._replace(reward=0.5)


class RaisesOnNonsense(Dial):
    caught_by = contract.TestHostileAnswers.test_no_answer_raises_earns_or_breaks_an_observation

    def _match(self, piece):
        return self.actions[["Less", "More"].index(piece)]


class PaysForNonsense(Dial):
    caught_by = contract.TestHostileAnswers.test_no_answer_raises_earns_or_breaks_an_observation

    def step(self, answer):
        observation, reward, *rest = super().step(answer)
        return observation, reward + ("Reward" in answer), *rest


class RepeatsNonsense(Dial):
    caught_by = contract.TestHostileAnswers.test_no_answer_raises_earns_or_breaks_an_observation

    def step(self, answer):
        observation, *rest = super().step(answer)
        return f"{answer[:99]}? {observation}", *rest


class PunishesEveryPiece(Dial):
    caught_by = contract.TestHostileAnswers.test_no_answer_raises_earns_or_breaks_an_observation
    multi_action = True

    def step(self, answer):
        observation, reward, *rest = super().step(answer)
        return observation, reward + FORMAT_PENALTY * answer.count("||"), *rest


class EndsTwice(Dial):
    caught_by = contract.TestLife.test_an_episode_is_never_both_terminated_and_truncated

    def step(self, answer):
        observation, reward, terminated, truncated, info = super().step(answer)
        return observation, reward, terminated or truncated, truncated, info


class NeverEnds(Dial):
    caught_by = contract.TestLife.test_a_player_who_never_acts_has_exactly_max_turns_turns

    def step(self, answer):
        observation, reward, terminated, _, info = super().step(answer)
        self._live = not terminated
        return observation, reward, terminated, False, info


class LivesOn(Dial):
    caught_by = contract.TestLife.test_a_step_after_the_end_tells_to_call_reset

    def step(self, answer):
        result = super().step(answer)
        self._live = True
        return result


class ReportsWords(Dial):
    caught_by = contract.TestInfo.test_info_holds_floats_and_names_success_valid_and_effective

    def step(self, answer):
        *rest, info = super().step(answer)
        return *rest, {**info, "at": str(self.at)}


class AnnouncesItsOwnNumber(Dial):
    caught_by = (contract.TestBudget
                 .test_every_number_of_turns_and_actions_in_the_prompt_is_the_budgets)
    instruction = "Turn the dial to its mark in 6 turns."


BROKEN = [UsesGlobalNoise, UsesHash, Remembers, ChangesWhenLookedAt,
          DrawsTheInstanceFromTheDynamics, SharesItsDynamics, IgnoresItsSplit, CannotBeSolved,
          SolvesItself, PaysForStalling, RaisesOnNonsense, PaysForNonsense, RepeatsNonsense,
          PunishesEveryPiece, EndsTwice, NeverEnds, LivesOn, ReportsWords, AnnouncesItsOwnNumber]
PARAMETERS = {CannotBeSolved: {"split": "train"}, NeverEnds: {"budget": None},
              AnnouncesItsOwnNumber: {"budget": contract.BUDGETS[0]}}


class TestContract:
    """The contract is itself tested: each class above breaks it in one way, and one test has to say
    so."""

    @pytest.mark.parametrize("broken", BROKEN)
    def test_an_environment_that_breaks_it_is_caught(self, broken):
        owner = getattr(contract, broken.caught_by.__qualname__.partition(".")[0])
        # The last: a raises() that did not.
        with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
            broken.caught_by(owner(), name_of(broken), **PARAMETERS.get(broken, {}))

    def test_a_users_environments_pass_from_the_command_line(self):
        """Also `Dial`, which the broken ones are made from: each is caught for its one fault."""
        done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", contract.__file__,
                          "--env", name_of(Dial), "--env", name_of(Question))
        assert done.returncode == 0, done.stdout
        assert " passed" in done.stdout and "skipped" in done.stdout


class TestRegistry:
    @pytest.mark.parametrize(("name", "meant"), [
        ("frozen_lake", "frozenlake"), ("FrozenLake", "frozenlake"), ("bandits", "bandit"),
        ("bandid", "bandit")])
    def test_an_unknown_name_gets_the_nearest_known_one(self, name, meant):
        with pytest.raises(ValueError, match=f"unknown env '{name}': did you mean '{meant}'"):
            make(name)

    def test_a_name_like_no_other_gets_the_whole_list_and_the_other_ways(self):
        with pytest.raises(ValueError, match=r"unknown env 'zzzz'") as refused:
            make("zzzz")
        assert all(name in str(refused.value) for name in (*envs.REGISTRY, "package.module:Class"))
        assert "did you mean" not in str(refused.value)

    def test_an_unknown_option_gets_the_nearest_known_one(self):
        with pytest.raises(ValueError, match=r"unknown option of FrozenLake 'slipp': "
                                             r"did you mean 'slip'\?"):
            make("frozenlake", slipp=0.2)

    @pytest.mark.parametrize(("name", "option"), [
        ("frozenlake", {"size": "8"}), ("frozenlake", {"size": 8.0}),
        ("frozenlake", {"size": True}), ("frozenlake", {"slip": "0.2"}),
        ("frozenlake", {"view": None}), ("bandit", {"reversed": 1}),
        ("bandit", {"low_reward": False})])
    def test_an_option_of_the_wrong_type_is_refused_with_an_example(self, name, option):
        key, = option
        with pytest.raises(ValueError, match=rf"option {key} of \w+: got .*, expected \w+ such as"):
            make(name, **option)

    def test_a_whole_number_is_a_float_where_one_is_expected(self):
        slip = make("frozenlake", slip=1).options["slip"]
        assert (slip, type(slip)) == (1.0, float)

    def test_options_that_are_not_given_keep_their_defaults(self):
        assert make("frozenlake", slip=0.2).options == {**FrozenLake.defaults, "slip": 0.2}
        assert FrozenLake.defaults["slip"] == 0.0

    def test_split_and_budget_are_handed_on(self):
        env = make("frozenlake", "val", Budget(3, 1, 3))
        assert (env.split, env.budget) == ("val", Budget(3, 1, 3))

    @pytest.mark.parametrize("wrong", [{"max_turns": 0}, {"max_actions": -1},
                                       {"max_actions_per_turn": 1.5}, {"max_turns": "5"}])
    def test_a_budget_of_no_use_is_refused(self, wrong):
        field, = wrong
        with pytest.raises(ValueError, match=f"bad budget: {field} is .*, expected an integer "
                                             f"of at least 1"):
            Budget(**wrong)

    def test_a_users_class_is_found_by_module_and_name(self):
        env = make(name_of(Dial), "test", Budget(9, 1, 9))
        assert (type(env), env.split, env.budget.max_turns) == (Dial, "test", 9)

    def test_a_users_module_is_found_in_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "my_dial.py").write_text(
            f"from {__name__} import Dial\nclass MyDial(Dial):\n    pass\n")
        monkeypatch.chdir(tmp_path)
        # As a console entry point begins.
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
        assert type(make("my_dial:MyDial")).__name__ == "MyDial"

    def test_a_missing_module_is_named(self):
        with pytest.raises(ImportError, match="no_such_module"):
            make("no_such_module:Dial")

    @pytest.mark.parametrize("attribute", ["NoSuchClass", "Budget", "EchoText"])
    def test_what_is_no_environment_of_text_is_refused_by_name(self, attribute):
        with pytest.raises(ValueError, match=f"{__name__} has no TextEnv class .*'{attribute}'"):
            make(f"{__name__}:{attribute}")

    def test_a_world_with_too_few_instances_says_so(self, monkeypatch):
        monkeypatch.setattr(envs, "MAX_REDRAWS", 20)
        monkeypatch.setattr(Dial, "instance", lambda self: "the only one")
        splits = []
        for split in envs.SPLITS:
            try:
                make(name_of(Dial), split).reset(seed=0)
                splits.append(split)
            except RuntimeError as problem:
                assert f"no instance of split {split!r} in 20 draws" in str(problem)
                assert "override instance_split()" in str(problem)
        assert len(splits) == 1

    def test_an_environment_without_a_solver_or_a_random_policy_says_so(self):
        env = make(name_of(Question))
        env.reset(seed=0)
        with pytest.raises(NotImplementedError, match="Question has no solver"):
            env.solve()
        with pytest.raises(NotImplementedError, match="Question .*random_answer"):
            env.random_answer(np.random.default_rng(0))

    def test_the_module_run_as_a_command_plays_a_users_class(self):
        done = run_python("-m", "minragen.envs", name_of(Dial))
        assert done.returncode == 0, done.stderr
        assert Dial.instruction in done.stdout and "<answer>" in done.stdout


class TestPrompt:
    def test_a_single_action_environment_names_its_actions_and_turns(self):
        assert make(name_of(Dial)).system_prompt == (
            "Turn the dial to its mark.\n"
            "Actions: Less, More. One action a turn, 6 turns.")

    def test_a_multi_action_environment_shows_both_limits(self):
        assert FrozenLake(budget=Budget(7, 3, 13)).system_prompt.splitlines()[-1] == (
            "Actions: Left, Down, Right, Up. Up to 3 a turn, such as Left || Up . "
            "You have 7 turns and 13 actions.")

    def test_actions_that_run_out_before_the_turns_do_are_announced(self):
        """One action a turn and 9 turns, but the episode ends after 5 actions: then 5 must be
        told."""
        env = make(name_of(Dial), budget=Budget(9, 1, 5))
        observation, _ = env.reset(seed=0)
        assert 5 in contract.numbers(
            r"(\d+)", f"{env.system_prompt}\n{observation}".replace(env.render(), ""))


@pytest.fixture
def echo():
    name = "minragen-test/EchoText-v0"
    gymnasium.register(name, entry_point=EchoText)
    yield name
    del gymnasium.registry[name]


class TestGymnasiumIds:
    def test_an_id_with_text_spaces_is_played_as_it_is(self, echo):
        env = make(echo)
        word = env.reset(seed=0)[0].splitlines()[0]
        assert len(word) == 6 and set(word) <= set("abcdef")
        _, reward, terminated, truncated, info = env.step(word)
        assert reward in (0.0, 1.0)
        assert (terminated, truncated, info["success"], info["valid"]) == (True, False, 1.0, 1.0)

    def test_an_id_may_name_the_module_that_registers_it(self, echo):
        assert make(f"{__name__}:{echo}").reset(seed=0)[0] == make(echo).reset(seed=0)[0]

    def test_an_answer_outside_the_action_space_is_a_bad_turn(self, echo):
        env = make(echo)
        env.reset(seed=0)
        _, reward, *_, info = env.step("not in the alphabet")
        assert (reward, info["valid"]) == (FORMAT_PENALTY, 0.0)

    def test_members_share_the_instance_and_differ_in_the_dynamics(self, echo):
        env, same = make(echo), 0
        for seed in range(20):
            words, rewards = set(), set()
            for member in range(8):
                observation, _ = env.reset(seed=seed, options={"member": member})
                words.add(observation)
                rewards.add(env.step(observation.splitlines()[0])[1])
            assert len(words) == 1
            same += len(rewards) == 1
        assert same < 20  # by chance each group agrees with probability 0.8^8 + 0.2^8 = 0.17

    @pytest.mark.parametrize(("env_id", "space"), [("CartPole-v1", "Box"),
                                                   ("FrozenLake-v1", "Discrete")])
    def test_an_id_with_other_spaces_is_refused_with_a_sentence(self, env_id, space):
        with pytest.raises(ValueError,
                           match=f"env '{env_id}' has a {space} space, expected Text spaces"):
            make(env_id)


class TestMixtures:
    @pytest.mark.parametrize(("spec", "groups", "mixture"), [
        ("bandit", 5, [("bandit", 5)]),
        ("frozenlake,bandit", 8, [("frozenlake", 4), ("bandit", 4)]),
        ("frozenlake,bandit", 7, [("frozenlake", 4), ("bandit", 3)]),
        ("a,b,c", 11, [("a", 4), ("b", 4), ("c", 3)]),
        ("frozenlake=12,bandit=4", 16, [("frozenlake", 12), ("bandit", 4)]),
        (" frozenlake , bandit ,", 2, [("frozenlake", 1), ("bandit", 1)]),
        ("frozenlake = 12, bandit = 4", 16, [("frozenlake", 12), ("bandit", 4)]),
        ("my.module:Env=1,my-space/Env-v0=2", 3, [("my.module:Env", 1), ("my-space/Env-v0", 2)]),
    ])
    def test_a_mixture_is_names_and_numbers_of_groups(self, spec, groups, mixture):
        assert parse_mixture(spec, groups) == mixture

    @settings(deadline=None, derandomize=True)
    @given(st.integers(1, 200), st.integers(1, 12))
    def test_an_even_mixture_adds_up_and_differs_by_one_at_most(self, groups, count):
        if groups < count:
            with pytest.raises(ValueError, match="bad mixture"):
                parse_mixture(",".join("x" * count), groups)
            return
        numbers = [n for _, n in parse_mixture(",".join("x" * count), groups)]
        assert sum(numbers) == groups
        assert max(numbers) - min(numbers) <= 1
        assert numbers == sorted(numbers, reverse=True)

    @pytest.mark.parametrize(("spec", "groups", "complaint"), [
        ("", 4, "empty env"), (" , ", 4, "empty env"),
        ("frozenlake=3,bandit", 4, "to every environment or to none"),
        ("frozenlake=x,bandit=1", 4, "to every environment or to none"),
        ("frozenlake=-1,bandit=5", 4, "bad mixture"),
        ("frozenlake=1.5,bandit=2.5", 4, "bad mixture"),
        ("frozenlake=3,bandit=2", 4, r"\[3, 2\] groups, expected 4"),
        ("frozenlake=4,bandit=0", 4, "at least one each"),
        ("frozenlake,bandit", 1, "at least one each"),
    ])
    def test_a_mixture_that_does_not_add_up_is_refused(self, spec, groups, complaint):
        with pytest.raises(ValueError, match=complaint):
            parse_mixture(spec, groups)


class TestEnvGroups:
    def test_rows_are_group_major_and_groups_are_as_the_mixture_says(self):
        groups = EnvGroups("frozenlake=2,bandit=1", 3, 4)
        assert len(groups) == 12
        assert groups.names == ["frozenlake", "frozenlake", "bandit"]
        assert [type(env) for env in groups.envs] == [FrozenLake] * 8 + [Bandit] * 4

    def test_group_g_plays_the_instance_of_the_first_seed_plus_g(self):
        groups, alone = (EnvGroups("frozenlake,bandit", 4, 3, "val"),
                         [make(n, "val") for n in ("frozenlake", "bandit")])
        observations = groups.reset(100)
        for row, observation in enumerate(observations):
            env = alone[row // 6]
            assert observation == env.reset(seed=100 + row // 3)[0]
            assert groups.envs[row].instance() == env.instance()

    def test_member_m_of_a_group_has_the_dynamics_of_member_m(self):
        groups, alone = EnvGroups("frozenlake", 2, 3, options={"slip": 0.5}), FrozenLake(slip=0.5)
        groups.reset(7)
        for row, env in enumerate(groups.envs):
            alone.reset(seed=7 + row // 3, options={"member": row % 3})
            assert contract.next_draws(env) == contract.next_draws(alone)

    def test_options_reach_every_environment_or_the_one_they_name(self):
        groups = EnvGroups("frozenlake,bandit", 2, 1,
                           options={"frozenlake.slip": 0.2, "bandit.reversed": True})
        assert groups.envs[0].options["slip"] == 0.2
        assert groups.envs[1].options["reversed"] is True
        assert EnvGroups("frozenlake", 1, 1, options={"slip": 0.2}).envs[0].options["slip"] == 0.2

    def test_an_option_of_a_users_class_is_named_by_its_whole_path(self):
        groups = EnvGroups(f"{name_of(FrozenLake)},bandit", 2, 1,
                           options={f"{name_of(FrozenLake)}.size": 5})
        assert groups.envs[0].options["size"] == 5

    @pytest.mark.parametrize("options", [{"frozenlake.slip": 0.5, "slip": 0.1},
                                         {"slip": 0.1, "frozenlake.slip": 0.5}], ids=str)
    def test_an_option_that_names_its_environment_wins_over_one_that_does_not(self, options):
        assert EnvGroups("frozenlake", 1, 1, options=options).envs[0].options["slip"] == 0.5

    @pytest.mark.parametrize(("options", "complaint"), [
        ({"frozenlak.slip": 0.2},
         "unknown env in an option 'frozenlak': did you mean 'frozenlake'"),
        ({"frozenlake.slipp": 0.2}, "unknown option of FrozenLake 'slipp': did you mean 'slip'"),
        ({"slip": 0.2}, "unknown option of Bandit 'slip'"),
    ])
    def test_an_option_of_nobody_is_refused(self, options, complaint):
        with pytest.raises(ValueError, match=complaint):
            EnvGroups("frozenlake,bandit", 2, 1, options=options)

    def test_an_unknown_environment_in_a_mixture_gets_the_nearest_known_one(self):
        with pytest.raises(ValueError, match="unknown env 'bandot': did you mean 'bandit'"):
            EnvGroups("frozenlake,bandot", 2, 1)

    def test_budgets_replace_single_numbers_of_each_environments_own(self):
        groups = EnvGroups("frozenlake,bandit", 2, 1, budgets={"max_turns": 8})
        assert [env.budget for env in groups.envs] == [Budget(8, 2, 10), Budget(8, 1, 1)]

    def test_only_the_given_rows_are_stepped_and_results_come_in_their_order(self):
        groups = EnvGroups(name_of(Dial), 3, 1)
        groups.reset(0)
        before = [env.at for env in groups.envs]
        results = groups.step([2, 0], ["More", "Less"])
        assert [env.at - b for env, b in zip(groups.envs, before)] == [-1, 0, 1]
        assert [f"Dial at {env.at}" in result[0]
                for env, result in zip((groups.envs[2], groups.envs[0]), results)] == [True, True]

    @pytest.mark.parametrize("broken", [Flaky, FlakyElsewhere])
    def test_an_environment_that_raises_yields_its_exception_in_its_own_row(self, broken):
        groups = EnvGroups(f"{name_of(broken)},{name_of(Dial)}", 4, 1)
        groups.reset(0)
        moved = [env.at for env in groups.envs]
        results = groups.step([0, 1, 2, 3], ["Less", "More", "Less", "More"])
        assert isinstance(results[0], ConnectionError)
        assert "out of order" in str(results[0])
        assert [len(r) for r in results[1:]] == [5, 5, 5]
        assert [env.at - m for env, m in zip(groups.envs, moved)] == [0, 1, -1, 1]

    def test_an_environment_that_raised_plays_again_after_a_reset(self):
        groups = EnvGroups(name_of(FlakyElsewhere), 1, 2)
        observations = groups.reset(0)
        groups.step([0, 1], ["Less", "More"])
        assert groups.reset(0) == observations
        assert [len(result) for result in groups.step([0, 1], ["More", "More"])] == [5, 5]

    def test_a_step_after_the_end_is_an_exception_of_its_row_too(self):
        groups = EnvGroups("bandit", 2, 1)
        groups.reset(0)
        groups.step([0], [""])
        results = groups.step([0, 1], ["", ""])
        assert isinstance(results[0], RuntimeError)
        assert results[1][1] == FORMAT_PENALTY


@pytest.fixture
def stuck(monkeypatch):
    """Groups of environments that hang on Less, a short time limit, and a release of every thread
    at the end."""
    monkeypatch.setattr(envs, "STEP_TIME_LIMIT", 0.3)
    monkeypatch.setattr(Stuck, "release", threading.Event())
    groups = EnvGroups(name_of(Stuck), 6, 1)
    groups.reset(0)
    yield groups
    Stuck.release.set()


class TestTimeLimit:
    def test_an_environment_that_hangs_ends_at_the_limit_and_leaves_the_others_intact(self, stuck):
        before, began = [env.at for env in stuck.envs[:3]], time.monotonic()
        results = stuck.step([0, 1, 2], ["More", "Less", "More"])
        assert 0.9 * envs.STEP_TIME_LIMIT < time.monotonic() - began < 3.0
        assert isinstance(results[1], TimeoutError)
        assert [stuck.envs[row].at - before[row] for row in (0, 2)] == [1, 1]
        assert len(results[0]) == len(results[2]) == 5

    def test_many_that_hang_share_one_limit(self, stuck):
        """Waiting for each in turn would take six limits, at sixty seconds each."""
        began = time.monotonic()
        results = stuck.step(range(6), ["Less"] * 6)
        assert [type(result) for result in results] == [TimeoutError] * 6
        assert time.monotonic() - began < 4 * envs.STEP_TIME_LIMIT

    def test_slow_environments_wait_side_by_side(self, stuck):
        threading.Timer(0.05, Stuck.release.set).start()
        results = stuck.step(range(6), ["Less"] * 6)
        assert [len(result) for result in results] == [5] * 6

    def test_what_still_hangs_does_not_keep_python_from_ending(self, stuck):
        """The interpreter joins every thread that is no daemon before it exits."""
        known = set(threading.enumerate())
        stuck.step([0], ["Less"])
        assert [thread.name for thread in set(threading.enumerate()) - known
                if not thread.daemon] == []

    def test_a_step_that_comes_back_late_does_not_reach_into_the_next_episode(self, stuck):
        known = set(threading.enumerate())
        stuck.step([0], ["Less"])
        late = set(threading.enumerate()) - known
        stuck.reset(50)
        Stuck.release.set()
        for thread in late:
            thread.join(timeout=5)
        alone = Dial()
        alone.reset(seed=50)
        assert stuck.step([0], ["More"]) == [alone.step("More")]


class TestDocstrings:
    HEADINGS = ("Goal:", "Observation:", "Actions:", "Reward:", "Ends when:", "Solver:")

    @pytest.mark.parametrize("name", sorted(envs.REGISTRY))
    def test_every_environment_answers_the_same_questions(self, name):
        lines = [line.strip() for line in type(make(name)).__doc__.splitlines()]
        for heading in self.HEADINGS:
            assert any(line.startswith(heading) for line in lines), heading

    @pytest.mark.parametrize("name", sorted(envs.REGISTRY))
    def test_the_transcript_is_what_the_environment_says_today(self, name):
        doc = type(make(name)).__doc__
        seed = int(re.search(rf"python -m minragen\.envs {name} (\d+)", doc)[1])
        shown = textwrap.dedent(doc[doc.index("`):") + 3:]).strip()
        assert envs.transcript(name, seed).endswith(shown) and "<answer>" in shown
