"""The pictures of the algorithm show a real step: the first one of the README's run."""

from pathlib import Path

import pytest

from lab import algorithm, archive
from lab.algorithm import PICTURES
from minragen.fast.prefix_tree import PrefixTree, micro_batches

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

    def test_the_segments_of_the_tree_are_what_the_learner_computes(self, step):
        batch = algorithm._members(step)
        ends = [int(mask.nonzero().max()) for mask in batch.response_mask]
        rows = [ids[:end] for ids, end in zip(batch.tokens.tolist(), ends)]
        segments = algorithm._segments(rows)
        assert sum(end - begin for _, begin, end in segments) == nodes_of(step, batch)
        assert segments[0][:2] == ((0, 1, 2, 3), 0)
        assert all(len({tuple(rows[n][begin:end]) for n in numbers}) == 1
                   for numbers, begin, end in segments)

    def test_the_performance_page_counts_its_tokens_and_nodes(self, step):
        tokens = sum(int(mini.lengths.sum()) for mini in step.minis)
        padded = sum(mini.tokens.numel() for mini in step.minis)
        nodes = sum(nodes_of(step, mini.take(rows)) for mini in step.minis
                    for rows in micro_batches(mini.tokens, mini.lengths, step.config.token_budget))
        assert (f"{len(step.trained)} rows with {tokens:,} tokens, {padded:,} with padding, and "
                f"{nodes:,} nodes") in " ".join(
            (ROOT / "docs" / "performance.md").read_text().split())


def nodes_of(step, batch):
    return len(PrefixTree(step.decoder, batch.tokens, batch.response_mask).tokens)
