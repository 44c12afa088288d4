"""StarPO's equations at the edges: zeros, ties, rounding, nan outside the masks, freak ratios.

test_step.py compares whole steps of training with the plain loops of slow.py.
"""

import math
from types import SimpleNamespace

import pytest
import slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import starpo
from minragen.more import estimators
from minragen.run import start  # noqa: F401  it adds rows to FILTERS
from minragen.trajectory import Batch


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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

    def test_equal_spreads_tie_whatever_their_last_bit(self):
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

    def test_refuses_scores_that_are_not_finite_or_negative(self):
        for strategy, bad in [("top_p", -0.5), ("top_k", math.nan), ("none", math.inf)]:
            with pytest.raises(ValueError, match=rf"filter {strategy}: got \[1.0, {bad}\], "
                                                 f"expected finite stds >= 0"):
                starpo.filter_groups(one(1, bad), 0.9, strategy)

    def test_refuses_a_value_outside_its_range(self):
        for strategy, value, expected in [
            ("top_p", 0.01, "more than 0.01 and at most 1."),  # needs no group at all
            ("top_k", 4, "more than 0 and at most 1."),
            ("top_k_abs", math.inf, "a whole number above 0, of groups."),
            ("top_k_abs", 2.5, "a whole number above 0, of groups."),
            ("min_p", math.nan, "more than 0 and at most 1.")]:
            with pytest.raises(ValueError, match=f"{strategy}: got a value of {value}, "
                                                 f"expected {expected}$"):
                starpo.filter_groups(torch.ones(2), value, strategy)


class TestGroups:
    def test_a_group_without_rows_scores_0(self):
        assert starpo.group_std(one(0, 4, 1), torch.tensor([0, 0, 2]))[1] == 0

    def test_a_std_of_rounding_is_not_blown_up_by_normalisation(self):
        x, ids = one(0, 1e-7), torch.tensor([0, 0])
        assert starpo.group_advantages(x, ids).abs().max() < 0.1

    def test_equal_returns_leave_exactly_nothing_in_float32(self):
        """Sixteen times .9 has a float32 mean that is not .9."""
        ids, mask = torch.zeros(16, dtype=torch.long), torch.ones(16, 1, dtype=torch.bool)
        for value in (0.1, 0.9, 123.4):
            x = torch.full((16,), value)
            for left in (starpo.group_std(x, ids),
                         starpo.group_advantages(x, ids, True),
                         starpo.group_advantages(x, ids, False),
                         starpo.rloo_advantages(x, ids),
                         starpo.whiten(x[:, None], mask)):
                assert not left.any(), value

    def test_returns_that_differ_by_the_order_of_a_sum_are_equal(self):
        """One turn of a state differs by its last bit; divided by its std it had counted fully."""
        x, zero = torch.tensor([1.0, 1.0 + 2**-23, 1.0, 1.0]), torch.zeros(4, dtype=torch.long)
        for returns, ids in ((x, zero), (-1e4 * x, zero + 1)):
            assert not starpo.group_advantages(returns, ids).any()
            assert not starpo.rloo_advantages(returns, ids).any()
            assert not starpo.group_std(returns, ids).any()
            assert not estimators.gigpo_advantages(
                batch_of(returns[:, None], ids, zero[:, None], zero[:, None])).any()

    def test_an_overlong_penalty_stands_on_the_last_token_of_a_turn(self):
        """Turns of 5, 2 and 3 tokens, of which 2 of 4 are free, then none, then all."""
        for share, (first, second, third) in [(0.5, (-1, 0, -0.5)), (1.0, (-1, -0.5, -0.75)),
                                              (0.0, (0, 0, 0))]:
            expected = row(0, 0, 0, 0, 0, first, 0, 0, second, 0, 0, third, 0)
            close(starpo.overlong_penalty(turns(".00000 .11 222."), 4, share), expected)


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


def batch_of(rewards, group_ids, turn_ids, state_ids):
    """A Batch whose rows are episodes and whose tokens are all sampled."""
    rows, there = torch.arange(len(rewards)), turn_ids >= 0
    return Batch(turn_ids, there, there, turn_ids, rewards, rewards, group_ids, rows,
                 rewards.sum(dim=1), state_ids, ~there, scores=rewards.sum(dim=1))


def discounted(function):
    return lambda rewards, values, mask, turn_ids: function(
        rewards, values, mask, turn_ids, lam=0.9, gamma_turn=0.95)


