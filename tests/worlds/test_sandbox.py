"""The sandbox: what honest programs may do, and what hostile ones cannot.

Every hostile program is after the same thing: to output a secret that stands in the expected output
of its test, in a file that everybody may read, in the judge's environment and memory, and behind
a TCP and a Unix socket. One that got through any wall would pass.
"""

import ctypes
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import tools
from minragen import warden as inside
from minragen.tools import Case, Limits, judge, judge_check, same_output, same_value

LIMITS = Limits(cpu=1)
QUICK = Limits(cpu=1, memory=192, patience=0.8)  # the clock ends what does nothing but last


def available():
    """The isolations that this system offers."""
    found = []
    for name in ("namespaces", "plain"):
        wardens = tools.Wardens(name, 1)
        try:
            layers = wardens.layers
        except RuntimeError:
            continue
        wardens.close()
        if name == "namespaces" or {"landlock", "seccomp"} <= set(layers):
            found.append(name)
    return found


AVAILABLE = available()


@pytest.fixture(scope="module", params=["namespaces", "plain"])
def wardens(request):
    if request.param not in AVAILABLE:
        pytest.skip(f"this system does not offer {request.param}")
    pool = tools.Wardens(request.param, 1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ours():
    pool = tools.Wardens("auto", 2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def referees():
    pool = tools.Wardens("auto", 1)
    yield pool
    pool.close()


def words(code, cases, name="", wardens=None, limits=LIMITS):
    return [r.word for r in judge(code, cases, name, limits, wardens)]


def processes():
    """Ids of all processes that were forked from a warden of this judge, wherever they went."""
    found, mark = [], f'"judge": {os.getpid()}}}'.encode()
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdigit():
            try:
                # A zombie has no command line any more and no harm in it.
                if mark in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


class TestPrograms:
    """Standard input to standard output."""

    HONEST = {
        "input": "print(int(input()) + int(input()))",
        "stdin_read": "import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)",
        "stdin_buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "open_0": "print(sum(map(int, open(0).read().split())))",
        "open_0_lines": "print(sum(map(int, open(0))))",
        "os_read": "import os\nprint(sum(map(int, os.read(0, 99).split())))",
        "stdin_iteration": "import sys\nprint(sum(int(line) for line in sys.stdin))",
        "stdout_write": "import sys\na, b = sys.stdin\nsys.stdout.write(str(int(a) + int(b)))",
        "buffer_write": "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin)))",
        "main_guard": "if __name__ == '__main__':\n    print(int(input()) + int(input()))",
        "exit": "print(int(input()) + int(input()))\nexit()",
        "sys_exit": "import sys\nprint(int(input()) + int(input()))\nsys.exit(0)",
        "quit": "print(int(input()) + int(input()))\nquit(0)\nprint('more')",
        "atexit": "import atexit, os\nn = int(input()) + int(input())\n"
                  "atexit.register(lambda: os.write(1, str(n).encode()))",
        "deep_recursion": "import sys\nsys.setrecursionlimit(10**6)\n"
                          "def f(n): return n and 1 + f(n - 1)\n"
                          "print(f(50_000) - 50_000 + int(input()) + int(input()))",
        "thread_with_a_large_stack":
            "import sys, threading\nthreading.stack_size(64 << 20)\nsys.setrecursionlimit(10**6)\n"
            "def main(): print(int(input()) + int(input()))\n"
            "threading.Thread(target=main).start()",
        "own_file": "open('a', 'w').write(input())\nprint(int(open('a').read()) + int(input()))",
        "devnull": "import os, sys\nsys.stderr = open(os.devnull, 'w')\n"
                   "print(int(input()) + int(input()))",
        "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
                     "print(A(int(input())).x + int(input()))",
        "imports": "import queue, decimal, fractions, cmath, bisect, array, asyncio, typing\n"
                   "print(int(input()) + int(input()))",
        "unicode": "# \u4e2d\u6587\nprint(int(input()) + int(input()))",
        "float": "print(f'{int(input()) + int(input()):.3f}')",
    }

    @pytest.mark.parametrize("name", HONEST)
    def test_an_honest_program_passes(self, wardens, name):
        assert words(self.HONEST[name], [Case("3\n4\n", "7")], wardens=wardens) == ["passed"]

    def test_every_test_starts_afresh(self, ours):
        """Neither a file nor a variable of the run before is there."""
        code = ("import os\nprint(input(), os.listdir())\nopen('left', 'w').write('x')")
        assert words(code, [Case("1", "1 []"), Case("2", "2 []")], wardens=ours) == 2 * ["passed"]

    @pytest.mark.parametrize("code, word", {
        "print(": "SyntaxError", "1/0": "ZeroDivisionError", "print(unknown)": "NameError",
        "class Strange(KeyError): pass\nraise Strange('you passed')": "KeyError",
        "print(7); raise KeyboardInterrupt": "Exception",
        "import os; print(7); os._exit(3)": "died",
        "print(7); exit(1)": "died", "print(8)": "wrong", "": "wrong", "print(7)\0": "SyntaxError",
        "input(); input(); input()": "EOFError", "print('\ud800')": "UnicodeEncodeError",
        "def f(): f()\nf()": "RecursionError", "x = 'a' * 10**10": "MemoryError",
    }.items())
    def test_a_failure_has_a_word_that_the_program_does_not_choose(self, ours, code, word):
        expected = {word} | ({"ValueError"} if "\0" in code else set())
        assert set(words(code, [Case("3\n4\n", "7")], wardens=ours)) <= expected

    def test_after_the_first_time_out_no_more_tests_are_run(self, ours):
        started = time.monotonic()
        got = words("x = input()\nwhile x == 'loop': pass\nprint(1)",
                    [Case("go", "1"), Case("loop", "1")] + 20 * [Case("go", "1")], "", ours,
                    QUICK)
        assert got == ["passed", "time"] + 20 * ["skipped"]
        assert time.monotonic() - started < 5

    def test_the_limit_is_one_of_cpu_time_and_of_each_test(self, ours):
        """Three calls of 0.45 seconds under a limit of one second, in one process as far as it
        goes."""
        code = ("def f(x):\n    import time\n    end = time.process_time() + .45\n"
                "    while time.process_time() < end: pass\n    return x")
        assert words(code, 3 * [Case([1], 1)], "f", ours) == 3 * ["passed"]

    def test_a_program_that_waits_is_ended_by_the_clock(self, ours):
        started = time.monotonic()
        limits = Limits(cpu=1, patience=0.3)
        assert words("import time\ntime.sleep(99)", [Case("", "")], "", ours, limits) == ["time"]
        assert time.monotonic() - started < 2

    def test_megabytes_of_input_that_nobody_reads_block_nobody(self, ours):
        assert words("print(7)", [Case("x" * 3_000_000, "7")], wardens=ours) == ["passed"]

    def test_megabytes_of_input_and_output_at_the_same_time_do_not_lock(self, ours):
        code = "import sys\nfor line in sys.stdin: sys.stdout.write(line)"
        text = "y" * 99 + "\n"
        assert words(code, [Case(text * 9000, text * 9000)], wardens=ours) == ["passed"]


class TestFunctions:
    def test_a_function_is_called_with_values_and_returns_one(self, wardens):
        cases = [Case([1, 2.5], 3.5), Case(["a", "b"], "ab"), Case([[1], [None]], [1, None])]
        code = "def f(a, b): print('noise'); return a + b"
        assert words(code, cases, "f", wardens) == 3 * ["passed"]

    def test_a_method_of_solution_is_found(self, ours):
        """As in LeetCode's starters, whose names of `typing` need no import."""
        code = "class Solution:\n    def two(self, n: List[int]) -> Optional[int]: return n[0] * 2"
        assert words(code, [Case([[4]], 8)], "two", ours) == ["passed"]

    def test_an_argument_that_was_changed_is_not_the_judges(self, ours):
        xs = [3, 1, 2]
        assert words("def f(xs):\n    xs.sort()\n    return xs", [Case([xs], [1, 2, 3])], "f",
                     ours) == ["passed"]
        assert xs == [3, 1, 2]

    def test_a_call_that_dies_fails_alone(self, ours):
        code = "import os\ndef f(x): return x if x % 2 else os._exit(0)"
        assert words(code, [Case([i], i) for i in range(5)], "f", ours) == [
            "died", "passed", "died", "passed", "died"]

    def test_a_missing_function_is_a_name_error(self, ours):
        assert words("g = 1", [Case([1], 1)], "f", ours) == ["NameError"]

    def test_the_order_of_a_set_is_the_same_in_every_process(self):
        code = "def f(): return list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
        told = []
        for _ in "12":
            pool = tools.Wardens("auto", 1)
            told.append(judge(code, [Case([], 0)], "f", QUICK, pool)[0].value)
            pool.close()
        assert told[0] == told[1] and sorted(told[0]) == list("abcdefg")

    plain = st.recursive(
        st.none() | st.booleans() | st.integers(-10**30, 10**30) | st.floats(allow_nan=False)
        | st.text(max_size=8) | st.binary(max_size=5) | st.complex_numbers(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.sets(st.integers(), max_size=3) | st.frozensets(st.text(max_size=3), max_size=3))

    @settings(max_examples=50, deadline=None)
    @given(plain)
    def test_values_survive_the_wire_with_their_types(self, value):
        back = inside.decode(json.loads(json.dumps(inside.encode(value))))
        assert repr(back) == repr(value) or back == value
        assert type(back) is type(value)

    @settings(max_examples=60, deadline=None)
    @given(st.recursive(st.none() | st.integers() | st.text(max_size=9) | st.just(10**400),
                        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                            st.sampled_from(["tuple", "set", "dict", "bytes", "complex", "x"]),
                            inner, max_size=2)))
    def test_no_message_of_a_child_breaks_the_decoder(self, message):
        """Well-formed JSON gives a value or one of the errors that the judge expects."""
        with suppress(ValueError, TypeError, KeyError, OverflowError):
            inside.decode(message)


class TestEquality:
    """By value, within a tolerance between floats."""

    @pytest.mark.parametrize("got, want", [
        (1, 1.0), (True, 1), (0.1 + 0.2, 0.3), (1e9 + 1e-3, 1e9), ((1, [2]), [1, (2,)]),
        ({1: "a"}, {"1": "a"}), (None, None), ("a b", "a b"), ({1, 2}, {2, 1}), ([], ()),
        (float("inf"), float("inf")), (10**400, 10**400)])
    def test_equal(self, got, want):
        assert same_value(got, want)

    @pytest.mark.parametrize("got, want", [
        ("1", 1), (1, "1"), (0.3001, 0.3), ([1, 2], [1]), ([1], [1, 2]), ([1, 2], [2, 1]),
        (None, 0.0), (None, []), ("", []), ({}, []), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}),
        (float("nan"), 1.0), (float("nan"), float("nan")), (10**400, 1.5), (10**15 + 1, 10**15),
        (float("inf"), 1e308), ("Abc", "abc"), ([[]], [[[]]]), (1e9 - 493.0, 10**9 + 7)])
    def test_different(self, got, want):
        assert not same_value(got, want)

    @pytest.mark.parametrize("got, want", [
        ("7\n", "7"), (" 1   2 \n", "1 2"), ("1.0", "1"), ("0.333333333", "0.3333333334"),
        ("1e3", "1000.0"), ("a\r\nb", "a\nb"), ("", "\n")])
    def test_equal_as_output(self, got, want):
        assert same_output(got, want)

    @pytest.mark.parametrize("got, want", [
        ("1\n2", "1 2"), ("12", "1 2"), ("007", "7"), ("yes", "YES"), ("", "0"), ("nan", "1.0"),
        ("inf", "1e999"), ("1e999", "5.0"), ("0.34", "0.33"),
        ("123456700.0", "123456789"), ("1e9", "1000000007"), ("1_000.0", "1000"), ("٣.0", "3"),
        ("7 7", "7"), ("passed", "7")])
    def test_different_as_output(self, got, want):
        assert not same_output(got, want)

    def test_a_value_in_a_list_of_one_counts_only_where_the_data_writes_it_so(self, ours):
        assert words("def f(): return 5", [Case([], [5], either=True), Case([], [5])], "f",
                     ours) == ["passed", "wrong"]


