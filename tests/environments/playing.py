"""Episodes and records for the tests of the environments."""

import json
from pathlib import Path

from minragen.envs import EnvGroups, make
from minragen.look.players import scripted


def begun(name, seed=0, split="train", budget=None, **options):
    """An environment at the start of an episode."""
    env = make(name, split, budget, **options)
    env.reset(seed=seed)
    return env


def success_of(name, episodes, player=None, **options):
    """The share of the first held-out instances that a player (env, texts, rng) -> answer solves,
    by default the shallow one."""
    player = player or (lambda env, texts, _: env.shallow_answer(texts))
    played = scripted(EnvGroups(name, episodes, 1, "val", options), player)
    assert not any(t.error for t in played)
    return sum(t.success for t in played) / episodes


def write(path, *records):
    """Write a file of JSON records. Returns its path as a text."""
    Path(path).write_text("\n".join(map(json.dumps, records)))
    return str(path)
