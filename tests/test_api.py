"""Episodes with a model behind a server: as in training, and what a bad server can do."""

import base64
import contextlib
import io
import itertools
import json
import math
import time
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from toys import tiny, web_server

from minragen.chat import ChatFrame
from minragen.envs import IMAGE, EnvGroups
from minragen.look.players import scripted
from minragen.more import api
from minragen.more.api import Server
from minragen.run.groups import PatientGroups

NOTHING = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def completion(text, **more):
    message = {"role": "assistant", "content": text}
    return NOTHING | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]} | more


@pytest.fixture
def server():
    """server(answer): an address whose answers are `answer(request)`: JSON, bytes, a status, or
    a status with bytes. server.asked: the requests."""
    with contextlib.ExitStack() as stack:
        def start(answer):
            def respond(_, request):
                start.asked.append(json.loads(request))
                said = answer(start.asked[-1])
                if isinstance(said, int):
                    said = said, b'{"error": {"message": "no such model"}}'
                status, said = said if isinstance(said, tuple) else (200, said)
                body = said if isinstance(said, bytes) else json.dumps(said).encode()
                return status, "/v1/chat/completions", body

            return f"{stack.enter_context(web_server(respond))}/v1"

        start.asked = []
        yield start


class TestConversation:
    def test_the_server_gets_the_prompts_of_training_and_its_replies_are_parsed_alike(self, server):
        form, groups = "grounding_worldmodeling", EnvGroups("frozenlake", 1, 1, "val")
        frame = ChatFrame(tiny()[0].tokenizer, form, max_new_tokens=9, example=True)
        reply = frame.prefix + frame.write(
            {"observation": "a", "reasoning": "b", "prediction": "c", "answer": "Up"})
        url = server(lambda request: completion(f"{reply} and so on", usage=USAGE))
        model = Server(url, "m", form, max_new_tokens=9, temperature=0.25, example=True)
        (t,) = model.collect(groups)
        env = groups.envs[0]
        first, second = env.reset(seed=0, options={"member": 0})[0], env.step("Up")[0]
        assert server.asked[0] == {
            "model": "m", "temperature": 0.25, "max_tokens": 9, "messages": [
                {"role": "system", "content": frame.system_message(env)},
                {"role": "user", "content": first}]}
        assert server.asked[1]["messages"][2:] == [
            {"role": "assistant", "content": reply}, {"role": "user", "content": second}]
        assert t.metrics["valid"] == 1 and t.metrics["reply_tokens"] == 3 * len(t.turns)
        assert (model.prompt_tokens, model.reply_tokens) == (7 * len(t.turns), 3 * len(t.turns))

    def test_of_every_row_it_keeps_what_a_scripted_player_earns_there_and_whose_it_is(self, server):
        """Success in any turn is success, and shares are averaged over the turns."""
        groups = EnvGroups("toys:Lottery=3,test_rollout:Counts=2", 5, 2)
        url = server(lambda request: completion("<think></think><answer>x</answer>"))
        played = Server(url, "m").collect(groups)
        assert [(t.env, t.seed, t.group_id, t.member) for t in played] == [
            (groups.names[g], g, g, member) for g in range(5) for member in range(2)]
        earned, scripts = ([(t.success, t.episode_return, len(t.turns), t.metrics["valid"])
                            for t in ts] for ts in (played, scripted(
                                groups, lambda env, texts, rng: "x")))
        assert earned == scripts
        assert {(len(t.turns), t.stop.value) for t in played} >= {(1, "terminated"),
                                                                 (3, "truncated")}

    def test_images_are_parts_of_the_messages_for_their_marks(self, server):
        url = server(lambda request: completion("<think>go</think><answer>Up</answer>"))
        groups = EnvGroups("frozenlake", 1, 1, "val", options={"view": "image"})
        (t,) = Server(url, "m").collect(groups)
        assert len(t.turns) > 1
        shown = [message["content"] for message in server.asked[-1]["messages"]
                 if message["role"] == "user"]
        for content, turn in zip(shown, t.turns):
            *above, image, below = content
            assert "".join([*(part["text"] for part in above), IMAGE, below["text"]]
                           ) == turn.observation
            seen = base64.b64decode(image["image_url"]["url"].split(",")[1])
            assert np.array_equal(np.array(Image.open(io.BytesIO(seen))), turn.observation.image)

    @pytest.mark.parametrize("form, content, thought, valid", [
        ("free_think", "go</think><answer>Nurse</answer>", None, True),
        ("free_think", "\n<think></think> <answer>Nurse</answer>", None, True),
        ("free_think", "Nurse", None, False), ("free_think", None, None, False),
        ("free_think", "<answer>Nurse</answer>", None, False),
        ("free_think", "<answer>Nurse</answer>", "go", True),
        ("free_think", "<answer>Nurse</answer>", "<think>go</think>", True),
        ("free_think", "<think>a</think><answer>Nurse</answer>", "go", True),
        ("free_think", None, "go</think><answer>Nurse</answer>", True),
        ("free_think", "Nurse", "go", False), ("no_think", "<answer>Nurse</answer>", "go", True),
        ("grounding", "<answer>Nurse</answer>",
         "<observation>a</observation><reasoning>b</reasoning>", True)])
    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
    def test_a_reply_goes_on_after_the_prefix_or_repeats_it_and_a_thought_cut_out_is_put_back(
            self, server, name, form, content, thought, valid):
        answer = completion(content)
        answer["choices"][0]["message"] |= {name: thought} if thought else {}
        (t,) = Server(server(lambda request: answer), "m", form).collect(EnvGroups("bandit", 1, 1))
        assert (t.turns[0].reply.answer, t.turns[0].reply.valid) == ("Nurse" * valid, valid)
        assert t.turns[0].text.count("<think>") <= 1


