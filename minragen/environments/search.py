"""Full-text search: BM25 in memory, and the client of a search over HTTP."""

import functools
import json
import math
import re
import time
import urllib.request
from collections import Counter, defaultdict
from http.client import HTTPException
from typing import NamedTuple
from urllib.error import HTTPError

import numpy as np

from minragen.environments.limits import ServerGone, in_time

MAX_REPLY = 2**22  # bytes; a longer reply of a server is refused
PAUSES = (0.1, 0.2, math.inf)  # seconds after each failed try of `fetch`; inf: give up


def words_of(text):
    """The lower-case words of a text: runs of letters and digits."""
    return re.findall(r"[^\W_]+", text.lower())


def one_line(text, without=""):
    """A text on one line, without control characters and the characters of `without`."""
    kept = "".join(c if c.isprintable() and c not in without else " " for c in text)
    return " ".join(kept.split())


class BM25:
    """An inverted index of texts, ranked by Okapi BM25.

        score(q, d) = sum over words w of q of  idf(w) * f (k1 + 1) / (f + k1 (1 - b + b |d| / avg))
        idf(w)      = ln(1 + (N - n + 1/2) / (n + 1/2))

    f: count of w in d    |d|: words of d, avg their mean    N: texts, n: texts that contain w
    (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", eq. 3.15; the 1 + inside
    the logarithm is Lucene's and keeps idf above 0 for words of most texts.) A word that occurs
    twice in the query counts twice.
    """

    def __init__(self, texts, k1=1.5, b=0.75):
        counts = [Counter(words_of(text)) for text in texts]
        lengths = np.array([count.total() for count in counts])
        norm = 1 - b + b * lengths / (lengths.mean() or 1) if counts else lengths
        found = defaultdict(list)  # word -> [(index of a text, count in it)]
        for i, count in enumerate(counts):
            for word, times in count.items():
                found[word].append((i, times))
        self.size, self.postings = len(counts), {}  # word -> (indices, terms of the sum above)
        for word, pairs in found.items():
            where, f = np.array(pairs).T
            idf = np.log(1 + (self.size - len(where) + 0.5) / (len(where) + 0.5))
            self.postings[word] = where, idf * f * (k1 + 1) / (f + k1 * norm[where])

    def top(self, query, k=3):
        """[(index, score)] of at most k texts that share a word with the query, best first."""
        scores = np.zeros(self.size)
        for word, times in Counter(words_of(query)).items():
            if word in self.postings:
                where, weights = self.postings[word]
                scores[where] += times * weights
        best = np.flatnonzero(scores)
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        return [(int(i), float(scores[i])) for i in best]


class Passage(NamedTuple):
    """One entry of a corpus. `content` is what is shown."""

    title: str
    text: str

    @property
    def content(self):
        return f"{self.title}: {self.text}" if self.title else self.text


class SearchIndex:
    """Passages behind BM25. A title counts twice, so that its own article ranks above mentions."""

    def __init__(self, passages):
        self.passages = list(passages)
        self.bm25 = BM25([f"{p.title} {p.content}" for p in self.passages])

    def search(self, query, k):
        """The k best passages, in the form of the HTTP API: [{"id", "content", "score"}]."""
        return [{"id": f"doc_{i}", "content": self.passages[i].content, "score": score}
                for i, score in self.bm25.top(query, k)]


class RemoteIndex:
    """A retriever behind `POST url/retrieve`: RAGEN's server or examples/retriever.py.

    timeout: seconds that one search may take, all tries together
    raises: RuntimeError if no usable reply comes, ServerGone if a later try may get one
    """

    def __init__(self, url, timeout=20.0):
        if not re.fullmatch(r"https?://[^/\s]+\S*", url):
            raise ValueError(f"bad retriever: got {url!r}, expected http://host:port.")
        self.url, self.timeout = url.rstrip("/"), timeout

    def search(self, query, k):
        """The best k passages, as `SearchIndex.search` returns them."""
        try:
            reply = fetch(f"{self.url}/retrieve", self.timeout, {"query": query, "top_k": k})
            if not all(isinstance(found["content"], str) for found in reply["results"]):
                raise TypeError("a passage is no text")
            return reply["results"][:k]
        except Exception as problem:  # of the connection, or of what it says
            kind = ServerGone if isinstance(problem, ServerGone) else RuntimeError
            raise kind(f"{self.url} does not answer like a retriever: "
                       f"{one_line(str(problem))[:300]}. Is it running? "
                       f"python -m examples.retriever") from None


def fetch(url, seconds, body=None, pauses=PAUSES, **headers):
    """The JSON with which a server answers a GET, or a POST of `body`.

    seconds: that all tries together may take      pauses: one for each try
    raises: RuntimeError if no reply comes, ServerGone if a later try may get one; the error of the
        last try is its cause. For a reply that is no JSON, what json.loads raises
    """
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {
        "Content-Type": "application/json", **headers})
    deadline = time.monotonic() + seconds
    for tries, pause in enumerate(pauses, 1):  # noqa: B007 (in the error)
        try:
            left = max(0.01, deadline - time.monotonic())
            return json.loads(in_time(left, read_bounded, request, left))
        except (OSError, HTTPException) as error:
            # Below 500 the server understood and refused: it would refuse again, unless it is busy.
            problem, code = error, getattr(error, "code", 500)
            retry = code >= 500 or code in (408, 429)
            asked = (getattr(error, "headers", None) or {}).get("Retry-After", "")
            wait = max(pause, int(asked)) if re.fullmatch(r"[0-9]{1,4}", asked) else pause
        if not retry or time.monotonic() + wait >= deadline:
            break
        time.sleep(wait)
    said = f"{one_line(str(problem)) or type(problem).__name__} (try {tries} of {len(pauses)})"
    raise (ServerGone if retry else RuntimeError)(said) from problem


def read_bounded(request, seconds):
    """The body of a server's reply. Raises ValueError if it has more than MAX_REPLY bytes, OSError
    if none come for so many seconds."""
    try:
        response = direct_opener().open(request, timeout=seconds)
    except HTTPError as error:
        if error.fp:
            error.msg += f" {error.read(300).decode(errors='replace')}"
        raise
    with response:
        reply = response.read(MAX_REPLY + 1)
    if len(reply) > MAX_REPLY:
        raise ValueError("endless reply")
    return reply


@functools.cache
def direct_opener():
    """Opens an address itself. A redirect is an error, since a server must not choose where a
    request or a key goes. No proxy: one for the web cannot reach a server on this machine."""
    redirects = urllib.request.HTTPRedirectHandler()
    redirects.redirect_request = lambda *_: None
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), redirects)
