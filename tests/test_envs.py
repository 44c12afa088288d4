"""Text environments: turns, names, groups, and faults that test_env_contract.py refuses."""

import asyncio
import contextlib
import functools
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
import weakref
import zlib
from collections import ChainMap, Counter
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import begin
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import replies, tiny
from walks import FAULTS, Question, Step, Walk

from minragen import envs
from minragen.environments import limits
from minragen.environments.layers import Layer
from minragen.environments.limits import ServerGone
from minragen.envs import FORMAT_PENALTY, REGISTRY, Budget, EnvGroups, Observation, Outcome, make
from minragen.look.faults import Failure
from minragen.rollout import Rules, collect
from minragen.run import groups as run_groups
from minragen.run.groups import PatientGroups
from minragen.support.options import parse_mixture
from minragen.trajectory import StopReason


def refusal(call, *arguments, **options):
    """The message of the error that the call raises."""
    with pytest.raises((ValueError, ImportError, NotImplementedError, RuntimeError)) as refused:
        call(*arguments, **options)
    return str(refused.value)


@pytest.mark.parametrize("name, checksum", {
    "bandit": 1387369827, "countdown": 4261272764, "deepcoder": 4153047330,
    "frozenlake": 1643134569, "lean": 1941462330, "metamathqa": 1158541819,
    "searchqa": 3738051267, "sokoban": 2572682743, "sudoku": 734271107,
    "webshop": 1970023985}.items())
def test_instances_of_the_default_options_stay_the_same(name, checksum):
    texts = [make(name, split).reset(seed=seed)[0] for split in envs.SPLITS for seed in range(8)]
    assert zlib.crc32("\n".join(texts).encode()) == checksum


class TestErrors:
    def test_a_name_that_is_no_environment_is_refused(self):
        for name, said in ((":Walk", "bad env ':Walk': expected package.module:Class"),
                           ("test_envs:Nothing", "the module has no such subclass of TextEnv"),
                           ("test_envs:Budget", "the module has no such subclass of TextEnv"),
                           ("minragen.environments.board:Board", "is the base of environments"),
                           ("openenv", "package.module:Class or openenv:URL")):
            assert said in refusal(make, name)

    def test_an_option_or_a_budget_that_makes_no_sense_is_refused(self):
        for value in ("8", 8.0, True):
            assert (f"option size of FrozenLake: got {value!r}, expected int such as 4"
                    in refusal(make, "frozenlake", size=value))
        for value in (False, float("nan"), -float("inf")):
            assert f"slip of FrozenLake: got {value}" in refusal(make, "frozenlake", slip=value)
        assert repr(make("frozenlake", slip=1).options["slip"]) == "1.0"
        assert "unknown split 'dev': expected one of train, val, test" in refusal(Walk, "dev")
        assert "max_turns is 0, expected an integer >= 1" in refusal(Budget, 0, 1, 1)
        assert "max_actions_per_turn is 2, expected 1." in refusal(Step, budget=Budget(3, 2, 4))

    def test_a_mixture_that_does_not_add_up_and_an_option_of_nobody_are_refused(self):
        for spec, said in ((" , ", "empty env: got ' , '. Known: bandit"),
                           ("a=3,b", "'a=3,b': expected a number for every environment or none"),
                           ("a=3,b=2", "[3, 2] groups, expected 4 "), ("a=4,b=0", "at least one")):
            assert said in refusal(EnvGroups, spec, 4, 1)
        for option, said in (("bandot.slip", "env in an option 'bandot': did you mean 'bandit'"),
                             ("bandit.split", "'split' is not"), ("slip", "option of Bandit")):
            assert said in refusal(EnvGroups, "frozenlake,bandit", 4, 1, options={option: 0.2})

    def test_what_an_environment_does_not_write_is_named(self, monkeypatch):
        assert "Question has no solver" in refusal(Question().solve)
        monkeypatch.setattr(envs, "MAX_REDRAWS", 20)
        monkeypatch.setattr(Walk, "instance", lambda self: "the only one")
        for split in {*envs.SPLITS} - {envs.split_of("the only one")}:
            said = refusal(Walk(split).reset, seed=0)
            assert f"Walk: no instance of split '{split}' in 20 draws." in said


