"""Prometheus metrics of a run, for /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from prometheus_client.core import Metric

from clotho.serving.families import counter, gauge, gauges
from protocols.accounting import LedgerState
from protocols.step import StepReport
from training_run.supervision.queues import QueueStats


def training_metrics(groups: LedgerState, report: StepReport | None, swap_seconds: float | None) -> Iterator[Metric]:
    """Yield what the learner has done. A value that has not been measured yet is left out.

    report: of the last step. swap_seconds: duration of the last weight swap.
    """
    rewards = [reward for group in report.trained for reward in group.scored.rewards] if report else []
    staleness = report.staleness if report else ()
    for name, help_text, value in (
        ("clotho_reward_mean", "Mean reward of the last batch.", fmean(rewards) if rewards else None),
        (
            "clotho_staleness_mean",
            "Mean staleness of the last batch, in versions.",
            fmean(staleness) if staleness else None,
        ),
        ("clotho_staleness_max", "Largest staleness of the last batch, in versions.", max(staleness, default=None)),
        (
            "clotho_learner_turn_seconds",
            "Longest turn of the last update.",
            report.longest_turn_seconds if report else None,
        ),
        ("clotho_swap_seconds", "Duration of the last weight swap.", swap_seconds),
    ):
        if value is not None:
            yield gauge(name, help_text, value)
    yield counter("clotho_groups_trained", "Groups trained on.", {"": groups.trained})
    yield counter("clotho_groups_discarded", "Groups discarded.", groups.discarded, by="reason")
    for name, help_text, counts in (
        (
            "clotho_environment_groups_trained",
            "Groups of an environment trained on.",
            {name: counts.trained for name, counts in groups.sources.items()},
        ),
        (
            "clotho_environment_groups_discarded",
            "Groups of an environment discarded.",
            {name: counts.ended - counts.trained for name, counts in groups.sources.items()},
        ),
    ):
        if counts:
            yield counter(name, help_text, counts, by="environment")


def queue_metrics(queues: Sequence[QueueStats]) -> Iterator[Metric]:
    """Yield depth, totals and waiting times of each queue."""
    yield gauges("clotho_queue_depth", "Messages in a queue.", {one.name: one.depth for one in queues})
    yield gauges(
        "clotho_queue_capacity", "Capacity of a queue, in messages.", {one.name: one.capacity for one in queues}
    )
    for name, help_text, values in (
        ("clotho_queue_sent_messages", "Messages sent to a queue.", {one.name: one.sent for one in queues}),
        ("clotho_queue_received_messages", "Messages taken from a queue.", {one.name: one.received for one in queues}),
        (
            "clotho_queue_send_wait_seconds",
            "Time that producers waited for room in a queue.",
            {one.name: one.send_wait_seconds for one in queues},
        ),
        (
            "clotho_queue_receive_wait_seconds",
            "Time that consumers waited for a message of a queue.",
            {one.name: one.receive_wait_seconds for one in queues},
        ),
    ):
        yield counter(name, help_text, values, by="queue")
