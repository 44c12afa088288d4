"""The process inside the sandbox: it runs submissions, one at a time, and kills them.

`sandbox.Namespaces` starts this file as a program (standard library only, no environment but a hash
seed) and sends it two files for each job: the submission with its inputs, and an empty one. The
worker forks a child, which gives up every right that the system can take, runs the submission and
writes its answers. When it ends, or the judge hangs up, the worker kills what is left and says why
it ended. Expected outputs never come here, because a child is a fork of this process.

Layers: namespaces (own users, processes, network, IPC, and a file system of the standard library
alone), seccomp for what namespaces do not hold, and rlimits.
"""

import builtins
import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
import threading
from contextlib import suppress
from types import SimpleNamespace

OUTPUT_BYTES = 1 << 20  # of a program
ANSWER_BYTES = OUTPUT_BYTES + 3  # of all answers of a process, and of any file
END = b"\xff"  # of an answer: neither JSON nor any other text has it
ERRORS = tuple(sorted(n for n, e in vars(builtins).items()
                      if isinstance(e, type) and issubclass(e, Exception)))
STDLIB = sysconfig.get_path("stdlib")
LIBC = ctypes.CDLL(None, use_errno=True)

# The names that a submission need not import, and what it often imports, loaded before any fork.
PRELUDE = {"__name__": "__main__", "exit": sys.exit, "quit": sys.exit}
exec("""
from typing import *; from itertools import *; from heapq import *; from collections import *
from bisect import *; from functools import cache, cmp_to_key, lru_cache, reduce
from math import ceil, floor, gcd, inf, sqrt
import bisect, collections, functools, heapq, itertools, math, os, random, re, string, sys
import copy, datetime, decimal, fractions, hashlib, operator, queue, statistics
""", PRELUDE)


