"""Data sets of the package reasoning-gym: the contract, what is paid, and what eval may see."""

import inspect
import random
import re
import shlex
import sys
from pathlib import Path

import conftest
import numpy as np
import pytest

from lab import archive
from minragen.envs import Budget, EnvGroups, make

reasoning_gym = pytest.importorskip("reasoning_gym")

from examples.reasoning_gym import draw, is_harmless  # noqa: E402

DATA_SETS = reasoning_gym.factory.DATASETS
# Their score_answer runs eval, of Python or of sympy, on the answer.
EVALUATE = {"binary_matrix", "countdown", "intermediate_integration", "n_queens",
            "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
            "string_insertion"}
JUDGE_ONLY = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def begin(name, seed=0, **options):
    return conftest.begin(f"examples.reasoning_gym:{name}", seed, **options)


class TestContract:
    def test_it_holds_for_data_sets_of_five_kinds(self, capsys):
        kinds = ("chain_sum", "mini_sudoku", "simple_equations", "knights_knaves", "spiral_matrix")
        arguments = ["-q", "--tb=short", "-p", "no:cacheprovider",
                     str(Path(__file__).parent.parent / "test_env_contract.py")]
        assert pytest.main([*arguments, *(
            f"--env=examples.reasoning_gym:{name}" for name in kinds)]) == 0
        # Its tasks take 25 ms, its answers are expressions.
        assert pytest.main([*arguments, "-k", "Hostile",
                            "--env=examples.reasoning_gym:countdown"]) == 0
        capsys.readouterr()


class TestTasks:
    def test_each_data_set_draws_one_and_its_own_answer_is_a_success(self):
        silent = set()
        for name in sorted(DATA_SETS.keys() - {"composite"}):  # which is made of others
            env = begin(name, seed=3)
            try:
                answer = env.solve()[0]
            except NotImplementedError:
                silent.add(name)
                continue
            observation, reward, terminated, _, info = env.step(answer)
            assert (reward, terminated, info["success"]) == (1.0, True, 1.0), name
            assert observation in env.observation_space, name
        assert silent == JUDGE_ONLY

    @pytest.mark.parametrize("name", ["list_functions", "pool_matrix"])  # they use global noise
    def test_a_seed_gives_one_task_and_the_global_generators_stay(self, name):
        first = begin(name, seed=5).render()
        draw.cache_clear()
        random.seed(1)
        np.random.seed(1)
        before = random.getstate(), np.random.get_state()[1].tolist()
        assert begin(name, seed=5).render() == first
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before

    def test_options_are_those_of_its_configuration(self):
        env = begin("chain_sum", min_terms=5, max_terms=5, max_digits=1)
        assert len(re.findall(r"\d+", env.render())) == 5


class TestScores:
    def test_only_a_score_of_1_is_paid_or_with_partial_what_is_more_than_before(self):
        for partial in (False, True):
            env = begin("chain_sum", seed=3, budget=Budget(3, 1, 3), partial=partial)
            replies = [text + env.solve()[0] for text in ("not ", "maybe not ", "")]
            share = len(replies[2]) / len(replies[0])  # which score_answer gives
            assert [env.step(reply)[1] for reply in replies] == pytest.approx(
                [share, 0.0, 1 - share] if partial else [0.0, 0.0, 1.0])

    @pytest.mark.parametrize("name, reply", [
        ("game_of_life_halting", "who knows"), ("puzzle24", "6 * 4 * 1 * 1")])
    def test_two_data_sets_pay_for_other_answers_as_the_example_says(self, name, reply):
        assert name in sys.modules[draw.__module__].__doc__ and begin(name).step(reply)[1] == 1.0

    def test_a_task_whose_answer_is_empty_is_not_drawn(self):
        answers = {begin("ab", seed=seed, length=2).solve()[0] for seed in range(40)}
        assert "" not in answers and len(answers) > 4  # A# #A becomes nothing

    def test_an_answer_on_which_the_data_set_raises_is_wrong(self):
        env = begin("prime_factorization")
        assert env.step("?")[1:3] == (0.0, True)


