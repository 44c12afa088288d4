"""Any reply, record and answer of a server is read, or refused as documented.

    MINRAGEN_FUZZ=100 .venv/bin/python -m pytest -n auto tests/test_fuzz.py    # 100 times as many

hypothesis draws them. Only a ValueError with a sentence may come back for the user's own records,
and only a RuntimeError for a server's answer.
"""

import contextlib
import functools
import gzip
import io
import json
import math
import os
import socket
import tempfile
import time
import types
from http.client import HTTPConnection, HTTPSConnection
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from test_deepcoder import CALL, MBPP, STDIN
from test_webshop import asked, lamp

from minragen.chat import ChatFrame
from minragen.config import Config, preset
from minragen.environments import countdown, lean, theorems
from minragen.environments.search import RemoteIndex
from minragen.envs import FORMAT_PENALTY, REGISTRY, Budget, make
from minragen.run.groups import env_groups
from minragen.run.tiny import tiny_tokenizer
from minragen.support.formats import FORMATS

SLOW = {"deepcoder", "lean"}  # they run programs
MORE = int(os.environ.get("MINRAGEN_FUZZ", "1"))


def fuzz(number, function):
    """Call the function with so many random.Random, whose numbers hypothesis draws."""
    test = given(rng=st.randoms(use_true_random=False))(function)
    settings(max_examples=number * MORE, deadline=None, database=None, derandomize=MORE == 1,
             report_multiple_bugs=False, suppress_health_check=[*HealthCheck])(test)()


# ---- Replies -------------------------------------------------------------------------------------
# Options to play beside the defaults and tiny's preset.
OPTIONS = {
    "bandit": [{"mixed": True}], "frozenlake": [{"slip": 0.5}, {"size": 6, "view": "grid"}],
    "sokoban": [{"boxes": 2, "rows": 7, "cols": 7, "view": "coord"}],
    "sudoku": [], "countdown": [{"operators": "+-", "budget": Budget(3, 1, 3)}],
    "metamathqa": [], "searchqa": [{"hops": 1}],
    "webshop": [{"wording": "plain"}, {"page_size": 1}],
    "deepcoder": [{"budget": Budget(3, 1, 3)}], "lean": [{"step_cost": 0.1}]}
# The most that an episode can pay, where luck or a shorter proof may beat the solver.
MOST = {"bandit": lambda o: o["high_reward"], "frozenlake": lambda o: 1.0,
        "lean": lambda o: 1 - o["step_cost"]}
PIECES = [  # what is put into a reply, one time in 500 as 2**14 copies
    *(f"<{end}{tag}>" for tag in ("think", "answer", "observation", "reasoning", "prediction")
      for end in ("", "/")), "<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "[INST]", "||",
    " || ", "\n", "\0", " ", "\u2028", "\ud800", "\u0301", "\u202e", *"🧊ﬃİ√٣１²⊢",
    *"()[]{};:,.=+-*/%'\"\\`<>#@_", "```python\n", "def f", "undo", "clear ", "1e999", "-1",
    "9" * 30, "0", "1/0", "skip", "; ", "sorry", "None", "search[", "finish[ ", "click[", "]"]


@functools.cache
def environments(name):
    """The environment by default, with the options of tiny's preset, and with those of OPTIONS."""
    configs = Config(env=name), preset(name)
    return [*(env_groups(config, "train").envs[0] for config in configs),
            *(make(name, **options) for options in OPTIONS[name])]


@functools.cache
def frame_of(response_format):
    return ChatFrame(tiny_tokenizer([make("frozenlake")], response_format), response_format)


@functools.cache
def best_return(name, which, seed):
    """The most that an episode from this start can pay: the solver's return, or MOST."""
    env = environments(name)[which]
    if name in MOST:
        return MOST[name](env.options)
    env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        _, reward, *ends, _ = env.step(env.solve()[0])
        total, over = total + reward, any(ends)
    return total


def play_episode(name, rng):
    """Play an episode of mutated answers of the solver, of the shallow player and of the random
    policy in the very state, wrapped in one of the formats and mutated again.

    Whatever the replies: no exception, no observation outside its space, no return above the best
    possible one.
    """
    which, seed, frame = rng.randrange(len(environments(name))), rng.randrange(20), frame_of(
        rng.choice([*FORMATS]))
    env, best = environments(name)[which], best_return(name, which, seed)
    texts, total, over = [env.system_prompt, env.reset(seed=seed)[0]], 0.0, False
    while not over:
        text = random_reply(env, frame, texts, rng)
        note(f"{name} {env.options} {env.budget}, seed {seed}: {text[:500]!r}")
        reply = frame.parse(text)
        f1s = [env.score_description(reply.observation)]
        observation, reward, terminated, truncated, info = env.step(reply.answer)
        f1s.append(env.score_description(reply.prediction))
        assert observation in env.observation_space, observation
        assert math.isfinite(reward) and all(map(math.isfinite, info.values())), (reward, info)
        assert reply.valid or (reward, info["valid"], info["success"]) == (FORMAT_PENALTY, 0, 0)
        assert all(f1 is None or 0 <= f1 <= 1 for f1 in f1s), f1s
        marks = [frame.next_prompt_ids(None, shown).count(frame.end_of_turn)
                 for shown in ("", observation)]
        assert marks[0] == marks[1], "the observation holds a control token"
        total, over = total + reward, terminated or truncated
        assert total <= best + 1e-9, f"{total} beats {best}"
        texts += [reply.answer, observation]


