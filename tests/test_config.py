"""Settings: options, presets, and one sentence for what cannot work."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import message, parsed

from lab import archive
from minragen import config as settings
from minragen import eval as evaluation
from minragen import starpo
from minragen.__main__ import main as command
from minragen.config import PRESETS, ROOM, Config, preset
from minragen.envs import REGISTRY
from minragen.run.groups import check_environments
from minragen.run.runs import load_config, read_config
from minragen.support.checks import OURS
from minragen.support.options import REMOVED, parse_options
from minragen.train import main

pytestmark = pytest.mark.usefixtures("runs")

OWN = {"advantages": "own"}  # an algorithm as a user may have it


class TestOptions:
    def test_every_field_is_an_option_with_a_help_text(self):
        values = {bool: ("true", True), int: ("5", 5), float: ("0.25", 0.25), str: ("x", "x"),
                  tuple: ("x", ("x",))}
        for f in dataclasses.fields(Config):
            text, value = values[f.type]
            given = settings.parse([f"--{f.name.replace('_', '-')}", text])
            assert given[f.name] == value and len(f.metadata["help"]) > 10, f.name

    def test_what_differs_from_the_preset_is_known(self):
        options = ["--env", "bandit", "--seed", "3", "--algo", "ppo"]
        start = "the preset of bandit, ppo, tiny, free_think, "
        assert settings.summary(parsed(*options)) == f"{start}unchanged"
        assert settings.summary(parsed(*options, "--lr", "0.5")) == f"{start}with lr=0.5"

    def test_an_option_that_would_change_nothing_is_refused_with_what_it_needs(self, monkeypatch):
        monkeypatch.setitem(starpo.ESTIMATORS, "own", ("group", lambda batch, config: None))
        for argv, needed in (
                (["--kl-estimator", "k3"], "It needs a kl_coef"),
                (["--gamma", "0.9"], "It needs advantages gae, bi_level_gae or a REINFORCE"),
                (["--lam", "0.9"], "It needs an estimator with a critic"),
                (["--context", "limited", "--window", "2"], "no more than an episode's turns"),
                (["--algo", "ppo", "--norm-by-std", "false"], "It needs advantages grpo"),
                (["--window", "2"], "It needs context limited or single_turn"),
                (["--filter", "none", "--filter-value", "0.5"], "It needs a filter")):
            said = message("--env", "bandit", *argv)
            assert "but it has no effect here. " in said and needed in said, argv
        asked = ["--algo", "test_config:OWN", "--gamma-turn", "0.8", "--norm-by-std", "false"]
        assert parsed(*asked).gamma_turn == 0.8  # a user's own estimator may read it
        assert "no effect" in message(*asked, "--advantages", "rloo")
        assert {*starpo.ESTIMATORS} == {*OURS, "own"}
        assert "did you mean 'bandit'" in message("--env", "bandi", "--print-config")
        longest = parsed("--env", "bandit,frozenlake", "--context", "limited", "--window", "5")
        check_environments(longest)  # 5 turns has the mixture's longest episode


class TestPresets:
    def test_every_environment_has_a_preset_and_presets_are_valid_as_they_stand(self):
        assert set(PRESETS["tiny"]) == set(REGISTRY)
        for env in REGISTRY:
            settings.check(preset(env))

    @pytest.mark.parametrize("env", REGISTRY)
    def test_the_stored_runs_of_the_results_have_the_settings_of_todays_presets(self, env):
        names = [name for name in archive.names(f"{env}*-grpo-s[0-9]")
                 if "-shuffled-" not in name]  # an ablation
        assert len(names) >= 3
        for name in names:
            config = archive.config(name)
            assert config == dataclasses.replace(settings.preset_of(config), run=config.run,
                                                 seed=int(name[-1]))

    def test_the_source_of_every_difference_is_printed(self, capsys):
        main(["--env", "sokoban", "--lr", "0.5", "--model", "smollm2", "--print-config"])
        above, below = capsys.readouterr().out.split("the rest are the defaults")
        assert "set by you" in next(x for x in above.splitlines() if x.startswith("lr "))
        assert "default 64 " in (rows := next(x for x in above.splitlines() if "mini-batch" in x))
        assert rows.endswith("set by model smollm2") and "\ngamma " in below
        assert "val-every" in below

    def test_tinys_preset_turns_on_options_which_given_ones_join_and_replace(self):
        def options(env, *given):
            words = (word for text in given for word in ("--env-arg", text))
            return parse_options(parsed("--env", env, *words).env_arg)

        assert options("sudoku")["hints"] is True
        assert options("sudoku", "size=9") == options("sudoku") | {"size": 9}
        assert options("sudoku", "hints=False")["hints"] is False
        url = "url=http://localhost"  # data of the user
        assert options("searchqa", url) == {"url": "http://localhost"}
        assert options("searchqa", f"searchqa.{url}") == {"searchqa.url": "http://localhost"}
        own = options("searchqa,countdown", f"searchqa.{url}")
        assert "searchqa.hops" not in own and own["countdown.count"] == 3
        counted = options("frozenlake=16,sokoban=16", "frozenlake.view=grid")
        assert (counted["frozenlake.view"], counted["sokoban.view"]) == ("grid", "coord")
        mine = options("frozenlake,sokoban", "view=grid", "sokoban.walls=0.1")
        assert "frozenlake.view" not in mine and mine["view"] == "grid"

    def test_a_mixture_takes_the_larger_of_each_number_and_no_ones_choices(self):
        mixed = preset("frozenlake,bandit")
        assert mixed.max_context == PRESETS["tiny"]["frozenlake"]["max_context"]
        assert mixed.steps == max(PRESETS["tiny"][env]["steps"] for env in ("frozenlake", "bandit"))
        assert preset("webshop").aggregation == "seq-mean-token-mean"
        assert preset("webshop,frozenlake").aggregation == Config.aggregation == "token-mean"
        assert preset("webshop", "dapo").aggregation == "token-mean"
        assert preset("searchqa").max_turns and not preset("searchqa,bandit").max_turns

    def test_a_pretrained_model_gets_its_own_rates_and_room_and_a_users_gets_no_warm_up(self):
        for env in REGISTRY.keys() - settings.RECIPES:
            for model, warmup_steps in (("smollm2", 20), ("some/folder", 0)):
                config = preset(env, "ppo", model, "free_think")
                assert (config.lr, config.critic_lr, config.mini_batch) == (1e-6, 1e-5, 32), env
                room = dict(max_new_tokens=128, max_context=2048) | ROOM.get(env, {})
                assert room.items() <= vars(config).items(), env
                assert (config.num_groups, config.token_budget) == (8, 8192), env
                assert (config.steps, config.lr_final, config.env_arg) == (200, 1.0, ()), env
                assert config.warmup_steps == warmup_steps < preset(env).warmup_steps, env

    def test_what_a_pretrained_model_has_run_with_is_of_that_response_format(self):
        """Its 24 tokens hold no thought."""
        recipe = settings.RECIPES["lean"]
        config = settings.from_options({"env": "lean", "model": "smollm2"})
        assert config.response_format == "no_think" and recipe.items() <= vars(config).items()
        assert config == settings.preset_of(config)
        other = preset("lean", "grpo", "smollm2", "free_think")
        assert other.max_new_tokens == settings.PRETRAINED["max_new_tokens"] == 128
        assert preset("lean", "grpo", "some/folder").response_format == "free_think"

    def test_a_format_that_describes_the_state_has_room_for_it(self):
        plain, one, both = (parsed("--response-format", name) for name in
                            ("no_think", "grounding", "grounding_worldmodeling"))
        assert (one.max_new_tokens - plain.max_new_tokens, one.max_context - plain.max_context) == (
            48, 768)
        assert both.max_new_tokens - plain.max_new_tokens == 96


def store(folder, **changes):
    """Make the folder of a run that a page could be written of."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(parsed("--env", "bandit"), **changes)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (folder / "metrics.jsonl").write_text('{"step": 0, "success": 0.5}\n')


