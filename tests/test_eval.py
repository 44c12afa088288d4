"""Measuring: intervals, baselines on the same instances, and the command that prints them."""

import csv
import itertools
import json
import math
import re
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import parsed
from test_families import write_family
from test_readme import code_blocks
from training import read_lines, run

from minragen import eval as evaluation
from minragen.__main__ import main as command
from minragen.config import Config, preset
from minragen.environments.data import DATA
from minragen.envs import EnvGroups, make
from minragen.look import evaluate as tables_of
from minragen.look import play as on_screen
from minragen.look.evaluate import SETS, of_set
from minragen.look.faults import Fault, failure_of
from minragen.look.intervals import pass_at_k, wilson
from minragen.look.play import play
from minragen.look.players import DEMONSTRATIONS, features, nearest_demonstration, players, scripted
from minragen.run import measure, start
from minragen.run.groups import env_groups
from minragen.run.runs import load_config
from minragen.support.options import parse_options
from minragen.trajectory import Trajectory, Turn


class TestPassAtK:
    def test_it_is_the_mean_over_all_choices_of_k_samples(self):
        for n in range(1, 7):
            for successes in range(n + 1):
                samples = [True] * successes + [False] * (n - successes)
                for k in range(1, n + 1):
                    slow = np.mean([any(some) for some in itertools.combinations(samples, k)])
                    assert pass_at_k(n, successes, k) == pytest.approx(slow)


def trajectory(success, episode_return, error=""):
    return Trajectory("", 0, 0, 0, success=success, turn_rewards=[episode_return], turns=[None],
                      error=error, fault=Fault(error))


def evaluated(config, split, size, sampled, greedy, samples=1, again=()):
    """The tables for such trajectories of a model; `again`: the successes of samples for pass@k."""
    def play(groups, greedily):
        assert groups.split == split
        if groups.group_size > 1:
            assert len(groups) == len(again) and not greedily
            return {"checkpoint": [trajectory(success, 0.0, "gone" if success is None else "")
                                   for success in again]}
        return {"checkpoint": [trajectory(*pair) for pair in sampled],
                "checkpoint, greedy": [trajectory(*pair) for pair in greedy]}
    return tables_of.evaluate(partial(env_groups, config), split, size, play, samples)[0]


def sums(table):
    """{player: (successes, episodes, mean return)}"""
    return {name: (sum(e.success for e in episodes), len(episodes),
                   pytest.approx(np.mean([e.episode_return for e in episodes])))
            for name, episodes in table.players.items()}


