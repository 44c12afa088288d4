"""SearchQA: questions about a corpus that can only be searched (search.py)."""

import itertools
import re
import string
from collections import Counter, defaultdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from minragen.environments import data
from minragen.environments.search import Passage, RemoteIndex, SearchIndex, one_line
from minragen.envs import Budget, Outcome, TextEnv, split_of, text_space

MAX_ARGUMENT = 300  # characters of a query or an answer
MAX_SHOWN = 800  # characters of a passage in an observation
NUM_PEOPLE = 320
# WORDS: kind of value -> values, and people's names
# RELATIONS: kind of article -> relation -> {value: kind of its value, tells: sentences of the
#   article, asks: questions, names: phrases for the value in a longer question}. Questions and
#   sentences share no telling word, so that matching words does not find the fact. No sentence
#   begins with its value: a small model learns to copy it by the words that precede it.
WORDS, RELATIONS = map(data.load_table("encyclopaedia.json").get, ("words", "relations"))
# The relations from a person to an answer, in one hop and in two.
PATHS = [*((first,) for first in RELATIONS["person"]),
         *((first, second) for first, words in RELATIONS["person"].items() if "names" in words
           for second in RELATIONS[words["value"]])]


class Hop(NamedTuple):
    """One hop of a question.

    thought: why this search comes next
    title: of the passage that the query should find, "" for any passage
    """

    query: str
    thought: str
    title: str

    def found_in(self, content):
        """Whether a retrieved text is the passage of this hop: its title and a colon, or a quote in
        Search-R1's passages."""
        content, title = content.lstrip('"'), self.title.lstrip('"')
        return not title or (content.startswith(title) and content[len(title):][:1] in ':"')


class Question(NamedTuple):
    """A question and how to answer it.

    answers: all are right, the solver gives the first
    asked: the relation that is wanted      about: the text that decides the split
    proof: what the last passage says, with ", so " behind it, or ""
    """

    text: str
    answers: tuple
    steps: tuple
    asked: str
    about: str
    proof: str = ""