class TestCheck:
    """A data set's own `check(candidate)`, run away from the submission."""

    CHECK = ("def check(candidate):\n    assert True, 'says nothing'\n"
             "    assert candidate(2, 1) == 3\n    for i in range(3):\n"
             "        assert candidate(i, b=i) == 2 * i, 'told'\n    x = candidate('a', 'b')\n"
             "    assert x == 'ab' and isinstance(x, str)\n"
             "    assert abs(candidate(.1, .2) - .3) < 1e-6\n"
             "    assert candidate((1,), (2,)) == (1, 2)\n")

    @pytest.mark.parametrize("code, passed", [
        ("def f(a, b): return a + b", 7), ("def f(a, b): return 3", 1),
        ("def f(a, b): return 1 / 0", 0), ("def f(a, b): return None if a == 2 else a + b", 5),
        ("import os\ndef f(a, b): os._exit(0)", 0), ("f = 7", 0),
        ("def f(a, b):\n    class Yes(str):\n        __eq__ = lambda s, o: True\n"
         "        __add__ = __sub__ = __abs__ = __lt__ = lambda *a: True\n    return Yes()", 0)])
    def test_assertions_that_depend_on_a_call_are_counted(self, ours, referees, code, passed):
        """A call that raises outside of an assertion ends the check: one failure, and no more to
        count."""
        total = 5 if passed == 0 and "Yes" not in code else 7
        assert judge_check(code, "f", self.CHECK, QUICK, ours, referees) == (passed, total)

    def test_an_endless_loop_costs_one_limit_however_often_it_is_called(self, ours, referees):
        started = time.monotonic()
        assert judge_check("def f(a, b):\n    while 1: pass", "f", self.CHECK, QUICK, ours,
                           referees) == (0, 5)
        assert time.monotonic() - started < 4

    def test_a_check_that_breaks_is_not_passed(self, ours, referees):
        for check in ("def check(c): raise KeyError", "def check(c): c(1, 2).unknown", "x = 1",
                      "def check(c): import os; os._exit(0)"):
            passed, total = judge_check("def f(a, b): return a", "f", check, QUICK, ours,
                                        referees)
            assert passed < total

    def test_values_that_would_occupy_the_check_are_cut_off(self, ours, referees, monkeypatch):
        """A submission may return what makes the test code itself run forever."""
        monkeypatch.setattr(tools, "CHECK_SECONDS", 1)
        check = "def check(c):\n    for i in range(c()): pass\n    assert c() == 3"
        assert judge_check("def f(): return 10**18", "f", check, QUICK, ours, referees) == (0, 1)


