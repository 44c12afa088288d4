"""The project as a whole: imports, links, options, an installed wheel, small forks."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import check
import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY_RUN = shlex.split("--steps 1 --num-groups 2 --group-size 2 --val-size 2 --max-new-tokens 12 "
                       "--warmup-steps 0")


def run(folder, *words, **environment):
    """Run Python with `words` in `folder`, the first place where modules are found."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True,
                          env=clean | environment, check=False)


def train(folder, *words, **environment):
    done = run(folder, "-m", "minragen.train", *words, *TINY_RUN, **environment,
               MINRAGEN_CACHE=str(folder / "cache"))
    assert done.returncode == 0 and "done      runs/" in done.stdout, done.stderr


@pytest.fixture
def fork(tmp_path):
    """A copy of the package with the bundled weights, in a folder of its own."""
    shutil.copytree(ROOT / "minragen", tmp_path / "minragen",
                    ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


class TestStructure:
    def test_imports_are_allowed_links_lead_somewhere_and_options_are_read(self):
        assert check.forbidden_imports() == check.dead_links() == check.unread_options() == []

    def test_a_lazy_forbidden_import_a_dead_link_and_an_unread_option_are_seen(self, fork):
        (fork / "README.md").write_text("# Here\n[a](#here) [b](#there) [c](docs/x.md) [d](https://x)")
        for file, edit in (
                ("starpo", lambda text: text + "\n\ndef f():\n    from minragen import envs\n"
                                               "    from minragen.environments.lean import Lean\n"),
                ("train", lambda text: text.replace("config.max_grad_norm", "1.0"))):
            path = fork / "minragen" / f"{file}.py"
            path.write_text(edit(path.read_text()))
        assert check.forbidden_imports(fork) == [
            f"minragen/starpo.py imports minragen.{name}" for name in ("environments.lean", "envs")]
        assert check.dead_links(fork) == [
            "README.md links to #there, but the page has no such heading",
            "README.md links to docs/x.md, which does not exist"]
        assert check.unread_options(fork) == ["option max_grad_norm is never read"]


class TestWheel:
    def test_it_trains_sokoban_where_it_is_installed(self, fork):
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, fork)
        built = run(fork, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--disable-pip-version-check", "--wheel-dir", "dist", ".")
        assert built.returncode == 0, built.stderr
        (wheel,) = (fork / "dist").glob("*.whl")
        shutil.unpack_archive(wheel, fork / "site", "zip")
        train(fork / "dist", "--env", "sokoban", PYTHONPATH=str(fork / "site"))


class TestForks:
    def test_an_estimator_is_fifteen_lines_in_one_place_and_an_environment_is_one_file(self, fork):
        page = (ROOT / "CONTRIBUTING.md").read_text()
        estimator, environment = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        assert len(estimator.strip().splitlines()) <= 15
        with open(fork / "minragen" / "starpo.py", "a") as file:
            file.write("\n\n" + estimator)
        (fork / "mine.py").write_text(environment)
        train(fork, "--advantages", re.search(r'ESTIMATORS\["(\w+)"\]', estimator)[1],
              "--env", "mine:" + re.search(r"class (\w+)\(TextEnv\)", environment)[1])
