"""Batched multi-turn generation: many conversations at once, each token computed once.

Reading order: `Rules` (how a conversation is held), `collect` (RAGEN's agent proxy; what comes out,
the `Trajectory`, is in chat.py), `_Player` (rows that move on by themselves), `sample_tokens`,
`Batch` (what the learner takes). Keys and values are in cache.py, the random numbers in noise.py.

Axes: B rows, T tokens, V vocabulary, K turns, n rows in a forward pass, q new tokens of each.

Three invariants, each a test:
  1. tokens in = tokens out: the ids that were sampled are the ids that are trained;
  2. the response mask is recorded while sampling and never reconstructed;
  3. a cached multi-turn rollout gives the logprobs of one full forward pass over the finished
     sequence.

Differences from RAGEN's agent proxy on vLLM:
  1. A turn's observation is appended to the cache; RAGEN sends the whole conversation again every
     turn.
  2. A trajectory does not depend on what else is in the batch, up to rounding (noise.py).
  3. A reply stops where its format is complete: the environment ignores everything after it.

Tests: `python -m pytest tests/test_rollout.py tests/test_rows.py`.
"""

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TopKLogitsWarper, TopPLogitsWarper

from minragen.cache import KVSlots, joined
from minragen.chat import StopReason, Trajectory
from minragen.envs import image_of
from minragen.noise import reply_noise

MASS = 2**38  # probabilities are whole multiples of 1 / MASS; less likely tokens are never drawn


