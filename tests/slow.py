"""The algorithm without the speed: one step of StarPO in plain loops, from prompts to new weights.

`collect` plays one episode after the other and runs the whole conversation through the network for
every token. `update` visits one row after the other. Nothing is batched, cached, padded or masked.
Environments, chat frame, tokenizer and network are minragen's; seeds and noise are computed again
here. test_step.py compares minragen with this file: the rollout token by token, the update gradient
by gradient. Left out: the state reward, filters that keep nothing.

A row is what the network sees at once: a whole conversation, or one turn in the windowed contexts.
Its vectors have one entry per token. Read `train_step` first: it is the outline.
"""

import math
import zlib
from collections import defaultdict
from statistics import fmean, mean
from types import SimpleNamespace

import torch

ZERO = 1e-10  # a score that is no larger counts as 0


def train_step(learner, frame, groups, config, step, play=None):
    """Play P groups of G episodes, keep the groups that the filter selects, update the weights.

    learner: policy, reference, critic, their optimizers and `rounds`
    returns: the gradients of every optimizer step (critic after policy), and the metrics
    """
    episodes, P = [], config.num_groups
    for attempt in range(1 + config.resample):
        first_seed = 2**41 + config.seed * 2**24 + learner.rounds * P  # instances never repeat
        learner.rounds += 1
        for episode in (play or collect)(learner, frame, groups, first_seed, config):
            episode.group_id += attempt * P
            if not episode.error:  # a failed environment says nothing of the policy
                episodes.append(episode)
        stds = [std(map(total, group)) for group in by_group(episodes).values()]
        if sum(s > ZERO for s in stds) >= P:
            break
    kept = sorted(kept_groups(dict(zip(by_group(episodes), stds)), config))[:P]
    gradients, metrics = update(learner, [e for e in episodes if e.group_id in kept], config, step)
    return gradients, metrics | {
        "episode_return": fmean(map(total, episodes)), "reward_std": fmean(stds),
        "groups_kept": len(kept), "groups_zero_std": sum(s <= ZERO for s in stds)}


def by_group(episodes):
    groups = defaultdict(list)
    for episode in episodes:
        groups[episode.group_id].append(episode)
    return groups


def total(episode):
    return sum(episode.turn_rewards)


def std(x):
    """Sample standard deviation; 0 for a single number."""
    x = list(x)
    middle = mean(x)  # statistics.mean is exact: equal values differ from it by exactly 0
    return math.sqrt(sum((v - middle)**2 for v in x) / (len(x) - 1)) if len(x) > 1 else 0.0


# ---- Playing -------------------------------------------------------------------------------------
def collect(learner, frame, groups, first_seed, config):
    """Play one episode in every environment of `groups`, one after the other."""
    return [play_episode(learner, frame, groups, i, observation, config)
            for i, observation in enumerate(groups.reset(first_seed))]


def play_episode(learner, frame, groups, i, observation, config):
    """Reply, step, observe, until the environment or the context ends the episode."""
    env, (group, member) = groups.envs[i], groups.places[i]
    source = (config.seed, f"{groups.split} {groups.names[group]}", groups.seeds[group], member)
    episode = SimpleNamespace(group_id=group, sequences=[], turn_rewards=[], error="", turns=[])
    prompt, turns, over = frame.first_prompt_ids(frame.system_message(env), observation), [], False
    while not over:
        # Positions repeat in the windowed contexts, so each turn counts from a number of its own.
        offset = 0 if config.context == "full" else len(turns) * config.max_context
        said, logprobs, ended = reply(learner, frame, prompt, config, source, offset)
        if config.context != "full" or not turns:
            row = SimpleNamespace(tokens=[], turn_ids=[], sample_logprobs=[])
            episode.sequences.append(row)
        given = len(prompt) - len(row.tokens)
        row.tokens = prompt + said
        row.turn_ids += [-1] * given + [len(turns)] * len(said)
        row.sample_logprobs += [0.0] * given + logprobs
        answer = frame.parse(learner.policy.tokenizer.decode(said[:-1] if ended else said)).answer
        turns.append((observation, answer, said))
        try:
            episode.turns.append(SimpleNamespace(observation=SimpleNamespace(state=env.state)))
            observation, reward, terminated, truncated, _ = env.step(answer)
        except OSError as failure:
            episode.error = str(failure)
            break
        episode.turn_rewards.append(reward)
        prompt = next_prompt(frame, env, config, row.tokens, turns, observation)
        over = terminated or truncated or prompt is None
    return episode


