"""Further filters of RAGEN V2. run/start.py enters them in `starpo.FILTERS` by way of ROWS.

Each is a function of the groups' reward stds, the largest first, and --filter-value, as
`starpo.top_p`: (P,) bool.

Tests: `python -m pytest tests/test_starpo.py -k Filter`.
"""

import math

import torch

from minragen import starpo


def top_p_softmax(ranked, value):
    """The fewest groups that hold this share of softmax(stds), the rule of RAGEN V2's main table.

    Stds below 0.5 have similar shares, so about this share of the groups is kept; at 1 all.
    """
    starpo.check_share("top_p_softmax", value)
    mass = ranked.softmax(0)
    return (mass.cumsum(0) - mass < value) | (value == 1)  # whatever rounding says


def top_k_abs(ranked, value):
    """The `value` groups of the largest stds."""
    if not (0 < value < math.inf and value == int(value)):
        raise ValueError(f"filter top_k_abs: got a value of {value}, expected a whole number above "
                         f"0: how many groups.")
    return torch.arange(len(ranked), device=ranked.device) < value


def min_p(ranked, value):
    """All groups of at least this share of the largest std, and above 0."""
    starpo.check_share("min_p", value)
    return (ranked >= value * ranked[0]) & (ranked > 0)


ROWS = {"top_p_softmax": top_p_softmax, "top_k_abs": top_k_abs, "min_p": min_p}
