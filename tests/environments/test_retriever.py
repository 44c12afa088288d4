"""The server of examples/retriever.py: its API, what it refuses, many and slow clients."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest
from conftest import begin

from examples.retriever import SearchServer
from minragen.environments.search import Passage, SearchIndex
from minragen.environments.searchqa import load_corpus

ROOT = Path(__file__).parents[2]
started = partial(begin, "searchqa")


@pytest.fixture(scope="module")
def retriever():
    """The address at which the command serves the encyclopaedia, as it prints it."""
    command = [sys.executable, "-m", "examples.retriever", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        yield re.fullmatch(r"360 passages at (http://\S+)\n", server.stdout.readline())[1]
        server.terminate()


@contextmanager
def serving(index):
    """The addresses of a server of the index, for `ask` and for a socket."""
    with SearchServer(index) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.server_address
        server.shutdown()


def ask(retriever, method, path, body=None, **headers):
    connection = HTTPConnection(retriever.removeprefix("http://"), timeout=5)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read() or "null")


class TestRetriever:
    def test_it_tells_its_health_and_returns_passages_in_the_apis_form(self, retriever):
        assert retriever.startswith("http://127.0.0.1:")  # and so reachable from this machine only
        assert ask(retriever, "GET", "/health") == (200, {
            "status": "healthy", "corpus_size": 360, "index_type": "bm25", "index_loaded": True})
        results = SearchIndex(load_corpus("encyclopaedia")).search("lives in", 50)
        for query, options, count in (("lives in", {"k": 1}, 1), ("zebra", {}, 0),
                                      ("lives in", {"top_k": 50, "k": 9}, 50)):
            body = json.dumps({"query": query, **options})
            assert ask(retriever, "POST", "/retrieve", body) == (200, {
                "query": query, "method": "bm25", "results": results[:count], "num_results": count})

    def test_what_it_cannot_take_is_refused_with_the_reason(self, retriever):
        for body in (b"", b"[]", b"\xff", b'{"query": " "}', b'{"query": "x", "top_k": 51}',
                     b'{"query": "x", "k": true}', b"[" * 50_000, b'{"query": "x"}' + b" " * 2**16):
            status, reply = ask(retriever, "POST", "/retrieve", body)
            assert (status, list(reply)) == (400, ["error"]) and reply["error"], body
        assert ask(retriever, "POST", "/health")[0] == ask(retriever, "GET", "/x")[0] == 404

    def test_a_name_that_was_pointed_at_this_machine_reads_nothing(self, retriever):
        """So does a web page that has its own name resolve to 127.0.0.1 (DNS rebinding)."""
        for host, status in (("evil.example:80", 403), ("localhost:1", 200), ("127.0.0.1", 200)):
            assert ask(retriever, "GET", "/health", Host=host)[0] == status

    def test_more_clients_than_places_wait_or_get_503_and_half_a_request_ends(self, monkeypatch):
        monkeypatch.setattr("examples.retriever.PATIENCE", 0.4)
        monkeypatch.setattr("examples.retriever.ARRIVAL", 1.2)
        monkeypatch.setattr("examples.retriever.MAX_CLIENTS", 2)
        with serving(SearchIndex([Passage("a", "b")])) as (url, address):
            silent = [socket.create_connection(address) for _ in range(2)]
            with socket.create_connection(address, 0.2) as waiting, pytest.raises(TimeoutError):
                waiting.recv(1)
            assert ask(url, "GET", "/health")[0] == 503
            began = time.monotonic()  # the silent ones are sent away, though they drip
            while ask(url, "GET", "/health")[0] == 503 and time.monotonic() < began + 9:
                for client in silent:
                    with suppress(OSError):
                        client.send(b"G")
            assert ask(url, "GET", "/health")[0] == 200
            for client in silent:
                client.close()

    def test_an_episode_over_http_is_the_local_one(self, retriever):
        for seed in range(3):
            local, remote = started(seed), started(seed, url=f"{retriever}/")
            assert remote.parallel and remote.backend and not local.parallel
            for answer in ('search[who plays chess é "x"]', *local.solve()):
                assert local.step(answer) == remote.step(answer)
