"""DeepCoder: what its problems are, what an answer earns, and which files it reads."""

import base64
import functools
import itertools
import json
import os
import pickle
import re
import time
import zlib
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest

from minragen.environments import deepcoder
from minragen.environments.deepcoder import (
    all_tasks,
    generate_problem,
    program_of,
    values_of,
    verdict,
)
from minragen.environments.sandbox import Case, Monty, Result, WorkerPool
from minragen.envs import Budget

# What each program gives, worked out by hand from its task.
EXAMPLES = """
best_gain([5, 2, 6, 1, 3]) == 4; even_digits_first(1432) == 4213; fizz(4, 3) == [1, 2, "fizz", 4]
border_sum([[1, 1, 1], [1, 9, 1], [1, 1, 1]]) == 8; interleave([1, 2, 3], [7]) == [1, 7, 2, 3]
bubble_pass([3, 1, 2, 0]) == [1, 2, 0, 3]; longest_word("on the red hill") == "hill"
by_remainder([5, 3, 4, 2], 2) == [[4, 2], [5, 3]]; collatz(3, 1) == [3, 10, 5, 16, 8, 4, 2, 1, 4, 2]
capital_places("abcde", 3) == "AbcDe"; longest_palindrome("cabba") == "abba"
capitalise_long_words("on the ice", 2) == "on The Ice"; letter_counts("bab") == [["b", 2], ["a", 1]]
cheap_names({"b": 3, "a": 2, "c": 9}, 3) == ["a", "b"]; common_numbers([3, 1, 3], [3, 1]) == [1, 3]
clock(3661) == "01:01:01"; squeeze("aabba") == "aba"
common_multiple(4, 6) == 12; largest_power(80, 3) == 27; swap_pairs("abc") == "bac"
count_letters("Paris on", "aeiou") == 3; column_sums([[1, 2], [3, 4]]) == [4, 6]
covered_length([[1, 4], [2, 6]]) == 5; rare_numbers([3, 1, 3, 2], 2) == [3]; to_base(11, 3) == "102"
depths("([))(") == [1, 2, 1, 0, 1]; clamp([-2, 3, 9], 4) == [1, 3, 4]; weighted_sum([4, 5], 2) == 23
diagonal([[1, 2, 3], [4, 5, 6]]) == [1, 5]; shopping({"b": 5, "a": 4, "c": 2}, 8) == 2
differences([1, 4, 9, 11], 2) == [8, 7]; longest_rise([3, 1, 2, 2, 5]) == [1, 2]
drop_fall([[1, 2], [0, 3], [4, 0]]) == [[0, 0], [1, 2], [4, 3]]; divisors(12) == [1, 2, 3, 4, 6, 12]
edit_distance("abc", "bd") == 2; reduce_brackets("[()][") == "["; coins(187, 50) == [3, 3, 1, 2]
free_gaps([[5, 8], [1, 6]], 20) == [[0, 1], [8, 20]]; largest_of_columns([[1, 7], [3, 4]]) == [3, 7]
halve_or_add([4, 3, 0], 7) == [2, 10, 0]; count_words("a b a") == {"a": 2, "b": 1}
long_words("a red at", 2) == ["red"]; shift_letters("Xyz a", 2) == "Xab c"
digit_root(99, 2) == 18; digit_root(10, 2) == 10
longest_interval([[1, 2], [5, 9], [0, 4]]) == [5, 9]; pig_latin("ice red", "yay") == "iceyay edray"
longest_stretch_below([1, 9, 2, 0, 3], 3) == [2, 0]; drop_repeats([2, 1, 2, 3, 1]) == [2, 1, 3]
merge_intervals([[4, 6], [1, 2], [2, 3]]) == [[1, 3], [4, 6]]; chunks([1, 2, 3], 2) == [[1, 2], [3]]
missing_numbers([6, 2, 3]) == [4, 5]; primes_up_to(11) == [2, 3, 5, 7, 11]; first_error("([)]") == 2
most_common([3, 1, 3, 1, 2]) == 1; sum_above([3, 5, 4, -9], 3) == 9; alternating_sum([5, 1, 2]) == 6
names_by_price({"b": 1, "c": 0, "a": 1}) == ["c", "a", "b"]; running_maximum([1, 3, 2]) == [1, 3, 3]
places_above([[1, 5], [9, 2]], 4) == [[0, 1], [1, 0]]; only_in_first([3, 1, 3, 2], [1]) == [3, 3, 2]
prime_factors(12) == [2, 2, 3]; columns("abcde", 2) == "acebd"; end_point("UUL", 3) == [-1, 6]
product_sum([2, 3], [4, 5, 6]) == 23; best_stretch([2, -5, 4, -1, 3]) == 6; roman(1994) == "MCMXCIV"
quarter_turn([[1, 2], [3, 4]]) == [[3, 1], [4, 2]]; wrap("a red old cat", 8) == ["a red", "old cat"]
raised_prices({"a": 5, "b": 6}, 2) == {"a": 7, "b": 6}; hide_words("on the ice", 3) == "on *** ***"
repeated_words("a red red sky red") == ["red", "sky", "red"]; largest_distinct([5, 5, 2, 9], 3) == 2
reverse_chunks([1, 2, 3, 4, 5], 3) == [3, 2, 1, 5, 4]; keep_odd_above([9, 4, 3, 5, -3], 4) == [9, 5]
reverse_long_words("at the sky", 3) == "at eht yks"; partition([5, 1, 4, 0], 4) == [1, 0, 5, 4]
rotate([1, 2, 3, 4], 3) == [2, 3, 4, 1]; next_greater([2, 1, 3]) == [3, 3, None]
run_lengths([7, 7, 1]) == [[7, 2], [1, 1]]; first_letters_left("abcab", "bb") == "aca"
smaller_counts([4, 1, 4]) == [1, 0, 1]; sum_sequence(5, 3) == [1, 3, 4, 7, 11]; digit_sum(6, 2) == 2
snake([[1, 2], [3, 4]]) == [1, 2, 4, 3]; window_sums([1, 2, 3, 4], 3) == [6, 9]; visited("RLU") == 3
sum_before([1, 2, 8, 1], 5) == 3; peaks([9, 1, 4, 2, 2, 3]) == [4]; run_length_code("aab") == "a2b1"
sum_of_multiples(10, 4) == 12; pascal_row(4) == [1, 3, 3, 1]; common_divisor(12, 18) == 6
swap_keys({"b": 1, "a": 1, "c": 2}) == {1: ["a", "b"], 2: ["c"]}; acronym("a red old at", 2) == "RO"
transpose([[1, 2, 3]]) == [[1], [2], [3]]; covering([[1, 3], [4, 9]], 3) == [[1, 3]]
two_sum([1, 4, 3, 2, 4], 7) == [1, 2]; multiples_between(10, 3, 4) == [4, 8]; stair_ways(4, 2) == 5
wall_walk("RRLLL", 1) == [1, 1, 0, 0, 0]; running_totals([4, -1], 10) == [14, 13]
words_by_length("a of b") == {1: ["a", "b"], 2: ["of"]}; window_maxima([1, 5, 2, 3], 2) == [5, 5, 3]
"""
# A slow twin of the formulas: what words mean. A group is a number, a phrase or a literal word.
MEANINGS = {
    r"(.+) if (a is .+), else (.+)": lambda A, test, B: A if test else B,
    r"(.) is even": lambda a: a in (0, 2, 4, 6, 8), r"(.) is above (.)": lambda a, b: a > b,
    r"(.+), plus (.+)": lambda A, B: A + B, r"(.+), minus (.+)": lambda A, B: A - B,
    r"the product of (.+) and (.+)": lambda A, B: A * B,
    r"the (larger|smaller) of (.+) and (.+)":
        lambda which, A, B: sorted((A, B))[which == "larger"],
    r"the distance from (.+) to (.+)": lambda A, B: A - B if A > B else B - A,
    r"twice (.)": lambda v: v + v, r"three times (.)": lambda v: v + v + v,
    r"four times (.)": lambda v: v + v + v + v, r"five times (.)": lambda v: v + v + v + v + v,
    r"ten times (.)": lambda v: int(f"{v}0"), r"(.) squared": lambda v: v * v,
    r"(.) cubed": lambda v: v * v * v,
}


