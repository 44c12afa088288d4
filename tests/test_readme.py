"""The pages are true: their commands run, and their numbers and episodes come from the project."""

import ast
import contextlib
import json
import re
import shlex
from collections import Counter

import pytest
from conftest import parsed

from lab import figure, scoreboard
from lab.figure import ROOT
from minragen.config import ALGOS

PAGES = {path.name: path.read_text()
         for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]}


def code_blocks(page, wanted):
    """The lines of each fenced block of a page that has this label."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    return [body.splitlines() for label, body in blocks if label == wanted]


class TestPages:
    @pytest.mark.parametrize("page", figure.PAGES)
    def test_tables_log_and_episodes_are_what_the_project_prints(self, page):
        assert figure.rewritten(page) == (ROOT / page).read_text()

    @pytest.mark.parametrize("page", figure.COURSE, ids=lambda page: page.stem)
    def test_the_notebook_is_what_its_chapter_gives(self, page):
        text = page.with_suffix(".ipynb").read_text()
        assert figure.notebook(page) == text and len(text) < 100_000

    def test_the_readme_has_a_step_with_trains_calls(self):
        _, step = code_blocks("README.md", "python")
        names = [getattr(node.func, "id", getattr(node.func, "attr", ""))
                 for node in ast.walk(ast.parse("\n".join(step))) if isinstance(node, ast.Call)]
        train = (ROOT / "minragen" / "train.py").read_text()
        assert len(names) > 10 and [name for name in names if f"{name}(" not in train] == []

    def test_the_readme_says_how_much_seed_0_of_frozenlake_learns(self):
        ends = re.search(r"success rise from (\S+) to about (\S+) ", PAGES["README.md"]).groups()
        assert "frozen=0.8 | {} | {}, ".format(*ends) in PAGES["results.md"]

    def test_each_algorithm_is_listed_with_all_that_it_changes(self):
        for algo, choices in ALGOS.items():
            (line,) = re.findall(rf"^\| `{algo}` \|.*$", PAGES["algorithms.md"], re.MULTILINE)
            assert set(re.findall(r"`(\w+=[^`]+)`", line)) == {
                f"{name}={value}" for name, value in choices.items()}

    def test_every_command_that_trains_has_options_that_are_accepted_together(self):
        """Those that are not run as they are written; without the packages of others."""
        text, accepted = "\n".join(PAGES.values()).replace("\\\n", " "), 0
        for line in re.findall(r"^make train .*", text, re.MULTILINE):
            words = dict(w.split("=", 1) for w in shlex.split(line, comments=True)[2:])
            argv = [x for name, value in words.items() if name not in ("ARGS", "NPROC")
                    for x in (f"--{name.lower()}", value)]
            with contextlib.suppress(ImportError):
                parsed(*argv, *shlex.split(words.get("ARGS", "")))
                accepted += 1
        assert accepted >= 20

    def test_every_recipe_for_a_configuration_of_ragen_or_vagen_is_accepted(self):
        recipes = PAGES["from-ragen.md"].partition("## Recipes")[2].partition("\n\nBelow,")[0]
        of_all = ""
        for name, cell in re.findall(r"^\| (.*?) \| (`--.*) \|$", recipes, re.MULTILINE):
            for options in re.findall(r"`(--.*?)`", cell):
                parsed("--env", "sokoban", "--model", "smollm2", *f"{of_all} {options}".split())
            of_all = options if name == "every VAGEN recipe" else of_all
        assert "--filter none" in of_all

    def test_every_file_that_a_page_or_the_docstring_of_a_module_names_is_there(self):
        told = "\n".join(ast.get_docstring(ast.parse(path.read_text())) or ""
                         for path in (ROOT / "minragen").rglob("*.py"))
        told += re.sub(r"-m lab\.(\w+)", r"lab/\1.py", PAGES["CONTRIBUTING.md"])
        for name in {*re.findall(r"`((?:minragen|tests|docs|lab)/[\w./*-]*)`",
                                 "".join(PAGES.values())),
                     *re.findall(r"\b(?:tests|docs|lab)/[\w/.]+\.\w+", told)}:
            assert "NAME" in name or list(ROOT.glob(name.rstrip("/"))), name

    def test_every_test_that_a_page_names_is_there(self):
        for name in {*re.findall(r"`((?:environments/|long/)?test_\w+\.py(?:::\w+)*)`",
                                 "".join(PAGES.values()))}:
            file, *path = name.split("::")
            source = (ROOT / "tests" / file).read_text()
            assert all(re.search(rf"^ *(class|def) {part}\b", source, re.M) for part in path), name

    def test_each_mutant_that_survived_has_the_reason_why_it_may(self):
        sample = json.loads((ROOT / "lab" / "results" / "mutants.json").read_text())["sample"] or {}
        assert all(sample.get("survivors", {}).values())

    def test_every_module_is_in_the_reading_order_and_the_page_of_the_idea_is_the_first(self):
        modules = {f"minragen/{path.name}" for path in (ROOT / "minragen").glob("[!_]*.py")}
        named = re.findall(r"`(minragen/\w+\.py)`", PAGES["README.md"].partition("## Read it")[2])
        assert set(named) == modules and named[0] == "minragen/nano.py"

    def test_no_file_names_a_folder_of_the_machine(self):
        for pattern in ("*.md", "*.toml", "*.cff", "Makefile", "minragen/**/*.py", "docs/**/*.md",
                        "docs/**/*.ipynb", "tests/**/*.py", "lab/*.py"):
            for path in ROOT.glob(pattern):
                found = re.search(r"(?<![\w.{}])/(home|root|work|Users)/", path.read_text())
                assert not found, path


class TestFindings:
    def test_its_counts_and_effects_are_those_of_the_file_of_effects(self):
        """An effect is told as mean [low, high]; that of a fall also with the signs of a rise."""
        page, effects = (ROOT / "docs" / "findings.md").read_text("utf-8"), scoreboard.read()
        verdicts = Counter(e["verdict"] for e in effects if e["claim"] != scoreboard.OURS)
        counts = scoreboard.count(effects)
        assert (f"{sum(counts.values())} answers to claims of the papers: {counts['confirmed']} "
                f"confirm, {counts['partly']} in part") in PAGES["README.md"].replace("\n", " ")
        for verdict, findings in counts.items():
            assert f"| {verdict} | {findings} | {verdicts[verdict]} |" in page
        intervals = [(e["mean"], e["low"], e["high"]) for e in effects]
        intervals += [(-mean, -high, -low) for mean, low, high in intervals]
        told = re.findall(r"(-?[\d.]*\d) \[(-?[\d.]*\d), (-?[\d.]*\d)\]", page.replace("\n", " "))
        assert len(told) > 80
        for texts in told:
            digits = [len(text.partition(".")[2]) for text in texts]
            assert any(all(abs(value - float(text)) <= 0.5001 * 10**-n
                           for value, text, n in zip(found, texts, digits))
                       for found in intervals), texts
