"""MetaMathQA: a word problem and several attempts, judged by value.

Reading order: `WordProblem`, `MetaMathQA`; then the bundled problems (`word_problems`), the user's
records (`load_problems`), and what an answer says (`read_value`, `read_text`).

Differences from RAGEN:
  1. An episode has five attempts. RAGEN allows one action per episode, so its retries and their
     reward of 1/2^k are never reached.
  2. Answers are compared by value. RAGEN compares strings: there 18.0 is not 18.
  3. The splits share no problem. RAGEN validates on the records that it trains on.
"""

import functools
import json
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from minragen.environments.data import read_records
from minragen.envs import Budget, Outcome, TextEnv, split_of, text_space

MAX_QUESTION = 8_000  # characters; longer records are left out
MAX_ANSWER = 1_000  # characters; a longer text is not only a result
# Forms of records: the question's field, the answer's field, the marker before the result.
FORMS = (("query", "response", "The answer is:"), ("question", "answer", "####"))


class WordProblem(NamedTuple):
    """A question and its result.

    gold: a Fraction, or the normalised text of a result that is not a number
    answer: the result as the solver writes it      percent: whether the result counts in percent
    task: the text that decides the split           note: the calculation, where it is known
    """

    question: str
    answer: str
    gold: Fraction | str
    percent: bool
    task: str
    note: str = ""

    def read(self, answer):
        """What `answer` says, to be compared with `gold`; None if it says nothing."""
        if isinstance(self.gold, str):
            return read_text(answer) or None
        return read_value(answer, self.percent)