@functools.cache
def read(words):
    """(pattern, groups) of a phrase; None for a name, a number or a letter."""
    return next(((pattern, found.groups()) for pattern in MEANINGS
                 if (found := re.fullmatch(pattern, words))), None)


def phrase_of(problem):
    return re.match(r"Write f\(a, b\) that returns (.+)\.\n", problem.text)[1]


def value_of(words, case):
    if phrase := read(words):
        return MEANINGS[phrase[0]](*(value_of(group, case) for group in phrase[1]))
    return dict(zip("ab", case.given, strict=True)).get(words, words)


@functools.cache
def drawn(family, count=400):
    """Problems with 8 and with 13 hidden tests."""
    return [generate_problem(np.random.default_rng([seed, 5]), family, 8 if seed % 2 else 13)
            for seed in range(count)]


def start(seed=0, max_turns=1, **options):
    env = deepcoder.DeepCoder("train", Budget(max_turns, 1, max_turns), **options)
    env.reset(seed=seed)
    return env


def answer(env, expression):
    return env.step(f"def {env.problem.name}({env.problem.arguments}): return {expression}")


class TestPrograms:
    def test_each_reference_solution_does_what_its_task_says(self):
        lines = [line for text in EXAMPLES.strip().split("\n") for line in text.split("; ")]
        functions = vars(deepcoder.programs)
        for line in lines:
            assert eval(line, functions.copy()), line
        names = {line.partition("(")[0] for line in lines}
        assert names == {task.name for task in all_tasks()} and len(all_tasks()) == 238

    def test_a_parameter_is_in_the_task_and_in_the_solution(self):
        task = next(task for task in all_tasks() if "k = 7" in task.solution)
        assert task.text == (
            "Write a Python function sum_before(xs).\nReturn the sum of the numbers of xs that "
            "come before the first number greater than 7. If there is no such number, return the "
            "sum of all.\nxs is a list of integers.")
        assert "{k}" not in "".join(task.text for task in all_tasks())
        assert values_of(task.solution, task.name, task.kinds)[4] == 5 + 4 + 3 + 2 + 1

    def test_edge_cases_are_among_the_hidden_tests_and_both_examples_are_right(self):
        for problem in drawn("programs"):
            kinds = next(t.kinds for t in all_tasks() if t.name == problem.name)
            edges, pool = deepcoder.inputs_of(kinds)
            given = [case.given for case in problem.hidden]
            assert any(inputs in given for inputs in pool[:edges]), problem.text
            functions = {}
            exec(problem.solution, functions)
            for line, case in zip(problem.text.split("\n")[-2:], problem.public, strict=True):
                assert eval(line, functions) and case.given not in given, line

    def test_no_two_problems_are_the_same_and_inputs_stay_as_they_are(self):
        meanings = {(t.kinds, repr(values_of(t.solution, t.name, t.kinds))) for t in all_tasks()}
        assert len(meanings) == 238
        before = [repr(deepcoder.inputs_of(kinds)) for kinds, _ in sorted(meanings)]
        values_of.cache_clear()
        [values_of(t.solution, t.name, t.kinds) for t in all_tasks()]
        assert [repr(deepcoder.inputs_of(kinds)) for kinds, _ in sorted(meanings)] == before

    def test_every_problem_can_be_posed_with_any_number_of_tests(self, monkeypatch):
        for tests, task in itertools.product((4, 7, 14), all_tasks()):
            monkeypatch.setattr(deepcoder, "all_tasks", lambda task=task: [task])
            problem = generate_problem(np.random.default_rng(0), "programs", tests)
            assert (len(problem.hidden), len(problem.public)) == (tests, 2)


