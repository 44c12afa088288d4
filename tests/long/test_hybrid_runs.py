"""Layers with states in whole runs: one model of each kind of state, with random weights.

What is true of them without a run: test_hybrid.py.
"""

import shlex

import pytest
import torch
import transformers
from several import several
from test_distributed import LOTTERY
from test_families import write_family
from test_hybrid import each_kind
from test_train import played
from training import assert_resumed_alike, metrics, run

from minragen import train as trainer
from minragen.run import start

pytestmark = pytest.mark.usefixtures("runs")
SHORT = shlex.split("--num-groups 2 --max-context 320 --example false --filter none --lr 1e-3")


@pytest.fixture
def options(name, tmp_path):
    """Of a run of Lottery with the family `name`."""
    write_family(name, tmp_path / "model", initializer_range=0.1)
    return [*LOTTERY, "--model", str(tmp_path / "model"), *SHORT]


@each_kind
class TestRuns:
    def test_ten_updates_lower_a_batchs_loss_and_the_result_loads(self, name, options, tmp_path):
        config, learner, batch = played(*options, "--mini-batch", "16")
        batch, _ = trainer.compute_targets(learner, batch, config)
        losses = [trainer.update(learner, batch, config, 1)["policy_loss"] for _ in range(10)]
        assert losses[9] < losses[6] < losses[3] < losses[0], losses
        learner.policy.save(tmp_path / "saved")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        with torch.no_grad():
            ours, theirs = (model(batch.tokens, use_cache=False).logits
                            for model in (learner.policy.model, loaded))
        assert torch.allclose(ours, theirs, atol=1e-4)

    @pytest.mark.parametrize("more", [
        "", "--lora-rank 4", "--algo ppo --activation-checkpointing true",
        "--context limited --window 2", "--context single_turn --window 2"], ids=[
        "grpo", "LoRA", "critic, activation checkpointing", "windows", "single turns"])
    def test_a_killed_run_goes_on_bit_for_bit_and_samples_no_wrong_token(
            self, name, more, options, runs, monkeypatch):
        """One token that is wrong by a tenth of a nat would raise the mean gap over 1e-4."""
        assert_resumed_alike(runs, monkeypatch, [
            *options, *shlex.split(f"--steps 2 --save-every 1 --kl-coef 0.1 {more}")])
        assert all(line["logprob_gap"] < 1e-4 for line in metrics(runs / "straight")
                   if "logprob_gap" in line)

    def test_plain_plays_the_same_trajectories(self, name, options):
        """With fewer rows than episodes the scheduler plays, where rows move on by themselves."""
        both = [played(*options, "--max-rows", "5", "--plain", plain)[-1]
                for plain in ("true", "false")]
        assert torch.equal(both[0].tokens, both[1].tokens)
        assert torch.allclose(both[0].sample_logprobs, both[1].sample_logprobs, atol=1e-4)

    def test_two_processes_end_with_the_metrics_of_one(self, name, options, runs):
        line = [*options, "--steps", "2", "--save-every", "2"]
        run("--run one", *line)
        assert several(2, lambda: start.main(["--run", "two", *line])) == [None, None]
        for one, two in zip(metrics(runs / "one"), metrics(runs / "two"), strict=True):
            assert one == pytest.approx(two, rel=1e-2, abs=1e-3)
