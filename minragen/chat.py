"""How a conversation becomes tokens, once, and how a reply is read.

Reading order: `FORMATS` (what a reply looks like), `ChatFrame` (RAGEN's context manager: text to
tokens without ever rendering history again), `Reply` (a parsed reply).

Differences from RAGEN's `ctx_manager`:
  1. The tokens between two turns are derived once from the tokenizer's own chat template and
     *proved* at start-up: appending must equal rendering. RAGEN looks for "qwen" or "llama-3" in
     the name of the model's folder.
  2. A sampled reply is never decoded, repaired and encoded again. RAGEN rebuilds replies from their
     parsed parts and so trains on tokens that were not sampled.
  3. Templates that remove earlier thoughts (Qwen3) keep them here: history only ever grows.

Tests: `python -m pytest tests/test_models.py -k Chat`.
"""

import re
from dataclasses import dataclass

from minragen.envs import nearest

# RAGEN's two formats, and VAGEN's three, whose thoughts describe what is seen (observation, before
# the answer) and what is expected (prediction, after it).
FORMATS = {
    "free_think": "<think>{reasoning}</think><answer>{answer}</answer>",
    "no_think": "<answer>{answer}</answer>",
    "grounding": "<think><observation>{observation}</observation>"
                 "<reasoning>{reasoning}</reasoning></think><answer>{answer}</answer>",
    "worldmodeling": "<think><reasoning>{reasoning}</reasoning>"
                     "<prediction>{prediction}</prediction></think><answer>{answer}</answer>",
    "grounding_worldmodeling": "<think><observation>{observation}</observation>"
                               "<reasoning>{reasoning}</reasoning>"
                               "<prediction>{prediction}</prediction></think>"
                               "<answer>{answer}</answer>",
}
# What a turn sees: the whole conversation, its last turns, or one message that tells them as text.
CONTEXTS = ("full", "limited", "single_turn")
TAG_TAIL = 12  # tokens that a closing tag can be spread over, and a few more


def format_parts(response_format):
    """The names of a format's parts in order, such as ("reasoning", "answer").

    raises: ValueError for an unknown format
    """
    if response_format not in FORMATS:
        raise ValueError(nearest("response_format", response_format, list(FORMATS)))
    return tuple(re.findall(r"{(\w+)}", FORMATS[response_format]))


def description_parts(response_format):
    """The parts of a format that describe the state: none, one or both."""
    return [p for p in format_parts(response_format) if p in ("observation", "prediction")]


@dataclass(frozen=True)
class Reply:
    """A parsed reply. `valid`: all parts of the format were there, in order; else all are empty."""

    reasoning: str = ""
    answer: str = ""
    valid: bool = False
    observation: str = ""
    prediction: str = ""


