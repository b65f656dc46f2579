"""What the monitor shows: the facts of a run, and how it stands."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from clotho.monitoring.metrics import StepMetrics
from clotho.monitoring.sample import Sample
from protocols.description import MachineDescription, PolicyDescription
from protocols.evaluation import EvalReport


class RunFacts(Struct, frozen=True, kw_only=True):
    """What does not change. address: of the live API, None where there is none. steps: of the whole run.

    estimated_memory: bytes of arrays at the run's fullest moment, as worked out before it began.
    """

    profile: str
    model: str
    machine: MachineDescription
    policy: PolicyDescription
    address: str | None
    run_dir: str
    steps: int
    estimated_memory: int


class RunView(Struct, frozen=True, kw_only=True):
    """How the run stands after a report. Histories are bounded by whoever keeps them.

    step: batches consumed; first_step: before this life of the run. seconds: of this life.
    rewards: means of the last batches, oldest first. evaluations: the first, and the last ones.
    """

    step: int = 0
    first_step: int = 0
    seconds: float = 0.0
    trained: int = 0
    discarded: dict[str, int] = {}
    rewards: tuple[float, ...] = ()
    evaluations: tuple[EvalReport, ...] = ()
    latest: StepMetrics | None = None
    sample: Sample | None = None

    def seconds_left(self, steps: int) -> float | None:
        """At the pace so far; None before the first batch."""
        done = self.step - self.first_step
        return self.seconds / done * (steps - self.step) if done > 0 else None


class Display(Protocol):
    """Somebody who shows it. Called from the event loop; returns at once."""

    def start(self) -> None:
        """Begin, with the facts."""

    def show(self, view: RunView) -> None:
        """Show how the run stands now."""

    def close(self) -> None:
        """End; the second time does nothing."""


class NoDisplay:
    """Shows nothing."""

    def start(self) -> None:
        """Do nothing."""

    def show(self, view: RunView) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
