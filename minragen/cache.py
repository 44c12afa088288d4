"""Which token sees which: keys and values that are kept, prompts that rows share, and masks.

Sampling keeps keys and values in `KVSlots`, so that nothing is computed twice; learning computes
what rows have in common once (`states_before`) and lets gradients flow back through it. Llama's
family runs by llama.py. Other decoders are unmodified transformers models: sampling gives them the
slots as `past_key_values`, explicit `position_ids` and a 4-D mask of floats; learning, whole rows.

Reading order: `KVSlots` and `forward_slots` (sampling), `states_before` and `PrefixTree`
(learning), `attention_masks`.

Axes: n rows in a forward pass, q new tokens of each, k keys, D hidden size, B rows, T tokens, N
nodes.

Tests: `python -m pytest tests/test_attention.py tests/test_rollout.py`.
"""

from contextlib import contextmanager
from itertools import accumulate, pairwise
from os.path import commonprefix

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from minragen.fast import llama

PAIRS = {"cpu": 2**18}  # of queries and keys in one attention call; on an accelerator 2**24


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


@torch.no_grad()
def forward_slots(model, slots, tokens, counts, first_row=0):
    """Append counts[i] ids of tokens[i] to slot first_row + i. Returns the last hidden state (n, D)
    of each.

    tokens: (n, q) int64, right-padded
    counts: (n,) int64; a row of 0 leaves its slot unchanged, and its output is undefined
    """
    n, q = tokens.shape
    rows = slice(first_row, first_row + n)
    filled = min(int(slots.bounds[rows].max()) + q, slots.capacity)
    positions = slots.lengths[rows, None] + torch.arange(q, device=slots.device)  # (n, q)
    slots.lengths[rows] += counts
    slots.bounds[rows] += q
    # Padding is written behind a row, perhaps behind the last position that the model has.
    position_ids = positions.minimum(slots.lengths[rows, None] - 1)
    keys = torch.arange(filled, device=slots.device)[None]
    decoder = model.base_model
    slots.set_positions(positions, filled, first_row)
    masks = attention_masks(model, visible_keys(decoder, tokens, positions, keys), positions, keys)
    ends = (counts - 1).clamp(min=0) + q * torch.arange(n, device=slots.device)
    if not llama.supports(decoder):
        with slots_attention(model):
            hidden = decoder(input_ids=tokens, attention_mask=masks, position_ids=position_ids,
                             past_key_values=slots, use_cache=True).last_hidden_state
        return hidden.flatten(0, 1)[ends]

    def attend(layer, queries, keys, values, scale):
        """Attention of one layer to its slots, as `llama.decode` asks for it."""
        keys, values = slots.update(*(x.unflatten(0, (n, q)).transpose(1, 2)
                                      for x in (keys, values)), layer)
        mask = _mask_of(decoder, masks, layer)
        if len(queries) > n:
            queries = queries.unflatten(0, (n, q)).transpose(1, 2)
            return _attend(queries, keys, values, mask, scale).transpose(1, 2).flatten(0, 1)
        # One query a row: the heads that share a key head take the place of queries.
        queries = queries.unflatten(1, (keys.shape[1], -1))  # (n, K, H / K, d)
        if q > 1:
            mask = mask.flatten(0, 2)[ends][:, None, None]
        return scaled_dot_product_attention(queries, keys, values, mask, scale=scale).flatten(1, 2)

    return llama.decode(decoder, tokens.flatten(), position_ids.flatten(), attend,
                        ends if q > 1 else None)


# ---- Learning ------------------------------------------------------------------------------------
def states_before(decoder, tokens, mask):
    """Last hidden states (N, D) at the positions before the masked tokens, in row-major order.

    In Llama's family the beginnings that rows share are computed once (`PrefixTree`). Other
    decoders get whole rows without a mask: under causal attention a real token never sees the
    padding to its right.

    decoder: a model without its head      tokens: (B, T) int64      mask: (B, T), False in column 0
    """
    if not shares_beginnings(decoder):
        masks = None
        if hasattr(decoder, "to_last"):
            places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            masks = attention_masks(decoder, visible_keys(decoder, tokens, places, places),
                                    places, places)
        hidden = decoder(input_ids=tokens, attention_mask=masks, use_cache=False).last_hidden_state
        return hidden[:, :-1][mask[:, 1:]]
    tree = PrefixTree(decoder, tokens, mask)
    if not len(tree.tokens):  # nothing is masked
        return decoder.embed_tokens(tree.tokens)
    states = llama.decode(decoder, tree.tokens, tree.positions, tree.attend, tree.asked)
    return states.index_select(0, tree.answers)