class SearchQA(TextEnv):
    """Answer a question about a corpus that can only be searched.

    Observation: the question and the results of the last search, one per line.
    Actions: search[query], finish[answer]; one per turn, whatever its case. A misspelt one is none.
    Reward: 1 for finishing with the answer, whatever its case, punctuation, articles and spaces;
        otherwise 0. The F1 of the words is a metric.
    Ends when: the answer is given by finish.
    Solver: searches for each hop whose passage is not in the observation, then finishes.

    Splits: by the person that a question is about.
    Options: `hops` from the person to the answer, 1 or 2, or 0 for both; `results`, passages per
    search; `data`, a file of questions; `corpus`: `encyclopaedia` or a file; `url` of a retriever
    in place of the corpus, and `timeout`, the seconds that it has.
    """

    budget = Budget(max_turns=5, max_actions_per_turn=1, max_actions=5)
    actions = ("search[query]", "finish[answer]")
    bundled_data = "generated encyclopaedia"
    defaults = {"hops": 0, "results": 5, "data": "", "corpus": "", "url": "", "timeout": 20.0}
    ranges = {"hops": (0, 2), "results": (1, 10), "timeout": (0.01, 60)}
    example = ("I need the article about Zora Quill.", "search[Zora Quill]",
               "A question about Zora Quill.", "The article about Zora Quill.")
    instruction = ("Answer the question. A search shows the articles that fit its words best, each "
                   "after its title. Finish with the answer alone: a name or a few words.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        data.refuse_with(self, "data", "hops")
        if o["url"] and o["corpus"]:
            raise ValueError("options url and corpus of SearchQA: got both, expected one.")
        needed = 1 + max(1, o["hops"])
        if self.budget.max_actions < needed:
            raise ValueError(f"SearchQA needs {needed} turns, for a search per hop and the answer: "
                             f"got {self.budget}.")
        self.questions = _questions(o["data"])[0] if o["data"] else ()
        self.parallel, self.backend = bool(o["url"]), o["url"]
        self.index = (RemoteIndex(o["url"], o["timeout"]) if o["url"] else
                      _index(o["data"], o["corpus"]))
        if o["data"] or o["corpus"] or o["url"]:
            self.observation_space = printable_space()

    def _reset(self, rng):
        self.question = (self.questions[rng.integers(len(self.questions))] if self.questions else
                         self._ask(rng))
        self.screen, self.finished = None, False  # screen: the texts that the last search found

    def _ask(self, rng):
        """Generate a question: draw the number of hops, the relations, a person and the words."""
        most = 2 if self.budget.max_actions > 2 else 1
        hops = self.options["hops"] or int(rng.integers(most)) + 1
        path = _draw(rng, [path for path in PATHS if len(path) == hops])
        person = title = phrase = _draw(rng, titles_of("person"))
        kind, proof, steps = "person", "", []
        for relation in path:
            (sentence, value), words = encyclopaedia()[title][relation], RELATIONS[kind][relation]
            steps.append(Hop(title, f"{proof}search {title}", title))
            proof, title, kind = f"{sentence}, so ", value, words["value"]
            phrase = _draw(rng, words["asks" if relation == path[-1] else "names"]).format(phrase)
        return Question(phrase, (title,), tuple(steps), path[-1], person, proof)

    def _match(self, piece):
        """(search or finish, argument), or None. Takes time linear in the text, unlike a regex."""
        name, _, argument = piece.partition("[")
        name, argument = name.lower(), argument[:-1].strip() if argument.endswith("]") else ""
        return (name, argument) if name in ("search", "finish") and _usable(argument) else None

    def _act(self, action):
        name, argument = action
        if name == "search":
            found = self.index.search(argument, self.options["results"])
            before, self.screen = self.screen, [r["content"] for r in found]
            return Outcome(0.0, effective=self.screen != before)
        self.finished = True
        em, f1 = score_answer(argument, self.question.answers)
        return Outcome(em, terminated=True, success=em == 1.0, metrics={"em": em, "f1": f1})

    def render(self):
        if self.finished:
            return f"Correct answer: {self._line(self.question.answers[0])}"
        lines = [f"Question: {self._line(self.question.text)}"]
        if self.screen is not None:
            passages = [f"- {self._line(content, MAX_SHOWN)}" for content in self.screen]
            lines += passages or ["Nothing was found."]
        return "\n".join(lines)

    def _line(self, text, most=1000):
        return data.fitted(" ".join(text.split()), most, self.observation_space)

    def _missing(self):
        """The hops after the last one whose passage is among the latest results, `screen`."""
        steps = self.question.steps
        found = [n for n, step in enumerate(steps, 1) if any(map(step.found_in, self.screen or ()))]
        return steps[max(found, default=0):]

    def note(self):
        missing = self._missing()
        answer = f"{self.question.proof}answer {self._line(self.question.answers[0])}"
        return missing[0].thought if missing else answer

    def instance(self):
        return f"{self.question.asked}: {self.question.text}"

    def instance_split(self):
        """Decided by the person, not the question: held-out people are never asked about."""
        return split_of(self.question.about)

    def solve(self):
        # The spaces make a word the same token here and in the passages: a small model can copy it.
        queries = [step.query for step in self._missing()][:max(0, self.actions_left - 1)]
        return [f"search[ {query} ]" for query in queries] + [
            f"finish[ {self.question.answers[0]} ]"]

    def random_answer(self, rng):
        """Three times in four a search, mostly for a title in sight; else a word in sight."""
        sight = " ".join([self.question.text, *(self.screen or [])])
        if rng.random() >= 0.75:
            words = re.findall(r"[A-Za-z]+", sight)
            return f"finish[ {_draw(rng, words or ['yes'])} ]"
        if self.questions:
            return f"search[ {_draw(rng, _draw(rng, self.questions).steps).query} ]"
        titles = [title for title in encyclopaedia() if title in sight]
        if not titles or rng.random() < 0.25:
            titles = titles_of(_draw(rng, list(RELATIONS)))
        return f"search[ {_draw(rng, titles)} ]"

    @staticmethod
    def shallow_answer(texts):
        """Search the name in the question. Read its article's sentences, those that share most
        words with the question first: long questions search the first name in them; others finish
        with the first name, if one is asked for, or else with a sentence's last word."""
        question, *shown = texts[-1].partition("Question: ")[2].split("\n")
        name = (re.findall(r"[A-Z]\w+ [A-Z]\w+", question) or [one_line(question, "[]")])[-1]
        if not shown or not shown[0].startswith("- "):
            return f"search[ {name} ]"
        title, _, text = shown[0][2:].partition(": ")
        onward = title == name and len(question.split()) > 9
        named = onward or re.match(r"Wh(ere|o) |(\w+ )?[Ww]hich (town|firm|place|river|mou|pe)"
                                   r"|.*name of", question)
        asked, found = {*question.lower().split()}, []
        for sentence in sorted(text.split(". "), key=lambda s: -len(asked & {*s.lower().split()})):
            names = [w for w in re.findall(r"(?<= )[A-Z]\w+", sentence) if w not in title]
            found += names if named else [] if names else re.findall(r"\w+", sentence)[-1:]
        return f"{'search' if onward else 'finish'}[ {(found or [title])[0]} ]"

    def words(self):
        """Every word of the generated encyclopaedia and of its questions."""
        yield from (f" {' '.join(words)}" for words in WORDS.values())
        for words in itertools.chain(*(relations.values() for relations in RELATIONS.values())):
            yield re.sub(r"{\w*}", "", " ".join(["", *words["tells"], *words["asks"],
                                                 *words.get("names", ())]))


@lru_cache  # it has 150,000 characters
def printable_space():
    """The observation space of passages in any language; control characters are shown as "?"."""
    joiners = "\u200c\u200d"  # within Persian words and within emoji
    return text_space(joiners + "".join(filter(str.isprintable, map(chr, range(161, 0x110000)))))


# ---- The score of an answer ----------------------------------------------------------------------
def score_answer(said, answers):
    """(exact match, F1) of an answer: each the best over the right answers.

    An exact match has the same words, without case, punctuation, a, an and the. F1 is the harmonic
    mean of the words' precision and recall; yes, no and noanswer match fully or not at all (the
    scorers of SQuAD and HotpotQA).
    """
    pairs = [(_bare(said), _bare(answer)) for answer in answers]
    return float(any(a == b for a, b in pairs)), max(_f1(a, b) for a, b in pairs)


def _bare(text):
    kept = text.lower().translate({ord(c): None for c in string.punctuation}).split()
    # If nothing is left (the grade A), the text stays: otherwise "." would match it.
    return [w for w in kept if w not in ("a", "an", "the")] or text.lower().split()


def _f1(said, right):
    one_word = any(side in (["yes"], ["no"], ["noanswer"]) for side in (said, right))
    common = sum((Counter(said) & Counter(right)).values())
    return 0.0 if one_word and said != right else 2 * common / (len(said) + len(right))


def _usable(argument):
    """Whether a text can stand in the brackets of an action."""
    return 0 < len(argument) <= MAX_ARGUMENT and argument == one_line(argument, "[]")


# ---- Questions of the user -----------------------------------------------------------------------
@data.cached_until_changed
def _questions(path):
    """(questions, passages) of a file of records."""
    pairs = data.read_each(
        path, _question_of, "bad record in {path}: {problem!r}; expected HotpotQA's question, "
        "answer (a text or several), context and supporting_facts, if any.",
        "no answer fits into finish[...]")
    if not pairs:
        raise ValueError(f"no usable question in {path!r}.")
    questions, contexts = zip(*pairs)
    return questions, tuple({p.content: p for context in contexts for p in context}.values())


@data.cached_until_changed
def _index(path, corpus):
    """The local index of `corpus`, or of the passages that belong to the records."""
    passages = (_questions(path)[1] if path and not corpus else
                load_corpus(corpus or "encyclopaedia"))
    if not passages:
        raise ValueError(f"the records of {path!r} have no context: give corpus or url.")
    return SearchIndex(passages)


def _question_of(record):
    """(Question, passages) of one record, as the authors of HotpotQA write it; there may also be
    several answers, no context and no supporting facts. Answers that do not fit into finish[...]
    are dropped; None if none is left. The hops are the supporting titles, or the question."""
    text, answers = record["question"], record["answer"]
    if not text.strip():
        raise ValueError("no question")
    passages = [Passage(title, " ".join(" ".join(said).split()))
                for title, said in record.get("context") or []]
    support = dict.fromkeys(fact[0] for fact in record.get("supporting_facts") or [])
    hops = [(title, title) for title in support] or [(text, "")]
    steps = [Hop(one_line(query, "[]")[:MAX_ARGUMENT].strip(), "need to read more", title)
             for query, title in hops]
    answers = map(str.strip, answers if isinstance(answers, list) else [answers])
    question = Question(text, tuple(filter(_usable, answers)), tuple(steps), "answer",
                        " ".join(_bare(text)))
    return (question, passages) if question.answers else None


# ---- Corpora -------------------------------------------------------------------------------------
def load_corpus(name):
    """The passages of `encyclopaedia`, or of a file of records with `text` and perhaps `title`."""
    if name == "encyclopaedia":
        return [Passage(title, " ".join(f"{sentence}." for sentence, _ in facts.values()))
                for title, facts in encyclopaedia().items()]
    # str.strip takes nothing but a text.
    return data.read_each(name, lambda record: Passage(
        *map(str.strip, (record.get("title", ""), record["text"]))),
        "bad passage in {path}: {problem!r}; expected text and perhaps title.")


@lru_cache(maxsize=1)
def encyclopaedia():
    """The generated world, the same on every machine: title -> {relation: (sentence, value)}, each
    sentence without its full stop, in the order of the article; people first, then towns, then
    companies.

    Values are dealt evenly, so that no guess is better than another. Two relations of a title with
    values of one kind differ, such as where somebody was born and lives.
    """
    rng = np.random.default_rng(1)
    names = map(" ".join, itertools.product(WORDS["first_name"], WORDS["last_name"]))
    people = rng.permutation(list(names))[:NUM_PEOPLE].tolist()
    articles = defaultdict(dict)
    for kind, relations in RELATIONS.items():
        titles, dealt = people if kind == "person" else WORDS[kind], {}
        for relation, words in relations.items():
            values = WORDS[words["value"]]
            places = rng.permutation(np.arange(len(titles)) % len(values))
            while len(same := np.flatnonzero(places == dealt.get(words["value"], -1))):
                pair = [same[0], rng.integers(len(titles))]
                places[pair] = places[pair[::-1]]
            dealt[words["value"]] = places
            for title, i in zip(titles, places):
                sentence = _draw(rng, words["tells"])
                articles[title][relation] = (
                    sentence.format(name=title.split()[-1], value=values[i]), values[i])
    return {title: {relation: facts[relation] for relation in rng.permutation([*facts]).tolist()}
            for title, facts in articles.items()}


def titles_of(kind):
    """The encyclopaedia's titles of one kind: person, town or company."""
    return list(encyclopaedia())[:NUM_PEOPLE] if kind == "person" else WORDS[kind]


def _draw(rng, things):
    return things[rng.integers(len(things))]
