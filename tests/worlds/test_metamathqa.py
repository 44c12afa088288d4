"""The specification of MetaMathQA: word problems that are right, answers judged by value, attempts
that pay half as much each, and the records of MetaMathQA and GSM8K."""

import ast
import json
import re
import string
import sys
import time
import types
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minragen import tasks
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget, split_of
from minragen.tasks import (
    MetaMathQA,
    arithmetic_value,
    draw_values,
    load_problems,
    pose,
    problem_of,
    read_value,
    word_problems,
)

TEMPLATES = {t["id"]: t for t in word_problems()[1]}
PEOPLE = {"name": "Ana", "friend": "Ben"}

# The values of one instance of each template, and its result worked by hand from the text.
WORKED = {
    "rolls": ("a=3 b=10 c=7 z=2", "23"),
    "bus": ("a=20 b=5 c=3 d=4 z=30", "14"),
    "stickers": ("a=12 n=2 b=6 c=4 z=8", "20"),
    "theater": ("a=10 b=12 c=4 d=8 z=9", "152"),
    "marbles": ("a=4 t=28 z=5", "7"),
    "book": ("a=30 b=10 t=80 z=9", "5"),
    "fence": ("a=12 b=7 z=3", "38"),
    "ages": ("a=15 k=3 b=5 z=4", "30"),
    "cyclist": ("h=2 a=30 g=5 z=7", "75"),
    "trains": ("v=60 w=80 h=3 z=6", "420"),
    "wages": ("a=10 h=5 d=3 z=20", "150"),
    "eggs": ("b=6 h=12 e=5 z=4", "10"),
    "legs": ("a=5 b=6 z=3", "38"),
    "cooling": ("a=20 b=3 h=4 z=10", "8"),
    "teams": ("a=13 b=17 t=5 z=20", "6"),
    "lawn": ("a=20 b=10 c=6 d=5 z=3", "170"),
    "coins": ("q=3 d=4 z=2", "115"),
    "tank": ("a=12 b=2 t=150 z=4", "15"),
    "puzzle": ("b=4 a=3 r=33 z=2", "7"),
    "shells": ("a=30 b=8 z=2", "52"),
    "average": ("a=10 b=14 c=21 z=20", "15"),
    "camp": ("w=3 d=4 z=9", "25"),
    "lessons": ("n=4 a=45 b=10 z=20", "210"),
    "pills": ("t=60 a=2 b=3 z=9", "12"),
    "truck": ("t=2500 n=20 w=15 z=40", "2800"),
    "tournament": ("n=6 z=7", "15"),
    "pizza": ("s=12 a=3 b=5 z=9", "1/3"),
    "draw": ("r=4 b=3 g=5 z=20", "1/3"),
    "walk": ("a=1 m=3 b=3 n=4 z=20", "13/12"),
    "salary": ("a=2 m=5 n=4 z=3", "7/20"),
    "corn": ("a=2 m=3 b=3 n=8 z=2", "1/4"),
    "painters": ("a=6 b=12 h=3 z=20", "3/4"),
    "pipes": ("a=2 b=3 z=4", "6/5"),
    "ribbon": ("a=10 n=4 z=3", "5/2"),
    "change": ("n=3 p=1.25 b=20 z=40", "16.25"),
    "fruit": ("p=2 q=3 a=1.5 b=2.5 z=10", "10.5"),
    "bill": ("n=4 t=46 s=5 z=2", "12.75"),
    "sale": ("p=50 d=15 z=4", "42.5"),
    "fuel": ("f=6.5 d=200 z=5", "13"),
    "board": ("a=3 n=4 c=20 z=12", "2.2"),
    "phone": ("b=10 p=0.75 g=4 m=2 z=5", "26"),
    "overtime": ("w=11 h=20 o=3 z=5", "269.5"),
    "euros": ("a=50 r=0.9 f=3 z=10", "42"),
    "quiz": ("r=15 t=20 z=15", "75%"),
    "plant": ("a=20 b=25 z=9", "25%"),
    "laptop": ("p=20 q=10 z=2", "108%"),
    "juice": ("a=3 p=40 b=2 z=2", "24%"),
    "pupils": ("t=25 a=8 b=12 z=9", "20%"),
    "season": ("w=9 n=15 m=5 z=30", "70%"),
    "battery": ("a=20 b=5 m=3 t=12 z=9", "40%"),
}

