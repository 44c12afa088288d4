"""Episodes with a model behind a server: as in training, and what a bad server can do."""

import base64
import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import parsed
from PIL import Image
from test_eval import players_of
from test_train import run_apart

from minragen import api
from minragen.api import Server
from minragen.config import env_groups
from minragen.envs import IMAGE, EnvGroups
from minragen.eval import checkpoint_player
from minragen.train import TRAIN_SEED

NOTHING = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def completion(text, **more):
    message = {"role": "assistant", "content": text}
    return NOTHING | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]} | more


@pytest.fixture
def server():
    """server(answer): an address whose answers are `answer(messages)`: JSON, bytes, a status, or
    a status with bytes."""
    started = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers["Content-Length"])
                said = answer(json.loads(self.rfile.read(length)))
                status, said = said if isinstance(said, tuple) else (200, said)
                status = said if isinstance(said, int) else status
                body = (b'{"error": {"message": "no such model"}}' if isinstance(said, int) else
                        said if isinstance(said, bytes) else json.dumps(said).encode())
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Location", "/v1/chat/completions")  # read with status 302 only
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        started.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}/v1"

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


@contextlib.contextmanager
def dripping():
    """The address of a server that sends a blank every 50 ms."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b" ")
                    time.sleep(0.05)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}/v1"
        one.shutdown()


class TestConversation:
    def test_the_server_gets_the_prompts_of_training_and_its_replies_are_parsed_alike(self, server):
        asked = []

        def answer(request):
            asked.append(request)
            return completion("<think>go</think><answer>Up</answer> and so on", usage=USAGE)

        model = Server(server(answer), "m", max_new_tokens=9, temperature=0.25)
        groups = EnvGroups("frozenlake", 1, 1, "val")
        (t,) = model.collect(groups)
        env = groups.envs[0]
        first = env.reset(seed=0, options={"member": 0})[0]
        (form,) = [line for line in asked[0]["messages"][0]["content"].splitlines()
                   if line.startswith("Reply in the form <think>...</think><answer>...</answer>")]
        assert form.endswith("A reply has at most 9 tokens.")
        assert asked[0]["messages"] == [
            {"role": "system", "content": f"{env.system_prompt}\n{form}"},
            {"role": "user", "content": first}]
        assert asked[0]["temperature"] == 0.25 and asked[0]["max_tokens"] == 9
        assert asked[0]["model"] == "m"
        second = env.step("Up")[0]
        assert asked[1]["messages"][2:] == [
            {"role": "assistant", "content": "<think>go</think><answer>Up</answer>"},
            {"role": "user", "content": second}]
        assert t.metrics["valid"] == 1 and t.metrics["reply_tokens"] == 3 * len(t.turns)
        assert (model.prompt_tokens, model.reply_tokens) == (7 * len(t.turns), 3 * len(t.turns))

    def test_images_are_parts_of_the_messages_for_their_marks(self, server):
        asked = []

        def answer(request):
            asked.append(request)
            return completion("<think>go</think><answer>Up</answer>")

        groups = EnvGroups("frozenlake", 1, 1, "val", options={"view": "image"})
        (t,) = Server(server(answer), "m").collect(groups)
        assert len(t.turns) > 1
        shown = [message["content"] for message in asked[-1]["messages"]
                 if message["role"] == "user"]
        for content, turn in zip(shown, t.turns):
            *above, image, below = content
            assert "".join([*(part["text"] for part in above), IMAGE, below["text"]]
                           ) == turn.observation
            seen = base64.b64decode(image["image_url"]["url"].split(",")[1])
            assert np.array_equal(np.array(Image.open(io.BytesIO(seen))), turn.observation.image)

    @pytest.mark.parametrize("text, valid", [
        ("go</think><answer>Nurse</answer>", True), ("Nurse", False), (None, False),
        ("\n<think></think> <answer>Nurse</answer>", True), ("<answer>Nurse</answer>", False)])
    def test_a_reply_may_begin_with_the_prefix_or_go_on_after_it(self, server, text, valid):
        (t,) = Server(server(lambda request: completion(text)), "m").collect(
            EnvGroups("bandit", 1, 1))
        assert t.metrics == {"valid": t.turns[0].reply.answer in t.turns[0].observation and valid}
        assert (t.turns[0].reply.answer, t.turns[0].reply.valid) == ("Nurse" * valid, valid)


class TestBadServers:
    def test_a_request_that_fails_is_sent_again_with_growing_waits(self, server):
        times = []

        def answer(request):
            times.append(time.monotonic())
            return 503 if len(times) < 3 else completion("<think></think><answer>x</answer>")

        (t,) = Server(server(answer), "m").collect(EnvGroups("bandit", 1, 1))
        assert t.turns[0].reply.valid and t.metrics["valid"] == 0 and len(times) == 3  # no arm
        assert times[2] - times[1] > 1.2 * (times[1] - times[0]) > 0.3

    @pytest.mark.parametrize("answer, said", [
        (404, "no such model"), (b"<html>", "does not answer like a chat server"),
        (NOTHING, "does not answer"), ([], "does not answer"), ({"choices": []}, "does not answer"),
        (completion(5), "does not answer"), (completion("x", usage={"prompt_tokens": "many"}),
                                             "does not answer")])
    def test_what_is_no_chat_completion_ends_the_evaluation_with_a_sentence(
            self, server, answer, said):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=said):
            Server(server(lambda request: answer), "m").collect(EnvGroups("bandit", 40, 1))
        assert time.monotonic() - began < 5

    @pytest.mark.parametrize("answer", [
        b" " * 2**22 + json.dumps(completion("x")).encode(), 302])
    def test_an_endless_reply_and_a_redirect_are_refused(self, server, monkeypatch, answer):
        monkeypatch.setattr(api, "ATTEMPTS", 1)
        said = "Error code: 302" if answer == 302 else f"more than {2**22} bytes"
        with pytest.raises(RuntimeError, match=said):
            Server(server(lambda request: answer), "m").collect(EnvGroups("bandit", 1, 1))

    def test_a_reply_that_drips_is_given_up(self, monkeypatch):
        monkeypatch.setattr(api, "ATTEMPTS", 1)
        monkeypatch.setattr(api, "SECONDS", 0.5)
        with dripping() as url, pytest.raises(RuntimeError, match="or 0.5 seconds"):
            Server(url, "m").collect(EnvGroups("bandit", 1, 1))

    def test_what_a_server_says_cannot_speak_to_the_terminal(self, server):
        body = json.dumps({"error": {"message": "\x1b]0;title\x07 gone"}}).encode()
        with pytest.raises(RuntimeError, match="title gone") as error:
            Server(server(lambda request: (400, body)), "m").collect(EnvGroups("bandit", 1, 1))
        assert str(error.value).isprintable()

    def test_after_a_failure_the_other_conversations_end(self, server):
        numbers = itertools.count(1)

        def answer(request):
            number = next(numbers)
            if number == 2:
                return 404
            time.sleep(1.0 if number == 1 else 0.05)  # they must not play on until it ends
            return completion("<think></think><answer>Up</answer>")

        with pytest.raises(RuntimeError, match="no such model"):
            Server(server(answer), "m").collect(EnvGroups("sokoban", 60, 1))
        assert next(numbers) < 60  # the others have not even begun

    def test_a_server_that_stalls_or_is_not_there_is_given_up(self, server, monkeypatch):
        monkeypatch.setattr(api, "SECONDS", 0.2)
        monkeypatch.setattr(api, "ATTEMPTS", 2)
        for url, said in ((server(lambda request: time.sleep(2) or {}), "timed out"),
                          ("http://127.0.0.1:9/v1", "Connection error")):
            with pytest.raises(RuntimeError, match=said):
                Server(url, "m").collect(EnvGroups("bandit", 1, 1))

    @pytest.mark.parametrize("env, error", [("test_train:Gone", "ConnectionError: no answer"),
                                            ("test_train:Late", "ConnectionError: not yet")])
    def test_an_environment_that_fails_is_no_fault_of_the_model(self, server, env, error):
        url = server(lambda request: completion("<think></think><answer>x</answer>"))
        groups = EnvGroups(env, 1, 1)
        groups.reset = lambda seed: EnvGroups.reset(groups, TRAIN_SEED)
        (t,) = Server(url, "m").collect(groups)
        assert t.error == error and not t.turns

    def test_without_the_package_it_is_told_how_to_get_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "openai", None)
        with pytest.raises(ImportError, match="pip install 'openai>=2'"):
            Server("http://x", "m")


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
    with ThreadingHTTPServer(("127.0.0.1", 0), None) as free:
        port = free.server_port
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
        monkeypatch.setattr("minragen.runs.RUNS", trained.parent)
        config = parsed("--env", "frozenlake")
        local = checkpoint_player(config, trained.name, say=lambda said: None)(
            env_groups(config, "test", 4))["checkpoint, greedy"]
        remote = Server(url, name, config.response_format, config.max_new_tokens, 0.0).collect(
            env_groups(config, "test", 4))
        for mine, its in zip(local, remote, strict=True):
            assert [f"<think>{turn.text}" for turn in mine.turns] == [t.text for t in its.turns]
            assert mine.turn_rewards == its.turn_rewards and mine.success == its.success
        assert sum(len(t.turns) for t in local) > 4

    def test_the_command_measures_it(self, served, capsys):
        players = players_of(capsys, "--env", "frozenlake", "--model", "tiny", "--api", served[0],
                             "--api-model", served[1], "--size", "2")
        assert served[1].startswith(players[0]) and "solver" in players
