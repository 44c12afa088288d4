"""SearchQA and what it searches with: BM25, the encyclopaedia, files, a retriever."""

import io
import json
import math
import random
import re
import socket
import threading
import time
import zlib
from collections import Counter
from contextlib import suppress
from functools import partial
from http.client import IncompleteRead
from unittest.mock import patch
from urllib.error import HTTPError

import pytest
from conftest import begin, write

from minragen.environments import searchqa
from minragen.environments.limits import ServerGone
from minragen.environments.search import BM25, Passage, RemoteIndex, SearchIndex, fetch
from minragen.environments.searchqa import RELATIONS, SearchQA, encyclopaedia, load_corpus
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget, EnvGroups
from minragen.look.players import scripted

ARTICLES = load_corpus("encyclopaedia")
NOBODY = "http://127.0.0.1:1"  # where no retriever listens
started = partial(begin, "searchqa")


def questions(count, **options):
    return [started(seed, **options).question for seed in range(count)]


def slow_bm25(texts, query, k1=1.5, b=0.75):
    """Every score by the formula as it is written, one word and one text at a time."""
    docs, scores = [re.findall("[a-z0-9é]+", text.lower()) for text in texts], Counter()
    average = sum(map(len, docs)) / max(len(docs), 1)
    for word in re.findall("[a-z0-9é]+", query.lower()):
        n = sum(word in doc for doc in docs)
        for i, doc in enumerate(docs):
            if f := doc.count(word):
                idf = math.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
                scores[i] += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(doc) / average))
    return scores


class TestCorpora:
    def test_it_scores_as_the_formula_says_and_ranks_the_first_of_equals_first(self):
        rng, words = random.Random(0), ["a", "b", "c", "E", "7", "x-y", "é"]
        for parameters in [(), (0.9, 0.0), (0.1, 1.0)] * 30:
            query, *texts = (" ".join(rng.choices(words, k=rng.randrange(6)))
                             for _ in range(rng.randint(1, 9)))
            index = BM25(texts, *parameters)
            top = index.top(query, 99)
            assert dict(top) == pytest.approx(slow_bm25(texts, query, *parameters))
            assert top == sorted(top, key=lambda found: (-found[1], found[0]))
            assert [index.top(query, k) for k in range(9)] == [top[:k] for k in range(9)]
            assert index.top(query) == top[:3]
        # A title counts twice: its own article comes before a shorter one that mentions it.
        oslo = Passage("Oslo", "a city in the north")
        found = SearchIndex([Passage("Ways", "a road from Oslo"), oslo]).search("oslo", 2)
        assert [r["id"] for r in found] == ["doc_1", "doc_0"]

    def test_the_encyclopaedia_is_the_same_on_every_machine_and_a_title_finds_its_article(self):
        assert zlib.crc32("\n".join(p.content for p in ARTICLES).encode()) == 1547107064
        index = SearchIndex(ARTICLES)
        for article, (title, facts) in zip(ARTICLES, encyclopaedia().items(), strict=True):
            assert article == (title, " ".join(f"{sentence}." for sentence, _ in facts.values()))
            assert all(value in sentence.split() for sentence, value in facts.values())
            assert index.search(title, 1)[0]["content"] == article.content
            assert len(article.content) < searchqa.MAX_SHOWN  # never cut

    def test_a_passage_is_a_text_and_perhaps_a_title(self, tmp_path):
        for record in ({"text": "Oslo: a city", "id": 3}, {"title": "Oslo", "text": "a city"}):
            path = write(tmp_path / "c.jsonl", record)
            assert [p.content for p in load_corpus(path)] == ["Oslo: a city"]
        for record in (3, None, {}, {"text": 4}, {"title": 1, "text": "x"}):
            with pytest.raises(ValueError, match="bad passage"):
                load_corpus(write(tmp_path / "c.jsonl", record))


