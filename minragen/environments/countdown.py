"""Countdown: make an expression from given numbers that has a given value."""

import ast
import re
from fractions import Fraction
from itertools import product
from operator import index
from typing import NamedTuple

from minragen.environments.data import cached_until_changed, read_each, refuse_with
from minragen.envs import Budget, Outcome, TextEnv


class Countdown(TextEnv):
    """Make an expression that has a target as its value and uses each given number once.

    Observation: the numbers in ascending order and the target; after a wrong attempt its value.
    Actions: `expr` or `expr = value`, with + - * /, brackets and whole numbers; no unary signs.
    Reward: 1 for the target (0.1 if a wrong `= value` follows), 0.1 for the right numbers and a
        wrong value, minus what earlier attempts (`--max-turns`) earned. Anything else is invalid.
    Ends when: the target is reached, or the only turn is over; more turns are more attempts.
    Solver: combines all subsets of the numbers in exact arithmetic.

    Options: `count` of numbers, 3 or 4, or 0 for either; `largest` bounds them; `operators` that
    tasks and answers may use (RAGEN's tasks: +-); `data`, a file of tasks; tasks without `count`
    numbers or without a solution by `operators` are skipped.
    """

    budget = Budget(max_turns=1, max_actions_per_turn=1, max_actions=1)
    defaults = {"count": 0, "largest": 100, "operators": "+-*/", "data": ""}
    ranges = {"count": [0, 3, 4], "largest": (2, 1000)}
    example = ("3 * 5 is 15, and 15 + 100 is the target 115.", "3 * 5 + 100",
               "Numbers 3 5 100, target 115.", "The value is 115.")
    TARGETS = range(1, 100)  # of generated tasks
    DRAWS = 1000  # draws from `data` per task; ten times as many without

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        refuse_with(self, "data", "largest")
        count, _, operators, data = (self.options[name] for name in self.defaults)
        self.operators = [op for op in "+-*/" if op in operators]
        if {*self.operators} != {*operators} or not operators:
            raise ValueError(f"operators of Countdown: got {operators!r}, expected some of +-*/.")
        self.counts = (count,) if count else (3, 4)
        rows = read_tasks(data) if data else []
        self.rows = [row for row in rows if len(row[0]) in self.counts]
        if data and not self.rows:
            raise ValueError(f"{data} has no task of {' or '.join(map(str, self.counts))} "
                             f"numbers{': change the option count' * bool(count)}.")

    @property
    def instruction(self):
        again = " If it is wrong you may try again." if self.budget.max_turns > 1 else ""
        return ("Write an expression that equals the target. Use each of the numbers exactly once, "
                f"with {' '.join(self.operators)} and brackets.{again}")

    def _reset(self, rng):
        draws = self.DRAWS if self.rows else 10 * self.DRAWS
        task = next(filter(None, (self._draw(rng) for _ in range(draws))), None)
        if task is None:
            raise ValueError(f"none of {draws} draws is a task of Countdown that can be solved: "
                             f"got {self.options}. Allow more operators or smaller numbers.")
        self.numbers, self.target = task
        self.worth, self.value = 0.0, None  # of the best attempt, of the last attempt

    def _draw(self, rng):
        """A row of the data, or the numbers and the value of a random expression. None if the
        operators cannot solve it, or the value is not in TARGETS."""
        if self.rows:
            row = self.rows[rng.integers(len(self.rows))]
            return row if find_expression(*row, self.operators) else None
        count = self.counts[rng.integers(len(self.counts))]
        numbers = (rng.integers(self.options["largest"], size=count) + 1).tolist()
        value = self._random_term(numbers, rng).value
        return (tuple(sorted(numbers)), int(value)) if value in self.TARGETS else None

    def _random_term(self, numbers, rng):
        """The numbers in the given order under random operators and brackets."""
        terms = [Term(number, str(number)) for number in numbers]
        while len(terms) > 1:
            i, op = rng.integers(len(terms) - 1), self.operators[rng.integers(len(self.operators))]
            terms[i:i + 2] = [join_terms(terms[i], op, terms[i + 1])]
        return terms[0]

    def instance(self):
        return f"{' '.join(map(str, self.numbers))} = {self.target}"

    def _act(self, action):
        numbers, value, claim = parse_equation(action, self.operators) or ((), None, None)
        if tuple(sorted(numbers)) != self.numbers:
            return None
        self.value, solved = value, value == self.target == claim
        gain = max(0.0, (1.0 if solved else 0.1) - self.worth)
        self.worth += gain
        return Outcome(gain, solved, solved)

    def render(self):
        attempt = "" if self.value is None else f"\nYour value: {self.value}"
        return f"Numbers: {' '.join(map(str, self.numbers))}\nTarget: {self.target}{attempt}"

    def note(self):
        """For each number, largest first: the values that it and the target make, one of which the
        others must make. With three numbers also what the other two make, to the first match."""
        lines = []
        for i in range(len(self.numbers) - 1, -1, -1):
            others = self.numbers[:i] + self.numbers[i + 1:]
            needed, made = results(self.target, self.numbers[i]), results(*others[-2:])
            lines.append(f"{self.target} {self.numbers[i]} make {' '.join(map(str, needed))}")
            if len(others) == 2:
                lines[-1] += f", {others[0]} {others[1]} make {' '.join(map(str, made))}"
                if both := [value for value in needed if value in made]:
                    return f"{'; '.join(lines)}, both {both[0]}"
        return "; ".join(lines)

    def random_answer(self, rng):
        """All numbers in random order, with random operators and brackets, not divided by zero."""
        while True:
            term = self._random_term(rng.permutation(self.numbers).tolist(), rng)
            if term.value is not None:
                return term.text

    @staticmethod
    def shallow_answer(texts):
        """The largest number plus or minus the others: signs that hit the target, or the sum."""
        found = re.search(r"Numbers: (.*)\nTarget: (\d+)", texts[1])
        first, *others = found[1].split()[::-1]
        tries = ["".join([first, *(f" {sign} {number}" for sign, number in zip(signs, others))])
                 for signs in product("+-", repeat=len(others))]
        return max(tries, key=lambda text: parse_equation(text)[1] == int(found[2]))

    def solve(self):
        return [find_expression(self.numbers[::-1], self.target, self.operators)]


