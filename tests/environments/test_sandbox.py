"""The sandbox: what honest programs may do, and what hostile ones cannot, in both of its kinds.

Every hostile program is after the same secret: the expected output of its test. It stands in a file
that everybody may read, in the judge's environment and memory, and behind a TCP and a Unix socket.
"""

import itertools
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from string import Template
from types import SimpleNamespace

import pytest

from minragen.environments import deepcoder, sandbox
from minragen.environments.sandbox import Case, Monty, Namespaces, WorkerPool, judge, judge_check

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


def start(kind):
    """A pool of sandboxes of this kind."""
    if kind is Namespaces:  # asked without our own code
        probe = ["unshare", "-Urmnpif", "mount", "-t", "tmpfs", "none", "/tmp"]
        if not shutil.which("unshare") or subprocess.run(probe, check=False).returncode:
            pytest.skip("this system does not offer namespaces")
    return WorkerPool(kind)


@pytest.fixture(scope="module", params=[Namespaces, Monty], ids=["namespaces", "monty"])
def pool(request, prey):
    """Of each kind, started when the secret was in the environment."""
    with closing(start(request.param)) as workers:
        yield workers


@pytest.fixture(scope="module")
def spaces(prey):
    with closing(start(Namespaces)) as workers:
        yield workers


@pytest.fixture
def quick(monkeypatch):
    """The clock ends what does nothing but last."""
    monkeypatch.setattr(sandbox, "CLOCK", 0.8)
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


