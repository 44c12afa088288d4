"""Sudoku: fill a grid whose solution is proved to be the only one.

Reading order: the class; then `geometry`, `random_grid` and `solvable`, which only know the rules.

Differences from RAGEN:
  1. There is one solution. In RAGEN 23 to 92 % of the 9x9 puzzles have several.
  2. The budget always covers the blanks. RAGEN has 32 blanks and 10 actions.
  3. A cell pays once, a wrong number nothing. RAGEN pays 0.5 for any that fits, every time.
  4. The whole text must be one of the FORMS. RAGEN takes the first match inside it.
"""

import re
from functools import cache
from itertools import product
from math import isqrt

from minragen.envs import SEPARATOR, Budget, Outcome, TextEnv

# Form of an action, 0 for each number -> what the numbers are: Row, Column, Number.
FORMS = {"(0,0,0)": "RCN", "0,0,0": "RCN", "(0,0) 0": "RCN", "clear(0,0)": "RC",
         "0 at(0,0)": "NRC", "0 at 0,0": "NRC", "place 0 at(0,0)": "NRC", "place 0 at 0,0": "NRC",
         "place 0 at row 0 col 0": "NRC"}


class Sudoku(TextEnv):
    """Fill the empty cells of a grid that has exactly one solution.

    Goal: every row, column and box holds each number once.
    Observation: the grid, with a dot for an empty cell; the last turn's refused actions; what fits
        the ten most constrained cells, tightest last, where a small model looks.
    Actions: `(R, C, N)` puts a number into a cell and may replace the player's own; `clear (R, C)`
        takes it back; up to 2 a turn. FORMS lists the other forms.
    Reward: 1 for the first time that a cell gets its number, 10 more for the last of them, -0.1
        for a clue cell or a broken rule, 0 for a number that fits but is wrong.
    Ends when: the grid is solved.
    Solver: corrects wrong numbers first, then fills the cells in an order of deduction.
    See an episode: python -m minragen.environments sudoku 0

    Options: `size` 4, 9 or 16; `difficulty`: easy (40 % blank: in some order only one number fits
    each cell), medium (50 %: or its number fits nowhere else in a row, column or box), hard (60 %:
    or all other numbers lead to contradictions); `view`, one of compact, simple, detailed,
    with_feedback; `hints`, what fits; `allow_conflicts`: a number against the rules is marked, not
    refused, at the same cost. Larger grids have larger budgets; smaller budgets mean fewer blanks.
    """

    budget = Budget(max_turns=5, max_actions_per_turn=2, max_actions=10)
    multi_action = True
    bundled_data = "generated, one solution each"
    defaults = {"size": 4, "difficulty": "easy", "view": "compact", "hints": True,
                "allow_conflicts": False}
    CHOICES = {"size": (4, 9, 16), "difficulty": ("easy", "medium", "hard"),
               "view": ("compact", "simple", "detailed", "with_feedback")}
    # Share of blank cells, and the hardest `_reason` allowed in each pass.
    DIFFICULTY = {"easy": (0.4, (0,)), "medium": (0.5, (1,)), "hard": (0.6, (1, 2))}
    SHOWN_HINTS = 10  # empty cells whose fitting numbers are shown
    ILLEGAL = -0.1  # reward of an action against the rules

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        for name, choices in self.CHOICES.items():
            if self.options[name] not in choices:
                raise ValueError(f"option {name} of Sudoku: got {self.options[name]!r}, expected "
                                 f"one of {', '.join(map(str, choices))}.")
        self.n, self.view = self.options["size"], self.options["view"]
        self.units, self.peers = geometry(self.n)
        share, self.passes = self.DIFFICULTY[self.options["difficulty"]]
        blanks = int(self.n**2 * share)
        if budget is None:  # a third more actions than blanks, for mistakes
            turns = max(5, 2 * blanks // 3)
            self.budget = Budget(turns, 2, 2 * turns)
        self.blanks = min(blanks, self.budget.max_actions)

    @property
    def instruction(self):
        n, b = self.n, isqrt(self.n)
        hints = "\nFits lists empty cells with the numbers that fit, least choice last."
        return (f"Fill the grid: each row, column and {b}x{b} box holds every number from 1 to "
                f"{n} once. A dot is an empty cell.\n"
                f"Cells are (row, column), from (1, 1) at the top left to ({n}, {n}). "
                f"Write (1, 2, 3) to put a 3 into (1, 2), clear (1, 2) to take back your own."
                f"{hints if self.options['hints'] else ''}")

    def instance(self):
        return " ".join(map(str, self.clues))

    def _reset(self, rng):
        """Blank cells of a random grid in random order, each only if its number still follows from
        the rest, so that the solution stays unique."""
        missing = self.blanks
        while missing:  # seldom more than once: some orders leave too few such cells
            self.solution = random_grid(self.n, rng)
            self.board, missing = list(self.solution), self.blanks
            order = rng.permutation(self.n**2).tolist()
            for hardest, cell in product(self.passes, order):
                if (missing and self.board[cell]
                        and self._reason(self.board, cell, hardest) <= hardest):
                    self.board[cell], missing = 0, missing - 1
        self.clues = tuple(self.board)
        self.paid, self.messages = set(), []  # messages: (turn, line about an action)

    def _reason(self, board, cell, hardest=1):
        """How the number of `cell` follows from the other cells of the board.

        0: no other number fits there   1: it fits nowhere else in a row, column or box
        2: any other number leads to a contradiction   3: not at all, or not found
        """
        number = self.solution[cell]
        others = [value for value in self._fitting(board, cell) if value != number]
        if not others:
            return 0
        board = [*board[:cell], 0, *board[cell + 1:]]
        if any(all(c == cell or board[c] or self._clashes(board, c, number) for c in unit)
               for unit in self.units[cell]):
            return 1
        if hardest < 2 or any(solvable([*board[:cell], value, *board[cell + 1:]], self.n)
                              for value in others):
            return 3
        return 2

    def _clashes(self, board, cell, number):
        """Whether a row, column or box of the cell holds the number elsewhere."""
        return any(board[p] == number for p in self.peers[cell])

    def _fitting(self, board, cell):
        return sorted({*range(1, self.n + 1)} - {board[p] for p in self.peers[cell]})

    def _free(self, board):
        """The empty cells, those with the least choice first."""
        free = [c for c, number in enumerate(board) if not number]
        return sorted(free, key=lambda c: len(self._fitting(board, c)))

    def _act(self, action):
        if (move := self._parse(action)) is None:
            return None
        cell, number = move
        if number == self.board[cell] and not self.clues[cell]:
            return Outcome(0.0, effective=False)
        row, col, b = cell // self.n, cell % self.n, isqrt(self.n)
        names = f"row {row + 1}", f"column {col + 1}", f"box ({row // b + 1}, {col // b + 1})"
        broken = [name for name, unit in zip(names, self.units[cell])
                  if number and any(self.board[c] == number for c in unit)]
        against = f"against {', '.join(broken)}"
        if self.clues[cell] or (broken and not self.options["allow_conflicts"]):
            why = f": {'it is a clue' if self.clues[cell] else against}"
            why = why if self.view == "with_feedback" else ""
            self.messages.append((self._turns, f"Refused {self._spell(*move)}{why}"))
            return Outcome(self.ILLEGAL, effective=False)
        self.board[cell] = number
        first = number == self.solution[cell] and cell not in self.paid
        if first:
            self.paid.add(cell)
        if self.view == "with_feedback":
            how = ("done" if not number else "correct" if number == self.solution[cell] else
                   against if broken else "it fits, but is not the solution")
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
                    if number and self._clashes(self.board, c, number)]
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
        free = self._free(self.board)[:self.SHOWN_HINTS]
        if self.options["hints"] and free:
            lines.append("Fits: " + "; ".join(map(self._hint, free[::-1])))
        return "\n".join(lines)

    def _hint(self, cell):
        """The numbers that fit; a single one as a move."""
        fitting = self._fitting(self.board, cell)
        return (self._spell(cell, *fitting) if len(fitting) == 1 else
                f"{self._name(cell)} {' '.join(map(str, fitting)) or 'none'}")

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
        return ", ".join(self._plan()[:min(self.budget.max_actions_per_turn, self.actions_left)])

    def solve(self):
        return self._in_turns(self._plan()[:max(1, self.actions_left)])

    def _plan(self):
        """The actions that are left, each legal when its turn comes."""
        board, solution, plan = list(self.board), self.solution, []
        rank = {c: i for i, c in enumerate(self._free(board))}  # the order of the hints now shown
        while board != solution:
            wrong = [c for c, number in enumerate(board) if number not in (0, solution[c])]
            legal = [c for c in wrong if self.options["allow_conflicts"]
                     or not self._clashes(board, c, solution[c])]
            if legal:
                cell = legal[0]
            elif wrong:  # they block each other in a circle: clear the one that blocks most
                cell = max(wrong, key=lambda c: sum(p in wrong and solution[p] == board[c]
                                                    for p in self.peers[c]))
            else:
                free = sorted(self._free(board), key=lambda c: rank.get(c, self.n**2))
                cell = min(free, key=lambda c: len(self._fitting(board, c)))
                if len(self._fitting(board, cell)) > 1:
                    cell = min(free, key=lambda c: self._reason(board, c))
            board[cell] = solution[cell] if legal or not wrong else 0
            plan.append(self._spell(cell, board[cell]))
        return plan

    def random_answer(self, rng):
        """Random numbers in random empty cells, or in the player's own where none is empty."""
        cells = self._free(self.board) or [c for c, clue in enumerate(self.clues) if not clue]
        count = min(self.budget.max_actions_per_turn, self.actions_left)
        return f" {SEPARATOR} ".join(f"{self._name(c)} {rng.integers(self.n) + 1}"
                                     for c in rng.permutation(sorted(cells))[:count].tolist())


