"""Prometheus metrics of a run."""

from __future__ import annotations

from msgspec.structs import replace

from protocols.accounting import LedgerState, SourceCounts
from tests.metric_samples import Values, page, require, samples
from tests.training_run.records.display_examples import step, trained
from training_run.run_monitor import queue_metrics, training_metrics
from training_run.supervision.queues import QueueStats

LEDGER = LedgerState(
    trained=11,
    discarded={"zero_variance": 3, "stale": 1},
    sources={"game": SourceCounts(trained=7, discarded={"stale": 2})},
)
QUEUE = QueueStats(
    name="prompts", capacity=16, depth=4, sent=20, received=16, send_wait_seconds=1.25, receive_wait_seconds=0.5
)

METRICS = {
    "clotho_reward_mean": "gauge",
    "clotho_staleness_mean": "gauge",
    "clotho_staleness_max": "gauge",
    "clotho_swap_seconds": "gauge",
    "clotho_learner_turn_seconds": "gauge",
    "clotho_groups_trained": "counter",
    "clotho_groups_discarded": "counter",
    "clotho_environment_groups_trained": "counter",
    "clotho_environment_groups_discarded": "counter",
    "clotho_queue_depth": "gauge",
    "clotho_queue_capacity": "gauge",
    "clotho_queue_sent_messages": "counter",
    "clotho_queue_received_messages": "counter",
    "clotho_queue_send_wait_seconds": "counter",
    "clotho_queue_receive_wait_seconds": "counter",
}
"""Every metric with its type. In the text format, the name of a counter ends in `_total`."""

VALUES: Values = [
    ("clotho_reward_mean", {}, 0.5),
    ("clotho_swap_seconds", {}, 0.0005),
    ("clotho_learner_turn_seconds", {}, 0.25),
    ("clotho_staleness_mean", {}, 1.5),
    ("clotho_staleness_max", {}, 2),
    ("clotho_groups_trained_total", {}, 11),
    ("clotho_groups_discarded_total", {"reason": "zero_variance"}, 3),
    ("clotho_environment_groups_trained_total", {"environment": "game"}, 7),
    ("clotho_environment_groups_discarded_total", {"environment": "game"}, 2),
    ("clotho_queue_depth", {"queue": "prompts"}, 4),
    ("clotho_queue_capacity", {"queue": "prompts"}, 16),
    ("clotho_queue_sent_messages_total", {"queue": "prompts"}, 20),
    ("clotho_queue_received_messages_total", {"queue": "prompts"}, 16),
    ("clotho_queue_send_wait_seconds_total", {"queue": "prompts"}, 1.25),
    ("clotho_queue_receive_wait_seconds_total", {"queue": "prompts"}, 0.5),
]


def test_each_metric_shows_its_own_value() -> None:
    """Rewards and staleness are those of the last batch."""
    groups = (trained(1, rewards=(1.0, 0.0)), trained(2, rewards=(0.0, 1.0)))
    report = replace(step(3, groups=groups), staleness=(1, 2), longest_turn_seconds=0.25)
    require([*training_metrics(LEDGER, report, 0.0005), *queue_metrics([QUEUE])], METRICS, VALUES)


def test_a_value_that_has_not_been_measured_is_absent() -> None:
    """Before the first update there is no reward."""
    seen = {name for name, _ in samples(page(list(training_metrics(LedgerState(), None, None))))}
    assert seen == {"clotho_groups_trained_total"}
