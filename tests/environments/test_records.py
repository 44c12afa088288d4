"""The converters of examples/records.py: what they write is read, and its solution succeeds."""

import base64
import json
import pickle
import zlib

import pytest
from conftest import write

from examples import records
from minragen.environments import deepcoder
from minragen.environments.deepcoder import program_of, verdict
from minragen.environments.metamathqa import MetaMathQA
from minragen.environments.sandbox import Case
from minragen.environments.searchqa import SearchQA, load_corpus


def packed(value):
    """As LiveCodeBench's own files hold their private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


LIVE = {"question_content": "Is the sum above 5?", "metadata": '{"func_name": "over"}',
        "starter_code": "class Solution:\n    def over(self, xs: List[int], k: int):\n        ",
        "canonical_solution": "class Solution:\n    def over(self, xs, k): return sum(xs) + k > 5",
        "public_test_cases": '[{"input": "[1]\\n2", "output": "false", "testtype": "functional"}]',
        "private_test_cases": '[{"input": "[1]\\n9", "output": "true", "testtype": "functional"}]'}
SHIFT = {
    "entry_point": "shift", "canonical_solution": "    return [x + by for x in xs]\n",
    "prompt": "def shift(xs: list, by: int) -> list:\n    \"\"\" Add by to all. \"\"\"\n",
    "test": "\n\ndef check(candidate):\n    assert True, 'fine'\n"
            "    assert candidate([1, 2], 3) == [4, 5]\n    assert candidate([], 1) == []\n"
            "    assert candidate([2], 1) == [3], 'one'\n"}


def converted(tmp_path, capsys, form, *rows):
    """A file of the records that the command prints."""
    records.main([form, write(tmp_path / "theirs.jsonl", *rows)])
    (tmp_path / "ours.jsonl").write_text(capsys.readouterr().out)
    return str(tmp_path / "ours.jsonl")


@pytest.mark.parametrize("form, record, name, public, hidden", [
    ("taco", {"question": "Add numbers.", "solutions": '["print(sum(map(int, open(0))))"]',
              "input_output": {"inputs": [["1", "2"], "3\n4\n"], "outputs": [["3"], "7\n"]}},
     "", [], [Case("1\n2", "3"), Case("3\n4\n", "7\n")]),
    ("taco", {"prompt": "Double it.", "starter_code": "def twice(x):\n  ",
              "ground_truth": json.dumps({"metadata": {"fn_name": "twice"}, "inputs": [[[1, 2]]],
                                          "outputs": [[[2, 4]]]}),
              "solutions": ["def twice(x): return [v * 2 for v in x]"]},
     "twice", [], [Case([[1, 2]], [[2, 4]], True)]),
    ("taco", {"problem": "Add.", "solution": "def f(a): return a + 1",
              "tests": [{"fn_name": "f", "input": [1], "output": [2]}]},
     "f", [], [Case([1], [2], True)]),
    ("livecodebench", LIVE, "over", [Case([[1], 2], False)], [Case([[1], 9], True)]),
    ("livecodebench", LIVE | {"private_test_cases": packed(LIVE["private_test_cases"])},
     "over", [Case([[1], 2], False)], [Case([[1], 9], True)])])
def test_programs_have_their_tests_and_the_solution_passes(
        tmp_path, capsys, form, record, name, public, hidden):
    path = converted(tmp_path, capsys, form, record)
    [problem] = deepcoder.load_programs(path)
    assert (problem.name, [*problem.public], [*problem.hidden]) == (name, public, hidden)
    assert ("Starter code" in problem.text) == ("starter_code" in record)
    solution = program_of(problem.solution, problem)
    assert verdict(problem, solution, 0, 2)[:2] == (len(hidden), len(hidden))


def test_private_tests_are_read_but_never_unpickled(tmp_path, capsys):
    class Call:
        def __reduce__(self):
            return pytest.fail, ("it ran",)

    for value in (Call(), ["a", "b"], 7):
        with pytest.raises(SystemExit, match="tests are not a pickled string"):
            converted(tmp_path, capsys, "livecodebench",
                      LIVE | {"private_test_cases": packed(value)})


def test_the_statements_of_humaneval_that_call_the_candidate_are_the_tests(tmp_path, capsys):
    [problem] = deepcoder.load_programs(converted(tmp_path, capsys, "humaneval", SHIFT))
    assert problem.text.endswith("\nassert shift([1, 2], 3) == [4, 5]")
    for code, passed in ((problem.solution, 2), ("def shift(xs, by): return []", 1)):
        assert verdict(problem, code, 0, 2)[:2] == (passed, 2)


def test_questions_and_passages_are_those_of_the_others(tmp_path, capsys):
    path = converted(tmp_path, capsys, "metamathqa", *[
        {"query": f"What is 2 + {n}?", "original_question": None, "type": "MATH",
         "response": f"The answer is: 4, no.\nThe answer is: {n + 2}"} for n in range(30)])
    env = MetaMathQA(data=path)
    env.reset(seed=0)
    assert env.step(str(eval(env.problem.question[8:-1])))[1] == 1.0
    path = converted(tmp_path, capsys, "passages", {"contents": "Oslo: a city"}, {"content": "x"})
    assert [p.content for p in load_corpus(path)] == ["Oslo: a city", "x"]
    path = converted(tmp_path, capsys, "hotpotqa", *[{
        "question": f"Where is film {n} from?", "answer": f"City {n}", "level": "hard",
        "context": {"title": [f"Film {n}"], "sentences": [[f"Film {n} is", "from City."]]},
        "supporting_facts": {"title": [f"Film {n}"], "sent_id": [0]}} for n in range(30)])
    env = SearchQA(data=path)
    env.reset(seed=0)
    search, finish = env.solve()
    assert " is from City." in env.step(search)[0] and env.step(finish)[1] == 1.0
    path = converted(tmp_path, capsys, "answers", *[
        {"question": f"Who is {n}?", "golden_answers": ["Al", "Bo"]} for n in range(30)])
    env = SearchQA(data=path, corpus="encyclopaedia")
    env.reset(seed=0)
    assert env.step("finish[bo]")[1] == 1.0


def test_a_record_of_another_form_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="record 1 is no record of metamathqa: KeyError"):
        converted(tmp_path, capsys, "metamathqa", {"question": "x"})
