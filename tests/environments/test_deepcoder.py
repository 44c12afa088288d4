"""DeepCoder: what its problems are, what an answer earns, and which files it reads."""

import ast
import functools
import itertools
import re
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import begin, write

from minragen.environments import deepcoder, sandbox
from minragen.environments.deepcoder import all_tasks, program_of, verdict
from minragen.environments.sandbox import Case, Monty, Result, WorkerPool
from minragen.envs import Budget

# The words of the formulas, worked out by hand: for 3, and for a, b = 5, 2 and 2, 5 and 3, 7.
PARTS = {"3": 3, "twice 3": 6, "three times 3": 9, "four times 3": 12, "five times 3": 15,
         "ten times 3": 30, "3 squared": 9, "3 cubed": 27}
JOINS = {"a, plus b": (7, 7, 10), "a, minus b": (3, -3, -4), "the product of a and b": (10, 10, 21),
         "the larger of a and b": (5, 5, 7), "the smaller of a and b": (2, 2, 3),
         "the distance from a to b": (3, 3, 4), "a if a is even, else b": (2, 2, 7),
         "a if a is above b, else b": (5, 5, 7)}


@functools.cache
def drawn(family, count=400):
    """Problems with 8 and with 13 hidden tests."""
    return [deepcoder.generate_problem(np.random.default_rng([seed, 5]), family, (13, 8)[seed % 2])
            for seed in range(count)]


def start(seed=0, max_turns=1, **options):
    return begin("deepcoder", seed, budget=Budget(max_turns, 1, max_turns), **options)


def answer(env, expression):
    return env.step(f"def {env.problem.name}({env.problem.arguments}): return {expression}")


class TestPrograms:
    def test_each_reference_solution_does_what_its_task_says(self):
        """programs.txt has what each program gives, worked out by hand from its task."""
        lines = Path(__file__).with_name("programs.txt").read_text().splitlines()
        exec(deepcoder.PROGRAMS, functions := {})
        for line in lines:
            assert eval(line, functions.copy()), line
        names = {line.partition("(")[0] for line in lines}
        assert names == {task.name for task in all_tasks()} and len(all_tasks()) == 238
        assert not [task.text for task in all_tasks() if "{k}" in task.text]

    def test_the_inputs_of_each_kind_are_its_edge_cases_and_then_draws_that_stay_the_same(self):
        pools = [deepcoder.inputs_of((kind,)) for kind in sorted(deepcoder.KINDS)]
        for (edges, pool), kind in zip(pools, sorted(deepcoder.KINDS)):
            assert [value for value, in pool[:edges]] == deepcoder.KINDS[kind]["edges"]
        assert zlib.crc32(repr(pools).encode()) == 3693724586

    def test_edge_cases_are_among_the_hidden_tests(self):
        for problem in drawn("programs"):
            edges, pool = deepcoder.inputs_of(problem.kinds)
            given = [case.given for case in problem.hidden]
            assert any(inputs in given for inputs in pool[:edges]), problem.text

    @pytest.mark.parametrize("family", ["programs", "formulas"])
    def test_both_examples_are_right_and_no_hidden_tests(self, family):
        for problem in drawn(family):
            exec(problem.solution, functions := {})
            for line, case in zip(problem.text.split("\n")[-2:], problem.public, strict=True):
                assert eval(line, functions), line
                assert case.given not in [hidden.given for hidden in problem.hidden], line

    def test_every_problem_can_be_posed_with_any_number_of_tests(self, monkeypatch):
        assert [deepcoder.DeepCoder(tests=tests).options["tests"] for tests in (4, 14)] == [4, 14]
        for tests, task in itertools.product((4, 7, 14), all_tasks()):
            monkeypatch.setattr(deepcoder, "all_tasks", lambda task=task: [task])
            problem = deepcoder.generate_problem(np.random.default_rng(0), "programs", tests)
            assert (len(problem.hidden), len(problem.public)) == (tests, 2)