@cache
def geometry(n):
    """Of every cell of an n x n grid: its (row, column, box) as tuples of cells, and its peers."""
    b, cells = isqrt(n), range(n * n)
    keys = [(c // n, c % n, (c // n // b, c % n // b)) for c in cells]
    units = [tuple(tuple(d for d in cells if keys[d][k] == keys[c][k]) for k in range(3))
             for c in cells]
    return units, [sorted(set().union(*unit) - {c}) for c, unit in enumerate(units)]


def random_grid(n, rng):
    """A random full grid: a regular one with its lines and numbers shuffled, then stirred.

    Regular: numbers form b blocks of b. Line i of box (band, stack) holds block (i + stack) mod b,
    rotated; the shifts differ within a stack. Shuffling alone reaches few grids. A
    stir swaps two numbers along a Kempe chain, a connected set of cells that hold one of the two. n
    stirs reach all 288 grids of 4x4.
    """
    b, (_, peers) = isqrt(n), geometry(n)

    def shuffled(k):
        return rng.permutation(k).tolist()

    rows, cols = ([b * band + line for band in shuffled(b) for line in shuffled(b)]
                  for _ in range(2))
    numbers, shifts = shuffled(n), rng.permuted([range(b)] * n, axis=1).tolist()
    grid = []
    for r, c in product(rows, cols):
        block, stack = (r + c // b) % b, c // b
        grid.append(numbers[b * block + (c + shifts[b * block + stack][r // b]) % b] + 1)
    for cell, number in rng.integers((n * n, n), size=(n, 2)).tolist():
        swap = {grid[cell]: number + 1, number + 1: grid[cell]}
        chain = [cell]
        for c in chain:  # the loop appends to it
            chain += [p for p in peers[c] if grid[p] in swap and p not in chain]
        for c in chain:
            grid[c] = swap[grid[c]]
    return grid


def solvable(board, n, patience=100):
    """Whether the grid can be completed: search from the cell with the least choice, sets as bits.

    After `patience` cells the answer is True, "perhaps": the caller then keeps a clue that it could
    have removed, and a 16x16 grid takes tenths of a second, not hours.
    """
    b, blank, bits = isqrt(n), [], [1 << i for i in range(n)]
    missing = [sum(bits)] * 3 * n  # the numbers that each row, column and box lacks
    for cell, number in enumerate(board):
        r, c = divmod(cell, n)
        place = r, n + c, 2 * n + r // b * b + c // b  # its indices in `missing`
        if number:
            for unit in place:
                missing[unit] &= ~bits[number - 1]
        else:
            blank.append(place)

    def search(blank, missing, place=(), bit=0):  # the last number goes into the last place
        nonlocal patience
        patience -= 1
        if not blank or patience < 0:
            return True
        missing = missing.copy()
        for unit in place:
            missing[unit] ^= bit
        fewest = n + 1
        for i, (r, c, x) in enumerate(blank):
            fits = missing[r] & missing[c] & missing[x]
            if fits.bit_count() < fewest:
                fewest, at, choice = fits.bit_count(), i, fits
                if fewest < 2:
                    break
        rest = blank[:at] + blank[at + 1:]
        return any(search(rest, missing, blank[at], bit) for bit in bits if choice & bit)

    return search(blank, missing)
