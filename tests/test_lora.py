"""LoRA: what is adapted, what is shared, what is trained, what is stored."""

import copy
import shlex
import shutil
import sys

import pytest
import torch
from conftest import message
from test_bundled import groups_of
from test_distributed import LOTTERY
from test_families import CONTEXT, family
from test_models import ragged
from test_train import build, played, updated
from toys import tiny
from training import assert_resumed_alike, run
from transformers import AutoModelForCausalLM

from minragen import eval as evaluation
from minragen import train as trainer
from minragen.models import Policy
from minragen.more import lora
from minragen.run import bundled, memory, start
from minragen.run.load import load_policy
from minragen.run.proof import prove

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("runs")
LORA = [*LOTTERY, "--lora-rank", "4"]


def adapted(policy):
    """The policy with adapters that change it."""
    lora.add_adapters(policy, 4, 0)
    for weight in lora.trained(policy.model).values():
        weight.normal_(0, 0.05)
    return policy


def layers(model):
    """{name: adapted layer}"""
    return {name: x for name, x in model.named_modules() if hasattr(x, "get_delta_weight")}


@torch.no_grad()
def logits(model):
    return model(ragged()[0], use_cache=False).logits


class TestAdapters:
    @pytest.mark.parametrize("name", ["Llama", "Qwen3.5", "LFM3", "Granite 4 H"])
    def test_all_linear_layers_but_the_output_layer_get_adapters_of_no_effect_yet(self, name):
        """Not convolutions, decays, time steps. A trained policy without them is the old model."""
        fresh, trained, before = (family(name) for _ in range(3))
        lora.add_adapters(fresh, 4, 0)
        adapted(trained)
        plain = {path for path, x in fresh.base.named_modules() if isinstance(x, torch.nn.Linear)}
        assert layers(fresh.model).keys() == plain - {"lm_head"}
        for same in (fresh.model, fresh.base, trained.base):
            assert torch.equal(logits(same), logits(before.model))
        assert not torch.equal(logits(trained.model), logits(before.model))

    @pytest.mark.parametrize("name", ["Qwen2", "Gemma 2", "Phi-3, window", "GPT-2", "Qwen3-MoE",
                                      "DeepSeek V2", "gpt-oss", "Qwen3.5", "LFM3", "Granite 4 H"])
    def test_adapted_families_are_proved_and_merged(self, name, tmp_path):
        """Biases, capped logits, joint and transposed matrices, experts in one tensor, states."""
        policy = adapted(family(name))
        assert "equal a full pass" in prove(policy, CONTEXT)
        policy.save(tmp_path)
        ours, merged = logits(policy.model), logits(load_policy(tmp_path).model)
        assert (ours - merged).abs().mean() < 1e-6 * ours.abs().max()
        assert (ours - logits(policy.base)).abs().mean() > 0.01

    def test_in_bfloat16_adapters_have_float32_masters_and_nothing_else_has(self):
        policy = Policy("tiny", copy.deepcopy(tiny()[0].model).to(torch.bfloat16), None)
        optimizer = trainer.AdamW(adapted(policy).model.parameters(), 1e-3)
        assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
        assert len(optimizer.masters) == len(optimizer.copies) == 2 * len(layers(policy.model))


class TestSharing:
    def test_policy_critic_and_reference_share_frozen_weights_and_adapters_and_head_move(self):
        config, learner, batch = played(*LORA, "--algo", "ppo", "--kl-coef", "0.1", "--filter",
                                        "none")
        models = learner.policy.model, learner.critic, learner.reference.model
        policy, critic, reference = ({p.data_ptr(): p.requires_grad for p in model.parameters()}
                                     for model in models)
        assert policy.keys() & critic.keys() == reference.keys() and not any(reference.values())
        _, moved = updated(config, learner, batch, *models)
        assert all(".lora_" in name for name in moved[0]) and moved[2] == set()
        assert all(".lora_" in name or name.startswith("head.") for name in moved[1])
        assert moved[0] and {"head.weight"} < moved[1]
        assert all(p.grad is None for p in learner.reference.model.parameters())

    def test_the_forecast_has_the_weights_once_and_adams_moments_of_the_adapters(self):
        both = [build(*options, "--algo", "ppo", "--kl-coef", "0.1") for options in (LOTTERY, LORA)]
        full, thin = (memory.phases(learner, config) for config, learner, _ in both)
        adapters = 4 * sum(x.numel() for x in lora.trained(both[1][1].policy.model).values())
        assert thin["always"]["weights"] < full["always"]["weights"] / 3 + 2 * adapters + 300
        assert thin["always"]["Adam"] == 4 * adapters + 8 * 65
        assert thin["update"]["gradients"] < full["update"]["gradients"] / 5


