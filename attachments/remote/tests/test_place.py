"""One inference server as the sampler sees it, the choice between servers, and their metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from attachments.remote.place import (
    PUSH_BOUNDS,
    Place,
    RemoteGauges,
    RemoteServerGauge,
    freest,
    measured,
    server_metrics,
    shown,
)
from attachments.remote.sections import REMOTE_METRICS
from attachments.remote.server import Traffic
from protocols.compute import Distribution
from tests.metric_samples import Values, require

SERVER = RemoteServerGauge(
    name="http://a:1", state="ready", version=6, lag=1, rows=8, groups=21, tokens=900, failures=14, restarts=2,
    bytes_sent=5 << 20, bytes_received=1 << 20, push_seconds=0.02,
    pushes=Distribution(bounds=(0.05,), counts=(9, 1), total=1.75),
)  # fmt: skip

METRICS = {
    "clotho_remote_server_state": "gauge", "clotho_remote_server_weights_version": "gauge",
    "clotho_remote_server_lag_versions": "gauge", "clotho_remote_server_rows": "gauge",
    "clotho_remote_server_groups": "counter", "clotho_remote_server_tokens": "counter",
    "clotho_remote_server_failures": "counter", "clotho_remote_server_restarts": "counter",
    "clotho_remote_server_sent_bytes": "counter", "clotho_remote_server_received_bytes": "counter",
    "clotho_remote_groups_requested_again": "counter", "clotho_remote_server_push_seconds": "histogram",
}  # fmt: skip
"""Every metric with its type. In the text format, the name of a counter ends in `_total`."""

VALUES: Values = [
    ("clotho_remote_server_state", {"server": "http://a:1", "clotho_remote_server_state": "ready"}, 1),
    ("clotho_remote_server_state", {"server": "http://a:1", "clotho_remote_server_state": "failed"}, 0),
    ("clotho_remote_server_weights_version", {"server": "http://a:1"}, 6),
    ("clotho_remote_server_lag_versions", {"server": "http://a:1"}, 1),
    ("clotho_remote_server_rows", {"server": "http://a:1"}, 8),
    ("clotho_remote_server_groups_total", {"server": "http://a:1"}, 21),
    ("clotho_remote_server_tokens_total", {"server": "http://a:1"}, 900),
    ("clotho_remote_server_failures_total", {"server": "http://a:1"}, 14),
    ("clotho_remote_server_restarts_total", {"server": "http://a:1"}, 2),
    ("clotho_remote_server_sent_bytes_total", {"server": "http://a:1"}, 5 << 20),
    ("clotho_remote_server_received_bytes_total", {"server": "http://a:1"}, 1 << 20),
    ("clotho_remote_groups_requested_again_total", {}, 13),
    ("clotho_remote_server_push_seconds_bucket", {"server": "http://a:1", "le": "0.05"}, 9),
    ("clotho_remote_server_push_seconds_sum", {"server": "http://a:1"}, 1.75),
]


def place(share: float = 1.0, version: int | None = None, rows: int = 0) -> Place:
    """A server that nobody calls."""
    found = Place(cast(Any, SimpleNamespace(name="http://a:1", traffic=Traffic())), share)
    found.version, found.rows = version, rows
    return found


def test_a_server_that_nothing_happened_to_counts_nothing() -> None:
    """It gets its weights: no version is known, and no groups are sent."""
    nothing = Distribution(bounds=PUSH_BOUNDS, counts=(0,) * (len(PUSH_BOUNDS) + 1), total=0.0)
    assert (new := place()).gauge(newest=5) == RemoteServerGauge(
        name="http://a:1", state="updating", version=None, lag=None, rows=0, groups=0, tokens=0, failures=0, restarts=0,
        bytes_sent=0, bytes_received=0, push_seconds=None, pushes=nothing,
    )  # fmt: skip
    assert not new.in_use


def test_the_state_of_a_server_follows_its_version_and_its_failures() -> None:
    """A server in use may have failed before; a server with newer weights than the run is not behind."""
    one = place(version=4)
    one.failures = 1
    assert [(gauge.state, gauge.lag) for gauge in (one.gauge(4), one.gauge(6), one.gauge(3))] == [
        ("ready", 0), ("ready", 2), ("ready", 0),
    ]  # fmt: skip
    assert one.in_use
    one.close()
    assert (one.gauge(6).state, one.gauge(6).lag, one.in_use) == ("failed", None, False)


def test_pushes_are_counted_by_their_seconds() -> None:
    """A bound of the histogram belongs to the bucket below it."""
    one = place()
    for seconds in (0.005, 0.006, 31.0):
        one.pushed(seconds)
    found = one.gauge(0)
    assert found.push_seconds == 31.0
    assert found.pushes.total == pytest.approx(31.011)
    assert found.pushes.counts == (1, 1, *(0,) * (len(PUSH_BOUNDS) - 2), 1)


def test_another_process_that_answers_is_a_restart() -> None:
    """The first one is none, and the same one is none."""
    one = place()
    for instance in ("a", "a", "b", "b", "a"):
        one.answered(instance)
    assert one.restarts == 2


@pytest.mark.parametrize(
    ("places", "waiting", "chosen"),
    [
        ([(1.0, 3, 4), (1.0, 3, 2)], 4, 1),  # the fewest rows
        ([(4.0, 3, 4), (1.0, 3, 2)], 4, 0),  # in relation to the share
        ([(1.0, 2, 0), (1.0, 3, 9)], 40, 1),  # too old
        ([(1.0, None, 0), (1.0, 3, 9)], 1, 1),  # a server without version has no share
        ([(1.0, 2, 0), (1.0, 3, 4)], 4, None),  # a current server leaves the share of the other one
        ([(1.0, 2, 0), (1.0, 3, 4)], 5, 1),
        ([(1.0, 2, 0), (1.0, None, 0)], 4, None),  # none is current
    ],
)
def test_a_group_goes_to_the_freest_server(
    places: list[tuple[float, int | None, int]], waiting: int, chosen: int | None
) -> None:
    """Among those with version 3 or newer. Each row of the table is a server's share, version and rows."""
    servers = [place(*one) for one in places]
    assert freest(servers, oldest=3, waiting=waiting) is (None if chosen is None else servers[chosen])


