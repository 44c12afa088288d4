"""The learner computes rows' common prefixes once, with the numbers of full passes."""

import dataclasses
import functools
import itertools
import random
import shlex
from types import SimpleNamespace

import pytest
import torch
import transformers
from test_families import family
from test_train import played
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from minragen import cache, models
from minragen import train as trainer
from minragen.fast import flash, graphs, head, llama, policies, prefix_tree
from minragen.fast.llama import attend_to
from minragen.fast.policies import faster
from minragen.fast.prefix_tree import hidden_before
from minragen.models import Critic
from minragen.run.proof import prove

pytestmark = pytest.mark.usefixtures("runs")
LEAN = ["Llama", "Llama 3", "Mistral, window", "Qwen2", "Qwen2, windows", "Qwen3"]


def related_rows(seed):
    """Padded rows that begin like earlier ones, a mask, and the rows' lengths.

    Some rows are equal, some are the beginning of another, some have no masked token.
    """
    rng, rows = random.Random(seed), [[5] * 9]
    for _ in range(rng.randint(2, 9)):
        like = rng.choice(rows)
        rows.append(like[:rng.randint(1, len(like))] + rng.choices(range(9), k=rng.choice(
            [0, 1, 7, 30])))
    masks = [[p > 0 and rng.random() < share for p in range(len(row))]
             for row, share in zip(rows, rng.choices([0, 0.3, 1], k=len(rows)))]
    masks[0][-1] = True
    lengths, longest = torch.tensor([len(row) for row in rows]), max(map(len, rows))
    return (torch.tensor([row + [7] * (longest - len(row)) for row in rows]),
            torch.tensor([m + [False] * (longest - len(m)) for m in masks]), lengths)


