"""Alarms of a run: findings about rewards, collapse, throughput and the machine, logged when they begin and end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import log2
from statistics import fmean, median, stdev

from msgspec.structs import replace

from attachments.alarms.collapse_detection import LOWER_RATE
from protocols.finding import CHECK, Change, Finding, Remedy
from protocols.rollout import GroupOutcome, bounded
from protocols.step import GroupsEnded, StepReport
from protocols.summary import ResourceReading, RunGauges
from training_run.records.event_log import log_finding, log_finding_over
from training_run.records.training_signal import TrainingSignal

CALM_UPDATES = 4
"""Applied updates without a sign of collapse after which its finding ends."""

REWARD_GROUPS = 64
"""Number of groups whose mean reward is compared with the best of the run. With 16, the best of hundreds of means is
far above the reward of the policy when few problems of a batch can be solved.
"""

COLLAPSED, STANDARD_ERRORS = 0.5, 4.0
"""A collapse is the loss of this fraction of (best mean reward - lowest reward), by more than this many errors."""

SLOW = 0.5
"""A rate below this fraction of the run's best on comparable work is a finding."""

FEWEST_DECODE_STEPS, FEWEST_DECODE_SECONDS = 16, 0.05
"""Less decoding between two reports is not assessed."""

RATES, SLOW_REPORTS, SLOW_SECONDS = 3, 5, 60.0
"""Rates whose median is compared; reports in a row, and their duration, after which low rates are a finding."""

SWAP_GROWTH = 256 * 2**20
"""Growth of the used swap since the start, in bytes, that is a finding."""

LESS_MEMORY = Remedy(
    action="resume",
    changes=(
        Change(key="engine.max_num_seqs", factor=0.5),
        Change(key="learner.micro_batch_tokens", factor=0.5),
    ),
)
"""Half as many sequences at once, or half as many tokens per pass of the learner: both need less memory and heat."""

SCORING_SHARE, SCORING_REPORTS = 0.5, 3
"""Share of the time of a step, and of the wait of the learner, and reports in a row, after which the limit of groups
that are scored at once is a finding.
"""

CACHE_REPORTS = 3
"""Reports in a row with completions that wait for the KV cache that are a finding."""

PRESSURE_READINGS = 2
"""Readings in a row with memory pressure that are a finding."""