class TestEpisodes:
    def test_hops_are_drawn_evenly_and_within_the_budget(self):
        for hops, budget, expected in (
                (0, None, {1, 2}), (1, None, {1}), (2, None, {2}),
                (0, Budget(3, 1, 3), {1, 2}), (0, Budget(5, 1, 2), {1})):
            counts = Counter(len(q.steps) for q in questions(100, budget=budget, hops=hops))
            assert set(counts) == expected and min(counts.values()) > 30

    def test_the_solver_finds_and_quotes_every_passage_and_no_title_is_the_answer(self):
        for options in ({}, {"hops": 2, "results": 1}):
            for seed in range(300):
                env = started(seed, "val", **options)
                for hop, answer in zip(env.question.steps, env.solve()):
                    shown = env.step(answer)[0]
                    assert f"\n- {hop.title}: " in shown and env.question.answers[0] != hop.title
                    quoted, _, plan = env.note().partition(", so ")
                    assert f" {quoted}. " in shown.replace("\n", " ") and plan
                titles = [content.partition(":")[0] for content in env.screen]
                assert env.question.answers[0] not in titles
                assert plan == f"answer {env.question.answers[0]}"
                assert env.step(env.solve()[0])[1] == 1

    def test_a_bot_that_knows_the_kind_of_every_answer_fails_two_hop_questions(self):
        """It has read many prompts: it knows which words are towns or rivers, and which of these a
        question asks for. Which of two towns is meant it can only guess."""

        def guess(place, env):
            first = next(words["value"] for words in RELATIONS["person"].values()
                         if env.question.asked in RELATIONS.get(words["value"], ()))
            if not env.screen:
                return f"search[{env.question.about}]"
            title, _, text = env.screen[0].partition(": ")
            onward = title == env.question.about
            kind = first if onward else RELATIONS[first][env.question.asked]["value"]
            words = [word for word in re.findall(r"\w+", text) if word in searchqa.WORDS[kind]]
            return f"{'search' if onward else 'finish'}[{words[place]}]"

        groups = EnvGroups("searchqa", 300, 1, "val", {"hops": 2})
        for bot in (lambda env, *_: guess(0, env), lambda env, *_: guess(-1, env)):
            played = scripted(groups, bot)
            assert 0 < sum(t.success for t in played) < 150 and not any(t.error for t in played)

    def test_all_questions_about_a_person_are_in_one_split(self):
        about = [{q.about for q in questions(300, split=split)} for split in SPLITS]
        assert len(set().union(*about)) == sum(map(len, about)) > 100

    def test_a_search_is_valid_in_any_case_and_anything_else_is_never_an_answer(self):
        env, began = started(budget=Budget(30, 1, 30)), time.process_time()
        for answer, effective in (("SEARCH[ Ada Holm ]", 1), ("search[ada holm]", 0),
                                  ("Search[é, 中: (x) || y]", 1), (f"search[{'x' * 300}]", 0)):
            _, *result, info = env.step(answer)
            assert result == [0.0, False, False], answer
            assert (info["valid"], info["effective"]) == (1.0, effective), answer
        for bad in (
                "search", "search[x", "searchx]", "serch[x]", "search [x]", "finish[]", "search[ ]",
                "search[x]]", "search[x] finish[y]", "search[a\nb]", "[x]", "search[x].", "Torvik",
                "say search[x]", "finish[\u200b]", f"finish[{'x' * 301}]", "search[" * 10**5,
                "[" * 10**6 + "]", "finish[" + " " * 10**6 + "]"):
            env.question = env.question._replace(answers=("Torvik", "x", bad))
            _, *result, info = env.step(bad)
            assert (*result, info["valid"]) == (FORMAT_PENALTY, False, False, 0.0), bad[:40]
        assert time.process_time() - began < 1.0  # linear in the text

    def test_long_strange_passages_are_cut_and_stay_in_the_observation_space(self, tmp_path):
        """What is a letter in some language is shown as it is."""
        passage = "ada \ud800\0\n Ω 誰が 북경에서 👩‍🔬 کتاب‌ها \u202e " + "long " * 999
        env = started(corpus=write(tmp_path / "c.jsonl", *[{"text": passage}] * 12), results=10)
        observation = env.step("search[Ada]")[0]
        lines = observation.splitlines()[2:-1]
        assert observation in env.observation_space == started(url=NOBODY).observation_space
        assert len(lines) == 10 and {len(line) for line in lines} == {2 + 800 + 3}
        assert lines[0].startswith("- ada ?? Ω 誰が 북경에서 👩‍🔬 کتاب‌ها ? long")

    def test_words_are_compared_as_squad_does(self):
        for said, right, em, f1 in (  # right answers are joined by |
                ("The paris!", "Paris", 1, 1), ("U.S. an", "a us", 1, 1), ("x", "y", 0, 0),
                ("b c b", "b b b d", 0, 4 / 7), ("yes it is", "yes", 0, 0), ("no", "no way", 0, 0),
                ("noanswer x", "noanswer", 0, 0), ("No.", "no", 1, 1), ("theatre", "atre", 0, 0),
                ("b", "b c d e f g", 0, 2 / 7), ("Texas, Paris", "Paris, Texas", 0, 1),
                (".", "A", 0, 0), ("New York", "NYC|New York City|new york", 1, 1),
                ("A", "A", 1, 1),  # grade A is no article
                ("b, c, Paris", "Paris", 0, 0.5)):
            env = started()
            env.question = env.question._replace(answers=tuple(right.split("|")))
            _, reward, terminated, _, info = env.step(f"finish[{said}]")
            assert terminated and info["success"] == info["em"] == reward == em, said
            assert info["f1"] == pytest.approx(f1), said


