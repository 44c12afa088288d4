"""Any data set of the package reasoning-gym: `--env examples.reasoning_gym:chain_sum`.

A name that the module lacks is a data set: `__getattr__`, at the end, makes its class.

Differences from reasoning-gym:
  1. The splits share no question. There, two seeds may give the same one.
  2. Only a score of 1 is paid. Some data sets score wrong answers, too: 0.01 for any text, or
     len(answer) / len(reply) if the reply contains the answer.
  3. Some data sets run Python's eval on the answer; `is_harmless` says what they get to see.

game_of_life_halting accepts any text, puzzle24 any four numbers that make 24.
boxnet, graph_color, propositional_logic, rubiks_cube and rush_hour have no answers, so no solver.
isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note and word_ladder draw other
questions in each process unless PYTHONHASHSEED is fixed.

Tests: `python -m pytest tests/environments/test_reasoning_gym.py`.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import random
import re

import numpy as np

from minragen.envs import Budget, Outcome, TextEnv, text_space
from minragen.support.options import nearest


class ReasoningGym(TextEnv):
    """A question of a data set.

    Reward: 1 for an answer whose score is 1.
    Ends when: an answer scores 1, or the turns are over; more turns are more attempts.
    Solver: the data set's own answer. A few data sets have none.
    Random policy: the answer to another question.
    Options: the fields of the data set's configuration; and `partial`, which pays scores below
    1; a later attempt earns only the improvement.
    """

    budget = Budget(max_turns=1, max_actions_per_turn=1, max_actions=1)
    defaults = {"partial": False}
    instruction = "Answer the question."

    name = ""  # of the data set

    def __init__(self, split="train", budget=None, partial=False, **options):
        super().__init__(split, budget, partial=partial)
        self.kind = self.name, repr(options)  # what `data_set` takes
        self.judge = data_set(*self.kind, 0)
        source = inspect.getsource(type(self.judge).score_answer)
        self.evaluates = self.name != "number_sorting" and (  # its eval sees its own answer
            re.search(r"\b(eval|exec|parse_expr|sympify)\(", source) is not None)

    def _reset(self, rng):
        self.task, self.worth = self._draw(rng), 0.0
        text = self.task["question"]
        self.observation_space = text_space(text, len(text) + 1000)

    def _draw(self, rng):
        tasks = (draw(*self.kind, int(rng.integers(2**31))) for _ in itertools.count())
        return next(task for task in tasks if task["answer"] != "")  # an empty reply is no action

    def _act(self, action):
        score = self._score(action)
        gain = max(0.0, (score if self.options["partial"] else float(score >= 1)) - self.worth)
        self.worth += gain
        return Outcome(gain, score >= 1, score >= 1)

    def _score(self, answer):
        if self.evaluates and not is_harmless(answer, str(self.task["answer"])):
            return 0.0
        try:
            return float(self.judge.score_answer(answer, self.task))
        except Exception:  # such as int("?") in prime_factorization
            return 0.0

    def render(self):
        return self.task["question"]

    def random_answer(self, rng):
        return self._answer_of(self._draw(rng))

    def solve(self):
        return [self._answer_of(self.task)]

    def _answer_of(self, task):
        if task["answer"] is None:
            raise NotImplementedError(f"{self.name} of reasoning_gym has no answers.")
        return task["answer"]


@functools.lru_cache(maxsize=2**13)  # the members of a group ask for one task, validations again
def draw(name, options, seed):
    """A task: {"question": text, "answer": text or None, "metadata": ...}."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)  # a few data sets use the global generators
    try:
        return data_set(name, options, seed)[0]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@functools.lru_cache
def data_set(name, options, seed):
    """A data set of one task. options: the repr of {name: value}. Raises ImportError, ValueError"""
    try:
        import reasoning_gym
    except ImportError:
        raise ImportError("env reasoning_gym needs a package: "
                          "pip install 'reasoning-gym>=0.1.25'") from None
    known, options = reasoning_gym.factory.DATASETS, ast.literal_eval(options)
    if name not in known:
        raise ValueError(nearest("data set of reasoning_gym", name, sorted(known)))
    if name == "composite":
        raise ValueError("composite of reasoning_gym is made of other data sets: give their names, "
                         "as in --env examples.reasoning_gym:aiw,examples.reasoning_gym:chain_sum.")
    fields = {f.name for f in dataclasses.fields(known[name][1])} - {"seed", "size"}
    for option in options.keys() - fields:
        raise ValueError(nearest(f"option of {name}", option, sorted(fields | {"partial"})))
    try:
        return reasoning_gym.create_dataset(name, **options, seed=seed, size=1)
    except (AssertionError, ValueError, TypeError, AttributeError) as problem:
        raise ValueError(f"bad options of {name}: got {options}, but {problem}.") from None


def is_harmless(reply, answer):
    """Whether eval and sympy's parse_expr may see a reply: it has no words but those of the data
    set's own answer, no other signs than + - * / ( ) . and comma, and no large power."""
    words = re.compile(r"[^\W\d]+")
    power = r"\*\*(?!\s*(-?\d\d?|\(\d/\d\))(?!\s*([\w.]|\*\*)))"  # not x**12, x**(3/2)
    return reply == answer or (
        re.fullmatch(r"[-+*/().,\w\s]{0,500}", reply, re.ASCII) is not None
        and {*words.findall(reply)} <= {*words.findall(answer)}
        and not re.search(rf"\d{{16}}|{power}|\)\s*\*\*.*\)\s*\*\*", reply, re.DOTALL))


def __getattr__(name):
    """The class of the data set of this name; AttributeError for names that begin with _."""
    if name.startswith("_"):
        raise AttributeError(name)
    return type("ReasoningGym", (ReasoningGym,), {"name": name})
