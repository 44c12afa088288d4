"""What StarPO computes, as sentences: filter, advantages, losses. Every fast function meets a slow
one.

Reading order: the slow definitions, one class per noun, then `TestMuseum`: famous bugs of this
field in miniature, each with the assertion that it is not here. Numbers without a comment are
worked by hand.

    pytest -v tests/test_starpo.py
"""

import doctest
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import starpo
from minragen.starpo import (
    aggregate,
    filter_groups,
    group_advantages,
    group_spread,
    kl_estimate,
    masked_gae,
    policy_loss,
    value_loss,
    whiten,
)

# The same cases in every run, and no example database left on disk.
cases = settings(max_examples=60, deadline=None, derandomize=True, database=None)


# ==================================================================================================
# Random cases


def conversation(rows, padding):
    """[(observation tokens, sampled tokens) of every turn] of every row -> response mask,
    right-padded."""
    rows = [[flag for seen, said in row for flag in [False] * seen + [True] * said] for row in rows]
    width = max(1, padding + max(len(row) for row in rows))
    return torch.tensor([row + [False] * (width - len(row)) for row in rows])


# No turns: an empty row.
TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4)
MASKS = st.builds(conversation, st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 2))
SEEDS = st.integers(0, 2**31)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
# Eighths have exact sums and means, so that equal returns are equal whatever order they are added
# in.
EPISODES = st.lists(st.tuples(st.sampled_from([5, 0, 2]),
                              st.integers(-16, 16).map(lambda n: n / 8)), min_size=1, max_size=12)
# Whole numbers: ties are frequent, sums exact.
SCORES = st.lists(st.integers(0, 6), min_size=1, max_size=8)
TOP_PS = st.integers(2, 120).map(lambda n: n / 100)


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, expected, tol=1e-12):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def bits(text):
    """'01 1' -> mask of one row; spaces are for the eye."""
    return torch.tensor([[c == "1" for c in text.replace(" ", "")]])


# ==================================================================================================
# The slow definitions


def slow_filter(scores, top_p, eps):
    """Walk from the largest score down until what is held reaches the threshold."""
    if top_p >= 1:
        return [True] * len(scores)
    kept, held = [False] * len(scores), 0.0
    for g in sorted(range(len(scores)), key=lambda g: (-scores[g], g)):
        if held >= (top_p - eps) * sum(scores) or scores[g] == 0:
            break
        kept[g], held = True, held + scores[g]
    return kept


def slow_group_advantages(episodes, mask, by_std, eps=1e-6):
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for b, (group, episode_return) in enumerate(episodes):
        others = [r for g, r in episodes if g == group]
        a = episode_return - statistics.fmean(others)
        if by_std:
            a /= (statistics.stdev(others) if len(others) > 1 else 0.0) + eps
        for t in range(mask.shape[1]):
            advantages[b, t] = a if mask[b, t] else 0.0
    return advantages


def slow_gae(rewards, values, mask, gamma, lam):
    """Schulman et al. 2016, eq. 16 as the sum it abbreviates:
    A_k = sum_j (gamma lam)^(j-k) delta_j."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[b, t]]
        r, v = [float(rewards[b, t]) for t in steps], [float(values[b, t]) for t in steps] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(steps))]
        for k, t in enumerate(steps):
            advantages[b, t] = sum((gamma * lam) ** (j - k) * deltas[j]
                                   for j in range(k, len(steps)))
            returns[b, t] = advantages[b, t] + v[k]
    return advantages, returns


def textbook_gae(rewards, values, gamma, lam):
    """GAE in which every position is a time step, as in torchtune's `estimate_advantages`."""
    advantages, last, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        last = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * last
        next_value = values[:, t]
        advantages[:, t] = last
    return advantages


def slow_policy_loss(logprob, old, advantage, low, high, dual):
    ratio = math.exp(logprob - old)
    inside = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * inside)
    if advantage < 0:
        loss = min(loss, -advantage * dual)
    return loss, -advantage * inside > -advantage * ratio


# ==================================================================================================


