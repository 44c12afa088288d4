"""StarPO's equations at the edges: zeros, ties, rounding, nan outside the masks, freak ratios.

test_step.py compares whole steps of training with the plain loops of slow.py.
"""

import math
import re
from types import SimpleNamespace

import pytest
import slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import starpo
from minragen.more import estimators
from minragen.run import start  # noqa: F401  it adds rows to FILTERS


def close(got, expected, tol=1e-12):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


def one(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


class TestFilter:
    @pytest.mark.parametrize("strategy", starpo.FILTERS)
    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from([0.311, 0.622, 0.777, 1]), st.sampled_from([1e-10, 1e-3, 1.0]),
           st.lists(st.sampled_from([0, 1, 2, 3, 6, 600]), max_size=8).filter(
               lambda scores: max(scores, default=0) > 1))
    def test_it_keeps_the_groups_that_the_slow_loop_keeps(self, strategy, value, scale, scores):
        """Scores of up to 1e-10 count as 0. Shares do not depend on the scale."""
        scores = one(*scores) * scale
        value = math.ceil(3 * value) if strategy == "top_k_abs" else value
        config = SimpleNamespace(filter=strategy, filter_value=value)
        expected = slow.kept_groups(dict(enumerate(scores.tolist())), config)
        kept = starpo.filter_groups(scores, value, strategy)
        assert kept.nonzero()[:, 0].tolist() == sorted(expected)

    def test_where_no_group_differs_those_that_take_shares_of_the_std_keep_nothing(self):
        kept = {name: starpo.filter_groups(torch.zeros(2), 1, name).tolist()
                for name in starpo.FILTERS}
        assert kept == {"none": [True] * 2, "top_p": [False] * 2, "top_p_softmax": [True] * 2,
                        "top_k": [True] * 2, "top_k_abs": [True, False], "min_p": [False] * 2}

    def test_top_k_takes_the_first_of_tied_groups_and_as_many_as_a_percentage_means(self):
        """Two hundred are more than an unstable sort keeps in order; in floats .29 * 200 < 58."""
        kept = starpo.filter_groups(torch.ones(200), 0.29, "top_k")
        assert kept.tolist() == [True] * 58 + [False] * 142

    def test_equal_stds_tie_whatever_their_last_bit(self):
        """Stds of (-.1, 0, 0, 0) and (.9, 1, 1, 1); the first group comes first either way."""
        x, ids = torch.tensor([-0.1, 0, 0, 0, 0.9, 1, 1, 1]), torch.tensor([0] * 4 + [1] * 4)
        for returns in (x, x.flip(0)):
            scores = starpo.group_std(returns, ids)
            assert scores[0] != scores[1]
            assert starpo.filter_groups(scores, 0.5, "top_k").tolist() == [True, False]

    def test_eps_keeps_rounding_from_taking_one_group_too_many(self):
        """One of three equal groups holds a third, but in float32 three times .1 is too large."""
        scores = torch.full((3,), 0.1)
        assert starpo.filter_groups(scores, 1 / 3).tolist() == [True, False, False]
        assert starpo.top_p(scores, 1 / 3, eps=0.0).tolist() == [True, True, False]


class TestGroups:
    def test_equal_returns_leave_exactly_nothing_in_float32(self):
        """Sixteen times .9 has a mean that is not .9. By the order of a sum returns differ in the
        last bit; divided by its std, that had counted fully. Group 0 has no rows."""
        last_bit = torch.tensor([1.0, 1.0 + 2**-23, 1.0, 1.0])
        constant = [torch.full((16,), value) for value in (0.1, 0.9, 123.4)]
        for x in (*constant, last_bit, -1e4 * last_bit):
            ids = torch.ones(len(x), dtype=torch.long)
            for left in (starpo.group_std(x, ids), starpo.rloo_advantages(x, ids),
                         estimators.maxrl_advantages(0 * x, ids),  # no success
                         starpo.group_advantages(x, ids, True),
                         starpo.group_advantages(x, ids, False)):
                assert not left.any(), x
        for x in constant:
            assert not starpo.whiten(x[:, None], x[:, None] > 0).any()


class TestKL:
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


