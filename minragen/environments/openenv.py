"""OpenEnv: play any server of text as a TextEnv, and serve any TextEnv (docs/openenv.md).

    python -m minragen serve --env sokoban --port 8000
    python -m minragen play openenv:http://127.0.0.1:8000
"""

import asyncio
import functools
import json
import re
import threading
import weakref
import zlib
from dataclasses import replace

import numpy as np

from minragen import envs
from minragen.environments import limits
from minragen.environments.limits import ServerGone
from minragen.environments.search import MAX_REPLY, fetch, one_line
from minragen.envs import Budget

try:
    import uvicorn  # noqa: F401  for look/serve.py; the message below covers it
    import websockets.asyncio.client
    from openenv import core
    from openenv.core.env_server.types import EnvironmentMetadata
    from starlette.responses import PlainTextResponse
    from starlette.websockets import WebSocketClose
    from websockets.exceptions import ConnectionClosed
except ImportError:
    raise ImportError("OpenEnv needs a package: pip install 'openenv>=0.10,<0.11'") from None

MAX_ANSWER = 2**20  # bytes of an answer that our server reads
MAX_SESSIONS = 1024  # of our server: a run has one for each row of training, validation and test
LOOPBACK = ["127.0.0.1", "localhost", "[::1]"]  # as the header Host writes them
OURS = "minragen"  # the author that our server names
websockets.asyncio.client.MAX_REDIRECTS = 1  # tries, the first included: no redirect is followed


class OpenEnv(envs.TextEnv):
    """An environment behind an OpenEnv server whose actions and observations hold text.

    Each object is a session, opened by its first reset. The server gives the prompt (its
    description), observations, rewards and the end; `budget` only bounds an episode.

    raises: ServerGone if a reset has no connection. A step raises RuntimeError, since its episode
        was in the session.
    """

    budget = Budget(max_turns=100, max_actions_per_turn=1, max_actions=100)
    parallel = True
    defaults = {"action": "", "observation": "", "instruction": "", "success": 1.0}

    def __init__(self, url, /, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"bad server {url!r}: expected openenv:http://host:port.")
        self.url = url.rstrip("/")
        schema, self.alias, description, self.ours = described(self.url)
        self._answer, self._shown = (self._fields(what, **schema[what]) for what in schema)
        if more := schema["action"]["required"] - {*self._answer}:
            raise ValueError(f"{self.url}: an action needs more than a text: {sorted(more)}.")
        self.instruction = self.options["instruction"] or description
        self._loop, self._client = event_loop(), core.GenericEnvClient(
            self.url, message_timeout_s=limits.STEP_TIME_LIMIT,
            max_message_size_mb=MAX_REPLY / 2**20)
        close = self._client.close  # when self is collected, without waiting
        weakref.finalize(self, self._loop.call_soon_threadsafe,
                         lambda: asyncio.ensure_future(close())).atexit = False

    def _fields(self, what, known, texts, required):
        """The names of the fields that are text: as the option says, else the only one."""
        if not texts or "tool_name" in known:  # the latter is a call of a tool (MCP)
            raise ValueError(f"{self.url}: no field of its {what}s is text, but a language model "
                             f"can only play with text: {', '.join(known)}.")
        texts = [name for name in texts if name in required and what == "action"] or texts
        given = self.options[what].split(",") if self.options[what] else texts[:1]
        if not {*given} <= {*known} or len(texts) > 1 and not self.options[what]:
            raise ValueError(f"{self.url}: which field of its {what}s is the text? Give --env-arg "
                             f"{what}=NAME: {', '.join(texts)}.")
        return given

    @property
    def system_prompt(self):
        return self.instruction

    def render(self):
        return "\n".join(text_of(self._result.observation.get(name)) for name in self._shown)

    @property
    def state(self):
        """What the server shows, without the lines that our own one adds to a state."""
        return re.sub(r"^(Reward|Turns left): .*\n?", "", self.render(), flags=re.MULTILINE)

    def reset(self, *, seed=0, options=None):
        """Ask for an episode. The seed that is sent is the same for all members of a group, differs
        between splits, and has 31 bits, since servers hand it to NumPy. Our own server reads the
        other arguments instead, and plays exactly the local episode."""
        drawn = zlib.crc32(f"{self.split} {seed}".encode()) >> 1
        self._result = self._ask("reset", seed=drawn, split=self.split, instance=seed,
                                 member=(options or {}).get("member", 0))
        self._session, self._turns, self._actions = self._client._ws, 0, 0
        return self.render(), {"success": 0.0, "valid": 1.0, "effective": 0.0}

    def step(self, answer):
        """Play one turn. An answer that the server's schema refuses costs the format penalty;
        so does an empty answer, unless the server is ours, which judges it."""
        self._turns, self._actions, said = self._turns + 1, self._actions + 1, ""
        result = None
        if self.ours or answer.strip():
            result = self._ask("step", dict.fromkeys(self._answer, answer))
        valid = float(result is not None)
        if not valid:
            said = "No valid action was given.\n"
            result = replace(self._result, reward=envs.FORMAT_PENALTY, metadata={})
        if self._client._ws is not self._session:  # the client opens another without a word
            raise RuntimeError(f"{self.url}: the session was lost.")
        self._result, more = result, result.metadata if self.ours else {}
        reward, done = float(result.reward or 0.0), bool(result.done)
        truncated = bool(more.get("truncated")) if done else self.actions_left == 0
        success = float(done and reward >= self.options["success"])
        info = {"success": success, "valid": valid, **more.get("info", {})}
        return said + self.render(), reward, done and not truncated, truncated, info

    def _ask(self, call, *arguments, **named):
        """The StepResult of a call of the client, None if the server's schema refuses it."""
        async def answer():
            return await getattr(self._client, call)(*arguments, **named)

        try:
            return asyncio.run_coroutine_threadsafe(answer(), self._loop).result()
        except Exception as error:  # of the server, the client or the connection
            if call == "step" and str(error).endswith("(code: VALIDATION_ERROR)"):
                return None
            said = one_line(str(error))[:300] or f"no answer in {limits.STEP_TIME_LIMIT:g} seconds"
            gone = call == "reset" and isinstance(error, (ConnectionError, ConnectionClosed))
            raise (ServerGone if gone else RuntimeError)(f"{self.url}: {said}") from None


