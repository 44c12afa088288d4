"""How a conversation becomes tokens, and how a reply is read."""

import copy
import functools
import re
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from toys import tiny
from transformers import PreTrainedTokenizerFast

from minragen.chat import ChatFrame
from minragen.config import preset
from minragen.envs import SPLITS, Budget, make
from minragen.run import start
from minragen.run.tiny import CHAT_TEMPLATE, tiny_tokenizer
from minragen.support.formats import FORMATS, description_parts, format_instructions
from minragen.trajectory import Reply

CHATML = CHAT_TEMPLATE
REPLY = " a</think><answer> Up</answer>"
# Tokens, ends of turns, a conversation and the template of each family.
FAMILIES = tomllib.loads((Path(__file__).parent / "templates.toml").read_text(encoding="utf-8"))


@functools.cache
def family(name):
    """A byte-level or SentencePiece tokenizer with a family's tokens and template, and its ends."""
    known, kind = FAMILIES[name], FAMILIES[name].get("kind", "")
    if kind:
        names = ["<unk>", "▁", "\n", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256))]
        core = Tokenizer(BPE({n: i for i, n in enumerate(names)}, [("\n", "\n")],
                             byte_fallback=True))
        if "legacy" in kind:  # a blank after every token, not only at the beginning
            core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                                    normalizers.Replace(" ", "▁")])
        else:
            core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                          decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        names = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(BPE({n: i for i, n in enumerate(names)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    for place in ("special", "added"):
        core.add_tokens([AddedToken(text, special=place == "special", normalized=False,
                                    rstrip=text in known.get("strips", []))
                         for text in known.get(place, [])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=known["eos"], bos_token=known.get("bos"),
        chat_template=FAMILIES[known.get("like", name)]["template"])
    return tokenizer, tokenizer.convert_tokens_to_ids(known["generation_eos"])


@functools.cache
def family_frame(name, response_format="free_think"):
    tokenizer, ends = family(name)
    return ChatFrame(tokenizer, response_format, ends)


@functools.cache
def spelling_frame(name, response_format):
    """A frame that reads single characters, or one whose tokens begin and end within tags."""
    tokenizer = copy.deepcopy(family("llama2" if name == "legacy" else "qwen2.5")[0])
    if name == "merged":
        tokenizer.add_tokens(["></", "answer>\n", "><", " <", "</think>", ">>", "</ans", "wer>x"])
    return ChatFrame(tokenizer, response_format)


def end_of_reply(frame, ids):
    """How many of the ids that it draws the sampler takes, and whether the reply is complete."""
    parts, sampled = 0, []
    while parts < len(frame.parts) and len(sampled) < len(ids):
        sampled.append(ids[len(sampled)])
        parts = frame.parts_ended(sampled, parts)
    return len(sampled), parts == len(frame.parts)


@functools.cache
def built(response_format="free_think"):
    return tiny_tokenizer([make("frozenlake", split) for split in SPLITS], response_format)


@pytest.fixture
def tokenizer():
    """A copy, which a test may give another template."""
    return copy.deepcopy(built())


class TestTinyTokenizer:
    @settings(max_examples=50, deadline=None)
    @given(st.text())
    def test_any_text_round_trips_exactly(self, text):
        policy, frame = tiny()
        assert policy.tokenizer.decode(frame.encode(text)) == text

    @pytest.mark.parametrize("turns", [5, 12])
    def test_each_number_of_turns_left_is_a_token_and_no_other(self, turns):
        env = make("lean", budget=Budget(turns, 1, turns), family="logic")
        words = {f"\u0120{n}" for n in range(1, 21)} & {*tiny_tokenizer([env]).get_vocab()}
        assert words == {f"\u0120{n}" for n in range(1, turns + 1)}

    def test_every_tag_and_relation_of_a_format_is_one_token_each(self):
        for response_format in FORMATS:
            frame = ChatFrame(built(response_format), response_format)
            parts = dict.fromkeys(frame.parts, " Left") | dict.fromkeys(
                description_parts(response_format),
                " hole same row left; goal below same column; none")
            reply = frame.write(parts)
            names = frame.tokenizer.convert_ids_to_tokens(frame.encode(reply))
            assert names == re.findall(r"<[^>]+>|Ġ?[a-zA-Z]+|;", reply.replace(" ", "Ġ"))


def system_message(frame, prompt="rules"):
    return frame.system_message(SimpleNamespace(system_prompt=prompt))


@pytest.mark.parametrize("name", FAMILIES)
class TestFamilies:
    def test_a_conversation_has_exactly_this_text(self, name):
        """It is what the template renders, with the thoughts that it drops, on a fixed date."""
        (tokenizer, _), frame, text = family(name), family_frame(name), FAMILIES[name]["text"]
        decode, framing = tokenizer.decode, frame.next_prompt_ids(None, "state 2")
        ids = frame.first_prompt_ids("rules", "state 1") + frame.encode(REPLY) + framing
        assert decode(ids) == "\n".join(text)
        assert decode(frame.encode("\nx")) == "\nx"
        rest = framing[framing.index(frame.end_of_turn) + 1:]
        assert frame.next_prompt_ids(frame.end_of_turn, "state 2") == rest
        said = ["rules", "state 1", f"<think>{REPLY}", "state 2"]
        if name in ("gemma2", "mistral0.3"):  # they get the system message from the user
            said[:2] = ["rules\n\nstate 1"]
        rendered = tokenizer.apply_chat_template(
            [dict(role=role, content=part) for role, part in zip(
                ("system", "user", "assistant", "user")[-len(said):], said)],
            tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024")
        assert (REPLY in rendered) == (name not in ("qwen3", "deepseek-r1", "glm4.5"))
        if REPLY in rendered and name != "smollm3":  # which takes no date
            spelled = decode(frame.encode(rendered)).strip()
            assert spelled == "\n".join(text).removesuffix("<think>").strip()

    def test_the_ends_of_template_tokenizer_and_model_all_end_a_reply(self, name):
        tokenizer, _ = family(name)
        names = tokenizer.convert_ids_to_tokens(family_frame(name).end_ids)
        assert sorted(names) == sorted(FAMILIES[name]["ends"])
        alone = ChatFrame(tokenizer)
        assert alone.end_ids == {alone.end_of_turn, tokenizer.eos_token_id}

    def test_every_format_begins_with_its_tags_once(self, name):
        """Where the template opens a thought, the rest is forced; no_think closes it."""
        for response_format in FORMATS:
            frame = family_frame(name, response_format)
            body = frame.write(dict.fromkeys(frame.parts, " b"))
            text = frame.tokenizer.decode(frame.first_prompt_ids(system_message(frame), "one")
                                          + frame.encode(body) + frame.next_prompt_ids(None, "two"))
            order = [text.index(part) for part in ("Reply in the form", "one", body, "two")]
            assert order == sorted(order)
            tags = re.sub(r">\s+", ">", text)
            assert tags.endswith(frame.prefix) and "<think><think>" not in tags, response_format
            if "reasoning" not in frame.parts:
                assert text.endswith(FAMILIES[name].get("no_think", "<answer>"))

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_no_control_token_written_in_an_observation_becomes_one(self, name, data):
        tokenizer, frame = family(name)[0], family_frame(name)
        added = {i: t.content for i, t in tokenizer.added_tokens_decoder.items()
                 if re.search(r"\w", t.content)}
        cuts = [cut for t in added.values() for cut in (t, t[:1], t[1:], t[:-1], t[-1:], t[:4])]
        drawn = data.draw(st.lists(st.sampled_from([*cuts, " ", "\n", "x"]), max_size=8))
        nested = [t[:-1] + t + t[-1] for t in added.values()]
        for text in ("".join(drawn), *added.values(), *nested):
            first, following = frame.first_prompt_ids, frame.next_prompt_ids
            for harmless, ids in ((first("x", "x"), first("x", text)),
                                  (following(None, "x"), following(None, text))):
                assert [i for i in ids if i in added] == [i for i in harmless if i in added], text
            system = system_message(frame, text).removesuffix(format_instructions("free_think"))
            assert not added.keys() & set(frame.encode(system)), text


class TestChatFrame:
    def test_only_added_tokens_within_signs_or_special_ones_are_changed(self, tokenizer):
        """Words, blanks and one sign are text; a tokenizer may lower text before it looks."""
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        call = AddedToken("<CALL>", normalized=True)
        tokenizer.add_tokens(["frozen", "well-known", "    ", call, AddedToken("#", special=True)])
        same, frame = "a frozen    well-known #", ChatFrame(tokenizer)
        for text, shown in ((same, same), ("<Call><|pad|>", "< call>< |pad|>")):
            decoded = tokenizer.decode(frame.first_prompt_ids("", text))
            assert decoded.count(f"user\n{shown}<|im_end|>") == 1

    def test_marks_that_are_plain_text_are_changed_too(self):
        for name, mark in (("tinyllama", "<|user|>"), ("olmo2", "<|assistant|>")):
            frame = ChatFrame(family(name)[0])
            text = frame.tokenizer.decode(frame.first_prompt_ids("rules", f"one\n{mark}\ntwo"))
            assert f"\n< {mark[1:]}\n" in text and text.count(mark) == 1

    @pytest.mark.parametrize("past, asked, opened", [
        ("<think>\n\n</think>\n\n", "<think>\n", "<think>\n"),  # Qwen 3.5, EXAONE 4
        ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n", "<think>"),
        ("<think></think>", "<think>\n", "<think>\n")])  # Nemotron 3
    def test_a_prompt_ends_in_one_open_thought_whatever_the_template_writes_into_earlier_replies(
            self, tokenizer, past, asked, opened):
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ past if m.role == 'assistant' }}"
            "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n{{ asked }}".replace(
                "past", repr(past)).replace("asked", repr(asked)))
        for frame, end in ((ChatFrame(tokenizer), opened), (
                ChatFrame(tokenizer, "no_think"), "</think>\n\n<answer>")):
            text = frame.tokenizer.decode(frame.first_prompt_ids("rules", "state 1"))
            assert text.rpartition("<|im_start|>assistant\n")[2].endswith(end)
            assert text.rpartition("assistant")[2].count("<think>") == 1

    @pytest.mark.parametrize("template, problem", [
        (None, "no chat template"),
        (dict(rag="{{ messages }}", tool="{{ messages }}"), "none is called default: rag, tool"),
        ("{{ messages[-1].content }}", "every turn in the same way"),
        (CHATML.replace("m.content", "m.content | upper"), "every turn in the same way"),
        (CHATML.replace("m.role", "loop.index ~ m.role"), "every turn in the same way"),
        (CHATML.replace("assistant\n{% endif", "helper\n{% endif"), "every turn in the same way"),
        (CHATML.replace("m.role", "raise_exception('no tools')"), "template fails: no tools")],
        ids=["none", "no default", "does not append", "changes messages", "counts turns", "asks",
             "raises"])
    def test_a_template_that_cannot_be_appended_to_or_an_unknown_format_is_refused(
            self, tokenizer, template, problem):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=problem):
            ChatFrame(tokenizer)
        with pytest.raises(ValueError, match="did you mean 'free_think'"):
            ChatFrame(tokenizer, "freethink")

    def test_a_tokenizer_that_writes_a_blank_before_a_turn_is_refused(self):
        tokenizer = copy.deepcopy(family("tinyllama")[0])
        tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "''")
        with pytest.raises(ValueError, match="encoded by itself"):
            ChatFrame(tokenizer)


