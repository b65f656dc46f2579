"""Collapse detection: checks every batch for signs of policy collapse or reward hacking, and decides the response.

A check compares a statistic of the batch either with a fixed threshold (KL of the update, effective sample size, KL to
the reference) or with a baseline of the run. The baseline is the median of the latest `window` healthy updates, and of
these medians the best value so far, so that a slow decline is compared with the best period of the run. Only the
completion length is compared with the latest median, because completions may legitimately grow. A batch that triggers a
check does not enter the baseline.

The KL of an update (`update_kl`) reacts first: rewards and importance ratios describe weights that are already several
updates old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite
from statistics import fmean, median, stdev

from msgspec import Struct

from attachments.alarms.sections import CollapseChecks
from protocols.finding import LOWER_RATE, Change, Finding, Remedy
from protocols.rollout import bounded
from protocols.sampling import Completion
from protocols.step import StepReport


class GroupStatistics(Struct, frozen=True, kw_only=True):
    """Statistics of one scored group; means and fractions over its completions.

    source: name of the environment. lowest: lowest reward of a completion.
    truncated: fraction of completions cut off at `sampling.max_tokens`.
    empty_form: fraction of completions with the full format reward and no content reward.
    content: fraction of completions with any content reward.
    empty_form and content are None if format or content is not rewarded.
    """

    source: str = ""
    reward: float
    lowest: float
    length: float
    truncated: float
    empty_form: float | None = None
    content: float | None = None


class BatchStatistics(Struct, frozen=True, kw_only=True):
    """Statistics of a batch and of its update; None if not available.

    reward_error: standard error of `reward`.
    rewards, shares: mean reward of each environment's groups, and their fraction of the batch.
    entropy, kl, update_kl: nats per token. ess: fraction of the tokens. learning_rate: of the update.
    The other fields are means of those of `GroupStatistics`.
    """

    reward: float | None = None
    reward_error: float | None = None
    rewards: dict[str, float] = {}
    shares: dict[str, float] = {}
    length: float | None = None
    truncated: float | None = None
    empty_form: float | None = None
    content: float | None = None
    entropy: float | None = None
    kl: float | None = None
    ess: float | None = None
    update_kl: float | None = None
    learning_rate: float | None = None


class BaselineStatistics(Struct, frozen=True, kw_only=True):
    """Medians over the latest `window` healthy updates, reduced over the run; None until the window is full once.

    | field | statistic | reduction over the run | check triggers if the batch is |
    |---|---|---|---|
    | rewards | median reward, per environment | maximum | lower |
    | reward_error | median standard error of the mean reward | that of the highest reward | lower by more than noise |
    | entropy_most | median entropy | maximum | lower |
    | entropy_least | median entropy | minimum | higher |
    | length | median completion length | latest | longer |
    | truncated | median truncated fraction | minimum | higher |
    | empty_form | median fraction of format without content | minimum | higher |
    | content | median fraction with content | maximum | lower (with empty_form) |
    """

    rewards: dict[str, float] = {}
    reward_error: float | None = None
    entropy_most: float | None = None
    entropy_least: float | None = None
    length: float | None = None
    truncated: float | None = None
    empty_form: float | None = None
    content: float | None = None


class CollapseState(Struct, frozen=True, kw_only=True):
    """The detector's state, as a checkpoint keeps it. The default is the state of a new run.

    bad: number of consecutive updates with triggered checks. lowest: lowest reward of any completion of the run.
    groups: the latest groups; small batches are assessed together with these.
    healthy: statistics of the latest healthy updates.
    """

    bad: int = 0
    lowest: float | None = None
    groups: tuple[GroupStatistics, ...] = ()
    healthy: tuple[BatchStatistics, ...] = ()
    baseline: BaselineStatistics = BaselineStatistics()


NAME = "alarms"
"""Name of the part in checkpoints."""


class AlarmsState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of the collapse detection, beside the policies of rollbacks.

    rollbacks: number of rollbacks since the run began. healthy_updates: as `RollbackPolicy` counts them.
    """

    collapse: CollapseState = CollapseState()
    rollbacks: int = 0
    healthy_updates: int = 0


class CollapseVerdict(Struct, frozen=True, kw_only=True):
    """The assessment of a batch. findings: of the triggered checks. tripped: triggered for `patience` updates."""

    findings: tuple[Finding, ...]
    tripped: bool

    @property
    def healthy(self) -> bool:
        """Whether the batch triggers no check."""
        return not self.findings


FORMAT = "format"
"""Name of the reward component that scores only the format. Without it, format without content is not checked."""

