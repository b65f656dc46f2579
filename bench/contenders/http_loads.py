"""A server as a contender: it runs in a process of its own, and the clients in this one."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from bench.contenders.http_clients import HOST, Load, first_token_seconds, throughput
from bench.contenders.http_model import write_model
from bench.contenders.loop import Case, Once, serve

START_SECONDS = 120.0
FULL = 0.75
"""Of the tokens asked for; shorter answers would not be comparable."""


def serve_loads(module: str, options: Sequence[str], *, semantics: str, packages: Sequence[str]) -> None:
    """Answer cases of clients; the server is `module`, run by this interpreter, and starts anew with another model."""
    with ExitStack() as running:
        started: dict[str, int] = {}

        def prepare(case: Case) -> Once:
            if case["model"] not in started:
                running.close()
                started.clear()
                started[case["model"]] = running.enter_context(_server(module, options, case["model"]))
            port = started[case["model"]]
            load = Load(case["clients"], case["tokens"], case["answers"])
            return lambda: measure(port, load)

        serve(prepare, semantics=semantics, packages=packages)


def measure(port: int, load: Load) -> dict[str, float]:
    """First whole answers, then streamed ones. Raises ValueError if answers are shorter than asked for."""
    rate = throughput(port, load)
    if rate.answer_tokens < FULL * load.tokens:
        raise ValueError(f"answers of {rate.answer_tokens:.1f} tokens, where {load.tokens} were asked for")
    return {"tokens_per_second": rate.tokens_per_second, "first_token_seconds": first_token_seconds(port, load)}


@contextmanager
def _server(module: str, options: Sequence[str], model: str) -> Iterator[int]:
    """Run a server on a free port of the loopback until the block ends."""
    with tempfile.TemporaryDirectory() as directory:
        path, port = write_model(model, Path(directory, "model")), _free_port()
        command = [sys.executable, "-m", module, "--model", str(path), "--port", str(port), *options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until_it_listens(process, port)
            throughput(port, Load(clients=1, tokens=1, answers=1))
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    """Raises RuntimeError if the server ends instead, or takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with closing(socket.socket()) as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the server does not answer; its exit status is {process.poll()}")


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
