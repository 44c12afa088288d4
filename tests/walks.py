"""Small environments and broken ones for test_envs.py. Another process imports them in the contract
of environments, which is quick because nothing here needs PyTorch."""

from collections import ChainMap

import numpy as np

from minragen.envs import Budget, Outcome, TextEnv


class Walk(TextEnv):
    """Walk to 3 and not to -3, or to what the budget reaches. Every move costs an eighth."""

    instruction = "Walk to 3."
    budget = Budget(max_turns=5, max_actions_per_turn=2, max_actions=10)
    actions = ("Left", "Wait", "Right")
    multi_action = True

    def _reset(self, rng):
        self.at, self.day, self.goal = 0, int(rng.integers(1000)), min(3, self.budget.max_actions)

    def _act(self, action):
        move = self.actions.index(action) - 1
        self.at += move
        won = self.at == self.goal
        return Outcome(won - 0.125 * abs(move), terminated=abs(self.at) == self.goal, success=won,
                       effective=move != 0, metrics={f"{action}s": 1})

    def render(self):
        return f"Day {self.day}: at {self.at}"

    def solve(self):
        return self._in_turns(["Right"] * (self.goal - self.at))


class Quoting(Walk):
    """Its data have marks of images in them; on some days there is an image."""

    def render(self):
        return f"Day {self.day}: <image><<image>image>"

    def image(self):
        return np.full((2, 3, 3), self.day % 256, np.uint8) if self.day % 2 else None


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


# Class of the contract that must notice -> fault -> (method of Walk, what it returns instead, given
# the environment, what Walk's own method returned, and its argument).
FAULTS = {
    "TestSeeds": {
        # As RAGEN's FrozenLake and Sokoban (VAGEN#45): hash(str(seed)) differs in every process.
        "uses_hash": ("render", lambda env, said: f"{said} {hash(said)}"),
        "uses_global_noise": ("_reset", lambda *_: np.random.random()),
        "remembers": ("_reset", lambda env, *_: add(env, "games", 1) or add(env, "day", env.games)),
        "changes_when_looked_at": ("render", lambda env, said: add(env, "day", 1) or said)},
    "TestGroups": {
        "draws_the_instance_for_each_member": ("_reset", lambda env, *_: env._draw(env.dynamics)),
        "has_dynamics_without_consequence": ("_act", lambda e, x, _: e.dynamics.random() and x)},
    "TestSplits": {"ignores_its_split": ("instance_split", lambda env, _: env.split)},
    "TestSolver": {
        "cannot_be_solved": ("_reset", lambda env, *_: add(env, "at", -9)),
        "ignores_its_budget": ("_reset", lambda env, *_: add(env, "goal", 3 - env.goal))},
    "TestRandomPolicy": {
        "solves_itself": ("_act", lambda *_: Outcome(1.0, True, True)),
        "rewards_stalling": ("step", lambda env, turn, _: pay(turn, 1.0 - turn[2]))},
    "TestHostileAnswers": {
        "rewards_nonsense": ("step", lambda env, turn, said: pay(turn, "Reward" in said)),
        "repeats_nonsense": ("step", lambda env, turn, said: (said[:99] + turn[0], *turn[1:])),
        "punishes_every_piece": ("step", lambda env, turn, said: pay(turn, -said.count("||")))},
    "TestLife": {
        "takes_a_name_of_the_run": ("_act", lambda e, x, _: x._replace(metrics={"val/success": 1})),
        "ends_twice": ("step", lambda env, turn, _: (*turn[:2], turn[2] | turn[3], *turn[3:])),
        "never_ends": ("step", lambda env, turn, _: add(env, "_live", turn[3])
                       or (*turn[:3], False, turn[4])),
        "lives_on": ("step", lambda env, turn, _: add(env, "_live", 1) or turn)}}


def add(env, name, number):
    setattr(env, name, getattr(env, name) + number)


def pay(turn, reward):
    return turn[0], turn[1] + reward, *turn[2:]


class Broken(Walk):
    """Walk, until one of its methods is replaced by a fault."""

    games, _draw = 0, Walk._reset


def broken(method, change):
    return {method: lambda env, *args: change(env, getattr(Walk, method)(env, *args), *args)}


for _name, _fault in ChainMap(*FAULTS.values()).items():
    globals()[_name] = type(_name, (Broken,), broken(*_fault))  # the contract makes them by name
