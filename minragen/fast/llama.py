"""The decoder of Llama's family on a flat list of tokens: Llama, Mistral, Qwen2, Qwen3.

transformers computes (rows, tokens) matrices, padding and repeated prompts included. Here the
tokens of a pass are one list (updates: no padding), `attend` alone knows which sees which, and the
last layer computes queries, attention and MLP only where a state is wanted. It uses transformers'
modules, so weights, biases and rotary frequencies are the same; run/proof.py compares the two at
the start of a run. Other decoders run as transformers has them.

Reading order: `last_hidden` (for sampling), `decode`; prefix_tree.py has the learner's pass.

Axes: N tokens, M wanted ones, H query heads, K key heads, d width of a head, D hidden size.

Tests: `python -m pytest tests/test_attention.py`.
"""

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from minragen.cache import reserve

FAMILY = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}  # decoders


@torch.no_grad()
def last_hidden(model, slots, tokens, counts, first_row=0):
    """Append ids to slots and return the last hidden states (n, D), as in cache.py."""
    q, decoder = tokens.shape[1], model.base_model
    flash = kernels(decoder)
    positions, masks, ends = reserve(model, slots, tokens, counts, first_row, not flash)
    attend = (flash.slots_attention(decoder, slots, counts, first_row, q) if flash else
              masked_attention(decoder, slots, masks, ends, q))
    return decode(decoder, tokens.flatten(), positions.flatten(), attend, ends if q > 1 else None)


def kernels(decoder):
    """The module flash.py if it can compute this decoder's attention on its device, else None."""
    if decoder.embed_tokens.weight.device.type != "cuda":
        return None
    from minragen.fast import flash

    return flash if flash.usable(decoder) else None


def masked_attention(decoder, slots, masks, ends, q):
    """`attend` of a pass of q new tokens a row. masks, ends: of `cache.reserve`"""
    n = len(ends)

    def attend(layer, queries, keys, values, scale):
        keys, values = slots.update(*(x.unflatten(0, (n, q)).transpose(1, 2)
                                      for x in (keys, values)), layer)
        mask = mask_of(decoder, masks, layer)
        if len(queries) > n:
            queries = queries.unflatten(0, (n, q)).transpose(1, 2)
            return attend_to(queries, keys, values, mask, scale).transpose(1, 2).flatten(0, 1)
        # One query a row: query heads of a key head stand where a pass has its queries (GQA).
        queries = queries.unflatten(1, (keys.shape[1], -1))  # (n, K, H / K, d)
        if q > 1:
            mask = mask.flatten(0, 2)[ends][:, None, None]
        return scaled_dot_product_attention(queries, keys, values, mask, scale=scale).flatten(1, 2)

    return attend


def decode(decoder, tokens, positions, attend, wanted=None):
    """Last hidden states (M, D) of the tokens `wanted` (M,); None: of all.

    tokens, positions: (N,) int64
    attend: (layer number, q (N or M, H, d), k, v (N, K, d), scale) -> (N or M, H, d); M in the last
        layer
    """
    x = decoder.embed_tokens(tokens)  # (N, D)
    angles = [angle[0, :, None] for angle in decoder.rotary_emb(x[None], positions[None])]
    for number, layer in enumerate(decoder.layers):
        last = number == len(decoder.layers) - 1
        step = (layer, number, x, angles, attend, wanted if last else None)
        if layer.gradient_checkpointing and torch.is_grad_enabled():
            x = checkpoint(_layer, *step, use_reentrant=False)
        else:
            x = _layer(*step)
    return _norm(decoder.norm, x)


def _layer(layer, number, x, angles, attend, wanted):
    """One decoder layer: (N, D) -> (N, D), or (M, D) of the tokens `wanted`."""
    project, finish = getattr(layer, "halves", (before_attention, after_attention))
    if wanted is not None:  # only in the last layer: not worth a compilation of its own
        project = before_attention
    x, queries, keys, values = project(layer, x, angles, wanted)
    return finish(layer, x, attend(number, queries, keys, values, layer.self_attn.scaling))


def before_attention(layer, x, angles, wanted=None):
    """States (N or M, D), queries (N or M, H, d), keys and values (N, K, d) of a layer's input."""
    attention, normed = layer.self_attn, _norm(layer.input_layernorm, x)
    keys, values = _heads(attention, "k", normed), _heads(attention, "v", normed)
    if wanted is None:
        queries = _heads(attention, "q", normed)
        both = _rotate(torch.cat([queries, keys], dim=1), *angles)
        queries, keys = both.split([queries.shape[1], keys.shape[1]], dim=1)
    else:
        keys = _rotate(keys, *angles)
        x, normed, angles = x[wanted], normed[wanted], [angle[wanted] for angle in angles]
        queries = _rotate(_heads(attention, "q", normed), *angles)
    return x, queries, keys, values


def after_attention(layer, x, seen):
    """A layer's output (N or M, D), with the results of its attention (N or M, H, d)."""
    x = x + layer.self_attn.o_proj(seen.flatten(1))
    return x + layer.mlp(_norm(layer.post_attention_layernorm, x))


def _heads(attention, name, x):
    """(N, D) -> (N, heads, d): projected, and in Qwen3 normalised."""
    states = getattr(attention, f"{name}_proj")(x).view(len(x), -1, attention.head_dim)
    norm = getattr(attention, f"{name}_norm", None)
    return _norm(norm, states) if norm else states


def _norm(norm, x):
    """Root mean square normalisation (Zhang and Sennrich 2019), in one call of torch."""
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotate(x, cos, sin):
    """Rotary position embedding (Su et al. 2021): pairs (i, i + d/2) turn by the angle."""
    one, other = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-other, one], dim=-1), sin)


def attend_to(queries, keys, values, mask, scale):
    """(n, H, q, d) for queries (n, H, q, d), keys and values (n, K, k, d): H is a multiple of K."""
    if queries.device.type != "cpu":  # with a mask, fast CUDA kernels need H key heads
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1)
                        for x in (keys, values))
    return scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)


def mask_of(decoder, masks, layer):
    """The mask of layer number `layer`; masks is a dict if layers differ in kind."""
    return masks[decoder.config.layer_types[layer]] if isinstance(masks, dict) else masks
