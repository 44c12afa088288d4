"""Lean and the sandbox at length: what test_lean.py and test_sandbox.py check a part of."""

import pytest
import test_lean
from test_lean import DRAWN, THEOREMS, assert_proofs_hold, assert_the_same_in_every_company
from test_sandbox import assert_solutions_pass

packaged = test_lean.packaged


def test_lean_accepts_stored_and_drawn_proofs_and_every_tactic_changes_the_goals(packaged):
    assert_proofs_hold(packaged, [*THEOREMS[1::4], *DRAWN[::6]])


@pytest.mark.parametrize("seed", (1, 2))
def test_a_verdict_is_the_same_in_every_company(seed):
    assert_the_same_in_every_company(seed)


def test_all_solutions_of_humaneval_and_of_generated_problems_pass_in_monty():
    assert_solutions_pass(every=1, generated=30)
