"""StarPO's equations: each function agrees with a slow, obvious twin over random cases, and with
numbers worked by hand."""

import ast
import doctest
import inspect
import math
import statistics

import pytest
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


@st.composite
def turn_wise(draw):
    """(group, episode, return) of each row; an episode has one to three rows, in any order.

    Eighths have exact sums and means, so equal returns stay equal in every order of addition. The
    ids have gaps, as after a filter.
    """
    episodes = draw(st.lists(st.tuples(st.sampled_from([5, 0, 2]), st.integers(-16, 16)),
                             min_size=1, max_size=8))
    rows = [(group, 3 * e + 1, eighths / 8) for e, (group, eighths) in enumerate(episodes)
            for _ in range(draw(st.integers(1, 3)))]
    return draw(st.permutations(rows))


TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4)  # may be none
TURN_IDS = st.builds(conversation, st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 2))
MASKS = TURN_IDS.map(lambda turn_ids: turn_ids >= 0)
SEEDS = st.integers(0, 2**31)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
ROWS = turn_wise()


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(shape, seed, n):
    return [normal(shape, seed + i) for i in range(n)]


def thinned(mask, seed):
    """The mask without a sixth of its tokens: turns then cover more than what is masked."""
    return mask & (normal(mask.shape, seed + 99) > -1)


def readings(rows):
    """(rows, group_ids, x, episode_ids), then each row as an episode of its own without ids."""
    groups, episodes, x = zip(*rows)
    yield rows, torch.tensor(groups), one(*x), torch.tensor(episodes)
    alone = [(group, b, x) for b, (group, _, x) in enumerate(rows)]
    yield alone, torch.tensor(groups), one(*x), None


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


def slow_rows(definition, mask, *tensors):
    """Apply a definition, which maps lists of one row's masked entries to lists, to every row.

    returns: (outputs, B, T), 0 outside the mask
    """
    results = []
    for b, flags in enumerate(mask.tolist()):
        steps = [t for t, flag in enumerate(flags) if flag]
        outputs = definition(*[[x[b, t].item() for t in steps] for x in tensors])
        result = torch.zeros(len(outputs), len(flags), dtype=torch.float64)
        result[:, steps] = torch.tensor(outputs, dtype=torch.float64)
        results.append(result)
    return torch.stack(results, dim=1)


def slow_turns(turn_ids):
    """The positions of every turn, first turn first."""
    return [[t for t, k in enumerate(turn_ids) if k == turn]
            for turn in sorted({k for k in turn_ids if k >= 0})]


def slow_filter(scores, value, strategy, select, include_zero, eps):
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


