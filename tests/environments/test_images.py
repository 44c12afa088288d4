"""Images of FrozenLake and Sokoban: their pixels, and the text beside them."""

import zlib
from itertools import combinations, product

import numpy as np
import pytest
from test_frozenlake import lake
from test_sokoban import room
from toys import replies

from minragen.environments.board import read_tiles
from minragen.environments.frozenlake import FrozenLake
from minragen.environments.sokoban import Sokoban
from minragen.envs import IMAGE, EnvGroups, image_of

BOARDS = (FrozenLake, Sokoban)
LAKE = ("P_O_", "__G_", "OO__", "____")
ROOM = ("#######", "#_#_O_#", "#_X___#", "#__√__#", "#O__P_#", "#######")


def state(env):
    """All that decides how an episode goes on. (Where the player started does not.)"""
    if isinstance(env, FrozenLake):
        return env.holes.tobytes(), env.goal, env.player
    return env.floor, env.targets, env.boxes, env.player


class TestImages:
    def test_the_small_tiles_have_the_pixels_that_models_were_trained_on(self):
        crcs = [zlib.crc32(read_tiles(cls.tiles, 8).tobytes()) for cls in BOARDS]
        assert crcs == [929452224, 284922240]

    @pytest.mark.parametrize("size", [8, 14, 28])
    def test_every_cell_is_the_tile_of_its_meaning(self, size):
        drowned, arrived = lake(*LAKE, tile=size), lake(*LAKE, tile=size)
        drowned.step("Down || Down")
        arrived.step("Down || Right")
        arrived.step("Right")
        on_target = room(*ROOM[:4], "#S____#", ROOM[5], tile=size)
        for env, rows in ((lake(*LAKE, tile=size), LAKE), (room(*ROOM, tile=size), ROOM),
                          (drowned, ("__O_", "__G_", "XO__", "____")),
                          (arrived, ("__O_", "__√_", "OO__", "____")),
                          (on_target, (*ROOM[:4], "#S____#", ROOM[5]))):
            tiles = dict(zip(env.options["symbols"], read_tiles(env.tiles, size)))
            there = np.vstack([np.hstack([tiles[symbol] for symbol in row]) for row in rows])
            assert env.draw().dtype == np.uint8 and np.array_equal(env.draw(), there)

    def test_tiles_of_all_sizes_differ_and_are_the_small_ones_enlarged(self):
        for cls, size in product(BOARDS, (8, 9, 16, 28, 64)):
            tiles = read_tiles(cls.tiles, size)
            assert tiles.shape == (len(cls.meanings), size, size, 3)
            assert not any(np.array_equal(a, b) for a, b in combinations(tiles, 2))
        assert np.array_equal(read_tiles(cls.tiles, 64)[:, ::8, ::8], read_tiles(cls.tiles, 8))

    @pytest.mark.parametrize("cls, options", [
        (FrozenLake, {"size": 3, "frozen": 0.7}), (FrozenLake, {}),
        (Sokoban, {"rows": 5, "cols": 5}), (Sokoban, {"boxes": 2})])
    def test_it_determines_the_state_and_the_state_determines_it(self, cls, options):
        env, rng = cls(view="image", **options), np.random.default_rng(0)
        states, images = {}, {}
        for seed in range(300):
            (shown, _), over = env.reset(seed=seed), False
            while not over:
                seen, now = shown.image.tobytes(), state(env)
                assert states.setdefault(seen, now) == now
                assert images.setdefault(now, seen) == seen
                shown, _, *ends, _ = env.step(env.random_answer(rng))
                over = any(ends)
        assert len(states) > 400

    def test_it_is_of_the_last_observation_and_keeps_what_it_showed(self):
        env = FrozenLake(view="image")
        before = env.reset(seed=3)[0].image
        copy, after = before.copy(), env.step("Right || Up")[0].image
        assert np.array_equal(before, copy) and not np.array_equal(after, before)
        groups = EnvGroups("frozenlake", 2, 2, options={"view": "image"})
        same = [np.array_equal(observation.image, before) for observation in groups.reset(3)]
        assert same == [True, True, False, False]
        (observation, *_), = groups.step([1], replies(["Right || Up"]))
        assert np.array_equal(observation.image, after)


class TestText:
    def test_beside_an_image_alone_it_says_nothing_of_the_instance(self):
        for cls in BOARDS:
            env = cls(view="image")
            said = {(env.system_prompt, env.reset(seed=seed)[0]) for seed in range(50)}
            assert {first for _, first in said} == {f"{IMAGE}\nTurns left: 5, actions left: 10"}
            assert len(said) == 1
            later = {env.step("nowhere")[0] for seed in range(20) if env.reset(seed=seed)}
            assert later == {f"Reward: -0.1\nNo valid action was given, or not all were valid.\n"
                             f"{IMAGE}\nTurns left: 4, actions left: 8"}

    def test_beside_image_and_text_it_is_the_default_views_and_all_views_show_one_instance(self):
        for cls in BOARDS:
            env, plain, image = cls(view="image+text"), cls(), cls(view="image")
            other = cls(view="grid", symbols="abcdefg"[:len(cls.meanings)])
            for seed in range(20):
                said, alone, *_ = [e.reset(seed=seed)[0] for e in (env, plain, image, other)]
                assert said == f"{IMAGE}\n{alone}" and image_of(alone) is None
                for look in ("instance", "note", "describe", "solve", "instance_split"):
                    assert len({str(getattr(e, look)()) for e in (env, plain, image, other)}) == 1
            legend = f"In the picture {cls.looks}.\n"
            assert env.system_prompt.replace(legend, "") == plain.system_prompt
            assert legend in image.system_prompt and "Symbols" not in image.system_prompt
