"""Batched multi-turn generation: many conversations at once, each token computed once.

Reading order: `Rules` (how a conversation is held), `collect` (RAGEN's agent proxy; what comes out,
the `Trajectory`, is in chat.py), `_Player.play` (the loop over turns) and `_sample_replies` (the
loop over tokens), `sample_tokens` and `uniforms` (where randomness comes from), `describe`, `Batch`
(what the learner takes). The keys and values are in cache.py.

Axes: B rows, T tokens, V vocabulary, K turns, n rows in a forward pass, q new tokens of each.

Three invariants, each a test:
  1. tokens in = tokens out: the ids that were sampled are the ids that are trained;
  2. the response mask is recorded while sampling and never reconstructed;
  3. a cached multi-turn rollout gives the logprobs of one full forward pass over the finished
     sequence.

Differences from RAGEN's agent proxy on vLLM:
  1. A turn's observation is appended to the cache; RAGEN sends the whole conversation again every
     turn.
  2. The noise of a token is a function of (run seed, split, environment, its seed, member,
     position), so a trajectory does not depend on what else is in the batch.
  3. A reply stops at `</answer>`: the environment ignores everything after it.

Tests: `python -m pytest tests/test_rollout.py`.
"""

import math
import zlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TopKLogitsWarper, TopPLogitsWarper

from minragen.cache import KVSlots
from minragen.chat import StopReason, Trajectory

MASS = 2**38  # units in probability 1; a token of less than one unit is never drawn
SHRINK = 0.9  # a batch is cut to its unfinished rows when they are at most this share of it
BLOCK = {"cpu": 1}  # tokens between two synchronisations with the host; an accelerator's: 8
HELD_OUT = ("success", "episode_return", "valid", "grounding", "worldmodeling", "env_errors")


