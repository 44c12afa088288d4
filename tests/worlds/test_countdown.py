"""What Countdown is about; what all environments share stands in the contract's tests."""

import json
import re
import time
from contextlib import suppress
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minragen import games
from minragen.envs import FORMAT_PENALTY, Budget
from minragen.games import Countdown, countdown_tasks, find_expression, parse_equation

TRIES = Budget(7, 1, 7)


def task(numbers, target, budget=None, **options):
    env = Countdown("train", budget, **options)
    env.reset(seed=0)
    env.numbers, env.target = tuple(sorted(numbers)), target
    return env


def exact(text):
    """Python's own reading of a text that is known to be harmless, in fractions."""
    assert re.fullmatch(r"[-+*/() 0-9]+", text)
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})


def bracketings(parts):
    """Every full bracketing of a list of operands with the operators between them."""
    if len(parts) == 1:
        yield parts[0]
    for i in range(1, len(parts), 2):
        for left, right in product(bracketings(parts[:i]), bracketings(parts[i + 1:])):
            yield f"({left}{parts[i]}{right})"


def brute_force(numbers, operators="+-*/"):
    """All values of all orders, operators and bracketings of the numbers."""
    values = set()
    for order in set(permutations(numbers)):
        for ops in product(operators, repeat=len(numbers) - 1):
            parts = [str(order[0])]
            for op, number in zip(ops, order[1:]):
                parts += [op, str(number)]
            for text in bracketings(parts):
                with suppress(ZeroDivisionError):
                    values.add(exact(text))
    return values


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner, st.booleans()).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})" if t[3] else f"{t[0]}{t[1]}{t[2]}"),
    max_leaves=6)


class TestParser:
    @given(expressions)
    @example("8-3-2")
    @example("8/4/2")
    @example("2+3*4-6/4")
    @settings(max_examples=300, deadline=None)
    def test_a_value_is_what_python_computes_in_fractions(self, text):
        try:
            value = exact(text)
        except ZeroDivisionError:
            value = None
        parsed = parse_equation(text)
        assert (parsed and parsed.value) == value
        if parsed:
            assert parsed.numbers == tuple(map(int, re.findall(r"\d+", text)))
            assert parsed.claim == value

    @given(st.text(alphabet="0123456789+-*/()= .,e_", max_size=14))
    @settings(max_examples=500, deadline=None)
    def test_whatever_is_parsed_is_an_expression_of_the_four_operators(self, text):
        parsed = parse_equation(text)
        if parsed:
            assert set(text) <= set("0123456789+-*/()= ") and text.count("=") <= 1
            assert exact(text.split("=")[0].strip()) == parsed.value

    @pytest.mark.parametrize("text", [
        "2**3", "7//2", "7 % 2", "2^3", "3 < 5", "[3, 5, 2]", "3 5 2", "3, 5, 2", "5-3.2", "3e2",
        "3_0", "0x3", "03 + 4", "-3 + 7", "3 * -4", "+3", "~3", "3(4)", "(3)(4)", "3 +", "* 3",
        "()", "", " ", "=", "= 7", "3 + 4 =", "3 = 3 = 3", "3 + 4 = 5 + 2", "3 + 4 = x", "(3 + 4",
        "3 + 4)", ")3(", "3 + 4;", "a", "abs(3)", "__import__('os')", "3 + 4 # 7", "3 if 4 else 5",
        "٣ + ٤", "3 × 4", "3 / 0", "3 / (4 - 4)", "3 + 4 = 7.0", "(3, 4)", "lambda: 3", "3\0+4"])
    def test_anything_else_is_none(self, text):
        """RAGEN evaluates powers, comparisons, lists and decimals glued from the digits."""
        assert parse_equation(text) is None

    @pytest.mark.parametrize("text", [
        "9**9**9**9", "9" * 100_000, "(" * 100_000, "(" * 100_000 + "3" + ")" * 100_000,
        "-" * 100_000 + "3", "3" + "+3" * 100_000, "3=" * 100_000, " " * 10**6, "*".join("9" * 90),
        "(" * 99 + "3" + ")" * 99, "(" * 20 + "3" + ")" * 20])
    def test_depth_and_size_are_refused_at_once(self, text):
        start = time.perf_counter()
        assert parse_equation(text) is None
        assert time.perf_counter() - start < 0.1

    def test_brackets_of_a_sensible_depth_are_not(self):
        assert parse_equation("(" * 15 + "3" + ")" * 15 + " + 4").value == 7

    def test_operators_that_the_task_does_not_have_are_refused(self):
        assert parse_equation("3 * 4", "+-") is None
        assert parse_equation("3 - 4", "+-").value == -1