# Programs between an input and an output. @FILE@, @FOLDER@, @PORT@, @UNIX@, @JUDGE@ and @TOKEN@ are
# filled in; the secret looks like secret-0123456789abcdef.
HUNT = ("import re\ndef tell(text):\n    found = re.findall(r'secret-[0-9a-f]{16}', str(text))\n"
        "    if found: print(found[0])\n")
HOSTILE = {
    # forged verdicts
    "prints_a_verdict": "print('{\"passed\": true, \"word\": \"passed\"}')",
    "prints_every_verdict": "for w in ('passed', 'success', 'True', 'OK', '1'): print(w)",
    "writes_a_result_and_leaves": "import os, json, sys\nsys.__stdout__.write(json.dumps([True, "
                                  "'', 1, 1]))\nsys.__stdout__.flush()\nos._exit(0)",
    "leaves_at_once": "import os\nos._exit(0)",
    "exits": "raise SystemExit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "forges_frames_on_every_descriptor":
        "import os, struct\nm = b'{\"status\": 0, \"cpu\": 0}'\nfor fd in range(256):\n"
        "    try: os.write(fd, struct.pack('!I', len(m)) + m)\n    except OSError: pass",
    "forges_answers_on_every_descriptor":
        "import os\nfor fd in range(256):\n    try: os.write(fd, b'{\"value\": 1}\\n' * 9)\n"
        "    except OSError: pass",
    "patches_builtins": "import builtins\nbuiltins.print = builtins.len = builtins.isinstance = "
                        "builtins.open = builtins.repr = lambda *a, **k: True",
    "patches_comparison": "import json, math\njson.loads = json.dumps = math.isclose = "
                          "lambda *a, **k: True\nprint(True)",
    "patches_the_wardens_frames":
        "import sys\nf = sys._getframe()\nwhile f:\n    for n in list(f.f_globals):\n"
        "        if callable(f.f_globals[n]) and n[:1] != '_': f.f_globals[n] = lambda *a, **k: 0\n"
        "    f = f.f_back",
    "shadows_a_module": "open('json.py', 'w').write('loads = dumps = lambda *a: True')\n"
                        "import sys\nsys.path.insert(0, '.')\nsys.modules.pop('json')\nimport json",
    # reading the tests
    "reads_the_file": "print(open('@FILE@').read())",
    "reads_through_a_symlink": "import os\nos.symlink('@FILE@', 'a')\nprint(open('a').read())",
    "reads_through_a_hard_link": "import os\nos.link('@FILE@', 'link')\nprint(open('link').read())",
    "reads_by_climbing": "import os\nfor _ in range(40): os.chdir('..')\n"
                         "print(open('.' + '@FILE@').read())",
    "reads_by_another_program": "import subprocess\nprint(subprocess.run(['cat', '@FILE@'], "
                                "capture_output=True, text=True).stdout)",
    "reads_by_a_shell": "import os\nos.system('cat @FILE@')",
    "reads_by_io_uring_or_handles": "import ctypes\nl = ctypes.CDLL(None)\n"
                                    "print(l.syscall(425, 8, bytes(200)), l.syscall(304, 0, 0))\n"
                                    "print(open('@FILE@').read())",
    "searches_its_objects": HUNT + "import gc, sys\nf = sys._getframe()\nwhile f:\n"
                            "    tell(f.f_locals)\n    tell(f.f_globals)\n    f = f.f_back\n"
                            "for o in gc.get_objects():\n    try: tell(o)\n    except Exception: 0",
    "searches_its_memory": HUNT + "for line in open('/proc/self/maps'):\n    a, b = (int(x, 16) "
                           "for x in line.split()[0].split('-'))\n"
                           "    m = open('/proc/self/mem', 'rb')\n    m.seek(a)\n"
                           "    tell(m.read(b - a))",
    "searches_its_parents_memory":
        HUNT + "import os\nfor p in (os.getppid(), @JUDGE@, 1):\n  try:\n"
        "    for line in open(f'/proc/{p}/maps'):\n"
        "        a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        m = open(f'/proc/{p}/mem', 'rb')\n        m.seek(a)\n        tell(m.read(b - a))\n"
        "  except OSError: pass",
    "reads_the_environment": HUNT + "import os\ntell(dict(os.environ))\n"
                             "tell(open('/proc/@JUDGE@/environ').read())",
    "steals_a_descriptor": "import os, ctypes\nl = ctypes.CDLL(None)\n"
                           "p = l.syscall(434, @JUDGE@, 0)\n"
                           "for n in range(64):\n    fd = l.syscall(438, p, n, 0)\n"
                           "    if fd >= 0: print(os.read(fd, 99))",
    "imports_the_data": HUNT + "import sys\nsys.path += ['@FOLDER@', '/']\nimport tests_of_others\n"
                        "print(tests_of_others.SECRET)",
    # network
    "connects": "import socket\ns = socket.create_connection(('127.0.0.1', @PORT@), 1)\n"
                "print(s.recv(99).decode())",
    "connects_to_a_unix_socket": "import socket\ns = socket.socket(socket.AF_UNIX)\n"
                                 "s.connect('\\0@UNIX@')\nprint(s.recv(99).decode())",
    "fetches": "import urllib.request as u\nprint(u.urlopen('http://127.0.0.1:@PORT@', "
               "timeout=1).read())",
    "asks_the_name_server": "import socket\nprint(socket.gethostbyname('localhost'))\n"
                            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', "
                            "('127.0.0.1', @PORT@))",
    # killing and escaping
    "kills_its_parent": "import os\nos.kill(os.getppid(), 9)",
    "kills_the_judge": "import os\nos.kill(@JUDGE@, 9)",
    "kills_everybody": "import os\nos.kill(-1, 9)",
    "kills_its_group": "import os\nos.killpg(0, 9)",
    "kills_by_other_calls": "import ctypes, os\nl = ctypes.CDLL(None)\nfor p in (@JUDGE@, "
                            "os.getppid()):\n    for n in (62, 200, 129): l.syscall(n, p, 9, 0)\n"
                            "    l.syscall(424, l.syscall(434, p, 0), 9, 0, 0)",
    "takes_its_parents_cpu_time": "import os, resource\nfor p in (@JUDGE@, os.getppid()):\n"
                                  "    resource.prlimit(p, resource.RLIMIT_CPU, (0, 0))",
    "traces_its_parent": "import ctypes, os\nl = ctypes.CDLL(None)\n"
                         "print(l.ptrace(16, os.getppid(), 0, 0), l.ptrace(16, @JUDGE@, 0, 0))",
    "enters_new_namespaces": "import ctypes\nl = ctypes.CDLL(None)\nprint(l.unshare(0x10000000), "
                             "l.unshare(0x20000), l.mount(b'none', b'/', b'tmpfs', 0, None))\n"
                             "print(open('@FILE@').read())",
    "leaves_the_root": "import ctypes, os\nl = ctypes.CDLL(None)\nl.umount2(b'/', 2)\n"
                       "os.mkdir('x')\nos.chroot('x')\nfor _ in range(99): os.chdir('..')\n"
                       "os.chroot('.')\nprint(open('@FILE@').read())",
    "becomes_root": "import os\nos.setuid(0)\nprint(open('@FILE@').read())",
    "forks_forever": "import os\nwhile True: os.fork()",
    "forks_and_keeps_going": "import os\nfor _ in range(99):\n    try: os.fork()\n"
                             "    except OSError: pass",
    "leaves_a_daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
                       "    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)",
    "leaves_a_daemon_by_clone": "import ctypes, time\nl = ctypes.CDLL(None)\n"
                                "for call, *a in ((56, 17, 0, 0, 0, 0), (57,), (58,), (435, "
                                "bytes(88), 88)):\n    if l.syscall(call, *a) == 0: time.sleep(60)",
    "starts_a_shell_in_the_background": "import os\nos.system('sleep 60 &')",
    "starts_threads_forever": "import threading, time\nwhile True: threading.Thread(target="
                              "time.sleep, args=(60,), daemon=True).start()",
    # using things up
    "takes_memory": "x = [bytearray(1 << 24)]\nwhile True: x.append(bytearray(1 << 24))",
    "takes_memory_at_once": "x = bytearray(64 << 30)",
    "takes_shared_memory": "import mmap, ctypes\nl = ctypes.CDLL(None)\nprint(l.shmget(0, 1 << 33, "
                           "0o1600), l.memfd_create(b'x', 0))\nmmap.mmap(-1, 1 << 36)",
    "prints_gigabytes": "while True: print('x' * 65536)",
    "prints_gigabytes_of_errors": "import sys\nfor _ in range(9999): sys.stderr.write('x' * 65536)",
    "overflows_the_stack_of_c": "import ctypes\nctypes.string_at(0)",
    "compiles_what_is_deep": "exec('-' * 99999 + '1')",
    "fills_the_disk": "for i in range(40):\n    open(f'f{i}', 'wb').write(bytes(1 << 20))",
    "makes_one_large_file": "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "makes_a_file_with_a_hole": "import os\nos.truncate(open('f', 'wb').fileno(), 1 << 44)",
    "makes_many_files": "for i in range(500): open(f'f{i}', 'w')",
    # leaving things behind
    "leaves_files_everywhere": "import os\nfor d in ('/tmp', '/var/tmp', '/dev/shm', '..', "
                               "'@FOLDER@', '/', os.path.expanduser('~'), '.'):\n"
                               "    try: open(d + '/@TOKEN@', 'w').write('x')\n"
                               "    except OSError: pass",
    "leaves_closed_folders": "import os\nfor i in range(9):\n    os.mkdir('d', 0o700)\n"
                             "    os.chdir('d')\nopen('@TOKEN@', 'w')\nos.mkdir('e', 0)",
    "leaves_deep_folders": "import os\nfor i in range(600):\n    os.mkdir('dddddddd')\n"
                           "    os.chdir('dddddddd')",
    "leaves_links_to_be_followed": "import os\nos.symlink('@FOLDER@', 'a')\nos.symlink('/', 'b')\n"
                                   "os.symlink('c', 'c')\nos.symlink('..', 'd')",
    "swaps_its_folder_for_a_link": "import os\nos.chdir('..')\nos.rmdir('box')\n"
                                   "os.symlink('@FOLDER@', 'box')",
    "leaves_a_pipe_and_a_device": "import os\nos.mkfifo('p')\nos.mknod('n', 0o60777, 0x700)",
    "opens_a_folder_to_all": "import os\nos.chmod('@FOLDER@', 0)\nos.utime('@FILE@', (0, 0))",
    "writes_over_the_file": "open('@FILE@', 'w').write('gone')",
    "removes_the_file": "import os\nos.remove('@FILE@')",
    "moves_the_file": "import os\nos.rename('@FILE@', 'mine')\nprint(open('mine').read())",
    "writes_into_the_library": "import os\nopen(os.__file__, 'a').write('')",
    "closes_everything": "import os\nos.closerange(0, 256)",
}
# These end by the clock, so each costs its second.
SLOW = {
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "loops": "while True: pass",
    "loops_in_c": "sum(range(10**14))",
    "ignores_all_signals": "import signal\nfor s in range(1, 65):\n"
                           "    try: signal.signal(s, signal.SIG_IGN)\n"
                           "    except (OSError, ValueError): pass\nwhile True: pass",
    "lifts_its_limits": "import resource as r\nfor what in (r.RLIMIT_CPU, r.RLIMIT_AS):\n"
                        "    try: r.setrlimit(what, (-1, -1))\n    except Exception: pass\n"
                        "while True: pass",
    "closes_its_output_and_loops": "import os\nos.close(1)\nwhile True: pass",
    "never_ends_its_thread": "import threading, time\n"
                             "threading.Thread(target=time.sleep, args=(60,)).start()",
    "loops_at_exit": "import atexit\n@atexit.register\ndef f():\n    while True: pass",
}
# Functions f(x).
FUNCTIONS = {
    "returns_what_equals_all": "class Yes:\n    __eq__ = __bool__ = lambda *a: True\n"
                               "    __hash__ = None\ndef f(x): return Yes()",
    "returns_a_string_that_equals_all": "class Yes(str):\n    __eq__ = lambda *a: True\n"
                                        "    __hash__ = str.__hash__\ndef f(x): return Yes('x')",
    "returns_a_pickle": "class P:\n    def __reduce__(self): return (print, ('passed',))\n"
                        "def f(x): return P()",
    "returns_nan": "def f(x): return float('nan')",
    "returns_depths": "def f(x):\n    for _ in range(99999): x = [x]\n    return x",
    "returns_itself": "def f(x):\n    x = []\n    x.append(x)\n    return x",
    "returns_a_number_of_ten_thousand_digits": "def f(x): return 10 ** 10 ** 4",
    "returns_megabytes": "def f(x): return 'x' * 3_000_000",
    "answers_itself": "import os\nos.write(4, b'{\"value\": \"passed\"}\\n' * 9)\n"
                      "def f(x): return x",
    "answers_nonsense": "import os\ndef f(x):\n    os.write(4, b'[' * 9000 + b'\\xff\\n')\n"
                        "    return x",
    "answers_without_an_end": "import os\ndef f(x):\n    while True: os.write(4, b'x' * 9999)",
    "asks_for_a_call": "import os\ndef f(x): os.write(4, b'{\"call\": [[1], {\"dict\": []}]}\\n')",
    "claims_an_error": "import os\ndef f(x): os.write(4, b'{\"error\": \"you passed\"}\\n')",
    "answers_with_a_broken_value": "import os\ndef f(x): os.write(4, b'{\"value\": {\"set\": [[]], "
                                   "\"x\": 1}}\\n')",
    "answers_with_an_impossible_number": "import os\ndef f(x): os.write(4, b'{\"value\": "
                                         "{\"complex\": [1' + b'0' * 400 + b', 0]}}\\n')",
    "answers_with_a_broken_number": "import os\ndef f(x): os.write(4, b'{\"value\": 1' + b'0' * "
                                    "9999 + b'}\\n')",
    "returns_keys_that_collide": "def f(x): return {i * (2**61 - 1) for i in range(5000)}",
    "replaces_the_encoder": "import sys\nm = sys._getframe(1).f_globals\n"
                            "m['encode'] = m['decode'] = lambda v: 'passed'\ndef f(x): return 0",
    "is_a_generator": "def f(x):\n    while True: yield 1",
    "exits_from_the_call": "def f(x): raise SystemExit(0)",
    "deletes_the_builtins": "import builtins\nvars(builtins).clear()\ndef f(x): return 1",
    "reads_the_next_tests": HUNT + "import os\ndef f(x):\n    os.set_blocking(3, False)\n"
                            "    try: return os.read(3, 999).decode()\n"
                            "    except OSError: return 0",
}


