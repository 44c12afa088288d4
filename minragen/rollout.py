"""Batched multi-turn generation: many conversations at once, each token computed once.

Reading order: `Trajectory` (what comes out), `collect` (the loop over turns; RAGEN's agent proxy),
`windowed_prompt` (what a turn sees in the context modes that do not show the whole history),
`KVSlots` (why nothing is prefilled twice), `sample` and `uniforms` (where randomness comes from),
`Batch` (what the learner takes).

Axes: B rows, T tokens, V vocabulary, K turns, n rows in a forward pass, q new tokens of each.

Three invariants, each a test:
  1. tokens in = tokens out: the ids that were sampled are the ids that are trained;
  2. the response mask is recorded while sampling and never reconstructed;
  3. a cached multi-turn rollout gives the logprobs of one full forward pass over the finished
     sequence.

Deltas (from RAGEN's agent proxy on vLLM):
  1. A turn's observation is appended to the cache; RAGEN sends the whole conversation again every
     turn.
  2. The noise of a token is a function of (run seed, environment seed, member, position), so that a
     trajectory does not depend on what else is in the batch, nor on how many processes share the
     work.
  3. A reply stops at `</answer>`: what would follow could not matter to the environment.
  4. In the turn-wise context modes a turn sees the earlier replies as they were sampled; they are
     context there, in the loss only of their own row.
  5. VAGEN pays its state reward in a batched server and adds 0.5 for each well-formed turn. Here it
     is part of the turn's reward wherever a turn is played, and the form is a matter of the
     environment's penalty.
"""

import zlib
from dataclasses import dataclass, field
from enum import Enum

import torch

from minragen.models import kv_shape, output_layer

CLOSING_TAIL = 12  # tokens that "</answer>" can be spread over, and a few more
CONTEXTS = ("full", "limited", "single_turn")
# Averaged over an episode's turns; other metrics are summed.
PER_TURN = {"valid", "effective", "grounding", "worldmodeling"}


class StopReason(Enum):
    """Why a reply (first four) or an episode (last four) ended."""

    END_OF_TURN = "end_of_turn"  # the model sampled its end-of-turn token
    ANSWER = "answer"  # the reply closed its </answer>
    MAX_NEW_TOKENS = "max_new_tokens"  # the reply used up its tokens
    CONTEXT = "context"  # no room for another token or another observation
    TERMINATED = "terminated"  # the environment reached an end
    TRUNCATED = "truncated"  # turns or actions ran out
    ENV_ERROR = "env_error"  # the environment raised or hung; the trajectory is kept and counted


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. `top_k` 0 and `top_p` 1 leave the distribution whole."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"bad sampling: got {self}, expected temperature >= 0, top_k >= 0 and "
                             f"0 < top_p <= 1.")


@dataclass(frozen=True)
class StateReward:
    """VAGEN's reward for what a reply says of the state: so much times the F1 of its observation
    against the state before the answer, and of its prediction against the state after it."""

    grounding: float = 0.0
    worldmodeling: float = 0.0


@dataclass(frozen=True)
class Rules:
    """How a conversation is held; see `collect`."""

    max_new_tokens: int
    max_context: int
    context: str
    window: int
    state_reward: StateReward


@dataclass
class Turn:
    """One reply and what came of it. `text` is what was sampled, decoded for people only."""

    observation: str
    text: str
    reasoning: str
    answer: str
    valid: bool
    reward: float
    stop: StopReason


