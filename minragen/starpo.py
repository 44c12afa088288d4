"""StarPO as equations: rewards -> advantages -> losses, and the filter over groups.

Pure tensor functions, vectorised over the batch. tests/slow.py does the same in plain loops, and
tests/test_step.py compares the two.

StarPO (State-Thinking-Actions-Reward Policy Optimisation; Wang et al. 2025, arXiv 2504.20073)
maximises the return of whole multi-turn trajectories. Only sampled tokens are actions; prompts and
observations are the environment's. So what is computed per token has a mask: True selects a token.

Reading order: which groups (`filter_groups`), which rewards (`overlong_penalty`, `kl_estimate`),
which advantages (`ESTIMATORS` and the functions below it, `whiten`), which losses (`policy_loss`,
`value_loss`), and how a loss per token becomes one number (`loss_weights`, `aggregate`).

Axes: E episodes, P groups, G members; B rows, T tokens, K turns; N values, V vocabulary. A row is
an episode, or in the windowed contexts one of its turns. Masks are bool (B, T).

More estimators and filters are in more/: they are rows that run/start.py, or a user's algorithm,
adds to ESTIMATORS and FILTERS.
"""

import torch
from torch.nn.functional import pad

LOG_RATIO_LIMIT = 20.0  # |log ratio| is clamped to it before exp, so a freak token cannot be inf
ZERO = 1e-10  # a reward std that is no larger counts as 0
# A std of at most this share of its group's largest |x| counts as 0, as an advantage of this does.
ROUNDING = 1e-6
VALUE_CLIP = 0.5  # how far one update may move a value


# ---- Which groups --------------------------------------------------------------------------------
def filter_groups(stds, value=0.9, name="top_p"):
    """SNR filter of RAGEN V2: which groups carry enough signal to learn from.

    Stds of up to 1e-10 count as 0. All are rounded to a millionth of the largest, so that equal
    ones tie; of tied groups the earlier wins.

    stds: (P,) float >= 0, the reward's standard deviation within each group (`group_std`)
    name, value: a row of FILTERS and its argument      returns: (P,) bool
    raises: ValueError for a value outside its range, a std below 0 or not finite

    >>> filter_groups(torch.tensor([9.0, 1.0, 5.0]), 0.9).tolist()
    [True, False, True]
    """
    if not bool((stds.isfinite() & (stds >= 0)).all()):
        raise ValueError(f"filter {name}: got {stds.tolist()}, expected finite stds >= 0.")
    stds = stds.masked_fill(stds <= ZERO, 0.0)
    unit = ROUNDING * stds.max().clamp(min=ZERO)
    ranked, order = ((stds / unit).round() * unit).sort(descending=True, stable=True)
    kept = FILTERS[name](ranked, value)
    return torch.zeros_like(kept).scatter(0, order, kept)


def top_p(ranked, value, eps=0.01):
    """The fewest groups that hold value - eps of the summed stds (eps as in RAGEN).

    ranked: (P,) stds, the largest first      returns: (P,) bool
    """
    check_share("top_p", value, eps)
    held_before = ranked.cumsum(0) - ranked
    kept = (held_before < (value - eps) * ranked.sum()) | (value == 1)  # 1 keeps all above 0
    return kept & (ranked > 0)


def top_k(ranked, value):
    """This share of all groups, at least one. Arguments and result as in `top_p`."""
    check_share("top_k", value)
    k = int(value * len(ranked) + 1e-9)  # in floats .29 * 200 < 58
    return torch.arange(len(ranked), device=ranked.device) < max(k, 1)


# name -> function(stds in falling order, --filter-value) -> (P,) bool, as `top_p`
FILTERS = {"none": lambda ranked, value: torch.ones_like(ranked, dtype=torch.bool),
           "top_p": top_p, "top_k": top_k}


def check_share(name, value, least=0):
    """Raise ValueError unless least < value <= 1."""
    if not least < value <= 1:
        raise ValueError(f"filter {name}: got a value of {value}, expected more than {least} and "
                         f"at most 1.")


def group_std(x, groups):
    """The sample std (P,) of x (E,) in each group; 0 of a group of one. groups: (E,), 0..P-1"""
    return group_moments(x, groups)[1]


