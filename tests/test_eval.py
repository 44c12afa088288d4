"""Measuring: intervals, baselines on the same instances, and the command that prints them."""

import json
import math

import numpy as np
import pytest
from conftest import parsed
from toys import tiny

from minragen import diagnostics, models, train
from minragen import eval as evaluation
from minragen import runs as runs_on_disk
from minragen.config import env_groups
from minragen.envs import EnvGroups, make
from minragen.eval import play, scripted, wilson
from minragen.rollout import Trajectory


class TestWilson:
    def test_it_gives_the_textbook_values(self):
        for successes, n, low, high in ((0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0),
                                        (5, 10, 0.2366, 0.7634), (206, 256, 0.7518, 0.8486)):
            assert wilson(successes, n) == pytest.approx((low, high), abs=1e-4)

    def test_it_covers_the_true_rate_about_95_times_in_100(self):
        """Exactly, by summing the binomial over all outcomes."""
        for p, n in ((0.02, 40), (0.5, 40), (0.9, 256)):
            covered = sum(math.comb(n, k) * p**k * (1 - p)**(n - k) for k in range(n + 1)
                          if wilson(k, n)[0] <= p <= wilson(k, n)[1])
            assert 0.90 < covered < 0.99

    def test_no_trials_are_refused(self):
        with pytest.raises(ValueError, match="at least one trial"):
            wilson(0, 0)


def trajectory(success, episode_return, error=""):
    return Trajectory("", 0, 0, 0, success=success, turn_rewards=[episode_return], turns=[None],
                      error=error)


class TestEvaluate:
    @pytest.fixture
    def evaluated(self, monkeypatch):
        """evaluated(config, split, size, sampled, greedy): the tables for such trajectories."""
        def tables(config, split, size, sampled, greedy):
            monkeypatch.setattr(runs_on_disk, "find_checkpoint", lambda folder: folder)
            monkeypatch.setattr(models, "load_policy", lambda *_, **__: tiny()[0])
            monkeypatch.setattr(diagnostics, "play_held_out", lambda *_: {
                "": [trajectory(*pair) for pair in sampled],
                "_greedy": [trajectory(*pair) for pair in greedy]})
            return evaluation.evaluate(config, split, size)
        return tables

    def test_each_environment_gets_its_rows_successes_and_mean_returns(self, evaluated):
        config = parsed("--env", "frozenlake,bandit")
        tables = evaluated(config, "val", 5,
                           [(True, 1.0), (False, 0.5), (True, 0.0), (False, 0.2), (False, -0.2)],
                           [(False, 0.0), (False, 0.0), (True, 0.3), (True, 0.1), (True, 0.3)])
        assert list(tables) == ["frozenlake", "bandit"]
        lake, arms = (rows for rows, _, _ in tables.values())
        assert lake[:2] == [("checkpoint", 2, 3, 0.5), ("checkpoint, greedy", 1, 3,
                                                        pytest.approx(0.1))]
        assert arms[:2] == [("checkpoint", 0, 2, 0.0), ("checkpoint, greedy", 2, 2,
                                                        pytest.approx(0.2))]
        assert [row[0] for row in lake[2:]] == ["random policy", "shallow player",
                                                "nearest demonstration", "solver"]
        assert lake[5] == ("solver", 3, 3, 1.0)

    def test_an_instance_on_which_an_environment_failed_is_in_nobodys_rate(
            self, evaluated, monkeypatch):
        sampled = [(True, 1.0), (False, 0.5), (False, 9.0, "OSError: gone"), (True, 0.3)]
        config = parsed("--env", "bandit")
        monkeypatch.setattr(type(make("bandit")), "shallow_answer", staticmethod(
            lambda texts: "Nurse" if texts[1] != broken else 1 / 0))
        broken = env_groups(config, "val", 4).reset(0)[3]
        rows, _, _ = evaluated(config, "val", 4, sampled, [(True, 1.0)] * 4)["bandit"]
        assert rows[:2] == [("checkpoint", 1, 2, 0.75), ("checkpoint, greedy", 2, 2, 1.0)]
        assert [row[2] for row in rows] == [2] * 6
        with pytest.raises(RuntimeError, match="every episode of bandit failed"):
            evaluated(config, "val", 2, sampled[2:3] * 2, [(True, 1.0)] * 2)

    @pytest.mark.parametrize("split", ["val", "test"])
    def test_baselines_play_the_instances_of_the_split_from_seed_0(self, evaluated, split):
        config = parsed("--env", "frozenlake")
        rows, distinct, _ = evaluated(config, split, 40, [(True, 1.0)] * 40,
                                      [(True, 1.0)] * 40)["frozenlake"]
        groups = env_groups(config, split, 40)
        groups.reset(0)
        assert distinct == len({env.instance() for env in groups.envs})
        rng, won = np.random.default_rng(0), 0
        for env in groups.envs:
            over = False
            while not over:
                _, _, terminated, truncated, info = env.step(env.random_answer(rng))
                over = terminated or truncated
            won += info["success"] == 1
        assert rows[2][1:3] == (won, 40) and rows[5][1:] == (40, 40, 1.0)
        assert 0.05 < won / 40 < 0.5

    def test_equal_instances_are_counted_once_as_distinct(self, evaluated):
        outcomes = [(True, 0.1)] * 30
        config = parsed("--env", "bandit", "--env-arg", "mixed=False")
        tables = evaluated(config, "val", 30, outcomes, outcomes)
        _, distinct, _ = tables["bandit"]
        assert 5 < distinct <= 12  # there are twelve pairs of names

    def test_success_in_any_turn_is_success(self):
        groups = EnvGroups("test_rollout:Counts", 1, 1)
        assert scripted(groups, lambda env, texts, rng: "x") == [(True, pytest.approx(0.6))]

    def test_a_scripted_player_sees_what_a_model_has_seen(self):
        groups, seen = EnvGroups("frozenlake", 1, 1), []
        scripted(groups, lambda env, texts, rng: seen.append([*texts]) or "Up")
        env = make("frozenlake")
        expected = [env.system_prompt, env.reset(seed=0)[0]]
        for texts in seen:
            assert texts == expected
            expected += "Up", env.step("Up")[0]

    def test_the_nearest_demonstration_is_the_one_that_shares_most_of_the_rare_words(self):
        """Its slow twin compares every pair of conversations."""
        def answers(groups, player):
            said = []
            scripted(groups, lambda *given: said.append(player(*given)) or said[-1])
            return said

        def slow(env, texts, rng):
            def similarity(seen):
                shared = evaluation.features(texts) & seen
                idf = (math.log(len(shown) / sum(f in x for x, _ in shown)) for f in shared)
                return sum(idf) / math.sqrt(len(seen))
            return max(shown, key=lambda pair: round(similarity(pair[0]), 9))[1]

        training, held, shown = EnvGroups("bandit", 120, 1), EnvGroups("bandit", 20, 1, "val"), []
        scripted(training, lambda env, texts, rng: shown.append(
            (evaluation.features(texts), env.solve()[0])) or shown[-1][1])
        nearest = evaluation.NearestDemonstration(training)
        assert answers(held, nearest) == answers(held, slow)
        assert sum(success for success, _ in scripted(held, nearest)) == 20