@pytest.fixture(scope="module")
def prey(tmp_path_factory):
    """What the programs are after, and the sentence that fills their blanks in."""
    secret, token = f"secret-{secrets.token_hex(8)}", f"minragen-{secrets.token_hex(8)}"
    folder = tmp_path_factory.mktemp("prey")
    for parent in (folder, *folder.parents[:-2]):
        parent.chmod(0o755)
    file = folder / "tests.json"
    file.write_text(secret)
    (folder / "tests_of_others.py").write_text(f"SECRET = {secret!r}")
    os.environ["MINRAGEN_TEST_SECRET"] = secret
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    servers[1].bind(f"\0{token}")
    servers[1].listen()

    def serve(server):
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.sendall(secret.encode())

    for server in servers:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    blanks = {"@FILE@": str(file), "@FOLDER@": str(folder), "@JUDGE@": str(os.getpid()),
              "@PORT@": str(servers[0].getsockname()[1]), "@UNIX@": token, "@TOKEN@": token}

    def fill(code):
        for blank, text in blanks.items():
            code = code.replace(blank, text)
        return code

    yield secret, token, folder, fill
    del os.environ["MINRAGEN_TEST_SECRET"]
    for server in servers:
        server.close()


def harm(wardens, token, folder, secret, before):
    """What is worse than before; an honest program must still pass in the same warden.

    before: the processes that there were
    """
    changed = sorted(set(processes()) - before)
    places = ("/tmp", "/var/tmp", "/dev/shm", "/", os.path.expanduser("~"), str(folder), ".")
    changed += [place for place in places if os.path.exists(f"{place}/{token}")]
    if (folder / "tests.json").read_text() != secret or (folder / "tests.json").stat().st_mtime < 9:
        changed.append("the file")
    if sorted(os.listdir(folder)) != ["tests.json", "tests_of_others.py"]:
        changed.append("the folder")
    with wardens.borrow() as warden:
        if warden.folder and os.listdir(warden.folder):
            changed.append("the box")
    if words("print(input())", [Case("7", "7")], wardens=wardens, limits=Limits(5)) != ["passed"]:
        changed.append("the next program")
    return changed


