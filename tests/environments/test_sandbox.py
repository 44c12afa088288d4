"""The sandbox: what honest programs may do, and what hostile ones cannot.

Every hostile program is after the same secret: the expected output of its test. It stands in a file
that everybody may read, in the judge's environment and memory, and behind a TCP and a Unix socket.
"""

import ctypes
import json
import os
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

from minragen.environments import sandbox, sandbox_worker
from minragen.environments.sandbox import Case, Limits, Submission, WorkerPool, judge, judge_check

QUICK = Limits(cpu=1, memory=192, patience=0.8)  # the clock ends what does nothing but last


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
                          fill=lambda code: Template(SETUP + code).substitute(blanks))
    del os.environ["MINRAGEN_TEST_SECRET"]


def offered(isolation):
    """Whether this system has what an isolation is made of, asked without the sandbox."""
    if isolation == "plain":  # asks for the version of Landlock
        return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
    probe = ["unshare", "-Urmnpif", "mount", "-t", "tmpfs", "none", "/tmp"]
    return bool(shutil.which("unshare")) and subprocess.run(probe, check=False).returncode == 0


@pytest.fixture(scope="module", params=["namespaces", "plain"])
def pool(request, prey):
    """A pool of one worker, started when the secret was in the environment."""
    if not offered(request.param):
        pytest.skip(f"this system does not offer {request.param}")
    with closing(WorkerPool(request.param, 1)) as workers:
        files = "landlock" if request.param == "plain" else "namespaces"
        assert {"rlimits", "seccomp", files} <= set(workers.layers)
        yield workers


def words(code, cases, name="", pool=None, limits=None):
    return [result.word for result in judge(code, cases, name, limits or Limits(1), pool)]


