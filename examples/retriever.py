"""A retriever for SearchQA: BM25 over a corpus, served over HTTP on this machine.

    python -m examples.retriever --corpus passages.jsonl
    make train ENV=searchqa ARGS="--env-arg url=http://127.0.0.1:8100"

Tests: `python -m pytest tests/environments/test_retriever.py`.
"""

import argparse
import contextlib
import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from minragen.environments.search import SearchIndex, one_line
from minragen.environments.searchqa import load_corpus

MAX_RESULTS = 50  # passages in one reply
MAX_REQUEST = 2**16  # bytes; a longer request is refused
MAX_CLIENTS = 128  # connections that are answered at a time
ARRIVAL = 10.0  # seconds in which a request must have arrived
PATIENCE = 1.0  # seconds that a connection beyond MAX_CLIENTS waits before it gets 503


def main():
    """Serve a corpus until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.retriever")
    parser.add_argument("--port", type=int, default=8100, help="on 127.0.0.1 [8100]; 0: a free one")
    parser.add_argument("--corpus", default="encyclopaedia",
                        help="encyclopaedia or a file of passages [encyclopaedia]")
    arguments = parser.parse_args()
    try:
        index = SearchIndex(load_corpus(arguments.corpus))
        server = SearchServer(index, arguments.port)
    except (ValueError, OSError, OverflowError) as problem:
        sys.exit(f"error: {one_line(str(problem))}")
    print(f"{len(index.passages):,} passages at http://127.0.0.1:{server.server_port}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    print("stopped")


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
        # Against DNS rebinding: such a page sends its own name.
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


if __name__ == "__main__":
    main()
