"""StarPO as equations: rewards -> advantages -> losses, and the filter over groups.

Pure tensor functions, vectorised over the batch; unknown names raise ValueError. tests/slow.py does
the same in plain loops, and tests/test_step.py compares the two.

StarPO (State-Thinking-Actions-Reward Policy Optimisation; Wang et al. 2025, arXiv 2504.20073)
maximises the return of whole multi-turn trajectories. Only sampled tokens are actions; prompts and
observations are the environment's. So what is computed per token has a mask: True selects a token.

Reading order: which groups (`filter_groups`), which rewards (`overlong_penalty`, `kl_estimate`),
which advantages (`ESTIMATORS` and the functions below it, `whiten`), which losses (`policy_loss`,
`value_loss`), and how a loss per token becomes one number (`loss_weights`, `aggregate`).

Axes: B rows, T tokens, P groups, G members, K turns. A row is a trajectory, or one turn of it in
the windowed contexts; the rows of one episode then share their `episode_ids` and count once in the
statistics of their group. Masks are bool (B, T).

Differences from RAGEN V2 and the verl version it pins:
  1. Means over tokens are normalised over the *whole optimizer step* (`loss_weights`), so the
     micro-batch size cannot change the gradient. There, every micro-batch is averaged by itself.
  2. Values, advantages and losses are exactly 0 outside the mask, whitened advantages too.
  3. The eps of filter top_p is relative to the sum of the scores, so scaling all rewards keeps the
     same groups.
  4. The KL in the loss is k2 or k3, never k1, whose gradient as a loss has expectation 0. There, k3
     is clamped at 10 nats, so a token that is 14 times less likely than before RL has no gradient.
  5. Turns end where `turn_ids` say. There, bi-level GAE looks for rewards that are not 0, so a turn
     without reward is no turn.
  6. REINFORCE++ passes later rewards on through observation tokens. There, the sum starts again at
     each of them, and earlier turns get nothing of later rewards.
  7. The advantage of a group of one is 0 before whitening. There, it is its raw score.
"""

import torch
from torch.nn.functional import pad

KL_ESTIMATORS = ("k1", "k2", "k3")  # as a loss k2 or k3
FILTERS = ("none", "top_p", "top_p_softmax", "top_k", "top_k_abs", "min_p")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum",
                "seq-mean-token-sum-norm")
LOG_RATIO_LIMIT = 20.0  # |log ratio| is clamped to it before exp, so a freak token cannot be inf
ZERO = 1e-10  # a |score| that is no larger counts as 0
# Sums of the same rewards in another order differ by rounding, and so do stds of equal spread.
ROUNDING = 1e-6  # two numbers are equal if they differ by at most this share of the largest one
VALUE_CLIP = 0.5  # how far one update may move a value


# ---- Which groups --------------------------------------------------------------------------------
def filter_groups(scores, value=0.9, strategy="top_p", eps=0.01):
    """SNR filter of RAGEN V2: which groups carry enough signal to learn from.

    From the largest score down:
        top_p          the shortest prefix with  sum_kept >= (value - eps) * sum_all
        top_p_softmax  the shortest prefix with  sum_kept softmax(scores) >= value. Small scores
                       give equal shares, so below 0.5 nearly all groups are kept
        top_k          int(value * P) groups, at least one
        top_k_abs      int(value) groups, at least one
        min_p          all with score >= value * largest
    top_p and min_p never keep a group of score 0; top_p keeps all others at value 1, and
    top_p_softmax all. Ties are broken by group index: scores are rounded to a millionth of the
    largest.

    scores: (P,) float >= 0, the reward's standard deviation within each group (`group_std`)
    returns: (P,) bool
    raises: ValueError for an unknown name, a value outside the strategy's range, and scores that
        are negative or not finite

    >>> filter_groups(torch.tensor([9.0, 1.0, 5.0]), 0.9).tolist()
    [True, False, True]
    """
    _check_filter(scores, value, strategy, eps)
    if strategy == "none":
        return torch.ones_like(scores, dtype=torch.bool)
    scores = scores.masked_fill(scores <= ZERO, 0.0)
    unit = ROUNDING * scores.max().clamp(min=ZERO)
    ranked, order = ((scores / unit).round() * unit).sort(descending=True, stable=True)
    differ = (scores > 0)[order]
    if strategy in ("top_p", "top_p_softmax"):
        mass = ranked if strategy == "top_p" else ranked.softmax(0)
        needed = (value - eps) * mass.sum() if strategy == "top_p" else value
        kept = (mass.cumsum(0) - mass < needed) | (value == 1)  # whatever eps and rounding say
    elif strategy == "min_p":
        kept = ranked >= value * ranked[0]
    else:
        k = int(value * len(scores) + 1e-9) if strategy == "top_k" else int(value)
        kept = torch.arange(len(scores), device=scores.device) < max(k, 1)
    kept = kept & differ if strategy in ("top_p", "min_p") else kept
    return torch.zeros_like(kept).scatter(0, order, kept)