def hotpot(i, **fields):
    """A record of HotpotQA, as its authors write it."""
    titles = [f"Film number{i}", f"Director number{i}", "Noise"]
    told = [[f"{titles[0]} is a film.", " It was made."], [f"{titles[1]} is from City{i}."], ["x"]]
    return {"question": f"Where is the director of {titles[0]} from?", "answer": f"City{i}",
            "context": [*zip(titles, told)],
            "supporting_facts": [[titles[0], 0], [titles[0], 1], [titles[1], 0]], **fields}


class TestRecords:
    def test_hotpotqa_is_played_from_its_own_contexts(self, tmp_path):
        """A question that others have spelt otherwise is in the split of its twin."""
        records = [hotpot(i) for i in range(40)]
        loud = [record | {"question": record["question"].upper()} for record in records]
        path, seen = write(tmp_path / "h.jsonl", *records, *loud), {}
        for split in SPLITS:
            env = SearchQA(split, data=path)
            for seed in range(30):
                env.reset(seed=seed)
                assert seen.setdefault(env.question.text.upper(), split) == split
                plan, titles = env.solve(), [step.title for step in env.question.steps]
                assert plan == [*(f"search[ {title} ]" for title in titles), *plan[2:]]
                first, second, last = (env.step(answer) for answer in plan)
                assert f"- {titles[0]}: {titles[0]} is a film. It was made." in first[0]
                assert f"- {titles[1]}: " in second[0] and last[1] == 1.0
        assert len(seen) > 30 and len(env.index.passages) == 81  # the noise is one passage, not 40

    def test_of_several_right_answers_those_that_can_stand_in_brackets_are_kept(self, tmp_path):
        rows = [{"question": f"Who is n{i}?", "answer": ["[", " Bo", "Al"]} for i in range(9)]
        path = write(tmp_path / "h.jsonl", *rows, hotpot(1, answer="[y]", context=[]))
        env = started(data=path, corpus="encyclopaedia")
        search, finish = env.solve()
        assert search.startswith("search[ Who is n") and finish == "finish[ Bo ]"
        assert env.step("finish[al]")[:2] == ("Reward: 1\nCorrect answer: Bo", 1.0)
        assert len(env.questions) == 9

    def test_what_is_no_such_record_is_refused_with_a_sentence(self, tmp_path):
        for record, complaint in (
                *((record, "bad record.*; expected HotpotQA's question") for record in (
                    3, {"question": "x"}, hotpot(1, question=" "), hotpot(1, answer=[3]),
                    hotpot(1, context=[["t"]]), hotpot(1, supporting_facts=[3]))),
                (hotpot(1, answer="[x]"), "no usable question"),
                (hotpot(1, answer=[]), "no usable question"),
                ({"question": "x", "answer": "y"}, "no context.*give corpus or url")):
            with pytest.raises(ValueError, match=complaint):
                SearchQA(data=write(tmp_path / "h.jsonl", record))

    def test_options_against_each_other_and_a_budget_without_a_search_are_refused(self):
        for complaint, options in (
                ("needs 3 turns.*got .*max_actions=2", {"hops": 2, "budget": Budget(9, 1, 2)}),
                ("needs 2 turns.*got .*max_actions=1", {"budget": Budget(1, 1, 1)}),
                ("got both, expected one", {"url": NOBODY, "corpus": "encyclopaedia"})):
            with pytest.raises(ValueError, match=complaint):
                SearchQA(**options)