class TestHostilePrograms:
    def test_there_are_more_than_forty(self):
        assert len(HOSTILE) + len(SLOW) + len(FUNCTIONS) >= 40

    @pytest.mark.parametrize("name", [*HOSTILE, *FUNCTIONS])
    def test_it_neither_passes_nor_harms_nor_leaves_anything(self, wardens, prey, name):
        self.attack(name, wardens, prey)

    def test_nor_do_those_that_would_last_forever(self, ours, prey):
        """All at once, so that they cost one time limit together."""
        secret, token, folder, fill = prey
        pool, results = tools.Wardens("auto", len(SLOW)), {}
        ours.layers  # noqa: B018  it is running now
        before = set(processes())

        def attack(name):
            results[name] = words(fill(SLOW[name]), [Case("1\n", secret)], "", pool, QUICK)

        threads = [threading.Thread(target=attack, args=(name,)) for name in SLOW]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ends = {"recurses": {"time", "MemoryError"}, "closes_its_output_and_loops": {"died"}}
        assert all(set(got) <= ends.get(name, {"time"}) for name, got in results.items()), results
        pool.close()
        assert harm(ours, token, folder, secret, before) == []

    def attack(self, name, wardens, prey):
        secret, token, folder, fill = prey
        code = fill({**HOSTILE, **FUNCTIONS}[name])
        with wardens.borrow() as warden:
            same, before = warden.process.pid, set(processes())
        if name in FUNCTIONS:
            results = judge(code, [Case([1], secret), Case([secret[:0]], secret)], "f", QUICK,
                            wardens)
        else:
            results = judge(code, [Case("1\n", secret)], "", QUICK, wardens)
        assert not any(r.passed for r in results), results
        assert secret not in str([r.value for r in results])
        assert harm(wardens, token, folder, secret, before) == []
        with wardens.borrow() as warden:
            assert warden.process.pid == same

    @pytest.mark.parametrize("name", ["reads_the_file", "reads_through_a_symlink", "connects",
                                      "reads_by_a_shell", "imports_the_data",
                                      "connects_to_a_unix_socket", "reads_the_environment"])
    def test_without_the_walls_the_same_program_does_get_the_secret(self, prey, name, tmp_path):
        """So that the tests above can fail."""
        secret, _, _, fill = prey
        got = subprocess.run([sys.executable, "-c", fill(HOSTILE[name])], cwd=tmp_path, text=True,
                             capture_output=True, check=False).stdout
        assert secret in got

    @pytest.mark.parametrize("name", ["searches_its_objects"])
    def test_a_secret_in_the_warden_would_be_found(self, ours, prey, name):
        """What the warden is told, a child can read: hence no expected output is told to it."""
        secret, _, _, fill = prey
        code = f"{fill(HOSTILE[name])}\n# {secret}"
        [result] = judge(code, [Case("1", secret)], "", QUICK, ours)
        assert result.passed or secret in str(result.value)


