"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures a training run while clients send hostile requests: the training rate, and the time of a valid request.

    python -m bench hostile_requests [--repeats 3] [--out bench/results/hostile_requests.jsonl]

Five clients send bodies of 3.4 MB whose last of 350,000 field names occurs twice. Ten clients send a prompt of
4,000,000 digits. Each sends the next request when the response to the last one has arrived. The run is the default run
on the embedded policy. Periods without and with hostile requests alternate in one process; the first pair is warmup. A
valid request is sent every half second in both periods. At the end the process receives SIGTERM while hostile requests
are in flight; the time until its exit includes the groups in flight and the final checkpoint.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.fingerprint import ROOT, fingerprint
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "hostile_requests"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
DUPLICATE_FIELDS, LONG_PROMPTS = 5, 10
PERIOD_SECONDS, QUICK_SECONDS = 20.0, 5.0
RUN = ("--profile", "local-m3", "--steps", "100000", "--eval", "off", "--monitor.display", "none")
HOST = "127.0.0.1"


def duplicate_fields() -> bytes:
    """A body of 350,001 fields whose last name occurs twice."""
    return b'{"prompt":"a",' + b",".join(b'"%x":0' % number for number in range(350_000)) + b',"5572f":1}'


def long_prompt() -> bytes:
    """A prompt of 4,000,000 digits."""
    return b'{"prompt":"' + b"7" * 4_000_000 + b'"}'


class HostileClients:
    """Sends hostile requests from threads while `active` is set. statuses: of all responses."""

    def __init__(self, port: int) -> None:
        self.active, self.statuses = threading.Event(), list[int]()
        self._port, self._stopped = port, False
        bodies = [duplicate_fields()] * DUPLICATE_FIELDS + [long_prompt()] * LONG_PROMPTS
        for body in bodies:
            threading.Thread(target=self._send, args=(body,), daemon=True).start()

    def stop(self) -> None:
        """Send no further request."""
        self._stopped = True

    def _send(self, body: bytes) -> None:
        while not self._stopped:
            self.active.wait()
            with suppress(OSError, http.client.HTTPException):
                self.statuses.append(post(self._port, body))


def post(port: int, body: bytes) -> int:
    """Send one request to /v1/completions and return the status of the response."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


class Period(NamedTuple):
    """steps_per_second: of training. slowest: seconds of the slowest valid request."""

    steps_per_second: float
    slowest: float


class HostileRun:
    """A training run in a process of its own, with its hostile clients. Ends the process at the end of the block."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server((HOST, 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._metrics = directory / "run" / "metrics.jsonl"
        command = [sys.executable, "pipeline.py", *RUN, "--run-dir", str(directory / "run")]
        self.process = subprocess.Popen(
            [*command, "--server.port", str(self.port)], cwd=ROOT, stdout=sys.stderr, stderr=sys.stderr
        )
        self.clients = HostileClients(self.port)

    def __enter__(self) -> HostileRun:
        while self.steps() < 3:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended with status {self.process.returncode}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.stop()
        self.process.kill()
        self.process.wait()

    def steps(self) -> int:
        """Number of training steps so far."""
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

    def period(self, seconds: float, *, hostile: bool) -> Period:
        """Measure for this time."""
        (self.clients.active.set if hostile else self.clients.active.clear)()
        time.sleep(1.0)
        steps, began, slowest = self.steps(), time.monotonic(), 0.0
        while time.monotonic() - began < seconds:
            asked = time.monotonic()
            status = post(self.port, json.dumps({"prompt": "1 + 1 =", "max_tokens": 8}).encode())
            if status != 200:
                raise RuntimeError(f"a valid request received status {status}")
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.5)
        return Period((self.steps() - steps) / (time.monotonic() - began), slowest)

    def terminate(self) -> tuple[int, float]:
        """Send SIGTERM with hostile requests in flight; return the exit status and the seconds until the exit."""
        self.clients.active.set()
        time.sleep(2.0)
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        return status, time.monotonic() - began


def measure(repeats: int, seconds: float) -> list[Measurement]:
    """Measure pairs of periods, then the end of the process."""
    alone: list[Period] = []
    attacked: list[Period] = []
    with tempfile.TemporaryDirectory() as directory, HostileRun(Path(directory)) as run:
        for _ in range(repeats + 1):
            alone.append(run.period(seconds, hostile=False))
            attacked.append(run.period(seconds, hostile=True))
        status, exit_seconds = run.terminate()
        if status != 0:
            raise RuntimeError(f"after SIGTERM the run ended with status {status}")
    return measurements(alone[1:], attacked[1:], exit_seconds)


def measurements(alone: Sequence[Period], attacked: Sequence[Period], exit_seconds: float) -> list[Measurement]:
    """One measurement per contender and metric; the contenders are the two kinds of period."""
    here = fingerprint()
    made = partial(
        Measurement,
        question=NAME,
        case={"duplicate_fields": DUPLICATE_FIELDS, "long_prompts": LONG_PROMPTS},
        versions={"mlx": here.machine.mlx_version},
        command=COMMAND,
        fingerprint=here,
    )
    found = []
    for contender, periods in (("without", list(alone)), ("with hostile requests", list(attacked))):
        found += [
            made(
                contender=contender,
                metric="steps_per_second",
                unit="steps/s",
                better="higher",
                values=[period.steps_per_second for period in periods],
                semantics="training steps per second;",
            ),
            made(
                contender=contender,
                metric="valid_request_seconds",
                unit="seconds",
                better="lower",
                values=[period.slowest for period in periods],
                semantics="slowest of the valid requests of a period, eight tokens each;",
            ),
        ]
    ended = made(
        contender="with hostile requests",
        metric="exit_seconds",
        unit="seconds",
        better="lower",
        values=[exit_seconds],
        semantics="from SIGTERM to the end of the process",
    )
    return [*found, ended]


def table(results: Sequence[Measurement]) -> str:
    """Format the results as Markdown, with the median ratio of the training rates, pair by pair."""
    rates = [one.values for one in results if one.metric == "steps_per_second"]
    ratio = statistics.median(attacked / alone for alone, attacked in zip(*rates, strict=True))
    return f"{report(results)}\n\nTraining rate with hostile requests: {ratio:.2f} of the rate without."


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure one pair of five seconds",
    results=RESULTS,
    measure=lambda repeats, quick: measure(1, QUICK_SECONDS) if quick else measure(repeats, PERIOD_SECONDS),
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
