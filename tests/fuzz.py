"""Fuzzing of replies and of what reads the text of others.

    python tests/fuzz.py replies 100000    # random and mutated replies in the environments
    python tests/fuzz.py parser 300        # one of TARGETS for 300 seconds, guided by coverage

A target gets bytes, makes an input of them and gives it to the code that reads it. Only a
ValueError with a sentence may come back for the user's own records, and only a RuntimeError for a
server's answer. CONTRIBUTING.md runs all of them, test_fuzz.py a short form.
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

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from minragen.chat import ChatFrame  # noqa: E402
from minragen.config import Config, preset  # noqa: E402
from minragen.environments import board, deepcoder, lean, theorems  # noqa: E402
from minragen.environments.search import RemoteIndex  # noqa: E402
from minragen.envs import FORMAT_PENALTY, REGISTRY, Budget, make  # noqa: E402
from minragen.run.groups import env_groups  # noqa: E402
from minragen.run.tiny import tiny_tokenizer  # noqa: E402  the line above finds it
from minragen.support.formats import FORMATS  # noqa: E402

SLOW = {"deepcoder", "lean"}  # they run programs: a fifth of the replies of another environment


# ---- Replies -------------------------------------------------------------------------------------
# Options to play beside the defaults and tiny's preset.
OPTIONS = {
    "bandit": [{"mixed": True}], "frozenlake": [{"slip": 0.5}, {"size": 6, "view": "grid"}],
    "sokoban": [{"boxes": 2, "rows": 7, "cols": 7, "view": "coord"}],
    "sudoku": [{"allow_conflicts": True, "view": "with_feedback"}, {"hints": True}],
    "countdown": [{"operators": "+-", "budget": Budget(3, 1, 3)}],
    "metamathqa": [{"repeat": False}], "searchqa": [{"reward": "f1"}, {"hops": 1}],
    "webshop": [{"wording": "plain", "show_attrs": True}, {"reward": "binary"}],
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


def play_replies(name, replies, seed=0):
    """Play so many replies in an environment. Returns (episodes, replies in their format).

    Answers of the solver, of the shallow player and of the random policy in the very state, and
    noise, are mutated in places, wrapped in one of the formats, and mutated again. Whatever the
    reply: no exception, no observation outside its space, no return above the best possible one.

    raises: AssertionError naming the reply that broke a promise
    """
    rng, envs, best = random.Random(f"{name} {seed}"), environments(name), {}
    episodes = valid = 0
    over = True
    for _ in range(replies):
        if over:
            which, start = rng.randrange(len(envs)), rng.randrange(20)
            env, response_format = envs[which], rng.choice([*FORMATS])
            if (which, start) not in best:
                best[which, start] = best_return(name, env, start)
            texts, total = [env.system_prompt, env.reset(seed=start)[0]], 0.0
            episodes += 1
        text = random_reply(env, frame_of(response_format), texts, rng)
        try:
            reply, observation, reward, over = play_reply(env, frame_of(response_format), text)
            total += reward
            assert total <= best[which, start] + 1e-9, f"{total} beats {best[which, start]}"
        except Exception as problem:
            raise AssertionError(f"{name} {env.options} {env.budget}, seed {start}: {text[:500]!r} "
                                 f"in {response_format}: {problem!r}") from problem
        texts += [reply.answer, observation]
        valid += reply.valid
    return episodes, valid


def environments(name):
    """The environment by default, with the options of tiny's preset, and with those of OPTIONS."""
    configs = Config(env=name), preset(name)
    return [*(env_groups(config, "train").envs[0] for config in configs),
            *(make(name, **options) for options in OPTIONS[name])]


@functools.cache
def frame_of(response_format):
    return ChatFrame(tiny_tokenizer([make("frozenlake")], response_format), response_format)


def best_return(name, env, seed):
    """The most that an episode from this start can pay: the solver's return, or MOST."""
    if name in MOST:
        return MOST[name](env.options)
    env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        _, reward, *ends, _ = env.step(env.solve()[0])
        total, over = total + reward, any(ends)
    return total


