"""Bandit: what the contract of all environments does not already say about it."""

import numpy as np
import pytest
from conftest import begin

from minragen.environments.bandit import Bandit
from minragen.envs import Budget

KNOWN, UNSEEN = (set(map(frozenset, pairs)) for pairs in (Bandit.KNOWN, Bandit.UNSEEN))


def arms(split, n=250, **options):
    """The pairs of the split's first `n` instances, each in its order."""
    env = Bandit(split, **options)
    return {env.reset(seed=seed) and env.actions for seed in range(n)}


def pulls(arm, n=100, **options):
    """Rewards and successes of `n` pulls of the `safe` or `risky` arm, members 0 to 3 in turn."""
    env, results = Bandit("train", Budget(2, 1, 2), **options), []
    for i in range(n):
        env.reset(seed=i // 4, options={"member": i % 4})
        _, reward, terminated, _, info = env.step(getattr(env, arm))
        assert terminated
        results.append((reward, info["success"]))
    rewards, successes = zip(*results)
    return rewards, {*successes}


class TestArms:
    def test_train_has_every_known_pair_in_one_order_and_val_in_the_other(self):
        train = arms("train")
        assert set(map(frozenset, train)) == KNOWN and len(train) == len(KNOWN)
        assert arms("val") == {pair[::-1] for pair in train}
        # The position of an arm says little about it.
        assert 1 / 4 <= np.mean([pair in Bandit.KNOWN for pair in train]) <= 3 / 4

    def test_mixed_pairs_are_in_one_split_in_both_orders_and_training_has_all_names(self):
        safe, risky = zip(*Bandit.KNOWN, *Bandit.UNSEEN)
        pairs = [{frozenset(pair) for pair in arms(split, 2_000, mixed=True)}
                 for split in ("train", "val", "test")]
        assert sum(map(len, pairs)) == len(set.union(*pairs)) > 380
        assert frozenset.union(*pairs[0]) == {*safe, *risky}
        for some in pairs:
            assert all(len(pair & {*safe}) == len(pair & {*risky}) == 1 for pair in some)
        assert len(arms("val", 2_000, mixed=True)) > 1.8 * len(pairs[1])

    def test_test_has_names_that_training_never_shows_in_both_orders(self):
        assert set(map(frozenset, arms("test"))) == UNSEEN and len(arms("test")) == 2 * len(UNSEEN)
        names = [name.lower() for pair in KNOWN | UNSEEN for name in pair]
        assert len(set(names)) == len(names) == 2 * (len(KNOWN) + len(UNSEEN))

    def test_the_risky_arm_pays_one_a_quarter_of_the_time_and_the_safe_one_a_tenth(self):
        """To four standard deviations; success is the better arm, whatever it paid."""
        for risky, safe, swapped in (("risky", "safe", False), ("safe", "risky", True)):
            rewards, successes = pulls(risky, 1600, reversed=swapped)
            assert set(rewards) == {0.0, 1.0} and successes == {1.0}
            for member in range(4):
                assert np.mean(rewards[member::4]) == pytest.approx(0.25, abs=0.087)
            assert pulls(safe, reversed=swapped) == ((0.1,) * 100, {0.0})

    def test_hits_and_misses_pay_what_the_options_say_and_the_better_mean_wins(self):
        for low, miss, hit, better in ((0.2, 0.0, 1.0, "risky"), (0.25, 0.0, 1.0, "safe"),
                                       (0.3, 0.1, 1.0, "risky"), (0.3, 0.0, 2.0, "risky")):
            env = begin("bandit", low_reward=low, high_miss=miss, high_reward=hit)
            assert env.solve() == [getattr(env, better)]
        assert set(pulls("risky", high_reward=2.0, high_miss=-1.0)[0]) == {2.0, -1.0}
