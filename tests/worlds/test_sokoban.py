"""Sokoban: what the contract of all environments does not already say about it."""

import re
import warnings
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen.envs import SPLITS, Budget
from minragen.games import Sokoban

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
LARGE = {"rows": 8, "cols": 8, "boxes": 2}
BUDGETS = (Budget(5, 2, 10), Budget(7, 3, 13), Budget(2, 1, 1), Budget(1, 1, 1), Budget(3, 4, 5))


def room(*rows, budget=None, **options):
    """The room of a drawing in the default symbols; every row has its walls."""
    env = Sokoban(budget=budget, rows=len(rows), cols=len(rows[0]),
                  boxes=sum(row.count("X") + row.count("√") for row in rows), **options)
    env.reset(seed=0)
    marks = dict(enumerate("".join(rows)))
    env.floor = frozenset(cell for cell, mark in marks.items() if mark != "#")
    env.targets = frozenset(cell for cell, mark in marks.items() if mark in "O√S")
    env.boxes = frozenset(cell for cell, mark in marks.items() if mark in "X√")
    env.player = next(cell for cell, mark in marks.items() if mark in "PS")
    env._plans = {}
    return env


CORNER = ("######", "#X_O_#", "#____#", "#_P__#", "#____#", "######")


def drawing(env):
    """The grid as lists of the default symbols, whatever the instance's view and symbols are."""
    options, env.options = env.options, {**env.options, "view": "grid", "symbols": "#_O√XPS"}
    grid = [list(row) for row in env.render().splitlines()]
    env.options = options
    return grid


def slow_step(grid, action):
    """One action on a drawing, symbol by symbol: (drawing, reward, solved). Knows nothing of the
    class."""
    leave, enter = {"P": "_", "S": "O"}, {"_": "P", "O": "S", "X": "P", "√": "S"}
    receive = {"_": "X", "O": "√"}
    grid, (dr, dc) = [list(row) for row in grid], MOVES[action]
    home = sum(row.count("√") for row in grid)
    r, c = next((r, c) for r, row in enumerate(grid) for c, mark in enumerate(row) if mark in "PS")
    ahead = grid[r + dr][c + dc]
    if ahead in "X√":
        beyond = grid[r + 2 * dr][c + 2 * dc]
        if beyond not in receive:
            return grid, -0.1, False
        grid[r + 2 * dr][c + 2 * dc] = receive[beyond]
    if ahead != "#":
        grid[r][c], grid[r + dr][c + dc] = leave[grid[r][c]], enter[ahead]
    now, solved = sum(row.count("√") for row in grid), not any("X" in row for row in grid)
    return grid, -0.1 + (now - home) + 10 * solved, solved


def slow_length(grid):
    """Fewest actions to the solution by breadth-first search over tuples; None if there is none."""
    cells = {(r, c): mark for r, row in enumerate(grid) for c, mark in enumerate(row)}
    floor = {cell for cell, mark in cells.items() if mark != "#"}
    targets = tuple(sorted(cell for cell, mark in cells.items() if mark in "O√S"))
    start = (next(cell for cell, mark in cells.items() if mark in "PS"),
             tuple(sorted(cell for cell, mark in cells.items() if mark in "X√")))
    queue, steps = deque([start]), {start: 0}
    while queue:
        (r, c), boxes = state = queue.popleft()
        if boxes == targets:
            return steps[state]
        for dr, dc in MOVES.values():
            to, beyond, after = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc), boxes
            if to not in floor:
                continue
            if to in boxes:
                if beyond not in floor or beyond in boxes:
                    continue
                after = tuple(sorted(beyond if box == to else box for box in boxes))
            if (to, after) not in steps:
                steps[to, after] = steps[state] + 1
                queue.append((to, after))
    return None


def draw(env, seed):
    """An instance of any split."""
    env.reset(seed=0)
    env._reset(np.random.default_rng([seed, 7]))


def actions_of(plan):
    return [action for answer in plan for action in answer.split(" || ")]


