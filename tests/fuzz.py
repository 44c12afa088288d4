"""Fuzzing of replies and of what reads the text of others.

    python tests/fuzz.py replies 100000    # random and mutated replies (replies.py)
    python tests/fuzz.py parser 300        # one of TARGETS for 300 seconds, guided by coverage

`make fuzz` runs all of them. A target gets bytes, makes an input of them and gives it to the code
that reads it. Only a ValueError with a sentence may come back for the user's own records, and only
a RuntimeError for a server's answer. test_fuzz.py runs a short form.
"""

import contextlib
import functools
import gc
import gzip
import io
import json
import math
import pkgutil
import random
import socket
import sys
import tempfile
import time
import types
from http.client import HTTPConnection, HTTPSConnection
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
from replies import PIECES, frame_of, play_replies

from minragen.chat import FORMATS
from minragen.environments import board, deepcoder, lean, theorems
from minragen.environments.search import RemoteIndex
from minragen.envs import REGISTRY, make

SLOW = {"deepcoder", "lean"}  # they run programs: a fifth of the replies of another environment


# ---- Bytes as choices ----------------------------------------------------------------------------
class Source:
    """Choices made by bytes, in order; all are the first choice when none are left."""

    LEAVES = (None, True, -1, 0, 3, 1.5, math.inf, math.nan, 10**400, "", "\ud800", "no goals",
              "swap", "7", " x ", [], {}, [[]], [None], {"a": 1}, "[" * 2000, {"line": math.inf})

    def __init__(self, data):
        self.data, self.at = data, 0

    def pick(self, things):
        byte = self.data[self.at:self.at + 1] or b"\0"
        self.at += 1
        return things[byte[0] % len(things)]

    def rest(self):
        """The bytes that are left."""
        at, self.at = self.at, len(self.data)
        return self.data[at:]

    def text(self, pieces):
        """The bytes that are left as a text, or each of them as one of the pieces."""
        if self.pick(range(2)):
            return self.rest().decode(errors="surrogateescape")
        return "".join(pieces[byte % len(pieces)] for byte in self.rest())

    def edited(self, node):
        """The document with one node replaced, by a leaf or by another node of its parent."""
        if isinstance(node, (dict, list)) and node and self.pick(range(8)):
            copy = node.copy()
            keys = [*node] if isinstance(node, dict) else [*range(len(node))]
            key, other = self.pick(keys), self.pick([None, *keys])
            copy[key] = self.edited(node[key]) if other is None else node[other]
            return copy
        leaves = [*self.LEAVES, self.data[self.at:self.at + 40].decode(errors="surrogateescape")]
        return self.pick(leaves)

    def document(self, node):
        """The bytes of a JSON document with up to four edits, or any bytes."""
        if not (edits := self.pick([1, 2, 3, 4, 0])):
            return self.rest()
        for _ in range(edits):
            node = self.edited(node)
        return json.dumps(node).encode()


# ---- Targets -------------------------------------------------------------------------------------
def parser(source):
    """A reply: the format's parser, and what reads the answer in each environment."""
    frame, env = frame_of(source.pick([*FORMATS])), live(source.pick(sorted(READ_BY)))
    env.reset(seed=source.pick(range(8)))
    answer = env.solve()[0]
    whole = frame.write(dict.fromkeys(frame.parts, answer))
    text = source.text([whole, answer, *env.actions, *"123", *PIECES])
    reply = frame.parse(text)
    assert reply.valid or not reply.answer
    for answer in (reply.answer, text):
        READ_BY[type(env).__name__.lower()](env, answer)


def step(env, answer):
    if env._live:
        observation, reward, *_ = env.step(answer)
        assert observation in env.observation_space and math.isfinite(reward)


READ_BY = dict.fromkeys(REGISTRY.keys() - SLOW, step) | {
    "deepcoder": lambda env, text: deepcoder.program_of(text.strip(), env.problem),
    "lean": lambda env, text: lean.tactic_refusal(lean.tidy_tactic(text), env.known)}