class TestFilter:
    @pytest.mark.parametrize(("scores", "top_p", "kept"), [
        ([4, 3, 2, 1], 0.6, {0, 1}),  # threshold .59 * 10 = 5.9: 4, then 7
        ([3, 1, 1, 0], 0.9, {0, 1, 2}),  # .89 * 5 = 4.45: 3, 4, then 5
        ([9, 1, 5], 0.9, {0, 2}),  # .89 * 15 = 13.35: 9, then 14
        ([10, 1, 0, 0], 0.9, {0}),  # .89 * 11 = 9.79: 10
        ([0, 0, 2, 0], 0.9, {2}),
        ([5, 5], 0.5, {0}),  # .49 * 10 = 4.9: 5; with eps = 0 this is 5 >= 5, also one group
        ([7], 0.9, {0}),
    ])
    def test_hand_worked_examples(self, scores, top_p, kept):
        got = filter_groups(torch.tensor(scores, dtype=torch.float32), top_p)
        assert set(got.nonzero()[:, 0].tolist()) == kept

    @cases
    @given(SCORES, TOP_PS, st.sampled_from([0.0, 0.01, 0.019]))
    def test_equals_the_slow_walk(self, scores, top_p, eps):
        assert filter_groups(torch.tensor(scores, dtype=torch.float64), top_p, eps).tolist() == \
            slow_filter(scores, top_p, eps)

    @cases
    @given(SCORES, TOP_PS, st.integers(-12, 12))
    def test_the_scale_of_the_reward_changes_nothing(self, scores, top_p, exponent):
        scores = torch.tensor(scores, dtype=torch.float64)
        assert filter_groups(scores * 2.0**exponent, top_p).equal(filter_groups(scores, top_p))

    @cases
    @given(st.permutations([8.0, 5.0, 3.0, 2.0, 1.0, 0.0]), TOP_PS)
    def test_the_order_of_the_groups_changes_nothing(self, scores, top_p):
        ranked = torch.tensor(sorted(scores))
        by_score = dict(zip(ranked.tolist(), filter_groups(ranked, top_p).tolist()))
        assert filter_groups(torch.tensor(scores), top_p).tolist() == [by_score[s] for s in scores]

    @cases
    @given(SCORES, TOP_PS, TOP_PS)
    def test_a_larger_top_p_keeps_every_group_that_a_smaller_one_keeps(self, scores, p, q):
        scores = torch.tensor(scores, dtype=torch.float64)
        fewer, more = filter_groups(scores, min(p, q)), filter_groups(scores, max(p, q))
        assert not (fewer & ~more).any()

    @cases
    @given(SCORES, st.integers(2, 99))
    def test_what_is_kept_holds_the_share_and_would_not_without_its_smallest(self, scores, percent):
        scores = torch.tensor(scores, dtype=torch.float64)
        kept = scores[filter_groups(scores, percent / 100)]
        needed = (percent / 100 - 0.01) * scores.sum()
        assert kept.sum() >= needed
        if len(kept):
            assert kept.sum() - kept.min() < needed

    @cases
    @given(SCORES, st.integers(2, 99))
    def test_groups_without_spread_are_dropped_and_change_nothing_for_the_others(
            self, scores, percent):
        scores = torch.tensor(scores, dtype=torch.float64)
        kept = filter_groups(scores, percent / 100)
        with_zeros = filter_groups(torch.cat([scores, torch.zeros(3, dtype=torch.float64)]),
                                   percent / 100)
        assert with_zeros.tolist() == kept.tolist() + [False] * 3
        assert not kept[scores == 0].any()

    def test_of_tied_groups_the_first_are_kept(self):
        assert filter_groups(torch.ones(4), 0.5).tolist() == [True, True, False, False]
        assert filter_groups(torch.tensor([1.0, 2.0, 1.0, 2.0]), 0.5).tolist() == [
            False, True, False, True]

    def test_ties_go_by_index_among_more_groups_than_an_unstable_sort_keeps_in_order(self):
        assert filter_groups(torch.ones(200), 0.5, eps=0.0).tolist() == [True] * 100 + [False] * 100

    @pytest.mark.parametrize("top_p", [1.0, 1.5])
    def test_from_top_p_one_on_every_group_is_kept_even_without_spread(self, top_p):
        assert filter_groups(torch.tensor([0.0, 2.0, 0.0]), top_p).all()

    @pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
    def test_nothing_is_kept_where_no_group_has_spread(self, top_p):
        assert not filter_groups(torch.zeros(5), top_p).any()

    def test_no_groups_are_an_empty_answer(self):
        assert filter_groups(torch.zeros(0)).tolist() == []

    def test_eps_keeps_rounding_from_taking_one_group_too_many(self):
        """One of three equal groups holds a third, but added up in float32 three times .1 is too
        large."""
        scores = torch.full((3,), 0.1)
        assert filter_groups(scores, 1 / 3).tolist() == [True, False, False]
        assert filter_groups(scores, 1 / 3, eps=0.0).tolist() == [True, True, False]

    @pytest.mark.parametrize("top_p", [0.9, 1.0])
    @pytest.mark.parametrize("bad", [-0.5, math.nan])
    def test_refuses_negative_and_nan_scores(self, bad, top_p):
        with pytest.raises(ValueError,
                           match=r"scores \[1\.0, (-0\.5|nan)\], expected .*scores >= 0"):
            filter_groups(torch.tensor([1.0, bad]), top_p)

    @pytest.mark.parametrize("top_p", [0.0, -1.0])
    def test_refuses_a_top_p_that_is_not_positive(self, top_p):
        with pytest.raises(ValueError, match=f"top_p={top_p}.*expected top_p > 0"):
            filter_groups(torch.ones(2), top_p)


class TestGroupSpread:
    @cases
    @given(EPISODES)
    def test_is_the_sample_standard_deviation_of_each_group_in_the_order_of_group_id(
            self, episodes):
        ids, returns = zip(*episodes)
        groups = {g: [r for i, r in episodes if i == g] for g in sorted(set(ids))}
        close(group_spread(torch.tensor(returns, dtype=torch.float64), torch.tensor(ids)),
              [statistics.stdev(r) if len(r) > 1 else 0.0 for r in groups.values()])

    def test_hand_worked_example(self):
        """Deviations -1, 0, 1 have sample variance (1 + 0 + 1) / 2 = 1; a group of one has none."""
        spread = group_spread(torch.tensor([4.0, 7.0, 3.0, 5.0]), torch.tensor([0, 1, 0, 0]))
        assert spread.tolist() == [1.0, 0.0]

    def test_a_shift_changes_nothing_and_a_scale_passes_through(self):
        returns, ids = normal(12, 0), torch.arange(3).repeat(4)
        close(group_spread(returns + 5, ids), group_spread(returns, ids))
        close(group_spread(returns * -3, ids), group_spread(returns, ids) * 3)

    @pytest.mark.parametrize("value", [0.1, 0.3, 10.9])
    def test_of_equal_returns_is_exactly_zero_so_that_the_filter_drops_them(self, value):
        spread = group_spread(torch.full((16,), value), torch.zeros(16, dtype=torch.long))
        assert spread.tolist() == [0.0]
        assert not filter_groups(spread).any()


class TestGroupAdvantages:
    def test_hand_worked_example(self):
        """Returns 1, 0, 0, 1: mean 1/2, sample variance 4 * (1/4) / 3,
        so A = (1/2) sqrt(3) = 0.8660."""
        returns, ids = (torch.tensor([1.0, 0, 0, 1], dtype=torch.float64),
                        torch.zeros(4, dtype=torch.long))
        mask = torch.tensor([[1, 0, 1]] * 4).bool()
        half_root_3 = 3**0.5 / 2
        close(group_advantages(returns, ids, mask),
              [[a, 0, a] for a in (half_root_3, -half_root_3, -half_root_3, half_root_3)], tol=1e-5)
        close(group_advantages(returns, ids, mask, by_std=False),
              [[a, 0, a] for a in (0.5, -0.5, -0.5, 0.5)])

    @cases
    @given(EPISODES, st.booleans(), SEEDS)
    def test_equals_the_slow_loop(self, episodes, by_std, seed):
        ids, returns = zip(*episodes)
        mask = normal((len(episodes), 5), seed) > 0
        got = group_advantages(torch.tensor(returns, dtype=torch.float64), torch.tensor(ids), mask,
                               by_std)
        close(got, slow_group_advantages(episodes, mask, by_std))

    @cases
    @given(EPISODES, st.booleans())
    def test_sum_to_zero_over_the_trajectories_of_each_group(self, episodes, by_std):
        ids, returns = zip(*episodes)
        ids = torch.tensor(ids)
        got = group_advantages(torch.tensor(returns, dtype=torch.float64), ids,
                               torch.ones(len(ids), 1, dtype=torch.bool), by_std)
        for g in ids.unique():
            assert abs(got[ids == g].sum()) < 1e-9

    def test_have_unit_sample_variance_in_each_group(self):
        ids = torch.arange(3).repeat(8)
        got = group_advantages(normal(24, 1) * 7, ids, torch.ones(24, 1, dtype=torch.bool))
        for g in range(3):
            close(got[ids == g].var(), 1.0, tol=1e-5)

    def test_the_reward_scale_and_shift_vanish_by_std_and_only_the_shift_without(self):
        returns, ids, mask = (normal(8, 2), torch.arange(2).repeat(4),
                              torch.ones(8, 3, dtype=torch.bool))
        close(group_advantages(returns * 40 + 3, ids, mask), group_advantages(returns, ids, mask),
              tol=1e-4)
        close(group_advantages(returns * 40 + 3, ids, mask, by_std=False),
              group_advantages(returns, ids, mask, by_std=False) * 40)

    def test_a_group_does_not_see_another(self):
        mask, ids = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 1, 0, 1])
        before = group_advantages(torch.tensor([1.0, 5, 2, 9]), ids, mask)
        after = group_advantages(torch.tensor([1.0, -5, 2, 90]), ids, mask)
        assert before[[0, 2]].equal(after[[0, 2]])

    def test_a_shuffled_batch_gives_the_same_advantages_shuffled(self):
        returns, ids, mask = normal(9, 3), torch.arange(3).repeat(3), normal((9, 4), 4) > 0
        order = torch.tensor([4, 8, 0, 2, 6, 1, 7, 3, 5])
        close(group_advantages(returns[order], ids[order], mask[order]),
              group_advantages(returns, ids, mask)[order])

    @pytest.mark.parametrize("by_std", [True, False])
    def test_a_group_of_equals_has_zero_advantage(self, by_std):
        got = group_advantages(torch.full((4,), 0.75), torch.zeros(4, dtype=torch.long),
                               torch.ones(4, 2, dtype=torch.bool), by_std)
        assert got.tolist() == [[0.0, 0.0]] * 4

    @pytest.mark.parametrize("value", [0.3, 10.9, 123.4])
    def test_a_group_of_equals_has_zero_advantage_in_float32_too(self, value):
        got = group_advantages(torch.full((16,), value), torch.zeros(16, dtype=torch.long),
                               torch.ones(16, 1, dtype=torch.bool))
        assert got.abs().max() == 0

    def test_a_row_without_sampled_tokens_gets_nothing_but_still_counts_in_its_group(self):
        mask = torch.tensor([[0, 0], [1, 0]]).bool()
        got = group_advantages(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), mask, by_std=False)
        assert got.tolist() == [[0.0, 0.0], [1.0, 0.0]]


