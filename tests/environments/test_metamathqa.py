"""MetaMathQA: how results are read, what attempts earn, templates of problems, files of records."""

import functools
import gzip
import json
import os
import re
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import begin, write

from minragen.environments import data as files
from minragen.environments import metamathqa
from minragen.environments.data import cached_until_changed, read_records
from minragen.environments.metamathqa import MetaMathQA, fill_template, problem_of, read_value
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget

NOTATIONS = {  # value -> texts that give it
    "18": (
        "+018", "1.8E+1", r"1.8 \times 10^1", "1.8 x 10^{1}", r"\$18", r"\(18\)", "18 m", "18cm²",
        "18 km/h", r"18\text{ cm}^2", r"18^{\circ}", "18 of the red rolls are left.", "**18**",
        "x = 18", "So the answer is 18", "The answer is: 18.", "Answer = 18", "9 * 2 = 18",
        r"Therefore, the final answer is **\boxed{18}**.", "(2 + 4) × 3 = 18",
        r"$36 \div 2 = 18$", "####18"),
    "-18": ("-18", "- 18", "\u221218", "$-18"),
    "1/2": (".5", "0.50", "2 / 4", "50%", "50 per cent", r"50\%"),
    "3/4": (r"$\frac{3}{4}$", r"\dfrac{3}{4}", r"\frac{ 6 }{ 8 }", r"\boxed{\tfrac34}."),
    "-3/4": (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    "3/2": ("1.5 hours", "1 1/2", r"1\frac{1}{2}"),
    "1234": ("1,234", "1{,}234", r"1,\!234", r"1\,234", "123,400%"),
    "1234567.5": ("$1,234,567.50", "2,469,135/2"),
    "-0.0000101": ("-0.0000101", r"-101 \times 10^{-7}"),
    None: (  # texts that give none, or several, or more than a number and its unit
        "", "about 18", "3/0", "1 2/2", "12,34", "1 234", "$1$2", "18 x", "18g", "18 hundred",
        "18-20", "18.0.0", "--18", "0x12", "1e999", "1" * 5000, "18 of all the red rolls are left",
        "\u0661\u0668", "18 = 20", "-5 = 18", "9 * 2 =", "18 = x", "The answer is 18 or 20", "2**3",
        "18 #### 20"),
}
TEXTS = (  # a result that is no value, answers that say the same, answers that do not
    ("x+1", ("x + 1", "X+1."), ("1+x", "5")),
    ("(2, 5]", (r"\left(2,5\right]", r"(2,\,5]"), ("(2,5)", "2")),
    (r"\text{odd}", ("odd.",), ("5 pm",)),
    (r"10\sqrt{3}", (r"10\sqrt3", r"\boxed{10\sqrt{3}}"), ("10", "17.320508")),
    (r"7\pi", (r"\(7\pi\)", r"$$7\pi.$$", r"**7\pi**", r"#### 7\pi"), (r"\pi", "7")),
    (r"\frac{1}{2}x", (r"\frac12x", r"\dfrac 1 2x", r"\tfrac{1}{2} x"), (r"\frac{1}{2}",)),
)

TEMPLATES = {t["id"]: t for t in metamathqa.word_problems()[1]}
NUMBER = r"[0-9]+(?:\.[0-9]+)?"
PEOPLE = {"name": "Ana", "friend": "Ben"}


def gsm8k(gold, question="How many?"):
    return {"question": question, "answer": f"We count.\n#### {gold}"}


def judge(gold, answer, question="How many?"):
    """True if the answer is right, False if it is wrong, None if it is no answer."""
    problem = problem_of(gsm8k(gold, question))
    said = problem.read(answer)
    return None if said is None else said == problem.gold


@functools.cache
def samples():
    """40 instances of every template: [(template, values, problem)]."""
    rng = np.random.default_rng(0)
    drawn = [(t, metamathqa.draw_values(t, rng)) for t in TEMPLATES.values() for _ in range(40)]
    return [(t, values, fill_template(t, values, PEOPLE, True)) for t, values in drawn]


class TestAnswers:
    def test_a_text_is_the_one_value_that_it_gives_in_any_notation_or_no_answer(self):
        for value, texts in NOTATIONS.items():
            read = {text: read_value(text) for text in texts}
            assert read == dict.fromkeys(texts, Fraction(value) if value else None)

    def test_a_percentage_is_the_number_before_the_sign(self):
        for gold, question in (("75%", "How much?"), ("75", "What percentage is red?"),
                               ("75", "what % are red?")):
            assert all(judge(gold, same, question) for same in ("75", r"75.0\%", "150/2 percent"))
            assert [judge(gold, other, question) for other in ("0.75", "7500%")] == [False, False]
        assert judge("75", "75%", "A coat is 20% off. What does it cost?") is False

    def test_a_result_that_is_no_value_is_compared_as_text(self):
        for gold, same, other in TEXTS:
            verdicts = {answer: judge(gold, answer) for answer in (gold, *same, *other)}
            assert verdicts == dict.fromkeys((gold, *same), True) | dict.fromkeys(other, False)
        for nothing in ("", "$$", r"\boxed{}", " . ", "x+1" * 1000):
            assert judge("x+1", nothing) is None

    def test_no_answer_takes_long_to_read(self):
        for text in ("1" * 2**20, "1," * 499, "1 " * 499, "18 " + "a" * 990, " " * 999, "1e" * 499,
                     "\\frac{" + "1" * 990, "\\boxed{" * 140, "the answer is " * 70):
            began = time.process_time()
            judge("18", text), judge("x+1", text)
            assert time.process_time() - began < 0.05, text[:9]

    def test_each_wrong_answer_halves_what_the_right_one_earns(self):
        """After the last answer the question does not come again."""
        for wrong in range(5):
            env = begin("metamathqa")
            question = env.render()
            for k in range(1, wrong + 1):
                shown = f"Reward: 0\nWrong answers so far: {k}\n{question}\nTurns left: {5 - k}"
                assert env.step(str(100_000 + k))[:4] == (shown, 0.0, False, False)
            told, reward = f"Reward: {0.5**wrong:.4g}\nCorrect.", 0.5**wrong
            assert env.step(env.solve()[0])[:4] == (told, reward, True, False)
        env = begin("metamathqa", budget=Budget(1, 1, 1))
        assert env.step("9999")[0] == "Reward: 0\nWrong answers so far: 1"

    def test_a_repeated_answer_counts_and_a_text_without_one_value_costs_only_the_penalty(self):
        env = begin("metamathqa")
        right = env.solve()[0]
        for answer in ("98764 bananas or 18", "", f"100000 || {right}", f"{right} || 100000"):
            observation, *result, _ = env.step(answer)
            assert result == [FORMAT_PENALTY, False, False] and "bananas" not in observation
        env = begin("metamathqa")
        steps = [env.step(answer) for answer in ("98765", "98,765.0", "-98765", right)]
        assert [info["effective"] for *_, info in steps] == [1.0, 0.0, 1.0, 1.0]
        assert steps[-1][1] == 0.125


class TestTemplates:
    def test_an_instance_is_of_its_kind_and_its_note_computes_the_result(self):
        for template, values, (question, answer, gold, percent, _, note, most) in samples():
            assert all(eval(condition, {}, values) for condition in template.get("require", []))
            assert all(value > 0 for value in values.values()) and 0 < gold < 10_000
            kind = template["kind"]
            assert ("/" in answer) == (kind == "fraction") and read_value(answer, percent) == gold
            assert gold.denominator == 1 or kind != "integer"
            assert most == max(gold, *(values[variable] for variable in template["used"]))
            assert percent == answer.endswith("%") == (kind == "percent") <= ("percent" in question)
            assert eval(re.sub(NUMBER, r"F('\g<0>')", note), {"F": Fraction}) == gold
            shown = {metamathqa.format_number(values[variable], variable in template["money"])
                     for variable in template["used"]}
            assert shown <= set(re.findall(NUMBER, question)) & set(re.findall(NUMBER, note))
            assert not re.search(r"[^ -~]|\{|\b1 [a-z]+s\b|\b0 |\$\d+\.\d\b", question), question
            assert re.findall(r"\{(.)\}", template["distractor"]) == ["z"]

    def test_names_distractors_and_the_order_of_numbers_do_not_make_another_task(self):
        def task(a, b, z, people=PEOPLE, distract=True):
            values = {"a": Fraction(a), "b": Fraction(b), "z": Fraction(z)}
            return fill_template(TEMPLATES["legs"], values, people, distract).task

        assert task(5, 9, 2) == task(5, 9, 2, {"name": "Hugo", "friend": "Ana"}, False)
        assert task(5, 9, 2) == task(5, 9, 3) == task(9, 5, 2) != task(6, 9, 2)
        count = Counter(name for name, _ in {(t["id"], p.task) for t, _, p in samples()})
        assert len(count) == len(TEMPLATES) and min(count.values()) >= 10

    def test_no_number_of_a_calculation_and_its_result_is_above_largest(self):
        small = MetaMathQA(largest=20, max_steps=1, budget=Budget(1, 1, 1))
        assert "half" in MetaMathQA().system_prompt and "half" not in small.system_prompt
        seen = Counter()
        for seed in range(500):
            small.reset(seed=seed)
            seen[small.instance().split()[0]] += 1
            shown = re.findall(NUMBER, f"{small.note()} {small.solve()[0]}")
            assert max(map(float, shown)) <= 20
        assert len(seen) == 24 and max(seen.values()) < 60  # every template, none too often
        assert max(map(float, re.findall(NUMBER, MetaMathQA(max_steps=1).reset(seed=3)[0]))) > 20
        longer = MetaMathQA(largest=20)  # most of its templates have no small numbers
        for seed in range(20):
            longer.reset(seed=seed)
            assert longer.problem.largest <= 20


class TestRecords:
    def test_the_result_follows_the_last_marker_and_may_stand_alone(self):
        assert problem_of(gsm8k("4\n#### 5", " What is 2 + 3? "))[:3] == ("What is 2 + 3?", "5", 5)
        assert problem_of({"question": "How many?", "answer": "1,242"})[1:3] == ("1,242", 1242)
        assert problem_of(gsm8k("1,242", "q" * 8000))[1:3] == ("1,242", 1242)
        for record in (gsm8k(""), gsm8k("$$"), gsm8k("1", " "), gsm8k("1", "q" * 8001),
                       gsm8k("1", "q\ud800")):
            assert problem_of(record) is None

    def test_a_file_is_played_and_rephrasings_of_one_question_stay_in_one_split(self, tmp_path):
        rows = [{"question": f"\u222b caf\u00e9 {'x' * n}, {way}?", "answer": f"{n}",
                 "original_question": f"{way} {n}?"} for n in range(50) for way in ("ask", "Ask ")]
        path, owner, seen = write(tmp_path / "data.jsonl", *rows), {}, set()
        for split in SPLITS:
            env = MetaMathQA(split, data=path)
            for seed in range(100):
                assert env.reset(seed=seed)[0] in env.observation_space
                seen.add(env.render())
                assert owner.setdefault(env.problem.gold, split) == split
                assert env.problem.read(env.random_answer(env.np_random)) is not None
                assert (env.note(), *env.step(env.solve()[0])[1:3]) == ("", 1.0, True)
        assert len(owner) > 40 and len(seen) > 60 and env.records

    def test_a_file_is_read_once_until_it_changes(self, tmp_path):
        read, path = [], tmp_path / "data"
        load = cached_until_changed(lambda *paths: read.append(paths) or len(read))
        path.write_text("1")
        assert [load(path, "none"), load(path, "none"), load(path, "other")] == [1, 1, 2]
        path.write_text("12")
        assert [load(path, "none"), load(path, "none")] == [3, 3]
        os.utime(path, (0, 0))
        assert (load(path, "none"), load("none", path)) == (4, 5)
        path.write_text("123")
        assert load("none", path) == 6

    def test_every_format_holds_the_same_records(self, tmp_path, monkeypatch):
        rows = [gsm8k(1, "line\u2028end"), gsm8k(2)]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        for name, data in (("a.json", json.dumps(rows, indent=1)), ("b.jsonl", "\n\n".join(lines)),
                           ("c.jsonl", "\r\n".join(lines)), ("d.parquet", "PAR1")):
            (tmp_path / name).write_bytes(data.encode())
        (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        marked = "\ufeff" + "\n".join(lines)  # as Notepad and PowerShell write UTF-8
        (tmp_path / "f.jsonl").write_text(marked, "utf-8")
        pyarrow, batches = Mock(), [Mock(to_pylist=lambda row=row: [row]) for row in rows]
        pyarrow.parquet.ParquetFile.return_value.iter_batches.return_value = batches
        monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
        assert [[*read_records(path)] for path in tmp_path.iterdir()] == [rows] * 6
        pyarrow.parquet.ParquetFile.side_effect = NotImplementedError("7 bits")  # a damaged file
        for package, said in ((pyarrow, r"cannot read .*d\.parquet as JSONL"),
                              (None, "pip install pyarrow")):
            monkeypatch.setitem(sys.modules, "pyarrow", package)
            with pytest.raises(ValueError, match=said):
                [*read_records(tmp_path / "d.parquet")]

    def test_what_is_left_out_is_counted_and_progress_is_told(self, tmp_path, capfd, monkeypatch):
        """On stderr; of JSONL, a line at a time is in memory."""
        path = write(tmp_path / "a.jsonl", *[gsm8k(n % 4 or "", f"{n}?") for n in range(2000)])
        monkeypatch.setattr(files, "watched", functools.partial(files.watched, delay=0))
        assert sum(map(len, metamathqa.load_problems(path)[0].values())) == 1500
        said = capfd.readouterr().err
        assert f"reading {path}: 0it [" in said
        assert f"{path}: 500 of 2,000 records left out: no question or no result." in said
        rows = read_records(path)
        Path(path).write_text("{}")
        assert next(rows) == {}

    def test_a_file_that_cannot_be_played_is_refused_with_the_place_and_the_reason(self, tmp_path):
        path = tmp_path / "data.jsonl"
        for content, complaint in (
                (None, "no file .*: expected a JSONL"), (b"", "no records in"),
                (b'{"question": "q", "answer": "#### 1"}\nnot json', "cannot read record 2 of"),
                (b"\xff\xfe\x00", "cannot read /"), (b"[" * 50_000, "as JSONL"),
                (b'{"question": "q", "answer": 3}', "record 1 of .*; expected the texts question"),
                (b'{"question": "q", "answer": "#### "}', "has no problem of split 'train'")):
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(ValueError, match=complaint):
                MetaMathQA(data=str(path))
