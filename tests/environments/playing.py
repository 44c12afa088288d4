"""Episodes and records for the tests of the environments."""

import json
from pathlib import Path

from minragen.envs import make


def begun(name, seed=0, split="train", budget=None, **options):
    """An environment at the start of an episode."""
    env = make(name, split, budget, **options)
    env.reset(seed=seed)
    return env


def write(path, *records):
    """Write a file of JSON records. Returns its path as a text."""
    Path(path).write_text("\n".join(map(json.dumps, records)))
    return str(path)