class TestFilter:
    STRATEGIES = ["none", "top_p", "top_p_softmax", "top_k", "top_k_abs", "min_p"]

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @settings(cases, max_examples=40)
    @given(st.lists(st.integers(-6, 6), max_size=8), st.integers(2, 98),
           st.sampled_from(["largest", "smallest"]), st.booleans(),
           st.sampled_from([0.0, 0.01, 0.019]), st.sampled_from([1, 4, 2**-10]))
    def test_equals_the_slow_walk(self, strategy, scores, percent, select, include_zero, eps,
                                  scale):
        """Whole numbers make ties frequent; the values avoid shares that rounding would decide."""
        value = (percent / 100 + 0.0013) * (8 if strategy == "top_k_abs" else 1)
        if strategy in ("top_p", "min_p"):
            scores = [abs(score) for score in scores]
        scores = [score * scale for score in scores]
        got = starpo.filter_groups(one(*scores), value, strategy, select, include_zero, eps)
        assert got.tolist() == slow_filter(scores, value, strategy, select, include_zero, eps)

    def test_hand_worked_examples(self):
        for strategy, value, select, include_zero, scores, kept in [
            ("top_p", 0.6, "largest", False, [4, 3, 2, 1], {0, 1}),  # .59 * 10 = 5.9: 4, then 7
            ("top_p", 0.6, "smallest", False, [4, 3, 2, 1], {1, 2, 3}),  # 1, 3, then 6
            ("top_p", 0.25, "smallest", True, [3, 0, 1], {1, 2}),  # 0, then 1
            ("top_p", 1.0, "largest", False, [0, 1000, 1], {1, 2}),  # 1: all, whatever eps says
            ("top_p_softmax", 0.6, "largest", False, [1, 1, 1], {0, 1}),  # 1/3, then 2/3
            ("top_p_softmax", 0.9, "smallest", False, [10, 1, 0, 0], {1}),  # e^-1 : e^-10
            ("top_p_softmax", 1.0, "largest", False, [0, 1000, 1], {1, 2}),
            ("top_k", 0.5, "largest", False, [0, 2, 0, 0], {1}),  # two groups, one candidate
            ("top_k", 0.5, "smallest", False, [4, 3, 0, 1], {1, 3}),  # half of four, not of three
            ("top_k", 0.1, "largest", False, [1, 2, 3, 4], {3}),  # int(.4) = 0, but at least one
            ("top_k_abs", 2.9, "smallest", False, [1, 4, 2, 3], {0, 2}),
            ("min_p", 0.6, "largest", False, [10, 6, 4, 0], {0, 1}),  # >= 6
            ("min_p", 0.5, "smallest", False, [10, 6, 4, 0], {1, 2}),  # <= 4 / .5
            ("none", 7.0, "largest", False, [0, -2, 0], {0, 1, 2}),
        ]:
            got = starpo.filter_groups(one(*scores), value, strategy, select, include_zero)
            assert set(got.nonzero()[:, 0].tolist()) == kept, (strategy, value, select, scores)

    def test_by_default_keeps_the_shortest_prefix_that_holds_89_percent(self):
        assert starpo.filter_groups(one(89.5, 6, 4.5)).tolist() == [True, False, False]
        assert starpo.filter_groups(one(88.5, 5.5, 6)).tolist() == [True, False, True]

    def test_of_tied_groups_the_first_are_kept(self):
        """Two hundred are more than an unstable sort keeps in order."""
        for select in ("largest", "smallest"):
            kept = starpo.filter_groups(torch.ones(200), 0.5, "top_k", select)
            assert kept.tolist() == [True] * 100 + [False] * 100

    def test_top_k_counts_the_groups_that_a_percentage_means(self):
        """In floats .29 * 100 is less than 29."""
        assert starpo.filter_groups(torch.ones(100), 0.29, "top_k").sum() == 29

    def test_eps_keeps_rounding_from_taking_one_group_too_many(self):
        """One of three equal groups holds a third, but in float32 three times .1 is too large."""
        scores = torch.full((3,), 0.1)
        assert starpo.filter_groups(scores, 1 / 3).tolist() == [True, False, False]
        assert starpo.filter_groups(scores, 1 / 3, eps=0.0).tolist() == [True, True, False]

    def test_a_score_of_at_most_1e_10_is_no_score(self):
        kept = starpo.filter_groups(one(1e-10, 2e-10, -1e-10, -2e-10), 1.0, "top_k")
        assert kept.tolist() == [False, True, False, True]

    def test_refuses_scores_that_are_not_finite_or_have_no_share(self):
        refused = [(strategy, bad, "ones") for strategy in self.STRATEGIES
                   for bad in (math.nan, math.inf)]
        refused += [("top_p", -0.5, "ones >= 0"), ("min_p", -0.5, "ones >= 0")]
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
            ("min_p", 2.0, "more than 0 and at most 1."),
        ]:
            with pytest.raises(ValueError, match=f"{strategy}: got a value of {value}, "
                                                 f"expected {expected}$"):
                starpo.filter_groups(torch.ones(2), value, strategy)


def slow_groups(rows):
    """group -> the x of each of its episodes, taken from the episode's first row."""
    seen, groups = set(), {}
    for group, episode, x in rows:
        if episode not in seen:
            groups.setdefault(group, []).append(x)
        seen.add(episode)
    return groups


def slow_on_tokens(definition, rows, mask):
    """definition(the row's x, its group's xs, the xs of all groups) on the row's masked tokens."""
    groups = slow_groups(rows)
    return torch.tensor([[definition(x, groups[group], [*groups.values()]) if m else 0.0
                          for m in flags]
                         for (group, _, x), flags in zip(rows, mask.tolist())], dtype=torch.float64)


def slow_std(xs):
    return statistics.stdev(xs) if len(xs) > 1 else 0.0


def slow_distance(x, xs, groups):
    return x - statistics.fmean(xs)


def slow_grpo(x, xs, groups):
    return (x - statistics.fmean(xs)) / (slow_std(xs) + 1e-6)


def slow_asym_clip(x, xs, groups):
    return min(max(slow_grpo(x, xs, groups), -1.0), 3.0)


def slow_rloo(x, xs, groups):
    """Compared with the mean of the others, if there are any."""
    others = list(xs)
    others.remove(x)
    return x - statistics.fmean(others) if others else 0.0


def normalised(method):
    return lambda x, groups, mask, ids: (
        starpo.normalise_rewards(x, groups, method, ids)[:, None] * mask)


def scored(statistic):
    return lambda x, groups, mask, ids: (
        starpo.group_scores(x, groups, statistic, ids)[groups][:, None] * mask)


# Functions of (returns, group_ids, mask, episode_ids), and their twins.
OF_EPISODES = {
    "group_std": (scored("std"), lambda x, xs, groups: slow_std(xs)),
    "group_mean": (scored("mean"), lambda x, xs, groups: statistics.fmean(xs)),
    "reward": (normalised("identity"), lambda x, xs, groups: x),
    "reward_less_mean": (normalised("mean"), slow_distance),
    "reward_by_std": (normalised("mean_std"), slow_grpo),
    "reward_clipped": (normalised("asym_clip"), slow_asym_clip),
    "grpo": (lambda x, g, mask, ids: starpo.group_advantages(x, g, mask, True, ids), slow_grpo),
    "dr_grpo": (lambda x, g, mask, ids: starpo.group_advantages(x, g, mask, False, ids),
                slow_distance),
    "rloo": (starpo.rloo_advantages, slow_rloo),
    "soft_reweight": (
        lambda x, g, mask, ids: starpo.soft_reweight(mask.to(x.dtype), x, g, ids),
        lambda x, xs, groups: slow_std(xs) / (max(map(slow_std, groups)) + 1e-6)),
    "length_weight": (  # lengths are whole numbers from 0, which counts as 1
        lambda x, g, mask, ids: starpo.length_weight(mask.to(x.dtype), x * 8 + 16, ids),
        lambda x, xs, groups: (statistics.fmean(sum(groups, [])) * 8 + 16) / max(x * 8 + 16, 1)),
}