NUMBER_CASES = [  # gold, answer, verdict: True right, False wrong, None no answer
    ("18", "18", True), ("18", "18.0", True), ("18", "18.", True), ("18", " 18 ", True),
    ("18", "+18", True), ("18", "018", True), ("18", "-18", False), ("-18", "-18", True),
    ("-18", "- 18", True), ("-18", "\u221218", True), ("-5", "-$5", True), ("-5", "$-5", True),
    ("18", "19", False), ("18", "1.8", False), ("18", "180", False), ("0", "0", True),
    ("0", "-0.0", True), ("0", "0%", True), ("0.5", ".5", True), ("0.5", "0.50", True),
    ("0.5", "1/2", True), ("0.5", "2/4", True), ("0.5", "50%", True), ("0.5", "0.5%", False),
    ("0.5", "50", False), ("18", "1800%", True), ("1/3", "0.33", False),
    ("1/3", "1/3", True), ("1/3", "0.3333333", False), ("1/3", "2/6", True),
    ("1/3", "1 / 3", True), ("1/3", "3/1", False),
    ("3/4", "0.75", True), ("3/4", "75%", True), ("3/4", "75 percent", True),
    ("3/4", r"\frac{3}{4}", True), ("3/4", r"\dfrac{3}{4}", True), ("3/4", r"\tfrac34", True),
    ("3/4", r"\frac{ 6 }{ 8 }", True), ("3/4", r"$\frac{3}{4}$", True),
    ("3/4", r"\boxed{\frac{3}{4}}", True), ("3/4", r"\boxed{\frac34}.", True),
    ("3/4", r"-\frac{3}{4}", False), ("-3/4", r"-\frac{3}{4}", True),
    ("-3/4", r"\frac{-3}{4}", True),
    ("3/4", "3/0", None), ("3/4", "3/4/1", None), ("3/4", "3/-4", None), ("3/4", "4/3", False),
    ("3/2", "1 1/2", True), ("3/2", r"1\frac{1}{2}", True), ("3/2", "1.5", True),
    ("-3/2", "-1 1/2", True), ("3/2", "11/2", False), ("3/2", "1 3/2", None),
    ("3/2", "3 / 2", True),
    ("1234", "1,234", True), ("1234", "1{,}234", True), ("1234", r"1,\!234", True),
    ("1234", r"1\,234", True), ("1234", "12,34", None), ("1234", "1,2345", None),
    ("1234", "1 234", None), ("1234567.5", "$1,234,567.50", True), ("12", "1,2", None),
    ("18", "$18", True), ("18", "$18$", True), ("18", "$$18$$", True), ("18", r"\$18", True),
    ("18", r"$\$18$", True), ("18", "18$", True), ("18", "\u20ac18", True), ("18", "$18.00", True),
    ("18", r"\(18\)", True), ("18", r"\[18\]", True), ("12", "$1$2", None),
    ("18", r"\boxed{18}", True), ("18", r"\boxed{\text{18 dollars}}", True),
    ("18", r"\boxed{18} or 20", None), ("18", r"\boxed{18}\boxed{20}", None),
    ("18", r"\boxed{}", None), ("18", "18 hundred", None),
    ("18", "18 dollars", True), ("18", "18 rolls are left.", True), ("18", "18 km/h", True),
    ("18", r"18\text{ cm}^2", True), ("18", "18 cm\u00b2", True), ("18", "18kg", True),
    ("18", r"18^\circ", True), ("18", "18\u00b0", True), ("18", "18 m", True), ("18", "18 x", None),
    ("18", "18x", None), ("18", "18xy", None), ("18", "18g", None), ("18", "18 thousand", None),
    ("18", "18 dozen", None), ("18", "18 or so", None), ("18", "18 pi", None),
    ("18", "18 or 20", None), ("18", "18, 20", None), ("18", "18 and 20", None),
    ("18", "18 20", None), ("18", "18-20", None), ("18", "18 to 20", None), ("18", "10 + 8", None),
    ("18", "3 * 6 = 18", None), ("18", "2 * 9", None), ("18", "18!", None), ("18", "18?", None),
    ("18", "18..", None), ("18", "18.0.0", None), ("18", "--18", None), ("18", "(18)", None),
    ("18", "18 minus 0", None), ("18", "not 18", None), ("18", "about 18", None),
    ("18", "eighteen", None), ("18", "", None), ("18", ".", None), ("18", "$", None),
    ("18", "The answer is 18.", True), ("18", "Answer: 18", True), ("18", "x = 18", True),
    ("18", r"The answer is \boxed{18}.", True), ("18", "x = 18 or x = 20", None),
    ("18", "1.8e1", True), ("18", "1.8E+1", True), ("18", r"1.8 \times 10^1", True),
    ("18", "1.8 x 10^{1}", True), ("0.018", "1.8e-2", True), ("18", "18e0", True),
    ("18", "1e999999", None), ("18", "0x12", None), ("18", "nan", None), ("18", "inf", None),
    ("18", "1" * 5000, None), ("18", "\u0661\u0668", None), ("18", "\uff11\uff18", None),
    ("1.5", "1.5 hours", True), ("2.5", "$2.50", True), ("2.5", "2,5", None), ("5", "5 pm", None),
]
PERCENT_CASES = [  # where the result counts in percent
    ("75%", "75%", True), ("75%", "75", True), ("75%", "75 %", True), ("75%", r"75\%", True),
    ("75%", "75 percent", True), ("75%", "75.0 per cent", True), ("75%", "150/2", True),
    ("75%", "0.75", False), ("75%", "3/4", False), ("75%", "7500%", False),
    ("75%", "75% or 80%", None), ("2.5%", "2 1/2 %", True), (r"75\%", "75", True),
]
TEXT_CASES = [  # a gold that is no value
    ("x+1", "x + 1", True), ("x+1", "1+x", False), ("x+1", "$x+1$", True), ("x+1", "5", False),
    (r"\sqrt{2}", r"\sqrt2", True), (r"\sqrt{2}", "1.41421356", False), ("2x", "2", False),
    ("2x", "2 X", True), (r"\frac{\pi}{2}", r"\dfrac{\pi}{2}", True), ("(2, 5]", "(2,5]", True),
    ("(2, 5]", r"\left(2,5\right]", True), ("(2, 5]", "(2,5)", False),
    ("Tuesday", "tuesday.", True),
    (r"\text{odd}", "odd", True), ("18 or 20", "18 or 20", True), ("18 or 20", "18", False),
    (r"10\sqrt{3}", "10", False), ("1011_2", "1011", False), ("x+1", r"\boxed{x+1}", True),
    ("x+1", "", None), ("x+1", "$$", None), ("x+1", r"\boxed{}", None), ("x+1", " . ", None),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}{2}", True), ("3:4", "3:4", True),
    ("5 pm", "5 am", False),
    ("x+1", "x+1" * 1000, None),
]


