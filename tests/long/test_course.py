"""The course is true: each notebook prints what its chapter shows, and so do the solutions.

    WRITE=1 python -m pytest tests/long/test_course.py -k alone    # writes it into the chapters
"""

import codeop
import difflib
import math
import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from lab.figure import BLOCK, COURSE, INSTALL, ROOT

CHAPTERS = {page.stem: page.read_text() for page in COURSE}
CODE = {f"{name} {i}": found[1] for name, text in CHAPTERS.items()
        for i, found in enumerate(BLOCK.finditer(text), 1)}
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
        step = re.match(r"step +(\d+)/(\d+)", line)
        if not step or int(step[1]) in (1, int(step[2])) or int(step[1]) % EVERY == 0:
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


class TestChapters:
    @pytest.mark.parametrize("name", CODE)
    def test_a_block_can_be_pasted_at_the_prompt_of_python(self, name):
        """There an indented block ends with an empty line, and nowhere else."""
        pending = []
        for line in [*CODE[name].splitlines(), ""]:
            pending.append(line)
            if codeop.compile_command("\n".join(pending), symbol="single"):
                pending = []
        assert pending == []

    def test_what_is_computed_by_hand_is_right(self):
        prose = re.sub(r"^```.*?^```$", "", "\n".join(CHAPTERS.values()),
                       flags=re.DOTALL | re.MULTILINE)
        sums = SUM.findall(prose.replace("^", "**"))
        assert len(sums) > 15
        for term, result in sums:
            value = eval(term, {"exp": math.exp, "sqrt": math.sqrt, "max": max})
            assert f"{value:.{len(result.partition('.')[2])}f}" == result, term


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Models that more than one chapter uses."""
    return tmp_path_factory.mktemp("cache")


class TestNotebooks:
    @pytest.mark.parametrize("page", COURSE, ids=CHAPTERS)
    def test_alone_in_a_folder_it_prints_what_the_chapter_shows_and_so_do_the_solutions(
            self, page, cache, tmp_path, monkeypatch):
        for name, value in {"HOME": tmp_path, "MINRAGEN_CACHE": cache, "NO_COLOR": 1,
                            "PYTHONPATH": ROOT}.items():  # as if it were installed
            monkeypatch.setenv(name, str(value))
        book = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
        shown = [found[3] or "" for found in BLOCK.finditer(CHAPTERS[page.stem])]
        code = [cell.source for cell in book.cells if cell.cell_type == "code"][1:]
        every = [source for name, source in CODE.items() if name.startswith(page.stem)]
        assert [f"{source}\n" for source in code] == every[:len(code)]
        book.cells += map(nbformat.v4.new_code_cell, every[len(code):])  # the solutions
        NotebookClient(book, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
        first, *printed = [abbreviated("".join(  # without progress bars
            output.text for output in cell.get("outputs", ()) if output.get("name") == "stdout"))
            for cell in book.cells if cell.cell_type == "code"]
        assert first == "" and len(printed) == len(shown) >= len(code) + 3
        if "WRITE" in os.environ:
            write(page, printed)
        faults = "\n\n".join(filter(None, map(difference, shown, printed)))
        assert not faults, f"{faults}\nIf the run is right, write it into the page: WRITE=1"

    @pytest.mark.parametrize("flags, folder, said", [
        ("", COURSE[0].parent, f"{ROOT}\n"), ("-IS", "/", "minRAGEN is not installed.")],
        ids=["in a checkout", "alone"])
    def test_its_first_cell_goes_to_the_checkout_or_says_how_to_install(self, flags, folder, said):
        twice = f"{INSTALL}\n{INSTALL}\nprint(os.getcwd())"
        done = subprocess.run([sys.executable, *flags.split(), "-c", twice], cwd=folder,
                              capture_output=True, text=True, check=False)
        assert (done.stdout + done.stderr).startswith(said)


def write(page, printed):
    """Write into a chapter what its blocks have printed."""
    left = iter(printed)

    def renewed(found):
        output = next(left)
        return found[0] if found[3] is None else found[0].replace(
            f"```text\n{found[3]}```", f"```text\n{output}```")

    page.write_text(BLOCK.sub(renewed, page.read_text()))


class TestComparison:
    @pytest.mark.parametrize("line, change", [
        ("ratio 1.144", ("1.144", "1.164")), ("20 passed in 5.92s", ("20", "19")),
        ("A 0.5", ("0.5", "-0.5")), ("A\nB", ("\nB", "")),
        ("step   5/20  success 0.742  val 0.9", ("0.742", "0.942"))])
    def test_all_else_is_a_difference_that_is_shown(self, line, change):
        found = difference(line, line.replace(*change))
        assert f"-{line.splitlines()[-1]}" in found.splitlines()