class TestMuseum:
    """RAGEN's grader: one interpreter for submission and verdict, texts compared, 3 s for all."""

    def test_a_result_written_to_the_original_stdout_is_only_an_output(self, ours):
        code = ("import json, os, sys\n"
                "sys.__stdout__.write(json.dumps({'passed': 2, 'total': 2}))\n"
                "sys.__stdout__.flush()\nos._exit(0)")
        assert words(code, 2 * [Case("1", "1")], wardens=ours) == 2 * ["wrong"]

    def test_a_true_is_a_true_and_a_list_is_a_list_however_it_is_spelt(self, ours):
        assert words("def f(x): return x", [Case([True], json.loads("true")),
                                            Case([[1, 2]], json.loads("[1,2]"))], "f", ours) == [
            "passed", "passed"]


class TestWardens:
    def test_programs_run_in_parallel_one_a_core(self):
        """Four programs that wait: on four wardens they wait together."""
        pool, results = tools.Wardens("auto", 4), []
        judge("print(1)", [Case("", "1")], wardens=pool)

        def wait():
            results.extend(words("import time\ntime.sleep(.5)\nprint(1)", [Case("", "1")],
                                 wardens=pool, limits=Limits(5)))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == 4 * ["passed"]
        assert time.monotonic() - started < 1.8
        assert len(pool.idle) <= 4
        pool.close()

    def test_checks_and_calls_at_the_same_time_do_not_wait_for_each_other_forever(self):
        """A check needs a warden of each of two kinds, always in the same order."""
        ones, others, results = tools.Wardens("auto", 1), tools.Wardens("auto", 1), []

        def both():
            results.append(judge_check("def f(a, b): return a + b", "f", TestCheck.CHECK, QUICK,
                                       ones, others))
            results.append(words("print(1)", [Case("", "1")], wardens=ones))

        threads = [threading.Thread(target=both, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(results) == 12 and results.count((7, 7)) == 6
        ones.close()
        others.close()

    def test_a_warden_that_was_killed_is_an_error_once_and_then_replaced(self):
        pool = tools.Wardens("auto", 1)
        with pool.borrow() as warden:
            warden.process.kill()
            warden.process.wait()
        with pytest.raises(RuntimeError, match="the sandbox's process has ended"):
            judge("print(1)", [Case("", "1")], wardens=pool)
        assert words("print(1)", [Case("", "1")], wardens=pool) == ["passed"]
        pool.close()

    def test_a_fork_of_the_judge_starts_wardens_of_its_own(self):
        """Else two processes would read each other's answers."""
        code = (f"import sys, os\nsys.path[:0] = {sys.path!r}\nfrom minragen import tools as t\n"
                "def passed():\n"
                "    cases = [t.Case('7', '7')]\n"
                "    return t.judge('print(input())', cases)[0].passed\n"
                "assert passed()\nold = t.SUBMISSIONS.idle[0].process.pid\npid = os.fork()\n"
                "ok = passed() and (t.SUBMISSIONS.idle[0].process.pid == old) == bool(pid)\n"
                "if pid: ok = ok and os.waitpid(pid, 0)[1] == 0\nsys.exit(not ok)")
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_closing_ends_every_process(self):
        pool, before = tools.Wardens("auto", 2), set(processes())
        with pool.borrow(), pool.borrow():
            assert len(set(processes()) - before) >= 2
        pool.close()
        assert set(processes()) <= before

    def test_a_warden_that_dies_under_a_running_program_frees_its_place(self):
        pool, seen = tools.Wardens("auto", 1), []
        for _ in "12":
            with pytest.raises(RuntimeError, match="the sandbox's process"), \
                    tools.Submission("def f(): return 1", "f", LIMITS, pool) as submission:
                seen.append(submission.run([]).value)
                submission.warden.process.kill()
                submission.warden.process.wait()
        assert seen == [1, 1]
        pool.close()

    def test_one_that_finds_no_wall_around_files_says_so(self):
        pool = tools.Wardens("bare", 1)
        with pytest.warns(RuntimeWarning, match="no isolation of files: programs of the model run"):
            assert words("print(1)", [Case("", "1")], wardens=pool) == ["passed"]
        pool.close()

    def test_all_tests_of_a_submission_have_one_more_limit_together(self, ours, monkeypatch):
        """So that a thousand tests of nearly a limit each do not outlast a training step."""
        monkeypatch.setattr(tools, "TOTAL_SECONDS", 0.5)
        code, started = "import time\ntime.sleep(.2)\nprint(1)", time.monotonic()
        got = words(code, 20 * [Case("", "1")], wardens=ours)
        assert got[0] == "passed" and got[-1] == "skipped" and "time" in got
        assert time.monotonic() - started < 2

    def test_the_layers_in_use_are_told(self, wardens):
        want = {"namespaces": {"rlimits", "namespaces"}, "plain": {"rlimits"}}
        assert want[wardens.isolation] <= set(wardens.layers)

    def test_a_judge_that_is_killed_leaves_nothing(self, tmp_path):
        """The warden sees the end of its socket, kills what it runs and goes."""
        code = (f"import sys, os, threading, time\nsys.path[:0] = {sys.path!r}\n"
                f"from minragen import tools as t\nw = t.Wardens(sys.argv[1], 1)\n"
                f"threading.Thread(target=lambda: t.judge('while 1: pass', [t.Case('', '')], "
                f"limits=t.Limits(30), wardens=w)).start()\ntime.sleep(.3)\n"
                f"print(os.getpid(), flush=True)\nos.kill(os.getpid(), 9)")
        for isolation in AVAILABLE:
            done = subprocess.run([sys.executable, "-c", code, isolation], text=True, check=False,
                                  capture_output=True, env={**os.environ, "TMPDIR": str(tmp_path)})
            mark, end = f'"judge": {int(done.stdout)}}}'.encode(), time.monotonic() + 5
            while (left := alive(mark)) and time.monotonic() < end:
                time.sleep(0.05)
            assert left == [] and os.listdir(tmp_path) == []

    def test_starting_a_program_costs_little(self, ours):
        """Aim: 25 ms of CPU time a child; a bound with room for a busy machine."""
        cases = 20 * [Case("1", "1")]
        words("print(input())", cases, wardens=ours, limits=Limits(5))
        with ours.borrow() as warden, warden.child("program", "pass", "", Limits(5)) as child:
            child.converse(b"", time.monotonic() + 5)
            child.stop(1)
        assert child.status == 0 and child.cpu < 0.1


def alive(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_the_refused_system_calls_of_both_architectures_are_as_many_as_they_should_be():
    """The older names (fork, chmod, ...) are only on x86-64."""
    x86, arm = (inside.SYSTEM_CALLS[m][4] for m in ("x86_64", "aarch64"))
    assert len(set(x86)) == len(x86) and len(set(arm)) == len(arm)
    assert len(x86) > len(arm)
    assert ctypes.sizeof(inside.Program) == 2 * ctypes.sizeof(ctypes.c_void_p)