class TestBadInput:
    def check(self, *rows):
        for argv, said in rows:
            assert said in message(*argv), argv

    def test_a_misspelt_name_gets_the_nearest_known_one(self):
        self.check(
            (["--model", "smolm2"], "unknown model 'smolm2': did you mean 'smollm2'"),
            (["--response-format", "worldmodelling"], "did you mean 'worldmodeling'"),
            (["--env-arg", "slipp=0.1"], "did you mean 'slip'"),
            (["--device", "xpu"], "unknown device 'xpu'"))

    def test_an_option_that_was_removed_is_refused_with_what_to_do_now(self):
        self.check((["--zero-task", "true"], "unknown option '--zero-task': commit "
                                             "5892899 has it; now --advantages none trains by "))
        assert not REMOVED.keys() & {f.name for f in dataclasses.fields(Config)}

    def test_a_value_outside_its_bounds_is_refused_with_them(self):
        self.check(
            (["--norm-by-std", "maybe"], "expected true or false"),
            (["--env-arg", "slip"], "expected name=value"),
            (["--env", "frozenlake=²"], "a number for every environment or none"),
            (["--env", "frozenlake,bandit", "--val-size", "1"], "and at least one each"),
            (["--temperature", "0"], "temperature: got 0.0, expected at least 0.0001"),
            (["--temperature", "nan"], "temperature: got nan, expected a finite number"),
            (["--steps", "2000000"], "got 64000000, expected at most 16777216: a seed has"),
            (["--dual-clip", "0.5"], "dual_clip: got 0.5, expected more than 1"),
            (["--filter-value", "0.005"], "filter top_p: got a value of 0.005"),
            (["--top-p", "2"], "top_p: got 2.0, expected at most 1."),
            (["--run", "x" * 300], "up to 100 letters"), (["--run", "../x"], "bad run name"),
            (["--run", "."], "bad run name"), (["--max-context", "50"], "no room for a reply"))
        for option in ("mini-batch", "token-budget", "epochs", "num-groups", "val-size", "window",
                       "max-new-tokens", "max-rows", "save-every", "val-every", "steps"):
            assert "got 0, expected at least 1" in message(f"--{option}", "0"), option
        if not torch.cuda.is_available():
            self.check((["--device", "cuda:7"], "sees no GPU"))

    def test_choices_that_contradict_each_other_are_refused(self):
        self.check(
            (["--group-size", "1"], "grpo compares the members of a group"),
            (["--stale", "1", "--tis-cap", "2", "--top-k", "5"], "tis_cap weights by probabil"),
            (["--stale", "1", "--tis-cap", "2", "--top-p", "0.9"], "no top_k and no top_p"),
            (["--algo", "ppo", "--group-size", "1"], "group_size 1 has no reward std"),
            (["--credit", "turn"], "grpo compares whole episodes"),
            (["--filter", "top_k_abs", "--filter-value", "2.5"], "expected a whole number above 0"),
            (["--resample", "2"], "top_p with filter_value 1"),
            (["--algo", "dapo", "--filter", "top_k"], "replaces groups of reward std"),
            (["--algo", "ppo", "--ratio", "sequence"], "one advantage per row"),
            (["--reward", "success", "--response-format", "grounding", "--description-reward", "1"],
             "reward success pays for nothing else"),
            (["--algo", "maxrl", "--layer", "random_reward"], "and no layer random_reward"),
            (["--description-reward", "1"], "Use --response-format grounding or worldmodeling or "),
            (["--env", "frozenlake,bandit", "--response-format", "grounding",
              "--description-reward", "1"], "bandit cannot grade a description"))

    @pytest.mark.parametrize("text", [
        "[1]", "[]", "null", '{"steps": true}', '{"steps": "a"}', '{"env": 5}', "{", "[" * 100_000,
        '{"data_files": 5}', '{"env_arg": [[1]]}', "{" + " " * 10**6 + "}"])
    def test_a_stored_config_that_cannot_be_read_is_refused_by_name(self, runs, text):
        (runs / "a").mkdir(parents=True)
        (runs / "a" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"a/config.json cannot be read"):
            read_config(runs / "a")

    @pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/outside", "..", "."])
    def test_no_command_reads_or_writes_a_run_outside_of_runs(self, runs, tmp_path, name):
        name = name.replace("/outside", f"{tmp_path}/outside") if name[0] == "/" else name
        for folder in (tmp_path / "outside", runs / "a", runs, tmp_path):
            store(folder)
        for main_of, words in ((command, ["report", name]), (evaluation.main, ["--run", name])):
            with pytest.raises(SystemExit, match=re.escape(f"error: unknown run '{name}'")):
                main_of(words)
        self.check((["--resume", "--run", name], f"unknown run '{name}'"),
                   (["--env", "bandit", "--run", name], "bad run name"),
                   (["--env", "bandit", "--model", "tiny", "--init-from", name], "bad run name"))
        assert not [*tmp_path.rglob("report.html")]

    @pytest.mark.parametrize("name, make, said", [
        (".", Path.symlink_to, "is a symbolic link"), ("lock", Path.symlink_to, "a symbolic link"),
        ("figures", Path.symlink_to, "a symbolic link"),
        ("figures/success.png", Path.symlink_to, "a symbolic link"),
        ("lock", Path.hardlink_to, "lock is hard-linked"),
        ("errors.txt", Path.hardlink_to, "errors.txt is hard-linked"),
        ("trajectories.jsonl", lambda path, _: os.mkfifo(path), "trajectories.jsonl is no file")])
    def test_a_run_with_links_or_pipes_is_refused_untouched(self, runs, tmp_path, name, make, said):
        """What a link leads to would be overwritten; a pipe would be read for ever."""
        mine, path = tmp_path / "mine", runs / "a" / name
        store(mine)
        before = {file: file.read_text() for file in mine.iterdir()}
        if name == ".":
            runs.mkdir()
        else:
            store(runs / "a")
        path.parent.mkdir(exist_ok=True)
        make(path, mine if make is Path.symlink_to else mine / "config.json")
        self.check((["--resume", "--run", "a"], said),
                   (["--env", "bandit", "--model", "tiny", "--init-from", "a"], said))
        with pytest.raises(SystemExit, match=said):
            command(["report", "a"])
        assert {file: file.read_text() for file in mine.iterdir()} == before

    def test_a_file_that_is_renamed_while_it_is_read_is_nothing_to_refuse(self, runs, monkeypatch):
        """A run that trains renames its files, and `make report` may look at it."""
        store(runs / "a")
        monkeypatch.setattr(Path, "rglob", lambda folder, _: [folder / "metrics.jsonl.part"])
        assert load_config("a").run == "a"

    @pytest.mark.parametrize("option", [
        {"env": "runs.a.evil:Evil"}, {"env": "runs:Evil"}, {"env": "bandit=8, runs.a.evil:Evil=8"},
        {"env": "runs.a.evil:Evil-v0"}, {"algo": "runs.a.evil:preset"},
        {"layer": ("action_noise", "runs.a.evil:Evil,x=1")}])
    def test_python_in_a_runs_folder_is_not_imported(self, runs, tmp_path, option, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("")
        store(runs / "a", **option)
        (runs / "a" / "evil.py").write_text("open('it ran', 'w')")
        for main_of, word in ((command, "report"), (evaluation.main, "--run")):
            with pytest.raises(SystemExit, match="names code in"):
                main_of([word, "a"])
        self.check((["--resume", "--run", "a"], "names code in"))
        assert not (tmp_path / "it ran").exists()