def test_each_metric_shows_its_own_value() -> None:
    """By the address of the server."""
    require(server_metrics(RemoteGauges(requested_again=13, servers=(SERVER,))), METRICS, VALUES)


def test_the_state_of_each_server_is_measured() -> None:
    """By address, with the keys of the table. The rate is that of the tokens since the line before."""
    states = iter([replace(SERVER, tokens=400), SERVER])
    measure = measured(lambda: RemoteGauges(servers=(next(states),)))
    measure(1.0)
    found = measure(2.0)["remote_servers"]
    assert found == {
        "http://a:1": {
            "state": "ready", "version": 6, "lag": 1, "rows": 8, "groups": 21, "tokens_per_second": 250.0,
            "failures": 14, "restarts": 2, "bytes_sent": 5 << 20, "bytes_received": 1 << 20, "push_seconds": 0.02,
        }
    }  # fmt: skip
    assert found["http://a:1"].keys() == REMOTE_METRICS.keys()


def test_servers_are_shown_together_and_those_that_cannot_be_used_by_name() -> None:
    """State, throughput, lag, completions in flight, restarts and bytes."""
    other = replace(SERVER, name="http://b:1", state="failed", lag=2, tokens=100, restarts=3)
    line = measured(lambda: RemoteGauges(servers=(SERVER, other)))(2.0)
    assert list(shown(line["remote_servers"])) == [
        "1 of 2 servers ready, 500 tokens/s, lag 2, 16 sequences, 5 restarts, 12 MiB moved",
        "http://b:1 failed",
    ]
