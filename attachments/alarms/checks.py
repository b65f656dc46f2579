"""Signs that a run learns from noise, loses what it has learned, or slows down."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from math import log2
from statistics import fmean, median, stdev

from msgspec.structs import replace

from clotho.settings.objectives import ObjectiveSettings, RatioObjective
from protocols.finding import CHECK, LOWER_RATE, Change, Finding, Remedy
from protocols.rollout import bounded
from protocols.step import StepReport
from protocols.summary import RunGauges
from training_run.supervision.hooks import Check

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

CUT_SHARE, CUT_REPORTS = 0.05, 3
"""Share of the tokens that rounding cuts, and reports in a row with it, that are a finding."""

UNUSED_EXPERTS, EXPERT_UPDATES = 0.1, 3
"""Increase of the fraction of unused experts over its lowest value, and updates in a row with it, that are a finding.
"""

FLIPPED_ROUTES, FLIPPED_REPORTS = 10.0, 3
"""Flipped routes per layer and 1,000 tokens, and reports in a row with them, that are a finding.

12 to 47 of them, from noise in the scores of the routers of small random models, raised the KL divergence between
sampler and learner 14 to 66 times above that of the same noise with replayed routes.
"""

RATES, SLOW_REPORTS, SLOW_SECONDS = 3, 5, 60.0
"""Rates whose median is compared; reports in a row, and their duration, after which low rates are a finding."""


class CollapseCheck(Check):
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

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
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


class CutCheck(Check):
    """Observes how much of the gradient is cut although the policy has not moved since it sampled the completions."""

    def __init__(self, objective: ObjectiveSettings) -> None:
        self._name, self._key, self._change = str(objective.__struct_config__.tag), "clip_low and clip_high", ""
        if isinstance(objective, RatioObjective):
            in_ratio = objective.ratio_reference == "sampler"
            self._key = "ratio_reference" if in_ratio else "importance_correction"
            self._change = "batch_start" if in_ratio else "truncate"
        self._shares: deque[float] = deque(maxlen=CUT_REPORTS)

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take an update into account, if it has groups that the policy before it sampled."""
        if report.update is not None and 0 in report.staleness:
            self._shares.append(report.update.unmoved_cut_fraction)

    def findings(self) -> Iterator[Finding]:
        """Yield the finding if it applies now."""
        if len(self._shares) < CUT_REPORTS or min(self._shares) < CUT_SHARE:
            return
        key, change = f"learner.objective.{self._key}", self._change
        yield Finding(
            name="cut_without_moving",
            fact=f"{self._name} cuts {fmean(self._shares):.0%} of the tokens although the policy has not moved since "
            "it sampled them",
            consequence="rounding decides what the policy learns from",
            advice=f'set {key} = "{change}"' if change else f"raise {key}",
            remedy=Remedy(action="fork", changes=(Change(key=key, value=change),)) if change else CHECK,
        )


class ExpertCheck(Check):
    """Compares the fraction of experts that compute no trained token with its lowest value of the run."""

    def __init__(self) -> None:
        self._lowest = 1.0
        self._latest: deque[float] = deque(maxlen=EXPERT_UPDATES)
        self._step = 0

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take an update into account, if the model has experts."""
        unused = report.update.unused_experts_fraction if report.update is not None else None
        if unused is None:
            return
        self._latest.append(unused)
        if unused <= self._lowest:
            self._lowest, self._step = unused, report.step

    def findings(self) -> Iterator[Finding]:
        """Yield the finding if it applies now."""
        if len(self._latest) < EXPERT_UPDATES or min(self._latest) < self._lowest + UNUSED_EXPERTS:
            return
        yield Finding(
            name="experts_die",
            fact=f"{self._latest[-1]:.0%} of the experts compute no token, at step {self._step} {self._lowest:.0%}",
            consequence="the policy loses what these experts know, and the others compute its tokens alone",
            advice="lower learner.optimizer.learning_rate to a tenth, and continue from a checkpoint before the change",
            remedy=replace(LOWER_RATE, before_step=self._step),
        )


class RouteCheck(Check):
    """Counts updates on fresh groups whose learner chooses other experts than the sampler, and does not replay."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=FLIPPED_REPORTS)

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take an update into account. Of stale groups, other weights have chosen the experts."""
        update = report.update
        if update is None or update.flipped_routes is None or any(report.staleness):
            return
        self._latest.append(0.0 if update.replayed_routes else update.flipped_routes)

    def findings(self) -> Iterator[Finding]:
        """Yield the finding if it applies now."""
        if len(self._latest) < FLIPPED_REPORTS or min(self._latest) < FLIPPED_ROUTES:
            return
        yield Finding(
            name="routes_flip",
            fact=f"the learner's routers choose {self._latest[-1]:.0f} other experts per layer and 1,000 tokens",
            consequence="their log-probabilities differ, which importance ratios take for a change of the policy",
            advice='set learner.router_replay = "on"',
            remedy=Remedy(action="fork", changes=(Change(key="learner.router_replay", value="on"),)),
        )


class ThroughputCheck(Check):
    """Compares the decode rate with the best of the run on comparable work.

    Work is comparable if the sequences per decode step and the mean length of the completions agree within a factor of
    about 1.4. The rate is that of the time of decode steps alone, so that updates do not change it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = RunGauges()
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._slow_since: float | None = None
        self._slow_reports = 0
        self._rates = (0.0, 0.0)

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take the decoding since the report before into account."""
        tokens = gauges.tokens_decoded - self._before.tokens_decoded
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
                fact=f"decoding has {rate:.0f} tokens/s, and had {best:.0f} on comparable work earlier in this run",
                consequence=f"the rest of the run takes {best / rate:.1f} times as long",
                advice="close other programs, connect the power adapter, let the machine cool, and look for swap in "
                "`metrics.jsonl` (resources/swap_change_bytes)",
            )
