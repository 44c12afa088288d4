"""The keys and values that are kept while sampling, and masks: which token sees which.

Sampling keeps keys and values in `KVSlots`, which a decoder of transformers takes as its
`past_key_values`. Learning runs whole rows. For Llama's family fast/ computes both with less work.

    rollout.feed                       prefill or regather: makes the slots
        Policy.extend_in_chunks        reads prompts or observations
            Policy.extend              one forward pass; also of each sampled token
                last_hidden            reserve, then the decoder: in each layer KVSlots.update
                models.output_layer

Axes: n rows in a forward pass, q new tokens of each, k keys, D hidden size, B rows, T tokens.

Tests: `python -m pytest tests/test_attention.py tests/test_rollout.py`.
"""

import copy

import torch


# ---- Sampling ------------------------------------------------------------------------------------
class KVSlots:
    """The keys and values of conversations, each of which has a slot: one row of every buffer.

    `update` writes a row's new keys after its earlier keys and returns the buffers up to the end of
    the longest row. A shorter row ends in padding, which masks hide until new keys overwrite it.
    `lengths` are exact, on the device. `bounds` are upper limits of them on the CPU, where reading
    costs no wait: `reserve` adds counts to lengths and the padded q to bounds;
    `Policy.extend_in_chunks` then makes them equal.

    A row may also have states: tensors of one size, zero before its first token, which each pass
    replaces, as those of recurrent layers (more/hybrid.py). They move with the row's keys.

    FOOTGUN: `new_zeros`, never `new_empty`: a masked key still adds 0 * value, and 0 * nan is nan.

    capacity: tokens a row, rounded up to a multiple of 64: masks in fast/graphs.py get this width,
        and CUDA's attention copies masks of odd widths
    """

    def __init__(self, model, rows, capacity):
        self.device, self.capacity = next(model.parameters()).device, rounded_up(capacity, 64)
        self.layers = {}  # layer -> [keys, values], each (rows, heads, capacity, width)
        self.states = {}  # name -> (rows, ...)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.bounds = torch.zeros(rows, dtype=torch.int64)

    def set_positions(self, positions, filled, rows):
        """Tell `update` the positions (n, q) to write to, and how many positions to return.

        rows: the slots of the pass, a slice or (n,) int64
        """
        self._positions, self._filled = positions, filled
        self._rows = rows if isinstance(rows, slice) else rows.to(self.device)
        self._index = torch.arange(len(self.lengths), device=self.device)[self._rows, None]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Called by the decoder. key_states, value_states: (n, heads, q, width).

        A layer's buffers are made at its first call, with the sizes and dtype that it uses.
        """
        new = key_states, value_states
        if layer_idx not in self.layers:
            self.layers[layer_idx] = [x.new_zeros(
                len(self.lengths), x.shape[1], self.capacity, x.shape[3]) for x in new]
        for buffer, states in zip(self.layers[layer_idx], new):
            buffer[self._index, :, self._positions] = states.transpose(1, 2)  # (n, q, heads, width)
        return [buffer[self._rows, :, :self._filled] for buffer in self.layers[layer_idx]]

    def get_seq_length(self, layer_idx=0):
        return self._filled

    def state(self, name):
        """A state (n, ...) of the rows of this pass. Returns None if no row has it yet."""
        return self.states[name][self._rows] if name in self.states else None

    def set_state(self, name, new):
        """Replace a state of the rows of this pass. new: (n, ...)"""
        if name not in self.states:
            self.states[name] = new.new_zeros(len(self.lengths), *new.shape[1:])
        self.states[name][self._rows] = new

    def move_to_front(self, chosen):
        """Swap slots so that those in `chosen`, a rising list, come first. Returns the old slot of
        each new place: 0 4 2 3 1 if 0 2 4 of five slots are chosen."""
        order, kept = list(range(len(self.lengths))), {*chosen}
        gaps = [i for i in range(len(chosen)) if i not in kept]
        fill = [i for i in chosen if i >= len(chosen)]
        for gap, i in zip(gaps, fill):
            order[gap], order[i] = i, gap
        if gaps:
            filled = int(self.bounds.max())
            self.bounds[gaps + fill] = self.bounds[fill + gaps]
            to, of = torch.tensor([gaps + fill, fill + gaps]).to(self.device, non_blocking=True)
            for x in (self.lengths, *self.states.values(), *(
                    b[:, :, :filled] for both in self.layers.values() for b in both)):
                x[to] = x[of]
        return order


def regather(parts, capacity):
    """New KVSlots of `capacity` tokens a row with copies of the chosen slots, part after part. The
    given KVSlots cannot be used afterwards: their buffers are freed one by one.

    parts: [(KVSlots, [slot, ...])]; a list may be empty, or name a slot several times
    """
    parts = [(slots, torch.tensor(index)) for slots, index in parts if index]
    made = copy.copy(parts[0][0])
    made.capacity, made.layers, made.states = rounded_up(capacity, 64), {}, {}
    made.bounds = torch.cat([slots.bounds[index] for slots, index in parts])
    parts = [(slots, index.to(made.device, non_blocking=True), int(slots.bounds[index].max()))
             for slots, index in parts]
    made.lengths = torch.cat([slots.lengths[index] for slots, index, _ in parts])
    for layer in [*parts[0][0].layers]:
        news = made.layers[layer] = [
            x.new_zeros(len(made.lengths), x.shape[1], made.capacity, x.shape[3])
            for x in parts[0][0].layers[layer]]
        end = 0
        for slots, index, filled in parts:
            for new, old in zip(news, slots.layers[layer]):
                new[end:end + len(index), :, :filled] = old[:, :, :filled].index_select(0, index)
            end += len(index)
        for slots, *_ in parts:
            slots.layers.pop(layer, None)
    for name in [*parts[0][0].states]:
        made.states[name] = torch.cat([slots.states[name][index] for slots, index, _ in parts])
        for slots, *_ in parts:
            slots.states.pop(name, None)
    return made


def rounded_up(n, unit):
    """The smallest multiple of `unit` that is no less than n."""
    return -(-n // unit) * unit


@torch.no_grad()
def last_hidden(model, slots, tokens, counts, first_row=0):
    """One pass of new ids, as `reserve` draws it. Returns each row's last hidden state, (n, D)."""
    positions, masks, ends = reserve(model, slots, tokens, counts, first_row)
    hidden = model.base_model(input_ids=tokens, attention_mask=masks, position_ids=positions,
                              past_key_values=slots, use_cache=True).last_hidden_state
    return hidden.flatten(0, 1)[ends]


