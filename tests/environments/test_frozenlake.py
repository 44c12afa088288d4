"""FrozenLake: what the contract of all environments does not already say about it."""

from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
from conftest import begin
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from minragen.environments.frozenlake import FrozenLake


def lake(*rows, **options):
    """The lake of a drawing: P player, G goal, O hole, _ ice."""
    env, marks = begin("frozenlake", size=len(rows), **options), np.array([*map(list, rows)])
    env.holes = marks == "O"
    env.goal, = map(tuple, np.argwhere(marks == "G").tolist())
    env.start, = map(tuple, np.argwhere(marks == "P").tolist())
    env.player = env.start
    return env


def gymnasiums_table(env):
    """{(cell, action): {(next cell, reward, over): probability}} of Gymnasium on the same map."""
    n, slip = env.options["size"], env.options["slip"]
    chart, table = np.where(env.holes, "H", "F"), defaultdict(Counter)
    chart[env.start], chart[env.goal] = "S", "G"
    oracle = FrozenLakeEnv(desc=["".join(row) for row in chart], is_slippery=slip > 0,
                           success_rate=1 - slip)
    for cell, (number, action) in product(np.ndindex(n, n), enumerate(env.actions)):
        if chart[cell] in "SF":
            for p, state, reward, over in oracle.P[cell[0] * n + cell[1]][number]:
                if p > 0:
                    table[cell, action][divmod(state, n), float(reward), over] += p
    return table


def best_values(env):
    """V[k, cell] and Q[k, cell, action] of k actions left, where 0.999 prefers short ways."""
    table, q, v = gymnasiums_table(env), {}, Counter()
    for k, (cell, action) in product(range(1, env.budget.max_actions + 1), table):
        q[k, cell, action] = sum(p * (reward + (0.0 if over else 0.999 * v[k - 1, there]))
                                 for (there, reward, over), p in table[cell, action].items())
        v[k, cell] = max(v[k, cell], q[k, cell, action])
    return v, q


class TestLakes:
    @pytest.mark.parametrize("slip", [0.0, 0.4])
    def test_every_cell_and_action_has_gymnasiums_outcomes(self, slip):
        env, draws = FrozenLake(frozen=0.7, slip=slip), 2000
        env.reset(seed=1)
        if not slip:
            env.dynamics, draws = None, 1  # nothing is drawn
        for (cell, action), expected in gymnasiums_table(env).items():
            seen = Counter()
            for _ in range(draws):
                env.player = cell
                reward, over, success, effective, _ = env._act(action)
                assert (success, effective) == (env.player == env.goal, env.player != cell)
                seen[env.player, reward, over] += 1 / draws
            assert seen == pytest.approx(expected, abs=0.055)  # five standard deviations

    def test_start_goal_and_holes_are_drawn_everywhere_and_frozen_is_the_share_of_ice(self):
        env, drawn = FrozenLake(frozen=0.7), []
        for seed in range(400):
            env.reset(seed=seed)
            assert env.player == env.start != env.goal
            drawn.append((env.start, env.goal, env.holes))
        starts, goals, holes = zip(*drawn)
        assert len({*starts}) == len({*goals}) == np.any(holes, axis=0).sum() == 16
        # Start and goal are ice, and where few holes are a path is likelier.
        assert np.mean(holes) == pytest.approx(0.3 * 14 / 16, abs=0.04)

    def test_coordinates_and_symbols_say_where_the_player_is(self):
        player, ice, hole, goal, drowned, arrived = symbols = "☺❄●⚑☠★"
        for answer, line, grid in (
                ("Down", "Player: (1, 0)", [ice + goal, player + hole]),
                ("Down || Right", "Player in a hole: (1, 1)", [ice + goal, ice + drowned]),
                ("Right", "Player on the goal: (0, 1)", [ice + arrived, ice + hole])):
            env = lake("PG", "_O", symbols=symbols)
            coordinates = ["Start: (0, 0)", "Goal: (0, 1)", line, "Holes: (1, 1)"]
            env.step(answer)
            for view, seen in (("coord", coordinates), ("grid", grid),
                               ("grid_coord", coordinates + grid)):
                env.options["view"] = view
                assert env.render().splitlines() == seen
            assert env.render() in env.observation_space

    def test_the_instruction_explains_the_board_its_symbols_and_the_slip(self):
        told = FrozenLake(size=8, view="grid", symbols="@.#*!+", slip=2 / 3).instruction
        assert "from (0, 0) at the top left to (7, 7).\n" in told
        assert "with probability 0.667 a step goes sideways.\nSymbols: @ player, . ice, # h" in told


class TestPlayers:
    @pytest.mark.parametrize("slip", [0.0, 0.3, 0.9])
    def test_each_action_is_optimal_in_every_cell_for_any_number_of_actions_left(self, slip):
        env = FrozenLake(slip=slip, frozen=0.7)
        for seed in range(4):
            env.reset(seed=seed)
            v, q = best_values(env)
            for k, cell in [state for state in v if state[0] > 0]:
                env.player, env._actions = cell, env.budget.max_actions - k
                plan = " || ".join(env.solve()).split(" || ")
                assert len(plan) <= k
                for left, action in zip(range(k, 0, -1), plan):
                    there = env.player
                    if (left, there) in v:  # neither a hole nor the goal
                        assert q[left, there, action] == pytest.approx(v[left, there], abs=1e-12)
                    env.player = env._move(there, action)
