"""The leaderboard: its rule, its bootstrap, an algorithm by the page alone; and the stored runs."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import message
from test_readme import PAGES, code_blocks
from training import BRIEF, read_lines, run

from lab import archive, leaderboard, pretrained
from lab.leaderboard import MINUTES, SEEDS, TUNING_SEED, candidates, fill, finished, stored
from minragen import config as settings
from minragen import starpo, train
from minragen.envs import REGISTRY
from minragen.look import report
from minragen.run import reproduce
from minragen.run import runs as folders

RUN = "frozenlake-grpo-s0"


def row(env, algo, seed, test, rate="1", **more):
    return {"env": env, "algo": algo, "seed": seed, "test": test, "rate": rate, "size": 256,
            "valid": 1.0, "minutes": 2.0, "val": 0.5} | more


def standings(**rates):
    """What `finished` gives for algorithms of these rates in every environment."""
    return {algo: {env: [row(env, algo, seed, rate) for seed in SEEDS] for env in MINUTES}
            for algo, rate in rates.items()}


@pytest.fixture
def trained(monkeypatch):
    """The Configs that `measure` gets; validation is 0.5, or `val` of the learning rate."""
    asked, val = [], {}

    def measure(config):
        asked.append((config.seed, config.lr))
        return row(config.env, config.algo, config.seed, 0.7, lr=config.lr,
                   val=val.get(config.lr, 0.5))

    monkeypatch.setattr(leaderboard, "measure", measure)
    return SimpleNamespace(asked=asked, val=val)


class TestRule:
    def fill(self, folder, algo="grpo"):
        fill(("bandit", algo), folder / "rows.json", {})
        return stored(folder / "rows.json")

    def test_three_rates_are_tried_on_one_seed_and_the_best_trains_three(self, trained, tmp_path):
        trained.val[1e-4] = 0.6
        self.fill(tmp_path)
        assert trained.asked == [*((TUNING_SEED, lr) for lr in (3e-4, 1e-4, 9e-4)),
                                 *((seed, 1e-4) for seed in SEEDS)]

    def test_a_run_has_all_steps_of_the_preset_and_only_its_rate_and_seed_differ(self):
        base = settings.preset("webshop", "ppo")
        for config in candidates("webshop", "ppo").values():
            assert dataclasses.replace(
                config, lr=base.lr, seed=0, device="", val_every=base.val_every,
                save_every=base.save_every) == base

    def test_what_is_stored_is_not_repeated_after_a_kill(self, trained, tmp_path, monkeypatch):
        measure = leaderboard.measure

        def killed(config):
            if config.seed == 1:
                raise KeyboardInterrupt
            return measure(config)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(leaderboard, "measure", killed)
            self.fill(tmp_path)
        assert len(trained.asked) == 4 and not finished(stored(tmp_path / "rows.json"))
        assert len(self.fill(tmp_path)) == len(trained.asked) == 6
        assert "all 6" in leaderboard.forecast([("bandit", "grpo")], 1, tmp_path / "rows.json", {})
        assert [seed for seed, _ in trained.asked[4:]] == [1, 2]

    def test_a_changed_preset_is_seen_and_trained_again(self, trained, tmp_path, monkeypatch):
        before = self.fill(tmp_path)
        assert [*finished(before)["grpo"]] == ["bandit"]
        monkeypatch.setitem(settings.ALGOS, "grpo", {"gamma_turn": 0.5})
        assert not finished(before)
        after = self.fill(tmp_path)
        assert len(trained.asked) == 12 and not after.keys() & before.keys()

    def test_a_policy_that_diverges_has_no_success_and_rates_have_names(self, runs, monkeypatch):
        def diverges(*_):
            raise FloatingPointError("logits are not finite: the policy has diverged. Is")

        monkeypatch.setattr(train, "train", diverges)
        configs = candidates("bandit", "grpo", **leaderboard.QUICK).values()
        for rate, config in zip(("1", "1/3", "3"), configs):
            assert leaderboard.measure(config) | {"minutes": 0} == {
                "env": "bandit", "algo": "grpo", "rate": rate, "lr": config.lr,
                "seed": TUNING_SEED, "steps": 0, "size": 8, "val": 0.0, "test": 0.0, "valid": 0.0,
                "minutes": 0}


class TestBootstrap:
    def test_it_has_the_mean_of_the_seeds_and_the_variance_of_seeds_and_instances(self):
        rates, size = np.array([[[0.5, 0.6, 0.9]]]), 50
        drawn = leaderboard.replicates(rates, size)[:, 0, 0]
        between, within = rates.var(), (rates * (1 - rates)).mean() / size
        assert drawn.mean() == pytest.approx(rates.mean(), abs=0.01)
        assert drawn.var() == pytest.approx((between + within) / 3, rel=0.1)

    def test_a_replicate_draws_the_same_environments_for_all_algorithms(self):
        drawn = np.tile([[0.1, 0.5, 0.9], [0.2, 0.6, 1.0]], (leaderboard.DRAWS, 1, 1))
        means = leaderboard.over_environments(drawn)
        assert np.allclose(means[:, 1] - means[:, 0], 0.1)
        assert means[:, 0].std() == pytest.approx(np.std([0.1, 0.5, 0.9]) / 3**0.5, rel=0.1)

    def test_far_apart_ranks_are_certain_and_equal_ones_are_not(self):
        table = leaderboard.algorithms_table(standings(grpo=0.2, ppo=0.9, rloo=0.5, gspo=0.5))
        heads = [line.split(" | ")[:2] for line in table.splitlines()[2:]]
        assert heads[0] == ["| 1 [1, 1]", "`ppo`"] and heads[3] == ["| 4 [4, 4]", "`grpo`"]
        assert {head[0][-6:] for head in heads[1:3]} == {"[2, 3]"}

    def test_an_algorithm_is_above_or_below_another_only_beyond_the_noise(self):
        done = standings(grpo=0.6, ppo=0.9, rloo=0.59, gspo=0.2)
        done["gspo"].pop("webshop")
        said = [line.split() for line in leaderboard.verdicts("grpo", done)[1:]]
        assert [words[:-3] + words[-3:-2] for words in said] == [
            ["below", "ppo", "-0.300"], ["within", "the", "noise", "of", "rloo", "+0.010"]]
        assert leaderboard.verdicts("gspo", done)[0].startswith("gspo in bandit, deepcoder")
        assert len(leaderboard.verdicts("gspo", done)) == 4


class TestPage:
    def test_only_complete_rows_are_ranked_and_the_others_show_what_they_have(self):
        done = standings(grpo=0.5)
        done["my:own"] = {"bandit": [row("bandit", "my:own", seed, 0.5) for seed in SEEDS]}
        first, second = leaderboard.algorithms_table(done).splitlines()[2:]
        assert first.startswith("| 1 [1, 1] | `grpo` | 0.500 | 0.50 |")
        assert first.endswith(" | 0.50 | 0.50 |")
        assert second.startswith("|  | `my:own` |  | 0.50 |  |")


@pytest.fixture
def here(runs, tmp_path, monkeypatch):
    """The current folder, with the page's my_algo.py; what importing it did is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(starpo, "ESTIMATORS", {**starpo.ESTIMATORS})
    monkeypatch.setattr(starpo, "FILTERS", {**starpo.FILTERS})
    monkeypatch.delitem(sys.modules, "my_algo", raising=False)
    (own,) = code_blocks("algorithms.md", "python")
    assert len([line for line in own if line]) == 8  # as the README says
    (tmp_path / "my_algo.py").write_text("\n".join(own))
    yield tmp_path
    sys.modules.pop("my_algo", None)


