"""The theorems of the environment `lean`: bundled, drawn, or records of miniF2F."""

import functools
import itertools
import re
from typing import NamedTuple

import numpy as np

from minragen.environments.data import DATA, cached_until_changed, read_each

DRAWN = 120  # theorems of `draw_theorem` among the bundled ones
DEFAULT_HEADER = "import Mathlib\nopen BigOperators Real Nat Topology Rat"  # of miniF2F records


class Theorem(NamedTuple):
    name: str
    statement: str  # ends in `:= by`
    header: str = ""  # the Lean code before it; empty for the checker's default
    proof: tuple = ()  # one tactic a turn, if a proof is known


@functools.cache
def bundled_theorems():
    """One theorem of each shape, of those of data/theorems.lean and the first drawn ones."""
    theorems = []
    form = r"^(?:-- ([A-Z]): (.+)\n)?(theorem (\S+) [\s\S]*?:= by)\n((?:  .+\n)+)"
    for letter, choices, statement, name, proof in re.findall(
            form, (DATA / "theorems.lean").read_text(encoding="utf-8"), re.M):
        lines = [statement, *map(str.strip, proof.splitlines())]
        for choice in choices.split(" | "):
            claim, *tactics = fill(letter, choice, lines) if letter else lines
            theorems.append(Theorem(name, claim, "", tuple(tactics)))
    theorems += (draw_theorem(np.random.default_rng(k)) for k in range(DRAWN))
    return tuple({shape(theorem.statement): theorem for theorem in theorems}.values())


def fill(letter, choice, lines):
    """The lines with `choice` for the word `letter`; for `letter(x)` the choice's _ becomes x."""
    return [re.sub(rf"\b{letter}\b(?:\((\w+)\))?",
                   lambda found: choice.replace("_", found[1] or "_"), line) for line in lines]


def draw_theorem(rng):
    """Draw a theorem of propositional logic with its proof.

    A chain of implications leads from a fact to the goal. Distractors share a conclusion with the
    chain, but their premises cannot be proved: to choose, one has to look a step ahead.
    """
    atoms, names = ([*map(str, rng.permutation([*letters]))]
                    for letters in ("pqrstuvwxyz", "abcdefghk"))
    facts, (a, b, x, y, other) = [], (atoms.pop() for _ in range(5))

    def given(fact):
        facts.append(f"({names[-1]} : {fact})")
        return names.pop()

    def chain(path, start=""):
        proof = []
        for goal, premise in itertools.pairwise(path):
            proof.append(f"apply {given(f'{premise} → {goal}')}")
            for _ in range(rng.integers(1, 3)):
                given(f"{atoms.pop()} → {goal}")
        return (*proof, f"exact {start or given(path[-1])}")

    sign = rng.choice(["", "∧", "∨", "→"])
    goal = f"{a} {sign} {b}" if sign else a
    if sign == "∧":
        proof = ("constructor", *chain([a, x]), *chain([b, y]))
    elif sign == "∨":
        side = rng.integers(2)
        given(f"{other} → {(b, a)[side]}")
        proof = (("left", "right")[side], *chain([(a, b)[side], x, y]))
    elif sign == "→":
        name = names.pop()
        proof = (f"intro {name}", *chain([b, x, a], name))
    else:
        proof = chain([a, x, y])
    return drawn(rng, facts, goal, proof)


def draw_goal(rng):
    """Draw a theorem with its proof: its facts are atoms, and its goal joins two to four atoms.

    Of a disjunction one side can be proved: to choose, one has to look for its atoms in the facts.
    """
    atoms, names = ([*map(str, rng.permutation([*letters]))]
                    for letters in ("pqrstuvwxyz", "abcdefgk"))
    facts = []

    def given(atom):
        facts.append(f"({names[-1]} : {atom})")
        return names.pop()

    def join(count, provable, premise=""):
        """A formula of `count` atoms and its proof, () if it has none; `premise`: the fact h."""
        if count == 1:
            if provable and premise and rng.integers(2):
                return premise, ("exact h",)
            atom = atoms.pop()
            return atom, (f"exact {given(atom)}",) if provable else ()
        sign = rng.choice([*("∧∨" if premise else "∧∨→")])
        if sign == "→":
            left = atoms.pop()
            right, proof = join(count - 1, provable, left)
            proof = ("intro h", *proof)
        else:
            sides = [provable] * 2 if sign == "∧" else rng.permutation([provable, False])
            (left, first), (right, rest) = (join(n, side, premise)
                                            for n, side in zip((1, count - 1), sides))
            step = "constructor" if sign == "∧" else ("left" if sides[0] else "right")
            proof = (step, *first, *rest)
        return f"{left} {sign} {f'({right})' if count > 2 else right}", proof if provable else ()

    goal, proof = join(rng.integers(2, 5), True)
    for _ in range(rng.integers(1, 4)):
        given(atoms.pop())
    return drawn(rng, facts, goal, proof)


def drawn(rng, facts, goal, proof):
    """The theorem that states the goal after the facts in random order."""
    claim = f"{' '.join(rng.permutation(facts))} : {goal}"
    letters = " ".join(sorted({*re.findall(r"\b[p-z]\b", claim)}))
    return Theorem("drawn", f"theorem drawn ({letters} : Prop) {claim} := by", "", proof)


@cached_until_changed
def load_minif2f(path):
    """The theorems of miniF2F records: `formal_statement` ends in `:= by` or `:= by sorry`. A
    header is the field `header`, then what stands before the last theorem. Raises ValueError for
    other records."""
    return read_each(path, theorem_of, "option data of Lean: record {number} of {path} has no "
                     "formal_statement of the form `theorem ... := by`.")


def theorem_of(row):
    """The last theorem of a record. Raises ValueError if there is none.

    `name` is a guess from the text; `LeanChecker.check` proves that it is the goal's name.
    """
    text = row["formal_statement"]
    found = re.fullmatch(
        r"(?s)(.*(?<![\w.'!?]))(?:theorem|lemma)\s+(«[^»]*»|(?>[\w'!?]+(?:\.[\w'!?]+)*))"
        r".*?(:=)\s*(?:by\b)?\s*(?:sorry\b)?\s*", text)
    if not found:
        raise ValueError("no theorem")
    header = f"{row.get('header') or ''}\n{found[1]}".strip()
    if not re.search(r"(?m)^(import|prelude)\b", header):
        header = f"{DEFAULT_HEADER}\n{header}".strip()
    return Theorem(found[2], f"{text[found.end(1):found.start(3)]}:= by", header)


def shape(statement):
    """The statement without its name, its variables and facts numbered in the order of their use.

    It is the instance that decides the split: theorems that differ just in names share one.
    """
    text = " ".join(re.sub(r"^(theorem|lemma)\s+\S+", "", statement).split())
    bound = " ".join(re.findall(r"[({∀∃]([\w ]+)(?= :|,)", text)).split()
    # First where they are used, then `(p q : Prop)` where they are declared.
    used = re.sub(r"\([\w ]+ : [A-Z][\w →]*\)", "", text) + text
    numbers = {word: f"x{k}" for k, word in enumerate(dict.fromkeys(re.findall(r"\w+", used)))
               if word in bound}
    text = re.sub(r"\w+", lambda m: numbers.get(m[0], m[0]), text)
    return re.sub(r"(?<=\()[x\d ]+(?= :)", lambda m: " ".join(sorted(m[0].split())), text)
