"""Boards: worlds on a grid of cells, and the language in which a model describes them.

Reading order: `Board`; `read_tiles`, its images; `moved` to `read_places`, for solvers and
shallow players; `relation` to `relation_f1`, the language and its score; `flood`, a search.
"""

import re
from functools import cache

import numpy as np
import scipy  # NOTE: scipy.optimize is imported when it is first used

from minragen.environments.data import load_table
from minragen.envs import TextEnv, text_space

# What the values of the option `view` show.
VIEWS = {"coord": {"coord"}, "grid": {"grid"}, "grid_coord": {"coord", "grid"},
         "image": {"image"}, "image+text": {"image", "coord", "grid"}}
# Drawings, and for each letter in them its colour in RGB and what is drawn with it.
TILES = load_table("tiles.json")
COLOURS = {letter: rgb for letter, (*rgb, _) in TILES["colours"].items()}
MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
# Indexed by the sign of a thing's row (column) minus the player's: 0, 1, -1.
VERTICAL, HORIZONTAL = ("same row", "below", "above"), ("same column", "right", "left")
CLAIM = re.compile(rf"(\w+) ({'|'.join(VERTICAL)}) ({'|'.join(HORIZONTAL)})")


class Board(TextEnv):
    """The base of FrozenLake and Sokoban: shown as coordinates, a grid of symbols, an image.

    A subclass has the options `view` (of VIEWS), `symbols` (one for each of its `meanings`) and
    `tile` (pixels of a cell's side in the image), sets `rows` and `cols`, and writes

        story, rules       the instruction's first line, and what follows the line on positions
        meanings           what the symbols stand for, in their order
        tiles              a drawing of each, for `read_tiles`
        looks              how they look in the image, told to the model
        relation_weights   kind of thing -> its weight in the F1 of a description
        _coordinates()     name -> cells (row, column), one line each
        _meaning(r, c)     which of `meanings` a cell shows
        _things()          the player's cell, and kind -> cells of everything that can be described
    """

    ranges = {"view": [*VIEWS], "tile": (8, 64)}
    rules = ""
    relation_near = 0.5  # credit for a claim with one of its two relations right

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        symbols = self.options["symbols"]
        if not (len(symbols) == len(set(symbols)) == len(self.meanings) and symbols.isprintable()):
            raise ValueError(f"option symbols of {type(self).__name__}: got {symbols!r}, expected "
                             f"{len(self.meanings)} different symbols.")
        self.observation_space = text_space(symbols)

    @property
    def instruction(self):
        legend = ", ".join(map(" ".join, zip(self.options["symbols"], self.meanings)))
        shown = VIEWS[self.options["view"]]
        return (f"{self.story}\nPositions are (row, column), from (0, 0) at the top left to "
                f"({self.rows - 1}, {self.cols - 1}).{self.rules}"
                + (f"\nSymbols: {legend}." if "grid" in shown else "")
                + (f"\nIn the picture {self.looks}." if "image" in shown else ""))

    def render(self):
        lines, shown = [], VIEWS[self.options["view"]]
        if "coord" in shown:
            lines += [f"{name}: {' '.join(map(str, cells))}"
                      for name, cells in self._coordinates().items() if cells]
        if "grid" in shown:
            lines.append(self.grid())
        return "\n".join(lines)

    def grid(self):
        """The board as rows of symbols."""
        return "\n".join("".join(self.options["symbols"][i] for i in row) for row in self.cells())

    def image(self):
        return self.draw() if "image" in VIEWS[self.options["view"]] else None

    def draw(self):
        """The board from above: RGB, (rows * tile, cols * tile, 3) uint8."""
        size = self.options["tile"]
        cells = read_tiles(self.tiles, size)[np.array(self.cells())]  # (rows, cols, size, size, 3)
        return cells.swapaxes(1, 2).reshape(self.rows * size, self.cols * size, 3)

    def cells(self):
        """For each row of the board, which of `meanings` its cells show, as indices."""
        return [[self.meanings.index(self._meaning(r, c)) for c in range(self.cols)]
                for r in range(self.rows)]

    def relations(self):
        """Where everything is from the player: [(kind, vertical, horizontal), ...]."""
        player, things = self._things()
        return [(kind, *relation(player, cell)) for kind, cells in things.items() for cell in cells]

    def describe(self):
        return "; ".join(map(" ".join, self.relations())) or "none"

    def score_description(self, text):
        return relation_f1(read_relations(text), self.relations(), self.relation_weights,
                           self.relation_near)


