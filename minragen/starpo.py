"""StarPO as equations: rewards -> advantages -> losses, and the filter over groups.

Pure tensor functions.

StarPO (State-Thinking-Actions-Reward Policy Optimisation; Wang et al. 2025, arXiv 2504.20073)
maximises the return of whole multi-turn trajectories. Only sampled tokens are actions; prompts and
observations are the environment's, so every function here takes the mask of what was sampled.

Reading order: `filter_groups`, `group_advantages` or `masked_gae`, `policy_loss`, `value_loss`.

Axes: B trajectories, T tokens, P groups, G members. Masks are bool (B, T).

Deltas (from RAGEN V2 and the verl it pins):
  1. Means over tokens are sums divided by the token count of the *whole update* (`aggregate`), so
     the micro-batch size cannot change the gradient. There, every micro-batch is averaged by
     itself.
  2. Values, advantages and losses are exactly 0 outside the mask. There, whitened advantages are
     not.
  3. The eps of the linear top_p filter is relative to the spread, so a reward scaled by 0.01
     filters alike.
  4. k1 as a loss is refused: its gradient has expectation 0 (E[grad log pi] = 0), it regularises
     nothing.
"""

import torch

KL_ESTIMATORS = ("k2", "k3")
LOG_RATIO_LIMIT = 20.0  # |log ratio| is clamped to it before exp, so a freak token cannot be inf


def filter_groups(scores, top_p=0.9, eps=0.01):
    """SNR filter of RAGEN V2 (linear top-p): which groups carry enough reward spread to learn from.

    Walk the groups from the largest score down and keep them until they hold `top_p` of the total:
        keep the shortest prefix with  sum_kept >= (top_p - eps) * sum_all,   scores of 0 never
    With top_p >= 1 every group is kept, whatever its score. eps keeps rounding from taking one
    group too many. Ties are broken by group index.

    scores: (P,) float, non-negative (the reward's standard deviation within each group)
    returns: (P,) bool; all False if no group has any spread
    raises: ValueError if top_p <= eps or a score is negative, infinite or nan

    >>> filter_groups(torch.tensor([9.0, 1.0, 5.0]), top_p=0.9).tolist()
    [True, False, True]
    """
    if not top_p > eps or not bool(((scores >= 0) & scores.isfinite()).all()):
        raise ValueError(f"filter_groups: got top_p={top_p} and scores {scores.tolist()}, expected "
                         f"top_p > {eps} and finite scores >= 0.")
    if top_p >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    ranked, order = scores.sort(descending=True, stable=True)
    held_before = ranked.cumsum(0) - ranked
    kept = (held_before < (top_p - eps) * scores.sum()) & (ranked > 0)
    return torch.zeros_like(kept).scatter(0, order, kept)


def group_spread(episode_returns, group_ids):
    """Sample standard deviation of the return within each group; 0 for a group of one.

    episode_returns: (B,) float      group_ids: (B,) int64
    returns: (P,) in the order of group id
    """
    return torch.stack([_std(episode_returns[group_ids == g]) for g in group_ids.unique()])


def _std(x):
    # From the first entry: sixteen times 0.9 has a float32 mean that is not 0.9, and a spread that
    # is not 0.
    return (x - x[0]).std() if len(x) > 1 else torch.zeros((), dtype=x.dtype, device=x.device)


def group_advantages(episode_returns, group_ids, response_mask, by_std=True, eps=1e-6):
    """GRPO (Shao et al. 2024, eq. 2-3): an episode is as good as it is better than its group.

        A_i = (R_i - mean_g) / (std_g + eps)        std over G - 1, as in RAGEN
    on every sampled token of trajectory i. `by_std=False` leaves the division out (Dr. GRPO, Liu et
    al. 2025). A group of one has nothing to be compared with: A = 0.

    episode_returns, group_ids: (B,)      response_mask: (B, T) bool
    returns: (B, T) of the returns' dtype, exactly 0 where response_mask is False
    """
    advantages = torch.zeros_like(episode_returns)
    for g in group_ids.unique():
        members = group_ids == g
        # Exact zeros for equal returns.
        centred = episode_returns[members] - episode_returns[members][0]
        centred = centred - centred.mean()
        advantages[members] = (centred / (_std(episode_returns[members]) + eps) if by_std
                               else centred)
    return advantages[:, None] * response_mask


