"""Sudoku: fill a grid whose solution is proved to be the only one.

Reading order: the class; then `geometry`, `random_grid` and `may_be_solvable`, which know the
rules alone.

Differences from RAGEN:
  1. There is one solution. In RAGEN 23 to 92 % of the 9x9 puzzles have several.
  2. The budget always covers the blanks. RAGEN has 32 blanks and 10 actions.
  3. A difficulty is the technique that a puzzle needs. RAGEN counts blanks.
  4. A cell pays once, a wrong number nothing. RAGEN pays 0.5 for any that fits, every time.
  5. The whole text must be one of the FORMS. RAGEN takes the first match inside it.
"""

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

    Goal: every row, column and box holds each number once.
    Observation: the grid, with a dot for an empty cell; the last turn's refused actions.
    Actions: `(R, C, N)` puts a number into a cell and may replace the player's own; `clear (R, C)`
        takes it back; up to 2 a turn. FORMS lists the other forms.
    Reward: 1 for the first time that a cell gets its number, 10 more for the last of them, -0.1
        for a clue cell or a broken rule, 0 for a number that fits but is wrong.
    Ends when: the grid is solved.
    Solver: corrects wrong numbers first, then fills the cells in an order of deduction.
    See an episode: python -m minragen environments sudoku 0

    Options: `size` 4, 9 or 16; `difficulty`: easy (half of the cells blank; naked singles solve it:
    some empty cell always has only one number that fits), medium (60 %; also takes hidden singles:
    a number that fits nowhere else in a row, column or box), hard (67 %; takes more than both).
    Only 9x9 has the latter two: naked singles solve the 4x4 puzzles drawn here, and 16x16 ones take
    long to make. `view`, one of compact, simple, detailed, with_feedback; `hints` lists the empty
    cells with the numbers that fit, a single one as an action; `allow_conflicts`: a number against
    the rules is marked, not refused, at the same cost. Larger grids have larger budgets. A smaller
    budget means fewer blanks, and is refused unless the puzzle is easy.
    """

    budget = Budget(max_turns=5, max_actions_per_turn=2, max_actions=10)
    multi_action = True
    bundled_data = "generated, one solution each"
    defaults = {"size": 4, "difficulty": "easy", "view": "compact", "hints": False,
                "allow_conflicts": False}
    # The share of blank cells, and the hardest `_reason` that a puzzle needs.
    DIFFICULTY = {"easy": (0.5, 0), "medium": (0.6, 1), "hard": (0.67, 2)}
    ranges = {"size": [4, 9, 16], "difficulty": [*DIFFICULTY],
              "view": ["compact", "simple", "detailed", "with_feedback"]}
    example = ("Row 7 lacks only a 4, so the 4 belongs into its empty cell (7, 9).", "(7, 9, 4)",
               "The empty cell of row 7 is (7, 9).", "Row 7 is full.")
    ILLEGAL = -0.1  # reward of an action against the rules

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        self.n, self.view = self.options["size"], self.options["view"]
        self.units, self.peers = geometry(self.n)
        difficulty = self.options["difficulty"]
        share, self.hardest = self.DIFFICULTY[difficulty]
        if self.hardest and self.n != 9:
            raise ValueError(f"difficulty {difficulty} of Sudoku: got size {self.n}, expected 9.")
        blanks = int(self.n**2 * share)
        if budget is None:  # a third more actions than blanks, for mistakes
            turns = max(5, 2 * blanks // 3)
            self.budget = Budget(turns, 2, 2 * turns)
        self.blanks = min(blanks, self.budget.max_actions)
        if self.hardest and self.blanks < blanks:
            raise ValueError(f"difficulty {difficulty} of Sudoku has {blanks} blanks: got "
                             f"max_actions {self.blanks}, expected {blanks} or more.")

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
        one; again until the puzzle is as hard as asked for."""
        missing = True
        while missing or self._needed() != self.hardest:
            self.solution = random_grid(self.n, rng)
            self.board, missing = list(self.solution), self.blanks
            for cell in rng.permutation(self.n**2).tolist():
                others = self._fitting(self.board, cell) - {self.solution[cell]}
                before, after = self.board[:cell], self.board[cell + 1:]
                if missing and not any(may_be_solvable([*before, number, *after], self.n)
                                       for number in others):
                    self.board[cell], missing = 0, missing - 1
        self.clues = tuple(self.board)
        self.paid, self.messages = set(), []  # messages: (turn, line about an action)

    def _needed(self):
        """The hardest `_reason` that filling the board, the easiest cells first, takes."""
        board, hardest = list(self.board), 0
        while free := self._free(board):
            reasons = {cell: self._reason(free, cell) for cell in free}
            hardest = max(hardest, min(reasons.values()))
            for cell in free:
                if reasons[cell] <= hardest:
                    board[cell] = self.solution[cell]
        return hardest

    def _reason(self, free, cell):
        """How the number of an empty cell follows: 0: no other number fits there (naked single)
        1: it fits nowhere else in a row, column or box (hidden single)   2: by search only"""
        number = self.solution[cell]
        if free[cell] == {number}:
            return 0
        alone = (all(c == cell or number not in free.get(c, ()) for c in unit)
                 for unit in self.units[cell].values())
        return 1 if any(alone) else 2

    def _fitting(self, board, cell):
        """The numbers that no row, column or box of the cell holds elsewhere."""
        return {*range(1, self.n + 1)} - {board[p] for p in self.peers[cell]}

    def _free(self, board):
        """Empty cell -> the numbers that fit, those with the least choice first."""
        free = {c: self._fitting(board, c) for c, number in enumerate(board) if not number}
        return dict(sorted(free.items(), key=lambda item: len(item[1])))

    def _act(self, action):
        if (move := self._parse(action)) is None:
            return None
        cell, number = move
        if number == self.board[cell] and not self.clues[cell]:
            return Outcome(0.0, effective=False)
        broken = [name for name, unit in self.units[cell].items()
                  if number and number in [self.board[c] for c in unit]]
        against, feedback = f"against {', '.join(broken)}", self.view == "with_feedback"
        if self.clues[cell] or (broken and not self.options["allow_conflicts"]):
            why = f": {'it is a clue' if self.clues[cell] else against}" * feedback
            self.messages.append((self._turns, f"Refused {self._spell(*move)}{why}"))
            return Outcome(self.ILLEGAL, effective=False)
        self.board[cell], right = number, number == self.solution[cell]
        first = right and cell not in self.paid
        if first:
            self.paid.add(cell)
        if feedback:
            how = ("done" if not number else "correct" if right else against if broken else
                   "it fits, but is not the solution")
            self.messages.append((self._turns, f"{self._spell(*move)}: {how}"))
        solved = self.board == self.solution
        reward = 1.0 if first else self.ILLEGAL if broken else 0.0
        return Outcome(reward + 10.0 * solved, solved, solved, metrics={"correct": first})

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
        clashing = [c for c, number in enumerate(self.board)
                    if number and number not in self._fitting(self.board, c)]
        lines = self._grid(clashing)
        if self.view in ("detailed", "with_feedback"):
            lines.append("[5] clue, 5 placed, *5* conflicting, . empty")
        if self.view == "with_feedback":
            clues, filled = (sum(map(bool, cells)) for cells in (self.clues, self.board))
            lines = ["=" * 50, "Sudoku", "=" * 50, *lines,
                     f"Filled: {filled}/{self.n**2} ({clues} clues, {filled - clues} placed)"]
        lines += [line for turn, line in self.messages if turn == self._turns - 1]
        if clashing:
            lines.append(f"Conflicts: {' '.join(map(self._name, clashing))}")
        if self.options["hints"] and 0 in self.board:
            hints = [self._name(cell, *fitting) if len(fitting) == 1 else
                     f"{self._name(cell)} {' '.join(map(str, sorted(fitting))) or 'none'}"
                     for cell, fitting in self._free(self.board).items()]
            lines.append(f"Fits: {'; '.join(reversed(hints))}")
        return "\n".join(lines)

    def _grid(self, clashing):
        """The rows, with lines between the boxes except in the compact view."""
        n, b, cells = self.n, isqrt(self.n), [str(number or ".") for number in self.board]
        if self.view == "compact":
            return [" ".join(cells[k:k + n]) for k in range(0, n * n, n)]
        gap, cells = " ", [cell.rjust(len(str(n))) for cell in cells]
        if self.view != "simple":
            gap, cells = "", [f"[{cell}]" if clue else f"*{cell}*" if c in clashing else f" {cell} "
                              for c, (clue, cell) in enumerate(zip(self.clues, cells))]
        boxes = [gap.join(cells[k:k + b]) for k in range(0, n * n, b)]
        lines = [f"{gap}| ".join(boxes[k:k + b]) for k in range(0, n * b, b)]
        for k in range(n - b, 0, -b):
            lines.insert(k, "-" * len(lines[0]))
        return [line.rstrip() for line in lines]

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
        shown = self._free(board)  # the choice that the hints show
        while board != solution:
            wrong = [c for c, number in enumerate(board) if number not in (0, solution[c])]
            legal = [c for c in wrong if self.options["allow_conflicts"]
                     or solution[c] in self._fitting(board, c)]
            if legal:
                cell = legal[0]
            elif wrong:  # they block each other in a circle: clear the one that blocks most
                cell = max(wrong, key=lambda c: sum(p in wrong and solution[p] == board[c]
                                                    for p in self.peers[c]))
            else:
                free = self._free(board)
                cell = min(free, key=lambda c: (self._reason(free, c), len(shown.get(c, ()))))
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
        rows = [re.findall(r"[0-9]+|\.", line) for line in texts[-1].splitlines()
                if re.fullmatch(r"[0-9.|*\[\] ]+", line)]
        numbers = sorted(map(str, range(1, len(rows) + 1)), key=sum(rows, []).count)
        moves = re.findall(r"\(\d+, \d+, \d+\)", texts[-1].partition("Fits:")[2])[::-1]
        for r, c in product(range(len(rows)), repeat=2):
            options = [f"({r + 1}, {c + 1}, {n})" for n in numbers]
            untried = [move for move in options if not any(move in text for text in texts[2::2])]
            if rows[r][c] == ".":
                moves += (untried or options)[:1]
        return f" {SEPARATOR} ".join(moves[:2])


@cache
def geometry(n):
    """Of every cell of an n x n grid: its {name: cells} of row, column and box, and its peers."""
    b, cells = isqrt(n), range(n * n)
    names = [(f"row {r + 1}", f"column {c + 1}", f"box ({r // b + 1}, {c // b + 1})")
             for r, c in product(range(n), repeat=2)]
    units = [{name: [d for d in cells if name in names[d]] for name in names[c]} for c in cells]
    return units, [set().union(*units[c].values()) - {c} for c in cells]


def random_grid(n, rng):
    """A random full grid: a regular one with its lines and numbers shuffled, then stirred.

    Regular: numbers form b blocks of b. Line r of box (band, stack) holds block (r + stack) mod b,
    rotated; the shifts differ within a stack. Shuffling alone reaches few grids. A stir swaps two
    numbers along a Kempe chain, a connected set of cells that hold one of the two. n stirs reach
    all 288 grids of 4x4.
    """
    b, (_, peers) = isqrt(n), geometry(n)
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
    """False if the grid provably cannot be completed: search from the cell with the least choice.

    After `node_limit` cells the answer is True: the caller then keeps a clue that it could have
    removed, and a 16x16 grid takes tenths of a second, not hours.
    """
    _, peers = geometry(n)

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
