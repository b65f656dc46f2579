"""Alarms where several environments send: each is compared with its own best times."""

from __future__ import annotations

from msgspec.structs import replace

from clotho.config.schema import CollapseDetectionSection
from clotho.monitoring.collapse_detection import Alarms
from protocols.rollout import ScoredGroup
from tests.monitoring.reports import GOOD, metrics, report, scored

EASY, HARD = 7, 3
"""Of ten completions, those that are rewarded in one environment and in the other."""


def group(source: str, right: int) -> ScoredGroup:
    """Ten completions, so many of them right."""
    made = scored([1.0] * right + [0.0] * (10 - right))
    return replace(made, group=replace(made.group, prompt=replace(made.group.prompt, source=source)))


def observe(alarms: Alarms, *, easy: int, hard: int, right: int = EASY) -> str:
    """What alarms say of a batch with so many groups of each."""
    groups = [group("easy", right + i % 2) for i in range(easy)] + [group("hard", HARD + i % 2) for i in range(hard)]
    return "; ".join(alarms.observe(report(groups, (), metrics(GOOD))).signs)


def test_another_mixture_of_environments_is_no_loss_of_reward() -> None:
    """One of them pauses, and the mean falls to that of the other; nothing has become worse."""
    alarms = Alarms(CollapseDetectionSection())
    for _ in range(20):
        assert observe(alarms, easy=12, hard=4) == ""
    for _ in range(5):
        assert observe(alarms, easy=0, hard=16) == ""


def test_a_loss_in_one_of_them_is_seen() -> None:
    """Where its share of the batch is what it was."""
    alarms = Alarms(CollapseDetectionSection())
    for _ in range(20):
        assert observe(alarms, easy=12, hard=4) == ""
    assert "reward fell" in observe(alarms, easy=12, hard=4, right=0)


def test_an_environment_that_is_new_is_compared_with_nothing() -> None:
    """Until its own good times are known."""
    alarms = Alarms(CollapseDetectionSection())
    for _ in range(20):
        assert observe(alarms, easy=16, hard=0) == ""
    for _ in range(CollapseDetectionSection().window):
        assert observe(alarms, easy=8, hard=8) == ""
