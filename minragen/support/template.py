"""What a tokenizer's chat template writes around messages, found once and proved.

A ChatFrame (chat.py) appends turns to a conversation and never renders its history again. So it has
to know the texts between messages, which token ends a turn, and what an observation must not
contain. `derive_template` finds them in any template, by rendering messages that it can recognize.

Reading order: `Template` (with an example), `derive_template`, then its parts in call order.

Tests: `python -m pytest tests/test_chat.py`.
"""

import re
from datetime import date
from functools import partial
from typing import NamedTuple

DATE = date(2024, 7, 26)  # in place of today's, where a template prints it; Llama 3's default


class Template(NamedTuple):
    r"""The texts around messages, and the control tokens.

    Two turns in ChatML, if replies are forced to begin with <think>. The names of the texts are on
    the right; the lines without a name are messages.

        <|im_start|>system\n                            head
        Push the box to the target.
        <|im_end|>\n<|im_start|>user\n                  to_user
        The box is left of you.
        <|im_end|>\n<|im_start|>assistant\n<think>      to_reply
        I push.</think><answer>Left</answer>
        <|im_end|>\n<|im_start|>user\n                  after_reply
        The box is one step from the target.
        <|im_end|>\n<|im_start|>assistant\n<think>      to_reply
        Again.</think><answer>Left</answer>
    """

    head: str
    to_user: str
    to_reply: str  # ends with the forced prefix
    after_reply: str
    end_of_turn: int | None  # id that after_reply begins with; None if that is plain text
    control: re.Pattern  # the control tokens: what `plain` changes

    def plain(self, text):
        """The text with a blank inside each control token, so that data can neither end nor begin a
        turn, and ? in place of lone surrogates, which JSON may hold and tokenizers refuse."""
        text = text.encode(errors="replace").decode()
        while self.control.search(text):  # again, since the new text may hold another one
            text = self.control.sub(lambda m: re.sub(r"\S", r"\g<0> ", m[0], count=1), text)
        return text