def edit_worker(monkeypatch, folder, old, new):
    """Have sandboxes start a worker whose source reads `new` in place of `old`."""
    source = Path(sandbox.worker.__file__).read_text()
    assert old in source
    (folder / "worker.py").write_text(source.replace(old, new))
    monkeypatch.setattr(sandbox.worker, "__file__", str(folder / "worker.py"))


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

    def test_a_failure_has_a_word_that_the_program_does_not_choose(self, spaces):
        for code, word in {
                "print(": "SyntaxError", "1/0": "ZeroDivisionError", "print(8)": "wrong",
                "class Strange(KeyError): pass\nraise Strange('you passed')": "KeyError",
                "print(7); raise KeyboardInterrupt": "Exception", "print(7); exit(1)": "died",
                "print(7); exit('no')": "died", "print(7, flush=True); os.abort()": "died",
                "os.write(1, b'7'); os._exit(3)": "died", "def f(): f()\nf()": "RecursionError",
                "x = 'a' * 10**10": "MemoryError", "open('/x', 'w')": "OSError"}.items():
            assert words(code, [Case("3\n4\n", "7")], pool=spaces) == [word], code

    def test_an_endless_loop_costs_one_limit_of_cpu_time_or_of_the_clock(self, spaces, monkeypatch):
        """However many tests there are: those after it are not run."""
        cases = [Case("go", "1"), Case("end", "1"), Case("go", "1"), Case("go", "1")]
        spin = ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
                "while True: pass")
        for loop, clock, least in [(spin, 60, .7), ("time.sleep(99)", .3, .3)]:
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
        for body, word in {
                "1/0": "ZeroDivisionError", "[][x]": "IndexError", "{}[x]": "KeyError",
                "int('x')": "ValueError", "f(x)": "RecursionError", "nothing": "NameError",
                "'a' * 10**10": "MemoryError", "None.x": "AttributeError", "f()": "TypeError",
                "'x' * 300_000": "output", "print": "TypeError", "lambda: 0": "TypeError"}.items():
            assert words(f"def f(x): return {body}", [Case([1], 0)], "f", pool) == [word], body
        for code, word in {
                "def f(x:": "SyntaxError", "import numpy": "ModuleNotFoundError",
                "def f(x):\n  while x: pass": "time", "import json\njson.loads('{')": "ValueError",
                "def f(x): raise NotImplementedError('not yet')": "NotImplementedError", "f = 1":
                "TypeError", "g = 1": "NameError", "import math\nmath.nothing": "AttributeError",
                }.items():
            assert words(code, [Case([1], 0)], "f", pool) == [word], code

    def test_arguments_are_copies_and_a_call_that_fails_fails_alone(self, spaces, pool):
        """One process makes all calls. Where it ends, a new one makes that call again, with the
        whole limit."""
        xs = [3, 1, 2]
        cases = [Case([[1]], [1]), Case([xs], [1, 2, 3]), Case([[1]], [1]), Case([xs], [1, 2, 3])]
        code = "def f(x):\n    x.sort()\n    return x if x[1:] else "
        got = words(f"{code}1 / 0", cases, "f", pool)
        assert got == ["ZeroDivisionError", "passed"] * 2 and xs == [3, 1, 2]
        assert words(f"{code}os._exit(0)", cases, "f", spaces) == ["died", "passed"] * 2
        late = "calls = []\ndef f(x):\n    calls.append(x)\n    while calls[2:]: pass\n    return x"
        assert words(late, 4 * SEVEN, "f", spaces) == 4 * ["passed"]

    def test_chance_and_the_order_of_a_set_are_the_same_in_every_process(self, pool):
        code = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd', 'e'})]"
        with closing(WorkerPool(pool.kind)) as another:
            [one], [other] = (judge(code, [Case([], 0)], "f", pool=p) for p in (pool, another))
        assert one == other and sorted(json.loads(one.value)[1]) == list("abcde")

    def test_plain_values_survive_the_wire_with_their_types_and_nothing_else_does(self):
        for value in [None, True, 10**30, -0.5, float("inf"), "\u4e2d\0",
                      {"a": {3: (2.0,)}, (1, 2): []}, {1, 2}]:
            back = sandbox.decode(json.loads(json.dumps(sandbox.encode(value))))
            assert back == value and repr(back) == repr(value)
        for message in [{}, {"a": 1, "b": 2}, {"x": []}, {"set": [[]]}, {"dict": [1]},
                        {"set": list(range(2000))}]:
            with pytest.raises((ValueError, TypeError, KeyError)):
                sandbox.decode(message)


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

    def test_all_solutions_of_humaneval_and_of_generated_problems_pass(self):
        problems, passed = deepcoder.load_programs("humaneval"), 0
        for problem in problems:
            held, total, _ = judge_check(problem.solution, problem.name, problem.check,
                                         pool=self.POOL)
            passed += held == total > 0
        assert passed == len(problems) == 164
        for seed in range(30):
            env = deepcoder.DeepCoder()
            env.reset(seed=seed)
            [code] = env.solve()
            name, cases = env.problem.name, env.problem.hidden
            assert words(code, cases, name, self.POOL) == len(cases) * ["passed"], code

    def test_without_namespaces_programs_are_refused_and_the_backend_says_why(
            self, monkeypatch, tmp_path):
        """A worker that finds no unshare() makes a pool choose Monty."""
        with closing(WorkerPool()) as pool:
            edit_worker(monkeypatch, tmp_path, "call(LIBC.unshare, NEWUSER |",
                        "call(LIBC.setns, -1, NEWUSER |")  # Bad file descriptor
            monkeypatch.setattr(sandbox, "SUBMISSIONS", pool)
            backend = deepcoder.DeepCoder().backend
            assert backend.startswith("pydantic-monty 1.") and "(no namespaces: " in backend
            assert backend.endswith("Bad file descriptor)") and pool.kind is Monty
            file = tmp_path / "x.jsonl"
            file.write_text('{"question": "x", "tests": {"inputs": ["1"], "outputs": ["1"]}}')
            with pytest.raises(ValueError, match="standard input: got pydantic-monty .*sysctl"):
                deepcoder.DeepCoder(data=str(file))