@dataclass(frozen=True)
class Rules:
    """How a conversation is held: the options of the same names in config.py."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    max_new_tokens: int = 64  # of a reply
    max_context: int = 1024  # tokens of a conversation
    max_rows: int = 256  # conversations at a time
    feed_share: float = 1.0  # ready rows are fed once they are this share of all; 1: wait for all
    token_budget: int = 8192  # padded ids in one forward pass of prompts or observations
    seed: int = 0  # of the noise


@torch.inference_mode()
def collect(policy, frame, groups, first_seed, rules, progress=lambda tokens: None):
    """Play one episode in every row of `groups`. Returns a trajectory for each, group-major.

    first_seed: group g plays the instance of seed first_seed + g
    progress: called with the number of tokens sampled since the last call
    raises: ValueError if a first prompt fills the context
    """
    trajectories = [first_prompt(frame, groups, row, observation, rules)
                    for row, observation in enumerate(groups.reset(first_seed))]
    _Player(policy, frame, groups, [t for t in trajectories if not t.error], rules, progress).play()
    return trajectories


def first_prompt(frame, groups, row, observation, rules):
    """The Trajectory of a fresh episode. Raises ValueError if its prompt leaves no room.

    observation: what `groups.reset` returned for the row: a text, or an exception
    """
    def prompt():  # of what the environment says and shows, images included
        t.system = frame.system_message(groups.envs[row])
        t.add_prompt(frame.open(t.system, observation))

    t = Trajectory.begin(groups, row, observation)
    if not t.error and (failure := groups.attempt(row, prompt)):
        t.fail(failure)
    if not t.error and len(t.tokens) >= rules.max_context:
        raise ValueError(f"the first prompt of {t.env} has {len(t.tokens)} tokens and max_context "
                         f"is {rules.max_context}: no room for a reply. Raise --max-context.")
    return t


def play_held_out(policy, frame, groups, rules, temperature, progress=lambda tokens: None,
                  first_seed=0):
    """Trajectories sampled at `temperature` with the noise that all validations have."""
    policy.begin_rollout()
    rules = replace(rules, top_k=0, top_p=1, seed=0, temperature=temperature)
    return collect(policy, frame, groups, first_seed, rules, progress)


@dataclass
class _Row:
    """A conversation, and the reply that is being sampled."""

    trajectory: Trajectory
    slot: int = -1  # of its keys and values; while it samples, its index in `sampling` counts
    cached: int = 0  # how many of its ids are in the slot between replies; 0: none
    times: tuple = ()  # seconds of time.time(): when it was fed, and when its reply was sent
    # -- of the reply
    cap: int = 0  # most tokens that it may have
    limit: StopReason | None = None  # its stop reason if it reaches the cap
    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    parts: int = 0  # of its format that have ended
    stop: StopReason | None = None

    def begin_reply(self, rules):
        room = rules.max_context - len(self.trajectory.tokens)
        self.cap, self.parts, self.stop = min(room, rules.max_new_tokens), 0, None
        self.ids, self.logprobs = [], []
        self.limit = (StopReason.CONTEXT if room <= rules.max_new_tokens else
                      StopReason.MAX_NEW_TOKENS)
        self.times = (time.time(),)

    def add(self, token, logprob, frame):
        """Add a token to the reply and note whether it ends it.

        raises: FloatingPointError if the logprob is not finite
        """
        if not math.isfinite(logprob):
            raise FloatingPointError("the policy's logits are not finite: the policy has diverged. "
                                     "Is the learning rate too large?")
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.parts = frame.parts_ended(self.ids, self.parts)
        if self.parts == len(frame.parts):
            self.stop = StopReason.ANSWER
        elif token in frame.end_ids:
            self.stop = StopReason.END_OF_TURN
        elif len(self.ids) == self.cap:
            self.stop = self.limit


class _Player:
    """Each conversation moves on by itself: the model reads its prompt, samples a reply, and waits
    until the environment has answered. Time goes to the right:

        a   f s s s s s s - - . f s s s ...       f   it is fed: a prompt, or an observation
        b   f s s s s - - - - . f s s s ...       s   its next token is sampled
        c   f s s s - - - - - - - - - - . ...     -   in flight: its environment has the reply
        d   f s s s s - - |                       .   ready: it waits for others to be fed with
        e                       f s s s ...       |   its episode is over: e takes its slot

    A slot holds the keys and values of all of a row's ids but the last one that was sampled, which
    goes through the model with the next observation. Slot i is that of `sampling[i]`.
    """

    def __init__(self, policy, frame, groups, trajectories, rules, progress):
        self.policy, self.frame, self.groups, self.rules = policy, frame, groups, rules
        # If every environment answers at once, all rows fit, and all are fed together, rows stay in
        # the same turn, and their replies are parsed in one batch, when the last one has stopped.
        self.together = rules.feed_share >= 1 and len(trajectories) <= rules.max_rows and not any(
            env.parallel for env in groups.envs)
        self.progress = progress
        rows = [_Row(t) for t in trajectories]
        self.ready, self.queue = rows[:rules.max_rows], rows[rules.max_rows:]
        # in_flight: row of the EnvGroups -> (_Row, the reply's text, Reply)
        self.sampling, self.stopped, self.in_flight = [], [], {}
        # What the rows of `sampling` sample from, (n, V), and their noise, (tokens to come, n).
        self.slots, self.logits, self.noise = None, None, None

    def play(self):
        """Play until no conversation is left."""
        while self.ready:
            self._feed()
            while not self._time_to_feed():
                wait = not self.sampling  # NOTE: as it was before the last of them stops
                if self.sampling:
                    self._sample_token()
                self._take_results(wait)

    def _time_to_feed(self):
        """Whether `feed_share` of the rows are ready, or (below 1) one while none samples."""
        rows = len(self.sampling) + len(self.stopped) + len(self.in_flight) + len(self.ready)
        alone = not self.sampling and self.rules.feed_share < 1
        return len(self.ready) >= min(rows, 1 if alone else max(1, self.rules.feed_share * rows))

    def _feed(self):
        """Feed the ready rows, which then sample. Slots are copied to a new order: rows in the
        middle of a reply, rows that go on, rows that begin, rows in flight."""
        self.ready.sort(key=lambda row: row.slot)  # and not by when their environments returned
        n, go_on = len(self.sampling), [row for row in self.ready if row.cached]
        begin = [row for row in self.ready if not row.cached]
        away = [row for row, *_ in self.in_flight.values() if row.cached]
        fresh = [row.trajectory.tokens[row.cached:] for row in go_on]
        if not (n or go_on or away):
            self.slots = None  # frees them before others are made
        self._begin_replies(go_on + begin)
        first, index, first_logits = self._prefill(begin) if begin else (None, [], None)
        longest = max(len(row.trajectory.tokens) for row in self.sampling + away)
        # The padding of shorter rows is written, too, and needs room.
        padded = max((row.cached for row in go_on), default=0) + max(map(len, fresh), default=0)
        self.slots = joined([(self.slots, [*range(n), *(row.slot for row in go_on)]),
                             (first, index), (self.slots, [row.slot for row in away])],
                            max(longest + self.rules.max_new_tokens, padded))
        self.logits = torch.cat([*[self.logits] * bool(n), *self._forward(self.slots, fresh, n),
                                 *[first_logits] * bool(begin)])
        for slot, row in enumerate(away, len(self.sampling)):
            row.slot = slot

    def _prefill(self, rows):
        """Prefill each distinct prompt once. Returns the slots, the index of the slot that each row
        begins with, and its logits, (n, V)."""
        prompts = [tuple(row.trajectory.tokens) for row in rows]
        distinct = {p: i for i, p in enumerate(dict.fromkeys(prompts))}
        slots = KVSlots(self.policy.model, len(distinct), max(map(len, distinct)))
        logits = torch.cat(self._forward(slots, list(distinct)))
        index = [distinct[p] for p in prompts]
        return slots, index, logits[self._upload(torch.tensor(index))]

    def _forward(self, slots, fresh, first=0):
        """Feed slot first + i the ids fresh[i], `token_budget` ids at a time. Returns the logits
        (n, V) after each one's last id, in a list of parts."""
        bounds, logits = slots.bounds.clone(), []
        rows = max(1, self.rules.token_budget // max(map(len, fresh), default=1))
        for start in range(0, len(fresh), rows):
            part = [torch.tensor(ids) for ids in fresh[start:start + rows]]
            counts = torch.tensor([len(ids) for ids in part])
            bounds[first + start:][:len(part)] += counts
            tokens = self._upload(pad_sequence(part, batch_first=True))
            logits.append(self.policy.extend(slots, tokens, self._upload(counts), first + start))
        slots.bounds = bounds  # the lengths, on the CPU; `extend` also counted padding
        return logits

    def _begin_replies(self, rows):
        """Begin an empty reply in each row. They sample from now on."""
        for row in rows:
            row.begin_reply(self.rules)
        noise = self._upload(reply_noise(self.rules, self.groups.split,
                                         [row.trajectory for row in rows], self.frame.appends))
        if self.sampling:
            earlier = pad(self.noise, (0, 0, 0, len(noise) - len(self.noise)))
            noise = torch.cat([earlier, noise], dim=1)
        self.noise, self.sampling, self.ready = noise, self.sampling + rows, []

    def _sample_token(self):
        """Sample the next token of the rows that sample, and feed it to those that go on.

        A row that stops swaps places with one of the last rows, slot and noise included:

            sampling a b c d e    b and d stop    sampling a e c    stopped d b (slots 3 and 4)
        """
        tokens, logprobs = sample_tokens(self.logits, self.noise[0], self.rules)
        self.noise = self.noise[1:]
        self._add(tokens, logprobs)
        live = [i for i, row in enumerate(self.sampling) if row.stop is None]
        if len(live) < len(tokens):
            index = self._upload(torch.tensor(self._move_to_front(live), dtype=torch.int64))
            self.noise, tokens = self.noise[:, index], tokens[index]
            if not (self.together and live):
                self._send_replies()
        if live:
            self.logits = self.policy.extend(self.slots, tokens[:, None], torch.ones_like(tokens))

    def _move_to_front(self, live):
        """Exchange rows so that those numbered `live` come first; the others have stopped. Returns
        the old index of each live row: for live 0 2 4, row 4 fills the gap at 1: 0 4 2."""
        order, rows = list(range(len(live))), self.sampling
        gaps = sorted({*order} - {*live})
        for i, j in zip(gaps, live[len(live) - len(gaps):]):
            rows[i], rows[j], order[i] = rows[j], rows[i], j
        if gaps:
            self.slots.swap(gaps, [order[i] for i in gaps])
        for slot, row in enumerate(rows[len(live):], len(live)):
            row.slot = slot
        self.sampling, self.stopped = rows[:len(live)], self.stopped + rows[len(live):]
        return order

    def _add(self, tokens, logprobs):
        """Add a token (n,) to the reply of each row that samples."""
        # Here the host waits for an accelerator: pack both tensors, to wait only once.
        both = torch.stack([tokens.int(), logprobs.view(torch.int32)]).cpu()
        self.progress(len(tokens))
        for row, token, logprob in zip(self.sampling, both[0].tolist(),
                                       both[1].view(torch.float32).tolist()):
            row.add(token, logprob, self.frame)

    def _upload(self, x):
        """To the policy's device, without waiting for it."""
        return x.to(self.policy.device, non_blocking=True)

    def _send_replies(self):
        """Add the replies to their conversations and give them to the environments."""
        rows, self.stopped = self.stopped, []
        texts = self.frame.tokenizer.batch_decode(
            [row.ids[:-1] if row.stop is StopReason.END_OF_TURN else row.ids for row in rows])
        replies = [self.frame.parse(text) for text in texts]
        for row, text, reply in zip(rows, texts, replies):
            t, row.times = row.trajectory, (*row.times, time.time())
            t.add_reply(row.ids, row.logprobs, len(t.turns))
            # The last id has not been through the model.
            row.cached = len(t.tokens) - 1 if self.frame.appends else 0
            self.in_flight[t.row] = row, text, reply
        self.groups.send([row.trajectory.row for row in rows], replies)

    def _take_results(self, wait):
        """End the turn of each row whose environment has returned; give it its next prompt."""
        for number, outcome in self.groups.receive(wait).items():
            row, text, reply = self.in_flight.pop(number)
            t, times = row.trajectory, (*row.times, time.time())
            t.end_turn(text, reply, row.stop, outcome, times)
            if not t.stop and image_of(t.observation) is not None:  # which the model may not take
                ids = self.groups.attempt(number, self.frame.between, None, t.observation)
                if isinstance(ids, Exception):
                    t.fail(ids)
            if not t.stop and self.frame.next(t, self.rules):  # appends the next prompt
                self.ready.append(row)
                continue
            t.stop = t.stop or StopReason.CONTEXT
            t.end()
            self.ready += self.queue[:1]  # takes its place
            del self.queue[:1]


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
        # The clamp is for logits that are nan: `_Row.add` refuses them.
        token = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(
            max=logits.shape[1] - 1)
    return token, log_p.gather(-1, token[:, None])[:, 0]


# ---- What the learner takes ----------------------------------------------------------------------
@dataclass
class Batch:
    """Sequences as right-padded tensors; B rows, one for each trajectory or one for each turn."""

    tokens: Tensor  # (B, T) int64
    attention_mask: Tensor  # (B, T) bool, the tokens that are no padding
    response_mask: Tensor  # (B, T) bool, the tokens that the policy sampled
    turn_ids: Tensor  # (B, T) int64
    sample_logprobs: Tensor  # (B, T) float32
    rewards: Tensor  # (B, T) float32, the environment's, on the last sampled token of each turn
    group_ids: Tensor  # (B,) int64
    episode_ids: Tensor  # (B,) int64
    episode_returns: Tensor  # (B,) float32, the sum of the environment's rewards in the episode
    state_ids: Tensor  # (B, T) int64, the state before a turn, on its last sampled token; else -1
    predicted_mask: Tensor  # (B, T) bool, the tokens of observations that ECHO predicts
    # -- added by train.compute_targets; (B, T) unless said otherwise
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    scores: Tensor | None = None  # (B,) what estimators compare within a group
    token_rewards: Tensor | None = None  # what REINFORCE and GAE sum up
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None  # what the critic learns to predict
    value_mask: Tensor | None = None  # the tokens where it learns
    # -- added by train.add_loss_weights
    loss_weights: Tensor | None = None
    mean_weights: Tensor | None = None  # weights of the mean over sampled tokens, for metrics
    value_weights: Tensor | None = None
    predicted_weights: Tensor | None = None

    def __len__(self):
        return len(self.tokens)

    @property
    def lengths(self):
        return self.attention_mask.sum(dim=1)

    def take(self, index):
        """The rows `index`, cut to the longest of them."""
        longest = int(self.lengths[index].max()) if len(index) else 0
        rows = {name: value[index] for name, value in vars(self).items() if value is not None}
        return Batch(**{name: v[:, :longest] if v.ndim == 2 else v for name, v in rows.items()})

    def to(self, device):
        return Batch(**{name: v.to(device) for name, v in vars(self).items() if v is not None})

    # -- E episodes and their B rows: the windowed contexts have a row for each turn, others one
    @property
    def episodes(self):
        """(B,) int64: the number of each row's episode, from 0 to E - 1."""
        return self.episode_ids.unique(return_inverse=True)[1]

    def by_episode(self, x):
        """One value an episode, (E,), of x (B,), which is the same in all its rows."""
        episodes = self.episodes
        return x.new_zeros(int(episodes.max()) + 1).scatter(0, episodes, x)

    def episode_scores(self):
        """(scores, group_ids), each one number an episode: what estimators compare."""
        return self.by_episode(self.scores), self.by_episode(self.group_ids)

    def episode_sums(self, x):
        """Each row's x becomes the sum over the rows of its episode. (B,) -> (B,)"""
        episodes = self.episodes
        return x.new_zeros(int(episodes.max()) + 1).index_add(0, episodes, x)[episodes]

    def to_tokens(self, x):
        """Each episode's x on all its sampled tokens, 0 elsewhere. (E,) -> (B, T)"""
        return x[self.episodes][:, None] * self.response_mask

    def by_turn(self, x):
        """The sums of x over the sampled tokens of each turn; 0 for turns that an episode lacks.
        (B, T) -> (E, K)"""
        at, episodes = self.response_mask, self.episodes
        table = x.new_zeros(int(episodes.max()) + 1, int(self.turn_ids.max()) + 1)
        place = episodes[:, None].expand_as(at)[at], self.turn_ids[at]
        return table.index_put(place, x[at], accumulate=True)

    def turns_to_tokens(self, table):
        """Each turn's number on all its sampled tokens, 0 elsewhere. (E, K) -> (B, T)"""
        return table[self.episodes[:, None], self.turn_ids.clamp(min=0)] * self.response_mask


def make_batch(trajectories):
    """Pad to the longest. Masks mark padding, so token id 0 stays usable.

    Groups are numbered again without gaps: one whose episodes all failed is no group.
    """
    rows = [(sequence, t, e) for e, t in enumerate(trajectories) for sequence in t.sequences]

    def column(name, fill):
        arrays = [np.array(getattr(s, name)) for s, _, _ in rows]  # faster than torch.tensor
        return pad_sequence([*map(torch.from_numpy, arrays)], batch_first=True, padding_value=fill)

    turn_ids = column("turn_ids", -1)
    rewards, predicted_mask = torch.zeros(turn_ids.shape), torch.zeros_like(turn_ids).bool()
    state_ids, states = torch.full_like(turn_ids, -1), {}
    for b, (sequence, t, _) in enumerate(rows):
        # A later position of the same turn replaces an earlier one.
        last = {turn: position for position, turn in enumerate(sequence.turn_ids) if turn >= 0}
        for turn, position in last.items():
            rewards[b, position] = t.turn_rewards[turn]
            state = t.turns[turn].observation.state
            state_ids[b, position] = states.setdefault((t.group_id, state), len(states))
        predicted_mask[b, sequence.predicted] = True
    lengths = torch.tensor([len(sequence.tokens) for sequence, _, _ in rows])
    return Batch(
        tokens=column("tokens", 0),
        attention_mask=torch.arange(turn_ids.shape[1]) < lengths[:, None],
        response_mask=column("response_mask", False), turn_ids=turn_ids,
        sample_logprobs=column("sample_logprobs", 0.0).float(), rewards=rewards,
        group_ids=torch.tensor([t.group_id for _, t, _ in rows]).unique(return_inverse=True)[1],
        episode_ids=torch.tensor([e for _, _, e in rows]),
        episode_returns=torch.tensor([t.episode_return for _, t, _ in rows]),
        state_ids=state_ids, predicted_mask=predicted_mask)