class TestEvaluate:
    def test_each_environment_gets_its_players_successes_and_mean_returns(self):
        config = parsed("--env", "frozenlake,bandit")
        tables = evaluated(config, "val", 5,
                           [(True, 1.0), (False, 0.5), (True, 0.0), (False, 0.2), (False, -0.2)],
                           [(False, 0.0), (False, 0.0), (True, 0.3), (True, 0.1), (True, 0.3)])
        assert list(tables) == ["frozenlake", "bandit"]
        lake, arms = map(sums, tables.values())
        assert lake["checkpoint"] == (2, 3, 0.5) and lake["checkpoint, greedy"] == (1, 3, 0.1)
        assert arms["checkpoint"] == (0, 2, 0.0) and arms["checkpoint, greedy"] == (2, 2, 0.2)
        assert [*lake][2:] == ["random policy", "shallow player", "nearest demonstration", "solver"]
        assert lake["solver"] == (3, 3, 1.0) and tables["bandit"].rows == [3, 4]

    def test_pass_at_k_is_averaged_over_the_instances_for_powers_of_two(self):
        config, once = parsed("--env", "bandit"), [(True, 1.0)] * 2
        table = evaluated(config, "val", 2, once, once, 3, [1, 0, 0, 1, 1, 1])["bandit"]
        assert table.passed == {1: pytest.approx((1 / 3 + 1) / 2), 2: pytest.approx(
            (2 / 3 + 1) / 2), 3: 1.0}
        assert evaluated(config, "val", 2, once, once)["bandit"].passed == {}
        four, mixture = [(True, 1.0)] * 4, parsed("--env", "frozenlake,bandit")
        lake, arms = evaluated(mixture, "test", 4, four, [*four[:3], (False, 0.0, "gone")], 2,
                               [0, None, 1, 0, 1, 1, 0, 0]).values()
        assert (lake.rows, lake.passed) == ([1], {1: 0.5, 2: 1.0})  # without failures
        assert (arms.rows, arms.passed) == ([2], {1: 1.0, 2: 1.0})

    def test_an_instance_that_failed_is_told_and_in_nobodys_rate(self, monkeypatch, capsys):
        sampled = [(True, 1.0), (False, 0.5), (False, 9.0, "OSError: gone"), (True, 0.3)]
        config = parsed("--env", "bandit")
        monkeypatch.setattr(type(make("bandit")), "shallow_answer", staticmethod(
            lambda texts: "Nurse" if texts[1] != broken else 1 / 0))
        broken = env_groups(config, "val", 4).reset(0)[3]
        table = evaluated(config, "val", 4, sampled, [(True, 1.0)] * 4)["bandit"]
        found = sums(table)
        assert found["checkpoint"] == (1, 2, 0.75) and found["checkpoint, greedy"] == (2, 2, 1.0)
        assert [n for _, n, _ in found.values()] == [2] * 6 and table.rows == [0, 1]
        assert "episodes left out: 2. The first: OSError: gone" in capsys.readouterr().err
        with pytest.raises(RuntimeError, match="every episode of bandit failed"):
            evaluated(config, "val", 2, sampled[2:3] * 2, [(True, 1.0)] * 2)

    def test_equal_instances_are_counted_once_as_distinct(self):
        once = [(True, 0.1)] * 30
        config = parsed("--env", "bandit", "--env-arg", "mixed=False")
        # There are twelve pairs of names.
        assert 5 < evaluated(config, "val", 30, once, once)["bandit"].distinct <= 12

    def test_a_set_changes_its_options_alone_and_only_of_environments_that_have_it(self):
        config = parsed("--env", "frozenlake", "--env-arg", "slip=0.5")
        assert parse_options(of_set(config, "slippery").env_arg) == {
            "view": "coord", "frozen": 0.8, "slip": 0.5, "frozenlake.slip": 0.2}
        # Larger boards take more tokens, in an episode of as many turns.
        assert of_set(config, "large").max_context == 2 * config.max_context
        for name, env in ((name, env) for name, envs in SETS.items() for env in envs):
            groups = env_groups(of_set(parsed("--env", env), name), "test", 4)
            solved = scripted(groups, lambda env, texts, rng: env.solve()[0])
            assert name == "slippery" or all(episode.success for episode in solved), (name, env)
        for name, env, said in (("larg", "sokoban", "did you mean 'large'"),
                                ("large", "bandit", "of sokoban, frozenlake, not of bandit")):
            with pytest.raises(ValueError, match=said):
                of_set(parsed("--env", env), name)

    def test_a_scripted_player_sees_what_a_model_has_seen(self):
        groups, seen = EnvGroups("frozenlake", 1, 1), []
        scripted(groups, lambda env, texts, rng: seen.append([*texts]) or "Up")
        env = make("frozenlake")
        expected = [env.system_prompt, env.reset(seed=0)[0]]
        for texts in seen:
            assert texts == expected
            expected += "Up", env.step("Up")[0]

    def test_demonstrations_are_of_training_instances(self, monkeypatch):
        given = []
        monkeypatch.setattr(tables_of, "players", lambda groups: given.append(groups) or {})
        evaluated(parsed("--env", "bandit,countdown"), "test", 2, *[[(True, 1.0)] * 2] * 2)
        (groups,) = given
        assert (groups.split, len(groups)) == ("train", DEMONSTRATIONS)
        assert {*groups.names} == {"bandit", "countdown"}

    @pytest.mark.parametrize("env, solved", [("bandit", 15), ("countdown", 0)])
    def test_the_nearest_demonstration_shares_most_of_the_rare_words(self, env, solved):
        """Its slow twin compares every pair of conversations."""
        def answers(groups, player):
            said = []
            scripted(groups, lambda *given: said.append(player(*given)) or said[-1])
            return said

        def slow(env, texts, rng):
            def similarity(seen):
                shared = features(texts) & seen
                idf = (math.log(len(shown) / having[feature]) for feature in shared)
                return sum(idf) / math.sqrt(len(seen))
            return max(shown, key=lambda pair: round(similarity(pair[0]), 9))[1]

        training, held, shown = EnvGroups(env, 120, 1), EnvGroups(env, 15, 1, "val"), []
        scripted(training, lambda env, texts, rng: shown.append(
            (features(texts), env.solve()[0])) or shown[-1][1])
        nearest = nearest_demonstration(training)
        assert features(["a b", "b"]) == {"a", "b", ("a", "b"), ("b", "b")}
        having = Counter(feature for seen, _ in shown for feature in seen)
        assert answers(held, nearest) == answers(held, slow)
        assert sum(episode.success for episode in scripted(held, nearest)) == solved


