"""Hybrids: decoders in which some layers keep no keys but a state of fixed size.

    layers of              keep for each row                               in
    gated delta nets       a matrix a head, some inputs of a convolution   Qwen3.5, Kimi Linear
    Mamba 2                the same                                        Granite 4 H, Nemotron-H
    short convolutions     their last inputs                               LFM2, LFM3

Padding would change a state, and no mask could hide it afterwards, as masks hide keys. So ids of
rows of different lengths go through the model in pieces of equal length. The states lie beside the
keys in `KVSlots`, which moves them. The learner's whole rows need nothing: padding on their right
comes after all that is read.

Reading order: `prepare`; `last_hidden` with `pieces` and `LayerStates`; `by_device`; `sizes`.

Axes: n rows in a forward pass, q new tokens of each, D hidden size.

Tests: `python -m pytest tests/test_hybrid.py`.
"""

import functools
import inspect
import math
import sys

import torch

from minragen.cache import KVSlots, reserve


def prepare(policy):
    """Let rollouts run in pieces, and layers give the same numbers for one id as for many."""
    policy.last_hidden = last_hidden
    limit = getattr(policy.model.config.get_text_config(), "time_step_limit", None)
    for module in policy.model.modules():
        # Nemotron-H and Zamba 2 clamp Mamba's step size dt from below in a scan over many ids, not
        # in a step of one, whatever config.json says (transformers pull request 48989).
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limit or (0.0, math.inf))
    for source in {type(module).__module__ for module in policy.model.modules()}:
        functions = vars(sys.modules[source])
        for name, function in [*functions.items()]:
            if inspect.isfunction(function) and "torch_function" in function.__code__.co_freevars:
                functions[name] = by_device(function)


@torch.no_grad()
def last_hidden(model, slots, tokens, counts, first_row=0):
    """`cache.last_hidden` in pieces: each is a pass without padding."""
    hidden = None
    wanted = counts.tolist()
    if min(wanted) == tokens.shape[1]:
        return one_pass(model, slots, tokens, counts, first_row)
    for chosen, begun, size in pieces(wanted):
        rows, starts = torch.tensor(chosen), torch.tensor(begun)
        part = tokens[rows[:, None], starts[:, None] + torch.arange(size)]
        # All rows are a slice: keys and states are then read in place, without a copy.
        where = first_row if len(chosen) == len(tokens) else rows + first_row
        last = one_pass(model, slots, part, counts.new_full((len(rows),), size), where)
        hidden = last.new_zeros(len(tokens), last.shape[1]) if hidden is None else hidden
        hidden[rows] = last
    return hidden


def one_pass(model, slots, tokens, counts, first_row):
    """`cache.last_hidden` for layers with states: right only if no row has padding."""
    positions, masks, ends = reserve(model, slots, tokens, counts, first_row)
    masks = masks if isinstance(masks, dict) else {"full_attention": masks}
    states = LayerStates(slots)
    hidden = model.base_model(
        input_ids=tokens, attention_mask=masks | dict.fromkeys(("linear_attention", "conv")),
        position_ids=positions, past_key_values=states, use_cache=True).last_hidden_state
    states.put_back()
    return hidden.flatten(0, 1)[ends]


def sizes(policy):
    """How many layers keep keys, and the bytes of a row's states."""
    slots, one = KVSlots(policy.model, 1, 1), torch.ones(1, 1, dtype=torch.int64)
    last_hidden(policy.model, slots, one.to(slots.device), one[0].to(slots.device))
    return len(slots.layers), sum(state.nbytes for state in slots.states.values())


def pieces(counts):
    """Divide rows of counts[i] ids into passes without padding: first the shortest row's count of
    all; then the shortest count left, or the largest power of two in the longest, if that is more.

    yields: (rows, where the piece begins in each, its size)

    >>> [*pieces([5, 7, 12])]
    [([0, 1, 2], [0, 0, 0], 5), ([2], [5], 4), ([1, 2], [5, 9], 2), ([2], [11], 1)]
    """
    left, size = [*counts], min(counts)
    while any(left):
        size = size or max(1 << max(left).bit_length() - 1, min(n for n in left if n))
        rows = [i for i, n in enumerate(left) if n >= size]
        yield rows, [counts[i] - left[i] for i in rows], size
        for i in rows:
            left[i] -= size
        size = 0


class LayerStates:
    """What the layers call in a pass: KVSlots, and the methods of transformers' Cache for states.

    Some kernels write into what `get_...` returned, which may be a copy of chosen rows. So what a
    layer has taken or given is kept here, and written to the slots after the pass.
    """

    def __init__(self, slots):
        self.slots, self.taken = slots, {}

    def __getattr__(self, name):
        return getattr(self.slots, name)

    def put_back(self):
        for name, state in self.taken.items():
            self.slots.set_state(name, state)

    def get_conv_state(self, layer_idx, state_idx=0):
        return self._take("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx, state_idx=0):
        return self._take("recurrent", layer_idx, state_idx)

    def _take(self, *name):
        if name not in self.taken and (state := self.slots.state(name)) is not None:
            self.taken[name] = state
        return self.taken.get(name)

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None):
        """Returns the earlier inputs, zeros before the first, and the new ones (n, channels, ...);
        the last `conv_kernel_size` of them are the new state."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        seen = torch.cat([before, conv_states], dim=-1)
        self.taken["conv", layer_idx, state_idx] = seen[..., -before.shape[-1]:]
        return seen

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0):
        self.taken["recurrent", layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx):
        return False


def by_device(function):
    """A function of transformers that takes an installed package's kernel only in half precision on
    a GPU. There is no kernel for a CPU, and in float32 a kernel may round to 10 bits (TF32), which
    the proof would take for a mistake.

    transformers' own function pads a row's last chunk to `chunk_size`, which is 64 or 256 ids.
    Here a chunk is at most the next power of two of the ids that there are.
    """
    inside = inspect.getclosurevars(function).nonlocals
    plain, kernel = inside["torch_function"], inside["implementation"]
    sizes = inspect.signature(plain).parameters

    @functools.wraps(plain)
    def chosen(x, *given, **named):
        half = any(getattr(each, "itemsize", 4) == 2 for each in (x, *given))
        if kernel is not plain and half and x.device.type != "cpu":
            return function(x, *given, **named)
        if "chunk_size" in sizes:
            usual = named.get("chunk_size", sizes["chunk_size"].default)
            named["chunk_size"] = min(usual, 1 << (x.shape[1] - 1).bit_length())
        return plain(x, *given, **named)

    return chosen
