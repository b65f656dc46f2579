"""What the monitor shows: the facts of a run, and how it stands.

The completion of a batch that is put before a person.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from clotho.monitoring.metrics import StepMetrics
from protocols.evaluation import EvalReport
from protocols.prompt import Problem
from protocols.step import StepReport
from protocols.summary import MachineDescription, PolicyDescription


class Sample(Struct, frozen=True, kw_only=True):
    """One completion of the last batch."""

    prompt: str
    answer: str
    completion: str
    reward: float | None


def sample(report: StepReport) -> Sample | None:
    """One completion of a batch, another of the group each time; None where there are none."""
    for group in report.trained:
        scored = group.scored
        i = report.step % len(scored.group.completions)
        return _sample(scored.group.prompt.problem, scored.group.completions[i].text, scored.rewards[i])
    for lost in report.discarded:
        if lost.completions:
            i = report.step % len(lost.completions)
            reward = lost.rewards[i] if lost.rewards else None
            return _sample(lost.prompt.problem, lost.completions[i].text, reward)
    return None


def _sample(problem: Problem, completion: str, reward: float | None) -> Sample:
    return Sample(prompt=problem.prompt, answer=problem.answer, completion=completion, reward=reward)


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
    resumed_from: int | None = None
    """The step of the checkpoint that the run resumed from; 0 if it had none yet; None for a new run."""


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
