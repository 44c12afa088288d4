"""The commands of the pages run as written."""

import io
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from test_readme import PAGES, code_blocks

from lab.figure import ROOT

SHORT = ("--steps 1 --num-groups 2 --group-size 2 --val-size 2 --max-new-tokens 12 "
         "--warmup-steps 0 --save-every 1 --diagnose-every 0")
OWN = "make leaderboard ALGO=my_algo:preset"  # has a test of its own
INSTALLED = [word for name in ("ready", "test", "lean") for word in ("-o", f".venv/{name}")]


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
    price, fog = code_blocks("add-an-environment.md", "python")
    (own,), (lamps, *_), (rooms, *_) = (code_blocks(page, "python") for page in (
        "algorithms.md", "README.md", "4-task.md"))
    for name, lines in (("my_algo.py", own), ("lamps.py", lamps), ("price.py", price),
                        ("fog.py", fog), ("rooms.py", rooms)):
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
        if not line.startswith(".venv/bin/python -m minragen"):
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
    extra = {"train": SHORT, "eval": "--size 2", "leaderboard": "--quick",
             "test": "--collect-only tests/test_env_contract.py"}.get(target, "")
    if "MODEL=smollm2" in words:
        extra = ("--env bandit --size 2" if target == "leaderboard" else
                 f"{extra} --num-groups 1 --val-size 1")
    given = "".join(w.removeprefix("ARGS=") for w in words if w.startswith("ARGS="))
    given = re.sub(r"--(steps|samples|warmup-steps) \d+", r"--\1 2", given)
    return ["make", *INSTALLED,
            *(re.sub("^STEPS=.*", "STEPS=2", w) for w in words[1:] if not w.startswith("ARGS=")),
            *[f"ARGS={given} {extra}"] * bool(given or extra)]


class TestCommands:
    def test_the_readme_has_the_one_that_matters(self):
        assert commands("README.md") == ["make train ENV=frozenlake"]

    @pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # of runpy
    @pytest.mark.parametrize("command", dict.fromkeys(
        command for command in itertools.chain(*map(commands, PAGES)) if OWN not in command))
    def test_it_runs_as_written(self, checkout, command, monkeypatch, capfd):
        if "smollm2" in command and not os.environ.get("MINRAGEN_TEST_SMOLLM2"):
            pytest.skip("downloads 93 MB: set MINRAGEN_TEST_SMOLLM2=1 to run it")
        words = shortened(command)
        if words[0] == "make" and "smollm2" not in words:  # which installs packages
            run_here(words, checkout, monkeypatch, capfd)
        else:
            run(words, checkout)

    @pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # of runpy
    def test_the_sweep_runs_as_written(self, checkout, tmp_path, monkeypatch, capfd):
        """A shell expands it, with a `make` that prints its words and begins the runs."""
        (script,) = (block for block in code_blocks("running.md", "sh") if "for " in block[0])
        said = run(["sh", "-c", "\n".join([
            "make() { printf '%s\\n' \"$@\" ''; [ $1 != train ] || mkdir -p runs/${3#RUN=}; }",
            *script])], tmp_path)
        found = [["make", *words.splitlines()] for words in said.split("\n\n")[:-1]]
        *_, report, measured = found
        assert len(found) == 14 and report[2] == measured[2]
        assert "rloo-lr1e-3-s2" in report[2].split()
        for words in found:
            run_here(shortened(shlex.join(words)), checkout, monkeypatch, capfd)
        assert (checkout / "runs/report.html").exists()

    def test_the_scripted_players_of_the_evaluation_page_are_those_that_it_prints(self, checkout):
        printed = run(shortened("make eval ENV=frozenlake MODEL=tiny")[:-1], checkout).splitlines()
        (shown,) = (block for block in code_blocks("running.md", "text") if "solver" in block[-1])
        assert printed[-4:] == shown[-4:] and printed[-7] == shown[1]

    def test_an_algorithm_of_the_page_gets_a_row_of_the_leaderboard(self, checkout):
        first, *lines = run(shortened(f"{OWN} ENV=bandit"), checkout).splitlines()
        assert first == "6 of 6 runs to train, 1 at a time: seconds each"
        assert sum(line.startswith("bandit ") for line in lines) == 6
        assert lines[-2].startswith("|  | `my_algo:preset` |  | 0.")
        assert lines[-1].startswith("It runs.")

    @pytest.mark.parametrize("module, little", [
        ("speed", "--trajectories 4 --turns 1 --new-tokens 2 --repeats 1 --group-size 2"),
        ("environments", "bandit --size 2")])
    def test_a_measurement_for_developers_runs(self, checkout, module, little):
        run([".venv/bin/python", "-m", f"lab.{module}", *little.split()], checkout)


class TestWheel:
    def test_it_trains_sokoban_where_it_is_installed(self, tmp_path):
        shutil.copytree(ROOT / "minragen", tmp_path / "minragen")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path)
        run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
             "--disable-pip-version-check", "--wheel-dir", "dist", "."], tmp_path)
        (wheel,) = (tmp_path / "dist").glob("*.whl")
        shutil.unpack_archive(wheel, tmp_path / "site", "zip")
        words = [sys.executable, "-m", "minragen.train", "--env", "sokoban", *SHORT.split()]
        assert "done      runs/" in run(words, tmp_path / "dist", PYTHONPATH=str(tmp_path / "site"))