class MetaMathQA(TextEnv):
    """A word problem and several attempts at it; each wrong one halves the reward.

    Goal: give the result.
    Observation: the question; after a wrong answer also the number of wrong answers. The question
        is repeated although the conversation holds it already: for a few dozen tokens, each
        observation is the whole state (`repeat=False` saves them).
    Actions: one value in any notation: 18, 18.0, 1.8e1, 36/2, 1 1/2, \\frac{3}{4}, 75%, $1,234.50,
        \\boxed{18}, 18 dollars. A text that does not give exactly one value ("18 or 20") is not an
        action and not an attempt. Units are not judged.
    Reward: 1/2^k for the right value after k wrong ones, otherwise 0.
    Ends when: the value is right.
    Solver: computes the template's expression exactly; for the user's records it knows the answer.

    A percentage question wants the number before the sign: 75% and 75 are right, 0.75 is wrong. In
    any other question 75% is 0.75. Nothing is rounded: 0.33 is not 1/3.

    The problems come from the templates of data/word_problems.json and need one to four operations.
    Two problems are the same task if they have the same template and the same numbers in any order;
    names and distractors do not matter.

    Options: `distractors`, whether half of the questions contain an irrelevant fact; `max_steps`,
    the most operations a problem may need; `repeat`, see above; `data`, a JSONL, JSON or parquet
    file of records to use instead of the templates: MetaMathQA's (query, response; the result
    follows the last "The answer is:") or GSM8K's (question, answer; it follows the last "####").
    Records without a result are left out. All rephrasings of one `original_question` belong to one
    split. A result that is not a number (an interval, x+1) must be given literally, except for
    case, spaces and LaTeX decoration.

    See an episode: python -m minragen.environments metamathqa 18
    """

    budget = Budget(max_turns=5, max_actions_per_turn=1, max_actions=5)
    bundled_data = "50 templates of word problems"
    defaults = {"data": "", "distractors": True, "max_steps": 4, "repeat": True}
    instruction = ("Solve the problem. Answer with its result alone, such as 18, 3/4, 2.5 or 75%. "
                   "A right answer earns 1, and half as much after each wrong one.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        path, steps = self.options["data"], self.options["max_steps"]
        if not 1 <= steps <= 4:
            raise ValueError(f"option max_steps of MetaMathQA: got {steps}, expected 1 to 4.")
        self._names, templates = word_problems()
        self.templates = [t for t in templates if t["steps"] <= steps]
        self.records = None
        if path:
            by_split, characters = load_problems(path)
            self.records = by_split[split]
            self.observation_space = text_space(characters)
            if not self.records:
                counts = ", ".join(f"{len(by_split[s])} {s}" for s in by_split)
                raise ValueError(f"option data of MetaMathQA: {path!r} has no problem of split "
                                 f"{split!r} (it has {counts}). Give a file of more records.")

    def _reset(self, rng):
        self.solved, self._given = False, []
        if self.records:
            self.problem = self.records[rng.integers(len(self.records))]
            return
        template = self.templates[rng.integers(len(self.templates))]
        # Always draw the coin: a seed has the same task with and without distractors.
        self.problem = self.pose(template, rng, rng.random() < 0.5 and self.options["distractors"])

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
        # After the last turn there is no answer to come, so the question is not repeated.
        again = f"\n{self.problem.question}" if self.options["repeat"] and self._live else ""
        return f"Wrong answers so far: {len(self._given)}{again}"

    def instance(self):
        return self.problem.task

    def note(self):
        return self.problem.note

    def solve(self):
        return [self.problem.answer]

    def random_answer(self, rng):
        """A number of the question, or one operation on two of them."""
        numbers = [Fraction(n) for n in DIGITS.findall(self.problem.question)] or [Fraction(1)]
        a, b = (numbers[i] for i in rng.integers(len(numbers), size=2))
        results = [a, a + b, abs(a - b), a * b, *([a / b] if b else [])]
        result = results[rng.integers(len(results))]
        return format_number(result) if (100 * result).denominator == 1 else str(result)


# -- problems from templates -----------------------------------------------------------------------

@functools.cache
def word_problems():
    """(names, templates) of the data file, each template with what is derived from its texts.

    money: variables behind a $ sign      used: variables that the result depends on
    values: variable -> its choices, or "= expression" if it is computed      steps: operations
    """
    path = Path(__file__).parent.parent / "data" / "word_problems.json"
    data = json.loads(path.read_text("utf-8"), parse_float=Fraction)  # 0.1 is a tenth
    for t in data["templates"]:
        t["money"] = set(re.findall(r"\$\{(\w+)\}", t["facts"]))
        t["used"] = sorted(set(re.findall("[a-z]", t["answer"])))
        t["steps"] = len(re.findall("[-+*/]", t["answer"]))
        t["values"] = {name: choices_of(spec) for name, spec in t["values"].items()}
    return data["names"], data["templates"]


def choices_of(spec):
    """The choices of a variable: [low, high, step] is a range, "3 5 7" a list; "= a * b" stays."""
    if isinstance(spec, str):
        return spec if spec.startswith("=") else [Fraction(number) for number in spec.split()]
    low, high, step = (Fraction(number) for number in [*spec, 1][:3])
    return [low + k * step for k in range(int((high - low) / step) + 1)]


def draw_values(template, rng):
    """Values of the template's variables, exact, drawn again until its conditions hold."""
    while True:
        values = {}
        for name, choices in template["values"].items():
            values[name] = (evaluate(choices.removeprefix("= "), values)
                            if isinstance(choices, str) else choices[rng.integers(len(choices))])
        if all(evaluate(condition, values) for condition in template.get("require", ())):
            return values


def evaluate(expression, values):
    """The exact value of an expression of data/word_problems.json, whose variables are Fractions.

    Never pass a text of a user or a model: it is evaluated as Python.
    """
    return eval(expression, {"__builtins__": {}}, values)


def fill_template(template, values, people, distract):
    """The WordProblem of a template with these values and names."""
    shown = people | {name: format_number(value, name in template["money"])
                      for name, value in values.items()}
    parts = [template["facts"], *[template["distractor"]] * distract, template["question"]]
    note = re.sub("[a-z]", lambda m: shown[m[0]], template["answer"])
    gold, kind = evaluate(template["answer"], values), template["kind"]
    answer = str(gold) if kind == "fraction" else format_number(gold) + "%" * (kind == "percent")
    # Sorted, so that an order of numbers seen in one split does not reveal another split's task.
    numbers = " ".join(map(str, sorted(values[name] for name in template["used"])))
    return WordProblem(" ".join(parts).format(**shown), answer, gold, kind == "percent",
                       f"{template['id']} {numbers}", note)


def format_number(value, money=False):
    """A finite decimal as people write it: 18, 2.5, and 2.50 if it is money."""
    if value.denominator == 1:
        return str(value.numerator)
    decimal = Decimal(value.numerator) / value.denominator
    return f"{decimal:.2f}" if money else f"{decimal:f}"


# -- problems of the user --------------------------------------------------------------------------

@functools.cache
def load_problems(path):
    """({split: list of WordProblem}, their characters) of a MetaMathQA or GSM8K file."""
    by_split, characters = {"train": [], "val": [], "test": []}, set()
    for number, record in enumerate(read_records(path), 1):
        problem = problem_of(record, f"record {number} of {path}")
        if problem:
            by_split[split_of(problem.task)].append(problem)
            characters.update(problem.question)
    return by_split, characters


def problem_of(record, where):
    """The WordProblem of a record; None if it has no usable question and result.

    raises: ValueError if the record has none of the known forms
    """
    fields = record if isinstance(record, dict) else {}
    known = [form for form in FORMS
             if all(isinstance(fields.get(name), str) for name in form[:2])]
    if not known:
        raise ValueError(f"{where}: got {str(record)[:80]}, expected the text fields query and "
                         f"response (MetaMathQA) or question and answer (GSM8K).")
    asked, told, marker = known[0]
    question, (_, found, result) = fields[asked].strip(), fields[told].rpartition(marker)
    result = result.strip()
    percent = "%" in result or bool(re.search(r"percent|what %", question, re.IGNORECASE))
    value = read_value(result, percent)
    gold = read_text(result) if value is None else value
    # MetaMathQA rephrases each question many times: rephrasings must not be in two splits.
    task = " ".join(str(fields.get("original_question") or question).lower().split())
    usable = found and gold != "" and 0 < len(question) <= MAX_QUESTION
    if not usable or re.search("[\ud800-\udfff]", question + task):  # half characters
        return None
    return WordProblem(question, result, gold, percent, task)


# -- what an answer says ---------------------------------------------------------------------------

DIGITS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,9}|[0-9]{1,40})"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?:(?:(?P<whole>{WHOLE}) )?(?P<top>{WHOLE}) ?/ ?(?P<bottom>{WHOLE})"
    rf"|(?P<decimal>{WHOLE}(?:\.[0-9]{{1,40}})?|\.[0-9]{{1,40}})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,2}}))?)(?![0-9])(?P<percent> ?(?:%|per ?cent\b))?")