class TestFormulas:
    def test_the_words_mean_what_the_code_computes_alone_and_joined(self):
        parts, joins = deepcoder.TABLES["parts"], deepcoder.TABLES["joins"]
        assert {text.format(v=3): eval(code.format(v=3)) for text, code in parts} == PARTS
        assert {text.format("a", "b"): tuple(eval(code.format("a", "b"), {"a": a, "b": b}) for a, b
                                             in ((5, 2), (2, 5), (3, 7)))
                for text, code in joins} == JOINS
        names = [[code.format(v=v) for _, code in parts] for v in "ab"]
        for (_, join), *codes in itertools.product(joins, *names):
            alone = join.format(*(f"({code})" for code in codes))
            assert eval(join.format(*codes), {"a": 3, "b": 7}) == eval(alone, {"a": 3, "b": 7})

    def test_one_function_is_one_instance_however_its_phrase_reads(self):
        """`a, plus b` and `b, plus a`: split by the words, one would be in train and one in val."""
        meanings, phrases = {}, {}
        for problem in drawn("formulas"):
            exec(problem.solution, functions := {})
            values = str([functions["f"](a, b) for a in range(10) for b in range(10)])
            meanings.setdefault(values, set()).add(problem.meaning)
            phrases.setdefault(problem.meaning, set()).add(problem.text.partition("\n")[0])
        assert all(len(same) == 1 for same in meanings.values()) and len(meanings) == len(phrases)
        assert any(len(same) > 1 for same in phrases.values())


class TestHiddenTests:
    def test_neither_a_constant_nor_a_simpler_program_passes_many(self):
        for problem in drawn("programs") + drawn("formulas"):
            expected = [repr(case.expected) for case in problem.hidden]
            assert len(expected) in (8, 13)
            assert max(map(expected.count, expected)) <= len(expected) // 4, problem
            for simpler in problem.simpler:
                function = eval(f"lambda {problem.arguments}: {simpler}")
                lucky = sum(function(*case.given) == case.expected for case in problem.hidden)
                assert lucky <= len(expected) // 2, (simpler, problem)


class TestReward:
    def test_it_is_the_fraction_of_the_hidden_tests_passed_less_the_best_so_far(self):
        env = start(3, max_turns=8, family="formulas")
        some = env.problem.hidden[0].expected
        part = sum(case.expected == some for case in env.problem.hidden) / 8
        tries = [answer(env, expression) for expression in (some, some, "None", some)]
        paid = [(reward, info["effective"]) for _, reward, *_, info in tries]
        assert paid == [(part, 1.0), *3 * [(0.0, 0.0)]] and 0 < part <= 0.25
        observation, last, terminated, truncated, info = env.step(env.solve()[0])
        assert part + last == 1.0 == info["success"] and (terminated, truncated) == (True, False)
        assert observation == f"Reward: {last:.4g}\nPassed 8 of 8 hidden tests."

    def test_the_same_program_is_judged_once_unless_it_ran_out_of_time(self, monkeypatch):
        """On a busy machine, that may have been bad luck."""
        first, runs = [answer(start(seed), "1") for seed in (77, 78)], []

        def judge(code, cases, name, cpu):
            runs.append((cpu, len(cases)))
            return [Result("time"), *(len(cases) - 1) * [Result("skipped")]]

        monkeypatch.setattr(sandbox, "judge", judge)
        assert [answer(start(seed), "1") for seed in (77, 78)] == first and runs == []
        assert [answer(start(77, seconds=3), "1")[1] for _ in "12"] == [0.0, 0.0]
        assert runs == 2 * [(3, 8)]  # a task of one turn runs no examples


class TestFeedback:
    def test_with_turns_to_come_failed_examples_are_told_and_nothing_of_hidden_tests(self):
        """Also where the program has been judged before, in a last turn, without the examples."""
        env = start(3, 4, family="formulas")
        answer(start(3, family="formulas"), "0")  # verdicts are kept by kind of sandbox: it begins
        (*first, _), (*second, _) = env.problem.public
        expression = f"{first[1]} if [a, b] == {first[0]} else -77"
        assert "wrong" not in answer(start(3, family="formulas"), expression)[0]
        observation = answer(env, expression)[0]
        assert observation == (f"Reward: 0\nPassed 0 of 8 hidden tests.\nf{tuple(second[0])}: "
                               f"wrong\n{env.problem.text}\nTurns left: 3")

    def test_what_monty_lacks_is_told_and_counted(self, monkeypatch):
        monkeypatch.setattr(sandbox, "SUBMISSIONS", WorkerPool(Monty))
        env = start(3, 4, family="formulas")
        assert env.backend == Monty.layers
        observation, *_, info = env.step("import heapq\ndef f(a, b): return heapq.heappop([a])")
        assert "): unsupported\n" in observation
        assert info["unsupported"] == 1.0 and answer(env, "0")[4]["unsupported"] == 0.0
        assert env.step(env.solve()[0])[4]["success"] == 1.0


