"""MetaMathQA: a word problem and several attempts, judged by value."""

import functools
import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from minragen.environments.data import cached_until_changed, load_table, read_each, refuse_with
from minragen.envs import Budget, Outcome, TextEnv, split_of, text_space
from minragen.support.options import data_table

MAX_QUESTION, MAX_ANSWER = 8_000, 1_000  # characters of a record's question; of an answer
DRAWS = 100  # draws of a template's numbers before another template is tried
# Words of a question: the operation that they suggest to a shallow player; the first match counts.
KEYWORDS = {"percent|fraction|equal": "/", "each|every|times|pay": "*",
            "now|than|younger|of them": "-", "": "+"}


class WordProblem(NamedTuple):
    question: str
    answer: str  # the result as the solver writes it
    gold: Fraction | str  # a str: the normal form of a result that is not a number
    percent: bool  # whether the result counts in percent
    task: str  # decides the split
    note: str = ""  # the calculation, if known
    largest: Fraction = Fraction(0)  # of its given numbers and its result, if known

    def read(self, answer):
        """The value or text of `answer`, to compare with `gold`; None if it has none."""
        if isinstance(self.gold, str):
            return read_text(answer) or None
        return read_value(answer, self.percent)


class MetaMathQA(TextEnv):
    """Solve a word problem in several attempts; each wrong one halves the reward.

    Observation: the question; after a wrong answer also the number of wrong answers.
    Actions: one value in any notation: 18, 36/2, `\\boxed{18}`, So the answer is 18 dollars. A
        text without exactly one value is not an action and not an attempt.
    Reward: 1/2^k for the right value after k wrong ones, otherwise 0. Nothing is rounded. 75% is
        0.75, but 75 if the question asks for a percentage.
    Ends when: the value is right.
    Solver: computes the template's expression exactly; for the user's records it knows the answer.

    Options: `distractors`, an irrelevant fact in half of the questions; `max_steps`, the most
    operations of a problem; `largest`, 12 or more, bounds the given numbers and the result (0: no
    bound); `data`, a file of records. Reordering a problem's numbers keeps its split.
    """

    budget = Budget(max_turns=5, max_actions_per_turn=1, max_actions=5)
    defaults = {"data": "", "distractors": True, "largest": 0, "max_steps": 4}
    ranges = {"largest": (0, 10_000), "max_steps": (1, 4)}
    example = ("5 boxes of 48 pens are 5 * 48 = 240 pens. 10 are lost, so 240 - 10 = 230 are left.",
               "230", "A question about pens in boxes.", "The answer is right.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        if 0 < (largest := self.options["largest"]) < 12:
            raise ValueError(f"largest of MetaMathQA: got {largest}, expected 12 or more; 0: any.")
        refuse_with(self, "data", "distractors", "largest", "max_steps")
        self._names, templates = word_problems()
        self.templates = [t for t in templates if t["steps"] <= self.options["max_steps"]]
        self.bundled_data = f"{len(self.templates)} templates of word problems"
        self.records = None
        if path := self.options["data"]:
            by_split, characters = load_problems(path)
            self.records = by_split[split]
            self.observation_space = text_space(characters)
            if not self.records:
                raise ValueError(f"{path!r} has no problem of split {split!r}: give more records.")

    @property
    def instruction(self):
        again = " A right answer earns 1, and half as much after each wrong one."
        return ("Solve the problem. Answer with its result alone, such as 18, 3/4, 2.5 or 75%."
                + again * (self.budget.max_actions > 1))

    def _reset(self, rng):
        self.solved, self._given = False, []
        if self.records:
            self.problem = self.records[rng.integers(len(self.records))]
            return
        # Always draw the coin: a seed has the same task with and without distractors.
        distract = rng.random() < 0.5 and self.options["distractors"]
        while True:
            template = self.templates[rng.integers(len(self.templates))]
            for _ in range(DRAWS):
                self.problem = self.pose(template, rng, distract)
                if self.problem.largest <= (self.options["largest"] or math.inf):
                    return

    def pose(self, template, rng, distract):
        """Draw names and numbers for a template. Returns a WordProblem."""
        people = dict(zip(("name", "friend"), rng.permutation(self._names).tolist()))
        return fill_template(template, draw_values(template, rng), people, distract)

    def _act(self, action):
        given = self.problem.read(action)
        if given is None:
            return None
        self.solved, fresh = given == self.problem.gold, given not in self._given
        reward = 0.5 ** len(self._given) if self.solved else 0.0
        self._given.append(given)
        return Outcome(reward, terminated=self.solved, success=self.solved, effective=fresh)

    def render(self):
        if self.solved:
            return "Correct."
        if not self._given:
            return self.problem.question
        # No answer follows the last turn, so the question is not repeated there.
        again = f"\n{self.problem.question}" if self._live else ""
        return f"Wrong answers so far: {len(self._given)}{again}"

    def instance(self):
        return self.problem.task

    def note(self):
        return self.problem.note

    @staticmethod
    def shallow_answer(texts):
        """The first two numbers under the operation that a word suggests, then under the others."""
        question = texts[1].partition("\nTurns left")[0].lower()
        a, b = ([Fraction(n) for n in DIGITS.findall(question)] + [Fraction(1)] * 2)[:2]
        a, b = max(a, b), min(a, b) or Fraction(1)
        results = {"-": a - b, "+": a + b, "*": a * b, "/": a / b}
        guess = next(sign for words, sign in KEYWORDS.items() if re.search(words, question))
        if guess == "*" and a > 10 and a % b == 0:  # too large for a factor
            guess = "/"
        order = [guess, *(sign for sign in results if sign != guess)]
        return str(results[order[(len(texts) // 2 - 1) % 4]])

    def solve(self):
        return [self.problem.answer]

    def random_answer(self, rng):
        """A number of the question, or one operation on two of them."""
        numbers = [Fraction(n) for n in DIGITS.findall(self.problem.question)] or [Fraction(1)]
        a, b = (numbers[i] for i in rng.integers(len(numbers), size=2))
        results = [a, a + b, abs(a - b), a * b, *([a / b] if b else [])]
        result = results[rng.integers(len(results))]
        return format_number(result) if (100 * result).denominator == 1 else str(result)


# ---- Problems from templates ---------------------------------------------------------------------
@functools.cache
def word_problems():
    """Load (names, templates), each template with what follows from its texts.

    money: variables behind a $ sign      used: variables of the result      steps: operations
    values: variable -> its choices, or "= expression" if it is computed

    Templates of one operation come in pairs that share most of their words, not the operation.
    """
    data = load_table("word_problems.json", parse_float=Fraction)  # 0.1 is a tenth
    for t in data["templates"]:
        t["money"] = set(re.findall(r"\$\{(\w+)\}", t["facts"]))
        t["used"] = sorted(set(re.findall("[a-z]", t["answer"])))
        t["steps"] = len(re.findall("[-+*/]", t["answer"]))
        t["values"] = {name: values_of_spec(spec) for name, spec in t["values"].items()}
    return data["names"], data["templates"]


def values_of_spec(spec):
    """A variable's choices: [low, high, step] is a range, "3 5 7" a list; "= a * b" stays."""
    if isinstance(spec, str):
        return spec if spec.startswith("=") else [Fraction(number) for number in spec.split()]
    low, high, step = (Fraction(number) for number in [*spec, 1][:3])
    return [low + k * step for k in range(int((high - low) / step) + 1)]


def draw_values(template, rng):
    """Draw exact values of the template's variables until its conditions hold."""
    while True:
        values = {}
        for name, choices in template["values"].items():
            values[name] = (evaluate(choices.removeprefix("= "), values)
                            if isinstance(choices, str) else choices[rng.integers(len(choices))])
        if all(evaluate(condition, values) for condition in template.get("require", ())):
            return values


def evaluate(expression, values):
    """Evaluate an expression of word_problems.json; never a text of a user or a model."""
    return eval(expression, {"__builtins__": {}}, values)


def fill_template(template, values, people, distract):
    """The WordProblem of a template with these values and names."""
    shown = people | {name: format_number(value, name in template["money"])
                      for name, value in values.items()}
    parts = [template["facts"], *[template["distractor"]] * distract, template["question"]]
    note = re.sub("[a-z]", lambda m: shown[m[0]], template["answer"])
    gold, kind = evaluate(template["answer"], values), template["kind"]
    answer = str(gold) if kind == "fraction" else format_number(gold) + "%" * (kind == "percent")
    # Sorted, so that no other split has the same numbers in another order.
    numbers = sorted(values[name] for name in template["used"])
    return WordProblem(" ".join(parts).format(**shown), answer, gold, kind == "percent",
                       " ".join(map(str, [template["id"], *numbers])), note, max(gold, *numbers))


def format_number(value, money=False):
    """A finite decimal as people write it: 18, 2.5, and 2.50 if it is money."""
    if value.denominator == 1:
        return str(value.numerator)
    decimal = Decimal(value.numerator) / value.denominator
    return f"{decimal:.2f}" if money else f"{decimal:f}"


# ---- Problems of the user ------------------------------------------------------------------------
@cached_until_changed
def load_problems(path):
    """({split: list of WordProblem}, their characters) of a file of records."""
    by_split, characters = {"train": [], "val": [], "test": []}, set()
    for problem in read_each(path, problem_of, "record {number} of {path}: {problem!r}; expected "
                             "the texts question and answer.", "no question or no result"):
        by_split[split_of(problem.task)].append(problem)
        characters.update(problem.question)
    return by_split, characters


def problem_of(record):
    """The WordProblem of a record: GSM8K's, or one whose answer is the result alone; or None."""
    question, result = record["question"].strip(), record["answer"].rpartition("####")[2].strip()
    percent = "%" in result or bool(re.search(r"percent|what %", question, re.IGNORECASE))
    value = read_value(result, percent)
    gold = read_text(result) if value is None else value
    task = " ".join(str(record.get("original_question") or question).lower().split())
    usable = gold != "" and 0 < len(question) <= MAX_QUESTION
    if not usable or re.search("[\ud800-\udfff]", question + task):  # lone surrogates
        return None
    return WordProblem(question, result, gold, percent, task)


# ---- The value of an answer ----------------------------------------------------------------------
DIGITS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,9}|[0-9]{1,40})"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?:(?:(?P<whole>{WHOLE}) )?(?P<top>{WHOLE}) ?/ ?(?P<bottom>{WHOLE})"
    rf"|(?P<decimal>{WHOLE}(?:\.[0-9]{{1,40}})?|\.[0-9]{{1,40}})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,2}}))?)(?![0-9])(?P<percent> ?(?:%|per ?cent\b))?")
# What may stand around a number, and how LaTeX and other decoration is removed.
NOTATIONS = data_table("notations")
LEAD, LEFT_SIDE, UNIT, NO_UNIT, ATTACHED = (
    re.compile(NOTATIONS["ignoring_case"][name], re.IGNORECASE)
    for name in ("lead", "left_side", "unit", "no_unit", "attached"))
BARE_NUMBER, BARE_TEXT = (NOTATIONS["in_order"][name] for name in ("bare_number", "bare_text"))


def read_value(text, percent=False):
    """The one value that `text` gives, as a Fraction; None if it gives no value or several.

    The text is: an optional "so the answer is", "=", "x =" or "7 * 8 =", one number (integer,
    decimal, fraction, mixed number, scientific notation, thousands separated by commas), at most
    six words of unit. Bold, LaTeX and currency signs do not matter.
    percent: whether a % sign is a unit; otherwise it means hundredths
    """
    if text.isascii() and text.isdecimal() and len(text) <= 40:  # as most results of a large file
        return Fraction(int(text))
    text = substitute(text, BARE_NUMBER).strip()
    left, _, text = text[LEAD.match(text).end():].rpartition("=")
    text = text.strip()
    found = NUMBER.match(text)
    if not found or not LEFT_SIDE.fullmatch(left.strip()) or not is_unit(text[found.end():]):
        return None
    sign, whole, top, bottom, decimal, exponent, hundredths = (
        part and part.replace(",", "") for part in found.groups())
    if top is None:
        value = Fraction(f"{decimal}e{exponent or 0}")
    elif int(bottom) == 0 or (whole and int(top) >= int(bottom)):
        return None  # neither a fraction nor a mixed number
    else:
        value = int(whole or 0) + Fraction(int(top), int(bottom))
    return (-value if sign == "-" else value) / (100 if hundredths and not percent else 1)


def is_unit(text):
    """Whether `text`, which follows a number, is only its unit."""
    words = text.removesuffix(".").split()
    if len(words) > 6 or any(not UNIT.fullmatch(w) or NO_UNIT.fullmatch(w) for w in words):
        return False
    return not words or text[0] == " " or bool(ATTACHED.fullmatch(words[0].rstrip("^23²³")))


def read_text(text):
    """The normal form of a result that is not a number; "" if nothing is left."""
    return substitute(text, BARE_TEXT).casefold()


def substitute(text, table):
    """`text` after the substitutions of a table; "" if it is too long for a result."""
    text = text if len(text) <= MAX_ANSWER else ""
    for pattern, replacement, *times in table:
        for _ in range(*times or [1]):
            text = re.sub(pattern, replacement, text)
    return text
