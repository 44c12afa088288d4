"""Countdown: its parser, rewards, tasks, solver and options."""

import re
from contextlib import suppress
from fractions import Fraction
from itertools import combinations, permutations, product

import pytest
from conftest import begin, write

from minragen.environments.countdown import Countdown, find_expression, parse_equation
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget


def task(numbers, target, **options):
    env = begin("countdown", **options)
    env.numbers, env.target = numbers, target
    return env


def exact(text):
    """The value that Python computes in fractions; None for x / 0 and for what is no expression."""
    if re.search(r"[^-+*/() 0-9]|[-+*/(] *[-+*/)]|^ *[-+]", text):  # **, // and signs
        return None
    with suppress(ZeroDivisionError, SyntaxError, TypeError):  # TypeError: (3)(4) is a call
        return eval(re.sub("[0-9]+", r"Fraction(\g<0>)", text.strip()), {"Fraction": Fraction})


class TestAnswers:
    def test_an_expression_has_the_value_that_python_computes_and_all_else_is_refused(self):
        for text in (*map("".join, product("2+-*/()", repeat=5)), "10 * (3 - 4) / 8", "3 / (4-4)",
                     "(1+2) * (3 + 4*5)", "((2 + 3", "(2+3(", "(3)(4)", "", " ", "2 3", "[3, 5]",
                     "5-3.2", "3e2", "3_0", "2 % 3", "2 < 3", "abs(3)", "3 + 4 # 7", "03 + 4",
                     "٣ + ٤", "=", "= 7", "7 =", "7 = 7 = 7", "7 = 5 + 2", "7 = x", "7 = 7.0"):
            value, numbers = exact(text), tuple(map(int, re.findall(r"\d+", text)))
            expected = None if value is None else (numbers, value, value)
            assert parse_equation(text) == expected, text

    def test_the_target_earns_one_another_value_a_tenth_and_other_numbers_are_no_action(self):
        for numbers, target, reward, *texts in (
                ((2, 2, 5), 1, 1.0, "5-2-2", "((5)) - (2+2)", "5-2-2=1", "5 - (2+2) = 1 "),
                ((2, 2, 5), 1, 0.1, "5-2-2=2", "5+2-2=1", "5+2+2=9", "2-2-5", "2-5/2"),
                ((2, 2, 5), 1, FORMAT_PENALTY, "2, 2, 5", "1", "5-2", "5-2-2+0", "5-2-2-2", "25-2"),
                ((1, 999_998, 999_999), 1, 0.1, "999999 / 999998 * 1")):
            for text in texts:
                _, paid, *ended, info = task(numbers, target).step(text)
                assert (paid, ended) == (reward, [True, False]), text
                assert (info["success"], info["valid"]) == (reward == 1.0, reward > 0), text

    def test_with_more_turns_only_an_improvement_is_paid_and_other_operators_never(self):
        env = task((2, 3, 5), 30, operators="-+")
        assert "with + - and" in env.system_prompt and env.step("2 * 3 * 5")[1] == FORMAT_PENALTY
        env = task((2, 3, 5), 4, budget=Budget(7, 1, 7))
        assert "try again" in env.system_prompt and "try again" not in Countdown().system_prompt
        observation, *_ = env.step("2 + 3 + 5")
        assert observation.startswith("Reward: 0.1\nNumbers: 2 3 5\nTarget: 4\nYour value: 10\n")
        assert [env.step(text)[1:3] for text in ("5*3*2", "2+5-3")] == [(0.0, False), (0.9, True)]


def solved_tasks(split="train", **options):
    """The (numbers, target) of 60 seeds, each of which the solver solves."""
    env, tasks = Countdown(split, **options), set()
    for seed in range(60):
        env.reset(seed=seed)
        tasks.add((env.numbers, env.target))
        assert env.step(env.solve()[0])[1] == 1.0
    return tasks


def written(folder, *tasks):
    return write(folder / "tasks", *({"nums": n, "target": target} for n, target in tasks))


class TestTasks:
    def test_they_keep_to_the_options_and_need_every_operator(self):
        for count, operators in ((3, "+-*/"), (4, "+-*/"), (0, "*/"), (3, "-")):
            tasks = solved_tasks(count=count, operators=operators, largest=10)
            assert {len(numbers) for numbers, _ in tasks} == ({count} if count else {3, 4})
            assert {n for numbers, _ in tasks for n in numbers} == set(range(1, 11))
            assert {target for _, target in tasks} <= set(range(1, 100))
            for others in combinations(operators, len(operators) - 1):
                assert not all(find_expression(*task, others) for task in tasks), others

    def test_the_solver_finds_an_expression_exactly_where_one_exists(self):
        for numbers, operators in product(((2, 3, 7), (4, 4, 10)), ("+-*/", "+-", "*")):
            values = {exact(form.format(a, p, b, q, c)) for a, b, c in permutations(numbers)
                      for p, q in product(operators, repeat=2)
                      for form in ("({}{}{}){}{}", "{}{}({}{}{})")}
            for target in range(-5, 60):
                text = find_expression(numbers, target, operators)
                assert exact(text or "") == (target if target in values else None), text
                assert not text or sorted(parse_equation(text)[0]) == list(numbers)
        assert exact(find_expression((3, 3, 8, 8), 24, "+-*/")) == 24, "8 / (3 - 8/3)"

    def test_options_that_leave_no_task_are_refused_with_the_reason(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Countdown, "DRAWS", 10)
        path = written(tmp_path, ([2, 3, 7], 42))
        for options, reason in (
                ({"operators": "*", "largest": 1000}, "none of 100 draws is a task of Countdown"),
                ({"data": path, "count": 4}, "has no task of 4 numbers"),
                ({"data": path, "operators": "+-"}, "none of 10 draws is a task of Countdown")):
            with pytest.raises(ValueError, match=reason):
                Countdown(**options).reset(seed=0)

    def test_every_row_of_a_file_belongs_to_one_split_and_options_choose_rows(self, tmp_path):
        sums = {((2, 3, n), 5 + n) for n in range(20, 28)}
        products = {((2, 3, n), 6 * n) for n in range(7, 11)}
        fours = {((2, 3, 4, n), 9 + n) for n in range(20, 24)}
        rows = sums | products | fours
        path = written(tmp_path, *((numbers[::-1], target) for numbers, target in rows))
        parts = [solved_tasks(split, data=path, count=0) for split in SPLITS]
        assert set.union(*parts) == rows and sum(map(len, parts)) == len(rows)
        assert solved_tasks(data=path, count=0, operators="+-") == parts[0] - products
        assert solved_tasks(data=path, count=4) == parts[0] & fours

    def test_a_bad_record_is_named(self, tmp_path):
        for bad in (([1, 2, "3"], 6), ([1, 2, 3], 6.5), (6, 6), ([1, 2, 0], 3), ([2, 10**6], 3)):
            with pytest.raises(ValueError, match=r"tasks, record 2: .*expected records like"):
                Countdown(data=written(tmp_path, ([1, 2, 3], 6), bad))