class TestMaskedGAE:
    # Two turns, "x" a sampled token:  . x x . . x x x
    MASK = "0 11 00 111"
    REWARDS = row(0, 0, 0.5, 0, 0, 0, 0, 2)
    VALUES = row(9, 0.1, 0.2, 9, 9, 0.3, 0.4, 0.5)

    def test_hand_worked_example(self):
        """gamma = 1, lambda = .9. From the back: delta = 2 - .5, .1, .1, .6, .1 and
        A = 1.5;  .1 + .9*1.5 = 1.45;  .1 + .9*1.45 = 1.405;  .6 + .9*1.405 = 1.8645;
        .1 + .9*1.8645.
        The same row and numbers as VAGEN's masked_gae, whose raw advantages are also 0 outside the
        mask.
        """
        advantages, returns = masked_gae(self.REWARDS, self.VALUES, bits(self.MASK), gamma=1.0,
                                         lam=0.9)
        close(advantages, row(0, 1.77805, 1.8645, 0, 0, 1.405, 1.45, 1.5))
        close(returns, row(0, 1.87805, 2.0645, 0, 0, 1.705, 1.85, 2.0))

    def test_gamma_discounts_the_next_value_and_lambda_does_not(self):
        """Values 1, 2 and a reward of 1 at the end, so delta_1 = 1 - 2 = -1.
        gamma .5, lambda 1: delta_0 = .5*2 - 1 = 0, A_0 = 0 - .5.
        gamma 1, lambda .5: delta_0 = 1, A_0 = 1 - .5.
        """
        rewards, values, mask = row(0, 1), row(1, 2), bits("11")
        close(masked_gae(rewards, values, mask, gamma=0.5, lam=1.0)[0], row(-0.5, -1))
        close(masked_gae(rewards, values, mask, gamma=1.0, lam=0.5)[0], row(0.5, -1))

    @cases
    @given(MASKS, SEEDS, DISCOUNTS, DISCOUNTS)
    def test_equals_the_slow_sum(self, mask, seed, gamma, lam):
        rewards, values = normal(mask.shape, seed), normal(mask.shape, seed + 1)
        for got, expected in zip(masked_gae(rewards, values, mask, gamma, lam),
                                 slow_gae(rewards, values, mask, gamma, lam)):
            close(got, expected)

    @cases
    @given(MASKS, SEEDS)
    def test_is_textbook_gae_on_each_row_with_the_observations_deleted(self, mask, seed):
        rewards, values = normal(mask.shape, seed), normal(mask.shape, seed + 1)
        advantages, _ = masked_gae(rewards, values, mask, 0.9, 0.8)
        for b, said in enumerate(mask):
            alone = textbook_gae(rewards[b:b + 1, said], values[b:b + 1, said], 0.9, 0.8)
            close(advantages[b, said], alone[0])

    @cases
    @given(MASKS, SEEDS)
    def test_is_exactly_zero_outside_the_mask_and_blind_to_what_stands_there(self, mask, seed):
        rewards, values = normal(mask.shape, seed), normal(mask.shape, seed + 1)
        noise = normal(mask.shape, seed + 2) * ~mask * 100
        clean = masked_gae(rewards, values, mask, 0.9, 0.8)
        for got, expected in zip(masked_gae(rewards + noise, values - noise, mask, 0.9, 0.8),
                                 clean):
            assert got.equal(expected)
            assert (got[~mask] == 0).all()

    @cases
    @given(MASKS, SEEDS)
    def test_padding_and_neighbouring_rows_change_nothing(self, mask, seed):
        rewards, values = normal(mask.shape, seed), normal(mask.shape, seed + 1)
        wide = [torch.nn.functional.pad(x, (2, 3)) for x in (rewards, values, mask)]
        together, _ = masked_gae(rewards, values, mask, 0.9, 0.8)
        padded, _ = masked_gae(*wide, 0.9, 0.8)
        close(padded[:, 2:-3], together)
        for b in range(len(mask)):
            alone, _ = masked_gae(rewards[b:b + 1], values[b:b + 1], mask[b:b + 1], 0.9, 0.8)
            close(alone, together[b:b + 1])

    def test_a_missing_mask_cannot_be_noticed_at_gamma_and_lambda_one_but_can_at_99_and_95(self):
        """At gamma = lambda = 1 the deltas telescope: A_t = the rewards from t on - V_t, however
        many observation tokens lie between. RAGEN's defaults are exactly there. The review of pull
        request 235 of redai-studio/Relax measured both: a difference of 2e-7 at 1 / 1 and of 0.36
        at .99 / .95.
        """
        mask = conversation([[(3, 5), (6, 4), (2, 5)], [(4, 3), (9, 6)]], padding=2)
        values = normal(mask.shape, 0)
        rewards = torch.zeros_like(values)
        # Ends of the turns.
        rewards[0, [7, 17, 24]] = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
        rewards[1, 21] = 1.0

        def gap(gamma, lam):
            unmasked = textbook_gae(rewards, values, gamma, lam)
            return (masked_gae(rewards, values, mask, gamma, lam)[0] - unmasked)[mask].abs().max()

        assert mask[0, [7, 17, 24]].all()
        assert mask[1, 21]
        assert gap(1.0, 1.0) < 1e-12
        assert gap(0.99, 0.95) > 0.1

    @cases
    @given(MASKS, SEEDS)
    def test_at_gamma_and_lambda_one_is_the_reward_still_to_come_minus_the_value(self, mask, seed):
        rewards, values = normal(mask.shape, seed), normal(mask.shape, seed + 1)
        to_come = (rewards * mask).flip(1).cumsum(1).flip(1)
        advantages, returns = masked_gae(rewards, values, mask)
        close(advantages, (to_come - values) * mask)
        close(returns, to_come * mask)

    @cases
    @given(MASKS, SEEDS, DISCOUNTS)
    def test_at_lambda_zero_is_the_one_step_error(self, mask, seed, gamma):
        rewards, values = normal(mask.shape, seed), normal(mask.shape, seed + 1)
        advantages, _ = masked_gae(rewards, values, mask, gamma, lam=0.0)
        for b in range(len(mask)):
            v = torch.cat([values[b, mask[b]], torch.zeros(1, dtype=torch.float64)])
            close(advantages[b, mask[b]], rewards[b, mask[b]] + gamma * v[1:] - v[:-1])

    @cases
    @given(MASKS, SEEDS, DISCOUNTS, DISCOUNTS)
    def test_returns_are_advantages_plus_values(self, mask, seed, gamma, lam):
        values = normal(mask.shape, seed + 1)
        advantages, returns = masked_gae(normal(mask.shape, seed), values, mask, gamma, lam)
        close(returns[mask], (advantages + values)[mask])

    @cases
    @given(MASKS, SEEDS)
    def test_a_critic_that_is_right_leaves_no_advantage(self, mask, seed):
        """V_k = r_k + gamma * V_{k+1} makes every delta 0, whatever lambda."""
        rewards = normal(mask.shape, seed)
        _, values = slow_gae(rewards, torch.zeros_like(rewards), mask, 0.9, 1.0)
        advantages, returns = masked_gae(rewards, values, mask, 0.9, 0.7)
        close(advantages, torch.zeros_like(advantages))
        close(returns, values)

    def test_the_gradient_to_an_earlier_token_decays_with_the_sampled_tokens_between(self):
        """dA_k / dr_j = (gamma lambda)^(j - k) for j >= k, else 0; k and j count sampled tokens."""
        mask, values = bits("01 00 11"), row(0, 0.3, 0, 0, 0.2, 0.1)
        jacobian = torch.autograd.functional.jacobian(
            lambda r: masked_gae(r, values, mask, 0.9, 0.5)[0], torch.zeros_like(values))[0, :, 0]
        expected = torch.zeros(6, 6, dtype=torch.float64)
        d = 0.45
        expected[1, [1, 4, 5]] = torch.tensor([1.0, d, d * d], dtype=torch.float64)
        expected[4, [4, 5]] = torch.tensor([1.0, d], dtype=torch.float64)
        expected[5, 5] = 1.0
        close(jacobian, expected)

    def test_agrees_with_numeric_gradients(self):
        mask = bits("0110 01")
        rewards, values = normal((1, 6), 0).requires_grad_(), normal((1, 6), 1).requires_grad_()
        assert torch.autograd.gradcheck(lambda r, v: masked_gae(r, v, mask, 0.9, 0.8),
                                        (rewards, values))

    def test_turns_of_one_token_are_single_time_steps(self):
        """Values 0, gamma * lambda = .5: A = 4;  .5*4 = 2;  1 + .5*2 = 2."""
        advantages, _ = masked_gae(row(0, 1, 0, 0, 0, 0, 4), torch.zeros(1, 7, dtype=torch.float64),
                                   bits("01 01 001"), gamma=0.5, lam=1.0)
        close(advantages, row(0, 2, 0, 2, 0, 0, 4))

    def test_a_row_without_sampled_tokens_is_zero_and_leaves_the_others_alone(self):
        mask = torch.cat([bits("000"), bits("011")])
        advantages, returns = masked_gae(torch.ones(2, 3), torch.ones(2, 3), mask, 0.5, 1.0)
        assert advantages.tolist() == [[0, 0, 0], [0, 0.5, 0]]  # delta = 1 + .5 - 1, 1 - 1
        assert returns.tolist() == [[0, 0, 0], [0, 1.5, 1]]

    def test_an_empty_mask_gives_zeros(self):
        advantages, returns = masked_gae(torch.ones(2, 3), torch.ones(2, 3),
                                         torch.zeros(2, 3).bool())
        assert not advantages.any()
        assert not returns.any()

    def test_float32_stays_within_rounding_of_float64_over_a_long_row(self):
        mask = normal((4, 512), 0) > -0.5
        rewards, values = normal(mask.shape, 1), normal(mask.shape, 2)
        single = masked_gae(rewards.float(), values.float(), mask, 0.99, 0.95)[0]
        assert single.dtype == torch.float32
        close(single.double(), masked_gae(rewards, values, mask, 0.99, 0.95)[0], tol=1e-5)

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_is_exactly_zero_outside_the_mask_even_where_nan_or_inf_stands(self, poison):
        mask = bits("101")
        advantages, returns = masked_gae(row(0, poison, 1), row(0.5, poison, 0.5), mask)
        close(advantages, row(0.5, 0, 0.5))
        close(returns, row(1, 0, 1))

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_refuses_three_shapes_that_are_not_equal(self, odd):
        parts = [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3).bool()]
        parts[odd] = parts[odd][:1]  # (1, 3) would broadcast
        with pytest.raises(ValueError, match=r"masked_gae: got shapes .*\(1, 3\)"
                                             r".*expected three equal ones"):
            masked_gae(*parts)


