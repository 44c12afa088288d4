"""Conversations: how they are stored, how they become tokens, once, and how a reply is parsed.

Reading order: `FORMATS` (what a reply looks like), `Reply` (a parsed reply), `Trajectory` (a
conversation with an environment), `ChatFrame` (RAGEN's context manager: text to tokens without ever
rendering history again).

Differences from RAGEN's `ctx_manager`:
  1. The tokens between two turns are derived once from the tokenizer's own chat template and
     *proved* at start-up: appending must equal rendering. RAGEN looks for "qwen" or "llama-3" in
     the name of the model's folder.
  2. A sampled reply is never decoded, repaired and encoded again. RAGEN rebuilds replies from their
     parsed parts and so trains on tokens that were not sampled.
  3. Templates that remove earlier thoughts (Qwen3, R1) keep them here: history only ever grows.

Tests: `python -m pytest tests/test_chat.py`.
"""

import re
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from functools import lru_cache

from minragen.envs import IMAGE, image_of
from minragen.options import nearest

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
DESCRIPTIONS = {"observation": "The observation says what you see.",
                "prediction": "The prediction says what you will see after the answer."}
# What a turn sees: the whole conversation, its last turns, or one message that tells them as text.
CONTEXTS = ("full", "limited", "single_turn")
DATE = date(2024, 7, 26)  # for templates that print today's; the default of Llama 3's own
# Averaged over an episode's turns; other metrics are summed.
PER_TURN = {"valid", "effective", "grounding", "worldmodeling"}
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


class StopReason(Enum):
    """Why a reply ended (END_OF_TURN to CONTEXT) or an episode (CONTEXT to ENV_ERROR)."""

    END_OF_TURN = "end_of_turn"  # the model sampled its end-of-turn token
    ANSWER = "answer"  # the reply closed its </answer>
    MAX_NEW_TOKENS = "max_new_tokens"  # the reply used up its tokens
    CONTEXT = "context"  # no room for another token or another observation
    TERMINATED = "terminated"  # the environment reached an end
    TRUNCATED = "truncated"  # turns or actions ran out
    ENV_ERROR = "env_error"  # the environment failed: counted, and left out of all else


@dataclass
class Turn:
    """One reply and what came of it. `text` is the reply decoded, for people only."""

    observation: str
    text: str
    reply: Reply
    reward: float
    stop: StopReason


@dataclass
class Sequence:
    """One row of a batch: parallel lists, appended to and never edited."""

    tokens: list = field(default_factory=list)
    response_mask: list = field(default_factory=list)  # True iff the id came out of our sampler
    turn_ids: list = field(default_factory=list)  # turn of a sampled token, else -1
    # Nats at the sampling temperature, before truncation by top_k or top_p, so that the learner can
    # compute the same quantity; 0.0 where not sampled.
    sample_logprobs: list = field(default_factory=list)
    advantages: list = field(default_factory=list)  # empty if its group was not trained on

    def add(self, ids, logprobs, sampled, turn):
        self.tokens += ids
        self.sample_logprobs += logprobs
        self.response_mask += [sampled] * len(ids)
        self.turn_ids += [turn] * len(ids)