@dataclass(frozen=True)
class Rules:
    """How a conversation is held: the options of the same names in config.py."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    max_new_tokens: int = 64  # of a reply
    max_context: int = 1024  # tokens of a conversation
    max_rows: int = 256  # conversations in one batch
    token_budget: int = 8192  # padded ids in one forward pass of prompts or observations
    seed: int = 0  # of the noise


@torch.inference_mode()
def collect(policy, frame, groups, first_seed, rules, progress=lambda tokens: None):
    """Play one episode in every row of `groups`. Returns B = P*G trajectories, group-major.

    first_seed: group g plays the instance of seed first_seed + g
    progress: called with the number of tokens sampled since the last call
    raises: ValueError if a first prompt fills the context
    """
    trajectories = [first_prompt(frame, groups, row, observation, rules)
                    for row, observation in enumerate(groups.reset(first_seed))]
    begun = [t for t in trajectories if not t.error]
    for start in range(0, len(begun), rules.max_rows):
        _Player(policy, frame, groups, begun[start:start + rules.max_rows], rules,
                progress).play()
    return trajectories


def first_prompt(frame, groups, row, observation, rules):
    """The Trajectory of a fresh episode. Raises ValueError if its prompt leaves no room.

    observation: of `groups.reset`, which may be an exception
    """
    t = Trajectory.begin(groups, row, observation)
    if t.error:
        return t
    t.system = frame.system_message(groups.envs[row])
    t.add_prompt(frame.open(t.system, observation))
    if len(t.tokens) >= rules.max_context:
        raise ValueError(f"the first prompt of {t.env} has {len(t.tokens)} tokens and max_context "
                         f"is {rules.max_context}: no room for a reply. Raise --max-context.")
    return t


@dataclass
class _Draft:
    """A reply that is being sampled."""

    cap: int  # tokens that it may have
    limit: StopReason  # what it stops for when it has used them
    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    stop: StopReason | None = None
    cached: int = 0  # ids already in its slot: all but the last, or all in a block


class _Player:
    """A batch of conversations from first prompt to last reply: slot i holds `rows[i]`."""

    def __init__(self, policy, frame, groups, rows, rules, progress):
        self.policy, self.frame, self.groups, self.rules = policy, frame, groups, rules
        self.rows, self.progress = rows, progress
        self.slots = None  # of the rows, in their order
        self.cached = []  # how many ids of each row lie in its slot

    def play(self):
        """Turn after turn until no conversation is left."""
        logits = self._prefill_prompts()
        while True:
            self._step_environments(self._sample_replies(logits))
            live = [i for i, t in enumerate(self.rows) if t.stop is None]
            if not live:
                return
            self.rows = [self.rows[i] for i in live]
            logits = (self._append_observations(live) if self.frame.appends else
                      self._prefill_prompts())

    def _prefill_prompts(self):
        """Prefill each distinct prompt once and copy its slots to the rows that begin with it."""
        prompts = [tuple(t.tokens) for t in self.rows]
        distinct = {p: i for i, p in enumerate(dict.fromkeys(prompts))}
        longest = max(map(len, distinct))
        self.slots = KVSlots(self.policy.model, len(distinct), longest)
        logits = self._forward(list(distinct))
        index = [distinct[p] for p in prompts]
        self.slots.gather(index, longest + self.rules.max_new_tokens)
        return logits[*self._upload(torch.tensor(index))]

    def _append_observations(self, live):
        """Feed each live row the ids that its slot has not seen: last sampled id, observation."""
        fresh = [t.tokens[self.cached[i]:] for t, i in zip(self.rows, live)]
        longest = max(len(t.tokens) for t in self.rows)
        padded = max(self.cached[i] for i in live) + max(map(len, fresh))  # padding is written too
        self.slots.set_lengths(self.cached)
        self.slots.gather(live, max(longest + self.rules.max_new_tokens, padded))
        return self._forward(fresh)

    def _forward(self, fresh):
        """Feed row i the ids fresh[i], `token_budget` ids at a time. Returns the logits (n, V)
        after each row's last one."""
        bounds, logits = self.slots.bounds + torch.tensor([len(ids) for ids in fresh]), []
        rows = max(1, self.rules.token_budget // max(map(len, fresh)))
        for start in range(0, len(fresh), rows):
            part = [torch.tensor(ids) for ids in fresh[start:start + rows]]
            counts, tokens = self._upload(torch.tensor([len(ids) for ids in part]),
                                          pad_sequence(part, batch_first=True))
            logits.append(self.policy.extend(self.slots, tokens, counts, start))
        self.slots.bounds = bounds  # `extend` counts padding, too
        return torch.cat(logits)

    def _sample_replies(self, logits):
        """Sample until every row has stopped. Returns one _Draft per row, in the order of the rows.

        Only the first n rows go through the model. A row that has stopped stays among them, with
        nothing appended to its slot, until at most SHRINK of them go on; then those move to the
        front, with their drafts, noise and slots:

            n = 5    rows a b c d e    b and d stop    rows a c e b d    n = 3

        On an accelerator the host looks at the tokens once a block: what a row sampled after its
        stop is dropped.
        """
        (drafts, noise), n, sampled = self._begin_replies(), len(self.rows), 0
        counts = torch.ones(n, dtype=torch.int64, device=logits.device)  # 0: a row has stopped
        while True:
            room = min(draft.cap for draft in drafts[:n] if draft.stop is None) - sampled
            block = self._sample_block(logits, noise[sampled:sampled + room, :n], counts)
            sampled += len(block)
            last = self._extend(drafts[:n], block)
            live = [i for i in range(n) if drafts[i].stop is None]
            if not live:
                break
            if len(live) <= SHRINK * n:
                order = [*live, *(i for i in range(len(drafts)) if i >= n or drafts[i].stop)]
                self.rows, drafts = ([rows[i] for i in order] for rows in (self.rows, drafts))
                self.slots.gather(order)
                index, = self._upload(torch.tensor(order))
                n, noise, last = len(live), noise[:, index], last[index[:len(live)]]
            counts, = self._upload(torch.tensor([int(d.stop is None) for d in drafts[:n]]))
            logits = self._feed(last, counts)
        self.cached = [len(row.tokens) + draft.cached for row, draft in zip(self.rows, drafts)]
        return drafts

    def _sample_block(self, logits, noise, counts):
        """Sample a few tokens of each row. Returns [(tokens (n,), logprobs (n,)), ...].

        noise: (tokens left, n)      counts: (n,) 0 for a row whose slot stays as it is, else 1
        """
        block = []
        for u in noise[:BLOCK.get(logits.device.type, 8)]:
            if block:
                logits = self._feed(block[-1][0], counts)
            block.append(sample_tokens(logits, u, self.rules))
        return block

    def _begin_replies(self):
        """An empty _Draft for each row, and the noise of its tokens: (max_new_tokens, B)."""
        rules, turn = self.rules, len(self.rows[0].turns)
        begin = torch.tensor([len(t.tokens) for t in self.rows])
        drafts = [_Draft(min(room, rules.max_new_tokens), StopReason.CONTEXT
                         if room <= rules.max_new_tokens else StopReason.MAX_NEW_TOKENS)
                  for room in (rules.max_context - begin).tolist()]
        # Where every turn begins anew positions repeat, so each turn has a range of its own.
        counters = begin + (0 if self.frame.appends else turn * rules.max_context)
        return drafts, uniforms(*self._upload(
            noise_keys(rules.seed, self.groups.split, self.rows),
            counters + torch.arange(rules.max_new_tokens)[:, None]))

    def _upload(self, *tensors):
        """To the policy's device, without waiting for it."""
        return [x.to(self.policy.device, non_blocking=True) for x in tensors]

    def _feed(self, tokens, counts):
        """Append one id (n,), or none, to each of the first n slots. Returns the logits (n, V)."""
        return self.policy.extend(self.slots, tokens[:, None], counts)

    def _extend(self, drafts, block):
        """Add a block's tokens to each unfinished reply and note which of them they end.

        block: [(tokens (n,), logprobs (n,)), ...]      returns: the last tokens
        raises: RuntimeError if a logprob is not finite
        """
        tokens, logprobs = (torch.stack(column, dim=1) for column in zip(*block))
        # The one synchronisation of a block: pack both tensors for a single copy.
        both = torch.stack([tokens.int(), logprobs.view(torch.int32)]).cpu()
        before = sum(len(draft.ids) for draft in drafts)
        for draft, *columns in zip(drafts, both[0].tolist(), both[1].view(torch.float32).tolist()):
            fed = len(draft.ids) + len(block) - 1
            for token, logprob in zip(*columns):
                if draft.stop is None:
                    self._add(draft, token, logprob)
                    draft.cached = min(len(draft.ids), fed)
        self.progress(sum(len(draft.ids) for draft in drafts) - before)
        return tokens[:, -1]

    def _add(self, draft, token, logprob):
        """Add a token to a reply and note whether it ends it."""
        if not math.isfinite(logprob):
            raise RuntimeError("the policy's logits are not finite: the policy has diverged. Is "
                               "the learning rate too large?")
        draft.ids.append(token)
        draft.logprobs.append(logprob)
        if self.frame.completes(draft.ids):
            draft.stop = StopReason.ANSWER
        elif token in self.frame.end_ids:
            draft.stop = StopReason.END_OF_TURN
        elif len(draft.ids) == draft.cap:
            draft.stop = draft.limit

    def _step_environments(self, drafts):
        """Add the replies, act on them, and give each live row the prompt of its next turn."""
        texts = self.frame.tokenizer.batch_decode(
            [d.ids[:-1] if d.stop is StopReason.END_OF_TURN else d.ids for d in drafts])
        replies = [self.frame.parse(text) for text in texts]
        outcomes = self.groups.step([t.row for t in self.rows], replies)
        for t, draft, text, reply, outcome in zip(self.rows, drafts, texts, replies, outcomes):
            t.add_reply(draft.ids, draft.logprobs, len(t.turns))
            t.end_turn(text, reply, draft.stop, outcome)
            full = self.frame.appends and draft.stop is StopReason.CONTEXT
            if t.stop is None and (full or not self.frame.next(t, self.rules)):
                t.stop = StopReason.CONTEXT
            if t.stop is not None:
                t.end()


# ---- Sampling ------------------------------------------------------------------------------------
def sample_tokens(logits, u, rules):
    """Draw one token per row by inverting the cumulative distribution at the uniforms `u`.

    One uniform a token, so the draw is a function of (logits, u) alone. Probabilities are counted
    in units of 1 / MASS: integer sums are exact, so the distribution is monotone and does not
    depend on the order in which a GPU adds.
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
        # u < 1 is a multiple of 2**-24: the product is exact, and the target below the last cdf.
        target = (u * 2**24).long() * cdf[:, -1] >> 24
        # Within the vocabulary even if the logits are nan, which the host sees later.
        token = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(
            max=logits.shape[1] - 1)
    return token, log_p.gather(-1, token[:, None])[:, 0]


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


# ---- Episodes ------------------------------------------------------------------------------------
def describe(trajectories):
    """Metrics of the episodes, before any filter; of a mixture also for each environment.

    Episodes whose environment failed are counted in `env_errors` and enter nothing else. If all
    failed there is nothing else.
    """
    def means(chosen, prefix=""):
        errors = {prefix + "env_errors": sum(bool(t.error) for t in chosen)}
        chosen = [t for t in chosen if not t.error]
        if not chosen:
            return errors
        values = {"success": [t.success for t in chosen],
                  "episode_return": [t.episode_return for t in chosen],
                  "turns": [len(t.turns) for t in chosen],
                  "response_tokens": [t.response_tokens for t in chosen],
                  "context_full": [t.stop is StopReason.CONTEXT for t in chosen]}
        # What not all environments report is left out of the mixture's own metrics.
        reported = [set().union(*(t.metrics for t in chosen if t.env == env))
                    for env in {t.env for t in chosen}]
        for name in sorted(set.intersection(*reported) - values.keys() - {"step"}):
            values[name] = [t.metrics.get(name, 0.0) for t in chosen]
        return errors | {prefix + name: sum(x) / len(x) for name, x in values.items()}

    metrics, names = means(trajectories), sorted({t.env for t in trajectories})
    for name in names if len(names) > 1 else ():
        metrics |= means([t for t in trajectories if t.env == name], f"{name}/")
    return metrics


def play_held_out(policy, frame, groups, rules, temperature, progress=lambda tokens: None,
                  greedy=True, first_seed=0):
    """{"": trajectories sampled at `temperature` with fixed noise, "_greedy": greedy ones}."""
    policy.begin_rollout()
    rules = replace(rules, top_k=0, top_p=1, seed=0)
    return {suffix: collect(policy, frame, groups, first_seed, replace(rules, temperature=t),
                            progress)
            for suffix, t in (("", temperature), ("_greedy", 0.0))[:1 + greedy]}


def held_out_metrics(split, played):
    """`val/success`, `val/success_greedy`, ... of `played`; of a mixture also `val/ENV/success`."""
    return {f"{split}/{name}{suffix}": value for suffix, trajectories in played.items()
            for name, value in describe(trajectories).items()
            if name.rpartition("/")[2] in HELD_OUT}


# ---- What the learner takes ----------------------------------------------------------------------
@dataclass
class Batch:
    """Sequences as right-padded tensors; B rows, one for each trajectory or one for each turn."""

    tokens: Tensor  # (B, T) int64
    attention_mask: Tensor  # (B, T) bool
    response_mask: Tensor  # (B, T) bool
    turn_ids: Tensor  # (B, T) int64
    sample_logprobs: Tensor  # (B, T) float32
    rewards: Tensor  # (B, T) float32, each turn's reward on its last sampled token
    group_ids: Tensor  # (B,) int64
    episode_ids: Tensor  # (B,) int64
    episode_returns: Tensor  # (B,) float32, of the row's episode
    # -- added by train.compute_targets; (B, T) unless said otherwise
    loss_mask: Tensor | None = None
    step_mask: Tensor | None = None  # tokens that are time steps of GAE
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    scores: Tensor | None = None  # (B,) what the row's episode is worth
    token_rewards: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    value_mask: Tensor | None = None  # where the critic learns
    # -- added by train.add_loss_weights
    loss_weights: Tensor | None = None
    mean_weights: Tensor | None = None  # those of the token mean, for metrics
    value_weights: Tensor | None = None

    def __len__(self):
        return len(self.tokens)

    @property
    def lengths(self):
        return self.attention_mask.sum(dim=1)

    def take(self, index):
        """The rows `index`, cut to the longest of them."""
        longest = int(self.lengths[index].max())
        rows = {name: value[index] for name, value in vars(self).items() if value is not None}
        return Batch(**{name: v[:, :longest] if v.ndim == 2 else v for name, v in rows.items()})

    def to(self, device):
        return Batch(**{name: v.to(device) for name, v in vars(self).items() if v is not None})


def make_batch(trajectories):
    """Pad to the longest. Masks mark padding, so token id 0 stays usable.

    Groups are numbered again without gaps: one whose episodes all failed is no group.
    """
    rows = [(sequence, t, e) for e, t in enumerate(trajectories) for sequence in t.sequences]

    def column(name, fill):
        return pad_sequence([torch.tensor(getattr(sequence, name)) for sequence, _, _ in rows],
                            batch_first=True, padding_value=fill)

    turn_ids = column("turn_ids", -1)
    rewards = torch.zeros(turn_ids.shape)
    for b, (sequence, t, _) in enumerate(rows):
        last = {turn: position for position, turn in enumerate(sequence.turn_ids) if turn >= 0}
        for turn, position in last.items():
            rewards[b, position] = t.turn_rewards[turn]
    lengths = torch.tensor([len(sequence.tokens) for sequence, _, _ in rows])
    return Batch(
        tokens=column("tokens", 0),
        attention_mask=torch.arange(turn_ids.shape[1]) < lengths[:, None],
        response_mask=column("response_mask", False), turn_ids=turn_ids,
        sample_logprobs=column("sample_logprobs", 0.0), rewards=rewards,
        group_ids=torch.tensor([t.group_id for _, t, _ in rows]).unique(return_inverse=True)[1],
        episode_ids=torch.tensor([e for _, _, e in rows]),
        episode_returns=torch.tensor([t.episode_return for _, t, _ in rows]))