class RunAlarms:
    """Combines all checks during a run. Used from the event loop.

    findings: the findings that apply now.
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
        self._signal, self._collapse = TrainingSignal(expected), CollapseAlarms()
        self._throughput, self._scoring, self._machine = ThroughputAlarm(clock), ScoringAlarm(clock), MachineAlarms()
        self._cache = CacheAlarm()
        self._reported, self._complete = set(reported), complete
        self._active: dict[str, Finding] = {}
        self._previewed: tuple[Finding, ...] = ()
        self._permanent: dict[str, Finding] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
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
            self._collapse.observe(report)
            self._throughput.observe(report, gauges)
            self._scoring.observe(report, gauges)
            self._cache.observe(gauges)
        self._refresh()

    def preview(self, groups: Iterable[GroupOutcome]) -> None:
        """Check the rewards of the first groups before the first update. The findings apply until their report."""
        signal = TrainingSignal(self._expected)
        signal.observe_groups(groups)
        self._previewed = tuple(signal.findings())
        self._refresh()

    def add(self, finding: Finding) -> None:
        """Add a finding that applies until the end of the run, in place of an earlier one of this name."""
        self._permanent[finding.name] = finding
        self._refresh()

    def observe_resources(self, reading: ResourceReading) -> None:
        """Take a reading of the machine into account."""
        self._machine.observe(reading)
        self._refresh()

    def _refresh(self) -> None:
        """Log the findings that begin or end now."""
        checks = (self._signal, self._collapse, self._throughput, self._scoring, self._cache, self._machine)
        now = (
            *self._permanent.values(),
            *self._previewed,
            *(finding for check in checks for finding in check.findings()),
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


class CollapseAlarms:
    """Keeps the findings of the collapse detection while they apply, and compares the reward with its best.

    A finding of the detection describes one update. It ends after `CALM_UPDATES` applied updates without it, because
    a collapsed policy often earns equal rewards, and has no updates that could be checked. The mean reward of the
    latest `REWARD_GROUPS` groups is compared with the highest such mean of the run.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Finding] = {}
        self._calm: dict[str, int] = {}
        self._rewards: deque[float] = deque(maxlen=REWARD_GROUPS)
        self._lowest: float | None = None
        self._best: tuple[float, float] | None = None
        self._best_step: int | None = None
        self._rate: float | None = None
        self._rolled_back = False

    def observe(self, report: StepReport) -> None:
        """Take a batch into account. After a rollback, findings end with the next batch: the weights are healthy."""
        if self._rolled_back:
            self._kept, self._calm, self._best, self._best_step = {}, {}, None, None
            self._rewards.clear()
        self._rolled_back = report.rolled_back
        new: dict[str, Finding] = {
            finding.name: self._before(report.step, finding) for finding in report.collapse_findings
        }
        if report.update and report.update.update_applied:
            self._rate = max(self._rate or 0.0, report.update.learning_rate)
            self._calm = {name: self._calm[name] + 1 for name in self._kept}
        self._kept |= new
        self._calm |= dict.fromkeys(new, 0)
        self._kept = {name: finding for name, finding in self._kept.items() if self._calm[name] < CALM_UPDATES}
        for rewards in _group_rewards(report):
            self._rewards.append(fmean(rewards))
            self._lowest = min(rewards) if self._lowest is None else min(self._lowest, *rewards)
        if len(self._rewards) == REWARD_GROUPS:
            now = self._mean_and_error()
            if self._best is None or now > self._best:
                self._best, self._best_step = now, report.step

    def _before(self, step: int, finding: Finding) -> Finding:
        """Return a finding about an update with the step before which a checkpoint is healthy."""
        fallen = finding.name == "reward_drop" and self._best_step is not None
        before = self._best_step if fallen else step
        return replace(finding, remedy=replace(finding.remedy, before_step=before))

    def findings(self) -> Iterator[Finding]:
        """Yield the findings that apply now."""
        yield from self._kept.values()
        if self._best is None or self._lowest is None or "reward_drop" in self._kept:
            return
        (best, best_error), (now, error) = self._best, self._mean_and_error()
        noise = STANDARD_ERRORS * 2**0.5 * max(best_error, error)  # a mean that is low by chance has a low error
        if best - now > max(COLLAPSED * (best - self._lowest), noise):
            rate = f" (at most {self._rate:.2g} so far)" if self._rate else ""
            yield Finding(
                name="reward_collapse",
                severity="error",
                fact=f"the mean reward fell from {best:.3g} to {now:.3g}",
                consequence="the policy has lost what it had learned, and seldom recovers",
                advice=f"lower learner.optimizer.learning_rate{rate} to a tenth, and continue from a checkpoint before "
                'the fall, or set collapse_detection = "rollback"',
                remedy=replace(LOWER_RATE, before_step=self._best_step),
            )

    def _mean_and_error(self) -> tuple[float, float]:
        return fmean(self._rewards), stdev(self._rewards) / len(self._rewards) ** 0.5


def _group_rewards(report: StepReport) -> Iterator[tuple[float, ...]]:
    """Yield the rewards of each group from the run's own dataset. A mixture of environments may vary by itself."""
    rewards = [(group.scored.group.prompt.source, group.scored.rewards) for group in report.trained]
    rewards += [(group.prompt.source, group.rewards) for group in report.discarded if group.reason != "stale"]
    for source, values in rewards:
        if not source and values and bounded(values):
            yield values


class ThroughputAlarm:
    """Compares the decode rate with the best of the run on comparable work.

    Work is comparable if the sequences per decode step and the mean length of the completions agree within a factor of
    about 1.4. The rate is that of the time of decode steps alone, so that updates do not change it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before = RunGauges()
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._slow_since: float | None = None
        self._slow_reports = 0
        self._rates = (0.0, 0.0)

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take the decoding since the report before into account."""
        tokens = gauges.tokens_sampled - gauges.remote.tokens_sampled
        tokens -= self._before.tokens_sampled - self._before.remote.tokens_sampled
        steps = gauges.decode_steps - self._before.decode_steps
        seconds = gauges.decode_seconds - self._before.decode_seconds
        self._before = gauges
        lengths = [completion.length for group in report.trained for completion in group.scored.group.completions]
        lengths += [completion.length for group in report.discarded for completion in group.completions]
        if steps < FEWEST_DECODE_STEPS or seconds < FEWEST_DECODE_SECONDS or tokens <= 0 or not sum(lengths):
            return
        work = round(2 * log2(tokens / steps)), round(2 * log2(fmean(lengths)))
        latest = self._latest.setdefault(work, deque(maxlen=RATES))
        latest.append(tokens / seconds)
        if len(latest) < RATES:
            return
        rate = median(latest)
        best = self._best[work] = max(rate, self._best.get(work, 0.0))
        self._rates = rate, best
        if rate >= SLOW * best:
            self._slow_since, self._slow_reports = None, 0
            return
        self._slow_reports += 1
        if self._slow_since is None:
            self._slow_since = self._clock()

    def findings(self) -> Iterator[Finding]:
        """Yield the finding if it applies now."""
        if self._slow_since is None or self._slow_reports < SLOW_REPORTS:
            return
        if self._clock() - self._slow_since >= SLOW_SECONDS:
            rate, best = self._rates
            yield Finding(
                name="slow",
                severity="warning",
                fact=f"decoding has {rate:.0f} tokens/s, and had {best:.0f} on comparable work earlier in this run",
                consequence=f"the rest of the run takes {best / rate:.1f} times as long",
                advice="close other programs, connect the power adapter, let the machine cool, and look for swap in "
                "`metrics.jsonl` (resources/swap_change_bytes)",
                remedy=CHECK,
            )


