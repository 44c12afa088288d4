"""The judge of programs: it runs a submission in the sandbox and compares the outputs itself.

A submission is a program that a model wrote. It runs in a child of a sandbox worker
(sandbox_worker.py), never in this process. The child gets one input, and its output is compared
*here* with the expected value. A submission can write to every descriptor it has, exit, raise,
patch the builtins or take over its interpreter: without the expected value it can only guess.
Values arrive as JSON of plain types, so no `__eq__` of the submission takes part in a comparison.

Reading order: `judge`, `Submission`, `compare`; then `WorkerPool`, `Worker`, `Child`.
"""

import atexit
import json
import math
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing, contextmanager, suppress
from decimal import Decimal
from typing import NamedTuple

from minragen.environments import sandbox_worker
from minragen.environments.sandbox_worker import ERRORS, RAISED, decode, encode, json_line

OUTPUT_BYTES = 1 << 20  # of one answer; more fails the test
TOTAL_SECONDS = 40.0  # of the clock for all tests of a submission
CHECK_SECONDS = 20  # CPU of a data set's own test code
TOLERANCE = 1e-6  # relative, where a float is expected
NUMERAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")


class Case(NamedTuple):
    """One test. given: text on standard input, or a list of arguments; expected: text or value;
    either: the value may also be the only one in the list `expected` (TACO's convention)."""

    given: object
    expected: object
    either: bool = False


class Result(NamedTuple):
    """The outcome of one test: whether it passed, one word, and the value if there is one. word:
    passed, wrong, time, output, died, skipped, or the name of a builtin exception."""

    passed: bool
    word: str
    value: object = None


class Limits(NamedTuple):
    """Limits of one test, and of the memory of a process."""

    cpu: int = 2  # whole seconds
    memory: int = 512  # MiB of address space
    patience: float = 0.0  # seconds of the clock; 0: derived from `cpu`


def judge(code, cases, name="", limits=None, pool=None):
    """Run `code` on every case: call its function `name`, or without a name run it as a program.

    Tests after one that runs out of time are skipped, so that an endless loop costs one limit.
    returns: list of Result, one for each case      raises: RuntimeError if the sandbox fails
    """
    results = []
    with (pool or SUBMISSIONS).borrow() as worker, \
            closing(Submission(worker, code, name, limits or Limits())) as submission:
        for case in cases:
            late = results and results[-1].word in ("time", "skipped")
            results.append(Result(False, "skipped") if late else
                           compare(submission.run(case.given), case))
    return results


def judge_check(code, name, check, limits=None, pool=None, referees=None):
    """Run a data set's own test program, which defines `check(candidate)`, on function `name`.

    The test program runs in a worker of another pool, because a submission is a fork of its worker
    and can read whatever that worker has seen. Only plain values pass between the two.
    returns: (assertions that held, assertions that depended on a call)
    """
    reply, late = b"", False
    with (referees or REFEREES).borrow() as referee, \
            closing(Child(referee, "check", check, "", Limits(CHECK_SECONDS))) as test, \
            (pool or SUBMISSIONS).borrow() as worker, \
            closing(Submission(worker, code, name, limits or Limits())) as submission:
        while True:
            word, line = test.converse(reply, submission.end, by_line=True)
            message = json.loads(line) if word == "line" else {"passed": 0, "total": 1}
            if "call" not in message:
                return message["passed"], message["total"]
            arguments = decode(message["call"])
            result = Result(False, "time") if late else submission.run(*arguments)
            late = result.word == "time"
            reply = json_line({"value": encode(result.value)} if result.word == "value" else
                              {"error": result.word})


class Submission:
    """One child for each run of a program, or for all calls of a function until one fails."""

    def __init__(self, worker, code, name, limits):
        self.worker, self.code, self.name, self.limits = worker, code, name, limits
        self.child, self.end = None, time.monotonic() + TOTAL_SECONDS

    def close(self):
        if self.child:
            self.child.close()

    def run(self, given, keywords=None):
        """Return a Result whose word is `value`, or the reason why there is none."""
        if not self.name:
            return self._run_program(given)
        fresh = self.child is None
        result = self._call(given, keywords or {})
        if result.word == "time" and not fresh:  # earlier calls may have used it up
            result = self._call(given, keywords or {})
        return result

    def _run_program(self, text):
        with closing(Child(self.worker, "program", self.code, "", self.limits)) as child:
            word, output = child.converse(text.encode("utf-8", "replace"), self._deadline())
            failure = child.finish(word)
        if word == "end" and child.status == 0:
            return Result(False, "value", output.decode("utf-8", "replace"))
        return Result(False, failure)

    def _call(self, arguments, keywords):
        self.child = self.child or Child(self.worker, "calls", self.code, self.name, self.limits)
        call = json_line(encode([list(arguments), keywords]))
        word, line = self.child.converse(call, self._deadline(), by_line=True)
        if word == "line":
            with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError,
                          RecursionError):
                message = json.loads(line)
                if message.get("error") in ERRORS:
                    return Result(False, message["error"])
                return Result(False, "value", decode(message["value"]))
            word = "died"  # it has written into the protocol's pipe
        child, self.child = self.child, None
        return Result(False, child.finish(word))

    def _deadline(self):
        # Longer than `cpu`, so that a busy machine fails no honest program.
        patience = self.limits.patience or 3.0 * self.limits.cpu + 2.0
        return min(time.monotonic() + patience, self.end)


