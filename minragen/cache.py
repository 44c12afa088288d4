"""Which token sees which: the keys and values that are kept while sampling, and masks.

Sampling keeps keys and values in `KVSlots`, so that nothing is computed twice. A decoder of
transformers takes the slots as its `past_key_values`, with explicit `position_ids` and a 4-D mask
of floats. Learning runs whole rows through the decoder (`states_before`). fast/ computes the same
with less work, for Llama's family.

Reading order: `KVSlots`, `append` (sampling), `states_before`, `micro_batches` (learning),
`attention_masks`.

Axes: n rows in a forward pass, q new tokens of each, k keys, D hidden size, B rows, T tokens.

Tests: `python -m pytest tests/test_attention.py tests/test_rollout.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


# ---- Sampling ------------------------------------------------------------------------------------
class KVSlots:
    """Preallocated keys and values of conversations of different lengths, without a graph.

    `update` writes each row's new keys at that row's own positions and returns the filled part of
    the slots; masks say what each query may see. Positions beyond a row's length hold padding from
    earlier calls: masked, and overwritten before they become visible.

    FOOTGUN: `new_zeros`, never `new_empty`: a masked key enters `0 * value`, and 0 * nan is nan.
    """

    def __init__(self, model, rows, capacity):
        self.device, self.capacity = next(model.parameters()).device, capacity
        self.layers = {}  # layer -> [keys, values], each (rows, heads, capacity, width)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)
        # At least the lengths, on the CPU: sizes must be known without a synchronisation.
        self.bounds = torch.zeros(rows, dtype=torch.int64)

    def set_lengths(self, lengths):
        """Forget what lies behind the first lengths[i] tokens of row i. lengths: list of int"""
        self.bounds = torch.tensor(lengths)
        self.lengths = self.bounds.to(self.device, copy=True, non_blocking=True)

    def set_positions(self, positions, filled, first_row=0):
        """Set where the next `update` writes, (n, q), and how many positions it returns."""
        self._positions, self._filled = positions, filled
        self._rows = slice(first_row, first_row + len(positions))
        self._index = torch.arange(len(positions), device=positions.device)[:, None]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Called by the decoder. key_states, value_states: (n, heads, q, width).

        A layer's slots are made at its first call, with the sizes and dtype that it uses.
        """
        new = key_states, value_states
        if layer_idx not in self.layers:
            self.layers[layer_idx] = [x.new_zeros(
                len(self.lengths), x.shape[1], self.capacity, x.shape[3]) for x in new]
        slots = [slot[self._rows] for slot in self.layers[layer_idx]]
        for slot, states in zip(slots, new):
            slot[self._index, :, self._positions] = states.transpose(1, 2)
        return [slot[:, :, :self._filled] for slot in slots]

    def get_seq_length(self, layer_idx=0):
        return self._filled

    def gather(self, index, capacity=None):
        """Gather slots by index, a list, into new buffers with room for `capacity` tokens each.

        Callers ask for one more turn's room, so memory grows as conversations do.
        """
        capacity, self.bounds = capacity or self.capacity, self.bounds[index]
        filled = min(int(self.bounds.max()), capacity, self.capacity)
        self.capacity = capacity
        index = torch.tensor(index).to(self.device, non_blocking=True)
        self.lengths = self.lengths[index]
        for slots in self.layers.values():
            for i, old in enumerate(slots):
                slots[i] = pad(old[:, :, :filled].index_select(0, index),
                               (0, 0, 0, self.capacity - filled))


class Placement(NamedTuple):
    """What a decoder needs to append tokens to slots."""

    positions: Tensor  # (n, q), at most the last real one of each row
    masks: Tensor | dict  # of `attention_masks`
    ends: Tensor  # (n,) index among the n * q tokens of each row's last real one


