"""Sokoban: its moves, instances, views, solver and notes."""

import re
from collections import deque
from itertools import product

import numpy as np
import pytest
from conftest import begin

from minragen.environments.board import MOVES, moved
from minragen.environments.sokoban import Sokoban
from minragen.envs import Budget

LARGE = {"rows": 8, "cols": 8, "boxes": 2}
KINDS = ({}, LARGE, {"boxes": 3}, {"rows": 5, "cols": 9, "walls": 0.3})
EXTREMES = ({"boxes": 4, "walls": 0.3, "pulls": 99}, {"rows": 5, "cols": 5, "boxes": 2},
            {"walls": 0.0, "pulls": 1}, {"rows": 32, "cols": 32, "boxes": 60})


def room(*rows, **options):
    """The room of a drawing in the default symbols."""
    def cells(marks):
        return frozenset(cell for cell, mark in enumerate("".join(rows)) if mark in marks)

    env = begin("sokoban", rows=len(rows), cols=len(rows[0]), boxes=len(cells("X√")), **options)
    env.floor, env.targets, env.boxes = cells("_OX√PS"), cells("O√S"), cells("X√")
    [env.player] = cells("PS")
    return env


def drawn(seeds, **options):
    """An environment at one instance after the other, of any split."""
    env = begin("sokoban", **options)
    for seed in range(seeds):
        env._reset(np.random.default_rng([seed, 7]))
        yield env


def state(env):
    """(floor, targets, player, boxes) in (row, column) pairs."""
    floor, targets, [player], boxes = (frozenset(divmod(cell, env.cols) for cell in cells) for cells
                                       in (env.floor, env.targets, [env.player], env.boxes))
    return floor, targets, player, boxes


def plan_of(env):
    return env._plan(env.player, env.boxes)


def twin_step(floor, player, boxes, action):
    """The rules once more, in (row, column) pairs: (player, boxes) after an action."""
    to, beyond = moved(player, action), moved(player, action, 2)
    if to not in floor or (to in boxes and (beyond in boxes or beyond not in floor)):
        return player, boxes
    return to, frozenset(beyond if box == to else box for box in boxes)


def shortest(env):
    """Fewest actions to the solution, by breadth-first search; 99 if there is none."""
    floor, targets, *start = state(env)
    queue, steps = deque([tuple(start)]), {tuple(start): 0}
    while queue:
        now = queue.popleft()
        if now[1] == targets:
            return steps[now]
        for after in (twin_step(floor, *now, action) for action in MOVES):
            if after not in steps:
                steps[after] = steps[now] + 1
                queue.append(after)
    return 99