class TestWhiten:
    @cases
    @given(MASKS.filter(lambda m: m.sum() > 1), SEEDS, st.sampled_from([0.1, 1.0, 50.0]))
    def test_has_mean_zero_and_variance_one_on_the_mask_and_is_zero_outside(
            self, mask, seed, scale):
        white = whiten(normal(mask.shape, seed) * scale + 3, mask)
        assert abs(white[mask].mean()) < 1e-9
        variance = (normal(mask.shape, seed) * scale)[mask].var()
        assert abs(white[mask].var() - variance / (variance + 1e-8)) < 1e-9  # 1, but for eps
        assert (white[~mask] == 0).all()

    @cases
    @given(MASKS.filter(lambda m: m.sum() > 1), SEEDS)
    def test_equals_the_slow_definition_and_is_blind_to_what_stands_outside(self, mask, seed):
        x = normal(mask.shape, seed)
        mean, var = statistics.fmean(x[mask].tolist()), statistics.variance(x[mask].tolist())
        expected = torch.tensor([[(float(x[b, t]) - mean) / math.sqrt(var + 1e-8) if mask[b, t]
                                  else 0.0 for t in range(mask.shape[1])]
                                 for b in range(len(mask))])
        close(whiten(x, mask), expected.double(), tol=1e-6)
        close(whiten(torch.where(mask, x, 1e6), mask), whiten(x, mask))

    def test_hand_worked_example(self):
        """1, 2, 3: mean 2, sample variance 1. The fourth entry is not in the mask."""
        close(whiten(row(1, 2, 3, 100), bits("1110")), row(-1, 0, 1, 0), tol=1e-7)

    def test_the_sign_and_the_order_of_the_differences_are_kept(self):
        x, mask = normal((3, 7), 5), normal((3, 7), 6) > 0
        assert whiten(x, mask)[mask].argsort().equal(x[mask].argsort())

    def test_equal_entries_become_zero(self):
        assert whiten(torch.full((2, 3), 2.5), bits("110").expand(2, 3)).tolist() == [[0.0] * 3] * 2

    def test_equal_entries_become_zero_in_float32_whatever_their_size(self):
        for value in (0.3, 10.9, 123.4):
            x = torch.full((64, 101), value)
            assert whiten(x, torch.ones_like(x).bool()).abs().max() < 1e-3

    def test_of_a_single_entry_the_mean_alone_is_removed(self):
        assert whiten(torch.tensor([[7.0, 5.0]]), bits("01")).tolist() == [[0.0, 0.0]]

    def test_an_empty_mask_gives_zeros(self):
        assert whiten(torch.ones(2, 3), torch.zeros(2, 3).bool()).tolist() == [[0.0] * 3] * 2

    def test_agrees_with_numeric_gradients(self):
        x = normal((2, 4), 0).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: whiten(x, bits("0111").expand(2, 4)), (x,))

    @pytest.mark.parametrize("mask", ["101", "100", "000"])
    def test_is_exactly_zero_outside_the_mask_even_where_nan_stands(self, mask):
        white = whiten(row(1, math.nan, 3), bits(mask))
        assert (white[~bits(mask)] == 0).all()


