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

    @pytest.mark.parametrize("size, options", [
        ("tiny", dict(algo="grpo")), ("tiny", dict(algo="ppo")), ("10M", dict(algo="ppo")),
        ("10M", dict(algo="grpo", lora_rank=16, max_turns=2)), ("60M", dict(algo="grpo"))], ids=str)
    def test_an_update_is_too_and_checkpointing_lowers_both(self, size, options):
        if "lora_rank" in options:
            pytest.importorskip("peft")
        plain, less = (check_update(size, activation_checkpointing=again, **options)
                       for again in (False, True))
        assert less < 0.8 * plain

    @pytest.mark.parametrize("rank", [0, 8])
    def test_it_counts_the_float32_masters_of_bfloat16_weights(self, rank):
        if rank:
            pytest.importorskip("peft")
        check_update("tiny", torch.bfloat16, lora_rank=rank, algo="grpo", max_turns=2)
