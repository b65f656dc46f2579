"""Teachers for tests: models with the tokenizer of the embedded policy, and a server that answers as a test says."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx

EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"

Answer = tuple[int, dict[str, Any]]
"""Status and body of a response."""


def other_model(directory: Path, *, scale: float = 0.05) -> Path:
    """Write the embedded model with changed weights. scale: of the noise, as a share of each weight."""
    shutil.copytree(EMBEDDED, directory)
    file = directory / "model.safetensors"
    weights = {name: array * (1 + scale * mx.sin(7 * array * 100)) for name, array in mx.load(str(file)).items()}  # type: ignore[union-attr]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return directory


def scored(body: dict[str, Any], *, nats: float = -0.5) -> Answer:
    """Answer as a server whose model gives every token the same log-probability, and other tokens lower ones."""
    prompts = body["prompt"]
    top = body["prompt_logprobs"]
    choices = []
    for index, prompt in enumerate(prompts):
        tokens = prompt if isinstance(prompt, list) else [ord(one) for one in prompt]
        positions = [
            {str(token): {"logprob": nats}} | {str(token + k): {"logprob": nats - k} for k in range(1, top)}
            for token in tokens[1:]
        ]
        choices.append({"index": index, "text": "", "prompt_logprobs": [None, *positions]})
    return 200, {"choices": choices[::-1]}


class TeacherServer:
    """A server. answer: the response to the body of a request. requests: what it received, with the headers."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer] = scored) -> None:
        self.answer = answer
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                status, found = server.answer(body)
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """End the server."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
