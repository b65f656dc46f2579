"""What follows where a batch looks bad: a warning, the end of the run, or the way back."""

from __future__ import annotations

from typing import Literal

import structlog
from msgspec import Struct

from clotho.config.schema import CollapseDetectionSection
from clotho.monitoring.collapse_detection import Alarms
from protocols.collapse import CollapseState
from protocols.errors import CollapseError
from protocols.step import StepReport

log = structlog.get_logger(actor="learner")


class Judgement(Struct, frozen=True, kw_only=True):
    """Of one batch. signs: in words, none where it looks healthy. reaction: what the learner is to do about them."""

    signs: tuple[str, ...]
    reaction: Literal["none", "stop", "rollback"]


class CollapseWatch:
    """Judges every batch and says what to do, as the profile wants it; counts how often it sent the policy back."""

    def __init__(self, settings: CollapseDetectionSection, *, state: CollapseState, rollbacks: int) -> None:
        """state, rollbacks: of an earlier life of the run, or of a beginning."""
        self._settings = settings
        self._alarms = Alarms(settings, state)
        self.rollbacks = rollbacks
        self._tripped: tuple[str, ...] = ()

    @property
    def rollback_rate(self) -> float:
        """Factor of the learning rate with every rollback."""
        return self._settings.rollback_rate

    def state(self) -> CollapseState:
        """What the alarms remember, for a checkpoint."""
        return self._alarms.state()

    def compute_advantages(self, report: StepReport) -> Judgement:
        """Look at a batch. With `rollback` everything that was normal is forgotten: learning starts anew."""
        if self._settings.on_collapse == "off":
            return Judgement(signs=(), reaction="none")
        verdict = self._alarms.observe(report)
        if not verdict.tripped:
            self._tripped = ()
            return Judgement(signs=verdict.signs, reaction="none")
        if not self._tripped:
            log.warning("the policy seems to collapse", step=report.step, signs="; ".join(verdict.signs))
        self._tripped = verdict.signs
        if self._settings.on_collapse == "warn":
            return Judgement(signs=verdict.signs, reaction="none")
        if self._settings.on_collapse == "stop" or self.rollbacks >= self._settings.max_rollbacks:
            return Judgement(signs=verdict.signs, reaction="stop")
        self.rollbacks += 1
        self._alarms.restart()
        self._tripped = ()
        return Judgement(signs=verdict.signs, reaction="rollback")

    def error(self, report: StepReport) -> CollapseError:
        """What ends the run: what was seen, and what to do."""
        after = f" after {self.rollbacks} rollbacks (collapse_detection.max_rollbacks)" if self.rollbacks else ""
        return CollapseError(
            f"the policy collapses at step {report.step}{after}: {'; '.join(report.collapse_warnings)}. An earlier checkpoint may "
            "be better; lower learner.learning_rate, or see collapse_detection.on_collapse"
        )