class TestComparison:
    def test_values_are_compared_within_a_tolerance_where_a_float_is_expected(self):
        equal = [
            (1, 1.0), (True, 1), (0.1 + 0.2, 0.3), (1e9 + 1e-3, 1e9), ((1, [2]), [1, (2,)]),
            ({1: "a"}, {"1": "a"}), (1e-10, 0.0), (float("inf"), float("inf"))]
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
                 ("1e3", "1000.0"), ("a\r\nb", "a\nb"), ("-.5", "-0.5")]
        unequal = [("1\n2", "1 2"), ("12", "1 2"), ("007", "7"), ("yes", "YES"), ("nan", "1.0"),
                   ("1e999", "2e999"), ("0.34", "0.33"), ("7 7", "7"), ("123456700.0", "123456789"),
                   ("1_000.0", "1000"), ("\u0663.0", "3"), ("1." + "0" * 400, "1.0")]
        for got, want in equal + unequal:
            assert sandbox.same_output(got, want) == ((got, want) in equal), (got, want)

    def test_no_answer_of_a_megabyte_occupies_the_trainer_for_a_tenth_of_a_second(self):
        """The judge holds its interpreter lock; 0.25 and three tries leave room for a busy core and
        a garbage collection."""
        collide = [i * (2**61 - 1) for i in range(2_500)]  # equal hashes; 55 KB
        answers = [{"set": collide}, 5 * [{"set": collide[:512]}], 15_000 * [[]],
                   {"dict": [{"tuple": [i, 0]} for i in collide[:1400]]}, 4_000 * [{"set": [1]}]]
        texts = [*map(json.dumps, answers), "[" * (1 << 20), "9" * (1 << 20), "a " * (1 << 19),
                 f"[{','.join(200 * ['9' * 4299])}]", "\n" * (1 << 20) + "a",
                 "0." + "3" * (1 << 20)]
        assert all(len(text) < sandbox.VALUE_BYTES for text in texts[:len(answers)])
        for text in texts:
            value = text[:sandbox.VALUE_BYTES]  # a longer one is not even read
            for given, want in [("", "1 2\n3"), ([], [1]), ([], {"a": 1}), (None, None)]:
                seconds = []
                while len(seconds) < 3 and min(seconds, default=1) >= 0.25:
                    began = time.thread_time()
                    if given is None:  # what a test program gets from its candidate
                        with suppress(ValueError, TypeError, RecursionError):
                            sandbox.decode(json.loads(value))
                    else:
                        answer = sandbox.Result("value", value if given == [] else text)
                        assert sandbox.compare(answer, Case(given, want)).word == "wrong", text[:99]
                    seconds.append(time.thread_time() - began)
                assert min(seconds) < 0.25, text[:99]


class TestCheck:
    CHECK = ("def check(candidate):\n    assert True\n    assert candidate(2, 1) == 3\n"
             "    for i in range(3):\n        assert candidate(i, b=i) == 2 * i, 'told'\n"
             "    x = candidate('a', 'b')\n    assert x == 'ab' and isinstance(x, str)\n"
             "    assert candidate((1,), (2,)) == (1, 2)\n")
    PLUS = "def f(a, b): return a + b"

    def test_assertions_that_depend_on_a_call_are_counted(self, pool, spaces):
        """A call that raises outside of an assertion ends the check: one failure more."""
        for code, counts in {
                self.PLUS: (6, 6), "def f(a, b): return 3": (1, 6), "f = 7": (0, 5),
                "def f(a, b): return None if a == 2 else a + b": (4, 6)}.items():
            assert judge_check(code, "f", self.CHECK, 1, pool)[:2] == counts, code
        for check in ("def check(c): raise KeyError", "x = 1",
                      "def check(c):\n    assert c(1, 2) == 3\n    c(1, 2)"):
            passed, total, _ = judge_check(self.PLUS, "f", check, 1, pool)
            assert passed < total, check
        yes = "class Yes(str): __eq__ = lambda s, o: True\ndef f(a, b): return Yes()"
        assert judge_check(yes, "f", self.CHECK, 1, spaces)[:2] == (0, 6)
        assert judge_check("def f(a, b): os._exit(0)", "f", self.CHECK, 1, spaces)[:2] == (0, 5)

    def test_what_would_last_forever_costs_one_limit(self, monkeypatch, pool, quick):
        """A loop in the submission, or a value that makes the test code itself run forever."""
        began = time.monotonic()
        loop = "def f(a, b):\n    while 1: pass"
        assert judge_check(loop, "f", self.CHECK, 1, pool)[:2] == (0, 5)
        assert time.monotonic() - began < 2
        monkeypatch.setattr(sandbox, "CHECK_SECONDS", 0.5)
        for line in ("for i in range(c()): pass", "x = [0] * c()", "x = 'x' * (c() // 10**9)"):
            check = f"def check(c):\n    {line}\n    assert c() == 3"
            assert judge_check("def f(): return 10**18", "f", check, 1, pool)[:2] == (0, 1)


# The first lines of every program; `tell` prints the secret if a text holds it.
SETUP = ("import ctypes, os, re, socket, sys, threading, time\n"
         "libc = ctypes.CDLL(None, use_errno=True)\n"
         "def tell(text):\n    found = re.search('secret-[0-9a-f]{16}', str(text))\n"
         "    if found: sys.exit(print(found[0]))\n")
SEARCH = ("import gc\nf = sys._getframe()\nwhile f:\n    tell(f.f_locals)\n    tell(f.f_globals)\n"
          "    f = f.f_back\nfor o in gc.get_objects():\n    try: tell(o)\n    except Exception: 0")
