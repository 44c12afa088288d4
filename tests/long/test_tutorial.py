"""The tutorial is true: its notebook, which `make figure` makes of the page, prints what it shows.

    WRITE=1 python -m pytest tests/long/test_tutorial.py -k fetches    # writes it into the page
"""

import codeop
import copy
import difflib
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "tutorial.md"
BOOK = nbformat.read(PAGE.with_suffix(".ipynb"), as_version=4)
FLOAT = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?|\d+e[-+]\d+")
TIMES = re.compile(r" +\d+(?= tok/s)|(?<=tok/s)  [\d.]+(?= s)|(?<=passed in )[\d.]+")
# A sum in the prose, such as `0.25 / 0.5 = 0.5`.
SUM = re.compile(r"((?:exp|sqrt|max)?[-\d(][-+*/^\d., ()]*) = (-?\d+(?:\.\d+)?)")
# Rounding differs between CPUs: by so much, relative or absolute, numbers may differ.
RELATIVE, ABSOLUTE = 0.01, 0.002
# Training amplifies it. Of its lines these numbers are not compared, the others within this much.
CHAOTIC, TRAINED = re.compile(r"(?<=kept|grad) +[\d.]+|(?<=ent) +[\d.]+|(?<=gap) +\S+"), 0.15
EVERY = 10  # of the lines of a training the page shows the first and those of every tenth step


def abbreviated(output):
    """The output without trailing blanks and without most lines of a training."""
    lines = []
    for line in map(str.rstrip, output.splitlines()):
        step = re.match(r"step +(\d+)/", line)
        if not step or int(step[1]) == 1 or int(step[1]) % EVERY == 0:
            lines.append(line)
        elif lines[-1:] != ["..."]:
            lines.append("...")
    return "".join(f"{line}\n" for line in lines)


def alike(shown, line):
    """Whether two lines say the same but for timings, rounding and the width of columns."""
    shown, line = (TIMES.sub("", text) for text in (shown, line))
    relative, absolute = RELATIVE, ABSOLUTE
    if shown.startswith("step "):
        shown, line = (CHAOTIC.sub("", text) for text in (shown, line))
        relative, absolute = 0.0, TRAINED
    words, numbers = zip(*((FLOAT.sub("#", text).split(), [float(x) for x in FLOAT.findall(text)])
                           for text in (shown, line)))
    return words[0] == words[1] and all(
        math.isclose(a, b, rel_tol=relative, abs_tol=absolute) for a, b in zip(*numbers))


def difference(shown, output):
    """The lines that differ, as a diff; "" if none does."""
    shown, output = shown.splitlines(), output.splitlines()
    if len(shown) == len(output):
        output = [old if alike(old, new) else new for old, new in zip(shown, output)]
    return "\n".join(difflib.unified_diff(shown, output, "the page", "this run", lineterm="", n=1))


def shown_by(cell):
    """What a cell of a notebook has printed, without progress bars."""
    return "".join(output.text for output in cell.get("outputs", ())
                   if output.get("name") == "stdout")


def pictures_of(cell):
    return [output.data.get("image/png", "").strip() for output in cell.get("outputs", ())
            if "data" in output]


def asks_the_shell(cell):
    return cell.source.startswith(("%%", "!")) or "\n    !" in cell.source


class TestTutorial:
    @pytest.mark.parametrize("cell", [cell for cell in BOOK.cells if cell.cell_type == "code"
                                      and not asks_the_shell(cell)], ids=lambda cell: cell.id)
    def test_a_block_can_be_pasted_at_the_prompt_of_python(self, cell):
        """There an indented block ends with an empty line, and nowhere else."""
        pending = []
        for line in [*cell.source.splitlines(), ""]:
            pending.append(line)
            if codeop.compile_command("\n".join(pending), symbol="single"):
                pending = []
        assert pending == []

    def test_what_is_computed_by_hand_is_right(self):
        prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
        sums = SUM.findall(prose.replace("^", "**"))
        assert len(sums) > 10
        for term, result in sums:
            value = eval(term, {"exp": math.exp, "sqrt": math.sqrt, "max": max})
            assert f"{value:.{len(result.partition('.')[2])}f}" == result, term


class TestNotebook:
    @pytest.fixture
    def execute(self, tmp_path, monkeypatch):
        """(notebook, folder) -> the notebook with the outputs of this run, in a home of its own.
        pip is offline and only writes into pip.log what it would install."""
        for name, value in {
                "HOME": tmp_path, "MINRAGEN_CACHE": tmp_path / "cache", "NO_COLOR": 1,
                "PIP_DRY_RUN": 1, "PIP_NO_INDEX": 1, "PIP_NO_BUILD_ISOLATION": 0,
                "PIP_CONFIG_FILE": os.devnull, "PIP_LOG": tmp_path / "pip.log"}.items():
            monkeypatch.setenv(name, str(value))
        return lambda book, folder: NotebookClient(
            copy.deepcopy(book), timeout=600, resources={"metadata": {"path": folder}}).execute()

    @pytest.fixture
    def address(self, tmp_path):
        """A repository with the files of this tree."""
        folder = tmp_path / "origin"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
            ".git", ".venv", "runs", "__pycache__", ".*_cache"))
        for words in ("init --quiet", "add .",
                      "-c user.name=a -c user.email=a@b.c commit --quiet --message all"):
            subprocess.run(["git", *words.split()], cwd=folder, check=True)
        return folder.as_uri()

    def test_without_a_checkout_it_fetches_one_and_prints_what_the_page_shows(
            self, execute, address, tmp_path):
        (folder := tmp_path / "alone").mkdir()
        book = copy.deepcopy(BOOK)
        first, *cells = book.cells
        first.source = re.sub(r"input\(.*?\)", repr(address), first.source)
        _, *done = execute(book, folder).cells
        assert "Would install minragen" in (tmp_path / "pip.log").read_text()
        shown = [(shown_by(old), abbreviated(shown_by(new))) for old, new in zip(cells, done)]
        if "WRITE" in os.environ:
            page = PAGE.read_text()
            for old, new in shown:
                page = page.replace(f"```text\n{old}```", f"```text\n{new}```")
            PAGE.write_text(page)
        faults = "\n\n".join(filter(None, (difference(*pair) for pair in shown)))
        assert not faults, f"{faults}\nIf the run is right, write it into the page: WRITE=1"
        assert [*map(pictures_of, done)] == [*map(pictures_of, cells)]

    def test_in_a_checkout_its_first_cell_only_goes_to_the_folder(self, execute):
        book = copy.deepcopy(BOOK)
        first, where = book.cells[0], nbformat.v4.new_code_cell("print(os.getcwd())")
        book.cells = [first, first, where]
        *before, last = execute(book, PAGE.parent).cells
        assert [shown_by(cell) for cell in before] == ["", ""] and shown_by(last) == f"{ROOT}\n"


class TestComparison:
    @pytest.mark.parametrize("line, change", [
        ("ratio 1.144", ("1.144", "1.164")), ("20 passed in 5.92s", ("20", "19")),
        ("id 320", ("320", "321")), ("kept True", ("True", "False")), ("A 0.5", ("A 0.5", "A")),
        ("step   5/20  success 0.742  val 0.9", ("0.742", "0.942")), ("A 0.5", ("0.5", "-0.5")),
        ("step   5/20  success 0.742  val 0.9", ("  val 0.9", "")), ("A\nB", ("\nB", ""))])
    def test_all_else_is_a_difference_that_is_shown(self, line, change):
        found = difference(line, line.replace(*change))
        assert f"-{line.splitlines()[-1]}" in found.splitlines()