class TestPolicyLoss:
    # ratio, advantage -> loss, clipped, d loss / d logprob      (0.2 / 0.28, dual clip 3)
    TABLE = {
        "good_token_that_became_unlikely": (0.5, 1.0, -0.5, False, -0.5),
        "good_token_unchanged": (1.0, 1.0, -1.0, False, -1.0),
        "good_token_inside_the_upper_bound": (1.25, 2.0, -2.5, False, -2.5),
        "good_token_beyond_the_upper_bound": (2.0, 2.0, -2.56, True, 0.0),
        "bad_token_beyond_the_lower_bound": (0.5, -1.0, 0.8, True, 0.0),
        "bad_token_inside_the_lower_bound": (0.9, -2.0, 1.8, False, 1.8),
        "bad_token_unchanged": (1.0, -1.0, 1.0, False, 1.0),
        "bad_token_that_became_likely": (2.0, -1.0, 2.0, False, 2.0),
        "bad_token_beyond_the_dual_clip": (4.0, -2.0, 6.0, False, 0.0),
        "token_without_advantage": (2.0, 0.0, 0.0, False, 0.0),
    }

    @pytest.mark.parametrize("case", TABLE)
    def test_hand_worked_value_and_gradient(self, case):
        ratio, advantage, expected, expected_clipped, slope = self.TABLE[case]
        logprobs = torch.tensor([math.log(ratio) - 1.5], dtype=torch.float64, requires_grad=True)
        loss, clipped = policy_loss(logprobs, torch.tensor([-1.5], dtype=torch.float64),
                                    torch.tensor([advantage], dtype=torch.float64))
        loss.sum().backward()
        close(loss.detach(), [expected])
        close(logprobs.grad, [slope])
        assert clipped.tolist() == [expected_clipped]

    @cases
    @given(SEEDS, st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.5, 1.2),
                                   (0.0, 0.0, 10.0)]))
    def test_equals_the_slow_loop(self, seed, bounds):
        new, old, advantages = (normal((3, 4), seed), normal((3, 4), seed + 1),
                                normal((3, 4), seed + 2))
        loss, clipped = policy_loss(new, old, advantages, *bounds)
        for b in range(3):
            for t in range(4):
                token = [float(x[b, t]) for x in (new, old, advantages)]
                expected, expected_clipped = slow_policy_loss(*token, *bounds)
                close(loss[b, t], expected)
                assert bool(clipped[b, t]) == expected_clipped

    @cases
    @given(SEEDS)
    def test_before_the_first_update_its_gradient_is_the_policy_gradient(self, seed):
        """At ratio 1, d loss / d logprob = -A: REINFORCE, with no token clipped."""
        logprobs, advantages = normal((2, 5), seed).requires_grad_(), normal((2, 5), seed + 1)
        loss, clipped = policy_loss(logprobs, logprobs.detach().clone(), advantages)
        loss.sum().backward()
        close(logprobs.grad, -advantages)
        close(loss.detach(), -advantages)
        assert not clipped.any()

    def test_agrees_with_numeric_gradients_away_from_the_corners(self):
        """Corners of the log ratio: log .8 = -.22, log 1.28 = .25, log 3 = 1.10."""
        logprobs = torch.tensor([-1.0, -0.1, 0.1, 0.8, 2.0],
                                dtype=torch.float64).repeat(2).requires_grad_()
        advantages = torch.tensor([1.5] * 5 + [-0.7] * 5, dtype=torch.float64)
        old = torch.zeros(10, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages)[0], (logprobs,))

    @cases
    @given(SEEDS)
    def test_is_never_below_the_free_loss_for_good_tokens_and_never_above_the_floor_for_bad_ones(
            self, seed):
        logprobs, old, advantages = (normal((50,), seed + i) * 2 for i in range(3))
        loss, _ = policy_loss(logprobs, old, advantages, dual_clip=3.0)
        free, good, bad = -advantages * (logprobs - old).exp(), advantages > 0, advantages < 0
        assert (loss >= free)[good].all()
        assert (loss <= -3 * advantages)[bad].all()

    def test_the_upper_bound_is_separate_from_the_lower_one(self):
        """Clip-higher (DAPO): at ratio 1.25 a good token still learns; at the symmetric 0.2 it
        would not."""
        logprobs = torch.tensor([math.log(1.25)], dtype=torch.float64)
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        assert not policy_loss(logprobs, zero, one)[1]
        assert policy_loss(logprobs, zero, one, clip_high=0.2)[1]
        close(policy_loss(logprobs, zero, one, clip_high=0.2)[0], [-1.2])
        close(policy_loss(-logprobs, zero, -one, clip_low=0.1)[0], [0.9])

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    @pytest.mark.parametrize("nats", [-1000.0, 1000.0])
    def test_a_freak_token_has_a_finite_loss_and_gradient(self, nats, advantage):
        logprobs = torch.tensor([nats], requires_grad=True)
        loss, _ = policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]))
        loss.sum().backward()
        assert loss.isfinite().all()
        assert logprobs.grad.isfinite().all()

    @pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
    def test_refuses_a_dual_clip_of_one_or_less(self, dual_clip):
        with pytest.raises(ValueError, match=f"dual_clip={dual_clip}, expected more than 1"):
            policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), dual_clip=dual_clip)


