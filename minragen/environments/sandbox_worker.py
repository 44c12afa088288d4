"""The process inside the sandbox: it runs submissions, one at a time, and kills them.

`sandbox.Worker` starts this file as a program (standard library only, no environment but a hash
seed) and sends it jobs over a socket: a program and two pipes to the judge. For each job the worker
forks a child, takes every right from it that the system can take, and runs the program there. On
`stop` it kills the child and reports how it ended. Expected outputs never come here, because a
child is a fork of this process and can read its memory.

Reading order: `main`, `run_job`, `confine`, the kinds of job, `Isolation`. Layers, where offered:

    namespaces   own users, processes, network, IPC, and a file system of the standard library alone
    landlock     without namespaces: the same file system, by rule instead of by mount
    user         as root without namespaces: another user id
    seccomp      no new processes, programs, sockets, signals to others, ptrace, chmod, ... at all
    rlimits      CPU seconds, address space, file size, open files, threads, core files
"""

import ast
import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
import types

MAX_THREADS = 32  # of a child, where the limit can be set for it alone
MAX_FILES = 64  # open at a time
MAX_FILE_BYTES = 8 << 20  # of one file; with namespaces, of all files together
STACK_BYTES = 64 << 20
RAISED = 64  # exit code of a program that raised: this plus the index in ERRORS
ERRORS = tuple(sorted(n for n, e in vars(builtins).items()
                      if isinstance(e, type) and issubclass(e, Exception)))
STDLIB = sorted({*map(sysconfig.get_path, ("stdlib", "platstdlib")), os.path.dirname(os.__file__)})
LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True)
prctl = LIBC.prctl if LINUX else lambda *arguments: None
CHILD_UID = 100_000  # as root, children run as this plus the worker's process id

# Modules that contest programs use without an import, and often import; loaded before any fork.
SITE_MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "os", "random",
                "re", "string", "sys")
PRELOADED = ("copy", "datetime", "decimal", "fractions", "hashlib", "operator", "queue",
             "statistics", "typing")
MODULES = {name: importlib.import_module(name) for name in SITE_MODULES + PRELOADED}
# The names that a program starts with; `pow` and `open` are the builtins.
PRELUDE = {name: value for module in ("typing", "itertools", "heapq", "bisect", "collections")
           for name, value in vars(MODULES[module]).items() if not name.startswith("_")}
PRELUDE |= {name: MODULES[name] for name in SITE_MODULES}
PRELUDE |= {name: getattr(MODULES[module], name) for module, names in (
    ("functools", "cache cmp_to_key lru_cache reduce"), ("math", "ceil floor gcd inf sqrt"))
    for name in names.split()}


def main():
    """Build the isolation, report its layers, then run jobs until the judge hangs up."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    try:
        isolation = Isolation(sys.argv[1])
    except OSError as problem:
        send(control, {"failed": str(problem)})
        return
    send(control, {"layers": isolation.layers, "folder": isolation.folder})
    gc.freeze()  # a collection in a child would copy the pages that it shares with us
    try:
        with contextlib.suppress(EOFError):
            while True:
                run_job(control, isolation, *receive(control))
    finally:
        if isolation.folder:
            shutil.rmtree(isolation.folder, ignore_errors=True)


def send(control, message, fds=()):
    """Send one message: its length, its JSON, and file descriptors beside it."""
    data = json.dumps(message).encode()
    data = struct.pack("!I", len(data)) + data
    sent = socket.send_fds(control, [data], fds) if fds else 0
    control.sendall(data[sent:])


def receive(control):
    """Return (message, file descriptors). Raises EOFError if the other side has hung up."""
    head, fds, *_ = socket.recv_fds(control, 4, 2)
    size = struct.unpack("!I", head + read_exactly(control, 4 - len(head)))[0]
    return json.loads(read_exactly(control, size)), fds


def read_exactly(control, count):
    data = b""
    while len(data) < count:
        piece = control.recv(count - len(data))
        if not piece:
            raise EOFError("the other side hung up")
        data += piece
    return data


def run_job(control, isolation, job, fds):
    """Run one child from start to end. Answer `stop` with its exit status and CPU seconds."""
    isolation.prepare()
    pid = os.fork()
    if pid == 0:
        try:
            confine(isolation, job, fds)
            {"program": run_program, "calls": serve_calls, "check": run_check}[job["mode"]](job)
        finally:
            os._exit(RAISED - 1)
    for fd in fds:
        os.close(fd)
    patience = 0
    try:
        patience = receive(control)[0]["stop"]
    finally:  # also where the judge has died
        status, usage = kill_and_wait(pid, patience)
        isolation.clear()
    send(control, {"status": os.waitstatus_to_exitcode(status),
                   "cpu": usage.ru_utime + usage.ru_stime})


def kill_and_wait(pid, patience):
    """Wait up to `patience` seconds for the child's end, then kill it and all that it started.
    Returns its wait status and resource usage."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        time.sleep(min(patience, 0.01))
        patience = 0
    for _ in range(int(patience * 1000)):
        # WNOWAIT keeps the zombie, and so its id, until the group is killed.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.001)
    for kill in (os.killpg, os.kill):  # the second: it may have no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    # A grandchild that has left the group is now our child (PR_SET_CHILD_SUBREAPER).
    while orphans := children():
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)
    return status, usage


