"""The judge of programs: it runs a submission in a sandbox and compares the outputs itself.

A submission is a program that a model wrote. It never runs in this process: a worker's child runs
it in real Python (sandbox_worker.py), or pydantic-monty where the system gives no namespaces. Its
output is compared *here* with the expected value, which the sandbox never sees.

Values travel as JSON (`encode`). What a submission sends is bounded in size and a comparison goes
no further than the expected value, so that a hostile answer cannot keep the judge busy.
"""

import builtins
import datetime
import inspect
import json
import math
import os
import queue
import re
import socket
import string
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import NamedTuple

import pydantic_monty as monty

from minragen.environments import sandbox_worker as worker
from minragen.environments.limits import oom_kills
from minragen.environments.sandbox_worker import ERRORS, OUTPUT_BYTES, encode, place

VALUE_BYTES = 1 << 16  # of a function's value as JSON; what is longer would occupy the judge
MEMORY = 512  # MiB of a submission; a quarter in Monty, which hands whole values to the host
CLOCK = 3.0  # seconds for each second of CPU time: a busy machine fails no honest program
TOTAL_SECONDS = 40.0  # of the clock for all tests of a submission; a step may take 60
WORKER_SECONDS = 15.0  # until a worker must answer
TOLERANCE = 1e-6  # relative, where a float is expected
NUMERAL = re.compile(r"[-+]?(?:[0-9]{1,99}\.?[0-9]{0,99}|\.[0-9]{1,99})(?:[eE][-+]?[0-9]{1,3})?")


class Case(NamedTuple):
    """One test. given: text on standard input, or a list of arguments; expected: text or value;
    either: `expected` may also be the value in a list of its own (TACO's convention)."""

    given: object
    expected: object
    either: bool = False


class Result(NamedTuple):
    """The outcome of one test. word: value (not yet compared), passed, wrong, time, died, skipped,
    output (too long), unsupported (by Monty), or a builtin exception; value: the output or JSON."""

    word: str
    value: str = ""


def judge(code, cases, name="", cpu=2, pool=None):
    """Run `code` on every case: call its function `name`, or without a name run it as a program.

    Tests after one that runs out of time are skipped, so that an endless loop costs one limit.
    One process answers all calls that are left; a program has a process for each input.
    cpu: whole seconds for each case
    returns: list of Result, one for each case      raises: RuntimeError if the sandbox fails
    """
    given = [json.dumps(encode(case.given)) if name else case.given for case in cases]
    results, end = [], time.monotonic() + TOTAL_SECONDS
    with (pool or SUBMISSIONS).lend() as sandbox:
        while len(results) < len(cases) and "time" not in [r.word for r in results]:
            rest = given[len(results):]
            seconds = max(1e-3, min(end - time.monotonic(), CLOCK * cpu))
            answers = sandbox.run(code, name, rest if name else rest[:1], cpu, seconds)
            results += map(compare, answers, cases[len(results):])
    return results + (len(cases) - len(results)) * [Result("skipped")]


# ---- Comparison ----------------------------------------------------------------------------------
def compare(result, case):
    """Return a run's result with the word `value` replaced by `passed` or `wrong`."""
    if result.word != "value":
        return result
    passed, want = False, case.expected
    if isinstance(case.given, str):
        passed = same_output(result.value, want)
    else:
        with suppress(ValueError, TypeError, KeyError, RecursionError):  # not in `encode`'s form
            got = json.loads(result.value)
            passed = same_value(got, want) or (case.either and same_value([got], want))
    return result._replace(word="passed" if passed else "wrong")


def same_value(got, want):
    """Return whether got, as `encode` writes it, equals the value want, floats within TOLERANCE.
    1 is 1.0 and True, a tuple is a list, and keys are compared as text, as JSON has them. Neither
    a set nor a dictionary has an order."""
    if isinstance(want, (list, tuple)):
        got = got.get("tuple") if isinstance(got, dict) else got
        return isinstance(got, list) and len(got) == len(want) and all(map(same_value, got, want))
    if isinstance(want, (set, frozenset)):
        got = got.get("set", got.get("frozenset")) if isinstance(got, dict) else None
        return same_value(got, sorted(want, key=place))  # which is how `encode` orders them
    if isinstance(want, dict):
        pairs = [pair["tuple"] for pair in got["dict"][:len(want) + 1]]
        got, want = {str(k): v for k, v in pairs}, {str(encode(k)): v for k, v in want.items()}
        return got.keys() == want.keys() and all(same_value(got[k], want[k]) for k in want)
    if isinstance(want, float) and isinstance(got, (int, float)) and abs(got) < 1e300:
        return math.isclose(got, want, rel_tol=TOLERANCE, abs_tol=1e-9)
    return got == encode(want)


