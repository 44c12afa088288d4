"""DeepCoder: write a program that passes hidden tests."""

import ast
import functools
import itertools
import re
import textwrap
import threading
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from minragen.environments import data, sandbox
from minragen.envs import Budget, Outcome, TextEnv, text_space

MAX_SOURCE = 32_768  # characters of an answer
VERDICTS = {}  # the cache of `verdict`
MAX_VERDICTS = 4096  # in it
# CPython 3.11 counts the recursion of `ast.parse` for all threads together and raises SystemError
# when two of them parse at a time.
PARSING = threading.Lock()
POOL = 90  # random inputs, besides the edge cases, on which functions are compared
# Its first lines explain programs.json, too.
PROGRAMS = (data.DATA / "programs.txt").read_text("utf-8")
TABLES = data.load_table("programs.json")
KINDS = TABLES["kinds"]

# The parser warns of "\d" in the model's code.
warnings.filterwarnings("ignore", module="<answer>")


class DeepCoder(TextEnv):
    """Write a program; hidden tests decide.

    Observation: the task and two examples; after a try, how many hidden tests it passed and a
        word for each example that failed (`Result.word` of sandbox.py).
    Actions: Python source, with or without a Markdown fence. Text that is not Python, or lacks the
        function that the task names, is not an action.
    Reward: the fraction of hidden tests passed, beyond the best of earlier turns (`--max-turns`).
    Ends when: all hidden tests are passed.
    Solver: the reference solution; for a record without one, a program that fails.

    Options: `family` (`formulas`: the answer is one line of arithmetic that the task spells out);
    `tests` hidden tests per problem (0: all of a record); `seconds` of CPU per test; `data`, a file
    of records.
    """

    budget = Budget(max_turns=1, max_actions_per_turn=1, max_actions=1)
    parallel = True
    bundled_data = "238 problems"
    defaults = {"data": "", "family": "programs", "tests": 8, "seconds": 2}
    ranges = {"family": ["programs", "formulas"], "tests": (0, 1000), "seconds": (1, 10)}
    example = ("The area of a rectangle is its width times its height.",
               "def area(width, height):\n    return width * height",
               "A function area(width, height) is asked for.", "All hidden tests are passed.")
    instruction = ("Write the Python code that is asked for. It is run on hidden tests. "
                   "Answer with code only.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        if not (o["data"] or 4 <= o["tests"] <= 14):
            raise ValueError(f"tests of DeepCoder: got {o['tests']}, expected 4 to 14.")
        data.refuse_with(self, "data", "family")
        self.records = None
        if o["family"] == "formulas":
            self.bundled_data = "drawn formulas"
        if o["data"]:
            self.records = [replace(problem, hidden=problem.hidden[:o["tests"] or None])
                            for problem in load_programs(o["data"])]
            if (not all(problem.name for problem in self.records)
                    and self.backend.startswith(sandbox.Monty.layers)):
                raise ValueError(
                    f"data={o['data']} has programs that read standard input: got {self.backend}, "
                    "expected Linux namespaces. docs/security.md says how to get them.")
            texts = [problem.text for problem in self.records]
            self.observation_space = text_space("".join(texts), 16_384 + max(map(len, texts)))

    @property
    def backend(self):
        return sandbox.SUBMISSIONS.backend

    def _reset(self, rng):
        self.problem = (self.records[rng.integers(len(self.records))] if self.records else
                        generate_problem(rng, self.options["family"], self.options["tests"]))
        self.best, self.feedback = 0.0, ""

    def _act(self, action):
        code = program_of(action, self.problem)
        if code is None:
            return None
        # Examples are only feedback, so they are not run on the last turn.
        examples = self.problem.public[:3] if self.turns_left > 1 else ()
        passed, total, words = verdict(self.problem, code, len(examples), self.options["seconds"])
        lines = [f"Passed {passed} of {total} hidden tests."]
        for case, word in zip(examples, words):
            name, given = self.problem.name, ", ".join(map(ascii, case.given))
            call = f"{name}({given[:200]})" if name else "An example"
            lines += [f"{call}: {word}"] if word != "passed" else []
        self.feedback = "\n".join(lines)
        gain = max(0.0, passed / total - self.best)
        self.best += gain
        solved = passed == total
        return Outcome(gain, terminated=solved, success=solved, effective=gain > 0, metrics={
            "tests_passed": passed / total, "unsupported": "unsupported" in words})

    def render(self):
        over = self.feedback and (self.turns_left <= 0 or self.best >= 1.0)
        return "\n".join(filter(None, [self.feedback, "" if over else self.problem.text]))

    def instance(self):
        return self.problem.meaning

    def solve(self):
        return [self.problem.solution or self._one_line("None")]

    def random_answer(self, rng):
        if self.options["family"] == "formulas":
            return draw_formula(rng).solution
        return self._one_line(self.problem.simpler[rng.integers(len(self.problem.simpler))])

    def _one_line(self, value):
        name, arguments = self.problem.name, self.problem.arguments
        return f"def {name}({arguments}): return {value}" if name else "print(input())"

    @staticmethod
    def shallow_answer(texts):
        """The first one-line program of a list that fits both examples, or else one that returns
        the value of the first whatever it is given. It does not read the task."""
        found = re.search(r"(\w+)\(([a-z]\w*(?:, [a-z]\w*)*)\)", texts[1])
        name, names = found.groups() if found else ("solution", "given")
        examples = []
        for given, value in re.findall(rf"^{name}\((.+)\) == (.+)$", texts[1], re.MULTILINE):
            with suppress(ValueError, SyntaxError):  # not a literal
                examples.append([*map(ast.literal_eval, (f"[{given}]", value))])
        for form, v, w in itertools.product(TABLES["shallow"], *2 * [names.split(", ")]):
            program = f"def {name}({names}): return {form.format(v=v, w=w)}"
            with suppress(Exception):  # arguments of another kind
                exec(program, space := {})
                if all(space[name](*given) == value for given, value in examples):
                    return program
        return f"def {name}({names}): return {next((value for _, value in examples), None)!r}"


@dataclass(frozen=True, eq=False)
class CodeProblem:
    """A problem with its tests."""

    text: str
    meaning: str = ""  # must not be in two splits
    name: str = ""  # the function asked for; empty: a program between standard input and output
    hidden: tuple = ()  # of sandbox.Case
    public: tuple = ()
    solution: str = ""  # empty: not known
    arguments: str = "*given"  # of that function
    simpler: tuple = ("given[0]",)  # expressions that should not solve it
    kinds: tuple = ()  # of the arguments of a generated problem, from KINDS


def program_of(answer, problem):
    """Return the program in an answer, or None if there is none: then no process starts. It must
    define the function asked for or, if none is, contain some call."""
    if len(answer) > MAX_SOURCE:
        return None
    fenced = re.search(r"```[^\n`]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = fenced[1] if fenced else answer
    try:
        with PARSING:
            nodes = list(ast.walk(ast.parse(code, "<answer>")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not problem.name:
        return code if any(isinstance(n, ast.Call) for n in nodes) else None
    names = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return code if problem.name in names else None


def verdict(problem, code, examples, seconds):
    """Return (hidden tests passed, hidden tests, the words of the results of the first `examples`
    public ones and of all hidden ones).

    Groups repeat programs, so verdicts are cached; timeouts, which load may cause, are not.
    """
    cases = (*problem.public[:examples], *problem.hidden)
    key = hash(str(cases)), problem.name, code, examples, seconds, sandbox.SUBMISSIONS.kind
    if key in VERDICTS:
        return VERDICTS[key]
    words = [result.word for result in sandbox.judge(code, cases, problem.name, seconds)]
    found = words[examples:].count("passed"), len(problem.hidden), words
    if "time" not in words:
        if len(VERDICTS) >= MAX_VERDICTS:
            VERDICTS.clear()
        VERDICTS[key] = found
    return found


# ---- Generated problems --------------------------------------------------------------------------
def generate_problem(rng, family, tests):
    """Draw a problem, two examples and `tests` hidden tests that tell it from simpler programs."""
    hidden = public = ()
    while len(hidden) < tests or len(public) < 2:
        task = (draw_formula(rng) if family == "formulas" else
                all_tasks()[rng.integers(len(all_tasks()))])
        edges, pool = inputs_of(task.kinds)
        wanted = values_of(task.solution, task.name, task.kinds)
        simpler = [values_of(f"def f({task.arguments}): return {line}", "f", task.kinds)
                   for line in task.simpler]
        order = [*rng.permutation(edges)[:3].tolist(),
                 *(edges + rng.permutation(len(pool) - edges)).tolist()]
        hidden = choose_tests(order, wanted, simpler, tests)
        public = choose_tests([i for i in order[::-1] if i not in hidden], wanted, simpler, 2)
    cases = [sandbox.Case(pool[i], wanted[i]) for i in (*public, *hidden)]
    examples = [f"{task.name}({', '.join(map(ascii, case.given))}) == {case.expected!r}"
                for case in cases[:2]]
    return replace(task, text="\n".join([task.text, *examples]), meaning=f"{task.kinds} {wanted}",
                   hidden=tuple(cases[2:]), public=tuple(cases[:2]))


def choose_tests(order, wanted, simpler, tests):
    """Return up to `tests` inputs, as indices: the first of `order` of which no constant passes
    more than a quarter (of two: one) and no simpler program more than half. `wanted` and each of
    `simpler` have a value for each input."""
    chosen, constants, passed = [], Counter(), Counter()
    for i in order:
        right = [n for n, values in enumerate(simpler) if values[i] == wanted[i]]
        if (len(chosen) < tests and constants[repr(wanted[i])] < max(1, tests // 4)
                and all(passed[n] < tests // 2 for n in right)):
            chosen.append(i)
            constants[repr(wanted[i])] += 1
            passed.update(right)
    return chosen


@functools.cache
def all_tasks():
    """Return the problems of data/programs.txt without tests, one per function and value of `k`."""
    return [program_task(function, k) for function in ast.parse(PROGRAMS).body
            for k in ([*map(ast.literal_eval, function.args.defaults)] or [[None]])[0]]


def program_task(function, k):
    """Return the problem of a parsed function and a value of its `k`; None: it has no k."""
    kinds = {a.arg: a.annotation.value for a in function.args.args if a.annotation}
    name, arguments = function.name, ", ".join(kinds)
    lines = [f"Write a Python function {name}({arguments}).",
             " ".join(ast.get_docstring(function).split()).replace("{k}", str(k)),
             " ".join(f"{v} is {KINDS[kind]['is']}." for v, kind in kinds.items())]
    body = [f"k = {k!r}"] * (k is not None) + [*map(ast.unparse, function.body[1:])]
    code = f"def {name}({arguments}):\n" + textwrap.indent("\n".join(body), "    ")
    simpler = [form.format(v=v) for v, kind in kinds.items() for form in KINDS[kind]["simpler"]]
    return CodeProblem(text="\n".join(lines), name=name, arguments=arguments, solution=code,
                       simpler=tuple(simpler), kinds=tuple(kinds.values()))


def _brackets(rng):
    text = "".join(rng.choice(["()", "[]", "(())", "[()]", "()[", ")", "([])"],
                              size=rng.integers(1, 5)))
    return f"[{text}]" if rng.integers(2) else text


# kind -> function of a numpy Generator that makes an input
DRAWS = {
    "digit": lambda rng: int(rng.integers(10)),
    "numbers": lambda rng: rng.integers(*((-9, 20), (0, 5), (1, 10))[rng.integers(3)],
                                        size=rng.integers(3, 10)).tolist(),
    "integer": lambda rng: int(rng.integers(2, 10 ** rng.integers(2, 5))),
    "small": lambda rng: int(rng.integers(1, 40)),
    "sentence": lambda rng: " ".join(rng.choice(TABLES["words"], size=rng.integers(2, 8))),
    "letters": lambda rng: "".join(rng.choice([*"abcd"], rng.integers(3, 10)).repeat(
        rng.integers(1, 3))),
    "brackets": _brackets,
    "moves": lambda rng: "".join(rng.choice([*"UDLR"], size=rng.integers(2, 10))),
    "grid": lambda rng: rng.integers(0, 10, size=rng.integers(1, 5, size=2)).tolist(),
    "intervals": lambda rng: [[start, start + int(rng.integers(1, 7))] for start in
                              rng.integers(0, 20, size=rng.integers(2, 6)).tolist()],
    "prices": lambda rng: {name: int(rng.integers(1, 13)) for name in rng.permutation(
        TABLES["words"][:12])[:rng.integers(2, 7)].tolist()}}


@functools.cache
def inputs_of(kinds):
    """Return (number of edge cases, the edge cases and then random inputs) of these kinds. Two
    functions are the same if they agree on all of them."""
    edges = [KINDS[kind]["edges"] for kind in kinds]
    pool = [[e[(i + j) % len(e)] for j, e in enumerate(edges)] for i in range(len(edges[0]))]
    first, rng = len(pool), np.random.default_rng(0)
    for _ in range(POOL):
        given = [DRAWS[kind](rng) for kind in kinds]
        pool += [given] * (given not in pool)
    return first, pool


@functools.lru_cache(maxsize=4096)
def values_of(code, name, kinds):
    """Return the values of a function of our own (never a model's) on all inputs of the kinds."""
    exec(code, names := {})
    return [names[name](*given) for given in inputs_of(kinds)[1]]


def draw_formula(rng):
    """Draw a problem without tests: a formula over a and b. Simpler programs are its parts."""
    joins, parts = TABLES["joins"], TABLES["parts"]
    phrase, code = joins[rng.integers(len(joins))]
    phrases, codes = zip(*([text.format(v=v) for text in parts[rng.integers(len(parts))]]
                           for v in rng.permutation(["a", "b"])))
    return CodeProblem(text=f"Write f(a, b) that returns {phrase.format(*phrases)}.", name="f",
                       solution=f"def f(a, b): return {code.format(*codes)}", arguments="a, b",
                       simpler=codes, kinds=("digit", "digit"))


# ---- Problems of others --------------------------------------------------------------------------
@data.cached_until_changed
def load_programs(path):
    """Return the CodeProblems of a file of records."""
    return data.read_each(
        path, problem_of, "record {number} of {path}: {problem}. Expected a question, tests "
        "(input, output) and perhaps a function; or MBPP's fields.",
        "an assertion is not of the form `assert f(1, [2]) == 3`")


def problem_of(record):
    """Return the problem of a record, or None for one of MBPP with asserts unlike f(...) == value.

    With a `function` an input is a list of arguments. Without one the program reads standard
    input, and inputs and outputs are texts. `examples` are tests whose failures are told.
    """
    if "test_list" in record:
        return mbpp_problem(record)
    question, name, solution = (record.get(key) or "" for key in (
        "question", "function", "solution"))
    hidden, public = (tuple(sandbox.Case(test["input"], test["output"], test.get("either") is True)
                            for test in record.get(key) or ()) for key in ("tests", "examples"))
    if not (hidden and question.strip()) or name and not name.isidentifier():
        raise ValueError(f"it has no question, no tests, or a bad function name {name!r}")
    if not all(isinstance(case.given, list) if name else
               isinstance(case.given, str) and isinstance(case.expected, str)
               for case in hidden + public):
        raise ValueError("an input is no list of arguments" if name else "a test is no text")
    how = f"Write {name}." if name else "Read standard input and write to standard output."
    text = f"{question.strip()}\n{how}".replace("\r\n", "\n")
    text = "".join(c for c in text if c.isprintable() or c in "\n\t")
    return CodeProblem(text, " ".join(question.split()), name, hidden, public,
                       solution if isinstance(solution, str) else "")


def mbpp_problem(record):
    """Return an MBPP record's problem, or None if one of its assertions does not compare a call of
    its function with a plain value. The first one is the example, which says the name; the others,
    if there are any, are hidden."""
    tests = [test.strip() for test in record["test_list"]]
    found = [*map(call_and_value, tests)]
    if None in found or len({name for name, _ in found}) != 1:
        return None
    (name, *_), cases = zip(*found)
    question, code = (record.get("text") or record["prompt"]).strip(), record["code"]
    return CodeProblem(f"{question}\n{tests[0]}", " ".join(question.split()), name,
                       cases[1:] or cases, cases[:1], code if isinstance(code, str) else "")


def call_and_value(assertion):
    """Return (f, Case) of `assert f(1, [2]) == 3`, or None if it has another form."""
    with PARSING, suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        match ast.parse(assertion, "<answer>").body:
            case [ast.Assert(ast.Compare(ast.Call(ast.Name(f), given, []), [ast.Eq()], [value]))]:
                case = sandbox.Case([*map(ast.literal_eval, given)], ast.literal_eval(value))
                sandbox.encode([*case])  # raises TypeError for complex numbers and bytes
                return f, case
