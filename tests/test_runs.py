"""What is kept on disk, and how a run goes on."""

import contextlib
import copy
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import message
from toys import tiny
from training import BRIEF, assert_resumed_alike, interrupted, metrics, read_lines, run, state_text

from minragen import eval as evaluation
from minragen import train as trainer
from minragen.__main__ import main
from minragen.config import Config
from minragen.environments.limits import ServerGone
from minragen.models import AdamW
from minragen.run import log as log_module
from minragen.run import reproduce, start
from minragen.run import runs as runs_module
from minragen.run.log import Log, stop_requests
from minragen.run.runs import damage, find_checkpoint, read_config, save_checkpoint, step_of
from minragen.trajectory import StopReason, Trajectory

pytestmark = pytest.mark.usefixtures("runs")


class TestFullDisk:
    """A function that writes fails; long/test_kill.py has real disks."""

    def test_a_checkpoint_that_cannot_be_written_is_named(self, begun, monkeypatch):
        monkeypatch.setattr(torch, "save", mock.Mock(side_effect=OSError(30, "Read-only")))
        assert message("--run", "a", "--resume", "--steps", "3") == (
            f"error: cannot write {begun}/checkpoint: [Errno 30] Read-only")


class TestPowerCut:
    def test_nothing_has_its_name_or_is_whole_before_the_disk_holds_it(self, runs, monkeypatch):
        flushed, renamed, folder = {}, [], runs / "a"

        def fsync(descriptor):
            info = os.fstat(descriptor)
            flushed[info.st_ino] = info.st_size, info.st_mtime_ns

        def is_held(path):
            info = path.stat()
            return flushed.get(info.st_ino) == (info.st_size, info.st_mtime_ns)

        def rename(real, source, target):
            path = Path(source)
            needed = [path, *path.rglob("*")]
            if path.name.startswith("manifest.json"):  # it says that the others are there
                needed += [*path.parent.iterdir(), folder / "reference.pt"]
            if path.name == "checkpoint.new":  # a checkpoint must not be ahead of the log
                needed += [folder / "metrics.jsonl", folder / "trajectories.jsonl"]
            assert folder not in path.parents or not [p for p in needed if not is_held(p)]
            renamed.append(Path(target).name)
            real(source, target)

        monkeypatch.setattr(os, "fsync", fsync)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, partial(rename, getattr(os, name)))
        run("--run a --steps 2 --kl-coef 0.1", *BRIEF, "--save-every", "1")
        assert Counter(renamed) >= Counter({
            "config.json": 1, "metrics.jsonl": 1, "trajectories.jsonl": 1, "reference.pt": 1,
            "manifest.json": 2, "checkpoint": 2, "checkpoint.old": 1})
        assert is_held(folder)  # and so the new names

    def test_whatever_flush_or_renaming_fails_a_whole_checkpoint_stays(self, tmp_path, monkeypatch):
        policy, frame = tiny()
        learner = trainer.Learner(policy, frame, AdamW(policy.model.parameters(), 1e-3),
                                  reference=policy)
        calls, failing, k = [], 0, 0

        def once(real, *given):
            calls.append(real)
            if len(calls) == failing:
                raise OSError(5, "Input/output error")
            return real(*given)

        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, partial(once, getattr(os, name)))
        while len(calls) == k:  # the one that was to fail was there
            failing = 0
            learner.step += 1
            save_checkpoint(tmp_path, learner, best=True)
            assert step_of(find_checkpoint(tmp_path)) == learner.step
            k += 1
            failing = k
            learner.step += 1
            calls.clear()
            with contextlib.suppress(OSError):
                save_checkpoint(tmp_path, learner, best=True)
            assert step_of(find_checkpoint(tmp_path)) >= learner.step - 1
        assert k > 10


