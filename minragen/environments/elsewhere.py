"""Environments outside the registry: the user's own classes, and those of other libraries.

Tests: `python -m pytest tests/test_envs.py tests/test_faults.py`.
"""

import importlib
import pkgutil
import sys
from functools import partial

import gymnasium

from minragen.environments.gymnasium_text import GymnasiumText
from minragen.envs import REGISTRY, TextEnv
from minragen.options import nearest

# prefix -> the class that wraps an environment of another library, given what follows the prefix
ADAPTERS = {"reasoning_gym": "minragen.environments.reasoning_gym:ReasoningGym",
            "openenv": "minragen.environments.openenv:OpenEnv"}


def find(name):
    """The class or function that builds an environment, given its split, budget and options.

    name: `package.module:Class`, a Gymnasium id with Text spaces, `package.module:id` if that
        module registers the id, or a prefix of ADAPTERS with what the adapter takes
    raises: ValueError with the nearest known name, ImportError naming the missing module
    """
    prefix, colon, rest = name.partition(":")
    if colon and prefix in ADAPTERS:
        return partial(pkgutil.resolve_name(ADAPTERS[prefix]), rest)
    if colon:
        return in_module(name)
    if name not in gymnasium.registry:
        raise ValueError(nearest("env", name, sorted(REGISTRY)) + " Or give package.module:"
                         "Class, a Gymnasium id, reasoning_gym:DATASET or openenv:URL.")
    return partial(GymnasiumText, name)


def in_module(name):
    """What `package.module:attribute` names, a TextEnv or a Gymnasium id of the module."""
    found, (module, _, attribute) = found_in_module("env", name), name.rpartition(":")
    if isinstance(found, type) and issubclass(found, TextEnv):
        unwritten = found._reset is TextEnv._reset and module.startswith("minragen.")
        if unwritten or found is GymnasiumText or name in ADAPTERS.values():
            raise ValueError(f"env {name!r} is the base of environments, not one itself.")
        return found
    if attribute not in gymnasium.registry:
        raise ValueError(f"env {name!r}: {module} has no TextEnv class and registers no "
                         f"Gymnasium id called {attribute!r}.")
    return partial(GymnasiumText, attribute)


def found_in_module(kind, name):
    """What `package.module:attribute` names, None if the module lacks it.

    kind: what it should be, for the messages of the errors
    """
    module, _, attribute = name.rpartition(":")
    if not module.strip(".") or module.startswith(".") or not attribute:
        raise ValueError(f"bad {kind} {name!r}: expected package.module:Class.")
    if "" not in sys.path:  # unlike `-m`, a console entry point skips the current folder
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as problem:
        if not f"{module}.".startswith(f"{problem.name}."):
            raise  # what the module itself imports
        raise ImportError(f"{kind} {name}: there is no module {problem.name!r} in the current "
                          f"folder or among the installed packages.") from None