class TestRewards:
    def test_an_expression_with_the_right_value_earns_one(self):
        for text in ("3*7+4", "4 + 7 * 3", "(3 * 7) + 4", "((4)) + (7*3)", "3*7+4 = 25",
                     "3 * 7 + 4=25"):
            env = task((3, 4, 7), 25)
            _, reward, terminated, truncated, info = env.step(text)
            assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, 1.0), text

    def test_the_equation_form_counts(self):
        """In RAGEN "2+5-3=4" earns nothing, because the 4 is taken for one more number."""
        assert task((2, 3, 5), 4).step("2+5-3=4")[1] == 1.0

    @pytest.mark.parametrize("text", ["2+5-3=5", "2+5+3=4", "2+5+3=10", "2+5-3=-4", "2+5+3",
                                      "2*3/5", "2-3-5"])
    def test_a_wrong_value_or_a_wrong_right_side_earns_a_tenth(self, text):
        _, reward, *_, info = task((2, 3, 5), 4).step(text)
        assert (reward, info["success"], info["valid"]) == (0.1, 0.0, 1.0)

    @pytest.mark.parametrize("text", ["3 5 2", "2, 3, 5", "4", "2+2", "2+5", "2+5-3+0", "2+5-3-3",
                                      "25-3", "2+5-3=4=4", "(2+5-3", "2+5-3 is 4", "5-3.2",
                                      "2 + 5 - 3 + 4 - 4", "3/(5-2-3)", "2/(3-3)+5"])
    def test_all_else_is_no_action(self, text):
        """RAGEN pays a tenth for listing the numbers."""
        env = task((2, 3, 5), 4)
        _, reward, *_, info = env.step(text)
        assert (reward, info["success"], info["valid"]) == (FORMAT_PENALTY, 0.0, 0.0)

    def test_a_number_given_twice_is_used_twice(self):
        assert task((4, 4, 7), 15).step("4 + 7")[1] == FORMAT_PENALTY
        assert task((4, 4, 7), 15).step("4 + 4 + 7")[1] == 1.0

    def test_values_are_exact(self):
        """1/3 + 2/3 in floats, or a tolerance, would do for near misses as well."""
        assert task((1, 5, 6, 7), 21, count=4).step("6 / (1 - 5/7)")[1] == 1.0
        near = task((1, 999_999, 999_998), 1)
        assert near.step("999999 / 999998 * 1")[1] == pytest.approx(0.1)

    def test_one_turn_is_the_default_and_ends_the_task(self):
        assert Countdown().budget == Budget(1, 1, 1)
        assert task((2, 3, 5), 4).step("2 + 3 + 5")[2:4] == (True, False)

    def test_with_more_turns_a_wrong_attempt_may_be_mended_and_the_prompt_says_so(self):
        env = task((2, 3, 5), 4, TRIES)
        assert "try again" in env.system_prompt and "try again" not in Countdown().system_prompt
        observation, first, terminated, *_ = env.step("2 + 3 + 5")
        assert not terminated and "Your value: 10" in observation and "Target: 4" in observation
        _, second, terminated, _, info = env.step("2 + 5 - 3")
        assert (first, first + second, terminated, info["success"]) == (0.1, 1.0, True, 1.0)

    def test_repeating_a_wrong_attempt_earns_nothing_more(self):
        env = task((2, 3, 5), 4, TRIES)
        assert [env.step(text)[1] for text in ("2+3+5", "2+3+5", "5*3*2", "5-3-2")] == [0.1, 0, 0,
                                                                                       0]


