"""A run under hostile requests: it serves valid requests, and a signal ends its process. See also `test_signals`."""

from __future__ import annotations

import http.client
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from bench.soak_clients import BODIES, COMPLETIONS, LONG_PROMPT, MANY_KEYS, post
from tests.e2e.pipeline_process import Run, assert_recorded, metrics

SETTINGS = ("--steps", "5000")
VALID = b'{"prompt": "1 + 1 =", "max_tokens": 4}'


class HostileClients:
    """Fifteen threads that send one hostile request after the other. statuses: of all responses."""

    def __init__(self, port: int) -> None:
        self.statuses = list[int]()
        self._port, self._stopped = port, False
        for name in (*[MANY_KEYS] * 5, *[LONG_PROMPT] * 10):
            threading.Thread(target=self._send, args=BODIES[name](), daemon=True).start()

    def stop(self) -> None:
        """Send no further request."""
        self._stopped = True

    def _send(self, path: str, body: bytes) -> None:
        while not self._stopped:
            with suppress(OSError, http.client.HTTPException):
                self.statuses.append(post(self._port, path, body))


def port_of(running: Run) -> int:
    """Return the port of the server."""
    return int(running.wait_for("API").split()[1].split(":")[2].split("/")[0])


@pytest.mark.slow
def test_a_signal_ends_a_run_with_hostile_requests_in_flight(tmp_path: Path) -> None:
    """Fifteen clients send one request after the other. A valid request succeeds. The exit status is 0."""
    with Run(tmp_path / "run", *SETTINGS) as running:
        port = port_of(running)
        running.wait_for("tokens/s")
        clients = HostileClients(port)
        try:
            while len(clients.statuses) < 15:
                assert post(port, COMPLETIONS, VALID) == 200
            running.send(signal.SIGTERM)
            result = running.finish()
        finally:
            clients.stop()
    assert result.status == 0, result
    assert result.err == ""
    assert set(clients.statuses) <= {400, 408, 503}
    assert_recorded(tmp_path / "run", result.accounting, steps=len(metrics(tmp_path / "run")))
