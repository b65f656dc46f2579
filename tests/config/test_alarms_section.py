"""Every key of the alarms section changes what is seen, or what follows."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.config.schema import CollapseDetectionSection
from clotho.monitoring.collapse_response import CollapseWatch, Judgement
from protocols.collapse import CollapseState
from protocols.step import StepReport
from tests.monitoring.reports import GOOD, batch, metrics, report

TIMES = (*[batch(GOOD)] * 5,)
ROLLBACK = {"on_collapse": "rollback", "patience": 1}

EFFECTS: dict[str, tuple[Any, StepReport, dict[str, Any]]] = {
    "on_collapse": ("stop", batch(GOOD._replace(ess=0.1)), {}),
    "patience": (1, batch(GOOD._replace(ess=0.1)), {"on_collapse": "stop"}),
    "window": (9, batch(GOOD._replace(length=99.0)), {}),
    "step_kl_high": (0.01, batch(GOOD._replace(step_kl=0.02)), {}),
    "ess_low": (0.9, batch(GOOD._replace(ess=0.8)), {}),
    "kl_high": (1.0, report(update=metrics(GOOD, kl=1.5, kl_beta=0.1)), {}),
    "reward_drop": (0.2, batch(GOOD._replace(reward=0.75)), {}),
    "entropy_low": (0.5, batch(GOOD._replace(entropy=0.02)), {}),
    "entropy_high": (6.0, batch(GOOD._replace(entropy=0.26)), {}),
    "length_high": (2.0, batch(GOOD._replace(length=50.0)), {}),
    "truncated_high": (0.1, batch(GOOD._replace(truncated=0.2)), {}),
    "empty_format_high": (0.2, batch(GOOD._replace(empty_form=0.3)), {}),
    "max_rollbacks": (2, batch(GOOD._replace(ess=0.1)), ROLLBACK),
}
"""By key: another value, a batch that is judged otherwise by it, and what it needs beside it."""

IN_THE_LEARNER = {"rollback_rate"}
"""tests/training/test_rollback.py: the learning rate after a rollback."""


def judged(bad: StepReport, **settings: Any) -> list[Judgement]:
    """Judgements of good times and of four bad batches that follow."""
    watch = CollapseWatch(CollapseDetectionSection(**settings), state=CollapseState(), rollbacks=0)
    return [watch.compute_advantages(one) for one in (*TIMES, *[bad] * 4)]


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_of_the_alarms_changes_a_judgement(key: str) -> None:
    """No option without effect."""
    value, bad, beside = EFFECTS[key]
    assert judged(bad, **beside) != judged(bad, **{**beside, key: value})


def test_no_key_of_the_alarms_was_forgotten() -> None:
    """What is not in the table is a number that the learner is told."""
    assert set(CollapseDetectionSection.__struct_fields__) == EFFECTS.keys() | IN_THE_LEARNER