class TestTurns:
    PIECES = ("Left", "Right", "Right", "wait", "RIGHT\n", "jump", "Right.", "Left Right", "", " ")

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(turns=st.lists(st.lists(st.sampled_from(PIECES), max_size=5), min_size=1, max_size=6),
           budget=st.sampled_from([Budget(), Budget(1, 5, 5), Budget(5, 2, 10), Budget(6, 3, 3)]))
    def test_a_turn_is_what_its_rules_say(self, turns, budget):
        """Bad pieces cost the penalty once; those over a cap or after the end are ignored. No
        episode is both terminated and truncated (RAGEN's may be: es_manager.py:211)."""
        env, at, executed = begin("walks:Walk", budget=budget), 0, 0
        for turns_left, said in zip(range(budget.max_turns - 1, -1, -1), turns):
            pieces = [piece.strip().lower() for piece in said if piece.strip()]
            reward, valid, run = 0.0, pieces != [], Counter()
            for piece in pieces[:min(budget.max_actions_per_turn, env.actions_left)]:
                if piece not in ("left", "wait", "right"):
                    valid = False
                    continue
                run[f"{piece.capitalize()}s"] += 1
                at += {"left": -1, "wait": 0, "right": 1}[piece]
                reward += (at == 3) - 0.125 * (piece != "wait")
                if abs(at) == 3:
                    break
            executed += run.total()
            left = min(budget.max_actions - executed, turns_left * budget.max_actions_per_turn)
            ended = abs(at) == 3 or budget.max_turns == 1
            truncated = not ended and left == 0
            shown, earned, *ends, info = env.step("||".join(said))
            assert earned == pytest.approx(reward if valid else reward + FORMAT_PENALTY)
            assert shown.split("\n") == [
                f"Reward: {earned:.4g}",
                *["No valid action was given, or not all were valid."] * (not valid),
                f"Day {env.day}: at {at}",
                *[f"Turns left: {turns_left}, actions left: {left}"] * (not ended | truncated)]
            assert info == {"success": at == 3, "valid": valid, **run, "effective":
                            (run.total() - run["Waits"]) / max(1, run.total())}
            assert (env.at, env.turns_left, env.actions_left) == (at, turns_left, left)
            assert ends == [ended, truncated]
            if ended or truncated:
                break

    def test_a_success_counts_whatever_follows_it_in_the_turn(self, monkeypatch):
        monkeypatch.setattr(Walk, "_act", lambda env, name: Outcome(0.0, success=name == "Left"))
        assert begin("walks:Walk").step("Left || Right")[4]["success"] == 1.0

    def test_without_a_seed_a_reset_goes_on_from_the_last_one(self):
        one, same = begin("walks:Walk"), begin("walks:Walk")
        drawn = [one.reset()[0] for _ in range(4)]
        assert drawn == [same.reset()[0] for _ in range(4)] and len({*drawn}) == 4