def judge(gold, answer, question="How many?"):
    """What the environment says of `answer` to a user's question whose result is `gold`."""
    problem = problem_of({"question": question, "answer": f"#### {gold}"}, "here")
    given = problem.read(answer)
    return None if given is None else given == problem.gold


def records_file(folder, records, name="data.jsonl"):
    path = folder / name
    path.write_text("\n".join(json.dumps(r) for r in records), "utf-8")
    return str(path)


def gsm8k(count):
    return [{"question": f"Natalia sold {n} clips in April and as many in May. How many in all?",
             "answer": f"She sold {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n} clips.\n#### {2 * n}"}
            for n in range(600, 600 + count)]


def sample(template, count=40, seed=0):
    """Instances of a template: pairs of values and Problem."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        values = draw_values(template, rng)
        yield values, pose(template, values, PEOPLE, True)


class TestAnswers:
    def test_the_table_is_long_enough_and_holds_no_case_twice(self):
        cases = NUMBER_CASES + PERCENT_CASES + TEXT_CASES
        assert len(cases) == len(set(cases)) >= 80

    @pytest.mark.parametrize("gold, answer, verdict", NUMBER_CASES)
    def test_a_number_is_judged_by_its_value(self, gold, answer, verdict):
        assert judge(gold, answer) is verdict

    @pytest.mark.parametrize("gold, answer, verdict", PERCENT_CASES)
    def test_a_percentage_is_the_number_before_the_sign(self, gold, answer, verdict):
        assert judge(gold, answer) is verdict

    @pytest.mark.parametrize("gold, answer, verdict", TEXT_CASES)
    def test_what_is_no_value_is_compared_as_text_without_its_decoration(self, gold, answer,
                                                                         verdict):
        assert judge(gold, answer) is verdict

    def test_a_question_for_a_percentage_whose_result_has_no_sign_takes_one(self):
        for question in ("What percent are red?", "Which percentage is red?", "What % are red?"):
            assert judge("75", "75%", question) is True
            assert judge("75", "0.75", question) is False
        assert judge("75", "75%", "A coat is 20% off. What does it cost?") is False

    @given(st.fractions(), st.sampled_from(["1/2", "frac", "dfrac", "mixed", "latex mixed"]))
    def test_every_fraction_in_every_notation_is_itself(self, value, notation):
        sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
        whole, rest = divmod(top, bottom)
        text = {"1/2": f"{top}/{bottom}", "frac": rf"\frac{{{top}}}{{{bottom}}}",
                "dfrac": rf"$\dfrac{{{top * 3}}}{{{bottom * 3}}}$",
                "mixed": f"{whole} {rest}/{bottom}",
                "latex mixed": rf"\boxed{{{sign}{whole}\frac{{{rest}}}{{{bottom}}}}}"}[notation]
        assert read_value(text if notation == "latex mixed" else sign + text) == value

    @given(st.integers(-10**12, 10**12), st.integers(0, 6), st.sampled_from(
        ["{}", "${}", r"\${}", "{}.", "{} dollars", r"\boxed{{{}}}", "x = {}", "{}e0", "${}$"]))
    def test_every_decimal_in_every_dress_is_itself(self, digits, places, dress):
        value = Fraction(digits, 10**places)
        plain = f"{abs(digits):0{places + 1}d}"
        whole, rest = plain[:len(plain) - places], plain[len(plain) - places:]
        for integer in (whole, f"{int(whole):,}"):
            text = dress.format("-" * (digits < 0) + integer + f".{rest}" * (places > 0))
            assert read_value(text) == value
        assert read_value(f"{digits}e-{places}") == value
        assert read_value(rf"{digits} \times 10^{{-{places}}}") == value
        assert read_value(f"{digits}%") == Fraction(digits, 100)
        assert read_value(f"{digits}%", percent=True) == digits

    @given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
    def test_two_values_are_equal_only_if_they_are_one(self, one, other):
        assert judge(str(one), str(other)) is (one == other)

    @given(st.text(alphabet="0123456789.,/-+%${}\\ e", max_size=12))
    def test_whatever_is_read_has_one_value_only(self, text):
        """Slow twin: a text whose digits stand in more than one plain number must be a fraction, a
        mixed number, a power of ten or grouped in thousands."""
        value = read_value(text)
        runs = re.findall(r"[0-9]+", text)
        if value is None or len(runs) == 1:
            return
        assert re.search(r"[./,e]|\\[, ]", text) and len(runs) <= 5
        if not re.search(r"[/e\\]", text):  # a decimal: the runs, in order, are its digits
            digits = re.sub(r"[^0-9.]", "", text).rstrip(".")
            assert abs(value) * (100 if "%" in text else 1) == Fraction(digits)

    @pytest.mark.parametrize("text", [
        "1" * 2**20, "1," * 2**19, "1 " * 2**19, "{" * 2**20, "\\boxed{" * 2**17, "$" * 2**20,
        "\\frac" * 2**17, "18 " + "a " * 2**19, " " * 2**20 + "x", "1/" * 2**19, "\\text{a}" * 140,
        "1," * 499, "1 " * 499, "\\boxed{" * 140, "18 " + "a" * 990, " " * 999, "1e" * 499,
        "10^" * 330, "\\frac{" + "1" * 990, "\\," * 499, "(" * 999, "the answer is " * 70])
    def test_a_long_answer_costs_no_time(self, text):
        start = time.perf_counter()
        for gold in ("18", "x+1"):
            judge(gold, text)
        assert time.perf_counter() - start < 0.05

    def test_nothing_is_evaluated(self):
        for text in ("__import__('os')", "9**9**9", "1 if True else 2", "2*9", "int('18')"):
            assert read_value(text) is None


class TestAttempts:
    def start(self, **options):
        env = MetaMathQA(**options)
        env.reset(seed=3)
        return env

    @pytest.mark.parametrize("wrong", range(5))
    def test_the_right_answer_after_k_wrong_ones_earns_a_half_to_the_k(self, wrong):
        """RAGEN's own cap of one action a trajectory makes every k beyond 0 unreachable."""
        env = self.start()
        for k in range(wrong):
            _, reward, terminated, truncated, info = env.step(str(100_000 + k))
            assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, 1.0)
        observation, reward, terminated, _, info = env.step(env.solve()[0])
        assert (reward, terminated, info["success"]) == (0.5**wrong, True, 1.0)
        assert "Correct." in observation

    def test_the_sixth_attempt_does_not_happen(self):
        env = self.start()
        ends = [env.step(str(100_000 + k))[2:4] for k in range(5)]
        assert ends == [(False, False)] * 4 + [(False, True)]

    def test_an_answer_that_says_nothing_is_penalised_and_is_no_attempt(self):
        env = self.start()
        for answer in ("18 or 20", "", "no idea", "100000 || 18"):
            _, reward, terminated, _, info = env.step(answer)
            assert (reward, info["valid"], terminated) == (FORMAT_PENALTY, 0.0, False)
        assert env.step(env.solve()[0])[1] == 1.0

    def test_two_answers_in_one_turn_are_not_two_attempts(self):
        env = self.start()
        assert not env.step(f"{env.solve()[0]} || 100000")[4]["success"]
        assert not env.step(f"100000 || {env.solve()[0]}")[4]["success"]

    def test_the_question_comes_again_with_the_number_of_wrong_answers(self):
        env = self.start()
        question = env.render()
        for k in range(1, 5):
            observation = env.step(str(100_000 + k))[0]
            assert f"Wrong answers so far: {k}\n{question}\n" in observation
        assert env.step("100000")[0] == "Reward: 0\nWrong answers so far: 5"

    def test_without_repeat_it_does_not(self):
        env = self.start(repeat=False)
        assert env.step("100000")[0] == "Reward: 0\nWrong answers so far: 1\nTurns left: 4"

    def test_what_the_model_said_never_comes_back(self):
        env = self.start()
        assert "98765" not in env.step("98765")[0]
        assert "bananas" not in env.step("98764 bananas")[0]

    def test_the_same_wrong_value_in_another_dress_changes_nothing_but_the_count(self):
        env = self.start()
        assert [env.step(a)[4]["effective"] for a in ("98765", "98,765.0", "98766")] == [1, 0, 1]

    def test_attempts_beyond_the_smallest_float_do_not_raise(self):
        env = MetaMathQA(budget=Budget(1200, 1, 1200))
        env.reset(seed=0)
        for k in range(1100):
            env.step(str(100_000 + k))
        assert env.step(env.solve()[0])[4]["success"] == 1.0


