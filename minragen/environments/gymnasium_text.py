"""Any registered Gymnasium environment with Text spaces as a TextEnv: `--env package.module:Id-v0`.

Tests: `python -m pytest tests/test_envs.py -k Gymnasium`.
"""

import gymnasium
from gymnasium import spaces

from minragen.envs import Outcome, TextEnv


class GymnasiumText(TextEnv):
    def __init__(self, env_id, split="train", budget=None, **options):
        try:
            self.inner = gymnasium.make(env_id, **options)
        except TypeError as error:
            raise ValueError(f"env {env_id!r} does not take these options: {error}.") from None
        for space in (self.inner.observation_space, self.inner.action_space):
            if not isinstance(space, spaces.Text):
                raise ValueError(f"env {env_id!r} has a {type(space).__name__} space, expected "
                                 f"Text spaces.")
        super().__init__(split, budget)
        self.instruction = str(self.inner.unwrapped.__doc__ or env_id).strip()

    def _reset(self, rng):
        self._text, _ = self.inner.reset(seed=int(rng.integers(2**31)))
        # The instance is drawn; from here on, each member has its own dynamics.
        self.inner.unwrapped.np_random = self.dynamics

    def _act(self, action):
        if not self.inner.action_space.contains(action):
            return None
        self._text, reward, terminated, truncated, info = self.inner.step(action)
        return Outcome(float(reward), terminated or truncated, bool(info.get("success", False)))

    def render(self):
        return self._text

    def random_answer(self, rng):
        self.inner.action_space.seed(int(rng.integers(2**31)))
        return self.inner.action_space.sample()