class ChatFrame:
    """Turns text into tokens by rules that are derived from the chat template once.

    The forced prefix is everything before the first free choice: `<think>` (free_think),
    `<answer>` (no_think), `<think><observation>` or `<think><reasoning>`. It is part of the prompt
    and never in the response mask. `end_ids` are the ids with which the model ends its own turn.

    raises: ValueError if appending does not reproduce the template's own rendering
    """

    def __init__(self, tokenizer, response_format="free_think"):
        self.parts = format_parts(response_format)
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use an instruction-tuned model.")
        self.tokenizer, self._format = tokenizer, FORMATS[response_format]
        self.instruction = format_instructions(response_format)
        self.thinks = "reasoning" in self.parts
        self.describes = bool(description_parts(response_format))
        self.prefix = self._format.partition("{")[0]
        self._pattern = _pattern(self._format)
        self._specials = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._closers = {i for i, name in enumerate(names) if ">" in (name or "")}
        self._derive()
        self._prove()

    def system_message(self, env):
        """The environment's prompt, the format instructions, and how states are described."""
        lines = [self._plain(env.system_prompt), self.instruction]
        if self.describes:
            lines.append(env.description_language)
        return "\n".join(lines)

    def open(self, system, observation):
        """Ids up to and including the forced prefix of the first reply."""
        return self.encode(f"{self._head}{system}{self._to_user}{self._plain(observation)}"
                           f"{self._to_reply}{self._forced}")

    def between(self, last_id, observation):
        """Ids after a reply ending in `last_id`, through the next one's forced prefix.

        A reply without its end-of-turn id gets one here, which is not in the loss.
        """
        ids = self.encode(f"{self._after_reply}{self._plain(observation)}{self._to_reply}"
                          f"{self._forced}")
        return ids[1:] if last_id is not None and last_id == self.end_of_turn else ids

    def write(self, parts):
        """What a policy would have sampled for these parts (name -> text); others are ignored."""
        return self._format.format_map(parts)[len(self.prefix):]

    def parse(self, text):
        """Read sampled text, without the forced prefix and the end-of-turn token, as a Reply."""
        found = self._pattern.match(self.prefix + text)
        if not found:
            return Reply()
        return Reply(**{part: text.strip() for part, text in found.groupdict().items()}, valid=True)

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def completes(self, ids, tag="</answer>"):
        """Whether the last of `ids` completed a closing tag.

        Tokenizers merge "</", "answer" and ">" with their neighbours as they like, so the tag is
        looked for in text, and only if the last id has a ">" in it, which is cheap to see.
        """
        return ids[-1] in self._closers and tag in self.tokenizer.decode(ids[-TAG_TAIL:])

    def find_tag(self, ids, tag):
        """The index of the first id that a closing tag touches, None without the tag."""
        for end in range(1, len(ids) + 1):
            if self.completes(ids[max(0, end - TAG_TAIL):end], tag):
                # The latest start from which the ids still spell the whole tag.
                return next(start for start in range(end - 1, -1, -1)
                            if tag in self.tokenizer.decode(ids[start:end]))
        return None

    def _plain(self, text):
        """Observations are data: a special token in one must not open or close a turn."""
        for special in self._specials:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    def _derive(self):
        """Render four marked messages and keep the text between the marks."""
        marks = ["S0MARK", "U1MARK", "A1MARK", "U2MARK"]
        roles = ["system", "user", "assistant", "user"]
        try:
            text = self._render([dict(role=r, content=m) for r, m in zip(roles, marks)])
            self.has_system = True
        except Exception as error:  # templates raise jinja errors of their own for unknown roles
            if "system" not in str(error).lower():
                raise
            text = self._render([dict(role=r, content=m) for r, m in zip(roles[1:], marks[1:])])
            text = text.replace("U1MARK", "S0MARK\n\nU1MARK")
            self.has_system = False
        parts = re.split("|".join(marks), text)
        if len(parts) != 5 or parts[2] != parts[4]:
            raise ValueError("the chat template does not render four messages as four plain "
                             "blocks, so turns cannot be appended to it.")
        self._head, self._to_user, self._to_reply, self._after_reply, _ = parts
        # A template may open the thought itself (R1): the rest of the prefix is forced.
        given = next((n for n in range(len(self.prefix), 0, -1)
                      if self._to_reply.rstrip().endswith(self.prefix[:n])), 0)
        self._forced = self.prefix[given:]
        after = self.encode(self._after_reply)
        self.end_of_turn = (after[0] if after and after[0] in self.tokenizer.all_special_ids
                            else None)
        eos = self.tokenizer.eos_token_id
        self.end_ids = {i for i in (self.end_of_turn, eos) if i is not None}

    def _prove(self):
        """Check that appended ids spell what the template renders; raise ValueError otherwise."""
        reply, system = self.write(dict.fromkeys(self.parts, " fine")), f"rules\n{self.instruction}"
        appended = (self.open(system, "state 1") + self.encode(reply)
                    + self.between(None, "state 2"))
        messages = [dict(role="user", content="state 1"), dict(role="assistant", content="REPLY"),
                    dict(role="user", content="state 2")]
        if self.has_system:
            messages.insert(0, dict(role="system", content=system))
        else:
            messages[0]["content"] = f"{system}\n\nstate 1"
        rendered = self._render(messages).replace("REPLY", self._forced + reply) + self._forced
        if self.tokenizer.decode(appended) != self.tokenizer.decode(self.encode(rendered)):
            raise ValueError("appending a turn does not reproduce the chat template's rendering; "
                             "this tokenizer or template cannot be used for multi-turn training.")

    def _render(self, messages):
        return self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                  add_generation_prompt=True)


def format_instructions(response_format):
    """The format instructions in the system message."""
    form = FORMATS[response_format].format(
        observation=" what you see", reasoning=" your thoughts",
        prediction=" what you will see after the answer", answer=" your answer")
    return f"Reply in this form and no other:\n{form}"


def _pattern(form):
    """The regular expression of a format: only blanks may stand between two adjacent tags.

    Each part ends where the tags that follow it first occur. An atomic group (?>...) never
    backtracks: otherwise costs multiply in a reply full of closing tags.
    """
    opening, *rest = re.split(r"({\w+})", form)
    pattern = re.escape(opening)
    for part, tags in zip(rest[::2], rest[1::2]):
        blanks_allowed = tags.replace("><", r">\s*<")
        pattern += f"(?>(?P<{part[1:-1]}>.*?){blanks_allowed})"
    return re.compile(pattern, re.DOTALL)