@functools.cache
def live(name):
    """An environment, whose Lean answers at once."""
    env = make(name, **{"server": "http://lean", "family": "logic"} if name == "lean" else {})
    if name == "lean":
        env.checker = types.SimpleNamespace(check=lambda *_: lean.Verdict(False, goals="⊢ p"))
    return env


def relations(source):
    """A description of the state: what it claims and its score."""
    env = live(source.pick(["frozenlake", "sokoban"]))
    env.reset(seed=source.pick(range(8)))
    text = source.text([*"; .\nſ", *(f"{word} " for word in (
        "goal", "hole", "box", "target", *board.VERTICAL, *board.HORIZONTAL))])
    claims = board.read_relations(text)
    assert board.read_relations(board.relations_text(claims)) == claims
    assert 0 <= env.score_description(text) <= 1 == env.score_description(env.describe())


RECORDS = {
    ("countdown", "data"): [{"nums": [3, 7, 14], "target": 24}],
    ("metamathqa", "data"): [
        {"query": "What is 2+2?", "response": "The answer is: 4", "original_question": "2?"},
        {"question": "How many percent?", "answer": "So\n#### 1/2"}],
    ("searchqa", "data"): [{
        "question": "Who?", "answer": "Ann", "supporting_facts": [["Ann", 0]],
        "context": {"title": ["Ann"], "sentences": [["Ann is.", "She."]]}},
        {"question": "Who?", "ground_truth": ["Ann"], "context": [["Ann", ["A", "b"]]]}],
    ("searchqa", "corpus"): [{"title": "Ann", "text": "Ann is."}, {"contents": "x"}, "y"],
    ("webshop", "products"): [{
        "asin": "B01", "name": "Red mug", "query": "mug", "product_category": "Home › Mugs",
        "pricing": "$9.50$12", "customization_options": {"size": [{"value": "Big"}]},
        "full_description": "A mug.", "small_description": ["red"]}],
    ("deepcoder", "data"): [
        {"text": "Add.", "code": "def f(a): return a", "test_list": ["assert f(1) == 1"],
         "test_setup_code": "", "test_imports": ["import math"]},
        {"problem": "Echo.", "tests": "{\"inputs\": [\"1\"], \"outputs\": [\"1\"]}",
         "solutions": ["print(input())"], "starter_code": "def"},
        {"question": "Add.", "metadata": "{\"func_name\": \"f\"}", "public_test_cases": [
            {"input": "1\n2", "output": "3", "testtype": "functional"}],
         "private_test_cases": "eJxrYIp3hIAAJGQFaQ==", "solution": "[\"x\"]"},
        {"prompt": "Add.", "ground_truth": [{"fn_name": "f", "input": [1], "output": [2]}]}],
    ("lean", "data"): [{"formal_statement": "theorem a (n : Nat) : n = n := by sorry",
                        "header": "import Mathlib"},
                       {"formal_statement": "open Nat\nlemma b : 1 = 1 :=\n  by"}]}
INSTRUCTIONS = {"B01": {"instruction": "a red mug", "attributes": ["red"],
                        "instruction_attributes": ["red"]}}
FILES = count()  # a new name for each file: they are cached


def records(source):
    """A file of the user's records, and an episode of the solver with them."""
    (name, option), suffix = source.pick([*RECORDS]), source.pick([".jsonl", ".json", ".gz"])
    data = source.document(RECORDS[name, option])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{next(FILES)}{suffix}"
        path.write_bytes(gzip.compress(data) if suffix == ".gz" and source.pick([1, 0]) else data)
        options = {option: str(path)} | ({"server": "http://lean"} if name == "lean" else {})
        if name == "webshop":
            options["instructions"] = f"{path}.instructions"
            Path(options["instructions"]).write_bytes(source.document(INSTRUCTIONS))
        try:
            env = make(name, **options)
            env.instance_split = lambda: env.split
            env.checker = live("lean").checker
            observation, _ = env.reset(seed=0)
        except ValueError as problem:
            assert type(problem) is ValueError and " " in str(problem), repr(problem)
            return
        assert observation in env.observation_space
        READ_BY[name](env, env.solve()[0])
        if name == "lean":
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