def processes(mark):
    """Ids of the processes with `mark` in their command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "cmdline").read_text(errors="replace"):
                found.add(entry.name)
    return found


OURS = f"judge={os.getpid()}\0"  # in the command line of our workers and of what they forked


class TestPrograms:
    def test_honest_programs_pass_and_find_nothing_of_the_run_before(self, pool):
        for code in [
                "print(int(input()) + int(input()))  # \u4e2d\u6587",
                "a, b = map(int, sys.stdin.read().split())\nsys.stdout.write(str(a + b))",
                "sys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer)))",
                "print(sum(map(int, open(0))))",
                "if __name__ == '__main__': print(int(input()) + int(input())); exit()",
                "sys.setrecursionlimit(10**6)\ndef f(n): return n and f(n-1)\nprint(7 + f(50_000))",
                "import threading\nthreading.stack_size(64 << 20)\n"
                "threading.Thread(target=lambda: print(7)).start()",
                "open('a', 'w').write(input())\nprint(int(open('a').read()) + int(input()))",
                "print(8 if os.listdir() or 'x' in globals() else 7)\nx = open('left', 'w')"]:
            assert words(code, 2 * [Case("3\n4\n", "7")], pool=pool) == 2 * ["passed"], code

    def test_a_failure_has_a_word_that_the_program_does_not_choose(self):
        for code, word in {
                "print(": "SyntaxError", "1/0": "ZeroDivisionError", "print(8)": "wrong",
                "class Strange(KeyError): pass\nraise Strange('you passed')": "KeyError",
                "print(7); raise KeyboardInterrupt": "Exception", "print(7); exit(1)": "died",
                "print(7); exit('no')": "died", "print(7, flush=True); os.abort()": "died",
                "os.write(1, b'7'); os._exit(3)": "died", "def f(): f()\nf()": "RecursionError",
                "x = 'a' * 10**10": "MemoryError"}.items():
            assert words(code, [Case("3\n4\n", "7")]) == [word], code

    def test_an_endless_loop_costs_one_limit_of_cpu_time_or_of_the_clock(self):
        """However many tests there are: those after it are not run."""
        cases = [Case("go", "1"), Case("end", "1"), Case("go", "1"), Case("go", "1")]
        for loop, limits, least in [("while True: pass", Limits(2, patience=60), 1.5),
                                    ("import time; time.sleep(99)", Limits(1, patience=0.3), 0.3)]:
            code, started = f"if input() == 'go': print(1); exit()\n{loop}", time.monotonic()
            assert words(code, cases, limits=limits) == ["passed", "time", "skipped", "skipped"]
            assert least <= time.monotonic() - started < 50

    def test_megabytes_of_input_and_output_block_nobody(self):
        text, copy = ("y" * 99 + "\n") * 10_000, "for line in sys.stdin: sys.stdout.write(line)"
        assert words(copy, [Case(text, text), Case(2 * text, "")]) == ["passed", "output"]
        assert words("print(7)", [Case(3 * text, "7")]) == ["passed"]


class TestFunctions:
    def test_a_function_or_a_method_of_solution_is_called_and_returns_a_value(self, pool):
        cases = [Case([1, 2.5], 3.5), Case(["a", "b"], "ab"), Case([[1], [None]], [1, None])]
        code = "def f(a, b): print('noise'); return a + b"
        assert words(code, cases, "f", pool) == ["passed", "passed", "passed"]
        code = "class Solution:\n    def two(self, n: List[int]) -> Optional[int]: return n[0] * 2"
        assert words(code, [Case([[4]], 8)], "two") == ["passed"]
        assert words("two = 1", [Case([[4]], 8)], "two") == ["NameError"]

    def test_a_call_that_dies_fails_alone_and_arguments_are_copies(self):
        xs = [3, 1, 2]
        code = "def f(x):\n    x.sort()\n    return x if x[1:] else os._exit(0)"
        cases = [Case([[1]], [1]), Case([xs], [1, 2, 3]), Case([[1]], [1]), Case([xs], [1, 2, 3])]
        assert words(code, cases, "f") == ["died", "passed", "died", "passed"] and xs == [3, 1, 2]

    def test_each_call_has_the_whole_limit(self):
        """One process makes all calls; where its time runs out, a new one makes that call again."""
        code = ("calls = 0\ndef f():\n    global calls\n    calls += 1\n"
                "    while calls == 3: pass\n    return calls")
        cases = [Case([], 1), Case([], 2), Case([], 1), Case([], 2)]
        assert words(code, cases, "f", limits=QUICK) == 4 * ["passed"]

    def test_chance_is_the_same_in_every_process(self, pool):
        code = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd', 'e'})]"
        [one], [other] = (judge(code, [Case([], 0)], "f", pool=p) for p in (pool, None))
        assert one.value == other.value and sorted(one.value[1]) == list("abcde")

    def test_plain_values_survive_the_wire_with_their_types_and_nothing_else_does(self):
        class Text(str):
            __add__ = None

        for value in [None, True, 10**30, -0.5, float("inf"), "\u4e2d\0", b"\0\xff", 1 - 2j,
                      {"a": {3: (2.0,)}, (1, 2): []}, {1, 2}, frozenset({"a"}), Text("x")]:
            back = sandbox_worker.decode(json.loads(json.dumps(sandbox_worker.encode(value))))
            assert back == value and repr(back) == repr(value) and type(back) is not Text
        for message in [{}, {"a": 1, "b": 2}, {"x": []}, {"set": [[]]}, {"complex": [10**400, 0]},
                        {"set": list(range(4097))}, {"dict": [[i, 0] for i in range(4097)]}]:
            with pytest.raises((ValueError, TypeError, KeyError, OverflowError)):
                sandbox_worker.decode(message)


class TestEquality:
    def test_values_are_compared_within_a_tolerance(self):
        """Within a tolerance where a float is expected."""
        for got, want in [
                (1, 1.0), (True, 1), (0.1 + 0.2, 0.3), (1e9 + 1e-3, 1e9), ((1, [2]), [1, (2,)]),
                ({1: "a"}, {"1": "a"}), (1e-10, 0.0), (float("inf"), float("inf"))]:
            assert sandbox.same_value(got, want), (got, want)
        for got, want in [
                ("1", 1), (0.3001, 0.3), ([1, 2], [1]), ([1], [1, 2]), ([1, 2], [2, 1]), ([], {}),
                (None, 0.0), ({"a": 1}, {"a": 2}), (1e-8, 0.0), (float("nan"), float("nan")),
                (10**400, 1.5), (1e15 + 1, 10**15)]:
            assert not sandbox.same_value(got, want), (got, want)

    def test_outputs_are_compared_as_lines_and_numbers(self):
        """The same words on the same lines; numbers by value if one of them has a point."""
        for got, want in [
                (" 1   2 \n", "1 2"), ("1.0", "1"), ("0.333333333", "0.3333333334"),
                ("1e3", "1000.0"), ("a\r\nb", "a\nb"), ("-.5", "-0.5")]:
            assert sandbox.same_output(got, want), (got, want)
        for got, want in [
                ("1\n2", "1 2"), ("12", "1 2"), ("007", "7"), ("yes", "YES"), ("nan", "1.0"),
                ("1e999", "2e999"), ("0.34", "0.33"), ("7 7", "7"), ("123456700.0", "123456789"),
                ("1_000.0", "1000"), ("\u0663.0", "3"), ("1." + "0" * 400, "1.0")]:
            assert not sandbox.same_output(got, want), (got, want)

    def test_a_value_in_a_list_of_one_counts_only_where_the_data_writes_it_so(self):
        cases = [Case([], [5], either=True), Case([], [5]), Case([], [5, 5], either=True)]
        assert words("def f(): return 5", cases, "f") == ["passed", "wrong", "wrong"]


class TestCheck:
    CHECK = ("def check(candidate):\n    assert True\n    assert candidate(2, 1) == 3\n"
             "    for i in range(3):\n        assert candidate(i, b=i) == 2 * i, 'told'\n"
             "    x = candidate('a', 'b')\n    assert x == 'ab' and isinstance(x, str)\n"
             "    assert candidate((1,), (2,)) == (1, 2)\n")
    PLUS = "def f(a, b): return a + b"

    def test_assertions_that_depend_on_a_call_are_counted(self):
        """A call that raises outside of an assertion ends the check: one failure more."""
        yes = "class Yes(str): __eq__ = lambda s, o: True\ndef f(a, b): return Yes()"
        for code, counts in {
                self.PLUS: (6, 6), "def f(a, b): return 3": (1, 6), "f = 7": (0, 5), yes: (0, 6),
                "def f(a, b): return None if a == 2 else a + b": (4, 6),
                "def f(a, b): os._exit(0)": (0, 5)}.items():
            assert judge_check(code, "f", self.CHECK) == counts, code
        for check in ("def check(c): raise KeyError", "x = 1",
                      "def check(c):\n    assert c(1, 2) == 3\n    c(1, 2)"):
            passed, total = judge_check(self.PLUS, "f", check, QUICK)
            assert passed < total, check

    def test_what_would_last_forever_costs_one_limit(self, monkeypatch):
        """A loop in the submission, or a value that makes the test code itself run forever."""
        runs, run = [], Submission.run
        monkeypatch.setattr(Submission, "run", lambda *a: runs.append(a) or run(*a))
        loop, limits = "def f(a, b):\n    while 1: pass", Limits(1, patience=0.3)
        assert judge_check(loop, "f", self.CHECK, limits) == (0, 5) and len(runs) == 1
        monkeypatch.setattr(sandbox, "CHECK_SECONDS", 1)
        check = "def check(c):\n    for i in range(c()): pass\n    assert c() == 3"
        assert judge_check("def f(): return 10**18", "f", check, QUICK) == (0, 1)


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
        "os.chdir('..')\nos.rmdir('box')\nos.symlink('$FOLDER', 'box')", "os.closerange(0, 256)",
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
        "os.write(4, b'{\"value\": \"passed\"}\\n' * 9)\ndef f(x): return x",
        "def f(x): os.write(4, b'[' * 9999 + b'\\xff\\n')", "def f(x): return 'x' * 3_000_000",
        "def f(x): os.write(4, b'{\"error\": \"you passed\"}\\n')",
        "def f(x): return {i * (2**61 - 1) for i in range(5000)}  # keys that collide",
        "m = sys._getframe(1).f_globals\nm['encode'] = lambda v: 'passed'\ndef f(x): return 0",
        "def f(x):\n    os.set_blocking(3, False)\n    return os.read(3, 999).decode()",
    ],
}


class TestHostilePrograms:
    @pytest.mark.parametrize("aim", HOSTILE)
    def test_none_gets_the_secret_or_harms_or_leaves_anything(self, pool, prey, aim):
        name = "f" if "f(x)" in aim else ""
        cases = 2 * [Case([1], prey.secret)] if name else [Case("1\n", prey.secret)]
        limits = Limits(1, memory=192, patience=0.2) if "lasting" in aim else QUICK
        with pool.borrow() as worker:
            pid, before = worker.process.pid, processes(OURS)
        for code in HOSTILE[aim]:
            results = judge(prey.fill(code), cases, name, limits, pool)
            assert not any(r.passed or prey.secret in str(r.value) for r in results), code
            assert not processes(OURS) - before and not processes(prey.token), code
            assert self.changes(prey) == [], code
            assert words("print(input())", [Case("7", "7")], pool=pool) == ["passed"], code
            with pool.borrow() as worker:
                assert worker.process.pid == pid, code
                assert not worker.folder or os.listdir(worker.folder) == [], code

    def changes(self, prey):
        """What is not as it was among the files that a program could write, move or close."""
        places = ("/tmp", "/var/tmp", "/dev/shm", "/", os.path.expanduser("~"), prey.folder, ".")
        left = [str(place) for place in places if os.path.exists(f"{place}/{prey.token}")]
        file = prey.folder / "tests.json"
        now = prey.folder.stat().st_mode & 0o777, file.read_text(), file.stat().st_mtime > 9
        return left + ["the file"] * (now != (0o755, prey.secret, True))

    def test_without_isolation_the_same_programs_do_get_the_secret(self, prey, tmp_path):
        """So that the test above can fail. A program also finds whatever its worker is told."""
        for code in HOSTILE["reading the secret"]:
            done = subprocess.run([sys.executable, "-c", prey.fill(code)], cwd=tmp_path, text=True,
                                  capture_output=True, check=False)
            assert done.stdout.strip() == prey.secret, code
        told = f"{prey.fill(SEARCH)}\n# {prey.secret}"
        assert words(told, [Case("", prey.secret)]) == ["passed"]

    def test_calls_that_no_such_program_needs_are_refused(self, pool, prey):
        """By their names in libc. With these arguments the kernel's own answer is another."""
        names = ("fork execve socket kill ptrace process_vm_readv process_vm_writev setpgid "
                 "setpriority sched_setscheduler sched_setparam sched_setaffinity unshare setns "
                 "mount umount2 chroot shmget semget msgget memfd_create chmod fchmod fchmodat "
                 "chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr utime")
        code = (f"for name in {names!r}.split():\n"
                "    if getattr(libc, name)(-1, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:\n"
                "        print(name)\n"
                "for path in (os.__file__, '/dev/full', '/etc/passwd'):\n"
                "    try: print(path, open(path, 'a'))\n    except OSError: pass")
        assert judge(prey.fill(code), [Case("", "")], pool=pool) == [(True, "passed", "")]