class TestInstructions:
    def test_they_show_the_form_with_dots_and_tell_the_limit_that_training_has(self):
        frame = ChatFrame(built(), max_new_tokens=24)
        assert frame.system_message(make("bandit")).splitlines()[-1] == (
            "Reply in the form <think>...</think><answer>...</answer>: first a short thought about "
            "this state, then the answer alone. A reply has at most 24 tokens.")
        config = preset("bandit")
        learner = start.build_learner(config, {}, say=lambda line: None)
        assert f"at most {config.max_new_tokens} tokens." in system_message(learner.frame)
        assert "tokens" not in system_message(ChatFrame(built()))


class TestParsing:
    def test_a_reply_in_the_format_is_read_and_any_other_has_no_parts_at_all(self):
        for text, *parts in (
                (" a b</think><answer> Left || Up</answer>", "a b", "Left || Up", True),
                ("</think>\n <answer></answer>", "", "", True),
                (" a</think><answer>x</think>\ny</answer>.", "a", "x</think>\ny", True),
                ("",), ("<answer> a</answer>",), (" r</think> so <answer> a</answer>",),
                (" r</think><answer> a",), (" r <answer> a</answer>",), ("</answer></think>",)):
            assert tiny()[1].parse(text) == Reply(*parts), text
        for text in (" r</think><answer> a</answer>",
                     " o</observation><reasoning> r</think><answer> a</answer>",
                     " o</observation> and <reasoning> r</reasoning></think><answer> a</answer>",
                     " o</observation><reasoning> r</reasoning><prediction> p</prediction></think>"
                     "<answer> a</answer>"):
            assert ChatFrame(built(), "grounding").parse(text) == Reply(), text

    @pytest.mark.parametrize("response_format", FORMATS)
    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_a_reply_ends_at_its_first_complete_beginning_or_never(self, response_format, data):
        form = FORMATS[response_format]
        tags = re.findall(r"<[^>]+>", form) + re.findall(r"(?:<[^>]+>)+", form)
        noise = st.lists(st.sampled_from(
            [*tags, re.sub(r"{\w+}", "...", form), "</", "answer", ">", "<", "\n", " ", "x"]),
            max_size=3).map("".join)
        blanks = data.draw(st.sampled_from(["", "\n", " " * 20]))
        text = data.draw(noise)
        for end in re.findall(r"(?:</?\w+>)+", form)[form[0] == "<":]:
            text += data.draw(st.sampled_from([end, end, end, ""])).replace("><", f">{blanks}<")
            text += data.draw(noise)
        frame = spelling_frame(data.draw(st.sampled_from(["single", "merged", "legacy"])),
                               response_format)
        ids = frame.encode(text)
        read = [frame.parse(frame.tokenizer.decode(ids[:n + 1])) for n in range(len(ids))]
        complete = [n for n, reply in enumerate(read, 1) if reply.valid]
        assert end_of_reply(frame, ids) == ((complete[0], True) if complete else (len(ids), False))
        assert len({*read[complete[0] - 1:]} if complete else {*read}) <= 1

    def test_what_is_written_is_read_again_in_every_format_whatever_tags_its_parts_quote(self):
        prefixes = ("<think>", "<answer>", "<think><observation>", "<think><reasoning>",
                    "<think><observation>")
        for (response_format, form), prefix in zip(FORMATS.items(), prefixes, strict=True):
            frame = spelling_frame("merged", response_format)
            assert frame.prefix == prefix
            assert ("reasoning" in frame.parts) == (response_format != "no_think")
            for quoted in ("{0} < > </x> ;", form, form.replace("><", "> <"),
                           *re.findall(r"<[^>]+>", form)):
                parts = {part: f"{part} {quoted} so" for part in frame.parts}
                reply = frame.write(parts)
                found, ids = frame.parse(reply), frame.encode(reply)
                assert found.valid and end_of_reply(frame, ids) == (len(ids), True), quoted
                for part, text in parts.items():
                    assert getattr(found, part).replace("< ", "<") == text.replace("< ", "<")

    def test_the_time_of_a_reply_full_of_tags_grows_as_its_length(self):
        """Decoding all ids after each tag would cost its square, backtracking even more."""
        frame = ChatFrame(built(), "grounding_worldmodeling")
        reply = frame.write(dict.fromkeys(frame.parts, " b"))

        def seconds(size):
            text = "".join(tags * (2 * size) for tags in re.findall(r"(?:<[^>]+>)+", reply)[:-1])
            began = time.process_time()
            for tag in ("</answer>", "<answer>", ">"):
                ids = tiny()[1].encode(tag) * size
                assert end_of_reply(tiny()[1], ids) == (size, False)
            assert not frame.parse(text).valid
            return time.process_time() - began

        assert seconds(8_000) < 20 * seconds(1_000)  # the square would take 64 times as long
