"""Sudoku: fill a grid whose solution is proved to be the only one."""

import re
from functools import cache
from itertools import product
from math import isqrt

import numpy as np

from minragen.environments.board import flood
from minragen.envs import SEPARATOR, Budget, Outcome, TextEnv

# Form of an action, 0 for each number -> what the numbers are: Row, Column, Number.
FORMS = {"(0,0,0)": "RCN", "0,0,0": "RCN", "(0,0) 0": "RCN", "clear(0,0)": "RC",
         "0 at(0,0)": "NRC", "0 at 0,0": "NRC", "place 0 at(0,0)": "NRC", "place 0 at 0,0": "NRC",
         "place 0 at row 0 col 0": "NRC"}


class Sudoku(TextEnv):
    """Fill the empty cells of a grid that has exactly one solution.

    Observation: the grid, with a dot for an empty cell, and the last turn's refused actions.
    Actions: `(R, C, N)` puts a number into a cell, `clear (R, C)` takes the player's own number
        back; up to 2 a turn.
    Reward: 1 for the first time that a cell gets its number, 10 more for solving, -0.1 for a clue
        cell or a broken rule, 0 for a number that fits but is wrong.
    Ends when: the grid is solved.
    Solver: corrects wrong numbers first, then fills the cells in an order of deduction.

    Options: `size` (4, 9 or 16); larger ones raise the budget; `hints` lists the numbers that fit
    each empty cell. Half of the cells are blank, or fewer with a smaller budget; at every stage
    some empty cell admits only one number.
    """

    budget = Budget(max_turns=5, max_actions_per_turn=2, max_actions=10)
    multi_action = True
    bundled_data = "generated, one solution each"
    defaults = {"size": 4, "hints": False}
    ranges = {"size": [4, 9, 16]}
    example = ("Row 7 lacks only a 4, so the 4 belongs into its empty cell (7, 9).", "(7, 9, 4)",
               "The empty cell of row 7 is (7, 9).", "Row 7 is full.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        self.n = self.options["size"]
        self.peers = peers_of(self.n)
        blanks = self.n**2 // 2
        if budget is None:  # a third more actions than blanks, for mistakes
            turns = max(5, 2 * blanks // 3)
            self.budget = Budget(turns, 2, 2 * turns)
        self.blanks = min(blanks, self.budget.max_actions)

    @property
    def instruction(self):
        n, b = self.n, isqrt(self.n)
        hints = ("\nFits lists the empty cells with the numbers that fit, least choice last; where "
                 "only one fits, as an action.") * self.options["hints"]
        return (f"Fill the grid: each row, column and {b}x{b} box holds every number from 1 to "
                f"{n} once. A dot is an empty cell.\n"
                f"Cells are (row, column), from (1, 1) at the top left to ({n}, {n}). "
                "Write (1, 2, 3) to put a 3 into (1, 2), clear (1, 2) to take back your own."
                + hints)

    def instance(self):
        return " ".join(map(str, self.clues))

    def _reset(self, rng):
        """Blank cells of a random grid in random order, each only if the solution stays the only
        one; again until naked singles fill them."""
        missing = True
        while missing or not self._falls_to_singles():
            self.solution = random_grid(self.n, rng)
            self.board, missing = list(self.solution), self.blanks
            for cell in rng.permutation(self.n**2).tolist():
                others = self._fitting(self.board, cell) - {self.solution[cell]}
                before, after = self.board[:cell], self.board[cell + 1:]
                if missing and not any(may_be_solvable([*before, number, *after], self.n)
                                       for number in others):
                    self.board[cell], missing = 0, missing - 1
        self.clues = tuple(self.board)
        self.paid, self.refused = set(), []  # refused: (turn, action)

    def _falls_to_singles(self):
        """Whether the board fills up if each cell in which one number alone fits gets it."""
        board = list(self.board)
        while free := self._free(board):
            singles = [cell for cell in free if len(free[cell]) == 1]
            if not singles:
                return False
            for cell in singles:
                board[cell] = self.solution[cell]
        return True

    def _fitting(self, board, cell):
        """The numbers that no row, column or box of the cell holds elsewhere."""
        return {*range(1, self.n + 1)} - {board[p] for p in self.peers[cell]}

    def _free(self, board):
        """Empty cell -> the numbers that fit (candidates), the fewest first."""
        free = {c: self._fitting(board, c) for c, number in enumerate(board) if not number}
        return dict(sorted(free.items(), key=lambda item: len(item[1])))

    def _act(self, action):
        if (move := self._parse(action)) is None:
            return None
        cell, number = move
        if number == self.board[cell] and not self.clues[cell]:
            return Outcome(0.0, effective=False)
        if self.clues[cell] or (number and number not in self._fitting(self.board, cell)):
            self.refused.append((self._turns, self._spell(*move)))
            return Outcome(-0.1, effective=False)
        self.board[cell] = number
        first = number == self.solution[cell] and cell not in self.paid
        if first:
            self.paid.add(cell)
        solved = self.board == self.solution
        return Outcome(first + 10.0 * solved, solved, solved, metrics={"correct": first})

    def _parse(self, action):
        """(cell, number), number 0 for clear; None unless all of the text is one of FORMS. Blanks
        beside a comma, inside brackets and before an opening one are ignored."""
        if len(action) > 80:
            return None
        text = re.sub(r"\s*([(,])\s*|\s*(\))", r"\1\2", action.lower(), flags=re.ASCII)
        form = re.sub("[0-9]{1,2}", "0", re.sub(r"\s+", " ", text, flags=re.ASCII))
        found = dict(zip(FORMS.get(form, ""), map(int, re.findall("[0-9]+", text))))
        if not found or not all(1 <= value <= self.n for value in found.values()):
            return None
        return (found["R"] - 1) * self.n + found["C"] - 1, found.get("N", 0)

    def _spell(self, cell, number):
        return self._name(cell, number) if number else f"clear {self._name(cell)}"

    def _name(self, cell, *number):
        return str((cell // self.n + 1, cell % self.n + 1, *number))

    def render(self):
        n, cells = self.n, [str(number or ".") for number in self.board]
        lines = [" ".join(cells[k:k + n]) for k in range(0, n * n, n)]
        lines += [f"Refused {said}" for turn, said in self.refused if turn == self._turns - 1]
        if self.options["hints"] and 0 in self.board:
            hints = [self._name(cell, *fitting) if len(fitting) == 1 else
                     f"{self._name(cell)} {' '.join(map(str, sorted(fitting))) or 'none'}"
                     for cell, fitting in self._free(self.board).items()]
            lines.append(f"Fits: {'; '.join(reversed(hints))}")
        return "\n".join(lines)

    def note(self):
        """The next moves."""
        moves = self._plan()[:min(self.budget.max_actions_per_turn, self.actions_left)]
        return ", ".join(self._spell(*move) for move in moves)

    def solve(self):
        moves = self._plan()[:max(1, self.actions_left)]
        return self._in_turns([self._spell(*move) for move in moves])

    def _plan(self):
        """The moves (cell, number or 0) that are left, each legal when its turn comes."""
        board, solution, plan = list(self.board), self.solution, []
        shown = self._free(board)  # the candidates that the hints show
        while board != solution:
            wrong = [c for c, number in enumerate(board) if number not in (0, solution[c])]
            legal = [c for c in wrong if solution[c] in self._fitting(board, c)]
            if legal:
                cell = legal[0]
            elif wrong:  # they block each other in a circle: clear the one that blocks most
                cell = max(wrong, key=lambda c: sum(p in wrong and solution[p] == board[c]
                                                    for p in self.peers[c]))
            else:
                free = self._free(board)
                cell = min((c for c in free if len(free[c]) == 1),
                           key=lambda c: len(shown.get(c, ())))
            board[cell] = solution[cell] if legal or not wrong else 0
            plan.append((cell, board[cell]))
        return plan

    def random_answer(self, rng):
        """Random numbers in random empty cells, or in the player's own where none is empty."""
        cells = [*self._free(self.board)] or [c for c, clue in enumerate(self.clues) if not clue]
        count = min(self.budget.max_actions_per_turn, self.actions_left)
        return f" {SEPARATOR} ".join(f"{self._name(c)} {rng.integers(self.n) + 1}"
                                     for c in rng.permutation(cells)[:count].tolist())

    @staticmethod
    def shallow_answer(texts):
        """Paste the last actions of the hints; else guess: the next empty cells get the number that
        the grid shows least and that was not tried there."""
        rows = [line.split() for line in texts[-1].splitlines() if re.fullmatch("[0-9. ]+", line)]
        numbers = sorted(map(str, range(1, len(rows) + 1)), key=sum(rows, []).count)
        moves = re.findall(r"\(\d+, \d+, \d+\)", texts[-1].partition("Fits:")[2])[::-1]
        for r, c in product(range(len(rows)), repeat=2):
            options = [f"({r + 1}, {c + 1}, {n})" for n in numbers]
            untried = [move for move in options if not any(move in text for text in texts[2::2])]
            if rows[r][c] == ".":
                moves += (untried or options)[:1]
        return f" {SEPARATOR} ".join(moves[:2])


@cache
def peers_of(n):
    """Of every cell of an n x n grid: the other cells of its row, column and box."""
    b, cells = isqrt(n), [*product(range(n), repeat=2)]
    return [{d for d, (i, j) in enumerate(cells) if (i, j) != (r, c) and (
        i == r or j == c or (i // b, j // b) == (r // b, c // b))} for r, c in cells]


def random_grid(n, rng):
    """A random full grid: a regular one with its lines and numbers shuffled, then stirred.

    Regular: numbers form b blocks of b. Line r of box (band, stack) is block (r + stack) mod b,
    rotated by another shift in each band. Shuffling alone reaches few grids. A stir swaps two
    numbers along a Kempe chain, a connected set of cells that hold one of the two. n stirs reach
    all 288 grids of 4x4.
    """
    b, peers = isqrt(n), peers_of(n)
    r, c = np.ix_(*([b * band + line for band in rng.permutation(b) for line in rng.permutation(b)]
                    for _ in range(2)))
    numbers, shifts = rng.permutation(n), rng.permuted([range(b)] * n, axis=1)
    block, stack = (r + c // b) % b, c // b
    shift = shifts[b * block + stack, r // b]
    grid = (numbers[b * block + (c + shift) % b] + 1).ravel().tolist()
    for cell, number in (rng.integers((n * n, n), size=(n, 2)) + (0, 1)).tolist():
        swap = {grid[cell]: number, number: grid[cell]}
        chain = flood([cell], lambda c: [p for p in peers[c] if grid[p] in swap])  # noqa: B023
        for c in chain:
            grid[c] = swap[grid[c]]
    return grid


def may_be_solvable(board, n, node_limit=100):
    """False if the grid provably cannot be completed: search from the cell of fewest candidates.

    After `node_limit` cells the answer is True: the caller then keeps a clue that it could have
    removed, and a 16x16 grid takes tenths of a second, not hours.
    """
    peers = peers_of(n)

    def search(fits):  # empty cell -> the numbers that fit
        nonlocal node_limit
        node_limit -= 1
        if not fits or node_limit < 0:
            return True
        forced = [c for c, numbers in fits.items() if len(numbers) < 2]
        cell = forced[0] if forced else min(fits, key=lambda c: len(fits[c]))
        return any(search({c: numbers - {number} if c in peers[cell] else numbers
                           for c, numbers in fits.items() if c != cell}) for number in fits[cell])

    return search({c: {*range(1, n + 1)} - {board[p] for p in peers[c]}
                   for c, number in enumerate(board) if not number})
