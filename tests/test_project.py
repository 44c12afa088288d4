"""The project as a whole: imports, links, options, an installed wheel."""

import ast
import dataclasses
import doctest
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import check
import pytest
from several import several
from test_readme import PAGES, ROOT, code_blocks
from training import BRIEF

from minragen.config import preset
from minragen.envs import REGISTRY
from minragen.run import bundled
from minragen.run.groups import env_groups


@pytest.fixture
def fork(tmp_path):
    """A copy of the package with the bundled weights, in a folder of its own."""
    shutil.copytree(ROOT / "minragen", tmp_path / "minragen")
    return tmp_path


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


class TestGroundFloor:
    def lines_of(self, fork, folder):
        """What a run of the fork writes. It imports minRAGEN again, and not PyTorch."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "minragen"]:
            del sys.modules[name]
        sys.path.insert(0, str(fork))
        from minragen import train
        from minragen.chat import ChatFrame
        from minragen.config import preset
        from minragen.envs import EnvGroups
        from minragen.models import AdamW, load_policy

        assert train.__file__ == f"{fork}/minragen/train.py"
        config = dataclasses.replace(preset("bandit"), steps=2, num_groups=4, group_size=4)
        policy, callbacks, lines = load_policy(folder), train.Callbacks(), []
        callbacks.write = lines.append
        groups = {split: EnvGroups("bandit", 4, 4, split, {"mixed": True})
                  for split in ("train", "val", "test")}
        train.train(train.Learner(policy, ChatFrame(policy.tokenizer, max_new_tokens=24), AdamW(
            policy.model.parameters(), config.lr)), groups, config, callbacks)
        return lines

    def test_it_trains_bandit_without_any_wing_and_nine_of_the_environments(self, fork):
        config = preset("bandit")
        folder = bundled.resolve("tiny", functools.partial(env_groups, config), max_new_tokens=24,
                                 steps=config.warmup_steps, say=lambda line: None)
        for wing in ("fast", "more", "look", "run"):
            shutil.rmtree(fork / "minragen" / wing)
        for name in REGISTRY.keys() - {"bandit"}:
            (fork / "minragen" / "environments" / f"{name}.py").unlink()
        (lines,) = several(1, lambda: self.lines_of(fork, folder))
        assert [line["step"] for line in lines] == [0, 1, 2, 2]
        assert lines[0]["val/success"] > 0 and lines[3]["test/success"] > 0
        assert lines[1]["grad_norm"] > 0 and lines[2]["logprob_gap"] < 1e-4


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

    def test_its_help_lists_every_target_and_no_page_or_message_names_another(self):
        makefile = (ROOT / "Makefile").read_text()
        targets = {*re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()}
        assert {*re.findall(r"^([a-z\d-]+):.*## \w", makefile, re.MULTILINE)} == targets
        pages = [*PAGES.values(), *(path.read_text("utf-8") for folder in ("minragen", "lab")
                                    for path in (ROOT / folder).rglob("*.py"))]
        named = {"".join(name) for text in pages for name in re.findall(
            r"(?:`|or: )make ([\w-]+)|[(:] make ([\w-]+) [A-Z]+=", text)}
        assert {"check", "test-all", "figure", "reproduce"} <= named <= targets


class TestCommandsForDevelopers:
    def test_they_name_modules_files_and_oldest_packages_that_are_those_of_the_project(self):
        (commands,) = code_blocks("CONTRIBUTING.md", "sh")
        text = "\n".join(commands)
        modules = re.findall(r"-m (lab\.\w+)", text)
        assert len(modules) > 2 and all(map(importlib.util.find_spec, modules))
        files = re.findall(r"\btests/[\w/]+\.py", text)
        assert len(files) > 2 and all((ROOT / name).exists() for name in files)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        oldest = re.findall(r"(torch|transformers)>=([\d.]+)", " ".join(project["dependencies"]))
        assert len(oldest) == 2 and all(f"'{a}=={version}.*'" in text for a, version in oldest)