class TestSokobanMoves:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from([{}, LARGE, {"boxes": 3}, {"cols": 9}]),
           st.lists(st.sampled_from(Sokoban.actions), min_size=1, max_size=40))
    def test_every_action_does_and_pays_what_a_symbol_by_symbol_twin_says(self, seed, options,
                                                                          actions):
        env = Sokoban(**options)
        draw(env, seed)
        for action in actions:
            before = drawing(env)
            after, reward, solved = slow_step(before, action)
            outcome = env._act(action)
            assert drawing(env) == after
            assert outcome.reward == pytest.approx(reward, abs=1e-12)
            assert outcome.terminated == outcome.success == solved
            assert outcome.effective == (after != before)
            if solved:
                break

    def test_a_box_at_a_wall_and_two_boxes_in_a_row_do_not_move(self):
        env = room("#######", "#X____#", "#PXX__#", "#__O__#", "#_OO__#", "#######")
        for action in ("Up", "Right", "Left"):
            before = drawing(env)
            assert not env._act(action).effective and drawing(env) == before

    def test_a_box_cannot_be_pulled(self):
        env = room("######", "#____#", "#_X__#", "#_P__#", "#_O__#", "######")
        env._act("Down")
        assert drawing(env)[2][2] == "X"

    def test_a_one_box_solution_of_n_actions_earns_eleven_less_a_tenth_of_n(self):
        env = Sokoban()
        for seed in range(50):
            env.reset(seed=seed)
            plan = env.solve()
            total = sum(env.step(answer)[1] for answer in plan)
            assert total == pytest.approx(11 - 0.1 * len(actions_of(plan)))

    def test_pushing_a_box_on_and_off_its_target_never_pays(self):
        env = room("#######", "#_____#", "#PXO__#", "#X___O#", "#_____#", "#######")
        on, off = env._act("Right"), env._act("Right")
        assert on.reward == pytest.approx(0.9) and off.reward == pytest.approx(-1.1)
        assert not (on.terminated or off.terminated)

    def test_a_box_from_target_to_target_pays_the_step_only(self):
        env = room("#######", "#_____#", "#P√O__#", "#X____#", "#_____#", "#######")
        assert env._act("Right").reward == pytest.approx(-0.1)

    def test_a_lost_box_does_not_end_the_episode(self):
        env = room(*CORNER)
        assert env.step("Up")[2:4] == (False, False)


