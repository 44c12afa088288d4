"""The formats of replies: what a reply looks like, and what the model is told about it.

chat.py parses replies. Tests: `python -m pytest tests/test_chat.py`.
"""

import re

from minragen.support.options import nearest

# RAGEN's two formats, and VAGEN's three, whose thoughts describe what is seen (observation) or what
# will be seen after the answer (prediction).
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
WORLD = ("In a world with places, say what you see as things and where they are from the player, "
         "such as: goal below right; hole same row left; box above same column; target above left.")


def format_parts(response_format):
    """The names of a format's parts in order, such as ("reasoning", "answer").

    raises: ValueError for an unknown format
    """
    if response_format not in FORMATS:
        raise ValueError(nearest("response_format", response_format, list(FORMATS)))
    return tuple(re.findall(r"{(\w+)}", FORMATS[response_format]))


def description_parts(response_format):
    """The parts of a format that describe the state: none, one or both."""
    return [part for part in format_parts(response_format) if part in DESCRIPTIONS]


def forced_prefix(response_format):
    """What every reply of a format begins with, such as "<think>". No policy samples it."""
    return FORMATS[response_format].partition("{")[0]


def system_message(env, response_format, max_new_tokens=0, example=False, plain=str):
    """What a model is told once: the environment's prompt, the format, how it describes states, and
    an example of a reply (`TextEnv.example`).

    Without an example a pretrained model may write a sentence where an action belongs.
    plain: what is done to the texts of an environment (Template.plain)
    """
    told = [plain(env.system_prompt), format_instructions(response_format, max_new_tokens)]
    if description_parts(response_format):
        told.append(WORLD)
    if example and (parts := env.example_parts()):
        parts = {name: plain(text) for name, text in parts.items()}
        told.append(f"For example: {FORMATS[response_format].format(**parts)}")
    return "\n".join(told)


def format_instructions(response_format, max_new_tokens=0):
    """The format instructions in the system message."""
    # Dots stand for the parts: small models copy a placeholder such as "your answer".
    form = re.sub(r"{\w+}", "...", FORMATS[response_format])
    thinks = ("first a short thought about this state, then "
              if "reasoning" in format_parts(response_format) else "")
    lines = [f"Reply in the form {form}: {thinks}the answer alone."]
    lines += [DESCRIPTIONS[part] for part in description_parts(response_format)]
    lines += [f"A reply has at most {max_new_tokens} tokens."] if max_new_tokens else []
    return " ".join(lines)


def reply_pattern(form, count=None):
    """The regular expression of a format, or of its first `count` parts.

    Each part ends where the tags that follow it first occur. In an atomic group, (?>...), no other
    end is tried if a later part does not match, so a reply full of closing tags costs no more.
    """
    parts = [f"(?>(?P<{part}>.*?){end})" for part, end in part_ends(form).items()]
    return re.compile(re.escape(form.partition("{")[0]) + "".join(parts[:count]), re.DOTALL)


def part_ends(form):
    """{part: regular expression of the tags that end it}, with only blanks between two tags."""
    _, *rest = re.split(r"{(\w+)}", form)
    return {part: tags.replace("><", r">\s*<") for part, tags in zip(rest[::2], rest[1::2])}
