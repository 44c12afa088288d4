"""The forecast of memory, computed for models without weights: the tables of the pages, and what is
counted once, for each process or not at all. long/test_memory.py measures the peaks."""

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import message

from lab import pictures
from minragen.config import from_options
from minragen.fast import head, sampling
from minragen.models import Critic, Policy
from minragen.run import memory, start
from minragen.train import World

DOCS = Path(__file__).parent.parent / "docs"

ARCHITECTURES = {name: pictures.ARCHITECTURES[name]
                 for name in ("Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen2.5-3B")} | {
                 "Qwen2.5-7B": (152064, 3584, 18944, 28, 28, 4, False)}


def large(name):
    """A bfloat16 model of ARCHITECTURES without memory for its weights."""
    return pictures.without_weights(*ARCHITECTURES[name], llama=not name.startswith("Qwen"))


def forecast_of_large(name, algo="grpo", **options):
    """(parameters, {phase: {what: bytes}}) with pretrained models' preset and these options."""
    policy = Policy(name, large(name), None, output_layer=head.output_layer,
                    token_logprobs=head.token_logprobs)  # as on a GPU
    learner = SimpleNamespace(
        policy=policy, world=World(), critic=Critic(policy) if algo == "ppo" else None,
        reference=large(name).requires_grad_(False) if "kl_coef" in options else None)
    config = from_options(dict(env="frozenlake", model=f"hub/{name}", algo=algo, **options))
    return policy.model.num_parameters(), memory.phases(learner, config)


def sums(phases):
    """{phase: bytes} and the peak, which is what is always held and the largest phase."""
    sizes = {phase: sum(parts.values()) for phase, parts in phases.items()}
    return sizes, sizes["always"] + max(sizes[phase] for phase in sizes if phase != "always")


def numbers_of(page, row):
    """The numbers in the cells of the table's row that begins so."""
    (line,) = [x for x in (DOCS / page).read_text().splitlines() if x.startswith(f"| {row} |")]
    return [float(cell.replace(",", "").rstrip("B ")) for cell in line.split("|")[2:]
            if re.fullmatch(r" [\d,.]+B? ", cell)]


class TestParts:
    def test_a_process_holds_its_share_of_slots_and_validation_may_need_most(self, monkeypatch):
        def slots(**options):
            return forecast_of_large("Qwen2.5-0.5B", **options)[1]["rollout"]["KV slots"]

        few, many = (slots(num_groups=2, group_size=2, val_size=n) for n in (1, 16))
        assert many == 4 * few
        monkeypatch.setattr(World, "size", 2)
        assert slots(num_groups=2, group_size=2, val_size=16) == many / 2


    def test_slots_that_stay_on_a_gpu_are_always_held(self):
        policy = Policy("x", large("Qwen2.5-0.5B"), None, regather=sampling.regather)
        learner = SimpleNamespace(policy=policy, reference=None, critic=None, world=World())
        found = memory.phases(learner, from_options(dict(env="frozenlake", model="hub/x")))
        assert found["always"]["KV slots kept"] == found["rollout"]["KV slots"] > 0


class TestLine:
    def test_more_than_the_device_has_is_told_with_what_helps(self, monkeypatch):
        policy = Policy("x", large("Qwen2.5-0.5B"), None)
        learner = SimpleNamespace(policy=policy, reference=None, critic=None, world=World())
        for options, helps in (({}, "--token-budget"), (dict(token_budget=512), "--max-rows")):
            config = from_options(dict(env="frozenlake", model="hub/x", **options))
            for there, said in ((2**60, 1), (2**30, 2)):
                monkeypatch.setattr(os, "sysconf", lambda name, there=there: (
                    there if name == "SC_PHYS_PAGES" else 1))
                lines = memory.forecast(learner, config).split("\n")
                assert len(lines) == said
            before = peak(learner, config)
            told = re.findall(r"--([a-z-]+) (\w+) saves ([\d,]+) MiB", lines[1])
            assert helps in lines[1] and len(told) == 2 + (options == {})  # the others save nothing
            for option, value, saved in told:
                changes = {option.replace("-", "_"): value == "true" or int(value)}
                after = (peak(learner, config, True) if option == "lora-rank" else
                         peak(learner, dataclasses.replace(config, **changes)))
                assert (before - after) / 2**20 == pytest.approx(int(saved.replace(",", "")), abs=1)

    def test_a_card_that_is_full_ends_a_run_with_what_helps(self, runs, monkeypatch):
        def train(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        monkeypatch.setattr(start, "train", train)
        said = message("--env", "bandit", "--warmup-steps", "0")
        assert said.startswith("error: cpu is out of memory. By the forecast ")
        assert said.count(" saves ") == 3


def peak(*given):
    return sums(memory.phases(*given))[1]


class TestPages:
    @pytest.mark.parametrize("row, options", [
        ("`--token-budget 4096`", dict(token_budget=4096)),
        ("the preset, `--token-budget 8192`", {}),
        ("`--activation-checkpointing true`", dict(activation_checkpointing=True)),
        ("`--token-budget 4096`, `--kl-coef 0.001`: a reference model",
         dict(token_budget=4096, kl_coef=0.001)),
        ("`--algo ppo`, checkpointing, `--max-rows 128`: a critic",
         dict(algo="ppo", activation_checkpointing=True, max_rows=128))])
    def test_the_recipe_for_a_gpu_has_the_forecasts_of_its_options(self, row, options):
        _, peak = sums(forecast_of_large("Qwen2.5-0.5B", **options)[1])
        assert numbers_of("performance.md", row) == pytest.approx([peak / 1e9], abs=0.06)

    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_the_table_of_what_fits_has_the_forecasts_and_the_smallest_card(self, name):
        n, phases = forecast_of_large(name, activation_checkpointing=True)
        sizes = [x / 1e9 for x in (n, 18 * n, 38 * n, sums(phases)[1])]
        cards = [card for card in (24, 48, 80, 141) if sizes[-1] < card]
        assert numbers_of("performance.md", name) == pytest.approx([*sizes, *cards[:1]], 4e-4, 0.06)