def main():
    """Enter the namespaces, say so, then run jobs until the judge hangs up."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.memfd_create("nothing"), 0)
    try:
        own_pids = enter_namespaces()
    except OSError as problem:
        control.send(f"no namespaces: {problem}".encode())
        return
    control.send(b"ready")
    gc.freeze()  # a collection in a child would copy the pages that it shares with us
    with suppress(BrokenPipeError):
        while (job := socket.recv_fds(control, 99, 2))[0]:
            # NOTE unshare(NEWPID) works once, so we return to our own namespace before each fork.
            call(LIBC.setns, own_pids, NEWPID)
            call(LIBC.unshare, NEWPID | NEWIPC)
            word = run_job(float(job[0]), *job[1], control)
            for file in job[1]:
                os.close(file)
            control.send(word.encode())


def run_job(seconds, job, answers, control):
    """Run one child until it ends, the judge hangs up or the seconds are over. Returns `time` if it
    was killed, else `died`. The first process of a namespace cannot kill itself: only we can, or
    the kernel, at its limit of CPU time (or out of memory, which the judge sees for itself)."""
    if (pid := os.fork()) == 0:
        try:
            os.setsid()  # else its kill(0) would reach our group, outside of the namespace
            os.dup2(answers, 3)
            job = json.loads(os.pread(job, os.fstat(job).st_size, 0))
            confine(job)
            serve(job)
        finally:
            os._exit(1)
    poll, child = select.poll(), os.pidfd_open(pid)
    poll.register(control, select.POLLRDHUP)
    poll.register(child, select.POLLIN)
    poll.poll(1000 * seconds)
    os.kill(pid, signal.SIGKILL)  # and with it the other processes of its namespace
    status = os.waitpid(pid, 0)[1]
    os.close(child)
    return "time" if os.waitstatus_to_exitcode(status) == -signal.SIGKILL else "died"


# ---- What a child does ---------------------------------------------------------------------------
def confine(job):
    """In the child: redirect the standard streams, drop all rights, set the limits."""
    for fd in range(3):  # files of this child alone
        os.dup2(os.memfd_create("stream"), fd)
    os.closerange(4, 1 << 16)
    call(LIBC.capset, struct.pack("Ii", 0x20080522, 0), bytes(24))
    refuse_calls()
    if not job["name"]:
        os.write(0, job["given"][0].encode("utf-8", "replace"))
        os.lseek(0, 0, os.SEEK_SET)
    for what, limit in {"CPU": job["cpu"], "AS": job["memory"] << 20, "STACK": 64 << 20, "CORE": 0,
                        "FSIZE": ANSWER_BYTES, "NOFILE": 64, "NPROC": 32}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (limit, limit))
    random.seed(0)  # the same program gets the same verdict


def serve(job):
    """Answer each call with `=` and the value, or `!` and the error. A program is one call, and its
    output is the value."""
    function = None
    if job["name"]:  # its answers are values: what it prints goes nowhere
        sys.stdout = sys.stderr = SimpleNamespace(write=len, flush=bool)
    for given in job["given"]:
        try:
            if job["name"]:
                function = function or define(job["code"], job["name"], PRELUDE)
                answer = b"=" + answer_call(function, given).encode()
            else:
                answer = b"=" + run_program(job["code"])
        except BaseException as error:
            # The name of its builtin class: no word of the program leaves the child.
            names = (kind.__name__ for kind in (*type(error).__mro__, Exception))
            answer = b"!" + next(name for name in names if name in ERRORS).encode()
        os.write(3, answer + END)


def run_program(code):
    """Run a whole program between standard input and standard output. Returns its output."""
    try:
        exec(compile(code, "<program>", "exec"), PRELUDE)
        threading._shutdown()  # wait for its threads
        sys.stdout.flush()
    except SystemExit as leaving:
        if leaving.code:
            os._exit(1)
        sys.stdout.flush()
    except OSError:
        if os.fstat(1).st_size <= OUTPUT_BYTES:  # else the judge sees that there is too much
            raise
    return os.pread(1, OUTPUT_BYTES + 1, 0)


# ---- What Monty runs too: it gets the source of these functions, so they use only what it has ----
def define(code, name, names):
    """Run `code`. Return the method `name` of its class Solution, or else its function `name`."""
    exec(code, names)
    solution = names.get("Solution")
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    if name not in names:
        raise NameError(name)
    return names[name]


def answer_call(function, call):
    """Return the value of a call with a list of arguments; both are JSON."""
    return json.dumps(encode(function(*decode(json.loads(call)))))


def encode(value):
    """Return a plain value as JSON has it: a tuple, set or dict becomes {type: its parts}, those of
    a set in the order of `place`. Raises TypeError for any other."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(v) for v in value]
    for kind in (tuple, set, frozenset, dict):
        if isinstance(value, kind):
            parts = (value.items() if kind is dict else value if kind is tuple else
                     sorted(value, key=place))
            return {kind.__name__: [encode(p) for p in parts]}
    raise TypeError("not a plain value")


def place(value):
    """Return the key that sorts the elements of a set, which have another order in each process:
    numbers by value, then the others by their text."""
    number = isinstance(value, (int, float))
    return (0, value, "") if number else (1, 0, json.dumps(encode(value)))


def decode(coded):
    """Invert `encode`."""
    if isinstance(coded, list):
        return [decode(c) for c in coded]
    if not isinstance(coded, dict):
        return coded
    [(kind, parts)] = coded.items()
    kinds = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
    return kinds[kind]([decode(p) for p in parts])


# ---- Layers --------------------------------------------------------------------------------------
NEWNS, NEWIPC, NEWUTS, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x8000000, 0x4000000, 0x10000000, 0x20000000, 0x40000000)
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
# The machine's number in seccomp; the calls pivot_root and clone; then those to refuse, which
# namespaces and limits do not confine: fork and vfork; unshare; socket and io_uring_setup (vsock
# has no namespace); add_key, request_key and keyctl (the keys are the judge's); shmget, semget and
# msgget (no limit counts their memory).
CALLS = {
    "x86_64": (0xC000003E, 155, 56, 57, 58, 272, 41, 425, 248, 249, 250, 29, 64, 68),
    "aarch64": (0xC00000B7, 41, 220, 97, 198, 425, 217, 218, 219, 194, 190, 186)}