@dataclass
class Trajectory:
    """One episode. `sequences`: the whole conversation, or in the windowed contexts one Sequence
    per turn that holds all that this turn saw."""

    env: str
    seed: int
    group_id: int
    member: int
    row: int = 0  # of its EnvGroups
    system: str = ""
    observation: str = ""  # the one that the next reply answers
    sequences: list = field(default_factory=lambda: [Sequence()])
    turn_rewards: list = field(default_factory=list)
    turns: list = field(default_factory=list)
    stop: StopReason | None = None
    error: str = ""  # what the environment raised; then `stop` is ENV_ERROR
    fault: object = None  # the same with the line of code, where look/faults.py has found it
    success: bool = False
    metrics: dict = field(default_factory=dict)

    @classmethod
    def begin(cls, groups, row, observation):
        """The fresh episode of a row of EnvGroups. observation: of its reset, or the exception"""
        group, member = divmod(row, groups.group_size)
        t = cls(groups.envs[row].alias or groups.names[group], groups.seeds[group],
                groups.numbers[group], member, row)
        if isinstance(observation, Exception):
            t.fail(observation)
        else:
            t.observation = observation
        return t

    @property
    def tokens(self):
        """All ids that the last turn saw or sampled."""
        return self.sequences[-1].tokens

    @property
    def episode_return(self):
        return sum(self.turn_rewards)

    @property
    def response_tokens(self):
        return sum(sum(sequence.response_mask) for sequence in self.sequences)

    def fail(self, exception):
        """End the episode because its environment raised."""
        self.stop, self.error = StopReason.ENV_ERROR, f"{type(exception).__name__}: {exception}"
        self.fault = getattr(exception, "fault", None)

    def add_prompt(self, ids):
        """Append ids that were not sampled: prompt, framing, observation."""
        self.sequences[-1].add(ids, [0.0] * len(ids), False, -1)

    def add_reply(self, ids, logprobs, turn):
        """Append the ids of reply number `turn` with the logprobs they were sampled with."""
        self.sequences[-1].add(ids, logprobs, True, turn)

    def end_turn(self, text, reply, stop, outcome):
        """Note what a reply did. outcome: of EnvGroups.step, which may be an exception"""
        if isinstance(outcome, Exception):
            self.fail(outcome)
            outcome = self.error, 0.0, False, False, {}
        observation, reward, terminated, truncated, info = outcome
        self.turns.append(Turn(self.observation, text, reply, reward, stop))
        self.turn_rewards.append(reward)
        self.observation, self.success = observation, self.success or info.get("success", 0) > 0
        for name, value in info.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if terminated or truncated:
            self.stop = StopReason.TERMINATED if terminated else StopReason.TRUNCATED

    def end(self):
        """Divide the metrics of PER_TURN, summed so far, by the number of turns."""
        for name in PER_TURN & self.metrics.keys():
            self.metrics[name] /= len(self.turns)

    def messages(self):
        """The conversation as chat messages, for people and for JSONL."""
        chat = [{"role": "system", "content": self.system}]
        for turn in self.turns:
            chat += [{"role": "user", "content": turn.observation},
                     {"role": "assistant", "content": turn.text}]
        return chat


def converse(step, trajectories, player):
    """Play fresh Trajectories to their ends with a player that samples no tokens here: a person, a
    script, a model behind a server.

    step: (rows, Replies) -> outcomes, as EnvGroups.step
    player: Trajectory -> (text, Reply), or None to leave the conversation as it is
    """
    while said := [(t, *turn) for t in trajectories if not t.stop and (turn := player(t))]:
        outcomes = step([t.row for t, _, _ in said], [reply for _, _, reply in said])
        for (t, text, reply), outcome in zip(said, outcomes):
            t.end_turn(text, reply, StopReason.END_OF_TURN, outcome)
            if t.stop:
                t.end()