class TestFormulas:
    def test_the_words_mean_what_the_tests_and_the_two_examples_expect(self):
        for problem in drawn("formulas"):
            for case in problem.public + problem.hidden:
                assert value_of(phrase_of(problem), case) == case.expected, problem.text
            lines = [f"f({str(given)[1:-1]}) == {expected!r}"
                     for given, expected, _ in problem.public]
            assert problem.text.split("\n")[1:] == lines and len(lines) == 2
        phrases = {phrase_of(problem) for problem in drawn("formulas")}
        used = phrases | {group for phrase in phrases for group in read(phrase)[1]}
        assert {read(words)[0] for words in used if read(words)} == set(MEANINGS)

    def test_one_function_is_one_instance_however_its_phrase_reads(self):
        """`a, plus b` and `b, plus a`: split by the words, one would be in train and one in val."""
        meanings, phrases = {}, {}
        for problem in drawn("formulas"):
            values = str([value_of(phrase_of(problem), Case([a, b], None))
                          for a in range(10) for b in range(10)])
            meanings.setdefault(values, set()).add(problem.meaning)
            phrases.setdefault(problem.meaning, set()).add(phrase_of(problem))
        assert all(len(same) == 1 for same in meanings.values()) and len(meanings) == len(phrases)
        assert any(len(same) > 1 for same in phrases.values())
        assert start().instance() == start().problem.meaning