class TestTokens:
    def test_sums_have_the_numbers_worked_out_by_hand_and_are_blind_outside_the_mask(self):
        """One row: observation, two tokens, two observations, three tokens. gamma = 1, lambda = .9.
        Over tokens, from the back: delta = 2 - .5, .1, .1, .6, .1 and
        A = 1.5;  .1 + .9*1.5 = 1.45;  .1 + .9*1.45 = 1.405;  .6 + .9*1.405 = 1.8645;  ...
        Over turns with gamma_turn = .95: A_1 = 2 - .5 = 1.5; delta_0 = .5 + .95*.5 - .2 = .775,
        A_0 = .775 + .95*.9*1.5 = 2.0575. With two levels, the first turn's last token has the
        reward 2.0575 + .2, so before it .1 + .9*2.0575 = 1.95175; the second turn is as over
        tokens. These are the numbers of VAGEN's masked_gae, bi_level_gae and turn_wise_gae.
        """
        ids = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1]])
        nan, of_turns = math.nan, dict(lam=0.9, gamma_turn=0.95)
        rewards = torch.tensor([[nan, 0, 0.5, nan, nan, 0, 0, 2]])
        row = rewards, torch.tensor([[nan, 0.1, 0.2, nan, nan, 0.3, 0.4, 0.5]]), ids >= 0
        for sums, expected in (  # advantages, and returns for a critic
                ([starpo.returns_to_go(rewards, ids >= 0, 0.5)],
                 [[0, 0.375, 0.75, 0, 0, 0.5, 1, 2]]),
                (starpo.masked_gae(*row, lam=0.9), [[0, 1.77805, 1.8645, 0, 0, 1.405, 1.45, 1.5],
                                                    [0, 1.87805, 2.0645, 0, 0, 1.705, 1.85, 2]]),
                (estimators.bi_level_gae(*row, ids, **of_turns),
                 [[0, 1.95175, 2.0575, 0, 0, 1.405, 1.45, 1.5],
                  [0, 2.05175, 2.2575, 0, 0, 1.705, 1.85, 2]]),
                (estimators.turn_gae(*row, ids, **of_turns),
                 [[0, 2.0575, 2.0575, 0, 0, 1.5, 1.5, 1.5], [0, 0, 2.2575, 0, 0, 0, 0, 2]])):
            close(torch.cat([*sums]), expected, tol=1e-6)
            assert sums[0].dtype == torch.float32

    def test_a_missing_mask_cannot_be_noticed_at_gamma_and_lambda_one_but_can_at_99_and_95(self):
        """At RAGEN's default of 1 the deltas telescope: A_t = the rewards from t on - V_t."""
        mask, (rewards, values) = torch.randn(2, 40) > 0, torch.randn(2, 2, 40).double()
        rewards *= mask
        for discounts, equal in (((1.0, 1.0), True), ((0.99, 0.95), False)):
            masked, unmasked = (starpo.masked_gae(rewards, values, m, *discounts)[0][mask]
                                for m in (mask, mask | True))
            assert torch.allclose(masked, unmasked, atol=1e-9 if equal else 0.1) == equal

    def test_whitening_is_blind_outside_the_mask_and_needs_two_entries(self):
        x = one(math.nan, 1, 3, math.nan)
        for mask, expected in [(x > 0, [0, -0.5**0.5, 0.5**0.5, 0]), (x == 1, [0] * 4)]:
            close(starpo.whiten(x[None], mask[None]), [expected], tol=1e-8)


class TestLosses:
    def test_a_freak_token_has_a_finite_loss_and_gradient(self):
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
        for dual_clip in (3.0, 0):
            logprobs = torch.tensor([-1000.0, 1000.0] * 2, requires_grad=True)
            loss, _ = starpo.policy_loss(logprobs, torch.zeros(4), advantages, 0.2, 0.28, dual_clip)
            loss.sum().backward()
            assert loss.isfinite().all() and logprobs.grad.isfinite().all()

    def test_an_impossible_outcome_adds_no_entropy_and_has_a_finite_gradient(self):
        """A token that the tokenizer never uses has the logit -inf."""
        logits = one(0.5, 0.25, 0.25, 0).log().requires_grad_()
        entropy = starpo.entropy(logits.log_softmax(-1))
        entropy.backward()
        close(entropy.detach(), 1.5 * math.log(2))
        assert logits.grad.isfinite().all()

    @pytest.mark.parametrize("mode, expected", [*zip(starpo.AGGREGATIONS, (2, 2, 3, 0.75))])
    def test_an_aggregated_loss_is_blind_outside_the_mask_only(self, mode, expected):
        """Tokens 1, 3 | 2 | none: (1 + 3 + 2) / 3; (2 + 2) / 2, as two rows have tokens; (4 + 2) /
        2; a quarter of that for the 4 tokens that a row may have. Weights are the gradient."""
        x = torch.tensor([[1, 3], [2, math.nan], [math.nan, math.nan]], requires_grad=True)
        weights = starpo.loss_weights(~x.isnan(), mode, horizon=4)
        loss = starpo.aggregate(x, weights)
        assert loss.item() == pytest.approx(expected) and weights.dtype == torch.float32
        assert torch.autograd.grad(loss, x)[0].equal(weights)
        assert starpo.aggregate(x * math.nan, weights).isnan()
        assert not starpo.loss_weights(x < 0, mode).any()


class TestModule:
    def test_a_wrong_argument_is_refused_with_what_was_expected(self):
        x, mask, nan, inf = torch.ones(2), torch.ones(1, 2).bool(), math.nan, math.inf
        for said, function, *arguments in [
                ("got [1.0, -0.5], expected finite stds >= 0", starpo.filter_groups, one(1, -0.5)),
                ("filter top_k: got [1.0, nan], ", starpo.filter_groups, one(1, nan), 0.9, "top_k"),
                ("filter none: got [1.0, inf], ", starpo.filter_groups, one(1, inf), 0.9, "none"),
                ("4, expected more than 0 and at most 1.", starpo.filter_groups, x, 4, "top_k"),
                ("inf, expected a whole number above 0", starpo.filter_groups, x, inf, "top_k_abs"),
                ("got a value of nan, expected more than 0", starpo.filter_groups, x, nan, "min_p"),
                ("got shapes (1, 2), (2,) and (1, 2), ", starpo.masked_gae, mask.float(), x, mask),
                ("(1, 2), expected three equal ones", starpo.masked_gae, x, x, mask),
                ("is not 0 or 1. Episodes must", estimators.maxrl_advantages, x / 2, x.long())]:
            with pytest.raises(ValueError, match=re.escape(said)):
                function(*arguments)