def derive_template(tokenizer, prefix):
    """The Template of a tokenizer, for replies that are forced to begin with `prefix`.

    raises: ValueError if there is no chat template, or it cannot be appended to
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; use an instruction-tuned model.")
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        raise ValueError(f"the tokenizer has several chat templates and none is called default: "
                         f"{', '.join(tokenizer.chat_template)}. Name one of them so.")
    texts = find_texts(tokenizer, "<think>" in prefix)
    head, to_user, asked, shown, after_reply = texts
    ids = control_tokens(tokenizer)
    # Some templates open turns with plain text, such as TinyLlama's <|user|>.
    tags = re.findall(r"<[^<>\s]+>|\[[^\[\]\s]+\]", "\n".join(texts))
    longest_first = sorted({*ids, *tags}, key=len, reverse=True)
    ends = [t for t in longest_first if t in ids and after_reply.lstrip().startswith(t)]
    # A tokenizer may change capitals before it looks for tokens.
    control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)
    return Template(head, to_user, open_reply(asked, shown, prefix), after_reply,
                    ids[ends[0]] if ends else None, control)


def find_texts(tokenizer, thinks):
    """`texts_around` for the first way of writing messages that the template accepts."""
    problems = []
    # Gemma 2 has no system role, Mistral's moves with the turns; vision-language models may read
    # lists of parts alone.
    for has_system, in_parts in ((True, False), (False, False), (True, True), (False, True)):
        try:
            return texts_around(partial(render, tokenizer, has_system, in_parts, thinks))
        except ValueError as problem:
            problems.append(problem)
    raise problems[0]


def render(tokenizer, has_system, in_parts, thinks, texts):
    """Render messages of system, user, assistant, user, and so on, then the opening of a reply.

    has_system: else the first user says the system message
    in_parts: content is a list
    thinks: templates that can ask for a thought do so
    """
    template = re.sub(  # a resumed run has to play the same prompts on another day
        r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
        lambda found: repr(DATE.strftime(found[2])), tokenizer.get_chat_template())
    if not has_system:
        texts = ["\n\n".join(texts[:2]), *texts[2:]]
    roles = ["system"] * has_system + ["user", "assistant"] * len(texts)
    messages = [dict(role=role, content=[dict(type="text", text=text)] if in_parts else text)
                for role, text in zip(roles, texts)]
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True,
            enable_thinking=thinks)
    except Exception as error:  # templates raise what they like, for roles that they lack
        raise ValueError(f"the chat template fails: {error}") from None


def texts_around(render):
    """The texts (head, to_user, asked, shown, after_reply) around the messages of a conversation.

    render: messages of system, user, assistant, user, ... -> text that asks for the next reply
    asked, shown: between a user's message and the reply, while it is asked for and once it is
        finished; one may only extend the other, or they differ after `<think>`
    raises: ValueError unless the same texts stand around the messages of every turn

    >>> def render(texts):
    ...     written = [f"[{role}] {text} " for role, text in zip("SUAUAU", texts)]
    ...     return "".join([*written, "[A] <think>"])
    >>> texts_around(render)
    ('[S] ', ' [U] ', ' [A] <think>', ' [A] ', ' [U] ')
    """
    first_turn, whole = (render([f"mark{i}" for i in range(n)]) for n in (2, 6))
    found = re.fullmatch(
        r"(?P<head>.*?)mark0(?P<to_user>.*?)mark1(?P<shown>.*?)mark2(?P<after_reply>.*?)mark3"
        r"(?P=shown)mark4(?P=after_reply)mark5(?P<asked>.*)", whole, re.DOTALL)
    if found:
        head, to_user, shown, after_reply, asked = found.groups()
        if first_turn == f"{head}mark0{to_user}mark1{asked}" and (
                shown.startswith(asked) or asked.startswith(shown)
                or shown.partition("<think>")[:2] == asked.partition("<think>")[:2]):
            return head, to_user, asked, shown, after_reply
    raise ValueError("the chat template does not render every turn in the same way, so turns "
                     "cannot be appended to it.")


def open_reply(asked, shown, prefix):
    r"""The text between an observation and the first token that is sampled. It ends with `prefix`.

    >>> open_reply("[/INST]", "[/INST] ", "<think>")  # Mistral: history has a blank more
    '[/INST] <think>'
    >>> open_reply("<|Assistant|><think>\n", "<|Assistant|>", "<think><reasoning>")  # R1
    '<|Assistant|><think>\n<reasoning>'
    >>> open_reply("<|Assistant|><think>\n", "<|Assistant|>", "<answer>")
    '<|Assistant|><think>\n\n</think>\n\n<answer>'
    >>> open_reply("[A]<think>\n", "[A]<think></think>", "<think>")  # Nemotron 3's history
    '[A]<think>\n'
    """
    if "<think>" in prefix:  # some templates always write an empty thought, as Qwen 3.8's does
        asked = re.sub(r"<think>\s*</think>\s*$", "", asked)
    more = shown[len(asked):] if shown.startswith(asked) else ""
    opened = asked if "think>" in more else asked + more  # GLM-4.5's history has empty thoughts
    if opened.rstrip().endswith("<think>") and "<think>" not in prefix:
        opened += "\n</think>\n\n"
    # R1's template opens the thought itself: then the rest of the prefix is forced.
    given = next((n for n in range(len(prefix), 0, -1) if opened.rstrip().endswith(prefix[:n])), 0)
    return opened + prefix[given:]


def control_tokens(tokenizer):
    """{text: id} of the added tokens that are special, or that begin and end with punctuation, such
    as <tool_call>. Other added tokens are ordinary words or runs of blanks."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items()
            if len(token.content.strip()) > 1 and (token.special or re.fullmatch(
                r"[^\w\s▁].*[^\w\s▁]", token.content, re.DOTALL))}


def check_pieces(frame):
    """Raise ValueError unless two turns that a ChatFrame encodes one after the other decode to the
    same text as when encoded at once."""
    tokenizer, t = frame.tokenizer, frame.template
    pieces = frame.first_prompt_ids("rules", "state 1") + frame.next_prompt_ids(None, "state 2")
    at_once = tokenizer(
        f"{t.head}rules{t.to_user}state 1{t.to_reply}{t.after_reply}state 2{t.to_reply}",
        add_special_tokens=False)["input_ids"]
    lost = t.end_of_turn is not None and t.end_of_turn not in frame.encode(t.after_reply)
    if lost or tokenizer.decode(pieces) != tokenizer.decode(at_once):
        raise ValueError("the tokenizer changes a turn that is encoded by itself, so turns cannot "
                         "be appended to a conversation.")