class TestGroups:
    @pytest.mark.parametrize("name", OF_EPISODES)
    @cases
    @given(ROWS, SEEDS)
    def test_equal_the_slow_loop_in_which_an_episode_counts_once(self, name, rows, seed):
        fast, slow = OF_EPISODES[name]
        mask = normal((len(rows), 5), seed) > 0
        for read, group_ids, x, ids in readings(rows):
            close(fast(x, group_ids, mask, ids), slow_on_tokens(slow, read, mask))

    def test_scores_and_advantages_by_hand(self):
        """Returns 1, 0, 0, 1: mean 1/2, sample variance 4 * (1/4) / 3, so (1/2) / sqrt(1/3) is
        the advantage of the first. The others' mean is 1/3. Group 1 has no rows, group 2 one."""
        returns, ids, mask = one(1, 0, 0, 1, 5), torch.tensor([0, 0, 0, 0, 2]), bits("101")
        close(starpo.group_scores(returns, ids), [3**-0.5, 0, 0])
        close(starpo.group_scores(returns, ids, "mean"), [0.5, 0, 5])
        signs, mask = one(1, -1, -1, 1, 0)[:, None] * mask, mask.expand(5, 3)
        close(starpo.group_advantages(returns, ids, mask), signs * 3**0.5 / 2, tol=1e-5)
        close(starpo.rloo_advantages(returns, ids, mask), signs * 2 / 3)
        assert starpo.normalise_rewards(returns, ids).equal(returns)

    def test_asym_clip_ends_at_minus_one_and_three(self):
        """One 1 among sixteen: (1 - 1/16) / (1/4) = 3.75."""
        x, ids = one(1, *[0] * 15), torch.zeros(16, dtype=torch.long)
        assert starpo.normalise_rewards(x, ids, "asym_clip")[0] == 3
        assert starpo.normalise_rewards(-x, ids, "asym_clip")[0] == -1

    def test_a_std_of_rounding_is_not_blown_up_by_normalisation(self):
        x, ids = one(0, 1e-7), torch.tensor([0, 0])
        assert starpo.normalise_rewards(x, ids, "mean_std").tolist() == [0, 0]
        close(starpo.normalise_rewards(x, ids, "mean"), [-5e-8, 5e-8])

    def test_equal_returns_leave_exactly_nothing_in_float32(self):
        """Sixteen times .9 has a float32 mean that is not .9."""
        of_distances = OF_EPISODES.keys() - {"group_mean", "reward", "length_weight"}
        ids, mask = torch.zeros(16, dtype=torch.long), torch.ones(16, 1, dtype=torch.bool)
        for value in (0.1, 0.3, 0.75, 0.9, 10.9, 123.4):
            x = torch.full((16,), value)
            for name in of_distances:
                assert not OF_EPISODES[name][0](x, ids, mask, None).any(), (name, value)
            assert not starpo.whiten(x[:, None], mask).any(), value

    def test_loss_scale_is_one_the_share_of_kept_groups_or_its_root(self):
        kept = torch.tensor([False, True, False, False])
        assert starpo.loss_scale(kept) == 1.0
        assert starpo.loss_scale(kept, "linear") == 0.25
        assert starpo.loss_scale(kept, "sqrt") == 0.5