def compare(result, case):
    """Return a run's result with the word `value` replaced by `passed` or `wrong`."""
    if result.word != "value":
        return result
    same = same_output if isinstance(case.given, str) else same_value
    wanted = [case.expected]
    if case.either and isinstance(case.expected, list) and len(case.expected) == 1:
        wanted += case.expected
    passed = any(same(result.value, want) for want in wanted)
    return result._replace(passed=passed, word="passed" if passed else "wrong")


def same_value(got, want):
    """Return whether two values are equal, within TOLERANCE where a float is expected. 1 is 1.0 and
    True, a tuple is a list, and keys are compared as text, as JSON has them."""
    if isinstance(want, (list, tuple)):
        return (isinstance(got, (list, tuple)) and len(got) == len(want)
                and all(map(same_value, got, want)))
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return False
        got, want = ({str(k): v for k, v in d.items()} for d in (got, want))
        return got.keys() == want.keys() and all(same_value(got[k], want[k]) for k in want)
    if isinstance(want, float):
        return isinstance(got, (int, float)) and close(got, want)
    return got == want


def close(got, want):
    with suppress(OverflowError):  # an integer beyond all floats
        return got == want or math.isclose(got, want, rel_tol=TOLERANCE, abs_tol=1e-9)
    return False


def same_output(got, want):
    """Return whether two outputs have the same words, by `same_word`, on the same lines."""
    got, want = ([line.split() for line in text.strip().splitlines()] for text in (got, want))
    return len(got) == len(want) and all(
        len(g) == len(w) and all(map(same_word, g, w)) for g, w in zip(got, want))


def same_word(got, want):
    """Return whether two words are the same text or, if one has a point, the same number."""
    if got == want:
        return True
    point = {".", "e", "E"}
    if (max(len(got), len(want)) > 400 or not point & {*got, *want}  # 007 is not 7
            or not NUMERAL.fullmatch(got) or not NUMERAL.fullmatch(want)):
        return False
    if not point & set(want):  # an integer is expected: 3.0 is 3, 2.9999999 is not
        return Decimal(got) == int(want)
    return math.isfinite(float(got)) and close(float(got), float(want))


class WorkerPool:
    """As many workers as there are cores. A thread borrows one; further threads wait. isolation:
    namespaces, plain, bare (only limits, as on macOS) or auto (namespaces, else plain)."""

    def __init__(self, isolation="auto", size=None):
        self.isolation = isolation
        self.size = size or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity")
                                else range(os.cpu_count() or 1))
        self.reset()

    def reset(self):
        """Forget all workers: after a fork they are the parent's."""
        self.slots, self.idle, self.lock = (threading.BoundedSemaphore(self.size), [],
                                            threading.Lock())

    @contextmanager
    def borrow(self):
        """Lend a worker for a `with`. An exception closes it."""
        with self.slots:
            with self.lock:
                worker = self.idle.pop() if self.idle else self._start()
            try:
                yield worker
            except BaseException:
                worker.close()
                raise
            self.idle.append(worker)

    def _start(self):
        if self.isolation == "auto":
            with suppress(RuntimeError):  # a container or kernel without them
                worker, self.isolation = Worker("namespaces"), "namespaces"
                return worker
            self.isolation = "plain"
        worker = Worker(self.isolation)
        if not {"namespaces", "landlock"} & set(worker.layers):
            warnings.warn(f"no isolation of files: programs of the model run with {worker.layers}. "
                          f"Use Linux with namespaces or Landlock.", RuntimeWarning, stacklevel=2)
        return worker

    @property
    def layers(self):
        """The layers of isolation in use."""
        with self.borrow() as worker:
            return worker.layers

    def close(self):
        """Close all idle workers."""
        while self.idle:
            self.idle.pop().close()