def children():
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(pid) for pid in listed.read().split()]
    return []  # no /proc: macOS, or namespaces, where the kernel kills all orphans


# ---- What a child does ---------------------------------------------------------------------------
def confine(isolation, job, fds):
    """In the child: redirect the standard streams, drop all rights, set the limits."""
    os.setsid()
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the worker
    null = os.open(os.devnull, os.O_RDWR)
    source, sink = (os.dup2(fd, 40 + i, inheritable=False) for i, fd in enumerate(fds))
    if job["mode"] == "program":
        streams = (source, sink, null)
    else:  # the protocol has its own pipes: what a function prints is not its result
        streams = (null, null, null, source, sink)
    for fd, origin in enumerate(streams):
        os.dup2(origin, fd)
    os.chdir(isolation.box)
    isolation.restrict()
    os.closerange(len(streams), 1 << 16)
    limits = {"CPU": job["cpu"], "CORE": 0, "FSIZE": MAX_FILE_BYTES, "NOFILE": MAX_FILES}
    if isolation.namespaces or isolation.uid:  # the limit counts this child alone
        limits["NPROC"] = MAX_THREADS
    elif not isolation.seccomp:  # it counts all processes of our user: allow no more
        limits["NPROC"] = 1
    if LINUX:
        limits["STACK"] = STACK_BYTES
    if sys.platform != "darwin":  # which refuses it
        limits["AS"] = job["memory"] << 20
    for what, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (limit, limit))
    random.seed(0)  # the same program gets the same verdict


def fresh_main():
    """Return the namespace of a new `__main__` module that holds the prelude."""
    module = types.ModuleType("__main__")
    vars(module).update(PRELUDE)
    sys.modules["__main__"] = module
    builtins.exit = builtins.quit = sys.exit  # site.py, which is not loaded, would define them
    return vars(module)