class TestSokobanInstances:
    @pytest.mark.parametrize("budget", BUDGETS, ids=str)
    @pytest.mark.parametrize("options", [{}, LARGE, {"boxes": 3}, {"rows": 5, "cols": 7}], ids=str)
    def test_they_begin_unsolved_and_can_be_solved_within_the_budget(self, budget, options):
        env = Sokoban(budget=budget, **options)
        for seed in range(8):
            draw(env, seed)
            assert 1 <= slow_length(drawing(env)) <= budget.max_actions

    def test_two_thousand_seeds_of_the_larger_board_draw_without_a_warning(self):
        """In RAGEN a tenth of these fall back on a seed made by hash() of a string, which another
        process salts otherwise."""
        env = Sokoban(**LARGE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(2000):
                env._reset(np.random.default_rng(seed))
                assert len(env.boxes) == 2 and not env.boxes & env.targets

    def test_no_box_begins_on_a_target_nor_the_player_in_a_wall_or_box(self):
        env = Sokoban()
        for seed in range(500):
            draw(env, seed)
            assert not env.boxes & env.targets
            assert env.player in env.floor - env.boxes
            assert env.boxes | env.targets <= env.floor <= set(env.inner)

    def test_nearly_always_all_of_several_boxes_begin_away_from_home(self):
        """Some of these rooms are too narrow for it, or the budget too small."""
        env, away = Sokoban(boxes=3), 0
        for seed in range(300):
            draw(env, seed)
            away += len(env.boxes - env.targets) == 3
        assert away > 0.85 * 300

    def test_every_floor_cell_can_be_reached(self):
        env = Sokoban(walls=0.3, **LARGE)
        for seed in range(100):
            draw(env, seed)
            assert env._flood([env.player], lambda to, step: to in env.floor).keys() == env.floor

    def test_they_are_varied_and_neither_trivial_nor_all_hard(self):
        """RAGEN's generator: nine in ten boards are distinct, a mean of 4.1 actions."""
        env, boards, lengths = Sokoban(), set(), []
        for seed in range(2000):
            draw(env, seed)
            boards.add(str(drawing(env)))
            lengths.append(len(env._plan()))
        assert len(boards) > 0.95 * 2000
        assert 3.7 < np.mean(lengths) < 4.7
        assert set(lengths) == set(range(1, 11))

    def test_more_pulls_are_longer_solutions_where_the_budget_allows(self):
        means = []
        for pulls in (1, 12):
            env = Sokoban(budget=Budget(10, 4, 40), pulls=pulls, rows=8, cols=8)
            lengths = []
            for seed in range(150):
                draw(env, seed)
                lengths.append(len(env._plan()))
            means.append(np.mean(lengths))
        assert means[1] > means[0] + 2

    @pytest.mark.parametrize("options", [
        {"boxes": 4, "walls": 0.3}, {"rows": 5, "cols": 5, "boxes": 2, "walls": 0.3},
        {"rows": 5, "cols": 5, "walls": 0.0}, {"rows": 32, "cols": 32, "boxes": 60}], ids=str)
    def test_the_extreme_options_are_drawn_too(self, options):
        env = Sokoban(budget=Budget(1, 1, 1), **options)
        for seed in range(3):
            draw(env, seed)
            assert len(env.boxes) == len(env.targets) == options.get("boxes", 1)
            assert len(env._plan()) == 1

    def test_a_room_belongs_to_one_split_whoever_stands_where(self):
        """So that no position on the way through a training episode is a validation instance."""
        seen = {}
        for split in SPLITS:
            env, rng = Sokoban(split), np.random.default_rng(0)
            for seed in range(150):
                env.reset(seed=seed)
                for _ in range(6):
                    key = (env.floor, env.targets)
                    assert seen.setdefault(key, split) == split == env.instance_split()
                    env._act(env.actions[rng.integers(4)])

    def test_view_and_symbols_change_neither_instance_nor_split(self):
        views = [Sokoban(view=view) for view in ("coord", "grid", "grid_coord")]
        views.append(Sokoban(view="grid", symbols="W.GCBA@"))
        for seed in range(30):
            for env in views:
                env.reset(seed=seed)
            assert len({(env.instance(), env.boxes, env.player) for env in views}) == 1

    @pytest.mark.parametrize("options", [
        {"view": "image"}, {"symbols": "#_O√XP"}, {"symbols": "#_O√XPP"}, {"symbols": "#_O√XP\n"},
        {"rows": 4}, {"cols": 33}, {"boxes": 0}, {"boxes": 5}, {"walls": -0.1}, {"walls": 0.5},
        {"walls": float("nan")}, {"pulls": 0}, {"pulls": 100}], ids=str)
    def test_impossible_options_are_refused_with_what_is_expected(self, options):
        with pytest.raises(ValueError, match="expected"):
            Sokoban(**options)


class TestSokobanViews:
    ROOM = ("######", "#_#_O#", "#_X__#", "#S_X√#", "#____#", "######")

    def test_coordinates_name_inner_walls_targets_boxes_and_player(self):
        env = room(*self.ROOM)
        assert env.render().splitlines() == [
            "Walls: (1, 2)", "Targets: (1, 4) (3, 1) (3, 4)", "Boxes: (2, 2) (3, 3)",
            "Boxes on target: (3, 4)", "Player on target: (3, 1)"]

    def test_what_is_not_there_is_not_named(self):
        told = room("######", "#____#", "#_XO_#", "#_P__#", "#____#", "######").render()
        assert told.splitlines() == ["Targets: (2, 3)", "Boxes: (2, 2)", "Player: (3, 2)"]

    def test_the_grid_is_drawn_in_the_instances_own_symbols(self):
        env = room(*self.ROOM, view="grid", symbols="W.GCBA@")
        assert env.render().splitlines() == ["WWWWWW", "W.W.GW", "W.B..W", "W@.BCW", "W....W",
                                             "WWWWWW"]

    def test_grid_coord_is_both(self):
        coord, grid, both = (room(*self.ROOM, view=v).render()
                             for v in ("coord", "grid", "grid_coord"))
        assert both == f"{coord}\n{grid}"

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from([{}, LARGE, {"boxes": 4, "cols": 9}]),
           st.lists(st.sampled_from(Sokoban.actions), max_size=10))
    def test_the_coordinates_tell_the_whole_state(self, seed, options, actions):
        env = Sokoban(**options)
        draw(env, seed)
        for action in actions:
            env._act(action)
        named = {name: {int(r) * env.options["cols"] + int(c)
                        for r, c in re.findall(r"\((\d+), (\d+)\)", cells)}
                 for name, cells in (line.split(":") for line in env.render().splitlines())}
        assert set(env.inner) - named.get("Walls", set()) == env.floor
        assert named["Targets"] == env.targets
        assert named.get("Boxes", set()) | named.get("Boxes on target", set()) == env.boxes
        assert (named.get("Player") or named["Player on target"]) == {env.player}
        assert ("Player on target" in named) == (env.player in env.targets)
        assert named.get("Boxes on target", set()) <= named["Targets"]

    @pytest.mark.parametrize("symbols", ["#_O√XPS", "W.GCBA@", "☐·◎★▣☺☻"])
    def test_the_legend_is_the_instances_own(self, symbols):
        """RAGEN looks the symbols up in the defaults, so that its other set is never explained."""
        env = Sokoban(view="grid", symbols=symbols)
        observation, _ = env.reset(seed=0)
        meanings = ("wall", "floor", "target", "box on a target", "box", "player",
                    "player on a target")
        for symbol, meaning in zip(symbols, meanings):
            assert re.search(rf" {re.escape(symbol)} {meaning}[,.]", env.instruction)
        assert env.instruction.count(",") - env.instruction.count(", (") >= 6
        assert set(env.render()) <= set(symbols) | {"\n"}
        assert observation in env.observation_space

    def test_coordinates_need_no_legend(self):
        assert "Symbols" not in Sokoban(view="coord").instruction

    @pytest.mark.parametrize("rows, cols", [(6, 6), (8, 8), (5, 11)])
    def test_the_corner_that_is_told_is_the_boards(self, rows, cols):
        corners = re.findall(r"\((\d+), (\d+)\)", Sokoban(rows=rows, cols=cols).instruction)
        assert corners == [("0", "0"), (str(rows - 1), str(cols - 1))]