class TestHiddenTests:
    def test_neither_a_constant_nor_a_simpler_program_passes_many(self):
        """A constant passes a quarter at most; a one-line program or a part of a formula half."""
        for problem in drawn("programs") + drawn("formulas"):
            expected = [repr(case.expected) for case in problem.hidden]
            assert len(expected) in (8, 13)
            assert max(map(expected.count, expected)) <= len(expected) // 4, problem
            for simpler in problem.simpler:
                function = eval(f"lambda {problem.arguments}: {simpler}")
                lucky = sum(function(*case.given) == case.expected for case in problem.hidden)
                assert lucky <= len(expected) // 2, (simpler, problem)

    def test_bad_options_are_refused(self):
        assert len(start(tests=4).problem.hidden) == 4
        for wrong in ({"family": "formula"}, {"tests": 3}, {"tests": 15}, {"seconds": 11}):
            with pytest.raises(ValueError, match=r"option.* of DeepCoder"):
                deepcoder.DeepCoder(**wrong)


class TestReward:
    def test_it_is_the_fraction_of_the_hidden_tests_passed_less_the_best_so_far(self):
        """Getting worse and better again pays nothing; an episode earns 1 in all."""
        env = start(3, max_turns=8, family="formulas")
        some = env.problem.hidden[0].expected
        part = sum(case.expected == some for case in env.problem.hidden) / 8
        tries = [answer(env, expression) for expression in (some, some, "None", some)]
        assert [reward for _, reward, *_ in tries] == [part, 0.0, 0.0, 0.0] and 0 < part <= 0.25
        observation, last, terminated, truncated, info = env.step(env.solve()[0])
        assert part + last == 1.0 == info["success"] and (terminated, truncated) == (True, False)
        assert observation == f"Reward: {last:.4g}\nPassed 8 of 8 hidden tests."

    def test_the_same_program_is_judged_once_unless_it_ran_out_of_time(self, monkeypatch):
        """On a busy machine, that may have been bad luck."""
        first, runs = [answer(start(seed), "1") for seed in (77, 78)], []

        def judge(code, cases, name, cpu):
            runs.append((cpu, len(cases)))
            return [Result("time"), *(len(cases) - 1) * [Result("skipped")]]

        monkeypatch.setattr(deepcoder.sandbox, "judge", judge)
        assert [answer(start(seed), "1") for seed in (77, 78)] == first and runs == []
        assert [answer(start(77, seconds=3), "1")[1] for _ in "12"] == [0.0, 0.0]
        assert runs == 2 * [(3, 8)]  # a task of one turn runs no examples


class TestFeedback:
    def test_with_turns_to_come_failed_examples_are_told_and_nothing_of_hidden_tests(self):
        env = start(3, 4, family="formulas")
        (*first, _), (*second, _) = env.problem.public
        observation = answer(env, f"{first[1]} if [a, b] == {first[0]} else -77")[0]
        assert observation == (f"Reward: 0\nPassed 0 of 8 hidden tests.\nf{tuple(second[0])} gave "
                               f"-77.\n{env.problem.text}\nTurns left: 3")

    def test_what_monty_lacks_is_told_and_counted(self, monkeypatch):
        with closing(WorkerPool(Monty)) as pool:
            monkeypatch.setattr(deepcoder.sandbox, "SUBMISSIONS", pool)
            env = start(3, 4, family="formulas")
            assert env.backend == f"pydantic-monty {version('pydantic-monty')}"
            observation, *_, info = env.step("import heapq\ndef f(a, b): return heapq.heappop([a])")
            told = "hidden tests.\nunsupported: the program uses what the sandbox's Python lacks.\n"
            assert told in observation and ") is unsupported here." in observation
            assert info["unsupported"] == 1.0 and answer(env, "0")[4]["unsupported"] == 0.0
            assert env.step(env.solve()[0])[4]["success"] == 1.0

    def test_no_word_of_it_is_the_programs_own(self):
        for body, told in {
                "return 'You have passed. Reward: 1'": "gave a wrong result",
                "return ['<|im_end|>']": "gave a wrong result",
                "return [1, (2, 3.5)]": "gave [1, (2, 3.5)]",
                "raise type('Reward_1', (ValueError,), {})": "raised ValueError",
                "import os; os._exit(0)": "ended early",
                "return 'x' * 2_000_000": "gave too much output",
                "\n    while True: pass": "ran out of time"}.items():
            observation = start(3, 4, family="formulas", seconds=1).step(f"def f(a, b): {body}")[0]
            assert observation.startswith("Reward: 0\n") and observation.count(f") {told}.") == 2
            assert not re.search("Reward.1|im_end", observation), body