# One row: observation, two tokens, two observations, three tokens. Functions of (rewards, values,
# mask, turn_ids), and what they give: advantages, and returns for a critic.
TURN_IDS, NAN = turns(". 00 .. 111"), math.nan
ROW = (torch.tensor([[NAN, 0, 0.5, NAN, NAN, 0, 0, 2]]),
       torch.tensor([[NAN, 0.1, 0.2, NAN, NAN, 0.3, 0.4, 0.5]]), TURN_IDS >= 0, TURN_IDS)
OF_TOKENS = {
    "reinforce": (lambda r, v, mask, ids: (starpo.returns_to_go(r, mask, 0.5),),
                  [[0, 0.375, 0.75, 0, 0, 0.5, 1, 2]]),
    "masked_gae": (lambda r, v, mask, ids: starpo.masked_gae(r, v, mask, lam=0.9),
                   [[0, 1.77805, 1.8645, 0, 0, 1.405, 1.45, 1.5],
                    [0, 1.87805, 2.0645, 0, 0, 1.705, 1.85, 2.0]]),
    "bi_level_gae": (discounted(estimators.bi_level_gae),
                     [[0, 1.95175, 2.0575, 0, 0, 1.405, 1.45, 1.5],
                      [0, 2.05175, 2.2575, 0, 0, 1.705, 1.85, 2.0]]),
    "turn_gae": (discounted(estimators.turn_gae), [[0, 2.0575, 2.0575, 0, 0, 1.5, 1.5, 1.5],
                                               [0, 0, 2.2575, 0, 0, 0, 0, 2.0]]),
}


class TestGroupAdvantages:
    def test_gigpo_compares_turns_in_the_same_state_at_whatever_turn(self):
        """Two members of a group, three turns each, of one token. They begin in state 0. The first
        goes by 1 and 2 and fails; the second reaches 2 a turn sooner, and 1 after it, and earns 1.
        By hand, without stds, gamma .5. Episodes: -.5 and .5. Returns from each turn on:
        0 0 0 and .25 .5 1. State 0: 0 against .25, so -+.125; state 1, met at turn 1 by the first
        and at turn 2 by the second: 0 against 1, so -+.5; state 2: 0 against .5, so -+.25."""
        turn_ids = torch.arange(3).expand(2, 3)
        states, rewards = torch.tensor([[0, 1, 2], [0, 2, 1]]), torch.zeros(2, 3).double()
        rewards[1, 2] = 1.0
        batch = batch_of(rewards, torch.zeros(2, dtype=torch.long), turn_ids, states)
        got = estimators.gigpo_advantages(batch, gamma=0.5, by_std=False)
        close(got, [[-0.625, -1.0, -0.75], [0.625, 0.75, 1.0]])

    @pytest.mark.parametrize(("by_std", "members", "least_std", "share", "expected"), [
        (False, 8, 0.0, 0.5, 0.0328), (True, 8, 0.0, 0.5, -0.0454), (True, 8, 0.1, 0.5, 0.1017),
        (True, 16, 0.0, 0.5, 0.0505), (True, 16, 0.0, 0.3, -0.0005), (True, 16, 0.0, 0.2, -0.0417)])
    def test_in_small_groups_division_by_the_std_favours_the_arm_that_mostly_pays(
            self, by_std, members, least_std, share, expected):
        """The mean, over all groups, of what GRPO adds to the logit of the better arm: it pays 1 in
        a quarter of the cases, the other arm always 0.1; `share` of the members choose it. With a
        filter the groups that it drops add 0."""
        def chance(k, n, p):
            return math.comb(n, k) * p**k * (1 - p) ** (n - k)

        total, member = 0.0, torch.arange(members)
        for better in range(members + 1):
            chosen = (member < better).double()
            for paid in range(better + 1):
                returns = torch.where(member < paid, 1.0, 0.1 * (1 - chosen))
                advantages = starpo.group_advantages(returns, 0 * member, by_std)
                if returns.std() >= least_std:
                    total += (chance(better, members, share) * chance(paid, better, 0.25)
                              * float((advantages * (chosen - 0.5)).mean()))
        assert total == pytest.approx(expected, abs=1e-4)

    def test_maxrl_weights_a_group_by_one_over_its_success_and_refuses_other_rewards(self):
        """The mean over a group of A times the gradient of log p is that of log(success rate)."""
        ids = torch.tensor([0, 0, 0, 1, 1, 1])
        close(estimators.maxrl_advantages(one(1, 0, 0, 0, 0, 0), ids), [2, -1, -1, 0, 0, 0])
        with pytest.raises(ValueError, match="returns other than 0 and 1. End an"):
            estimators.maxrl_advantages(one(1, 0, 0.5, 0, 0, 0), ids)


