"""How tokens become logprobs, what the optimizer keeps, and how a policy is loaded."""

import collections
import contextlib
import copy
import functools
import itertools
import pathlib

import pytest
import torch
from conftest import message
from safetensors.torch import load_file, save_file
from test_families import family
from toys import tiny
from training import changed
from transformers import GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from minragen import models
from minragen.cache import KVSlots, hidden_before
from minragen.fast.policies import faster
from minragen.models import AdamW, Critic, Policy, token_logprobs
from minragen.run import bundled
from minragen.run.load import load_policy
from minragen.run.memory import checkpoint_activations


def ragged():
    """Tokens and a response mask; nothing was sampled in one of the rows."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (5, 24), generator=rng)
    mask = torch.rand(5, 24, generator=rng) < 0.3
    mask[:, 0] = mask[3] = False
    return tokens, mask


class TestLogprobs:
    """That they equal a plain full pass: test_attention.py."""

    def test_chunks_change_no_value_and_no_gradient_and_padding_costs_nothing(self, monkeypatch):
        """Only response positions go through the output layer, in the second round in threes."""
        model, (tokens, mask) = copy.deepcopy(tiny()[0].model), ragged()
        pad = functools.partial(torch.nn.functional.pad, pad=(0, 17))
        results, seen = [], []
        model.get_output_embeddings().register_forward_hook(
            lambda module, args, out: seen.append(out.shape[:-1].numel()))
        for budget, inputs in ((2**24, (tokens, mask)),
                               (3 * model.config.vocab_size, (pad(tokens, value=7), pad(mask)))):
            monkeypatch.setattr(models, "LOGIT_BUDGET", budget)
            logprobs, entropy = token_logprobs(model, *inputs)
            (logprobs.sum() + entropy.sum()).backward()
            results.append([logprobs.detach()[:, :24], *(p.grad for p in model.parameters())])
            model.zero_grad()
        n = int(mask.sum())
        assert seen[0] == n and max(seen[1:]) == 3 and sum(seen[1:]) == 2 * n
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*results))

    @pytest.mark.parametrize("bias", [True, False])
    def test_of_bfloat16_weights_only_the_states_are_rounded(self, bias):
        """Logits and logprobs are those of the same states and weights in float32."""
        policy, (tokens, mask) = copy.deepcopy(tiny()[0]), ragged()
        model, V = policy.model.bfloat16(), policy.model.config.vocab_size
        layer = model.get_output_embeddings()
        if bias:
            layer.bias = torch.nn.Parameter(torch.linspace(-1, 1, V, dtype=torch.bfloat16))
        hidden = hidden_before(model.base_model, tokens, mask)
        exact = torch.nn.functional.linear(hidden.float(), layer.weight.float(),
                                           layer.bias.float() if bias else None)
        assert not layer(hidden).float().equal(exact)
        assert models.output_layer(model, hidden).equal(exact)
        log_p = (exact / 0.7).log_softmax(-1)
        logprobs, entropy = token_logprobs(model, tokens, mask, 0.7)
        assert logprobs[mask].equal(log_p.gather(-1, tokens[mask][:, None])[:, 0])
        assert {x.dtype for x in (entropy, Critic(policy)(tokens, mask))} == {torch.float32}
        exact.sum().backward()
        assert layer.weight.grad is not None


class TestCritic:
    def test_its_values_are_0_at_first_so_that_advantages_are_plain_returns(self):
        """That a value is read before its token is seen: test_attention.py."""
        assert not Critic(tiny()[0])(*ragged()).any()


class TestCheckpointing:
    @pytest.mark.parametrize("name", ["GPT-2", "Qwen3.5", "LFM3", "Granite 4 H"])
    def test_layers_are_computed_again_with_equal_gradients(self, name):
        """Three keep states. GPT-2's configuration has dropout, which transformers' own switch
        would turn on. That it takes less memory: long/test_memory.py."""
        critic, (tokens, mask) = Critic(family(name)), ragged()
        critic.head.weight.data.normal_()
        calls, measured, gradients = [], [], []
        for module in critic.modules():
            if isinstance(module, GradientCheckpointingLayer):
                next(module.children()).register_forward_pre_hook(lambda *_: calls.append(1))
        for prepare in (lambda module: None, checkpoint_activations):
            prepare(critic)
            calls.clear()
            total = critic(tokens, mask).square().sum()
            forward = len(calls)
            gradients.append(torch.autograd.grad(total, critic.parameters()))
            measured.append((forward, len(calls)))
        assert measured == [(4, 4), (4, 8)]
        torch.testing.assert_close(*gradients)


class TestAttention:
    """--attention: the learner computes whole rows with an attention of transformers."""

    def test_eager_attention_gives_our_logprobs(self, tmp_path):
        bundled.save_folder(tiny()[0], tmp_path)
        ours, eager = (faster(load_policy(tmp_path), name) for name in ("", "eager"))
        (tokens, mask), used, config = ragged(), [], eager.model.config
        eager.model.base_model.norm.register_forward_hook(lambda module, args, out: used.append(
            (config._attn_implementation, out[..., 0].numel())))
        torch.testing.assert_close(eager.logprobs(tokens, mask), ours.logprobs(tokens, mask),
                                   atol=1e-5, rtol=1e-5)
        assert used == [("eager", tokens.numel())]
        assert eager.last_hidden == ours.last_hidden  # a rollout's

    def test_a_rollout_keeps_the_usual_one_whatever_the_model(self):
        """Another one may not take the masks of a rollout."""
        policy, used = faster(family("Gemma 2"), "eager"), []
        config, usual = policy.model.config, policy.model.usual_attention
        policy.model.base_model.register_forward_pre_hook(
            lambda *_: used.append(config._attn_implementation))
        config._attn_implementation = "flash_attention_2"
        policy.extend(KVSlots(policy.model, 1, 4), torch.ones(1, 2, dtype=int), torch.tensor([2]))
        assert used == [usual] and config._attn_implementation == "flash_attention_2"

    @pytest.mark.parametrize("name", ["flash_attention_2", "flash"])
    def test_one_that_cannot_be_had_is_refused_before_there_is_a_folder(self, name, runs):
        said = message("--env", "bandit", "--warmup-steps", "0", "--attention", name)
        assert f"error: model 'tiny' cannot use attention '{name}': " in said
        assert not runs.exists()


class TestOptimizer:
    def test_small_updates_and_small_gradients_are_not_lost_on_bfloat16_weights(self):
        """In bfloat16 an update of 1e-5 is rounded away, and a sum of ones ends at 256."""
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = AdamW([p], lr=1.0, weight_decay=0.0)
        optimizer.set_lr(1e-5)
        for _ in range(500):
            p.sum().backward()
            optimizer.step(10.0)
        assert p.dtype == torch.bfloat16 and (p.float() - 0.995).abs().max() < 2e-3
        for _ in range(300):
            p.sum().backward()
        assert float(optimizer.step(1e9)) == 600.0 and optimizer.masters[0].grad is None

    def test_its_state_restores_it_exactly(self):
        def run(optimizers, steps):
            for step, optimizer in itertools.product(steps, optimizers):
                optimizer.parameters[0].mul(0.1 * (step + 1)).sum().backward()
                optimizer.step(1.0)

        p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        straight = AdamW([p], lr=1e-3)
        run([straight], range(3))
        q = torch.nn.Parameter(p.detach().clone())
        restored = AdamW([q], lr=1e-3)
        restored.load_state_dict(copy.deepcopy(straight.state_dict()))
        run([straight, restored], range(3, 6))
        assert torch.equal(p, q) and torch.equal(straight.masters[0], restored.masters[0])


def saved(folder, file="config.json", **changes):
    """Save tiny in a folder, with changes of one of its files."""
    bundled.save_folder(tiny()[0], folder)
    changed(folder / file, **changes)


class TestLoading:
    @pytest.mark.parametrize("change, problem", [
        (lambda name, x: {name.replace("model.norm", "model.nrom"): x},
         "1 missing, e.g. model.norm.weight; 1 unexpected, e.g. model.nrom.weight"),
        (lambda name, x: {name: x, "v_head.weight": x[:1]}, "1 unexpected, e.g. v_head.weight"),
        (lambda name, x: {name: x[1:] if "norm" in name else x}, "mismatched, e.g. .*norm.weight"),
        (lambda name, x: {name: x, "model.layers.0.self_attn.rotary_emb.inv_freq": x[:1]}, "")],
        ids=["one renamed", "a value head", "other sizes", "an old file's buffer"])
    def test_weights_that_do_not_fit_are_refused_by_name(self, change, problem, tmp_path):
        """transformers leaves what is missing random, and says so at a level that we hide."""
        policy, file = tiny()[0], tmp_path / "model.safetensors"
        bundled.save_folder(policy, tmp_path)
        changed = [change(name, x) for name, x in load_file(file).items()]
        save_file({k: v.clone() for k, v in collections.ChainMap(*changed).items()}, file)
        with pytest.raises(ValueError, match=problem) if problem else contextlib.nullcontext():
            load_policy(tmp_path)

    def test_a_tokenizer_may_write_no_token_beyond_the_vocabulary(self, tmp_path):
        """Special tokens that the chat template does not write are never encoded."""
        size = len(tiny()[0].tokenizer)
        for special, template in ((False, ""), (True, "{{ '<more>' }}"), (True, "")):
            tokenizer = copy.deepcopy(tiny()[0].tokenizer)
            folder = tmp_path / f"{special}{template[:1]}"
            tokenizer.add_tokens(["<more>"], special_tokens=special)
            tokenizer.chat_template += template
            bundled.save_folder(Policy("", tiny()[0].model, tokenizer), folder)
            with (pytest.raises(ValueError, match=f"vocabulary of {size}: <more>")
                  if template or not special else contextlib.nullcontext()):
                load_policy(folder)

    def test_a_folder_without_tokenizer_files_is_refused(self, tmp_path):
        """transformers makes one of a few tokens of the named class, and every prompt is empty."""
        saved(tmp_path, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(ValueError, match="reads 'a' as '': its files are missing or broken"):
            load_policy(tmp_path)

    def test_checkpoints_advise_no_top_k_or_penalty_of_the_original(self, tmp_path):
        saved(tmp_path / "given", "generation_config.json", do_sample=True, top_k=20, top_p=0.8,
              repetition_penalty=1.1, eos_token_id=[2, 1], pad_token_id=-1)
        load_policy(tmp_path / "given").save(tmp_path / "written")
        found = GenerationConfig.from_pretrained(tmp_path / "written")
        advice = found.do_sample, found.top_k, found.top_p, found.repetition_penalty
        assert (advice, found.eos_token_id) == ((None,) * 4, [2, 1])

    @pytest.mark.parametrize("change", [
        {"attn_implementation": "somebody/kernel"}, {"_attn_implementation": "somebody/kernel"}])
    def test_a_folder_names_no_kernel_to_fetch(self, change, tmp_path):
        saved(tmp_path, **change)
        assert load_policy(tmp_path).model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("file, changes", [
        ("config.json", {"model_type": "evil", "auto_map": {
            "AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}),
        ("tokenizer_config.json", {"tokenizer_class": "Words", "auto_map": {
            "AutoTokenizer": [None, "evil.Words"]}})])
    def test_no_python_in_folders_is_run_or_asked_about(self, file, changes, tmp_path, monkeypatch):
        """transformers asks on the terminal whether to run it."""
        saved(tmp_path, file, **changes)
        proof = tmp_path / "it ran"
        (tmp_path / "evil.py").write_text(
            "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
            f"open({str(proof)!r}, 'w')\n"
            "class Config(LlamaConfig): model_type = 'evil'\n"
            "class Model(LlamaForCausalLM): pass\nclass Words(PreTrainedTokenizerFast): pass\n")
        asked = []
        monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
        with contextlib.suppress(ValueError):  # a tokenizer may load as the plain class
            load_policy(tmp_path)
        assert not proof.exists() and not asked

    def test_pickled_weights_run_nothing(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return pathlib.Path.touch, (tmp_path / "it ran",)

        bundled.save_folder(tiny()[0], tmp_path)
        (tmp_path / "model.safetensors").unlink()
        torch.save({"model.norm.weight": Evil()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match="cannot load model"):
            load_policy(tmp_path)
        assert not (tmp_path / "it ran").exists()
        torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
        assert (tmp_path / "it ran").exists()

    def test_a_name_that_is_no_model_is_refused_with_what_to_do(self, monkeypatch, tmp_path):
        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        for name, problem in (("smollm2", "make smollm2"),
                              (f"{tmp_path}/typo", "/typo': there is no such folder. Give a")):
            with pytest.raises(ValueError, match=problem):
                load_policy(bundled.resolve(name, None))

    def test_the_model_is_chosen_by_what_the_machine_has(self, monkeypatch, tmp_path):
        def chosen(gpu, *asked):
            monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
            name, device, why = bundled.choose_model(*asked)
            assert f"on {device} ({'H200' if gpu else 'no GPU found'})" in why and name in why
            return name, str(device)

        monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
        assert chosen(True) == ("tiny", "cuda")  # smollm2 is not there yet
        (tmp_path / "smollm2").mkdir()
        (tmp_path / "smollm2" / "config.json").touch()
        assert chosen(False) == chosen(True, "", "cpu") == ("tiny", "cpu")
        assert chosen(True) == ("smollm2", "cuda")
        assert chosen(True, "a/b", "cuda:1") == ("a/b", "cuda:1")
