"""A real server of a trained model is measured as the model itself."""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import parsed, run_apart
from several import free_port

from minragen.more.api import Server
from minragen.run.groups import env_groups
from minragen.run.measure import checkpoint_player


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address and model name of `transformers serve` with a copy of a run's checkpoint, and the
    run's folder.

    Its template opens the thought, as R1's does, since a server forces no prefix.
    """
    trained = run_apart(tmp_path_factory, "--steps 1 --num-groups 2 --group-size 4 --val-size 4 "
                                          "--diagnose-every 0")
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(trained / "checkpoint", folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace(
        "<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>{%"))
    port = free_port()
    command = [Path(sys.executable).parent / "transformers", "serve", "--port", str(port),
               "--device", "cpu"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=os.environ | {"HF_HUB_OFFLINE": "1"}, cwd=folder.parent)
    for _ in range(120):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            time.sleep(0.5)
    yield f"http://127.0.0.1:{port}/v1", str(folder), trained
    running.terminate()
    running.wait()


class TestRealServer:
    def test_at_temperature_0_it_says_token_for_token_what_the_trained_model_says(
            self, served, monkeypatch):
        url, name, trained = served
        monkeypatch.setattr("minragen.run.runs.RUNS", trained.parent)
        config = parsed("--env", "frozenlake")
        local = checkpoint_player(config, trained.name, say=lambda said: None)(
            env_groups(config, "test", 4))["checkpoint, greedy"]
        remote = Server(url, name, config.response_format, config.max_new_tokens, 0.0).collect(
            env_groups(config, "test", 4))
        for mine, its in zip(local, remote, strict=True):
            assert [f"<think>{turn.text}" for turn in mine.turns] == [t.text for t in its.turns]
            assert mine.turn_rewards == its.turn_rewards and mine.success == its.success
        assert sum(len(t.turns) for t in local) > 4
