"""Random and mutated replies, played through the parser and the environments.

    python tests/fuzz.py replies 100000

Answers of the solver, of the shallow player and of the random policy in the very state, and noise,
are mutated in places, wrapped in one of the formats, and mutated again. Whatever the reply: no
exception, no observation outside its space, no return above the best possible one.
"""

import functools
import math
import random
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from minragen.bundled import tiny_tokenizer  # noqa: E402  the line above finds it
from minragen.chat import FORMATS, ChatFrame  # noqa: E402
from minragen.config import Config, env_groups, preset  # noqa: E402
from minragen.envs import FORMAT_PENALTY, Budget, make  # noqa: E402

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