class TestOwnAlgorithm:
    @staticmethod
    def forget():
        """As a new process begins."""
        del sys.modules["my_algo"], starpo.ESTIMATORS["median"]

    def test_the_lines_of_the_page_train_resume_and_are_reproduced(self, here, runs):
        run("--algo my_algo:preset --steps 1 --run a", *BRIEF)
        self.forget()
        run("--run a --resume --steps 2")
        self.forget()
        with pytest.raises(SystemExit) as stop:
            reproduce.main(["a"])
        assert stop.value.code == 0
        for name in ("a", "a-again"):
            assert read_lines(runs / name / "metrics.jsonl")[-1]["step"] == 2
            assert json.loads((runs / name / "config.json").read_text())["advantages"] == "median"

    def test_a_filter_of_its_own_is_a_row_too(self, here, runs):
        line, = re.findall(r'`(starpo\.FILTERS\["half"\] = [^`]*)`', PAGES["algorithms.md"])
        with open(here / "my_algo.py", "a") as file:
            file.write(f'\n{line}\nhalf = {{"filter": "half", "filter_value": 0.5}}\n')
        run("--algo my_algo:half --steps 1 --run a", *BRIEF)
        assert json.loads((runs / "a" / "config.json").read_text())["filter"] == "half"
        assert starpo.filter_groups(torch.tensor([1.0, 3, 2]), 0.5, "half").tolist() == [
            False, True, True]

    def test_a_change_of_its_file_is_seen(self, here):
        before = candidates("bandit", "my_algo:preset")
        (here / "my_algo.py").write_text((here / "my_algo.py").read_text() + "\n# another\n")
        assert not before.keys() & candidates("bandit", "my_algo:preset").keys()

    def test_what_is_no_preset_is_refused(self, here):
        with open(here / "my_algo.py", "a") as file:
            file.write('\nwrong = {"advantags": "median"}\nelsewhere = {"env": "bandit"}\n'
                       'starpo.ESTIMATORS |= {"a": 1, "b": ("all", 1)}\n'
                       'kindless = {"advantages": "a"}\nunkind = {"advantages": "b"}\n')
        for algo, said in (
                ("my_algo:wrong", "unknown option of algo my_algo:wrong 'advantags': did you mean"),
                ("my_algo:elsewhere", "unknown option of algo my_algo:elsewhere 'env'"),
                ("my_algo:kindless", "advantages a: got 1 in starpo.ESTIMATORS, expected"),
                ("my_algo:unkind", "advantages b: got ('all', 1) in starpo.ESTIMATORS"),
                ("my_algo:nothing", "algo 'my_algo:nothing' names no dictionary of options"),
                ("my_alg:preset", "algo my_alg:preset: there is no module 'my_alg' in the")):
            assert said in message("--env", "bandit", "--algo", algo)

    def test_what_changes_the_task_or_fails_gets_no_row_and_a_sentence(self, here, capsys):
        with open(here / "my_algo.py", "a") as file:
            file.write('\nlonger = {"steps": 99}\nbroken = {"advantages": "broken"}\n'
                       'starpo.ESTIMATORS["broken"] = ("group", lambda batch, config: 1 / 0)\n')
        with pytest.raises(SystemExit, match="^error: algo my_algo:longer: all algorithms have "
                           "the same steps in bandit, 30"):
            leaderboard.main(["--algo", "my_algo:longer", "--env", "bandit"])
        said = fill(("bandit", "my_algo:broken"), here / "rows.json", leaderboard.QUICK)
        assert said.startswith("ZeroDivisionError: division by zero (my_algo.py:")
        assert not stored(here / "rows.json")

    def test_words_that_mean_nothing_are_refused(self, capsys):
        for words, said in ((["--env", "bandi"], "unknown env 'bandi': did you mean 'bandit'"),
                            (["--model", "a", "--quick"], "a model takes neither --algo nor"),
                            (["--algo", "grop"], "unknown algo 'grop': did you mean 'grpo'")):
            with pytest.raises(SystemExit) as stop:
                leaderboard.main(words)
            assert said in f"{stop.value}{(read := capsys.readouterr()).err}"
            assert "Traceback" not in read.err


