"""Policies that compute the same numbers with less work.

Tests: `python -m pytest tests/test_attention.py tests/test_models.py`.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

from minragen import cache
from minragen.fast import llama, prefix_tree


def faster(policy, attention="", room=0):
    """The policy with the quickest way to run its model: in Llama's family updates without padding
    and with shared prefixes computed once, and on a GPU decode steps as graphs, several tokens
    sampled at once, and the output layer on tensor cores.

    room: max_context + max_new_tokens; slots get this capacity at once where flash.py reads them
    attention: transformers' implementation for the learner's passes; empty: the model's own. In
        Llama's family fast/ replaces it if it is empty, or flash attention where flash.py runs
    raises: ValueError if the model cannot use it
    """
    ours = type(policy.model.base_model).__name__ in llama.FAMILY
    run = llama.last_hidden
    if policy.device.type == "cuda":
        from minragen.fast import graphs, head, sampling

        run = graphs.last_hidden
        # cuDNN plans each new shape for 50 ms; hardly any repeats.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if head.fits(policy.model):
            policy = replace(policy, output_layer=head.output_layer,
                             token_logprobs=head.token_logprobs)
        if ours and not graphs.synchronizes(policy.model):
            policy = replace(policy, sample_replies=sampling.sample_replies)
            if room and llama.kernels(policy.model.base_model):  # masks would span it
                policy = replace(policy, regather=partial(sampling.regather, room, []))
    ragged = attention.startswith("flash_attention")
    if ragged and policy.model.dtype == torch.float32:
        raise ValueError(f"model {policy.name!r} cannot use attention {attention!r}: it computes "
                         f"in bfloat16, and the weights are float32, as on every CPU.")
    if attention and not (ours and ragged and llama.kernels(policy.model.base_model)):
        set_attention(policy, attention)
        plain = policy.last_hidden == cache.last_hidden and policy.image_store is None
        run = run if ours else partial(last_hidden, policy.last_hidden)
        return replace(policy, last_hidden=run, micro_batches=cache.micro_batches,
                       hidden_before=packed if plain and ragged else cache.hidden_before)
    if ours:
        return replace(policy, last_hidden=run, hidden_before=prefix_tree.hidden_before,
                       micro_batches=prefix_tree.micro_batches)
    return policy


def compile_layers(policy, wish, steps, least=100):
    """Let torch.compile fuse what layers of Llama's family compute before and after attention. If
    it fails, which is printed, they run as they are.

    wish: on, off, or auto: on CUDA if the run has at least `least` steps, to repay compilation
    raises: ValueError for `on` with other decoders, or LoRA, whose reference stays uncompiled
    """
    decoder = policy.model.base_model
    ours = type(decoder).__name__ in llama.FAMILY and not policy.base
    auto = ours and policy.device.type == "cuda" and steps >= least
    if wish == "off" or wish == "auto" and not auto:
        return
    if not ours:
        raise ValueError(f"compile: {policy.name!r} is not of Llama's family, or has LoRA.")
    torch._dynamo.config.recompile_limit = 64  # sampling, learning, one token, a critic, ...
    torch._functorch.config.donated_buffer = False  # gradients_every: several backwards
    halves = [torch.compile(half, dynamic=True)
              for half in (llama.before_attention, llama.after_attention)]
    for layer in decoder.layers:
        layer.halves = halves
    try:
        tokens = torch.arange(4, device=decoder.embed_tokens.weight.device)[None]
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                states = prefix_tree.hidden_before(decoder, tokens, tokens > 0)
        states.sum().backward()
        policy.model.zero_grad()
    except Exception as error:  # there may be no C compiler
        for layer in decoder.layers:
            del layer.halves
        print(f"warning   torch.compile fails: {error!r:.300}", flush=True)


def set_attention(policy, attention):
    """Let a model use another attention of transformers, except within `usual_attention`."""
    model = policy.model
    model.usual_attention = model.config._attn_implementation
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ValueError(f"model {policy.name!r} cannot use attention {attention!r}: "
                         f"{str(error).strip().splitlines()[0]}") from None
    now = model.config.get_text_config()._attn_implementation
    if attention != model.usual_attention == now:
        raise ValueError(f"model {policy.name!r} cannot use attention {attention!r}: transformers "
                         f"cannot change the attention of its decoder.")


def packed(decoder, tokens, mask):
    """`cache.hidden_before` for flash attention: rows are packed one after the other, without
    padding, and each ends before its last token that the mask selects."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    ends = (mask * columns).amax(dim=1).clamp(min=1)  # flash attention takes no empty input
    real = columns < ends[:, None]
    starts = pad(ends.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(ends.max())
    hidden = decoder(
        input_ids=tokens[real][None], position_ids=columns.expand_as(real)[real][None],
        use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest,
        max_length_k=longest).last_hidden_state[0]
    return hidden[(starts[:-1, None] + columns - 1)[mask]]


@contextmanager
def usual_attention(model):
    """Within this, a model uses the attention that it was loaded with: another one, such as flash
    attention, may not take the masks of a rollout."""
    config = model.config.get_text_config()
    chosen = config._attn_implementation
    config._attn_implementation = getattr(model, "usual_attention", chosen)
    try:
        yield
    finally:
        config._attn_implementation = chosen


def last_hidden(run, model, *given):
    """run(model, ...), called as `cache.last_hidden` is, with the usual attention."""
    with usual_attention(model):
        return run(model, *given)