class TestRooms:
    def test_every_action_does_and_pays_what_the_rules_say_and_stays_in_the_instance(self):
        """No position on the way through a training episode is a validation instance."""
        rng = np.random.default_rng(0)
        for env in (env for options in KINDS for env in drawn(20, **options)):
            instance = env.instance()
            for action in [*plan_of(env), *rng.choice(env.actions, size=30)]:
                floor, targets, player, boxes = state(env)
                to, after = twin_step(floor, player, boxes, action)
                reward, terminated, success, effective, _ = env._act(action)
                assert state(env) == (floor, targets, to, after)
                solved, gain = after == targets, len(after & targets) - len(boxes & targets)
                assert reward == pytest.approx(gain + 10 * solved - 0.1, abs=1e-12)
                assert (terminated, success, effective) == (solved, solved, to != player)
                assert env.instance() == instance

    def test_they_are_sound_and_can_be_solved_within_the_budget(self):
        cases = [*product([Budget(7, 3, 13)], KINDS), *product([Budget(2, 1, 1)], KINDS + EXTREMES)]
        for budget, options in cases:
            for env in drawn(8, budget=budget, **options):
                floor, targets, player, boxes = state(env)
                assert len(boxes) == len(targets) == env.options["boxes"]
                assert player in floor - boxes and boxes | targets <= floor
                assert env._walk([env.player], env.floor).keys() == env.floor
                assert 1 <= shortest(env) <= budget.max_actions

    def test_walls_and_pulls_are_those_of_the_options_and_boxes_and_player_are_anywhere(self):
        for options, walls, pulled in (  # a quarter: 0.2 and the cells that these cut off
                ({}, 0.25, {1, 2, 3, 4}), ({"pulls": 1}, 0.25, {1}),
                ({"walls": 0.0}, 0.0, {1, 2, 3, 4})):
            floors, away, rows = [], set(), []
            for env in drawn(200, **options):
                floor, [target], player, [box] = state(env)
                floors.append(len(floor) / 16)
                away.add(abs(box[0] - target[0]) + abs(box[1] - target[1]))
                rows.append(player[0])
            assert 1 - np.mean(floors) == pytest.approx(walls, abs=0.06 * bool(walls))
            assert away == pulled, "none begins on its target"
            assert np.mean(rows) == pytest.approx(2.5, abs=0.3)
        assert not any(env.boxes & env.targets for env in drawn(50, **LARGE))

    def test_a_room_is_told_in_coordinates_as_a_grid_of_its_own_symbols_or_both(self):
        coordinates = ["Walls: (1, 2)", "Targets: (1, 4) (3, 1) (3, 4)", "Boxes: (2, 2) (3, 3)",
                       "Boxes on target: (3, 4)", "Player on target: (3, 1)"]
        grid = ["☐☐☐☐☐☐☐", "☐·☐·◎·☐", "☐·▣···☐", "☐☻·▣★·☐", "☐·····☐", "☐☐☐☐☐☐☐"]
        legend = ("Symbols: ☐ wall, · floor, ◎ target, ★ box on a target, ▣ box, ☺ player, "
                  "☻ player on a target.")
        for view, lines in (("coord", coordinates), ("grid", grid),
                            ("grid_coord", coordinates + grid)):
            env = room("#######", "#_#_O_#", "#_X___#", "#S_X√_#", "#_____#", "#######",
                       view=view, symbols="☐·◎★▣☺☻")
            assert env.render().splitlines() == lines
            assert env.render() in env.observation_space
            assert (legend in env.instruction) == (view != "coord")
            assert "from (0, 0) at the top left to (5, 6)." in env.instruction


class TestPlayers:
    def test_its_plan_is_as_short_as_that_of_breadth_first_search(self):
        for env in (env for options in KINDS for env in drawn(20, **options)):
            assert len(plan_of(env)) == shortest(env)
        # Here a search that keeps the first way it sees to each position needs 13.
        env = room("########", "#______#", "##_#OX_#", "#__PX__#", "#__O___#", "#_____##",
                   "#___#__#", "########", budget=Budget(10, 4, 40))
        assert len(plan_of(env)) == shortest(env) == 12

    def test_after_any_beginning_it_finishes_as_fast_as_possible_or_idles(self):
        rng, lost = np.random.default_rng(0), 0
        for env, seed in product((Sokoban(), Sokoban(**LARGE)), range(40)):
            env.reset(seed=seed)
            if not any(env.step(env.random_answer(rng))[2] for _ in range(3)):
                length, plan = shortest(env), plan_of(env)
                assert len(plan) == (length if length <= 10 else 0)
                assert plan or env.solve() == ["Right"] and "out of reach" in env.note()
                lost += not plan
        assert lost > 0

    def test_who_follows_the_notes_alone_solves_it_in_the_fewest_actions(self):
        for env in (env for options in ({}, LARGE) for env in drawn(25, **options)):
            for left in range(shortest(env), 0, -1):
                player, box, _, start, *via = (tuple(map(int, cell)) for cell in
                                               re.findall(r"\((\d+), (\d+)\)", env.note()))
                push, first = re.search(r"push (\w+)", env.note())[1], (via or [start])[0]
                assert moved(start, push) == box
                action = push if first == player else {moved(player, a): a for a in MOVES}[first]
                assert env._act(action).terminated == (left == 1)
