"""VAGEN's reward for describing the state, in the response formats that ask for a description.

    grounding      F1(observation, state before the answer)
    worldmodeling  F1(prediction, state after it, chance included)
    paid           their sum, weighted, if both the format of the reply and the actions in it were
                   valid; otherwise 0

Tests: `python -m pytest tests/environments/test_relations.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minragen.envs import EnvGroups


@dataclass(frozen=True)
class DescribedTurn:
    """A turn of EnvGroups that also scores the reply's descriptions and pays for them."""

    parts: tuple  # of the response format
    grounding_reward: float = 0.0
    worldmodeling_reward: float = 0.0
    turn: Callable = EnvGroups.turn

    def __call__(self, env, reply):
        seen = score(env, reply.observation) if "observation" in self.parts else None
        observation, reward, terminated, truncated, info = self.turn(env, reply)
        expected = score(env, reply.prediction) if "prediction" in self.parts else None
        paid, described = self.reward(reply, seen, expected, reward, info)
        return observation, reward + paid, terminated, truncated, {**info, **described}

    def reward(self, reply, grounding, worldmodeling, reward, info):
        """The paid reward, and {name: F1, "env_return": reward}; 0.0 and {} if nothing is graded.

        grounding, worldmodeling: F1, None where the format or the environment has nothing to grade
        """
        # A malformed reply describes nothing, not even an empty world.
        described = {name: float(f1) * reply.valid for name, f1 in
                     (("grounding", grounding), ("worldmodeling", worldmodeling)) if f1 is not None}
        if not described:
            return 0.0, {}
        paid = (self.grounding_reward * described.get("grounding", 0.0)
                + self.worldmodeling_reward * described.get("worldmodeling", 0.0))
        return paid * bool(info["valid"]), {**described, "env_return": reward}


def score(env, text):
    """The F1 of a description, or None. Raises ValueError for what is no F1."""
    f1 = env.score_description(text)
    if f1 is None or 0 <= f1 <= 1:
        return f1
    raise ValueError(f"{type(env).__name__}.score_description() returned {f1!r:.50}, expected a "
                     f"number from 0 to 1, or None.")