class ChatFrame:
    """Turns text into tokens by rules that are derived from the chat template once.

    The forced prefix is everything before the first free choice: `<think>` (free_think),
    `<answer>` (no_think), `<think><observation>` or `<think><reasoning>`. It is part of the prompt
    and never in the response mask.

    end_ids: the model's `generation_config.eos_token_id`: one id, several or None. The attribute
        of this name adds the tokenizer's eos and the token with which the template ends a reply.
    max_new_tokens: the limit that the system message tells; 0: none
    image_store: the images of a policy that sees
    raises: ValueError if the template cannot be appended to
    """

    appends = True  # a prompt goes on where the last reply ended; in more/windows.py it begins anew

    def __init__(self, tokenizer, response_format="free_think", end_ids=None, max_new_tokens=0,
                 image_store=None):
        self.parts, self.image_store = format_parts(response_format), image_store
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use an instruction-tuned model.")
        self.tokenizer, self._format = tokenizer, FORMATS[response_format]
        self._ids = lru_cache(4096)(self._ids)  # members of a group see much alike
        self._line = self._ids("\n")
        self._template = re.sub(  # "today" is DATE: a resumed run plays the same prompts
            r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
            lambda found: repr(DATE.strftime(found[2])), tokenizer.get_chat_template())
        self.instruction = format_instructions(response_format, max_new_tokens)
        self.thinks = "reasoning" in self.parts
        self.describes = bool(description_parts(response_format))
        self.prefix = self._format.partition("{")[0]
        self._pattern = reply_pattern(self._format)
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._closers = {i for i, name in enumerate(names) if ">" in (name or "")}
        first = None
        # Gemma 2 has no system role, Mistral's moves with the turns; vision-language models may
        # read lists of parts alone.
        for has_system, in_parts in ((True, False), (False, False), (True, True), (False, True)):
            try:
                self._derive(has_system, in_parts)
                break
            except ValueError as problem:
                first = first or problem
        else:
            raise first
        end_ids = end_ids if isinstance(end_ids, (list, tuple)) else [end_ids]
        self.end_ids = {self.end_of_turn, tokenizer.eos_token_id, *end_ids} - {None}

    def system_message(self, env):
        """The environment's prompt, the format instructions, and how states are described."""
        lines = [self._plain(env.system_prompt), self.instruction]
        if self.describes:
            lines.append(env.description_language)
        return "\n".join(lines)

    def first(self, env, observation):
        """(system message, ids of the first prompt) of an episode."""
        system = self.system_message(env)
        return system, self.open(system, observation)

    def next(self, trajectory, rules):
        """Append the prompt of the next turn. Returns False if that leaves no room for a reply."""
        ids = self.between(trajectory.tokens[-1], trajectory.observation)
        fits = len(trajectory.tokens) + len(ids) < rules.max_context
        if fits:
            trajectory.add_prompt(ids)
        return fits

    def open(self, system, observation):
        """Ids up to and including the forced prefix of the first reply."""
        return self._with_reply(self._ids, f"{self._head}{system}{self._to_user}", observation)

    def between(self, last_id, observation):
        """Ids after a reply ending in `last_id`, through the next one's forced prefix.

        A reply without its end-of-turn id gets one here, which is not in the loss.
        """
        ids = self._with_reply(self.encode, self._after_reply, observation)
        ended = last_id is not None and last_id == self.end_of_turn
        return ids[ids.index(last_id) + 1:] if ended else ids

    def _with_reply(self, encode, before, observation):
        """Ids of a text, an observation and the opening of the reply to it. The ids of an image
        replace its placeholder."""
        if (image := image_of(observation)) is None:
            return encode(f"{before}{self._plain(observation)}{self._to_reply}")
        if self.image_store is None:
            raise ValueError("the observations have images and this model reads only text: use a "
                             "vision-language model, or a view without images.")
        above, _, below = observation.partition(IMAGE)
        return [*encode(before + self._plain(above)), *self.image_store.ids_of(image),
                *self.encode(self._plain(below) + self._to_reply)]

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
        """Ids of a text that follows another, so SentencePiece must not put a blank before it."""
        line, ids = self._line, self._ids(f"\n{text}")
        return ids[len(line):] if ids[:len(line)] == line else self._ids(text)

    def _ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def completes(self, ids, tag="</answer>"):
        """Whether the last of `ids` completed a closing tag.

        Tokenizers merge "</", "answer" and ">" with their neighbours as they like, so the tag is
        looked for in text, and only if the last id has a ">" in it, which is cheap to see.
        """
        return ids[-1] in self._closers and tag in self.tokenizer.decode(ids[-TAG_TAIL:])

    def _plain(self, text):
        """Observations are data: a blank inside a control token makes it ordinary text."""
        while self._control.search(text):  # again, since the new text may hold another one
            text = self._control.sub(lambda m: re.sub(r"\S", r"\g<0> ", m[0], count=1), text)
        return text

    def _derive(self, has_system, in_parts):
        """Find the texts around messages, and prove that every turn is rendered with them.

        Only what stands before a finished reply may differ from the generation prompt: Mistral's
        has one blank more, R1's lacks the opened thought. History keeps what the model saw.
        """
        def after(text, n):
            return text.partition(f"mark{n}")[2].partition(f"mark{n + 1}")[0]

        opened, whole = (self._render([f"mark{i}" for i in range(n)], has_system, in_parts)
                         for n in (2, 6))
        head, to_user, to_reply = opened.partition("mark0")[0], after(opened, 0), after(opened, 1)
        shown, after_reply = after(whole, 1), after(whole, 2)
        if whole != (f"{head}mark0{to_user}mark1{shown}mark2{after_reply}mark3{shown}mark4"
                     f"{after_reply}mark5{to_reply}") or not (
                         shown.startswith(to_reply) or to_reply.startswith(shown)):
            raise ValueError("the chat template does not render every turn in the same way, so "
                             "turns cannot be appended to it.")
        more = shown[len(to_reply):]
        to_reply += "" if "<think>" in more else more  # GLM-4.5 shows an empty thought
        if to_reply.rstrip().endswith("<think>") and not self.thinks:  # R1: close the thought
            to_reply += "\n</think>\n\n"
        # Where the template opens the thought itself (R1), the rest of the prefix is forced.
        given = next((n for n in range(len(self.prefix), 0, -1)
                      if to_reply.rstrip().endswith(self.prefix[:n])), 0)
        self._head, self._to_user, self._after_reply = head, to_user, after_reply
        self._to_reply = to_reply + self.prefix[given:]
        self._find_control_tokens(whole)
        pieces = self.open("rules", "state 1") + self.between(None, "state 2")
        at_once = self._ids(f"{head}rules{to_user}state 1{self._to_reply}{after_reply}state 2"
                            f"{self._to_reply}")
        if self.tokenizer.decode(pieces) != self.tokenizer.decode(at_once):
            raise ValueError("the tokenizer changes a turn that is encoded by itself, so turns "
                             "cannot be appended to a conversation.")

    def _find_control_tokens(self, rendered):
        """Find what ends a reply, and what must not stand in an observation.

        Control tokens are the added tokens that are special, or that begin and end with punctuation
        such as <tool_call>; other added tokens are ordinary words or runs of blanks. A template's
        marks may be plain text.
        """
        added = {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items()
                 if len(token.content.strip()) > 1 and (token.special or re.fullmatch(
                     r"[^\w\s▁].*[^\w\s▁]", token.content, re.DOTALL))}
        marks = re.findall(r"<[^<>\s]+>|\[[^\[\]\s]+\]", rendered)
        longest_first = sorted({*added.values(), *marks}, key=len, reverse=True)
        # A tokenizer may change capitals before it looks for tokens.
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)
        ids = [i for i in self.encode(self._after_reply) if self.tokenizer.decode([i]).strip()]
        self.end_of_turn = ids[0] if ids and ids[0] in added else None

    def _render(self, texts, has_system, in_parts):
        """Render messages of system, user, assistant, user, and so on, then the next opening."""
        if not has_system:  # the first user says it
            texts = ["\n\n".join(texts[:2]), *texts[2:]]
        roles = ["system"] * has_system + ["user", "assistant"] * len(texts)
        messages = [dict(role=role, content=[dict(type="text", text=text)] if in_parts else text)
                    for role, text in zip(roles, texts)]
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True,
                enable_thinking=self.thinks)
        except Exception as error:  # templates raise what they like, for roles that they lack
            raise ValueError(f"the chat template fails: {error}") from None


def format_instructions(response_format, max_new_tokens=0):
    """The format instructions in the system message.

    Dots stand for the parts. Small models copy a placeholder such as "your answer" (LOG.md).
    """
    form = re.sub(r"{\w+}", "...", FORMATS[response_format])
    thinks = ("first a short thought about this state, then "
              if "reasoning" in format_parts(response_format) else "")
    lines = [f"Reply in the form {form}: {thinks}the answer alone."]
    lines += [DESCRIPTIONS[part] for part in description_parts(response_format)]
    lines += [f"A reply has at most {max_new_tokens} tokens."] if max_new_tokens else []
    return " ".join(lines)


def reply_pattern(form):
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
