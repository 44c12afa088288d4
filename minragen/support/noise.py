"""Random numbers that belong to a trajectory and a position, whatever else is in the batch.

A counter-based generator: each uniform is a function of (run seed, split, environment, its seed,
member, position). So a trajectory draws the same numbers in any batch, on any number of processes.

Tests: `python -m pytest tests/test_rollout.py -k Noise`.
"""

import zlib

import torch


def reply_noise(rules, split, trajectories, appends):
    """The uniforms of the replies that come next, (max_new_tokens, B).

    Noise depends on the position. Where each turn begins a new row of tokens (not `appends`), turns
    must not share positions, or else equal prompts would get equal replies.
    """
    positions = torch.tensor([
        len(t.tokens) + (0 if appends else len(t.turns) * rules.max_context) for t in trajectories])
    return uniforms(noise_keys(rules.seed, split, trajectories),
                    positions + torch.arange(rules.max_new_tokens)[:, None])


def noise_keys(run_seed, split, trajectories):
    """(B,) 63-bit keys of everything that a trajectory's noise may depend on."""
    keys = torch.tensor([zlib.crc32(f"{split} {t.env}".encode()) for t in trajectories])
    seeds, members = [t.seed for t in trajectories], [t.member for t in trajectories]
    for part in (run_seed, torch.tensor(seeds), torch.tensor(members)):
        keys = _mix(keys ^ part) & (2**63 - 1)
    return keys


def uniforms(noise_keys, positions):
    """Counter-based uniforms in (0, 1): a function of (key, position) and of nothing else.

    Never exactly 0, which would draw the first token however improbable it is.
    noise_keys, positions: int64 of shapes that broadcast
    returns: float32, odd multiples of 2**-24
    """
    bits = _shift(_mix(_mix(noise_keys) + positions), 41)  # the upper 23 bits
    return (2 * bits + 1).float() / 2**24


def _mix(x):
    """The finaliser of SplitMix64 (Steele et al. 2014); products of int64 tensors wrap around."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def _shift(x, bits):
    return (x >> bits) & (2**(64 - bits) - 1)  # logical: torch shifts int64 arithmetically
