"""What comes of a step of a Gymnasium environment; test_envs.py plays whole episodes."""

from types import SimpleNamespace
from unittest.mock import Mock

from minragen.environments.gymnasium_text import GymnasiumText


def test_success_is_what_the_environment_says_or_else_an_end_with_a_reward():
    for reward, terminated, truncated, info, success in (
            (1.0, True, False, {}, True), (1.0, False, False, {}, False),
            (1.0, False, True, {}, False), (0.0, True, False, {}, False),
            (1.0, True, False, {"success": 0}, False), (0.0, False, True, {"success": 1}, True)):
        inner = Mock(**{"step.return_value": ("", reward, terminated, truncated, info)})
        outcome = GymnasiumText._act(SimpleNamespace(inner=inner), "a")
        assert outcome[:3] == (reward, terminated or truncated, success)