def http_reply(source, document):
    """A reply of HTTP: a document with status 200 or another, or any bytes."""
    head = source.pick([b"200 OK", b"200 OK", b"500 No", b"404 No", b"302 No\r\nLocation: /x", b""])
    if not head:
        return source.rest()
    body = source.document(document)
    more = source.pick([b"", b"Content-Length: %d\r\n" % len(body), b"Content-Length: 9999\r\n",
                        b"Transfer-Encoding: chunked\r\n"])
    return b"HTTP/1.1 %s\r\n%s\r\n%s" % (head, more, body)


def retriever(source):
    """What a retriever sends: results, or RuntimeError; then SearchQA shows them."""
    env = remote_search()
    env.reset(seed=source.pick(range(8)))
    with (served(http_reply(source, {"results": [{"id": "1", "content": "Ann: is", "score": 1},
                                                 {"content": "b"}], "num_results": 2})),
          contextlib.suppress(RuntimeError)):
        env.index = RemoteIndex("http://retriever", 5.0)
        step(env, "search[Ann]")
    env.shallow_answer([env.system_prompt, env._observe(0.0)])


@functools.cache
def remote_search():
    return make("searchqa", url="http://retriever")


def lean_answers(source):
    """What a Kimina server sends or `lean --json` prints: a verdict, or RuntimeError."""
    env = live("lean")
    env.reset(seed=source.pick(range(8)))
    rows = [{"pos": {"line": 35, "column": 1}, "severity": "error", "data": "unsolved goals\n⊢ p"},
            {"pos": {"line": 39}, "severity": "info", "data": "case a\np : Prop\n⊢ p\n\n⊢ q"},
            {"pos": {"line": 40}, "severity": "info", "data": "'drawn' depends on axioms: []"}]
    checker, env.checker = env.checker, lean.KiminaLean("http://lean", 1.0)
    reply = http_reply(source, {"results": [{"error": None, "response": {
        "messages": rows, "sorries": [{"pos": {"line": 36}}], "message": "m"}}]})
    if source.pick([0, 1]):
        env.checker = lean.LeanChecker("lean", 1.0)
        lines = b"\n".join(source.document(row) for row in rows)
        env.checker._ask = lambda script: lean.json_rows(lines.decode(errors="replace"))
    try:
        with served(reply), contextlib.suppress(RuntimeError):
            step(env, "constructor")
            env.shallow_answer([env.system_prompt, env.render()])
            env.random_answer(np.random.default_rng(0))
    finally:
        env.checker = checker


TARGETS = {"parser": parser, "records": records, "relations": relations, "retriever": retriever,
           "lean": lean_answers}


# ---- The command line ----------------------------------------------------------------------------
def fuzz(target, seconds):
    """Run a target for so many seconds, on inputs that reach new lines."""
    import atheris
    for path in REGISTRY.values():  # they are imported late
        pkgutil.resolve_name(path)
    for function in gc.get_objects():
        if type(function) is types.FunctionType and str(function.__module__).startswith(
                ("minragen.", "http.client", "urllib.request")):
            atheris.instrument_func(function)
    corpus, rng = Path(tempfile.mkdtemp()), random.Random(0)  # an input that fails is kept there
    for i in range(300):
        (corpus / f"{i}").write_bytes(rng.randbytes(rng.choice((8, 20, 40, 100, 300))))
    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={corpus}/", "-max_len=2048",
                   f"-max_total_time={seconds}", "-timeout=20", "-print_final_stats=1",
                   "-verbosity=0"],
                  lambda data: TARGETS[target](Source(data)))
    atheris.Fuzz()


def main(what, number):
    if what in TARGETS:
        return fuzz(what, number)
    share = number / (len(REGISTRY) - 0.8 * len(SLOW))
    for name in REGISTRY:
        replies, began = round(share * (0.2 if name in SLOW else 1)), time.monotonic()
        episodes, valid = play_replies(name, replies)
        print(f"{name:12}{replies:8} replies, {valid / replies:4.0%} in their format, "
              f"{episodes:6} episodes, {time.monotonic() - began:5.0f} s", flush=True)
    return None


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("replies", *TARGETS):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
