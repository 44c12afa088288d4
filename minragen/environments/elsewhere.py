"""Environments outside the registry: the user's own classes, and servers."""

from functools import partial

from minragen.envs import REGISTRY, TextEnv
from minragen.support.options import in_module, nearest


def find(name):
    """The class or function that builds an environment, given its split, budget and options.

    name: `package.module:Class`, or `openenv:` and a server's URL
    raises: ValueError with the nearest known name, ImportError naming the missing module
    """
    if name.startswith("openenv:"):
        from minragen.environments.openenv import OpenEnv  # which needs a package
        return partial(OpenEnv, name.removeprefix("openenv:"))
    if ":" not in name:
        raise ValueError(nearest("env", name, sorted(REGISTRY)) + " Or give package.module:"
                         "Class or openenv:URL.")
    found = in_module("env", name, "Class")
    if not (isinstance(found, type) and issubclass(found, TextEnv)):
        raise ValueError(f"env {name!r}: the module has no such subclass of TextEnv.")
    if found._reset is TextEnv._reset and found.__module__.startswith("minragen."):
        raise ValueError(f"env {name!r} is the base of environments, not one itself.")
    return found