def random_reply(env, frame, texts, rng):
    """A reply for the current state: one of a player's answers or noise, mutated in places."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    answer = rng.choice((lambda: env.solve()[0], lambda: env.shallow_answer(texts),
                         lambda: env.random_answer(numbers), lambda: ""))()
    if rng.random() < 0.6:
        answer = mutated(answer, rng)
    state = mutated(env.describe(), rng)
    text = frame.write({"answer": answer, "reasoning": env.note(), "observation": state,
                        "prediction": state})
    return mutated(text, rng) if rng.random() < 0.5 else text


def mutated(text, rng):
    """The text after 1 to 8 cuts, copies, moves, reversals and insertions."""
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        i, j = sorted(rng.choices(range(len(text) + 1), k=2))
        piece = rng.choice(PIECES) * (2**14 if rng.random() < 0.002 else 1)
        text = rng.choice((
            text[:i] + text[j:], text[:j] + text[i:], text[:i], text[j:] + text[i:j] + text[:i],
            text[:i] + text[i:j][::-1] + text[j:], text[:i] + text[i:j].swapcase() + text[j:],
            *[text[:i] + piece + text[i:], text[:i] + piece + text[j:]] * 3))
    return text


def play_reply(env, frame, text):
    """Play one reply as the rollout does. Returns (parsed reply, observation, reward, over)."""
    reply = frame.parse(text)
    f1s = [env.score_description(reply.observation)]
    observation, reward, terminated, truncated, info = env.step(reply.answer)
    f1s.append(env.score_description(reply.prediction))
    assert observation in env.observation_space, observation
    assert math.isfinite(reward) and all(map(math.isfinite, info.values())), (reward, info)
    assert reply.valid or (reward, info["valid"], info["success"]) == (FORMAT_PENALTY, 0, 0)
    assert all(f1 is None or 0 <= f1 <= 1 for f1 in f1s), f1s
    marks = [frame.between(None, shown).count(frame.end_of_turn) for shown in ("", observation)]
    assert marks[0] == marks[1], "the observation holds a control token"
    return reply, observation, reward, terminated or truncated


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
        {"question": "What is 2+2?", "answer": "4", "original_question": "2?"},
        {"question": "How many percent?", "answer": "So\n#### 1/2"}],
    ("searchqa", "data"): [{
        "question": "Who?", "answer": "Ann", "supporting_facts": [["Ann", 0]],
        "context": [["Ann", ["Ann is.", "She."]]]}, {"question": "Who?", "answer": ["Ann"]}],
    ("searchqa", "corpus"): [{"title": "Ann", "text": "Ann is."}, {"text": "y"}],
    ("webshop", "products"): [{
        "asin": "B01", "name": "Red mug", "query": "mug", "product_category": "Home › Mugs",
        "pricing": "$9.50$12", "customization_options": {"size": [{"value": "Big"}]},
        "full_description": "A mug.", "small_description": ["red"]}],
    ("deepcoder", "data"): [
        {"text": "Add.", "code": "def f(a): return a", "test_list": ["assert f(1) == 1"],
         "test_setup_code": "", "test_imports": ["import math"]},
        {"question": "Echo.", "tests": [{"input": "1", "output": "1"}],
         "solution": "print(input())"},
        {"question": "Add.", "function": "f", "solution": "def f(a): return a + 1",
         "tests": [{"input": [1], "output": 2, "either": True}],
         "examples": [{"input": [2], "output": 3}]}],
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
    """What a Kimina server sends: a verdict, or RuntimeError."""
    env = live("lean")
    env.reset(seed=source.pick(range(8)))
    rows = [{"pos": {"line": 35, "column": 1}, "severity": "error", "data": "unsolved goals\n⊢ p"},
            {"pos": {"line": 39}, "severity": "info", "data": "case a\np : Prop\n⊢ p\n\n⊢ q"},
            {"pos": {"line": 40}, "severity": "info", "data": "'drawn' depends on axioms: []"}]
    checker, env.checker = env.checker, lean.KiminaLean("http://lean", 1.0)
    reply = http_reply(source, {"results": [{"error": None, "response": {
        "messages": rows, "sorries": [{"pos": {"line": 36}}], "message": "m"}}]})
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
