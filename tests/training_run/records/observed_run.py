"""A run whose checks observe the steps that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from protocols.finding import Finding
from protocols.step import StepReport, TrainedGroup
from protocols.summary import RunGauges
from tests.training_run.records.display_examples import step, trained
from training_run.records.findings import RunFindings
from training_run.supervision.hooks import Check


class ObservedRun:
    """A run whose steps take ten seconds; a step decodes 1000 tokens in 20 decode steps.

    checks: those of attachments, made with the clock of the run.
    """

    def __init__(
        self,
        *checks: Callable[[Callable[[], float]], Check],
        reported: Iterable[str] = (),
        complete: Callable[[Finding], Finding] = lambda finding: finding,
    ) -> None:
        self.clock = 0.0
        self.gauges = RunGauges()
        self.findings = RunFindings({}, reported=tuple(reported), complete=complete, clock=lambda: self.clock)
        for check in checks:
            self.findings.add_check(check(lambda: self.clock))

    def step(self, report: StepReport | None = None, *, tokens_per_second: float = 1000.0) -> set[str]:
        """Report a step, and return the names of the findings that apply then."""
        self.clock += 10.0
        self.gauges = replace(
            self.gauges,
            tokens_decoded=self.gauges.tokens_decoded + 1000,
            decode_steps=self.gauges.decode_steps + 20,
            decode_seconds=self.gauges.decode_seconds + 1000 / tokens_per_second,
        )
        self.findings.observe(report or step(1, groups=groups(1.0)), self.gauges)
        return self.names

    @property
    def names(self) -> set[str]:
        """Names of the findings that apply."""
        return {finding.name for finding in self.findings.now}


def groups(reward: float, count: int = 16) -> tuple[TrainedGroup, ...]:
    """Return groups of four completions, of which half have the reward, and half have none."""
    return tuple(trained(number, rewards=(reward, 0.0) * 2) for number in range(count))