SCRIPTED = json.loads((DATA / "players.json").read_text("utf-8"))
PROGRAMS = {"deepcoder", "lean"}  # they run programs, which takes long


class TestPlayers:
    @pytest.mark.parametrize("name", sorted({row["env"] for row in SCRIPTED} - PROGRAMS))
    def test_they_succeed_as_often_as_the_table_of_the_environments_says(self, name):
        """On the instances of a validation, by default and with the options of tiny's preset."""
        stored = [row for row in SCRIPTED if row["env"] == name]
        for config, row in zip((Config(env=name), preset(name)), stored, strict=True):
            groups = env_groups(config, "val", row["size"])
            for player in ("random policy", "shallow player", "solver"):
                played = scripted(groups, players(training=None)[player])
                assert sum(t.success for t in played) == row["players"][player], player


def players_of(capsys, *argv):
    """The names in the table that the command prints."""
    evaluation.main([*argv])
    return [line[:22].strip() for line in capsys.readouterr().out.splitlines()[2:] if "[" in line]


@pytest.fixture
def trained(begun, runs):
    """Two runs in runs/, of which b is a copy of a."""
    shutil.copytree(begun, runs / "b")
    return runs


@pytest.fixture
def refused(capsys):
    """refused((words, part of the sentence), ...): the command ends with it and plays nothing."""
    def check(*rows):
        for words, said in rows:
            with pytest.raises(SystemExit) as stop:
                command(words) if words[0] == "play" else evaluation.main(words)
            printed = capsys.readouterr()
            assert said in str(stop.value) + printed.err, words
            assert printed.out == ""
    return check