class TestValueLoss:
    @pytest.mark.parametrize(("value", "expected", "slope"), [
        (0.25, 0.5 * 1.75**2, -1.75),  # inside: plain
        (1.0, 0.5 * 1.5**2, 0.0),  # towards the return, past .5: held back
        (-1.0, 0.5 * 3.0**2, -3.0),  # away from the return: pulled back
    ], ids=["inside", "towards_the_return", "away_from_the_return"])
    def test_hand_worked_value_and_gradient(self, value, expected, slope):
        """V_old = 0, R = 2, and the default value_clip of .5."""
        values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
        old, returns = (torch.zeros(1, dtype=torch.float64),
                        torch.full((1,), 2.0, dtype=torch.float64))
        loss = value_loss(values, old, returns)
        loss.sum().backward()
        close(loss.detach(), [expected])
        close(values.grad, [slope])

    @cases
    @given(SEEDS, st.sampled_from([0.1, 0.5, 2.0]))
    def test_equals_the_slow_loop(self, seed, clip):
        values, old, returns = (normal((3, 4), seed + i) for i in range(3))
        loss = value_loss(values, old, returns, clip)
        for b in range(3):
            for t in range(4):
                v, o, r = float(values[b, t]), float(old[b, t]), float(returns[b, t])
                near = min(max(v, o - clip), o + clip)
                close(loss[b, t], max((v - r) ** 2, (near - r) ** 2) / 2)

    @cases
    @given(SEEDS)
    def test_is_never_below_half_the_squared_error_and_equal_to_it_before_the_first_update(
            self, seed):
        values, old, returns = (normal((40,), seed + i) for i in range(3))
        plain = 0.5 * (values - returns) ** 2
        assert (value_loss(values, old, returns) >= plain).all()
        close(value_loss(values, values, returns), plain)

    def test_agrees_with_numeric_gradients_away_from_the_corners(self):
        values = torch.tensor([0.25, 1.0, -1.0, 4.0], dtype=torch.float64, requires_grad=True)
        old, returns = (torch.zeros(4, dtype=torch.float64),
                        torch.full((4,), 2.0, dtype=torch.float64))
        assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns), (values,))


class TestKL:
    """Expectations are exact: sums over a categorical of five outcomes, nothing is sampled."""

    LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, -0.3], dtype=torch.float64)
    REF = torch.tensor([-0.2, 0.4, 1.0, 0.9, -2.0], dtype=torch.float64).log_softmax(0)

    def gradient(self, function):
        """d/dlogits of E_pi[f(log pi, log ref)], the outcomes held as if they had been sampled from
        pi."""
        logits = self.LOGITS.clone().requires_grad_()
        logprobs = logits.log_softmax(0)
        (logprobs.exp().detach() * function(logprobs, self.REF)).sum().backward()
        return logits.grad

    def true_gradient(self, divergence):
        logits = self.LOGITS.clone().requires_grad_()
        divergence(logits.log_softmax(0)).backward()
        return logits.grad

    def reverse(self, logprobs):
        return (logprobs.exp() * (logprobs - self.REF)).sum()  # KL(pi || ref)

    def forward(self, logprobs):
        return (self.REF.exp() * (self.REF - logprobs)).sum()  # KL(ref || pi)

    def test_hand_worked_example(self):
        """d = log 2: k2 = .480453 / 2, k3 = 2 - .693147 - 1.  d = -log 2: k3 = .5 + .693147 - 1."""
        two, zero = (torch.tensor([math.log(2)], dtype=torch.float64),
                     torch.zeros(1, dtype=torch.float64))
        close(kl_estimate(zero, two, "k2"), [0.2402265], tol=1e-7)
        close(kl_estimate(zero, two, "k3"), [0.3068528], tol=1e-7)
        close(kl_estimate(two, zero, "k3"), [0.1931472], tol=1e-7)

    def test_the_expected_gradient_of_k2_is_that_of_the_true_kl(self):
        truth = self.true_gradient(self.reverse)
        assert truth.abs().max() > 0.1
        close(self.gradient(lambda x, ref: kl_estimate(x, ref, "k2")), truth)

    def test_the_expected_gradient_of_k3_is_that_of_the_kl_the_other_way_round(self):
        """E_pi[(1 - ref/pi) grad log pi] = -E_ref[grad log pi] = grad KL(ref || pi): also a
        regulariser."""
        close(self.gradient(lambda x, ref: kl_estimate(x, ref, "k3")),
              self.true_gradient(self.forward))

    def test_k3_is_unbiased_and_k2_is_not(self):
        logprobs = self.LOGITS.log_softmax(0)
        k2, k3 = ((logprobs.exp() * kl_estimate(logprobs, self.REF, name)).sum()
                  for name in ("k2", "k3"))
        close(k3, self.reverse(logprobs))
        assert abs(k2 - self.reverse(logprobs)) > 0.01

    @pytest.mark.parametrize("estimator", ["k2", "k3"])
    @cases
    @given(SEEDS)
    def test_is_never_negative_and_zero_exactly_where_the_two_agree(self, estimator, seed):
        logprobs, ref = normal((30,), seed) * 3, normal((30,), seed + 1) * 3
        assert (kl_estimate(logprobs, ref, estimator) > 0).all()
        assert (kl_estimate(logprobs, logprobs.clone(), estimator) == 0).all()

    def test_k3_of_a_small_drift_is_d_squared_over_two_in_float32(self):
        """What approx_kl measures after one small update. expm1(d) - d does not cancel as badly."""
        drift = torch.linspace(-1e-3, 1e-3, 1001)
        estimate = kl_estimate(drift, torch.zeros_like(drift))
        assert (estimate >= 0).all()
        close(estimate.double().mean(), float((drift.double() ** 2 / 2).mean()), tol=1e-2)

    @pytest.mark.parametrize("estimator", ["k2", "k3"])
    @pytest.mark.parametrize("nats", [-1000.0, 1000.0])
    def test_a_freak_token_has_a_finite_estimate_and_gradient(self, nats, estimator):
        logprobs = torch.tensor([nats], requires_grad=True)
        estimate = kl_estimate(logprobs, torch.zeros(1), estimator)
        estimate.sum().backward()
        assert estimate.isfinite().all()
        assert logprobs.grad.isfinite().all()

    @pytest.mark.parametrize(("estimator", "slope"), [("k2", 29.0), ("k3", 1.0)])
    def test_a_token_that_the_reference_finds_impossible_is_still_pulled_back(
            self, estimator, slope):
        """log pi = -1, log ref = -30: d k2 = log pi - log ref, d k3 = 1 - exp(d). Where KL is
        needed most."""
        logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        kl_estimate(logprobs, torch.tensor([-30.0], dtype=torch.float64),
                    estimator).sum().backward()
        close(logprobs.grad, [slope])

    @pytest.mark.parametrize("estimator", ["k2", "k3"])
    def test_agrees_with_numeric_gradients(self, estimator):
        logprobs, ref = normal((2, 4), 0).requires_grad_(), normal((2, 4), 1)
        assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, estimator), (logprobs,))

    def test_refuses_k1_and_says_why(self):
        with pytest.raises(ValueError, match="'k1': k1 as a loss has a gradient of expectation 0"
                                             ".*k2, k3"):
            kl_estimate(torch.zeros(1), torch.zeros(1), "k1")

    @pytest.mark.parametrize("name", ["low-var-kl", "", "K3"])
    def test_refuses_unknown_names_and_lists_the_known_ones(self, name):
        with pytest.raises(ValueError,
                           match=f"unknown kl_estimator '{name}': expected one of k2, k3"):
            kl_estimate(torch.zeros(1), torch.zeros(1), name)


