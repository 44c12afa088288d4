"""Environments outside the registry: the user's own classes, and those of other libraries.

Tests: `python -m pytest tests/test_envs.py tests/test_faults.py`.
"""

import pkgutil
from functools import partial

import gymnasium

from minragen.environments.gymnasium_text import GymnasiumText
from minragen.envs import REGISTRY, TextEnv
from minragen.support.options import in_module, nearest

OPENENV = "minragen.environments.openenv:OpenEnv"  # `openenv:` and a URL is one


def find(name):
    """The class or function that builds an environment, given its split, budget and options.

    name: `package.module:Class`, a Gymnasium id with Text spaces, `package.module:id` if that
        module registers the id, or `openenv:` and a server's URL
    raises: ValueError with the nearest known name, ImportError naming the missing module
    """
    if name.startswith("openenv:"):
        return partial(pkgutil.resolve_name(OPENENV), name.removeprefix("openenv:"))
    if ":" in name:
        return class_or_id(name)
    if name not in gymnasium.registry:
        raise ValueError(nearest("env", name, sorted(REGISTRY)) + " Or give package.module:"
                         "Class, a Gymnasium id or openenv:URL.")
    return partial(GymnasiumText, name)


def class_or_id(name):
    """What `package.module:attribute` names, a TextEnv or a Gymnasium id of the module."""
    found = in_module("env", name, "Class")
    module, _, attribute = name.rpartition(":")
    if isinstance(found, type) and issubclass(found, TextEnv):
        unwritten = found._reset is TextEnv._reset and module.startswith("minragen.")
        if unwritten or found is GymnasiumText or name == OPENENV:
            raise ValueError(f"env {name!r} is the base of environments, not one itself.")
        return found
    if attribute not in gymnasium.registry:
        raise ValueError(f"env {name!r}: {module} has no TextEnv class and registers no "
                         f"Gymnasium id called {attribute!r}.")
    return partial(GymnasiumText, attribute)