def masked_gae(rewards, values, response_mask, gamma=1.0, lam=1.0):
    """Token-level GAE in which only sampled tokens are time steps.

    Observation tokens sit between two actions but are not actions, so they must not consume a
    gamma*lam step. With gamma = lam = 1 the distinction vanishes, so at RAGEN's default setting a
    missing mask cannot be noticed; tests/test_starpo.py shows both facts.

        delta_k = r_k + gamma * V_{k+1} - V_k          k indexes sampled tokens only,
                                                       V after the last is 0
        A_k     = delta_k + gamma * lam * A_{k+1}      (Schulman et al. 2016, eq. 16)
        returns = A + V

    The sampled tokens of each row are moved to the front, the recursion runs over those columns,
    and the result is moved back.

    rewards, values: (B, T) float      response_mask: (B, T) bool
    returns: advantages, returns, both (B, T), exactly 0 where response_mask is False
    raises: ValueError if the three shapes differ
    """
    if not rewards.shape == values.shape == response_mask.shape:
        raise ValueError(f"masked_gae: got shapes {tuple(rewards.shape)}, {tuple(values.shape)} "
                         f"and {tuple(response_mask.shape)}, expected three equal ones.")
    # Sampled tokens first, in order.
    order = (~response_mask).to(torch.uint8).argsort(dim=1, stable=True)
    mask = response_mask.gather(1, order)
    # Not x * mask: 0 * nan is nan.
    r, v = (x.gather(1, order).masked_fill(~mask, 0.0) for x in (rewards, values))
    deltas = r + gamma * torch.nn.functional.pad(v[:, 1:], (0, 1)) - v
    advantages, last = torch.zeros_like(r), torch.zeros_like(r[:, 0])
    for k in range(int(mask.sum(dim=1).max()) - 1, -1, -1):
        last = (deltas[:, k] + gamma * lam * last) * mask[:, k]
        advantages[:, k] = last
    advantages = torch.zeros_like(advantages).scatter(1, order, advantages)
    return advantages, (advantages + values).masked_fill(~response_mask, 0.0)


def whiten(x, mask, eps=1e-8):
    """Mean 0 and sample variance 1 over the mask, exactly 0 outside it.

    With fewer than two masked entries there is no variance, and nothing is left once the mean is
    removed.
    x: (B, T) float      mask: (B, T) bool      returns: (B, T)
    """
    if int(mask.sum()) < 2:
        return torch.zeros_like(x)
    chosen = x[mask] - x[mask][0]  # exact zeros where all entries are equal
    white = (chosen - chosen.mean()) * torch.rsqrt(chosen.var() + eps)
    return torch.zeros_like(x).masked_scatter(mask, white)


def policy_loss(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0):
    """PPO's clipped loss for every token, with a separate upper bound and a floor for bad tokens.

        ratio = exp(logprobs - old_logprobs)
        L = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
                                     (Schulman et al. 2017, eq. 7;
                                      decoupled bounds: DAPO, Yu et al. 2025, eq. 10)
        L = min(L, -A * dual_clip)  where A < 0
                                     (dual clip, Ye et al. 2020, eq. 5)
    Without the last line a token that became likely although it was bad has an unbounded loss.

    all inputs: (B, T) or (N,)
    returns: loss, and clipped (bool: the clipped branch was the larger one)
    raises: ValueError if dual_clip <= 1
    """
    if dual_clip <= 1:
        raise ValueError(f"policy_loss: got dual_clip={dual_clip}, expected more than 1.")
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, bounded)
    floor = -advantages * dual_clip
    loss = torch.where(advantages < 0, torch.minimum(loss, floor), loss)
    return loss, bounded > free


def value_loss(values, old_values, returns, value_clip=0.5):
    """Half squared error of the critic, clipped so that one update cannot move a value far.

        V_c = clip(V, V_old - value_clip, V_old + value_clip)
        L   = max((V - R)^2, (V_c - R)^2) / 2
    all inputs: (B, T) or (N,)      returns: loss of the same shape
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def kl_estimate(logprobs, ref_logprobs, estimator="k3"):
    """KL(pi || ref) per token from samples of pi (Schulman, "Approximating KL divergence", 2020).

        d  = ref_logprobs - logprobs
        k2 = d^2 / 2           as a loss its gradient on-policy is that of KL(pi || ref)
        k3 = exp(d) - d - 1    unbiased and never negative; as a loss its gradient is that of
                               KL(ref || pi)
    all inputs: (B, T) or (N,)      returns: nats, same shape, never negative
    raises: ValueError for k1 (see Deltas) and for unknown names
    """
    if estimator not in KL_ESTIMATORS:
        why = ("k1 as a loss has a gradient of expectation 0 and regularises nothing; "
               if estimator == "k1" else "")
        raise ValueError(f"unknown kl_estimator {estimator!r}: {why}expected one of "
                         f"{', '.join(KL_ESTIMATORS)}.")
    d = ref_logprobs - logprobs
    if estimator == "k2":
        return 0.5 * d**2
    # Only exp can overflow; a clamp below would take the gradient away.
    d = d.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def aggregate(x, mask, total):
    """Token mean over the whole update: this micro-batch's share of it.

        sum(x * mask) / total      summed over the micro-batches this is the mean over all tokens
    x: (B, T) float      mask: (B, T) bool
    total: number of True in the masks of all micro-batches
    """
    return torch.where(mask, x, 0.0).sum() / max(total, 1)