class TestTemplates:
    def test_there_are_several_dozen_of_all_kinds_and_lengths(self):
        assert len(TEMPLATES) == len(word_problems()[1]) >= 36
        kinds = [t["kind"] for t in TEMPLATES.values()]
        assert set(kinds) == {"integer", "fraction", "decimal", "percent"}
        assert min(map(kinds.count, kinds)) >= 6
        assert {t["steps"] for t in TEMPLATES.values()} == {1, 2, 3, 4}

    def test_no_two_are_nearly_the_same(self):
        """Neither in their words nor, but for a few, in their operations."""
        bags = [(name, set(re.findall(r"[a-z]{3,}", t["facts"].lower())))
                for name, t in TEMPLATES.items()]
        for k, (one, words) in enumerate(bags):
            for other, others in bags[:k]:
                assert len(words & others) <= 0.5 * len(words | others), (one, other)
        shapes = [re.sub("[a-z]", "x", t["answer"]) for t in TEMPLATES.values()]
        assert max(map(shapes.count, shapes)) <= 3

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_the_result_worked_by_hand(self, name):
        text, result = WORKED[name]
        values = {k: Fraction(v) for k, v in (pair.split("=") for pair in text.split())}
        problem = pose(TEMPLATES[name], values, PEOPLE, True)
        assert (problem.answer, problem.read(result)) == (result, problem.gold)
        for condition in TEMPLATES[name]["require"]:
            assert arithmetic_value(condition, values) is True

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_the_note_computes_the_result_from_numbers_of_the_question(self, name):
        for values, problem in sample(TEMPLATES[name]):
            told = re.findall(r"[0-9]+(?:\.[0-9]+)?", problem.question)
            exact = re.sub(r"[0-9]+(?:\.[0-9]+)?", r"F('\g<0>')", problem.note)
            assert eval(exact, {"F": Fraction}) == problem.gold  # noqa: PLW0123
            for variable in TEMPLATES[name]["used"]:
                shown = tasks.spell_number(values[variable], variable in TEMPLATES[name]["money"])
                assert shown in told and shown in problem.note

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_results_are_positive_and_of_their_kind(self, name):
        kind = TEMPLATES[name]["kind"]
        for values, problem in sample(TEMPLATES[name]):
            gold = problem.gold
            assert all(v > 0 for v in values.values()) and 0 < gold < 10_000
            assert problem.percent == problem.answer.endswith("%") == (kind == "percent")
            assert problem.read(problem.answer) == gold
            if kind == "integer":
                assert gold.denominator == 1
            elif kind == "fraction":
                assert gold.denominator > 1 and problem.answer == str(gold)
            else:
                assert (100 * gold).denominator == 1 and "/" not in problem.answer
            if kind == "percent":
                assert "percent" in problem.question

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_texts_are_whole_sentences_and_ask_one_question(self, name):
        t = TEMPLATES[name]
        for part, end in (("facts", "."), ("distractor", "."), ("question", "?")):
            assert t[part].endswith(end) and (t[part][0].isupper() or t[part][0] == "{")
            assert t[part].count("?") == (end == "?") and "  " not in t[part]
        for _, problem in sample(t, 20):
            assert not set(problem.question) - set(string.printable) and "{" not in problem.question
            assert not re.search(r"\b1 [a-z]+s\b|\b0 ", problem.question), "a plural of one"
            assert all(len(c) == 2 for c in re.findall(r"\$[0-9]+\.([0-9]+)", problem.question))
            assert len(problem.question) < 250

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_every_variable_is_a_letter_and_the_distractor_plays_no_part(self, name):
        t = TEMPLATES[name]
        used, told = set(t["used"]), set(re.findall(r"\{(\w+)\}", t["facts"] + t["question"]))
        apart = set(re.findall(r"\{(\w+)\}", t["distractor"])) - set(PEOPLE)
        assert all(len(v) == 1 and v.islower() for v in t["values"])
        assert used <= told and told - set(PEOPLE) <= used and apart == {"z"}
        assert not apart & used

    def test_there_are_many_instances_of_each(self):
        for name, t in TEMPLATES.items():
            tasks = {problem.task for _, problem in sample(t, 200)}
            assert len(tasks) >= 15, name

    @pytest.mark.parametrize("text", ["__import__('os')", "a ** 9", "a.real", "(lambda: 1)()",
                                      "a and b", "'x' * 9", "a < b < 3", "[a][0]", "1.5"])
    def test_the_evaluator_knows_arithmetic_only(self, text):
        values = {"a": Fraction(1), "b": Fraction(2)}
        with pytest.raises(ValueError, match="is not arithmetic"):
            arithmetic_value(ast.parse(text, mode="eval").body, values)