class TestBadServers:
    @pytest.mark.parametrize("answer, said", [
        (404, "no such model"), (302, "HTTP Error 302"),
        ((400, b'{"error": {"message": "\\u001b]0;title\\u0007 gone"}}'), "title.* gone"),
        (b" " * 2**22 + json.dumps(completion("x")).encode(), "endless reply"),
        (b"<html>", "does not answer like a chat server"), (b"\x1f\x8b", "does not answer"),
        (NOTHING, "does not answer"), ([], "does not answer"), ({"choices": []}, "does not answer"),
        (completion("x", usage=USAGE | {"prompt_tokens": math.inf}), "does not answer"),
        (b"[" * 50_000, "does not answer"), (completion(5), "does not answer"),
        (completion("x", usage={"prompt_tokens": "many"}), "does not answer")])
    def test_redirects_endless_replies_and_other_answers_are_refused(self, server, answer, said):
        with pytest.raises(RuntimeError, match=said) as error:
            Server(server(lambda request: answer), "m").collect(EnvGroups("bandit", 40, 1))
        assert str(error.value).isprintable()  # it cannot speak to the terminal

    @pytest.mark.parametrize("answer, said", [
        (lambda request: 503, "/v1 does not .*HTTP Error 503.*try 1 of 6.*Is it running"),
        (lambda request: time.sleep(1) or {}, "timed out")])
    def test_a_request_and_its_tries_have_one_deadline(self, server, answer, said, monkeypatch):
        monkeypatch.setattr(api, "SECONDS", 0.2)
        with pytest.raises(RuntimeError, match=said):
            Server(server(answer), "m").collect(EnvGroups("bandit", 1, 1))

    def test_after_a_failure_the_other_conversations_end(self, server):
        numbers = itertools.count(1)

        def answer(request):
            number = next(numbers)
            if number == 2:
                return 404
            time.sleep(0.4 if number == 1 else 0.05)  # they must not play on until it ends
            return completion("<think></think><answer>Up</answer>")

        with pytest.raises(RuntimeError, match="no such model"):
            Server(server(answer), "m").collect(EnvGroups("sokoban", 60, 1))
        assert next(numbers) < 60  # the others have not even begun

    def test_an_environment_that_fails_is_no_fault_of_the_model(self, server):
        url = server(lambda request: completion("<think></think><answer>x</answer>"))
        groups = PatientGroups("toys:Gone", 2, 1)
        groups.envs[1].reset = mock.Mock(side_effect=ConnectionError("not yet"))
        gone, late = Server(url, "m").collect(groups)
        assert (gone.error, gone.turn_rewards) == ("ConnectionError: no answer", [0.0])
        assert (late.error, late.turn_rewards) == ("ConnectionError: not yet", [])  # as in training
