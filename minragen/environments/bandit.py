"""Bandit: choose one of two arms by what their names suggest."""

import re
import zlib

from minragen.environments.data import load_table
from minragen.envs import Budget, Outcome, TextEnv


class Bandit(TextEnv):
    """Choose one of two arms whose names hint at their risk.

    Observation: the two names.
    Actions: the name of an arm.
    Reward: the safe arm pays 0.1; the risky arm pays 1 with probability 0.25, otherwise 0. Success
        is the choice of the arm with the higher mean.
    Ends when: an arm has been chosen.
    Solver: names the arm with the higher mean.

    Splits: val has the pairs of train in the other order, test has pairs of other names.
    Options: `low_reward` of the safe arm; `high_reward` of the risky arm with probability
    `high_prob`, else `high_miss`; `reversed` swaps the payouts, so that the names mislead; `mixed`
    makes 400 pairs of 40 names, each pair in one split.
    """

    budget = Budget(max_turns=1, max_actions_per_turn=1, max_actions=1)
    bundled_data = "20 pairs of names"
    defaults = {"low_reward": 0.1, "high_reward": 1.0, "high_miss": 0.0, "high_prob": 0.25,
                "reversed": False, "mixed": False}
    ranges = {"high_prob": (0, 1)}
    instruction = ("You play a bandit with two arms. What an arm pays is related to its name: "
                   "think about what the names mean. Answer with the name of one arm.")
    # Names that suggest no risk, so that the example does not tell which kind of arm pays more.
    example = ("Circle and Square: neither name tells me more, so I take the second.", "Square",
               "Two arms, Circle and Square.", "Square paid something.")
    # Pairs (safe, risky).
    KNOWN, UNSEEN = (tuple(map(tuple, load_table("arms.json")[name]))
                     for name in ("known", "unseen"))

    @property
    def system_prompt(self):
        return self.instruction  # without `actions`: the arms differ from instance to instance

    def _reset(self, rng):
        pairs = self.KNOWN + self.UNSEEN
        self.safe, self.risky = pairs[rng.integers(len(pairs))]
        if self.options["mixed"]:
            _, self.risky = pairs[rng.integers(len(pairs))]
        pair = self.safe, self.risky
        self.actions = pair if rng.random() < 0.5 else pair[::-1]
        self.text = f"Two arms: {' and '.join(self.actions)}. Which pays more on average?"

    def instance(self):
        return f"{self.safe} {self.risky}" if self.options["mixed"] else self.render()

    def instance_split(self):
        if self.options["mixed"]:
            return super().instance_split()
        pair = self.safe, self.risky
        if pair in self.UNSEEN:
            return "test"
        # The pair's CRC says which order is trained on, so that the position tells nothing.
        safe_first, bit = self.actions == pair, zlib.crc32(" ".join(pair).encode()) % 2
        return "val" if safe_first == bit else "train"

    def _act(self, action):
        o = self.options
        hit = self.dynamics.random() < o["high_prob"]
        gamble = (action == self.risky) != o["reversed"]
        reward = (o["high_reward"] if hit else o["high_miss"]) if gamble else o["low_reward"]
        self.text = f"{action} paid {reward:.4g}"
        return Outcome(reward, terminated=True, success=[action] == self.solve())

    def render(self):
        return self.text

    def note(self):
        return " or ".join(self.actions)

    @staticmethod
    def shallow_answer(texts):
        """The first name."""
        return re.search(r"Two arms: (\S+)", texts[1])[1]

    def solve(self):
        o = self.options
        mean = o["high_prob"] * o["high_reward"] + (1 - o["high_prob"]) * o["high_miss"]
        return [self.risky if (mean > o["low_reward"]) != o["reversed"] else self.safe]
