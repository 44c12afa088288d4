"""TensorBoard and Weights & Biases beside metrics.jsonl, read back from their files."""

import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import message
from test_train import BRIEF, metrics, read_lines, run

SHORT = [*BRIEF, *shlex.split("--warmup-steps 0 --filter none --diagnose-every 2")]


def tensorboard_scalars(folder):
    """{name: [(step, value), ...]}, and the texts, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    texts = "".join(e.tensor_proto.string_val[0].decode() for e in events.Tensors(
        "config/text_summary"))
    return {name: [(e.step, e.value) for e in events.Scalars(name)]
            for name in events.Tags()["scalars"]}, texts


def wandb_records(path):
    """The records of an offline run: a log in LevelDB's format after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 < len(data):
        if 2**15 - at % 2**15 < 7:  # the rest of a block holds no header
            at += 2**15 - at % 2**15
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7:at + 7 + length], at + 7 + length
        if kind in (1, 4):  # full, last
            yield Record.FromString(whole)
            whole = b""


def wandb_run(folder):
    """{step: metrics}, the config, and the id of the only run in the folder."""
    import wandb

    wandb.teardown()  # as at the end of Python: waits for its process
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows, config, identity = defaultdict(dict), {}, None
    for record in wandb_records(path):
        if record.HasField("run"):
            identity = record.run.run_id
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                rows[record.history.step.num][name] = json.loads(item.value_json)
    return dict(rows), config, identity


def wait_for(lines, path):
    """Wait until a run's metrics.jsonl has so many lines."""
    deadline = time.monotonic() + 300
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run whose W&B process was killed, and after two more steps the run itself."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    home = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent),
                                "MINRAGEN_CACHE": str(home / "cache")}
    with open(home / "printed", "w") as printed:
        training = subprocess.Popen(
            [sys.executable, "-m", "minragen.train", "--run", "a", "--model", "tiny", *SHORT,
             "--steps", "10000", "--log", "tensorboard, wandb"],
            cwd=home, env=environment, stdout=printed, stderr=printed)
        wait_for(3, home / "runs/a/metrics.jsonl")
        core = subprocess.check_output(["pgrep", "-P", str(training.pid), "wandb"])
        os.kill(int(core), signal.SIGKILL)
        before = len(read_lines(home / "runs/a/metrics.jsonl"))
        wait_for(before + 3, home / "runs/a/metrics.jsonl")
        training.kill()
        training.wait()
    return home / "runs" / "a"


class TestFiles:
    def test_a_logger_that_breaks_is_named_once_and_the_run_goes_on(self, killed):
        printed = (killed.parent.parent / "printed").read_text()
        assert printed.count("warning   wandb is closed: ") == 1 and "Traceback" not in printed

    def test_after_a_kill_both_hold_each_line_once_and_the_lines_are_those_of_a_run_without(
            self, killed, runs, monkeypatch):
        monkeypatch.chdir(killed.parent.parent)
        monkeypatch.setattr("minragen.runs.RUNS", killed.parent)
        identity = (killed / "wandb" / "id").read_text()
        steps = json.loads((killed / "checkpoint/manifest.json").read_text())["step"] + 3
        config = json.loads((killed / "config.json").read_text())  # it may not be reduced
        (killed / "config.json").write_text(json.dumps(config | {"steps": steps}))
        run("--run a --resume")
        lines = [{k: v for k, v in line.items() if v is not None}
                 for line in read_lines(killed / "metrics.jsonl")]
        scalars, texts = tensorboard_scalars(killed)
        expected, rows = defaultdict(list), defaultdict(dict)
        for line in lines:
            rows[line["step"]] |= line
            for name, value in line.items():
                if not isinstance(value, str):
                    expected[name].append((line["step"], pytest.approx(value, rel=1e-6)))
        assert scalars == expected and "regime" in set().union(*lines)
        told, config, its_id = wandb_run(killed)
        assert (told, config["num_groups"], its_id) == (rows, 2, identity)
        assert '"num_groups": 2' in texts
        run(f"--run b --steps {steps} --model tiny", *SHORT)
        plain = killed.parent / "b"
        assert metrics(killed) == metrics(plain)
        run(f"--run b --resume --steps {steps + 1} --log tensorboard")  # newly asked for
        assert [step for step, _ in tensorboard_scalars(plain)[0]["step"]] == [
            line["step"] for line in metrics(plain)]


class TestRefusal:
    def test_a_name_that_is_no_logger_and_a_missing_package_are_refused_before_anything_is_made(
            self, runs, monkeypatch, tmp_path):
        for name in ("tensorboard", "wandb"):
            monkeypatch.setitem(sys.modules, name, None)  # wandb leaves a folder of that name, too
            with monkeypatch.context() as patch:
                patch.delitem(sys.modules, name)
                patch.syspath_prepend(tmp_path)
                patch.setattr(sys, "path", [str(tmp_path)])
                (tmp_path / name).mkdir()
                assert message("--run", "a", "--log", name).endswith(f"pip install {name}")
            assert message("--run", "a", "--log", name) == (
                f"error: --log {name} needs a package: pip install {name}")
        assert "unknown log 'wanbd': did you mean 'wandb'?" in message("--log", "wanbd")
        assert not runs.exists()

    def test_what_wandb_says_when_nobody_is_logged_in_is_a_sentence(
            self, runs, monkeypatch, tmp_path):
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        assert message("--run", "a", "--model", "tiny", *SHORT, "--steps", "1", "--log", "wandb"
                       ).startswith("error: --log wandb: No API key configured")
        assert message("--run", "a", "--resume").endswith("Delete it and start again.")
