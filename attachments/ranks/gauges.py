"""Work of the ranks of a data-parallel learner, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from prometheus_client.core import Metric

from clotho.serving.metrics import counter
from training_run.records.terminal_text import number


class RankGauge(Struct, kw_only=True):
    """Work of a rank of a data-parallel learner. Totals count since the last start.

    name: number of the rank. positions: of its micro-batches, padding included. seconds: between a share and its
    result; at rank 0, with the decode steps and requests in this time. bytes_sent: by rank 0 to this rank.
    """

    name: str
    positions: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0


class RankGauges(Struct, frozen=True, kw_only=True):
    """Work of all ranks of a data-parallel learner; empty without one.

    waited_seconds: time that rank 0 has waited for the shares of other ranks and for sums.
    """

    waited_seconds: float = 0.0
    ranks: tuple[RankGauge, ...] = ()


def measured(gauges: Callable[[], RankGauges]) -> Callable[[float], Mapping[str, Any]]:
    """Return what measures the work of each rank since the line of metrics.jsonl before."""
    before = RankGauges()

    def measure(_: float) -> Mapping[str, Any]:
        """Return the work since the last call."""
        nonlocal before
        now, earlier = gauges(), {one.name: one for one in before.ranks}
        waited, before = now.waited_seconds - before.waited_seconds, now
        found = {}
        for one in now.ranks:
            start = earlier.get(one.name, RankGauge(name=one.name))
            positions, seconds = one.positions - start.positions, one.seconds - start.seconds
            found[one.name] = {
                "positions": positions,
                "seconds": seconds,
                "positions_per_second": positions / seconds if seconds > 0 else None,
                "bytes_sent": one.bytes_sent - start.bytes_sent,
            }
        return {"learner_ranks": found, "time/wait_for_ranks": waited if now.ranks else None}

    return measure


def shown(line: Mapping[str, Any]) -> Iterator[str]:
    """Yield the speed of each rank in a step, and how long rank 0 has waited. line: of metrics.jsonl."""
    speeds = [number(found["positions_per_second"], ".0f") for found in line["learner_ranks"].values()]
    yield f"ranks {' + '.join(speeds)} positions/s"
    yield f"{number(line['time/wait_for_ranks'], '.1f')} s waited for ranks"


def rank_metrics(found: RankGauges) -> Iterator[Metric]:
    """Yield the work of each rank."""
    for name, help_text, counts in (
        ("positions", "Positions of the micro-batches of a rank.", {one.name: one.positions for one in found.ranks}),
        ("seconds", "Time between the shares of a rank and results.", {one.name: one.seconds for one in found.ranks}),
        ("sent_bytes", "Weights and shares for a rank.", {one.name: one.bytes_sent for one in found.ranks}),
    ):
        yield counter(f"clotho_learner_rank_{name}", help_text, counts, by="rank")
    yield counter(
        "clotho_learner_ranks_wait_seconds", "Time that rank 0 waited for others.", {"": found.waited_seconds}
    )
