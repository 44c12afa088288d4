"""What a user reads about exceptions, and what of them the console and the folder of a run keep."""

import io
import json
import os
import subprocess
import sys
import time

import pytest
from conftest import message
from toys import replies
from training import run

from minragen import envs
from minragen import eval as evaluation
from minragen import train as trainer
from minragen.__main__ import main as command
from minragen.environments import limits
from minragen.look import faults
from minragen.run import command as commands
from minragen.run.groups import PatientGroups

USERS = """
import json

from minragen.environments.limits import ServerGone
from minragen.envs import Budget, Outcome, TextEnv

WHERE, TRAINING = {where!r}, 2**41

def broken(place, error=ValueError("zzz\\x1b]0;title")):
    if WHERE == place:
        raise error

broken("import")

class Mine(TextEnv):
    budget = Budget(0 if WHERE == "budget" else 1, 1, 1)
    actions = ("A",)
    instruction = "Say A."

    def reset(self, *, seed=None, options=None):
        self.late = seed >= TRAINING
        if self.late:
            broken("first prompt")
        return super().reset(seed=seed, options=options)

    def _reset(self, rng):
        self.number = int(rng.integers(100))

    def render(self):
        return f"Number {{self.number}}"

    def step(self, answer):
        if self.late:
            broken("training")
        return super().step(answer)

    def _act(self, action):
        broken("act")
        broken("server", ServerGone("no answer"))
        if WHERE == "library":
            json.loads("{{")
        return Outcome(1.0, True, True)

    def solve(self):
        if WHERE == "option":
            type(self)(size=3)
        return ["A"]

    def note(self):
        broken("note")
        return "A"
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    """(where) -> writes users_env.py, which raises there, into the current folder."""
    monkeypatch.chdir(tmp_path)
    # A file of the same size in the same second would pass for the one that was compiled before.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(where, text=USERS):
        monkeypatch.delitem(sys.modules, "users_env", raising=False)
        text = text.format(where=where) if text is USERS else text
        (tmp_path / "users_env.py").write_text(text)
        sys.path_importer_cache.pop(str(tmp_path), None)
        return text

    yield write
    sys.modules.pop("users_env", None)


def solved(name):
    """How the command ends that shows the solver's episode."""
    with pytest.raises(SystemExit) as stop:
        command(["environments", name])
    return str(stop.value)


def line_of(text, part):
    """The number of the only line of a text with this part."""
    (number,) = (n for n, line in enumerate(text.splitlines(), 1) if part in line)
    return number


class TestSentences:
    @pytest.mark.parametrize("where, said, part, function", [
        ("import", "ValueError: zzz]0;title", "raise error", "broken"),
        ("act", "ValueError: zzz]0;title", "raise error", "broken"),
        ("library", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 "
         "column 2 (char 1)", "json.loads", "_act")])
    def test_an_exception_of_the_users_code_has_its_line_and_its_traceback(
            self, users, capsys, where, said, part, function):
        """Below the user's line a library may have raised."""
        line = line_of(users(where), part)
        assert solved("users_env:Mine") == f"error: {said} (users_env.py:{line} in {function})."
        printed = capsys.readouterr().err
        assert part in printed and said.partition(":")[0] in printed

    def test_a_refusal_is_one_sentence_also_where_the_users_code_led_to_it(self, users, capsys):
        for where, said in (("budget", "bad budget: max_turns is 0, expected an integer >= 1."),
                            ("option", "unknown option of Mine 'size'. Known: none."),
                            ("server", "no answer")):
            users(where)
            assert solved("users_env:Mine") == f"error: {said}"
            assert capsys.readouterr().err == ""

    def test_a_file_that_python_cannot_read_and_a_module_that_is_missing_are_named(self, users):
        for text, said in (
                ("x = 1\ndef f(:", "invalid syntax (users_env.py, line 2)"),
                ("x = 1\nimport nosuch", "ModuleNotFoundError: No module named 'nosuch' "
                                         "(users_env.py:2 in <module>).")):
            users("", text)
            assert solved("users_env:Mine") == f"error: {said}"
        for name in ("nosuch", "nosuch.deeper"):
            assert solved(f"{name}:Thing") == (
                f"error: env {name}:Thing: there is no module 'nosuch' in the current folder or "
                f"among the installed packages.")

    def test_an_error_of_ours_is_no_refusal_whatever_its_class(self, monkeypatch, capsys):
        monkeypatch.setattr(envs, "REGISTRY", {"bandit": "minragen.envs:SEPARATOR"})
        with pytest.raises(SystemExit, match=r"^error: TypeError: 'str' object is not callable "
                                             r"\(.*envs\.py:\d+ in make\)\.$"):
            command(["play", "bandit"])
        monkeypatch.setattr(commands, "parse_options", lambda options: [].index(1))
        with pytest.raises(SystemExit, match="ValueError: 1 is not in list .*test_faults"):
            command(["play", "bandit"])
        assert capsys.readouterr().err.count("Traceback") == 2

    def test_a_step_over_the_time_limit_has_the_line_that_it_was_in(self, monkeypatch):
        monkeypatch.setattr(limits, "STEP_TIME_LIMIT", 0.1)
        monkeypatch.setattr("toys.Lottery.step", lambda env, answer: time.sleep(9))
        groups = PatientGroups("toys:Lottery", 1, 1)
        groups.reset(0)
        fault = faults.fault_of(groups.step([0], replies(["word"]))[0])
        assert fault.sentence == "TimeoutError: a step took over 0.1 seconds"
        assert "test_faults.py:" in fault.place and fault.place.endswith("in <lambda>")

    def test_a_stored_traceback_is_bounded_and_has_the_innermost_lines(self):
        def deeper(n):
            return shallower(n + 1)

        def shallower(n):
            if n < 200:
                return deeper(n + 1)
            return {}["the last"]

        with pytest.raises(KeyError) as deep:
            deeper(0)
        found = faults.fault_of(deep.value).traceback
        assert '{}["the last"]' in found and len(found) < faults.MOST_CHARACTERS
        assert found.count("File") <= faults.MOST_FRAMES
        with pytest.raises(ValueError) as long:
            raise ValueError("x" * 10**6)
        fault = faults.fault_of(long.value)
        assert len(fault.traceback) == faults.MOST_CHARACTERS and len(str(fault)) < 500

    def test_an_unknown_option_or_value_is_one_sentence_with_the_nearest_name(self, capsys):
        for main, words, said in (
                (evaluation.main, ["--rnu", "a"], "unknown option '--rnu': did you mean '--run'?"),
                (evaluation.main, ["--run", "a", "--split", "foo"], "unknown split 'foo'. Known"),
                (command, ["play", "a", "--seed", "x"], "invalid int value: 'x'"),
                (command, ["reproduce"], "arguments are required: run"),
                (command, ["reprot", "a"], "unknown command 'reprot': did you mean 'report'?")):
            with pytest.raises(SystemExit) as stop:
                main(words)
            printed = capsys.readouterr().err
            assert stop.value.code == 2 and said in printed
            assert printed.startswith("error: ") and printed.count("\n") == 1


