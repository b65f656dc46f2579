"""What rehearsed updates say about a collapse, before the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan

from attachments.alarms.collapse_detection import CERTAIN_FACTOR
from attachments.alarms.sections import CollapseChecks
from protocols.finding import LOWER_RATE, Finding, Remedy
from protocols.step import UpdateMetrics


def large_updates(updates: Sequence[UpdateMetrics], settings: CollapseChecks) -> Iterator[Finding]:
    """Yield a finding if updates that were rehearsed one after another move the policy too far.

    The thresholds are those of the collapse detection: all updates exceed its limit, or one exceeds it so far that no
    second is needed as evidence. The first updates of Adam are the largest of a run, and single updates of healthy runs
    exceed the limit.
    """
    limit, moved = settings.update_kl_high, [one.update_kl for one in updates if one.update_kl is not None]
    certain = any(isnan(kl) or kl > CERTAIN_FACTOR * limit for kl in moved)
    if certain or (len(moved) > 1 and min(moved) > limit):
        rate = max(metrics.learning_rate for metrics in updates)
        yield Finding(
            name="update_too_large",
            fact=f"rehearsed updates with learning rates up to {rate:g} move the policy by "
            f"{', '.join(f'{kl:.2g}' for kl in moved)} nats per token (limit {limit:g}, "
            "collapse_detection.update_kl_high)",
            consequence="the policy may collapse within a few updates",
            advice=f"--learner.optimizer.learning-rate {rate / 10:g}, or a lower policy.method.scale",
            remedy=Remedy(action="start", changes=LOWER_RATE.changes),
        )