class Term(NamedTuple):
    """A number, or two terms joined by an operator, with no needless brackets."""

    value: object  # exact: int, Fraction, or None for a division by zero
    text: str
    rank: int = 3  # precedence: 1 for + and -, 2 for * and /, 3 for a number


def join_terms(left, op, right):
    rank = 1 if op in "+-" else 2
    first = left.text if left.rank >= rank else f"( {left.text} )"
    # a - (b + c) is not a - b + c
    second = right.text if right.rank >= rank + (op in "-/") else f"( {right.text} )"
    return Term(operate(left.value, op, right.value), f"{first} {op} {second}", rank)


def results(x, y):
    """The whole numbers up to 100 that x and y make: sum, difference, product and quotient."""
    small, large = sorted((x, y))
    made = [x + y, large - small, x * y, *([large // small] if large % small == 0 else [])]
    return [value for value in made if value <= 100]


def operate(x, op, y):
    """x op y, exactly; None for a division by zero, also inside x or y."""
    if x is None or y is None or (op == "/" and y == 0):
        return None
    if op == "/":
        return x // y if x % y == 0 else Fraction(x) / y
    return x + y if op == "+" else x - y if op == "-" else x * y


def find_expression(numbers, target, operators):
    """The text of an expression over all the numbers that equals the target, or None.

    made[s]: value -> one term, for every value of the numbers in subset s (a bit mask).
    The first pass keeps only whole values, which is fast and mostly enough.
    """
    everything = 2**len(numbers) - 1
    for whole in (True, False):
        made = {1 << i: {n: Term(n, str(n))} for i, n in enumerate(numbers)}
        for s in range(1, everything):
            if s not in made:
                made[s] = {term.value: term for term in joined_terms(made, s, operators)
                           if type(term.value) is int or (term.value is not None and not whole)}
        for term in joined_terms(made, everything, operators):
            if term.value == target:
                return term.text
    return None


def joined_terms(made, s, operators):
    """Every term that joins terms of two parts of subset `s`; + and * take them in one order."""
    for part in range(1, s // 2 + 1):
        if part & s == part:
            for a, b, op in product(made[part].values(), made[s - part].values(), operators):
                yield join_terms(a, op, b)
                if op in "-/":
                    yield join_terms(b, op, a)


def parse_equation(text, operators="+-*/"):
    """Read `expr` or `expr = whole number`: (numbers in their order, exact value, the right side or
    else the value), or None for any other text.

    `eval` would run endless powers and any other Python. Here only known tokens reach Python's
    parser, and their number bounds the depth of brackets.
    """
    found = len(text) <= 200 and re.fullmatch(r"([^=]+)(?:=\s*(-?[0-9]{1,20})\s*)?", text)
    tokens = re.findall(r"0|[1-9][0-9]*|\S", found[1]) if found else []
    numbers = [token for token in tokens if token not in {*operators, "(", ")"}]
    if not 1 <= len(tokens) <= 40 or not all(re.fullmatch("[0-9]+", token) for token in numbers):
        return None
    try:
        value = evaluate(ast.parse(" ".join(tokens), mode="eval").body)
    except SyntaxError:
        return None
    claim = value if found[2] is None else int(found[2])
    return None if value is None else (tuple(map(int, numbers)), value, claim)


def evaluate(node):
    """The exact value of a parsed expression; None for unary signs, calls or a division by zero."""
    match node:
        case ast.Constant(number):
            return number
        case ast.BinOp(left, operator, right):
            op = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(operator)]
            return operate(evaluate(left), op, evaluate(right))
    return None


@cached_until_changed
def read_tasks(path):
    """The (sorted numbers, target) of every record; ValueError for a bad file or record."""
    return read_each(path, task_of, "{path}, record {number}: {problem!r}; expected records like "
                     '{{"nums": [3, 7, 14], "target": 24}}.')


def task_of(record):
    numbers, target = tuple(sorted(map(index, record["nums"]))), index(record["target"])
    if not all(0 < n < 10**6 for n in (*numbers, target)):
        raise ValueError(f"nums {list(numbers)}, target {target} are not from 1 to {10**6 - 1:,}")
    return numbers, target
