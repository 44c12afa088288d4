"""What StarPO computes, as sentences: groups, rewards, advantages, losses.

Every fast function meets a slow one. Reading order: the slow definitions, one class per noun in the
order of starpo.py, then `TestMuseum`: famous bugs of this field in miniature, each with the
assertion that it is not here. Numbers without a comment are worked by hand.

    pytest -v tests/test_starpo.py
"""

import ast
import doctest
import inspect
import math
import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import starpo
from minragen.starpo import (
    AGGREGATIONS,
    FILTERS,
    REWARD_NORMS,
    adapt_kl_coef,
    aggregate,
    bi_level_gae,
    entropy,
    episode_sums,
    filter_groups,
    group_advantages,
    group_scores,
    kl_estimate,
    kl_loss,
    last_token_rewards,
    length_weight,
    loss_scale,
    loss_weights,
    masked_gae,
    normalise_rewards,
    overlong_penalty,
    policy_loss,
    reinforce_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    soft_reweight,
    turn_ends,
    turn_gae,
    turn_returns,
    turn_sums,
    value_loss,
    whiten,
)

# The same cases in every run, and no example database left on disk.
cases = settings(max_examples=16, deadline=None, derandomize=True, database=None)


# ==================================================================================================
# Random cases


def conversation(rows, padding=0):
    """[(observation tokens, sampled tokens) of every turn] of every row -> turn_ids,
    right-padded."""
    rows = [[turn for k, (seen, said) in enumerate(row) for turn in [-1] * seen + [k] * said]
            for row in rows]
    width = max(1, padding + max(len(row) for row in rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


@st.composite
def turn_wise(draw):
    """One to three rows of every episode, in any order: (group, episode, return) of each row.

    Eighths have exact sums and means, so that equal returns are equal whatever order they are added
    in. The ids have gaps, as after a filter.
    """
    episodes = draw(st.lists(st.tuples(st.sampled_from([5, 0, 2]),
                                       st.integers(-16, 16).map(lambda n: n / 8)),
                             min_size=1, max_size=8))
    rows = [(group, 3 * e + 1, episode_return) for e, (group, episode_return) in enumerate(episodes)
            for _ in range(draw(st.integers(1, 3)))]
    return draw(st.permutations(rows))


# No turns: an empty row.
TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4)
TURN_IDS = st.builds(conversation, st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 2))
MASKS = TURN_IDS.map(lambda turn_ids: turn_ids >= 0)
SEEDS = st.integers(0, 2**31)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
ROWS = turn_wise()
# One row an episode.
EPISODES = ROWS.map(lambda rows: [(g, b, r) for b, (g, _, r) in enumerate(rows)])
# Whole numbers: ties are frequent, sums exact.
SCORES = st.lists(st.integers(0, 6), min_size=1, max_size=8)
# Off the round numbers, where softmax's rounding would decide.
SHARES = st.integers(2, 98).map(lambda n: n / 100 + 0.0013)


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(shape, seed, n):
    return [normal(shape, seed + i) for i in range(n)]


def thinned(mask, seed):
    """A sixth of the tokens taken out: a mask that is smaller than what the turn ids cover."""
    return mask & (normal(mask.shape, seed + 99) > -1)


def columns(rows):
    """(group, episode, x) of every row -> group_ids, episode_ids, x."""
    groups, episodes, x = zip(*rows)
    return torch.tensor(groups), torch.tensor(episodes), torch.tensor(x, dtype=torch.float64)


def floats(*tensors):
    return [x.tolist() for x in tensors]


def close(got, expected, tol=1e-12):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def bits(text):
    """'01 1' -> mask of one row; spaces are for the eye."""
    return torch.tensor([[c == "1" for c in text.replace(" ", "")]])


def turns(text):
    """'.0 .11' -> turn ids of one row, a dot where nothing was sampled."""
    return torch.tensor([[-1 if c == "." else int(c) for c in text.replace(" ", "")]])


def one(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# ==================================================================================================
# The slow definitions: loops over plain floats


def slow_filter(scores, value, strategy, select, include_zero, eps=0.01):
    """Walk over the candidates from the best until enough is held."""
    if strategy == "none":
        return [True] * len(scores)
    sign = 1 if select == "largest" else -1
    walk = [g for g in range(len(scores)) if include_zero or abs(scores[g]) > 1e-10]
    walk.sort(key=lambda g: (-sign * scores[g], g))
    if strategy == "min_p":
        best = scores[walk[0]] if walk else 0.0
        return [g in walk and (s >= best * value if sign > 0 else s <= best / value)
                for g, s in enumerate(scores)]
    if strategy == "top_p":
        share, enough = scores, (value - eps) * sum(scores[g] for g in walk)
    elif strategy == "top_p_softmax":
        share = [math.exp(sign * score) for score in scores]
        enough = value * sum(share[g] for g in walk)
    else:
        share = [1] * len(scores)
        enough = max(1, math.floor(value * len(scores) + 1e-9 if strategy == "top_k" else value))
    kept, held = [False] * len(scores), 0.0
    for g in walk:
        if held >= enough:
            break
        kept[g], held = True, held + share[g]
    return kept


def slow_groups(rows):
    """group -> the x of each of its episodes, taken from the episode's first row."""
    seen, groups = set(), {}
    for group, episode, x in rows:
        if episode not in seen:
            groups.setdefault(group, []).append(x)
        seen.add(episode)
    return groups


def slow_std(xs):
    return statistics.stdev(xs) if len(xs) > 1 else 0.0


def slow_normalise(x, xs, method):
    if method == "identity":
        return x
    if method == "mean":
        return x - statistics.fmean(xs)
    scaled = (x - statistics.fmean(xs)) / (slow_std(xs) + 1e-6) if slow_std(xs) > 1e-6 else 0.0
    return min(max(scaled, -1.0), 3.0) if method == "asym_clip" else scaled


def slow_grpo(x, xs):
    return (x - statistics.fmean(xs)) / (slow_std(xs) + 1e-6)


def slow_dr_grpo(x, xs):
    return x - statistics.fmean(xs)


def slow_rloo(x, xs):
    """Compared with the mean of the others, if there are any."""
    others = list(xs)
    others.remove(x)
    return x - statistics.fmean(others) if others else 0.0


def slow_on_tokens(function, rows, mask):
    """function(the row's return, the returns of its group) on each of the row's masked tokens."""
    groups = slow_groups(rows)
    return torch.tensor([[function(x, groups[group]) if m else 0.0 for m in flags]
                         for (group, _, x), flags in zip(rows, mask.tolist())], dtype=torch.float64)


def slow_whiten(x, mask, measured_mask=None, eps=1e-8):
    x, mask, where = floats(x, mask, mask if measured_mask is None else measured_mask)
    places = [(b, t) for b, flags in enumerate(mask) for t, flag in enumerate(flags)]
    measured = [x[b][t] for b, t in places if where[b][t]]
    white = [[0.0] * len(flags) for flags in mask]
    if len(measured) < 2:
        return torch.tensor(white, dtype=torch.float64)
    mean, std = statistics.fmean(measured), math.sqrt(statistics.variance(measured) + eps)
    for b, t in places:
        white[b][t] = (x[b][t] - mean) / std if mask[b][t] else 0.0
    return torch.tensor(white, dtype=torch.float64)


def slow_reinforce(rewards, mask, gamma):
    """G_k = sum_j gamma^(j-k) r_j over the sampled tokens from k on."""
    got = torch.zeros_like(rewards)
    for b, (r, flags) in enumerate(zip(*floats(rewards, mask))):
        steps = [t for t, flag in enumerate(flags) if flag]
        for k, t in enumerate(steps):
            got[b, t] = sum(gamma**j * r[s] for j, s in enumerate(steps[k:]))
    return got


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


def slow_turns(flags, ids):
    """The positions of every turn that has masked tokens, first turn first."""
    sampled = [t for t in range(len(ids)) if flags[t] and ids[t] >= 0]
    return [[t for t in sampled if ids[t] == k] for k in sorted({ids[t] for t in sampled})]


def slow_bi_level_gae(rewards, values, mask, turn_ids, gamma, lam, gamma_turn):
    """From the back: one step of the turns, then down the tokens of that turn."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b, (r, v, flags, ids) in enumerate(zip(*floats(rewards, values, mask, turn_ids))):
        of_turn, next_end = 0.0, 0.0
        for turn in reversed(slow_turns(flags, ids)):
            end = turn[-1]
            of_turn = r[end] + gamma_turn * next_end - v[end] + gamma_turn * lam * of_turn
            next_end = v[end]
            last, next_value = 0.0, 0.0
            for t in reversed(turn):
                reward = of_turn + v[end] if t == end else r[t]
                last = reward + gamma * next_value - v[t] + gamma * lam * last
                next_value = v[t]
                advantages[b, t], returns[b, t] = last, last + v[t]
    return advantages, returns


def slow_turn_gae(rewards, values, mask, turn_ids, lam, gamma_turn):
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b, (r, v, flags, ids) in enumerate(zip(*floats(rewards, values, mask, turn_ids))):
        of_turn, next_end = 0.0, 0.0
        for turn in reversed(slow_turns(flags, ids)):
            end, earned = turn[-1], sum(r[t] for t in turn)
            of_turn = earned + gamma_turn * next_end - v[end] + gamma_turn * lam * of_turn
            next_end = v[end]
            returns[b, end] = of_turn + v[end]
            for t in turn:
                advantages[b, t] = of_turn
    return advantages, returns


def textbook_gae(rewards, values, gamma, lam):
    """GAE in which every position is a time step, as in torchtune's `estimate_advantages`."""
    advantages, last, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        last = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * last
        next_value = values[:, t]
        advantages[:, t] = last
    return advantages


def slow_policy_loss(log_ratio, advantage, low, high, dual):
    ratio = math.exp(log_ratio)
    inside = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * inside)
    if advantage < 0 and dual > 0:
        loss = min(loss, -advantage * dual)
    return loss, -advantage * inside > -advantage * ratio


def slow_loss(x, mask, mode, horizon):
    """The four means as they are said, over a whole update."""
    rows = [[v for v, flag in zip(*pair) if flag] for pair in zip(*floats(x, mask))]
    rows = [said for said in rows if said]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return statistics.fmean([v for said in rows for v in said])
    if mode == "seq-mean-token-mean":
        return statistics.fmean([statistics.fmean(said) for said in rows])
    constant = horizon if mode == "seq-mean-token-sum-norm" else 1
    return statistics.fmean([sum(said) / constant for said in rows])


