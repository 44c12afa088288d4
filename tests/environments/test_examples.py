"""The examples that `--example` shows stand on instances that no split can contain.

OWN sets an environment up with its example's instance, where one turn can solve it; there the
example is right.
"""

from fractions import Fraction

import pytest

from minragen.config import preset
from minragen.environments.deepcoder import CodeProblem
from minragen.environments.metamathqa import WordProblem
from minragen.environments.sandbox import Case
from minragen.environments.theorems import Theorem, bundled_theorems, shape
from minragen.envs import REGISTRY, Budget, TextEnv, make
from minragen.support.formats import FORMATS, system_message

STATEMENT = "theorem own (n : Nat) (hn : n = 41) : 41 = n := by"


def frozenlake(env):
    env.holes[:], env.player, env.goal, env.best_actions = False, (7, 2), (8, 3), []
    assert env.goal[0] >= make("frozenlake").rows


def sokoban(env):
    env.floor = frozenset(env.inner)
    env.player, *rest = (7 * env.cols + column for column in (3, 4, 6))
    env.boxes, env.targets = (frozenset([cell]) for cell in rest)
    assert make("sokoban").rows <= 7


def sudoku(env):
    """The numbers of a drawn grid are swapped so that the last one of row 7 is 4."""
    last, swap = 6 * 9 + 8, {env.solution[6 * 9 + 8]: 4, 4: env.solution[6 * 9 + 8]}
    env.solution = [swap.get(number, number) for number in env.solution]
    env.board = [number * (cell != last) for cell, number in enumerate(env.solution)]
    env.clues = tuple(env.board)
    assert make("sudoku").n < 7


def countdown(env):
    env.numbers, env.target = (3, 5, 100), 115
    assert env.target not in env.TARGETS


def metamathqa(env):
    env.problem = WordProblem("5 boxes hold 48 pens each. 10 pens are lost. How many are left?",
                              "230", Fraction(230), False, "own")
    assert not any("pens" in str(template) for template in env.templates)


def deepcoder(env):
    env.problem = CodeProblem("Write a Python function area(width, height).", name="area",
                              hidden=(Case([3, 4], 12), Case([5, 5], 25)))


def lean(env):
    env.theorem = Theorem("own", STATEMENT)
    assert shape(STATEMENT) not in {shape(theorem.statement) for theorem in bundled_theorems()}


OWN = {frozenlake: {"size": 9}, sokoban: {"rows": 9, "cols": 9}, sudoku: {"size": 9},
       countdown: {}, metamathqa: {}, deepcoder: {}, lean: {}}


@pytest.mark.parametrize("place", OWN, ids=lambda place: place.__name__)
def test_an_example_is_right_on_an_instance_that_no_split_contains(place):
    env = make(place.__name__, **OWN[place])
    env.reset(seed=0)
    place(env)
    assert env.step(env.example_parts()["answer"])[4]["success"] == 1.0


def test_all_ten_have_one_for_every_response_format_and_only_pretrained_models_are_told_it():
    for name in REGISTRY:
        env = make(name)
        assert len(env.example) == 4
        for form in FORMATS:
            line = system_message(env, form, example=True).removeprefix(
                system_message(env, form) + "\n")
            assert line.startswith(f"For example: {FORMATS[form].partition('{')[0]}")
            assert line.endswith(f"<answer>{env.example[1]}</answer>") and "..." not in line
        assert preset(name, model="some/model").example and preset(name, model="smollm2").example
        assert not preset(name).example and not preset(name, model="tiny-vlm").example


def test_an_example_has_no_more_actions_than_a_turn():
    one = make("sokoban", budget=Budget(5, 1, 5))
    assert one.example_parts()["answer"] == "Right"
    assert make("sokoban").example_parts()["answer"] == "Right || Right"


class Lever(TextEnv):
    actions, multi_action, budget = ("Pull", "Push", "Wait"), True, Budget(3, 2, 6)


@pytest.mark.parametrize("example", [
    ("only a thought",), "text", (1, 2), ("a", "b</answer>"), ("a", "b", "c"), 7])
def test_an_example_that_shows_no_reply_is_refused_by_name(example):
    env = Lever()
    env.example = example
    with pytest.raises(ValueError, match="Lever.example is .*, expected .thought, answer."):
        env.example_parts()


def test_an_environment_without_one_gets_one_made_of_its_actions_if_it_has_any():
    assert system_message(Lever(), "no_think", example=True).splitlines()[-1] == (
        "For example: <answer>Pull || Push</answer>")
    Lever.actions = ()
    assert "example" not in system_message(Lever(), "no_think", example=True)
