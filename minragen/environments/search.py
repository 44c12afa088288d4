"""Full-text search: BM25 in memory, and the same search over HTTP.

Reading order: `BM25`, `SearchIndex`, `RemoteIndex`, `fetch`, `SearchServer`. WebShop uses `BM25`,
Lean and OpenEnv use `fetch`.
"""

import contextlib
import functools
import json
import math
import re
import socket
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import numpy as np

from minragen.environments.limits import in_time
from minragen.envs import ServerGone

MAX_RESULTS = 50  # passages in one reply of the server
MAX_REQUEST = 2**16  # bytes; a longer request is refused
MAX_REPLY = 2**22  # bytes; a longer reply of a server is refused
MAX_CLIENTS = 128  # connections that the server answers at a time
PATIENCE = 1.0  # seconds that another one waits for a place before it gets 503
ARRIVAL = 10.0  # seconds in which a request must have arrived
BUSY = (408, 429)  # statuses of a server that asks to try again
PAUSES = (0.1, 0.2, math.inf)  # seconds to wait after each failed try of `fetch`


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
    """A retriever behind `POST url/retrieve`: RAGEN's server or `SearchServer`.

    timeout: seconds that one search may take, all tries together
    raises: RuntimeError if no usable reply comes, ServerGone if another time one may. An error
        must not be trained on
    """

    def __init__(self, url, timeout=20.0):
        if not re.fullmatch(r"https?://[^/\s]+\S*", url):
            raise ValueError(f"bad retriever: got {url!r}, expected http://host:port.")
        self.url, self.timeout = url.rstrip("/"), timeout

    def search(self, query, k):
        """The best k passages, as `SearchIndex.search` returns them."""
        try:
            match fetch(f"{self.url}/retrieve", self.timeout, {"query": query, "top_k": k}):
                case {"results": [*results]} if all(
                        isinstance(r, dict) and isinstance(r.get("content"), str) for r in results):
                    return results[:k]
            raise ValueError
        except (ArithmeticError, MemoryError, ValueError, RecursionError):
            kind, problem = RuntimeError, 'the reply is not {"results": [{"content": ...}]}'
        except RuntimeError as error:
            kind, problem = type(error), error
        raise kind(f"the retriever at {self.url} gave no results: {problem}. Is it running? "
                   f"python -m minragen.environments.searchqa serve")


def fetch(url, seconds, body=None, **headers):
    """The JSON with which a server answers a GET, or a POST of `body`.

    seconds: that all tries together may take
    raises: RuntimeError if no reply comes, ServerGone if another time one may; the error of the
        last try is its cause. For a reply that is no JSON, what json.loads raises
    """
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {
        "Content-Type": "application/json", **headers})
    deadline = time.monotonic() + seconds
    for tries, pause in enumerate(PAUSES, 1):  # noqa: B007 (in the error)
        try:
            return json.loads(in_time(deadline - time.monotonic(), read_bounded, request, deadline))
        except (OSError, HTTPException) as error:
            # Below 500 the server understood and refused: it would refuse again, unless it is busy.
            problem, code = error, getattr(error, "code", 500)
            retry = code >= 500 or code in BUSY
            asked = (getattr(error, "headers", None) or {}).get("Retry-After", "")
            wait = max(pause, int(asked)) if re.fullmatch(r"[0-9]{1,4}", asked) else pause
        if not retry or time.monotonic() + wait >= deadline:
            break
        time.sleep(wait)
    said = f"{one_line(str(problem)) or type(problem).__name__} (try {tries} of {len(PAUSES)})"
    raise (ServerGone if retry else RuntimeError)(said) from problem


def read_bounded(request, deadline):
    """The body of a server's reply, which may drip until the deadline (else OSError) and have
    MAX_REPLY bytes (else ValueError)."""
    left, reply = max(0.01, deadline - time.monotonic()), b""
    with direct_opener().open(request, timeout=left) as response:
        while piece := response.read1(2**16):
            reply += piece
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
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


class SearchServer(ThreadingHTTPServer):
    """A server of `index` on 127.0.0.1, not yet running: GET /health, POST /retrieve.

    /retrieve takes {"query": text, "top_k": 1 to 50 (or "k"), default 10} and returns {"query",
    "method", "results": [{"id", "content", "score"}], "num_results"}. A bad request gets status 400
    with {"error"}. port 0: any free port, named by `server_port`.
    """

    def __init__(self, index, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.index, self.places = index, threading.Semaphore(MAX_CLIENTS)

    def process_request(self, connection, address):
        if self.places.acquire(timeout=PATIENCE):
            super().process_request(connection, address)
        else:
            with contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")
            super().shutdown_request(connection)

    def shutdown_request(self, connection):
        super().shutdown_request(connection)
        self.places.release()


class Handler(BaseHTTPRequestHandler):
    """One request of a SearchServer."""

    timeout = ARRIVAL  # also seconds in which a client has to take the answer

    def handle(self):
        self.limit = threading.Timer(ARRIVAL, self.connection.shutdown, [socket.SHUT_RDWR])
        self.limit.start()  # dripping bytes do not renew it
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()
        self.limit.cancel()

    def do_GET(self):
        self.limit.cancel()
        self._answer("/health", lambda: {
            "status": "healthy", "corpus_size": len(self.server.index.passages),
            "index_type": "bm25", "index_loaded": True})

    def do_POST(self):
        self._answer("/retrieve", self._retrieve)

    def _answer(self, path, content_of):
        """Send what `content_of` returns; status 404 for another path, 400 if it raises."""
        status, content = 404, {"error": f"unknown path: expected {path}, got {self.path!r}"}
        # A web page that pointed its own name at this machine sends that name.
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            status, content = 403, {"error": "expected Host to be 127.0.0.1 or localhost"}
        elif self.path == path:
            try:
                status, content = 200, content_of()
            except (ValueError, RecursionError) as problem:
                status, content = 400, {"error": str(problem)}
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _retrieve(self):
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and int(length) <= MAX_REQUEST):
            raise ValueError(f"expected a Content-Length of at most {MAX_REQUEST} bytes")
        body = json.loads(self.rfile.read(int(length)))
        self.limit.cancel()
        query = body.get("query") if isinstance(body, dict) else None
        if not isinstance(query, str) or not query.strip():
            raise ValueError('expected {"query": text}')
        k = body.get("top_k", body.get("k", 10))
        if type(k) is not int or not 1 <= k <= MAX_RESULTS:
            raise ValueError(f"expected top_k to be an integer of 1 to {MAX_RESULTS}")
        results = self.server.index.search(query, k)
        return {"query": query, "method": "bm25", "results": results, "num_results": len(results)}

    def log_message(self, *_):
        """Nothing: a line per search would hide everything else."""