# ==================================================================================================
# Which groups


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
    def test_hand_worked_examples_of_top_p(self, scores, top_p, kept):
        got = filter_groups(one(*scores), top_p)
        assert set(got.nonzero()[:, 0].tolist()) == kept

    @pytest.mark.parametrize(("strategy", "value", "select", "include_zero", "scores", "kept"), [
        ("top_p", 0.6, "smallest", False, [4, 3, 2, 1], {1, 2, 3}),  # 5.9: 1, 3, then 6
        ("top_p", 0.25, "smallest", False, [3, 0, 1], {2}),  # .24 * 4 = .96: 1; the 0 is no one
        ("top_p", 0.25, "smallest", True, [3, 0, 1], {1, 2}),  # 0, then 1
        ("top_p_softmax", 0.6, "largest", False, [1, 1, 1], {0, 1}),  # 1/3, then 2/3
        ("top_p_softmax", 0.9, "largest", False, [10, 1, 0, 0], {0}),  # e^10 : e^1 is .9999
        ("top_p_softmax", 0.9, "largest", True, [10, 1, 0, 0], {0}),
        ("top_p_softmax", 0.9, "smallest", False, [10, 1, 0, 0], {1}),
        ("top_p_softmax", 0.9, "smallest", True, [10, 1, 0, 0], {1, 2, 3}),  # .42, .84, then 1
        ("top_k", 0.25, "largest", True, [1, 5, 3, 2, 0, 0, 0, 4], {1, 7}),  # StarPO-S
        ("top_k", 0.5, "largest", False, [0, 2, 0, 0], {1}),  # two groups, one candidate
        ("top_k", 0.5, "largest", True, [0, 2, 0, 0], {0, 1}),
        ("top_k", 0.5, "smallest", False, [4, 3, 0, 1], {1, 3}),  # half of four, not of three
        ("top_k", 0.1, "largest", False, [1, 2, 3, 4], {3}),  # int(.4) = 0, but at least one
        ("top_k_abs", 2, "largest", False, [1, 4, 2, 3], {1, 3}),
        ("top_k_abs", 2.9, "smallest", False, [1, 4, 2, 3], {0, 2}),
        ("top_k_abs", 0.5, "largest", False, [1, 4, 2, 3], {1}),
        ("top_k_abs", 99, "largest", False, [1, 0, 2, 3], {0, 2, 3}),
        ("min_p", 0.5, "largest", False, [10, 6, 4, 0], {0, 1}),  # >= 5
        ("min_p", 0.6, "largest", False, [10, 6, 4, 0], {0, 1}),  # >= 6
        ("min_p", 0.5, "smallest", False, [10, 6, 4, 0], {1, 2}),  # <= 4 / .5
        ("min_p", 0.5, "smallest", True, [10, 6, 4, 0], {3}),  # <= 0
        ("min_p", 1.0, "largest", False, [4, 3, 4], {0, 2}),
        ("none", 0.9, "largest", False, [0, 2, 0], {0, 1, 2}),
    ])
    def test_hand_worked_examples_of_the_other_rules(self, strategy, value, select, include_zero,
                                                     scores, kept):
        got = filter_groups(one(*scores), value, strategy, select, include_zero)
        assert set(got.nonzero()[:, 0].tolist()) == kept

    @pytest.mark.parametrize("include_zero", [False, True])
    @pytest.mark.parametrize("select", ["largest", "smallest"])
    @pytest.mark.parametrize("strategy", FILTERS)
    @cases
    @given(SCORES, SHARES)
    def test_equals_the_slow_walk(self, strategy, select, include_zero, scores, value):
        value *= 8 if strategy == "top_k_abs" else 1
        got = filter_groups(one(*scores), value, strategy, select, include_zero)
        assert got.tolist() == slow_filter(scores, value, strategy, select, include_zero)

    @cases
    @given(SCORES, st.integers(2, 98).map(lambda n: n / 100), st.sampled_from([0.0, 0.01, 0.019]))
    def test_equals_the_slow_walk_at_every_eps_and_at_round_shares(self, scores, top_p, eps):
        assert filter_groups(one(*scores), top_p, eps=eps).tolist() == \
            slow_filter(scores, top_p, "top_p", "largest", False, eps)

    @pytest.mark.parametrize("strategy", [name for name in FILTERS if name != "top_p_softmax"])
    @cases
    @given(SCORES, SHARES, st.integers(-12, 12))
    def test_the_scale_of_the_reward_changes_nothing(self, strategy, scores, value, exponent):
        scores = one(*scores)
        assert filter_groups(scores * 2.0**exponent, value, strategy).equal(
            filter_groups(scores, value, strategy))

    def test_the_scale_of_the_reward_decides_what_softmax_keeps(self):
        """Spreads below .5 have nearly equal shares, so .9 of the mass is nearly all of them."""
        scores = one(0.5, 0.4, 0.3, 0.2, 0.1)
        assert filter_groups(scores, 0.9, "top_p_softmax").sum() == 5
        assert filter_groups(scores * 30, 0.9, "top_p_softmax").sum() == 1

    @pytest.mark.parametrize("strategy", FILTERS)
    @cases
    @given(st.permutations([8.0, 5.0, 3.0, 2.0, 1.0, 0.0]), SHARES)
    def test_the_order_of_the_groups_changes_nothing(self, strategy, scores, value):
        ranked = torch.tensor(sorted(scores))
        by_score = dict(zip(ranked.tolist(), filter_groups(ranked, value, strategy).tolist()))
        assert filter_groups(torch.tensor(scores), value, strategy).tolist() == [
            by_score[s] for s in scores]

    @pytest.mark.parametrize("strategy", FILTERS)
    @pytest.mark.parametrize("select", ["largest", "smallest"])
    @cases
    @given(SCORES, SHARES, SHARES)
    def test_a_looser_value_keeps_every_group_that_a_tighter_one_keeps(
            self, select, strategy, scores, p, q):
        """Looser is larger, but for min_p: there a smaller share of the best is asked for."""
        tight, loose = sorted([p, q], reverse=strategy == "min_p")
        fewer, more = (filter_groups(one(*scores), v, strategy, select) for v in (tight, loose))
        assert not (fewer & ~more).any()

    @cases
    @given(SCORES, st.integers(2, 98))
    def test_what_is_kept_holds_the_share_and_would_not_without_its_smallest(self, scores, percent):
        scores = one(*scores)
        kept = scores[filter_groups(scores, percent / 100)]
        needed = (percent / 100 - 0.01) * scores.sum()
        assert kept.sum() >= needed
        if len(kept):
            assert kept.sum() - kept.min() < needed

    @pytest.mark.parametrize("strategy", ["top_p", "top_p_softmax", "top_k_abs", "min_p"])
    @pytest.mark.parametrize("select", ["largest", "smallest"])
    @cases
    @given(SCORES, SHARES)
    def test_groups_without_spread_are_dropped_and_change_nothing_for_the_others(
            self, select, strategy, scores, value):
        """top_k counts them: a quarter of the groups is a quarter of all groups."""
        kept = filter_groups(one(*scores), value, strategy, select)
        with_zeros = filter_groups(one(*scores, 0, 0, 0), value, strategy, select)
        assert with_zeros.tolist() == kept.tolist() + [False] * 3
        assert not kept[one(*scores) == 0].any()

    @pytest.mark.parametrize(("score", "kept"), [(1e-10, False), (2e-10, True)])
    def test_a_score_of_at_most_1e_10_is_no_score(self, score, kept):
        assert filter_groups(one(score), 0.9).tolist() == [kept]
        assert filter_groups(one(-score), 0.9, "top_k").tolist() == [kept]

    def test_of_tied_groups_the_first_are_kept(self):
        assert filter_groups(torch.ones(4), 0.5).tolist() == [True, True, False, False]
        assert filter_groups(torch.tensor([1.0, 2.0, 1.0, 2.0]), 0.5).tolist() == [
            False, True, False, True]
        assert filter_groups(torch.ones(4), 0.5, "top_k", "smallest").tolist() == [
            True, True, False, False]

    def test_ties_go_by_index_among_more_groups_than_an_unstable_sort_keeps_in_order(self):
        assert filter_groups(torch.ones(200), 0.5, eps=0.0).tolist() == [True] * 100 + [False] * 100

    def test_top_k_counts_the_groups_that_a_percentage_means(self):
        """.29 * 100 is 28.999999999999996."""
        assert int(0.29 * 100) == 28
        assert filter_groups(torch.ones(100), 0.29, "top_k").sum() == 29

    @pytest.mark.parametrize("strategy", ["top_p", "top_p_softmax"])
    @pytest.mark.parametrize("include_zero", [False, True])
    def test_at_value_one_every_candidate_is_kept(self, include_zero, strategy):
        """Also where one group holds more than 99 % of the spread."""
        got = filter_groups(one(0, 1000, 1, 0), 1.0, strategy, include_zero=include_zero)
        assert got.tolist() == [include_zero, True, True, include_zero]

    @pytest.mark.parametrize("strategy", [name for name in FILTERS if name != "none"])
    @pytest.mark.parametrize("value", [0.1, 0.5, 1.0])
    def test_nothing_is_kept_where_no_group_has_spread(self, value, strategy):
        assert not filter_groups(torch.zeros(5), value, strategy).any()

    @pytest.mark.parametrize("strategy", FILTERS)
    def test_one_group_with_spread_survives_alone(self, strategy):
        kept = filter_groups(one(0, 0, 0.3, 0), 0.9, strategy)
        assert kept.tolist() == [strategy == "none", strategy == "none", True, strategy == "none"]

    @pytest.mark.parametrize("strategy", FILTERS)
    def test_no_groups_are_an_empty_answer(self, strategy):
        assert filter_groups(torch.zeros(0), 0.9, strategy).tolist() == []

    def test_eps_keeps_rounding_from_taking_one_group_too_many(self):
        """One of three equal groups holds a third, but added up in float32 three times .1 is too
        large."""
        scores = torch.full((3,), 0.1)
        assert filter_groups(scores, 1 / 3).tolist() == [True, False, False]
        assert filter_groups(scores, 1 / 3, eps=0.0).tolist() == [True, True, False]

    @pytest.mark.parametrize("bad", [-0.5, math.nan, math.inf])
    def test_top_p_refuses_scores_that_have_no_share(self, bad):
        with pytest.raises(ValueError, match=r"filter top_p: got scores \[1\.0, (-0\.5|nan|inf)\], "
                                             r"expected finite ones >= 0\."):
            filter_groups(torch.tensor([1.0, bad]))

    @pytest.mark.parametrize("strategy", FILTERS)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_every_rule_refuses_scores_that_are_not_finite(self, bad, strategy):
        with pytest.raises(ValueError, match=f"filter {strategy}: got scores .*expected finite"):
            filter_groups(torch.tensor([1.0, bad]), 0.9, strategy)

    @pytest.mark.parametrize(("strategy", "value", "expected"), [
        ("top_p", 0.0, "more than 0.01 and at most 1."),
        ("top_p", 0.01, "more than 0.01 and at most 1."),  # needs no group at all
        ("top_p", 1.5, "more than 0.01 and at most 1."),
        ("top_p", math.nan, "more than 0.01 and at most 1."),
        ("top_p_softmax", 0.0, "more than 0 and at most 1."),
        ("top_p_softmax", 1.01, "more than 0 and at most 1."),
        ("top_k", 0.0, "more than 0 and at most 1."),
        ("top_k", 4, "more than 0 and at most 1."),
        ("top_k_abs", 0, "more than 0."),
        ("top_k_abs", -2, "more than 0."),
        ("min_p", -1.0, "more than 0 and at most 1."),
        ("min_p", 2.0, "more than 0 and at most 1."),
    ])
    def test_refuses_a_value_outside_its_range(self, strategy, value, expected):
        with pytest.raises(ValueError,
                           match=f"filter {strategy}: got a value of {value}, expected {expected}"):
            filter_groups(torch.ones(2), value, strategy)

    @pytest.mark.parametrize(("strategy", "select"), [("topp", "largest"), ("top_p", "best"),
                                                      ("none", "")])
    def test_refuses_unknown_names_and_lists_the_known_ones(self, strategy, select):
        with pytest.raises(ValueError, match=f"unknown filter '{strategy}' of the '{select}': "
                                             "expected one of none, top_p, .*largest or smallest"):
            filter_groups(torch.ones(2), 0.9, strategy, select)


class TestGroupScores:
    @cases
    @given(ROWS)
    def test_are_the_sample_std_and_the_mean_of_each_groups_episodes(self, rows):
        group_ids, episode_ids, x = columns(rows)
        groups = slow_groups(rows)
        present = sorted(groups)
        std, mean = (group_scores(x, group_ids, name, episode_ids) for name in ("std", "mean"))
        close(std[present], [slow_std(groups[g]) for g in present])
        close(mean[present], [statistics.fmean(groups[g]) for g in present])

    @cases
    @given(EPISODES)
    def test_count_every_row_where_no_episodes_are_named(self, rows):
        group_ids, episode_ids, x = columns(rows)
        for name in ("std", "mean"):
            assert group_scores(x, group_ids, name).equal(
                group_scores(x, group_ids, name, episode_ids))

    def test_hand_worked_example(self):
        """Deviations -1, 0, 1 have sample variance (1 + 0 + 1) / 2 = 1; a group of one has none."""
        x, group_ids = torch.tensor([4.0, 7.0, 3.0, 5.0]), torch.tensor([0, 1, 0, 0])
        assert group_scores(x, group_ids).tolist() == [1.0, 0.0]
        assert group_scores(x, group_ids, "mean").tolist() == [4.0, 7.0]

    def test_a_shift_changes_no_spread_and_a_scale_passes_through(self):
        x, ids = normal(12, 0), torch.arange(3).repeat(4)
        close(group_scores(x + 5, ids), group_scores(x, ids))
        close(group_scores(x * -3, ids), group_scores(x, ids) * 3)
        close(group_scores(x * -3 + 5, ids, "mean"), group_scores(x, ids, "mean") * -3 + 5)

    @pytest.mark.parametrize("value", [0.1, 0.3, 10.9])
    def test_the_spread_of_equals_is_exactly_zero_so_that_the_filter_drops_them(self, value):
        spread = group_scores(torch.full((16,), value), torch.zeros(16, dtype=torch.long))
        assert spread.tolist() == [0.0]
        assert not filter_groups(spread).any()

    def test_a_group_id_that_no_row_has_is_no_spread_and_none_of_its_neighbours(self):
        spread = group_scores(one(1, 3, 2, 6), torch.tensor([1, 1, 4, 4]))
        close(spread, [0, 2**0.5, 0, 0, 8**0.5])
        assert filter_groups(spread, 0.5).tolist() == [False, False, False, False, True]

    @pytest.mark.parametrize("name", ["variance", "", "median"])
    def test_refuse_an_unknown_statistic(self, name):
        with pytest.raises(ValueError, match=f"{name}.*expected .*std.*mean"):
            group_scores(torch.ones(2), torch.zeros(2, dtype=torch.long), name)


# ==================================================================================================
# Which rewards