def place(model, slots, tokens, counts, first_row=0):
    """Reserve counts[i] positions of slot first_row + i and say where `slots.update` writes.

    Three slots of 4, 2 and 3 tokens get 2, 1 and 0 more (a dot is padding: written, never seen):

        before    a a a a           positions   4 5
                  b b                           2 .
                  c c c                         . .
        after     a a a a a a       ends        1 2 4
                  b b b .
                  c c c . .

    tokens: (n, q) int64, right-padded
    counts: (n,) int64; a row of 0 leaves its slot unchanged, and its output is undefined
    returns: a Placement
    """
    n, q = tokens.shape
    rows = slice(first_row, first_row + n)
    filled = min(int(slots.bounds[rows].max()) + q, slots.capacity)
    positions = slots.lengths[rows, None] + torch.arange(q, device=slots.device)
    slots.lengths[rows] += counts
    slots.bounds[rows] += q
    slots.set_positions(positions, filled, first_row)
    keys = torch.arange(filled, device=slots.device)[None]
    visible = visible_keys(model.base_model, tokens, positions, keys)
    # Padding is written behind a row, perhaps behind the last position that the model has.
    return Placement(positions.minimum(slots.lengths[rows, None] - 1),
                attention_masks(model, visible, positions, keys),
                (counts - 1).clamp(min=0) + q * torch.arange(n, device=slots.device))


@torch.no_grad()
def append(model, slots, tokens, counts, first_row=0):
    """Append counts[i] ids of tokens[i] to slot first_row + i, as `place` says. Returns the last
    hidden state (n, D) of each row."""
    call = place(model, slots, tokens, counts, first_row)
    hidden = model.base_model(input_ids=tokens, attention_mask=call.masks,
                              position_ids=call.positions, past_key_values=slots,
                              use_cache=True).last_hidden_state
    return hidden.flatten(0, 1)[call.ends]


# ---- Learning ------------------------------------------------------------------------------------
def states_before(decoder, tokens, mask):
    """Last hidden states (N, D) at the positions before the masked tokens, in row-major order.

    Whole rows need no mask: under causal attention a real token never sees the padding to its
    right.

    decoder: a model without its head      tokens: (B, T) int64      mask: (B, T), False in column 0
    """
    masks = None
    if hasattr(decoder, "to_last"):
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        masks = attention_masks(decoder, visible_keys(decoder, tokens, places, places), places,
                                places)
    hidden = decoder(input_ids=tokens, attention_mask=masks, use_cache=False).last_hidden_state
    return hidden[:, :-1][mask[:, 1:]]


def micro_batches(tokens, lengths, token_budget, rank=0, size=1):
    """Row indices of the micro-batches of process `rank` of `size`: padded rows of at most
    `token_budget` ids, one row at least."""
    mine = lengths.argsort(descending=True, stable=True)[rank::size]
    return [mine[part] for part in padded_batches(lengths[mine], token_budget)]


def padded_batches(lengths, token_budget):
    """Row indices, longest first, cut so that rows * longest <= token_budget; at least one each."""
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        rows = max(1, token_budget // int(lengths[order[start]]))
        yield order[start:start + rows]
        start += rows


# ---- Masks ---------------------------------------------------------------------------------------
def visible_keys(decoder, tokens, positions, keys):
    """(n, 1, q, k) bool: each token sees itself and what is before it. If images are
    bidirectional (more/vision.py), the tokens of an image also see the rest of it.

    tokens, positions: (n, q)      keys: positions, (n or 1, k)
    """
    if hasattr(decoder, "to_last"):
        positions = positions + decoder.to_last(tokens)
    # NOTE: never `is_causal`: with more keys than queries it aligns the triangle to the top left.
    return keys[:, None, None] <= positions[:, None, :, None]


def attention_masks(model, visible, queries, keys):
    """What a decoder takes as attention_mask: floats to add to the scores, 0 where a query sees a
    key and -inf elsewhere; a dict of them where layers differ in kind.

    Under a sliding window of w the query at position p sees the keys at p - w + 1 to p, as in
    transformers.masking_utils.

    visible: (n, 1, q, k) bool, what full attention sees
    queries, keys: their positions, (n, q) and (n or 1, k)
    """
    config, dtype = model.config.get_text_config(), next(model.parameters()).dtype
    window = getattr(config, "sliding_window", None)
    usual = "sliding_attention" if window else "full_attention"
    masks = {}
    for kind in {*(getattr(config, "layer_types", None) or [usual])}:
        seen = visible if kind == "full_attention" else visible & (
            keys[:, None, None] > queries[:, None, :, None] - window)
        masks[kind] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
            ~seen, -torch.inf)
    return masks if len(masks) > 1 else masks[kind]
