"""Learning with shared beginnings: each prefix that rows have in common is computed once.

The members of a group share their prompt, all groups the rules of the game, and some members their
first replies. Gradients flow back through what is shared. Llama's family only: llama.py runs its
decoder on the nodes of the tree.

Reading order: `hidden_before`, `PrefixTree`, `neighbours`, `micro_batches`.

Axes: B rows, T tokens, N nodes, M queries of the last layer, D hidden size.

Tests: `python -m pytest tests/test_attention.py`.
"""

from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import NamedTuple

import torch
from torch import Tensor

from minragen.cache import attention_masks
from minragen.fast.llama import attend_to, decode, mask_of

PAIRS = {"cpu": 2**18}  # of queries and keys in one attention call; on an accelerator 2**24


def hidden_before(decoder, tokens, mask):
    """Last hidden states (N, D) at the positions before the masked tokens, as in cache.py."""
    tree = PrefixTree(decoder, tokens, mask)
    if not len(tree.tokens):  # nothing is masked
        return decoder.embed_tokens(tree.tokens)
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

    Six nodes in place of eight ids; nodes 1 and 2 are computed for both a and b.

    tokens, positions: (N,) of the nodes      wanted: (M,) nodes whose last state is wanted
    state_of: for each masked token, the index in `wanted` of the node before it
    """

    def __init__(self, decoder, tokens, mask):
        self._decoder, self._device = decoder, tokens.device
        masked = [[p for p, m in enumerate(row) if m] for row in mask.tolist()]
        # The last masked token is only predicted: it and what follows need no state.
        rows = [ids[:max(places, default=0)] for ids, places in zip(tokens.tolist(), masked)]
        paths, new, ids, path = [None] * len(rows), [], [], []
        for row, shared in zip(*neighbours(rows)):
            path = [*path[:shared], *range(len(ids), len(ids) + len(rows[row]) - shared)]
            paths[row] = path
            new.append((path, range(shared, len(path))))  # the positions of its new nodes
            ids += rows[row][shared:]
        before = [path[p - 1] for path, places in zip(paths, masked) for p in places]
        number = {node: i for i, node in enumerate(sorted(set(before)))}
        self.tokens, self.wanted = self._tensor(ids), self._tensor(list(number))
        self.positions = self._tensor([p for _, positions in new for p in positions])
        self.state_of = self._tensor([number[node] for node in before])
        # In the last layer only the wanted nodes have queries.
        few = [(path, [p for p in positions if path[p] in number]) for path, positions in new]
        self._parts = self._cut(new, range(len(ids)))
        self._last_parts = self._cut(few, number)

    def attend(self, layer, queries, keys, values, scale):
        """Attention of one layer, as `llama.decode` asks for it."""
        last = layer == len(self._decoder.layers) - 1
        parts, order = self._last_parts if last else self._parts
        results = []
        for part in parts:
            pairs = (queries, part.queries), (keys, part.keys), (values, part.keys)
            q, k, v = (x.index_select(0, i.flatten()).unflatten(0, i.shape).transpose(1, 2)
                       for x, i in pairs)
            out = attend_to(q, k, v, mask_of(self._decoder, part.masks, layer), scale)
            results.append(out.transpose(1, 2).flatten(0, 1).index_select(0, part.real))
        return torch.cat(results).index_select(0, order)

    def _cut(self, rows, number):
        """Split the attention of a layer into Parts of rows of similar length, to waste little on
        padding. Returns them, and where the result of each query stands among all of theirs.

        rows: [(path, positions with a query)]      number: node -> number of its query
        """
        rows = sorted((row for row in rows if row[1]), key=lambda row: -len(row[1]))
        parts, together = [], []
        for row in rows:
            together.append(row)
            pairs = len(together) * len(together[0][1]) * max(len(path) for path, _ in together)
            if row is rows[-1] or pairs > PAIRS.get(self._device.type, 2**24):
                parts.append(self._part(together, number))
                together = []
        order = [number[path[p]] for path, positions in rows for p in positions]
        return parts, self._tensor(order).argsort()

    def _part(self, rows, number):
        """The Part of some rows, given and numbered as for `_cut`."""
        q = max(len(positions) for _, positions in rows)
        k = 1 + max(positions[-1] for _, positions in rows)
        padded = [[*positions, *[positions[-1]] * (q - len(positions))] for _, positions in rows]
        position, places = self._tensor(padded), torch.arange(k, device=self._device)[None]
        visible = places[:, None, None] <= position[:, None, :, None]
        return Part(
            queries=self._tensor([[number[path[p]] for p in positions]
                                  for positions, (path, _) in zip(padded, rows)]),
            keys=self._tensor([[*path[:k], *[0] * (k - len(path))] for path, _ in rows]),
            masks=attention_masks(self._decoder, visible, position, places),
            real=self._tensor([i * q + j for i, (_, positions) in enumerate(rows)
                               for j in range(len(positions))]))

    def _tensor(self, numbers):
        return torch.tensor(numbers, dtype=torch.int64).to(self._device, non_blocking=True)


def neighbours(rows):
    """The order in which rows with equal beginnings are neighbours, and how many ids each row has
    in common with the one before it. rows: lists of ids

    >>> neighbours([[1, 2, 3], [5, 6], [1, 2, 4, 7]])
    ([0, 2, 1], [0, 2, 0])
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return order, [0, *(len(commonprefix([rows[a], rows[b]])) for a, b in pairwise(order))]


def micro_batches(tokens, lengths, token_budget, rank=0, size=1):
    """Row indices of the micro-batches of process `rank` of `size`: trees of at most `token_budget`
    nodes, one row at least.

    Processes get stretches of the tree with about as many nodes each.
    """
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
