"""An HTTP server in this process that answers in OpenAI's chat format."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(BaseHTTPRequestHandler):
    """Responds in OpenAI's chat format with the requested number of tokens, at most `limit`, and with `status`."""

    limit, status = 1_000, 200
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        """Send a complete response, or a stream whose first event has no text."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(self.status)
        self.end_headers()
        if body.get("stream"):
            for delta in ({"role": "assistant"}, {"content": "a"}, {"content": "b"}):
                self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            usage = {"completion_tokens": min(body["max_tokens"], self.limit)}
            self.wfile.write(json.dumps({"usage": usage}, indent=1).encode())

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Log nothing."""


@contextmanager
def fake_server(limit: int = 1_000, status: int = 200) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Its port and the requests that it received."""
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (FakeServer,), {"asked": asked, "limit": limit, "status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()
            thread.join()