def random_reply(env, frame, texts, rng):
    """A reply for the current state: one of a player's answers or noise, mutated in places."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    answer = rng.choice((lambda: env.solve()[0], lambda: env.shallow_answer(texts),
                         lambda: env.random_answer(numbers), lambda: ""))()
    state = mutated(env.describe(), rng)
    text = frame.write({"answer": rng.choice((answer, mutated(answer, rng))), "observation": state,
                        "reasoning": env.note(), "prediction": state})
    return rng.choice((text, mutated(text, rng)))


def mutated(text, rng):
    """The text after 1 to 8 cuts, copies, moves, reversals and insertions."""
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        i, j = sorted(rng.choices(range(len(text) + 1), k=2))
        piece = rng.choice(PIECES) * (2**14 if rng.randrange(500) == 250 else 1)
        text = rng.choice((
            text[:i] + text[j:], text[:j] + text[i:], text[:i], text[j:] + text[i:j] + text[:i],
            text[:i] + text[i:j][::-1] + text[j:], text[:i] + text[i:j].swapcase() + text[j:],
            *[text[:i] + piece + text[i:], text[:i] + piece + text[j:]] * 3))
    return text


class TestReplies:
    @pytest.mark.parametrize("name", REGISTRY)
    def test_none_raises_beats_the_solver_or_is_answered_outside_the_space(self, name):
        fuzz(10 if name in SLOW else 40, lambda rng: play_episode(name, rng))

    @pytest.mark.parametrize("worse, said", [
        (countdown.Outcome(9.0), "beats"), (countdown.Outcome(float("nan")), "nan"), (1, "'int'")])
    def test_each_promise_that_is_broken_is_noticed(self, worse, said, monkeypatch):
        act = countdown.Countdown._act
        monkeypatch.setattr(countdown.Countdown, "_act",
                            lambda env, text: worse if " + " not in text else act(env, text))
        with pytest.raises((AssertionError, AttributeError), match=said):
            fuzz(60, lambda rng: play_episode("countdown", rng))


# ---- What reads the text of others ---------------------------------------------------------------
LEAVES = (None, True, -1, 0, 3, 1.5, math.inf, math.nan, 10**400, "", "\ud800", "no goals", "swap",
          "7", " x ", [], {}, [[]], [None], {"a": 1}, "[" * 2000, {"line": math.inf})


def bytes_of(rng):
    return rng.randbytes(rng.choice((1, 8, 40, 200)))


def edited(node, rng):
    """The document with one node replaced, by a leaf or by another node of its parent."""
    if not (isinstance(node, (dict, list)) and node and rng.randrange(8)):
        return rng.choice([*LEAVES, bytes_of(rng).decode(errors="surrogateescape")])
    copy, keys = node.copy(), [*node] if isinstance(node, dict) else [*range(len(node))]
    key, other = rng.choice(keys), rng.choice([None, *keys])
    copy[key] = edited(node[key], rng) if other is None else node[other]
    return copy


def document(node, rng):
    """The bytes of a JSON document with up to four edits, or any bytes."""
    for _ in range(edits := rng.randrange(5)):
        node = edited(node, rng)
    return json.dumps(node).encode() if edits else bytes_of(rng)


def step(env, answer):
    if env._live:
        observation, reward, *_ = env.step(answer)
        assert observation in env.observation_space and math.isfinite(reward)


@functools.cache
def with_server(name):
    return make(name, **{"lean": {"server": "http://lean", "family": "logic"},
                         "searchqa": {"url": "http://retriever"}}[name])


LEAN = types.SimpleNamespace(check=lambda *_: lean.Verdict(False, goals="⊢ p"))  # answers at once
RECORDS = {
    ("countdown", "data"): [{"nums": [3, 7, 14], "target": 24}],
    ("metamathqa", "data"): [
        {"question": "What is 2+2?", "answer": "4", "original_question": "2?"},
        {"question": "How many percent?", "answer": "So\n#### 1/2"}],
    ("searchqa", "data"): [{
        "question": "Who?", "answer": "Ann", "supporting_facts": [["Ann", 0]],
        "context": [["Ann", ["Ann is.", "She."]]]}, {"question": "Who?", "answer": ["Ann"]}],
    ("searchqa", "corpus"): [{"title": "Ann", "text": "Ann is."}, {"text": "y"}],
    ("webshop", "products"): [lamp(1)],
    ("deepcoder", "data"): [MBPP, STDIN, CALL],
    ("lean", "data"): [{"formal_statement": "theorem a (n : Nat) : n = n := by sorry",
                        "header": "import Mathlib"},
                       {"formal_statement": "open Nat\nlemma b : 1 = 1 :=\n  by"}]}
FILES = count()  # a new name for each file: they are cached


def records(rng):
    """A file of the user's records, and an episode of the solver with them."""
    (name, option), suffix = rng.choice([*RECORDS]), rng.choice([".jsonl", ".json", ".gz"])
    written = document(RECORDS[name, option], rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{next(FILES)}{suffix}"
        zipped = suffix == ".gz" and rng.randrange(4)
        path.write_bytes(gzip.compress(written) if zipped else written)
        options = {option: str(path)} | ({"server": "http://lean"} if name == "lean" else {})
        if name == "webshop":
            options["instructions"] = f"{path}.instructions"
            Path(options["instructions"]).write_bytes(document({"B01": asked(1)}, rng))
        try:
            env = make(name, **options)
            env.instance_split = lambda: env.split
            env.checker = LEAN
            observation, _ = env.reset(seed=0)
        except ValueError as problem:
            assert type(problem) is ValueError and " " in str(problem), repr(problem)
            return
        assert observation in env.observation_space
        answer = env.solve()[0]
        if name not in SLOW:
            step(env, answer)
        elif name == "lean":
            theorems.shape(env.theorem.statement)


@contextlib.contextmanager
def served(reply):
    """Every HTTP connection gets this reply; there is no other network, and no waiting."""
    def connect(self):
        self.sock = types.SimpleNamespace(sendall=lambda _: None, close=lambda: None,
                                          makefile=lambda *_: io.BytesIO(reply))

    with (mock.patch.object(HTTPConnection, "connect", connect),
          mock.patch.object(HTTPSConnection, "connect", connect),
          mock.patch.object(socket, "create_connection", side_effect=OSError("no network")),
          mock.patch.object(time, "sleep")):
        yield


def http_reply(node, rng):
    """A reply of HTTP: a document with status 200 or another, or any bytes."""
    head = rng.choice([b"200 OK", b"200 OK", b"500 No", b"404 No", b"302 No\r\nLocation: /x", b""])
    if not head:
        return bytes_of(rng)
    body = document(node, rng)
    more = rng.choice([b"", b"Content-Length: %d\r\n" % len(body), b"Content-Length: 9999\r\n",
                       b"Transfer-Encoding: chunked\r\n"])
    return b"HTTP/1.1 %s\r\n%s\r\n%s" % (head, more, body)


def retriever(rng):
    """What a retriever sends: results, or RuntimeError; then SearchQA shows them."""
    env = with_server("searchqa")
    env.reset(seed=rng.randrange(8))
    with (served(http_reply({"results": [{"id": "1", "content": "Ann: is", "score": 1},
                                         {"content": "b"}], "num_results": 2}, rng)),
          contextlib.suppress(RuntimeError)):
        env.index = RemoteIndex("http://retriever", 5.0)
        step(env, "search[Ann]")
    env.shallow_answer([env.system_prompt, env._observe(0.0)])


def lean_answers(rng):
    """What a Kimina server sends: a verdict, or RuntimeError."""
    env = with_server("lean")
    env.checker = LEAN
    env.reset(seed=rng.randrange(8))
    env.checker = lean.KiminaLean("http://lean", 1.0)
    rows = [{"pos": {"line": 35, "column": 1}, "severity": "error", "data": "unsolved goals\n⊢ p"},
            {"pos": {"line": 39}, "severity": "info", "data": "case a\np : Prop\n⊢ p\n\n⊢ q"},
            {"pos": {"line": 40}, "severity": "info", "data": "'drawn' depends on axioms: []"}]
    reply = http_reply({"results": [{"error": None, "response": {
        "messages": rows, "sorries": [{"pos": {"line": 36}}], "message": "m"}}]}, rng)
    with served(reply), contextlib.suppress(RuntimeError):
        step(env, "constructor")
        env.shallow_answer([env.system_prompt, env.render()])
        env.random_answer(np.random.default_rng(0))


class TestReaders:
    @pytest.mark.parametrize("reader", [records, retriever, lean_answers])
    def test_random_bytes_and_edited_documents_are_read_or_refused_as_documented(self, reader):
        fuzz(200, reader)
