"""A real HTTP server of a test's own on loopback, beside what is tested."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Reply = tuple[int, str]  # status and body
SLOW = 3.0  # s that a request takes which is given up


def limit_s(failure: object) -> float:
    """Return the client's limit: short where the failure is a delay, else longer than any hiccup of the machine."""
    return 1.0 if failure == SLOW else 60.0


def chat_reply(text: str) -> str:
    """Return the body of an OpenAI-compatible endpoint's answer."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


@contextmanager
def program_serving(command: Sequence[str], port: int, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server's program while the body runs, which begins once the server accepts connections or has ended."""
    with subprocess.Popen(command, **options) as process:
        try:
            while process.poll() is None:
                with socket.socket() as asked:
                    if asked.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


class JsonServer(ThreadingHTTPServer):
    """Answers each POST by `answer`, and keeps what it was sent, and where."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}  # of every answer
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        """Return what a request is answered; it runs in a thread of the request's own."""
        raise NotImplementedError

    def handle_error(self, *_: Any) -> None:
        """A client that gave up waiting is no news."""

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Serve while the body runs."""
        with self:
            thread = threading.Thread(target=self.serve_forever, daemon=True, kwargs={"poll_interval": 0.02})
            thread.start()
            yield self
            self.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    server: JsonServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        status, text = self.server.answer(self.path, body, dict(self.headers))
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...
