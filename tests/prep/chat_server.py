"""A scripted OpenAI-compatible server on loopback: what it answers is a function of the request alone, unless it is told."""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "scripted"


def reply(body: dict) -> dict:
    """An answer that tells which messages it answers."""
    said = body["messages"][-1]["content"]
    message = {"role": "assistant", "content": f"re {len(body['messages'])}: {said}"}
    return completion(message)


def completion(message: dict, finish: str = "stop", tokens: int = 7) -> dict:
    """A chat completion as servers send it."""
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": tokens}}


class ChatServer(ThreadingHTTPServer):
    """Answers each request by `script(body)`: a completion, bytes, (status, headers, value), or an exception to act out.

    ConnectionResetError resets the connection. `requests` holds every body, `most` the most that were in flight at once.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, script: Callable[[dict], object] = reply, models: object = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.models = {"object": "list", "data": [{"id": MODEL}]} if models is None else models
        self.requests, self.headers, self.flying, self.most = [], [], 0, 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """What --endpoint takes."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address):
        """Clients that are killed are no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *parts):
        """Say nothing."""

    def do_GET(self):
        """The models."""
        self.send(self.server.models if self.path == "/v1/models" else (404, {}, {"error": "no such path"}))

    def do_POST(self):
        """A chat."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        with self.server.lock:
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.flying += 1
            self.server.most = max(self.server.most, self.server.flying)
        try:
            outcome = self.server.script(body)
        except ConnectionResetError:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())  # the handler's own files would keep it open
            self.close_connection = True
            return
        finally:
            with self.server.lock:
                self.server.flying -= 1
        self.send(outcome)

    def send(self, outcome: object) -> None:
        """Write a response."""
        status, headers, value = outcome if isinstance(outcome, tuple) else (200, {}, outcome)
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(script: Callable[[dict], object] = reply, models: object = None):
    """A running server."""
    with ChatServer(script, models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
