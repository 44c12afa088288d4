"""How much memory training needs: a forecast from the sizes of the model and the run.

What a run always holds adds up; rollout and update follow each other, so only the larger counts.
Every conversation is assumed to fill `max_context`. Only the tensors of one process are counted:
not Python, not libraries, not what an allocator keeps for later; of a vision-language model not
the images and what the tower computes. Activations are those of fast/llama.py; other decoders
pad, and keep some results more than once.

Tests: `python -m pytest tests/long/test_memory.py`, which measures the peaks.
"""

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from minragen.cache import regather, rounded_up
from minragen.fast.sampling import may_stay
from minragen.models import LOGIT_BUDGET
from minragen.run.groups import env_groups, most_turns
from minragen.run.load import STATES, layer_kinds

# Bytes of an id of a batch: 2 integers, 5 masks, 11 numbers, and the part that mini-batches copy.
BATCH_BYTES = 100


def forecast(learner, config):
    """One line for the console: the peak and its parts, in MiB."""
    (_, held), *others = phases(learner, config).items()
    phase, added = max(others, key=lambda item: sum(item[1].values()))
    total = sum(held.values()) + sum(added.values())
    parts = [", ".join(f"{what} {size / 2**20:,.0f}" for what, size in sizes.items() if size)
             for sizes in (held, added)]
    line = f"memory    about {total / 2**20:,.0f} MiB: {parts[0]}; {phase}: {parts[1]}"
    device = learner.policy.device
    there = (torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else
             os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if total <= there:
        return line
    return (f"{line}\nwarning   {device} has only {there / 2**20:,.0f} MiB; what helps: "
            f"{remedies(learner, config)}")


def remedies(learner, config):
    """Up to three options that lower the peak of the forecast, and by how much, as text."""
    def peak(frozen=False, **changes):
        always, *others = (sum(sizes.values()) for sizes in phases(
            learner, replace(config, **changes), frozen).values())
        return always + max(others)

    now, rows = peak(), _sizes(learner.policy, config, learner.world.size).slots
    peaks = {f"--{name.replace('_', '-')} {str(value).lower()}": peak(**{name: value})
             for name, value in (("token_budget", max(1, config.token_budget // 2)),
                                 ("max_rows", max(1, rows // 2)),
                                 ("activation_checkpointing", True))}
    if not config.lora_rank:
        peaks["a new run with --lora-rank 16"] = peak(frozen=True)  # its adapters are small
    saved = sorted(((now - least, option) for option, least in peaks.items()), reverse=True)
    return ", ".join(f"{option} saves {size / 2**20:,.0f} MiB" for size, option in saved[:3]
                     if size >= 2**20) or "no option saves a MiB"


def phases(learner, config, frozen=False):
    """{phase: {what: bytes}}: first what is always held, then what each phase adds to that.

    frozen: as if no parameter were trained
    """
    models = [learner.policy.model, *filter(None, [
        learner.critic, learner.reference and learner.reference.model])]
    parameters = {id(p): p for m in models for p in m.parameters()}.values()  # LoRA shares some
    trained = [p for p in parameters if p.requires_grad and not frozen]
    n = _sizes(learner.policy, config, learner.world.size)
    rollout = _rollout(n, config)
    stay = learner.policy.regather is not regather and may_stay(
        learner.policy.device, rollout["KV slots"])  # which fast/sampling.py keeps
    return {"always": {"weights": sum(p.nbytes for p in parameters),
                       "masters": sum(4 * p.numel() for p in trained if p.itemsize < 4),
                       "Adam": sum(8 * p.numel() for p in trained),
                       "older weights": config.stale and (config.stale + 1) * sum(
                           p.nbytes for p in trained),
                       "KV slots kept": stay and rollout["KV slots"]},
            "rollout": rollout, "update": _update(n, config, trained)}


def _sizes(policy, config, processes):
    """The numbers that the phases share."""
    model = policy.model
    c, context, rows = (model.config.get_text_config(), config.max_context,
                        config.num_groups * config.group_size)
    if getattr(c, "is_heterogeneous", False):  # Gemma 4: the last layer has the widest heads
        c = c.per_layer_config[-1]
    heads = c.num_attention_heads
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    own = -(-max(rows, config.val_size) // processes)
    tokens = max(context, min(config.token_budget, min(rows, config.mini_batch) * context))
    replies = most_turns(env_groups(config, "val")) if config.context == "full" else 1
    share = replies * config.max_new_tokens / context
    inner = getattr(c, "intermediate_size", None)
    keyed, states = c.num_hidden_layers, 0
    if layer_kinds(model.config) & STATES:
        from minragen.more.hybrid import sizes

        keyed, states = sizes(policy)
    chunk, copies = LOGIT_BUDGET, (1, 1)  # float32 copies of the output layer: rollout, update
    if policy.token_logprobs:  # fast/head.py: in an update its gradient and a chunk's share
        from minragen.fast.head import LOGITS as chunk

        copies = 0, 2
    output_layer = 4 * c.vocab_size * c.hidden_size if model.dtype.itemsize < 4 else 0
    return SimpleNamespace(
        width=model.dtype.itemsize,
        heads=[count * output_layer for count in copies],
        chunk=chunk, vocab=c.vocab_size, layers=c.num_hidden_layers, keyed=keyed, states=states,
        hidden=c.hidden_size, queries=heads * head_dim,
        keys=2 * head_dim * (getattr(c, "num_key_value_heads", None) or heads),  # and values
        inner=inner if isinstance(inner, int) else 4 * c.hidden_size,  # GPT-2, OPT
        context=context, rows=rows, tokens=tokens, in_loss=tokens * min(1, share),
        slots=min(config.max_rows, own))


def _rollout(n, config):
    """Slots, and the largest of: a pass over prompts or observations; the logits and their
    cumulative sums (20 bytes each); the copies of a layer's slots when rows are gathered."""
    # A turn has room for all its tokens before its length is known.
    room = rounded_up(n.context + config.max_new_tokens, 64)
    slots = n.slots * (room * n.keyed * n.keys * n.width + n.states)
    fed = min(config.token_budget, n.slots * n.context) * (
        n.width * (4 * n.hidden + 2 * n.queries + 3 * n.inner + n.context))
    logits = n.slots * n.vocab * (20 + n.width) + n.heads[0]
    return {"KV slots": slots, "one pass": max(fed, logits, slots / n.layers)}


def _update(n, config, trained):
    """Gradients of all models, and one micro-batch of one model."""
    # Of a token and layer autograd keeps: norms in float32, their results, the input and the output
    # of attention, queries twice, keys and values, and four results of the MLP.
    layer = 16 * n.hidden + n.width * (2 * n.hidden + 3 * n.queries + n.keys + 4 * n.inner)
    kept = (n.tokens * (n.layers - 1) + n.in_loss) * layer  # the last one: tokens in the loss
    # Five copies of a chunk, for logprob and entropy; and the output layer in float32.
    logits = 20 * min(n.in_loss * n.vocab, n.chunk) + n.heads[1]
    if config.activation_checkpointing:  # a layer is computed again when the logits are gone
        again = n.tokens * (layer + 2 * n.inner * n.width)
        kept = n.tokens * n.layers * n.hidden * n.width + max(0, again - logits)
    masks = n.context * n.width * (n.tokens / 2 + n.in_loss)
    numbers = [p.numel() for p in trained]
    gradients = sum(numbers) + max(numbers, default=0)  # one is new and not yet added
    if config.gradients_every:
        terms = 1 + (config.entropy_coef > 0) + (config.kl_coef > 0)
        # Of each term: the total, a bucket's sum and a micro-batch's; and two in the making.
        gradients = (3 * terms + 2) * sum(numbers)
    return {"gradients": 4 * gradients,
            "activations": kept + masks, "logits": logits,
            "batch": n.rows * n.context * BATCH_BYTES}


def checkpoint_activations(module):
    """Let every decoder layer keep only its input and compute the rest again in the backward pass.

    transformers has the switch, but obeys it only in training mode, which would turn on dropout.
    """
    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError("activation_checkpointing: the layers of this model cannot be recomputed.")
    for layer in layers:
        layer.gradient_checkpointing = True  # for fast/llama.py
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