class TestAggregate:
    @cases
    @given(MASKS.filter(lambda m: m.any()), SEEDS,
           st.lists(st.integers(1, 3), min_size=4, max_size=4))
    def test_sums_to_the_mean_over_all_tokens_however_the_batch_is_split(self, mask, seed, sizes):
        x, total = normal(mask.shape, seed), int(mask.sum())
        parts, start = [], 0
        for rows in sizes:
            parts.append(aggregate(x[start:start + rows], mask[start:start + rows], total))
            start += rows
        close(sum(parts), float(x[mask].mean()))

    def test_hand_worked_example(self):
        """Tokens 1, 2, 6 in three rows of one update: 1/3 + 2/3 + 6/3; the masked 9 is not
        there."""
        x = torch.tensor([[1.0, 9.0], [2.0, 9.0], [9.0, 6.0]])
        mask = torch.tensor([[1, 0], [1, 0], [0, 1]]).bool()
        assert aggregate(x, mask, 3) == 3.0
        assert aggregate(x[:2], mask[:2], 3) == 1.0

    def test_its_gradient_is_one_over_total_on_the_mask_and_zero_outside(self):
        x = torch.zeros(2, 2, requires_grad=True)
        aggregate(x, torch.tensor([[1, 0], [0, 1]]).bool(), 8).backward()
        assert x.grad.tolist() == [[0.125, 0.0], [0.0, 0.125]]

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_nan_and_inf_outside_the_mask_reach_neither_value_nor_gradient(self, poison):
        x = torch.tensor([[1.0, poison]], requires_grad=True)
        mean = aggregate(x * 2, bits("10"), 1)
        mean.backward()
        assert mean == 2.0
        assert x.grad.tolist() == [[2.0, 0.0]]

    def test_nan_on_the_mask_is_not_hidden(self):
        assert aggregate(torch.tensor([[1.0, math.nan]]), bits("11"), 2).isnan()

    def test_a_micro_batch_without_tokens_has_no_share(self):
        assert aggregate(torch.ones(1, 3), bits("000"), 5) == 0.0


class TestInputs:
    """Pure functions: what goes in comes out untouched, and float64 stays float64."""

    MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    IDS = torch.tensor([0, 0])
    CALLS = {
        "filter_groups": lambda m, x, y, z: filter_groups(x[0].abs()),
        "group_spread": lambda m, x, y, z: group_spread(x[:, 0], TestInputs.IDS),
        "group_advantages": lambda m, x, y, z: group_advantages(x[:, 0], TestInputs.IDS, m),
        "masked_gae": lambda m, x, y, z: masked_gae(x, y, m, 0.9, 0.8),
        "whiten": lambda m, x, y, z: whiten(x, m),
        "policy_loss": lambda m, x, y, z: policy_loss(x, y, z),
        "value_loss": lambda m, x, y, z: value_loss(x, y, z),
        "kl_estimate": lambda m, x, y, z: kl_estimate(x, y),
        "aggregate": lambda m, x, y, z: aggregate(x, m, 4),
    }

    @pytest.mark.parametrize("name", CALLS)
    def test_are_never_written_to(self, name):
        """nano-aha-moment's `compute_token_log_probs` wrote into a view of its labels (utils.py),
        and the count of response tokens that followed was wrong. So: nothing writes into what it
        was given.
        """
        inputs = [self.MASK.clone(), *(normal((2, 4), seed) for seed in range(3))]
        before = [x.clone() for x in inputs]
        self.CALLS[name](*inputs)
        assert all(x.equal(y) for x, y in zip(inputs, before))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("name", [name for name in CALLS if name != "filter_groups"])
    def test_keep_their_precision(self, name, dtype):
        result = self.CALLS[name](self.MASK, *(normal((2, 4), seed).to(dtype) for seed in range(3)))
        floats = [x for x in (result if isinstance(result, tuple) else (result,))
                  if x.dtype != torch.bool]
        assert floats
        assert all(x.dtype == dtype for x in floats)

    def test_examples_in_the_docstrings_are_true(self):
        result = doctest.testmod(starpo)
        assert result.attempted > 0
        assert result.failed == 0


