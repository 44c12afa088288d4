"""The contract of an algorithm: every preset keeps it, and so must yours.

    python -m pytest tests/test_algo_contract.py --algo my_algo:preset

An untrained network plays a lottery for two steps: episodes differ in length and return, and in
some groups all returns are equal. (test_step.py compares the bundled ones with slow.py.)
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import parsed
from toys import Lottery
from training import read_lines, run

from minragen import starpo, train

SHORT = ("--env test_algo_contract:Draw --model tiny --warmup-steps 0 --steps 2 --num-groups 6 "
         "--group-size 4 --mini-batch 12 --max-new-tokens 6 --max-context 104 --val-size 2 "
         "--diagnose-every 0")


class Draw(Lottery):
    """A lottery that ends with its prize, the one success of an episode."""

    def step(self, answer):
        state, reward, terminated, truncated, info = super().step(answer)
        won = info["success"] > 0
        return state, reward, terminated or won, truncated and not won, info


@pytest.fixture
def trained(runs, monkeypatch):
    """trained("--algo ppo"): `config`, `metrics` of two steps, `batches` that were trained on."""
    def run_two_steps(words):
        batches, compute = [], train.compute_targets

        def compute_targets(*arguments):
            batch, metrics = compute(*arguments)
            batches.append(batch)
            return batch, metrics

        with monkeypatch.context() as patch:
            patch.setattr(train, "compute_targets", compute_targets)
            run(f"--run a {SHORT} {words}")
        lines = [line for line in read_lines(runs / "a" / "metrics.jsonl") if "seconds" in line]
        return SimpleNamespace(config=parsed(*f"{SHORT} {words}".split()), metrics=lines,
                               batches=batches)

    return run_two_steps


def assert_advantages_are_sound(batches):
    """A finite number a token, 0 where nothing was sampled."""
    for batch in batches:
        found, mask = batch.advantages, batch.response_mask
        assert found.isfinite().all(), "an advantage is not finite"
        assert not found[~mask].any(), "an advantage outside response_mask is not 0"


def assert_filter_is_sound(name, value):
    """One bool a group, whatever the reward stds."""
    for count in (1, 2, 7, 32):
        for stds in (torch.zeros(count), torch.ones(count), torch.rand(count)):
            kept = starpo.filter_groups(stds, value, name)
            assert kept.dtype == torch.bool and kept.shape == stds.shape, (
                f"filter {name}: got {kept}, expected one bool for each of {count} groups")


class TestAlgorithm:
    def test_two_steps_train_with_sound_advantages_and_a_sound_filter(self, algo_name, trained):
        found = trained(f"--algo {algo_name}")
        assert [line["step"] for line in found.metrics] == [1, 2]
        assert found.batches, "the filter dropped all groups of both steps"
        assert_advantages_are_sound(found.batches)
        for line in found.metrics:
            assert not line.get("updates_skipped"), "a gradient was not finite"
        assert any(line.get("grad_norm", 0) > 0 for line in found.metrics)
        assert found.config.advantages == "none" or any(b.advantages.any() for b in found.batches)
        assert_filter_is_sound(found.config.filter, found.config.filter_value)


class TestContract:
    @pytest.mark.parametrize("estimate, said", [
        (lambda b, c: b.token_rewards / 0, "not finite"),
        (lambda b, c: torch.ones_like(b.token_rewards), "outside response_mask"),
        (lambda b, c: b.scores[:, None], "one an episode"), (lambda b, c: None, "got None"),
        (lambda b, c: b.scores, "got torch.Size")])  # one a turn, in a limited context
    def test_it_refuses_advantages_that_are_not_sound(self, trained, monkeypatch, estimate, said):
        monkeypatch.setitem(starpo.ESTIMATORS, "broken", ("group", estimate))
        with pytest.raises((AssertionError, SystemExit), match=said):
            assert_advantages_are_sound(trained("--advantages broken --context limited").batches)

    @pytest.mark.parametrize("keep", [
        lambda stds, value: stds * value, lambda stds, value: stds[:1] > 0])
    def test_it_refuses_a_filter_that_gives_no_bool_a_group(self, monkeypatch, keep):
        monkeypatch.setitem(starpo.FILTERS, "broken", keep)
        with pytest.raises((AssertionError, RuntimeError)):
            assert_filter_is_sound("broken", 0.5)