class TestCommand:
    def test_it_prints_each_players_rate_interval_return_turns_tokens_and_valid_turns(self, capsys):
        episodes = [Trajectory("", 0, 0, 0, success=k < 12, turn_rewards=[0.5],
                               turns=[None] * (2 + k % 2), metrics={"valid": 0.75,
                                                                    "reply_tokens": k})
                    for k in range(48)]
        table = tables_of.Table(range(48), {"checkpoint": episodes}, 17, {1: 0.25, 2: 0.5})
        tables_of.show({"sokoban": table}, "test", "run r", 0.5)
        title, _, row, passes = capsys.readouterr().out.splitlines()
        assert title == ("sokoban, split test: 48 episodes, 17 distinct instances; run r, sampled "
                         "at temperature 0.5")
        assert row.split() == ["checkpoint", "0.250", "[0.149,", "0.388]", "0.500", "2.50", "23.5",
                               "0.75"]
        assert passes == "pass@1 0.250  pass@2 0.500"

    def test_it_measures_a_run_on_a_split_as_it_measured_itself(self, trained, refused, capsys):
        (trained / "a").rename(trained / "d")  # a run is where its folder is
        lines = read_lines(trained / "d" / "metrics.jsonl")
        for split, line in (("val", lines[2]), ("test", lines[3])):
            evaluation.main(["--run", "d", "--split", split, "--size", "4"])
            printed, bars = (text.splitlines() for text in capsys.readouterr())
            assert bars == []
            rate = line[f"{split}/success"]
            low, high = wilson(round(rate * 4), 4)
            assert f"{rate:7.3f}   [{low:.3f}, {high:.3f}]" in printed[2]
            assert printed[7].startswith("solver                   1.000")
        assert lines[2]["val/success"] != lines[3]["test/success"]
        refused((["--run", "e"], "unknown run 'e'. Known: b, d."),
                (["--run", "d", "--size", "0"], "expected 1 to 65536"))

    def test_several_runs_are_measured_if_all_have_a_checkpoint(self, trained, refused, capsys):
        assert players_of(capsys, "--run", "a b a", "--size", "4").count("checkpoint") == 2
        for path in (trained / "b").glob("checkpoint*"):
            shutil.rmtree(path)
        refused((["--run", "a b"], "b has no checkpoint"), (["--run", ""], "unknown run ''"))

    def test_options_of_the_command_reach_the_config_that_is_measured(self, trained):
        def configs(*words):
            return [config for _, config, _ in measure.subjects(evaluation.arguments(words))]

        greedy, plain = configs("--run", "a", "--temperature", "0") + configs("--run", "a")
        assert (greedy.val_temperature, plain.val_temperature) == (0.0, 0.5)
        (unseen,) = configs("--run", "a", "--set", "unseen")
        assert unseen.env_arg == (*plain.env_arg, "bandit.mixed=False") == (
            "mixed=True", "bandit.mixed=False")
        arms, lake = configs("--env", "bandit,frozenlake", "--model", "tiny", "--env-arg",
                             "frozenlake.slip=0.1")
        assert "frozenlake.slip=0.1" in lake.env_arg and arms.env_arg == ("mixed=True",)

    def test_a_model_behind_a_server_is_asked_as_the_options_say(self, monkeypatch, capsys):
        server = Mock(return_value=SimpleNamespace(
            prompt_tokens=7000, reply_tokens=20,
            collect=lambda groups: [trajectory(True, 1.0)] * len(groups)))
        monkeypatch.setattr("minragen.more.api.Server", server)
        monkeypatch.setattr(tables_of, "players", lambda training: {})
        evaluation.main(["--env", "lean", "--api", "http://x", "--api-model", "m", "--size", "2",
                         "--temperature", "0.25", "--samples", "2"])
        server.assert_called_once_with("http://x", "m", "free_think", 128, 0.25, True)
        printed = capsys.readouterr().out
        assert "m                        1.000" in printed and "pass@2 1.000" in printed
        assert printed.endswith("counted 7,000 tokens of prompts and 20 of replies\n")

    def test_the_best_checkpoint_is_measured_if_asked(self, trained, refused, capsys, monkeypatch):
        best, loaded, load = trained / "a" / "checkpoint.best", [], start.load_policy
        monkeypatch.setattr(start, "load_policy", lambda source, *given: (
            loaded.append(source) or load(source, *given)))
        assert players_of(capsys, "--run", "a", "--checkpoint", "best", "--size", "4")[:2] == [
            "best", "best, greedy"]
        assert loaded == [best]
        (best / "trainer.pt").write_bytes(b"")
        asked = ["--run", "a", "--checkpoint", "best"]
        refused((asked, "best/trainer.pt is missing or has changed. Restore the file. Leave "
                        "out --checkpoint"))
        shutil.rmtree(best)
        refused((asked, "a has no best checkpoint: its weights are not here. Leave out --check"),
                (["--env", "bandit", "--checkpoint", "best"], "--checkpoint needs --run"))

    def test_it_writes_a_row_for_each_player_and_chats_as_messages(self, trained, tmp_path):
        evaluation.main(["--run", "a", "--size", "8", "--samples", "2", "--split", "val", "--out",
                         str(tmp_path)])
        with open(tmp_path / "results.csv") as file:
            rows = [*csv.DictReader(file)]
        assert [row["player"] for row in rows][:2] == ["checkpoint", "checkpoint, greedy"]
        assert len(rows) == 6 and {row["options"] for row in rows} == {"mixed=True"}
        assert rows[0]["tokens"] and not rows[-1]["tokens"]  # the solver samples none
        chats = read_lines(tmp_path / "chats.jsonl")
        assert float(rows[0]["success"]) == sum(chat["success"] for chat in chats) / 8
        assert rows[0]["pass@k"].startswith("1:0.") and rows[0]["split"] == "val"
        assert [m["role"] for m in chats[0]["messages"]] == ["system", "user", "assistant"]

    def test_a_model_that_computes_cached_turns_wrongly_is_refused(self, refused, tmp_path):
        write_family("Jamba", tmp_path / "jamba")
        refused((["--env", "bandit", "--model", str(tmp_path / "jamba"), "--size", "2"],
                 "differs between cached turns and a full pass"))

    def test_what_it_does_not_know_and_what_has_no_effect_is_refused(self, refused):
        refused((["--env", "bandit,lak"], "unknown env 'lak'"),
                (["--run", "a", "--model", "tiny"], "--model needs --env"),
                (["--env", "bandit", "--api-model", "m"], "--api-model needs --api"),
                (["play", "frozen_lake"], "did you mean 'frozenlake'"),
                (["play", "frozenlake", "--env-arg", "sice=3"], "size"),
                (["play", "bandit", "--run", "a"], "give an environment, or --run NAME"),
                (["--run", "a", "--env-arg", "data=x"], "--env-arg needs --env"),
                (["play", "--run", "a", "--env-arg", "data=x"], "a run keeps its own"),
                (["play", "bandit", "--temperature", "0"], "--temperature needs --run"))