class TestSokobanSolver:
    @pytest.mark.parametrize("options, boards", [
        ({}, 150), ({"walls": 0.3, "cols": 8}, 50), (LARGE, 30), ({"boxes": 3}, 20)], ids=str)
    def test_its_plan_is_as_short_as_that_of_plain_breadth_first_search(self, options, boards):
        env = Sokoban(**options)
        for seed in range(boards):
            draw(env, seed)
            assert len(env._plan()) == slow_length(drawing(env)), f"seed {seed}"

    def test_a_shorter_way_to_a_position_that_is_found_later_is_taken(self):
        """Here a search that keeps the first way it sees to each position needs 13."""
        env = room("########", "#______#", "##_#OX_#", "#__PX__#", "#__O___#",
                   "#_____##", "#___#__#", "########",
                   budget=Budget(10, 4, 40))
        assert len(env._plan()) == slow_length(drawing(env)) == 12

    @pytest.mark.parametrize("options, boards", [({}, 120), (LARGE, 15)], ids=str)
    def test_so_it_is_after_any_beginning_and_otherwise_it_idles(self, options, boards):
        env, lost, most = Sokoban(**options), 0, Sokoban.budget.max_actions
        for seed in range(boards):
            env.reset(seed=seed)
            rng = np.random.default_rng(seed)
            over = False
            for _ in range(3):
                over = over or any(env.step(env.random_answer(rng))[2:4])
            if over:
                continue
            length = slow_length(drawing(env))
            if length is None or length > most:
                lost += 1
                assert env._plan() == [] and env.solve() == [env.habit]
            else:
                assert len(env._plan()) == length
                assert len(actions_of(env.solve())) == min(length, env.actions_left)
        assert lost > 0

    def test_its_plan_brings_every_box_home_in_the_twins_world(self):
        env = Sokoban(**LARGE)
        for seed in range(50):
            draw(env, seed)
            grid, solved = drawing(env), False
            for action in env._plan():
                assert not solved
                grid, _, solved = slow_step(grid, action)
            assert solved

    def test_a_box_in_a_corner_gets_a_well_formed_answer_and_an_honest_note(self):
        env = room(*CORNER)
        assert env.solve() == ["Right"]
        assert env.note() == "player (3, 2) box (1, 1) out of reach"

    def test_of_several_boxes_the_note_names_the_lost_one(self):
        env = room("######", "#X_O_#", "#____#", "#_PX_#", "#_O__#", "######")
        assert env.note() == "player (3, 2) box (1, 1) out of reach"

    def test_turns_wasted_after_planning_shorten_the_answer_not_the_thought(self):
        env = room("#######", "#_____#", "#__X_O#", "#P____#", "#_____#", "#######")
        note, whole = env.note(), actions_of(env.solve())
        for _ in range(4):
            env.step("")
        assert actions_of(env.solve()) == whole[:2] and env.note() == note