def call(function, *arguments):
    """Call a C function. Raises OSError where it returns -1."""
    if function(*(a.encode() if isinstance(a, str) else a for a in arguments)) == -1:
        raise OSError(f"{function.__name__}: {os.strerror(ctypes.get_errno())}")


def enter_namespaces():
    """Fork into new namespaces and continue there. Return a descriptor of the PID namespace. Raises
    OSError if the system refuses."""
    if sys.platform != "linux" or os.uname().machine not in CALLS:
        raise OSError("only Linux on x86-64 and aarch64 has them")
    # If memory runs out, Linux kills a submission before the training run.
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as score:
        score.write(b"1000")
    os.chdir(STDLIB)  # now: it may lie in a folder that only root enters
    if os.getuid() == 0:  # NPROC does not limit root's threads, so become an unused user
        os.setgroups([])
        os.setresgid(*3 * [100_000 + os.getpid()])
        os.setresuid(*3 * [100_000 + os.getpid()])
    user, group = os.getuid(), os.getgid()
    call(LIBC.unshare, NEWUSER | NEWNS | NEWIPC | NEWUTS | NEWPID | NEWNET)
    LIBC.prctl(4, 1)  # PR_SET_DUMPABLE, or else the map of users belongs to root
    for name, text in [("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                       ("gid_map", f"0 {group} 1")]:
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    if os.fork():
        os._exit(0)
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    build_root("/proc")  # a folder that always exists and, unlike /tmp, never holds our library
    return own_pids


def build_root(root):
    """Make the children's file system: the current folder (the standard library), read-only and
    without installed packages."""
    call(LIBC.mount, "none", "/", None, MS_REC | MS_PRIVATE, None)
    call(LIBC.mount, "tmpfs", root, "tmpfs", 0, "size=1m,mode=755")
    os.makedirs(root + STDLIB)
    call(LIBC.mount, ".", root + STDLIB, None, MS_BIND, None)
    for installed in (f"{root}{STDLIB}/site-packages", f"{root}{STDLIB}/dist-packages"):
        if os.path.isdir(installed):
            call(LIBC.mount, "tmpfs", installed, "tmpfs", 0, "size=4k")
    # mount_setattr(root, AT_RECURSIVE, {MOUNT_ATTR_RDONLY})
    call(LIBC.syscall, 442, -100, root, 0x8000, struct.pack("4Q", 1, 0, 0, 0), 32)
    os.chdir(root)
    call(LIBC.syscall, CALLS[os.uname().machine][1], ".", ".")  # pivot_root
    call(LIBC.umount2, ".", MNT_DETACH)
    os.chdir("/")


def refuse_calls():
    """Have seccomp refuse CALLS, with EPERM, so that an honest program goes on. clone() may start
    threads but no processes."""
    load, equal, at_least, has, end = 0x20, 0x15, 0x35, 0x45, 0x06  # in the language of BPF
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
    machine, _, clone, *refused = CALLS[os.uname().machine]
    # Lines are: operation, lines to skip if it holds, lines to skip if not, value.
    lines = [(load, 0, 0, 4), (equal, 1, 0, machine), (end, 0, 0, kill), (load, 0, 0, 0),
             (at_least, 0, 1, 1 << 30), (end, 0, 0, eperm),  # x86-64's second numbers (x32)
             (equal, 0, 1, 435), (end, 0, 0, enosys)]  # clone3() hides its flags; libc has clone()
    for number in refused:
        lines += [(equal, 0, 1, number), (end, 0, 0, eperm)]
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (has, 1, 0, 0x10000),  # CLONE_THREAD
              (end, 0, 0, eperm), (end, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call(LIBC.prctl, 22, 2, struct.pack("HP", len(lines), ctypes.addressof(program)))


if __name__ == "__main__":
    main()
