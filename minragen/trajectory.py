"""The nouns: an episode as it is played, and many of them as the tensors that one learns from.

Reading order: `Reply` (a parsed reply), `Trajectory` (one episode: its `Turn`s, and its tokens in a
`Sequence`), `Batch` (sequences as right-padded tensors) and `make_batch`.

Axes: B rows, T tokens, K turns.

Tests: `python -m pytest tests/test_rollout.py tests/test_chat.py`.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minragen.envs import Observation

# Metrics that are averaged over an episode's turns; the others are summed.
PER_TURN = {"valid", "effective", "grounding", "worldmodeling"}


@dataclass(frozen=True)
class Reply:
    """A parsed reply. `valid`: the format's parts were there, in order; if not, they are empty."""

    reasoning: str = ""
    answer: str = ""
    valid: bool = False
    observation: str = ""  # what the policy says that it sees
    prediction: str = ""  # and what it says that it will see next


class StopReason(Enum):
    """Why a reply or an episode ended."""

    END_OF_TURN = "end_of_turn"  # reply: the model sampled its end-of-turn token
    ANSWER = "answer"  # reply: all parts of its format have ended
    MAX_NEW_TOKENS = "max_new_tokens"  # reply: it used up its tokens
    CONTEXT = "context"  # reply or episode: no room for what comes next
    TERMINATED = "terminated"  # episode: the environment reached an end
    TRUNCATED = "truncated"  # episode: turns or actions ran out
    ENV_ERROR = "env_error"  # episode: the environment failed; counted, and left out of all else


@dataclass
class Turn:
    """One reply and what came of it. `text` is the reply decoded, for people only."""

    observation: str
    text: str
    reply: Reply
    stop: StopReason
    times: tuple = ()  # seconds of time.time(): feeding begins, reply sent, result received


@dataclass
class Sequence:
    """One row of a batch. The first four lists have an entry for each token; they only grow."""

    tokens: list = field(default_factory=list)
    response_mask: list = field(default_factory=list)  # True iff the id came out of our sampler
    turn_ids: list = field(default_factory=list)  # turn of a sampled token, else -1
    # Nats at the sampling temperature, before truncation by top_k or top_p, so that the learner can
    # compute the same quantity; 0.0 where not sampled.
    sample_logprobs: list = field(default_factory=list)
    predicted: list = field(default_factory=list)  # positions that ECHO predicts (more/echo.py)
    last_of_turn: dict = field(default_factory=dict)  # turn -> position of its last sampled token
    advantages: list = field(default_factory=list)  # of a trained row, for run/log.py's report

    def add(self, ids, logprobs, sampled, turn):
        self.tokens += ids
        self.sample_logprobs += logprobs
        self.response_mask += [sampled] * len(ids)
        self.turn_ids += [turn] * len(ids)
        if sampled:
            self.last_of_turn[turn] = len(self.tokens) - 1


@dataclass
class Trajectory:
    """One episode: its instance, the tokens of its conversation, and what came of each turn."""

    env: str
    seed: int
    group_id: int
    member: int
    env_index: int = 0  # the row of its environment in the EnvGroups
    system: str = ""
    observation: Observation = Observation("")  # what the next reply answers
    # One Sequence; in the contexts of more/windows.py one for each turn, with all that it saw.
    sequences: list = field(default_factory=lambda: [Sequence()])
    turn_rewards: list = field(default_factory=list)
    turns: list = field(default_factory=list)
    stop: StopReason | None = None
    error: str = ""  # what the environment raised; then `stop` is ENV_ERROR
    fault: object = None  # where in the environment's code it was raised (look/faults.py)
    success: bool = False
    metrics: dict = field(default_factory=dict)

    @classmethod
    def begin(cls, groups, row, observation):
        """The fresh episode of a row of EnvGroups. observation: what `reset` returned for it"""
        g, member = groups.places[row]
        t = cls(groups.name_of(row), groups.seeds[g], g, member, row)
        if isinstance(observation, Exception):
            t.fail(observation)
        else:
            t.observation = observation
        return t

    @property
    def tokens(self):
        """All ids so far; in more/windows.py those of the last turn."""
        return self.sequences[-1].tokens

    @property
    def episode_return(self):
        return sum(self.turn_rewards)

    @property
    def response_tokens(self):
        return sum(sum(sequence.response_mask) for sequence in self.sequences)

    def fail(self, exception):
        """End the episode because its environment raised. exception: a Failure or any other"""
        self.stop, self.error = StopReason.ENV_ERROR, str(exception)
        self.fault = getattr(exception, "fault", None)

    def add_prompt(self, ids):
        """Append ids that were not sampled: prompt, framing, observation."""
        self.sequences[-1].add(ids, [0.0] * len(ids), False, -1)

    def add_reply(self, ids, logprobs, turn):
        """Append the ids of reply number `turn` with the logprobs they were sampled with."""
        self.sequences[-1].add(ids, logprobs, True, turn)

    def end_turn(self, text, reply, stop, outcome, times=()):
        """Note what a reply did. outcome: of EnvGroups.step"""
        self.turns.append(Turn(self.observation, text, reply, stop, times))
        if isinstance(outcome, Exception):
            self.turn_rewards.append(0.0)
            self.fail(outcome)
            return
        self.observation, reward, terminated, truncated, info = outcome
        self.turn_rewards.append(float(reward))
        self.success = self.success or info.get("success", 0) > 0
        for name, value in info.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if terminated or truncated:
            self.stop = StopReason.TERMINATED if terminated else StopReason.TRUNCATED

    def end(self):
        """Divide the metrics of PER_TURN, summed so far, by the number of turns."""
        for name in PER_TURN & self.metrics.keys():
            self.metrics[name] /= len(self.turns)

    def messages(self):
        """The conversation as chat messages, for people and for JSONL."""
        chat = [{"role": "system", "content": self.system}]
        for turn in self.turns:
            chat += [{"role": "user", "content": turn.observation},
                     {"role": "assistant", "content": turn.text}]
        return chat