NOT_CONTENT = (FORMAT, "overlong")
"""Reward components that do not score the content."""

MIN_GROUPS = 16
"""Smaller batches are assessed together with the groups before them, up to this number of groups."""

STANDARD_ERRORS = 4.0
"""A reward drop must exceed this number of standard errors of the difference of two batch means."""

ENTROPY_NOISE = 0.2
"""A rise of the entropy by less than this value (nats per token) is ignored."""

CERTAIN_FACTOR = 5.0
"""An update whose KL exceeds its threshold by this factor trips the detection without waiting for `patience`."""

CONTENT_DROP = 0.8
"""Format without content is a sign only if content fell below this fraction of its baseline: policies often learn the
format first."""

OVERLONG_SHARE = 0.25
"""Share of the token limit over which the overlong penalty grows that findings recommend, as in DAPO."""

Parts = Mapping[str, Sequence[float | None]]


def group_statistics(report: StepReport) -> Iterator[GroupStatistics]:
    """Yield the statistics of every scored group of the batch, trained groups first.

    Stale groups are skipped, because an older policy sampled them, possibly one that was rolled back. So are groups
    whose rewards are not all finite and bounded.
    """
    for trained in report.trained:
        scored = trained.scored
        yield from _statistics(scored.group.prompt.source, scored.group.completions, scored.rewards, scored.parts)
    for discarded in report.discarded:
        if discarded.reason != "stale":
            yield from _statistics(discarded.prompt.source, discarded.completions, discarded.rewards, discarded.parts)


def batch_statistics(groups: Sequence[GroupStatistics], report: StepReport) -> BatchStatistics:
    """Return means over groups (each with equal weight), and the metrics of the update if it was applied."""
    rewards = [group.reward for group in groups]
    by_source: dict[str, list[float]] = {}
    for group in groups:
        by_source.setdefault(group.source, []).append(group.reward)
    update = report.update if report.update and report.update.update_applied else None
    return BatchStatistics(
        reward=_mean(rewards),
        reward_error=stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else None,
        rewards={source: fmean(values) for source, values in by_source.items()},
        shares={source: len(values) / len(groups) for source, values in by_source.items()},
        length=_mean([group.length for group in groups]),
        truncated=_mean([group.truncated for group in groups]),
        empty_form=_mean([group.empty_form for group in groups]),
        content=_mean([group.content for group in groups]),
        entropy=_finite(update.entropy) if update else None,
        kl=_finite(update.kl) if update and update.kl_beta > 0 else None,
        ess=_finite(update.ess) if update else None,
        update_kl=_nan_as_infinity(update.update_kl) if update else None,
        learning_rate=update.learning_rate if update else None,
    )


def _statistics(
    source: str, completions: Sequence[Completion], rewards: Sequence[float], parts: Parts
) -> Iterator[GroupStatistics]:
    if not rewards or not bounded(rewards):
        return
    format_and_content = list(_format_and_content(parts, len(rewards)))
    yield GroupStatistics(
        source=source,
        reward=fmean(rewards),
        lowest=min(rewards),
        length=fmean(completion.length for completion in completions),
        truncated=fmean(completion.finish_reason == "length" for completion in completions),
        empty_form=_mean([reward == 1.0 and not content for reward, content in format_and_content]),
        content=_mean([content for _, content in format_and_content]),
    )


def _format_and_content(parts: Parts, count: int) -> Iterator[tuple[float, bool]]:
    """Yield (format reward, any content reward > 0) for every completion that has both kinds of rewards."""
    for i in range(count):
        format_reward = parts[FORMAT][i] if FORMAT in parts else None
        content = [values[i] for name, values in parts.items() if name not in NOT_CONTENT]
        applicable = [value for value in content if value is not None]
        if format_reward is not None and applicable:
            yield format_reward, any(value > 0 for value in applicable)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _nan_as_infinity(value: float | None) -> float | None:
    """NaN counts as exceeding every threshold."""
    return value if value is None or isfinite(value) else inf


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


