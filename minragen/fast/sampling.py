"""Sampling in which a GPU waits for the host once in AHEAD tokens.

`rollout.sample_replies` reads every token before it launches the next step, and while the host
reads, the GPU has nothing to do. Here AHEAD steps are launched one after the other, and then their
tokens are read together. A reply may have stopped among them: what was sampled behind its stop is
dropped, and its slot forgets the keys (AHEAD = 4, X stops a reply):

    row 0   a b c d   e X . .      two tokens too many; the slot keeps a b c d e
    row 1   a X . .                it swapped places with row 2 after the first four
    row 2   a b c d   e f g h

A row's random numbers belong to its trajectory and positions, so replies are rollout.py's. Where
flash.py runs, `regather` moves rows within their buffers, which the next rollout reuses: graphs.py
repeats kernels on fixed addresses, so what it captured once serves all that follow.

Tests: `python -m pytest tests/test_rows.py`.
"""

import torch
from torch.nn.functional import pad

from minragen import cache, rollout

AHEAD = 8  # tokens of a row between two looks; a stop wastes half as many steps on average
SHARE = 1 / 8  # slots of up to this share of a GPU's memory get full capacity at once, and are kept


def sample_replies(policy, frame, slots, logits, noise, rows, rules, progress):
    """`rollout.sample_replies` for a decoder whose slots hold nothing but keys and values."""
    noise = noise.to(policy.device, non_blocking=True)
    while noise.shape[1]:
        logits = sample_block(policy, frame, slots, logits, noise[:AHEAD], rows, rules, progress)
        order, live = stopped_behind(slots, rows[:noise.shape[1]])
        rows[:noise.shape[1]] = [rows[i] for i in order]
        noise, logits = noise[AHEAD:, live], logits[live]
    for slot, row in enumerate(rows):
        row.slot = slot


def sample_block(policy, frame, slots, logits, noise, rows, rules, progress):
    """Sample a token in each row for every line of noise (k, n), or fewer where a reply stops.
    Returns the logits (n, V) after the last. logits: (n, V)      rows: the first n are sampled"""
    sampled, n = [], noise.shape[1]
    for uniforms in noise:
        tokens, logprobs = rollout.sample_tokens(logits, uniforms, rules)
        sampled.append(torch.stack([tokens.float(), logprobs]))
        logits = policy.extend(slots, tokens[:, None], torch.ones_like(tokens))
    forgotten, count = [], 0
    for row, ids, logprobs in zip(rows, *torch.stack(sampled, dim=2).tolist()):
        before = len(row.ids)
        for token, logprob in zip(ids, logprobs):
            if row.stop is None:
                row.add(int(token), logprob, frame, rules)
        added = len(row.ids) - before
        count += added
        # The last id of a reply goes through the model with the next observation.
        forgotten.append(0 if row.stop is None else len(ids) - added + 1)
    progress(count)
    forgotten = torch.tensor(forgotten)
    slots.bounds[:n] -= forgotten
    slots.lengths[:n] -= forgotten.to(policy.device, non_blocking=True)
    return logits


def stopped_behind(slots, rows):
    """Swap slots so that those of the rows that go on come first. Returns the old place of each row
    in the new order, and the old places of the rows that go on, as an index on the device."""
    live = [i for i, row in enumerate(rows) if row.stop is None]
    order = slots.move_to_front(live)[:len(rows)]  # slots after those do not move
    index = torch.tensor(order[:len(live)], dtype=torch.int64)
    return order, index.to(slots.device, non_blocking=True)


def regather(room, kept, parts, capacity):
    """`cache.regather` that reuses the KVSlots in `kept`, or the first given, if large enough; else
    it makes new ones, for `room` tokens if they may stay. kept: one or none, replaced here"""
    parts = [(slots, index) for slots, index in parts if index]
    slots, n = parts[0][0], sum(len(index) for _, index in parts)
    token = sum(x[0, :, 0].nbytes for both in slots.layers.values() for x in both)
    stays = may_stay(slots.device, max(n, len(slots.lengths)) * room * token)
    if stays:
        capacity = max(capacity, room)
    fitting = [x for x in (*kept, slots) if n <= len(x.lengths) and capacity <= x.capacity]
    if not fitting:
        kept.clear()  # frees them before others are made
        made = cache.regather(parts, capacity)
        kept += [made] if stays else []
        return made
    made = fitting[0]
    bounds = [part.bounds[index] for part, index in parts]
    behind = (0, len(made.bounds) - n)
    parts = [(part, torch.tensor(index).to(made.device, non_blocking=True), int(longest.max()))
             for (part, index), longest in zip(parts, bounds)]
    made.bounds[:] = pad(torch.cat(bounds), behind)
    made.lengths[:] = pad(torch.cat([part.lengths[index] for part, index, _ in parts]), behind)
    for layer, both in made.layers.items():
        for i, buffer in enumerate(both):
            copies = [part.layers[layer][i][:, :, :filled][index] for part, index, filled in parts]
            for rows, x in zip(buffer[:n].split([*map(len, copies)]), copies):
                rows[:, :, :x.shape[2]] = x
    return made


def may_stay(device, size):
    """Whether slots of `size` bytes take at most SHARE of a GPU's memory."""
    return device.type != "cuda" or size <= SHARE * torch.cuda.get_device_properties(
        device).total_memory
