"""Learning with shared beginnings: each prefix that rows have in common is computed once.

The members of a group share their prompt, all groups the rules of the game, and some members their
first replies. Gradients flow back through what is shared. Llama's family only: llama.py runs its
decoder on the nodes of the tree.

Reading order: `hidden_before`, `PrefixTree`, `neighbours`, `micro_batches`.

Axes: B rows, T tokens, N nodes, M queries of the last layer, D hidden size.

Tests: `python -m pytest tests/test_attention.py`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minragen.cache import attention_masks
from minragen.fast import llama
from minragen.fast.llama import attend_to, decode, mask_of

PAIRS = {"cpu": 2**18}  # of queries and keys in one attention call; on an accelerator 2**24


def hidden_before(decoder, tokens, mask):
    """Last hidden states (N, D) before the tokens that mask selects, as in cache.py."""
    if not mask.any():
        return decoder.embed_tokens(tokens[mask])
    tree = PrefixTree(decoder, tokens, mask)
    states = decode(decoder, tree.tokens, tree.positions, tree.attend, tree.wanted)
    return states.index_select(0, tree.state_of)


class Part(NamedTuple):
    """One attention call: n rows of the tree with q queries and k keys each."""

    queries: Tensor  # (n, q) which query; padding repeats a row's last one
    keys: Tensor  # (n, k) which node
    masks: Tensor | dict  # of `attention_masks`
    real: Tensor  # which of the n * q results are no padding


class PrefixTree:
    """A micro-batch as a prefix tree: each prefix that rows share is stored and computed once.

    Every id is a node, and a row is a path of nodes. A node sees those before it on its path. Its
    gradient is the sum over the rows that go through it. Three rows:

        row  ids        sorted     nodes (new ones)     path
        a    5 6 7 8    c 4        0                    c  0
        b    5 6 9      a 5 6 7 8  1 2 3 4              a  1 2 3 4
        c    4          b 5 6 9    5                    b  1 2 5

    Six nodes in place of eight ids; nodes 1 and 2 are computed once for a and b. A path's entry is
    the largest node so far in its column of new ones: b takes 1 and 2 from a.

    tokens, positions: (N,) of the nodes      wanted: (M,) nodes whose last state is wanted
    state_of: for each token that mask selects, the index in `wanted` of the node before it
    """

    def __init__(self, decoder, tokens, mask):
        self._decoder, self._device = decoder, tokens.device
        ids, masked = tokens.cpu().numpy(), mask.cpu().numpy()
        columns = np.arange(ids.shape[1])
        # The last selected token is only predicted: it and what follows need no state.
        ends = (masked * columns).max(axis=1)
        order, shared = neighbours(ids, ends)
        self._ends = ends[order]  # from here on all rows are sorted
        inside = columns < self._ends[:, None]
        new = inside & (columns >= shared[:, None])
        nodes = new * (new.cumsum().reshape(new.shape) - 1)
        self._paths = np.maximum.accumulate(nodes, axis=0) * inside  # (B, T), 0 after the ends
        before = np.zeros_like(self._paths)
        before[order, 1:] = self._paths[:, :-1]
        before = before[masked]
        wanted = np.zeros(new.sum(), dtype=bool)
        wanted[before] = True
        asks = new & wanted[self._paths]  # where the last layer has queries
        self._flash = llama.kernels(decoder)
        if self._flash:
            # A segment copies its row's keys, so a row has only one: first to last query.
            asks = np.maximum.accumulate(asks, axis=1) & np.maximum.accumulate(
                asks[:, ::-1], axis=1)[:, ::-1]
            wanted = asks[new]
        self.tokens, self.positions = self._tensor(ids[order][new]), self._tensor(_columns(new))
        self.wanted = self._tensor(wanted.nonzero()[0])
        self.state_of = self._tensor(wanted.cumsum()[before] - 1)
        cut = self._segments if self._flash else self._cut
        self._parts, self._last_parts = cut(new), cut(asks)

    def attend(self, layer, queries, keys, values, scale):
        """Attention of one layer, as `llama.decode` asks for it."""
        last = layer == len(self._decoder.layers) - 1
        parts = self._last_parts if last else self._parts
        if flash := self._flash:
            keys, values = (x.index_select(0, parts.nodes) for x in (keys, values))
            return flash.attention(queries, keys, values, parts, scale,
                                   flash.window_of(self._decoder.config, layer))
        (parts, order), results = parts, []
        for part in parts:
            pairs = (queries, part.queries), (keys, part.keys), (values, part.keys)
            q, k, v = (x.index_select(0, i.flatten()).unflatten(0, i.shape).transpose(1, 2)
                       for x, i in pairs)
            out = attend_to(q, k, v, mask_of(self._decoder, part.masks, layer), scale)
            results.append(out.transpose(1, 2).flatten(0, 1).index_select(0, part.real))
        return torch.cat(results).index_select(0, order)

    def _segments(self, asks):
        """The attention of a layer as flash.Segments, one for each row with queries. Its keys are
        the row's path up to its last query:

            asks of a row   . . . 1 1 1 .      three queries
            its path        1 2 3 8 9 10 .     six keys

        asks: as in `_cut`, without a gap
        """
        queries = asks.sum(axis=1)
        rows = np.flatnonzero(queries)
        queries, keys = queries[rows], asks.shape[1] - asks[rows, ::-1].argmax(axis=1)
        nodes = self._paths[rows][np.arange(asks.shape[1]) < keys[:, None]]
        starts = (np.append(0, counts.cumsum()).astype(np.int32) for counts in (queries, keys))
        return self._flash.Segments(tuple(map(self._tensor, starts)),
                                    (int(queries.max()), int(keys.max())), self._tensor(nodes))

    def _cut(self, asks):
        """Split the attention of a layer into Parts of rows of similar length, to waste little on
        padding. Returns them, and the index of each query's result among their joined results.

        asks: (B, T) bool, whether the node there is new and has a query
        """
        counts, places = asks.sum(axis=1), _columns(asks)
        firsts = counts.cumsum() - counts
        rows = (-counts).argsort(kind="stable")[:np.count_nonzero(counts)]
        queries, keys = counts[rows].tolist(), self._ends[rows].tolist()
        parts, start = [], 0
        for end in range(1, len(rows) + 1):
            pairs = (end - start) * queries[start] * max(keys[start:end])
            if end == len(rows) or pairs > PAIRS.get(self._device.type, 2**24):
                parts.append(self._part(rows[start:end], firsts, counts, places))
                start = end
        order = torch.cat([part.queries.flatten()[part.real] for part in parts])
        numbers = torch.arange(len(order), device=self._device)
        return parts, torch.empty_like(order).scatter_(0, order, numbers)  # a quicker argsort

    def _part(self, rows, firsts, counts, places):
        """The Part of some rows, the one with most queries first.

        firsts, counts: (B,) the index of a row's first query, and how many queries it has
        places: of all queries, their positions
        """
        firsts, counts = firsts[rows, None], counts[rows, None]
        columns = np.arange(counts[0, 0])
        queries = firsts + np.minimum(columns, counts - 1)
        k = 1 + places[queries].max()
        position, keys = self._tensor(places[queries]), torch.arange(k, device=self._device)[None]
        visible = keys[:, None, None] <= position[:, None, :, None]
        return Part(
            queries=self._tensor(queries), keys=self._tensor(self._paths[rows, :k]),
            masks=attention_masks(self._decoder, visible, position, keys),
            real=self._tensor(np.flatnonzero(columns < counts)))

    def _tensor(self, numbers):
        return torch.tensor(numbers).to(self._device, non_blocking=True)


def _columns(places):
    """The columns of the true places of a matrix, row after row."""
    return np.flatnonzero(places) % places.shape[1]


def neighbours(ids, ends):
    """The order in which rows with equal beginnings are neighbours, and how many ids each row has
    in common with the one before it. ids: (B, T), of which each row has those before its end

    >>> neighbours(np.array([[1, 2, 3, 0], [5, 6, 0, 0], [1, 2, 4, 7]]), np.array([3, 2, 4]))
    (array([0, 2, 1]), array([0, 2, 0]))
    """
    # Big-endian, so that the bytes sort as the ids do.
    keys = [row[:end].tobytes() for row, end in zip(ids.astype(">i8"), ends)]
    order = np.array(sorted(range(len(ids)), key=keys.__getitem__), dtype=int)
    rows, ends = ids[order], ends[order]
    equal = (rows[1:] == rows[:-1]) & (
        np.arange(ids.shape[1]) < np.minimum(ends[1:], ends[:-1])[:, None])
    return order, np.append(0, np.logical_and.accumulate(equal, axis=1).sum(axis=1))


def micro_batches(tokens, lengths, token_budget, rank=0, size=1):
    """Row indices of the micro-batches of process `rank` of `size`: trees of at most `token_budget`
    nodes, one row at least.

    Processes get stretches of the tree with about as many nodes each.
    """
    lengths = lengths.cpu().numpy()
    order, common = neighbours(tokens.cpu().numpy(), lengths)
    lengths = lengths[order]
    ends = (lengths - common).cumsum()
    parts, nodes = [], 0
    for row, length, begin, end in zip(*(x.tolist() for x in (order, lengths, common, ends))):
        own = length - begin
        if min(int((end - own / 2) / ends[-1] * size), size - 1) != rank:
            continue
        if not parts or nodes + own > token_budget:
            parts.append([])
            nodes, own = 0, length
        parts[-1].append(row)
        nodes += own
    return [torch.tensor(part).to(tokens.device, non_blocking=True) for part in parts]