class TestNormaliseRewards:
    @pytest.mark.parametrize("method", REWARD_NORMS)
    @cases
    @given(ROWS)
    def test_equals_the_slow_definition(self, method, rows):
        group_ids, episode_ids, x = columns(rows)
        groups = slow_groups(rows)
        close(normalise_rewards(x, group_ids, method, episode_ids),
              [slow_normalise(x, groups[g], method) for g, _, x in rows])

    @pytest.mark.parametrize(("method", "expected"), [
        ("identity", [1, 0, 0, 1, 5]),
        ("mean", [0.5, -0.5, -0.5, 0.5, 0]),
        ("mean_std", [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5, 0]),
        ("asym_clip", [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5, 0]),
    ])
    def test_hand_worked_example(self, method, expected):
        """Returns 1, 0, 0, 1: mean 1/2, sample variance 4 * (1/4) / 3, so (1/2) / sqrt(1/3)."""
        close(normalise_rewards(one(1, 0, 0, 1, 5), torch.tensor([0, 0, 0, 0, 1]), method),
              expected, tol=1e-5)

    @pytest.mark.parametrize(("sign", "end"), [(1, 3.0), (-1, -1.0)])
    def test_asym_clip_ends_at_minus_one_and_three(self, sign, end):
        """One 1 among sixteen: mean 1/16, variance (1 - 1/16) / 15 = 1/16, so its score is
        (15/16) / (1/4) = 3.75."""
        x, ids = sign * one(1, *[0] * 15), torch.zeros(16, dtype=torch.long)
        close(normalise_rewards(x, ids, "mean_std")[0], sign * 3.75, tol=1e-5)
        assert normalise_rewards(x, ids, "asym_clip")[0] == end

    def test_a_spread_of_rounding_is_not_blown_up(self):
        x, ids = one(0, 1e-7), torch.tensor([0, 0])
        assert normalise_rewards(x, ids, "mean_std").tolist() == [0, 0]
        close(normalise_rewards(x, ids, "mean"), [-5e-8, 5e-8])

    @pytest.mark.parametrize("value", [0.3, 10.9, 123.4])
    @pytest.mark.parametrize("method", ["mean", "mean_std", "asym_clip"])
    def test_of_equals_is_exactly_zero_in_float32(self, method, value):
        got = normalise_rewards(torch.full((16,), value), torch.zeros(16, dtype=torch.long), method)
        assert got.tolist() == [0.0] * 16

    def test_one_partition_is_the_batch_and_another_the_prompts(self):
        """BRPO sees a hard prompt and an easy one; GRPO sees who was better at each."""
        x = one(0, 1, 10, 11)
        batch = normalise_rewards(x, torch.zeros(4, dtype=torch.long), "mean_std")
        prompts = normalise_rewards(x, torch.tensor([0, 0, 1, 1]), "mean_std")
        assert batch[1] < 0 < batch[2]
        assert prompts[2] < 0 < prompts[1]

    def test_shift_and_scale_vanish_by_std_and_only_the_shift_without(self):
        x, ids = normal(8, 0), torch.arange(2).repeat(4)
        for method in ("mean_std", "asym_clip"):
            close(normalise_rewards(x * 40 + 3, ids, method), normalise_rewards(x, ids, method),
                  tol=1e-4)
        close(normalise_rewards(x * 40 + 3, ids, "mean"), normalise_rewards(x, ids, "mean") * 40)

    @cases
    @given(ROWS, SEEDS)
    def test_as_the_last_tokens_reward_it_makes_reinforce_grpo(self, rows, seed):
        """Without discount every token of the row then has the reward that stands at its end."""
        group_ids, episode_ids, x = columns(rows)
        mask = normal((len(rows), 5), seed) > 0
        rewards = last_token_rewards(normalise_rewards(x, group_ids, "mean_std", episode_ids), mask)
        close(reinforce_advantages(rewards, mask),
              group_advantages(x, group_ids, mask, episode_ids=episode_ids))

    @pytest.mark.parametrize("method", ["std", "", "Mean"])
    def test_refuses_unknown_names_and_lists_the_known_ones(self, method):
        with pytest.raises(ValueError, match=f"unknown reward normalisation '{method}': expected "
                                             "one of identity, mean, mean_std, asym_clip"):
            normalise_rewards(torch.ones(2), torch.zeros(2, dtype=torch.long), method)


class TestCredit:
    """Which token gets which part of an episode's reward."""

    @cases
    @given(ROWS, SEEDS)
    def test_episode_sums_are_the_sum_over_the_rows_of_the_episode(self, rows, seed):
        _, episode_ids, _ = columns(rows)
        x, ids = normal(len(rows), seed), episode_ids.tolist()
        close(episode_sums(x, episode_ids),
              [sum(v for v, e in zip(x.tolist(), ids) if e == mine) for mine in ids])

    def test_episode_sums_by_hand(self):
        assert episode_sums(one(1, 2, 4, 8), torch.tensor([3, 0, 3, 3])).tolist() == [13, 2, 13, 13]

    @cases
    @given(MASKS, SEEDS)
    def test_last_token_rewards_stand_on_the_last_sampled_token(self, mask, seed):
        scores = normal(len(mask), seed)
        expected = torch.zeros(mask.shape, dtype=torch.float64)
        for b, flags in enumerate(mask.tolist()):
            if any(flags):
                expected[b, max(t for t, flag in enumerate(flags) if flag)] = float(scores[b])
        assert last_token_rewards(scores, mask).equal(expected)

    def test_last_token_rewards_by_hand(self):
        mask = torch.cat([bits("0110"), bits("0000"), bits("1001")])
        assert last_token_rewards(one(7, 8, 9), mask).tolist() == [
            [0, 0, 7, 0], [0, 0, 0, 0], [0, 0, 0, 9]]

    @cases
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=5), SEEDS, DISCOUNTS)
    def test_turn_returns_are_the_discounted_rewards_of_this_turn_and_later_ones(
            self, lengths, seed, gamma):
        rows = [(2 * e, k) for e, length in enumerate(lengths) for k in range(length)]
        rewards = normal(len(rows), seed).tolist()
        order = normal(len(rows), seed + 1).argsort().tolist()
        expected = [sum(gamma ** (j - k) * r for (e2, j), r in zip(rows, rewards)
                        if e2 == e and j >= k) for e, k in rows]
        got = turn_returns(one(*[rewards[i] for i in order]),
                           torch.tensor([rows[i][0] for i in order]),
                           torch.tensor([rows[i][1] for i in order]), gamma)
        close(got, [expected[i] for i in order])

    def test_turn_returns_by_hand(self):
        """Rewards 1, 0, 2 at gamma .5:  1 + .5*1 = 1.5;  0 + .5*2 = 1;  2. The other episode has
        one turn."""
        got = turn_returns(one(2, 5, 1, 0), torch.tensor([1, 0, 1, 1]), torch.tensor([2, 0, 0, 1]),
                           gamma=0.5)
        assert got.tolist() == [2, 5, 1.5, 1]

    @cases
    @given(TURN_IDS, st.integers(2, 6), st.sampled_from([0.25, 0.5, 1.0]))
    def test_overlong_penalty_equals_the_slow_definition(self, turn_ids, limit, share):
        expected = torch.zeros(turn_ids.shape)
        free = limit * (1 - share)
        for b, ids in enumerate(turn_ids.tolist()):
            for turn in slow_turns([True] * len(ids), ids):
                over = min(max((len(turn) - free) / (limit - free), 0.0), 1.0)
                expected[b, turn[-1]] = -over
        close(overlong_penalty(turn_ids, limit, share), expected, tol=1e-6)

    @pytest.mark.parametrize(("length", "penalty"), [(1, 0), (5, 0), (7, -0.4), (10, -1), (12, -1)])
    def test_overlong_penalty_by_hand(self, length, penalty):
        """A limit of 10 of which the second half is penalised: 5 are free, then -1/5 a token."""
        turn_ids = conversation([[(2, 3), (1, length)]], padding=1)
        expected = [0.0] * (6 + length + 1)
        expected[-2] = penalty
        close(overlong_penalty(turn_ids, 10, 0.5), [expected], tol=1e-6)

    def test_overlong_penalty_of_no_share_is_no_penalty(self):
        assert not overlong_penalty(turns("0000"), 4, 0.0).any()


class TestTurns:
    @cases
    @given(TURN_IDS, SEEDS)
    def test_ends_are_the_last_masked_token_of_each_turn(self, turn_ids, seed):
        for mask in (turn_ids >= 0, thinned(turn_ids >= 0, seed)):
            expected = torch.zeros_like(mask)
            for b, (flags, ids) in enumerate(zip(*floats(mask, turn_ids))):
                for turn in slow_turns(flags, ids):
                    expected[b, turn[-1]] = True
            assert turn_ends(turn_ids, mask).equal(expected)

    def test_ends_by_hand(self):
        turn_ids = torch.cat([turns(".00 .1 222."), turns("0011 2 ....")])
        assert turn_ends(turn_ids, turn_ids >= 0).int().tolist() == [
            [0, 0, 1, 0, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 0, 0, 0, 0]]

    def test_the_last_turn_of_a_row_that_fills_it_ends_on_the_last_token(self):
        assert turn_ends(turns("00"), bits("11")).tolist() == [[False, True]]

    def test_a_turn_of_which_nothing_is_masked_has_no_end(self):
        assert turn_ends(turns("00 .11"), bits("00 011")).int().tolist() == [[0, 0, 0, 0, 1]]

    @cases
    @given(TURN_IDS, SEEDS)
    def test_sums_stand_on_every_token_of_the_turn_and_are_zero_elsewhere(self, turn_ids, seed):
        x = normal(turn_ids.shape, seed)
        expected = torch.zeros_like(x)
        for b, (values, ids) in enumerate(zip(*floats(x, turn_ids))):
            for turn in slow_turns([True] * len(ids), ids):
                for t in turn:
                    expected[b, t] = sum(values[s] for s in turn)
        close(turn_sums(x, turn_ids), expected)
        junk = torch.where(turn_ids >= 0, x, math.nan)
        assert turn_sums(junk, turn_ids).equal(turn_sums(x, turn_ids))

    def test_sums_by_hand(self):
        assert turn_sums(row(9, 1, 2, 9, 4), turns(".00.1")).tolist() == [[0, 3, 3, 0, 4]]

    def test_rows_without_turns_have_neither_ends_nor_sums(self):
        nothing = torch.full((2, 3), -1)
        assert not turn_ends(nothing, nothing >= 0).any()
        assert not turn_sums(torch.ones(2, 3), nothing).any()


class TestKL:
    """Expectations are exact: sums over a categorical of three outcomes, nothing is sampled."""

    LOGITS = one(0.5, -1.0, 1.5)
    REF = one(-0.2, 0.4, 0.9).log_softmax(0)

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
        """d = log 2: k1 = -.693147, k2 = .480453 / 2, k3 = 2 - .693147 - 1.
        d = -log 2: k3 = .5 + .693147 - 1."""
        two, zero = one(math.log(2)), one(0)
        close(kl_estimate(zero, two, "k1"), [-0.6931472], tol=1e-7)
        close(kl_estimate(zero, two, "k2"), [0.2402265], tol=1e-7)
        close(kl_estimate(zero, two, "k3"), [0.3068528], tol=1e-7)
        close(kl_estimate(two, zero, "k3"), [0.1931472], tol=1e-7)

    @cases
    @given(SEEDS)
    def test_equals_the_slow_definition(self, seed):
        logprobs, ref = normals((2, 5), seed, 2)
        slow = {"k1": lambda p, q: p - q, "k2": lambda p, q: (p - q) ** 2 / 2,
                "k3": lambda p, q: math.exp(q - p) - (q - p) - 1}
        for name, definition in slow.items():
            close(kl_estimate(logprobs, ref, name),
                  [[definition(p, q) for p, q in zip(*pair)]
                   for pair in zip(*floats(logprobs, ref))])

    def test_the_expected_gradient_of_k1_is_zero_whatever_the_reference(self):
        """The reason why k1 is refused as a loss: sum_v p_v grad log p_v = grad sum_v p_v = 0."""
        pull = self.gradient(lambda x, ref: kl_estimate(x, ref, "k1"))
        assert pull.abs().max() < 1e-15
        assert self.true_gradient(self.reverse).abs().max() > 0.1

    def test_the_expected_gradient_of_k2_is_that_of_the_true_kl(self):
        close(self.gradient(lambda x, ref: kl_loss(x, ref, "k2")), self.true_gradient(self.reverse))

    def test_the_expected_gradient_of_k3_is_that_of_the_kl_the_other_way_round(self):
        """E_pi[(1 - ref/pi) grad log pi] = -E_ref[grad log pi] = grad KL(ref || pi): also a
        regulariser."""
        close(self.gradient(lambda x, ref: kl_loss(x, ref, "k3")), self.true_gradient(self.forward))

    def test_k1_in_the_reward_pulls_as_the_kl_does(self):
        """grad E_pi[-k1] by REINFORCE is E_pi[-k1 * grad log pi], with k1 held fixed."""
        pull = self.gradient(lambda x, ref: kl_estimate(x, ref, "k1").detach() * x)
        close(pull, self.true_gradient(self.reverse))

    def test_k1_and_k3_are_unbiased_and_k2_is_not(self):
        logprobs = self.LOGITS.log_softmax(0)
        k1, k2, k3 = ((logprobs.exp() * kl_estimate(logprobs, self.REF, name)).sum()
                      for name in ("k1", "k2", "k3"))
        close(k1, self.reverse(logprobs))
        close(k3, self.reverse(logprobs))
        assert abs(k2 - self.reverse(logprobs)) > 0.01

    @pytest.mark.parametrize("estimator", ["k2", "k3"])
    @cases
    @given(SEEDS)
    def test_k2_and_k3_are_never_negative_and_zero_exactly_where_the_two_agree(
            self, estimator, seed):
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
        estimate = kl_loss(logprobs, torch.zeros(1), estimator)
        estimate.sum().backward()
        assert estimate.isfinite().all()
        assert logprobs.grad.isfinite().all()

    @pytest.mark.parametrize(("estimator", "slope"), [("k2", 29.0), ("k3", 1.0)])
    def test_a_token_that_the_reference_finds_impossible_is_still_pulled_back(
            self, estimator, slope):
        """log pi = -1, log ref = -30: d k2 = log pi - log ref, d k3 = 1 - exp(d). Where KL is
        needed most."""
        logprobs = one(-1).requires_grad_()
        kl_loss(logprobs, one(-30), estimator).sum().backward()
        close(logprobs.grad, [slope])

    @pytest.mark.parametrize("estimator", ["k2", "k3"])
    def test_agrees_with_numeric_gradients(self, estimator):
        logprobs, ref = normal((2, 4), 0).requires_grad_(), normal((2, 4), 1)
        assert torch.autograd.gradcheck(lambda x: kl_loss(x, ref, estimator), (logprobs,))

    def test_as_a_loss_is_the_estimate_and_k3_unless_named(self):
        logprobs, ref = normals((2, 4), 0, 2)
        for name in ("k2", "k3"):
            assert kl_loss(logprobs, ref, name).equal(kl_estimate(logprobs, ref, name))
        assert kl_loss(logprobs, ref).equal(kl_estimate(logprobs, ref, "k3"))
        assert kl_estimate(logprobs, ref).equal(kl_estimate(logprobs, ref, "k3"))

    def test_as_a_loss_refuses_k1_and_says_why(self):
        with pytest.raises(ValueError, match="k1 as a loss has a gradient of expectation 0 and "
                                             "regularises nothing: expected k2 or k3.*reward"):
            kl_loss(torch.zeros(1), torch.zeros(1), "k1")

    @pytest.mark.parametrize("function", [kl_estimate, kl_loss])
    @pytest.mark.parametrize("name", ["low-var-kl", "", "K3"])
    def test_refuses_unknown_names_and_lists_the_known_ones(self, name, function):
        with pytest.raises(ValueError,
                           match=f"unknown kl_estimator '{name}': expected one of k1, k2, k3"):
            function(torch.zeros(1), torch.zeros(1), name)


