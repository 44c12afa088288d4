"""Messages become tokens, each text once; and how a reply is parsed.

`ChatFrame` is RAGEN's context manager: text becomes tokens without rendering history again. In
support/, formats.py says what a reply looks like and template.py which texts stand around messages.

Tests: `python -m pytest tests/test_chat.py`.
"""

import re
from functools import lru_cache, partial
from itertools import islice

from minragen.envs import IMAGE, image_of
from minragen.support import formats
from minragen.support.template import check_pieces, derive_template
from minragen.trajectory import Reply

REMEMBERED = 2**10  # texts whose ids are remembered
TAG_TAIL = 16  # a tag is made of fewer tokens


class ChatFrame:
    """Turns messages into tokens, with what the chat template writes around them.

    A prompt ends with the forced prefix of the reply, such as `<think>`, which no policy samples.
    A reply ends at the `</answer>` that closes it (one quoted in a thought does not), or at one of
    `end_ids`: the template's end of turn, the tokenizer's eos, `model_eos`.

    model_eos: the model's `generation_config.eos_token_id`: one id, several or None
    max_new_tokens: the limit that the system message tells; 0: none
    example: whether the system message shows a reply
    image_store: the images of a policy that sees
    raises: ValueError for an unknown format, or if turns cannot be appended to the chat template
    """

    appends = True  # a prompt goes on where the last reply ended; in more/windows.py it begins anew

    def __init__(self, tokenizer, response_format="free_think", model_eos=None, max_new_tokens=0,
                 image_store=None, example=False):
        self.parts = formats.format_parts(response_format)
        self.describes = bool(formats.description_parts(response_format))
        self.prefix = formats.forced_prefix(response_format)
        self._form = formats.FORMATS[response_format]
        self._part_ends = [re.compile(end) for end in formats.part_ends(self._form).values()]
        # Patterns of the first part, of the first two parts, ..., of the whole reply.
        self._patterns = [formats.reply_pattern(self._form, n + 1) for n in range(len(self.parts))]
        self.tokenizer, self.image_store = tokenizer, image_store
        # Ids of a text. Recent texts are remembered: members of a group see much alike.
        self._ids = lru_cache(REMEMBERED)(
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        self.template = derive_template(tokenizer, self.prefix)
        # (env) -> the system message, in which `plain` keeps the environment from ending a turn
        self.system_message = partial(
            formats.system_message, response_format=response_format, max_new_tokens=max_new_tokens,
            example=example, plain=self.template.plain)
        self.end_of_turn = self.template.end_of_turn
        check_pieces(self)
        model_eos = model_eos if isinstance(model_eos, (list, tuple)) else [model_eos]
        self.end_ids = {self.end_of_turn, tokenizer.eos_token_id, *model_eos} - {None}
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._ids_with_bracket = {
            i for i, name in enumerate(names)  # bytes are named like <0x0A>; only <0x3E> is a ">"
            if ">" in (name or "") and not re.fullmatch("<0x(?!3E)..>", name)}

    def append_first_prompt(self, trajectory, env):
        """Append the first prompt."""
        trajectory.system = self.system_message(env)
        trajectory.add_prompt(self.first_prompt_ids(trajectory.system, trajectory.observation))

    def append_next_prompt(self, trajectory, rules):
        """Append the prompt of the next turn. Returns False if that leaves no room for a reply."""
        ids = self.next_prompt_ids(trajectory.tokens[-1], trajectory.observation)
        if fits := len(trajectory.tokens) + len(ids) < rules.max_context:
            trajectory.add_prompt(ids)
        return fits

    def first_prompt_ids(self, system, observation):
        """Ids from the beginning through the forced prefix of the first reply."""
        t = self.template
        return self._prompt(self._ids, f"{t.head}{system}{t.to_user}", observation)

    def next_prompt_ids(self, last_id, observation):
        """Ids from the end of a reply, whose last id is `last_id`, through the next forced prefix.

        A reply that stopped without the end-of-turn id gets it from the prompt, outside the loss.
        """
        ids = self._prompt(self.encode, self.template.after_reply, observation)
        ended = last_id is not None and last_id == self.end_of_turn
        return ids[ids.index(last_id) + 1:] if ended else ids

    def _prompt(self, encode, before, observation):
        """Ids of a text, an observation (an image as its own ids), and the reply's opening."""
        plain, to_reply = self.template.plain, self.template.to_reply
        if (image := image_of(observation)) is None:
            return encode(f"{before}{plain(observation)}{to_reply}")
        if self.image_store is None:
            raise ValueError("the observations have images and this model reads only text: use a "
                             "vision-language model, or a view without images.")
        above, _, below = observation.partition(IMAGE)
        return [*encode(before + plain(above)), *self.image_store.ids_of(image),
                *self.encode(plain(below) + to_reply)]

    def encode(self, text):
        """Ids of a text that follows another. SentencePiece puts a blank before a text, so it is
        encoded after a line break, whose ids are cut off."""
        line, ids = self._ids("\n"), self._ids(f"\n{text}")
        return ids[len(line):] if ids[:len(line)] == line else self._ids(text)

    def parts_ended(self, ids, before=0):
        """How many parts of the format are complete in a reply. With all of them the reply is
        complete: whatever follows cannot change what `parse` reads. before: the number for ids[:-1]

        Tokenizers merge "</", "answer" and ">" with their neighbours as they like, so tags are
        looked for in text. Decoding is dear, so the last few ids are searched first for the tags
        that end the next part.
        """
        if ids[-1] not in self._ids_with_bracket or before == len(self.parts):
            return before
        end = self._part_ends[before]
        tags = end.pattern.count("<")  # how many end this part: </a><b> is two
        *_, start = islice((i for i in reversed(range(len(ids)))
                            if ids[i] in self._ids_with_bracket), tags)
        if not end.search(self.tokenizer.decode(ids[max(0, start - TAG_TAIL):])):
            return before
        text = self.prefix + self.tokenizer.decode(ids)
        return sum(bool(pattern.match(text)) for pattern in self._patterns)

    def write(self, parts):
        """What a policy would have sampled for {part: text}; parts of other formats are ignored.

        Tags that would end a part too early get a blank: `</answer>` becomes `< /answer>`.
        """
        texts = {part: end.sub(lambda tags: f"< {tags[0][1:]}", parts[part])
                 for part, end in zip(self.parts, self._part_ends)}
        return self._form.format_map(texts)[len(self.prefix):]

    def parse(self, text):
        """The Reply in a sampled text, which lacks the forced prefix and the end-of-turn token."""
        found = self._patterns[-1].match(self.prefix + text)
        parts = found.groupdict() if found else {}
        return Reply(**{part: text.strip() for part, text in parts.items()}, valid=bool(found))
