"""Play episodes: many conversations at once, all in the same turn, each token computed once.

Reading order: `Rules` (how a conversation is held), `collect` and `play` (RAGEN's agent proxy), the
parts of a turn in order: `feed`, `sample_replies`, `act`; last `sample_tokens`.

Axes: n conversations (rows of a forward pass), V vocabulary.

Three invariants, each a test:
  1. tokens in = tokens out: the ids that were sampled are the ids that are trained;
  2. the response mask is recorded while sampling and never reconstructed;
  3. a cached multi-turn rollout gives the logprobs of one full pass over the finished sequence.

A trajectory does not depend on what else is in the batch, up to rounding (support/noise.py). So
fast/scheduler.py, in which rows do not wait for each other, plays the same trajectories.

Tests: `python -m pytest tests/test_rollout.py tests/test_rows.py`.
"""

import math
import time
from dataclasses import dataclass, field, replace

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from minragen.cache import KVSlots
from minragen.support.noise import reply_noise
from minragen.trajectory import Reply, StopReason, Trajectory

MASS = 2**38  # probabilities are whole multiples of 1 / MASS; less likely tokens are never drawn


@dataclass(frozen=True)
class Rules:
    """How a conversation is held: options of config.py, which has defaults of its own."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    max_new_tokens: int = 64  # of a reply
    max_context: int = 1024  # tokens of a conversation
    max_rows: int = 256  # conversations at a time
    feed_share: float = 1.0  # of fast/scheduler.py: rows are fed once this share is ready
    token_budget: int = 8192  # padded ids in one forward pass of prompts or observations
    seed: int = 0  # of the noise

    def held_out(self, temperature):
        """The rules of a validation at `temperature`: all validations have the same noise."""
        return replace(self, top_k=0, top_p=1, seed=0, temperature=temperature)


@torch.inference_mode()
def collect(policy, frame, groups, first_seed, rules, progress=lambda tokens: None):
    """Play one episode in every row of `groups`. Returns a trajectory for each, group-major.

    first_seed: group g plays the instance of seed first_seed + g
    progress: called with the number of tokens sampled since the last call
    raises: ValueError if a first prompt fills the context
    """
    trajectories = [first_prompt(frame, groups, row, observation, rules)
                    for row, observation in enumerate(groups.reset(first_seed))]
    begun = [t for t in trajectories if not t.error]
    for start in range(0, len(begun), rules.max_rows):
        play(policy, frame, groups, begun[start:start + rules.max_rows], rules, progress)
    return trajectories


def first_prompt(frame, groups, row, observation, rules):
    """The Trajectory of a fresh episode. Raises ValueError if its prompt leaves no room.

    observation: what `groups.reset` returned for the row: a text, or an exception
    """
    t = Trajectory.begin(groups, row, observation)
    if not t.error and (failure := groups.attempt(
            row, frame.append_first_prompt, t, groups.envs[row])):
        t.fail(failure)
    if not t.error and len(t.tokens) >= rules.max_context:
        raise ValueError(f"the first prompt of {t.env} has {len(t.tokens)} tokens and max_context "
                         f"is {rules.max_context}: no room for a reply. Raise --max-context.")
    return t


def play(policy, frame, groups, trajectories, rules, progress):
    """Play conversations to their ends. All are in the same turn:

        turn 1   a b c d   feed the prompts, sample replies, step the environments
        turn 2   a   c d   feed the observations, ...           b's episode has ended
        turn 3       c

    A slot holds the keys and values of all ids of a conversation except the last sampled id, which
    goes through the model with the next observation.
    """
    rows, slots = [Conversation(t) for t in trajectories], None
    while rows:
        for row in rows:
            row.begin_reply()
        noise = reply_noise(rules, groups.split, [row.trajectory for row in rows], frame.appends)
        slots, logits = feed(policy, slots, rows, rules)
        sample = policy.sample_replies or sample_replies
        sample(policy, frame, slots, logits, noise, rows, rules, progress)
        rows = act(frame, groups, rows, rules)
        if not frame.appends:  # the next prompts begin anew
            slots = None


@dataclass
class Conversation:
    """A conversation, and the reply that is being sampled."""

    trajectory: Trajectory
    slot: int = -1  # between replies; while they are sampled, rows[i] has slot i
    cached: int = 0  # how many of its ids are in the slot between replies
    # -- the reply that is being sampled
    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    parts_ended: int = 0  # of the format's parts
    stop: StopReason | None = None
    text: str = ""
    reply: Reply = Reply()
    times: tuple = ()  # the first two of Turn.times

    def begin_reply(self):
        self.ids, self.logprobs, self.parts_ended, self.stop = [], [], 0, None
        self.times = (time.time(),)

    def add(self, token, logprob, frame, rules):
        """Add a token to the reply and note whether the token ends the reply."""
        if not math.isfinite(logprob):
            raise FloatingPointError("the policy's logits are not finite: the policy has diverged. "
                                     "Is the learning rate too large?")
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.parts_ended = frame.parts_ended(self.ids, self.parts_ended)
        if self.parts_ended == len(frame.parts):
            self.stop = StopReason.ANSWER
        elif token in frame.end_ids:
            self.stop = StopReason.END_OF_TURN
        elif len(self.trajectory.tokens) + len(self.ids) == rules.max_context:
            self.stop = StopReason.CONTEXT
        elif len(self.ids) == rules.max_new_tokens:
            self.stop = StopReason.MAX_NEW_TOKENS


# ---- The parts of a turn -------------------------------------------------------------------------
def feed(policy, slots, rows, rules):
    """Let the model read what is new: prompts, if there are no slots yet, or observations.

    slots: of the last turn; they cannot be used afterwards
    returns: KVSlots with slot i for rows[i], and the logits (n, V) of the replies' first tokens
    """
    fresh = [row.trajectory.tokens[row.cached:] for row in rows]
    capacity = max(len(row.trajectory.tokens) for row in rows) + rules.max_new_tokens
    if slots is None:
        slots, index, logits = prefill(policy, fresh, rules.token_budget)
        return policy.regather([(slots, index)], capacity), logits
    # `extend` writes padding, too, so the longest row plus the longest new text must fit.
    padded = max(row.cached for row in rows) + max(map(len, fresh))
    slots = policy.regather([(slots, [row.slot for row in rows])], max(capacity, padded))
    return slots, policy.extend_in_chunks(slots, fresh, rules.token_budget)


def prefill(policy, prompts, token_budget):
    """Feed each distinct prompt once. Returns the slots, each row's slot, and logits (n, V)."""
    distinct = {ids: i for i, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
    slots = KVSlots(policy.model, len(distinct), max(map(len, distinct)))
    logits = policy.extend_in_chunks(slots, list(distinct), token_budget)
    index = [distinct[tuple(ids)] for ids in prompts]
    return slots, index, logits[torch.tensor(index).to(policy.device, non_blocking=True)]


def sample_replies(policy, frame, slots, logits, noise, rows, rules, progress):
    """Sample a reply in each row, a token at a time. Rows that go on are kept in front: one that
    stops swaps place and slot with a later one, so `rows` is reordered.

        rows   a b c d e      b and d stop      a e c | d b

    logits: (n, V)      noise: (max_new_tokens, n)
    """
    columns = torch.arange(len(rows), device=policy.device)  # of the noise, for the rows that go on
    for uniforms in noise.to(policy.device, non_blocking=True):  # the CPU does not wait for this
        tokens, logprobs = sample_tokens(logits, uniforms[columns], rules)
        progress(len(tokens))
        # One tensor, one wait for the GPU; float32 is exact to 2**24. `zip` skips stopped rows.
        for row, token, logprob in zip(rows, *torch.stack([tokens.float(), logprobs]).tolist()):
            row.add(int(token), logprob, frame, rules)
        live = [i for i in range(len(tokens)) if rows[i].stop is None]
        if not live:
            break
        if len(live) < len(tokens):
            order = slots.move_to_front(live)
            rows[:] = [rows[i] for i in order]
            moved = torch.tensor(order[:len(live)]).to(policy.device, non_blocking=True)
            columns, tokens = columns[moved], tokens[moved]
        logits = policy.extend(slots, tokens[:, None], torch.ones_like(tokens))
    for slot, row in enumerate(rows):
        row.slot = slot


def act(frame, groups, rows, rules):
    """Step the environments. Returns the rows that go on, with their next prompts."""
    end_replies(frame, rows)
    outcomes = groups.step([row.trajectory.env_index for row in rows], [row.reply for row in rows])
    return [row for row, outcome in zip(rows, outcomes)
            if end_turn(frame, groups, row, outcome, rules)]


def end_replies(frame, rows):
    """Add each reply to its conversation, and parse it."""
    texts = frame.tokenizer.batch_decode(
        [row.ids[:-1] if row.stop is StopReason.END_OF_TURN else row.ids for row in rows])
    for row, text in zip(rows, texts):
        t, row.text, row.reply = row.trajectory, text, frame.parse(text)
        t.add_reply(row.ids, row.logprobs, len(t.turns))
        # The last id has not been through the model.
        row.cached = len(t.tokens) - 1 if frame.appends else 0
        row.times += (time.time(),)


def end_turn(frame, groups, row, outcome, rules):
    """Note what `groups.step` returned and append the next prompt. False if the episode is over."""
    t = row.trajectory
    t.end_turn(row.text, row.reply, row.stop, outcome, (*row.times, time.time()))
    if not t.stop:
        # In run/groups.py what this raises (a refused image) ends only this episode.
        fits = groups.attempt(t.env_index, frame.append_next_prompt, t, rules)
        if isinstance(fits, Exception):
            t.fail(fits)
        elif not fits:
            t.stop = StopReason.CONTEXT
    if t.stop:
        t.end()
    return not t.stop


# ---- Sampling ------------------------------------------------------------------------------------
def sample_tokens(logits, u, rules):
    """Draw one token per row by inverting the cumulative distribution at the uniforms `u`.

    One uniform a token, so the draw is a function of (logits, u) alone. The cumulative sums are of
    integers: they are exact and never fall, in whatever order a GPU adds.
    logits: (n, V)      u: (n,) multiples of 2**-24 in (0, 1)
    returns: tokens (n,) int64, logprobs (n,) float32 nats, before truncation; nan for logits that
        are not finite
    """
    log_p = (logits.float() / (rules.temperature or 1.0)).log_softmax(dim=-1)
    if rules.temperature == 0:
        token = log_p.argmax(dim=-1)
    else:
        kept = log_p
        if rules.top_k > 0:
            kept = TopKLogitsWarper(rules.top_k)(None, kept)
        if rules.top_p < 1:
            kept = TopPLogitsWarper(rules.top_p)(None, kept)
        cdf = (kept.exp() * MASS).long().cumsum(dim=-1)
        # floor(u * total), in integers of at most 24 + 38 bits. It is below the total, as u < 1.
        target = ((u * 2**24).long() * cdf[:, -1]) >> 24
        # With `right` no token of mass 0 is drawn. The clamp is for nan, which `add` refuses.
        token = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(
            max=logits.shape[1] - 1)
    return token, log_p.gather(-1, token[:, None])[:, 0]
