"""Play episodes with a model behind an OpenAI-compatible server: vLLM, transformers serve, a cloud.

    python -m minragen.eval --api http://localhost:8000/v1 --api-model NAME --env frozenlake

Environments, system message, reply format and parser are those of training. The server renders the
chat and samples, so there are no logprobs, and no prefix such as `<think>` can be forced: a reply
may begin with the prefix or with what follows it (R1's template opens the thought itself). What
follows `</answer>` is cut off.

The key is $OPENAI_API_KEY. No proxy is used.
"""

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from minragen.environments.search import fetch, one_line
from minragen.envs import IMAGE, image_of
from minragen.more.converse import converse
from minragen.more.vision import data_uri
from minragen.support.formats import FORMATS, forced_prefix, reply_pattern, system_message
from minragen.trajectory import Reply, Trajectory

CONCURRENCY = 16  # conversations at a time
PAUSES = (0.5, 1, 2, 4, 8, float("inf"))  # seconds after each failed try; inf: it was the last
SECONDS = 600  # for a request, with all its tries and the waits that the server asks for
THOUGHTS = ("reasoning_content", "reasoning")  # where reasoning parsers put the thought
OPEN, CLOSE = "<think>", "</think>"


@dataclass
class Server:
    """A model behind a server, how it is asked, and the tokens that the server has counted."""

    url: str
    model: str
    response_format: str = "free_think"
    max_new_tokens: int = 128
    temperature: float = 0.5
    example: bool = False
    prompt_tokens: int = 0  # as the server counted them
    reply_tokens: int = 0

    def __post_init__(self):
        self.lock, self.stopped = threading.Lock(), threading.Event()
        # More steps at a time than cores would slow each other down, up to their time limit.
        self.stepping = threading.BoundedSemaphore(os.cpu_count() or 1)
        self.prefix = forced_prefix(self.response_format)
        self.pattern = reply_pattern(FORMATS[self.response_format])

    def collect(self, groups):
        """Play one episode in every row of `groups`: Trajectories without tokens.

        raises: RuntimeError if a request keeps failing, or its answer is no chat completion
        """
        trajectories = [Trajectory.begin(groups, *row) for row in enumerate(groups.reset(0))]
        self.stopped.clear()
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            played = [pool.submit(self._play, groups, t) for t in trajectories if not t.error]
            try:
                wait(played, return_when=FIRST_EXCEPTION)
            finally:  # after an error the others end with the turn that they are in
                self.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
            for future in played:
                future.result()
        return trajectories

    def _play(self, groups, t):
        """Play a conversation, unless another one has failed."""
        def step(rows, replies):
            with self.stepping:
                return groups.step(rows, replies)

        told = groups.attempt(t.env_index, system_message, groups.envs[t.env_index],
                              self.response_format, self.max_new_tokens, self.example)
        if isinstance(told, Exception):
            t.fail(told)
            return
        t.system = told
        converse(step, [t], lambda t: None if self.stopped.is_set() else self._reply(t))

    def _reply(self, t):
        """(the text that later turns show, the parsed Reply)"""
        text = self._ask(t)
        found = self.pattern.match(text.lstrip()) or self.pattern.match(self.prefix + text)
        if not found:
            return text, Reply()
        return found[0], Reply(valid=True, **{
            part: words.strip() for part, words in found.groupdict().items()})

    def _ask(self, t):
        """The text of the model's next message; its tokens are counted if the server tells them."""
        messages = [*t.messages(), {"role": "user", "content": t.observation}]
        try:
            answer = fetch(
                f"{self.url.rstrip('/')}/chat/completions", SECONDS, {
                    "model": self.model, "messages": list(map(with_image, messages)),
                    "temperature": self.temperature, "max_tokens": self.max_new_tokens},
                PAUSES, Authorization=f"Bearer {os.environ.get('OPENAI_API_KEY') or 'none'}")
            text, usage = self._text_of(answer["choices"][0]["message"]), answer.get("usage")
            sizes = usage and (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        except Exception as problem:  # of the connection, or of what it says
            raise RuntimeError(f"{self.url} does not answer like a chat server: "
                               f"{one_line(str(problem))[:300]}. Is it running, and the address "
                               f"right?") from None
        if sizes:
            t.metrics["reply_tokens"] = t.metrics.get("reply_tokens", 0) + sizes[1]
            with self.lock:
                self.prompt_tokens += sizes[0]
                self.reply_tokens += sizes[1]
        return text

    def _text_of(self, message):
        """The text of a reply. Servers with a reasoning parser have cut the thought out of it; it
        is put back where the format asks for it. Raises TypeError for what is no text"""
        text, *thoughts = (message.get(name) or "" for name in ("content", *THOUGHTS))
        thought = next(filter(None, thoughts), "")
        if not (isinstance(text, str) and isinstance(thought, str)):
            raise TypeError("its content is no text")
        thought = thought.strip()
        if not thought or not self.prefix.startswith(OPEN) or CLOSE in text:
            return text
        thought = thought.removeprefix(OPEN)
        return f"{OPEN}{thought}{'' if CLOSE in thought else CLOSE}{text.removeprefix(OPEN)}"


def with_image(message):
    """The message as the server takes it: its image as a part of its own."""
    content = message["content"]
    if image_of(content) is None:
        return message
    above, below = ({"type": "text", "text": text} for text in content.split(IMAGE))
    image = {"type": "image_url", "image_url": {"url": data_uri(content.image)}}
    return {**message, "content": [p for p in (above, image, below) if p.get("text") != ""]}
