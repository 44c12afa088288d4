"""Policies that compute the same numbers with less work.

Tests: `python -m pytest tests/test_attention.py tests/test_models.py`.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from minragen import cache
from minragen.fast import llama, prefix_tree


def faster(policy, attention=""):
    """The policy with the quickest way to run its model: in Llama's family without padding, with
    beginnings that rows share computed once, and on a GPU with decode steps as graphs and the
    output layer on tensor cores.

    attention: transformers' implementation for the learner's passes, such as flash_attention_2;
        empty: ours where it applies
    raises: ValueError if the model cannot use it
    """
    run = llama.last_hidden
    if policy.device.type == "cuda":
        from minragen.fast import head
        from minragen.fast.graphs import last_hidden as run

        # cuDNN plans each new shape for 50 ms; hardly any repeats.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if head.fits(policy.model):
            policy = replace(policy, output_layer=head.output_layer,
                             token_logprobs=head.token_logprobs)
    ours = type(policy.model.base_model).__name__ in llama.FAMILY
    if attention:
        set_attention(policy, attention)
        run = run if ours else partial(last_hidden, policy.last_hidden)
        return replace(policy, last_hidden=run, hidden_before=cache.hidden_before,
                       micro_batches=cache.micro_batches)
    if ours:
        return replace(policy, last_hidden=run, hidden_before=prefix_tree.hidden_before,
                       micro_batches=prefix_tree.micro_batches)
    return policy


def set_attention(policy, attention):
    """Let a model use another attention of transformers, except within `usual_attention`."""
    model = policy.model
    model.usual_attention = model.config._attn_implementation
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ValueError(f"model {policy.name!r} cannot use attention {attention!r}: "
                         f"{str(error).strip().splitlines()[0]}") from None


@contextmanager
def usual_attention(model):
    """Within this, a model uses the attention that it was loaded with: another one, such as flash
    attention, may not take the masks of a rollout."""
    if usual := getattr(model, "usual_attention", ""):
        config = model.config.get_text_config()
        chosen, config._attn_implementation = config._attn_implementation, usual
    try:
        yield
    finally:
        if usual:
            config._attn_implementation = chosen


def last_hidden(run, model, *given):
    """run(model, ...), as `cache.last_hidden` is, with the usual attention."""
    with usual_attention(model):
        return run(model, *given)