def _check_filter(scores, value, strategy, eps):
    _check_name("filter", strategy, FILTERS)
    least, most = {"top_p": (eps, 1), "top_k_abs": (0, torch.inf)}.get(strategy, (0, 1))
    if strategy != "none" and not (least < value <= most and value < torch.inf):
        raise ValueError(f"filter {strategy}: got a value of {value}, expected more than {least}"
                         + (f" and at most {most}." if most == 1 else "."))
    if not bool((scores.isfinite() & (scores >= 0)).all()):
        raise ValueError(f"filter {strategy}: got scores {scores.tolist()}, expected finite ones "
                         f">= 0.")


def _check_name(what, name, known):
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}.")


def group_std(x, group_ids, episode_ids=None):
    """The sample standard deviation of x in each group; 0 of a group of one.

    x: (B,) float, one number an episode      group_ids: (B,) int64, 0..P-1      returns: (P,)
    """
    return _moments(x, group_ids, episode_ids)[1]


def _moments(x, group_ids, episode_ids=None):
    """Mean, sample std and size (P,) of each group, and every row's distance (B,) from its mean.

    An episode counts once, however many rows it has. The smallest x of a group is subtracted
    first, so that equal ones have a std of exactly 0: the float32 mean of sixteen 0.9s is not 0.9.
    A std of at most ROUNDING times the largest |x| is 0, too, and so are the distances.
    """
    P, once = int(group_ids.max()) + 1, first_rows(x, episode_ids)

    def total(v):
        return torch.zeros(P, dtype=x.dtype, device=x.device).index_add(0, group_ids, v * once)

    size = total(torch.ones_like(x))
    base = torch.full_like(size, torch.inf).scatter_reduce(0, group_ids, x, "amin")
    above = x - base[group_ids]
    mean = total(above) / size.clamp(min=1)
    distance = above - mean[group_ids]
    std = (total(distance**2) / (size - 1).clamp(min=1)).sqrt()
    equal = std <= ROUNDING * torch.zeros_like(size).scatter_reduce(0, group_ids, x.abs(), "amax")
    std, distance = std.masked_fill(equal, 0.0), distance.masked_fill(equal[group_ids], 0.0)
    return torch.where(size > 0, base + mean, 0.0), std, size, distance


def first_rows(x, episode_ids):
    """(B,) 1.0 on the first row of each episode, 0.0 on its other rows."""
    if episode_ids is None:
        return torch.ones_like(x)
    rows = torch.arange(len(x), device=x.device)
    first = torch.full((int(episode_ids.max()) + 1,), len(x), device=x.device)
    first = first.scatter_reduce(0, episode_ids, rows, "amin")
    return (first[episode_ids] == rows).to(x.dtype)


# ---- Which rewards -------------------------------------------------------------------------------
def episode_sums(x, episode_ids):
    """Each row's x becomes the sum over the rows of its episode. x: (B,)      returns: (B,)"""
    total = torch.zeros(int(episode_ids.max()) + 1, dtype=x.dtype, device=x.device)
    return total.index_add(0, episode_ids, x)[episode_ids]


def last_token_rewards(scores, response_mask):
    """Credit per episode: the whole score on the last sampled token of its row.

    scores: (B,)      returns: (B, T)
    """
    last = turn_ends(response_mask.long() - 1, response_mask)  # turn id 0 where sampled
    return torch.where(last, scores[:, None], 0.0)