class TestAdaptKLCoef:
    @pytest.mark.parametrize(("kl", "expected"), [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 0.0128)),
        (5.0, 0.5 * (1 + 0.2 * 0.0128)),  # at most a fifth
        (0.0, 0.5 * (1 - 0.2 * 0.0128)),
    ])
    def test_hand_worked_examples(self, kl, expected):
        """128 trajectories of a horizon of 10,000."""
        assert adapt_kl_coef(0.5, kl, 0.1, 128, 10_000) == pytest.approx(expected, abs=1e-12)

    @cases
    @given(st.floats(0.001, 1), st.floats(-0.5, 1), st.floats(0.01, 1), st.integers(1, 512))
    def test_equals_the_slow_definition(self, coef, kl, target, trajectories):
        """Smaller than the target by a fifth or more, larger by a fifth or more, or between."""
        error = kl / target - 1
        if error > 0.2:
            error = 0.2
        elif error < -0.2:
            error = -0.2
        assert adapt_kl_coef(coef, kl, target, trajectories, 1000) == pytest.approx(
            coef + coef * error * trajectories / 1000)


# ==================================================================================================
# Which advantages


OF_EPISODES = {  # name -> what is computed of the episode returns of a group, its slow definition
    "grpo": (group_advantages, slow_grpo),
    "dr_grpo": (lambda x, ids, mask, **kw: group_advantages(x, ids, mask, False, **kw),
                slow_dr_grpo),
    "rloo": (rloo_advantages, slow_rloo),
}


class TestGroupAdvantages:
    @pytest.mark.parametrize("name", OF_EPISODES)
    @cases
    @given(ROWS, SEEDS)
    def test_equal_the_slow_loop_in_which_an_episode_counts_once(self, name, rows, seed):
        fast, slow = OF_EPISODES[name]
        group_ids, episode_ids, x = columns(rows)
        mask = normal((len(rows), 5), seed) > 0
        close(fast(x, group_ids, mask, episode_ids=episode_ids), slow_on_tokens(slow, rows, mask))

    @pytest.mark.parametrize("name", OF_EPISODES)
    @cases
    @given(EPISODES, SEEDS)
    def test_equal_the_slow_loop_without_episode_ids(self, name, rows, seed):
        fast, slow = OF_EPISODES[name]
        group_ids, _, x = columns(rows)
        mask = normal((len(rows), 5), seed) > 0
        close(fast(x, group_ids, mask), slow_on_tokens(slow, rows, mask))

    def test_hand_worked_example(self):
        """Returns 1, 0, 0, 1: mean 1/2, sample variance 4 * (1/4) / 3,
        so A = (1/2) sqrt(3) = 0.8660."""
        returns, ids = one(1, 0, 0, 1), torch.zeros(4, dtype=torch.long)
        mask = torch.tensor([[1, 0, 1]] * 4).bool()
        half_root_3 = 3**0.5 / 2
        close(group_advantages(returns, ids, mask),
              [[a, 0, a] for a in (half_root_3, -half_root_3, -half_root_3, half_root_3)], tol=1e-5)
        close(group_advantages(returns, ids, mask, by_std=False),
              [[a, 0, a] for a in (0.5, -0.5, -0.5, 0.5)])

    def test_leave_one_out_by_hand(self):
        """Returns 6, 0, 3: 6 - 1.5, 0 - 4.5, 3 - 3."""
        got = rloo_advantages(one(6, 0, 3), torch.zeros(3, dtype=torch.long),
                              torch.ones(3, 1, dtype=torch.bool))
        close(got, [[4.5], [-4.5], [0]])

    @pytest.mark.parametrize("name", OF_EPISODES)
    @cases
    @given(EPISODES)
    def test_sum_to_zero_over_the_trajectories_of_each_group(self, name, rows):
        ids, _, x = columns(rows)
        got = OF_EPISODES[name][0](x, ids, torch.ones(len(ids), 1, dtype=torch.bool))
        for g in ids.unique():
            assert abs(got[ids == g].sum()) < 1e-9

    def test_have_unit_sample_variance_in_each_group(self):
        ids = torch.arange(3).repeat(8)
        got = group_advantages(normal(24, 1) * 7, ids, torch.ones(24, 1, dtype=torch.bool))
        for g in range(3):
            close(got[ids == g].var(), 1.0, tol=1e-5)

    @pytest.mark.parametrize(("name", "scale", "tol"), [("grpo", 1, 1e-4), ("dr_grpo", 40, 1e-12),
                                                        ("rloo", 40, 1e-12)])
    def test_a_shift_vanishes_and_a_scale_vanishes_only_by_std(self, name, scale, tol):
        returns, ids, mask = (normal(8, 2), torch.arange(2).repeat(4),
                              torch.ones(8, 3, dtype=torch.bool))
        advantages = OF_EPISODES[name][0]
        close(advantages(returns * 40 + 3, ids, mask), advantages(returns, ids, mask) * scale,
              tol=tol)

    def test_leave_one_out_is_dr_grpo_but_for_a_constant_of_the_group_size(self):
        returns, ids, mask = normal(12, 5), torch.arange(3).repeat(4), torch.ones(12, 1).bool()
        close(rloo_advantages(returns, ids, mask),
              group_advantages(returns, ids, mask, by_std=False) * 4 / 3)

    @pytest.mark.parametrize("name", OF_EPISODES)
    def test_a_group_does_not_see_another(self, name):
        mask, ids = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 1, 0, 1])
        before = OF_EPISODES[name][0](torch.tensor([1.0, 5, 2, 9]), ids, mask)
        after = OF_EPISODES[name][0](torch.tensor([1.0, -5, 2, 90]), ids, mask)
        assert before[[0, 2]].equal(after[[0, 2]])

    @pytest.mark.parametrize("name", OF_EPISODES)
    def test_gaps_in_the_group_ids_change_nothing(self, name):
        """What a filter leaves: groups 2 and 9 of ten."""
        returns, ids, mask = normal(6, 3), torch.arange(2).repeat(3), torch.ones(6, 2).bool()
        advantages = OF_EPISODES[name][0]
        assert advantages(returns, ids * 7 + 2, mask).equal(advantages(returns, ids, mask))

    @pytest.mark.parametrize("name", OF_EPISODES)
    def test_a_shuffled_batch_gives_the_same_advantages_shuffled(self, name):
        returns, ids, mask = normal(9, 3), torch.arange(3).repeat(3), normal((9, 4), 4) > 0
        order = torch.tensor([4, 8, 0, 2, 6, 1, 7, 3, 5])
        close(OF_EPISODES[name][0](returns[order], ids[order], mask[order]),
              OF_EPISODES[name][0](returns, ids, mask)[order])

    @pytest.mark.parametrize("name", OF_EPISODES)
    @pytest.mark.parametrize("value", [0.3, 0.75, 0.9, 10.9, 123.4])
    def test_a_group_of_equals_has_exactly_zero_advantage_in_float32(self, value, name):
        got = OF_EPISODES[name][0](torch.full((16,), value), torch.zeros(16, dtype=torch.long),
                                   torch.ones(16, 1, dtype=torch.bool))
        assert got.tolist() == [[0.0]] * 16

    @pytest.mark.parametrize("name", OF_EPISODES)
    def test_a_group_of_one_has_zero_advantage_also_if_its_episode_has_many_rows(self, name):
        mask = torch.ones(4, 1, dtype=torch.bool)
        got = OF_EPISODES[name][0](one(7, 7, 1, 2), torch.tensor([0, 0, 1, 1]), mask,
                                   episode_ids=torch.tensor([0, 0, 1, 2]))
        assert got[:2].tolist() == [[0.0], [0.0]]
        assert got[2] < 0 < got[3]

    def test_a_row_without_sampled_tokens_gets_nothing_but_still_counts_in_its_group(self):
        mask = torch.tensor([[0, 0], [1, 0]]).bool()
        got = group_advantages(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), mask, by_std=False)
        assert got.tolist() == [[0.0, 0.0], [1.0, 0.0]]


class TestEpisodes:
    """A turn is a row in the turn-wise modes; statistics are of episodes all the same."""

    OF_ROWS = {
        "group_advantages": lambda x, g, mask, e: group_advantages(x, g, mask, episode_ids=e),
        "dr_grpo": lambda x, g, mask, e: group_advantages(x, g, mask, False, e),
        "rloo_advantages": rloo_advantages,
        "soft_reweight": lambda x, g, mask, e: soft_reweight(mask.double(), x, g, e),
        "length_weight": lambda x, g, mask, e: length_weight(mask.double(), x + 3, e),
        **{method: lambda x, g, mask, e, m=method: normalise_rewards(x, g, m, e)[:, None]
           for method in REWARD_NORMS},
    }

    @pytest.mark.parametrize("name", OF_ROWS)
    @cases
    @given(ROWS)
    def test_every_row_gets_what_its_episode_gets_where_each_has_one_row(self, name, rows):
        group_ids, episode_ids, x = columns(rows)
        once = [b for b, (_, e, _) in enumerate(rows) if e not in [f for _, f, _ in rows[:b]]]
        mask = torch.ones(len(rows), 1, dtype=torch.bool)
        function = self.OF_ROWS[name]
        got = function(x, group_ids, mask, episode_ids)
        alone = function(x[once], group_ids[once], mask[once], None)
        of_episode = dict(zip(episode_ids[once].tolist(), alone.tolist()))
        close(got, [of_episode[e] for e in episode_ids.tolist()])