class TestMuseum:
    """Famous bugs in miniature. Each docstring names where the original stands."""

    def test_a_turn_without_reward_keeps_its_place_in_time(self):
        """RAGEN ragen/trainer/core_algos.py, compute_bi_level_gae_advantage_return: a turn ends
        where the reward is not zero. A turn that earned nothing is then no turn: it loses its
        discount, and if it is the last one there is an IndexError. masked_gae never asks a reward
        where a turn ends.
        """
        mask, values = bits("11 0 11"), torch.zeros(1, 5, dtype=torch.float64)
        first_earns_nothing, last_earns_nothing = row(0, 0, 0, 0, 1), row(0, 1, 0, 0, 0)
        for rewards in (first_earns_nothing, last_earns_nothing):
            assert int(rewards.bool().sum()) == 1  # the original sees one turn of the two
        close(masked_gae(first_earns_nothing, values, mask, 0.9, 1.0)[0],
              row(0.729, 0.81, 0, 0.9, 1))
        close(masked_gae(last_earns_nothing, values, mask, 0.9, 1.0)[0], row(0.9, 1, 0, 0, 0))

    def test_observation_tokens_do_not_carry_the_next_advantage(self):
        """verl's masked GAE (verl/trainer/ppo/core_algos.py, as RAGEN V2 calls it) carries the
        running advantage through the gaps, so observations hold the advantage of the next sampled
        token.
        """
        mask, values = bits("1001"), row(0, 5, 5, 0)
        carried, last = torch.zeros_like(values), 0.0
        for t in (3, 2, 1, 0):
            last = 0.5 * last + float(t == 3) if mask[0, t] else last
            carried[0, t] = last
        assert carried.tolist() == [[0.5, 1.0, 1.0, 1.0]]
        close(masked_gae(row(0, 0, 0, 1), values, mask, 0.5, 1.0)[0], row(0.5, 0, 0, 1))

    def test_whitening_equal_advantages_does_not_blow_up_outside_the_mask(self):
        """verl's masked_whiten maps every position: with variance 0 on the mask,
        1 / sqrt(1e-8) = 1e4."""
        x, mask = torch.tensor([[2.0, 2.0, 3.0]]), bits("110")
        everywhere = (x - x[mask].mean()) * torch.rsqrt(x[mask].var() + 1e-8)
        assert everywhere[0, 2] > 9999
        assert whiten(x, mask).tolist() == [[0.0, 0.0, 0.0]]

    def test_whitening_removes_the_mean(self):
        """torchtune rlhf whiten (torchtune/rlhf/rewards.py): `shift_mean=True` adds the mean back,
        the opposite of the TRL function it was taken from, so its PPO advantages are not centred.
        Its unit test asserts the formula of the code; the property is that the mean is 0.
        """
        x, mask = row(1, 2, 3, 10), bits("1111")
        torchtune = (x - x.mean()) * torch.rsqrt(x.var() + 1e-8) + x.mean()
        assert abs(torchtune.mean() - 4.0) < 1e-9
        assert abs(whiten(x, mask).mean()) < 1e-9

    def test_a_group_of_one_has_no_advantage_instead_of_its_raw_return(self):
        """RAGEN ragen/trainer/core_algos.py, compute_grpo_outcome_advantage: a group of one gets
        mean 0 and std 1, so its raw return becomes its advantage.
        """
        returns, ids = torch.tensor([11.0, 3.0, 1.0]), torch.tensor([0, 1, 1])
        for by_std in (True, False):
            got = group_advantages(returns, ids, torch.ones(3, 1, dtype=torch.bool), by_std)
            assert got[0] == 0
            assert got[1] > 0 > got[2]

    def test_rewards_on_a_small_scale_are_not_filtered_away(self):
        """RAGEN ragen/trainer/rollout_filter.py, linear top_p: the eps of .01 is subtracted from
        the sum of scores, so where every score is .004 and top_p * sum < eps nothing is ever
        selected.
        """
        scores = torch.tensor([0.004, 0.004])
        # The original's threshold: reached by the empty set.
        assert 0.9 * float(scores.sum()) - 0.01 < 0
        assert filter_groups(scores, 0.9).tolist() == [True, True]
        big = torch.tensor([4.0, 3.0, 2.0, 1.0])
        assert filter_groups(big / 1000, 0.6).equal(filter_groups(big, 0.6))

    def test_groups_without_spread_are_not_kept_by_a_softmax(self):
        """RAGEN ragen/trainer/rollout_filter.py, softmax top_p: of eight groups with spreads .5 x 4
        and 0 x 4, top_p = .9 keeps seven, three of them with nothing to learn from.
        """
        scores = torch.tensor([0.5] * 4 + [0.0] * 4)
        assert int((scores.softmax(0).cumsum(0) < 0.9).sum()) + 1 == 7
        assert filter_groups(scores, 0.9).tolist() == [True] * 4 + [False] * 4

    def test_the_micro_batch_size_does_not_weigh_tokens(self):
        """verl's agg_loss as RAGEN V2 uses it: "token-mean" is taken in each micro-batch and
        averaged over them, so with one row each a token of a short reply weighs more than one of a
        long reply.
        """
        x = torch.tensor([[8.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]).bool()
        total = int(mask.sum())
        mean_of_means = sum(x[b, mask[b]].mean() for b in range(2)) / 2
        assert mean_of_means == 4.0
        split = sum(aggregate(x[b:b + 1], mask[b:b + 1], total) for b in range(2))
        assert aggregate(x, mask, total) == pytest.approx(1.6)  # 8 / 5 tokens
        assert split == pytest.approx(1.6)

    @pytest.mark.parametrize("prompt", [0, 1, 5, 50])
    def test_prompt_tokens_do_not_dilute_the_loss(self, prompt):
        """nano-aha-moment nano_r1_script.py: by the time response tokens are counted their labels
        have been overwritten, so in a toy batch with 3 response tokens the normaliser was 8, prompt
        included.
        """
        x = torch.cat([torch.full((2, prompt), 100.0), torch.tensor([[1.0, 2.0], [3.0, 50.0]])],
                      dim=1)
        mask = torch.cat([torch.zeros(2, prompt).bool(), torch.tensor([[1, 1], [1, 0]]).bool()],
                         dim=1)
        assert aggregate(x, mask, mask.sum()) == 2.0  # (1 + 2 + 3) / 3

    def test_k1_regularises_nothing_and_is_refused(self):
        """RAGEN's config/base.yaml: `kl_loss_type: kl` is k1 = log pi - log ref. As a loss its
        gradient is E[grad log pi] = 0, whatever the reference: it does not even appear.
        """
        pull = TestKL().gradient(lambda logprobs, ref: logprobs - ref)
        assert pull.abs().max() < 1e-15
        assert TestKL().true_gradient(TestKL().reverse).abs().max() > 0.1
        with pytest.raises(ValueError, match="regularises nothing"):
            kl_estimate(torch.zeros(1), torch.zeros(1), "k1")

    def test_a_bad_token_that_became_likely_does_not_dominate_the_update(self):
        """PPO as in Schulman et al. 2017 has no bound for A < 0: ratio e^5 is a loss of 148 for one
        token. Dual clip (Ye et al. 2020) holds it at 3 and gives it no gradient.
        """
        logprobs = torch.tensor([5.0], requires_grad=True)
        loss, _ = policy_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), dual_clip=3.0)
        loss.sum().backward()
        assert logprobs.detach().exp() > 148
        assert loss.tolist() == [3.0]
        assert logprobs.grad.tolist() == [0.0]
