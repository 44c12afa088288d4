"""TensorBoard and W&B beside metrics.jsonl: what they get, and what their files then hold."""

import shlex
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import ANY, MagicMock, call

import pytest
from conftest import message
from training import BRIEF, metrics, read_lines, run

from minragen.more import loggers

SHORT = [*BRIEF, *shlex.split("--warmup-steps 0 --filter none --diagnose-every 2")]
HISTORY = [{"step": 0, "success": 0.5, "kl": None}, {"step": 1, "regime": "diverse", "kl": 0.25}]


def start(folder, log):
    """What writes a step to the loggers of a run that has the steps of HISTORY."""
    return loggers.start(folder, SimpleNamespace(log=log), HISTORY)


class TestCalls:
    """With stand-ins for the libraries."""

    def test_each_gets_history_and_steps_and_one_that_fails_is_named(self, tmp_path, monkeypatch):
        writers = {"tensorboard": MagicMock(), "wandb": MagicMock()}
        for name, write in writers.items():
            monkeypatch.setitem(loggers.LOGGERS, name, lambda folder, config, write=write: write)
        start(tmp_path, "tensorboard, wandb")({"step": 2})
        for write in writers.values():
            assert write.mock_calls == [*map(call, [*HISTORY, {"step": 2}])]
        monkeypatch.setitem(loggers.LOGGERS, "wandb", MagicMock(side_effect=KeyError()))
        with pytest.raises(RuntimeError, match="--log wandb: KeyError"):
            start(tmp_path, "wandb")

    def test_tensorboard_begins_anew_and_shows_numbers_at_once(self, tmp_path, monkeypatch):
        writer = MagicMock()
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard",
                            SimpleNamespace(SummaryWriter=writer))
        start(tmp_path, "tensorboard")
        assert writer.mock_calls == [
            call(tmp_path / "tensorboard", purge_step=0), call().add_text("config", ANY),
            call().add_scalar("step", 0, 0), call().add_scalar("success", 0.5, 0), call().flush(),
            call().add_scalar("step", 1, 1), call().add_scalar("kl", 0.25, 1), call().flush()]

    def test_wandb_keeps_its_id_and_nothing_of_an_earlier_offline_run(self, tmp_path, monkeypatch):
        wandb = MagicMock()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        for mode in ("offline", "offline", "online"):
            if mode == "online":
                monkeypatch.setenv("WANDB_MODE", mode)
            (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
            start(tmp_path, "wandb")
            assert [path.name for path in (tmp_path / "wandb").iterdir()] == ["id"]
            given = wandb.init.call_args.kwargs
            assert (given["id"], given["name"], given["mode"], given["resume"]) == (
                (tmp_path / "wandb" / "id").read_text(), tmp_path.name, mode,
                "allow" if mode == "online" else None)
        assert wandb.init.return_value.log.mock_calls == 3 * [
            call({"step": 0, "success": 0.5}, step=0),
            call({"step": 1, "regime": "diverse", "kl": 0.25}, step=1)]


def tensorboard_scalars(folder):
    """{name: [(step, value), ...]}, and the texts, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    texts = "".join(e.tensor_proto.string_val[0].decode() for e in events.Tensors(
        "config/text_summary"))
    return {name: [(e.step, e.value) for e in events.Scalars(name)]
            for name in events.Tags()["scalars"]}, texts


class TestFiles:
    def test_after_a_resume_tensorboard_has_each_line_once_and_wandb_one_run(self, runs):
        """The lines are those of a run without them."""
        pytest.importorskip("tensorboard")
        wandb = pytest.importorskip("wandb")
        run("--run a --steps 2 --model tiny", *SHORT, "--log", "tensorboard, wandb")
        wandb.finish()
        identity = (runs / "a/wandb/id").read_text()
        run("--run a --resume --steps 4")
        wandb.teardown()  # as at the end of Python: waits for its process
        (path,) = (runs / "a").glob("wandb/offline-run-*/*.wandb")
        assert not any(path.is_symlink() for path in (runs / "a").rglob("*"))  # they are refused
        assert path.name == f"run-{identity}.wandb"
        scalars, texts = tensorboard_scalars(runs / "a")
        expected = defaultdict(list)
        for line in read_lines(runs / "a/metrics.jsonl"):
            for name, value in line.items():
                if isinstance(value, int | float):
                    expected[name].append((line["step"], pytest.approx(value, rel=1e-6)))
        assert scalars == expected and '"num_groups": 2' in texts
        run("--run b --steps 4 --model tiny", *SHORT)
        assert metrics(runs / "a") == metrics(runs / "b")
        run("--run b --resume --steps 5 --log tensorboard")  # newly asked for
        assert [step for step, _ in tensorboard_scalars(runs / "b")[0]["step"]] == [
            line["step"] for line in metrics(runs / "b")]


class TestRefusal:
    def test_an_unknown_logger_and_a_missing_package_are_refused_at_once(self, runs, monkeypatch):
        for name in ("tensorboard", "wandb"):
            monkeypatch.setitem(sys.modules, name, None)
            assert message("--run", "a", "--log", name) == (
                f"error: --log {name} needs a package: pip install {name}")
        assert "unknown log 'wanbd': did you mean 'wandb'?" in message("--log", "wanbd")
        assert not runs.exists()
