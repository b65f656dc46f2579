"""Prometheus metrics of the ranks of a learner."""

from __future__ import annotations

from attachments.ranks.gauges import RankGauge, RankGauges, rank_metrics
from tests.metric_samples import Values, require

METRICS = {
    "clotho_learner_rank_positions": "counter",
    "clotho_learner_rank_seconds": "counter",
    "clotho_learner_rank_sent_bytes": "counter",
    "clotho_learner_ranks_wait_seconds": "counter",
}
"""Every metric with its type. In the text format, the name of a counter ends in `_total`."""

VALUES: Values = [
    ("clotho_learner_rank_positions_total", {"rank": "1"}, 4096),
    ("clotho_learner_rank_seconds_total", {"rank": "1"}, 2.25),
    ("clotho_learner_rank_sent_bytes_total", {"rank": "1"}, 80),
    ("clotho_learner_ranks_wait_seconds_total", {}, 0.125),
]

RANKS = RankGauges(waited_seconds=0.125, ranks=(RankGauge(name="1", positions=4096, seconds=2.25, bytes_sent=80),))


def test_each_metric_shows_its_own_value() -> None:
    """By the number of the rank."""
    require(rank_metrics(RANKS), METRICS, VALUES)