class TestModels:
    @pytest.fixture
    def stored_at(self, tmp_path, monkeypatch):
        """The file of models, in a temporary folder, and no page."""
        monkeypatch.setattr(leaderboard, "MODELS", tmp_path / "models.json")
        monkeypatch.setattr(leaderboard, "write_page", lambda: None)
        return tmp_path / "models.json"

    def test_a_folder_plays_beside_the_players_once(self, begun, stored_at, capsys, monkeypatch):
        words = ["--model", str(begun / "checkpoint"), "--env", "bandit", "--size", "2"]
        leaderboard.main(words)
        (found,) = stored(stored_at).values()
        assert (found["env"], found["model"], found["size"]) == ("bandit", "checkpoint", 2)
        assert [*found["players"]] == ["model", "random policy", "shallow player",
                                       "nearest demonstration", "solver"]
        assert found["players"]["solver"] == {"episodes": 2, "success": 1.0, "valid": 1.0}
        assert "bandit, split test: 2 episodes" in capsys.readouterr().out
        monkeypatch.setattr(leaderboard.measuring, "measure", None)
        leaderboard.main(words)

    def test_the_table_has_a_row_for_each_model_and_player(self, stored_at):
        for env in REGISTRY:
            for model in ("one", "two")[:1 + (env != "lean")]:
                leaderboard.store(stored_at, {
                    "env": env, "model": model, "size": 64, "key": env + model, "minutes": 2.0,
                    "players": {player: {"episodes": 64, "success": 0.25, "valid": 0.5}
                                for player in ("model", "random policy", "solver")}})
        first, second, third = leaderboard.models_table().splitlines()[2:]
        assert first.startswith("| `one` | 0.250 | 0.25 |") and first.endswith(" | 0.25 | 0.50 |")
        assert second.startswith("| `two` |  | 0.25") and second.endswith(" |  |  |")
        assert third.startswith("| random policy | 0.250 |")


