"""Every key of [collapse_detection] has an effect."""

from __future__ import annotations

from typing import Any

import pytest

from attachments.alarms.collapse_detection import AlarmsState
from attachments.alarms.hooks import CollapseHook, RollbackPolicy
from attachments.alarms.sections import RollBackOnCollapse, StopOnCollapse, WarnOnCollapse
from attachments.alarms.tests.collapse_reports import GOOD, batch, metrics, report
from protocols.finding import Finding
from protocols.step import StepReport

HEALTHY = (*[batch(GOOD)] * 5,)

EFFECTS: dict[str, tuple[Any, StepReport, dict[str, Any]]] = {
    "type": (StopOnCollapse, batch(GOOD._replace(ess=0.1)), {}),
    "patience": (1, batch(GOOD._replace(ess=0.1)), {"type": StopOnCollapse}),
    "window": (9, batch(GOOD._replace(length=99.0)), {}),
    "update_kl_high": (0.01, batch(GOOD._replace(update_kl=0.02)), {}),
    "ess_low": (0.9, batch(GOOD._replace(ess=0.8)), {}),
    "kl_high": (1.0, report(update=metrics(GOOD, kl=1.5, kl_beta=0.1)), {}),
    "reward_drop": (0.2, batch(GOOD._replace(reward=0.75)), {}),
    "entropy_low": (0.5, batch(GOOD._replace(entropy=0.02)), {}),
    "entropy_high": (6.0, batch(GOOD._replace(entropy=0.26)), {}),
    "length_high": (2.0, batch(GOOD._replace(length=50.0)), {}),
    "truncated_high": (0.1, batch(GOOD._replace(truncated=0.2)), {}),
    "empty_format_high": (0.2, batch(GOOD._replace(empty_form=0.3)), {}),
    "max_rollbacks": (2, batch(GOOD._replace(ess=0.1)), {"type": RollBackOnCollapse, "patience": 1}),
}
"""By key: another value, a batch with a different response, and other settings that the key needs."""

USED_BY_THE_LEARNER = {"rollback_rate"}
"""attachments/alarms/tests/test_rollback.py: the learning rate after a rollback."""


def responses(bad: StepReport, **settings: Any) -> list[tuple[tuple[Finding, ...], bool, bool]]:
    """Return findings, stop and rollback of healthy batches and of four bad batches after them."""
    response = settings.pop("type", WarnOnCollapse)
    weights: Any = object()
    rollback = RollbackPolicy(weights, window=1) if response is RollBackOnCollapse else None
    hook = CollapseHook(response(**settings), AlarmsState(), snapshot=lambda: weights, rollback=rollback)
    verdicts = [hook.assess(one) for one in (*HEALTHY, *[bad] * 4)]
    return [(one.findings, one.error is not None, one.back_to is not None) for one in verdicts]


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_changes_a_response(key: str) -> None:
    """With another value of the key."""
    value, bad, others = EFFECTS[key]
    assert responses(bad, **others) != responses(bad, **{**others, key: value})


def test_the_table_has_every_key() -> None:
    """Keys that are not in the table are used by the learner."""
    assert {"type", *RollBackOnCollapse.__struct_fields__} == EFFECTS.keys() | USED_BY_THE_LEARNER
