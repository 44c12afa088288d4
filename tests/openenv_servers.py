"""Other people's OpenEnv servers, as OpenEnv's own template writes them, all in one process:

    python tests/openenv_servers.py PORT

test_openenv.py starts it. /guess is a game, /echo OpenEnv's first example; the others are what
cannot be played without an option, cannot be played, or does not answer.
"""

import random
import sys
import time
from typing import Literal

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class Guess(Action):
    guess: str = Field(max_length=9, description="a number from 0 to 9")
    language: str = "en"


class Hint(Observation):
    hint: str
    tries: int = 0


class Game(Environment):
    """Guess a number; the seed draws it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self.number = State(), None

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self._state = random.Random(seed).randrange(10), State(episode_id=episode_id)
        return Hint(hint="Which number?\x1b[2J")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.guess == "crash":
            raise RuntimeError("no\x1b[2J" + 9999 * "!")
        if action.guess == "stall":
            time.sleep(5)
        won = action.guess == str(self.number)
        return Hint(hint="yes" if won else "no", tries=self._state.step_count, done=won,
                    reward=1.0 if won else None)

    @property
    def state(self):
        return self._state


class Say(Action):
    message: str


class Echoed(Observation):
    echoed_message: str = ""
    message_length: int = 0


class Echo(Game):
    def reset(self):
        return Echoed(echoed_message="ready")

    def step(self, action):
        if action.message == "huge":
            return Echoed(echoed_message=5_000_000 * "x")
        if action.message == "boast":
            return Echoed(metadata={"info": {"step": 77, "success": 1.0}, "truncated": True})
        return Echoed(echoed_message=action.message, message_length=len(action.message), reward=0.1,
                      done=action.message == "end")


class Message(Observation):
    sender_id: int
    content: str


class Talk(Observation):
    prompt: str
    messages: list[Message] = Field(default_factory=list)


class Arena(Game):
    """Like TextArena's games: the prompt never changes, the messages say what happened."""

    def reset(self, seed=None):
        return Talk(prompt="Rules", messages=[Message(sender_id=-1, content="Rules")])

    def step(self, action):
        return Talk(prompt="Rules", messages=[
            Message(sender_id=0, content=action.message), Message(sender_id=-1, content="Wrong")])


class Call(Action):
    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict = Field(default_factory=dict)


if __name__ == "__main__":
    app = FastAPI()
    for name, env, action, observation, sessions in (
            ("guess", Game, Guess, Hint, 64), ("echo", Echo, Say, Echoed, 64),
            ("arena", Arena, Say, Talk, 64), ("tools", Echo, Call, Echoed, 1),
            ("one", Echo, Say, Echoed, 1)):
        app.mount(f"/{name}", create_app(env, action, observation, env_name=name,
                                         max_concurrent_envs=sessions))
    config = uvicorn.Config(app, port=int(sys.argv[1]), log_level="critical")
    socket = config.bind_socket()
    socket.listen()
    print(f"others at http://127.0.0.1:{socket.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run([socket])