class TestCredit:
    """Which row and which token gets which part of an episode's reward."""

    @cases
    @given(ROWS, SEEDS)
    def test_episode_sums_are_the_sum_over_the_rows_of_the_episode(self, rows, seed):
        x, ids = normal(len(rows), seed), [episode for _, episode, _ in rows]
        close(starpo.episode_sums(x, torch.tensor(ids)),
              [sum(v for v, e in zip(x.tolist(), ids) if e == mine) for mine in ids])

    @cases
    @given(MASKS, SEEDS)
    def test_last_token_rewards_stand_on_the_last_sampled_token(self, mask, seed):
        scores = normal(len(mask), seed)
        expected = slow_rows(lambda said: [[0.0] * len(said[:-1]) + said[-1:]], mask,
                             scores[:, None].expand(mask.shape))[0]
        assert starpo.last_token_rewards(scores, mask).equal(expected)

    @cases
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=5), SEEDS, DISCOUNTS)
    def test_turn_returns_are_the_discounted_rewards_of_this_turn_and_later_ones(
            self, lengths, seed, gamma):
        rows = [(2 * e, k) for e, length in enumerate(lengths) for k in range(length)]
        rows = [rows[i] for i in normal(len(rows), seed + 1).argsort()]
        rewards = normal(len(rows), seed)
        expected = [sum(gamma ** (j - k) * r for (other, j), r in zip(rows, rewards.tolist())
                        if other == e and j >= k) for e, k in rows]
        episode_ids, turn_numbers = torch.tensor(rows).T
        close(starpo.turn_returns(rewards, episode_ids, turn_numbers, gamma), expected)

    def test_turn_returns_by_hand(self):
        """Rewards 1, 0, 2, in another order; the other episode has one turn."""
        rows = one(2, 5, 1, 0), torch.tensor([1, 0, 1, 1]), torch.tensor([2, 0, 0, 1])
        assert starpo.turn_returns(*rows).tolist() == [2, 5, 3, 2]

    @cases
    @given(TURN_IDS, st.integers(2, 6), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def test_overlong_penalty_equals_the_slow_definition(self, turn_ids, limit, share):
        expected = torch.zeros(turn_ids.shape)
        free = limit * (1 - share)
        for b, ids in enumerate(turn_ids.tolist()):
            for turn in slow_turns(ids):
                if share and len(turn) > free:
                    expected[b, turn[-1]] = -min((len(turn) - free) / (limit - free), 1.0)
        close(starpo.overlong_penalty(turn_ids, limit, share), expected, tol=1e-6)


class TestKL:
    @cases
    @given(SEEDS)
    def test_equals_the_slow_definition(self, seed):
        logprobs, ref = normals((10,), seed, 2)
        for name, definition in [("k1", lambda d: -d), ("k2", lambda d: d**2 / 2),
                                 ("k3", lambda d: math.exp(d) - d - 1)]:
            expected = [definition(d) for d in (ref - logprobs).tolist()]
            close(starpo.kl_estimate(logprobs, ref, name), expected)
            if name != "k1":
                close(starpo.kl_loss(logprobs, ref, name), expected)
        close(starpo.kl_loss(logprobs, ref), expected)  # k3 by default
        close(starpo.kl_estimate(logprobs, ref), expected)

    def test_the_expected_gradients_are_those_that_the_docstring_promises(self):
        """The expectation is exact: a sum over three outcomes."""
        logits, ref = one(0.5, -1.0, 1.5).requires_grad_(), one(-0.2, 0.4, 0.9).log_softmax(0)
        logprobs = logits.log_softmax(0)
        p = logprobs.exp()

        def gradient(terms):
            return torch.autograd.grad(terms.sum(), logits, retain_graph=True)[0]

        reverse = gradient(p * (logprobs - ref))  # KL(pi || ref)
        forward = gradient(ref.exp() * (ref - logprobs))  # KL(ref || pi)
        for name, expected in [("k1", [0, 0, 0]), ("k2", reverse), ("k3", forward)]:
            close(gradient(p.detach() * starpo.kl_estimate(logprobs, ref, name)), expected)

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
            estimate = starpo.kl_loss(logprobs, torch.zeros(2), name)
            estimate.sum().backward()
            assert estimate.isfinite().all(), name
            assert logprobs.grad.isfinite().all(), name
            assert logprobs.grad[0] == slope, name

    @cases
    @given(st.floats(0.001, 1), st.floats(-0.5, 3), st.floats(0.01, 1), st.integers(1, 512))
    def test_the_adaptive_coefficient_grows_by_the_relative_error_but_at_most_a_fifth(
            self, coef, ratio, target, trajectories):
        error = 0.2 if ratio > 1.2 else -0.2 if ratio < 0.8 else ratio - 1
        assert starpo.adapt_kl_coef(coef, ratio * target, target, trajectories, 1000) == (
            pytest.approx(coef + coef * error * trajectories / 1000))


def slow_reinforce(rewards, gamma):
    """G_k = sum_j gamma^(j-k) r_j"""
    return [[sum(gamma**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]]


def slow_gae(rewards, values, gamma, lam):
    """Schulman et al. 2016, eq. 16 as a sum: A_k = sum_j (gamma lam)^(j-k) delta_j."""
    deltas = [r + gamma * following - v
              for r, v, following in zip(rewards, values, [*values[1:], 0.0])]
    advantages = [sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
                  for k in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values)]


def slow_bi_level_gae(rewards, values, turn_ids, gamma, lam, gamma_turn):
    """GAE over the last tokens of the turns; its returns are then the last rewards of the turns,
    each of which has a GAE of its own."""
    each = slow_turns(turn_ids)
    _, returns_of_turns = slow_gae([rewards[turn[-1]] for turn in each],
                                   [values[turn[-1]] for turn in each], gamma_turn, lam)
    advantages, returns = [], []
    for turn, of_turn in zip(each, returns_of_turns):
        inside = [rewards[t] for t in turn[:-1]] + [of_turn]
        more_advantages, more_returns = slow_gae(inside, [values[t] for t in turn], gamma, lam)
        advantages += more_advantages
        returns += more_returns
    return advantages, returns


def slow_turn_gae(rewards, values, turn_ids, lam, gamma_turn):
    """GAE over the turns; all tokens of a turn have its advantage, its last token its return."""
    each = slow_turns(turn_ids)
    of_turns = slow_gae([sum(rewards[t] for t in turn) for turn in each],
                        [values[turn[-1]] for turn in each], gamma_turn, lam)
    advantages, returns = [], []
    for turn, advantage, of_turn in zip(each, *of_turns):
        advantages += [advantage] * len(turn)
        returns += [0.0] * (len(turn) - 1) + [of_turn]
    return advantages, returns


def slow_turn_ends(turn_ids):
    ends = [turn[-1] for turn in slow_turns(turn_ids)]
    return [[float(t in ends) for t in range(len(turn_ids))]]


def slow_turn_sums(x, turn_ids):
    return [[sum(v for v, other in zip(x, turn_ids) if other == k) for k in turn_ids]]


# Functions of (rewards, values, mask, turn_ids, gamma, lam, gamma_turn), and their twins, which
# see the masked tokens of one row.
OF_TOKENS = {
    "turn_ends": (lambda r, v, m, ids, *_: (starpo.turn_ends(ids, m).to(r),),
                  lambda r, v, ids, *_: slow_turn_ends(ids)),
    "turn_sums": (lambda r, v, m, ids, *_: (starpo.turn_sums(r, ids.masked_fill(~m, -1)),),
                  lambda r, v, ids, *_: slow_turn_sums(r, ids)),
    "reinforce": (lambda r, v, m, ids, gamma, *_: (starpo.reinforce_advantages(r, m, gamma),),
                  lambda r, v, ids, gamma, *_: slow_reinforce(r, gamma)),
    "masked_gae": (lambda r, v, m, ids, gamma, lam, _: starpo.masked_gae(r, v, m, gamma, lam),
                   lambda r, v, ids, gamma, lam, _: slow_gae(r, v, gamma, lam)),
    "bi_level_gae": (starpo.bi_level_gae, slow_bi_level_gae),
    "turn_gae": (lambda r, v, m, ids, _, *discounts: starpo.turn_gae(r, v, m, ids, *discounts),
                 lambda r, v, ids, _, *discounts: slow_turn_gae(r, v, ids, *discounts)),
}


class TestTokens:
    @pytest.mark.parametrize("name", OF_TOKENS)
    @settings(cases, max_examples=40)
    @given(TURN_IDS, SEEDS, DISCOUNTS, DISCOUNTS, DISCOUNTS)
    def test_equal_the_slow_loop_and_are_blind_outside_the_mask(
            self, name, turn_ids, seed, gamma, lam, gamma_turn):
        (fast, slow), discounts = OF_TOKENS[name], (gamma, lam, gamma_turn)
        mask = thinned(turn_ids >= 0, seed)
        rewards, values = (torch.where(mask, x, math.nan) for x in normals(mask.shape, seed, 2))
        got = torch.stack(fast(rewards, values, mask, turn_ids, *discounts))
        close(got, slow_rows(lambda *xs: slow(*xs, *discounts), mask, rewards, values, turn_ids))
        assert (got[:, ~mask] == 0).all()

    def test_a_long_row_in_float32_stays_within_rounding_of_the_slow_loop(self):
        """The recursion is computed by doubling: 63 to 65 tokens are around a power of two."""
        for length in (63, 64, 65, 400):
            rewards, values = (x.float() for x in normals((1, length), 0, 2))
            mask = normal((1, length), 2) > -0.5
            got = torch.stack(starpo.masked_gae(rewards, values, mask, 0.99, 0.95))
            slow = slow_rows(lambda *xs: slow_gae(*xs, 0.99, 0.95), mask, rewards, values)
            close(got, slow, tol=2e-5)

    def test_a_missing_mask_cannot_be_noticed_at_gamma_and_lambda_one_but_can_at_99_and_95(self):
        """At gamma = lambda = 1 the deltas telescope: A_t = the rewards from t on - V_t, however
        many observation tokens lie between. RAGEN's defaults are exactly there."""
        mask = conversation([[(3, 5), (6, 4), (2, 5)], [(4, 3), (9, 6)]], padding=2) >= 0
        rewards, values = normals(mask.shape, 0, 2)
        rewards *= mask

        def gap(gamma, lam):
            unmasked, _ = starpo.masked_gae(rewards, values, mask | True, gamma, lam)
            masked, _ = starpo.masked_gae(rewards, values, mask, gamma, lam)
            return (masked - unmasked)[mask].abs().max()

        to_come = starpo.reinforce_advantages(rewards, mask)
        close(starpo.masked_gae(rewards, values, mask)[0], to_come - values * mask)
        assert gap(1.0, 1.0) < 1e-12
        assert gap(0.99, 0.95) > 0.1

    def test_a_masked_token_outside_of_turns_ends_none(self):
        assert starpo.turn_ends(turns(".0"), bits("11")).equal(bits("01"))


class TestGAE:
    """One row for all three: observation, two tokens, two observations, three tokens."""

    MASK = bits("0 11 00 111")
    TURN_IDS = turns(". 00 .. 111")
    REWARDS = row(0, 0, 0.5, 0, 0, 0, 0, 2)
    VALUES = row(9, 0.1, 0.2, 9, 9, 0.3, 0.4, 0.5)

    def test_over_tokens_by_hand(self):
        """gamma = 1, lambda = .9. From the back: delta = 2 - .5, .1, .1, .6, .1 and
        A = 1.5;  .1 + .9*1.5 = 1.45;  .1 + .9*1.45 = 1.405;  .6 + .9*1.405 = 1.8645;
        .1 + .9*1.8645. The same row and numbers as VAGEN's masked_gae.
        """
        advantages, returns = starpo.masked_gae(self.REWARDS, self.VALUES, self.MASK, lam=0.9)
        close(advantages, row(0, 1.77805, 1.8645, 0, 0, 1.405, 1.45, 1.5))
        close(returns, row(0, 1.87805, 2.0645, 0, 0, 1.705, 1.85, 2.0))

    def test_over_turns_by_hand(self):
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
    return slow_rows(lambda masked: [[(v - mean) / std for v in masked]], mask, x)[0]


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

    @cases
    @given(TURN_IDS, SEEDS, DISCOUNTS)
    def test_reinforce_plus_plus_is_whitened_reinforce(self, turn_ids, seed, gamma):
        mask = thinned(turn_ids >= 0, seed)
        rewards = normal(mask.shape, seed)
        to_come = slow_rows(lambda r: slow_reinforce(r, gamma), mask, rewards)[0]
        close(starpo.reinforce_pp_advantages(rewards, mask, gamma), slow_whiten(to_come, mask),
              tol=1e-6)
        assert starpo.reinforce_pp_advantages(rewards, mask).equal(
            starpo.reinforce_pp_advantages(rewards, mask, 1.0))

    @cases
    @given(ROWS, SEEDS)
    def test_with_baseline_it_is_the_whitened_distance_from_the_groups_mean(self, rows, seed):
        mask = normal((len(rows), 5), seed) > 0
        for read, group_ids, x, ids in readings(rows):
            close(starpo.reinforce_pp_baseline_advantages(x, group_ids, mask, ids),
                  slow_whiten(slow_on_tokens(slow_distance, read, mask), mask), tol=1e-6)


def slow_policy_loss(log_ratio, advantage, low, high, dual):
    ratio = math.exp(log_ratio)
    inside = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * inside)
    if advantage < 0 and dual > 0:
        loss = min(loss, -advantage * dual)
    return loss, -advantage * inside > -advantage * ratio


