"""The project as a whole: imports, links, options, commands of make."""

import ast
import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib

import check
import pytest
from test_readme import PAGES, ROOT
from training import BRIEF

EXAMPLES = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            for folder in ("minragen", "lab") for path in sorted((ROOT / folder).rglob("*.py"))
            if ">>> " in path.read_text()]


class TestStructure:
    @pytest.mark.parametrize("module", EXAMPLES)
    def test_examples_in_docstrings_are_true(self, module):
        result = doctest.testmod(importlib.import_module(module))
        assert result.attempted > 0 and result.failed == 0

    def test_every_text_file_is_opened_as_utf_8_whatever_the_locale(self):
        for path in (ROOT / "minragen").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                method, name = getattr(node.func, "attr", ""), getattr(node.func, "id", "")
                if name == "open" or method in ("read_text", "write_text"):
                    assert re.search("encoding=|'utf-8|'ascii'|'[rwax]b'|os.memfd",
                                     ast.unparse(node)), (path, node.lineno)

    def test_in_a_locale_without_our_letters_a_command_still_prints(self):
        ran = subprocess.run([sys.executable, "-m", "minragen", "environments", "sokoban"],
                             env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False,
                             capture_output=True, cwd=ROOT)
        assert ran.returncode == 0 and not ran.stderr and len(ran.stdout) > 9, ran.stderr

    def test_messages_about_missing_packages_name_the_requirements_of_the_extras(self):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"]
        wanted = {requirement for extra in extras.values() for requirement in extra}
        told = {text for path in (ROOT / "minragen").rglob("*.py") for text in re.findall(
            r"pip install (?:--no-deps )?'?([\w-]+[^'`\".{ ]*[^\"`]*?)['`]", path.read_text())}
        assert {"peft>=0.21", "openenv>=0.10,<0.11"} < told <= wanted

    def test_imports_are_allowed_links_lead_somewhere_and_options_are_read(self):
        assert check.forbidden_imports() == check.dead_links() == check.unread_options() == []


class TestWings:
    PROGRAM = """
import sys
from minragen.run import command, start

def lines_loaded(log, ended):
    files = [module.__file__ for name, module in sys.modules.items()
             if name.partition(".")[0] == "minragen"]
    lines.append(sum(len(open(file).readlines()) for file in files if file))
    return write_report(log, ended)

lines, write_report, start.last_line = [], start.last_line, lines_loaded
try:
    command.train(["--help"])
except SystemExit:
    command.train(sys.argv[1:])
import minragen.eval
print(*lines)
print(*{"peft", "matplotlib", "tensorboard", "wandb", "datasets", "reasoning_gym", "openenv",
        "fastapi", "websockets", "trl"} & sys.modules.keys())
"""

    def test_bandits_first_step_loads_at_most_7500_lines_and_no_optional_package(self, tmp_path):
        """Without look/report.py, which comes after the training. The help names the rest."""
        words = [sys.executable, "-c", self.PROGRAM, *BRIEF, "--model", "tiny", "--steps", "1"]
        done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=False,
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0 and not done.stderr.strip(), done.stderr
        *told, lines, optional = done.stdout.splitlines()
        assert {"gigpo,", "min_p"} <= {*" ".join(told).split()}
        assert int(lines) <= 7500 and optional == ""


def make(*words, **environment):
    """What make would run, without quotes and `.venv/bin/python`, or why it refuses."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    installed = [word for name in ("ready", "test", "lean") for word in ("-o", f".venv/{name}")]
    done = subprocess.run(["make", "-n", *installed, *words], cwd=ROOT, env=clean | environment,
                          capture_output=True, text=True, check=False)
    said = done.stderr if done.returncode else done.stdout.replace('"', "")
    return " ".join(said.replace(".venv/bin/python -m", "-m").split())


class TestMakefile:
    @pytest.mark.parametrize("words, said", [
        ("train ENV=bandit ALGO=ppo STEPS=9 LR=1e-4 SEED=1 RUN=a MODEL=tiny ARGS='--top-p 0.9'",
         "-m minragen train --nproc auto --env bandit --algo ppo --steps 9 --lr 1e-4 --model tiny "
         "--run a --seed 1 --top-p 0.9"),
        ("resume RUN=a STEPS=9 NPROC=3", "-m minragen train --nproc 3 --run a --resume --steps 9"),
        ("play RUN=a SEED=2 SPLIT=val", "-m minragen play --run a --split val --seed 2"),
        ("play", "-m minragen play frozenlake"),
        ("train eval RUN='a b'", "-m minragen train --nproc auto --run a b "
                                 "-m minragen.eval --run a b"),
        ("pretrained RUN=v2-sokoban SEED=1", "-m lab.pretrained v2-sokoban --seed 1"),
        ("train PYTHON=.venv/bin/python", "-m minragen train --nproc auto")])
    def test_its_variables_become_options(self, words, said):
        assert make(*shlex.split(words)) == said

    @pytest.mark.parametrize("words, said", [
        ("report", "give the name of a run: make report RUN=name"),
        ("train env=bandit", "unknown variable env: did you mean ENV? Known: ENV ALGO"),
        ("train GROUP_SIZE=3", 'GROUP_SIZE. Known: ENV ALGO STEPS LR MODEL RUN SEED SPLIT SET '
         'NPROC ARGS PYTHON PY. Other options go into ARGS="--name value"'),
        ("STEP=3", "unknown variable STEP: did you mean STEPS?"),
        ("train PYTHON=nosuch", ", not that of PYTHON=nosuch")])  # since .venv is there
    def test_what_is_missing_unknown_or_without_effect_is_refused(self, words, said):
        assert said in make(*words.split())

    def test_what_is_exported_or_handed_down_by_another_make_is_no_mistake(self):
        plain = make("train")
        assert make("train", SEED="7", STEPS="3", FOO="1") == plain
        assert plain in make("train", MAKELEVEL="1", MAKEFLAGS=" -- FOO=1")
        assert "rm -rf" in make("clean", "PYTHON=nosuch")

    def test_every_target_that_a_page_or_a_message_names_is_there_and_explained(self):
        explained = {*re.findall(r"^([a-z\d-]+):.*## \w", (ROOT / "Makefile").read_text(), re.M)}
        pages = [*PAGES.values(), *(path.read_text("utf-8") for folder in ("minragen", "lab")
                                    for path in (ROOT / folder).rglob("*.py"))]
        named = {"".join(name) for text in pages for name in re.findall(
            r"(?:`|or: )make ([\w-]+)|[(:] make ([\w-]+) [A-Z]+=", text)}
        assert {"check", "test-all", "figure", "reproduce"} <= named <= explained


class TestCommandsForDevelopers:
    def test_the_oldest_packages_that_they_try_are_those_of_the_project(self):
        """test_readme.py has the files and modules that they name."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        oldest = re.findall(r"(torch|transformers)>=([\d.]+)", " ".join(project["dependencies"]))
        assert len(oldest) == 2
        assert all(f"'{a}=={version}.*'" in PAGES["CONTRIBUTING.md"] for a, version in oldest)
