"""Decode steps as CUDA graphs, for Llama's family.

A decode step of a small model is hundreds of kernels of some microseconds each, and to launch them
one by one from Python takes longer than they run. A captured graph launches them all at once. It
repeats the same kernels on the same addresses, so it belongs to one KVSlots and one model, has a
fixed number of rows, and attends to the whole capacity of the slots under a mask that hides what
lies beyond a row's end (flash.py reads each row's own length instead):

    sampling   a b c d e f g h    captured for eight rows
               a b c              the same graph: three rows, and five of padding
               a b                captured again, for two: the other serves 3 to 8
    next turn  a b c d e f        the first graph, if the slots are the same (sampling.py)

A row of padding has count 0, which leaves its slot's length as it is: what it writes lies behind
the row's end, where no query sees it. run/proof.py compares graphs, too, with a full pass.

Tests: `python -m pytest tests/test_rows.py`, and on a GPU tests/long/test_accelerator.py.
"""

from functools import cache
from weakref import WeakKeyDictionary

import torch

from minragen.fast import llama

DEVICES = {"cuda"}
# KVSlots -> its Steps. NOTE: a Step that held its slots would keep them forever.
STEPS = WeakKeyDictionary()


@torch.no_grad()
def last_hidden(model, slots, tokens, counts, first_row=0):
    """`llama.last_hidden`, for one id a row by a graph, whose next replay overwrites the result."""
    n, q = tokens.shape
    if q > 1 or first_row or slots.device.type not in DEVICES or synchronizes(model):
        return llama.last_hidden(model, slots, tokens, counts, first_row)
    steps = STEPS.setdefault(slots, [])
    step = next((step for step in steps if step.rows / 4 < n <= step.rows), None)
    if step is None:
        step = Step(model, slots, n)
        steps.append(step)
    return step.run(slots, tokens, counts)


def synchronizes(model):
    """Whether a step makes the host wait for a value of the GPU, which no graph can: whether an id
    is an image's, or the largest position, on which some rotary frequencies depend."""
    return getattr(model, "image_store", None) or model.base_model.rotary_emb.rope_type in (
        "dynamic", "longrope")


class Step:
    """A captured decode step of the first `rows` slots."""

    def __init__(self, model, slots, rows):
        self.rows = rows
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=slots.device)
        self.counts = torch.zeros_like(self.tokens[:, 0])
        self._kernels(model, slots)  # what a first call does, such as compiling, is not captured
        self.replay = Graph(lambda: self._kernels(model, slots), slots.device)

    def _kernels(self, model, slots):
        """What is captured: all positions of the slots are attended to."""
        bounds, slots.bounds = slots.bounds, torch.full_like(slots.bounds, slots.capacity)
        hidden = llama.last_hidden(model, slots, self.tokens, self.counts)
        slots.bounds = bounds
        return hidden

    def run(self, slots, tokens, counts):
        """Append counts[i] ids, 0 or 1, to slot i. Returns the last hidden states (n, D)."""
        n = len(tokens)
        self.tokens[:n], self.counts[:n], self.counts[n:] = tokens, counts, 0
        slots.bounds[:n] += 1
        return self.replay()[:n]


class Graph:
    """The kernels of function(), recorded. A call runs them again; its result is overwritten by the
    next call. Later graphs use the first one's memory pool, so a replay may overwrite results of
    other graphs; by then they have been used."""

    def __init__(self, function, device, first=False):
        shared = None if first else first_graph(device)
        self.graph = torch.cuda.CUDAGraph()
        # One stream for all: the allocator reuses memory only on the stream that it was made on.
        self.stream = shared.stream if shared else torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            # Not `torch.cuda.graph`, which first empties the allocator's cache.
            self.graph.capture_begin(pool=shared and shared.graph.pool(),
                                     capture_error_mode="thread_local")
            self.result = function()
            self.graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(self.stream)

    def __call__(self):
        self.graph.replay()
        return self.result


@cache
def first_graph(device):
    """The graph whose memory pool all share. It is cached forever, so the pool is never freed."""
    return Graph(lambda: torch.zeros(1, device=device), device, first=True)
