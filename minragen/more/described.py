"""VAGEN's reward for describing the state, in the response formats that ask for a description.

    grounding      F1(observation, state before the answer)
    worldmodeling  F1(prediction, state after it, with what chance did)
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
    weight: float = 0.0  # of each F1 in the reward
    turn: Callable = EnvGroups.turn

    def __call__(self, env, reply):
        found = {}  # name -> F1, None where the environment has nothing to grade
        if "observation" in self.parts:
            found["grounding"] = score(env, reply.observation)
        observation, reward, terminated, truncated, info = self.turn(env, reply)
        if "prediction" in self.parts:
            found["worldmodeling"] = score(env, reply.prediction)
        # A malformed reply describes nothing, not even an empty world.
        graded = {name: float(f1) * reply.valid for name, f1 in found.items() if f1 is not None}
        if graded:
            info = {**info, **graded, "env_return": reward}
            reward += bool(info["valid"]) * self.weight * sum(graded.values())
        return observation, reward, terminated, truncated, info


def score(env, text):
    """The F1 of a description, or None. Raises ValueError for what is no F1."""
    f1 = env.score_description(text)
    if f1 is None or 0 <= f1 <= 1:
        return f1
    raise ValueError(f"{type(env).__name__}.score_description() returned {f1!r:.50}, expected a "
                     f"number from 0 to 1, or None.")
