"""The pages are true: their commands run, and their numbers and episodes come from the project."""

import ast
import io
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from benchmarks import compare, figure
from benchmarks.figure import ROOT
from minragen.config import ALGOS
from minragen.envs import REGISTRY, make

PAGES = {path.name: path.read_text()
         for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]}
SHORT = ("--steps 1 --num-groups 2 --group-size 2 --val-size 2 --max-new-tokens 12 "
         "--warmup-steps 0 --save-every 1")
SHORT_BENCH = "--trajectories 4 --turns 1 --new-tokens 2 --repeats 1 --group-size 2"


def code_blocks(page, wanted):
    """The lines of each fenced block of a page that has this label."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    return [body.splitlines() for label, body in blocks if label == wanted]


def commands(page):
    """The lines of the unlabelled blocks, and what a sentence says to run on the user's code."""
    return [*itertools.chain(*code_blocks(page, "")),
            *re.findall(r"`(\.venv/bin/python -m minragen\.train [^`]+)`", PAGES[page])]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the tree whose .venv runs this test, with the code that the pages add."""
    folder = tmp_path_factory.mktemp("clone") / "minragen"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
        ".git", ".venv", "runs", "__pycache__", ".*_cache"))
    (folder / ".venv").symlink_to(sys.prefix)
    estimator, small_env = code_blocks("CONTRIBUTING.md", "python")
    (env,) = code_blocks("add-an-environment.md", "python")
    for name, lines in (("minragen/starpo.py", ["", "", *estimator]), ("my_env.py", small_env),
                        ("reach.py", env)):
        with open(folder / name, "a") as file:
            file.write("\n".join([*lines, ""]))
    return folder


def run(words, folder, **environment):
    """What a command prints, which must succeed, run without what an outer make hands down."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    clean |= {"OMP_NUM_THREADS": "1", "MINRAGEN_CACHE": str(folder / "cache")}
    done = subprocess.run(words, cwd=folder, env=clean | environment, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{done.stdout}{done.stderr}"
    return done.stdout


def run_here(words, checkout, monkeypatch, capfd):
    """Run make's recipe (-n), each `python -m minragen.x` of it in this process.

    Importing torch for each command would take most of the time. The benchmarks write into their
    own tree, so they remain processes in the copy.
    """
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("MINRAGEN_CACHE", str(checkout / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for line in run([*words, "-n"], checkout).splitlines():
        if not line.startswith(".venv/bin/python -m minragen."):
            run(["sh", "-c", line], checkout)
            continue
        _, _, module, *argv = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [module, *argv])
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            assert not leaving.code, leaving.code
        assert "Traceback" not in capfd.readouterr().err


def shortened(command):
    """The words of a command with more options, which make it small; -o: install nothing."""
    words = shlex.split(command)
    if words[0] != "make":
        return words + (SHORT.split() if "minragen.train" in words else
                        ["-q", "-x"] if "pytest" in words else [])
    target = next((w for w in words[1:] if "=" not in w), "help")
    extra = {"train": SHORT, "eval": "--size 2", "bench": SHORT_BENCH, "envs": "bandit --size 2",
             "compare": "--algos grpo --seeds 0 --steps 1 --val-size 2",
             "test": "--collect-only tests/test_env_contract.py"}.get(target, "")
    if "MODEL=smollm2" in words:
        extra += " --num-groups 1 --val-size 1"
    given = "".join(w.removeprefix("ARGS=") for w in words if w.startswith("ARGS="))
    given = re.sub(r"--(steps|samples) \d+", r"--\1 2", given)
    return ["make", "-o", ".venv/ready", "-o", ".venv/lean",
            *(w for w in words[1:] if not w.startswith("ARGS=")), f"ARGS={given} {extra}"]


class TestCommands:
    def test_the_readme_has_the_two_that_matter(self):
        assert commands("README.md") == ["make train ENV=frozenlake", "make test"]

    @pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # of runpy
    @pytest.mark.parametrize("command", dict.fromkeys(itertools.chain(*map(commands, PAGES))))
    def test_it_runs_as_written(self, checkout, command, monkeypatch, capfd):
        if "smollm2" in command and not os.environ.get("MINRAGEN_TEST_SMOLLM2"):
            pytest.skip("downloads 93 MB: set MINRAGEN_TEST_SMOLLM2=1 to run it")
        words = shortened(command)
        if words[0] == "make" and "smollm2" not in words:  # which installs packages
            run_here(words, checkout, monkeypatch, capfd)
        else:
            run(words, checkout)

    def test_watch_writes_the_page_until_ctrl_c(self, checkout):
        run(shortened("make train ENV=bandit RUN=watched"), checkout)
        page = checkout / "runs/watched/report.html"
        page.unlink()
        words = run([*shortened("make watch RUN=watched"), "-n"], checkout)
        with subprocess.Popen(shlex.split(words), cwd=checkout, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watch:
            assert watch.stdout.readline().strip() == "runs/watched/report.html"
            assert 'Number("5")' in page.read_text()  # seconds until it reloads itself
            watch.send_signal(signal.SIGINT)
            assert (watch.wait(60), watch.stderr.read()) == (0, "")

    def test_the_scripted_players_of_the_evaluation_page_are_those_that_it_prints(self, checkout):
        printed = run(shortened("make eval ENV=frozenlake MODEL=tiny")[:-1], checkout).splitlines()
        (shown,) = (block for block in code_blocks("evaluate.md", "text") if "solver" in block[-1])
        assert printed[-4:] == shown[-4:] and printed[-7] == shown[1]

    def test_a_new_estimator_is_fifteen_lines_in_one_place(self):
        estimator, _ = code_blocks("CONTRIBUTING.md", "python")
        assert len(estimator) <= 15

    def test_every_make_target_is_in_the_help_and_the_help_names_no_other(self, checkout):
        makefile = (checkout / "Makefile").read_text()
        targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
        assert {line.split()[1] for line in run(["make"], checkout).splitlines()} == targets
        named = set(re.findall(r"`make (\w+)", "".join(PAGES.values())))
        assert {"check", "test", "mutants", "figure"} <= named <= targets


class TestPages:
    @pytest.mark.parametrize("page", figure.PAGES)
    def test_tables_log_and_episodes_are_what_the_project_prints(self, page):
        assert figure.rewritten(page) == (ROOT / page).read_text()

    def test_every_episode_is_one_that_is_printed_again(self):
        shown = [lines[0].split()[-2] for name in PAGES for lines in code_blocks(name, "console")]
        again = [match[2] for path in figure.PAGES
                 for match in figure.EPISODE.finditer((ROOT / path).read_text())]
        assert sorted(shown) == sorted(again) == sorted([*REGISTRY, "frozenlake"])

    def test_the_reply_in_the_readme_is_the_solvers(self):
        env = make("frozenlake")
        env.reset(seed=3)
        assert (f"`<think>{env.note()}</think><answer>{env.solve()[0]}</answer>`"
                in PAGES["README.md"])

    def test_the_step_in_the_readme_calls_what_the_training_calls(self):
        (step,) = code_blocks("README.md", "python")
        names = [getattr(node.func, "id", getattr(node.func, "attr", ""))
                 for node in ast.walk(ast.parse("\n".join(step))) if isinstance(node, ast.Call)]
        train = (ROOT / "minragen" / "train.py").read_text()
        assert len(names) > 10 and [name for name in names if f"{name}(" not in train] == []

    @pytest.mark.parametrize("env", REGISTRY)
    def test_the_options_of_an_environment_are_listed_with_their_defaults(self, env):
        listed = re.search(r"^Options: (.*?)\.$", PAGES[f"{env}.md"], re.MULTILINE | re.DOTALL)[1]
        assert re.findall(r"`([^`]+)`", listed) == [
            f"{name}={value}" for name, value in make(env).defaults.items()]

    def test_the_table_of_algorithms_is_what_the_short_runs_say(self):
        rows = json.loads(compare.STORED.read_text())
        assert {(row["env"], row["algo"], row["seed"]) for row in rows} == set(
            itertools.product(compare.STEPS, ALGOS, compare.SEEDS))
        page = PAGES["algorithms.md"]
        assert figure.written_into(page, {"compare": compare.table(rows)}) == page
        assert not any(row["warnings"] for row in rows if row["env"] == "frozenlake")

    def test_each_algorithm_is_listed_with_all_that_it_changes(self):
        for algo, choices in ALGOS.items():
            (line,) = re.findall(rf"^\| `{algo}` \|(?!.* to ).*$", PAGES["algorithms.md"],
                                 re.MULTILINE)
            assert set(re.findall(r"`(\w+=[^`]+)`", line)) == {
                f"{name}={value}" for name, value in choices.items()}

    def test_every_file_that_a_page_names_is_there(self):
        for page, text in PAGES.items():
            for name in re.findall(r"`((?:minragen|tests|docs|runs|benchmarks)/[\w./*-]*)`", text):
                assert "NAME" in name or list(ROOT.glob(name.rstrip("/"))), (page, name)

    def test_every_test_that_the_specification_names_is_there(self):
        for name in re.findall(r"`((?:environments/)?test_\w+\.py(?:::\w+)*)`",
                               PAGES["specification.md"] + PAGES["security.md"]):
            file, *path = name.split("::")
            body = ast.parse((ROOT / "tests" / file).read_text()).body
            for part in path:
                found = [node.body for node in body if getattr(node, "name", "") == part]
                assert len(found) == 1, name
                (body,) = found

    def test_the_result_of_the_mutants_is_what_the_run_found(self):
        found = json.loads((ROOT / "runs" / "readme-mutants.json").read_text())
        assert (f"{found['mutants']} rows, {len(found['survivors'])} survived; "
                f"{found['generic_killed']} of {found['generic']} generic mutants died"
                ) in PAGES["specification.md"] and not found["survivors"]

    def test_every_module_is_in_the_reading_order_and_train_is_the_first(self):
        modules = {f"minragen/{path.name}" for path in (ROOT / "minragen").glob("[!_]*.py")}
        named = re.findall(r"`(minragen/\w+\.py)`", PAGES["README.md"].partition("## Read it")[2])
        assert set(named) == modules and named[0] == "minragen/train.py"

    def test_no_file_names_a_folder_of_the_machine(self):
        for pattern in ("*.md", "*.toml", "*.cff", "Makefile", "minragen/**/*.py", "docs/*.md",
                        "tests/**/*.py", "benchmarks/*.py"):
            for path in ROOT.glob(pattern):
                found = re.search(r"(?<![\w.{}])/(home|root|work|Users)/", path.read_text())
                assert not found, path