class TestPolicyLoss:
    def test_hand_worked_values_gradients_and_flags(self):
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

    @cases
    @given(SEEDS, st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.5, 1.2),
                                   (0.0, 0.0, 10.0), (0.2, 0.28, 0)]))
    def test_equals_the_slow_loop(self, seed, bounds):
        log_ratio, advantages = normals((20,), seed, 2)
        got = starpo.policy_loss(log_ratio - 1.5, torch.full((20,), -1.5), advantages, *bounds)
        slow = [slow_policy_loss(r, a, *bounds)
                for r, a in zip(log_ratio.tolist(), advantages.tolist())]
        for result, expected in zip(got, zip(*slow)):
            close(result, expected)

    def test_a_freak_token_has_a_finite_loss_and_gradient(self):
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
        for dual_clip in (3.0, 0):
            logprobs = torch.tensor([-1000.0, 1000.0] * 2, requires_grad=True)
            loss, _ = starpo.policy_loss(logprobs, torch.zeros(4), advantages, dual_clip=dual_clip)
            loss.sum().backward()
            assert loss.isfinite().all()
            assert logprobs.grad.isfinite().all()


class TestSequenceRatio:
    """GSPO: all tokens of a row share one ratio."""

    def test_hand_worked_example(self):
        """Ratios 2 and 1 of the two masked tokens have the geometric mean sqrt(2), above 1.28."""
        logprobs, old, mask = row(math.log(2), 0, 7), row(0, 0, 0), bits("110")
        good, clipped = starpo.policy_loss(logprobs, old, row(1, 1, 0), sequence_mask=mask)
        close(good, row(-1.28, -1.28, 0))
        assert clipped.tolist() == [[True, True, False]]
        logprobs.requires_grad_()
        bad, clipped = starpo.policy_loss(logprobs, old, row(-1, -2, 0), sequence_mask=mask)
        bad.sum().backward()
        close(bad.detach(), row(2**0.5, 2 * 2**0.5, 0))
        close(logprobs.grad, row(3 / 2**0.5, 3 / 2**0.5, 0))  # half of the row's 3 sqrt(2) each
        assert not clipped.any()

    @cases
    @given(MASKS, SEEDS, st.sampled_from([(0.2, 0.28, 3.0), (3e-4, 4e-4, 0), (0.1, 0.5, 1.2)]))
    def test_equals_the_slow_loop_and_is_blind_outside_the_mask(self, mask, seed, bounds):
        def definition(new, old, advantages):
            mean = statistics.fmean([a - b for a, b in zip(new, old)]) if new else 0.0
            pairs = [slow_policy_loss(mean, advantage, *bounds) for advantage in advantages]
            return [loss for loss, _ in pairs], [flag for _, flag in pairs]

        new, old = (torch.where(mask, x, math.nan) for x in normals(mask.shape, seed, 2))
        advantages = torch.where(mask, normal(mask.shape, seed + 2), 0.0)
        got = starpo.policy_loss(new, old, advantages, *bounds, sequence_mask=mask)
        for result, expected in zip(got, slow_rows(definition, mask, new, old, advantages)):
            close(result, expected)