@dataclass
class Sample:
    """What the learner takes as one row: four parallel lists, appended to and never edited.

    response_mask: True iff the id came out of our sampler, for this row
    turn_ids: turn of a sampled token, else -1
    sample_logprobs: nats, under the sampling temperature and before any truncation by top_k or
        top_p, so that the learner can compute the same quantity; 0.0 where not sampled
    """

    tokens: list = field(default_factory=list)
    response_mask: list = field(default_factory=list)
    turn_ids: list = field(default_factory=list)
    sample_logprobs: list = field(default_factory=list)

    def given(self, ids):
        """Append ids that were not sampled: prompt, framing, observation."""
        self._extend(ids, [0.0] * len(ids), False, -1)

    def sampled(self, ids, logprobs, turn):
        """Append the ids of reply number `turn` with the logprobs they were drawn with."""
        self._extend(ids, logprobs, True, turn)

    def _extend(self, ids, logprobs, mask, turn):
        self.tokens += ids
        self.sample_logprobs += logprobs
        self.response_mask += [mask] * len(ids)
        self.turn_ids += [turn] * len(ids)

    @property
    def reply(self):
        """The sampled ids."""
        return [i for i, sampled in zip(self.tokens, self.response_mask) if sampled]


@dataclass
class Trajectory:
    """One episode. `samples`: the whole conversation, or in the turn-wise context modes one Sample
    per turn, each with all that this turn saw; `tokens` and the other lists are the last one's."""

    env: str
    seed: int
    group_id: int
    member: int
    system: str = ""
    samples: list = field(default_factory=lambda: [Sample()])
    turn_rewards: list = field(default_factory=list)
    turns: list = field(default_factory=list)
    stop: StopReason | None = None
    success: bool = False
    metrics: dict = field(default_factory=dict)

    @property
    def episode_return(self):
        return sum(self.turn_rewards)

    tokens = property(lambda self: self.samples[-1].tokens)
    response_mask = property(lambda self: self.samples[-1].response_mask)
    turn_ids = property(lambda self: self.samples[-1].turn_ids)
    sample_logprobs = property(lambda self: self.samples[-1].sample_logprobs)

    @property
    def response_tokens(self):
        """How many ids were sampled in the whole episode."""
        return sum(sum(sample.response_mask) for sample in self.samples)

    def given(self, ids):
        self.samples[-1].given(ids)

    def sampled(self, ids, logprobs, turn):
        self.samples[-1].sampled(ids, logprobs, turn)

    def messages(self):
        """The conversation as chat messages, for people and for JSONL."""
        chat = [{"role": "system", "content": self.system}]
        for turn in self.turns:
            chat += [{"role": "user", "content": turn.observation},
                     {"role": "assistant", "content": turn.text}]
        return chat


@torch.inference_mode()
def collect(policy, frame, groups, first_seed, sampling, run_seed=0, max_new_tokens=64,
            max_context=1024, max_rows=256, progress=None, context="full", window=1,
            state_reward=StateReward()):
    """Play one episode in every row of `groups` and return B = P*G trajectories, group-major.

    context: what a turn sees. full: the whole conversation; limited: its last `window` turns, this
        one included; single_turn: one message, with the window's earlier turns told in it as text
    progress: called with the number of tokens sampled since the last call
    state_reward: what is added to a turn's reward for describing the state (see `graded`)
    raises: ValueError if a first prompt leaves no room for a reply in `max_context` tokens
    """
    observations = groups.reset(first_seed)
    trajectories = []
    for row, observation in enumerate(observations):
        group, member = divmod(row, groups.group_size)
        env, name = groups.envs[row], groups.names[group]
        t = Trajectory(name, groups.seeds[group], group, member,
                       f"{env.system_prompt}\n{frame.instruction}")
        t.given(first_prompt(frame, env, name, observation, max_context))
        trajectories.append(t)
    rules = Rules(max_new_tokens, max_context, context, window, state_reward)
    for start in range(0, len(trajectories), max_rows):
        rows = range(start, min(start + max_rows, len(trajectories)))
        _Player(policy, frame, groups, rows, trajectories, observations, sampling, run_seed, rules,
                progress).play()
    return trajectories


def first_prompt(frame, env, name, observation, max_context):
    """The ids that open a conversation. Raises ValueError if they leave no room for a reply."""
    ids = frame.open(env.system_prompt, observation)
    if len(ids) >= max_context:
        raise ValueError(f"the first prompt of {name} has {len(ids)} tokens and max_context is "
                         f"{max_context}: no room for a reply. Raise --max-context.")
    return ids