def same_output(got, want):
    """Return whether two outputs have the same words, by `same_word`, on the same lines."""
    want = [line.split() for line in want.strip().split("\n")]
    got = got.strip().split("\n", len(want))
    return len(got) == len(want) and all(
        len(words := g.split(None, len(w))) == len(w) and all(map(same_word, words, w))
        for g, w in zip(got, want))


def same_word(got, want):
    """Return whether two words are the same text or, if one has a point, the same number."""
    numbers, point = NUMERAL.fullmatch(got) and NUMERAL.fullmatch(want), {".", "e", "E"}
    if got == want or not numbers or not point & {*got, *want}:  # 007 is not 7
        return got == want
    if not point & {*want}:  # an integer is expected: 3.0 is 3, 2.9999999 is not
        return Decimal(got) == Decimal(want)
    return math.isfinite(float(got)) and math.isclose(
        float(got), float(want), rel_tol=TOLERANCE, abs_tol=1e-9)


# ---- Sandboxes -----------------------------------------------------------------------------------
class WorkerPool:
    """As many sandboxes as there are cores; further threads wait for one.

    kind: Namespaces or Monty; None tries Namespaces, then Monty (`downgrade`: why)
    """

    def __init__(self, kind=None):
        self.kind, self.downgrade, self.free = kind, "", queue.LifoQueue()
        for _ in range(os.cpu_count() or 1):
            self.free.put(None)  # not started

    @contextmanager
    def lend(self):
        """Lend a sandbox. One that fails is closed."""
        sandbox = self.free.get()
        kept = None
        try:
            sandbox = sandbox or self._start()
            yield sandbox
            kept = sandbox
        finally:
            self.free.put(kept)
            if sandbox and not kept:
                sandbox.close()

    def _start(self):
        if not self.kind:
            try:
                sandbox, self.kind = Namespaces(), Namespaces
                return sandbox
            except RuntimeError as problem:  # a container or kernel without them
                self.kind, self.downgrade = Monty, f" ({problem})"
        return self.kind()

    @property
    def backend(self):
        """What is in use and, if it is not namespaces, why."""
        with self.lend():
            return self.kind.layers + self.downgrade


class Namespaces:
    """The judge's end of a process of sandbox_worker.py. Raises RuntimeError if that fails."""

    layers = "namespaces, seccomp, rlimits"

    def __init__(self):
        self.control, theirs = socket.socketpair()
        # No site-packages, no environment but a hash seed: a set's order must not decide a verdict.
        # In a session of its own, because Ctrl-C is for us.
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", worker.__file__, f"judge={os.getpid()}"],
                stdin=theirs, stdout=subprocess.DEVNULL, cwd="/", env={"PYTHONHASHSEED": "0"},
                start_new_session=True)
        hello = self._hear(WORKER_SECONDS)
        process.wait()  # it goes on in a fork
        if hello != "ready":
            raise RuntimeError(hello)

    def _hear(self, seconds):
        self.control.settimeout(seconds)
        with suppress(OSError):
            if message := self.control.recv(1000):
                return message.decode()
        raise RuntimeError("the sandbox's process does not answer.")

    def run(self, code, name, given, cpu, seconds):
        """Run a program on the first input, or have one process answer calls (as JSON) until its
        time is over or it ends. Returns a Result for each answer: its word is `value`, or the
        reason why there is none. `judge` asks again, in a new process, about inputs after that: an
        earlier call may be why they have no answer."""
        kills = oom_kills()
        job = {"code": code, "name": name, "given": given, "cpu": cpu, "memory": MEMORY}
        with open(os.memfd_create("job"), "wb") as file, \
                open(os.memfd_create("answers"), "rb") as answers:
            file.write(json.dumps(job).encode())
            file.flush()
            with suppress(OSError):  # `_hear` notices
                socket.send_fds(self.control, [str(seconds).encode()], [file.fileno(),
                                                                        answers.fileno()])
            word = self._hear(seconds + WORKER_SECONDS)
            if word == "time" and oom_kills() != kills:
                raise RuntimeError("the kernel killed a program: the machine is out of memory.")
            answers.seek(0)
            *whole, rest = answers.read(worker.ANSWER_BYTES).split(worker.END)
        most = VALUE_BYTES if name else OUTPUT_BYTES
        return [read_answer(answer, most) for answer in whole[:len(given)]] or [
            Result("output" if len(rest) > most else word)]

    def close(self):
        self.control.close()  # the worker sees it and ends