class TestReinforce:
    @cases
    @given(MASKS, SEEDS, DISCOUNTS)
    def test_equals_the_slow_sum(self, mask, seed, gamma):
        rewards = normal(mask.shape, seed)
        close(reinforce_advantages(rewards, mask, gamma), slow_reinforce(rewards, mask, gamma),
              tol=1e-7)

    def test_hand_worked_example(self):
        """gamma = .5, from the back: 4;  0 + .5*4 = 2;  1 + .5*2 = 2. The 9 was not sampled."""
        got = reinforce_advantages(row(0, 1, 9, 0, 4), bits("01 0 11"), gamma=0.5)
        close(got, row(0, 2, 0, 2, 4))

    @cases
    @given(MASKS, SEEDS, DISCOUNTS)
    def test_is_gae_with_lambda_one_and_a_critic_that_says_zero(self, mask, seed, gamma):
        rewards = normal(mask.shape, seed)
        close(reinforce_advantages(rewards, mask, gamma),
              masked_gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0], tol=1e-7)

    @cases
    @given(MASKS, SEEDS, DISCOUNTS)
    def test_whitened_it_is_reinforce_plus_plus(self, mask, seed, gamma):
        rewards = normal(mask.shape, seed)
        close(reinforce_pp_advantages(rewards, mask, gamma),
              slow_whiten(slow_reinforce(rewards, mask, gamma), mask), tol=1e-6)

    def test_reinforce_plus_plus_by_hand(self):
        """Returns to come 3, 2 | 1: mean 2, variance 1."""
        got = reinforce_pp_advantages(torch.cat([row(1, 0, 2), row(1, 9, 9)]),
                                      torch.cat([bits("101"), bits("100")]))
        close(got, [[1, 0, 0], [-1, 0, 0]], tol=1e-7)

    def test_reinforce_plus_plus_does_not_see_the_scale_or_the_shift_of_an_episodes_reward(self):
        """At gamma 1 all tokens of a row have the reward that stands at its end."""
        mask, scores = normal((6, 9), 0) > -0.5, normal(6, 1)
        close(reinforce_pp_advantages(last_token_rewards(scores * 40 + 3, mask), mask),
              reinforce_pp_advantages(last_token_rewards(scores, mask), mask), tol=1e-6)

    @cases
    @given(ROWS, SEEDS)
    def test_with_baseline_it_is_the_distance_from_the_groups_mean_whitened(self, rows, seed):
        group_ids, episode_ids, x = columns(rows)
        mask = normal((len(rows), 5), seed) > 0
        close(reinforce_pp_baseline_advantages(x, group_ids, mask, episode_ids),
              slow_whiten(slow_on_tokens(slow_dr_grpo, rows, mask), mask), tol=1e-6)

    def test_with_baseline_by_hand(self):
        """Distances -1, 1 | -2, 2 on a token each: mean 0, variance 10/3."""
        got = reinforce_pp_baseline_advantages(one(0, 2, 5, 9), torch.tensor([0, 0, 1, 1]),
                                               torch.ones(4, 1, dtype=torch.bool))
        close(got[:, 0], one(-1, 1, -2, 2) / (10 / 3) ** 0.5, tol=1e-7)

    def test_with_baseline_equals_have_exactly_zero_in_float32(self):
        got = reinforce_pp_baseline_advantages(torch.full((16,), 0.9), torch.arange(2).repeat(8),
                                               torch.ones(16, 3, dtype=torch.bool))
        assert not got.any()

    def test_an_empty_mask_gives_zeros(self):
        rewards, nothing = torch.ones(2, 3), torch.zeros(2, 3).bool()
        for function in (reinforce_advantages, reinforce_pp_advantages):
            assert function(rewards, nothing).tolist() == [[0.0] * 3] * 2


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
        rewards, values = normals(mask.shape, seed, 2)
        for got, expected in zip(masked_gae(rewards, values, mask, gamma, lam),
                                 slow_gae(rewards, values, mask, gamma, lam)):
            close(got, expected)

    @pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65])
    def test_equals_the_slow_sum_whatever_the_length_is_to_a_power_of_two(self, length):
        """The recursion is computed by doubling."""
        rewards, values = normals((1, length), 0, 2)
        mask = normal((1, length), 2) > -0.5
        close(masked_gae(rewards, values, mask, 0.99, 0.95)[0],
              slow_gae(rewards, values, mask, 0.99, 0.95)[0])

    @cases
    @given(MASKS, SEEDS)
    def test_is_textbook_gae_on_each_row_with_the_observations_deleted(self, mask, seed):
        rewards, values = normals(mask.shape, seed, 2)
        advantages, _ = masked_gae(rewards, values, mask, 0.9, 0.8)
        for b, said in enumerate(mask):
            alone = textbook_gae(rewards[b:b + 1, said], values[b:b + 1, said], 0.9, 0.8)
            close(advantages[b, said], alone[0])

    @cases
    @given(MASKS, SEEDS)
    def test_padding_and_neighbouring_rows_change_nothing(self, mask, seed):
        rewards, values = normals(mask.shape, seed, 2)
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
        mask = conversation([[(3, 5), (6, 4), (2, 5)], [(4, 3), (9, 6)]], padding=2) >= 0
        values = normal(mask.shape, 0)
        rewards = torch.zeros_like(values)
        # Ends of the turns.
        rewards[0, [7, 17, 24]] = one(0.5, 0.0, 2.0)
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
        rewards, values = normals(mask.shape, seed, 2)
        to_come = (rewards * mask).flip(1).cumsum(1).flip(1)
        advantages, returns = masked_gae(rewards, values, mask)
        close(advantages, (to_come - values) * mask)
        close(returns, to_come * mask)

    @cases
    @given(MASKS, SEEDS, DISCOUNTS)
    def test_at_lambda_zero_is_the_one_step_error(self, mask, seed, gamma):
        rewards, values = normals(mask.shape, seed, 2)
        advantages, _ = masked_gae(rewards, values, mask, gamma, lam=0.0)
        for b in range(len(mask)):
            v = torch.cat([values[b, mask[b]], torch.zeros(1, dtype=torch.float64)])
            close(advantages[b, mask[b]], rewards[b, mask[b]] + gamma * v[1:] - v[:-1])

    @cases
    @given(MASKS, SEEDS)
    def test_a_critic_that_is_right_leaves_no_advantage(self, mask, seed):
        """V_k = r_k + gamma * V_{k+1} makes every delta 0, whatever lambda."""
        rewards = normal(mask.shape, seed)
        values = slow_reinforce(rewards, mask, 0.9)
        advantages, returns = masked_gae(rewards, values, mask, 0.9, 0.7)
        close(advantages, torch.zeros_like(advantages))
        close(returns, values)

    def test_the_share_of_a_later_reward_decays_with_the_sampled_tokens_between(self):
        """A reward on token j counts (gamma lambda)^(j - k) at token k <= j; k and j count sampled
        tokens, and a reward that stands elsewhere counts nothing."""
        mask, d = bits("01 00 11"), 0.45
        got = [masked_gae(reward[None], torch.zeros(1, 6, dtype=torch.float64), mask, 0.9, 0.5)[0]
               for reward in torch.eye(6, dtype=torch.float64)]
        expected = torch.zeros(6, 6, dtype=torch.float64)
        expected[1, 1] = 1.0
        expected[4, [1, 4]] = one(d, 1)
        expected[5, [1, 4, 5]] = one(d * d, d, 1)
        close(torch.cat(got), expected)

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

    def test_float32_stays_within_rounding_of_float64_over_a_long_row(self):
        mask = normal((4, 512), 0) > -0.5
        rewards, values = normals(mask.shape, 1, 2)
        single = masked_gae(rewards.float(), values.float(), mask, 0.99, 0.95)[0]
        assert single.dtype == torch.float32
        close(single.double(), masked_gae(rewards, values, mask, 0.99, 0.95)[0], tol=1e-5)

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_refuses_three_shapes_that_are_not_equal(self, odd):
        parts = [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3).bool()]
        parts[odd] = parts[odd][:1]  # (1, 3) would broadcast
        with pytest.raises(ValueError, match=r"masked_gae: got shapes .*\(1, 3\)"
                                             r".*expected three equal ones"):
            masked_gae(*parts)


class TestBiLevelGAE:
    TURNS = turns(". 00 .. 111")  # the row of TestMaskedGAE

    def test_hand_worked_example(self):
        """gamma_turn = .95, gamma = 1, lambda = .9. The turns, from the back: A_1 = 2 - .5 = 1.5;
        delta_0 = .5 + .95*.5 - .2 = .775, A_0 = .775 + .95*.9*1.5 = 2.0575. The first turn's last
        token has the reward 2.0575 + .2, so before it .1 + .9*2.0575 = 1.95175; the second turn is
        as in masked_gae. The row and the numbers of VAGEN's bi_level_gae.
        """
        advantages, returns = bi_level_gae(TestMaskedGAE.REWARDS, TestMaskedGAE.VALUES,
                                           bits(TestMaskedGAE.MASK), self.TURNS, 1.0, 0.9, 0.95)
        close(advantages, row(0, 1.95175, 2.0575, 0, 0, 1.405, 1.45, 1.5))
        close(returns, row(0, 2.05175, 2.2575, 0, 0, 1.705, 1.85, 2.0))

    def test_ragens_own_example(self):
        """The self-test at the end of RAGEN's ragen/trainer/core_algos.py: two turns of five tokens
        without observations, a reward of 1 at the end of each, values .1 to 1."""
        values = torch.linspace(0.1, 1.0, 10, dtype=torch.float64)[None]
        advantages, returns = bi_level_gae(row(0, 0, 0, 0, 1, 0, 0, 0, 0, 1), values,
                                           bits("11111 11111"), turns("00000 11111"))
        close(advantages, row(1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0))
        close(returns, row(*[1.95] * 5, *[1.0] * 5))

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS, DISCOUNTS, DISCOUNTS)
    def test_equals_the_slow_loop(self, turn_ids, seed, gamma, lam, gamma_turn):
        rewards, values = normals(turn_ids.shape, seed, 2)
        for mask in (turn_ids >= 0, thinned(turn_ids >= 0, seed)):
            for got, expected in zip(
                    bi_level_gae(rewards, values, mask, turn_ids, gamma, lam, gamma_turn),
                    slow_bi_level_gae(rewards, values, mask, turn_ids, gamma, lam, gamma_turn)):
                close(got, expected)

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS, DISCOUNTS)
    def test_of_one_turn_is_masked_gae_whatever_the_discount_of_turns(
            self, turn_ids, seed, gamma, lam):
        mask, one_turn = turn_ids >= 0, turn_ids.clamp(max=0)
        rewards, values = normals(mask.shape, seed, 2)
        for got, expected in zip(bi_level_gae(rewards, values, mask, one_turn, gamma, lam, 0.3),
                                 masked_gae(rewards, values, mask, gamma, lam)):
            close(got, expected)

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS, DISCOUNTS)
    def test_of_turns_of_one_token_is_masked_gae_with_the_discount_of_turns(
            self, turn_ids, seed, lam, gamma_turn):
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        single = torch.where(mask, mask.cumsum(1) - 1, -1)
        for got, expected in zip(
                bi_level_gae(rewards, values, mask, single, 0.3, lam, gamma_turn),
                masked_gae(rewards, values, mask, gamma_turn, lam)):
            close(got, expected)

    @cases
    @given(TURN_IDS, SEEDS)
    def test_with_all_discounts_one_and_rewards_at_turn_ends_is_masked_gae(self, turn_ids, seed):
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        rewards *= turn_ends(turn_ids, mask)
        close(bi_level_gae(rewards, values, mask, turn_ids, 1.0, 1.0, 1.0)[0],
              masked_gae(rewards, values, mask)[0])

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS)
    def test_at_gamma_and_lambda_one_a_token_has_its_turns_advantage_from_its_own_value(
            self, turn_ids, seed, gamma_turn):
        """A[p] = A_k + V[e_k] - V[p]: all tokens of turn k have the same return."""
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        ends = turn_ends(turn_ids, mask)
        rewards *= ends
        advantages, returns = bi_level_gae(rewards, values, mask, turn_ids, 1.0, 1.0, gamma_turn)
        of_turns, _ = masked_gae(rewards, values, ends, gamma_turn, 1.0)
        target = turn_sums((of_turns + values) * ends, turn_ids)
        close(advantages, (target - values) * mask)
        close(returns, target)

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS, DISCOUNTS)
    def test_at_the_turn_ends_the_words_between_them_do_not_count(
            self, turn_ids, seed, lam, gamma_turn):
        """The row with one token a turn has the same advantages there."""
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        ends = turn_ends(turn_ids, mask)
        got, _ = bi_level_gae(rewards, values, mask, turn_ids, 0.7, lam, gamma_turn)
        close(got * ends, slow_gae(rewards, values, ends, gamma_turn, lam)[0])

    def test_a_turn_without_reward_is_a_turn(self):
        """Values 0: the 1 at the end of the third turn is worth .9 and .81 to the two before."""
        advantages, _ = bi_level_gae(row(0, 0, 0, 0, 0, 1), torch.zeros(1, 6, dtype=torch.float64),
                                     bits("111111"), turns("00 11 22"), gamma_turn=0.9)
        close(advantages, row(0.81, 0.81, 0.9, 0.9, 1, 1))

    def test_a_last_turn_without_reward_is_a_turn(self):
        """delta_0 = 1 + .5*.2 - .4 = .7, delta_1 = -.2, so A_0 = .7 - .5*.2."""
        advantages, _ = bi_level_gae(row(1, 0), row(0.4, 0.2), bits("11"), turns("01"),
                                     gamma_turn=0.5)
        close(advantages, row(0.6, -0.2))

    def test_a_penalty_on_each_token_stays_in_its_turn(self):
        """The KL in the reward is paid where it arises: an earlier turn never hears of it, but for
        what stands on a last token."""
        turn_ids = turns("000 111")
        mask, (rewards, values) = turn_ids >= 0, normals((1, 6), 0, 2)
        penalty = row(0, 0, 0, 1, 2, 0)
        paid, _ = bi_level_gae(rewards - penalty, values, mask, turn_ids)
        free, _ = bi_level_gae(rewards, values, mask, turn_ids)
        close(free - paid, row(0, 0, 0, 3, 2, 0))


class TestTurnGAE:
    def test_hand_worked_example(self):
        """The turns of TestBiLevelGAE, and no tokens: 2.0575 for the first turn, 1.5 for the
        second; returns + .2 and + .5. The row and the numbers of VAGEN's turn_wise_gae."""
        advantages, returns = turn_gae(TestMaskedGAE.REWARDS, TestMaskedGAE.VALUES,
                                       bits(TestMaskedGAE.MASK), TestBiLevelGAE.TURNS,
                                       lam=0.9, gamma_turn=0.95)
        close(advantages, row(0, 2.0575, 2.0575, 0, 0, 1.5, 1.5, 1.5))
        close(returns, row(0, 0, 2.2575, 0, 0, 0, 0, 2.0))

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS, DISCOUNTS)
    def test_equals_the_slow_loop(self, turn_ids, seed, lam, gamma_turn):
        rewards, values = normals(turn_ids.shape, seed, 2)
        for mask in (turn_ids >= 0, thinned(turn_ids >= 0, seed)):
            rewards = torch.where(mask, rewards, 0.0)  # what a turn earns, it earns on its tokens
            for got, expected in zip(turn_gae(rewards, values, mask, turn_ids, lam, gamma_turn),
                                     slow_turn_gae(rewards, values, mask, turn_ids, lam,
                                                   gamma_turn)):
                close(got, expected)

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS)
    def test_of_turns_of_one_token_is_masked_gae(self, turn_ids, seed, lam):
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        single = torch.where(mask, mask.cumsum(1) - 1, -1)
        for got, expected in zip(turn_gae(rewards, values, mask, single, lam, 0.9),
                                 masked_gae(rewards, values, mask, 0.9, lam)):
            close(got, expected)

    @cases
    @given(TURN_IDS, SEEDS)
    def test_where_in_its_turn_a_reward_stands_changes_nothing(self, turn_ids, seed):
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        at_ends = turn_sums(rewards * mask, turn_ids) * turn_ends(turn_ids, mask)
        for got, expected in zip(turn_gae(at_ends, values, mask, turn_ids, 0.8, 0.9),
                                 turn_gae(rewards, values, mask, turn_ids, 0.8, 0.9)):
            close(got, expected)

    @cases
    @given(TURN_IDS, SEEDS)
    def test_only_the_value_of_a_turns_last_token_takes_part(self, turn_ids, seed):
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        others = torch.where(turn_ends(turn_ids, mask), values, math.nan)
        for got, expected in zip(turn_gae(rewards, others, mask, turn_ids, 0.8, 0.9),
                                 turn_gae(rewards, values, mask, turn_ids, 0.8, 0.9)):
            assert got.equal(expected)

    @cases
    @given(TURN_IDS, SEEDS)
    def test_has_the_advantages_of_bi_level_gae_at_the_turn_ends(self, turn_ids, seed):
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        ends = turn_ends(turn_ids, mask)
        rewards *= ends
        by_turn = turn_gae(rewards, values, mask, turn_ids, 0.8, 0.9)
        bi_level = bi_level_gae(rewards, values, mask, turn_ids, 1.0, 0.8, 0.9)
        for got, expected in zip(by_turn, bi_level):
            close(got * ends, expected * ends)

    def test_a_turn_without_reward_is_a_turn(self):
        got, _ = turn_gae(row(0, 0, 0, 0, 1), torch.zeros(1, 5, dtype=torch.float64),
                          bits("11011"), turns("00.11"), gamma_turn=0.9)
        close(got, row(0.9, 0.9, 0, 1, 1))