class _Player:
    """One batch of conversations from first prompt to last reply.

    `slot_row[i]` is the row whose conversation lies in KV slot i; the first n slots are the live
    ones.
    """

    def __init__(self, policy, frame, groups, rows, trajectories, observations, sampling, run_seed,
                 rules, progress):
        self.policy, self.frame, self.groups, self.sampling = policy, frame, groups, sampling
        self.trajectories, self.observations = trajectories, observations
        self.rules = rules
        self.progress = progress or (lambda tokens: None)
        self.slot_row = torch.tensor(list(rows))
        self.keys = torch.tensor([trajectory_key(run_seed, groups.split, trajectories[r])
                                  for r in rows])
        ends = torch.zeros(policy.model.config.vocab_size, dtype=torch.bool)
        ends[list(frame.end_ids)] = True
        self.ends = ends
        self.closes = torch.zeros_like(ends)
        self.closes[:len(frame.may_close)] = frame.may_close

    def play(self):
        """Turn after turn until no conversation is left."""
        logits = self._prefill_prompts()
        turn = 0
        while True:
            replies = self._sample_replies(logits, turn)
            live = self._step_environments(turn, replies)
            if not live:
                return
            if self.rules.context == "full":
                logits = self._append_observations(live)
            else:
                index = torch.tensor(live)
                self.slot_row, self.keys = self.slot_row[index], self.keys[index]
                logits = self._prefill_prompts()
            turn += 1

    def _prefill_prompts(self):
        """Prefill each distinct prompt once and copy its slots to the rows that begin with it."""
        prompts = [tuple(self.trajectories[r].tokens) for r in self.slot_row.tolist()]
        distinct = {p: i for i, p in enumerate(dict.fromkeys(prompts))}
        longest = max(map(len, distinct))
        self.slots = KVSlots(self.policy.model, len(distinct), longest)
        logits = self._forward(list(distinct))
        index = torch.tensor([distinct[p] for p in prompts])
        self.slots.keep(index, longest + self.rules.max_new_tokens)
        return logits[index]

    def _append_observations(self, live):
        """Keep the live slots and feed each what its cache has not seen: last sampled id and
        observation."""
        index = torch.tensor(live)
        self.slot_row, self.keys = self.slot_row[index], self.keys[index]
        cached = self.slots.lengths[index].tolist()
        fresh = [self.trajectories[r].tokens[c:] for r, c in zip(self.slot_row.tolist(), cached)]
        longest = max(c + len(f) for c, f in zip(cached, fresh))
        # The padding of a short row may reach beyond the longest.
        padded = max(cached) + max(map(len, fresh))
        self.slots.keep(index, max(longest + self.rules.max_new_tokens, padded))
        return self._forward(fresh)

    def _forward(self, fresh):
        """Feed row i the ids fresh[i] and return the logits (n, V) after its last one."""
        counts = torch.tensor([len(f) for f in fresh])
        tokens = torch.zeros(len(fresh), int(counts.max()), dtype=torch.int64)
        for i, ids in enumerate(fresh):
            tokens[i, :len(ids)] = torch.tensor(ids)
        return forward_slots(self.policy.model, self.slots, tokens, counts)

    def _sample_replies(self, logits, turn):
        """Sample until every row has stopped. Returns {row: (ids, logprobs, stop)}.

        A row that stops changes places with the last live one, so the live slots are always the
        first n and every forward pass is as small as it can be; the stopped slot stays for the next
        turn.
        """
        B, n = len(self.slot_row), len(self.slot_row)
        # Row i: reply in slot order of the start.
        ids = torch.zeros(B, self.rules.max_new_tokens, dtype=torch.int64)
        logprobs = torch.zeros(B, self.rules.max_new_tokens)
        who = torch.arange(B)  # slot -> row of `ids`
        start_row = self.slot_row.tolist()
        lengths = torch.tensor([len(self.trajectories[r].tokens) for r in start_row])
        room = self.rules.max_context - lengths
        cap = room.clamp(max=self.rules.max_new_tokens)
        # Where every turn is a row of its own, positions come again: turns have counters of their
        # own.
        counters = lengths + (0 if self.rules.context == "full" else turn * self.rules.max_context)
        noise = uniforms(self.keys,  # (max_new_tokens, B)
                         counters + torch.arange(self.rules.max_new_tokens)[:, None])
        replies = {}
        for t in range(self.rules.max_new_tokens):
            token, logprob = sample(logits, noise[t, who[:n]].to(logits.device), self.sampling)
            token, logprob = token.cpu(), logprob.cpu()
            ids[who[:n], t], logprobs[who[:n], t] = token, logprob
            ended, capped, closed = self.ends[token], t + 1 >= cap[:n], self.closes[token]
            for i in closed.nonzero()[:, 0].tolist():
                tail = ids[who[i], max(0, t + 1 - CLOSING_TAIL):t + 1]
                closed[i] = "</answer>" in self.frame.tokenizer.decode(tail)
            stopped = ended | closed | capped
            for i in stopped.nonzero()[:, 0].tolist():
                stop = (StopReason.ANSWER if closed[i] else StopReason.END_OF_TURN if ended[i] else
                        StopReason.CONTEXT if room[i] <= self.rules.max_new_tokens else
                        StopReason.MAX_NEW_TOKENS)
                k = int(who[i])
                replies[start_row[k]] = (ids[k, :t + 1].tolist(), logprobs[k, :t + 1].tolist(),
                                         stop)
            self.progress(n)
            if stopped.any():
                n = n - int(stopped.sum())
                holes = stopped[:n].nonzero()[:, 0]
                movers = n + (~stopped[n:]).nonzero()[:, 0]
                for state in (who, self.slot_row, self.keys, room, cap, token):
                    swap(state, holes, movers)
                self.slots.swap(holes, movers)
            if n == 0:
                break
            logits = forward_slots(self.policy.model, self.slots, token[:n, None],
                                   torch.ones(n, dtype=torch.int64))
        return replies

    def _step_environments(self, turn, replies):
        """Record the replies, act on them, append the observations. Returns the slots that go
        on."""
        rows = self.slot_row.tolist()
        texts = self.frame.tokenizer.batch_decode(
            [ids[:-1] if stop is StopReason.END_OF_TURN else ids
             for ids, _, stop in (replies[r] for r in rows)])
        parsed = [self.frame.parse(text) for text in texts]
        # Before the step, which changes what an observation was about.
        before = [self.groups.envs[row].relations() if self.frame.describes else None
                  for row in rows]
        results = self.groups.step(rows, [p.answer for p in parsed])
        live = []
        for slot, (row, text, reply, result) in enumerate(zip(rows, texts, parsed, results)):
            t, (ids, logprobs, stop) = self.trajectories[row], replies[row]
            t.sampled(ids, logprobs, turn)
            if isinstance(result, Exception):
                observation, reward, info = (f"{type(result).__name__}: {result}", 0.0,
                                             {"valid": 0.0})
                t.stop = StopReason.ENV_ERROR
            else:
                observation, reward, terminated, truncated, info = result
                paid, described = graded(reply, self.frame.parts, self.groups.envs[row],
                                         before[slot], result, self.rules.state_reward)
                reward, info = reward + paid, {**info, **described}
                t.stop = (StopReason.TERMINATED if terminated else
                          StopReason.TRUNCATED if truncated else
                          StopReason.CONTEXT if stop is StopReason.CONTEXT
                          and self.rules.context == "full" else None)
            t.turns.append(Turn(self.observations[row], text, reply.reasoning, reply.answer,
                                bool(info["valid"]), reward, stop))
            t.turn_rewards.append(reward)
            t.success = t.success or bool(info.get("success", 0.0))
            for name, value in info.items():
                t.metrics[name] = t.metrics.get(name, 0.0) + value
            self.observations[row] = observation
            if t.stop is None:
                if self._goes_on(t, row, observation):
                    live.append(slot)
                else:
                    t.stop = StopReason.CONTEXT
            if t.stop is not None:
                for name in PER_TURN & t.metrics.keys():
                    t.metrics[name] /= len(t.turns)
        return live

    def _goes_on(self, t, row, observation):
        """Give the trajectory the prompt of its next turn. False if the context has no room."""
        rules = self.rules
        if rules.context == "full":
            framed = self.frame.between(t.tokens[-1], observation)
            fits = len(t.tokens) + len(framed) < rules.max_context
            if fits:
                t.given(framed)
            return fits
        system = self.groups.envs[row].system_prompt
        # What leaves no room for a whole reply loses its oldest turns.
        for window in range(rules.window, 0, -1):
            ids = windowed_prompt(self.frame, system, t, observation, rules.context, window)
            room = rules.max_context - len(ids)
            if room >= (rules.max_new_tokens if window > 1 else 1):
                t.samples.append(Sample())
                t.given(ids)
                return True
        return False


