"""Further estimators of advantages: BRPO, MaxRL, GiGPO, and VAGEN's bi-level and turn-wise GAE.

run/start.py enters them in `starpo.ESTIMATORS`; ROWS is read once one is used. Axes: starpo.py.

Tests: `python -m pytest tests/test_starpo.py tests/test_step.py`.
"""

import torch

from minragen import starpo
from minragen.starpo import group_advantages, masked_gae, turn_ends, turn_sums


# ---- One advantage an episode --------------------------------------------------------------------
def brpo_advantages(returns, groups):
    """BRPO (RAGEN V1): GRPO's advantage with the whole batch as one group. (E,), (E,) -> (E,)"""
    return group_advantages(returns, torch.zeros_like(groups))


def maxrl_advantages(successes, groups):
    """MaxRL (Tajwar et al. 2026): maximise log p in place of p, the chance of success.

        A_i = (r_i - mean_g) / mean_g          0 for a group without a success
    A group in which one of G members succeeds counts G times as much as with (r_i - mean_g).

    successes: (E,) 1 or 0 an episode      groups: (E,)      returns: (E,)
    raises: ValueError for other rewards

    >>> maxrl_advantages(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.long)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    if not bool(((successes == 0) | (successes == 1)).all()):
        raise ValueError("maxrl: a return is not 0 or 1. Episodes must end at their success.")
    mean, _, _, deviation = starpo.group_moments(successes, groups)
    return deviation / mean.where(mean > 0, 1.0)[groups]


# ---- Turns ---------------------------------------------------------------------------------------
def gigpo_advantages(batch, gamma=1.0, by_std=True):
    """GiGPO (Feng et al. 2025, eq. 3-8): GRPO's advantage plus one among the turns of a group that
    began in the same state.

        G_k = r_k + gamma * G_{k+1}                      over the turns of an episode
        A   = A_episode + (G_k - mean_s) / (std_s + eps)   s: turns in the state of turn k
    Members of a group share the first state and may meet in later ones, at any turn; what they
    earned from there is compared, without a critic. A state met once adds 0. With gamma < 1 a turn
    closer to the reward is worth more. As in the authors' code, `by_std` divides both levels by
    the std, or neither; the weight of the second term is 1, as in their runs. An episode counts
    once in its group's mean and std, as in eq. 3; in their code once for each of its turns.

    returns: (B, T), exactly 0 where not sampled
    """
    of_turns = batch.turn_totals(batch.rewards)  # (E, K)
    returns = starpo.returns_to_go(of_turns, torch.ones_like(of_turns, dtype=torch.bool), gamma)
    at = batch.state_ids >= 0  # the turns' last tokens, N in all
    among_turns = group_advantages(batch.turns_to_tokens(returns)[at], batch.state_ids[at], by_std)
    on_ends = torch.zeros_like(batch.rewards).masked_scatter(at, among_turns)
    among_episodes = group_advantages(*batch.episode_scores(), by_std)
    return turn_sums(on_ends, batch.turn_ids) + batch.to_tokens(among_episodes)


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


ROWS = {
    "brpo": lambda b, c: brpo_advantages(*b.episode_scores()),
    "maxrl": lambda b, c: maxrl_advantages(*b.episode_scores()),
    "gigpo": lambda b, c: gigpo_advantages(b, c.gamma_turn, c.norm_by_std),
    "bi_level_gae": lambda b, c: (*bi_level_gae(
        b.token_rewards, b.values, b.response_mask, b.turn_ids, c.gamma, c.lam, c.gamma_turn),
        b.response_mask),
    "turn_gae": lambda b, c: (*turn_gae(
        b.token_rewards, b.values, b.response_mask, b.turn_ids, c.lam, c.gamma_turn),
        turn_ends(b.turn_ids, b.response_mask)),
}