class TestEval:
    def test_the_data_sets_that_evaluate_an_answer_are_known(self):
        found = {name for name, (cls, _) in DATA_SETS.items() if re.search(
            r"\b(eval|exec|parse_expr|sympify)\(", inspect.getsource(cls.score_answer))}
        assert found - {"number_sorting"} == EVALUATE  # it evaluates its own answer
        assert {name for name in EVALUATE if not begin(name).evaluates} == set()

    def test_a_program_in_an_answer_is_not_run_and_a_large_number_not_computed(self, tmp_path):
        touch = f"__import__('pathlib').Path({str(tmp_path / 'it ran')!r}).touch()"
        own = "-2*(4*x - 7)**(3/2) + exp(x) + C"
        for reply in (touch, f"{touch}!", "9**9**9", "9**9 ** 9", "9**999", "9**0x9999999", "1e99",
                      "9!", "x!", "((9**99)**99)**99", "2**(3/2)**99", "[1]*9**9", "x.__class__",
                      "lambda: 1", "exp(x) if x else C", "(x:=1)", "open(0)", "eval(x)", "9" * 16,
                      "x" * 501):
            assert not is_harmless(reply, own), reply
        for reply in (own, "C + exp(x)-2*(4*x-7) ** (3/2)", "x**-1 + 12.5", "exp(x) * x ** 12"):
            assert is_harmless(reply, own), reply
        for name in sorted(EVALUATE):
            env = begin(name)
            assert env.step(touch)[1] == 0.0
        assert not (tmp_path / "it ran").exists()

    @pytest.mark.parametrize("name", sorted(EVALUATE - {"n_queens", "string_insertion",
                                                        "binary_matrix", "spiral_matrix"}))
    def test_the_own_answer_in_other_blanks_is_still_right(self, name):
        for seed in range(5):
            env = begin(name, seed=seed)
            assert env.step(env.solve()[0].replace("*", " * ").replace(" *  * ", " ** "))[1] == 1.0


class TestRefusal:
    @pytest.mark.parametrize("name, options, said", [
        ("chainsum", {}, "unknown data set of reasoning_gym 'chainsum': did you mean 'chain_sum'?"),
        ("chain_sum", {"max_term": 3}, "option of chain_sum 'max_term': did you mean 'max_terms'?"),
        ("chain_sum", {"max_terms": 1}, "{'max_terms': 1}, but max_terms must be >= min_terms"),
        ("composite", {}, "composite of reasoning_gym is made of other data sets: give their")])
    def test_an_unknown_name_or_a_bad_option_is_a_sentence(self, name, options, said):
        with pytest.raises(ValueError) as refused:
            make(f"examples.reasoning_gym:{name}", **options)
        assert said in str(refused.value)

    def test_without_the_package_it_is_told_how_to_get_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(ImportError, match="pip install 'reasoning-gym"):
            make("examples.reasoning_gym:chain_sum", max_terms=9)


class TestTraining:
    def test_a_mixture_with_a_data_set_trains_from_a_warm_up_and_is_evaluated(self, runs, capsys):
        from minragen import eval as evaluation
        from minragen.run.start import main

        small = shlex.split(
            "--num-groups 2 --group-size 4 --steps 2 --val-size 4 --warmup-steps 3 --model tiny "
            "--filter none --max-new-tokens 12 --diagnose-every 0")
        main(["--env", "examples.reasoning_gym:chain_sum,bandit", "--run", "a", *small,
              "--env-arg", "examples.reasoning_gym:chain_sum.max_terms=2"])
        evaluation.main(["--run", "a", "--size", "4"])
        printed = capsys.readouterr().out
        assert "examples.reasoning_gym:chain_sum" in printed and "solver" in printed

    def test_the_page_of_results_has_the_numbers_of_the_three_runs(self):
        from minragen.look.intervals import wilson

        root = Path(__file__).parent.parent.parent
        runs = [archive.metrics(f"reasoning-gym-aiw-s{seed}") for seed in range(3)]
        before, last = runs[0][0]["val/success"], [run[-2]["val/success"] for run in runs]
        tests = ", ".join(f"{run[-1]['test/success']:.2f}" for run in runs)
        (low, high), (worst, best) = (wilson(256 * rate, 256) for rate in (before, min(last)))
        minutes = sorted(run[-1]["elapsed"] / 60 for run in runs)
        page = " ".join((root / "docs/results.md").read_text().split())
        assert (f"success is {before:.2f} [{low:.2f}, {high:.2f}] before RL and "
                f"{', '.join(f'{rate:.2f}' for rate in last)} [{worst:.2f}, {best:.2f}] after 100 "
                f"steps ({minutes[0]:.1f} to {minutes[-1]:.1f} minutes), on the test split {tests}."
                ) in page
        first = EnvGroups("examples.reasoning_gym:aiw", 256, 1, "val").reset(0)
        assert "On 256 held-out questions (244 different ones)" in page and len({*first}) == 244