class TestTimeSteps:
    """What the four recursions over tokens share. `function(rewards, values, mask, turn_ids)`."""

    RECURSIONS = {
        "reinforce": lambda r, v, m, ids: (reinforce_advantages(r, m, 0.9),),
        "masked_gae": lambda r, v, m, ids: masked_gae(r, v, m, 0.9, 0.8),
        "bi_level_gae": lambda r, v, m, ids: bi_level_gae(r, v, m, ids, 0.9, 0.8, 0.7),
        "turn_gae": lambda r, v, m, ids: turn_gae(r, v, m, ids, 0.8, 0.7),
    }

    @pytest.mark.parametrize("name", RECURSIONS)
    @pytest.mark.parametrize("junk", [100.0, math.nan, math.inf])
    @cases
    @given(TURN_IDS, SEEDS)
    def test_are_exactly_zero_outside_the_mask_and_blind_to_what_stands_there(
            self, junk, name, turn_ids, seed):
        mask, function = thinned(turn_ids >= 0, seed), self.RECURSIONS[name]
        rewards, values = normals(mask.shape, seed, 2)
        clean = function(rewards, values, mask, turn_ids)
        noisy = function(torch.where(mask, rewards, junk), torch.where(mask, values, junk), mask,
                         turn_ids)
        for got, expected in zip(noisy, clean):
            assert got.equal(expected)
            assert (got[~mask] == 0).all()

    @pytest.mark.parametrize("name", RECURSIONS)
    @cases
    @given(TURN_IDS, SEEDS)
    def test_are_linear_in_rewards_and_values_together(self, name, turn_ids, seed):
        """So the unit of the reward is the unit of the advantage."""
        mask, function = turn_ids >= 0, self.RECURSIONS[name]
        r1, v1, r2, v2 = normals(mask.shape, seed, 4)
        for got, a, b in zip(function(40 * r1 + r2, 40 * v1 + v2, mask, turn_ids),
                             function(r1, v1, mask, turn_ids), function(r2, v2, mask, turn_ids)):
            close(got, 40 * a + b, tol=1e-10)

    @pytest.mark.parametrize("name", ["masked_gae", "bi_level_gae"])
    @cases
    @given(TURN_IDS, SEEDS)
    def test_returns_are_advantages_plus_values(self, name, turn_ids, seed):
        mask = turn_ids >= 0
        rewards, values = normals(mask.shape, seed, 2)
        advantages, returns = self.RECURSIONS[name](rewards, values, mask, turn_ids)
        close(returns, (advantages + values) * mask)

    @pytest.mark.parametrize("name", RECURSIONS)
    def test_an_empty_mask_gives_zeros(self, name):
        ones, nothing = torch.ones(2, 3), torch.full((2, 3), -1)
        for got in self.RECURSIONS[name](ones, ones, nothing >= 0, nothing):
            assert got.tolist() == [[0.0] * 3] * 2

    @pytest.mark.parametrize("name", RECURSIONS)
    def test_a_row_of_one_token_is_its_reward_less_its_value(self, name):
        advantages = self.RECURSIONS[name](row(3), row(1), bits("1"), turns("0"))[0]
        assert advantages.tolist() == [[3.0 if name == "reinforce" else 2.0]]


# ==================================================================================================
# How advantages are bent


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
    @given(MASKS, SEEDS)
    def test_equals_the_slow_definition_and_is_blind_to_what_stands_outside(self, mask, seed):
        x = normal(mask.shape, seed)
        close(whiten(x, mask), slow_whiten(x, mask), tol=1e-9)
        assert whiten(torch.where(mask, x, math.nan), mask).equal(whiten(x, mask))

    @cases
    @given(TURN_IDS, SEEDS)
    def test_takes_mean_and_variance_where_it_is_told_to(self, turn_ids, seed):
        x, mask = normal(turn_ids.shape, seed), turn_ids >= 0
        ends = turn_ends(turn_ids, mask)
        close(whiten(x, mask, ends), slow_whiten(x, mask, ends), tol=1e-9)

    def test_hand_worked_example(self):
        """1, 2, 3: mean 2, sample variance 1. The fourth entry is not in the mask."""
        close(whiten(row(1, 2, 3, 100), bits("1110")), row(-1, 0, 1, 0), tol=1e-7)

    def test_a_turn_of_many_words_counts_for_one_turn(self):
        """Turns worth 1, 2, 3 of one, four and one token: mean 2, variance 1 over the turn ends."""
        ids = turns("0 1111 2")
        close(whiten(row(1, 2, 2, 2, 2, 3), ids >= 0, turn_ends(ids, ids >= 0)),
              row(-1, 0, 0, 0, 0, 1), tol=1e-7)

    def test_the_sign_and_the_order_of_the_differences_are_kept(self):
        x, mask = normal((3, 7), 5), normal((3, 7), 6) > 0
        assert whiten(x, mask)[mask].argsort().equal(x[mask].argsort())

    @pytest.mark.parametrize("value", [0.3, 2.5, 10.9, 123.4])
    def test_equal_entries_become_exactly_zero_in_float32_whatever_their_size(self, value):
        x = torch.full((64, 101), value)
        assert not whiten(x, torch.ones_like(x).bool()).any()

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


class TestWeights:
    """Weights of trajectories on their advantages, and of the update on its loss."""

    @cases
    @given(ROWS, SEEDS)
    def test_soft_reweight_equals_the_slow_definition(self, rows, seed):
        group_ids, episode_ids, x = columns(rows)
        advantages = normal((len(rows), 3), seed)
        stds = {g: slow_std(xs) for g, xs in slow_groups(rows).items()}
        weights = [stds[g] / (max(stds.values()) + 1e-6) for g, _, _ in rows]
        close(soft_reweight(advantages, x, group_ids, episode_ids),
              [[w * a for a in line] for w, line in zip(weights, advantages.tolist())])

    def test_soft_reweight_by_hand(self):
        """Spreads sqrt(2) and 2 sqrt(2), and a group of equals."""
        got = soft_reweight(torch.ones(6, 1, dtype=torch.float64), one(0, 2, 0, 4, 3, 3),
                            torch.tensor([0, 0, 1, 1, 2, 2]))
        close(got[:, 0], [0.5, 0.5, 1, 1, 0, 0], tol=1e-6)

    def test_soft_reweight_where_no_group_has_spread_leaves_nothing(self):
        got = soft_reweight(torch.ones(4, 2), torch.full((4,), 0.9), torch.tensor([0, 0, 1, 1]))
        assert not got.any()

    @cases
    @given(ROWS, SEEDS)
    def test_length_weight_equals_the_slow_definition(self, rows, seed):
        rows = [(g, e, int((r + 2) * 8)) for g, e, r in rows]  # whole numbers from 0
        _, episode_ids, _ = columns(rows)
        lengths = {e: n for _, e, n in rows}
        advantages, mean = normal((len(rows), 3), seed), statistics.fmean(lengths.values())
        close(length_weight(advantages, torch.tensor([n for _, _, n in rows]), episode_ids),
              [[a * mean / max(n, 1) for a in line]
               for (_, _, n), line in zip(rows, advantages.tolist())])

    def test_length_weight_by_hand(self):
        """Mean length 4, or (2 + 4 + 9) / 3 = 5 where the first two rows are of one episode."""
        ones = torch.ones(3, 1, dtype=torch.float64)
        close(length_weight(ones, torch.tensor([2, 4, 6]))[:, 0], [2, 1, 2 / 3])
        close(length_weight(torch.ones(4, 1, dtype=torch.float64), torch.tensor([2, 2, 4, 9]),
                            torch.tensor([0, 0, 1, 2]))[:, 0], [2.5, 2.5, 1.25, 5 / 9])

    @pytest.mark.parametrize(("mode", "scale"), [("none", 1.0), ("linear", 0.25), ("sqrt", 0.5)])
    def test_loss_scale_by_hand(self, mode, scale):
        """One of four groups was kept."""
        assert loss_scale(bits("0100")[0], mode) == scale

    @cases
    @given(st.lists(st.booleans(), min_size=1, max_size=9))
    def test_loss_scale_equals_the_slow_definition(self, kept):
        share = sum(kept) / len(kept)
        for mode, scale in (("none", 1), ("linear", share), ("sqrt", math.sqrt(share))):
            assert loss_scale(torch.tensor(kept), mode) == pytest.approx(scale, abs=1e-6)

    @pytest.mark.parametrize("mode", ["root", "", "Linear"])
    def test_loss_scale_refuses_unknown_names_and_lists_the_known_ones(self, mode):
        with pytest.raises(ValueError, match=f"unknown loss scaling '{mode}': expected one of none,"
                                             " linear, sqrt"):
            loss_scale(torch.ones(2).bool(), mode)


# ==================================================================================================
# Which losses


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
        logprobs = one(math.log(ratio) - 1.5).requires_grad_()
        loss, clipped = policy_loss(logprobs, one(-1.5), one(advantage))
        loss.sum().backward()
        close(loss.detach(), [expected])
        close(logprobs.grad, [slope])
        assert clipped.tolist() == [expected_clipped]

    @cases
    @given(SEEDS, st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.5, 1.2),
                                   (0.0, 0.0, 10.0), (0.2, 0.28, 0.0), (0.2, 0.28, 0)]))
    def test_equals_the_slow_loop(self, seed, bounds):
        new, old, advantages = normals((3, 4), seed, 3)
        loss, clipped = policy_loss(new, old, advantages, *bounds)
        for b in range(3):
            for t in range(4):
                expected, expected_clipped = slow_policy_loss(
                    float(new[b, t] - old[b, t]), float(advantages[b, t]), *bounds)
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

    @pytest.mark.parametrize("dual_clip", [3.0, 0])
    def test_agrees_with_numeric_gradients_away_from_the_corners(self, dual_clip):
        """Corners of the log ratio: log .8 = -.22, log 1.28 = .25, log 3 = 1.10."""
        logprobs = one(-1.0, -0.1, 0.1, 0.8, 2.0).repeat(2).requires_grad_()
        advantages = one(*[1.5] * 5, *[-0.7] * 5)
        old = torch.zeros(10, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda x: policy_loss(x, old, advantages, dual_clip=dual_clip)[0], (logprobs,))

    @cases
    @given(SEEDS)
    def test_is_never_below_the_free_loss_for_good_tokens_and_never_above_the_floor_for_bad_ones(
            self, seed):
        logprobs, old, advantages = (x * 2 for x in normals((50,), seed, 3))
        loss, _ = policy_loss(logprobs, old, advantages, dual_clip=3.0)
        free, good, bad = -advantages * (logprobs - old).exp(), advantages > 0, advantages < 0
        assert (loss >= free)[good].all()
        assert (loss <= -3 * advantages)[bad].all()

    def test_without_dual_clip_a_bad_token_has_no_floor(self):
        assert policy_loss(one(math.log(100)), one(0), one(-1), dual_clip=0)[0].item() == \
            pytest.approx(100)

    def test_the_upper_bound_is_separate_from_the_lower_one(self):
        """Clip-higher (DAPO): at ratio 1.25 a good token still learns; at the symmetric 0.2 it
        would not."""
        logprobs = one(math.log(1.25))
        assert not policy_loss(logprobs, one(0), one(1))[1]
        assert policy_loss(logprobs, one(0), one(1), clip_high=0.2)[1]
        close(policy_loss(logprobs, one(0), one(1), clip_high=0.2)[0], [-1.2])
        close(policy_loss(-logprobs, one(0), one(-1), clip_low=0.1)[0], [0.9])

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    @pytest.mark.parametrize("dual_clip", [3.0, 0])
    @pytest.mark.parametrize("nats", [-1000.0, 1000.0])
    def test_a_freak_token_has_a_finite_loss_and_gradient(self, nats, dual_clip, advantage):
        logprobs = torch.tensor([nats], requires_grad=True)
        loss, _ = policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]),
                              dual_clip=dual_clip)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert logprobs.grad.isfinite().all()

    @pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
    def test_refuses_a_dual_clip_of_one_or_less(self, dual_clip):
        with pytest.raises(ValueError, match=f"dual_clip={dual_clip}, expected more than 1, or 0"):
            policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), dual_clip=dual_clip)


