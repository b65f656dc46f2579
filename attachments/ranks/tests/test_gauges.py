"""Work of ranks in metrics.jsonl and in the terminal."""

from __future__ import annotations

from msgspec.structs import replace

from attachments.ranks.attachment import RANK_METRICS
from attachments.ranks.gauges import RankGauge, RankGauges, measured, shown

ONE = RankGauge(name="0", positions=900, seconds=3.0, bytes_sent=0)
OTHER = RankGauge(name="1", positions=300, seconds=2.0, bytes_sent=70)


def test_the_work_of_each_rank_is_measured() -> None:
    """Since the line before, with the keys of the table."""
    before = RankGauges(waited_seconds=1.5, ranks=(replace(ONE, positions=400, seconds=1.0), OTHER))
    now = RankGauges(waited_seconds=1.75, ranks=(ONE, replace(OTHER, bytes_sent=100)))
    states = iter([before, now])
    measure = measured(lambda: next(states))
    measure(1.0)
    found = measure(1.0)
    assert found["learner_ranks"] == {
        "0": {"positions": 500, "seconds": 2.0, "positions_per_second": 250.0, "bytes_sent": 0},
        "1": {"positions": 0, "seconds": 0.0, "positions_per_second": None, "bytes_sent": 30},
    }
    assert found["learner_ranks"]["0"].keys() == RANK_METRICS.keys()
    assert found["time/wait_for_ranks"] == 0.25


def test_the_speed_of_each_rank_is_shown() -> None:
    """With the time that rank 0 has waited."""
    other = replace(OTHER, positions=900)
    line = measured(lambda: RankGauges(waited_seconds=0.25, ranks=(ONE, other)))(1.0)
    assert list(shown(line)) == ["ranks 300 + 450 positions/s", "0.2 s waited for ranks"]