class TestAnswers:
    def test_the_shallow_one_is_the_first_line_that_fits_both_examples_or_what_one_shows(self):
        for task, line in {
                "g(xs).\n...\ng([3, 1]) == [1, 3]\ng([2]) == [2]": "def g(xs): return sorted(xs)",
                "f(a, b) that\nf(1, 4) == -3\nf(5, 2) == 3": "def f(a, b): return a - b",
                "g(s). Return\ng('ab') == 'x'\ng('') == 'y'": "def g(s): return 'x'"}.items():
            assert deepcoder.DeepCoder.shallow_answer(["Answer.", f"Write {task}"]) == line

    def test_one_thread_at_a_time_parses(self, monkeypatch):
        """CPython 3.11 counts the recursion of `ast.parse` for all threads together."""
        parse, alone = ast.parse, []
        monkeypatch.setattr(ast, "parse", lambda *given: (
            alone.append(deepcoder.PARSING.locked()) or parse(*given)))
        assert program_of("f = 1", start(family="formulas").problem) and alone == [True]

    def test_python_that_defines_the_function_is_a_program(self):
        for text in ["def f(a, b): return 1", "```python\ndef f(a, b): return 1\n```",
                     "So:\n``` py \nf = lambda *a: 1\n```\nOk!",
                     "```Python3\nf = lambda *a: 1",  # cut off
                     "class Solution:\n    def f(self, a, b): return '<think>'"]:
            code = program_of(text, start(family="formulas").problem)
            assert code and "`" not in code and code.strip() in text, text
        env = start(5)
        assert env.step(env.solve()[0] + "  # a || b")[4]["success"] == 1.0

    def test_anything_else_is_an_invalid_action_and_starts_no_process(self, monkeypatch):
        monkeypatch.setattr(sandbox, "judge", None)
        problem, began = start(family="formulas").problem, time.process_time()
        for unit in (" ", "```", "``` ", "```\n", "```py", "\n```", "`"):
            assert program_of("```" + unit * (32_700 // len(unit)), problem) is None
        assert time.process_time() - began < 0.5  # once quadratic
        for text in ["return 1", "def g(a, b): return 1", "# def f(a, b): return 1", "def f(",
                     "\0", "\ud800", "f = 1" + " " * 32_768, "f = " + "-" * 20_000 + "1"]:
            assert program_of(text, problem) is None, text[:60]
        observation, reward, _, _, info = start(family="formulas").step("return 1")
        assert (reward, info["valid"]) == (-0.1, 0.0) and "valid" in observation
        assert program_of("x = 1", replace(problem, name="")) is None  # it calls nothing


STDIN = {"question": "Add  numbers.\r\nInput: integers.",
         "solution": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
         "tests": [{"input": "1\n2", "output": "3"}, {"input": "3\n4\n", "output": "7\n"}]}
CALL = {"question": "Double it.", "function": "twice", "solution": "def twice(x): return 2 * x",
        "tests": [{"input": [[1, 2]], "output": [1, 2, 1, 2]}, {"input": [3], "output": 6}],
        "examples": [{"input": ["a"], "output": "aa"}]}
MBPP = {"task_id": 2, "text": "Write a function to find shared elements.", "test_setup_code": "",
        "code": "import heapq\r\ndef shared(a, b):\r\n  return tuple({*a} & {*b})",
        "challenge_test_list": [], "test_imports": ["import math"],
        "test_list": ["assert shared ((3, 4), (4, 5))==(4,)", "assert shared([], [1]) == () ",
                      "assert (shared({1: -2.5}, {1})) == (1,)"]}


def load(tmp_path, *records, **options):
    path = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", *records)
    return deepcoder.DeepCoder(data=path, **options)


class TestRecords:
    def test_a_program_or_a_function_is_asked_for_and_the_solution_passes(self, tmp_path):
        program, call = load(tmp_path, STDIN, CALL).records
        assert [problem.text for problem in (program, call)] == [
            "Add  numbers.\nInput: integers.\nRead standard input and write to standard output.",
            "Double it.\nWrite twice."]
        assert call.public == (Case(["a"], "aa"),) and not program.public
        for problem in (program, call):
            solution = program_of(problem.solution, problem)
            assert verdict(problem, solution, len(problem.public), 2)[:2] == (2, 2)

    def test_the_mbpp_assertion_that_the_task_shows_is_graded_only_if_it_is_alone(self, tmp_path):
        text, shown = MBPP["text"], MBPP["test_list"][:1]
        for fields in ({}, {"text": None, "prompt": text}):
            [problem] = load(tmp_path, MBPP | fields).records
            assert problem.text == f"{text}\n{shown[0]}"
            for code, passed in {problem.solution: 2, "def shared(a, b): return ()": 1,
                                 "def shared(*x): return 4": 0}.items():
                assert verdict(problem, program_of(code, problem), 0, 2)[:2] == (passed, 2), code
            [problem] = load(tmp_path, MBPP | fields | {"test_list": shown}).records
            assert verdict(problem, "def shared(*x): return 4,", 0, 2)[:2] == (1, 1)

    @pytest.mark.parametrize("test", [
        "assert f(1j) == 1", "assert f(int) == 1", "assert f(1) == 1, f(", "f(1) == 1",
        "assert Solution().f(1) == 1", "assert round(f(1)) == 1", "assert f(1) == b''",
        "assert f(x=1) == 1", "assert g(1) == 1", "assert f(1) == 1 == 1", "\ud800"])
    def test_rows_that_cannot_be_judged_are_left_out_and_counted(self, tmp_path, capfd, test):
        good = {"text": "x", "code": "def f(x): return 1", "test_list": ["assert f(1) == 1"]}
        [problem] = load(tmp_path, good | {"test_list": [*good["test_list"], test]}, good).records
        assert problem.text.endswith("\nassert f(1) == 1")
        told = capfd.readouterr().err
        assert re.search(r"/0\.jsonl: 1 of 2 records left out: an assertion is not of", told)

    def test_records_that_differ_only_in_examples_share_no_verdict(self, tmp_path):
        records = [CALL | {"examples": [{"input": [2], "output": output}]} for output in (4, 5)]
        found = [verdict(problem, CALL["solution"], 1, 2) for problem in load(
            tmp_path, *records).records]
        assert [words[0] for *_, words in found] == ["passed", "wrong"]

    def test_the_number_of_tests_is_an_option_and_spaces_make_no_other_question(self, tmp_path):
        tests = [{"input": str(k), "output": str(k)} for k in range(30)]
        rows = [{"question": f"Add{gap}{i}.", "tests": tests} for i in "12" for gap in (" ", "  ")]
        eight, every = (load(tmp_path, *rows, tests=limit).records for limit in (8, 0))
        assert [len(problem.hidden) for problem in (*eight, *every)] == 4 * [8] + 4 * [30]
        assert len({problem.meaning for problem in every}) == 2
        for problem in (eight[0], every[0]):  # which share no verdict
            passed = verdict(problem, "print(input())", 0, 2)[:2]
            assert passed == 2 * (len(problem.hidden),)

    def test_a_long_question_is_an_observation_of_the_space(self, tmp_path):
        env = load(tmp_path, STDIN | {"question": "Add. " * 4000})
        assert env.observation_space.contains(env.reset(seed=0)[0])

    def test_a_bad_record_is_named_with_what_was_expected(self, tmp_path):
        for record, sentence in [
                ({}, "it has no question"), ({"question": "x"}, "no tests"), (3, "iterable"),
                ({"test_list": 3}, "iterable"), (CALL | {"function": "a b"}, "name 'a b'"),
                (CALL | {"tests": [{"input": 3, "output": 6}]}, "an input is no list of arguments"),
                (STDIN | {"tests": [{"input": "3", "output": 6}]}, "a test is no text")]:
            with pytest.raises(ValueError, match="record 2 of .* Expected a question") as caught:
                load(tmp_path, STDIN, record)
            assert sentence in str(caught.value)

    def test_a_solution_that_is_not_a_text_counts_as_none(self, tmp_path):
        for given in ([5], 7, ""):
            env = load(tmp_path, STDIN | {"solution": given})
            env.problem = env.records[0]
            assert env.solve() == ["print(input())"] and not env.problem.solution