class TestValueLoss:
    def test_hand_worked_values_and_gradients(self):
        """V_old = 0, R = 2, and the default value_clip of .5. Inside: plain. Past .5 towards the
        return: held back. Away from it: pulled back."""
        values = one(0.25, 1.0, -1.0).requires_grad_()
        loss = starpo.value_loss(values, torch.zeros(3), torch.full((3,), 2.0))
        loss.sum().backward()
        close(loss.detach(), [0.5 * 1.75**2, 0.5 * 1.5**2, 0.5 * 3.0**2])
        close(values.grad, [-1.75, 0.0, -3.0])

    @cases
    @given(SEEDS, st.sampled_from([0.1, 0.5, 2.0]))
    def test_equals_the_slow_loop(self, seed, clip):
        values, old, returns = normals((20,), seed, 3)
        expected = []
        for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist()):
            near = min(max(v, o - clip), o + clip)
            expected.append(max((v - r) ** 2, (near - r) ** 2) / 2)
        close(starpo.value_loss(values, old, returns, clip), expected)


class TestEntropy:
    @cases
    @given(SEEDS, st.sampled_from([0.1, 1.0, 30.0]))
    def test_equals_the_slow_definition(self, seed, scale):
        log_p = (normal((2, 3, 5), seed) * scale).log_softmax(-1)
        close(starpo.entropy(log_p), [[-sum(math.exp(v) * v for v in outcomes) for outcomes in line]
                                      for line in log_p.tolist()])

    def test_an_impossible_outcome_adds_nothing_and_has_a_finite_gradient(self):
        """A token that the tokenizer never uses has the logit -inf; elsewhere the gradient is the
        numeric one."""
        logits = one(0.3, 0.3, -math.inf).requires_grad_()
        of_a_coin = starpo.entropy(logits.log_softmax(-1))
        of_a_coin.backward()
        close(of_a_coin.detach(), math.log(2))
        assert logits.grad.isfinite().all()
        assert torch.autograd.gradcheck(lambda x: starpo.entropy(x.log_softmax(-1)),
                                        (normal((2, 5), 0).requires_grad_(),))