def run_program(job):
    """Run a whole program between standard input and standard output, as if from a shell."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", errors="replace")
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8")
    code = 0
    try:
        exec(compile(job["code"], "<program>", "exec"), fresh_main())
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        code = RAISED + error_index(error)
    # The interpreter's own end. A normal exit would unwind through the worker's frames.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # the judge or the program has closed it
        sys.stdout.flush()
    os._exit(code & 255)


def error_index(error):
    """Return the index of its builtin class in ERRORS: no word of the program leaves the child."""
    return next(ERRORS.index(c.__name__) for c in (*type(error).__mro__, Exception)
                if c.__name__ in ERRORS)


def serve_calls(job):
    """Define the function, then answer each call, a line of JSON, with a value or an error."""
    names, function = fresh_main(), None
    with open(3, "rb") as calls, open(4, "wb") as results:
        for line in calls:
            try:
                if function is None:
                    exec(compile(job["code"], "<program>", "exec"), names)
                    function = find_function(names, job["name"])
                arguments, keywords = decode(json.loads(line))
                result = {"value": encode(function(*arguments, **keywords))}
            except BaseException as error:
                result = {"error": ERRORS[error_index(error)]}
            results.write(json_line(result))
            results.flush()


def find_function(names, name):
    """Return the method of `Solution` if there is one, else the function of that name."""
    solution = names.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    if not callable(names.get(name)):
        raise NameError(name)
    return names[name]


def run_check(job):
    """Run a data set's `check(candidate)`, whose `candidate` has the judge call the submission in
    another process. Every assertion that depends on a call counts, also after a failed one."""
    calls, results = os.fdopen(3, "rb"), os.fdopen(4, "wb", buffering=0)
    made = judged = passed = total = 0  # made: calls; judged: those made before the last assertion

    def candidate(*arguments, **keywords):
        nonlocal made
        made += 1
        results.write(json_line({"call": encode([arguments, keywords])}))
        reply = json.loads(calls.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return decode(reply["value"])

    def check(assertion):
        nonlocal judged, passed, total
        held = False
        with contextlib.suppress(Exception):
            held = bool(assertion())
        if made > judged:  # `assert True` does not count
            judged, passed, total = made, passed + held, total + 1

    names = {"__name__": "check", "candidate": candidate, "__check__": check}
    tree = ast.fix_missing_locations(CountAssertions().visit(ast.parse(job["code"])))
    try:
        exec(compile(tree, "<check>", "exec"), names)
        names["check"](candidate)
        failed = made == 0 or made > judged  # no call, or no assertion after the last call
    except Exception:
        failed = True
    results.write(json_line({"passed": passed, "total": total + failed}))


class CountAssertions(ast.NodeTransformer):
    """Turn `assert x` into `__check__(lambda: x)`."""

    def visit_Assert(self, node):
        counted = ast.parse("__check__(lambda: 0)").body[0]
        counted.value.args[0].body = node.test
        return ast.copy_location(counted, node)


# ---- Values as text ------------------------------------------------------------------------------
PLAIN = (int, float, str, list, dict, tuple, set, frozenset, complex, bytes)
MAX_KEYS = 4096  # of a dictionary or set; more that collide would occupy the judge


def json_line(message):
    return json.dumps(message).encode() + b"\n"


def encode(value):
    """Return a plain value as JSON: a type that JSON lacks becomes {type: parts}, and a subclass of
    a plain type that type, without its own __eq__. Raises TypeError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    plain = next((t for t in PLAIN if isinstance(value, t)), None)
    if plain in (int, float, str):
        return plain.__add__(value, plain())  # a subclass's own methods are not asked
    if plain is None:
        raise TypeError(f"not a plain value: {type(value).__name__}")
    parts = (dict.items(value) if plain is dict else (value.real, value.imag) if plain is complex
             else plain.__iter__(value))
    coded = [encode(list(p) if plain is dict else p) for p in parts]
    return coded if plain is list else {plain.__name__: coded}


def decode(coded):
    """Invert `encode`. Raises ValueError, TypeError, KeyError or OverflowError for other input."""
    if isinstance(coded, list):
        return [decode(c) for c in coded]
    if not isinstance(coded, dict):
        return coded
    (kind, parts), = coded.items()
    if kind in ("dict", "set", "frozenset") and len(parts) > MAX_KEYS:
        raise ValueError(f"{len(parts)} keys")
    make = {"dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes,
            "complex": lambda pair: complex(*pair)}[kind]
    return make([decode(p) for p in parts])


