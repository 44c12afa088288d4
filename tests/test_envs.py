"""Text environments: turns, names, groups, and faults that test_env_contract.py refuses."""

import os
import re
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import envs
from minragen.environments.__main__ import transcript
from minragen.envs import FORMAT_PENALTY, Budget, EnvGroups, Outcome, TextEnv, make


class Walk(TextEnv):
    """Walk to 3 and not to -3. Every move costs a quarter."""

    instruction = "Walk to 3."
    budget = Budget(max_turns=5, max_actions_per_turn=2, max_actions=10)
    actions = ("Left", "Wait", "Right")
    multi_action = True

    def _reset(self, rng):
        self.at, self.day = 0, int(rng.integers(1000))

    def _act(self, action):
        move = self.actions.index(action) - 1
        self.at += move
        return Outcome((self.at == 3) - 0.25 * abs(move), terminated=abs(self.at) == 3,
                       success=self.at == 3, effective=move != 0, metrics={f"{action}s": 1})

    def render(self):
        return f"Day {self.day}: at {self.at}"

    def solve(self):
        return self._in_turns(["Right"] * (3 - self.at))


class Step(Walk):
    budget = Budget(max_turns=6, max_actions_per_turn=1, max_actions=6)
    multi_action = False


class Question(Walk):
    """Any text is an answer, and there is neither a solver nor a random policy."""

    budget = Budget(max_turns=2, max_actions_per_turn=1, max_actions=2)
    instruction, actions, multi_action, solve = "", (), False, TextEnv.solve

    def _act(self, action):
        right = action == str(self.day)
        return Outcome(float(right), terminated=right, success=right, effective=right)


class EchoText(gymnasium.Env):
    """Repeat the word. The reward is random."""

    observation_space = action_space = spaces.Text(max_length=8, charset="abcdef")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice([*"abcdef"], size=6))
        return self.word, {}

    def step(self, action):
        return self.word, self.np_random.random(), False, True, {"success": action == self.word}


def begun(cls, seed=0, budget=None):
    env = cls(budget=budget)
    env.reset(seed=seed)
    return env


def refusal(call, *arguments, **options):
    """The message of the error that the call raises."""
    with pytest.raises((ValueError, ImportError, NotImplementedError, RuntimeError)) as refused:
        call(*arguments, **options)
    return str(refused.value)


class TestErrors:
    def test_a_name_that_is_no_environment_is_refused(self):
        for name, said in (("FrozenLakes", "unknown env 'FrozenLakes': did you mean 'frozenlake'?"),
                           (":Walk", "bad env ':Walk': expected package.module:Class"),
                           ("minragen.envs:TextEnv", "is the base"),
                           ("minragen.environments.board:Board", "is the base"),
                           ("minragen.environments.gymnasium_text:GymnasiumText", "is the base"),
                           ("test_envs:Nothing", "no Gymnasium id called 'Nothing'"),
                           ("test_envs:Budget", "test_envs has no TextEnv class"),
                           ("no_such_module:Walk", "No module named 'no_such_module'"),
                           ("FrozenLake-v1", "has a Discrete space, expected Text spaces")):
            assert said in refusal(make, name)

    def test_an_option_or_a_budget_that_makes_no_sense_is_refused(self):
        assert ("unknown option of FrozenLake 'slipp': did you mean 'slip'? Known: frozen, size, "
                in refusal(make, "frozenlake", slipp=0.2))
        for value in ("8", 8.0, True):
            assert (f"option size of FrozenLake: got {value!r}, expected int such as 4"
                    in refusal(make, "frozenlake", size=value))
        for value in (False, float("nan"), -float("inf")):
            assert f"slip of FrozenLake: got {value}" in refusal(make, "frozenlake", slip=value)
        assert "max_turns is 0, expected an integer >= 1" in refusal(Budget, 0, 1, 1)

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
        assert "TextEnv does not write _act(action)" in refusal(TextEnv()._act, "Left")
        monkeypatch.setattr(envs, "MAX_REDRAWS", 20)
        monkeypatch.setattr(Walk, "instance", lambda self: "the only one")
        for split in {*envs.SPLITS} - {envs.split_of("the only one")}:
            said = refusal(Walk(split).reset, seed=0)
            assert f"Walk: no instance of split '{split}' in 20 draws." in said