class TestTasks:
    def test_names_and_distractors_do_not_make_another_task(self):
        t = TEMPLATES["rolls"]
        values = draw_values(t, np.random.default_rng(0))
        for people, distract in ((PEOPLE, False), ({"name": "Hugo", "friend": "Ana"}, True)):
            assert pose(t, values, people, distract).task == pose(t, values, PEOPLE, True).task
        other = {**values, "z": values["z"] + 1}
        assert pose(t, other, PEOPLE, True).task == pose(t, values, PEOPLE, True).task

    def test_numbers_that_change_places_do_not_make_another_task(self):
        t, values = TEMPLATES["legs"], {"a": Fraction(5), "b": Fraction(9), "z": Fraction(2)}
        swapped = {**values, "a": values["b"], "b": values["a"]}
        assert pose(t, values, PEOPLE, True).task == pose(t, swapped, PEOPLE, True).task

    def test_views_of_a_seed_have_the_same_task(self):
        plain, told = MetaMathQA(distractors=False, repeat=False), MetaMathQA()
        longer = 0
        for seed in range(60):
            short, long = plain.reset(seed=seed)[0], told.reset(seed=seed)[0]
            assert (plain.instance(), plain.solve()) == (told.instance(), told.solve())
            longer += len(long) > len(short)
        assert 15 < longer < 45  # about half of the questions have a distractor

    def test_max_steps_limits_the_operations(self):
        env = MetaMathQA(max_steps=2)
        for seed in range(60):
            env.reset(seed=seed)
            assert len(re.findall(r" [-+*/] ", env.note())) <= 2
        for steps in (0, 5):
            with pytest.raises(ValueError, match=f"got {steps}, expected 1 to 4"):
                MetaMathQA(max_steps=steps)

    def test_every_word_of_the_templates_is_in_the_texts_of_64_seeds(self):
        words = set()
        env = MetaMathQA()
        for seed in range(64):
            for text in env.texts(seed):
                words |= set(re.findall("[A-Za-z]+", text))
        needed = set().union(*(re.findall(r"(?<![{A-Za-z])[A-Za-z]+", t[part])
                               for t in TEMPLATES.values()
                               for part in ("facts", "distractor", "question")))
        assert needed <= words

    def test_a_random_answer_is_a_value_and_seldom_right(self):
        env, rng, right = MetaMathQA(), np.random.default_rng(0), 0
        for seed in range(300):
            env.reset(seed=seed)
            given = env.problem.read(env.random_answer(rng))
            assert given is not None
            right += given == env.problem.gold
        assert right < 30


