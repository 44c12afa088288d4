"""The whole idea on one page: a language model learns by trial and error to win a game of turns.

    python -m minragen.nano         (trains the bundled model tiny, on one CPU core)

One step: the policy plays G episodes of each of P instances, token by token. The return of each
episode is compared with the returns of its group (GRPO). The update makes the sampled tokens of
better episodes more likely and those of worse episodes less likely (PPO's clipped loss).

An episode is one conversation. Only what the policy sampled in it is trained:

    tokens         ... Matches: IIII II <answer> |  2 </answer> | ... Matches: III <answer> |  3 ...
    response_mask  F   F        F    F  F        |  T T         | F   F        F   F        |  T

Axes: B = P * G episodes, T tokens of an episode, N sampled tokens of all episodes, V vocabulary.

With the same settings train.py has the same gradient (tests/test_nano.py).
"""

from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from minragen.chat import ChatFrame
from minragen.envs import Budget, EnvGroups, Outcome, TextEnv
from minragen.models import load_policy

RESPONSE_FORMAT = "no_think"  # a reply is <answer>2</answer>
MAX_NEW_TOKENS = 4  # the most tokens of a reply that the policy samples
WARMUP_STEPS = 120  # of imitation before RL: an untrained model would never write an answer
STEPS, EPOCHS = 20, 2  # every step plays fresh episodes; an epoch is an update on all of them
NUM_GROUPS, GROUP_SIZE = 16, 8  # P, G
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-3, 0.2, 1.0
HELD_OUT_SIZE, HELD_OUT_TEMPERATURE = 256, 0.5  # episodes; config.py: val_temperature


