"""What the findings compute from curves: intervals, verdicts, windows, the onset of a collapse.

Axes: S seeds, N steps. A curve is (N + 1,) float, value k is of step k (0: before training), nan
where a step did not measure the metric.
"""

import numpy as np
import scipy

DRAWS = 10_000  # resamples of a bootstrap interval
WINDOW = 10  # steps averaged, so that a window is some thousand episodes


def bootstrap(differences):
    """95 % percentile interval of the mean of S paired differences: (low, high).

    Seeds are drawn with replacement (Efron 1979). With five seeds it is too narrow: for normal
    differences it holds about 85 % of the time, and it never reaches beyond the five.
    """
    if len(differences) == 1:
        return differences[0], differences[0]
    return scipy.stats.bootstrap([differences], np.mean, n_resamples=DRAWS, method="percentile",
                                 rng=0).confidence_interval


def verdict(differences, margin):
    """"reproduced", "not reproduced" or "inconclusive" of S differences, positive as claimed.

    `margin` is stated beforehand: a smaller effect does not matter. Reproduced: the interval is
    above 0 and the mean above the margin. Not reproduced: the whole interval is below the margin,
    so that the effect is too small, zero or of the other sign.
    """
    if len(differences) < 2:
        return "inconclusive"
    low, high = bootstrap(differences)
    if low > 0 and np.mean(differences) > margin:
        return "reproduced"
    return "not reproduced" if high < margin else "inconclusive"


def overall(verdicts):
    """The verdict of a claim that makes several predictions: reproduced if all are, not reproduced
    if one is not."""
    worst = ("not reproduced", "not testable", "inconclusive", "reproduced")
    return min(verdicts, key=worst.index)


def windows(curve, width=WINDOW):
    """Means over `width` steps, without step 0: entry k is of steps k+1 to k+width. nan is left out
    of a mean; a window of nan alone is nan."""
    sums, counts = (np.convolve(values, np.ones(width), "valid")
                    for values in (np.nan_to_num(curve[1:]), ~np.isnan(curve[1:])))
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def last(curve):
    """The mean of the last WINDOW steps."""
    return windows(curve)[-1]


def fall(curve):
    """How far the last WINDOW steps lie below the best ones. It is never negative, and above 0 by
    chance alone: its margin must be wider than that."""
    means = windows(curve)
    return np.nanmax(means) - means[-1]


def onset(curve, sign, first=1, width=5):
    """The step at which a curve has risen (sign 1) or fallen (-1), from step `first` on: the split
    into two constants with the least squared error among those with this sign (Hinkley 1970).

    The curve is looked at in means of `width` steps, as often as the slowest indicator is measured.
    Noise always has a best split, so it must explain half of their variance. Else, and if there are
    fewer than four means, the answer is the step after the last: it has not turned.
    """
    means, never = windows(curve, width)[::width], float(len(curve))
    steps = 1 + width * np.flatnonzero(~np.isnan(means))  # the first of each mean
    means, steps = means[~np.isnan(means)][steps >= first], steps[steps >= first]
    if len(steps) < 4:
        return never
    values = means - means.mean()
    sums, n = values.cumsum()[:-1], np.arange(1, len(values))
    before, after = sums / n, -sums / n[::-1]
    explained = n * before**2 + n[::-1] * after**2  # of the sum of squares
    explained[sign * (after - before) <= 0] = -1
    best = explained.argmax()
    return float(steps[best + 1]) if explained[best] > (values**2).sum() / 2 else never


def worst_spike(values, width=3):
    """log2 of the largest median of `width` steps over the median of all steps before them.

    So two of three steps have to be large: single ones occur in healthy runs, too. A value that was
    not finite counts as the largest that was (without a filter every step has a value). The first
    WINDOW steps only count as what was before.
    """
    values = np.where(np.isnan(values[1:]), np.nanmax(values[1:]), values[1:])
    return max(np.log2(np.median(values[k:k + width]) / np.median(values[:k]))
               for k in range(WINDOW, len(values) - width + 1))