class TestPrefixTree:
    @pytest.mark.parametrize("most", [30, 99, 400, 2**18])
    def test_a_part_has_few_pairs_and_the_last_layer_only_the_queries_that_are_read(
            self, most, monkeypatch):
        """A part is full with the row that exceeds `most`, which is what PAIRS has."""
        decoder = family("Llama").model.base_model
        monkeypatch.setitem(prefix_tree.PAIRS, "cpu", most)
        for seed in range(50):
            tokens, mask, _ = related_rows(seed)
            tree = prefix_tree.PrefixTree(decoder, tokens, mask)
            read = {(*row[:place],) for row, masked in zip(tokens.tolist(), mask)
                    for place in masked.nonzero()[:, 0].tolist()}
            for (parts, _), queries in ((tree._parts, tree.tokens), (tree._last_parts, read)):
                assert sum(len(part.real) for part in parts) == len(queries)
                for part in parts:
                    (n, q), keys = part.queries.shape, part.masks.eq(0)[:, 0, -1].sum(dim=-1)
                    assert n == 1 or (n - 1) * q * keys[:-1].max() <= most
                    assert n * q * keys.max() > most or part is parts[-1]

    @pytest.mark.parametrize("name, way", [
        *((name, "") for name in LEAN), ("Mistral, window", "segments"),
        ("Qwen2, windows", "segments"), ("Qwen3", "segments")])
    def test_logprobs_values_and_gradients_are_those_of_a_plain_full_pass(
            self, name, way, float64, monkeypatch, request):
        if way:
            request.getfixturevalue(way)
        policy = family(name)
        assert (policy.last_hidden, policy.hidden_before) == (llama.last_hidden, hidden_before)
        for p in policy.model.double().parameters():
            if p.dim() == 1:  # norms, and the biases that are 0 at first
                p.data.normal_(1.0, 0.5)
        for module in policy.model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 0.01
        critic = Critic(policy)
        critic.head.weight.data.normal_()
        for seed in range(8):
            monkeypatch.setitem(prefix_tree.PAIRS, "cpu", 99 if seed % 3 else 2**18)
            tokens, mask, _ = related_rows(seed)
            log_p = (policy.model(tokens, use_cache=False).logits[:, :-1] / 0.7).log_softmax(-1)
            expected = (log_p.gather(-1, tokens[:, 1:, None])[..., 0],
                        torch.special.entr(log_p.exp()).sum(dim=-1),
                        critic.head(critic.trunk(tokens, use_cache=False).last_hidden_state[
                            :, :-1])[..., 0])
            ours = (*policy.logprobs(tokens, mask, 0.7), critic(tokens, mask))
            for module, x, full in zip((policy.model, policy.model, critic), ours, expected):
                plain = torch.where(mask[:, 1:], full, 0.0)
                assert x.dtype == torch.float64 and torch.allclose(x[:, 1:], plain, 1e-9, 1e-9)
                weights = torch.randn(plain.shape)
                one, other = (torch.autograd.grad((y * weights).sum(), module.parameters(),
                                                  retain_graph=True) for y in (x[:, 1:], plain))
                for a, b in zip(one, other):
                    assert (a - b).norm() <= 1e-9 * b.norm() + 1e-9

    def test_on_an_accelerator_too_each_query_head_has_its_own_key_head(self):
        class Elsewhere(torch.Tensor):
            device = SimpleNamespace(type="cuda")

        queries, keys, values = (torch.randn(2, heads, 3, 8) for heads in (6, 2, 2))
        one, other = (attend_to(q, keys, values, None, 1.0)
                      for q in (queries, queries.as_subclass(Elsewhere)))
        assert torch.allclose(one, other, atol=1e-6)

    def test_in_bfloat16_it_is_as_exact_as_a_plain_full_pass(self):
        model, gaps = family("Qwen2").model, []
        tokens, mask, _ = related_rows(1)
        with torch.no_grad():
            exact = hidden_before(model.base_model, tokens, mask)
            model.bfloat16()
            plain = model.base_model(tokens, use_cache=False).last_hidden_state[:, :-1]
            for states in (plain[mask[:, 1:]], hidden_before(model.base_model, tokens, mask)):
                assert states.dtype == torch.bfloat16
                gaps.append((states - exact).norm())
        assert 0 < gaps[1] < 1.5 * gaps[0]

    def test_a_training_step_of_tiny_computes_each_beginning_once_for_every_model(self):
        config, learner, batch = played(*shlex.split(
            "--env frozenlake --max-turns 1 --algo ppo --kl-coef 0.1 --warmup-steps 0 "
            "--num-groups 2 --group-size 8 --mini-batch 99 --token-budget 99999"))
        counts = [], [], []  # of the ids in each forward pass
        for model, ids in zip((learner.policy.model, learner.reference.model,
                               learner.critic.trunk), counts):
            model.get_input_embeddings().register_forward_hook(
                lambda module, args, out, ids=ids: ids.append(args[0].numel()))
        trainer.update(learner, trainer.compute_targets(learner, batch, config)[0], config, 1)
        once = len({(*row[:end],) for row, masked in zip(
            batch.tokens.tolist(), batch.response_mask.tolist())
            for end in range(1, len(row)) if any(masked[end:])})
        assert counts == ([once], [once], [once, once])  # the critic: before and in the update
        assert once < batch.lengths.sum() / 3


@pytest.fixture
def segments(monkeypatch):
    """As on CUDA, where one kernel computes the segments."""
    monkeypatch.setattr(llama, "kernels", lambda decoder: flash)
    monkeypatch.setattr(flash, "attention", flash.plain_attention)


def packed_segments(module, q, k, v, mask, scaling=None, sliding_window=None, **given):
    """An attention that gets what transformers hands to flash attention."""
    if "cu_seq_lens_q" not in given:  # a full pass of the proof
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **given)
    starts = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
    assert mask is None and given["max_length_q"] == starts[0].diff().max()
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return flash.plain_attention(q, k, v, flash.Segments(starts, None), scaling,
                                 sliding_window)[None], None


