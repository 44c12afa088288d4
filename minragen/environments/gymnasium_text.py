"""Any registered Gymnasium environment with Text spaces as a TextEnv: `--env package.module:Id-v0`.

Tests: `python -m pytest tests/test_envs.py -k "Gymnasium or gymnasium"`.
"""

import ast
import functools
import inspect

import gymnasium
from gymnasium import spaces

from minragen.environments.limits import within_time_limit
from minragen.envs import SPLITS, Budget, Outcome, TextEnv, split_of, text_space


class GymnasiumText(TextEnv):
    """The docstring of the wrapped environment is the instruction, its `max_episode_steps` the
    number of turns.

    Success: `info["success"]`; without it, an end with a positive reward.
    Splits: by the first text. If the first texts of 64 episodes do not cover all three splits,
    as in a game with a hidden word, by the seed; then the splits share instances.
    """

    def __init__(self, env_id, split="train", budget=None, **options):
        try:  # -1: without TimeLimit, which would end episodes before the turns that are announced
            self.inner = gymnasium.make(env_id, max_episode_steps=-1, **options)
            self.by_text = within_time_limit(first_texts_split, env_id, repr(options))
        except Exception as error:  # of somebody else's constructor or reset
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"env {env_id!r} does not begin with these options: {said}."
                             ) from error
        for space in (self.inner.observation_space, self.inner.action_space):
            if not isinstance(space, spaces.Text):
                raise ValueError(f"env {env_id!r} has a {type(space).__name__} space, expected "
                                 f"Text spaces.")
        turns = gymnasium.spec(env_id).max_episode_steps or self.budget.max_turns
        super().__init__(split, budget or Budget(turns, 1, turns))
        said = self.inner.observation_space
        self.observation_space = text_space(said.character_set, said.max_length + 1000)
        self.instruction = inspect.cleandoc(self.inner.unwrapped.__doc__ or env_id)

    def _reset(self, rng):
        self._seed = int(rng.integers(2**31))
        self._text, _ = self.inner.reset(seed=self._seed)
        # The instance is drawn; from here on, each member has its own dynamics.
        self.inner.unwrapped.np_random = self.dynamics

    def instance(self):
        return self._text if self.by_text else str(self._seed)

    def _act(self, action):
        if not self.inner.action_space.contains(action):
            return None
        self._text, reward, terminated, truncated, info = self.inner.step(action)
        success = info.get("success", terminated and reward > 0)
        return Outcome(float(reward), terminated or truncated, bool(success))

    def render(self):
        return self._text

    def random_answer(self, rng):
        self.inner.action_space.seed(int(rng.integers(2**31)))
        return self.inner.action_space.sample()


@functools.cache
def first_texts_split(env_id, options):
    """Whether the first texts of 64 episodes fall into all splits. options: a repr"""
    env = gymnasium.make(env_id, **ast.literal_eval(options))
    texts = (env.reset(seed=seed)[0] for seed in range(64))
    return {split_of(str(text)) for text in texts} == {*SPLITS}