def search(*replies):
    """What a client finds, or complains of, that gets these replies, the last again and again."""
    with patch("minragen.environments.search.direct_opener") as opener:
        asked = opener().open
        asked.side_effect = [*replies, *replies[-1:] * 3]
        try:
            return RemoteIndex(NOBODY, 20.0).search("x", 2), asked.call_count
        except RuntimeError as error:
            return error, asked.call_count


class TestRetriever:
    def test_trouble_is_tried_three_times_and_a_refusal_or_nonsense_once(self, monkeypatch):
        pauses, results = [], [{"content": str(i)} for i in range(9)]
        monkeypatch.setattr(time, "sleep", pauses.append)
        status = {code: HTTPError(NOBODY, code, "", {}, io.BytesIO()) for code in (499, 500)}
        reply = io.BytesIO(json.dumps({"results": results}).encode())
        assert search(status[500], OSError(), reply) == (results[:2], 3) and pauses == [0.1, 0.2]
        for complaint, tries, *replies in (
                ("HTTP Error 500", 3, status[500]), ("HTTP Error 499", 1, status[499]),
                ("Incomplete", 3, IncompleteRead(b"")), ("OSError", 3, OSError()),
                ("", 1, b"", b"[]", b'{"results": 3}', b"\xff" * 99, b"[" * 50_000,
                 b'{"results": [{"content": null}]}', b" " * 2**22 + b'{"results": []}',
                 OverflowError("a chunk of 2**64 bytes"))):
            for reply in replies:
                error, asked = search(io.BytesIO(reply) if isinstance(reply, bytes) else reply)
                assert f"{NOBODY} does not answer like a retriever: {complaint}" in str(error)
                assert asked == tries and isinstance(error, ServerGone) == (tries == 3), error

    def test_a_busy_server_is_asked_again_after_the_time_that_it_names(self, monkeypatch):
        pauses, reply = [], io.BytesIO(b'{"results": []}')
        monkeypatch.setattr(time, "sleep", pauses.append)
        busy = [HTTPError(NOBODY, code, "", headers, io.BytesIO())
                for code, headers in ((429, {"Retry-After": "3"}), (408, {}))]
        assert search(*busy, reply) == ([], 3) and pauses == [3, 0.2]
        later = HTTPError(NOBODY, 429, "", {"Retry-After": "59"}, io.BytesIO())
        error, asked = search(later)  # it does not fit into the time
        assert isinstance(error, ServerGone) and asked == 1 and len(pauses) == 2

    @pytest.mark.parametrize("begin, drip", [
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n")])
    def test_headers_or_a_text_that_never_end_cost_the_timeout(self, begin, drip):
        """Each byte begins a socket's own time limit anew."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            def answer():
                client = listening.accept()[0]
                with client, suppress(OSError):
                    client.sendall(begin)
                    for _ in range(50):
                        client.sendall(drip)
                        time.sleep(0.05)

            threading.Thread(target=answer, daemon=True).start()
            began = time.monotonic()
            with pytest.raises(ServerGone, match="timed out"):
                fetch(f"http://127.0.0.1:{listening.getsockname()[1]}", 0.2)
            assert time.monotonic() - began < 1.5