class TestCommand:
    def test_it_prints_each_players_rate_interval_and_return(self, capsys):
        rows, described = [("checkpoint", 12, 48, 0.5)], {"grounding": 0.25, "worldmodeling": 0.75}
        evaluation.show({"sokoban": (rows, 17, described)}, "r", "test", 0.5)
        title, _, row, last = capsys.readouterr().out.splitlines()
        assert title == ("sokoban, split test: 48 episodes, 17 distinct instances; run r, sampled "
                         "at temperature 0.5")
        assert row.split() == ["checkpoint", "0.250", "[0.149,", "0.388]", "0.500"]
        assert last == "F1 of descriptions: grounding 0.250, worldmodeling 0.750"

    def test_it_measures_a_run_on_the_split_asked_for_as_the_run_measured_itself(
            self, runs, capsys, monkeypatch):
        train.main(["--env", "bandit", "--run", "a", "--steps", "1", "--num-groups", "2",
                    "--group-size", "4", "--val-size", "16"])
        (runs / "a").rename(runs / "b")  # a run is where its folder is
        lines = [json.loads(x) for x in (runs / "b" / "metrics.jsonl").read_text().splitlines()]
        capsys.readouterr()
        for split, line in (("val", lines[1]), ("test", lines[2])):
            monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
            evaluation.main(["--run", "b", "--split", split, "--size", "16"])
            printed, bars = (text.splitlines() for text in capsys.readouterr())
            assert bars == []
            for row, name in zip(printed[2:4], ("success", "success_greedy")):
                low, high = wilson(round(line[f"{split}/{name}"] * 16), 16)
                assert f"{line[f'{split}/{name}']:8.3f}   [{low:.3f}, {high:.3f}]" in row
            assert printed[7].startswith("solver                  1.000")
        assert lines[1]["val/success"] != lines[2]["test/success"]
        for argv, said in ((["--run", "c"], r"unknown run 'c'\. Known: b\."),
                           (["--run", "b", "--size", "0"], "expected 1 to 65536")):
            with pytest.raises(SystemExit, match=said):
                evaluation.main(argv)


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

    def test_a_line_that_ends_in_a_backslash_goes_on(self):
        assert "--- success, return 1" in self.play("Right ||\\", "Up", "Up")

    def test_the_command_says_what_it_does_not_know(self):
        for words, said in ((["--play", "frozen_lake"], "did you mean 'frozenlake'"),
                            (["--play", ""], "unknown env ''"),
                            (["--play", "bandit", "--seed", "-1"], "expected at least 0"),
                            (["--play", "countdown", "--env-arg", "data={[1]:2}"], "no file"),
                            (["--play", "frozenlake", "--env-arg", "sice=3"], "size")):
            with pytest.raises(SystemExit, match=said):
                evaluation.main(words)