def read_answer(answer, most):
    """Return the Result of an answer: `=` and a value, or `!` and the name of an error."""
    text = answer[1:most + 2].decode("utf-8", "replace")
    if answer[:1] == b"=":
        return Result("value", text) if len(answer) <= most + 1 else Result("output")
    return Result(text if text in ERRORS else "died")


class Monty:
    """A process of pydantic-monty: an interpreter of a part of Python, with limits of its own."""

    layers = f"pydantic-monty {monty.__version__}"

    def __init__(self):
        self.pool = monty.Monty(max_processes=1).__enter__()

    def run(self, code, name, given, _cpu, seconds):
        """Run a call, the first input. Returns its Result in a list.

        Beside the clock and the memory, calls of the host (files, unknown names) are limited. Time
        stands still and the seed is fixed: the same program gets the same verdict.
        """
        if not name:  # it has no standard input
            return [Result("unsupported")]
        limits = {"max_feed_duration_secs": seconds, "max_memory": MEMORY << 18,
                  "max_suspensions": 8}
        fixed = {"datetime": datetime.datetime(2000, 1, 1), "sleep": "zero",
                 "random_start": {"seed": 0}}
        modules = {"string": monty.ExternalModule(CONSTANTS)}
        try:
            with self.pool.checkout(limits=limits, os_policy=fixed, external_modules=modules,
                                    assert_message_annotations=False) as session:
                # The format makes it a text of bounded size, whatever `answer` returns.
                line = session.feed_run(f"{ANSWER}\nf'{{answer()!s:.{VALUE_BYTES + 2}}}'", inputs={
                    "code": code, "name": name, "call": given[0]},
                    print_callback=monty.CollectString(1 << 16))
        except monty.MontyCrashedError as problem:
            return [Result("time" if problem.timed_out else "died")]
        except monty.MontyError as problem:  # a limit, or an error outside of `answer`
            kind = type(problem.exception()).__name__
            return [Result("time" if kind == "TimeoutError" else monty_word(kind, str(problem)))]
        kind, _, message = line[1:].partition(" ")
        return [read_answer(line.encode(), VALUE_BYTES) if line[:1] == "=" else
                Result(monty_word(kind, message))]

    def close(self):
        self.pool.__exit__(None, None, None)


CONSTANTS = {name: value for name, value in vars(string).items() if isinstance(value, str)}
ANSWER = "\n".join(map(inspect.getsource, (
    worker.define, worker.answer_call, encode, worker.decode, place))) + """
import json
names = {"__name__": "__main__", "print": lambda *a, **k: None}
exec("import bisect, collections, functools, itertools, math, os, random, re, sys\\n"
     "from collections import Counter, defaultdict, deque", names)

def answer():
    try:
        return "=" + answer_call(define(code, name, names), call)
    except BaseException as error:
        return "!" + type(error).__name__ + " " + str(error)
"""


def monty_word(kind, message):
    """Return the word of an exception in Monty: `unsupported` where CPython would not raise it.
    Names are looked up without importing: the submission chooses them."""
    names = [*re.findall(r"'(\w+)'", message), "", ""]
    lacks = re.search("^The monty syntax parser|^Wildcard imports|Internal error in monty", message)
    if kind == "ModuleNotFoundError":
        lacks = names[0] in sys.stdlib_module_names
    elif kind == "NameError":
        lacks = names[0] in worker.PRELUDE or hasattr(builtins, names[0])
    elif kind in ("ImportError", "AttributeError"):
        owner, name = names[:2] if kind == "AttributeError" else names[1::-1]
        known = sys.modules if owner in sys.stdlib_module_names else vars(builtins)
        lacks = hasattr(known.get(owner), name)
    if lacks:
        return "unsupported"
    return kind if kind in ERRORS else "ValueError" if kind == "JSONDecodeError" else "Exception"


SUBMISSIONS = WorkerPool()
os.register_at_fork(after_in_child=SUBMISSIONS.__init__)  # its sandboxes are the parent's