class Worker:
    """The judge's end of a process of sandbox_worker.py. Raises RuntimeError if it fails."""

    def __init__(self, isolation):
        self.control, theirs = socket.socketpair()
        self.control.settimeout(60)
        # No site-packages, no environment but a hash seed: a set's order must not decide a verdict.
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", sandbox_worker.__file__, isolation,
             f"judge={os.getpid()}"],
            stdin=theirs, stdout=subprocess.DEVNULL, cwd="/", env={"PYTHONHASHSEED": "0"},
            start_new_session=True)  # Ctrl-C is for us; the worker ends when we hang up
        theirs.close()
        hello, _ = self.talk(sandbox_worker.receive)
        self.layers, self.folder = hello.get("layers"), hello.get("folder")
        try:
            if not self.layers:
                raise RuntimeError(f"the sandbox did not start: {hello['failed']}.")
            first = Submission(self, "print(input())", "", Limits(5)).run("ready")
            if first.value != "ready\n":
                raise RuntimeError(f"the sandbox {self.layers} runs no program: {first.word}.")
        except BaseException:
            self.close()
            raise

    def talk(self, function, *arguments):
        """Call sandbox_worker's `send` or `receive`. Raises RuntimeError if the worker fails."""
        try:
            return function(self.control, *arguments)
        except (OSError, EOFError) as problem:
            raise RuntimeError(f"the sandbox's process does not answer: {problem}.") from None

    def close(self):
        """Hang up, so that the worker cleans up and ends; else kill it."""
        self.control.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)


class Child:
    """One process of a submission, seen from the judge: two pipes and, once closed, `status` (exit
    code, or minus the signal) and `cpu` (seconds used). mode: program, calls or check."""

    def __init__(self, worker, mode, code, name, limits):
        self.worker, self.limits, self.status, self.received = worker, limits, None, bytearray()
        (their_in, write_end), (read_end, their_out) = os.pipe(), os.pipe()
        os.set_blocking(write_end, False)
        self.write_end = os.fdopen(write_end, "wb", buffering=0)
        self.read_end = os.fdopen(read_end, "rb", buffering=0)
        try:
            job = {"mode": mode, "code": code, "name": name, **limits._asdict()}
            worker.talk(sandbox_worker.send, job, (their_in, their_out))
        finally:
            os.close(their_in)
            os.close(their_out)

    def converse(self, data, deadline, by_line=False):
        """Write `data` and read: ("line", the line), ("end", all output), ("time", b"") after the
        deadline, or ("output", b"") after too much of it."""
        poll, data = select.poll(), memoryview(data)
        poll.register(self.read_end, select.POLLIN)
        poll.register(self.write_end, select.POLLOUT)
        while True:
            if by_line and b"\n" in self.received:
                line, _, self.received = self.received.partition(b"\n")
                return "line", line
            if len(self.received) > OUTPUT_BYTES:
                return "output", b""
            left = deadline - time.monotonic()
            ready = poll.poll(left * 1000) if left > 0 else []
            if not ready:
                return "time", b""
            for fd, _ in ready:
                if fd == self.read_end.fileno():
                    piece = self.read_end.read(1 << 16)
                    if not piece:
                        return "end", self.received
                    self.received += piece
                elif not (data := self._write(data)):
                    poll.unregister(fd)
                    if not by_line:
                        self.write_end.close()

    def _write(self, data):
        """Write what the pipe takes. Returns the rest."""
        with suppress(BrokenPipeError):  # a program need not read
            return data[self.write_end.write(data[:1 << 16]) or 0:]  # None: the pipe is full
        return data[:0]

    def finish(self, word):
        """Close it after `converse` returned `word`. Returns the word of a failed test."""
        self.close(patience=0.5 if word == "end" else 0)
        if word != "end":
            return word
        if self.status < 0:
            return "time" if self.cpu >= 0.9 * self.limits.cpu else "died"
        raised = self.status - RAISED
        return ERRORS[raised] if 0 <= raised < len(ERRORS) else "died"

    def close(self, patience=0):
        """Have it killed, unless it ends within `patience` seconds."""
        if self.status is not None:
            return
        self.status = 0
        self.write_end.close()
        self.read_end.close()
        self.worker.talk(sandbox_worker.send, {"stop": patience})
        end, _ = self.worker.talk(sandbox_worker.receive)
        self.status, self.cpu = end["status"], end["cpu"]


SUBMISSIONS, REFEREES = WorkerPool(), WorkerPool()
for _pool in (SUBMISSIONS, REFEREES):
    os.register_at_fork(after_in_child=_pool.reset)
    atexit.register(_pool.close)