@torch.no_grad()
def reply(learner, frame, prompt, config, source, offset):
    """Sample ids until the reply can be read, the model ends its turn, or no token is left.

    returns: ids, their logprobs, whether the last id is the model's own end of turn
    """
    said, logprobs, closed, ended = [], [], False, False
    room = min(config.max_new_tokens, config.max_context - len(prompt))
    while not (closed or ended or len(said) == room):
        logits = learner.policy.model(torch.tensor([prompt + said])).logits[0, -1]
        log_p = (logits / (config.temperature or 1.0)).log_softmax(-1).tolist()
        u = uniform(*source, offset + len(prompt) + len(said))
        said.append(draw(log_p, u, config))
        logprobs.append(log_p[said[-1]])  # in the whole distribution, before top-k and top-p
        closed = frame.parse(learner.policy.tokenizer.decode(said)).valid
        ended = said[-1] in frame.end_ids and not closed
    return said, logprobs, ended


def draw(log_p, u, config):
    """The first id at which the cumulative probability exceeds u; temperature 0: the likeliest."""
    p = [math.exp(x) for x in log_p]
    likeliest_first = sorted(range(len(p)), key=lambda v: -p[v])
    if config.temperature == 0:
        return likeliest_first[0]
    allowed = likeliest_first[:config.top_k or len(p)]
    nucleus, held, enough = [], 0.0, config.top_p * sum(p[v] for v in allowed)
    while held < enough and len(nucleus) < len(allowed):
        nucleus.append(allowed[len(nucleus)])
        held += p[nucleus[-1]]
    for v in sorted(nucleus):
        u -= p[v] / held
        if u < 0:
            break
    return v


def uniform(run_seed, env, seed, member, position):
    """The noise of one token: in (0, 1), a function of its arguments alone (SplitMix64)."""
    key = zlib.crc32(env.encode())
    for part in (run_seed, seed, member):
        key = mix(key ^ part) % 2**63
    return (2 * (mix((mix(key) + position) % 2**64) >> 41) + 1) / 2**24


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def next_prompt(frame, env, config, conversation, turns, observation):
    """All ids before the next reply, or None if the context has no room for one."""
    if config.context == "full":
        ids = conversation + frame.next_prompt_ids(conversation[-1], observation)
        return ids if len(ids) < config.max_context else None
    for window in range(config.window, 0, -1):  # fewer turns if a whole reply would not fit
        shown = turns[max(0, len(turns) - window + 1):]
        seen = [s for s, _, _ in shown] + [observation]
        if config.context == "single_turn":
            past = [f"{s}\nYou answered: {answer or 'nothing valid'}" for s, answer, _ in shown]
            ids = frame.first_prompt_ids(frame.system_message(env), "\n".join([*past, observation]))
        else:
            ids = frame.first_prompt_ids(frame.system_message(env), seen[0])
            for (_, _, said), following in zip(shown, seen[1:]):
                ids = ids + said + frame.next_prompt_ids(said[-1], following)
        if len(ids) + (config.max_new_tokens if window > 1 else 1) <= config.max_context:
            return ids
    return None


class Adapted(torch.nn.Module):
    """LoRA: W x + 2 B A x, where only A (r, in) and B (out, r) are trained; alpha is 2 r."""

    def __init__(self, linear, A):
        super().__init__()
        self.linear = linear
        self.A = torch.nn.Parameter(A)
        self.B = torch.nn.Parameter(torch.zeros(linear.out_features, len(A)))

    def forward(self, x):
        return self.linear(x) + 2 * (x @ self.A.T @ self.B.T)