class TestPretrained:
    def test_its_runs_are_settings_that_training_takes(self):
        for options in pretrained.RUNS.values():
            words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            config = settings.from_options({name: value for name, value in settings.parse(
                words).items() if name in options})
            assert config.example
            assert config.model == "smollm2" or (config.lr, config.group_size) == (1e-6, 16)


@pytest.mark.usefixtures("runs", "drawn")
class TestArchive:
    """One file that commands of one's own runs can read."""

    def test_a_stored_run_becomes_one_of_runs_that_the_report_can_show(self):
        folder = archive.unpack(RUN)
        assert folders.load_config(RUN) == archive.config(RUN)
        page = report.write([folder]).read_text("utf-8")
        assert RUN in page and f"{archive.metrics(RUN)[-1]['test/success']:.2f}" in page
        (folder / "config.json").write_text("mine")
        assert archive.unpack(RUN) == folder and (folder / "config.json").read_text() == "mine"

    def test_what_is_put_in_comes_out_and_other_runs_stay(self, tmp_path, monkeypatch):
        copied = tmp_path / "runs.zip"
        copied.write_bytes(archive.ARCHIVE.read_bytes())
        monkeypatch.setattr(archive, "ARCHIVE", copied)
        folder = archive.unpack(RUN)
        told = [dict(step=step, split=split, seed=step) for step, split in (
            (0, "val"), (1, "train"), (5, "val"), (5, "train"), (9, "val"), (9, "val"))]
        (folder / "trajectories.jsonl").write_text("\n".join(map(json.dumps, told)))
        before = archive.names(), archive.metrics("lora-r8-s0")
        archive.add(RUN)
        assert archive.episodes(RUN) == [told[0], *told[-2:]]
        assert (archive.names(), archive.metrics("lora-r8-s0")) == before