def turn_returns(turn_rewards, episode_ids, turns, gamma=1.0):
    """Credit per turn where each turn is a row: the return from this turn on.

        G_k = r_k + gamma * G_{k+1}

    turn_rewards: (B,), the reward of the row's turn      turns: (B,) int64, its number from 0
    returns: (B,)
    """
    shape = int(episode_ids.max()) + 1, int(turns.max()) + 1
    table = torch.zeros(shape, dtype=turn_rewards.dtype, device=turn_rewards.device)
    table[episode_ids, turns] = turn_rewards
    return _from_the_end(table, torch.full_like(table, gamma))[episode_ids, turns]


def overlong_penalty(turn_ids, max_new_tokens, share):
    """DAPO's penalty of replies that come close to their limit (Yu et al. 2025, eq. 13): 0 up to a
    length of free = max_new_tokens * (1 - share), then falling linearly to -1 at max_new_tokens.

    turn_ids: (B, T) int64, -1 where not sampled      share: 0 for no penalty
    returns: (B, T), on the last token of a turn
    """
    ends = turn_ends(turn_ids, turn_ids >= 0)
    length = turn_sums(torch.ones(turn_ids.shape, device=turn_ids.device), turn_ids)
    zone = max_new_tokens * share
    return -((length - max_new_tokens + zone) / max(zone, 1e-9)).clamp(0, 1) * ends * bool(share)


def turn_ends(turn_ids, mask):
    """(B, T) bool: of each turn the last token that the mask selects.

    turn_ids: (B, T) int64, -1 outside turns

    >>> turn_ids = torch.tensor([[-1, 0, 0, -1, 1]])
    >>> turn_ends(turn_ids, turn_ids >= 0).tolist()
    [[False, False, True, False, True]]
    """
    after = pad(turn_ids, (0, 1), value=-1).gather(1, _next(mask))
    return mask & (turn_ids >= 0) & (after != turn_ids)


def turn_sums(x, turn_ids):
    """At every sampled token the sum of x over its turn; 0 elsewhere. x: (B, T) float"""
    inside = turn_ids >= 0
    turn = turn_ids.clamp(min=0)
    K = int(turn.max()) + 1
    sums = torch.zeros(len(x), K, dtype=x.dtype, device=x.device)
    return sums.scatter_add(1, turn, x.masked_fill(~inside, 0.0)).gather(1, turn) * inside


def kl_estimate(logprobs, ref_logprobs, estimator="k3"):
    """KL(pi || ref) per token from samples of pi (Schulman, "Approximating KL divergence", 2020).

        d  = ref_logprobs - logprobs
        k1 = -d                for the reward: its expectation is the KL; as a loss its gradient is
                               noise of mean 0, since E_pi[grad log pi] = 0
        k2 = d^2 / 2           as a loss its expected gradient is that of KL(pi || ref)
        k3 = exp(d) - d - 1    unbiased and never negative; as a loss its expected gradient is that
                               of KL(ref || pi), with weights exp(d), so few tokens dominate
    all inputs: (B, T) or (N,)      returns: nats, same shape
    """
    _check_name("kl_estimator", estimator, KL_ESTIMATORS)
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d**2
    # One token of a larger d would outweigh all others. For negative d the estimate is about -d.
    d = d.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