@cache
def read_tiles(drawing, size):
    """The tiles of a drawing: (n, size, size, 3) uint8.

    drawing: eight lines of n words; word i of line j: row j of tile i, a letter of COLOURS a pixel
    size: at least 8, so that every letter is visible
    """
    tiles = np.array([[[COLOURS[letter] for letter in word] for word in line.split()]
                      for line in drawing.splitlines()], np.uint8).swapaxes(0, 1)
    nearest = np.arange(size) * 8 // size
    return tiles[:, nearest][:, :, nearest]


def moved(cell, action, steps=1):
    """The (row, column) so many steps from `cell`, whatever is there."""
    return cell[0] + steps * MOVES[action][0], cell[1] + steps * MOVES[action][1]


def straight(start, end):
    """The actions of a shortest way over an empty board, vertical ones first."""
    (r, c), (row, column) = start, end
    return (["Up"] * (r - row) + ["Down"] * (row - r)
            + ["Left"] * (c - column) + ["Right"] * (column - c))


def read_places(observation):
    """The coordinates of an observation: {"Goal": [(0, 1)], "Player on target": [(2, 1)], ...}."""
    return {name: [tuple(map(int, cell)) for cell in re.findall(r"(\d+), (\d+)", cells)]
            for name, cells in re.findall(r"^([\w ]+): (\(.*)$", observation, re.MULTILINE)}


def relation(player, cell):
    """(vertical, horizontal): where `cell` is from `player`, both (row, column)."""
    (r, c), (row, column) = player, cell
    return VERTICAL[(row > r) - (row < r)], HORIZONTAL[(column > c) - (column < c)]


def read_relations(text):
    """The claims of a text, [(kind, vertical, horizontal), ...]: its clauses such as `goal below
    right` and `hole same row left`, in their order.

    Clauses end at ; or . or a line end. Others are ignored: a model may think aloud between them.
    """
    clauses = (" ".join(clause.split()) for clause in re.split(r"[;.\n]", text.lower()))
    return [match.groups() for match in map(CLAIM.fullmatch, clauses) if match]


def relation_f1(claimed, true, weights, near=0.5):
    """Score the claims about a state: VAGEN's F1 over a best matching of claims to true things.
    Claiming everything does not pay: with one true thing, all nine claims have F1 0.2.

        score(kind) = max over one-to-one matchings of the sum of (1 where both relations agree,
                      `near` where one of them does, else 0)
        F1(kind)    = 2 score / (number claimed + number true)
        returns       sum_k weight_k F1_k / sum_k weight_k, over the kinds that either list has;
                      1 if there are none. Kinds without a weight are ignored.

    claimed, true: lists of (kind, vertical, horizontal)      weights: kind -> positive number
    near: VAGEN has 0.5 in FrozenLake and 0 in Sokoban
    """
    weighted = present = 0.0
    for kind, weight in weights.items():
        said, there = (np.array([claim for claim in claims if claim[0] == kind], str).reshape(-1, 3)
                       for claims in (claimed, true))
        if len(said) or len(there):
            agreed = (said[:, None, 1:] == there[None, :, 1:]).sum(axis=2)  # relations of a pair
            worth = np.choose(agreed, (0.0, near, 1.0))
            score = worth[scipy.optimize.linear_sum_assignment(worth, maximize=True)].sum()
            weighted += weight * 2 * score / (len(said) + len(there))
            present += weight
    return weighted / present if present else 1.0


def flood(starts, neighbours, limit=float("inf")):
    """Breadth-first search: cell -> fewest steps to it from `starts`, up to `limit` steps."""
    distance, queue = dict.fromkeys(starts, 0), list(starts)
    for cell in queue:  # the loop appends to it
        for to in neighbours(cell) if distance[cell] < limit else ():
            if to not in distance:
                distance[to] = distance[cell] + 1
                queue.append(to)
    return distance