class TestSequenceRatio:
    """GSPO: all tokens of a row share one ratio."""

    def test_hand_worked_example(self):
        """Ratios 2 and 1 of the two masked tokens have the geometric mean sqrt(2), above 1.28."""
        logprobs, old = row(math.log(2), 0, 7), row(0, 0, 0)
        good, clipped = policy_loss(logprobs, old, row(1, 1, 0), sequence_mask=bits("110"))
        close(good, row(-1.28, -1.28, 0))
        assert clipped.tolist() == [[True, True, False]]
        bad, clipped = policy_loss(logprobs, old, row(-1, -2, 0), sequence_mask=bits("110"))
        close(bad, row(2**0.5, 2 * 2**0.5, 0))
        assert not clipped.any()

    @cases
    @given(MASKS, SEEDS, st.sampled_from([(0.2, 0.28, 3.0), (3e-4, 4e-4, 0), (0.1, 0.5, 1.2)]))
    def test_equals_the_slow_loop(self, mask, seed, bounds):
        new, old, advantages = normals(mask.shape, seed, 3)
        loss, clipped = policy_loss(new, old, advantages, *bounds, sequence_mask=mask)
        for b, flags in enumerate(mask.tolist()):
            steps = [t for t, flag in enumerate(flags) if flag]
            for t in steps:
                mean = statistics.fmean([float(new[b, s] - old[b, s]) for s in steps])
                expected, expected_clipped = slow_policy_loss(mean, float(advantages[b, t]),
                                                              *bounds)
                close(loss[b, t], expected)
                assert bool(clipped[b, t]) == expected_clipped

    @cases
    @given(MASKS, SEEDS)
    def test_what_stands_outside_the_mask_changes_neither_loss_nor_gradient(self, mask, seed):
        new, old = normals(mask.shape, seed, 2)
        advantages = normal(mask.shape, seed + 2) * mask
        results = []
        for junk in (0.0, math.nan):
            logprobs = torch.where(mask, new, junk).requires_grad_()
            loss, _ = policy_loss(logprobs, torch.where(mask, old, junk), advantages,
                                  sequence_mask=mask)
            total = aggregate(loss, loss_weights(mask, "seq-mean-token-mean"))
            total.backward()
            results.append((total, logprobs.grad))
        assert results[0][0].equal(results[1][0])
        assert results[0][1].equal(results[1][1])

    @cases
    @given(MASKS, SEEDS, st.sampled_from([0.0, 3.0]))
    def test_its_gradient_is_that_of_the_straight_through_form(self, mask, seed, dual_clip):
        """The same ratio on every token, its gradient through the token's own logprob (Zheng et
        al. 2025, eq. 14): log ratio = logp - sg(logp) + sg(mean log ratio). With one advantage for
        the row and the mean of means, the row's gradient spreads evenly either way."""
        new, old = normals(mask.shape, seed, 2)
        advantages = normal((len(mask), 1), seed + 2).expand(mask.shape)
        weights = loss_weights(mask, "seq-mean-token-mean")

        logprobs = new.clone().requires_grad_()
        loss, _ = policy_loss(logprobs, old, advantages, dual_clip=dual_clip, sequence_mask=mask)
        aggregate(loss, weights).backward()

        theirs = new.clone().requires_grad_()
        count = mask.sum(1, keepdim=True).clamp(min=1)
        mean = ((new - old) * mask).sum(1, keepdim=True) / count
        token_wise, _ = policy_loss(theirs - theirs.detach() + mean, torch.zeros_like(mean),
                                    advantages, dual_clip=dual_clip)
        aggregate(token_wise, weights).backward()
        close(logprobs.grad, theirs.grad)

    def test_of_rows_of_one_token_is_the_tokens_own_ratio(self):
        new, old, advantages = normals((6, 1), 0, 3)
        for got, expected in zip(
                policy_loss(new, old, advantages, sequence_mask=torch.ones(6, 1).bool()),
                policy_loss(new, old, advantages)):
            close(got.double(), expected.double())

    def test_agrees_with_numeric_gradients_away_from_the_corners(self):
        """Mean log ratios -.1, .5, .8 and 2, with advantages of both signs; -.22, .25 and 1.10 are
        the corners."""
        means = one(-0.1, 0.5, 0.8, 2).repeat(2)[:, None]
        mask = bits("1101").expand(8, 4)
        logprobs = (means + row(0.3, -0.1, 5, -0.2)).requires_grad_()
        advantages = torch.cat([normal((4, 4), 1).abs() + 0.1, -normal((4, 4), 2).abs() - 0.1])
        old = torch.zeros(8, 4, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda x: policy_loss(x, old, advantages, sequence_mask=mask)[0], (logprobs,))

    def test_a_row_without_tokens_has_a_finite_loss_and_gradient(self):
        logprobs = torch.zeros(1, 3, requires_grad=True)
        loss, _ = policy_loss(logprobs, torch.zeros(1, 3), torch.zeros(1, 3),
                              sequence_mask=bits("000"))
        loss.sum().backward()
        assert not loss.any()
        assert not logprobs.grad.any()


class TestValueLoss:
    @pytest.mark.parametrize(("value", "expected", "slope"), [
        (0.25, 0.5 * 1.75**2, -1.75),  # inside: plain
        (1.0, 0.5 * 1.5**2, 0.0),  # towards the return, past .5: held back
        (-1.0, 0.5 * 3.0**2, -3.0),  # away from the return: pulled back
    ], ids=["inside", "towards_the_return", "away_from_the_return"])
    def test_hand_worked_value_and_gradient(self, value, expected, slope):
        """V_old = 0, R = 2, and the default value_clip of .5."""
        values = one(value).requires_grad_()
        loss = value_loss(values, one(0), one(2))
        loss.sum().backward()
        close(loss.detach(), [expected])
        close(values.grad, [slope])

    @cases
    @given(SEEDS, st.sampled_from([0.1, 0.5, 2.0]))
    def test_equals_the_slow_loop(self, seed, clip):
        values, old, returns = normals((3, 4), seed, 3)
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
        values, old, returns = normals((40,), seed, 3)
        plain = 0.5 * (values - returns) ** 2
        assert (value_loss(values, old, returns) >= plain).all()
        close(value_loss(values, values, returns), plain)

    def test_agrees_with_numeric_gradients_away_from_the_corners(self):
        values = one(0.25, 1.0, -1.0, 4.0).requires_grad_()
        old, returns = torch.zeros(4, dtype=torch.float64), one(2, 2, 2, 2)
        assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns), (values,))


class TestEntropy:
    def test_hand_worked_examples(self):
        """Four equal outcomes log 4; 1/2, 1/4, 1/4: (1/2) log 2 + (1/2) log 4 = 1.5 log 2."""
        close(entropy(torch.full((4,), 0.25, dtype=torch.float64).log()), math.log(4))
        close(entropy(one(0.5, 0.25, 0.25).log()), 1.5 * math.log(2))

    @cases
    @given(SEEDS, st.sampled_from([0.1, 1.0, 30.0]))
    def test_equals_the_slow_definition(self, seed, scale):
        log_p = (normal((2, 3, 5), seed) * scale).log_softmax(-1)
        close(entropy(log_p), [[-sum(math.exp(v) * v for v in outcomes) for outcomes in line]
                               for line in log_p.tolist()])

    def test_an_impossible_outcome_adds_nothing_and_has_a_finite_gradient(self):
        """A token that the tokenizer never uses has the logit -inf."""
        logits = one(0.3, 0.3, -math.inf).requires_grad_()
        of_a_coin = entropy(logits.log_softmax(-1))
        of_a_coin.backward()
        close(of_a_coin.detach(), math.log(2))
        assert logits.grad.isfinite().all()

    def test_agrees_with_numeric_gradients(self):
        logits = normal((2, 5), 0).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: entropy(x.log_softmax(-1)), (logits,))

    def test_following_its_gradient_makes_the_distribution_more_even(self):
        logits = normal((4,), 1).requires_grad_()
        before = entropy(logits.log_softmax(-1))
        before.backward()
        assert entropy((logits + 0.1 * logits.grad).log_softmax(-1)) > before


class TestAggregate:
    X = torch.tensor([[1.0, 3.0, 9.0], [9.0, 2.0, 9.0], [9.0, 9.0, 9.0]])
    MASK = torch.cat([bits("110"), bits("010"), bits("000")])

    @pytest.mark.parametrize(("mode", "loss"), [
        ("token-mean", 2.0),  # (1 + 3 + 2) / 3
        ("seq-mean-token-mean", 2.0),  # (2 + 2) / 2: two rows have tokens
        ("seq-mean-token-sum", 3.0),  # (4 + 2) / 2
        ("seq-mean-token-sum-norm", 0.75),  # ... of 4 tokens that a row may have
    ])
    def test_hand_worked_example(self, mode, loss):
        weights = loss_weights(self.MASK, mode, horizon=4)
        assert aggregate(self.X, weights).item() == pytest.approx(loss, abs=1e-6)

    def test_a_short_row_weighs_more_in_the_mean_of_means(self):
        """Tokens 8, 2 and 5: (8 + 2 + 5) / 3 = 5 or ((8 + 2) / 2 + 5) / 2 = 5; but with the 5 a 7
        it is 17/3 or 6."""
        x, mask = torch.tensor([[8.0, 2.0], [7.0, 0.0]]), torch.cat([bits("11"), bits("10")])
        assert aggregate(x, loss_weights(mask)).item() == pytest.approx(17 / 3)
        assert aggregate(x, loss_weights(mask, "seq-mean-token-mean")).item() == pytest.approx(6)

    @pytest.mark.parametrize("mode", AGGREGATIONS)
    @cases
    @given(MASKS, SEEDS)
    def test_equals_the_slow_definition(self, mode, mask, seed):
        x = normal(mask.shape, seed)
        close(aggregate(x, loss_weights(mask, mode, horizon=7)), slow_loss(x, mask, mode, 7),
              tol=1e-6)

    @pytest.mark.parametrize("mode", AGGREGATIONS)
    @cases
    @given(MASKS, SEEDS, st.integers(1, 4), st.integers(1, 5))
    def test_micro_batches_cannot_change_the_sum(self, mode, mask, seed, rows, width):
        """Rows apart, and columns cut off or apart."""
        x, weights = normal(mask.shape, seed), loss_weights(mask, mode, horizon=7)
        parts = [aggregate(a, w)
                 for several_x, several_w in zip(x.split(rows), weights.split(rows))
                 for a, w in zip(several_x.split(width, dim=1), several_w.split(width, dim=1))]
        close(sum(parts), float(aggregate(x, weights)))

    @pytest.mark.parametrize("mode", AGGREGATIONS)
    @cases
    @given(MASKS, SEEDS)
    def test_padding_and_rows_without_tokens_change_nothing(self, mode, mask, seed):
        x = normal(mask.shape, seed)
        wide = torch.nn.functional.pad(mask, (2, 3, 0, 2))
        more = torch.nn.functional.pad(x, (2, 3, 0, 2), value=50.0)
        close(aggregate(more, loss_weights(wide, mode, 7)),
              float(aggregate(x, loss_weights(mask, mode, 7))))

    def test_where_all_rows_have_n_tokens_the_modes_differ_by_constants(self):
        """The mean of all tokens, the mean of means, 1 / n of the mean of sums, and horizon / n of
        that with the constant."""
        x, mask, n, horizon = normal((3, 6), 0), bits("011010").expand(3, 6), 3, 7
        mean, of_means, of_sums, of_norms = (
            float(aggregate(x, loss_weights(mask, mode, horizon))) for mode in AGGREGATIONS)
        assert mean == pytest.approx(float(x[mask].mean()), abs=1e-6)
        assert of_means == pytest.approx(mean, abs=1e-6)
        assert of_sums == pytest.approx(mean * n, abs=1e-6)
        assert of_norms == pytest.approx(mean * n / horizon, abs=1e-6)

    @pytest.mark.parametrize("mode", AGGREGATIONS)
    def test_weights_are_its_gradient_and_zero_outside_the_mask(self, mode):
        x, weights = torch.zeros(3, 3, requires_grad=True), loss_weights(self.MASK, mode, 4)
        aggregate(x, weights).backward()
        assert x.grad.equal(weights)
        assert (weights > 0).equal(self.MASK)
        assert weights.dtype == torch.float32

    @pytest.mark.parametrize("mode", AGGREGATIONS)
    def test_agrees_with_numeric_gradients(self, mode):
        weights = loss_weights(self.MASK, mode, 4)
        x = self.X.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: aggregate(x**2, weights), (x,))

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_nan_and_inf_outside_the_mask_reach_neither_value_nor_gradient(self, poison):
        x = torch.tensor([[1.0, poison]], requires_grad=True)
        mean = aggregate(x * 2, loss_weights(bits("10")))
        mean.backward()
        assert mean == 2.0
        assert x.grad.tolist() == [[2.0, 0.0]]

    def test_nan_on_the_mask_is_not_hidden(self):
        assert aggregate(torch.tensor([[1.0, math.nan]]), loss_weights(bits("11"))).isnan()

    @pytest.mark.parametrize("mode", AGGREGATIONS)
    def test_an_update_without_tokens_is_zero(self, mode):
        assert aggregate(torch.ones(2, 3), loss_weights(torch.zeros(2, 3).bool(), mode)) == 0.0

    @pytest.mark.parametrize("mode", ["token_mean", "", "mean"])
    def test_refuses_unknown_names_and_lists_the_known_ones(self, mode):
        with pytest.raises(ValueError, match=f"unknown aggregation '{mode}': expected one of "
                                             "token-mean, seq-mean-token-mean, "):
            loss_weights(bits("11"), mode)


# ==================================================================================================
# All of them