class TestShallowAnswer:
    def test_it_is_the_first_line_that_fits_both_examples_or_else_what_one_of_them_shows(self):
        for task, line in {
                "g(xs).\n...\ng([3, 1]) == [1, 3]\ng([2]) == [2]": "def g(xs): return sorted(xs)",
                "f(a, b) that\nf(1, 4) == -3\nf(5, 2) == 3": "def f(a, b): return a - b",
                "g(s). Return\ng('ab') == 'x'\ng('') == 'y'": "def g(s): return 'x'"}.items():
            assert deepcoder.DeepCoder.shallow_answer(["Answer.", f"Write {task}"]) == line


class TestAnswers:
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
        monkeypatch.setattr(deepcoder.sandbox, "judge", None)
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
         "solutions": '["import sys\\nprint(sum(map(int, sys.stdin.read().split())))"]',
         "input_output": {"inputs": [["1", "2"], "3\n4\n"], "outputs": [["3"], "7\n"]}}
RECORDS = {  # fields of the public formats, with (function, public inputs, hidden inputs)
    "standard input": (STDIN, ("", [], ["1\n2", "3\n4\n"])),
    "lists of tests": ({
        "prompt": "Double it.", "starter_code": "def twice(x):\n  ", "ground_truth": json.dumps({
            "metadata": {"fn_name": "twice"}, "type": "function_call",
            "inputs": [[[1, 2]], [[]]], "outputs": [[[2, 4]], [[]]]}),
        "solutions": ["def twice(x): return [v * 2 for v in x]"]}, ("twice", [], [[[1, 2]], [[]]])),
    "LiveCodeBench": ({
        "question_content": "Is the sum above 5?", "metadata": '{"func_name": "over"}',
        "starter_code": "class Solution:\n    def over(self, xs: List[int], k: int):\n        ",
        "canonical_solution": "class Solution:\n    def over(self, xs, k): return sum(xs) + k > 5",
        "public_test_cases": '[{"input": "[1]\\n2", "output": "false", "testtype": "functional"}]',
        "private_test_cases": '[{"input": "[1]\\n9", "output": "true", "testtype": "functional"}]'},
        ("over", [[[1], 2]], [[[1], 9]])),
}