class TestTasks:
    @pytest.mark.parametrize("count,operators", [(3, "+-*/"), (3, "+-"), (4, "+-*/"), (0, "*/"),
                                                 (3, "-")])
    def test_every_task_is_solved_by_its_solver_within_its_options(self, count, operators):
        env, counts = Countdown(count=count, operators=operators), set()
        for seed in range(100):
            env.reset(seed=seed)
            counts.add(len(env.numbers))
            text = env.solve()[0]
            assert set(text) <= set(operators) | set("0123456789() ")
            assert exact(text) == env.target and 1 <= env.target <= 99
            assert sorted(map(int, re.findall(r"\d+", text))) == list(env.numbers)
            assert min(env.numbers) >= 1 and max(env.numbers) <= 10
            assert env.step(text)[1] == 1.0
        assert counts == ({count} if count else {3, 4})

    def test_the_order_of_the_numbers_does_not_betray_the_expression(self):
        env = Countdown(count=0)
        for seed in range(50):
            observation, _ = env.reset(seed=seed)
            shown = list(map(int, re.search("Numbers: (.*)", observation)[1].split()))
            assert shown == sorted(shown) == list(env.numbers)

    def test_all_four_operators_are_needed_by_some_task(self):
        """RAGEN keeps only tasks that + and - can solve."""
        env, needed = Countdown(), set()
        for seed in range(150):
            env.reset(seed=seed)
            needed |= {op for op in "+-*/" if not find_expression(
                env.numbers, env.target, "+-*/".replace(op, ""))}
        assert needed == set("+-*/")

    def test_the_random_policy_solves_about_one_in_twenty(self):
        env, rng = Countdown(), np.random.default_rng(0)
        solved = 0
        for seed in range(2000):
            env.reset(seed=seed)
            solved += env.step(env.random_answer(rng))[-1]["success"]
        assert 0.04 < solved / 2000 < 0.09

    def test_a_random_answer_uses_every_number_once_and_has_a_value(self):
        env, rng = task((3, 3, 6, 6), 24, Budget(300, 1, 300), count=4), np.random.default_rng(1)
        for _ in range(300):
            *_, over, _, info = env.step(env.random_answer(rng))
            assert info["valid"] == 1.0
            if over:
                env._live = True

    def test_the_note_is_true(self):
        env = Countdown(count=0)
        for seed in range(50):
            env.reset(seed=seed)
            n = env.numbers
            products = [n[i] * n[j] for i in range(len(n)) for j in range(i + 1, len(n))]
            assert env.note() == (f"target {env.target} sum {sum(n)} "
                                  f"products {' '.join(map(str, products))}")

    def test_the_same_numbers_in_another_order_are_the_same_task(self, tmp_path):
        rows = [{"nums": list(order), "target": 25} for order in permutations((3, 4, 7))]
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(rows))
        assert {numbers for numbers, _ in countdown_tasks(str(path))} == {(3, 4, 7)}


class TestSolver:
    @given(st.lists(st.integers(1, 12), min_size=2, max_size=3), st.integers(-5, 60))
    @settings(max_examples=60, deadline=None)
    def test_it_finds_an_expression_exactly_where_brute_force_does(self, numbers, target):
        for operators in ("+-*/", "+-", "*"):
            text = find_expression(tuple(numbers), target, operators)
            assert (text is not None) == (target in brute_force(numbers, operators))
            if text:
                assert exact(text) == target
                assert sorted(map(int, re.findall(r"\d+", text))) == sorted(numbers)

    def test_so_it_does_with_four_numbers(self):
        for numbers in ((1, 5, 6, 7), (3, 3, 8, 8)):
            values = brute_force(numbers)
            for target in range(0, 60):
                assert (find_expression(numbers, target, "+-*/") is not None) == (target in values)

    def test_fractions_on_the_way_are_found(self):
        assert exact(find_expression((3, 3, 8, 8), 24, "+-*/")) == 24
        assert exact(find_expression((1, 5, 6, 7), 21, "+-*/")) == 21

    def test_brackets_are_as_few_as_needed(self):
        assert find_expression((2, 3, 4), 9, "+-*/") == "2 + 3 + 4"
        assert find_expression((2, 3, 4), 20, "+-*/") == "( 2 + 3 ) * 4"


ROWS = [{"nums": [44, 19, 35], "target": 98}, {"nums": [63, 95, 96], "target": 64},
        {"nums": [95, 11, 56], "target": 28}, {"nums": [19, 74, 45], "target": 48},
        {"nums": [3, 7, 14, 2], "target": 24}, {"nums": [2, 3, 7], "target": 42}]


