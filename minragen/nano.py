"""The whole idea on one page: a language model learns by trial and error to act in an environment.

    python -m minragen.nano         (trains the bundled model tiny on bandit, on one CPU core)

One step: the policy plays G episodes of each of P instances, token by token. The return of each
episode is compared with the returns of its group (GRPO). The update makes the sampled tokens of
better episodes more likely and those of worse episodes less likely (PPO's clipped loss).

Reading order: `Episode`, then `train`, the loop, then its parts in the order in which they run.
Axes: B = P * G episodes, T tokens of an episode, N sampled tokens of all episodes, V vocabulary.

Differences from train.py: nothing is cached, so every token costs a forward pass over its whole
conversation; GRPO is the only algorithm, without its options (filter, mini-batches, dual clip,
entropy bonus). With the same settings both have the same gradient (tests/test_nano.py).
"""

from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from minragen.chat import ChatFrame
from minragen.envs import EnvGroups, make
from minragen.models import load_policy

ENV, ENV_OPTIONS = "bandit", {"mixed": True}
MAX_NEW_TOKENS = 24  # of a reply
WARMUP_STEPS = 400  # of imitation before RL; the resulting weights come with minRAGEN
STEPS, EPOCHS = 26, 2  # every step plays fresh episodes; an epoch is an update on all of them
NUM_GROUPS, GROUP_SIZE = 8, 32  # P, G: the better arm pays seldom, which few members would miss
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 5e-4, 0.2, 1.0
HELD_OUT_SIZE, HELD_OUT_EVERY = 256, 10  # instances, steps
HELD_OUT_TEMPERATURE = 0.5  # as in the validation of train.py


@dataclass
class Episode:
    """One conversation. The first three lists have an entry for each of its T tokens."""

    env: object
    tokens: list = field(default_factory=list)  # ids: prompt, reply, observation, reply, ...
    response_mask: list = field(default_factory=list)  # True iff the policy sampled this id
    sample_logprobs: list = field(default_factory=list)  # nats; 0.0 where not sampled
    reply: list = field(default_factory=list)  # the ids of the unfinished reply
    episode_return: float = 0.0  # sum of the rewards so far
    success: bool = False
    over: bool = False

    def add(self, ids, sampled=False, logprob=0.0):
        self.tokens += ids
        self.response_mask += [sampled] * len(ids)
        self.sample_logprobs += [logprob] * len(ids)


def train(policy, frame, seed=0, steps=STEPS):
    """Train the policy in place and print a line per step."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE)
    print(f"before    held-out success {held_out_success(policy, frame):.3f}", flush=True)
    for step in range(1, steps + 1):
        first_seed = (seed * steps + step) * NUM_GROUPS  # fresh instances in every step
        episodes = collect(policy, frame, "train", first_seed, NUM_GROUPS, GROUP_SIZE)
        tokens, response_mask, old_logprobs, returns = make_batch(episodes)
        advantages = group_advantages(returns, GROUP_SIZE)  # (B,)
        advantages = advantages.repeat_interleave(response_mask.sum(dim=1))  # (N,)
        for _ in range(EPOCHS):
            logprobs = token_logprobs(policy.model, tokens, response_mask)
            loss = policy_loss(logprobs, old_logprobs, advantages).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step:2}   mean return {returns.mean():.3f}", flush=True)
        if step % HELD_OUT_EVERY == 0 or step == steps:
            print(f"          held-out success {held_out_success(policy, frame):.3f}", flush=True)


@torch.no_grad()
def collect(policy, frame, split, first_seed, num_groups, group_size, temperature=1.0):
    """Play P * G episodes; group g plays the instance of seed first_seed + g.

    Each forward pass gives every unfinished episode one token. Attention is causal, so no token
    sees the padding on its right.
    """
    episodes = [begin(frame, split, first_seed + g, member)
                for g in range(num_groups) for member in range(group_size)]
    while live := [e for e in episodes if not e.over]:
        tokens = pad(e.tokens for e in live)
        last = torch.tensor([len(e.tokens) - 1 for e in live])
        logits = policy.model(tokens, use_cache=False).logits[torch.arange(len(live)), last]
        log_p = (logits / temperature).log_softmax(dim=-1)  # (live episodes, V)
        sampled = torch.multinomial(log_p.exp(), num_samples=1)
        logprobs = log_p.gather(1, sampled)
        for episode, token, logprob in zip(live, sampled[:, 0].tolist(), logprobs[:, 0].tolist()):
            add_token(frame, episode, token, logprob)
    return episodes


def begin(frame, split, seed, member):
    """A new episode, with its prompt. `seed` draws the instance, (seed, member) the payouts."""
    episode = Episode(make(ENV, split, **ENV_OPTIONS))
    observation, _ = episode.env.reset(seed=seed, options={"member": member})
    episode.add(frame.open(frame.system_message(episode.env), observation))
    return episode


def add_token(frame, episode, token, logprob):
    """Append a sampled token. If it ends the reply, act and append the next observation."""
    episode.add([token], sampled=True, logprob=logprob)
    ids = episode.reply = [*episode.reply, token]
    # The text is only for the environment; training uses the sampled ids, never encoded text.
    reply = frame.parse(frame.tokenizer.decode(ids))  # malformed: its answer is "", which costs
    if not (reply.valid or token in frame.end_ids or len(ids) == MAX_NEW_TOKENS):
        return
    observation, reward, terminated, truncated, info = episode.env.step(reply.answer)
    episode.episode_return += reward
    episode.success = episode.success or info["success"] == 1
    episode.over = terminated or truncated
    if not episode.over:  # another turn
        episode.add(frame.between(token, observation))
        episode.reply = []


def held_out_success(policy, frame):
    """The share of successful episodes on instances of a split that training never plays."""
    episodes = collect(policy, frame, "val", 0, HELD_OUT_SIZE, 1, HELD_OUT_TEMPERATURE)
    return sum(e.success for e in episodes) / len(episodes)


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

    A token whose ratio has moved by more than CLIP in its advantage's direction has no gradient:
    the old policy played these episodes, and they say little about a policy far from it.
    """
    ratio = (logprobs - old_logprobs).exp()  # 1 in the first epoch
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))


def main(seed=0, steps=STEPS):
    """Load tiny after its warm-up, and train it. An untrained model would never write an answer."""
    from minragen.run.bundled import resolve  # loading is not part of the idea

    folder = resolve("tiny", lambda split, count: EnvGroups(ENV, count or 1, 1, split, ENV_OPTIONS),
                     max_new_tokens=MAX_NEW_TOKENS, steps=WARMUP_STEPS)
    policy = load_policy(folder, name="tiny")
    train(policy, ChatFrame(policy.tokenizer, max_new_tokens=MAX_NEW_TOKENS), seed, steps)


if __name__ == "__main__":
    main()
