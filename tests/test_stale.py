"""Samples of older weights and their correction: more/stale.py, `starpo.truncated_weights`. Whole
steps are compared with plain loops in test_step.py::TestCollect."""

import shlex
from types import SimpleNamespace

import pytest
import torch
from conftest import parsed
from toys import tiny
from training import BRIEF, assert_resumed_alike

from minragen import starpo
from minragen.more.stale import OlderWeights
from minragen.run import bundled, start


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
