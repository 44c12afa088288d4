"""Sudoku: its puzzles, spellings, rewards, conflicts, solver and views."""

from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from playing import begun

from minragen.environments.sudoku import Sudoku, random_grid
from minragen.envs import FORMAT_PENALTY, Budget, Outcome

LONG = Budget(40, 2, 80)
fresh = partial(begun, "sudoku")


def puzzle(**options):
    """One puzzle to write literal answers for: 2 3 . 1 | . . 3 2 | 3 2 . . | . 1 2 3."""
    env = fresh(**options)
    env.clues = (2, 3, 0, 1, 0, 0, 3, 2, 3, 2, 0, 0, 0, 1, 2, 3)
    env.solution = [2, 3, 4, 1, 1, 4, 3, 2, 3, 2, 1, 4, 4, 1, 2, 3]
    env.board = list(env.clues)
    return env


@cache
def units(cell, size):
    """The other cells of the row, the column and the box of `cell`, straight from the rules."""
    b, (r, c) = round(size**0.5), divmod(cell, size)
    others = [(i, j) for i in range(size) for j in range(size) if (i, j) != (r, c)]
    return [[i * size + j for i, j in others if same(i, j)] for same in (
        lambda i, j: i == r, lambda i, j: j == c,
        lambda i, j: (i // b, j // b) == (r // b, c // b))]


def fitting(board, cell):
    n = round(len(board)**0.5)
    return sorted({*range(1, n + 1)} - {board[p] for unit in units(cell, n) for p in unit})


def blanks(board):
    return [cell for cell, number in enumerate(board) if not number]


def completions(board):
    """How many full grids extend the board: every number that fits, in the cell with the fewest."""
    if 0 not in board:
        return 1
    cell = min(blanks(board), key=lambda cell: len(fitting(board, cell)))
    return sum(completions([*board[:cell], number, *board[cell + 1:]])
               for number in fitting(board, cell))


def hardest_technique(board):
    """0 if naked singles alone fill the board, 1 if hidden ones are needed, 2 if neither is left.

    Without a look at the solution: every step writes a number that the rules force.
    """
    board, n, hardest = list(board), round(len(board)**0.5), 0
    while 0 in board:
        fits = {cell: fitting(board, cell) for cell in blanks(board)}
        forced = {cell: numbers[0] for cell, numbers in fits.items() if len(numbers) == 1}
        if not forced:
            hardest = 1
            forced = {cell: number for cell in fits for number in fits[cell] if any(
                all(number not in fits.get(d, [board[d]]) for d in unit)
                for unit in units(cell, n))}
        if not forced:
            return 2
        for cell, number in forced.items():
            board[cell] = number
    return hardest


class TestPuzzles:
    def test_puzzles_of_a_difficulty_need_the_technique_it_names(self):
        for size, difficulty, technique, empty, count in (
                (4, "easy", 0, 8, 60), (9, "easy", 0, 40, 60), (9, "medium", 1, 48, 20),
                (9, "hard", 2, 54, 20), (16, "easy", 0, 128, 1)):
            env = Sudoku(size=size, difficulty=difficulty)
            assert empty < env.budget.max_actions <= 2 * empty
            for seed in range(count):
                env.reset(seed=seed)
                assert len(blanks(env.board)) == empty
                assert hardest_technique(env.board) == technique
                assert technique < 2 or seed > 5 or completions(env.board) == 1

    def test_a_size_that_lacks_a_difficulty_and_a_budget_that_lacks_actions_are_refused(self):
        for size, difficulty, budget, expected in (
                (4, "medium", None, "size 4, expected 9"), (16, "hard", None, "size 16, expected"),
                (9, "medium", Budget(7, 2, 14), "48 blanks: got max_actions 14, expected 48"),
                (9, "hard", Budget(5, 2, 10), "54 blanks: got max_actions 10")):
            with pytest.raises(ValueError, match=expected):
                Sudoku(size=size, difficulty=difficulty, budget=budget)

    def test_grids_keep_the_rules_and_all_288_of_4x4_are_drawn(self):
        grids = {tuple(random_grid(4, np.random.default_rng(seed))) for seed in range(3000)}
        assert len(grids) == 288
        for grid in [*grids, *(random_grid(n, np.random.default_rng(n)) for n in (9, 16))]:
            assert all(number in fitting(grid, c) for c, number in enumerate(grid))

    def test_the_view_simple_has_lines_between_the_boxes(self):
        assert puzzle(view="simple").render().splitlines() == [
            "2 3 | . 1", ". . | 3 2", "---------", "3 2 | . .", ". 1 | 2 3"]


class TestActions:
    def test_the_spellings_of_the_reference_are_understood_and_nothing_else(self):
        env = fresh()
        for text in ("(1, 3) 4", "4 at (1, 3)", "4 at (1,3)", "place 4 at (1, 3)", "4 at 1, 3",
                     "place 4 at row 1 col 3", "place 4 at 1,3", "1,3,4", "place  4  AT ( 1 , 3 )"):
            assert env._parse(text) == (2, 4), text
        assert Sudoku(size=16)._parse("(10, 16, 12)") == (9 * 16 + 15, 12)
        for text in ("5 at (1, 3)", "0 at (1, 3)", "4 at (0, 3)", "4 at (1, 5)", "4 at (5, 1)",
                     "4 at (1, 3", "4 at (1, 3, 4)", "I say 4 at 1, 3", "4 at (1, 3).", "1 3 4",
                     "٤ at (١, ٣)", "4 at (001, 3)", "4 at (1," + " " * 80 + "3)", "clear (0, 1)"):
            assert env._parse(text) is None, text
        assert env.step("4 at (1, 5)")[1] == FORMAT_PENALTY

    def test_a_wrong_number_that_fits_pays_nothing_and_a_right_one_pays_once(self):
        env = puzzle(budget=LONG)
        for move, *expected in (("(2, 1, 4)", 0.0, 4), ("(2, 1, 1)", 1.0, 1), ("(2, 1, 4)", 0.0, 4),
                                ("clear (2, 1)", 0.0, 0), ("(2, 1, 1)", 0.0, 1)):
            _, reward, *_, info = env.step(move)
            assert [reward, env.board[4]] == expected and info["effective"] == 1.0, move
            assert info["correct"] == reward
        assert env._act("(2, 1, 1)") == Outcome(0.0, effective=False), "it is there already"

    def test_a_right_number_pays_one_and_ten_more_where_it_ends_the_mistakes(self):
        env = puzzle(budget=LONG, allow_conflicts=True)
        for moves, reward in (("(2, 1, 4)", 0.0), ("(1, 3, 4)", 1.0), ("(2, 2, 4)", 1.0),
                              ("(3, 3, 1) || (3, 4, 4)", 2.0), ("(4, 1, 4)", 1.0)):
            assert env.step(moves)[1:3] == (reward, False), moves
        assert 0 not in env.board and env.random_answer(np.random.default_rng(0))
        assert env.step("(2, 1, 1)")[1:3] == (11.0, True)

    def test_a_clue_or_a_number_against_the_rules_is_refused_with_the_reason(self):
        for move, why in (("(2, 1, 3)", "against row 2, column 1, box (1, 1)"),
                          ("(3, 4, 1)", "against column 4"), ("(1, 1, 2)", "it is a clue"),
                          ("clear (1, 1)", "it is a clue")):
            env = puzzle(view="with_feedback")
            observation, reward, *_, info = env.step(move)
            assert (reward, info["effective"], env.board) == (-0.1, 0.0, list(env.clues))
            assert f"Refused {move}: {why}\n" in observation
        # Other views give no reason, nor do they tell that 4 fits and is wrong.
        env = puzzle()
        for move, row, said in (("(2, 1, 3)", ". .", "Refused (2, 1, 3)\n"),
                                ("(2, 1, 4)", "4 .", "")):
            assert f"\n2 3 . 1\n{row} 3 2\n3 2 . .\n. 1 2 3\n{said}Turns" in env.step(move)[0]

    def test_an_allowed_conflict_costs_the_same_stays_and_is_shown(self):
        env = puzzle(view="detailed", hints=True, allow_conflicts=True)
        assert env.step("(2, 2, 4) || (4, 1, 1)")[1] == 1 - 0.1
        assert env.render().splitlines() == [
            "[2][3]|  . [1]", " .  4 | [3][2]", "--------------", "[3][2]|  .  .",
            "*1*[1]| [2][3]", "[5] clue, 5 placed, *5* conflicting, . empty",
            "Conflicts: (4, 1) (4, 2)",
            "Fits: (3, 3) 1 4; (3, 4, 4); (1, 3, 4); (2, 1) none"]

    def test_after_mistakes_it_wastes_no_action_and_clears_only_what_blocks_in_a_circle(self):
        """Two numbers in each other's cells can only be swapped over an empty one."""
        rng, clears = np.random.default_rng(1), 0
        for seed, allow_conflicts in product(range(120), (False, True)):
            env = fresh(seed, budget=LONG, allow_conflicts=allow_conflicts)
            for cell in rng.choice(blanks(env.board), size=14).tolist():  # any but the right number
                env._act(env._spell(cell, int(env.solution[cell] + rng.integers(3)) % 4 + 1))
            unsolved = sum(a != b for a, b in zip(env.board, env.solution))
            assert env.note() == env.solve()[0].replace(" || ", ", "), "the next turn"
            plan = " || ".join(env.solve()).split(" || ")
            cleared = sum("clear" in action for action in plan)
            assert len(plan) == unsolved + cleared and cleared <= 2 * (not allow_conflicts)
            infos = [env.step(action)[-1] for action in plan]
            assert infos[-1]["success"] and all(info["effective"] for info in infos)
            clears += cleared
        assert clears > 5

    def test_the_shallow_player_writes_the_rarest_number_that_it_has_not_tried(self):
        env = puzzle()
        texts = [env.system_prompt, env.render()]
        for answer in ("(1, 3, 4) || (2, 1, 4)", "(2, 2, 1) || (3, 3, 1)",
                       "(2, 2, 4) || (3, 4, 4)", "(2, 2, 2) || (4, 1, 1)"):
            assert env.shallow_answer(texts) == answer
            texts += [answer, env.step(answer)[0]]
