"""Alarms: whether the policy collapses or cheats, judged once per batch by simple signs that have to last.

A sign is a number of the batch beyond a fixed bound (how far the update moved the policy, effective sample size, KL),
or one far from what is normal for the run. HealthyRange is the median of the latest `window` healthy updates, and of it the
healthiest value so far: a slow decline stays measured against the best times. Only length is compared with the latest
median, for answers may grow for good. What looks bad never becomes normal.

How far an update moved the policy (`UpdateMetrics.step_kl`) is the earliest sign: rewards and ratios speak of weights
that are already some updates old when they are seen.

How a batch looks, from the learner's report of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite
from statistics import fmean, median, stdev

from clotho.config.schema import CollapseDetectionSection
from protocols.collapse import BatchStatistics, CollapseState, CollapseVerdict, GroupStatistics, HealthyRange
from protocols.sampling import Completion
from protocols.step import StepReport

FORM = "format"
"""The reward part that judges form alone. Without one of this name, form without content is not looked at."""

NO_CONTENT = (FORM, "overlong")
"""Components of a reward that say nothing of content."""

Components = Mapping[str, Sequence[float | None]]


def group_looks(report: StepReport) -> Iterator[GroupStatistics]:
    """Every group of the batch that was scored, whether it was trained on or discarded, the trained ones first.

    Stale ones are left out: an older policy drew them, perhaps one that was given up.
    """
    for trained in report.trained:
        scored = trained.scored
        yield from _group(scored.group.prompt.source, scored.group.completions, scored.rewards, scored.parts)
    for lost in report.discarded:
        if lost.reason != "stale":
            yield from _group(lost.prompt.source, lost.completions, lost.rewards, lost.parts)


def batch_look(groups: Sequence[GroupStatistics], report: StepReport) -> BatchStatistics:
    """Groups together, each counted the same, and the numbers of the update if one was made."""
    reward = [group.reward for group in groups]
    by_source: dict[str, list[float]] = {}
    for group in groups:
        by_source.setdefault(group.source, []).append(group.reward)
    update = report.update if report.update and report.update.applied else None
    return BatchStatistics(
        reward=_mean(reward),
        reward_error=stdev(reward) / len(reward) ** 0.5 if len(reward) > 1 else None,
        rewards={source: fmean(values) for source, values in by_source.items()},
        shares={source: len(values) / len(groups) for source, values in by_source.items()},
        length=_mean([group.length for group in groups]),
        truncated=_mean([group.truncated for group in groups]),
        empty_form=_mean([group.empty_form for group in groups]),
        content=_mean([group.content for group in groups]),
        entropy=_finite(update.entropy) if update else None,
        kl=_finite(update.kl) if update and update.kl_beta > 0 else None,
        ess=_finite(update.ess) if update else None,
        step_kl=_distance(update.step_kl) if update else None,
    )


def _group(
    source: str, completions: Sequence[Completion], rewards: Sequence[float], parts: Components
) -> Iterator[GroupStatistics]:
    if not rewards or not all(map(isfinite, rewards)):
        return
    judged = list(_content(parts, len(rewards)))
    yield GroupStatistics(
        source=source,
        reward=fmean(rewards),
        lowest=min(rewards),
        length=fmean(completion.length for completion in completions),
        truncated=fmean(completion.finish_reason == "length" for completion in completions),
        empty_form=_mean([form == 1.0 and not content for form, content in judged]),
        content=_mean([content for _, content in judged]),
    )


def _content(parts: Components, count: int) -> Iterator[tuple[float, bool]]:
    """Form, and whether there is any content, of every completion that is judged by both."""
    for i in range(count):
        form = parts[FORM][i] if FORM in parts else None
        content = [row[i] for name, row in parts.items() if name not in NO_CONTENT]
        marks = [value for value in content if value is not None]
        if form is not None and marks:
            yield form, any(value > 0 for value in marks)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _distance(value: float | None) -> float | None:
    """What is no number is beyond every bound: weights whose probabilities are none are as far away as can be."""
    return value if value is None or isfinite(value) else inf


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


ENOUGH_GROUPS = 16
"""Smaller batches are judged together with the groups before them, up to so many."""

CERTAIN = 3.0
"""A reward has fallen where the difference is more than so many standard errors."""

ENTROPY_NOISE = 0.2
"""Rises of the entropy by less nats per token are nothing, however low it was."""

BEYOND_DOUBT = 5.0
"""An update that moved the policy by so many times its bound needs no second one to trip the alarm."""

CONTENT_KEPT = 0.8
"""Form without content is a sign only where content fell below this share of its best: learning form first is none."""


class Alarms:
    """Remembers what is normal, and says of every batch whether it looks bad and for how long it has."""

    def __init__(self, settings: CollapseDetectionSection, state: CollapseState | None = None) -> None:
        """state: as another's `state()` gave it; the verdicts that follow are the same as its own would be."""
        self._settings = settings
        self._state = state or CollapseState()

    def state(self) -> CollapseState:
        """Return all that is remembered, for a checkpoint."""
        return self._state

    def restart(self) -> None:
        """Forget everything, as after going back to an earlier policy."""
        self._state = CollapseState()

    def observe(self, report: StepReport) -> CollapseVerdict:
        """Judge a batch. One without scored groups and without an update leaves everything as it was."""
        before = self._state
        new = tuple(group_looks(report))
        groups = (*before.groups, *new)[-max(ENOUGH_GROUPS, len(new)) :]
        look = batch_look(groups if new else (), report)
        if look == BatchStatistics():
            return CollapseVerdict(signs=(), tripped=False)
        signs = tuple(self._signs(look))
        bad = before.bad + 1 if signs else 0
        if look.step_kl is not None and look.step_kl > BEYOND_DOUBT * self._settings.step_kl_high:
            bad = max(bad, self._settings.patience)
        healthy = before.healthy if signs else (*before.healthy, look)[-self._settings.window :]
        self._state = CollapseState(
            bad=bad,
            lowest=_least(before.lowest, *(group.lowest for group in new)),
            groups=groups[-ENOUGH_GROUPS:],
            healthy=healthy,
            normal=before.normal if signs else self._normal(before.normal, healthy),
        )
        return CollapseVerdict(signs=signs, tripped=bad >= self._settings.patience)

    def _normal(self, before: HealthyRange, healthy: tuple[BatchStatistics, ...]) -> HealthyRange:
        def usual(name: str) -> float | None:
            values = [value for look in healthy if (value := getattr(look, name)) is not None]
            return median(values) if len(values) == self._settings.window else None

        def usual_reward(source: str) -> float | None:
            values = [look.rewards[source] for look in healthy if source in look.rewards]
            return median(values) if len(values) == self._settings.window else None

        rewards = {
            source: _most(before.rewards.get(source), usual_reward(source))
            for source in {*before.rewards, *(source for look in healthy for source in look.rewards)}
        }
        return HealthyRange(
            rewards={source: best for source, best in rewards.items() if best is not None},
            entropy_most=_most(before.entropy_most, usual("entropy")),
            entropy_least=_least(before.entropy_least, usual("entropy")),
            length=usual("length") or before.length,
            truncated=_least(before.truncated, usual("truncated")),
            empty_form=_least(before.empty_form, usual("empty_form")),
            content=_most(before.content, usual("content")),
        )

    def _signs(self, look: BatchStatistics) -> Iterator[str]:
        for sign in (_step, _ess, _kl, _reward, _entropy, _length, _truncated, _empty_form):
            yield from sign(look, self._state, self._settings)