class TestInputs:
    """Pure functions: what goes in comes out untouched, and float64 stays float64."""

    TURN_IDS = torch.cat([turns(".00 1"), turns("..01")])
    IDS = torch.tensor([0, 0])
    CALLS = {
        "filter_groups": lambda m, ids, x, y, z: filter_groups(x[0].abs()),
        "group_scores": lambda m, ids, x, y, z: group_scores(x[:, 0], TestInputs.IDS),
        "normalise_rewards": lambda m, ids, x, y, z: normalise_rewards(x[:, 0], TestInputs.IDS,
                                                                       "asym_clip"),
        "episode_sums": lambda m, ids, x, y, z: episode_sums(x[:, 0], TestInputs.IDS),
        "last_token_rewards": lambda m, ids, x, y, z: last_token_rewards(x[:, 0], m),
        "turn_returns": lambda m, ids, x, y, z: turn_returns(x[:, 0], TestInputs.IDS,
                                                             torch.tensor([1, 0]), 0.9),
        "turn_sums": lambda m, ids, x, y, z: turn_sums(x, ids),
        "group_advantages": lambda m, ids, x, y, z: group_advantages(x[:, 0], TestInputs.IDS, m),
        "rloo_advantages": lambda m, ids, x, y, z: rloo_advantages(x[:, 0], TestInputs.IDS, m),
        "reinforce_advantages": lambda m, ids, x, y, z: reinforce_advantages(x, m, 0.9),
        "reinforce_pp_advantages": lambda m, ids, x, y, z: reinforce_pp_advantages(x, m, 0.9),
        "reinforce_pp_baseline_advantages": lambda m, ids, x, y, z:
            reinforce_pp_baseline_advantages(x[:, 0], TestInputs.IDS, m),
        "masked_gae": lambda m, ids, x, y, z: masked_gae(x, y, m, 0.9, 0.8),
        "bi_level_gae": lambda m, ids, x, y, z: bi_level_gae(x, y, m, ids, 0.9, 0.8),
        "turn_gae": lambda m, ids, x, y, z: turn_gae(x, y, m, ids, 0.9, 0.8),
        "whiten": lambda m, ids, x, y, z: whiten(x, m),
        "soft_reweight": lambda m, ids, x, y, z: soft_reweight(x, y[:, 0], TestInputs.IDS),
        "length_weight": lambda m, ids, x, y, z: length_weight(x, m.sum(1)),
        "policy_loss": lambda m, ids, x, y, z: policy_loss(x, y, z),
        "policy_loss of a sequence": lambda m, ids, x, y, z: policy_loss(x, y, z, sequence_mask=m),
        "value_loss": lambda m, ids, x, y, z: value_loss(x, y, z),
        "entropy": lambda m, ids, x, y, z: entropy(x),
        "kl_estimate": lambda m, ids, x, y, z: kl_estimate(x, y),
        "kl_loss": lambda m, ids, x, y, z: kl_loss(x, y),
        "aggregate": lambda m, ids, x, y, z: aggregate(x, loss_weights(m)),
    }

    @pytest.mark.parametrize("name", CALLS)
    def test_are_never_written_to(self, name):
        """nano-aha-moment's `compute_token_log_probs` wrote into a view of its labels (utils.py),
        and the count of response tokens that followed was wrong. So: nothing writes into what it
        was given.
        """
        inputs = [self.TURN_IDS >= 0, self.TURN_IDS.clone(), *normals((2, 4), 0, 3)]
        before = [x.clone() for x in inputs]
        self.CALLS[name](*inputs)
        assert all(x.equal(y) for x, y in zip(inputs, before))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("name", [name for name in CALLS if name != "filter_groups"])
    def test_keep_their_precision(self, name, dtype):
        result = self.CALLS[name](self.TURN_IDS >= 0, self.TURN_IDS,
                                  *(x.to(dtype) for x in normals((2, 4), 0, 3)))
        tensors = [x for x in (result if isinstance(result, tuple) else (result,))
                   if x.dtype != torch.bool]
        assert tensors
        assert all(x.dtype == dtype for x in tensors)

    def test_examples_in_the_docstrings_are_true(self):
        result = doctest.testmod(starpo)
        assert result.attempted > 0
        assert result.failed == 0


class TestSpeed:
    def test_the_only_loop_is_the_doubling_of_the_recursion(self):
        """Ten passes for a thousand tokens. A loop over tokens or rows costs seconds a step."""
        loops = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        tree = ast.parse(inspect.getsource(starpo))
        found = [(function.name, type(node)) for function in ast.walk(tree)
                 if isinstance(function, ast.FunctionDef)
                 for node in ast.walk(function) if isinstance(node, loops)]
        assert found == [("_from_the_end", ast.While)]
        assert sum(isinstance(node, loops) for node in ast.walk(tree)) == 1

    def test_advantage_filter_and_loss_of_two_million_tokens_take_less_than_a_second(self):
        """1,024 trajectories of 2,048 tokens on one thread, seconds of the processor: nothing else
        that runs on the machine counts."""
        turn_ids = torch.arange(2048).expand(1024, 2048) // 256  # eight turns,
        turn_ids = torch.where(torch.arange(2048) % 256 < 64, -1, turn_ids)  # a quarter is observed
        mask, group_ids = turn_ids >= 0, torch.arange(1024) // 16
        generator = torch.Generator().manual_seed(0)
        rewards, values = (torch.randn(1024, 2048, generator=generator) for _ in range(2))
        logprobs = values.requires_grad_()

        def seconds(function):
            start = time.process_time()
            function()
            return time.process_time() - start

        def loss():
            per_token, _ = policy_loss(logprobs, rewards, rewards)
            aggregate(per_token, loss_weights(mask)).backward()

        returns, critic = rewards[:, 0], values.detach()
        advantages = {
            "gae": lambda: whiten(masked_gae(rewards, critic, mask, 0.99, 0.95)[0], mask),
            "bi-level": lambda: whiten(
                bi_level_gae(rewards, critic, mask, turn_ids, 0.99, 0.95)[0], mask),
            "turn": lambda: whiten(turn_gae(rewards, critic, mask, turn_ids, 0.95)[0], mask,
                                   turn_ends(turn_ids, mask)),
            "grpo": lambda: group_advantages(returns, group_ids, mask),
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            took = {name: seconds(function) for name, function in advantages.items()}
            rest = seconds(lambda: filter_groups(group_scores(returns, group_ids))) + seconds(loss)
        finally:
            torch.set_num_threads(threads)
        assert max(took.values()) + rest < 1.0, (took, rest)


class TestMuseum:
    """Famous bugs in miniature. Each docstring names where the original stands."""

    def test_a_turn_without_reward_keeps_its_place_in_time(self):
        """RAGEN ragen/trainer/core_algos.py, compute_bi_level_gae_advantage_return: a turn ends
        where the reward is not zero. A turn that earned nothing is then no turn: it merges with
        the one after it and loses its discount, and if it is the last one there is an IndexError.
        """
        turn_ids, values = turns("00 . 11"), torch.zeros(1, 5, dtype=torch.float64)
        mask, first_earns_nothing = turn_ids >= 0, row(0, 0, 0, 0, 1)
        merged = torch.where(mask, 0, -1)  # the turn that the original sees
        original, _ = slow_bi_level_gae(first_earns_nothing, values, mask, merged, 1.0, 1.0, 0.9)
        close(original, row(1, 1, 0, 1, 1))
        close(bi_level_gae(first_earns_nothing, values, mask, turn_ids, gamma_turn=0.9)[0],
              row(0.9, 0.9, 0, 1, 1))

        last_earns_nothing = row(0, 1, 0, 0, 0)
        assert not last_earns_nothing[turn_ids == 1].any()  # no end after the last token
        close(bi_level_gae(last_earns_nothing, values, mask, turn_ids, gamma_turn=0.9)[0],
              row(1, 1, 0, 0, 0))

    def test_a_penalty_on_each_token_does_not_make_each_token_a_turn(self):
        """The same function of RAGEN with a KL in the reward: no token's reward is 0 any more, so
        the discount of turns works on tokens. VAGEN's, which is told where turns end, does not.
        """
        turn_ids, values = turns("000"), torch.zeros(1, 3, dtype=torch.float64)
        rewards = row(-0.01, -0.01, 1)
        original, _ = masked_gae(rewards, values, bits("111"), 0.5, 1.0)  # each a turn
        close(original, row(0.235, 0.49, 1))
        close(bi_level_gae(rewards, values, bits("111"), turn_ids, gamma_turn=0.5)[0],
              row(0.98, 0.99, 1))

    def test_reinforce_plus_plus_hears_of_rewards_behind_an_observation(self):
        """verl verl/trainer/ppo/core_algos.py, compute_reinforce_plus_plus_outcome_advantage: the
        running sum is multiplied by the mask, so it starts again at every observation, and only the
        last turn ever hears of a reward at the end.
        """
        mask, rewards = bits("11 0 11"), row(0, 0, 0, 0, 1)
        original, running = torch.zeros_like(rewards), 0.0
        for t in (4, 3, 2, 1, 0):
            running = float(rewards[0, t]) + running
            original[0, t] = running
            running *= float(mask[0, t])
        assert original.tolist() == [[0, 0, 1, 1, 1]]
        assert reinforce_advantages(rewards, mask).tolist() == [[1, 1, 0, 1, 1]]

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
        """RAGEN ragen/trainer/core_algos.py, compute_grpo_outcome_advantage, and verl's RLOO: a
        group of one gets mean 0 and std 1, so its raw return becomes its advantage.
        """
        returns, ids = torch.tensor([11.0, 3.0, 1.0]), torch.tensor([0, 1, 1])
        for advantages, _ in OF_EPISODES.values():
            got = advantages(returns, ids, torch.ones(3, 1, dtype=torch.bool))
            assert got[0] == 0
            assert got[1] > 0 > got[2]

    def test_duplicates_and_turns_do_not_vote_twice_in_their_group(self):
        """RAGEN V2 fills a batch up with random copies of its rows before the group statistics are
        taken (`copy` after the filter), and VAGEN's GRPO counts every turn of a turn-wise batch:
        the episode with three rows then has three votes in the mean of its group.
        """
        returns, ids = one(1, 1, 1, 0), torch.zeros(4, dtype=torch.long)
        mask, episodes = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 0, 0, 1])
        voted = group_advantages(returns, ids, mask, by_std=False)
        close(voted[:, 0], [0.25, 0.25, 0.25, -0.75])
        fair = group_advantages(returns, ids, mask, by_std=False, episode_ids=episodes)
        close(fair[:, 0], [0.5, 0.5, 0.5, -0.5])

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

    def test_groups_without_spread_are_kept_by_a_softmax_only_if_they_may_be_candidates(self):
        """RAGEN V2's main table (softmax top_p of .9 with `include_zero`): of eight groups with
        spreads .5 x 4 and 0 x 4 it keeps seven, three of them with nothing to learn from.
        """
        scores = torch.tensor([0.5] * 4 + [0.0] * 4)
        theirs = filter_groups(scores, 0.9, "top_p_softmax", include_zero=True)
        assert theirs.tolist() == [True] * 7 + [False]
        assert filter_groups(scores, 0.9, "top_p_softmax").tolist() == [True] * 4 + [False] * 4
        assert filter_groups(scores, 0.9, include_zero=True).tolist() == [True] * 4 + [False] * 4

    def test_the_smallest_groups_are_found_behind_those_without_spread(self):
        """RAGEN ragen/trainer/rollout_filter.py: linear top_p walks until the first score that is
        not positive, so from the smallest up, with a zero among the candidates, it stops at once
        and the step trains on nothing.
        """
        scores = [0.0, 3.0, 1.0]
        walked = []
        for score in sorted(scores):
            if score <= 0:
                break
            walked.append(score)
        assert walked == []
        assert filter_groups(one(*scores), 0.2, select="smallest", include_zero=True).tolist() == [
            True, False, True]

    def test_the_micro_batch_size_does_not_weigh_tokens(self):
        """verl's agg_loss as RAGEN V2 uses it: "token-mean" is taken in each micro-batch and
        averaged over them, so with one row each a token of a short reply weighs more than one of a
        long reply.
        """
        x = torch.tensor([[8.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]).bool()
        mean_of_means = sum(x[b, mask[b]].mean() for b in range(2)) / 2
        assert mean_of_means == 4.0
        weights = loss_weights(mask)
        split = sum(aggregate(x[b:b + 1], weights[b:b + 1]) for b in range(2))
        assert aggregate(x, weights) == pytest.approx(1.6)  # 8 / 5 tokens
        assert split == pytest.approx(1.6)

    def test_padding_is_not_a_number_of_tokens(self):
        """verl's agg_loss, "seq-mean-token-sum-norm": divided by the width of the padded batch, so
        one long reply makes the loss of all others smaller. Dr. GRPO's constant is a constant.
        """
        x, mask = torch.ones(2, 4), bits("1100").expand(2, 4)
        wider = torch.nn.functional.pad(mask, (0, 4))
        assert float((x * mask).sum() / mask.shape[1]) == 1.0
        assert float(torch.ones(2, 8)[wider].sum() / wider.shape[1]) == 0.5
        mode = "seq-mean-token-sum-norm"
        assert aggregate(x, loss_weights(mask, mode, 4)) == 0.5  # 2 of 4 tokens
        assert aggregate(torch.ones(2, 8), loss_weights(wider, mode, 4)) == 0.5

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
        assert aggregate(x, loss_weights(mask)).item() == pytest.approx(2.0)  # (1 + 2 + 3) / 3

    def test_k1_regularises_nothing_and_is_refused(self):
        """RAGEN's config/base.yaml: `kl_loss_type: kl` is k1 = log pi - log ref. As a loss its
        gradient is E[grad log pi] = 0, whatever the reference: it does not even appear.
        """
        pull = TestKL().gradient(lambda logprobs, ref: logprobs - ref)
        assert pull.abs().max() < 1e-15
        assert TestKL().true_gradient(TestKL().reverse).abs().max() > 0.1
        with pytest.raises(ValueError, match="regularises nothing"):
            kl_loss(torch.zeros(1), torch.zeros(1), "k1")

    def test_a_bad_token_that_became_likely_does_not_dominate_the_update(self):
        """PPO as in Schulman et al. 2017 has no bound for A < 0: ratio e^5 is a loss of 148 for one
        token. Dual clip (Ye et al. 2020) holds it at 3 and gives it no gradient.
        """
        logprobs = torch.tensor([5.0], requires_grad=True)
        free, _ = policy_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), dual_clip=0)
        assert free > 148
        loss, _ = policy_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), dual_clip=3.0)
        loss.sum().backward()
        assert loss.tolist() == [3.0]
        assert logprobs.grad.tolist() == [0.0]