class TestFlash:
    """fast/flash.py and `packed`. A CPU has no such kernels: segments are computed one by one."""

    def test_the_kernel_takes_our_arguments(self):
        """Tensors without data show the shapes and types of results and gradients."""
        q, k, v = (torch.empty(n, heads, 8, device="meta", dtype=torch.bfloat16).requires_grad_()
                   for n, heads in ((4, 6), (9, 2), (9, 2)))
        starts = torch.empty(2, 3, device="meta", dtype=torch.int32)
        for window, used in ((None, None), (5, None), (5, starts[0, :2])):
            seen = flash.attention(q, k, v, flash.Segments((*starts,), (3, 6), used=used), 0.4,
                                   window)
            assert seen.shape == q.shape and seen.dtype == torch.bfloat16
            gradients = torch.autograd.grad(seen.sum(), (q, k, v))
            assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]

    @pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    def test_it_is_used_where_it_agrees_with_plain_attention(self, device, monkeypatch):
        decoder, given = family("Qwen3").model.bfloat16().base_model, (torch.device(device), 4, 2)
        assert llama.kernels(decoder) is None  # on a CPU
        plain, real = flash.plain_attention, flash.attention
        right = [plain] + [real] * (device == "cuda")
        wrong = [real] * (device == "cpu") + [
            lambda q, k, v, segments, scale, window=None: plain(q, k, v, segments, scale),
            lambda q, k, *given: plain(q, 2 * k - k.detach(), *given),  # a gradient
            lambda q, k, v, segments, *given: plain(
                q, k, v, segments._replace(used=None), *given),
            lambda q, k, v, segments, *given: plain(q, k, v, segments, *given) * (
                1.1 if segments.longest[0] == 1 else 1.0)]
        for function in (*right, *wrong):
            monkeypatch.setattr(flash, "attention", function)
            assert flash.agrees.__wrapped__(*given, 16) == (function in right)
        asked, weight = [], SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
        monkeypatch.setattr(flash, "agrees", lambda *given: asked.append(given) or True)
        on_gpu = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight), layers=decoder.layers)
        assert llama.kernels(on_gpu) is flash and asked == [(weight.device, 4, 2, 16)]
        weight.dtype = torch.float32
        assert llama.kernels(on_gpu) is None

    @pytest.mark.parametrize("name", LEAN)
    def test_cached_turns_and_the_learner_equal_a_full_pass(self, name, segments):
        """Windows, rows that get nothing, and a last layer with few queries."""
        assert "equal a full pass" in prove(family(name), 320)

    @pytest.mark.parametrize("name", ["GPT-NeoX", "OLMo 3", "Phi-3, window", "GLM4", "OPT"])
    def test_packed_rows_have_the_logprobs_of_padded_ones(self, name, float64):
        transformers.AttentionInterface.register("segments", packed_segments)
        policy = family(name)
        policy.model.double()
        for seed in range(8):
            tokens, mask, _ = related_rows(seed)
            mask[:] &= seed > 0  # a micro-batch may have no reply
            padded = policy.logprobs(tokens, mask)
            policy.model.set_attn_implementation("segments")
            ours = dataclasses.replace(policy, hidden_before=policies.packed)
            for x, y in zip(ours.logprobs(tokens, mask), padded):
                assert torch.allclose(x, y, atol=1e-9)
            policy.model.set_attn_implementation("sdpa")

    def test_packed_rows_are_proved(self):
        """In float32, which flash attention lacks, rows are padded: OPT's masks mix packed ones."""
        transformers.AttentionInterface.register("segments", packed_segments)
        policy = family("OPT")
        policy.model.bfloat16()
        policies.set_attention(policy, "segments")
        assert "equal a full pass" in prove(
            dataclasses.replace(policy, hidden_before=policies.packed), 320)
        with pytest.raises(ValueError, match="transformers cannot change the attention"):
            policies.set_attention(family("Falcon"), "segments")

    def test_the_option_chooses_segments_packed_rows_or_refuses(self, monkeypatch):
        monkeypatch.setattr(policies, "set_attention", lambda *given: None)
        for name, usable, chosen in (("Llama", True, hidden_before),
                                     ("Llama", False, policies.packed),
                                     ("GPT-NeoX", True, policies.packed),
                                     ("Qwen3.5", True, cache.hidden_before)):  # it has states
            policy = dataclasses.replace(family(name), hidden_before=cache.hidden_before)
            if policy.last_hidden == llama.last_hidden:  # as `faster` gets it
                policy.last_hidden = cache.last_hidden
            monkeypatch.setattr(llama, "kernels", lambda decoder, usable=usable: usable)
            with pytest.raises(ValueError, match="in bfloat16, and the weights are float32"):
                faster(policy, "flash_attention_2")
            policy.model.bfloat16()
            assert faster(policy, "flash_attention_2").hidden_before == chosen


