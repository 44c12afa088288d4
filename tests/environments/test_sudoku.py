"""Sudoku: its puzzles, spellings, rewards, solver and shallow player."""

from functools import cache, partial

import numpy as np
from conftest import begin

from minragen.environments.sudoku import Sudoku, may_be_solvable, random_grid
from minragen.envs import FORMAT_PENALTY, Budget, Outcome

LONG = Budget(40, 2, 80)
fresh = partial(begin, "sudoku")


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


def falls_to_naked_singles(board):
    """Without a look at the solution: every step writes the one number that the rules allow."""
    while 0 in board:
        fits = {cell: fitting(board, cell) for cell in blanks(board)}
        cell = min(fits, key=lambda cell: len(fits[cell]))
        if len(fits[cell]) != 1:
            return False
        board = [*board[:cell], *fits[cell], *board[cell + 1:]]
    return True


class TestPuzzles:
    def test_half_of_the_cells_are_blank_and_naked_singles_fill_them(self):
        for size, count in ((4, 60), (9, 20), (16, 1)):
            env, empty = Sudoku(size=size), size**2 // 2
            assert empty < env.budget.max_actions <= 2 * empty
            for seed in range(count):
                env.reset(seed=seed)
                assert len(blanks(env.board)) == empty and falls_to_naked_singles(env.board)

    def test_grids_keep_the_rules_and_all_288_of_4x4_are_drawn(self):
        grids = {tuple(random_grid(4, np.random.default_rng(seed))) for seed in range(3000)}
        assert len(grids) == 288
        for grid in [*grids, *(random_grid(n, np.random.default_rng(n)) for n in (9, 16))]:
            assert all(number in fitting(grid, c) for c, number in enumerate(grid))

    def test_the_search_goes_on_with_a_cell_that_no_number_fits(self):
        assert not may_be_solvable([0] * 9 + [2, 0, 0, 0, 0, 3, 4], 4, node_limit=2)


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

    def test_the_last_number_pays_ten_more(self):
        env = puzzle()
        for moves, reward in (("(1, 3, 4) || (2, 1, 1)", 2.0), ("(2, 2, 4) || (3, 3, 1)", 2.0),
                              ("(3, 4, 4)", 1.0)):
            assert env.step(moves)[1:3] == (reward, False), moves
        assert env.step("(4, 1, 4)")[1:3] == (11.0, True)

    def test_a_clue_or_a_number_against_the_rules_is_refused(self):
        for move in ("(2, 1, 3)", "(3, 4, 1)", "(1, 3, 1)", "(1, 1, 2)", "clear (1, 1)"):
            env = puzzle()
            observation, reward, *_, info = env.step(move)
            assert (reward, info["effective"], env.board) == (-0.1, 0.0, list(env.clues))
            grid = "2 3 . 1\n. . 3 2\n3 2 . .\n. 1 2 3"
            assert f"\n{grid}\nRefused {move}\nTurns" in observation
        # Nothing tells of the refused action of an earlier turn, nor that 4 fits and is wrong.
        assert "\n2 3 . 1\n4 . 3 2\n3 2 . .\n. 1 2 3\nTurns" in env.step("(2, 1, 4)")[0]

    def test_hints_list_the_numbers_that_fit_the_least_choice_last(self):
        fits = "(3, 3) 1 4; (3, 4, 4); (1, 3, 4); (4, 1) none; (2, 2) none"
        assert f"\nFits: {fits}\nTurns" in puzzle(hints=True).step("(2, 1, 4)")[0]

    def test_after_mistakes_it_wastes_no_action_and_clears_only_what_blocks_in_a_circle(self):
        """Two numbers in each other's cells can only be swapped over an empty one."""
        rng, clears = np.random.default_rng(1), 0
        for seed in range(120):
            env = fresh(seed, budget=LONG)
            for cell in rng.choice(blanks(env.board), size=14).tolist():  # any but the right number
                env._act(env._spell(cell, int(env.solution[cell] + rng.integers(3)) % 4 + 1))
            unsolved = sum(a != b for a, b in zip(env.board, env.solution))
            assert env.note() == env.solve()[0].replace(" || ", ", "), "the next turn"
            plan = " || ".join(env.solve()).split(" || ")
            cleared = sum("clear" in action for action in plan)
            assert len(plan) == unsolved + cleared and cleared <= 2
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
