"""An HTTP server as a contender: the server is a separate process, the clients run in this one."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.contenders.http_clients import HOST, Load, first_token_seconds, throughput
from bench.contenders.http_model import write_adapter, write_model
from bench.contenders.worker import Case, MeasureOnce, serve

START_SECONDS = 120.0
FULL = 0.75
"""Minimum fraction of the requested tokens; shorter responses are not comparable."""


class Started(NamedTuple):
    """What a server is started with: the directory of the model, the directory of an adapter or None, and the port."""

    model: Path
    adapter: Path | None
    port: int


Command = Callable[[Started], list[str]]


def serve_http_load(command: Command, *, semantics: str, packages: Sequence[str], adapter_name: str = "") -> None:
    """Answer cases of clients; a server serves model and adapter of the case and restarts for others.

    A case has a model, `adapter_rank` (0, the default: no adapter), the fields of `Load`, and `streamed`: the number of
    streamed responses of each client. adapter_name: name of the adapter in requests; empty: requests name none.
    """
    with ExitStack() as running:
        started: dict[tuple[str, int], int] = {}

        def prepare(case: Case) -> MeasureOnce:
            served = case["model"], case.get("adapter_rank", 0)
            if served not in started:
                running.close()
                started.clear()
                started[served] = running.enter_context(_server(command, *served))
            port = started[served]
            load = Load(case["clients"], case["tokens"], case["answers"], adapter_name if served[1] else "")
            return lambda: measure(port, load, streamed=case["streamed"])

        serve(prepare, semantics=semantics, packages=packages)


def measure(port: int, load: Load, *, streamed: int) -> dict[str, float]:
    """Measure complete responses, then `streamed` streamed ones of each client.

    Raises ValueError if responses are shorter than requested.
    """
    rate = throughput(port, load)
    if rate.answer_tokens < FULL * load.tokens:
        raise ValueError(f"responses of {rate.answer_tokens:.1f} tokens instead of {load.tokens}")
    metrics = {"tokens_per_second": rate.tokens_per_second}
    if streamed:
        metrics["first_token_seconds"] = first_token_seconds(port, load._replace(answers=streamed))
    return metrics


@contextmanager
def _server(command: Command, model: str, rank: int) -> Iterator[int]:
    """Run a server on a free loopback port until the block ends. rank: of the adapter; 0: no adapter."""
    with tempfile.TemporaryDirectory() as directory:
        path, port = write_model(model, Path(directory, "model")), free_port()
        adapter = write_adapter(path, Path(directory, "adapter"), rank=rank) if rank else None
        server = Started(path, adapter, port)
        process = subprocess.Popen(
            command(server), stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.DEVNULL
        )
        try:
            wait_until_ready(process, port)
            throughput(port, Load(clients=1, tokens=1, answers=1))
            yield port
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a server answers.

    Raises RuntimeError if it exits, or does not listen or still loads its model after `START_SECONDS`.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with closing(http.client.HTTPConnection(HOST, port, timeout=START_SECONDS)) as probe:
            try:
                probe.request("GET", "/health")
                if probe.getresponse().status != http.HTTPStatus.SERVICE_UNAVAILABLE:
                    return
            except ConnectionError:
                pass
        time.sleep(0.05)
    raise RuntimeError(f"the server is not ready; exit status {process.poll()}")


def free_port() -> int:
    """A port of the loopback address that nobody uses."""
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