Sign = Callable[[BatchStatistics, CollapseState, CollapseDetectionSection], Iterator[str]]
"""One idea of what looks bad: nothing, or words that say it."""


def _step(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    if look.step_kl is not None and look.step_kl > settings.step_kl_high:
        yield f"the update moved the policy by {look.step_kl:.2g} nats per token"


def _ess(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    if look.ess is not None and look.ess < settings.ess_low:
        yield f"the effective sample size is {look.ess:.1%} of the tokens"


def _kl(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    if look.kl is not None and look.kl > settings.kl_high:
        yield f"the policy is {look.kl:.2g} nats per token from its reference"


def _reward(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    """Lost of what the best times had above the worst completion of the run, and more than chance explains.

    The best of several environments are weighed as the batch is: another mixture is no loss.
    """
    bests, lowest = state.normal.rewards, state.lowest
    if lowest is None or look.reward is None or look.reward_error is None or not look.shares.keys() <= bests.keys():
        return
    best = sum(share * bests[source] for source, share in look.shares.items())
    lost = best - look.reward
    if lost > settings.reward_drop * (best - lowest) and lost > CERTAIN * look.reward_error:
        yield f"the mean reward fell from {best:.3g} to {look.reward:.3g}"


def _entropy(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    least, most = state.normal.entropy_least, state.normal.entropy_most
    if look.entropy is None or least is None or most is None:
        return
    if look.entropy > max(settings.entropy_high * least, least + ENTROPY_NOISE):
        yield f"the entropy rose from {least:.2g} to {look.entropy:.2g} nats"
    elif look.entropy < settings.entropy_low * most:
        yield f"the entropy fell from {most:.2g} to {look.entropy:.2g} nats"


def _length(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    usual = state.normal.length
    if look.length is not None and usual is not None and look.length > settings.length_high * usual:
        yield f"completions grew from {usual:.0f} to {look.length:.0f} tokens"


def _truncated(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    usual = state.normal.truncated
    if look.truncated is not None and usual is not None and look.truncated > usual + settings.truncated_high:
        yield f"{look.truncated:.0%} of completions are cut off, {usual:.0%} in good times"


def _empty_form(look: BatchStatistics, state: CollapseState, settings: CollapseDetectionSection) -> Iterator[str]:
    usual, content = state.normal.empty_form, state.normal.content
    if look.empty_form is None or look.content is None or usual is None or content is None:
        return
    if look.empty_form > usual + settings.empty_format_high and look.content <= CONTENT_KEPT * content:
        yield f"{look.empty_form:.0%} of completions have form without content, {usual:.0%} in good times"


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)
