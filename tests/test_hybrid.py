"""Layers with states: one model of each kind of state, with random weights.

Which hybrids work: test_families.py. How they are trained in runs: long/test_hybrid_runs.py.
"""

import functools
import math
import sys
import types

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import CONTEXT, family
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode

from minragen import cache
from minragen.config import Config
from minragen.more import hybrid
from minragen.run import memory, proof
from minragen.run.proof import prove
from minragen.train import Learner

KINDS = {"Qwen3.5": "delta net", "LFM3": "convolution", "Granite 4 H": "Mamba 2"}
each_kind = pytest.mark.parametrize("name", KINDS, ids=KINDS.values())
kept = functools.cache(family)  # nobody may change its weights


def conversations(policy, draw):
    """Play turns of random ids as rollout.play does, with lengths that `draw` chooses: prompts of
    which several rows have copies, replies that end one by one, then observations for some rows.
    Returns [(ids of a row so far, the logits after them)]."""
    number, seen = st.integers(1, 20), []

    def fresh(count):
        return [torch.randint(300, (draw(number),)).tolist() for _ in range(count)]

    prompts = fresh(draw(st.integers(1, 3)))
    budget = draw(st.sampled_from([16, 64, 1024]))  # several passes, or one
    slots = cache.KVSlots(policy.model, len(prompts), max(map(len, prompts)))
    policy.extend_in_chunks(slots, prompts, budget)
    chosen = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=5))
    texts = [[*prompts[i]] for i in chosen]
    for turn in range(2):
        slots, live = cache.regather([(slots, chosen)], 128), len(chosen)
        if turn:
            texts = [texts[i] for i in chosen]
            new = fresh(live)
            logits = policy.extend_in_chunks(slots, new, budget)
            texts = [ids + more for ids, more in zip(texts, new)]
            seen += zip([[*ids] for ids in texts], logits)
        for _ in range(draw(st.integers(0, 3))):
            going = sorted(draw(st.sets(st.integers(0, live - 1), min_size=1)))
            texts, live = [texts[i] for i in slots.move_to_front(going)], len(going)
            sampled = torch.randint(300, (live,))
            logits = policy.extend(slots, sampled[:, None], torch.ones_like(sampled))
            texts[:live] = [ids + [int(i)] for ids, i in zip(texts, sampled)]
            seen += zip([[*ids] for ids in texts[:live]], logits)
        chosen = draw(st.permutations(range(len(texts))))[:draw(st.integers(1, len(texts)))]
    return seen


