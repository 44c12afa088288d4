"""The README is true: its numbers come from the files, and every one of its commands runs."""

import ast
import io
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.figure import ROOT, blocks, written_into
from minragen.config import ALGOS

README = (ROOT / "README.md").read_text()
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
SPECIFICATION = (ROOT / "docs" / "specification.md").read_text()
GUIDE = (ROOT / "docs" / "add-an-environment.md").read_text()
SHORT = ("--steps 1 --num-groups 2 --group-size 2 --val-size 2 --max-new-tokens 12 "
         "--warmup-steps 0 --save-every 1")
SHORT_BENCH = "--trajectories 4 --turns 1 --new-tokens 2 --repeats 1 --group-size 2"


def code_blocks(text):
    """[(label, lines), ...] of the fenced blocks of a Markdown text."""
    return [(label, body.splitlines())
            for label, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def commands(text):
    """The lines of the unlabelled code blocks, without their comments."""
    return [line.split(" #")[0].strip() for label, lines in code_blocks(text) if not label
            for line in lines if line.strip()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the tree whose .venv is the environment that runs this test."""
    folder = tmp_path_factory.mktemp("clone") / "minragen"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
        ".git", ".venv", "runs", "__pycache__", ".*_cache"))
    (folder / ".venv").symlink_to(sys.prefix)
    (users_env,) = [lines for label, lines in code_blocks(GUIDE) if label == "python"]
    (folder / "reach.py").write_text("\n".join(users_env) + "\n")
    return folder


def run(words, checkout):
    """Without what an outer make hands to inner ones: its flags, and its ARGS."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment |= {"OMP_NUM_THREADS": "1", "MINRAGEN_CACHE": str(checkout / "cache")}
    return subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, check=False)


def run_here(words, checkout, monkeypatch, capfd):
    """What make would run, by its own word (-n), with `python -m minragen.x` in this process.

    The benchmarks, which write into the tree that they stand in, remain processes in the copy.
    One test below starts a process of its own; an import of torch for each command would be most
    of the time.
    returns: as `run`
    """
    recipe = run([*words, "-n"], checkout)
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("MINRAGEN_CACHE", str(checkout / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = recipe
    for line in recipe.stdout.splitlines():
        if not line.startswith(".venv/bin/python -m minragen.") or done.returncode:
            done = run(["sh", "-c", line], checkout)
            continue
        _, _, module, *argv = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [module, *argv])
        code = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            code = leaving.code or 0
        done = subprocess.CompletedProcess(words, code, *capfd.readouterr())
    return done


def shortened(command):
    """The command as written, made small by more ARGS; nothing is installed (-o)."""
    words = shlex.split(command)
    if words[0] != "make":
        return words + (["-q", "-x"] if "pytest" in words else [])
    target = next((w for w in words[1:] if "=" not in w), "help")
    extra = {"train": SHORT, "bench": SHORT_BENCH,
             "envs": "bandit --size 2",
             "compare": "--algos grpo --seeds 0 --steps 1 --val-size 2",
             "test": "--collect-only tests/test_env_contract.py"}.get(target, "")
    if "MODEL=smollm2" in words:
        extra += " --num-groups 1 --val-size 1"
    given = next((w.partition("=")[2] for w in words if w.startswith("ARGS=")), "")
    given = re.sub(r"--steps \d+", "--steps 2", given)
    given_words = [w for w in words[1:] if not w.startswith("ARGS=")]
    return ["make", "-o", ".venv/ready", "-o", ".venv/lean", *given_words, f"ARGS={given} {extra}"]


class TestCommands:
    def test_there_are_the_two_that_matter(self):
        assert {"make train ENV=frozenlake", "make test"} <= set(commands(README))

    @pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # of runpy
    @pytest.mark.parametrize("command", dict.fromkeys(
        commands(README) + commands(GUIDE) + commands(ALGORITHMS)))
    def test_it_runs_as_written(self, checkout, command, monkeypatch, capfd):
        if "smollm2" in command and not os.environ.get("MINRAGEN_TEST_SMOLLM2"):
            pytest.skip("downloads 93 MB: set MINRAGEN_TEST_SMOLLM2=1 to run it")
        words = shortened(command)
        done = (run_here(words, checkout, monkeypatch, capfd) if words[0] == "make"
                else run(words, checkout))
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{done.returncode}"
        assert "Traceback" not in done.stderr

    def test_training_starts_as_a_process_of_its_own(self, checkout):
        done = run(shortened("make train ENV=bandit RUN=process"), checkout)
        assert done.returncode == 0 and "done      runs/process" in done.stdout, done.stderr

    def test_every_make_target_is_in_the_help_and_the_help_names_no_other(self, checkout):
        makefile = (checkout / "Makefile").read_text()
        targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
        helped = run(["make"], checkout).stdout
        assert {line.split()[1] for line in helped.splitlines()} == targets
        assert {"help", "train", "eval", "test", "smoke", "smollm2", "clean"} <= targets

    def test_a_whole_environment_takes_about_forty_lines(self):
        (lines,) = [lines for label, lines in code_blocks(GUIDE) if label == "python"]
        assert sum(bool(line.strip()) for line in lines) <= 48


class TestNumbers:
    def test_figure_and_tables_are_what_the_runs_say(self):
        assert written_into(README, blocks()) == README

    def test_the_table_of_algorithms_is_what_the_short_runs_say(self):
        rows = json.loads(compare.STORED.read_text())
        assert {(row["env"], row["algo"], row["seed"]) for row in rows} == set(
            itertools.product(compare.STEPS, ALGOS, compare.SEEDS))
        assert written_into(ALGORITHMS, {"compare": compare.table(rows)}) == ALGORITHMS
        assert not any(row["warnings"] for row in rows if row["env"] == "frozenlake")

    def test_each_algorithm_is_told_with_all_that_it_changes(self):
        for algo, choices in ALGOS.items():
            (line,) = re.findall(rf"^\| `{algo}` \|(?!.* to ).*$", ALGORITHMS, re.MULTILINE)
            assert set(re.findall(r"`(\w+=[^`]+)`", line)) == {
                f"{name}={value}" for name, value in choices.items()}

    def test_the_log_lines_have_the_parts_that_the_text_explains(self):
        log = blocks()["log"]
        assert all(f"{word} " in log
                   for word in ("success", "val", "greedy", "kept", "gap", "test"))

    def test_every_file_that_it_names_is_there(self):
        for name in re.findall(r"`((?:minragen|tests|docs|runs|benchmarks)/[\w./-]*)`"
                               r"|\((docs/[\w.]+)\)", README):
            path = name[0] or name[1]
            assert "NAME" in path or (ROOT / path).exists(), path

    def test_every_test_that_the_specification_names_is_there(self):
        for name in re.findall(r"`((?:worlds/)?test_\w+\.py(?:::\w+)*)`", SPECIFICATION):
            file, *path = name.split("::")
            body = ast.parse((ROOT / "tests" / file).read_text()).body
            for part in path:
                bodies = [node.body for node in body if getattr(node, "name", "") == part]
                assert len(bodies) == 1, name
                body = bodies[0]

    def test_the_result_of_the_mutants_is_what_the_run_found(self):
        found = json.loads((ROOT / "runs" / "readme-mutants.json").read_text())
        assert (f"{found['mutants']} rows, {len(found['survivors'])} survived; "
                f"{found['generic_killed']} of {found['generic']} generic mutants died"
                ) in SPECIFICATION and not found["survivors"]

    def test_every_module_is_in_the_reading_order(self):
        modules = ({f"minragen/{p.name}" for p in Path(ROOT / "minragen").glob("*.py")}
                   - {"minragen/__init__.py"})
        assert modules <= set(re.findall(r"`(minragen/\w+\.py)`", README))

    def test_the_project_speaks_of_no_machine(self):
        tracked = [p for pattern in ("*.md", "*.toml", "Makefile", "minragen/*.py", "docs/*.md",
                                     "tests/**/*.py", "benchmarks/*.py")
                   for p in ROOT.glob(pattern)]
        for path in tracked:
            assert not re.search(r"(?<![\w.{}])/(home|root|work|Users)/", path.read_text()), path