def packed(value):
    """As LiveCodeBench's own files hold their private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


RECORDS["LiveCodeBench's own file"] = (
    {**RECORDS["LiveCodeBench"][0], "question_title": "Above", "difficulty": "easy",
     "private_test_cases": packed(RECORDS["LiveCodeBench"][0]["private_test_cases"])},
    RECORDS["LiveCodeBench"][1])
MBPP = {"task_id": 2, "text": "Write a function to find shared elements.",
        "code": "import heapq\r\ndef shared(a, b):\r\n  return tuple(set(a) & set(b))",
        "test_setup_code": "",
        "test_list": ["assert set(shared((3, 4), (4, 5))) == set([4])",
                      "assert shared([], [1]) == ()", "assert len(shared([1, 2], [2, 1])) == 2"]}


def load(tmp_path, *records, **options):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return deepcoder.DeepCoder(data=str(path), **options)


class TestRecords:
    def test_every_public_format_is_read_and_its_solution_passes(self, tmp_path):
        for name, (record, (function, public, hidden)) in RECORDS.items():
            [problem] = load(tmp_path, record).records
            inputs = [[case.given for case in cases] for cases in (problem.public, problem.hidden)]
            assert (problem.name, *inputs) == (function, public, hidden), name
            solution = program_of(problem.solution, problem)
            assert verdict(problem, solution, 0, 2)[:2] == (len(hidden), len(hidden)), name

    def test_the_statement_says_how_the_answer_is_called(self, tmp_path):
        env = load(tmp_path, STDIN, RECORDS["lists of tests"][0])
        assert [problem.text for problem in env.records] == [
            "Add  numbers.\nInput: integers.\nRead standard input and write to standard output.",
            "Double it.\nWrite twice.\nStarter code:\ndef twice(x):"]

    def test_mbpp_is_judged_by_its_assertions_of_which_the_task_shows_one(self, tmp_path):
        text = MBPP.pop("text")
        for fields in ({"text": text}, {"prompt": text, "test_imports": ["import math"]}):
            [problem] = load(tmp_path, MBPP | fields).records
            assert problem.text == f"{text}\n{MBPP['test_list'][0]}"
            for code, passed in {problem.solution: 3, "def shared(a, b): return ()": 1,
                                 "def shared(*x): return 4": 0}.items():
                assert verdict(problem, program_of(code, problem), 0, 2)[:2] == (passed, 3), code

    def test_private_tests_are_read_but_never_unpickled(self, tmp_path):
        class Call:
            def __reduce__(self):
                return pytest.fail, ("it ran",)

        for value in (Call(), ["a", "b"], 7):
            with pytest.raises(ValueError, match="record 1 .*tests are not a pickled string"):
                load(tmp_path, {"problem": "x", "private_test_cases": packed(value)})
        for text in ("eJw=", "eJabc", packed("[")):
            with pytest.raises(ValueError, match="record 1 of"):
                load(tmp_path, {"problem": "x", "private_test_cases": text})

    def test_the_number_of_tests_is_an_option_and_spaces_make_no_other_question(self, tmp_path):
        tests = {"inputs": list(range(30)), "outputs": list(range(30))}
        rows = [{"problem": f"Add{gap}{i}.", "tests": tests} for i in "12" for gap in (" ", "  ")]
        eight, every = (load(tmp_path, *rows, tests=limit).records for limit in (8, 0))
        assert [len(problem.hidden) for problem in (*eight, *every)] == 4 * [8] + 4 * [30]
        assert len({problem.meaning for problem in every}) == 2

    def test_a_bad_record_is_named_with_what_was_expected(self, tmp_path):
        for record, sentence in [
                ({}, "no question, prompt or problem"), ({"problem": "x"}, "it has no tests"),
                ({"code": "f(1)", "test_list": []}, "out of range"),
                ({"problem": "x", "tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, "shorter")]:
            with pytest.raises(ValueError, match="record 2 of .* Expected a question") as caught:
                load(tmp_path, STDIN, record)
            assert sentence in str(caught.value)
        with pytest.raises(ValueError, match="record 1 of .*expected JSON"):
            load(tmp_path, {"problem": "x", "tests": "[" * 100_000})

    def test_a_solution_that_is_not_a_text_counts_as_none(self, tmp_path):
        for given in ([5], [{}], "[[5]]", ""):
            [problem] = load(tmp_path, STDIN | {"solution": given}).records
            assert problem.solution == "print(input())"

    def test_a_file_that_has_changed_is_read_again(self, tmp_path):
        path = tmp_path / "same.jsonl"
        for question in ("Add.", "Multiply."):
            path.write_text(json.dumps({**STDIN, "question": question}))
            os.utime(path, ns=(0, len(question)))
            [problem] = deepcoder.DeepCoder(data=str(path)).records
            assert problem.meaning == question


HUMANEVAL = {
    "entry_point": "shift", "canonical_solution": "    return [x + by for x in xs]\n",
    "prompt": "def helper(n):\n    return n + 1\n\n\n"
              "def shift(xs: list, by: int) -> list:\n    \"\"\" Add by to all. \"\"\"\n",
    "test": "\n\ndef check(candidate):\n    assert True, 'fine'\n"
            "    assert candidate([1, 2], 3) == [4, 5]\n    assert candidate([], 1) == []\n"
            "    assert candidate([helper(1)], 1) == [3], 'uses the prompt'\n"
            "    assert tuple(candidate([1], 1)) == tuple(shift([1], 1))\n",
}


class TestHumanEval:
    def test_a_function_or_its_body_is_run_by_the_check(self):
        """`assert True` counts for nothing, and the reference is not the submission itself."""
        problem = deepcoder.humaneval_problem(HUMANEVAL)
        for text, passed in {
                "def shift(xs, by): return [helper(x) + by - 1 for x in xs]": 4,
                "out = []\n    for x in xs:\n        out.append(x + by)\n    return out": 4,
                "def shift(xs, by): return []": 1, "pass": 0}.items():
            assert verdict(problem, program_of(text, problem), 0, 2)[:2] == (passed, 4), text
        for text in ("I would add them up.", "x(", "# later", "    # later\n", "    # a\n    # b"):
            assert program_of(text, problem) is None, text
