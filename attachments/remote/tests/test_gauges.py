"""State of inference servers in metrics.jsonl and in the terminal."""

from __future__ import annotations

from msgspec.structs import replace

from attachments.remote.place import RemoteGauges, RemoteServerGauge, measured, shown
from attachments.remote.sections import REMOTE_METRICS
from protocols.compute import Distribution

SERVER = RemoteServerGauge(
    name="http://a:1", state="ready", version=6, lag=1, rows=8, groups=21, tokens=900, failures=3, restarts=2,
    bytes_sent=5 << 20, bytes_received=1 << 20, push_seconds=0.02,
    pushes=Distribution(bounds=(), counts=(1,), total=0.02),
)  # fmt: skip


def test_the_state_of_each_server_is_measured() -> None:
    """By address, with the keys of the table. The rate is that of the tokens since the line before."""
    states = iter([replace(SERVER, tokens=400), SERVER])
    measure = measured(lambda: RemoteGauges(servers=(next(states),)))
    measure(1.0)
    found = measure(2.0)["remote_servers"]
    assert found == {
        "http://a:1": {
            "state": "ready", "version": 6, "lag": 1, "rows": 8, "groups": 21, "tokens_per_second": 250.0,
            "failures": 3, "restarts": 2, "bytes_sent": 5 << 20, "bytes_received": 1 << 20, "push_seconds": 0.02,
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