LEAD = re.compile(r"(?:(?:the )?(?:final )?answer(?: is)? ?:? ?|[a-z] ?= ?)?", re.IGNORECASE)
UNIT = re.compile(r"(?:[a-z]{2,}|[gmshl])(?:/(?:[a-z]{2,}|[gmshl]))?(?:\^[23]|[²³])?",
                  re.IGNORECASE)
# Words that are not a unit: they change the number, or make it something else.
NO_UNIT = re.compile("hundred|thousand|[mbt]r?illion|dozen|score|pi|sqrt|squared|cubed|mod|over|"
                     "plus|minus|times|divided|by|or|and|not|to|if|[ap]m", re.IGNORECASE)
ATTACHED = re.compile("[ckm]m|m?in|ft|[mk]g|ml|hrs?|lbs?|oz", re.IGNORECASE)  # 5kg, but not 5xy
WRAPPER = r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mbox) ?\{([^{}]*)\}"
# (pattern, replacement), in this order: a number without LaTeX and currency signs around it.
BARE_NUMBER = (
    ("−", "-"), (r"(?<=[0-9])(?:\{,\}|,\\!|\\[,!])(?=[0-9]{3})", ","),
    (r"\^ ?(?:\{\\circ\}|\\circ)|°", " degrees"), (r"\\%", "%"),
    (r"\\[$,;:!()\[\] ]|[$€£¥]", " "), (r"\s+", " "),  # a space, so that "$1$2" is not 12
    (r"\\[dtc]?frac ?(?:\{ ?([-+]?[0-9,]+) ?\}|([0-9])) ?(?:\{ ?([0-9,]+) ?\}|([0-9]))",
     r" \1\2/\3\4 "),
    (r" ?(?:\\times|\\cdot|x|\*) ?10 ?\^ ?(?:\{([-+]?[0-9]{1,2})\}|([-+]?[0-9]{1,2}))(?![0-9])",
     r"e\1\2"),
    *[(WRAPPER, r" \1 ")] * 4, (r"\s+", " "), (r" \^", "^"))  # \boxed{\text{...}}: inside out
# The same for a result that is not a number: what is left is compared literally.
BARE_TEXT = (
    (r"\A\s+|\.?\s*\Z|\$", ""), (r"(?s)\A\s*\\boxed ?\{(.*)\}\s*\Z", r"\1"),
    (r"\\(?:left|right)(?![a-z])|\\[,;:! ]", ""), (r"\\[dt]frac", r"\\frac"), (WRAPPER, r"\1"),
    (r"\\frac ?([0-9]) ?([0-9])", r"\\frac{\1}{\2}"), (r"\\sqrt ?([0-9])", r"\\sqrt{\1}"),
    (r"\s", ""))


def read_value(text, percent=False):
    """The one value that `text` gives, as a Fraction; None if it gives no value or several.

    The text is: an optional "the answer is" or "x =", one number (integer, decimal, fraction, mixed
    number, scientific notation, thousands separated by commas), at most six words of unit.
    percent: the value counts in percent, so a % sign is its unit; otherwise % means hundredths
    """
    text = substitute(text, BARE_NUMBER).strip()
    text = text[LEAD.match(text).end():]
    found = NUMBER.match(text)
    if not found or not is_unit(text[found.end():]):
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
    """Whether `text`, which follows a number, only names what was counted."""
    words = text.removesuffix(".").split()
    if len(words) > 6 or any(not UNIT.fullmatch(w) or NO_UNIT.fullmatch(w) for w in words):
        return False
    return not words or text[0] == " " or bool(ATTACHED.fullmatch(words[0].rstrip("^23²³")))


def read_text(text):
    """The normal form of a result that is not a number, for comparison; "" if nothing is left."""
    return substitute(text, BARE_TEXT).casefold()


def substitute(text, table):
    """`text` after the substitutions of a table; "" if it is too long for a result."""
    text = text if len(text) <= MAX_ANSWER else ""
    for pattern, replacement in table:
        text = re.sub(pattern, replacement, text)
    return text
