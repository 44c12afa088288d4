"""The forecast of memory beside what PyTorch's profiler counts on a CPU: every allocation and
release of a tensor's memory, inside operations too, and nothing of the interpreter."""

import functools
import gc
import tempfile
from itertools import accumulate

import pytest
import torch
from conftest import parsed
from torch.profiler import ProfilerActivity, profile
from toys import tiny
from transformers import LlamaConfig, LlamaForCausalLM

from minragen import train
from minragen.models import AdamW
from minragen.run import memory, start
from minragen.trajectory import make_batch

MODELS = {"tiny": None,  # and random ones of so many parameters
          "10M": dict(vocab_size=8192, hidden_size=256, intermediate_size=1024,
                      num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2),
          "60M": dict(vocab_size=32000, hidden_size=512, intermediate_size=2048,
                      num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4)}
# Untrained replies are as long as they may be, so these conversations fill their context.
RUN = dict(env="frozenlake", num_groups=2, val_size=1, max_new_tokens=24,
           max_context=408, warmup_steps=0, filter="none", device="cpu")
SHORT = dict(num_groups=1, group_size=4, mini_batch=2, token_budget=160)  # one row at a time
SIZES = {"tiny": dict(group_size=16, token_budget=1200, mini_batch=16), "10M": SHORT,
         "60M": SHORT | dict(max_new_tokens=45, max_turns=2)}  # which fills its context


@functools.cache
def folder_of(size):
    """A temporary folder with a model of MODELS."""
    folder, policy = tempfile.TemporaryDirectory(), tiny()[0]
    model = policy.model if size == "tiny" else LlamaForCausalLM(LlamaConfig(
        **MODELS[size], max_position_embeddings=512, tie_word_embeddings=True))
    model.save_pretrained(folder.name)
    policy.tokenizer.save_pretrained(folder.name)
    return folder


def begun(size, **options):
    """(learner, its groups, its Config) as `train` has them at step 1, with a model of MODELS."""
    options = RUN | SIZES[size] | dict(model=folder_of(size).name) | options
    config = parsed(*(f"--{name.replace('_', '-')}={x}" for name, x in options.items()))
    groups = start.build_groups(config)
    return start.build_learner(config, groups, say=str), groups, config


def allocated(function):
    """(the most bytes that were held at a time, the function's result)"""
    gc.collect()  # else the learner of an earlier test may be released while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in
                   found.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(size for _, size in sizes)), result


def forecast_of(learner, config):
    return {name: sum(parts.values()) for name, parts in memory.phases(learner, config).items()}


@functools.cache
def rollout_of(size):
    """(bytes of the forecast, of the profiler, the batch)"""
    learner, groups, config = begun(size)
    peak, trajectories = allocated(lambda: train.roll_out(learner, groups["train"], config))
    return forecast_of(learner, config)["rollout"], peak, make_batch(trajectories)


def check_update(size, dtype=torch.float32, **options):
    """The measured peak of an update, which the forecast must meet, as it must what is held."""
    learner, _, config = begun(size, **options)
    learner.optimizer = AdamW(learner.policy.model.to(dtype).parameters(), config.lr)
    held = 0
    for model, (_, optimizer) in zip((learner.policy.model, learner.critic), learner.optimizers()):
        for master in optimizer.masters:
            master.grad = torch.zeros_like(master)
        optimizer.step(1.0)  # makes Adam's moments
        held += sum(x.nbytes for x in (
            *model.parameters(), *(master for _, master in optimizer.copies),
            *(x for state in optimizer.inner.state.values() for x in state.values())))
    batch = rollout_of(size)[2].take(torch.arange(config.mini_batch))
    peak, _ = allocated(lambda: train.update(
        learner, train.compute_targets(learner, batch, config)[0], config, step=1))
    assert forecast_of(learner, config)["update"] == pytest.approx(peak, rel=0.2)
    assert forecast_of(learner, config)["always"] == pytest.approx(held, rel=0.01)
    return peak


class TestForecast:
    @pytest.mark.parametrize("size", MODELS)
    def test_a_rollout_is_within_a_fifth_of_the_measured_peak(self, size):
        forecast, peak, _ = rollout_of(size)
        assert forecast == pytest.approx(peak, rel=0.2)

    @pytest.mark.parametrize("size, algo", [
        ("tiny", "grpo"), ("tiny", "ppo"), ("10M", "ppo"), ("60M", "grpo")])
    def test_an_update_is_too_and_checkpointing_lowers_both(self, size, algo):
        plain, less = (check_update(size, algo=algo, activation_checkpointing=again)
                       for again in (False, True))
        assert less < 0.8 * plain

    @pytest.mark.parametrize("rank", [0, 8])
    def test_it_counts_the_float32_masters_of_bfloat16_weights(self, rank):
        if rank:
            pytest.importorskip("peft")
        check_update("tiny", torch.bfloat16, lora_rank=rank, algo="grpo", max_turns=2)


class TestLora:
    def test_an_update_needs_less_and_the_weights_are_held_once(self):
        pytest.importorskip("peft")
        peaks, held = [], []
        for more in ({}, dict(lora_rank=16)):
            for again in (False, True):
                options = dict(algo="grpo", max_turns=2, activation_checkpointing=again, **more)
                peaks.append(check_update("10M", **options))  # within a fifth of the forecast
            learner, _, config = begun("10M", **options)
            held.append(forecast_of(learner, config)["always"])
        assert peaks[2] < 0.7 * peaks[0] and peaks[3] < 0.7 * peaks[1]
        assert held[1] < 0.5 * held[0]
