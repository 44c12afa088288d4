"""Shared by test files: the untrained tiny policy, a scripted model, a server, two lotteries."""

import contextlib
import functools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from minragen.chat import ChatFrame
from minragen.config import preset
from minragen.environments.frozenlake import FrozenLake
from minragen.environments.sokoban import Sokoban
from minragen.envs import IMAGE, SPLITS, Budget, EnvGroups, Observation, TextEnv
from minragen.fast.policies import faster
from minragen.models import Policy
from minragen.rollout import Rules, collect
from minragen.run.groups import env_groups
from minragen.run.tiny import tiny_policy
from minragen.trajectory import Reply


@functools.cache
def tiny(env="frozenlake"):
    """The untrained tiny policy of an environment's preset, never to be changed; its frame."""
    config = preset(env)
    policy = faster(tiny_policy([x for split in SPLITS for x in env_groups(config, split).envs]))
    return policy, ChatFrame(policy.tokenizer, max_new_tokens=config.max_new_tokens)


class Puppet(nn.Module):
    """A decoder that gives all probability at position p to the id script[p]."""

    def __init__(self, vocab_size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.script = {}
        self.config = SimpleNamespace(vocab_size=vocab_size, num_hidden_layers=1,
                                      num_attention_heads=1, num_key_value_heads=1, hidden_size=1,
                                      head_dim=1)
        self.config.get_text_config = lambda: self.config

    def base_model(self, input_ids, position_ids, **kwargs):
        hidden = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for b, row in enumerate(position_ids.tolist()):
            for q, position in enumerate(row):
                hidden[b, q, self.script.get(position + 1, 0)] = 100.0
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self):
        return nn.Identity()


def puppet(tokenizer=None):
    """A policy that follows a script, and its frame, by default with FrozenLake's tokenizer."""
    tokenizer = tokenizer or tiny()[0].tokenizer
    return Policy("puppet", Puppet(len(tokenizer)), tokenizer), ChatFrame(tokenizer)


def replies(answers):
    """Replies of these answers, as EnvGroups takes them."""
    return [Reply(answer=answer) for answer in answers]


def prompt_length(frame, groups):
    """Tokens of the first prompt of the first row at seed 0."""
    return len(frame.first_prompt_ids(frame.system_message(groups.envs[0]), groups.reset(0)[0]))


def scripted(reply, turns=1, room=300, tokenizer=None, cap=None):
    """Play FrozenLake with a puppet whose first reply is the ids `reply`.

    room: tokens after the first prompt      cap: of a reply [the length of `reply`]
    returns: the trajectory, its frame, the length of the first prompt
    """
    policy, frame = puppet(tokenizer)
    groups = EnvGroups("frozenlake", 1, 1, budgets=dict(max_turns=turns))
    start = prompt_length(frame, groups)
    policy.model.script = dict(enumerate(reply, start))
    rules = Rules(max_new_tokens=cap or len(reply), max_context=start + room)
    (trajectory,) = collect(policy, frame, groups, 0, rules)
    return trajectory, frame, start


def sampled(row):
    """The sampled ids of a Sequence."""
    return [i for i, ours in zip(row.tokens, row.response_mask) if ours]


@contextlib.contextmanager
def web_server(answer):
    """The address of a server of `answer(path, body)`: a status, a redirect's address, bytes."""
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # as a WebSocket asks for

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, location, said = answer(self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Location", location)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    class Listening(ThreadingHTTPServer):
        request_queue_size = 64  # a connection that finds no place in the queue waits for a second

        def handle_error(self, *_):
            """A client that has given up."""

    with Listening(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Lottery(TextEnv):
    """Draws rewards and ends at random, in a quarter of the instances the same for all members: an
    untrained network gets episodes of different lengths and returns, and groups of reward std 0."""

    instruction = "Say a word."
    budget = Budget(max_turns=3, max_actions_per_turn=1, max_actions=3)
    defaults = {"prize": 1.0}

    def _reset(self, rng):
        self.number = int(rng.integers(100))
        self.luck = rng if self.number % 4 == 0 else self.dynamics

    def instance_split(self):
        return self.split

    def render(self):
        return f"Ticket {self.number}"

    def step(self, answer):
        self._turns += 1
        reward = float(self.luck.choice([-0.1, 0.0, 0.3, self.options["prize"]]))
        terminated = bool(self.luck.random() < 0.3)
        truncated = not terminated and self.turns_left == 0
        drawn = self.luck.integers(9)
        info = {"success": float(reward == 1.0), "valid": float(drawn > 0), "effective": 1.0}
        self.state = f"Drawn {drawn}"
        return self.state, reward, terminated, truncated, info

    def random_answer(self, rng):
        return "word"


class Faulty(Lottery):
    """A lottery whose third turn fails, and in some instances any turn of any member; the random
    policy, from whose episodes the tokenizer is made, is spared."""

    def step(self, answer):
        unlucky = self._turns == 2 or (self.number % 3 and self.dynamics.random() < 0.4)
        if unlucky and answer != self.random_answer(None):
            raise OSError("the server is gone")
        return super().step(answer)


class Painted(Lottery):
    """A lottery that shows an image of noise in each turn."""

    def image(self):
        return np.random.default_rng([self.number, self._turns]).integers(
            256, size=(16, 16, 3)).astype(np.uint8)

    def step(self, answer):
        text, *rest = super().step(answer)
        return Observation(f"{IMAGE}\n{text}", self.image()), *rest


class Raffle(Lottery):
    """Another such environment, for mixtures."""

    instruction = "Buy a ticket."


class Gone(Lottery):
    """Answers the random policy, from whose episodes the tokenizer is made, and nobody else."""

    def step(self, answer):
        if answer == self.random_answer(None):
            return super().step(answer)
        raise ConnectionError("no answer")


class Lake(FrozenLake):
    """FrozenLake as images, in the contract of all environments."""

    defaults = FrozenLake.defaults | {"view": "image"}


class Room(Sokoban):
    """Sokoban as images and text, in the same."""

    defaults = Sokoban.defaults | {"view": "image+text"}