class TestSokobanNotes:
    NOTE = re.compile(r"player (\(.+?\)) box (\(.+?\)) target (\(.+?\)) "
                      r"push (\w+) from (\(.+?\))(?: via (\(.+?\)))?")

    def test_it_names_the_next_push_and_the_way_to_it(self):
        env = room("######", "#_O__#", "#_XP_#", "#____#", "#____#", "######")
        assert env.note() == ("player (2, 3) box (2, 2) target (1, 2) push Up from (3, 2) "
                              "via (3, 3)")

    def test_of_two_boxes_it_names_the_one_to_push_next_and_its_own_target(self):
        env = room("########", "#O_____#", "#______#", "#X__PXO#", "#______#", "########")
        assert env.note() == "player (3, 4) box (3, 5) target (3, 6) push Right from (3, 4)"

    def test_a_solved_room_needs_no_push(self):
        env = room("######", "#____#", "#P√__#", "#____#", "#____#", "######")
        assert env.note() == "player (2, 1) solved"

    @pytest.mark.parametrize("options", [{}, LARGE], ids=str)
    def test_who_follows_the_notes_alone_solves_it_in_the_fewest_actions(self, options):
        env = Sokoban(**options)
        for seed in range(40):
            draw(env, seed)
            fewest = slow_length(drawing(env))
            for done in range(1, fewest + 1):
                player, box, _, push, start, via = self.NOTE.fullmatch(env.note()).groups()
                cell = {name: tuple(map(int, re.findall(r"\d+", text))) for name, text in
                        (("player", player), ("box", box), ("start", start), ("via", via or start))}
                behind = tuple(a - b for a, b in zip(cell["box"], MOVES[push]))
                assert cell["start"] == behind and via not in (player, start)
                step = tuple(a - b for a, b in zip(cell["via"], cell["player"]))
                action = next((a for a, move in MOVES.items() if move == step), push)
                assert (action == push and step == (0, 0)) or step in MOVES.values()
                assert env._act(action).terminated == (done == fewest)

    def test_the_target_of_the_note_is_where_the_plan_leaves_the_box(self):
        env = Sokoban(**LARGE)
        for seed in range(60):
            draw(env, seed)
            box, target = self.NOTE.fullmatch(env.note()).group(2, 3)
            place = tuple(map(int, re.findall(r"\d+", box)))
            for action in env._plan():
                before = drawing(env)
                env._act(action)
                r, c = place
                if before[r][c] in "X√" and drawing(env)[r][c] not in "X√":
                    place = (r + MOVES[action][0], c + MOVES[action][1])
            assert str(place) == target and drawing(env)[place[0]][place[1]] == "√"

    def test_it_is_short(self):
        env = Sokoban(**LARGE)
        for seed in range(50):
            env.reset(seed=seed)
            assert len(re.findall(r"\(.+?\)|\w+", env.note())) <= 14