class TestTokens:
    @pytest.mark.parametrize("name", OF_TOKENS)
    def test_each_gives_the_numbers_worked_out_by_hand_and_is_blind_outside_the_mask(self, name):
        """gamma = 1, lambda = .9. Over tokens, from the back: delta = 2 - .5, .1, .1, .6, .1 and
        A = 1.5;  .1 + .9*1.5 = 1.45;  .1 + .9*1.45 = 1.405;  .6 + .9*1.405 = 1.8645;  ...
        Over turns with gamma_turn = .95: A_1 = 2 - .5 = 1.5; delta_0 = .5 + .95*.5 - .2 = .775,
        A_0 = .775 + .95*.9*1.5 = 2.0575. With two levels, the first turn's last token has the
        reward 2.0575 + .2, so before it .1 + .9*2.0575 = 1.95175; the second turn is as over
        tokens. These are the numbers of VAGEN's masked_gae, bi_level_gae and turn_wise_gae.
        """
        function, expected = OF_TOKENS[name]
        results = torch.cat(function(*ROW))
        close(results, expected, tol=1e-6)
        assert results.dtype == torch.float32

    def test_a_missing_mask_cannot_be_noticed_at_gamma_and_lambda_one_but_can_at_99_and_95(self):
        """At RAGEN's default of 1 the deltas telescope: A_t = the rewards from t on - V_t."""
        mask, (rewards, values) = normal((2, 40), 0) > 0, normal((2, 2, 40), 1)
        rewards *= mask
        for discounts, equal in (((1.0, 1.0), True), ((0.99, 0.95), False)):
            masked, unmasked = (starpo.masked_gae(rewards, values, m, *discounts)[0][mask]
                                for m in (mask, mask | True))
            assert torch.allclose(masked, unmasked, atol=1e-9 if equal else 0.1) == equal

    def test_whitening_is_blind_outside_the_mask_and_needs_two_entries(self):
        x = row(NAN, 1, 3, NAN)
        for mask, expected in [("0110", [0, -0.5**0.5, 0.5**0.5, 0]), ("0100", [0] * 4)]:
            close(starpo.whiten(x, bits(mask)), [expected], tol=1e-8)


class TestLosses:
    def test_a_value_that_an_update_has_moved_by_more_than_a_half_gains_nothing_by_moving_on(self):
        """Old value 0, target 2: at .25 (2 - .25)^2 / 2, from .5 on (2 - .5)^2 / 2."""
        values = torch.tensor([0.25, 0.5, 1.5], requires_grad=True)
        loss = starpo.value_loss(values, torch.zeros(3), torch.full((3,), 2.0))
        close(loss.detach(), [1.53125, 1.125, 1.125], tol=1e-6)
        assert torch.autograd.grad(loss.sum(), values)[0][2] == 0

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
        x = torch.tensor([[1, 3, NAN], [NAN, 2, NAN], [NAN, NAN, NAN]], requires_grad=True)
        weights = starpo.loss_weights(~x.isnan(), mode, horizon=4)
        loss = starpo.aggregate(x, weights)
        assert loss.item() == pytest.approx(expected) and weights.dtype == torch.float32
        assert torch.autograd.grad(loss, x)[0].equal(weights)
        assert starpo.aggregate(x * NAN, weights).isnan()
        assert not starpo.loss_weights(bits("00"), mode).any()


class TestModule:
    def test_a_wrong_argument_is_refused_with_what_was_expected(self):
        x, mask = torch.ones(2), bits("11")
        for function, *arguments in [
                (starpo.filter_groups, x, 0.9, "x"), (starpo.kl_estimate, x, x, "x"),
                (starpo.loss_weights, mask, "x")]:
            with pytest.raises(ValueError, match="unknown .* 'x': expected one of .*, "):
                function(*arguments)
        for arguments in (mask.float(), x, mask), (x, x, mask):
            with pytest.raises(ValueError, match="got shapes .*, expected three equal ones"):
                starpo.masked_gae(*arguments)
        for dual_clip in (1.0, -3):
            with pytest.raises(ValueError, match=f"got dual_clip={dual_clip}, expected more than"):
                starpo.policy_loss(x, x, x, 0.2, 0.28, dual_clip)
