"""Sampling on a GPU that does not wait: the host looks at several tokens at once, and slots stay.

`rollout.sample_replies` reads every token before it launches the next step, and while the host
reads, the GPU has nothing to do. Here AHEAD steps are launched one after the other, and then their
tokens are read together. A reply may have stopped among them: what was sampled behind its stop is
dropped, and its slot forgets the keys (AHEAD = 4, X stops a reply):

    row 0   a b c d   e X . .      two tokens too many; the slot keeps a b c d e
    row 1   a X . .                it swapped places with row 2 after the first four
    row 2   a b c d   e f g h

A row's noise belongs to its positions, so the replies are the same.

Between turns, `regather` moves rows within their buffers in place of making others: graphs.py
repeats kernels on fixed addresses, so what it captured in one turn serves the next ones, too.

Tests: `python -m pytest tests/test_rows.py`.
"""

import torch

from minragen import cache, rollout

AHEAD = 8  # tokens of a row between two looks; a stop wastes half as many steps on average
MOST = 0.25  # of a GPU's memory that slots may take to stay; larger ones grow as they are needed


def sample_replies(policy, frame, slots, logits, noise, rows, rules, progress):
    """`rollout.sample_replies` for a decoder whose slots hold nothing but keys and values."""
    columns = torch.arange(len(rows), device=policy.device)
    for block in noise.to(policy.device, non_blocking=True).split(AHEAD):
        n, sampled = len(columns), []
        for uniforms in block:
            tokens, logprobs = rollout.sample_tokens(logits, uniforms[columns], rules)
            sampled.append(torch.stack([tokens.float(), logprobs]))
            logits = policy.extend(slots, tokens[:, None], torch.ones_like(tokens))
        before = [len(row.ids) for row in rows[:n]]
        for row, ids, logprobs in zip(rows, *torch.stack(sampled, dim=2).tolist()):
            for token, logprob in zip(ids, logprobs):
                if row.stop is None:
                    row.add(int(token), logprob, frame, rules)
        added = [len(row.ids) - count for row, count in zip(rows, before)]
        progress(sum(added))
        # The last id of a reply goes through the model with the next observation.
        forgotten = torch.tensor([0 if row.stop is None else len(block) - count + 1
                                  for row, count in zip(rows, added)])
        slots.bounds[:n] -= forgotten
        slots.lengths[:n] -= forgotten.to(policy.device, non_blocking=True)
        live = [i for i in range(n) if rows[i].stop is None]
        if not live:
            break
        if len(live) < n:
            order = slots.move_to_front(live)  # of all slots; those behind the rows are unused
            rows[:] = [rows[i] for i in order[:len(rows)]]
            moved = torch.tensor(order[:len(live)]).to(policy.device, non_blocking=True)
            columns, logits = columns[moved], logits[moved]
    for slot, row in enumerate(rows):
        row.slot = slot


def regather(room, parts, capacity):
    """`cache.regather` into slots for `room` tokens; slots that have them are changed in place."""
    (slots, chosen), *others = parts
    n = len(chosen)
    if stays(slots, n * room):
        capacity = max(capacity, room)
    if others or n > len(slots.lengths) or capacity > slots.capacity:
        return cache.regather(parts, capacity)
    filled = int(slots.bounds[chosen].max())
    slots.bounds[:n] = slots.bounds[chosen]
    index = torch.tensor(chosen).to(slots.device, non_blocking=True)
    for x in (slots.lengths, *(x[:, :, :filled] for both in slots.layers.values() for x in both)):
        x[:n] = x[index]  # the right side is a copy
    return slots


def stays(slots, tokens):
    """Whether slots of so many tokens in all take no more than MOST of the GPU's memory."""
    if slots.device.type != "cuda":
        return True
    token = sum(x[0, :, 0].nbytes for both in slots.layers.values() for x in both)
    return token * tokens <= MOST * torch.cuda.get_device_properties(slots.device).total_memory