# ---- Isolation -----------------------------------------------------------------------------------
NEWNS, NEWIPC, NEWUTS, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x8000000, 0x4000000, 0x10000000, 0x20000000, 0x40000000)
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 32, 4096, 16384, 1 << 18, 2
NAMED_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def call(function, *arguments):
    """Call a C function. Raises OSError where it returns -1."""
    result = function(*(a.encode() if isinstance(a, str) else a for a in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
    return result


class Isolation:
    """The layers in use, and what they do to each child.

    kind: namespaces, plain (landlock and seccomp if offered) or bare (neither)
    uid: the children's; None if they keep ours      box: their folder, inside `folder` if on disk
    """

    def __init__(self, kind):
        self.layers, self.folder, self.seccomp, self.mounted = ["rlimits"], None, None, False
        # Before namespaces change what getuid() and getpid() return.
        uid = CHILD_UID + os.getpid() if os.getuid() == 0 else None
        prctl(4, 0)  # PR_SET_DUMPABLE: no process of our user may read our memory
        # If memory runs out, Linux kills a submission before the training run.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        self.namespaces = kind == "namespaces"
        if self.namespaces:
            self._enter_namespaces(uid)
            self.layers.append("namespaces")
        else:
            self.folder = tempfile.mkdtemp(prefix="minragen-")
            os.chmod(self.folder, 0o711)
            self.box = f"{self.folder}/box"
            prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
            if kind == "plain" and LINUX and LIBC.syscall(444, None, 0, 1) >= 1:
                self.layers.append("landlock")
            self.uid = uid if uid and may_become(uid) else None
            if self.uid:
                self.layers.append("user")
        if kind != "bare" and LINUX and os.uname().machine in SYSTEM_CALLS:
            self.seccomp = seccomp_program(os.uname().machine)
            self.layers.append("seccomp")

    def _enter_namespaces(self, outer_uid):
        """Enter own namespaces and go on in a fork, their first process; this one waits for it."""
        if not LINUX:
            raise OSError("only Linux has namespaces")
        enter_user_namespace(outer_uid)
        if (pid := os.fork()):
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.closerange(3, 1 << 10)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
        prctl(1, signal.SIGKILL)
        # NOTE unshare(NEWPID) works once, so `prepare` returns to this namespace before each fork.
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        build_root("/tmp")
        self.box, self.uid = "/box", 1 if outer_uid else None

    def prepare(self):
        """Before a fork: make an empty folder and, with namespaces, those of processes and IPC."""
        if not self.namespaces:
            os.mkdir(self.box, 0o700)
            if self.uid:
                os.chown(self.box, self.uid, self.uid)
            return
        if not self.mounted:
            call(LIBC.mount, "tmpfs", self.box, "tmpfs", 0,
                 f"size={MAX_FILE_BYTES},nr_inodes=256,mode=777")
            self.mounted = True
        call(LIBC.setns, self.own_pids, NEWPID)
        call(LIBC.unshare, NEWPID | NEWIPC)

    def restrict(self):
        """In the child: take another user and no capabilities; limit files and system calls."""
        if self.uid:
            become(self.uid, drop_groups=not self.namespaces)
        if LINUX:
            prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
            for capability in range(41):
                prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
            LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
        if "landlock" in self.layers:
            call(LIBC.syscall, 446, landlock_rules(self.box), 0)  # landlock_restrict_self
        if self.seccomp:
            code = ctypes.create_string_buffer(self.seccomp)
            program = struct.pack("HP", len(self.seccomp) // 8, ctypes.addressof(code))
            call(prctl, 22, 2, program, 0, 0)  # PR_SET_SECCOMP, FILTER, struct sock_fprog

    def clear(self):
        """After the child: delete its folder, whatever is in it. Links are not followed."""
        if self.namespaces:
            if os.listdir(self.box):  # an empty one stays: mounting is slow
                call(LIBC.umount2, self.box, MNT_DETACH)
                self.mounted = False
            return
        try:
            os.rmdir(self.box)
        except OSError:  # not shutil, which fails at a depth of a thousand folders
            script = 'rm -rf "$0" || { chmod -R u+rwx "$0"; rm -rf "$0"; }'
            os.waitpid(os.posix_spawnp("sh", ["sh", "-c", script, self.box],
                                       {"PATH": os.defpath}), 0)


def become(uid, drop_groups):
    if drop_groups:  # forbidden in a user namespace; `enter_user_namespace` drops them before
        os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def may_become(uid):
    """Return whether the system knows `uid` and lets that user enter the standard library."""
    pid = os.fork()
    if pid == 0:
        try:
            become(uid, drop_groups=True)
            for folder in STDLIB:
                os.chdir(folder)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def enter_user_namespace(outer_uid):
    """Call unshare(), with user 0 our own and, as root, user 1 `outer_uid`, who owns nothing. A
    second process writes the maps: only one outside can map two users."""
    wait, go = os.pipe()
    prctl(4, 1)  # else /proc/self/uid_map belongs to root
    if outer_uid:
        os.setgroups([])
    parent, second = os.getpid(), f"\n1 {outer_uid} 1" if outer_uid else ""
    maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1{second}",
            "gid_map": f"0 {os.getgid()} 1{second}"}
    if (pid := os.fork()) == 0:
        try:
            os.close(go)
            if os.read(wait, 1):  # nothing: unshare failed and our parent has ended
                for name, text in maps.items():
                    with open(f"/proc/{parent}/{name}", "w") as file:
                        file.write(text)
                os._exit(0)
        finally:
            os._exit(1)
    call(LIBC.unshare, NEWUSER | NEWNS | NEWIPC | NEWUTS | NEWPID | NEWNET)
    os.write(go, b"!")
    if os.waitpid(pid, 0)[1]:
        raise OSError("the maps of the user namespace could not be written")
    prctl(4, 0)


def build_root(root):
    """Make the file system of the children: read-only standard library, three devices, /box."""
    call(LIBC.mount, "none", "/", None, MS_REC | MS_PRIVATE, None)
    call(LIBC.mount, "tmpfs", root, "tmpfs", 0, "size=1m,mode=755")
    for path in (*STDLIB, *NAMED_DEVICES):
        target = root + path
        os.makedirs(target if path in STDLIB else os.path.dirname(target), exist_ok=True)
        if path in NAMED_DEVICES:
            open(target, "w").close()
        call(LIBC.mount, path, target, None, MS_BIND, None)
        # The flags that the outside has on this mount are locked and must be repeated.
        kept = os.statvfs(target).f_flag & (2 | 4 | 8)
        call(LIBC.mount, "none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept, None)
    for folder in STDLIB:  # what is installed beside the standard library is not part of it
        for name in ("site-packages", "dist-packages"):
            if os.path.isdir(f"{root}{folder}/{name}"):
                call(LIBC.mount, "tmpfs", f"{root}{folder}/{name}", "tmpfs", MS_RDONLY, "size=4k")
    os.mkdir(f"{root}/box")
    os.chdir(root)
    call(LIBC.syscall, 155 if os.uname().machine == "x86_64" else 41, ".", ".")  # pivot_root
    call(LIBC.umount2, ".", MNT_DETACH)
    call(LIBC.mount, "none", "/", None, MS_REMOUNT | MS_RDONLY, None)
    os.chdir("/")


def landlock_rules(folder):
    """Return a ruleset: read the standard library, use the devices and the own folder, no more."""
    abi = LIBC.syscall(444, None, 0, 1)  # which rights the kernel knows; 6: signals and sockets too
    files = {1: 0x1FFF, 2: 0x3FFF}.get(abi, 0x7FFF)
    attributes = struct.pack("QQQ", files, 3, 3)[:24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = call(LIBC.syscall, 444, attributes, len(attributes), 0)
    read_folder, use_file = 0b1100, 0b110
    rules = dict.fromkeys(STDLIB, read_folder) | dict.fromkeys(NAMED_DEVICES, use_file)
    for path, rights in {**rules, folder: files}.items():
        fd = os.open(path, os.O_PATH)
        call(LIBC.syscall, 445, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    return ruleset


# By architecture: audit number, clone, prlimit64, clone3, then the system calls that no submission
# needs: fork, vfork; execve, execveat; socket; kill, tkill, tgkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo, pidfd_*; ptrace, process_vm_*; setsid, setpgid, setpriority, sched_set*;
# unshare, setns, mount family, chroot; SysV IPC, mq_open, memfd_create, the key ring, bpf, perf,
# userfaultfd, io_uring, open_by_handle_at; chmod, chown, xattr and utime families, which Landlock
# lets through.
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, 302, 435, (
        57, 58, 59, 322, 41, 62, 200, 234, 129, 297, 424, 434, 438, 101, 310, 311, 112, 109, 141,
        142, 144, 203, 314, 272, 308, 165, 166, 155, 161, 428, 429, 430, 431, 432, 442, 29, 64, 68,
        240, 319, 447, 248, 249, 250, 321, 298, 323, 425, 426, 427, 304, 90, 91, 268, 452, 92, 93,
        94, 260, 188, 189, 190, 197, 198, 199, 132, 235, 261, 280)),
    "aarch64": (0xC00000B7, 220, 261, 435, (
        221, 281, 198, 129, 130, 131, 138, 240, 424, 434, 438, 117, 270, 271, 157, 154, 140,
        118, 119, 122, 274, 97, 268, 40, 39, 41, 51, 428, 429, 430, 431, 432, 442, 194, 190, 186,
        180, 279, 447, 217, 218, 219, 280, 241, 282, 425, 426, 427, 265, 52, 53, 452, 54, 55,
        5, 6, 7, 14, 15, 16, 88)),
}


def seccomp_program(machine):
    """Return the filter as BPF. Refused calls fail with EPERM, so an honest program that tries one
    goes on. clone() may only start threads, prlimit() only change oneself."""
    audit, clone, prlimit, clone3, refused = SYSTEM_CALLS[machine]
    allow, refuse, missing = 0x7FFF0000, 0x00050001, 0x00050000 | 38

    def step(code, k, then=0, otherwise=0):
        return struct.pack("HBBI", code, then, otherwise, k)

    load, equal, at_least, test, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [step(load, 4), step(equal, audit, 1, 0), step(give, refuse),  # another architecture
            step(load, 0), step(at_least, 0x40000000, 0, 1), step(give, refuse),  # x32
            # NOTE clone3 hides its flags in memory; told that it is missing, libc uses clone.
            step(equal, clone3, 0, 1), step(give, missing)]
    for number, is_allowed in ((clone, step(test, 0x10000, 0, 1)), (prlimit, step(equal, 0, 0, 1))):
        code += [step(equal, number, 0, 4), step(load, 16), is_allowed, step(give, allow),
                 step(give, refuse)]
    for number in refused:
        code += [step(equal, number, 0, 1), step(give, refuse)]
    return b"".join([*code, step(give, allow)])


if __name__ == "__main__":
    main()
