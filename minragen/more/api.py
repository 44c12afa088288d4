"""Play episodes with a model behind an OpenAI-compatible server: vLLM, transformers serve, a cloud.

    python -m minragen.eval --api http://localhost:8000/v1 --api-model NAME --env frozenlake

Environments, system message, reply format and parser are those of training. The server renders the
chat and samples, so there are no logprobs, and no prefix such as `<think>` can be forced: a reply
may begin with the prefix or with what follows it (R1's template opens the thought itself). What
follows `</answer>` is cut off.

Needs `pip install 'openai>=2'`, which retries with growing waits. The key is $OPENAI_API_KEY.
"""

import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from minragen.chat import reply_pattern
from minragen.environments.limits import in_time
from minragen.envs import IMAGE, image_of
from minragen.formats import FORMATS, forced_prefix, system_message
from minragen.more.converse import converse
from minragen.more.vision import data_uri
from minragen.trajectory import Reply, Trajectory

CONCURRENCY = 16  # conversations at a time
ATTEMPTS = 6  # for a request
SECONDS = 120  # without a byte from the server, or for the rest of a reply
DEADLINE = 600  # seconds for a request, with all its tries and the waits that the server asks for
MAX_REPLY = 2**20  # bytes of a reply
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
        try:
            import openai
        except ImportError:
            raise ImportError("--api needs a package: pip install 'openai>=2'") from None
        self.lock, self.stopped = threading.Lock(), threading.Event()
        # More environments at a time would wait for each other within the time limit of a step.
        self.stepping = threading.BoundedSemaphore(os.cpu_count() or 1)
        self.error = openai.OpenAIError
        self.http = openai.DefaultHttpxClient(
            follow_redirects=False, headers={"Accept-Encoding": "identity"},
            event_hooks={"response": [read_bounded]})
        self.client = openai.OpenAI(
            base_url=self.url, api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=ATTEMPTS - 1, timeout=SECONDS, http_client=self.http)
        self.prefix = forced_prefix(self.response_format)
        self.pattern = reply_pattern(FORMATS[self.response_format])

    def collect(self, groups):
        """Play one episode in every row of `groups`: Trajectories without tokens.

        raises: RuntimeError if a request keeps failing, or its answer is no chat completion
        """
        self._refuse_dead_server()
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

    def _refuse_dead_server(self):
        """Raise RuntimeError if nothing answers at the address, before a request is tried again
        with growing waits. Any answer will do."""
        try:
            in_time(5, self.http.get, self.url, timeout=5)
        except Exception as problem:  # of httpx or of httpx2, by openai's version
            if type(problem).__name__ in ("ConnectError", "ConnectTimeout"):
                raise RuntimeError(f"{self.url}: Connection error. {problem}. Is the server "
                                   f"running, and the address right?") from None

    def _play(self, groups, t):
        """Play a conversation, unless another one has failed."""
        def step(rows, replies):
            with self.stepping:
                return groups.step(rows, replies)

        told = groups.attempt(t.row, system_message, groups.envs[t.row], self.response_format,
                              self.max_new_tokens, self.example)
        if isinstance(told, Exception):
            t.fail(told)
            return
        t.system = told
        converse(step, [t], lambda t: None if self.stopped.is_set() else self._reply(t))

    def _reply(self, t):
        """(the reply as history keeps it, the Reply)"""
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
            answer = in_time(
                DEADLINE, self.client.chat.completions.create, model=self.model,
                messages=list(map(with_image, messages)), temperature=self.temperature,
                max_tokens=self.max_new_tokens)
            text, usage = self._text_of(answer.choices[0].message), answer.usage
            sizes = usage and (int(usage.prompt_tokens), int(usage.completion_tokens))
        except self.error as problem:
            said = f"{problem} {problem.__cause__ or ''}".strip()[:300]
            said = "".join(filter(str.isprintable, said))  # no terminal escapes
            raise RuntimeError(f"{self.url}: {said}") from None
        except TimeoutError:
            raise RuntimeError(f"{self.url}: no answer in {DEADLINE} seconds.") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
                ValueError) as problem:
            raise RuntimeError(f"{self.url} does not answer like a chat server: "
                               f"{str(problem)[:300]}") from None
        if sizes:
            t.metrics["reply_tokens"] = t.metrics.get("reply_tokens", 0) + sizes[1]
            with self.lock:
                self.prompt_tokens += sizes[0]
                self.reply_tokens += sizes[1]
        return text

    def _text_of(self, message):
        """The text of a reply. Servers with a reasoning parser have cut the thought out of it; it
        is put back where the format asks for it. Raises TypeError for what is no text"""
        text, thoughts = message.content, [getattr(message, name, None) for name in THOUGHTS]
        if not all(isinstance(part, str | None) for part in (text, *thoughts)):
            raise TypeError(f"its content is {type(text).__name__}, its thought "
                            f"{', '.join(type(thought).__name__ for thought in thoughts)}")
        text, thought = text or "", next(filter(None, thoughts), "").strip()
        if not thought or not self.prefix.startswith(OPEN) or CLOSE in text:
            return text
        thought = thought.removeprefix(OPEN)
        return f"{OPEN}{thought}{'' if CLOSE in thought else CLOSE}{text.removeprefix(OPEN)}"


def with_image(message):
    """The message as the server takes it: its image as a part of its own."""
    content = message["content"]
    if image_of(content) is None:
        return message
    above, _, below = content.partition(IMAGE)
    return {**message, "content": [
        *[{"type": "text", "text": above}] * bool(above),
        {"type": "image_url", "image_url": {"url": data_uri(content.image)}},
        *[{"type": "text", "text": below}] * bool(below)]}


def read_bounded(response):
    """Read a response before httpx does, which has no limit. Raises ValueError beyond ours."""
    if response.headers.get("Content-Encoding", "identity") != "identity":  # it may be a bomb
        raise ValueError("the reply is compressed, which was not asked for.")
    body, deadline = b"", time.monotonic() + SECONDS
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_REPLY or time.monotonic() > deadline:
            raise ValueError(f"the reply has more than {MAX_REPLY} bytes or {SECONDS} seconds.")
    response._content = body
