"""The check at start-up that cached turns, and the learner, give a full pass's logprobs.

It compares with transformers' own forward pass of the same weights, so an architecture that the KV
slots, the masks or fast/ compute wrongly is refused before it trains on wrong numbers.

Three rows grow by pieces, as conversations do (a column is one call of `Policy.extend`):

    row 0   length-14   1   1   4   1   0
    row 1   length-18   1   0   9   1   1
    row 2   length-22   1   1   2   1   1

After each piece the logits after every row's last token are compared. The slots of the first piece
are copied, as those of prompts are.

Tests: `python -m pytest tests/test_rollout.py tests/test_models.py`.
"""

import copy

import torch
from torch.nn.utils.rnn import pad_sequence

from minragen import cache
from minragen.cache import KVSlots, regather
from minragen.fast.policies import packed, usual_attention
from minragen.look.diagnostics import max_positions

PROOF_TOKENS = 48  # per row of the proof, in addition to any window
# Compute limit of the proof, some seconds: tokens of a row x parameters; other devices 2**43.
PROOF_BUDGET = {"cpu": 2**33, "mps": 2**36}
TOLERANCE = 1e-4  # nats, in float32; in the policy's own dtype:
ROUNDED_TOLERANCE = 0.3
LARGEST = 10  # no single gap may exceed this many times the mean's tolerance


def prove(policy, max_context):
    """Prove that cached turns give a full pass's logprobs, in the policy's dtype and in float32.

    The turns exceed the sliding window where max_context and PROOF_BUDGET allow it.

    returns: what was proved, for the console
    raises: ValueError if the model has too few positions, RuntimeError if it is unsupported
    """
    name, model, most = policy.name, policy.model, max_positions(policy.model)
    if max_context > most:
        raise ValueError(f"max_context is {max_context} and model {name!r} has positions for "
                         f"{most} tokens. Lower --max-context.")
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    affordable = PROOF_BUDGET.get(policy.device.type, 2**43) // model.num_parameters()
    image_store = policy.image_store
    for dtype, tolerance in {model.dtype: ROUNDED_TOLERANCE, torch.float32: TOLERANCE}.items():
        try:
            least = PROOF_TOKENS + 2 * len(image_store.proof_ids() if image_store else ())
            length = min(most, max(least, min(max_context, window + PROOF_TOKENS, affordable)))
            if dtype == model.dtype:
                gap, largest = _gaps(policy, length)
            else:  # with the usual attention throughout: flash attention has no float32
                exact = in_float32(policy)
                with usual_attention(exact.model):
                    gap, largest = _gaps(exact, length)
        except Exception as error:  # decoders fail in many ways on a cache not made for them
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            images = f" or images of {image_store.shape}" if image_store else ""
            raise RuntimeError(f"model {name!r} cannot use the KV slots{images}: "
                               f"{reason}") from error
        if not (gap <= tolerance and largest <= LARGEST * tolerance):  # nan too
            raise RuntimeError(f"model {name!r} differs between cached turns and a full pass by "
                               f"{gap:.2g} nats in {dtype} on average, {largest:.2g} at most; "
                               f"allowed are {tolerance} and {LARGEST * tolerance:g}. Its "
                               f"attention, states or output layer do something that we do not. "
                               f"docs/models.md lists what works.")
    policy.begin_rollout()
    rest = f"; its window of {window} was not reached" if length <= window < max_context else ""
    return f"cached turns of {length} tokens equal a full pass, gap {gap:.0e} nats{rest}"


def in_float32(policy):
    """The policy with a float32 copy of its model."""
    exact = copy.copy(policy)
    exact.model = copy.deepcopy(policy.model).float()
    if exact.hidden_before == packed:  # for flash attention, which has no float32
        exact.hidden_before = cache.hidden_before
    return exact


@torch.no_grad()
def _gaps(policy, length):
    """(mean, maximum) of |logprob - that of a full pass of transformers' model|, in nats: of cached
    turns in three rows and of the learner the larger one."""
    model = policy.model
    slots, lengths, gaps = KVSlots(model, 3, length), torch.zeros(3, dtype=torch.int64), []
    tokens = torch.randint(model.config.get_text_config().vocab_size, (3, length),
                           generator=torch.Generator().manual_seed(0))
    tokens[1, :length // 2] = tokens[0, :length // 2]  # a prefix to share
    pieces = torch.tensor([[length - 14, length - 18, length - 22], [1, 1, 1], [1, 0, 1],
                           [4, 9, 2], [1, 1, 1], [0, 1, 1]])
    for mark in ("image_token_id", "video_token_id", "audio_token_id"):
        tokens[tokens == (getattr(model.config, mark, None) or -1)] = 0  # no images
    if image_store := policy.image_store:
        _insert_images(image_store, tokens, pieces)
    full = model(tokens.to(slots.device), use_cache=False).logits.float().log_softmax(dim=-1)
    largest = 0.0
    for turn, counts in enumerate(pieces):
        if turn == 1:
            slots = regather([(slots, [0, 1, 2])], length)
        fresh = [row[start:start + n] for row, start, n in zip(tokens, lengths, counts)]
        cached = policy.extend(slots, pad_sequence(fresh, batch_first=True).to(slots.device),
                               counts.to(slots.device))
        lengths += counts
        gap = (cached.float().log_softmax(dim=-1) - full[torch.arange(3), lengths - 1]).abs()
        gap = gap[(counts > 0).to(slots.device)]
        gaps, largest = gaps + gap.mean(dim=-1).tolist(), max(largest, float(gap.max()))
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, length // 2 + 1::2] = True
    tokens, mask = tokens.to(slots.device), (mask & (tokens < full.shape[-1])).to(slots.device)
    ours, _ = policy.logprobs(tokens, mask)
    theirs = full[:, :-1][mask[:, 1:]].gather(-1, tokens[mask][:, None])[:, 0]
    learner = (ours[mask] - theirs).abs()
    return max(sum(gaps) / len(gaps), float(learner.mean())), max(largest, float(learner.max()))


def _insert_images(image_store, tokens, pieces):
    """Insert an image into the first piece of each row, and another into the fourth."""
    first, other = (torch.tensor(image_store.proof_ids(seed)) for seed in range(2))
    pieces[0] -= len(other)
    tokens[:, 1:1 + len(first)] = first
    for row, start in zip(tokens, pieces[:3].sum(dim=0)):
        row[start:start + len(other)] = other
    pieces[3] += len(other)
