"""Prometheus metrics of the ranks of a learner."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from attachments.ranks.gauges import RankGauges
from clotho.serving.metrics import counter


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
