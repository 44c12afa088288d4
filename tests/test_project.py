"""The project as a whole: imports, links, options, an installed wheel."""

import re
import shutil
import sys
import tomllib

import check
import mutants
import pytest
from test_readme import ROOT, SHORT, run


@pytest.fixture
def fork(tmp_path):
    """A copy of the package with the bundled weights, in a folder of its own."""
    shutil.copytree(ROOT / "minragen", tmp_path / "minragen",
                    ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


class TestStructure:
    def test_every_wrong_line_of_the_mutants_has_its_place(self, monkeypatch):
        monkeypatch.setattr(mutants, "NEEDS", {})
        assert len(mutants.table()) > 300

    def test_messages_about_missing_packages_name_the_requirements_of_the_extras(self):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"]
        wanted = {requirement for extra in extras.values() for requirement in extra}
        told = {text for path in (ROOT / "minragen").rglob("*.py") for text in re.findall(
            r"pip install (?:--no-deps )?'?([\w-]+[^'`\".{ ]*[^\"`]*?)['`]", path.read_text())}
        assert {"peft>=0.21", "openenv>=0.10,<0.11"} < told <= wanted

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
        run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
             "--disable-pip-version-check", "--wheel-dir", "dist", "."], fork)
        (wheel,) = (fork / "dist").glob("*.whl")
        shutil.unpack_archive(wheel, fork / "site", "zip")
        words = [sys.executable, "-m", "minragen.train", "--env", "sokoban", *SHORT.split()]
        assert "done      runs/" in run(words, fork / "dist", PYTHONPATH=str(fork / "site"))
