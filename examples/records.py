"""Other people's records, converted to those that the environments read.

    python -m examples.records livecodebench test6.jsonl > problems.jsonl
    make train ENV=deepcoder ARGS="--env-arg data=problems.jsonl"

    FORM            records of                                              for
    metamathqa      MetaMathQA: query, response                             metamathqa
    hotpotqa        HotpotQA in the columns of the Hub                      searchqa, data
    answers         Search-R1 and RAGEN: golden_answers or ground_truth     searchqa, data
    passages        a corpus with contents or content                       searchqa, corpus
    taco            DeepCoder, TACO: tests, input_output or ground_truth    deepcoder
    livecodebench   LiveCodeBench, also with its packed private tests       deepcoder
    humaneval       HumanEval.jsonl.gz                                      deepcoder

A file is JSONL (also .gz), JSON or parquet. Tests: `python -m pytest
tests/environments/test_records.py`.
"""

import argparse
import ast
import base64
import json
import pickletools
import re
import sys
import zlib
from contextlib import suppress

from minragen.environments.data import read_records


def main(argv=None):
    """Print the converted records, one on a line."""
    parser = argparse.ArgumentParser(prog="python -m examples.records")
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("file")
    arguments = parser.parse_args(argv)
    try:
        for number, record in enumerate(read_records(arguments.file), 1):  # noqa: B007
            print(json.dumps(FORMS[arguments.form](record)))
    except (LookupError, TypeError, AttributeError, zlib.error) as problem:
        sys.exit(f"error: record {number} is no record of {arguments.form}: {problem!r}")
    except ValueError as problem:
        sys.exit(f"error: {problem}")


# ---- Questions -----------------------------------------------------------------------------------
def metamathqa(record):
    """The result follows the last marker. Rephrasings of one original question stay together."""
    result = record["response"].rpartition("The answer is:")[2]
    return {"question": record["query"], "answer": f"#### {result}",
            "original_question": record.get("original_question")}


def hotpotqa(record):
    """The Hub has columns where the authors' file has pairs."""
    context, facts = record["context"], record["supporting_facts"]
    return {"question": record["question"], "answer": record["answer"],
            "context": list(zip(context["title"], context["sentences"])),
            "supporting_facts": list(zip(facts["title"], facts["sent_id"]))}


def answers(record):
    """Any of several answers is right. There is no context: give corpus or url."""
    return {"question": record["question"],
            "answer": first_of(record, "golden_answers", "ground_truth")}


def passages(record):
    return {"text": first_of(record, "contents", "content")}


# ---- Programs ------------------------------------------------------------------------------------
def taco(record):
    """`inputs` and `outputs` side by side, or a list of tests. Of a function the value is
    expected, or a list that holds just it."""
    tests = from_json(first_of(record, "ground_truth", "tests", "input_output"))
    if isinstance(tests, dict) and "inputs" in tests:
        name = {**(tests.get("metadata") or {}), **tests}.get("fn_name")
        tests = [{"fn_name": name, "input": given, "output": expected} for given, expected
                 in zip(tests["inputs"], tests["outputs"], strict=True)]
    name = tests[0].get("fn_name")
    return {**task_of(record), "function": name, "tests": [
        {"input": test["input"], "output": test["output"], "either": True} if name else
        {key: text_of(test[key]) for key in ("input", "output")} for test in tests]}


def livecodebench(record):
    """A call's input has one argument a line, each as JSON."""
    name = (from_json(record.get("metadata")) or {}).get("func_name")

    def converted(tests):
        return [{"input": [from_json(line, line) for line in test["input"].splitlines()
                           if line.strip()], "output": from_json(test["output"], test["output"])}
                if name else {"input": test["input"], "output": test["output"]}
                for test in from_json(unpacked(tests)) or []]

    return {**task_of(record), "function": name,
            "tests": converted(record["private_test_cases"]),
            "examples": converted(record.get("public_test_cases"))}


def humaneval(record):
    """As a record of MBPP: each statement of its check that calls the candidate is a test, and the
    first of them is shown."""
    program, name = record["prompt"] + record["canonical_solution"], record["entry_point"]
    check = next(node for node in ast.parse(record["test"]).body
                 if getattr(node, "name", "") == "check")
    tests = [re.sub(r"\bcandidate\b", name, ast.unparse(part)) for part in check.body
             if "candidate" in ast.unparse(part)]
    return {"text": f"Write the whole program that begins so:\n{record['prompt'].strip()}",
            "code": program, "test_list": tests, "test_setup_code": program}


def task_of(record):
    """The question with its starter code, and the first solution, if there is any."""
    question = first_of(record, "question", "prompt", "problem", "question_content")
    starter = (record.get("starter_code") or "").rstrip()
    solution = first_of(record, "canonical_solution", "solution", "solutions") or ""
    if isinstance(solution, str) and solution.lstrip()[:1] == "[":
        solution = from_json(solution, [])
    if isinstance(solution, list):
        solution = (solution or [""])[0]
    return {"question": f"{question}\nStarter code:\n{starter}" if starter else question,
            "solution": solution}


def text_of(part):
    return "\n".join(map(str, part)) if isinstance(part, list) else str(part)


def unpacked(tests):
    """Return the JSON of LiveCodeBench's private tests: base64 of zlib of a pickled string. The
    string is read out of the pickle, which is not run. Other tests are returned as they are."""
    if not isinstance(tests, str) or not re.match("e[A-Z]", tests):  # a zlib header in base64
        return tests
    parts = pickletools.genops(zlib.decompress(base64.b64decode(tests)))
    texts = [value for code, value, _ in parts if "UNICODE" in code.name]
    if len(texts) != 1:
        raise ValueError("its private tests are not a pickled string")
    return texts[0]


def from_json(value, otherwise=...):
    """Return the value of JSON or of a Python literal; for other text `otherwise`, or ValueError
    without it. Blank text is None, and what is no text stays."""
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


FORMS = {form.__name__: form for form in (
    metamathqa, hotpotqa, answers, passages, taco, livecodebench, humaneval)}

if __name__ == "__main__":
    main()
