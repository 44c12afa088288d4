"""FrozenLake: walk over ice to a goal, around the holes."""

import numpy as np

from minragen.environments.board import MOVES, TILES, Board, flood, moved, read_places, straight
from minragen.envs import Budget, Outcome


class FrozenLake(Board):
    """Walk over ice from a start to a goal without entering a hole.

    Observation: the cells (row, column) of start, goal, player and holes, and a grid; or an image.
    Actions: Left, Down, Right, Up; up to 2 a turn. At the border the player stays in place.
    Reward: 1 on entering the goal, otherwise 0. A hole ends the episode.
    Ends when: the player enters the goal or a hole.
    Solver: value iteration over the actions left; without slip, a shortest path.

    Options: `size`; `frozen`, the probability that a tile is ice; `slip`, the probability
    that a step goes sideways; `view` (coord, grid, grid_coord, image, image+text); `symbols` of the
    grid; `tile`, the pixels of a cell's side. A path within the action budget joins start and goal.
    An image does not show the start.
    """

    budget = Budget(max_turns=5, max_actions_per_turn=2, max_actions=10)
    actions = ("Left", "Down", "Right", "Up")
    multi_action = True
    bundled_data = "generated maps"
    defaults = {"size": 4, "frozen": 0.9, "slip": 0.0, "view": "grid_coord", "symbols": "P_OGX√",
                "tile": 8}
    ranges = Board.ranges | {"size": (2, 64), "frozen": (0.01, 1), "slip": (0, 1)}
    story = "You walk on a frozen lake. Reach the goal and stay out of the holes."
    meanings = ("player", "ice", "hole", "goal", "player in a hole", "player on the goal")
    looks = "the player is a person, holes are dark water, and the goal is a green flag"
    example = ("Row 7 to 8: 1 down. Column 2 to 3: 1 right.", "Down || Right", "goal below right",
               "goal same row same column")
    tiles = "\n".join(TILES["FrozenLake"])
    relation_weights = {"goal": 0.7, "hole": 0.3}

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        self.rows = self.cols = self.options["size"]
        if slip := self.options["slip"]:
            self.rules = f"\nThe ice is slippery: with probability {slip:.3g} a step goes sideways."

    def _reset(self, rng):
        n, most = self.rows, self.budget.max_actions
        while True:
            self.holes = rng.random((n, n)) >= self.options["frozen"]
            self.start, self.goal = (tuple(rng.integers(n, size=2).tolist()) for _ in range(2))
            self.holes[self.start] = self.holes[self.goal] = False
            if self.start != self.goal and self.goal in flood([self.start], self._near, most):
                break
        self.player, self.best_actions = self.start, []

    def instance(self):
        # Not the rendering: a map has the same split in every view.
        return f"{self.holes.astype(int).tolist()} {self.start} {self.goal}"

    def _near(self, cell):
        """The cells without a hole that one step leads to."""
        return [to for action in self.actions if not self.holes[to := self._move(cell, action)]]

    def _move(self, cell, action):
        row, column = moved(cell, action)
        return min(max(row, 0), self.rows - 1), min(max(column, 0), self.cols - 1)

    def _act(self, action):
        a, slip = self.actions.index(action), self.options["slip"]
        if slip:  # one draw per action: the two sides share the slip probability
            u = self.dynamics.random()
            a = (a + (0 if u >= slip else -1 if u < slip / 2 else 1)) % 4
        before, self.player = self.player, self._move(self.player, self.actions[a])
        won, lost = self.player == self.goal, bool(self.holes[self.player])
        return Outcome(float(won), won or lost, won, effective=self.player != before)

    def _meaning(self, r, c):
        ground = "goal" if (r, c) == self.goal else "hole" if self.holes[r, c] else "ice"
        return ground if (r, c) != self.player else {
            "ice": "player", "hole": "player in a hole", "goal": "player on the goal"}[ground]

    def _coordinates(self):
        return {"Start": [self.start], "Goal": [self.goal],
                self._meaning(*self.player).capitalize(): [self.player],
                "Holes": self._things()[1]["hole"]}

    def _things(self):
        holes = list(map(tuple, np.argwhere(self.holes).tolist()))
        return self.player, {"goal": [self.goal], "hole": holes}

    def note(self):
        """Holes, player, goal, and the moves that neither a hole nor the border prevents."""
        places = {"holes": self._things()[1]["hole"], "player": [self.player], "goal": [self.goal],
                  "safe": self.safe_moves()}
        return " ".join(f"{name} {' '.join(map(str, what))}"
                        for name, what in places.items() if what)

    def thought(self):
        """How far the goal is, first by rows and then by columns. Two numbers side by side are
        compared sooner than two pairs of coordinates."""
        (r, c), (row, column) = self.player, self.goal
        return (f"Row {r} to {row}: {_way(row - r, 'up', 'down')}. "
                f"Column {c} to {column}: {_way(column - c, 'left', 'right')}.")

    def safe_moves(self):
        """The actions that lead to another cell without a hole."""
        return [a for a in self.actions if (to := self._move(self.player, a)) != self.player
                and not self.holes[to]]

    @staticmethod
    def shallow_answer(texts):
        """Walk straight to the goal. Holes are not looked at."""
        cells = read_places(texts[-1])
        return " || ".join(straight(cells["Player"][0], cells["Goal"][0])) if cells else "Right"

    def solve(self):
        """The optimal policy's actions as long as no step slips; with slip 0 a shortest path."""
        plan, cell = [], self.player
        self.best_actions = self.best_actions or self._value_iteration()
        for best in reversed(self.best_actions[:self.actions_left]):
            if cell == self.goal:
                break
            plan.append(self.actions[best[cell]])
            cell = self._move(cell, plan[-1])
        return self._in_turns(plan)

    def _value_iteration(self):
        """For 1, 2, ... actions left: an (n, n) array of the best action in each cell, from
        V_k(s) = max_a sum_s' p(s'|s,a) (1[s' = goal] + 0.999 V_{k-1}(s')), so short paths win."""
        n, slip, values, best = self.rows, self.options["slip"], 0.0, []
        for _ in range(self.budget.max_actions):
            worth = np.where(self.holes, 0.0, 0.999 * values)
            worth[self.goal] = 1.0  # no later value: the episode ends there
            worth = np.pad(worth, 1, mode="edge")  # a step into the border stays in place
            # (4, n, n): the worth of the cell that each action leads to
            step = np.stack([worth[1 + dr:n + 1 + dr, 1 + dc:n + 1 + dc]
                             for dr, dc in map(MOVES.get, self.actions)])
            sides = np.roll(step, 1, axis=0) + np.roll(step, -1, axis=0)
            q = (1 - slip) * step + slip / 2 * sides
            best.append(q.argmax(axis=0))
            values = q.max(axis=0)
        return best


def _way(difference, less, more):
    return f"{abs(difference)} {more if difference > 0 else less}" if difference else "stay"