def shares_beginnings(decoder):
    """Whether the learner computes the beginnings that rows share once."""
    return llama.supports(decoder) and not getattr(decoder, "learner_attention", "")


def choose_attention(model, name, attention):
    """Let the learner's passes use an attention of transformers, if it can be had here."""
    model.base_model.learner_attention = attention
    model.base_model.slots_attention = model.config._attn_implementation
    if attention:
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model {name!r} cannot use attention {attention!r}: "
                             f"{str(error).strip().splitlines()[0]}") from None


@contextmanager
def slots_attention(model):
    """Use the model's usual attention: that of option --attention is for the learner's passes, and
    may not take the masks of a rollout."""
    if not getattr(model.base_model, "learner_attention", ""):
        yield
        return
    config = model.config.get_text_config()
    learners = config._attn_implementation
    config._attn_implementation = model.base_model.slots_attention
    try:
        yield
    finally:
        config._attn_implementation = learners


def neighbours(rows):
    """The order in which rows with equal beginnings are neighbours, and how many ids each row has
    in common with the one before it. rows: lists of ids

    >>> neighbours([[1, 2, 3], [5, 6], [1, 2, 4, 7]])
    ([0, 2, 1], [0, 2, 0])
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return order, [0, *(len(commonprefix([rows[a], rows[b]])) for a, b in pairwise(order))]


def micro_batches(decoder, tokens, lengths, token_budget, rank=0, size=1):
    """Row indices of the micro-batches of process `rank` of `size`: trees of at most `token_budget`
    nodes, or padded rows of as many ids; one row at least.

    Processes get stretches of the tree with about as many nodes each.
    """
    if not shares_beginnings(decoder):
        mine = lengths.argsort(descending=True, stable=True)[rank::size]
        return [mine[part] for part in padded_batches(lengths[mine], token_budget)]
    rows = [ids[:n] for ids, n in zip(tokens.tolist(), lengths.tolist())]
    order, common = neighbours(rows)
    ends = list(accumulate(len(rows[row]) - begin for row, begin in zip(order, common)))
    parts, nodes = [], 0
    for row, begin, end in zip(order, common, ends):
        own = len(rows[row]) - begin
        if min(int((end - own / 2) / ends[-1] * size), size - 1) != rank:
            continue
        if not parts or nodes + own > token_budget:
            parts.append([])
            nodes, own = 0, len(rows[row])
        parts[-1].append(row)
        nodes += own
    return [torch.tensor(part).to(tokens.device, non_blocking=True) for part in parts]


def padded_batches(lengths, token_budget):
    """Row indices, longest first, cut so that rows * longest <= token_budget; at least one each."""
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        rows = max(1, token_budget // int(lengths[order[start]]))
        yield order[start:start + rows]
        start += rows


class PrefixTree:
    """A micro-batch as a prefix tree: each prefix that rows share is stored and computed once.

    Every id is a node and sees the nodes before it in any row that goes through it. The members of
    a group share their prompt, all groups the rules of the game, and some members their first
    replies. The gradient of a node is the sum over the rows that go through it.

    tokens, positions: (N,) of the nodes      asked: (M,) nodes whose last state is wanted
    answers: for each masked token, the index in `asked` of the node before it
    """

    def __init__(self, decoder, tokens, mask):
        self._decoder, self._device = decoder, tokens.device
        masked = [[p for p, m in enumerate(row) if m] for row in mask.tolist()]
        # The last masked token is only predicted: it and what follows need no state.
        rows = [ids[:max(places, default=0)] for ids, places in zip(tokens.tolist(), masked)]
        paths, own, ids, path = [None] * len(rows), [], [], []
        for row, begin in zip(*neighbours(rows)):
            path = [*path[:begin], *range(len(ids), len(ids) + len(rows[row]) - begin)]
            paths[row] = path
            own.append((path, range(begin, len(path))))
            ids += rows[row][begin:]
        before = [path[p - 1] for path, places in zip(paths, masked) for p in places]
        asked = {node: i for i, node in enumerate(sorted(set(before)))}
        self.tokens, self.asked = self._tensor(ids), self._tensor(list(asked))
        self.positions = self._tensor([p for _, positions in own for p in positions])
        self.answers = self._tensor([asked[node] for node in before])
        # In the last layer only the nodes in `asked` have queries.
        few = [(path, [p for p in positions if path[p] in asked]) for path, positions in own]
        self._parts = self._cut(own, range(len(ids)))
        self._last_parts = self._cut(few, asked)

    def attend(self, layer, queries, keys, values, scale):
        """Attention of one layer, as `llama.decode` asks for it."""
        last = layer == len(self._decoder.layers) - 1
        parts, order = self._last_parts if last else self._parts
        seen = []
        for at, keys_at, masks, real in parts:
            q, k, v = (x.index_select(0, i.flatten()).unflatten(0, i.shape).transpose(1, 2)
                       for x, i in ((queries, at), (keys, keys_at), (values, keys_at)))
            out = _attend(q, k, v, _mask_of(self._decoder, masks, layer), scale)
            seen.append(out.transpose(1, 2).flatten(0, 1).index_select(0, real))
        return torch.cat(seen).index_select(0, order)

    def _cut(self, rows, number):
        """Split the attention of a layer into groups of rows of similar length, to waste little on
        padding. Returns the parts, and the order of their results.

        rows: [(path, positions that ask)]      number: node -> its number among the queries
        """
        rows = sorted((row for row in rows if row[1]), key=lambda row: -len(row[1]))
        parts, part = [], []
        for row in rows:
            part.append(row)
            pairs = len(part) * len(part[0][1]) * max(len(path) for path, _ in part)
            if row is rows[-1] or pairs > PAIRS.get(self._device.type, 2**24):
                parts.append(self._part(part, number))
                part = []
        order = [number[path[p]] for path, positions in rows for p in positions]
        return parts, self._tensor(order).argsort()

    def _part(self, rows, number):
        """(numbers of the queries (n, q), nodes of the keys (n, k), masks, index of those of the
        n * q queries that are no padding). Padding repeats the last query."""
        q = max(len(positions) for _, positions in rows)
        k = 1 + max(positions[-1] for _, positions in rows)
        padded = [[*positions, *[positions[-1]] * (q - len(positions))] for _, positions in rows]
        position = self._tensor(padded)
        places = torch.arange(k, device=self._device)[None]
        asking = [[number[path[p]] for p in row] for row, (path, _) in zip(padded, rows)]
        return (self._tensor(asking),
                self._tensor([[*path[:k], *[0] * (k - len(path))] for path, _ in rows]),
                attention_masks(self._decoder, places[:, None, None] <= position[:, None, :, None],
                                position, places),
                self._tensor([i * q + j for i, (_, positions) in enumerate(rows)
                              for j in range(len(positions))]))

    def _tensor(self, numbers):
        return torch.tensor(numbers, dtype=torch.int64).to(self._device, non_blocking=True)


# ---- Masks ---------------------------------------------------------------------------------------
def visible_keys(decoder, tokens, positions, keys):
    """(n, 1, q, k) bool: each token sees itself and what is before it. If images are
    bidirectional (vision.py), the tokens of an image also see the rest of it.

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


def _attend(queries, keys, values, mask, scale):
    """(n, H, q, d) of queries (n, H, q, d), keys and values (n, K, k, d): H is a multiple of K."""
    if queries.device.type != "cpu":  # with a mask, fast CUDA kernels want as many key heads
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1)
                        for x in (keys, values))
    return scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)


def _mask_of(decoder, masks, layer):
    """The mask of a layer, by number, where layers differ in kind."""
    return masks[decoder.config.layer_types[layer]] if isinstance(masks, dict) else masks