def group_moments(x, groups):
    """Mean, sample std and size (P,) of each group, and the deviation (E,) of each x from its mean.

    The smallest x of a group is subtracted first, so that equal x have a std of exactly 0: the
    float32 mean of sixteen 0.9s is not 0.9. A std of at most ROUNDING times the group's largest |x|
    is 0, and so are the group's deviations.
    """
    P = int(groups.max()) + 1

    def total(v):
        return torch.zeros(P, dtype=x.dtype, device=x.device).index_add(0, groups, v)

    size = total(torch.ones_like(x))
    base = torch.full_like(size, torch.inf).scatter_reduce(0, groups, x, "amin")
    from_least = x - base[groups]
    mean = total(from_least) / size.clamp(min=1)  # also measured from the least
    deviation = from_least - mean[groups]
    std = (total(deviation**2) / (size - 1).clamp(min=1)).sqrt()
    rounding = std <= ROUNDING * torch.zeros_like(size).scatter_reduce(0, groups, x.abs(), "amax")
    std, deviation = std.masked_fill(rounding, 0.0), deviation.masked_fill(rounding[groups], 0.0)
    return torch.where(size > 0, base + mean, 0.0), std, size, deviation


# ---- Which rewards -------------------------------------------------------------------------------
def last_token_rewards(scores, response_mask):
    """Credit per episode: each row's score (B,) on its last sampled token. Returns (B, T)."""
    last = response_mask & (response_mask.flip(1).cumsum(1).flip(1) == 1)  # none follows it
    return torch.where(last, scores[:, None], 0.0)


def overlong_penalty(turn_ids, max_new_tokens, share):
    """DAPO's penalty of replies that come close to their limit (Yu et al. 2025, eq. 13): 0 up to
    max_new_tokens * (1 - share) tokens, then falling linearly to -1 at max_new_tokens.

    turn_ids: (B, T) int64, -1 where not sampled      share: in (0, 1)
    returns: (B, T), on the last token of a turn
    """
    ones, zone = torch.ones(turn_ids.shape, device=turn_ids.device), max_new_tokens * share
    beyond = turn_sums(ones, turn_ids) - max_new_tokens + zone
    return -(beyond / zone).clamp(0, 1) * turn_ends(turn_ids, turn_ids >= 0)


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
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d**2
    assert estimator == "k3"
    # A large d would outweigh all other tokens. A very negative d needs no clamp: k3 is about -d.
    d = d.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


# ---- Which advantages ----------------------------------------------------------------------------
# name -> (kind, function of a Batch and the Config). A new estimator is a function and a row here.
#   "group"   compares the scores of a group's members: advantages (B, T), or (E,), which
#             train.compute_advantages copies to each sampled token
#   "reward"  sums token rewards: advantages (B, T)
#   "critic"  sums them with values: advantages, returns, value_mask, all (B, T)
ESTIMATORS = {
    "grpo": ("group", lambda b, c: group_advantages(*b.episode_scores(), c.norm_by_std)),
    "rloo": ("group", lambda b, c: rloo_advantages(*b.episode_scores())),
    "reinforce_pp_baseline": ("group", lambda b, c: whiten(
        b.to_tokens(group_advantages(*b.episode_scores(), by_std=False)), b.response_mask)),
    "reinforce": ("reward", lambda b, c: returns_to_go(b.token_rewards, b.response_mask, c.gamma)),
    "reinforce_pp": ("reward", lambda b, c: whiten(
        returns_to_go(b.token_rewards, b.response_mask, c.gamma), b.response_mask)),
    "none": ("reward", lambda b, c: torch.zeros_like(b.token_rewards)),
    "gae": ("critic", lambda b, c: (*masked_gae(
        b.token_rewards, b.values, b.response_mask, c.gamma, c.lam), b.response_mask)),
}


def group_advantages(returns, groups, by_std=True, eps=1e-6):
    """GRPO (Shao et al. 2024, eq. 2-3): return minus the group's mean, over the group's std.

        A_i = (R_i - mean_g) / (std_g + eps)
    The std is over G - 1, as in RAGEN. Dr. GRPO (Liu et al. 2025) does not divide by it:
    `by_std=False`. REINFORCE++ with baseline (Hu et al. 2025) whitens these over the batch. The
    advantage of a group of one is 0.

    (E,) floats, one return an episode; (E,) int64, the episode's group, 0..P-1  ->  (E,)

    >>> group_advantages(torch.tensor([1.0, 0, 0, 3]), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071])
    """
    _, std, _, deviation = group_moments(returns, groups)
    return deviation / (std[groups] + eps) if by_std else deviation


def rloo_advantages(returns, groups):
    """Leave-one-out (Kool et al. 2019; Ahmadian et al. 2024): return minus the others' mean.

        A_i = R_i - mean of the G - 1 others = G / (G - 1) * (R_i - mean_g)
    Arguments and result as in `group_advantages`.
    """
    _, _, size, deviation = group_moments(returns, groups)
    return deviation * (size / (size - 1).clamp(min=1))[groups]


