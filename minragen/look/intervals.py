"""Intervals of success rates, and pass@k.

Tests: `python -m pytest tests/test_eval.py`.
"""

import math

import scipy  # NOTE: scipy.stats takes half a second to import; scipy does so when it is first used


def wilson(successes, n):
    """95 % interval of a rate: (low, high). Raises ValueError for n = 0.

    Wilson's (1927) stays inside [0, 1] and holds near 0 and 1, where the normal one does not.

    successes: rounded to a whole number, for a caller that has a rate times n

    >>> [round(float(bound), 4) for bound in wilson(206, 256)]
    [0.7518, 0.8486]
    """
    return scipy.stats.binomtest(round(successes), n).proportion_ci(method="wilson")


def difference(before, now):
    """95 % interval of now - before, of two independent rates: (low, high) (Newcombe 1998, method
    10). Each is (rate, low, high), with Wilson's bounds.

    >>> [round(bound, 4) for bound in difference((0.6, *wilson(48, 80)), (0.8, *wilson(56, 70)))]
    [0.0524, 0.3339]
    """
    (p, p_low, p_high), (q, q_low, q_high) = before, now
    return q - p - math.hypot(q - q_low, p_high - p), q - p + math.hypot(q_high - q, p - p_low)


def pass_at_k(n, successes, k):
    """Probability that k of n samples, drawn without replacement, contain a success: an unbiased
    estimate of that of k samples (Chen et al. 2021, section 2.1).

        1 - binom(n - successes, k) / binom(n, k)

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1 - math.comb(n - successes, k) / math.comb(n, k)