def assert_compiled_alike(policy, seeds):
    """Logprobs and gradients of a float64 policy are the same with compiled layers."""
    weights, results = [*policy.model.double().parameters()], []
    for wish in ("off", "on"):
        policies.compile_layers(policy, wish, steps=1)
        for seed in seeds:
            tokens, mask, _ = related_rows(seed)
            logprobs, entropy = policy.logprobs(tokens, mask)
            loss = (logprobs - entropy).sum()
            results.append([logprobs, *torch.autograd.grad(loss, weights, retain_graph=True)])
    assert hasattr(policy.model.base_model.layers[0], "halves")
    for plain, compiled in zip(results, results[len(seeds):]):
        for x, y in zip(plain, compiled):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


class TestCompiled:
    def test_graphs_are_the_same_for_all_layers_and_lengths(self, float64, monkeypatch):
        """All of torch.compile but its kernels, which tests/long/test_at_length.py has."""
        aot = functools.partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", aot)
        counters = torch._dynamo.utils.counters
        counters.clear()
        assert_compiled_alike(policy := family("Llama"), range(2))
        assert counters["stats"]["unique_graphs"] <= 6  # two halves in three modes
        assert "equal a full pass" in prove(policy, 320)

    def test_auto_is_for_long_runs_on_cuda_and_a_failure_leaves_the_layers_alone(
            self, monkeypatch, capsys):
        monkeypatch.setattr(torch, "compile", lambda half, dynamic: half)

        def compiles(wish, name="Llama", steps=100, device="cuda"):
            policy = family(name)
            with monkeypatch.context() as patch:
                patch.setattr(models.Policy, "device", torch.device(device))
                policies.compile_layers(policy, wish, steps)
            return hasattr(policy.model.base_model.layers[0], "halves")

        assert compiles("auto") and compiles("on", steps=1, device="cpu")
        assert not (compiles("off") or compiles("auto", steps=99) or compiles("auto", device="cpu")
                    or compiles("auto", "GPT-NeoX"))
        with pytest.raises(ValueError, match="'NAME' is not of Llama's family"):
            compiles("on", "GPT-NeoX")
        monkeypatch.setattr(torch, "compile", lambda half, dynamic: lambda *given: 1 / 0)
        assert not compiles("on")
        said = "warning   torch.compile fails: ZeroDivisionError('division by zero')\n"
        assert capsys.readouterr().out == said


class TestMicroBatches:
    @pytest.mark.parametrize("name", ["Llama", "GPT-2"])
    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_each_row_is_in_one_of_one_process_and_only_single_rows_exceed_the_budget(
            self, name, size):
        policy = family(name)
        for seed, budget in itertools.product(range(20), (1, 40, 90, 10**6)):
            tokens, mask, lengths = related_rows(seed)
            parts = [part.tolist() for rank in range(size)
                     for part in policy.micro_batches(tokens, lengths, budget, rank, size)]
            assert sorted(itertools.chain(*parts)) == list(range(len(tokens)))
            for part in parts:
                padded = len(part) * lengths[part].max()
                nodes = {tuple(tokens[row, :end].tolist()) for row in part
                         for end in range(1, lengths[row] + 1)}
                assert len(part) == 1 or (len(nodes) if name == "Llama" else padded) <= budget
            assert budget < 10**6 or len(parts) <= size

    @pytest.mark.parametrize("name", ["Llama", "GPT-2"])
    def test_processes_get_about_equal_shares(self, name):
        """16 groups of 16 with a prompt of 40 and up to 60 ids behind it."""
        policy, rng = family(name), torch.Generator().manual_seed(0)
        tokens = torch.randint(300, (256, 100), generator=rng)
        tokens[:, :40] = tokens[::16, :40].repeat_interleave(16, dim=0)
        lengths = torch.randint(45, 100, (256,), generator=rng)
        shares = [sum(int(lengths[part].sum()) - 40 * len(part) for part in policy.micro_batches(
            tokens, lengths, 900, rank, 4)) for rank in range(4)]
        assert max(shares) < 1.06 * min(shares)