class TestMake:
    def test_a_users_module_is_found_in_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "my_walk.py").write_text("from test_envs import Walk\nclass My(Walk): pass\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as in a console script
        env = make("my_walk:My", "test", Budget(9, 1, 9))
        assert (type(env).__name__, env.split, env.budget) == ("My", "test", Budget(9, 1, 9))


class TestGroups:
    def test_a_mixture_is_names_and_numbers_of_groups(self):
        for spec, groups, mixture in (
                ("bandit", 5, [("bandit", 5)]),
                (" a , b, c,", 11, [("a", 4), ("b", 4), ("c", 3)]),
                ("m.n:Env = 1, my-space/Env-v0=2", 3, [("m.n:Env", 1), ("my-space/Env-v0", 2)])):
            assert parse_mixture(spec, groups, REGISTRY) == mixture

    def test_rows_are_group_major_and_a_group_shares_its_instance(self):
        """In RAGEN a group of Bandit has several prompts, since a counter is added to the seed, and
        in FrozenLake equal actions slip equally, since the slips are seeded like the map."""
        groups = EnvGroups("frozenlake=2,bandit=1", 3, 4, "val", {"frozenlake.slip": 0.5})
        alone = [make("frozenlake", "val", slip=0.5), make("bandit", "val")]
        for row, observation in enumerate(groups.reset(100)):
            env, twin = groups.envs[row], alone[row // 8]
            assert observation == twin.reset(seed=100 + row // 4, options={"member": row % 4})[0]
            assert env.dynamics.random() == twin.dynamics.random()
        assert (len(groups), groups.seeds) == (12, [100, 101, 102])
        assert groups.names == ["frozenlake", "frozenlake", "bandit"]

    def test_no_dynamics_repeat_another_stream(self):
        """NumPy splits a seed of 2^32 or more into two words, like a seed and a member."""
        env, drawn, dynamics = Walk(), set(), []
        env._reset = lambda rng: drawn.add(rng.random()) or Walk._reset(env, rng)
        for seed, member in product((k + high for high in (0, 2**32) for k in range(9)), range(3)):
            env.reset(seed=seed, options={"member": member})
            dynamics.append(env.dynamics.random())
        assert len({*dynamics} - drawn) == len(dynamics)

    def test_options_reach_every_environment_or_the_one_they_name_and_budgets_all(self):
        users = "minragen.environments.frozenlake:FrozenLake"
        for options, slips in (({"frozenlake.slip": 0.2, f"{users}.slip": 0.4}, [0.2, 0.4]),
                               ({"slip": 0.1, "frozenlake.slip": 0.5}, [0.5, 0.1]),
                               ({"frozenlake.slip": 0.5, "slip": 0.1}, [0.5, 0.1])):
            groups = EnvGroups(f"frozenlake,{users}", 2, 1, "val", options, {"max_turns": 8})
            assert [env.options["slip"] for env in groups.envs] == slips
            assert [env.budget for env in groups.envs] == [Budget(8, 2, 10)] * 2

    def test_rows_that_wait_on_something_outside_begin_together(self, monkeypatch):
        together = threading.Barrier(3)
        monkeypatch.setattr(Step, "parallel", True)
        monkeypatch.setattr(Step, "reset", lambda env, **given: (
            together.wait(timeout=5), Walk.reset(env, **given))[1])
        assert {*map(type, PatientGroups("test_envs:Step", 3, 1).reset(0))} == {Observation}

    @pytest.mark.parametrize("parallel", [False, True], ids=["in line", "in threads"])
    def test_rows_are_stepped_in_any_order_and_one_that_raises_is_built_anew(self, parallel):
        groups = PatientGroups("test_envs:Step", 4, 1)
        groups.reset(0)
        groups.envs[1].parallel = groups.envs[2].parallel = parallel
        groups.envs[2]._match = None
        results = groups.step([3, 2, 1], replies(["Left", "Left", "Right"]))
        assert str(results[1]).startswith("TypeError: ")
        assert ": at -1" in results[0][0] and ": at 1" in results[2][0]
        groups.reset(0)  # the object that raised may be in any state
        assert groups.step([2], replies(["Right"])) == [begin("walks:Step", 2).step("Right")]


class TestTimeLimit:
    def test_all_that_hang_end_at_one_limit_and_their_late_steps_harm_nobody(self, monkeypatch):
        """Of six steps on four cores two share a core: twice the limit, not six times."""
        gate, known, waiting = threading.Event(), set(threading.enumerate()), []

        def match(env, piece):
            if piece == "Left":
                waiting.append(env)
                gate.wait(timeout=60)
            return piece

        monkeypatch.setattr(limits, "STEP_TIME_LIMIT", 0.2)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        monkeypatch.setattr(Step, "parallel", True)
        monkeypatch.setattr(Step, "_match", match)
        groups = PatientGroups("test_envs:Step", 6, 1)
        groups.reset(0)
        results = groups.step(range(6), replies(["Right"] + ["Left"] * 5))
        assert len(waiting) == 5  # one after the other: 1
        assert groups.envs[0].at == 1
        assert {*map(str, results[1:])} == {"TimeoutError: a step took over 0.4 seconds."}
        late = set(threading.enumerate()) - known
        assert late and all(thread.daemon for thread in late)  # lest Python wait for it at its exit
        groups.reset(49)
        gate.set()
        for thread in late:
            thread.join(timeout=5)
        assert groups.step([1], replies(["Right"])) == [begin("walks:Step", 50).step("Right")]

    def test_a_step_or_a_start_that_hangs_in_line_is_interrupted(self, monkeypatch):
        monkeypatch.setattr(limits, "STEP_TIME_LIMIT", 0.1)
        groups, began = PatientGroups("test_envs:Step", 3, 1), time.monotonic()

        def hang(*_):
            with contextlib.suppress(TimeoutError):
                time.sleep(5)
            time.sleep(5)

        groups.envs[1]._match = groups.envs[2]._reset = hang
        assert [isinstance(x, Failure) for x in groups.reset(0)] == [False, False, True]
        results = groups.step([0, 1], replies(["Right", "Right"]))
        assert results[0] == begin("walks:Step", 0).step("Right")
        assert str(results[1]) == "TimeoutError: a step took over 0.1 seconds."
        assert time.monotonic() - began < 4
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
        monkeypatch.undo()
        assert groups.reset(0) == PatientGroups("test_envs:Step", 3, 1).reset(0)


class TestServerGone:
    @pytest.mark.parametrize("parallel", [False, True], ids=["in line", "in threads"])
    def test_its_steps_wait_and_are_tried_again_and_no_others(self, monkeypatch, capsys, parallel):
        pauses, failures = [], 2
        monkeypatch.setattr(run_groups.time, "sleep", pauses.append)

        def match(piece):
            if len(pauses) < failures:
                raise ServerGone("no answer")
            return piece

        groups = PatientGroups("test_envs:Step", 3, 1)
        groups.reset(0)
        groups.envs[1]._match, groups.envs[1].parallel = match, parallel
        results = groups.step([0, 1], replies(["Right", "Right"]))
        assert results == [begin("walks:Step", seed).step("Right") for seed in (0, 1)]
        assert pauses == [5, 10] and groups.envs[0].at == 1
        assert capsys.readouterr().out.splitlines() == [
            f"waiting   {pause} s, then trying again: no answer" for pause in pauses]
        failures = 99
        with pytest.raises(ServerGone, match="no answer"):
            groups.step([1, 0], replies(["Right", "Right"]))
        assert pauses[2:] == [*run_groups.SERVER_PAUSES]


class Panic(BaseException):
    """As pyo3_runtime.PanicException."""


def fails(*given, **named):
    raise Panic("a method of a value that an environment returned")


def hostile(base):
    """A subclass of `base` all of whose methods raise."""
    names = {*dir(base), "__float__", "__bool__", "__len__", "__iter__", "__getattr__"}
    kept = {"__new__", "__init__", "__class__", "__dict__", "__getattribute__", "__del__",
            "__init_subclass__", "__subclasshook__", "__slots__", "__module__"}
    return type("Hostile", (base,), dict.fromkeys(names - kept, fails))


def raising(*kinds):
    def fail():
        raise kinds[0](*(kind() for kind in kinds[1:]))

    return fail


LOOP = []
LOOP.append(LOOP)
HOSTILE, TEXT, NUMBER, TABLE = map(hostile, (object, str, float, dict))
VALUES = [lambda value=value: value for value in (
    None, 5, 0.5, 10**400, float("nan"), float("inf"), "0.5", "", "<image>", "\x1b]0;", "\ud800",
    b"x", float, [1], {}, {1: 1.0}, {"a": "b"}, {"seconds": 2.0}, LOOP, np.array(0.5),
    np.array([0.5]), np.array("x"), np.float32(0.5), np.zeros((4, 4, 3), np.uint8), np.bool_(True),
    np.zeros((2, 2), object))] + [
    HOSTILE, lambda: TEXT("Day"), lambda: NUMBER(0.5), lambda: TABLE(a=1.0), lambda: iter("abc"),
    raising(Panic), raising(asyncio.CancelledError), raising(GeneratorExit),
    raising(hostile(ValueError)), raising(hostile(OSError), HOSTILE), raising(SystemExit, HOSTILE),
    raising(StopIteration), raising(KeyError, lambda: TEXT("x")), raising(SyntaxError, HOSTILE),
    raising(type("Sly", (Exception,), {"__class__": property(fails), "__cause__": property(fails),
                                       "__setattr__": fails, "args": property(fails)}))]
PLACES = ("observation", "reward", "terminated", "truncated", "info", "key", "number", "image",
          "result", "state", "prompt")


class Spoiler(Layer):
    """Puts a value in a place of what a reset or a step of its environment returns."""

    place, value, when, now = "", None, "", ""

    def spoilt(self, place, usual):
        return self.value() if (place, self.now) == (self.place, self.when) else usual

    state = property(lambda self: self.spoilt("state", self.env.state))
    system_prompt = property(lambda self: self.spoilt("prompt", self.env.system_prompt))

    def reset(self, *, seed=None, options=None):
        self.now = "reset"
        return self.change(*super().reset(seed=seed, options=options))

    def step(self, answer):
        self.now = "step"
        return self.change(*super().step(answer))

    def change(self, text, *rest):
        *ends, info = rest
        info = {**info, self.spoilt("key", "a"): self.spoilt("number", 1.0)}
        text = type("Shown", (str,), {"image": self.spoilt("image", None)})(text)
        ends = [self.spoilt(name, end) for name, end in zip(PLACES[1:4], ends)]
        return self.spoilt("result", (self.spoilt("observation", text), *ends,
                                      self.spoilt("info", info)))


def played(*spoils, rows=3):
    """Episodes of the tiny policy, every other one spoilt: (place, value, when, in a thread)."""
    policy, frame = tiny()
    groups = PatientGroups("test_envs:Step", rows, 1, budgets={"max_turns": 2, "max_actions": 2},
                           layers=["test_envs:Spoiler"])
    for env, spoil in zip(groups.envs[1::2], spoils):
        env.place, env.value, env.when, env.unwrapped.parallel = spoil
    return collect(policy, frame, groups, 0, Rules(max_new_tokens=1, max_context=900))


def plain(t):
    """The episode, whose values are all plain."""
    states = [turn.observation.state for turn in t.turns] + [t.error, t.system, *t.metrics]
    assert {*map(type, states)} == {str} and type(t.observation) in (str, Observation)
    assert {*map(type, [0.0, *t.turn_rewards, *t.metrics.values()])} == {float}
    assert np.isfinite([*t.turn_rewards, *t.metrics.values()]).all()
    assert pickle.loads(pickle.dumps(t)).error == t.error and json.dumps(t.messages())
    return t


def told(t):
    """What the neighbours of a spoilt episode must not feel."""
    return t.tokens, t.messages(), t.turn_rewards, t.metrics, t.stop, t.error


SPOILT, USUAL = 12, functools.cache(lambda: [told(plain(t)) for t in played(rows=25)[::2]])


class TestNonsense:
    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(VALUES), st.sampled_from(
        ["reset", "step", "step"]), st.booleans()), min_size=SPOILT, max_size=SPOILT))
    def test_whatever_a_row_returns_or_raises_ends_at_most_its_own_episode(self, spoils):
        found = played(*spoils, rows=2 * SPOILT + 1)
        assert [*map(told, found[::2])] == USUAL()
        for t in map(plain, found[1::2]):
            assert (t.stop is StopReason.ENV_ERROR) == bool(t.error)
            assert {*map(type, t.fault or ())} <= {str}

    @pytest.mark.parametrize("place, value", [
        ("reward", np.array([0.5])), ("reward", "0.5"), ("terminated", np.array([True])),
        ("truncated", None), ("state", ["a"]), ("observation", None), ("observation", [1]),
        ("key", 1), ("info", None), ("number", float("nan")), ("image", np.zeros((4, 4))),
        ("image", np.zeros((4, 4, 3), np.uint8)), ("result", ("Day", 0.0, False, {}))], ids=str)
    def test_what_is_no_plain_value_ends_it(self, place, value):
        _, t, _ = played((place, lambda: value, "step", False))
        assert t.stop is StopReason.ENV_ERROR and len(t.turns) == 1
        assert t.error.startswith("ValueError: ")

    def test_a_panic_is_told_and_nobody_waits_for_it(self):
        for parallel in (False, True):
            _, t, _ = played(("reward", raising(Panic, lambda: "index\x1b"), "step", parallel))
            assert t.error == "Panic: index\x1b" and "Panic: index (" in str(t.fault)
        _, t, _ = played(("reward", raising(hostile(ValueError)), "step", False))
        assert t.error == "<class 'test_envs.Hostile'>: its text cannot be read" == t.fault[0]

    def test_ctrl_c_ends_the_run_and_no_thread(self):
        interrupt = "reward", raising(KeyboardInterrupt), "step"
        assert played((*interrupt, True))[1].error == "KeyboardInterrupt: "
        with pytest.raises(KeyboardInterrupt):
            played((*interrupt, False))

    def test_an_environment_takes_no_name_of_the_run(self):
        groups = PatientGroups("bandit", 2, 1)
        groups.names, groups.envs[1].alias = ["val", "bandit"], "test/A"
        assert [groups.name_of(row) for row in (0, 1)] == ["env.val", "env.test_A"]

    def test_a_metric_takes_no_name_of_the_run(self, capsys):
        for name, logged in (("val/success", "env.val_success"), ("seconds", "env.seconds"),
                             ("\x1b[2J<b>", "env.__2J_b_"), ("found", "found")):
            for _ in range(2):
                _, t, _ = played(("key", lambda name=name: name, "step", False))
                assert {*t.metrics} == {"success", "valid", "effective", "a", logged} - {"a"}
        said = capsys.readouterr().out
        assert said.count("warning") == said.count("\n") == 3 and "\x1b" not in said