def written(folder, rows, kind=".jsonl"):
    path = folder / f"tasks{kind}"
    path.write_text(json.dumps(rows) if kind == ".json" else
                    "\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def seen(split="train", seeds=200, **options):
    env, found = Countdown(split, **options), set()
    for seed in range(seeds):
        env.reset(seed=seed)
        found.add(env.instance())
        assert env.step(env.solve()[0])[1] == 1.0
    return found


class TestData:
    @pytest.mark.parametrize("kind", [".json", ".jsonl"])
    def test_the_public_format_is_read(self, tmp_path, kind):
        path = written(tmp_path, ROWS, kind)
        assert countdown_tasks(path) == [
            ((19, 35, 44), 98), ((63, 95, 96), 64), ((11, 56, 95), 28), ((19, 45, 74), 48),
            ((2, 3, 7, 14), 24), ((2, 3, 7), 42)]

    def test_the_splits_share_no_row_and_leave_none_out(self, tmp_path):
        rows = [{"nums": [a, b, 9], "target": a + b + 9} for a in range(1, 7) for b in range(1, 7)]
        parts = [seen(split, data=written(tmp_path, rows)) for split in ("train", "val", "test")]
        assert sum(map(len, parts)) == len(set().union(*parts)) == 21

    def test_count_and_operators_choose_among_the_rows(self, tmp_path):
        rows = [{"nums": [2, 3, 7 + k], "target": 6 * (7 + k)} for k in range(12)]
        sums = [{"nums": [2, 3, 50 + k], "target": 55 + k} for k in range(12)]
        fours = [{"nums": [2, 3, 4, 50 + k], "target": 59 + k} for k in range(12)]
        path = written(tmp_path, rows + sums + fours)
        assert all("= 5" in i or "= 6" in i for i in seen(data=path, operators="+-"))
        assert {len(i.split()) for i in seen(data=path, count=4)} == {6}
        assert {len(i.split()) for i in seen(data=path, count=0)} == {5, 6}

    def test_rows_that_nobody_can_solve_are_named_as_the_reason(self, tmp_path):
        path = written(tmp_path, [{"nums": [2, 3, 7], "target": 42}])
        with pytest.raises(ValueError, match=r"none of 1000 rows drawn can be solved with \+ -\. "
                                             "Allow more operators"):
            Countdown(data=path, operators="+-").reset(seed=0)

    def test_a_file_is_read_once(self, tmp_path, monkeypatch):
        path = written(tmp_path, ROWS)
        first = Countdown(data=path)
        monkeypatch.setattr(games, "read_records", None)  # to call it again would raise
        assert Countdown("val", data=path).rows == first.rows

    @pytest.mark.parametrize("bad", [
        '{"nums": [1, 2, 3]}', '{"numbers": [1, 2, 3], "target": 6}', "[1, 2, 3]", "7",
        '{"nums": [1, 2, "3"], "target": 6}', '{"nums": [1, 2, 3], "target": 6.5}',
        '{"nums": 6, "target": 6}', '{"nums": [1, 2, -3], "target": 0}',
        '{"nums": [1, 2, 0], "target": 3}', '{"nums": [1, 2, 10000000], "target": 3}'])
    def test_a_bad_record_is_named(self, tmp_path, bad):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"nums": [1, 2, 3], "target": 6}\n' + bad + "\n")
        with pytest.raises(ValueError, match=r"bad\.jsonl, record 2: .*expected records like"):
            Countdown(data=str(path))

    def test_a_missing_file_an_unknown_kind_and_a_file_without_rows_are_sentences(self, tmp_path):
        with pytest.raises(ValueError, match="no file .*none.jsonl"):
            Countdown(data=str(tmp_path / "none.jsonl"))
        (tmp_path / "tasks.csv").write_text("nums,target\n")
        with pytest.raises(ValueError, match=r"cannot read line 1 of .*tasks.csv, expected JSONL"):
            Countdown(data=str(tmp_path / "tasks.csv"))
        with pytest.raises(ValueError, match="has no row of 4 numbers"):
            Countdown(data=written(tmp_path, ROWS[:2]), count=4)


class TestOptions:
    @pytest.mark.parametrize("option,value", [
        ("count", 2), ("count", 5), ("largest", 1), ("largest", 10**6), ("operators", ""),
        ("operators", "+^")])
    def test_a_bad_one_is_refused(self, option, value):
        with pytest.raises(ValueError, match=f"option {option} of Countdown: got {value!r}"
                           .replace("+", r"\+").replace("^", r"\^")):
            Countdown(**{option: value})

    def test_the_prompt_names_the_operators_of_the_task(self):
        assert "with + - * / and" in Countdown().system_prompt
        assert "with + - and" in Countdown(operators="-+").system_prompt

    def test_options_under_which_no_task_comes_are_named_at_once(self):
        with pytest.raises(ValueError, match="none of 10000 draws.*Allow more operators"):
            Countdown(operators="*", largest=1000, count=4).reset(seed=0)