def slow_loss(x, mask, mode, horizon):
    """The four means as they are said, over a whole update."""
    rows = [[v for v, flag in zip(*pair) if flag] for pair in zip(x.tolist(), mask.tolist())]
    rows = [said for said in rows if said]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return statistics.fmean([v for said in rows for v in said])
    if mode == "seq-mean-token-mean":
        return statistics.fmean([statistics.fmean(said) for said in rows])
    constant = horizon if mode == "seq-mean-token-sum-norm" else 1
    return statistics.fmean([sum(said) / constant for said in rows])


class TestAggregate:
    MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

    @pytest.mark.parametrize("mode", MODES)
    @cases
    @given(MASKS, SEEDS, st.integers(1, 4), st.integers(1, 5))
    def test_equals_the_slow_definition_whole_or_cut_into_micro_batches(
            self, mode, mask, seed, rows, width):
        """Rows apart, and columns cut off or apart; nan outside the mask."""
        x = torch.where(mask, normal(mask.shape, seed), math.nan)
        weights = starpo.loss_weights(mask, mode, horizon=7)
        parts = [starpo.aggregate(a, w)
                 for several_x, several_w in zip(x.split(rows), weights.split(rows))
                 for a, w in zip(several_x.split(width, dim=1), several_w.split(width, dim=1))]
        for got in (starpo.aggregate(x, weights), sum(parts)):
            close(got, slow_loss(x, mask, mode, 7), tol=1e-6)

    def test_hand_worked_example(self):
        """Tokens 1, 3 | 2 | none: (1 + 3 + 2) / 3; (2 + 2) / 2, as two rows have tokens; (4 + 2) /
        2; a quarter of that for the 4 tokens that a row may have. Weights are the gradient."""
        x = torch.tensor([[1.0, 3.0, 9.0], [9.0, 2.0, 9.0], [9.0, 9.0, 9.0]], requires_grad=True)
        mask = torch.cat([bits("110"), bits("010"), bits("000")])
        for mode, loss in zip(self.MODES, [2.0, 2.0, 3.0, 0.75]):
            weights = starpo.loss_weights(mask, mode, horizon=4)
            total = starpo.aggregate(x, weights)
            assert total.item() == pytest.approx(loss, abs=1e-6), mode
            assert torch.autograd.grad(total, x)[0].equal(weights), mode
            assert weights.dtype == torch.float32, mode
        assert starpo.aggregate(x, starpo.loss_weights(mask)) == 2.0
        assert starpo.aggregate(x, starpo.loss_weights(mask, self.MODES[3])) == 3.0

    def test_nan_outside_the_mask_reaches_no_gradient_and_on_the_mask_is_not_hidden(self):
        x = torch.tensor([[1.0, math.nan]], requires_grad=True)
        starpo.aggregate(x * 2, starpo.loss_weights(bits("10"))).backward()
        assert x.grad.tolist() == [[2.0, 0.0]]
        assert starpo.aggregate(x, starpo.loss_weights(bits("11"))).isnan()


