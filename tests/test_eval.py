"""Measuring: intervals, baselines on the same instances, and the command that prints them."""

import math

import numpy as np
import pytest

from minragen import config as chosen
from minragen import eval as evaluation
from minragen import train as trainer
from minragen.envs import EnvGroups, make
from minragen.eval import play, random_player, scripted, solver_player, wilson


class TestWilson:
    @pytest.mark.parametrize("successes, n, low, high", [
        (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634),
        (206, 256, 0.7518, 0.8486)])
    def test_it_gives_the_textbook_values(self, successes, n, low, high):
        assert wilson(successes, n) == pytest.approx((low, high), abs=1e-4)

    @pytest.mark.parametrize("p, n", [(0.02, 40), (0.5, 40), (0.9, 256)])
    def test_it_covers_the_true_rate_about_95_times_in_100(self, p, n):
        """Exactly, by summing the binomial over all outcomes."""
        covered = sum(math.comb(n, k) * p**k * (1 - p)**(n - k) for k in range(n + 1)
                      if wilson(k, n)[0] <= p <= wilson(k, n)[1])
        assert 0.90 < covered < 0.99

    def test_no_trials_are_refused(self):
        with pytest.raises(ValueError, match="at least one trial"):
            wilson(0, 0)


class TestBaselines:
    def test_the_solver_always_succeeds_and_chance_does_not(self):
        groups = EnvGroups("frozenlake", 100, 1, "val")
        assert np.mean([s for s, _ in scripted(groups, solver_player)]) == 1.0
        assert 0.1 < np.mean([s for s, _ in scripted(groups, random_player)]) < 0.4

    def test_they_play_the_same_instances_every_time(self):
        groups = EnvGroups("frozenlake", 50, 1, "val")
        assert scripted(groups, random_player) == scripted(groups, random_player)


class TestCommand:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(chosen, "RUNS", tmp_path / "runs")
        trainer.main(["--env", "bandit", "--run", "b", "--steps", "1", "--num-groups", "2",
                      "--group-size", "4", "--val-size", "8"])

    def test_it_prints_how_true_the_descriptions_of_the_checkpoint_are(self, capsys):
        rows, described = [("checkpoint", 1, 2, 0.5)], {"grounding": 0.25, "worldmodeling": 0.75}
        evaluation.show({"sokoban": (rows, 2, described)}, "r", "test", 0.5)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "F1 of descriptions: grounding 0.250, worldmodeling 0.750"

    def test_it_prints_checkpoint_random_policy_and_solver_with_intervals(self, run, capsys):
        capsys.readouterr()
        evaluation.main(["--run", "b", "--split", "val", "--size", "24"])
        printed = capsys.readouterr().out.splitlines()
        assert "24 episodes" in printed[0] and "distinct instances" in printed[0]
        for line, player in zip(printed[2:], ("checkpoint", "checkpoint, greedy", "random policy",
                                              "solver")):
            assert line.startswith(player + " ") and line.count("[") == 1
        assert "1.000" in printed[-1]

    def test_it_agrees_with_the_runs_own_validation(self, run, capsys):
        import json
        last = [json.loads(x) for x in
                (chosen.RUNS / "b" / "metrics.jsonl").read_text().splitlines()][-1]
        rows, *_ = evaluation.evaluate(chosen.load_config("b"), "test", 8)["bandit"]
        assert (rows[0][1] / 8 == last["test/success"]
                and rows[1][1] / 8 == last["test/success_greedy"])

    @pytest.mark.parametrize("argv, said", [
        (["--run", "c"], "unknown run 'c': Known: b"),
        (["--run", "b", "--size", "0"], "expected 1 to 65536")])
    def test_bad_input_gets_one_sentence(self, run, argv, said):
        with pytest.raises(SystemExit) as stop:
            evaluation.main(argv)
        assert said in str(stop.value)


class TestPlay:
    def play(self, *lines, **options):
        said, typed = [], iter(lines)

        def ask(prompt):
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        play("frozenlake", "train", 3, options, ask, said.append)
        return "\n".join(said)

    def test_a_person_gets_the_prompts_and_rewards_of_the_policy(self):
        env = make("frozenlake", "train")
        first, _ = env.reset(seed=3)
        second, *_ = env.step("Right || Up")
        said = self.play("Right || Up", "Up")
        assert all(part in said for part in (env.system_prompt, first, second))
        assert "--- success, return 1" in said and "train seed 4" in said

    def test_a_question_mark_shows_the_solvers_answer_and_costs_nothing(self):
        said = self.play("?", "Right || Up", "Up")
        assert "Right || Up" in said and "--- success, return 1" in said

    def test_nonsense_costs_what_it_costs_the_policy(self):
        assert "Reward: -0.1" in self.play("nonsense")

    def test_a_line_that_ends_in_a_backslash_goes_on(self):
        assert "--- success, return 1" in self.play("Right ||\\", "Up", "Up")

    def test_the_command_says_what_it_does_not_know(self, monkeypatch):
        for words, told in ((["--play", "frozen_lake"], "did you mean 'frozenlake'"),
                            (["--play", ""], "unknown env ''"),
                            (["--play", "bandit", "--seed", "-1"], "expected at least 0"),
                            (["--play", "countdown", "--env-arg", "data={[1]:2}"], "no file"),
                            (["--play", "frozenlake", "--env-arg", "sice=3"], "size")):
            with pytest.raises(SystemExit, match=told):
                evaluation.main(words)