class TestForCUDA:
    """What kernels of CUDA ask for. A CPU shows that it changes no number."""

    def test_rows_of_masks_and_slots_begin_where_kernels_need_no_copy(self):
        for name in ("Llama", "Gemma 2"):
            model, widths = family(name).model, range(1, 40)
            for k in widths:
                keys = torch.arange(k)[None]
                visible = keys[:, None, None] <= keys[:, None, :, None]
                masks = cache.attention_masks(model, visible, keys, keys)
                for mask in masks.values() if isinstance(masks, dict) else [masks]:
                    assert mask.shape == visible.shape
                    assert all(s % 16 == 0 for s in mask.stride()[:-1]) and mask.stride(-1) == 1
                    assert mask[~visible].eq(-torch.inf).all()
            slots = cache.KVSlots(model, 2, 65)
            assert slots.capacity == 128
            assert cache.regather([(slots, [0, 1, 1])], 129).capacity == 192

    def test_cudnn_does_not_plan_attention_for_each_new_shape(self, monkeypatch):
        used = []
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", used.append)
        policy = family("Llama")
        faster(policy)
        assert not used
        monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
        faster(policy)
        assert used == [False]

    @pytest.mark.parametrize("name, flash_runs, ahead, stays", [
        ("Llama", False, True, False), ("Llama", True, True, True), ("GPT-2", True, False, False),
        ("Llama, dynamic rope", True, False, False)])
    def test_several_tokens_are_sampled_at_once_where_nothing_else_waits(
            self, name, flash_runs, ahead, stays, monkeypatch):
        policy = family(name)
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", bool)
        monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
        monkeypatch.setattr(llama, "kernels", lambda decoder: flash_runs)
        found = faster(policy, room=64)
        assert (found.sample_replies is not None) == ahead
        assert (found.regather is not cache.regather) == stays