class CollapseDetector:
    """Keeps the baseline statistics of a run and assesses every batch."""

    def __init__(self, settings: CollapseChecks, state: CollapseState | None = None) -> None:
        """state: result of `state()` of another detector; the verdicts then continue as if it were the same one."""
        self._settings = settings
        self._state = state or CollapseState()

    def state(self) -> CollapseState:
        """Return the complete state, for a checkpoint."""
        return self._state

    def reset(self) -> None:
        """Forget all statistics, as after a rollback."""
        self._state = CollapseState()

    def observe(self, report: StepReport) -> CollapseVerdict:
        """Assess a batch. A batch without scored groups and without an applied update changes nothing."""
        before = self._state
        new = tuple(group_statistics(report))
        groups = (*before.groups, *new)[-max(MIN_GROUPS, len(new)) :]
        batch = batch_statistics(groups if new else (), report)
        if batch == BatchStatistics():
            return CollapseVerdict(findings=(), tripped=False)
        findings = tuple(finding for check in CHECKS for finding in check(batch, before, self._settings))
        bad = before.bad + 1 if findings else 0
        if batch.update_kl is not None and batch.update_kl > CERTAIN_FACTOR * self._settings.update_kl_high:
            bad = max(bad, self._settings.patience)
        healthy = before.healthy if findings else (*before.healthy, batch)[-self._settings.window :]
        self._state = CollapseState(
            bad=bad,
            lowest=_min(before.lowest, *(group.lowest for group in new)),
            groups=groups[-MIN_GROUPS:],
            healthy=healthy,
            baseline=before.baseline if findings else self._baseline(before.baseline, healthy),
        )
        return CollapseVerdict(findings=findings, tripped=bad >= self._settings.patience)

    def _baseline(self, before: BaselineStatistics, healthy: tuple[BatchStatistics, ...]) -> BaselineStatistics:
        def window_median(values: Sequence[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return median(known) if len(known) == self._settings.window else None

        rewards = {
            source: _max(before.rewards.get(source), window_median([batch.rewards.get(source) for batch in healthy]))
            for source in {*before.rewards, *(source for batch in healthy for source in batch.rewards)}
        }
        rises = any(best != before.rewards.get(source) for source, best in rewards.items())
        entropy = window_median([batch.entropy for batch in healthy])
        return BaselineStatistics(
            rewards={source: best for source, best in rewards.items() if best is not None},
            reward_error=window_median([batch.reward_error for batch in healthy]) if rises else before.reward_error,
            entropy_most=_max(before.entropy_most, entropy),
            entropy_least=_min(before.entropy_least, entropy),
            length=window_median([batch.length for batch in healthy]) or before.length,
            truncated=_min(before.truncated, window_median([batch.truncated for batch in healthy])),
            empty_form=_min(before.empty_form, window_median([batch.empty_form for batch in healthy])),
            content=_max(before.content, window_median([batch.content for batch in healthy])),
        )


Check = Callable[[BatchStatistics, CollapseState, CollapseChecks], Iterator[Finding]]
"""A check yields a finding if it triggers, otherwise nothing."""

OVERLONG_PENALTY = Change(
    key="learner.objective.overlong_penalty.buffer", of="sampling.max_tokens", factor=OVERLONG_SHARE
)


def _check_update_kl(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    if batch.update_kl is not None and batch.update_kl > settings.update_kl_high:
        used = batch.learning_rate
        rate = f" (in this update from {used:.2g} to {used / 10:.2g})" if used else ""
        yield Finding(
            name="update_too_large",
            severity="error" if batch.update_kl > CERTAIN_FACTOR * settings.update_kl_high else "warning",
            fact=f"the update changed the policy by {batch.update_kl:.2g} nats per token, more than "
            f"{settings.update_kl_high:g} (collapse_detection.update_kl_high)",
            consequence="such updates destroy what the policy has learned",
            advice=f"lower learner.optimizer.learning_rate to a tenth{rate}, or raise learner.batch_size",
            remedy=LOWER_RATE,
        )


def _check_ess(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    if batch.ess is not None and batch.ess < settings.ess_low:
        yield Finding(
            name="low_effective_sample_size",
            fact=f"the effective sample size is {batch.ess:.1%} of the tokens",
            consequence="the completions are too far from the trained policy, so the gradient is mostly noise",
            advice="lower rollouts.max_batches_ahead, learner.max_staleness or learner.optimizer.learning_rate",
            remedy=Remedy(
                action="fork", changes=(Change(key="rollouts.max_batches_ahead", factor=0.5), *LOWER_RATE.changes)
            ),
        )


def _check_kl(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    if batch.kl is not None and batch.kl > settings.kl_high:
        yield Finding(
            name="far_from_reference",
            fact=f"the KL divergence to the reference policy is {batch.kl:.2g} nats per token",
            consequence="the policy loses abilities of the base model",
            advice="raise learner.kl_penalty.coef, or lower learner.optimizer.learning_rate",
            remedy=Remedy(
                action="fork", changes=(Change(key="learner.kl_penalty.coef", factor=2.0), *LOWER_RATE.changes)
            ),
        )


def _check_reward(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    """Trigger if the reward lost more than `reward_drop` of (baseline - lowest reward), and more than noise explains.

    The noise is that of this batch or of healthy batches, whichever is larger: a batch in which few problems were
    solved by chance has a low standard error.

    The baselines of several environments are weighted by their shares of the batch, so that a different mixture of
    environments is not a drop.
    """
    baselines, lowest = state.baseline.rewards, state.lowest
    if lowest is None or batch.reward is None or batch.reward_error is None:
        return
    if not batch.shares.keys() <= baselines.keys():
        return
    baseline = sum(share * baselines[source] for source, share in batch.shares.items())
    drop = baseline - batch.reward
    noise = STANDARD_ERRORS * 2**0.5 * max(batch.reward_error, state.baseline.reward_error or 0.0)
    if drop > max(settings.reward_drop * (baseline - lowest), noise):
        yield Finding(
            name="reward_drop",
            fact=f"the mean reward fell from {baseline:.3g} to {batch.reward:.3g}",
            consequence="the policy loses what it has learned",
            advice="lower learner.optimizer.learning_rate, and continue from a checkpoint before the fall, or set "
            'collapse_detection = "rollback"',
            remedy=LOWER_RATE,
        )


def _check_entropy(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    least, most = state.baseline.entropy_least, state.baseline.entropy_most
    if batch.entropy is None or least is None or most is None:
        return
    if batch.entropy > max(settings.entropy_high * least, least + ENTROPY_NOISE):
        yield Finding(
            name="entropy_rise",
            fact=f"the entropy rose from {least:.2g} to {batch.entropy:.2g} nats",
            consequence="the policy becomes random",
            advice="lower learner.optimizer.learning_rate or learner.entropy_bonus",
            remedy=LOWER_RATE,
        )
    elif batch.entropy < settings.entropy_low * most:
        yield Finding(
            name="entropy_drop",
            fact=f"the entropy fell from {most:.2g} to {batch.entropy:.2g} nats",
            consequence="the completions of a group become identical, so groups have no signal",
            advice="use a larger learner.objective.clip_high, set learner.entropy_bonus, or raise sampling.temperature",
            remedy=Remedy(
                action="fork",
                changes=(
                    Change(key="learner.objective.clip_high", factor=1.4),
                    Change(key="learner.entropy_bonus.coef", value="0.001"),
                ),
            ),
        )


def _check_length(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    baseline = state.baseline.length
    if batch.length is not None and baseline is not None and batch.length > settings.length_high * baseline:
        yield Finding(
            name="length_growth",
            fact=f"the completion length grew from {baseline:.0f} to {batch.length:.0f} tokens",
            consequence="long completions cost time, and can mean that a reward favors length",
            advice="set learner.objective.overlong_penalty, or check whether a reward favors length",
            remedy=Remedy(action="fork", changes=(OVERLONG_PENALTY,)),
        )


def _check_truncated(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    baseline = state.baseline.truncated
    if batch.truncated is not None and baseline is not None and batch.truncated > baseline + settings.truncated_high:
        yield Finding(
            name="truncation_growth",
            fact=f"{batch.truncated:.0%} of completions are truncated, compared with {baseline:.0%} in the baseline",
            consequence="truncated completions seldom earn a reward",
            advice="set learner.objective.overlong_penalty, or raise sampling.max_tokens if long answers are wanted",
            remedy=Remedy(action="fork", changes=(OVERLONG_PENALTY, Change(key="sampling.max_tokens", factor=2.0))),
        )


def _check_format(batch: BatchStatistics, state: CollapseState, settings: CollapseChecks) -> Iterator[Finding]:
    baseline, content = state.baseline.empty_form, state.baseline.content
    if batch.empty_form is None or batch.content is None or baseline is None or content is None:
        return
    if batch.empty_form > baseline + settings.empty_format_high and batch.content <= CONTENT_DROP * content:
        yield Finding(
            name="format_without_content",
            fact=f"{batch.empty_form:.0%} of completions have the format without content, compared with "
            f"{baseline:.0%} in the baseline",
            consequence="the policy learns to satisfy the format reward instead of solving problems",
            advice="lower the weight of the reward format in [[rewards]]",
        )


CHECKS: tuple[Check, ...] = (
    _check_update_kl,
    _check_ess,
    _check_kl,
    _check_reward,
    _check_entropy,
    _check_length,
    _check_truncated,
    _check_format,
)


def _min(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _max(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)
