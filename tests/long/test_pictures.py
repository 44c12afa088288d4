"""The pictures of the algorithm show a real step: the first one of the README's run."""

from pathlib import Path

import pytest

from lab import algorithm, archive
from lab.algorithm import PICTURES

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

    def test_each_is_drawn_and_small_and_so_is_the_one_on_the_pages(self, step, tmp_path):
        for name, draw in PICTURES.items():
            draw(step, tmp_path / name)
            for path in (tmp_path / name, ROOT / "docs" / name):
                assert 10_000 < path.stat().st_size < MOST_BYTES, path