def reserve(model, slots, tokens, counts, first_row=0, masked=True):
    """Reserve counts[i] positions of slot first_row + i and set where `slots.update` writes.

    Two slots of 4 and 2 tokens get 2 and 1 more (a dot is padding: written, never seen):

        before      positions   after
        a a a a     4 5         a a a a a a
        b b         2 .         b b b .

    tokens: (n, q) int64, right-padded   counts: (n,) int64, 0 to q; a row of 0
        (run/proof.py, fast/graphs.py) has no meaningful result
    first_row: a number, or the n slots, (n,) int64 on the CPU
    returns: positions (n, q), masks (of `attention_masks`; None if not `masked`) and ends (n,), the
        index of each row's last real token among all n * q (here 1 and 2)
    """
    n, q = tokens.shape
    rows = slice(first_row, first_row + n) if isinstance(first_row, int) else first_row
    filled = min(int(slots.bounds[rows].max()) + q, slots.capacity)
    positions = slots.lengths[rows, None] + torch.arange(q, device=slots.device)
    slots.lengths[rows] += counts
    slots.bounds[rows] += q
    slots.set_positions(positions, filled, rows)
    masks = None
    if masked:  # not for fast/flash.py
        keys = torch.arange(filled, device=slots.device)[None]
        # NOTE: never `is_causal`: with fewer queries it aligns the triangle to the top left.
        visible = keys[:, None, None] <= positions[:, None, :, None]
        masks = attention_masks(model, visible, positions, keys)
    # Padding may lie beyond the model's largest position: it gets that of its row's last token.
    positions = positions.minimum(slots.lengths[rows, None] - 1)
    return positions, masks, counts - 1 + q * torch.arange(n, device=slots.device)


# ---- Learning ------------------------------------------------------------------------------------
def hidden_before(decoder, tokens, mask):
    """Last hidden states (N, D) at the positions before the masked tokens, in row-major order.

    Whole rows need no attention mask: a causal model's tokens never see the padding on their right.

    decoder: a model without its head      tokens: (B, T) int64      mask: (B, T), False in column 0
    """
    hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden[:, :-1][mask[:, 1:]]


def micro_batches(tokens, lengths, token_budget, rank=0, size=1):
    """Divide rows, longest first, into micro-batches of at most `token_budget` ids, padding
    included; a longer row is a micro-batch by itself. Returns each micro-batch's row indices, for
    process `rank` of `size`. Only fast/prefix_tree.py needs `tokens`."""
    rows, parts = lengths.argsort(descending=True, stable=True)[rank::size], []
    while len(rows):
        count = max(1, token_budget // int(lengths[rows[0]]))
        parts.append(rows[:count])
        rows = rows[count:]
    return parts


# ---- Masks ---------------------------------------------------------------------------------------
def attention_masks(model, visible, queries, keys):
    """What a decoder takes as attention_mask: floats to add to the scores, 0 where a query sees a
    key and -inf elsewhere; {kind: mask} if the model has layers of several kinds.

    Under a sliding window of w the query at position p sees the keys at p - w + 1 to p, as in
    transformers.masking_utils.

    visible: (n, 1, q, k) bool, what full attention sees
    queries, keys: their positions, (n, q) and (n or 1, k)
    returns: (n, 1, q, k), whose rows begin at multiples of 16 numbers in memory: in each layer,
        memory-efficient attention on CUDA would copy a mask of another layout
    """
    config, dtype = model.config.get_text_config(), next(model.parameters()).dtype
    window = getattr(config, "sliding_window", None)
    usual = "sliding_attention" if window else "full_attention"
    masks = {}
    kinds = {*(getattr(config, "layer_types", None) or [])}  # layers with states need no mask
    for kind in kinds & {"full_attention", "sliding_attention"} or {usual}:
        seen = visible if kind == "full_attention" else visible & (
            keys[:, None, None] > queries[:, None, :, None] - window)
        *rows, k = seen.shape
        wide = torch.zeros(*rows, rounded_up(k, 16), dtype=dtype, device=seen.device)
        masks[kind] = wide[..., :k].masked_fill_(~seen, -torch.inf)
    return masks if len(masks) > 1 else masks[kind]
