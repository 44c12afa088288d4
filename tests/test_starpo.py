"""StarPO's equations: each function agrees with a slow twin or with numbers worked out by hand,
also at the edges: exact zeros, rounding, nan outside the masks, freak ratios."""

import ast
import doctest
import functools
import inspect
import math
import statistics
from types import SimpleNamespace

import pytest
import slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import starpo

# The same cases in every run, and no example database left on disk.
cases = settings(max_examples=20, deadline=None, derandomize=True, database=None)


def conversation(rows, padding=0):
    """Turn ids of rows, each a list of (observation tokens, sampled tokens) per turn."""
    rows = [[turn for k, (seen, said) in enumerate(row) for turn in [-1] * seen + [k] * said]
            for row in rows]
    width = max(1, padding + max(len(row) for row in rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4)  # may be none
TURN_IDS = st.builds(conversation, st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 2))
SEEDS = st.integers(0, 2**31)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(shape, seed, n):
    return [normal(shape, seed + i) for i in range(n)]


def thinned(mask, seed):
    """The mask without a sixth of its tokens: turns then cover more than what is masked."""
    return mask & (normal(mask.shape, seed + 99) > -1)


def close(got, expected, tol=1e-12):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


def one(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def row(*numbers):
    return one(*numbers)[None]


def bits(text):
    """'01 1' -> mask of one row; spaces are for the eye."""
    return torch.tensor([[c == "1" for c in text.replace(" ", "")]])


def turns(text):
    """'.0 .11' -> turn ids of one row, a dot where nothing was sampled."""
    return torch.tensor([[-1 if c == "." else int(c) for c in text.replace(" ", "")]])


class TestFilter:
    def test_each_strategy_keeps_the_groups_worked_out_by_hand(self):
        for strategy, value, select, include_zero, scores, kept in [
            ("top_p", 0.6, "largest", False, [4, 3, 2, 1], {0, 1}),  # .59 * 10 = 5.9: 4, then 7
            ("top_p", 0.6, "smallest", False, [4, 3, 2, 1], {1, 2, 3}),  # 1, 3, then 6
            ("top_p", 0.25, "smallest", True, [3, 0, 1], {1, 2}),  # 0, then 1
            ("top_p", 0.6, "largest", False, [4e-3, 3e-3, 2e-3, 1e-3], {0, 1}),  # eps is relative
            ("top_p", 1.0, "largest", False, [0, 1000, 1], {1, 2}),  # 1: all, whatever eps says
            ("top_p_softmax", 0.6, "largest", False, [1, 1, 1], {0, 1}),  # 1/3, then 2/3
            ("top_p_softmax", 0.9, "smallest", False, [10, 1, 0, 0], {1}),  # e^-1 : e^-10
            ("top_p_softmax", 1.0, "largest", False, [0, 1000, 1], {1, 2}),
            ("top_k", 0.5, "largest", False, [0, 2, 0, 0], {1}),  # two groups, one candidate
            ("top_k", 0.5, "smallest", False, [4, 3, 0, 1], {1, 3}),  # half of four, not of three
            ("top_k", 0.5, "largest", True, [0, 2, 0, -1], {0, 1}),  # all are candidates
            ("top_k", 0.5, "largest", False, [0, 0], set()),  # none is
            ("top_k", 0.1, "largest", False, [1, 2, 3, 4], {3}),  # int(.4) = 0, but at least one
            ("top_k_abs", 2.9, "smallest", False, [1, 4, 2, 3], {0, 2}),
            ("min_p", 0.6, "largest", False, [10, 6, 4, 0], {0, 1}),  # >= 6
            ("min_p", 0.5, "smallest", False, [10, 6, 4, 0], {1, 2}),  # <= 4 / .5
            ("top_k", 1.0, "largest", False, [1e-10, 2e-10, -1e-10, -2e-10], {1, 3}),  # 1e-10 is 0
            ("none", 7.0, "largest", False, [0, -2, 0], {0, 1, 2})]:
            got = starpo.filter_groups(one(*scores), value, strategy, select, include_zero)
            assert set(got.nonzero()[:, 0].tolist()) == kept, (strategy, value, select, scores)

    def test_by_default_keeps_the_shortest_prefix_that_holds_89_percent(self):
        assert starpo.filter_groups(one(89.5, 6, 4.5)).tolist() == [True, False, False]
        assert starpo.filter_groups(one(88.5, 5.5, 6)).tolist() == [True, False, True]

    def test_top_k_takes_the_first_of_tied_groups_and_as_many_as_a_percentage_means(self):
        """Two hundred are more than an unstable sort keeps in order; in floats .29 * 200 < 58."""
        for select in ("largest", "smallest"):
            kept = starpo.filter_groups(torch.ones(200), 0.29, "top_k", select)
            assert kept.tolist() == [True] * 58 + [False] * 142

    def test_eps_keeps_rounding_from_taking_one_group_too_many(self):
        """One of three equal groups holds a third, but in float32 three times .1 is too large."""
        scores = torch.full((3,), 0.1)
        assert starpo.filter_groups(scores, 1 / 3).tolist() == [True, False, False]
        assert starpo.filter_groups(scores, 1 / 3, eps=0.0).tolist() == [True, True, False]

    def test_refuses_scores_that_are_not_finite_or_have_no_share(self):
        refused = [("top_p", -0.5, "ones >= 0"), ("min_p", -0.5, "ones >= 0")]
        for strategy in ("none", "top_p", "top_p_softmax", "top_k", "top_k_abs", "min_p"):
            refused += [(strategy, math.nan, "ones"), (strategy, math.inf, "ones")]
        for strategy, bad, expected in refused:
            with pytest.raises(ValueError, match=rf"filter {strategy}: got scores \[1.0, {bad}\], "
                                                 f"expected finite {expected}"):
                starpo.filter_groups(one(1, bad), 0.9, strategy)

    def test_refuses_a_value_outside_its_range(self):
        for strategy, value, expected in [
            ("top_p", 0.01, "more than 0.01 and at most 1."),  # needs no group at all
            ("top_p", math.nan, "more than 0.01 and at most 1."),
            ("top_p_softmax", 0.0, "more than 0 and at most 1."),
            ("top_k", 4, "more than 0 and at most 1."),
            ("top_k_abs", 0, "more than 0."),
            ("top_k_abs", math.inf, "more than 0."),
            ("min_p", 2.0, "more than 0 and at most 1.")]:
            with pytest.raises(ValueError, match=f"{strategy}: got a value of {value}, "
                                                 f"expected {expected}$"):
                starpo.filter_groups(torch.ones(2), value, strategy)


# Six episodes of three groups, two of them with two rows. The ids have gaps, as after a filter.
EPISODES = torch.tensor([4, 0, 7, 0, 9, 9, 2, 3])
GROUPS = torch.tensor([0, 0, 0, 0, 2, 2, 3, 3])
RETURNS = one(0, 4, 2, 4, 5, 5, 1, 3)
MASK = normal((8, 5), 0) > 0


def normalised(method):
    return lambda x, groups, mask, ids: (
        starpo.normalise_rewards(x, groups, method, ids)[:, None] * mask)


def scored(statistic):
    return lambda x, groups, mask, ids: (
        starpo.group_scores(x, groups, statistic, ids)[groups][:, None] * mask)


# Functions of (returns, group_ids, mask, episode_ids), and what they give each row. The groups'
# means are 2, 5 and 2, their sample standard deviations 2, 0 and sqrt(2).
ROOT_HALF = 0.5**0.5
LESS_MEAN, BY_STD = [-2, 2, 0, 2, 0, 0, -1, 1], [-1, 1, 0, 1, 0, 0, -ROOT_HALF, ROOT_HALF]
OF_EPISODES = {
    "group_std": (scored("std"), [2, 2, 2, 2, 0, 0, 2 * ROOT_HALF, 2 * ROOT_HALF]),
    "group_mean": (scored("mean"), [2, 2, 2, 2, 5, 5, 2, 2]),
    "reward": (normalised("identity"), [0, 4, 2, 4, 5, 5, 1, 3]),
    "reward_less_mean": (normalised("mean"), LESS_MEAN),
    "reward_by_std": (normalised("mean_std"), BY_STD),
    "reward_clipped": (normalised("asym_clip"), BY_STD),
    "grpo": (lambda x, g, m, ids: starpo.group_advantages(x, g, m, True, ids), BY_STD),
    "dr_grpo": (lambda x, g, m, ids: starpo.group_advantages(x, g, m, False, ids), LESS_MEAN),
    "rloo": (starpo.rloo_advantages, [-3, 3, 0, 3, 0, 0, -2, 2]),  # the others' means: 3, 1, ...
    "soft_reweight": (lambda x, g, mask, ids: starpo.soft_reweight(mask.to(x.dtype), x, g, ids),
                      [1, 1, 1, 1, 0, 0, ROOT_HALF, ROOT_HALF]),
    "length_weight": (  # the mean length is 15 / 6; a length of 0 counts as 1
        lambda x, g, mask, ids: starpo.length_weight(mask.to(x.dtype), x, ids),
        [2.5, 2.5 / 4, 2.5 / 2, 2.5 / 4, 0.5, 0.5, 2.5, 2.5 / 3]),
}


class TestGroups:
    @pytest.mark.parametrize("name", OF_EPISODES)
    def test_an_episode_counts_once_however_many_rows_it_has(self, name):
        function, numbers = OF_EPISODES[name]
        expected = one(*numbers)[:, None] * MASK
        close(function(RETURNS, GROUPS, MASK, EPISODES), expected, tol=1e-6)
        first = [0, 1, 2, 4, 6, 7]  # without ids every row is an episode
        close(function(RETURNS[first], GROUPS[first], MASK[first], None), expected[first], 1e-6)

    def test_a_group_without_rows_scores_0_and_by_default_a_reward_stays_as_it_is(self):
        assert starpo.group_scores(RETURNS, GROUPS)[1] == 0
        assert starpo.group_scores(RETURNS, GROUPS, "mean")[1] == 0
        assert starpo.normalise_rewards(RETURNS, GROUPS).equal(RETURNS)

    def test_asym_clip_ends_at_minus_one_and_three(self):
        """One 1 among sixteen: (1 - 1/16) / (1/4) = 3.75."""
        x, ids = one(1, *[0] * 15), torch.zeros(16, dtype=torch.long)
        assert starpo.normalise_rewards(x, ids, "asym_clip")[0] == 3
        assert starpo.normalise_rewards(-x, ids, "asym_clip")[0] == -1

    def test_a_std_of_rounding_is_not_blown_up_by_normalisation(self):
        x, ids = one(0, 1e-7), torch.tensor([0, 0])
        assert starpo.normalise_rewards(x, ids, "mean_std").tolist() == [0, 0]
        close(starpo.normalise_rewards(x, ids, "mean"), [-5e-8, 5e-8])
        assert starpo.group_advantages(x, ids, bits("11")).abs().max() < 0.1

    def test_equal_returns_leave_exactly_nothing_in_float32(self):
        """Sixteen times .9 has a float32 mean that is not .9."""
        of_distances = OF_EPISODES.keys() - {"group_mean", "reward", "length_weight"}
        ids, mask = torch.zeros(16, dtype=torch.long), torch.ones(16, 1, dtype=torch.bool)
        for value in (0.1, 0.9, 123.4):
            x = torch.full((16,), value)
            for name in of_distances:
                assert not OF_EPISODES[name][0](x, ids, mask, None).any(), (name, value)
            assert not starpo.whiten(x[:, None], mask).any(), value

    def test_loss_scale_is_one_the_share_of_kept_groups_or_its_root(self):
        kept = torch.tensor([False, True, False, False])
        scales = starpo.loss_scale(kept, "linear"), starpo.loss_scale(kept, "sqrt")
        assert starpo.loss_scale(kept) == 1.0 and scales == (0.25, 0.5)


class TestCredit:
    """Which row and which token gets which part of an episode's reward."""

    def test_episode_sums_add_up_the_rows_of_an_episode(self):
        sums = starpo.episode_sums(one(1, 2, 3, 4, 5, 6, 7, 8), EPISODES)
        assert sums.tolist() == [1, 6, 3, 6, 11, 11, 7, 8]

    def test_last_token_rewards_stand_on_the_last_sampled_token(self):
        mask = torch.cat([bits("0110 10"), bits("0000 00")])
        expected = torch.cat([row(0, 0, 0, 0, 3, 0), row(0, 0, 0, 0, 0, 0)])
        assert starpo.last_token_rewards(one(3, 5), mask).equal(expected)

    def test_turn_returns_are_the_discounted_rewards_of_this_turn_and_later_ones(self):
        """Rewards 1, 0, 2, in another order; the other episode has one turn."""
        rows = one(2, 5, 1, 0), torch.tensor([1, 0, 1, 1]), torch.tensor([2, 0, 0, 1])
        assert starpo.turn_returns(*rows).tolist() == [2, 5, 3, 2]
        assert starpo.turn_returns(*rows, 0.5).tolist() == [2, 5, 1.5, 1]

    def test_overlong_penalty_stands_on_the_last_token_of_a_turn(self):
        """Turns of 5, 2 and 3 tokens; free are 2 of 4, then none of 4."""
        turn_ids = turns(".00000 .11 222.")
        close(starpo.overlong_penalty(turn_ids, 4, 0.5),
              row(0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, -0.5, 0))
        close(starpo.overlong_penalty(turn_ids, 4, 1.0),
              row(0, 0, 0, 0, 0, -1, 0, 0, -0.5, 0, 0, -0.75, 0))
        assert not starpo.overlong_penalty(turn_ids, 4, 0.0).any()


class TestKL:
    def test_the_estimates_are_those_worked_out_by_hand(self):
        """The reference finds one token twice as likely, and one half as likely."""
        log2 = math.log(2)
        logprobs, ref = one(-3, -3), one(-3 + log2, -3 - log2)
        for name, expected in [("k1", [-log2, log2]), ("k2", [log2**2 / 2, log2**2 / 2]),
                               ("k3", [1 - log2, log2 - 0.5])]:
            close(starpo.kl_estimate(logprobs, ref, name), expected)
        close(starpo.kl_estimate(logprobs, ref), expected)  # k3 by default

    def test_k3_of_a_small_drift_is_d_squared_over_two_in_float32(self):
        """What approx_kl measures after one small update: exp(d) - d - 1 would cancel."""
        drift = torch.linspace(-1e-3, 1e-3, 1001)
        estimate = starpo.kl_estimate(drift, torch.zeros_like(drift))
        assert (estimate >= 0).all()
        close(estimate.double().mean(), (drift.double() ** 2 / 2).mean(), tol=1e-2)

    def test_a_freak_token_has_a_finite_estimate_and_is_still_pulled_back(self):
        """d k2 = log pi - log ref, d k3 = 1 - exp(d): the KL is needed most where ref is tiny."""
        for name, slope in [("k2", 1000.0), ("k3", 1.0)]:
            logprobs = torch.tensor([1000.0, -1000.0], requires_grad=True)
            estimate = starpo.kl_estimate(logprobs, torch.zeros(2), name)
            estimate.sum().backward()
            assert estimate.isfinite().all() and logprobs.grad.isfinite().all(), name
            assert logprobs.grad[0] == slope, name

    def test_the_adaptive_coefficient_grows_by_the_relative_error_but_at_most_a_fifth(self):
        for kl, error in [(0.33, 0.1), (0.27, -0.1), (3.0, 0.2), (0.0, -0.2)]:
            got = starpo.adapt_kl_coef(0.5, kl, 0.3, 64, 1000)
            assert got == pytest.approx(0.5 + 0.5 * error * 64 / 1000), kl


def slow_gae(name, rewards, values, mask, turn_ids, gamma, lam, gamma_turn):
    """Advantages and returns of slow.py, whose rows see masked entries only: (2, B, T)."""
    config = SimpleNamespace(advantages=name, gamma=gamma, lam=lam, gamma_turn=gamma_turn)
    results = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for b, flags in enumerate(mask):
        steps = flags.nonzero()[:, 0].tolist()
        turns = [[t for t in steps if turn_ids[b, t] == k] for k in turn_ids[b, steps].unique()]
        row = SimpleNamespace(rewards=rewards[b].double(), values=values[b].double(), steps=steps,
                              valued=steps, turns=turns, advantages=results[0, b])
        slow.advantages_with_critic(row, config)
        results[0, b], results[1, b, row.valued] = row.advantages, row.returns[row.valued]
    return results


# Functions of (rewards, values, mask, turn_ids, gamma, lam, gamma_turn), and their slow twins.
OF_TOKENS = {
    "reinforce": (lambda r, v, m, ids, gamma, *_: (starpo.reinforce_advantages(r, m, gamma),),
                  lambda r, v, m, ids, gamma, *_: slow_gae(  # GAE without values is the return
                      "gae", r, torch.zeros_like(v), m, ids, gamma, 1.0, 1.0)[:1]),
    "masked_gae": (lambda r, v, m, ids, gamma, lam, _: starpo.masked_gae(r, v, m, gamma, lam),
                   functools.partial(slow_gae, "gae")),
    "bi_level_gae": (starpo.bi_level_gae, functools.partial(slow_gae, "bi_level_gae")),
    "turn_gae": (lambda r, v, m, ids, _, *discounts: starpo.turn_gae(r, v, m, ids, *discounts),
                 functools.partial(slow_gae, "turn_gae")),
}


class TestTokens:
    @pytest.mark.parametrize("name", OF_TOKENS)
    @settings(cases, max_examples=40)
    @given(TURN_IDS, SEEDS, DISCOUNTS, DISCOUNTS, DISCOUNTS)
    def test_each_equals_its_slow_loop_and_is_blind_outside_the_mask(
            self, name, turn_ids, seed, gamma, lam, gamma_turn):
        mask = thinned(turn_ids >= 0, seed)
        rewards, values = (torch.where(mask, x, math.nan) for x in normals(mask.shape, seed, 2))
        got, twin = (function(rewards, values, mask, turn_ids, gamma, lam, gamma_turn)
                     for function in OF_TOKENS[name])
        got = torch.stack(got)
        close(got, twin)
        assert (got[:, ~mask] == 0).all()

    def test_a_long_row_in_float32_stays_within_rounding_of_the_slow_loop(self):
        """The recursion is computed by doubling: 63 to 65 tokens are around a power of two."""
        for length in (63, 64, 65, 400):
            rewards, values = (x.float() for x in normals((1, length), 0, 2))
            mask = normal((1, length), 2) > -0.5
            got = torch.stack(starpo.masked_gae(rewards, values, mask, 0.99, 0.95))
            twin = slow_gae("gae", rewards, values, mask, mask.long(), 0.99, 0.95, 1.0)
            close(got, twin, tol=2e-5)

    def test_a_missing_mask_cannot_be_noticed_at_gamma_and_lambda_one_but_can_at_99_and_95(self):
        """At RAGEN's default of 1 the deltas telescope: A_t = the rewards from t on - V_t."""
        mask = conversation([[(3, 5), (6, 4), (2, 5)], [(4, 3), (9, 6)]], padding=2) >= 0
        rewards, values = normals(mask.shape, 0, 2)
        rewards *= mask

        def gap(gamma, lam):
            unmasked, _ = starpo.masked_gae(rewards, values, mask | True, gamma, lam)
            masked, _ = starpo.masked_gae(rewards, values, mask, gamma, lam)
            return (masked - unmasked)[mask].abs().max()

        to_come = starpo.reinforce_advantages(rewards, mask)
        close(starpo.masked_gae(rewards, values, mask)[0], to_come - values * mask)
        assert gap(1.0, 1.0) < 1e-12 and gap(0.99, 0.95) > 0.1

    def test_a_masked_token_outside_of_turns_ends_none(self):
        assert starpo.turn_ends(turns(".0"), bits("11")).equal(bits("01"))


class TestGAE:
    """One row for all three: observation, two tokens, two observations, three tokens."""

    MASK = bits("0 11 00 111")
    TURN_IDS = turns(". 00 .. 111")
    REWARDS = row(0, 0, 0.5, 0, 0, 0, 0, 2)
    VALUES = row(9, 0.1, 0.2, 9, 9, 0.3, 0.4, 0.5)

    def test_over_tokens_it_gives_the_numbers_worked_out_by_hand(self):
        """gamma = 1, lambda = .9. From the back: delta = 2 - .5, .1, .1, .6, .1 and
        A = 1.5;  .1 + .9*1.5 = 1.45;  .1 + .9*1.45 = 1.405;  .6 + .9*1.405 = 1.8645;
        .1 + .9*1.8645. The same row and numbers as VAGEN's masked_gae.
        """
        advantages, returns = starpo.masked_gae(self.REWARDS, self.VALUES, self.MASK, lam=0.9)
        close(advantages, row(0, 1.77805, 1.8645, 0, 0, 1.405, 1.45, 1.5))
        close(returns, row(0, 1.87805, 2.0645, 0, 0, 1.705, 1.85, 2.0))

    def test_over_turns_it_gives_the_numbers_worked_out_by_hand(self):
        """gamma_turn = .95, gamma = 1, lambda = .9. The turns, from the back: A_1 = 2 - .5 = 1.5;
        delta_0 = .5 + .95*.5 - .2 = .775, A_0 = .775 + .95*.9*1.5 = 2.0575. With two levels, the
        first turn's last token has the reward 2.0575 + .2, so before it .1 + .9*2.0575 = 1.95175;
        the second turn is as in masked_gae. The numbers of VAGEN's bi_level_gae and turn_wise_gae.
        """
        given = self.REWARDS, self.VALUES, self.MASK, self.TURN_IDS
        advantages, returns = starpo.bi_level_gae(*given, lam=0.9)
        close(advantages, row(0, 1.95175, 2.0575, 0, 0, 1.405, 1.45, 1.5))
        close(returns, row(0, 2.05175, 2.2575, 0, 0, 1.705, 1.85, 2.0))
        advantages, returns = starpo.turn_gae(*given, lam=0.9, gamma_turn=0.95)
        close(advantages, row(0, 2.0575, 2.0575, 0, 0, 1.5, 1.5, 1.5))
        close(returns, row(0, 0, 2.2575, 0, 0, 0, 0, 2.0))
        bi_level, _ = starpo.bi_level_gae(*given)  # by default .775 + .95*1.5 = 2.2
        close(bi_level, row(0, 2.3, 2.2, 0, 0, 1.7, 1.6, 1.5))
        by_turn, _ = starpo.turn_gae(*given)  # by default .5 + 2 - .2
        close(by_turn, row(0, 2.3, 2.3, 0, 0, 1.5, 1.5, 1.5))


def slow_whiten(x, mask, measured_mask=None, eps=1e-8):
    measured = x[mask if measured_mask is None else measured_mask].tolist()
    if len(measured) < 2:
        return torch.zeros_like(x)
    mean, std = statistics.fmean(measured), math.sqrt(statistics.variance(measured) + eps)
    return torch.where(mask, (x - mean) / std, 0.0)


class TestWhiten:
    @cases
    @given(TURN_IDS, SEEDS, st.sampled_from([1e-3, 1.0, 50.0]))
    def test_equals_the_slow_definition_and_is_blind_outside_the_mask(self, turn_ids, seed, scale):
        """Measured on all tokens, or on turn ends so that a long turn counts once."""
        mask = thinned(turn_ids >= 0, seed)
        x = torch.where(mask, normal(mask.shape, seed) * scale + 3, math.nan)
        for measured in (None, starpo.turn_ends(turn_ids, mask)):
            white = starpo.whiten(x, mask, measured)
            close(white, slow_whiten(x, mask, measured), tol=1e-9)
            assert (white[~mask] == 0).all()


class TestLosses:
    def test_policy_losses_gradients_and_flags_are_those_worked_out_by_hand(self):
        table = [  # ratio, advantage, loss, d loss / d logprob, clipped
            (0.5, 1.0, -0.5, -0.5, False),  # a good token that became unlikely
            (1.25, 2.0, -2.5, -2.5, False),  # a good token inside the upper bound of 1.28
            (2.0, 2.0, -2.56, 0.0, True),  # a good token beyond it
            (0.5, -1.0, 0.8, 0.0, True),  # a bad token beyond the lower bound of .8
            (0.9, -2.0, 1.8, 1.8, False),  # a bad token inside it
            (2.0, -1.0, 2.0, 2.0, False),  # a bad token that became likely
            (4.0, -2.0, 6.0, 0.0, False),  # a bad token beyond the dual clip of 3
            (2.0, 0.0, 0.0, 0.0, False),  # a token without advantage
        ]
        ratio, advantage, expected, slope, flag = (list(column) for column in zip(*table))
        logprobs = (one(*ratio).log() - 1.5).requires_grad_()
        loss, clipped = starpo.policy_loss(logprobs, torch.full_like(logprobs, -1.5),
                                           one(*advantage))
        loss.sum().backward()
        close(loss.detach(), expected)
        close(logprobs.grad, slope)
        assert clipped.tolist() == flag
        without, _ = starpo.policy_loss(logprobs, logprobs - math.log(4), -one(*[2] * 8),
                                        dual_clip=0)
        close(without.detach(), [8.0] * 8)

    def test_a_freak_token_has_a_finite_loss_and_gradient(self):
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
        for dual_clip in (3.0, 0):
            logprobs = torch.tensor([-1000.0, 1000.0] * 2, requires_grad=True)
            loss, _ = starpo.policy_loss(logprobs, torch.zeros(4), advantages, dual_clip=dual_clip)
            loss.sum().backward()
            assert loss.isfinite().all() and logprobs.grad.isfinite().all()

    def test_the_ratio_that_a_row_shares_is_the_geometric_mean(self):
        """GSPO. Ratios 2 and 1 of the two masked tokens have the mean sqrt(2), above 1.28. The
        other row has no masked token; outside the mask all is nan."""
        mask, nan = torch.cat([bits("110"), bits("000")]), math.nan
        logprobs = torch.cat([row(math.log(2), 0, nan), row(nan, nan, nan)])
        old = torch.zeros_like(logprobs)
        good, clipped = starpo.policy_loss(logprobs, old, mask.double(), sequence_mask=mask)
        close(good, [[-1.28, -1.28, 0], [0, 0, 0]])
        assert clipped.equal(mask)
        logprobs.requires_grad_()
        bad, clipped = starpo.policy_loss(logprobs, old, mask * row(-1, -2, 0), sequence_mask=mask)
        bad.sum().backward()
        close(bad.detach(), [[2**0.5, 2 * 2**0.5, 0], [0, 0, 0]])
        half = 3 / 2**0.5  # each token gets half of the row's 3 sqrt(2)
        close(logprobs.grad, [[half, half, 0], [0, 0, 0]])
        assert not clipped.any()

    def test_value_losses_and_gradients_are_those_worked_out_by_hand(self):
        """V_old = 1, R = 3, value_clip = .5: inside, clipped towards the return, away from it."""
        values = one(1.25, 2.0, 0.0).requires_grad_()
        loss = starpo.value_loss(values, torch.ones(3), torch.full((3,), 3.0))
        loss.sum().backward()
        close(loss.detach(), [0.5 * 1.75**2, 0.5 * 1.5**2, 0.5 * 3.0**2])
        close(values.grad, [-1.75, 0.0, -3.0])

    def test_an_impossible_outcome_adds_no_entropy_and_has_a_finite_gradient(self):
        """A token that the tokenizer never uses has the logit -inf."""
        logits = one(0.5, 0.25, 0.25, 0).log().requires_grad_()
        entropy = starpo.entropy(logits.log_softmax(-1))
        entropy.backward()
        close(entropy.detach(), 1.5 * math.log(2))
        assert logits.grad.isfinite().all()
        assert torch.autograd.gradcheck(lambda x: starpo.entropy(x.log_softmax(-1)),
                                        (normal((2, 5), 0).requires_grad_(),))


class TestAggregate:
    MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

    def test_each_mode_gives_the_loss_worked_out_by_hand_and_shows_nan_on_the_mask(self):
        """Tokens 1, 3 | 2 | none: (1 + 3 + 2) / 3; (2 + 2) / 2, as two rows have tokens; (4 + 2) /
        2; a quarter of that for the 4 tokens that a row may have. Weights are the gradient."""
        nan = math.nan
        x = torch.tensor([[1.0, 3.0, nan], [nan, 2.0, nan], [nan, nan, nan]], requires_grad=True)
        mask = torch.cat([bits("110"), bits("010"), bits("000")])
        for mode, loss in zip(self.MODES, [2.0, 2.0, 3.0, 0.75]):
            weights = starpo.loss_weights(mask, mode, horizon=4)
            total = starpo.aggregate(x, weights)
            parts = [starpo.aggregate(*pair) for pair in zip(x.split(1), weights.split(1))]
            assert total.item() == pytest.approx(loss, abs=1e-6), mode
            assert sum(parts).item() == pytest.approx(loss, abs=1e-6), mode
            assert torch.autograd.grad(total, x)[0].equal(weights), mode
            assert weights.dtype == torch.float32, mode
            assert not starpo.loss_weights(bits("00"), mode).any(), mode
        assert starpo.aggregate(x, starpo.loss_weights(mask)) == 2.0
        assert starpo.aggregate(x, starpo.loss_weights(mask, self.MODES[3])) == 3.0
        assert starpo.aggregate(row(1, math.nan), starpo.loss_weights(bits("11"))).isnan()


class TestModule:
    def test_a_wrong_argument_is_refused_with_what_was_expected(self):
        x, ids, mask = torch.ones(2), torch.zeros(2, dtype=torch.long), bits("11")
        for function, arguments, message in [
            (starpo.filter_groups, (x, 0.9, "topp"),
             "unknown filter 'topp': expected one of none, top_p, "),
            (starpo.filter_groups, (x, 0.9, "none", "best"),
             "unknown select 'best': expected one of largest, smallest"),
            (starpo.group_scores, (x, ids, "median"), "'median': expected one of std, mean"),
            (starpo.normalise_rewards, (x, ids, "Mean"),
             "normalisation 'Mean': expected one of identity, mean, mean_std, asym_clip"),
            (starpo.kl_estimate, (x, x, "K3"),
             "unknown kl_estimator 'K3': expected one of k1, k2, k3"),
            (starpo.masked_gae, (mask.float(), x, mask), r"shapes \(1, 2\), \(2,\) and \(1, 2\)"),
            (starpo.masked_gae, (x, x, mask), "expected three equal ones"),
            (starpo.loss_scale, (mask, "root"), "'root': expected one of none, linear, sqrt"),
            (starpo.loss_weights, (mask, "mean"),
             "'mean': expected one of token-mean, seq-mean-token-mean, "),
            (starpo.policy_loss, (x, x, x, 0.2, 0.2, 1.0), "dual_clip=1.0, expected more than 1"),
            (starpo.policy_loss, (x, x, x, 0.2, 0.2, -3), "dual_clip=-3, expected more than 1")]:
            with pytest.raises(ValueError, match=message):
                function(*arguments)

    def test_inputs_are_never_written_to_and_float32_stays_float32(self):
        turn_ids = torch.cat([turns(".00 1"), turns("..01")])
        x, y, z = (v.float() for v in normals((2, 4), 0, 3))
        mask, group, numbers = turn_ids >= 0, torch.tensor([0, 0]), torch.tensor([1, 0])
        returns = x[:, 0]  # a view: what is written to it is seen in x
        calls = [
            (starpo.filter_groups, x[0].abs()), (starpo.episode_sums, returns, group),
            (starpo.last_token_rewards, returns, mask), (starpo.whiten, x, mask),
            (starpo.turn_returns, returns, group, numbers, 0.9), (starpo.entropy, x),
            (starpo.policy_loss, x, y, z, 0.2, 0.28, 3.0, mask), (starpo.value_loss, x, y, z),
            (starpo.kl_estimate, x, y), (starpo.aggregate, x, starpo.loss_weights(mask)),
            *((fast, returns, group, mask, numbers) for fast, _ in OF_EPISODES.values()),
            *((fast, x, y, mask, turn_ids, 0.9, 0.8, 0.7) for fast, _ in OF_TOKENS.values())]
        inputs = x, y, z, mask, turn_ids, group, numbers
        before = [tensor.clone() for tensor in inputs]
        for function, *arguments in calls:
            result = function(*arguments)
            assert all(a.equal(b) for a, b in zip(inputs, before)), function
            for tensor in result if isinstance(result, tuple) else (result,):
                assert tensor.dtype in (torch.float32, torch.bool), function

    def test_examples_in_the_docstrings_are_true(self):
        result = doctest.testmod(starpo)
        assert result.attempted > 0 and result.failed == 0

    def test_the_only_loop_is_the_doubling_of_the_recursion(self):
        """Ten passes for a thousand tokens. A loop over tokens or rows costs seconds a step."""
        loops = (ast.For, ast.While, ast.comprehension)
        tree = ast.parse(inspect.getsource(starpo))
        found = [(part.name, type(node)) for part in tree.body if hasattr(part, "name")
                 for node in ast.walk(part) if isinstance(node, loops)]
        assert found == [("_from_the_end", ast.While)]
