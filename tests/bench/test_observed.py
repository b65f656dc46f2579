"""What the benchmark of observation counts: tokens after the first steps, and the events of the dashboard."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench import overlap
from bench.contenders import event_client
from bench.contenders.clotho_observed import FIRST, rate, tokens_of
from tests.bench.made_measurements import measurement
from tests.training_run.records.display_examples import step


def test_the_rate_counts_the_tokens_after_the_first_steps() -> None:
    """Times are those of the reports; the tokens of a report were sampled before it."""
    steps = [(float(number), 100) for number in range(FIRST)] + [(5.0, 40), (7.0, 60)]
    assert rate(steps) == pytest.approx((40 + 60) / (7.0 - (FIRST - 1)))


def test_the_tokens_of_a_step_are_those_of_all_its_groups() -> None:
    """Trained or discarded."""
    report = step(3)
    assert report.discarded == ()
    expected = sum(len(one.tokens) for group in report.trained for one in group.scored.group.completions)
    assert tokens_of(report) == expected > 0


class Events(BaseHTTPRequestHandler):
    """A server that is not ready for the first request, and then sends two events and a comment."""

    requests = 0

    def do_GET(self) -> None:
        """Answer 503 once."""
        type(self).requests += 1
        ready = type(self).requests > 1
        self.send_response(200 if ready else 503)
        self.end_headers()
        if ready:
            self.wfile.write(b"event: metrics\ndata: {}\n\n: \n\nevent: end\ndata: {}\n\n")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_client_of_the_dashboard_waits_for_the_server_and_counts_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are no events."""
    monkeypatch.setattr(event_client, "PAUSE_SECONDS", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Events) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert event_client.follow(server.server_address[1]) == 2
        server.shutdown()
    assert Events.requests == 2


def test_the_table_has_the_ratio_of_observed_to_other_runs() -> None:
    """One row per case."""
    rates = {"clotho": [99.0, 98.0], "unobserved": [100.0, 100.0]}
    table = overlap.table([measurement(values, contender=name, mode="async") for name, values in rates.items()])
    assert "clotho / unobserved" in table
    assert "0.98" in table