class ScoringAlarm:
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
                severity="warning",
                fact=f"the learner waits for rewards in {fmean(self._waits):.0%} of the time, and {self._limit} groups "
                "are scored at the same time, which is the limit",
                consequence="slow rewards decide how long the run takes",
                advice="raise rollouts.scoring, and the max_workers of rewards in processes, if the machine or the "
                "service behind the rewards can do more at once",
                remedy=Remedy(action="resume", changes=(Change(key="rollouts.scoring", value=str(2 * self._limit)),)),
            )


class CacheAlarm:
    """Observes whether long requests of clients use the KV cache while others wait for it."""

    def __init__(self) -> None:
        self._reports, self._holders = 0, tuple[str, ...]()

    def observe(self, gauges: RunGauges) -> None:
        """Take the state at a report into account."""
        self._holders = gauges.cache_holders
        self._reports = self._reports + 1 if self._holders else 0

    def findings(self) -> Iterator[Finding]:
        """Yield the finding if it applies now."""
        if self._reports >= CACHE_REPORTS:
            yield Finding(
                name="kv_cache_full",
                severity="warning",
                fact=f"long requests of clients use the KV cache ({', '.join(self._holders)}), and others wait for it",
                consequence="fewer rollouts are decoded at once, and long completions are interrupted and continued",
                advice="raise engine.kv_cache_tokens if the memory allows it, abort these requests, or let clients ask "
                "for smaller max_tokens",
                remedy=Remedy(action="resume", changes=(Change(key="engine.kv_cache_tokens", factor=2.0),)),
            )


def power_findings(*, on_battery: bool, low_power: bool) -> Iterator[Finding]:
    """Yield the findings about the power supply and the power mode, at the start and during a run."""
    if low_power:
        yield Finding(
            name="low_power_mode",
            severity="warning",
            fact="the low power mode is on",
            consequence="processor and GPU run at about half of their speed",
            advice="turn the mode off: sudo pmset -a lowpowermode 0",
            remedy=CHECK,
        )
    if on_battery:
        yield Finding(
            name="on_battery",
            severity="warning",
            fact="the machine runs on its battery",
            consequence="the speed can be reduced, and the run stops when the battery is empty",
            advice="connect the power adapter",
            remedy=CHECK,
        )


class MachineAlarms:
    """Checks the readings of the machine."""

    def __init__(self) -> None:
        self._reading = ResourceReading()
        self._pressed = 0

    def observe(self, reading: ResourceReading) -> None:
        """Take a reading into account."""
        self._reading = reading
        self._pressed = self._pressed + 1 if reading.memory_level in ("warning", "critical") else 0

    def findings(self) -> Iterator[Finding]:
        """Yield the findings that apply now."""
        yield from self._memory()
        reading = self._reading
        if reading.thermal == "heavy":
            yield Finding(
                name="thermal_pressure",
                severity="warning",
                fact="the system reports heavy thermal pressure",
                consequence="processor and GPU run at a reduced speed",
                advice="improve the ventilation, or lower engine.max_num_seqs",
                remedy=LESS_MEMORY,
            )
        yield from power_findings(on_battery=reading.on_battery or False, low_power=reading.low_power or False)

    def _memory(self) -> Iterator[Finding]:
        reading = self._reading
        advice = "close other programs, or lower engine.max_num_seqs, learner.micro_batch_tokens or sampling.max_tokens"
        if self._pressed >= PRESSURE_READINGS and reading.memory_level is not None:
            available = f": {reading.available_bytes / 2**30:.1f} GiB available" if reading.available_bytes else ""
            critical = reading.memory_level == "critical"
            yield Finding(
                name="memory_pressure",
                severity="error" if critical else "warning",
                fact=f"the memory pressure is at the level {reading.memory_level}{available}",
                consequence="the system can end the run" if critical else "the run will be slowed down by swap",
                advice=advice,
                remedy=LESS_MEMORY,
            )
        if (growth := reading.swap_change_bytes or 0) >= SWAP_GROWTH:
            yield Finding(
                name="swap_growing",
                severity="warning",
                fact=f"the used swap grew by {growth / 2**30:.1f} GiB since the start",
                consequence="reading memory back from the disk is slower by orders of magnitude",
                advice=advice,
                remedy=LESS_MEMORY,
            )