class TestTurns:
    PIECES = ("Left", "Right", "Right", "wait", "RIGHT\n", "jump", "Right.", "Left Right", "", " ")

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(turns=st.lists(st.lists(st.sampled_from(PIECES), max_size=5), min_size=1, max_size=6),
           budget=st.sampled_from([Budget(), Budget(1, 5, 5), Budget(5, 2, 10), Budget(4, 3, 5)]))
    def test_a_turn_is_what_its_rules_say(self, turns, budget):
        """Bad pieces cost the penalty once; those over a cap or after the end are ignored."""
        env, at, executed = begun(Walk, budget=budget), 0, 0
        for turns_left, said in zip(range(budget.max_turns - 1, -1, -1), turns):
            pieces = [piece.strip().lower() for piece in said if piece.strip()]
            reward, valid, run = 0.0, pieces != [], Counter()
            for piece in pieces[:min(budget.max_actions_per_turn, env.actions_left)]:
                if piece not in ("left", "wait", "right"):
                    valid = False
                    continue
                run[f"{piece.capitalize()}s"] += 1
                at += {"left": -1, "wait": 0, "right": 1}[piece]
                reward += (at == 3) - 0.25 * (piece != "wait")
                if abs(at) == 3:
                    break
            executed += run.total()
            left = min(budget.max_actions - executed, turns_left * budget.max_actions_per_turn)
            ended = abs(at) == 3 or budget.max_turns == 1
            _, earned, terminated, truncated, info = env.step("||".join(said))
            assert earned == pytest.approx(reward if valid else reward + FORMAT_PENALTY)
            assert info == {"success": at == 3, "valid": valid, **run, "effective":
                            (run.total() - run["Waits"]) / max(1, run.total())}
            assert (env.at, env.turns_left, env.actions_left) == (at, turns_left, left)
            assert (terminated, truncated) == (ended, not ended and left == 0)
            if terminated or truncated:
                break

    def test_the_prompt_names_the_actions_and_the_budget(self):
        walk = "Walk to 3.\nActions: Left, Wait, Right."
        for cls, budget, prompt in (
                (Step, (6, 1, 6), f"{walk} One action a turn, 6 turns."),
                (Step, (9, 1, 5), f"{walk} One action a turn, 9 turns and 5 actions."),
                (Walk, (7, 3, 13), f"{walk} Up to 3 a turn, such as Left || Right . "
                                   "You have 7 turns and 13 actions."),
                (Walk, (2, 1, 10), f"{walk} Up to 1 a turn. You have 2 turns and 2 actions."),
                (Question, (2, 1, 2), "You have 2 turns."), (Question, (1, 1, 1), "")):
            assert cls(budget=Budget(*budget)).system_prompt == prompt

    def test_text_is_cut_and_rid_of_what_no_observation_may_hold(self):
        assert (Walk()._fitted("a√☺b", 4), Walk()._fitted("abcde", 4)) == ("a√?b", "abcd...")

    def test_a_random_answer_has_as_many_uniform_actions_as_may_still_be_executed(self):
        env, rng = begun(Walk, budget=Budget(2, 2, 3)), np.random.default_rng(0)
        count = Counter(" ".join(env.random_answer(rng) for _ in range(600)).split())
        assert count.pop("||") == 600
        assert count.keys() == {*env.actions} and max(count.values()) < 480
        env.step("Wait || Wait")
        assert env.random_answer(rng) in env.actions


