"""Attention without masks: PyTorch's flash kernels, for bfloat16 on CUDA.

A segment is a stretch of keys. Its last tokens also have queries, and a query sees the segment's
keys up to its own token. One call computes all segments of a layer (FlashAttention-2, Dao 2023,
arXiv 2307.08691):

    segment 0   keys a b c d e f   queries of d e f
    segment 1   keys a b c g       the query of g

The learner's segments are the new nodes of its rows (prefix_tree.py). A rollout's are its rows: the
keys stay in their slots, and each row reads its own alone, however many another row has.

Reading order: `Segments`, `attention`, `slots_attention`, `usable`.

Axes: n segments, M queries, L keys of all segments, H query heads, K key heads, d width of a head.

Tests: `python -m pytest tests/test_attention.py -k Flash`.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries, keys and used keys of three segments each. With one query each, other kernels run.
TRIALS = (([7, 1, 300], [20, 64, 340], [11, 60, 333]), ([1, 1, 1], [20, 64, 340], [11, 60, 333]))


class Segments(NamedTuple):
    """The segments of a pass, in the order of their queries."""

    starts: tuple  # (queries, keys): where each segment begins, and the end: (n + 1,) int32 each
    longest: tuple  # (queries, keys) of the longest segments
    nodes: Tensor | None = None  # (L,) the node of prefix_tree.py that each key belongs to
    used: Tensor | None = None  # (n,) int32, how many of a segment's keys are used; None: all


def attention(queries, keys, values, segments, scale, window=None):
    """Results (M, H, d) for queries (M, H, d), keys and values (L, K, d): H is a multiple of K.

    window: each query sees only so many keys, its own included
    """
    before = window and window - 1  # so many keys before a query's own
    return torch.ops.aten._flash_attention_forward(
        queries, keys, values, *segments.starts, *segments.longest, 0.0, True, False, scale=scale,
        window_size_left=before, seqused_k=segments.used)[0]


def plain_attention(queries, keys, values, segments, scale, window=None):
    """The same, one segment after the other."""
    (asked, found), results = (starts.tolist() for starts in segments.starts), []
    counts = segments.starts[1].diff() if segments.used is None else segments.used
    for start, end, first, count in zip(asked, asked[1:], found, counts.tolist()):
        q, k, v = queries[start:end], keys[first:first + count], values[first:first + count]
        place = torch.arange(len(k), device=k.device)
        behind = place[-len(q):, None] - place
        seen = (behind >= 0) & (behind < (window or len(k)))
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        results.append(scaled_dot_product_attention(*heads, seen, scale=scale, enable_gqa=True))
    return torch.cat([x[0].transpose(0, 1) for x in results])


def slots_attention(decoder, slots, counts, first_row, q):
    """The callback attend of llama.decode, for a pass of q tokens a row, of which the first counts
    (n,) are real and the others padding. `cache.reserve` has made room for them.

    first_row: the first slot of the pass, a number
    """
    config, n = decoder.config, len(counts)
    lengths = slots.lengths[first_row:first_row + n]
    # A row's keys end with its last query, padding included: a real query sees none of it.
    all_queries = _rows(config, slots, first_row, q, lengths - counts + q)
    last_queries = _rows(config, slots, first_row, 1, lengths)

    def attend(layer, queries, keys, values, scale):
        slots.update(*(x.unflatten(0, (n, q)).transpose(1, 2) for x in (keys, values)), layer)
        segments = all_queries if len(queries) == n * q else last_queries
        return attention(queries, *map(_tokens, slots.layers[layer]), segments, scale,
                         window_of(config, layer))

    return attend


def _tokens(slots):
    """Slots (rows, K, capacity, d) as tokens (L, K, d), without a copy: the first key head of slot
    i begins at token i * K * capacity, each further head `capacity` tokens after the one before."""
    rows, K, capacity, d = slots.shape
    return slots.as_strided((((rows - 1) * K + 1) * capacity, K, d), (d, capacity * d, 1))


def _rows(config, slots, first_row, q, used):
    """The Segments of rows with q queries each, among the keys that `_tokens` returns."""
    starts = torch.arange(len(used) + 1, dtype=torch.int32, device=slots.device)
    apart = config.num_key_value_heads * slots.capacity
    places = q * starts, apart * (first_row + starts)
    return Segments(places, (q, slots.capacity), used=used.int())


def window_of(config, layer):
    """How many keys a query of a layer sees, None: all before it."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def usable(decoder):
    """Whether the kernels compute the attention of this decoder, which is on a GPU."""
    weight, layer = decoder.embed_tokens.weight, decoder.layers[0].self_attn
    return weight.dtype == torch.bfloat16 and agrees(
        weight.device, *(getattr(layer, f"{name}_proj").out_features // layer.head_dim
                         for name in "qk"), layer.head_dim)


@cache
@torch.inference_mode(False)
@torch.enable_grad()
def agrees(device, H, K, d):
    """Whether `attention` equals `plain_attention` here, on random segments and with gradients. A
    GPU may be too old, a head too wide, another PyTorch may have other kernels."""
    if all(_agree(device, H, K, d, *trial) for trial in TRIALS):
        return True
    print(f"warning   PyTorch's flash kernels fail on {device}: slower attention is used")
    return False


def _agree(device, H, K, d, asked, kept, used):
    """Whether both agree on segments with so many queries, keys and used keys."""
    rng, (ours, plain) = torch.Generator().manual_seed(0), ([], [])

    def random(*sizes):
        return torch.randn(*sizes, generator=rng).to(device, torch.bfloat16)

    def integers(numbers):
        return torch.tensor([*numbers], dtype=torch.int32, device=device)

    starts = tuple(integers([0, *accumulate(counts)]) for counts in (asked, kept))
    segments = Segments(starts, (max(asked), max(kept)))
    q, weights = random(sum(asked), H, d), random(sum(asked), H, d)
    k, v = (random(K, sum(kept), d).transpose(0, 1) for _ in range(2))  # in memory as in slots
    learnt = [x.requires_grad_() for x in (q, k, v)]
    try:
        for function, found in ((attention, ours), (plain_attention, plain)):
            for window in (None, 9):
                seen = function(q, k, v, segments, d**-0.5, window)
                found += [seen, *torch.autograd.grad((seen * weights).sum(), learnt)]
                with torch.no_grad():
                    found.append(function(q, k, v, segments._replace(used=integers(used)),
                                          d**-0.5, window))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return all((a - b).norm() <= 0.02 * b.norm() for a, b in zip(ours, plain))