class TestWorkers:
    CASE = [Case("7", "7")]
    ECHO = "print(input())"

    def test_checks_at_the_same_time_do_not_wait_for_each_other_and_closing_ends_all(self):
        """A check needs a worker of each of two pools, always in the same order."""
        before, counts = processes(OURS), []
        with closing(WorkerPool("auto", 1)) as ones, closing(WorkerPool("auto", 1)) as others:
            def check():
                counts.append(judge_check(TestCheck.PLUS, "f", TestCheck.CHECK, None, ones, others))

            threads = [threading.Thread(target=check, daemon=True) for _ in range(4)]
            for step in (threading.Thread.start, lambda thread: thread.join(20)):
                list(map(step, threads))
            assert counts == 4 * [(6, 6)] and processes(OURS) - before
        assert processes(OURS) <= before

    def test_one_that_was_killed_is_an_error_once_and_then_replaced(self):
        with closing(WorkerPool("auto", 1)) as pool:
            with pytest.raises(RuntimeError, match="the sandbox's process"), \
                    pool.borrow() as worker, \
                    closing(Submission(worker, "def f(): return 1", "f", QUICK)) as submission:
                assert submission.run([]).value == 1
                worker.process.kill()
                worker.process.wait()
            assert words(self.ECHO, self.CASE, pool=pool) == ["passed"]

    def test_the_strongest_isolation_is_chosen_and_where_there_is_none_it_says_so(self, prey):
        sandbox.SUBMISSIONS.layers  # noqa: B018  it has chosen now
        assert sandbox.SUBMISSIONS.isolation == ("namespaces" if offered("namespaces") else "plain")
        with closing(WorkerPool("bare", 1)) as pool:
            with pytest.warns(RuntimeWarning, match="no isolation of files: programs of the model"):
                assert words(self.ECHO, self.CASE, pool=pool) == ["passed"]
            before = processes(OURS)
            judge(prey.fill(DAEMON), self.CASE, "", QUICK, pool)
            assert processes(OURS) <= before  # even then no process outlives its program

    def test_all_tests_of_a_submission_have_one_more_limit_together(self, monkeypatch):
        monkeypatch.setattr(sandbox, "TOTAL_SECONDS", 0.5)
        got = words("import time\ntime.sleep(.2)\nprint(input())", 20 * self.CASE)
        assert got[0] == "passed" and got[-1] == "skipped" and "time" in got

    def test_a_fork_of_the_judge_has_workers_of_its_own_that_die_with_it(self, pool):
        """With those of its parent, two processes would read each other's answers."""
        assert words(self.ECHO, self.CASE) == ["passed"]
        if (pid := os.fork()) == 0:
            try:
                own = not sandbox.SUBMISSIONS.idle and not sandbox.REFEREES.idle
                passed = own and words(self.ECHO, self.CASE) == ["passed"]
                with WorkerPool(pool.isolation, 1).borrow() as worker:
                    sandbox.Child(worker, "program", "while 1: pass", "", QUICK)
                    os.kill(os.getpid(), 9 if passed else 15)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 9 and words(self.ECHO, self.CASE) == ["passed"]
        end = time.monotonic() + 10
        while (left := processes(f"judge={pid}\0")) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left