class TestElsewhere:
    @pytest.mark.parametrize("options", [(), ("--lora-rank", "4")])
    def test_the_pages_program_samples_the_same_ids(self, options, runs, monkeypatch, capsys):
        (lines,) = code_blocks("running.md", "python")
        run("--env frozenlake --run lake --steps 1 --num-groups 2 --group-size 4 --val-size 2 "
            "--diagnose-every 0", *options)
        config = load_config("lake")
        here = measure.checkpoint_player(config, "lake")(env_groups(config, "test", 2))
        monkeypatch.chdir(runs.parent)
        for seed, t in enumerate(here["checkpoint, greedy"]):
            exec("\n".join(lines).replace("seed=0", f"seed={seed}"), found := {})
            assert [*found["ids"][0].tolist(), *found["out"].tolist()] == t.tokens
            assert bool(found["info"]["success"]) == t.success
        assert sum(len(t.turns) for t in here["checkpoint, greedy"]) > 2  # so there is a history


class TestPlay:
    def play(self, *lines):
        said, ask = [], Mock(side_effect=[*lines, EOFError])
        play("frozenlake", "train", 3, {}, ask, said.append)
        return "\n".join(said)

    def test_a_person_gets_the_prompts_and_rewards_of_the_policy(self):
        env = make("frozenlake", "train")
        first, _ = env.reset(seed=3)
        second, *_ = env.step("Right || Up")
        said = self.play("Right || Up", "Up")
        assert all(part in said for part in (env.system_prompt, first, second))
        assert "--- success, return 1" in said and "train seed 4" in said

    def test_a_question_mark_a_blank_line_and_a_backslash_at_the_end_cost_no_turn(self):
        said = self.play("?", "", "Right ||\\", "Up", "  ", "Up")
        assert "Right || Up" in said and said.count("Type an answer.") == 2
        assert "--- success, return 1" in said


class TestShow:
    """`minragen play --run NAME`: the policy plays."""

    def test_it_shows_the_measured_episodes_from_the_seed_on(self, trained, capsys, tmp_path):
        evaluation.main(["--run", "a", "--split", "val", "--size", "5", "--out", str(tmp_path)])
        chats = read_lines(tmp_path / "chats.jsonl")[2:]
        capsys.readouterr()
        command(["play", "--run", "a", "--split", "val", "--seed", "2"])
        title, *episodes = capsys.readouterr().out.split("\n--- bandit, val seed ")
        assert title.startswith("run a plays bandit, sampled at temperature 0.5 (greedy")
        assert len(episodes) == len(chats) == on_screen.SHOWN
        for seed, (chat, episode) in enumerate(zip(chats, episodes), 2):
            system, asked, reply = (m["content"] for m in chat["messages"])
            end = f"--- {'success' if chat['success'] else 'no success'}, return {chat['return']:g}"
            assert chat["seed"] == seed and f"{seed}\n" == episode[:2]
            assert f"\n{asked}\n> <think>{reply}\n\nReward: {chat['return']:g}\n" in episode
            assert episode.rstrip().endswith(end)
            assert (make("bandit").instruction in episode) == (seed == 2)

    def test_replies_cannot_speak_to_the_terminal_and_a_failure_has_its_line(self):
        t = Trajectory("bandit", 0, 0, 0, observation="gone", turn_rewards=[0.0, -0.1], turns=[
            Turn("board", "\x1b]0;title\x07 Up", None, None),
            Turn("board 2", "Down", None, None)])
        t.fail(failure_of(KeyError("x")))
        assert on_screen.episode_text(t, "<think>", [""] * 3) == (
            "board\n> <think>]0;title Up\n\nboard 2\n> <think>Down\n\n'x'\ngone\n"
            "--- env error, return -0.1 = 0 + -0.1")

    def test_a_run_is_measured_with_its_settings_and_shown_in_rounds(self, runs, capsys, tmp_path):
        """Here of a mixture, one instance of each environment a round."""
        run("--env toys:Lottery,toys:Raffle --context limited --window 2 --run w --steps 1 "
            "--num-groups 2 --group-size 2 --val-size 4 --warmup-steps 0 --max-new-tokens 6 "
            "--max-context 300 --response-format no_think --val-temperature 1.5")
        capsys.readouterr()
        command(["play", "--run", "w"])
        titles = re.findall(r"\n--- (toys:\w+), test seed (\d)", capsys.readouterr().out)
        assert titles == [("toys:Lottery", "0"), ("toys:Raffle", "1"), ("toys:Lottery", "2"),
                          ("toys:Raffle", "3")]
        evaluation.main(["--run", "w", "--size", "4", "--out", str(tmp_path / "out")])
        chats = read_lines(tmp_path / "out" / "chats.jsonl")
        assert [chat["messages"] for chat in chats] == [
            line["messages"] for line in read_lines(runs / "w" / "trajectories.jsonl")
            if line["split"] == "test"]
