"""Would the tests notice a wrong line? A sample of mutants, each tried by itself on a copy.

    .venv/bin/python tests/mutants.py --seed 59
    .venv/bin/python tests/mutants.py --only nano --count 3 tests/test_nano.py

cosmic-ray makes the mutants: a `<` that becomes `<=`, a number that becomes another, a `not` that
goes, a loop that never runs. The seed draws 150 of all that it makes of the package.

First coverage.py records which tests of `make test` execute which lines, and how long they take.
Then a mutant is put alone into a copy of the project, and the tests that execute its line run, the
quickest first. It is killed by the first test that fails, when pytest cannot even collect them, or
when they take a minute more than twice their usual time. A mutant that they leave alive survives:
either a test is missing, or the mutant is equivalent (its program does the same).
lab/results/mutants.json has the test that was added, or why there is none.

All of it takes less than an hour on two cores.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "lab" / "results" / "mutants.json"
PROCESSES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
MOST_SECONDS = 300.0  # of usual time of the tests that one mutant is tried on
# Their tests need packages that requirements-test.lock does not have.
SKIPPED = ("environments/openenv.py", "look/serve.py")


class Mutant(NamedTuple):
    file: str  # in minragen/
    line: int
    name: str  # what is changed, in words
    source: str  # the whole file with the change


def draw(seed, count, only=""):
    """`count` of all mutants that cosmic-ray makes of the files whose path holds `only`."""
    files = [path.relative_to(ROOT / "minragen").as_posix()
             for path in sorted((ROOT / "minragen").rglob("[!_]*.py"))]
    found = [(file, *mutant) for file in files if only in file and file not in SKIPPED
             for mutant in mutants_of((ROOT / "minragen" / file).read_text())]
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    return [mutant(*place) for place in chosen]


def mutants_of(source):
    """The places of all mutants of a file: [(line, operator, its how-manieth occurrence), ...]."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, found = list(ast_nodes(get_ast(source))), []
    for name in operator_names():
        if "Variable" in name:  # these two need arguments
            continue
        lines = [line for node in nodes
                 for (line, _), _ in get_operator(name)().mutation_positions(node)]
        found += [(line, name, occurrence) for occurrence, line in enumerate(lines)]
    return found


def mutant(file, line, operator, occurrence):
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    before = (ROOT / "minragen" / file).read_text()
    source = mutate_code(before, get_operator(operator)(), occurrence)
    old, new = next((a.strip(), b.strip()) for a, b in zip(
        before.splitlines(), source.splitlines()) if a != b)
    return Mutant(file, line, f"{file}:{line}: {old}  ->  {new}", source)


def usual(words, mutants):
    """A run without a mutant: ({name of a mutant: its tests}, {test: its seconds}).

    raises: SystemExit if a test fails without a mutant, because it would kill every mutant
    """
    from coverage import CoverageData

    seconds = Counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", str(PROCESSES), "--dist", "loadscope",
             *words, "--cov=minragen", "--cov-context=test", "--cov-report=",
             f"--junitxml={folder}/junit.xml"], cwd=ROOT, check=False, capture_output=True,
            text=True, env=os.environ | {"COVERAGE_FILE": f"{folder}/coverage"})
        if done.returncode:
            sys.exit(f"error: without a mutant the tests fail:\n{done.stdout[-4000:]}")
        for case in ElementTree.parse(f"{folder}/junit.xml").iter("testcase"):
            module, *classes = re.split(r"\.(?=Test)", case.get("classname"))
            test = "::".join([module.replace(".", "/") + ".py", *classes, case.get("name")])
            seconds[test] += float(case.get("time"))
        coverage = CoverageData(f"{folder}/coverage")
        coverage.read()
        return {mutant.name: tests_of(mutant, coverage, seconds) for mutant in mutants}, seconds


def tests_of(mutant, coverage, seconds):
    """The tests that execute the mutant's line, the quickest first, MOST_SECONDS of them.

    Of a statement of several lines not each is recorded, so the nearest one above counts. A fixture
    is executed in the first test that takes it, so all tests of that file count. A line that only
    an import executes is no test's: then those that execute any line of the file.
    """
    contexts = coverage.contexts_by_lineno(str(ROOT / "minragen" / mutant.file))
    nearest = max((line for line in contexts if line <= mutant.line), default=None)
    found = {c for c in contexts.get(nearest, ()) if c}
    found = found or {c for line in contexts.values() for c in line if c}
    tests = {c.rpartition("|")[0] for c in found}
    files = {c.partition("::")[0] for c in found if c.endswith("|setup")}
    ordered = sorted((t for t in seconds if t in tests or t.partition("::")[0] in files),
                     key=seconds.get)
    ends = itertools.accumulate(seconds[test] for test in ordered)
    return [test for test, end in zip(ordered, ends) if end < MOST_SECONDS]


def attempt(mutant, tests, seconds):
    """How tests that usually take so long notice the mutant in a copy of the project: the first
    that fails, or what else ends them; "" if they pass."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        git("checkout-index", "-a", f"--prefix={folder}/")
        (copy / ".venv").symlink_to(ROOT / ".venv")
        (copy / "minragen" / mutant.file).write_text(mutant.source)
        (copy / "chosen.txt").write_text("\n".join(tests))
        # A mutant must not leave wrong weights where real runs look for them.
        env = os.environ | {"MINRAGEN_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        with open(copy / "said.txt", "w") as said:
            child = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-xq", "--assert=plain", "@chosen.txt"],
                cwd=folder, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            ended = child.wait(60 + 2 * seconds) and "pytest itself fails"
        except subprocess.TimeoutExpired:
            ended = "too slow"
        with contextlib.suppress(ProcessLookupError):  # with whatever the tests have left running
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        failed = re.search(r"(?m)^(?:FAILED|ERROR) (.*?)(?: - .*)?$",
                           (copy / "said.txt").read_text())
        return failed[1] if failed else ended or ""


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=59)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--only", default="", help="only files whose path holds this")
    parser.add_argument("tests", nargs="*", default=["tests", "--ignore=tests/long"])
    args = parser.parse_args()
    if git("status", "--porcelain", "minragen", "tests"):
        sys.exit("error: minragen/ or tests/ differ from the commit that the result would name.")
    mutants = draw(args.seed, args.count, args.only)
    trees = {name: git("rev-parse", f"HEAD:{name}") for name in ("minragen", "tests")}
    began = time.monotonic()
    tests, seconds = usual(args.tests, mutants)

    def one(mutant):
        chosen = tests[mutant.name]
        noticed = chosen and attempt(mutant, chosen, sum(map(seconds.get, chosen)))
        print(mutant.name, noticed or "SURVIVED", flush=True)
        return noticed

    with ThreadPoolExecutor(PROCESSES) as pool:
        survivors = [mutant.name for mutant, noticed in zip(mutants, pool.map(one, mutants))
                     if not noticed]
    minutes = round((time.monotonic() - began) / 60)
    print(f"{len(mutants)} mutants, {len(survivors)} survived, {minutes} minutes:", *survivors,
          sep="\n")
    if not args.only:
        result = json.loads(RESULT.read_text())
        known = (result["sample"] or {}).get("survivors", {})
        result["sample"] = {
            "trees": trees, "seed": args.seed, "mutants": len(mutants), "minutes": minutes,
            "survivors": {name: known.get(name, "") for name in survivors}}  # name -> why it may
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