class Nim(TextEnv):
    """Two players take 1, 2 or 3 matches in turn. Who always leaves a multiple of 4 wins."""

    instruction = "Whoever takes the last match wins."
    actions = ("1", "2", "3")
    budget = Budget(max_turns=3)

    def _reset(self, rng):
        self.heap = 0
        while self.heap % 4 == 0:  # none yet, or one that cannot be won: draw again
            self.heap = int(rng.integers(1, 4 * self.budget.max_actions))

    def _act(self, action):
        self.heap = max(0, self.heap - int(action))
        won = self.heap == 0
        if not won:  # the other player leaves a multiple of 4 if it can
            self.heap -= self.heap % 4 or int(self.dynamics.integers(1, 4))
        return Outcome(float(won), terminated=self.heap == 0, success=won)

    def render(self):  # in fours, so that the remainder is one token
        return "Matches:" + " IIII" * (self.heap // 4) + " " + "I" * (self.heap % 4)

    def solve(self):
        return [str(self.heap % 4 or 1)]


@dataclass
class Episode:
    """One conversation. The first three lists have an entry for each of its T tokens."""

    env: TextEnv
    tokens: list = field(default_factory=list)  # ids: prompt, reply, observation, reply, ...
    response_mask: list = field(default_factory=list)  # True iff the policy sampled this id
    sample_logprobs: list = field(default_factory=list)  # nats; 0.0 where not sampled
    reply: list = field(default_factory=list)  # the ids of the unfinished reply
    episode_return: float = 0.0  # sum of the rewards of all turns so far
    over: bool = False

    def add(self, ids, sampled=False, logprob=0.0):
        self.tokens += ids
        self.response_mask += [sampled] * len(ids)
        self.sample_logprobs += [logprob] * len(ids)


def train(policy, frame, seed=0, steps=STEPS):
    """Train the policy in place, and print a line per step and held-out success at both ends."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE)
    print(f"step  0/{steps}  held-out success {held_out_success(policy, frame):.3f}", flush=True)
    for step in range(1, steps + 1):
        first_seed = (seed * steps + step) * NUM_GROUPS  # fresh seeds in every step
        episodes = collect(policy, frame, "train", first_seed, NUM_GROUPS, GROUP_SIZE)
        tokens, response_mask, old_logprobs, returns = make_batch(episodes)
        advantages = group_advantages(returns, GROUP_SIZE)  # (B,)
        advantages = advantages.repeat_interleave(response_mask.sum(dim=1))  # (N,), row by row
        for _ in range(EPOCHS):
            logprobs = token_logprobs(policy.model, tokens, response_mask)
            loss = policy_loss(logprobs, old_logprobs, advantages).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step:2}/{steps}  mean return {returns.mean():.3f}", flush=True)
    print(f"step {step:2}/{steps}  held-out success {held_out_success(policy, frame):.3f}")


@torch.no_grad()
def collect(policy, frame, split, first_seed, num_groups, group_size, temperature=1.0):
    """Play P * G episodes to their ends; group g plays the instance of seed first_seed + g.

    Each forward pass rereads every unfinished conversation (rollout.py keeps a cache) and gives
    each one token. No token sees the padding on its right.
    """
    episodes = [begin(frame, split, first_seed + g, member)
                for g in range(num_groups) for member in range(group_size)]
    while live := [e for e in episodes if not e.over]:
        tokens = pad(e.tokens for e in live)
        last = [len(e.tokens) - 1 for e in live]
        logits = policy.model(tokens, use_cache=False).logits[range(len(live)), last]
        log_p = (logits / temperature).log_softmax(dim=-1)  # (live episodes, V)
        sampled = torch.multinomial(log_p.exp(), num_samples=1)
        for episode, token, log_p_row in zip(live, sampled[:, 0].tolist(), log_p.tolist()):
            add_token(frame, episode, token, log_p_row[token])
    return episodes


def begin(frame, split, seed, member):
    """An episode. `seed` fixes the first heap, (seed, member) the other player's random moves."""
    episode = Episode(Nim(split))
    observation, _ = episode.env.reset(seed=seed, options={"member": member})
    episode.add(frame.first_prompt_ids(frame.system_message(episode.env), observation))
    return episode


def add_token(frame, episode, token, logprob):
    """Append a sampled token. If it ends the reply, act and append the next observation."""
    episode.add([token], sampled=True, logprob=logprob)
    episode.reply.append(token)
    # The text is only for the environment; training uses the sampled ids, never encoded text.
    reply = frame.parse(frame.tokenizer.decode(episode.reply))  # malformed: the answer is ""
    if reply.valid or token in frame.end_ids or len(episode.reply) == MAX_NEW_TOKENS:
        observation, reward, terminated, truncated, _ = episode.env.step(reply.answer)
        episode.episode_return += reward
        episode.over = terminated or truncated
        if not episode.over:  # another turn of the same conversation
            episode.add(frame.next_prompt_ids(token, observation))
            episode.reply = []


def held_out_success(policy, frame):
    """The share won of episodes that begin with 6, 7 or 11 matches, as none does in training."""
    episodes = collect(policy, frame, "test", 0, HELD_OUT_SIZE, 1, HELD_OUT_TEMPERATURE)
    return sum(e.episode_return > 0 for e in episodes) / len(episodes)  # only a win pays


def make_batch(episodes):
    """tokens (B, T), response_mask (B, T), old_logprobs (N,), returns (B,), all as tensors."""
    response_mask = pad(e.response_mask for e in episodes)
    old_logprobs = pad(e.sample_logprobs for e in episodes)[response_mask]
    returns = torch.tensor([e.episode_return for e in episodes], dtype=torch.float64)
    return pad(e.tokens for e in episodes), response_mask, old_logprobs, returns


def pad(rows):
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def group_advantages(returns, group_size):
    """(return - mean) / std within each group (GRPO, Shao et al. 2024, eq. 2-3). (B,) -> (B,)

    The group's mean is the baseline, so no critic is needed. Equal returns give advantages of 0.
    """
    groups = returns.view(-1, group_size)  # (P, G)
    mean, std = groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True)
    return ((groups - mean) / (std + 1e-6)).flatten().float()


def token_logprobs(model, tokens, response_mask):
    """The logprob of each sampled token, given all tokens before it. Returns (N,) nats."""
    logits = model(tokens, use_cache=False).logits[:, :-1]  # those at position t-1 predict token t
    log_p = logits[response_mask[:, 1:]].log_softmax(dim=-1)  # (N, V)
    return log_p.gather(1, tokens[response_mask][:, None])[:, 0]


def policy_loss(logprobs, old_logprobs, advantages):
    """PPO's clipped loss of each sampled token (Schulman et al. 2017, eq. 7). (N,) -> (N,)
    A token has no gradient once its ratio has moved more than CLIP in its advantage's direction."""
    ratio = (logprobs - old_logprobs).exp()  # 1 in the first epoch
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))


def main(seed=0, steps=STEPS):
    """Train tiny, warmed up by imitation (the first run does that and keeps the result on disk)."""
    from minragen.run.bundled import resolve  # loading is not part of the idea

    policy = load_policy(resolve(
        "tiny", lambda split, count: EnvGroups("minragen.nano:Nim", count or 1, 1, split),
        RESPONSE_FORMAT, MAX_NEW_TOKENS, WARMUP_STEPS), name="tiny")
    frame = ChatFrame(policy.tokenizer, RESPONSE_FORMAT, max_new_tokens=MAX_NEW_TOKENS)
    train(policy, frame, seed, steps)


if __name__ == "__main__":
    main()