class TestStates:
    @each_kind
    @given(data=st.data())
    @settings(max_examples=12, deadline=None)
    def test_ragged_rows_that_stop_swap_and_share_prompts_are_like_full_passes(self, name, data):
        """The next id, drawn at random, has the same logprob."""
        torch.manual_seed(0)
        rows = conversations(kept(name), data.draw)
        tokens = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
        with torch.no_grad():
            full = kept(name).model(tokens, use_cache=False).logits
        ends = torch.stack([x[len(ids) - 1] for x, (ids, _) in zip(full, rows)])
        ours = torch.stack([logits for _, logits in rows])
        gap = (ours.log_softmax(-1) - ends.log_softmax(-1)).abs()
        assert gap.gather(1, torch.randint(300, (len(rows), 1))).max() < 1e-4

    @each_kind
    @pytest.mark.parametrize("wrong", ["padded", "not copied", "not written back"])
    def test_the_proof_refuses_states_that_are(self, wrong, name, monkeypatch):
        policy, copied = family(name), cache.regather
        assert "equal a full pass" in prove(policy, CONTEXT)

        def emptied(parts, capacity):
            slots = copied(parts, capacity)
            slots.states = {key: torch.zeros_like(x) for key, x in slots.states.items()}
            return slots

        if wrong == "padded":
            policy.last_hidden = torch.no_grad()(hybrid.one_pass)
        elif wrong == "not copied":
            monkeypatch.setattr(proof, "regather", emptied)
        else:
            monkeypatch.setattr(hybrid.LayerStates, "put_back", lambda states: None)
        assert proof._gaps(policy, 48)[1] > 0.1
        with pytest.raises(RuntimeError, match="nats in torch.float32 on average"):
            prove(policy, CONTEXT)

    def test_the_proof_looks_at_the_largest_gap_too(self):
        """Raised time steps make few places of a scan wrong, on average less than is allowed."""
        policy = family("Nemotron-H")
        for p in policy.model.parameters():
            p.data *= 0.9 if p.ndim > 1 else 1
        for module in policy.model.modules():
            if hasattr(module, "time_step_limit"):
                assert module.time_step_limit == (0, math.inf)
                module.time_step_limit = 0.001, math.inf
        gap, largest = proof._gaps(policy, 48)
        assert gap < proof.TOLERANCE < 10 * proof.TOLERANCE < largest
        with pytest.raises(RuntimeError, match="allowed are 0.0001 and 0.001"):
            prove(policy, CONTEXT)

    @each_kind
    def test_in_bfloat16_it_is_proved_too(self, name):
        policy = family(name)
        policy.model.bfloat16()
        assert "equal a full pass" in prove(policy, CONTEXT)

    @each_kind
    def test_the_forecast_counts_keys_where_there_are_some_and_the_states_of_each_row(self, name):
        policy, config = kept(name), Config(num_groups=1, group_size=3, val_size=1, max_context=50,
                                            max_new_tokens=14, env="bandit")
        expected = memory.phases(Learner(policy, None, None), config)["rollout"]["KV slots"]
        slots = cache.KVSlots(policy.model, 3, 64)
        policy.extend_in_chunks(slots, [[5] * n for n in (2, 9, 4)], 64)
        assert expected == sum(x.nbytes for x in (*slots.states.values(), *(
            x for both in slots.layers.values() for x in both)))


class TestKernels:
    def test_a_piece_costs_no_whole_chunk(self):
        """transformers' Mamba 2 fills each piece up to 256 ids; the results are the same."""
        policy, tokens = kept("Granite 4 H"), torch.randint(300, (2, 4))
        functions = vars(transformers.models.granitemoehybrid.modeling_granitemoehybrid)
        (name,) = (name for name in functions if name.endswith("chunk_scan"))
        measured, prepared = [], functions[name]
        try:
            for function in (prepared, prepared.__wrapped__):
                functions[name] = function
                with torch.no_grad(), FlopCounterMode(display=False) as counter:
                    measured.append(policy.model(tokens, use_cache=False).logits)
                measured.append(counter.get_total_flops())
        finally:
            functions[name] = prepared
        assert torch.allclose(measured[0], measured[2], atol=1e-5)
        assert measured[1] * 10 < measured[3]

    def test_an_installed_kernel_runs_in_half_precision_on_a_gpu_only(self, monkeypatch):
        """transformers takes it wherever the model is: here for a package that would not run."""
        operations = types.ModuleType("fla.ops.gated_delta_rule")
        operations.chunk_gated_delta_rule = lambda query, chunk_size=64: ("kernel", chunk_size)
        package = types.ModuleType("fla")
        package.ops = types.SimpleNamespace(gated_delta_rule=operations)
        for module in (package, operations):
            monkeypatch.setitem(sys.modules, module.__name__, module)

        @transformers.integrations.use_kernel_func_from_hub_with_fallback(
            "chunk_gated_delta_rule", "fla")
        def plain(query, chunk_size=64):
            return "plain", chunk_size

        x = torch.zeros(1, 5, 2)
        chosen = hybrid.by_device(plain)
        assert plain(x) == ("kernel", 64) and chosen(x) == chosen(x.half()) == ("plain", 8)
        assert chosen(x.to("meta")) == ("plain", 8)
        assert chosen(x.to("meta", torch.bfloat16), chunk_size=32) == ("kernel", 32)
        assert chosen(x.repeat(1, 40, 1), chunk_size=128) == ("plain", 128)