# ---- Which advantages ----------------------------------------------------------------------------
# name -> (kind, function of a Batch and the Config). "group" compares the scores of a group's
# members, "reward" sums token rewards, "critic" has values too and returns (advantages, returns,
# where the critic learns). A new estimator is a function and a row here.
ESTIMATORS = {
    "grpo": ("group", lambda b, c: group_advantages(
        b.scores, b.group_ids, b.response_mask, c.norm_by_std, b.episode_ids)),
    "rloo": ("group", lambda b, c: rloo_advantages(
        b.scores, b.group_ids, b.response_mask, b.episode_ids)),
    "maxrl": ("group", lambda b, c: maxrl_advantages(
        b.scores, b.group_ids, b.response_mask, b.episode_ids)),
    "gigpo": ("group", lambda b, c: gigpo_advantages(
        b.scores, b.rewards, b.group_ids, b.turn_ids, b.state_ids, b.episode_ids, c.gamma_turn,
        c.norm_by_std)),
    "brpo": ("group", lambda b, c: group_advantages(
        b.scores, torch.zeros_like(b.group_ids), b.response_mask, True, b.episode_ids)),
    "reinforce_pp_baseline": ("group", lambda b, c: whiten(group_advantages(
        b.scores, b.group_ids, b.response_mask, False, b.episode_ids), b.response_mask)),
    "reinforce": ("reward", lambda b, c: reinforce_advantages(
        b.token_rewards, b.response_mask, c.gamma)),
    "reinforce_pp": ("reward", lambda b, c: whiten(reinforce_advantages(
        b.token_rewards, b.response_mask, c.gamma), b.response_mask)),
    "none": ("reward", lambda b, c: torch.zeros_like(b.token_rewards)),
    "gae": ("critic", lambda b, c: (*masked_gae(
        b.token_rewards, b.values, b.response_mask, c.gamma, c.lam), b.response_mask)),
    "bi_level_gae": ("critic", lambda b, c: (*bi_level_gae(
        b.token_rewards, b.values, b.response_mask, b.turn_ids, c.gamma, c.lam, c.gamma_turn),
        b.response_mask)),
    "turn_gae": ("critic", lambda b, c: (*turn_gae(
        b.token_rewards, b.values, b.response_mask, b.turn_ids, c.lam, c.gamma_turn),
        turn_ends(b.turn_ids, b.response_mask))),
}


def group_advantages(episode_returns, group_ids, response_mask, by_std=True, episode_ids=None,
                     eps=1e-6):
    """GRPO (Shao et al. 2024, eq. 2-3): return minus the group's mean, over the group's std.

        A_i = (R_i - mean_g) / (std_g + eps)
    Every sampled token of row i gets A_i. The std is over G - 1, as in RAGEN. Dr. GRPO (Liu et al.
    2025) does not divide by it: `by_std=False`. REINFORCE++ with baseline (Hu et al. 2025) whitens
    these over the batch. BRPO (RAGEN V1) takes the whole batch for one group. The advantage of a
    group of one is 0.

    episode_returns, group_ids: (B,)      response_mask: (B, T) bool
    returns: (B, T), exactly 0 where response_mask is False
    """
    _, std, _, distance = _moments(episode_returns, group_ids, episode_ids)
    advantages = distance / (std[group_ids] + eps) if by_std else distance
    return advantages[:, None] * response_mask


def rloo_advantages(episode_returns, group_ids, response_mask, episode_ids=None):
    """Leave-one-out (Kool et al. 2019; Ahmadian et al. 2024): return minus the others' mean.

        A_i = R_i - mean of the G - 1 others = G / (G - 1) * (R_i - mean_g)
    Arguments and result as in `group_advantages`.
    """
    _, _, size, distance = _moments(episode_returns, group_ids, episode_ids)
    factor = size / (size - 1).clamp(min=1)
    return (distance * factor[group_ids])[:, None] * response_mask