DAEMON = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)"
HOSTILE = {
    "forging verdicts": [
        "import json\nsys.__stdout__.write(json.dumps({'passed': 2, 'total': 2}))\n"
        "sys.__stdout__.flush()\nos._exit(0)",  # full marks from RAGEN's grader
        "for fd in range(256):\n  for t in (b'\\0\\0\\0\\x19{\"status\": 0, \"cpu\": 0.0 }', "
        "b'{\"value\": 1}\\n' * 9):\n    try: os.write(fd, t)\n    except OSError: pass",
        "f = sys._getframe()\nwhile f:\n    for n in list(f.f_globals):\n"
        "        if callable(f.f_globals[n]) and n[:1] != '_': f.f_globals[n] = lambda *a, **k: 0\n"
        "    f = f.f_back",
    ],
    "reading the secret": [
        "print(open('$FILE').read())", "print(os.environ['MINRAGEN_TEST_SECRET'])",
        "os.symlink('$FILE', 'a')\nprint(open('a').read())", "os.system('cat $FILE')",
        "os.link('$FILE', 'b')\nprint(open('b').read())",
        "print(socket.create_connection(('127.0.0.1', $PORT), 1).recv(99).decode())",
        "s = socket.socket(socket.AF_UNIX)\ns.connect('\\0$TOKEN')\nprint(s.recv(99).decode())",
    ],
    "reaching beyond its process": [
        SEARCH, "for p in (os.getppid(), $JUDGE): libc.ptrace(16, p, 0, 0)",
        "for p in ('self', os.getppid(), $JUDGE, 1):\n  try:\n"
        "    for line in open(f'/proc/{p}/maps'):\n      m = open(f'/proc/{p}/mem', 'rb')\n"
        "      a, b = (int(x, 16) for x in line.split()[0].split('-'))\n      m.seek(a)\n"
        "      tell(m.read(b - a))\n  except Exception: pass",
        "import resource\nfor p in ($JUDGE, os.getppid()): resource.prlimit(p, 0, (0, 0))",
        "os.kill(os.getppid(), 9)", "os.kill($JUDGE, 9)", "os.kill(-1, 9)",
        "os.setuid(0)\nprint(open('$FILE').read())", DAEMON, "for _ in range(99): os.fork()",
        "for call, *a in ((56, 17, 0, 0, 0, 0), (57,), (58,), (435, bytes(88), 88)):\n"
        "    if libc.syscall(call, *a) == 0: time.sleep(60)",
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ],
    "using things up": [
        "x = []\nwhile True: x.append(bytearray(1 << 24))", "while True: print('x' * 65536)",
        "for i in range(40): open(f'f{i}', 'wb').write(bytes(1 << 20))", "ctypes.string_at(0)",
        "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    ],
    "leaving things behind": [
        "for d in (os.path.expanduser('~'), '/tmp', '/var/tmp', '/dev/shm', '..', '$FOLDER'):\n"
        "    try: open(d + '/$TOKEN', 'w').write('x')\n    except OSError: pass",
        "for i in range(600):\n    os.mkdir('dddddddd')\n    os.chdir('dddddddd')",
        "for i, a in enumerate(('$FOLDER', '/', '3', '..')): os.symlink(a, str(i))",
        "os.closerange(0, 256)",
        "os.mkdir('e', 0)", "os.chmod('$FOLDER', 0)", "os.utime('$FILE', (0, 0))",
        "os.remove('$FILE')", "os.rename('$FILE', 'mine')", "open('$FILE', 'w').write('gone')",
    ],
    "lasting forever": [
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "import resource\ntry: resource.setrlimit(0, (-1, -1))\nfinally:\n    while True: pass",
        "os.close(1)\nwhile True: pass", "threading.Thread(target=time.sleep, args=(60,)).start()",
        "import atexit\n@atexit.register\ndef f():\n    while True: pass", "sum(range(10**14))",
    ],
    "answering for f(x)": [
        "class Yes:\n    __eq__ = __bool__ = lambda *a: True\ndef f(x): return Yes()",
        "class Yes(str): __eq__ = lambda *a: True\ndef f(x): return Yes('x')",
        "def f(x):\n    for _ in range(99999): x = [x]\n    return x",
        "os.write(3, b'=\"passed\"\\xff' * 9)\ndef f(x): return x",
        "def f(x): os.write(3, b'=' + b'[' * 9999 + b'\\xff')", "def f(x): return 'x' * 3_000_000",
        "def f(x): os.write(3, b'!passed\\xff')", "def f(x): os.write(3, b'\\xff=\\xff!\\xff')",
        "def f(x): return {i * (2**61 - 1) for i in range(5000)}  # keys that collide",
        "m = sys._getframe(1).f_globals\nm['encode'] = lambda v: 'passed'\ndef f(x): return 0",
        "def f(x): return os.pread(3, 999, 0).decode()",
    ],
    "programs for an interpreter": [
        "open('$FILE').read()", "__import__('os')", "import os\nprint(os.environ['PATH'])",
        "import os\nprint(os.listdir('$FOLDER'))",
        "import pathlib\npathlib.Path('$FILE').read_text()",
        "open('$FOLDER/$TOKEN', 'w').write('x')", "import asyncio\nasyncio.open_connection('a', 1)",
        "print(().__class__.__base__.__subclasses__())",
        "print(ask, answer, names, candidate, held)",
        "exec('print(secret)')", "eval('names')", "x = 10**10**8", "x = [0]\nwhile True: x += x",
        "import re\nre.match('(a*)*(a|b)*$$', 'a' * 99 + 'c')", "x = 'a' * 10**8\nwhile x: x += x",
        "raise ValueError('x' * 10**8)", "while True: print('x' * 65536)", "def f(x): return f(x)",
        "def f(x):\n    for _ in range(99999): x = [x]\n    return x", "sorted(range(10**9))",
        "def f(x):\n    x = []\n    x.append(x)\n    return x", "'{:>999999999}'.format(1)",
        "def f(x): return {i * (2**61 - 1) for i in range(5000)}", "'%999999999d' % 1",
        "class Yes:\n    def __eq__(self, o): return True\ndef f(x): return Yes()",
        "class S:\n    def __str__(self): return '=' + 9**9 * 'x'\ndef f(x): return S()",
        "import json\njson.dumps = None", "import random\nrandom.seed(1)\nprint(random.random())",
        "try:\n    while True: pass\nexcept BaseException:\n    while True: pass",
        "'a,' * 10**8\nimport json\njson.loads('[' * 10**7)", "sum([[]] * 10**7, [])",
    ],
}
MORE = Path(__file__).with_name("hostile.txt").read_text()
HOSTILE["others"] = re.split("(?m)^# ----.*\n", MORE)[1:]
# In Monty a program is a function, which returns what the program says.
SAY = "import os, re, sys, time\nsaid = []\ndef print(*a, **k): said.extend(a)\n"


class TestHostilePrograms:
    @pytest.mark.parametrize("aim", HOSTILE)
    def test_none_gets_the_secret_or_harms_or_leaves_anything(self, pool, prey, aim, quick):
        assert words(ECHO, SEVEN, "f", pool) == ["passed"]
        before = processes(OURS)
        for code in HOSTILE[aim]:
            full, name = f"{SETUP}{code}", "f" if "def f(" in code else ""
            if pool.kind is Monty:
                full = f"{SAY}{code}" + ("" if name else "\ndef f(x): return said[0]")
                name = "f"
            case = Case([1], prey.secret) if name else Case("1\n", prey.secret)
            began = time.process_time()
            results = judge(prey.fill(full), 2 * [case], name, 1, pool)
            assert time.process_time() - began < 0.5, code  # of the trainer's own
            assert not any(r.word == "passed" or prey.secret in r.value for r in results), code
            assert not processes(prey.token) and self.changes(prey) == [], code
            assert words(ECHO, SEVEN, "f", pool) == ["passed"], code
            assert processes(OURS) == before, code  # it is still the same sandbox

    def changes(self, prey):
        """What is not as it was among the files that a program could write, move or close."""
        places = ("/tmp", "/var/tmp", "/dev/shm", "/", os.path.expanduser("~"), prey.folder, ".")
        left = [str(place) for place in places if os.path.exists(f"{place}/{prey.token}")]
        file = prey.folder / "tests.json"
        now = prey.folder.stat().st_mode & 0o777, file.read_text(), file.stat().st_mtime > 9
        return left + ["the file"] * (now != (0o755, prey.secret, True))

    def test_without_isolation_the_same_programs_do_get_the_secret(self, prey, tmp_path, spaces):
        """So that the test above can fail. A program also finds whatever its worker is told."""
        for code in HOSTILE["reading the secret"]:
            done = subprocess.run([sys.executable, "-c", prey.fill(SETUP + code)], cwd=tmp_path,
                                  text=True, capture_output=True, check=False)
            assert done.stdout.strip() == prey.secret, code
        told = f"{prey.fill(SETUP + SEARCH)}\n# {prey.secret}"
        assert words(told, [Case("", prey.secret)], pool=spaces) == ["passed"]

    def test_what_namespaces_do_not_hold_is_refused(self, spaces):
        """By names in libc. With these arguments the kernel's own answer is another."""
        code = ("for name in 'fork vfork unshare socket shmget semget msgget'.split():\n"
                "    if getattr(libc, name)(-1, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:\n"
                "        print(name)\n"
                "keys = (248, 249, 250) if os.uname().machine == 'x86_64' else (217, 218, 219)\n"
                "for number in (425, *keys):\n"
                "    if libc.syscall(number, -1, 0, 0, 0) != -1 or ctypes.get_errno() != 1:\n"
                "        print(number)\n"
                "for path in (os.__file__, '/x', '/etc/passwd', '/proc/self/maps', '/dev/null'):\n"
                "    try: print(path, open(path, 'a'))\n    except OSError: pass\n"
                "site = os.path.dirname(os.__file__) + '/site-packages'\n"  # Debian has none
                "print(*os.listdir(site) if os.path.exists(site) else ())")
        [result] = judge(SETUP + code, [Case("", "")], pool=spaces)
        assert result == ("passed", "\n")


class TestWorkers:
    def test_checks_at_the_same_time_do_not_wait_for_each_other_and_closing_ends_all(self):
        before, counts = processes(OURS), []
        with closing(start(Namespaces)) as pool:
            def check():
                counts.append(judge_check(TestCheck.PLUS, "f", TestCheck.CHECK, 1, pool)[:2])

            threads = [threading.Thread(target=check, daemon=True) for _ in range(4)]
            for step in (threading.Thread.start, lambda thread: thread.join(20)):
                list(map(step, threads))
            assert counts == 4 * [(6, 6)] and processes(OURS) - before
        assert gone(before)

    def test_one_that_was_killed_is_an_error_once_and_then_replaced(self):
        before = processes(OURS)
        with closing(start(Namespaces)) as pool:
            assert words(ECHO, SEVEN, "f", pool) == ["passed"]
            for check in (False, True):
                [worker] = processes(OURS) - before
                os.kill(worker, 9)
                assert gone(before)
                with pytest.raises(RuntimeError, match="the sandbox"):
                    judge_check("f = max", "f", TestCheck.CHECK, 1, pool) if check else words(
                        ECHO, SEVEN, "f", pool)
                assert words(ECHO, SEVEN, "f", pool) == ["passed"]
        with closing(WorkerPool(Monty)) as pool:
            assert words(ECHO, SEVEN, "f", pool) == ["passed"]
            with pool.free.queue[-1].pool.checkout() as session:
                os.kill(session.worker_pid, 9)
            time.sleep(0.1)
            assert words(ECHO, SEVEN, "f", pool) == ["passed"]

    def test_all_tests_of_a_submission_have_one_more_limit_together(self, monkeypatch, spaces):
        monkeypatch.setattr(sandbox, "TOTAL_SECONDS", 0.5)
        got = words("import time\ndef f(x): time.sleep(.2); return x", 20 * SEVEN, "f", spaces)
        assert got[0] == "passed" and got[-1] == "skipped" and "time" in got

    def test_the_kernels_kill_is_an_error_only_where_the_machines_memory_was_used_up(
            self, monkeypatch):
        """A program can have itself killed by its limit of CPU time."""
        code = "import resource\nresource.setrlimit(0, (0, 0))\nwhile True: pass"
        with closing(start(Namespaces)) as pool:
            assert words(code, [Case("", "")], pool=pool) == ["time"]
            monkeypatch.setattr(sandbox, "oom_kills", itertools.count().__next__)
            with pytest.raises(RuntimeError, match="out of memory"):
                words(code, [Case("", "")], pool=pool)

    def test_a_fork_of_the_judge_has_workers_of_its_own_that_die_with_it(self, spaces):
        """With those of its parent, two processes would read each other's answers."""
        assert words(ECHO, SEVEN, "f") == ["passed"]
        if (pid := os.fork()) == 0:
            try:
                own = not any(sandbox.SUBMISSIONS.free.queue)
                passed = own and words(ECHO, SEVEN, "f") == ["passed"]
                threading.Timer(0.5, os.kill, (os.getpid(), 9 if passed else 15)).start()
                words("import time\ntime.sleep(60)", [Case("", "")])
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 9 and words(ECHO, SEVEN, "f") == ["passed"]
        assert gone(set(), f"judge={pid}\0")