def windowed_prompt(frame, system, trajectory, observation, context, window):
    """The ids of a prompt for `observation` that shows the last `window` turns, this one included.

    limited: the earlier turns of the window as chat, their replies in the very ids that were
    sampled. single_turn: one user message that tells the earlier turns as text.
    """
    earlier = range(max(0, len(trajectory.turns) - window + 1), len(trajectory.turns))
    shown = [trajectory.turns[k].observation for k in earlier] + [observation]
    if context == "single_turn":
        told = [f"{seen}\nYou answered: {trajectory.turns[k].answer or 'nothing valid'}"
                for k, seen in zip(earlier, shown)]
        return frame.open(system, "\n".join([*told, observation]))
    ids = frame.open(system, shown[0])
    for k, following in zip(earlier, shown[1:]):
        reply = trajectory.samples[k].reply
        ids = ids + reply + frame.between(reply[-1], following)
    return ids


def graded(reply, parts, env, before, result, state_reward):
    """What a turn's description of the state is worth.

        grounding      F1(observation, relations before the answer)
        worldmodeling  F1(prediction, relations after it); a slip is the model's bad luck
        paid           their sum, weighted by `state_reward`, if both the form of the reply and the
                       actions in it were valid; otherwise 0

    before: `env.relations()` before the step      result: what `env.step` returned
    returns: paid, {"grounding", "worldmodeling": F1, "env_return": the environment's own reward}
        with the parts that the form has; 0.0, {} where there is nothing to describe or no part for
        it
    """
    _, reward, _, _, info = result
    described = {}
    if before is not None and "observation" in parts:
        described["grounding"] = env.description_f1(reply.observation, before)
    if before is not None and "prediction" in parts:
        described["worldmodeling"] = env.description_f1(reply.prediction, env.relations())
    if not described:
        return 0.0, {}
    # Text that is in no form describes nothing, not even an empty world.
    described = {name: f1 * reply.valid for name, f1 in described.items()}
    paid = sum(getattr(state_reward, name) * f1 for name, f1 in described.items())
    return paid * bool(info["valid"]), {**described, "env_return": reward}