class TestConsole:
    PROGRAM = """
import sys
from minragen.look.faults import Console
Console.take_over()
for _ in range(3):
    print(chr(27) + "[31mred" + chr(7) + chr(13), flush=True)
    print("progress" + chr(27) + "[A", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("done")
"""

    def test_a_line_that_cannot_be_printed_is_no_reason_to_stop(self, tmp_path):
        """Where stdout is buffered a flush fails, and where stderr is not a write."""
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        with open("/dev/full", "w") as full:
            ran = subprocess.run([sys.executable, "-c", self.PROGRAM, tmp_path / "end"],
                                 check=False, stdout=full, stderr=full, env=buffered)
        assert ran.returncode == 0 and (tmp_path / "end").read_text() == "done"

    def test_control_codes_of_a_terminal_are_printed_as_question_marks(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["", tmp_path / "end"])
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "utf-8"))
        exec(self.PROGRAM, {})
        said, errors = (stream.buffer.getvalue().decode() for stream in (sys.stdout, sys.stderr))
        assert said == "?[31mred??\n" * 3 and errors == "progress\x1b[A\n" * 3

    def test_what_a_refusal_quotes_has_no_control_codes(self, runs, capsys):
        """Progress bars need them on stderr, where refusals are printed."""
        code = "\x1b[31mred\x1b]0;title\x07\r"
        (runs / "a").mkdir(parents=True)
        (runs / "a" / "config.json").write_text(json.dumps(
            {"env_arg": [f"{code}=x"], "data_files": {code: []}}))
        for refused in (lambda: faults.Parser().error(code),
                        lambda: command(["train", "--run", "a", "--resume"])):
            with pytest.raises(SystemExit) as ended:
                refused()
            said = f"{ended.value}{capsys.readouterr().err}"
            assert "[31mred]0;title" in said and not {"\x1b", "\x07", "\r"} & {*said}
        assert str(faults.fault_of(ValueError(code))) == "[31mred]0;title"

    def test_a_process_that_was_not_forked_prints_through_it_too(self):
        program = ("import sys; from minragen.run.command import process\n"
                   "process(0, lambda: print('\\x1b[2J'))")
        assert subprocess.check_output([sys.executable, "-c", program]) == b"?[2J\n"


class TestErrorsFile:
    SMALL = ("--env users_env:Mine --num-groups 4 --group-size 2 --val-size 2 --max-new-tokens 6 "
             "--max-context 200 --diagnose-every 0 --warmup-steps 2 --run a")

    def test_while_a_run_trains_the_first_traceback_of_each_line_is_kept_and_the_line_is_printed(
            self, users, runs, capsys):
        line = line_of(users("training"), "raise error")
        run(self.SMALL, "--steps", "2")
        place = f"users_env.py:{line} in broken"
        assert (f"are left out: ValueError: zzz]0;title (users_env:Mine, {place}; traceback in "
                f"{runs / 'a' / 'errors.txt'})") in capsys.readouterr().out
        text = (runs / "a" / "errors.txt").read_text()
        assert text.startswith("step 1, train, users_env:Mine: ValueError")
        assert (text.count(f"({place})"), text.count("Traceback")) == (1, 1) and "\x1b" not in text
        run("--run a --resume --steps 3")
        assert (runs / "a" / "errors.txt").read_text() == text

    @pytest.mark.parametrize("where, said", [
        ("note", "ValueError: zzz]0;title (users_env.py:"),
        ("first prompt", "users_env:Mine cannot be reset: ValueError: zzz]0;title (users_env.py:")])
    def test_before_step_0_an_exception_leaves_no_folder(self, users, runs, capsys, where, said):
        users(where)
        assert message(*self.SMALL.split()).startswith(f"error: {said}")
        assert "raise error\nValueError: zzz" in capsys.readouterr().err
        assert not (runs / "a").exists()

    def test_what_ends_a_run_after_step_0_is_in_its_folder(self, users, runs, capsys, monkeypatch):
        users("")
        monkeypatch.setattr(trainer, "train_step", lambda *given: {}["no such key"])
        path = runs / "a" / "errors.txt"
        said = message(*self.SMALL.split())
        assert said.startswith("error: KeyError: 'no such key' (")
        assert said.endswith(f"in <lambda>). The traceback is in {path}.")
        assert "KeyError: 'no such key'" in path.read_text()
        assert "Traceback" not in capsys.readouterr().err