class TestServerGone:
    def test_a_run_whose_tool_stays_away_saves_and_goes_on_later(self, begun, runs, monkeypatch):
        """Of dynamic sampling's second round, whose first must be played again."""
        sampling = ("--filter-value", "1", "--resample", "1", "--save-every", "9")
        real, rounds, failing = start.collect, [], 0

        def collect(*given):
            if given[2].split == "train":
                rounds.append(given[3])
                if len(rounds) == failing:
                    raise ServerGone("the retriever gave no results")
            return real(*given)

        monkeypatch.setattr(start, "collect", collect)
        run("--run b --steps 3", *BRIEF, *sampling)
        failing, rounds = len(rounds), []
        assert message("--run", "c", "--steps", "3", *BRIEF, *sampling) == (
            "error: the retriever gave no results")
        assert step_of(runs / "c" / "checkpoint") == 2
        run("--run c --resume")
        assert metrics(runs / "c") == metrics(runs / "b")

    @pytest.mark.parametrize("call, step", [(1, 0), (2, 2), (3, 2)])  # before, at step 2, at last
    def test_one_lost_in_a_validation_costs_no_step(self, finished, runs, monkeypatch, call, step):
        real, calls = trainer.validate, []

        def validate(*given):
            calls.append(given)
            if len(calls) == call:
                raise ServerGone("the server is gone")
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(trainer, "validate", validate)
            assert message("--run", "a", "--steps", "2", *BRIEF) == "error: the server is gone"
        assert step_of(runs / "a" / "checkpoint") == step
        run("--run a --resume")
        assert metrics(runs / "a") == metrics(finished)