class TestModule:
    def test_a_wrong_argument_is_refused_with_what_was_expected(self):
        x, ids, mask = torch.ones(2), torch.zeros(2, dtype=torch.long), bits("11")
        for function, arguments, message in [
            (starpo.filter_groups, (x, 0.9, "topp"),
             "filter 'topp' of the 'largest': expected one of none, top_p, .*largest or smallest"),
            (starpo.filter_groups, (x, 0.9, "none", "best"), "filter 'none' of the 'best'"),
            (starpo.group_scores, (x, ids, "median"), "'median' .*: expected std or mean"),
            (starpo.normalise_rewards, (x, ids, "Mean"),
             "normalisation 'Mean': expected one of identity, mean, mean_std, asym_clip"),
            (starpo.kl_loss, (x, x, "K3"), "unknown kl_estimator 'K3': expected one of k1, k2, k3"),
            (starpo.kl_loss, (x, x, "k1"), "gradient of expectation 0 .*: expected k2 or k3"),
            (starpo.masked_gae, (mask.float(), x, mask), r"shapes \(1, 2\), \(2,\) and \(1, 2\)"),
            (starpo.masked_gae, (x, x, mask), "expected three equal ones"),
            (starpo.loss_scale, (mask, "root"), "'root': expected one of none, linear, sqrt"),
            (starpo.loss_weights, (mask, "mean"),
             "'mean': expected one of token-mean, seq-mean-token-mean, "),
            (starpo.policy_loss, (x, x, x, 0.2, 0.2, 1.0), "dual_clip=1.0, expected more than 1"),
            (starpo.policy_loss, (x, x, x, 0.2, 0.2, -3), "dual_clip=-3, expected more than 1"),
        ]:
            with pytest.raises(ValueError, match=message):
                function(*arguments)

    def test_inputs_are_never_written_to_and_float32_stays_float32(self):
        turn_ids = torch.cat([turns(".00 1"), turns("..01")])
        x, y, z = (v.float() for v in normals((2, 4), 0, 3))
        mask, group, numbers = turn_ids >= 0, torch.tensor([0, 0]), torch.tensor([1, 0])
        returns = x[:, 0]  # a view: what is written to it is seen in x
        calls = {
            "filter_groups": (starpo.filter_groups, x[0].abs()),
            "episode_sums": (starpo.episode_sums, returns, group),
            "last_token_rewards": (starpo.last_token_rewards, returns, mask),
            "turn_returns": (starpo.turn_returns, returns, group, numbers, 0.9),
            "reinforce_pp": (starpo.reinforce_pp_advantages, x, mask, 0.9),
            "policy_loss": (starpo.policy_loss, x, y, z, 0.2, 0.28, 3.0, mask),
            "value_loss": (starpo.value_loss, x, y, z),
            "entropy": (starpo.entropy, x),
            "kl_loss": (starpo.kl_loss, x, y),
            "aggregate": (starpo.aggregate, x, starpo.loss_weights(mask)),
        }
        calls |= {name: (fast, returns, group, mask, numbers)
                  for name, (fast, _) in OF_EPISODES.items()}
        calls |= {name: (fast, x, y, mask, turn_ids, 0.9, 0.8, 0.7)
                  for name, (fast, _) in OF_TOKENS.items()}
        inputs = x, y, z, mask, turn_ids, group, numbers
        before = [tensor.clone() for tensor in inputs]
        for name, (function, *arguments) in calls.items():
            result = function(*arguments)
            assert all(a.equal(b) for a, b in zip(inputs, before)), name
            for tensor in result if isinstance(result, tuple) else (result,):
                assert tensor.dtype in (torch.float32, torch.bool), name

    def test_examples_in_the_docstrings_are_true(self):
        result = doctest.testmod(starpo)
        assert result.attempted > 0
        assert result.failed == 0

    def test_the_only_loop_is_the_doubling_of_the_recursion(self):
        """Ten passes for a thousand tokens. A loop over tokens or rows costs seconds a step."""
        loops = (ast.For, ast.While, ast.comprehension)
        tree = ast.parse(inspect.getsource(starpo))
        found = [(part.name, type(node)) for part in tree.body if hasattr(part, "name")
                 for node in ast.walk(part) if isinstance(node, loops)]
        assert found == [("_from_the_end", ast.While)]