# ---- Which groups --------------------------------------------------------------------------------
def kept_groups(score, config):
    """The groups that the SNR filter of RAGEN V2 keeps."""
    score = {g: s if s > ZERO else 0.0 for g, s in score.items()}
    value, unit = config.filter_value, 1e-6 * max([ZERO, *score.values()])
    score = {g: round(s / unit) * unit for g, s in score.items()}  # equal up to rounding: equal
    differ = {g for g in score if score[g] > 0 or config.filter not in ("top_p", "min_p")}
    best_first = sorted(differ, key=lambda g: (-score[g], g))
    if config.filter == "none":
        return list(score)
    if config.filter in ("top_k", "top_k_abs"):
        count = value * len(score) + 1e-9 if config.filter == "top_k" else value
        return best_first[:max(1, int(count))]
    if config.filter == "min_p":
        return [g for g in best_first if score[g] >= value * score[best_first[0]]]
    mass = {g: score[g] if config.filter == "top_p" else math.exp(score[g]) for g in best_first}
    needed = (value - (0.01 if config.filter == "top_p" else 0)) * sum(mass.values())
    kept, held = [], 0.0
    for g in best_first:  # top_p and top_p_softmax: the shortest prefix that holds enough
        if held < needed or value == 1:
            kept.append(g)
            held += mass[g]
    return kept


def sampled(row):
    """The positions of the tokens that the policy chose."""
    return [t for t, turn in enumerate(row.turn_ids) if turn >= 0]