class TestRecords:
    def test_metamathqa_and_gsm8k_are_told_apart_by_their_fields(self):
        meta = problem_of({"query": "What is 2 + 3?", "type": "MATH_SV", "original_question": None,
                           "response": "We add.\n#### 5\nThe answer is: 5"}, "here")
        gsm = problem_of({"question": "Each of 6 boxes holds 207. How many?",
                          "answer": "6*207 = <<6*207=1242>>1242\n#### 1,242"}, "here")
        assert (meta.question, meta.gold, meta.answer) == ("What is 2 + 3?", 5, "5")
        assert (gsm.gold, gsm.answer, gsm.note) == (1242, "1,242", "")

    def test_the_result_follows_the_last_marker(self):
        record = {"query": "q?", "response": "The answer is: wrong at first.\nThe answer is: 7"}
        assert problem_of(record, "here").gold == 7

    def test_a_record_without_a_result_is_left_out_instead_of_being_unsolvable(self):
        for answer in ("no marker", "#### ", "#### $$", "#### ."):
            assert problem_of({"question": "q?", "answer": answer}, "here") is None
        assert problem_of({"question": "q" * 9000, "answer": "#### 1"}, "here") is None
        assert problem_of({"question": "q\ud800", "answer": "#### 1"}, "here") is None

    def test_a_file_is_played_and_every_problem_can_be_solved(self, tmp_path):
        path = records_file(tmp_path, gsm8k(60) + [
            {"question": f"Compute \u222b_{n} caf\u00e9.", "answer": rf"#### \sqrt{{{n}}}"}
            for n in range(30)])
        seen = {}
        for split in SPLITS:
            env = MetaMathQA(split, data=path)
            for seed in range(60):
                observation, _ = env.reset(seed=seed)
                assert observation in env.observation_space
                assert seen.setdefault(env.instance(), split) == split == env.instance_split()
                assert env.note() == ""
                assert env.problem.read(env.random_answer(env.np_random)) is not None
                assert env.step(env.solve()[0])[1:3] == (1.0, True)
        assert len(seen) > 60

    def test_rephrasings_of_one_question_stay_in_one_split(self, tmp_path):
        """RAGEN has one split for training and validation."""
        rows = [{"query": f"Way {way} to ask about {n}?", "original_question": f"About {n}?",
                 "response": f"The answer is: {n}"} for n in range(50) for way in range(4)]
        by_split, _ = load_problems(records_file(tmp_path, rows))
        golds = [{p.gold for p in by_split[split]} for split in SPLITS]
        assert all(golds) and sum(map(len, golds)) == 50
        assert sum(map(len, by_split.values())) == 200

    def test_the_split_known_beforehand_is_the_one_of_the_contract(self):
        env = MetaMathQA()
        for seed in range(50):
            env._reset(np.random.default_rng(seed))
            assert split_of(env.instance()) == env.instance_split()

    def test_json_jsonl_and_windows_line_ends_hold_the_same(self, tmp_path):
        rows, answers = gsm8k(30), []
        (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
        (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        (tmp_path / "c.jsonl").write_bytes("\r\n".join(map(json.dumps, rows)).encode())
        for name in ("a.json", "b.jsonl", "c.jsonl"):
            answers.append(load_problems(str(tmp_path / name))[0])
        assert answers[0] == answers[1] == answers[2]
        assert sum(map(len, answers[0].values())) == 30

    def test_parquet_is_read_where_pyarrow_is_installed(self, tmp_path, monkeypatch):
        pyarrow = types.ModuleType("pyarrow")
        pyarrow.parquet = types.SimpleNamespace(
            read_table=lambda path: types.SimpleNamespace(to_pylist=lambda: gsm8k(30)))
        monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        assert MetaMathQA(data=str(tmp_path / "rows.parquet")).reset(seed=0)[0]

    def test_parquet_itself(self, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow
        path = str(tmp_path / "true.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(gsm8k(30)), path)
        assert sum(map(len, load_problems(path)[0].values())) == 30

    def test_parquet_without_pyarrow_names_the_command(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        with pytest.raises(ValueError, match="pip install pyarrow"):
            MetaMathQA(data=str(tmp_path / "rows.parquet"))

    @pytest.mark.parametrize("content, complaint", [
        (None, "no file .* expected a JSONL, JSON or parquet file"),
        (b"", "no records in"),
        (b'{"question": "q", "answer": "#### 1"}\nnot json', "cannot read line 2 of"),
        (b"[1, 2", "cannot read .*expected JSONL"),
        (b"\xff\xfe\x00", "cannot read .*expected JSONL"),
        (b'{"prompt": "q", "target": 3}', r"record 1 .* got \['prompt', 'target'\], expected"),
        (b'{"question": "q", "answer": 3}', "expected the text fields"),
        (b"[1]", "record 1 of .* got int, expected the text fields"),
        (b'{"question": "q", "answer": "none"}', "it has 0 train, 0 val, 0 test"),
    ])
    def test_a_file_that_is_none_is_refused_with_a_sentence(self, tmp_path, content, complaint):
        path = tmp_path / "bad.jsonl"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=complaint):
            MetaMathQA(data=str(path))