@dataclass
class Batch:
    """Sequences as right-padded tensors: B rows, each a trajectory or one of its turns."""

    tokens: Tensor  # (B, T) int64
    attention_mask: Tensor  # (B, T) bool, the tokens that are no padding
    response_mask: Tensor  # (B, T) bool, the tokens that the policy sampled: turn_ids >= 0
    turn_ids: Tensor  # (B, T) int64
    sample_logprobs: Tensor  # (B, T) float32
    rewards: Tensor  # (B, T) float32, the environment's, on the last sampled token of each turn
    group_ids: Tensor  # (B,) int64
    episode_ids: Tensor  # (B,) int64
    episode_returns: Tensor  # (B,) float32, the sum of the environment's rewards in the episode
    state_ids: Tensor  # (B, T) int64, at a turn's last token its opening state's number; else -1
    predicted_mask: Tensor  # (B, T) bool, the tokens of observations that ECHO predicts
    # -- added by train.compute_targets; (B, T) unless said otherwise
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    scores: Tensor | None = None  # (B,) what estimators compare within a group
    token_rewards: Tensor | None = None  # what REINFORCE and GAE sum up
    values: Tensor | None = None
    advantages: Tensor | None = None
    value_targets: Tensor | None = None  # what the critic learns to predict
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

    # -- E episodes: one row each, or in the windowed contexts one for each turn
    @property
    def episode_index(self):
        """(B,) int64: each row's episode, numbered from 0 to E - 1 without gaps."""
        return self.episode_ids.unique(return_inverse=True)[1]

    def by_episode(self, x):
        """x is equal in all rows of an episode: keep one. (B,) -> (E,)"""
        index = self.episode_index
        return x.new_zeros(int(index.max()) + 1).scatter(0, index, x)

    def episode_scores(self):
        """scores and group_ids, both (E,): what estimators compare."""
        return self.by_episode(self.scores), self.by_episode(self.group_ids)

    def episode_sums(self, x):
        """In each row the sum of x over all rows of the episode. (B,) -> (B,)"""
        index = self.episode_index
        return x.new_zeros(int(index.max()) + 1).index_add(0, index, x)[index]

    def to_tokens(self, x):
        """Each episode's x on all its sampled tokens, 0 elsewhere. (E,) -> (B, T)"""
        return x[self.episode_index][:, None] * self.response_mask

    def turn_totals(self, x):
        """Sums of x over each turn's sampled tokens; 0 without such a turn. (B, T) -> (E, K)"""
        at, index = self.response_mask, self.episode_index
        table = x.new_zeros(int(index.max()) + 1, int(self.turn_ids.max()) + 1)
        place = index[:, None].expand_as(at)[at], self.turn_ids[at]
        return table.index_put(place, x[at], accumulate=True)

    def turns_to_tokens(self, table):
        """Each turn's number on all its sampled tokens, 0 elsewhere. (E, K) -> (B, T)"""
        return table[self.episode_index[:, None], self.turn_ids.clamp(min=0)] * self.response_mask


def make_batch(trajectories):
    """Pad to the longest. Groups are renumbered: those that failed as a whole would leave gaps."""
    rows = [(sequence, t, e) for e, t in enumerate(trajectories) for sequence in t.sequences]

    def column(name, fill):
        arrays = [np.array(getattr(s, name)) for s, _, _ in rows]  # faster than torch.tensor
        return pad_sequence([*map(torch.from_numpy, arrays)], batch_first=True, padding_value=fill)

    turn_ids = column("turn_ids", -1)
    rewards, predicted_mask = torch.zeros(turn_ids.shape), torch.zeros_like(turn_ids).bool()
    state_ids, states = torch.full_like(turn_ids, -1), {}
    for b, (sequence, t, _) in enumerate(rows):
        for turn, position in sequence.last_of_turn.items():
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