# ==================================================================================================
# Keys and values


class KVSlots:
    """Preallocated keys and values of n conversations of different lengths, given to an unmodified
    transformers decoder as `past_key_values`.

    `update` writes each row's new keys at that row's own positions and returns the filled part of
    the slots; an explicit 4-D boolean mask, which transformers passes through, says what each query
    may see. Positions beyond a row's length hold padding from earlier calls: they are masked, and
    always overwritten before they become visible.

    FOOTGUN: slots are zeroed, not empty. A masked key still enters `0 * value`, and 0 * nan is nan.
    """

    def __init__(self, model, rows, capacity):
        layers, heads, head_dim = kv_shape(model)
        like = next(model.parameters())  # keys and values have the dtype and device of the weights
        self.layers = [torch.zeros(2, rows, heads, capacity, head_dim, dtype=like.dtype,
                                   device=like.device) for _ in range(layers)]
        # On the CPU: the loop above reads it all the time.
        self.lengths = torch.zeros(rows, dtype=torch.int64)

    def place(self, positions, filled):
        """Where the next `update` of every layer writes: positions (n, q); and how much it
        returns."""
        self._positions, self._filled = positions, filled
        self._rows = torch.arange(len(positions), device=positions.device)[:, None]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Called by the decoder. key_states, value_states: (n, kv_heads, q, head_dim)."""
        keys, values = self.layers[layer_idx]
        keys[self._rows, :, self._positions] = key_states.transpose(1, 2)
        values[self._rows, :, self._positions] = value_states.transpose(1, 2)
        n = len(self._positions)
        return keys[:n, :, :self._filled], values[:n, :, :self._filled]

    def get_seq_length(self, layer_idx=0):
        return self._filled

    def keep(self, index, capacity):
        """Make slot i what slot index[i] was, with room for `capacity` tokens: what the next turn
        needs, so that memory follows the conversations and not `max_context`."""
        self.lengths = self.lengths[index]
        filled = int(self.lengths.max())
        for i, old in enumerate(self.layers):
            _, _, heads, _, width = old.shape
            new = torch.zeros(2, len(index), heads, capacity, width, dtype=old.dtype,
                              device=old.device)
            new[:, :, :, :filled] = old[:, index.to(old.device), :, :filled]
            self.layers[i] = new

    def swap(self, holes, movers):
        swap(self.lengths, holes, movers)
        if len(holes):
            holes, movers = holes.to(self.layers[0].device), movers.to(self.layers[0].device)
            for layer in self.layers:
                layer[:, holes], layer[:, movers] = layer[:, movers], layer[:, holes]


def swap(tensor, a, b):
    """Exchange the entries at the index tensors a and b, in place."""
    tensor[a], tensor[b] = tensor[b], tensor[a]


@torch.no_grad()
def forward_slots(model, slots, tokens, counts):
    """Append counts[i] ids of tokens[i] to slot i and return the logits (n, V) after the last of
    them.

    tokens: (n, q) int64, right-padded      counts: (n,) int64, at least 1
    """
    n, q = tokens.shape
    filled = int(slots.lengths[:n].max()) + q
    positions = slots.lengths[:n, None] + torch.arange(q)  # (n, q)
    slots.lengths[:n] += counts
    device = slots.layers[0].device
    positions, tokens, counts = positions.to(device), tokens.to(device), counts.to(device)
    # NOTE: never `is_causal` here: with more keys than queries it aligns the triangle to the top
    # left.
    visible = (torch.arange(filled, device=device)
               <= positions[:, None, :, None])  # (n, 1, q, filled)
    slots.place(positions, filled)
    hidden = model.base_model(input_ids=tokens, attention_mask=visible, position_ids=positions,
                              past_key_values=slots, use_cache=True).last_hidden_state
    last = hidden[torch.arange(n, device=device), counts - 1] if q > 1 else hidden[:, 0]
    return output_layer(model, last)


# ==================================================================================================
# Sampling


def sample(logits, u, sampling):
    """Draw one token per row by inverting the cumulative distribution at the uniforms `u`.

    One uniform a token, so the draw is a function of (logits, u) alone.
    logits: (n, V)      u: (n,) in (0, 1)
    raises: RuntimeError if the logits are not finite
    returns: tokens (n,) int64, logprobs (n,) float32 in nats at the sampling temperature, before
        truncation
    """
    log_p = (logits.float() / (sampling.temperature or 1.0)).log_softmax(dim=-1)
    if not log_p[:, 0].isfinite().all():  # nan in one logit makes the whole row nan
        raise RuntimeError("the policy's logits are not finite: the policy has diverged. Is the "
                           "learning rate too large?")
    if sampling.temperature == 0:
        token = log_p.argmax(dim=-1)
    else:
        cdf = truncate(log_p.exp(), sampling.top_k, sampling.top_p).cumsum(dim=-1)
        total = cdf[:, -1]
        # u * total may round up to total, which no cumulative value exceeds.
        target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    return token, log_p.gather(-1, token[:, None])[:, 0]


def truncate(probs, top_k, top_p):
    """Zero all but the top_k most probable tokens and all but the smallest set with
    mass >= top_p."""
    if 0 < top_k < probs.shape[-1]:
        floor = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < floor, 0.0)
    if top_p < 1.0:
        ranked, order = probs.sort(dim=-1, descending=True)
        before = ranked.cumsum(dim=-1) - ranked  # mass of all that is more probable
        ranked = ranked.masked_fill(before >= top_p * ranked.sum(dim=-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    return probs


def trajectory_key(run_seed, split, trajectory):
    """A 63-bit key of all that a trajectory's noise may depend on."""
    key = zlib.crc32(f"{split} {trajectory.env}".encode())
    for part in (run_seed, trajectory.seed, trajectory.member):
        key = int(_mix(torch.tensor(key ^ part))) & (2**63 - 1)
    return key