@functools.cache
def event_loop():
    """The loop of all connections, in a thread. One for each would take three more open files."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@functools.cache
def described(url):
    """A server's fields, {"action": ..., "observation": ...}, the name that its episodes have in
    metrics, its description, and whether it is ours.

    raises: ServerGone if it does not answer as OpenEnv does
    """
    try:
        schema, about = (fetch(f"{url}/{page}", limits.STEP_TIME_LIMIT / 2)
                         for page in ("schema", "metadata"))
        parts = {}
        for what, kinds in (("action", {"string"}), ("observation", {"string", "array"})):
            known = {name: field for name, field in schema[what]["properties"].items()
                     if name not in ("metadata", "done", "reward")}
            texts = [name for name, field in known.items() if any(
                kind in kinds for form in [field, *field.get("anyOf", [])]
                for kind in np.ravel(form.get("type")))]
            parts[what] = dict(known=[*known], texts=texts,
                               required={*schema[what].get("required", [])})
        ours, name = about.get("author") == OURS, one_line(str(about["name"]))
        return (parts, name if ours else f"openenv:{name.replace('/', '.')}",
                text_of(about["description"]), ours)
    except Exception as problem:  # of the connection, or of what it says
        raise ServerGone(f"{url} does not answer like an OpenEnv server: "
                         f"{one_line(str(problem))[:300]}. Is it running?") from None


def text_of(value):
    """A field as text, without terminal escapes: a line for each item of a list; of a chat message
    its content."""
    if isinstance(value, list):
        return "\n".join(map(text_of, value))
    if isinstance(value, dict) and "content" in value:
        return text_of(value["content"])
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


# ---- The server ----------------------------------------------------------------------------------
class TextAction(core.Action):
    message: str


class TextObservation(core.Observation):
    text: str


class Served(core.Environment):
    """A session of our server (look/serve.py). build(split=) -> TextEnv, called `name`"""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = None  # the base's is a property

    def __init__(self, name, build):
        super().__init__()
        self._name, self._build, self.state = name, functools.cache(build), core.State()
        self._env = self._build(split="train")

    def reset(self, seed=None, episode_id=None, split="train", member=0, instance=None):
        self._env, self.state = self._build(split=split), core.State(episode_id=episode_id)
        text, info = self._env.reset(seed=seed if instance is None else instance,
                                     options={"member": member})
        return TextObservation(text=text, metadata={"info": info})

    def step(self, action, timeout_s=None):
        self.state.step_count += 1
        text, reward, terminated, truncated, info = self._env.step(action.message)
        return TextObservation(text=text, reward=reward, done=terminated or truncated,
                               metadata={"info": info, "truncated": truncated})

    def get_metadata(self):
        return EnvironmentMetadata(name=self._name, description=self._env.system_prompt,
                                   author=OURS)


def application(name, build, local):
    """The ASGI app that serves the environment `name`, which `build()` makes, to many sessions.

    It is open to WebSockets and GET only. On a `local` address it is also closed to web pages that
    are open on this machine: they send an Origin or (DNS rebinding) a foreign Host.
    """
    app = core.create_app(
        functools.partial(Served, name, build), TextAction, TextObservation, env_name=name,
        max_concurrent_envs=MAX_SESSIONS)

    async def answer(scope, receive, send):
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        host = re.sub(r":\d*$", "", headers.get(b"host", ""))
        if local and scope["type"] != "lifespan" and (b"origin" in headers or host not in LOOPBACK):
            said = "not for web pages"
        elif scope.get("method", "GET") != "GET":  # a POST's episode would end with it
            said = "play at /ws"
        else:
            return await app(scope, receive, send)
        refusal = (WebSocketClose() if scope["type"] == "websocket" else
                   PlainTextResponse(said, 403))
        return await refusal(scope, receive, send)

    return answer