class TestThreads:
    def test_environments_end_with_their_groups_at_once(self):
        """So do a server's sessions: it may have room for few."""
        groups = PatientGroups("test_envs:Step", 1, 1)
        groups.reset(0)
        there = weakref.ref(groups.envs[0])
        del groups
        assert there() is None

    def test_where_no_thread_can_start_a_step_runs_without(self, monkeypatch):
        monkeypatch.setattr(Step, "parallel", True)
        groups = PatientGroups("test_envs:Step", 3, 1)
        groups.reset(0)
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        assert groups.step([0, 2], replies(["Right"] * 2)) == [
            begin("walks:Step", seed).step("Right") for seed in (0, 2)]


class TestContract:
    def test_it_refuses_each_fault_and_accepts_those_of_users(self, capsys):
        accepted = ["Broken", "Step", "Question", "Quoting"]
        faults = {*ChainMap(*FAULTS.values())}
        parts = [f"{noun} and ({' or '.join(FAULTS[noun])})" for noun in FAULTS]
        pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-k", " or ".join(accepted + parts),
                     str(Path(__file__).with_name("test_env_contract.py")),
                     *(f"--env=walks:{name}" for name in (*accepted, *faults))])
        refused = re.findall(r"FAILED .*\[walks:(\w+)", capsys.readouterr().out)
        assert set(refused) == faults