def predict(model, tokens, temperature):
    """Logprob of each token given those before it, and entropy of what it was drawn from: (T,)."""
    log_p = (model(torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)[:-1]
    entropy = -(log_p.exp() * log_p).sum(-1)
    chosen = log_p[range(len(log_p)), tokens[1:]]  # the logits that predict t stand at t - 1
    return tuple(torch.cat([torch.zeros(1), x]) for x in (chosen, entropy))


# ---- Learning ------------------------------------------------------------------------------------
def update(learner, episodes, config, step):
    """Rewards, advantages, then an optimizer step for each mini-batch of rows in each epoch."""
    critic = config.advantages in ("gae", "bi_level_gae", "turn_gae")
    for e in episodes:
        e.rows = [make_row(learner, e, sequence, config) for sequence in e.sequences]
    rows, metrics = [row for e in episodes for row in e.rows], {}
    score(episodes, config, metrics)
    assign_rewards(episodes, config, metrics)
    compute_advantages(episodes, rows, config, critic)
    for row in rows:
        if config.tis_cap:
            weight = (row.old - row.sample_logprobs).exp()
            row.advantages[row.sampled] *= weight[row.sampled].clamp(max=config.tis_cap)
    if critic:
        returns = [r for row in rows for r in row.returns[row.valued].tolist()]
        errors = [x for row in rows for x in (row.returns - row.values)[row.valued].tolist()]
        metrics["explained_variance"] = 1 - std(errors)**2 / (std(returns)**2 + 1e-8)
    rate = 1 - (1 - config.lr_final) * (step - 1) / max(1, config.steps - 1)
    gradients, log = [], defaultdict(list)
    for epoch in range(config.epochs):
        seed = zlib.crc32(repr((config.seed, step, epoch)).encode())
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        parts, start = math.ceil(len(rows) / config.mini_batch), 0
        for part in range(parts):  # sizes differ by one at most, the larger ones first
            size = len(rows) // parts + (part < len(rows) % parts)
            mini, start = [rows[i] for i in order[start:start + size]], start + size
            policy_loss(learner, mini, config, log).backward()
            gradients.append(optimize(learner.optimizer, config.lr * rate, config))
            log["grad_norm"].append(norm(gradients[-1]))
            if critic:
                value_loss(learner, mini, config, log).backward()
                gradients.append(optimize(learner.critic_optimizer, config.critic_lr * rate,
                                          config))
                log["critic_grad_norm"].append(norm(gradients[-1]))
    del log["logprob_gap"][1:]  # measured before the first optimizer step
    return gradients, metrics | {name: fmean(values) for name, values in log.items()}


@torch.no_grad()
def make_row(learner, episode, sequence, config):
    """A row: the positions of each part of the step; logprobs and values before the update."""
    row = SimpleNamespace(episode=episode, tokens=sequence.tokens, turn_ids=sequence.turn_ids)
    row.sampled = row.valued = sampled(sequence)
    row.turns = [[t for t in row.sampled if sequence.turn_ids[t] == k]
                 for k in sorted({sequence.turn_ids[t] for t in row.sampled})]
    row.observed = observed(learner.policy.tokenizer, row) if config.echo_coef else []
    row.sample_logprobs = torch.tensor(sequence.sample_logprobs)
    row.old = predict(learner.policy.model, row.tokens, config.temperature)[0]
    if learner.reference:
        row.ref = predict(learner.reference, row.tokens, config.temperature)[0]
    if learner.critic:
        row.values = values_of(learner, row.tokens)
    return row


def observed(tokenizer, row):
    """Positions of the tokens of the states that replies led to: what the prompts between replies
    say apart from the reward and the chat template."""
    found, states = [], [turn.observation.state for turn in row.episode.turns]
    for k in range(1, 1 + max(row.turn_ids)):
        replied = [t for t, turn in enumerate(row.turn_ids) if turn == k - 1][-1]
        shown = range(replied + 1, row.turn_ids.index(k))
        pieces = [tokenizer.decode(row.tokens[t]) for t in shown]
        start = "".join(pieces).index(states[k])
        for t, piece in zip(shown, pieces):
            end = len("".join(pieces[:t - replied]))
            if start <= end - len(piece) and end <= start + len(states[k]):
                found.append(t)
    return found


def values_of(learner, tokens):
    """V_t, read from the state in which token t is chosen: (T,)."""
    hidden = learner.critic.trunk(torch.tensor([tokens])).last_hidden_state[0, :-1]
    return torch.cat([torch.zeros(1), learner.critic.head(hidden)[:, 0]])


def score(episodes, config, metrics):
    """Add the overlong penalties to the turn rewards (`rewards`), and up the sum (`score`)."""
    for e in episodes:
        e.rewards = list(e.turn_rewards)
        for row in e.rows if config.overlong else ():  # DAPO: replies that near their limit
            for tokens in row.turns:
                zone = config.overlong * config.max_new_tokens
                late = min(max(len(tokens) - config.max_new_tokens + zone, 0) / zone, 1)
                e.rewards[row.turn_ids[tokens[0]]] -= late
        e.score = sum(e.rewards)
    if config.overlong:
        metrics["overlong_penalty"] = fmean(e.score - total(e) for e in episodes)


def assign_rewards(episodes, config, metrics):
    """Put the rewards on tokens; subtract the KL to the reference from rewards and scores."""
    for e in episodes:
        return_to_go = 0.0
        for row in reversed(e.rows):
            row.rewards, last = torch.zeros(len(row.tokens)), row.sampled[-1]
            for tokens in row.turns if config.credit == "turn" else ():
                row.rewards[tokens[-1]] = e.rewards[row.turn_ids[tokens[-1]]]
            if config.credit == "episode":
                row.rewards[last] = e.score
            elif config.context != "full":  # later turns are other rows
                return_to_go = e.rewards[row.turn_ids[last]] + config.gamma_turn * return_to_go
                row.rewards[last] = return_to_go
    if config.kl_reward_coef:
        measured = []
        for row in (row for e in episodes for row in e.rows):
            kl = (row.old - row.ref)[row.sampled]
            row.rewards[row.sampled] -= config.kl_reward_coef * kl
            row.episode.score -= config.kl_reward_coef * float(kl.sum())
            measured += kl.tolist()
        metrics["kl_reward"] = fmean(measured)


def compute_advantages(episodes, rows, config, critic):
    """Advantages of every row by the estimator of the config, and returns for the critic."""
    groups, kind = by_group(episodes), config.advantages
    for row in rows:
        members = episodes if kind == "brpo" else groups[row.episode.group_id]
        scores = [e.score for e in members]
        row.advantages = torch.zeros(len(row.tokens))
        if critic:
            advantages_with_critic(row, config)
        elif kind in ("reinforce", "reinforce_pp"):  # GAE without values is the return
            row.advantages = gae(row.sampled, row.rewards, torch.zeros(len(row.tokens)), 1.0,
                                 lambda t: config.gamma)
        elif kind != "none":
            baseline = mean(scores) if kind != "rloo" else (
                (sum(scores) - row.episode.score) / (len(scores) - 1))
            normed = kind == "brpo" or kind in ("grpo", "gigpo") and config.norm_by_std
            divisor = (mean(scores) or math.inf) if kind == "maxrl" else (
                std(scores) + 1e-6 if normed else 1.0)
            row.advantages[row.sampled] = (row.episode.score - baseline) / divisor
        if kind == "gigpo":
            compare_turns(row, members, config)
    if critic or kind.startswith("reinforce_pp"):  # whitening, over the tokens of the update
        measured = [a for row in rows for a in row.advantages[row.valued].tolist()]
        middle, deviation = fmean(measured), math.sqrt(std(measured)**2 + 1e-8)
        for row in rows:
            row.advantages[row.sampled] = (row.advantages[row.sampled] - middle) / deviation


def compare_turns(row, members, config):
    """GiGPO: add each turn's return compared with those of all turns in the same state."""
    for tokens in row.turns:
        k = row.turn_ids[tokens[0]]
        state = row.episode.turns[k].observation.state
        others = [return_from(e, i, config.gamma_turn) for e in members
                  for i, turn in enumerate(e.turns) if turn.observation.state == state]
        own = return_from(row.episode, k, config.gamma_turn) - mean(others)
        row.advantages[tokens] += own / (std(others) + 1e-6 if config.norm_by_std else 1.0)


def return_from(episode, k, gamma):
    """The discounted rewards from turn k on."""
    return sum(gamma**i * reward for i, reward in enumerate(episode.turn_rewards[k:]))


def gae(positions, rewards, values, lam, discount):
    """A_t = r_t + d_t V_next - V_t + d_t lam A_next, from the last position to the first: (T,)."""
    advantages, next_value, next_advantage = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(positions):
        delta = rewards[t] + discount(t) * next_value - values[t]
        next_value, next_advantage = values[t], delta + discount(t) * lam * next_advantage
        advantages[t] = next_advantage
    return advantages


def advantages_with_critic(row, config):
    """GAE over tokens, over turns (VAGEN's turn-wise GAE), or over turns and then within them."""
    rewards, ends = row.rewards.clone(), [tokens[-1] for tokens in row.turns]
    if config.advantages == "gae":
        row.advantages = gae(row.sampled, rewards, row.values, config.lam, lambda t: config.gamma)
    if config.advantages == "turn_gae":
        for tokens in row.turns:
            rewards[tokens[-1]] = row.rewards[tokens].sum()
    if config.advantages != "gae":
        of_turns = gae(ends, rewards, row.values, config.lam, lambda t: config.gamma_turn)
        row.returns = of_turns + row.values
    if config.advantages == "turn_gae":
        row.valued = ends
        for tokens in row.turns:
            row.advantages[tokens] = of_turns[tokens[-1]]
        return
    if config.advantages == "bi_level_gae":
        rewards[ends] = row.returns[ends]  # so its delta is the turn's advantage
        row.advantages = gae(row.sampled, rewards, row.values, config.lam,
                             lambda t: 0.0 if t in ends else config.gamma)
    row.returns = row.advantages + row.values


def policy_loss(learner, mini, config, log):
    """PPO's clipped loss, minus the entropy bonus, plus the KL to the reference."""
    loss, task, measured = 0.0, 0.0, defaultdict(list)
    for row in mini:
        t = row.sampled
        logprobs, entropy = predict(learner.policy.model, row.tokens, config.temperature)
        log_ratio = logprobs - row.old
        if config.ratio == "sequence":  # GSPO: one ratio for all tokens of a row
            log_ratio = log_ratio[t].mean().expand(len(row.tokens))
        a, ratio = row.advantages, log_ratio.exp()
        free, bounded = -a * ratio, -a * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        token_loss, clipped = torch.maximum(free, bounded), bounded > free
        if config.ratio == "detached":  # CISPO
            weight_of = ratio.clamp(1 - config.clip_low, 1 + config.clip_high).detach()
            token_loss, clipped = -weight_of * a * logprobs, weight_of != ratio
        elif config.dual_clip:
            token_loss = torch.where(a < 0, token_loss.minimum(-a * config.dual_clip), token_loss)
        clipped = clipped & (a.abs() > 1e-6)
        d = (row.ref if config.kl_coef else logprobs) - logprobs
        kl = d**2 / 2 if config.kl_estimator == "k2" else d.exp() - d - 1
        share = weight(mini, row, "sampled", config)
        task = task + share * token_loss[t].sum()
        loss = loss + share * (config.kl_coef * kl - config.entropy_coef * entropy)[t].sum()
        moved = logprobs - row.old
        for name, x in (("entropy", entropy), ("kl_ref", kl), ("clip_fraction", clipped),
                        ("approx_kl", moved.exp() - moved - 1),
                        ("logprob_gap", (logprobs - row.sample_logprobs).abs())):
            measured[name] += x[row.sampled].tolist()
    places = [(row, t) for row in mini for t in row.observed]
    if config.echo_coef:
        losses = [-predict(learner.policy.model, row.tokens, config.temperature)[0][t]
                  for row, t in places]
        echo = sum(losses, torch.zeros(())) / max(len(losses), 1)
        log["echo_loss"].append(float(echo.detach()))
        loss = loss + config.echo_coef * echo
    log["policy_loss"].append(float(task.detach()))
    for name, values in measured.items():
        log[name].append(fmean(values))
    return loss + task


def value_loss(learner, mini, config, log):
    """Half the squared error of the critic; moving a value beyond 0.5 gains nothing."""
    loss = 0.0
    for row in mini:
        values, old, target = values_of(learner, row.tokens), row.values, row.returns
        near = old + (values - old).clamp(-0.5, 0.5)
        error = torch.maximum((values - target)**2, (near - target)**2)[row.valued] / 2
        loss = loss + weight(mini, row, "valued", config) * error.sum()
    log["value_loss"].append(float(loss.detach()))
    return loss


def weight(mini, row, positions, config):
    """The weight of one token of this row in the loss of the mini-batch."""
    sizes = [len(getattr(r, positions)) for r in mini]
    return {"token-mean": 1 / sum(sizes),
            "seq-mean-token-mean": 1 / (len(mini) * len(getattr(row, positions))),
            "seq-mean-token-sum": 1 / len(mini),
            "seq-mean-token-sum-norm": 1 / (len(mini) * config.max_context)}[config.aggregation]


def optimize(optimizer, lr, config):
    """Clip the gradient to max_grad_norm and step. Returns the gradient before clipping."""
    (group,) = optimizer.param_groups
    gradient = [p.grad.clone() for p in group["params"]]
    for p in group["params"]:
        p.grad *= min(1.0, config.max_grad_norm / (norm(gradient) + 1e-6))
    group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return gradient


def norm(gradient):
    return math.sqrt(sum(float((g**2).sum()) for g in gradient))