class TestTensorCores:
    """The output layer of fast/head.py. A CPU computes its products in float32."""

    @pytest.mark.parametrize("chunk", [1, 3, 99])
    def test_gradients_are_those_of_finite_differences(self, chunk, float64):
        hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5)
        given = torch.randint(11, (7,)), 0.7, chunk
        for learnt in (True, False):  # with LoRA the weight is frozen
            assert torch.autograd.gradcheck(lambda h, w: head.LogProbs.apply(h, w, *given), (
                hidden, weight.requires_grad_(learnt)))

    @pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    @pytest.mark.parametrize("rows", [1000, 4])
    def test_numbers_and_gradients_are_as_exact_as_without_it(self, device, rows, monkeypatch):
        """Against float64, with the same bfloat16 states and weights, in one chunk and in many."""
        model = family("Qwen2").model.bfloat16()
        rng, (V, D) = torch.Generator().manual_seed(0), model.get_output_embeddings().weight.shape
        model.get_output_embeddings().weight.data.normal_(std=0.5, generator=rng)
        tokens, mask = torch.randint(V, (9, 50), generator=rng), torch.ones(9, 50).bool()
        mask[:, 0] = mask[4] = False
        states = torch.randn(int(mask.sum()), D, generator=rng).bfloat16()
        costs = torch.randn(2, len(states), generator=rng).to(device)
        model, tokens, mask = model.to(device), tokens.to(device), mask.to(device)
        states, weight = states.to(device).requires_grad_(), model.get_output_embeddings().weight
        monkeypatch.setattr(models, "LOGIT_BUDGET", rows * V)
        monkeypatch.setattr(head, "LOGITS", rows * V)

        def results(columns, *learnt):
            total = sum((column * cost).sum() for column, cost in zip(columns, costs))
            return *columns, *torch.autograd.grad(total, learnt)

        exact = [x.detach().double().requires_grad_() for x in (states, weight)]
        log_p = (exact[0] @ exact[1].T / 0.7).log_softmax(dim=-1)
        exact = results((log_p.gather(1, tokens[mask][:, None])[:, 0],
                         torch.special.entr(log_p.exp()).sum(dim=-1)), *exact)
        ours, plain = (results([x[mask] for x in function(
            model, tokens, mask, 0.7, lambda *given: states)], states, weight)
            for function in (head.token_logprobs, models.token_logprobs))
        for x, y, right in zip(ours, plain, exact):
            assert x.dtype == y.dtype
            assert 0 < (x - right).norm() < 1.001 * (y - right).norm() + 1e-6 * right.norm()

    def test_elsewhere_than_on_a_cpu_all_products_are_of_bfloat16_with_float32_results(
            self, monkeypatch):
        """Tensors without data show the shapes and types of what a GPU computes."""
        products, mm = [], torch.mm
        monkeypatch.setattr(torch, "mm", lambda a, b, **options: (
            products.append((a.dtype, b.dtype, options)), mm(a, b, **options))[-1])
        hidden, weight = (torch.empty(n, 5, device="meta", dtype=torch.bfloat16).requires_grad_()
                          for n in (7, 400))
        targets = torch.empty(7, device="meta", dtype=torch.int64)
        columns = head.LogProbs.apply(hidden, weight, targets, 0.7, 3)
        assert [(x.dtype, x.shape) for x in columns] == [(torch.float32, (7,))] * 2
        gradients = torch.autograd.grad(sum(columns).sum(), (hidden, weight))
        assert [(x.dtype, x.shape) for x in gradients] == [
            (torch.bfloat16, (7, 5)), (torch.bfloat16, (400, 5))]
        assert products == [(torch.bfloat16, torch.bfloat16, {"out_dtype": torch.float32})] * 12

    def test_between_the_passes_only_numbers_of_states_are_kept(self):
        hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(400, 5)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
            head.LogProbs.apply(hidden, weight, torch.zeros(6, dtype=torch.int64), 1.0, 2)
        assert {x.numel() for x in kept} == {6, 30, 2000}

    def test_it_runs_where_an_output_layer_is_a_bfloat16_product_on_cuda(self, monkeypatch):
        for name, fits in (("Llama", True), ("GPT-2", True), ("Gemma 2", False),
                           ("Granite", False)):
            policy = family(name)
            policy.model.bfloat16()
            plain = policy.output_layer, policy.token_logprobs
            with monkeypatch.context() as context:
                context.setattr(torch.backends.cuda, "enable_cudnn_sdp", bool)
                context.setattr(type(policy), "device", torch.device("cuda"))
                found = faster(policy)
                usual = faster(dataclasses.replace(policy, model=policy.model.float()))
            assert (usual.output_layer, usual.token_logprobs) == plain == (None, None)
            assert (found.output_layer, found.token_logprobs) == (
                (head.output_layer, head.token_logprobs) if fits else plain)

    def test_a_policy_samples_and_learns_with_it(self):
        policy, (tokens, mask, _) = family("Llama"), related_rows(1)
        policy.model.bfloat16()
        ours = dataclasses.replace(policy, output_layer=head.output_layer,
                                   token_logprobs=head.token_logprobs)
        slots, other = (cache.KVSlots(policy.model, len(tokens), 64) for _ in range(2))
        counts = torch.full((len(tokens),), tokens.shape[1])
        assert ours.extend(slots, tokens, counts).equal(policy.extend(other, tokens, counts))
        for x, y in zip(ours.logprobs(tokens, mask, 0.7), policy.logprobs(tokens, mask, 0.7)):
            assert x.dtype == torch.float32 and torch.allclose(x, y, atol=1e-6)
            assert not x[~mask].any()


class TestGraphs:
    @pytest.mark.parametrize("name, waits", [
        ("Llama", False), ("Qwen3", False), ("Llama, dynamic rope", True)])
    def test_a_step_is_captured_unless_it_waits_for_a_value_from_the_gpu(self, name, waits):
        model = family(name).model
        assert graphs.synchronizes(model) == waits
        model.image_store = {1: 1}  # as a vision-language model that sees has one
        assert graphs.synchronizes(model)
        del model.image_store