class TestRuns:
    def test_without_peft_and_with_a_negative_rank_it_is_refused(self, monkeypatch):
        assert "lora_rank: got -1, expected at least 0" in message(*LORA, "--lora-rank", "-1")
        monkeypatch.setitem(sys.modules, "peft", None)
        assert message(*LORA).endswith("--lora-rank needs a package: pip install 'peft>=0.21'")

    def test_a_killed_run_goes_on_bit_for_bit(self, runs, monkeypatch):
        options = [*LORA, *shlex.split("--algo ppo --kl-coef 0.1 --steps 2 --save-every 1 --epochs "
                                       "2 --filter none --num-groups 2")]
        assert_resumed_alike(runs, monkeypatch, options)
        stored = torch.load(runs / "stopped" / "checkpoint" / "trainer.pt", weights_only=True)
        assert all(".lora_" in name for name in stored["adapters"])
        assert all(".lora_" in name or name.startswith("head.")
                   for name in stored["critic"]["model"])

    def test_its_checkpoint_is_a_plain_folder_with_merged_weights(self, runs, monkeypatch, capsys):
        """Without peft it is loaded, evaluated, trained on; with peft it may be adapted again."""
        learners, real = [], start.build_learner
        with monkeypatch.context() as patch:
            patch.setattr(start, "build_learner", lambda *given: (
                learners.append(real(*given)), learners[0])[1])
            run("--run a --steps 2", *LORA, "--lr", "0.01")
        ours = logits(learners[0].policy.model)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "peft", None)
            theirs = AutoModelForCausalLM.from_pretrained(runs / "a/checkpoint",
                                                          dtype=torch.float32)
            assert (ours - logits(theirs)).abs().mean() < 1e-6
            assert (ours - logits(learners[0].policy.base)).abs().mean() > 1e-3
            assert not list((runs / "a/checkpoint").glob("adapter*"))
            evaluation.main(["--run", "a", "--size", "4"])
            assert "checkpoint, greedy" in capsys.readouterr().out
            run("--run b --steps 1 --init-from a", *LOTTERY, "--lr", "0")
        run("--run c --steps 1 --init-from a", *LORA, "--lr", "0")
        weights = {(runs / name / "checkpoint/model.safetensors").read_bytes() for name in "abc"}
        assert len(weights) == 1
        shutil.rmtree(runs / "a")  # its weights are stored with the run that began with them
        run("--run c --resume --steps 2")


class TestWarmUp:
    def test_a_pretrained_warm_up_trains_adapters_and_keeps_their_sum(self, tmp_path, monkeypatch):
        """So it takes no more memory than the run. The folder is an ordinary one."""
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path / "cache"))
        bundled.save_folder(tiny("bandit")[0], tmp_path / "model")
        made = [bundled.resolve(str(tmp_path / "model"), groups_of("bandit"), steps=3,
                                lora_rank=rank, say=str) for rank in (0, 4, 8)]
        assert len(set(made)) == 3
        before, *after = (load_policy(folder).model.state_dict()
                          for folder in (tmp_path / "model", *made))
        moved = [{name for name in before if not torch.equal(before[name], state[name])}
                 for state in after]
        assert moved[0] == set(before) and moved[1] == moved[2]
        assert all(".self_attn." in name or ".mlp." in name for name in moved[1])
        for name in moved[1]:
            ranks = [int(torch.linalg.matrix_rank(state[name] - before[name], rtol=1e-3))
                     for state in after[1:]]
            assert ranks[0] <= 4 < ranks[1] <= 8
