"""Samples of older weights and their correction: more/stale.py, `starpo.truncated_weights`."""

import copy
import dataclasses
import shlex
from types import SimpleNamespace

import pytest
import slow
import torch
from conftest import parsed
from test_step import (  # noqa: F401
    PPO,
    configured,
    differ,
    env_groups,
    real,
    slow_learner,
    start,
)
from toys import tiny
from training import BRIEF, assert_resumed_alike

from minragen import starpo
from minragen.more.stale import OlderWeights
from minragen.rollout import collect
from minragen.run import bundled


class TestOlderWeights:
    def test_the_newest_weights_come_back_after_an_error(self):
        model = torch.nn.Linear(1, 1, bias=False)
        playing = OlderWeights(SimpleNamespace(model=model), 1)
        with playing():
            model.weight.data.fill_(7)  # lost: a rollout changes nothing
        model.weight.data.fill_(5)
        for _ in range(2):
            with pytest.raises(KeyError), playing():
                raise KeyError
            assert model.weight == 5
        with playing():  # the rollout that failed, again
            assert model.weight != 5

    @pytest.mark.usefixtures("float64")
    @pytest.mark.parametrize("options", [
        dict(), dict(tis_cap=1.1), dict(tis_cap=1.1, lora_rank=2),
        PPO | dict(tis_cap=1.1, loss_mask="all", advantage_mask="all")], ids=str)
    def test_four_steps_of_training_are_those_of_the_slow_loop(self, real, options):  # noqa: F811
        config = configured(steps=4, num_groups=3, stale=2, kl_coef=0.1, lr=0.02, **options)
        gradients, _, _ = real(config, play=collect)
        oracle, past = slow_learner(config), []
        frame = start.frame_of(config, oracle.policy)
        groups = env_groups(config, "train", 3, 3)

        def play(learner, frame, groups, first_seed, config):
            past.append(copy.deepcopy(learner.policy.model))
            older = SimpleNamespace(policy=SimpleNamespace(
                model=past[max(0, len(past) - 1 - config.stale)],
                tokenizer=learner.policy.tokenizer))
            return slow.collect(older, frame, groups, first_seed, config)

        expected = [g for step in (1, 2, 3, 4) for g in slow.train_step(
            oracle, frame, groups, config, step, play)[0]]
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)  # float32 logprobs
        fresh, _, _ = real(dataclasses.replace(config, stale=0, tis_cap=0.0), play=collect)
        assert differ(gradients, fresh)

    def test_a_resumed_run_plays_with_the_older_weights_that_it_had(self, runs, monkeypatch):
        options = shlex.split("--save-every 1 --steps 4 --stale 2 --tis-cap 2 --kl-coef 0.1")
        assert_resumed_alike(runs, monkeypatch, [*BRIEF, *options])


class TestTruncatedWeights:
    def test_in_float32_they_are_refused_without_stale_samples(self, monkeypatch, tmp_path):
        bundled.save_folder(tiny()[0], tmp_path)
        config = parsed("--env", "bandit", "--model", str(tmp_path), "--tis-cap", "2")
        with pytest.raises(ValueError, match="tis_cap: it has no effect here. In float32"):
            start.build_learner(config, start.build_groups(config))

    def test_a_token_counts_as_much_as_it_has_become_likelier_up_to_the_cap(self):
        """By hand: from a half to a quarter, to itself, to nine tenths; bounded by 1.5."""
        old, sampled = torch.tensor([0.25, 0.5, 0.9]).log(), torch.tensor([0.5, 0.5, 0.5]).log()
        sampling = torch.tensor([True, True, True])
        weights = starpo.truncated_weights(old, sampled, 1.5, sampling)
        assert weights.tolist() == pytest.approx([0.5, 1.0, 1.5])
        assert starpo.truncated_weights(old, sampled, 1.5, ~sampling).tolist() == [1.0] * 3