class TestResume:
    def test_with_steps_added_to_a_run_the_rate_decays_over_all_of_them(self, runs, monkeypatch):
        rates, real = [], trainer.AdamW.set_lr
        monkeypatch.setattr(trainer.AdamW, "set_lr", lambda self, lr: (
            rates.append(lr), real(self, lr)))
        run("--run a --steps 3 --lr 0.01 --lr-final 0.1 --filter none", *BRIEF)
        run("--run a --resume --steps 5")
        # The first run may have made its warm-up, which sets rates of its own.
        assert rates[-5:] == pytest.approx([0.01, 0.0055, 0.001, 0.00325, 0.001])

    def test_a_killed_run_goes_on_bit_for_bit_with_everything_that_adapts(self, runs, monkeypatch):
        options = shlex.split(
            "--env frozenlake --num-groups 2 --group-size 3 --steps 2 --val-size 1 --save-every 1 "
            "--algo ppo --kl-coef 0.01 --kl-reward-coef 0.1 "
            "--diagnose-every 1 --context limited --window 2 --lr-final 0.1 "
            "--filter-value 1 --resample 1")
        assert_resumed_alike(runs, monkeypatch, options)
        lines = metrics(runs / "straight")
        assert [line["step"] for line in lines] == [0, 1, 2, 2]
        assert '"first_turn/marginal_std"' in state_text(runs / "straight")

    def test_only_steps_and_a_larger_context_may_change(self, begun, runs):
        for argv, said in ((["--lr", "0.5"], "lr was 0.0003, got 0.5"),
                           (["--temperature", "0.5"], "temperature was 1.0, got 0.5"),
                           (["--max-context", "200"], "cannot reduce max_context: it was 256"),
                           (["--steps", "1"], "cannot reduce steps: it was 2")):
            assert said in message("--run", "a", "--resume", *argv)
        run("--run a --resume --steps 3 --max-context 300 --seed 0")
        assert [line["step"] for line in metrics(begun)] == [0, 1, 2, 3, 3]
        assert read_config(begun).max_context == 300
        assert {line["step"] for line in read_lines(begun / "trajectories.jsonl")
                if line["split"] == "test"} == {3}  # the final test is of the last step alone

    def test_what_a_resumed_run_had_is_told_from_what_is_given(self, begun):
        told = start.asked_for(["--run", "a", "--resume", "--steps", "3", "--print-config"])[2]
        assert re.search("^steps .*by you$", told, re.M) and "by the stored run" in told

    @pytest.mark.parametrize("gone", [
        dict(twists=0, knots=[], threads=1, step_gamma=1.0), dict(twists=0.5, knots=[], threads=1)])
    def test_a_run_with_options_that_are_gone_goes_on_if_they_were_off(self, begun, capsys, gone):
        path, expected = begun / "config.json", read_config(begun)
        path.write_text(json.dumps(json.loads(path.read_text()) | gone))
        runs_module.warn_once.cache_clear()
        capsys.readouterr()
        assert [read_config(begun), read_config(begun)] == [expected] * 2
        said = capsys.readouterr().out
        if gone["twists"]:
            assert said.endswith("this version lacks, which are left out: twists\n")
            commit = json.loads((begun / "checkpoint/manifest.json").read_text())["commit"]
            said = message("--run", "a", "--resume", "--steps", "3")
            assert "run 'a' had twists=0.5, which this version lacks" in said and commit in said
            with pytest.raises(ValueError, match="had twists=0.5"):
                reproduce.main(["a"])
        else:
            assert said == ""
            run("--run a --resume --steps 3")
            assert metrics(begun)[-1]["step"] == 3 and "twists" not in path.read_text()

    def test_a_damaged_checkpoint_is_refused_by_name(self, begun):
        shutil.rmtree(begun / "checkpoint.best")
        for file in ("model.safetensors", "trainer.pt", "tokenizer.json", "manifest.json"):
            path = begun / "checkpoint" / file
            data = path.read_bytes()
            flipped = bytearray(data)
            flipped[len(data) // 2] ^= 1
            for broken in (data[:len(data) // 2], bytes(flipped), None):
                path.unlink() if broken is None else path.write_bytes(broken)
                said = message("--run", "a", "--resume", "--steps", "3")
                assert "damaged" in said or (file == "manifest.json" and "no checkpoint" in said)
            path.write_bytes(data)
        assert find_checkpoint(begun) == begun / "checkpoint"

    def test_pickled_trainer_state_runs_nothing(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return Path.touch, (tmp_path / "it ran",)

        torch.save({"step": Evil()}, tmp_path / "trainer.pt")
        learner = SimpleNamespace(policy=SimpleNamespace(device="cpu"))
        with pytest.raises(pickle.UnpicklingError):
            runs_module.load_trainer_state(tmp_path, learner)
        assert not (tmp_path / "it ran").exists()

    def test_a_tokenizer_that_saves_a_folder_gets_a_checkpoint(self, tmp_path):
        policy, frame = (copy.deepcopy(x) for x in tiny())
        policy.tokenizer.chat_template = {"default": "{{ messages }}", "rag": "{{ messages }}"}
        learner = trainer.Learner(policy, frame, AdamW(policy.model.parameters(), 1e-3))
        save_checkpoint(tmp_path, learner)
        file = tmp_path / "checkpoint" / "additional_chat_templates" / "rag.jinja"
        assert file.read_text() == "{{ messages }}" and not damage(tmp_path / "checkpoint")
        file.write_text("{}")
        assert damage(tmp_path / "checkpoint") == file

    def test_a_kill_during_a_save_leaves_a_whole_checkpoint(self, begun, monkeypatch):
        (begun / "checkpoint").rename(begun / "checkpoint.new")  # between its two renames
        shutil.copytree(begun / "checkpoint.best", begun / "checkpoint.old")
        assert find_checkpoint(begun) == begun / "checkpoint.new"
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", mock.Mock(side_effect=KeyboardInterrupt))
            interrupted("--run a --resume --steps 3")  # and the next
        run("--run a --resume")
        assert metrics(begun)[-1]["step"] == 3 and (begun / "checkpoint").exists()
        assert {p.name for p in begun.glob("checkpoint*")} == {
            "checkpoint", "checkpoint.old", "checkpoint.best"}

    def test_instead_of_a_damaged_checkpoint_the_one_before_is_taken_or_else_the_best(
            self, runs, monkeypatch, capsys):
        """That is said. With adapters and a reference, which stands beside the checkpoints."""
        options = (*BRIEF, *shlex.split("--val-every 1 --save-every 1 --kl-coef 0.1 --lora-rank 2 "
                                        "--filter-value 1 --resample 1"))
        successes = {0: 0.9, 1: math.nan, 2: 0.75, 3: 0.6, 4: 0.75, 5: 0.72}
        real = trainer.validate
        monkeypatch.setattr(trainer, "validate", lambda learner, groups, *given: real(
            learner, groups, *given) | {f"{groups.split}/success": successes[learner.step]})
        run("--run a --steps 5", *options)
        run("--run b --steps 4", *options)
        (runs / "b" / "checkpoint" / "trainer.pt").write_bytes(b"")
        shutil.copytree(runs / "b", runs / "c")
        (runs / "c" / "checkpoint.old" / "model.safetensors").unlink()
        for name, whole, step in (("b", "checkpoint.old", 3), ("c", "checkpoint.best", 2)):
            capsys.readouterr()
            run(f"--run {name} --resume --steps 5")
            printed, a, b = capsys.readouterr().out, runs / "a", runs / name
            assert (f"trainer.pt is missing or has changed: going on from {whole} of step {step}\n"
                    in printed)
            assert f"resumed   after step {step}" in printed
            assert metrics(a) == metrics(b)
            for file in ("trajectories.jsonl", "reference.pt", "checkpoint/model.safetensors",
                         "checkpoint.best/model.safetensors", "checkpoint.old/model.safetensors"):
                assert (a / file).read_bytes() == (b / file).read_bytes(), file
            for end in ("", ".old", ".best"):
                assert not damage(b / f"checkpoint{end}")
            assert [step_of(b / f"checkpoint{end}") for end in ("", ".old", ".best")] == [5, 4, 2]

    def test_a_run_is_trained_by_one_process_at_a_time(self, begun):
        with runs_module.locked(begun):
            assert f"run 'a' is being trained by process {os.getpid()}" in message(
                "--run", "a", "--resume", "--steps", "3")
        run("--run a --resume --steps 3")

    @pytest.mark.parametrize("number, step, steps", [
        (signal.SIGTERM, 3, 4), (signal.SIGINT, 4, 5), (signal.SIGTERM, 4, 4)])
    def test_asked_to_stop_it_finishes_the_step_saves_and_says_how_to_go_on(
            self, begun, runs, monkeypatch, capsys, number, step, steps):
        """Step 4 ends with a validation, which is made when the run is resumed."""
        real, handler, successes = trainer.roll_out, signal.getsignal(number), {4: 0.75}
        validate = trainer.validate
        monkeypatch.setattr(trainer, "validate", lambda learner, groups, *given: (
            validate(learner, groups, *given)
            | {f"{groups.split}/success": successes.get(learner.step, math.nan)}))
        shutil.copytree(begun, runs / "b")
        run(f"--run b --resume --steps {steps}")
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "roll_out", lambda learner, *given: (
                learner.step == step - 1 and os.kill(os.getpid(), number)) or real(learner, *given))
            with pytest.raises(SystemExit) as stop:
                run(f"--run a --resume --steps {steps}")
        printed = capsys.readouterr().out
        assert stop.value.code == 130
        assert f"stopped   after step {step}. Go on with: make resume RUN=a" in printed
        assert step_of(begun / "checkpoint") == step == metrics(begun)[-1]["step"]
        assert "val/success" not in metrics(begun)[-1]
        run("--run a --resume")
        assert metrics(begun) == metrics(runs / "b")
        for file in ("trajectories.jsonl", "checkpoint/model.safetensors",
                     "checkpoint.best/model.safetensors"):
            assert (begun / file).read_bytes() == (runs / "b" / file).read_bytes(), file
        assert signal.getsignal(number) == handler

    def test_another_request_stops_it_at_once_unless_torchrun_repeats_the_first(self, monkeypatch):
        clock = iter([5.0, 5.9, 6.1])
        monkeypatch.setattr(log_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))

        def ends(number):
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                return True
            return False

        with stop_requests() as requests:
            assert [ends(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT)] == [
                False, False, True]
        assert requests == [5.0, 5.9, 6.1]

    def test_a_checkpoint_names_the_commit_of_a_checkout(self, begun, monkeypatch, tmp_path):
        root = Path(__file__).parent.parent
        known = (root / ".git").exists() and shutil.which("git")
        assert runs_module.commit_of(begun) == runs_module.commit()
        assert bool(re.fullmatch("[0-9a-f]{7,}(-dirty)?", runs_module.commit())) == bool(known)
        monkeypatch.setattr(runs_module, "__file__", str(tmp_path / "minragen" / "run" / "runs.py"))
        assert runs_module.commit.__wrapped__() == "" == runs_module.commit_of(tmp_path)

    def test_a_run_may_begin_with_the_weights_of_another_and_nothing_else_of_it(self, begun, runs):
        run("--run b --steps 1 --lr 0 --init-from a", *BRIEF)
        one, two = ((folder / "checkpoint" / "model.safetensors").read_bytes()
                    for folder in (begun, runs / "b"))
        assert one == two and [line["step"] for line in metrics(runs / "b")] == [0, 1, 1]
        assert "unknown run 'c'. Known: a, b." in message("--env", "bandit", "--init-from", "c")


class TestDataFile:
    def test_a_run_goes_on_and_is_measured_only_with_the_content_that_it_began_with(
            self, runs, tmp_path, capsys):
        file, resume = tmp_path / "data.jsonl", ("--run", "b", "--resume", "--steps", "2")
        file.write_text("".join(f'{{"nums": [{i}, 2, 3], "target": {5 + i}}}\n'
                                for i in range(1, 90)))
        run("--run b --env countdown --steps 1 --warmup-steps 0", *BRIEF[2:], "--env-arg",
            f"data={file}")
        content = file.read_text()
        for spoil, said in ((lambda: file.write_text(content + "\n"), "its content differs"),
                            (file.unlink, "there is no such file")):
            spoil()
            with pytest.raises(SystemExit, match=f"data is '{file}': {said}"):
                evaluation.main(["--run", "b"])
            assert f"data is '{file}': {said}" in message(*resume)
            with pytest.raises(ValueError, match=said):
                reproduce.main(["b"])
        file.write_text(content)
        evaluation.main(["--run", "b", "--size", "2"])
        assert "countdown, split test: 2 episodes" in capsys.readouterr().out
        assert "env_arg was" in message(*resume, "--env-arg", "data=other.jsonl")
        run(" ".join(resume))


class TestLines:
    """What a step writes to metrics.jsonl and trajectories.jsonl."""

    def test_numbers_have_six_digits_small_ones_all_and_those_that_are_not_finite_are_null(self):
        rows = []
        log = SimpleNamespace(writes=True, history=[], tell=id, config=Config(),
                              append=lambda _, more: rows.extend(more))
        Log.write(log, {"step": 1, "success": 1 / 3, "logprob_gap": 2.5e-8, "kl_ref": math.nan})
        assert rows == log.history == [
            {"step": 1, "success": 0.333333, "logprob_gap": 2.5e-8, "kl_ref": None}]

    @pytest.mark.parametrize("damaged", ['{"step": 2, "succ', "[" * 9999, "null", '{"step": []}'])
    def test_a_damaged_line_is_passed_over_and_such_a_manifest_is_refused(self, runs, damaged):
        whole = '{"step": 1, "success": 0.5}'
        (folder := runs / "a" / "checkpoint").mkdir(parents=True)
        (runs / "a" / "metrics.jsonl").write_text(f"{whole}\n{damaged}\n{whole}\n")
        (folder / "manifest.json").write_text(damaged)
        path, lines = runs / "a" / "metrics.jsonl", [json.loads(whole)] * 2
        assert runs_module.lines_until(1, path) == lines
        assert runs_module.read_lines(path) == (lines, 1)
        assert runs_module.commit_of(runs / "a") == ""
        with pytest.raises(ValueError, match="is damaged"):
            find_checkpoint(runs / "a")

    @staticmethod
    def written(split, step, episodes):
        rows = []
        log = SimpleNamespace(writes=True, append=lambda _, more: rows.extend(more),
                              learner=SimpleNamespace(policy=tiny()[0]))
        Log.episodes(log, step, split, episodes)
        return rows

    @pytest.mark.parametrize("size, ranks", [
        (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (7, [0, 1, 5, 6])])
    def test_of_a_group_the_best_and_the_worst_members_are_written_once(self, size, ranks):
        returns = random.Random(size).sample(range(10), size)
        episodes = [Trajectory("lake", 7 + group, group, member, turn_rewards=[returns[member]],
                               stop=StopReason.TERMINATED)
                    for group in range(3) for member in range(size)]
        for step in range(5):  # another group each step
            rows = self.written("train", step, episodes)
            assert {(row["step"], row["group"], row["seed"]) for row in rows} == {
                (step, step % 3, 7 + step % 3)}
            assert [row["turn_rewards"] for row in rows] == [
                [sorted(returns, reverse=True)[rank]] for rank in ranks]
            assert [returns[row["member"]] for row in rows] == [r["turn_rewards"][0] for r in rows]

    def test_held_out_episodes_are_of_all_environments_and_the_same_at_every_step(self):
        episodes = [Trajectory("lake" if seed < 8 else "shop", seed, seed, 0,
                               stop=StopReason.TERMINATED) for seed in range(16)]
        for step in (0, 1):
            rows = self.written("val", step, episodes)
            assert [(row["env"], row["seed"]) for row in rows] == [
                ("lake", 0), ("lake", 4), ("shop", 8), ("shop", 12)]


class TestReproduce:
    def test_it_repeats_a_run_without_loggers_or_says_where_it_differs(self, begun, runs, capsys):
        for path in (begun / "config.json", begun / "metrics.jsonl"):
            path.write_text(path.read_text().replace('"log": ""', '"log": "tensorboard"'))

        def reproduced():
            with pytest.raises(SystemExit) as end:
                main(["reproduce", "a"])
            assert read_config(runs / "a-again").log == ""
            shutil.rmtree(runs / "a-again")
            return end.value.code, capsys.readouterr().out.splitlines()[-1]

        assert reproduced() == (0, "a is reproduced: its 4 lines are equal but for times")
        lines = read_lines(begun / "metrics.jsonl")
        changed = [*lines[:2], lines[2] | {"entropy": 9.0}, lines[3] | {"test/success": 9.0}]
        (begun / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        assert reproduced() == (1, f"line 3 (step 2) differs in entropy: 9.0, now "
                                   f"{lines[2]['entropy']}. This was one process; with "
                                   f"several, rounding differs.")
        with pytest.raises(SystemExit, match="error: unknown run 'b'"):
            main(["reproduce", "b"])

    @pytest.mark.parametrize("line, new, said", [
        ({"a": 1}, {}, "a: 1, now None"), ({}, {"loss": 1}, "loss: None, now 1"),
        ({}, {"a": 1}, ""),  # the run's version did not measure it
        ({"val/a": 1}, {"val/a": 2}, "val/a: 1, now 2"),
        ({"val/a": 1}, {}, "")])  # a run that was given more steps has validated at its first end
    def test_a_difference_is_one_of_any_metric(self, line, new, said):
        first = [{"step": 0, "loss": 2}, {"step": 4} | line]
        again = [{"step": 0, "loss": 2}, {"step": 4} | new]
        assert reproduce.first_difference(first, again) == (
            f"line 2 (step 4) differs in {said}" if said else "")
        assert reproduce.first_difference(first, again[:1]) == "line 2 is missing in the new run"