def returns_to_go(rewards, mask, gamma=1.0):
    """REINFORCE (Williams 1992): the discounted return from this token on, without a baseline.

        G_k = r_k + gamma * G_{k+1}                 k indexes sampled tokens only
    REINFORCE++ (Hu 2025) whitens it over the batch in place of a critic.
    rewards: (B, T) float      mask: (B, T) bool      returns: (B, T), exactly 0 outside the mask
    """
    decay = torch.ones_like(rewards).masked_fill(mask, gamma)  # elsewhere no time passes
    return _from_the_end(rewards.masked_fill(~mask, 0.0), decay) * mask


def masked_gae(rewards, values, response_mask, gamma=1.0, lam=1.0):
    """Token-level GAE in which only sampled tokens are time steps.

    Observation tokens sit between two actions but are not actions, so they must not consume a
    gamma*lam step. With gamma = lam = 1, RAGEN's default, steps cost nothing, and a missing mask
    would not show (tests/test_starpo.py).

        delta_k = r_k + gamma * V_{k+1} - V_k          k indexes sampled tokens only,
                                                       V after the last is 0
        A_k     = delta_k + gamma * lam * A_{k+1}      (Schulman et al. 2016, eq. 16)
        returns = A + V

    rewards, values: (B, T) float      response_mask: (B, T) bool
    gamma: float; in `bi_level_gae` (more/estimators.py) one for each token, (B, T)
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
    decay = (torch.ones_like(r) * gamma * lam).masked_fill(~response_mask, 1.0)  # no time passes
    advantages = _from_the_end(deltas, decay) * response_mask
    return advantages, advantages + v


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

    By doubling: if y_t is the sum over the w steps from t on, and d_t the product of their decays,
        y_t <- y_t + d_t * y_{t+w},    d_t <- d_t * d_{t+w}
    are those of 2w steps: a thousand tokens take ten passes over (B, T). Not for autograd.

    >>> _from_the_end(torch.ones(1, 3), torch.full((1, 3), 0.5)).tolist()
    [[1.75, 1.5, 1.0]]
    """
    y, decay, w = x.clone(), decay.clone(), 1
    while w < x.shape[1]:
        y[:, :-w] += decay[:, :-w] * y[:, w:]
        decay[:, :-w] *= decay[:, w:].clone()  # they overlap
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
def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip,
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
    the first three: (B, T), or (N,) without sequence_mask
    dual_clip: more than 1, or 0
    returns: loss, and clipped (bool: the clipped branch was the larger one)
    """
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


def cispo_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """CISPO (MiniMax-M1 2025, eq. 4): REINFORCE with a clipped importance weight as a constant.

        L = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprobs
    In `policy_loss` a token whose ratio passes its advantage's bound has no gradient. Here only its
    weight is bounded. The paper has no lower bound: clip_low 1.

    all inputs: (B, T) or (N,)      returns: loss, and clipped (bool: the weight was bounded)
    """
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def truncated_weights(old_logprobs, sample_logprobs, cap, response_mask):
    """Truncated importance weights (Ionides 2008): min(cap, exp(old_logprobs - sample_logprobs)).

    They correct for samples of an older policy or another sampler; the cap trades variance for
    bias. Where response_mask is False they are 1.
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
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)  # 0 * -inf: nan


def loss_weights(mask, mode="token-mean", horizon=1):
    """The weight of each token's loss in an optimizer step; 0 outside the mask.

    Computed of a whole mini-batch, so the size of micro-batches cannot change the gradient.
    mask: (B, T) bool      horizon: tokens that a row may have      returns: (B, T) float32
    """
    return mask / AGGREGATIONS[mode](mask.sum(dim=1, keepdim=True), horizon).clamp(min=1)


# mode -> what a token's loss is divided by. n: (B, 1), the masked tokens of each row
AGGREGATIONS = {
    "token-mean": lambda n, horizon: n.sum(),
    "seq-mean-token-mean": lambda n, horizon: (n > 0).sum() * n,
    "seq-mean-token-sum": lambda n, horizon: (n > 0).sum(),
    # Dr. GRPO: independent of length and padding
    "seq-mean-token-sum-norm": lambda n, horizon: (n > 0).sum() * horizon}


def aggregate(x, weights):
    """A micro-batch's share, a scalar, of a step's loss; the shares sum to it. x: (B, T) float"""
    return (torch.where(weights > 0, x, 0.0) * weights).sum()  # 0 * nan is nan
