"""A stand-in for a vLLM server: it speaks the same protocol and misbehaves on demand.

A real server cannot be told to answer 503 twice, to cut an answer in the middle or to die at the third request; what the real
one does when all is well is tests/engine/test_server.py's.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB, END = 50, 2
Fault = Callable[["Handler", dict[str, Any]], None]


def own_words(prompt: list[int], length: int) -> list[int]:
    """The answer to a prompt: what a target would say, here a sum."""
    return [3 + (sum(prompt) + k) % (VOCAB - 3) for k in range(length)]


class StandIn(ThreadingHTTPServer):
    """`faults` are used up in order by completion requests, one each; then all is well.

    together: answers wait until as many requests are in flight.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: Any = {"data": [{"id": "tiny", "root": "example-org/tiny", "max_model_len": 65}]}
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.in_flight = self.most_in_flight = 0
        self.seconds_an_answer = 0.0
        self.together: threading.Barrier | None = None
        self.dies_after: int | None = None

    def end(self) -> None:
        """Take no more connections."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet: clients hang up here on purpose."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        self.reply(self.server.models)

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.keys.add(self.headers["Authorization"])
            server.requests.append(request)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            fault = server.faults.pop(0) if server.faults else answer
            if server.dies_after is not None and len(server.requests) > server.dies_after:
                fault = lost
                threading.Thread(target=server.end, daemon=True).start()
        if server.together is not None:
            server.together.wait(20)
        time.sleep(server.seconds_an_answer)
        # A client may send its next request as soon as it has this answer.
        with server.lock:
            server.in_flight -= 1
        fault(self, request)

    def reply(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send JSON, or text as it is."""
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)


def answer(handler: Handler, request: dict[str, Any], **changes: Any) -> None:
    """All is well; `changes` replace fields of the one choice."""
    prompt = request["prompt"]
    choice = {
        "token_ids": own_words(prompt, request["max_tokens"]),
        "prompt_token_ids": prompt,
        "finish_reason": "length",
    }
    handler.reply({"choices": [{**choice, **changes}]})


def with_changes(**changes: Any) -> Fault:
    """A well-formed answer that says something else."""
    return lambda handler, request: answer(handler, request, **changes)


def status(code: int, body: Any = "", headers: dict[str, str] | None = None) -> Fault:
    """An HTTP error."""
    return lambda handler, request: handler.reply(body, code, headers)


def lost(handler: Handler, request: dict[str, Any]) -> None:
    """The connection ends without an answer."""
    handler.close_connection = True


def cut(handler: Handler, request: dict[str, Any]) -> None:
    """The connection ends in the middle of the answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def page(handler: Handler, request: dict[str, Any]) -> None:
    """A proxy's page instead of JSON."""
    handler.reply("<html>one moment please</html>")


def hang(seconds: float) -> Fault:
    """An answer that comes too late."""

    def late(handler: Handler, request: dict[str, Any]) -> None:
        time.sleep(seconds)
        answer(handler, request)

    return late


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """A stand-in, answering until the end of the block."""
    server = StandIn()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.end()