def maxrl_advantages(successes, group_ids, response_mask, episode_ids=None):
    """MaxRL (Tajwar et al. 2026): maximise log p in place of p, the chance of success.

        A_i = (r_i - mean_g) / mean_g          0 for a group without a success
    A group in which one of G members succeeds counts G times as much as with (r_i - mean_g).

    successes: (B,) 1 or 0 an episode      returns: (B, T), exactly 0 where response_mask is False
    raises: ValueError for other rewards

    >>> one, mask = torch.tensor([1.0, 0, 0, 0]), torch.ones(4, 1, dtype=torch.bool)
    >>> maxrl_advantages(one, torch.zeros(4, dtype=torch.long), mask)[:, 0].tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    if not bool(((successes == 0) | (successes == 1)).all()):
        raise ValueError("maxrl: got returns other than 0 and 1. End an episode at its success.")
    mean, _, _, distance = _moments(successes, group_ids, episode_ids)
    return (distance / mean.where(mean > 0, 1.0)[group_ids])[:, None] * response_mask


def gigpo_advantages(episode_returns, rewards, group_ids, turn_ids, state_ids, episode_ids,
                     gamma=1.0, by_std=True):
    """GiGPO (Feng et al. 2025, eq. 3-8): GRPO's advantage plus one among the turns of a group that
    began in the same state.

        G_k = r_k + gamma * G_{k+1}                      over the turns of an episode
        A   = A_episode + (G_k - mean_s) / (std_s + eps)  s: all turns in the state of turn k
    Members of a group share the first state and may meet in later ones, at any turn; what they
    earned from there is compared, without a critic. A state met once adds 0. With gamma < 1 a turn
    closer to the reward is worth more. As in the authors' code, `by_std` divides both levels by
    the std, or neither; the weight of the second term is 1, as in their runs. An episode counts
    once in its group's mean and std, as in eq. 3; in their code once for each of its turns.

    rewards: (B, T), on the last sampled token of each turn
    state_ids: (B, T) int64, there the number of the state before the turn, unique to the group
    returns: (B, T), exactly 0 where not sampled
    """
    at = state_ids >= 0  # the turns' last tokens
    row = at.nonzero()[:, 0]
    returns = turn_returns(rewards[at], episode_ids[row], turn_ids[at], gamma)
    turns = at[at][:, None]  # (N, 1): each turn is a row of one token
    steps = group_advantages(returns, state_ids[at], turns, by_std)[:, 0]
    of_turns = turn_sums(torch.zeros_like(rewards).masked_scatter(at, steps), turn_ids)
    return of_turns + group_advantages(episode_returns, group_ids, turn_ids >= 0, by_std,
                                       episode_ids)


def reinforce_advantages(rewards, response_mask, gamma=1.0):
    """REINFORCE (Williams 1992): the discounted return from this token on, without a baseline.

        G_k = r_k + gamma * G_{k+1}                 k indexes sampled tokens only
    REINFORCE++ (Hu 2025) whitens it over the batch in place of a critic.
    rewards: (B, T) float      returns: (B, T), exactly 0 where response_mask is False
    """
    decay = torch.ones_like(rewards).masked_fill(response_mask, gamma)
    return _from_the_end(rewards.masked_fill(~response_mask, 0.0), decay) * response_mask


def masked_gae(rewards, values, response_mask, gamma=1.0, lam=1.0):
    """Token-level GAE in which only sampled tokens are time steps.

    Observation tokens sit between two actions but are not actions, so they must not consume a
    gamma*lam step. With gamma = lam = 1, RAGEN's default, steps cost nothing and a missing mask
    goes unnoticed. tests/test_starpo.py shows both.

        delta_k = r_k + gamma * V_{k+1} - V_k          k indexes sampled tokens only,
                                                       V after the last is 0
        A_k     = delta_k + gamma * lam * A_{k+1}      (Schulman et al. 2016, eq. 16)
        returns = A + V

    rewards, values: (B, T) float      response_mask: (B, T) bool      gamma: float or (B, T)
    returns: advantages, returns, both (B, T), exactly 0 where response_mask is False
    raises: ValueError if the three shapes differ
    """
    if not rewards.shape == values.shape == response_mask.shape:
        raise ValueError(f"masked_gae: got shapes {tuple(rewards.shape)}, {tuple(values.shape)} "
                         f"and {tuple(response_mask.shape)}, expected three equal ones.")
    # Not x * mask: 0 * nan is nan.
    r, v = rewards.masked_fill(~response_mask, 0.0), values.masked_fill(~response_mask, 0.0)
    next_values = pad(v, (0, 1)).gather(1, _next(response_mask))
    deltas = (r + gamma * next_values - v) * response_mask
    decay = (torch.ones_like(r) * gamma * lam).masked_fill(~response_mask, 1.0)
    advantages = _from_the_end(deltas, decay) * response_mask
    return advantages, advantages + v


def bi_level_gae(rewards, values, response_mask, turn_ids, gamma=1.0, lam=1.0, gamma_turn=0.95):
    """VAGEN's bi-level GAE (Wang et al. 2025): turns are time steps first, then tokens.

    Turns, with e_k the last token of turn k:
        delta_k = r[e_k] + gamma_turn * V[e_{k+1}] - V[e_k]
        A_k     = delta_k + gamma_turn * lam * A_{k+1}
    Tokens: GAE with gamma and lam inside each turn. The turn's last token has the reward
    A_k + V[e_k], and nothing after it counts, so its advantage is A_k. gamma_turn discounts turns,
    however long they are.

    With one turn it is `masked_gae`. Rewards inside a turn (a KL penalty on each token) take part
    in the token level only.
    response_mask: the tokens that are time steps, VAGEN's M_adv
    returns: advantages, returns as in `masked_gae`
    """
    ends = turn_ends(turn_ids, response_mask)
    _, of_turns = masked_gae(rewards, values, ends, gamma_turn, lam)
    discount = torch.full_like(rewards, gamma).masked_fill(ends, 0.0)
    return masked_gae(torch.where(ends, of_turns, rewards), values, response_mask, discount, lam)


def turn_gae(rewards, values, response_mask, turn_ids, lam=1.0, gamma_turn=1.0):
    """VAGEN's turn-wise GAE: turns are the only time steps; the tokens of one share its advantage.

    The first level of `bi_level_gae`, with r the sum of the turn's rewards. Only the values of last
    tokens take part, so the critic is trained on those alone (`turn_ends`).

    returns: advantages (B, T), returns (B, T) which are 0 but on the last token of each turn
    """
    ends = turn_ends(turn_ids, response_mask)
    summed = turn_sums(rewards.masked_fill(~response_mask, 0.0), turn_ids)
    advantages, returns = masked_gae(summed, values, ends, gamma_turn, lam)
    return turn_sums(advantages, turn_ids).masked_fill(~response_mask, 0.0), returns


def _next(mask):
    """(B, T) int64: the position of the next token after t that the mask selects; T if none.

    >>> _next(torch.tensor([[False, True, True, False, True]])).tolist()
    [[1, 2, 4, 4, 5]]
    """
    T = mask.shape[1]
    here = torch.where(mask, torch.arange(T, device=mask.device), T)
    return pad(here, (0, 1), value=T).flip(1).cummin(dim=1).values.flip(1)[:, 1:]


def _from_the_end(x, decay):
    """Solve y_t = x_t + decay_t * y_{t+1}, with 0 after the last: every recursion of this file.

    By doubling: if s_t is the sum over the w steps from t on, and p_t the product of their decays,
        s_t <- s_t + p_t * s_{t+w},    p_t <- p_t * p_{t+w}
    are those of 2w steps: a thousand tokens take ten passes over (B, T). No gradient flows.

    >>> _from_the_end(torch.ones(1, 3), torch.full((1, 3), 0.5)).tolist()
    [[1.75, 1.5, 1.0]]
    """
    y, decay, w = x.clone(), decay.clone(), 1
    while w < x.shape[1]:
        y[:, :-w] += decay[:, :-w] * y[:, w:]
        decay[:, :-w] = decay[:, :-w] * decay[:, w:]
        w *= 2
    return y


def whiten(x, mask, statistics_mask=None, eps=1e-8):
    """Mean 0 and sample variance 1 over the mask, exactly 0 outside it.

    All 0 with fewer than two masked entries, which have no variance. `statistics_mask`: where mean
    and variance are taken instead (`turn_gae`: turn ends, so that each turn counts once).
    x: (B, T) float      mask: (B, T) bool      returns: (B, T)
    """
    measured = x[mask if statistics_mask is None else statistics_mask]
    if len(measured) < 2:
        return torch.zeros_like(x)
    base = measured[0]  # exact zeros where all entries are equal
    mean, scale = (measured - base).mean(), torch.rsqrt((measured - base).var() + eps)
    return torch.zeros_like(x).masked_scatter(mask, (x[mask] - base - mean) * scale)


# ---- Which losses --------------------------------------------------------------------------------
def policy_loss(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0,
                sequence_mask=None):
    """PPO's clipped loss of every token, with decoupled bounds and dual clipping.

        ratio = exp(logprobs - old_logprobs)
        L = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
                                     (Schulman et al. 2017, eq. 7;
                                      decoupled bounds: DAPO, Yu et al. 2025, eq. 10)
        L = min(L, -A * dual_clip)  where A < 0
                                     (dual clip, Ye et al. 2020, eq. 5); 0 leaves it out
    Without the last line the loss of a bad token that became likely is unbounded.

    sequence_mask: (B, T) bool; if given, all tokens of a row share one ratio, the geometric mean
        over its masked tokens (GSPO, Zheng et al. 2025, eq. 7): exp(mean_t (log ratio_t))
    all inputs: (B, T) or (N,)
    returns: loss, and clipped (bool: the clipped branch was the larger one)
    raises: ValueError if dual_clip is neither 0 nor above 1
    """
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"policy_loss: got dual_clip={dual_clip}, expected more than 1, or 0 for "
                         f"none.")
    log_ratio = logprobs - old_logprobs
    if sequence_mask is not None:
        count = sequence_mask.sum(dim=1, keepdim=True).clamp(min=1)
        mean = log_ratio.masked_fill(~sequence_mask, 0.0).sum(dim=1, keepdim=True) / count
        log_ratio = mean.expand_as(log_ratio)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, bounded)
    if dual_clip:
        ceiling = -advantages * dual_clip
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return loss, bounded > free


def cispo_loss(logprobs, old_logprobs, advantages, clip_low=1.0, clip_high=4.0):
    """CISPO (MiniMax-M1 2025, eq. 4): REINFORCE with a clipped importance weight as a constant.

        L = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprobs
    In `policy_loss` a token whose ratio has left the bounds loses its gradient, rare ones first.
    Here only its weight is bounded. The paper has no lower bound, which is clip_low 1.

    all inputs: (B, T) or (N,)      returns: loss, and clipped (bool: the weight was bounded)
    """
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def truncated_weights(old_logprobs, sample_logprobs, cap, response_mask):
    """Truncated importance weights (Ionides 2008): min(cap, exp(old_logprobs - sample_logprobs)).

    They correct for samples of older weights or another sampler; the cap trades variance for bias.
    They are 1 where response_mask is False.
    """
    log_ratio = (old_logprobs - sample_logprobs).clamp(max=LOG_RATIO_LIMIT)
    return log_ratio.exp().clamp(max=cap).where(response_mask, 1.0)


def value_loss(values, old_values, returns):
    """Half squared error of the critic, clipped so that one update moves a value only so far.

        V_c = clip(V, V_old - 0.5, V_old + 0.5)
        L   = max((V - R)^2, (V_c - R)^2) / 2
    all inputs: (B, T) or (N,)      returns: loss of the same shape
    """
    near = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def entropy(log_p):
    """H = -sum_v p_v log p_v of distributions given as log-probabilities. (..., V) -> (...) nats"""
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def loss_weights(mask, mode="token-mean", horizon=1):
    """The weight of each token's loss in an optimizer step; 0 outside the mask.

        token-mean               1 / N
        seq-mean-token-mean      1 / (S * n_i)
        seq-mean-token-sum       1 / S
        seq-mean-token-sum-norm  1 / (S * horizon)     Dr. GRPO: independent of length and padding
    The mask selects n_i tokens of row i, N of all rows; S rows have n_i > 0. Computed of a whole
    mini-batch, so the size of micro-batches cannot change the gradient.

    mask: (B, T) bool      horizon: tokens that a row may have      returns: (B, T) float32
    """
    _check_name("aggregation", mode, AGGREGATIONS)
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    rows = mask.any(dim=1).sum().clamp(min=1)
    per = {"token-mean": mask.sum().clamp(min=1), "seq-mean-token-mean": rows * tokens,
           "seq-mean-token-sum": rows, "seq-mean-token-sum-norm": rows * horizon}[mode]
    return mask / per


def aggregate(x, weights):
    """A micro-batch's share of an optimizer step's loss; the shares sum to the loss.

    x: (B, T) float      weights: (B, T) from `loss_weights`      returns: scalar
    """
    return (torch.where(weights > 0, x, 0.0) * weights).sum()  # 0 * nan is nan