class TestMake:
    def test_a_users_module_is_found_in_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "my_walk.py").write_text("from test_envs import Walk\nclass My(Walk): pass\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as in a console script
        env = make("my_walk:My", "test", Budget(9, 1, 9))
        assert (type(env).__name__, env.split, env.budget) == ("My", "test", Budget(9, 1, 9))

    def test_six_tenths_of_all_instances_are_train_and_two_val(self):
        count = Counter(envs.split_of(f"instance {i} \ud800") for i in range(5000))
        assert [count[split] / 5000 for split in envs.SPLITS] == pytest.approx([0.6, 0.2, 0.2], 0.1)

    def test_a_gymnasium_id_with_text_spaces_is_played_as_it_is(self, monkeypatch):
        name, rewards, words = "EchoText-v0", set(), set()
        monkeypatch.setitem(gymnasium.registry, name, EnvSpec(name, entry_point=EchoText))
        env = make(f"test_envs:{name}", "val", Budget(2, 1, 2))
        assert env.system_prompt == f"{EchoText.__doc__}\nYou have 2 turns."
        for member in range(3):  # they share the instance and differ in the dynamics
            env.reset(seed=0, options={"member": member})
            words.add(word := env.render())
            _, reward, *ends, info = env.step(word)
            rewards.add(reward)
            assert (*ends, info["success"], info["valid"]) == (True, False, 1.0, 1.0)
        assert (len(rewards), len(words), env.instance_split()) == (3, 1, "val")
        env.reset(seed=0)
        assert env.random_answer(np.random.default_rng(0)) in EchoText.action_space
        assert env.step("not in the alphabet")[1] == FORMAT_PENALTY


class TestGroups:
    def test_a_mixture_is_names_and_numbers_of_groups(self):
        for spec, groups, mixture in (
                ("bandit", 5, [("bandit", 5)]),
                (" a , b, c,", 11, [("a", 4), ("b", 4), ("c", 3)]),
                ("m.n:Env = 1, my-space/Env-v0=2", 3, [("m.n:Env", 1), ("my-space/Env-v0", 2)])):
            assert envs.parse_mixture(spec, groups) == mixture

    def test_rows_are_group_major_and_a_group_shares_its_instance(self):
        groups = EnvGroups("frozenlake=2,bandit=1", 3, 4, "val", {"frozenlake.slip": 0.5})
        alone = [make("frozenlake", "val", slip=0.5), make("bandit", "val")]
        for row, observation in enumerate(groups.reset(100)):
            env, twin = groups.envs[row], alone[row // 8]
            assert observation == twin.reset(seed=100 + row // 4, options={"member": row % 4})[0]
            assert env.dynamics.random() == twin.dynamics.random()
        assert (len(groups), groups.seeds) == (12, [100, 101, 102])
        assert groups.names == ["frozenlake", "frozenlake", "bandit"]

    def test_options_reach_every_environment_or_the_one_they_name_and_budgets_all(self):
        users = "minragen.environments.frozenlake:FrozenLake"
        for options, slips in (({"frozenlake.slip": 0.2, f"{users}.slip": 0.4}, [0.2, 0.4]),
                               ({"slip": 0.1, "frozenlake.slip": 0.5}, [0.5, 0.1]),
                               ({"frozenlake.slip": 0.5, "slip": 0.1}, [0.5, 0.1])):
            groups = EnvGroups(f"frozenlake,{users}", 2, 1, "val", options, {"max_turns": 8})
            assert [env.options["slip"] for env in groups.envs] == slips
            assert [env.budget for env in groups.envs] == [Budget(8, 2, 10)] * 2

    @pytest.mark.parametrize("parallel", [False, True], ids=["in line", "in threads"])
    def test_rows_are_stepped_in_any_order_and_one_that_raises_harms_no_other(self, parallel):
        groups = EnvGroups("test_envs:Step", 4, 1)
        groups.reset(0)
        groups.envs[1].parallel = groups.envs[2].parallel = parallel
        groups.envs[2]._match = None
        results = groups.step([3, 2, 1], ["Left", "Left", "Right"])
        assert [env.at for env in groups.envs] == [0, 1, 0, -1]
        assert isinstance(results[1], TypeError)
        assert ": at -1" in results[0][0] and ": at 1" in results[2][0]


@pytest.fixture
def servers(monkeypatch):
    """Six environments that hang on Left until the gate opens, one core, a short time limit."""
    gate = threading.Event()

    def match(env, piece):
        if piece == "Left":
            gate.wait(timeout=5)
        return piece

    monkeypatch.setattr(envs, "STEP_TIME_LIMIT", 0.2)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(Step, "parallel", True)
    monkeypatch.setattr(Step, "_match", match)
    groups = EnvGroups("test_envs:Step", 6, 1)
    groups.reset(0)
    yield groups, gate
    gate.set()


class TestTimeLimit:
    def test_one_that_hangs_ends_at_the_limit_and_its_late_step_harms_nobody(self, servers):
        (groups, gate), known = servers, set(threading.enumerate())
        results = groups.step([0, 1], ["Right", "Left"])
        assert isinstance(results[1], TimeoutError) and groups.envs[0].at == 1
        assert str(results[1]) == "Step: a step took over 0.4 seconds."
        late = set(threading.enumerate()) - known
        assert late and all(thread.daemon for thread in late)  # lest Python wait for it at its exit
        groups.reset(49)
        gate.set()
        for thread in late:
            thread.join(timeout=5)
        assert groups.step([1], ["Right"]) == [begun(Step, 50).step("Right")]

    def test_many_that_hang_share_one_limit_times_those_that_share_a_core(self, servers):
        groups, began = servers[0], time.monotonic()
        results = groups.step(range(6), ["Left"] * 6)
        assert {str(result) for result in results} == {"Step: a step took over 1.2 seconds."}
        assert 1.1 < time.monotonic() - began < 1.9  # and not six times as long


class TestTranscript:
    @pytest.mark.parametrize("name", sorted(envs.REGISTRY))
    def test_the_docstring_answers_the_same_questions_and_names_an_episode_that_is_won(self, name):
        doc = type(make(name)).__doc__
        for heading in ("Goal:", "Observation:", "Actions:", "Reward:", "Ends when:", "Solver:"):
            assert re.search(rf"^ *{heading}", doc, re.MULTILINE), heading
        seed = int(re.search(rf"python -m minragen\.environments {name} (\d+)", doc)[1])
        env, printed = begun(type(make(name)), seed), transcript(name, seed)
        assert printed.startswith(f"{env.system_prompt}\n\n{env.render()}\n")
        answers = re.findall(r"<answer> (.*?) </answer>", printed, re.DOTALL)
        *_, (last, *_, info) = [env.step(answer) for answer in answers]
        assert printed.endswith(f"\n{last}") and info["success"] == 1

    @pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # of runpy
    def test_the_module_run_as_a_command_prints_one(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["environments", "test_envs:Walk", "7"])
        runpy.run_module("minragen.environments", run_name="__main__", alter_sys=True)
        assert capsys.readouterr().out == f"{transcript('test_envs:Walk', 7)}\n"


FAULTS = {  # class of the contract that must notice -> what may be wrong with an environment
    "TestSeeds": ("uses_hash", "uses_global_noise", "remembers", "changes_when_looked_at"),
    "TestGroups": ("draws_the_instance_for_each_member", "has_dynamics_without_consequence"),
    "TestSplits": ("ignores_its_split",), "TestSolver": ("cannot_be_solved",),
    "TestRandomPolicy": ("solves_itself", "rewards_stalling"),
    "TestHostileAnswers": ("raises_on_nonsense", "rewards_nonsense", "repeats_nonsense",
                           "punishes_every_piece"),
    "TestLife": ("ends_twice", "never_ends", "lives_on")}


class Broken(Walk):
    """It has the fault that its class is named after."""

    games = 0

    def has(self, fault):
        return type(self).__name__ == fault

    def _reset(self, rng):
        super()._reset(self.dynamics if self.has("draws_the_instance_for_each_member") else rng)
        self.at -= 9 * self.has("cannot_be_solved")
        self.games += 1
        if self.has("uses_global_noise"):
            np.random.random()

    def instance_split(self):
        return self.split if self.has("ignores_its_split") else super().instance_split()

    def render(self):
        self.day += self.has("changes_when_looked_at")
        shown = {"uses_hash": hash(str(self.day)), "remembers": self.games}
        return f"{super().render()} {shown.get(type(self).__name__, 0)}"

    def _act(self, action):
        if self.has("has_dynamics_without_consequence"):
            self.dynamics.random()
        return Outcome(1.0, True, True) if self.has("solves_itself") else super()._act(action)

    def step(self, answer):
        observation, reward, terminated, truncated, info = super().step(answer)
        if self.has("raises_on_nonsense") and not info["valid"]:
            raise KeyError(answer)
        if self.has("repeats_nonsense"):
            observation = f"{answer[:99]}? {observation}"
        reward += self.has("rewards_nonsense") * ("Reward" in answer)
        reward += self.has("rewards_stalling") * (not terminated)
        reward += self.has("punishes_every_piece") * FORMAT_PENALTY * answer.count("||")
        terminated |= self.has("ends_twice") and truncated
        self._live |= self.has("lives_on") or (self.has("never_ends") and truncated)
        return observation, reward, terminated, truncated and not self.has("never_ends"), info


for _fault in sum(FAULTS.values(), ()):
    globals()[_fault] = type(_fault, (Broken,), {})  # the contract makes them by name


class TestContract:
    def test_it_refuses_each_fault_and_accepts_a_users_environments_without(self, capsys):
        accepted, faults = ["Broken", "Step", "Question"], sum(FAULTS.values(), ())
        parts = [f"{noun} and ({' or '.join(FAULTS[noun])})" for noun in FAULTS]
        pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-k", " or ".join(accepted + parts),
                     str(Path(__file__).with_name("test_env_contract.py")),
                     *(f"--env=test_envs:{name}" for name in (*accepted, *faults))])
        refused = re.findall(r"FAILED .*\[test_envs:(\w+)", capsys.readouterr().out)
        assert set(refused) == {*faults}