def uniforms(keys, positions):
    """Counter-based uniforms in (0, 1): a function of (key, position) and of nothing else.

    Never exactly 0, which would draw the first token however improbable it is, and exact in
    float32.
    keys, positions: int64 of shapes that broadcast      returns: float32, odd multiples of 2**-24
    """
    bits = _shift(_mix(_mix(keys) + positions), 41)  # the upper 23 bits
    return (2 * bits + 1).float() / 2**24


def _mix(x):
    """The finaliser of SplitMix64 (Steele et al. 2014) on int64 tensors, whose products wrap
    around."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def _shift(x, bits):
    return (x >> bits) & (2**(64 - bits) - 1)  # logical: torch shifts int64 arithmetically


# ==================================================================================================
# What the learner takes


@dataclass
class Batch:
    """Samples as right-padded tensors; B rows, one for each trajectory or one for each turn.

    tokens (B, T) int64      response_mask, loss_mask, attention_mask (B, T) bool
    turn_ids (B, T) int64      sample_logprobs (B, T) float32
    rewards (B, T) float32: each turn's reward on its last sampled token
    group_ids, episode_ids (B,) int64      episode_returns (B,) float32, of the row's episode
    The fields below the line are the learner's: (B, T) float32, None until they are computed.
    """

    tokens: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    loss_mask: torch.Tensor
    turn_ids: torch.Tensor
    sample_logprobs: torch.Tensor
    rewards: torch.Tensor
    group_ids: torch.Tensor
    episode_ids: torch.Tensor
    episode_returns: torch.Tensor
    # ---
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    value_mask: torch.Tensor | None = None  # bool: where the critic learns
    loss_weights: torch.Tensor | None = None
    mean_weights: torch.Tensor | None = None  # those of the token mean, for metrics
    value_weights: torch.Tensor | None = None

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
    """Pad to the longest. Padding is positional: no token id means padding, so no id is lost to
    it."""
    rows = [(sample, e) for e, t in enumerate(trajectories) for sample in t.samples]
    longest = max(len(sample.tokens) for sample, _ in rows)

    def pad(name, fill):
        return torch.tensor([getattr(sample, name) + [fill] * (longest - len(sample.tokens))
                             for sample, _ in rows])

    turn_ids, response_mask = pad("turn_ids", -1), pad("response_mask", False)
    rewards = torch.zeros(turn_ids.shape)
    for b, (sample, e) in enumerate(rows):
        last = {turn: position for position, turn in enumerate(sample.turn_ids) if turn >= 0}
        for turn, position in last.items():
            rewards[b, position] = trajectories[e].turn_rewards[turn]
    lengths = torch.tensor([len(sample.tokens) for sample, _ in rows])
    return Batch(pad("tokens", 0), torch.arange(longest) < lengths[:, None], response_mask,
                 response_mask, turn_ids, pad("sample_logprobs", 0.0), rewards,
                 torch.tensor([trajectories[e].group_id for _, e in rows]),
                 torch.tensor([e for _, e in rows]),
                 torch.tensor([trajectories[e].episode_return for _, e in rows]))
