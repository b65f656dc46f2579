"""Findings of a run: the checks that apply during it, logged when a finding begins and when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from statistics import fmean

from protocols.finding import Change, Finding, Remedy
from protocols.rollout import GroupOutcome
from protocols.step import GroupsEnded, StepReport
from protocols.summary import RunGauges
from training_run.records.event_log import log_finding, log_finding_over
from training_run.records.training_signal import TrainingSignal
from training_run.supervision.hooks import Check

SCORING_SHARE, SCORING_REPORTS = 0.5, 3
"""Share of the time of a step, and of the wait of the learner, and reports in a row, after which the limit of groups
that are scored at once is a finding.
"""

CACHE_REPORTS = 3
"""Reports in a row with completions that wait for the KV cache that are a finding."""


class RunFindings:
    """Combines all checks during a run. Used from the event loop.

    now: the findings that apply now.
    """

    def __init__(
        self,
        expected: Mapping[str, str],
        *,
        reported: Collection[str] = (),
        complete: Callable[[Finding], Finding] = lambda finding: finding,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """expected: what each reward function expects. reported: names of findings that the start has reported.

        complete: adds the command line of the remedy to a finding.
        """
        self._expected = expected
        self._signal = TrainingSignal(expected)
        self._checks: list[Check] = [ScoringCheck(clock), CacheCheck()]
        self._reported, self._complete = set(reported), complete
        self._active: dict[str, Finding] = {}
        self._previewed: tuple[Finding, ...] = ()
        self._permanent: dict[str, Finding] = {}

    @property
    def now(self) -> tuple[Finding, ...]:
        """The findings that apply now, errors first."""
        return tuple(sorted(self._active.values(), key=lambda finding: finding.severity != "error"))

    @property
    def named_checkpoints(self) -> frozenset[int]:
        """Steps of the checkpoints that the commands of these findings start from."""
        steps = (finding.remedy.from_step for finding in self._active.values())
        return frozenset(step for step in steps if step is not None)

    def observe(self, report: StepReport | GroupsEnded, gauges: RunGauges) -> None:
        """Take a report of the learner into account."""
        self._previewed = ()
        self._signal.observe(report)
        if isinstance(report, StepReport):
            for check in self._checks:
                check.observe(report, gauges)
        self.refresh()

    def preview(self, groups: Iterable[GroupOutcome]) -> None:
        """Check the rewards of the first groups before the first update. The findings apply until their report."""
        signal = TrainingSignal(self._expected)
        signal.observe_groups(groups)
        self._previewed = tuple(signal.findings())
        self.refresh()

    def add_check(self, check: Check) -> None:
        """Let a further check observe the reports."""
        self._checks.append(check)

    def add(self, finding: Finding) -> None:
        """Add a finding that applies until the end of the run, in place of an earlier one of this name."""
        self._permanent[finding.name] = finding
        self.refresh()

    def refresh(self) -> None:
        """Ask the checks, and log the findings that begin or end now."""
        now = (
            *self._permanent.values(),
            *self._previewed,
            *self._signal.findings(),
            *(finding for check in self._checks for finding in check.findings()),
        )
        found: dict[str, Finding] = {finding.name: self._complete(finding) for finding in now}
        for name in [name for name in found if name not in self._active]:
            if name in self._reported:
                self._reported.discard(name)
            else:
                log_finding(found[name])
        for name in self._active.keys() - found.keys():
            log_finding_over(self._active[name])
        self._active = found


class ScoringCheck(Check):
    """Compares the time that the learner waits for groups with the time in which the scorer takes no further group."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()
        self._full_before, self._limit = 0.0, 0
        self._waits: deque[float] = deque(maxlen=SCORING_REPORTS)

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take the scoring since the report before into account."""
        now, full = self._clock(), gauges.scorer_full_seconds
        waited = report.wait_seconds / max(now - self._last, 1e-9)
        if waited >= SCORING_SHARE and full - self._full_before >= SCORING_SHARE * report.wait_seconds:
            self._waits.append(waited)
        else:
            self._waits.clear()
        self._last, self._full_before, self._limit = now, full, gauges.groups_scored_at_once

    def findings(self) -> Iterator[Finding]:
        """Yield the finding if it applies now."""
        if len(self._waits) == SCORING_REPORTS:
            yield Finding(
                name="scorer_full",
                fact=f"the learner waits for rewards in {fmean(self._waits):.0%} of the time, and {self._limit} groups "
                "are scored at the same time, which is the limit",
                consequence="slow rewards decide how long the run takes",
                advice="raise rollouts.scoring, and the max_workers of rewards in processes, if the machine or the "
                "service behind the rewards can do more at once",
                remedy=Remedy(action="resume", changes=(Change(key="rollouts.scoring", value=str(2 * self._limit)),)),
            )


class CacheCheck(Check):
    """Observes whether long requests of clients use the KV cache while others wait for it."""

    def __init__(self) -> None:
        self._reports, self._holders = 0, tuple[str, ...]()

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take the state at a report into account."""
        self._holders = gauges.cache_holders
        self._reports = self._reports + 1 if self._holders else 0

    def findings(self) -> Iterator[Finding]:
        """Yield the finding if it applies now."""
        if self._reports >= CACHE_REPORTS:
            yield Finding(
                name="kv_cache_full",
                fact=f"long requests of clients use the KV cache ({', '.join(self._holders)}), and others wait for it",
                consequence="fewer rollouts are decoded at once, and long completions are interrupted and continued",
                advice="raise engine.kv_cache_tokens if the memory allows it, abort these requests, or let clients ask "
                "for smaller max_tokens",
                remedy=Remedy(action="resume", changes=(Change(key="engine.kv_cache_tokens", factor=2.0),)),
            )
