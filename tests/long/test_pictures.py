"""The pictures show what is real: a run's first step, stored episodes, the forecast, real calls."""

import re
from functools import partial
from pathlib import Path

import pytest
from check import BELOW, READING

from lab import algorithm, archive, pictures
from lab.algorithm import PICTURES
from minragen.config import preset

ROOT = Path(__file__).parent.parent.parent
RUN = "frozenlake-grpo-s0"
MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def step():
    return algorithm.first_step(RUN)


class TestPictures:
    def test_the_step_is_the_first_one_of_the_stored_run(self, step):
        first = archive.metrics(RUN)[1]
        assert first["step"] == 1
        for name in ("groups_kept", "groups_zero_std", "updates_skipped"):
            assert step.metrics[name] == first[name]
        for name in ("reward_std", "policy_loss", "entropy", "grad_norm", "clip_fraction"):
            assert step.metrics[name] == pytest.approx(first[name], rel=0.05)

    @pytest.mark.parametrize("name", [*PICTURES, *pictures.PICTURES])
    def test_each_is_drawn_and_small_and_so_is_the_one_on_the_pages(self, name, step, tmp_path):
        draw = partial(PICTURES[name], step) if name in PICTURES else pictures.PICTURES[name]
        draw(tmp_path / name)
        for path in (tmp_path / name, ROOT / "docs" / name):
            assert 10_000 < path.stat().st_size < MOST_BYTES, path


class TestLoop:
    def test_an_episode_played_again_has_the_observations_and_rewards_that_were_stored(self):
        config = archive.config(pictures.LOOP_RUN)
        for episode in archive.episodes(pictures.LOOP_RUN):
            *turns, _ = pictures.replayed(config, episode)
            assert [turn.observation for turn in turns] == [
                m["content"] for m in episode["messages"][1:] if m["role"] == "user"]
            assert [turn.reward for turn in turns] == episode["turn_rewards"]

    def test_its_lake_is_not_crossed_before_rl_and_crossed_after_it(self):
        before, after = pictures.pair(pictures.LOOP_RUN)
        assert before[0].observation == after[0].observation
        assert [sum(turn.reward for turn in turns[:-1]) for turns in (before, after)] == [0, 1]
        assert "Player on the goal" in after[-1].observation


class TestCollapse:
    @pytest.mark.parametrize("seed", range(3))
    def test_a_seed_learns_at_the_presets_rate_and_loses_success_at_three_times_it(self, seed):
        for stem, times, sign in zip(pictures.RATES, (1, 3), (1, -1)):
            run = f"{stem}-s{seed}"
            assert archive.config(run).lr == times * preset("metamathqa").lr
            held_out = [m["val/success"] for m in archive.metrics(run) if "val/success" in m]
            assert sign * (held_out[-1] - held_out[0]) > 0.05


class TestMemory:
    @pytest.mark.parametrize("name, billions", [*zip(
        pictures.ARCHITECTURES, (0.1345, 0.494, 1.236, 1.544, 3.086))])
    def test_its_models_have_the_sizes_of_the_published_ones(self, name, billions):
        model = pictures.without_weights(*pictures.ARCHITECTURES[name], llama=name[0] != "Q")
        assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=5e-4)


class TestCode:
    def test_it_has_the_reading_list_and_all_wings_and_nothing_else(self):
        assert set(pictures.PLACES) == {*(f"{name}.py" for name in READING), "support/",
                                        *(f"{wing}/" for wing in BELOW)}
        assert all((ROOT / "minragen" / name).exists() for name in pictures.PLACES)

    def test_each_arrow_of_a_step_is_a_name_that_one_file_uses_and_the_other_defines(self):
        for caller, called, _, _, labels in pictures.CALLS:
            source, target = ((ROOT / "minragen" / file).read_text() for file in (caller, called))
            for name in (part for label in labels for part in label.split()[-1].split(".")):
                assert re.search(rf"\b{name}\b", source), (caller, name)
                assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", target, re.M), name
