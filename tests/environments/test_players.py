"""The scripted players of the environments: how often they succeed is on the pages."""

import json

import pytest

from minragen.config import Config, preset
from minragen.environments.data import DATA
from minragen.look.players import scripted
from minragen.run.groups import env_groups

ROWS = json.loads((DATA / "players.json").read_text("utf-8"))
SLOW = {"deepcoder", "lean"}  # they run programs


@pytest.mark.parametrize("name", sorted({row["env"] for row in ROWS} - SLOW))
def test_the_shallow_player_succeeds_as_often_as_the_table_of_the_environments_says(name):
    """On the instances of a validation, by default and with the options of tiny's preset."""
    stored = [row for row in ROWS if row["env"] == name]
    for config, row in zip((Config(env=name), preset(name)), stored, strict=True):
        played = scripted(env_groups(config, "val", row["size"]),
                          lambda env, texts, rng: env.shallow_answer(texts))
        assert sum(t.success for t in played) == row["players"]["shallow player"]
