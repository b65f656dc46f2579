"""Metrics of sessions."""

from __future__ import annotations

import time

from attachments.sessions import attachment
from attachments.sessions.groups import SessionGroups
from attachments.sessions.sections import HttpSessions
from attachments.sessions.sessions import Sessions
from attachments.sessions.supply import measured, session_metrics
from protocols.accounting import Balance
from tests.fakes import CharacterTokenizer
from tests.metric_samples import Values, require

METRICS = {
    "clotho_sessions_open": "gauge", "clotho_sessions_ended": "counter", "clotho_session_rewards": "counter",
    "clotho_session_refusals": "counter", "clotho_session_forks": "counter", "clotho_session_untrainable": "counter",
}  # fmt: skip
"""Every metric with its type. In the text format, the name of a counter ends in `_total`."""

VALUES: Values = [
    ("clotho_sessions_open", {}, 0), ("clotho_sessions_ended_total", {"end": "trained"}, 4),
    ("clotho_sessions_ended_total", {"end": "stale"}, 1), ("clotho_sessions_ended_total", {"end": "lost"}, 5),
    ("clotho_session_rewards_total", {}, 7), ("clotho_session_refusals_total", {"reason": "double"}, 2),
    ("clotho_session_forks_total", {}, 3), ("clotho_session_untrainable_total", {}, 6),
]  # fmt: skip


def resumed() -> Sessions:
    """Return sessions with different counts."""
    saved = Balance(prompted=10, trained=4, by_reason={"stale": 1}, carried_over=5)
    groups = SessionGroups(size=2, clock=time.monotonic)
    sessions = Sessions(HttpSessions(), groups, life="a", tokenizer=CharacterTokenizer(), context_length=9, saved=saved)
    counts = sessions.counts
    counts.rewarded, counts.forked, counts.untrainable, counts.refused["double"] = 7, 3, 6, 2
    return sessions


def test_each_metric_shows_its_own_value() -> None:
    """By reason where there are several."""
    require(session_metrics(resumed()), METRICS, VALUES)


def test_every_described_metric_is_measured() -> None:
    """And no other."""
    assert measured(resumed()).keys() == attachment.METRICS.keys()
