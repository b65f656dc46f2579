"""The completions that `doctor` draws: how many, and what their rewards prove about a learning signal.

A few completions cannot tell a reward that is never earned from one that is seldom earned: 0 of 16 is what a policy
with 17 % success shows in one of twenty cases. Without a signal, `doctor` therefore draws on, and states the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from math import inf
from statistics import fmean
from typing import Literal

from anyio import move_on_after
from msgspec import Struct
from msgspec.structs import replace

from protocols.errors import GenerationError, visible
from protocols.finding import Change, Finding, Remedy
from protocols.prompt import Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import Completion, CompletionTurn, FinishReason
from training_run.evaluation.accuracy import pass_at
from training_run.groups.rollout_source import RolloutSource
from training_run.profile.schema import Profile
from training_run.records.training_signal import MOSTLY, TrainingSignal

GROUPS, COMPLETIONS = 4, 4
"""Number of prompts, and of completions per prompt, that are drawn first."""

FOR_SIGNAL, MOST_COMPLETIONS, MOST_PER_GROUP = 128, 256, 16
"""Completions that are drawn at most for a group with different rewards, and with it for two updates; and of one
prompt."""

CONFIDENCE = 0.95
"""Confidence of the bound on the share of what was never seen."""

MAX_SHOWN = 300
"""Characters of a completion that a finding shows."""


def next_draw(profile: Profile, outcomes: Sequence[GroupOutcome]) -> tuple[int, int] | None:
    """Return how many further prompts `doctor` draws, and how many completions of each; None if it needs no more.

    After a first look, it draws the batches of two updates, or, while no group has different rewards, as many
    completions as `FOR_SIGNAL` allows. A reward that fails for every group needs no more completions.
    """
    if not outcomes:
        return GROUPS, COMPLETIONS
    if all(isinstance(outcome, Discarded) and outcome.reason == "reward_error" for outcome in outcomes):
        return None
    size = min(profile.sampling.group_size, MOST_PER_GROUP)
    sizes = [len(_group(outcome).completions) for outcome in outcomes]
    if trainable(outcomes):
        missing = 2 * profile.learner.batch_size - sizes.count(size)
        count = min(missing, (MOST_COMPLETIONS - sum(sizes)) // size)
    else:
        count = (FOR_SIGNAL - sum(sizes)) // size
    return (count, size) if count > 0 else None


def trainable(outcomes: Sequence[GroupOutcome]) -> list[ScoredGroup]:
    """Return the groups that an update trains on: those with different rewards."""
    return [outcome for outcome in outcomes if isinstance(outcome, ScoredGroup)]


def rehearsal_batches(
    profile: Profile, outcomes: Sequence[GroupOutcome]
) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """Return the groups that two updates train on, none in both: of the largest groups, as many as two batches have."""
    largest = sorted(outcomes, key=lambda outcome: -len(_group(outcome).completions))
    graded = trainable(largest[: 2 * profile.learner.batch_size])
    return graded[::2], graded[1::2]


def _group(outcome: GroupOutcome) -> RolloutGroup | Discarded:
    return outcome if isinstance(outcome, Discarded) else outcome.group


async def draw(
    source: RolloutSource,
    prompts: Sequence[Prompt],
    *,
    seconds: float = inf,
    progress: Callable[[int], None] = lambda drawn: None,
) -> list[RolloutGroup]:
    """Draw the group of each prompt, as in a run.

    seconds: time after which unfinished groups are given up; the result has only finished groups.
    progress: is called with the number of completions after each group. Raises GenerationError.
    """
    found: list[RolloutGroup] = []
    with move_on_after(seconds):
        async with aclosing(source.groups(prompts)) as groups:
            async for group in groups:
                if isinstance(group, Discarded):
                    raise GenerationError(group.detail)
                found.append(group)
                progress(sum(len(one.completions) for one in found))
    return sorted(found, key=lambda group: group.prompt.group_id)


def completion_findings(outcomes: Sequence[GroupOutcome], expected: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about scored groups. expected: what each reward function expects of a completion, by name.

    Equal rewards are an error after `FOR_SIGNAL` completions. After fewer they are a warning, because the next
    completion may earn another reward; both state the share that may. Truncation that leaves a signal is a finding only
    if nearly all completions are truncated: a policy learns to end its answers, if some of them end.
    """
    signal = TrainingSignal(expected, window=max(1, len(outcomes)))
    signal.observe_groups(outcomes)
    found = list(signal.findings())
    scored = [outcome for outcome in outcomes if outcome.rewards]
    drawn = sum(len(outcome.rewards) for outcome in scored)
    all_drawn = drawn > FOR_SIGNAL - MOST_PER_GROUP  # no further group fits
    severity: Literal["error", "warning"] = "error" if all_drawn else "warning"
    for finding in found:
        if finding.severity == "error" and finding.name != "rewards_fail":
            fact = f"{finding.fact}; {_bound(drawn)} of completions earn another reward"
            yield replace(finding, severity=severity, fact=fact)
        elif finding.name != "truncated" or _truncated(scored) >= MOSTLY:
            yield finding
    if len(scored) >= GROUPS and not trainable(scored) and not any(finding.severity == "error" for finding in found):
        yield Finding(
            name="no_signal",
            severity=severity,
            fact=f"in each of {len(scored)} groups all completions have the same reward, although groups differ; "
            f"{_bound(len(scored))} of groups have different rewards",
            consequence="such groups have no advantages, so nothing is learned",
            advice="raise sampling.temperature or sampling.group_size, or choose problems that are solved sometimes",
            remedy=Remedy(
                action="start",
                changes=(Change(key="sampling.temperature", value="1"), Change(key="sampling.group_size", factor=2.0)),
            ),
        )


def _truncated(outcomes: Sequence[GroupOutcome]) -> float:
    """Return the share of completions that reached the token limit."""
    reasons = [completion.finish_reason for outcome in outcomes for completion in _group(outcome).completions]
    return reasons.count("length") / len(reasons)


def _bound(trials: int) -> str:
    """Return the bound of Clopper and Pearson on the share of a result that no trial had, in words."""
    return f"at most {1 - (1 - CONFIDENCE) ** (1 / trials):.0%} ({CONFIDENCE:.0%} confidence)"


def stop_reasons(completions: Sequence[Completion]) -> str:
    """Return how many completions ended for which reason."""
    reasons = [completion.finish_reason for completion in completions]
    return ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))


def reward_rows(outcomes: Sequence[GroupOutcome]) -> list[tuple[str, str]]:
    """Return name and range of every reward function, and of their weighted sum."""
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, row in outcome.parts.items():
            values.setdefault(name, []).extend(value for value in row if value is not None)
        values.setdefault("sum", []).extend(outcome.rewards)
    failed = [outcome for outcome in outcomes if isinstance(outcome, Discarded) and outcome.reason == "reward_error"]
    rows = [(name, _range(found)) for name, found in values.items() if name != "sum"]
    if failed:
        rows.append(("failed", f"{len(failed)} of {len(outcomes)} groups: {visible(failed[0].detail, MAX_SHOWN)}"))
    return [*rows, ("sum", _range(values.get("sum", [])))]


def _range(values: Sequence[float]) -> str:
    if not values:
        return "no value"
    mean = sum(values) / len(values)
    return f"mean {mean:.3g}, {min(values):.3g} to {max(values):.3g} ({len(values)} values)"


class Completed(Struct, frozen=True, kw_only=True):
    """One of the drawn completions. turns: the parts of its text, if an environment inserted some."""

    prompt: str
    completion: str
    reward: float | None
    stop_reason: FinishReason
    turns: tuple[CompletionTurn, ...]


def examples(outcomes: Sequence[GroupOutcome], *, limit: int = 16) -> Iterator[Completed]:
    """Yield the first completions."""
    for outcome in outcomes:
        group = _group(outcome)
        for index, completion in enumerate(group.completions[:limit]):
            limit -= 1
            yield Completed(
                prompt=group.prompt.problem.prompt,
                completion=completion.text,
                reward=outcome.rewards[index] if outcome.rewards else None,
                stop_reason=completion.finish_reason,
                turns=completion.turns,
            )


LARGEST_K = 8
"""Largest k of pass@k, as far as groups have so many completions."""

FEWEST_GROUPS = 4
"""Problems below which nothing is estimated."""

SOLVED = 0.95
"""pass@1 from which on nearly all groups of 8 are solved by all completions: 0.95^8 is two thirds."""


def learnability(outcomes: Sequence[GroupOutcome], *, batch_size: int) -> str:
    """Return pass@1, pass@k and what helps; empty if too few groups have completions that are judged correct or wrong.

    A group teaches RL something if some of its completions are correct and others are not. pass@k is the share of
    problems that k completions solve at least once; with fewer than one such problem in a batch, RL has nothing to
    reinforce in most updates. With fewer than one group of both kinds, problems are always solved or never. A group of
    one says neither.
    outcomes: scored groups. batch_size: number of groups of a batch of the run.
    """
    judged = [[one for one in outcome.correct if one is not None] for outcome in outcomes]
    judged = [row for row in judged if len(row) > 1]
    if len(judged) < FEWEST_GROUPS:
        return ""
    k = min(LARGEST_K, *map(len, judged))
    one, several = (fmean(pass_at(n, correct=sum(row), samples=len(row)) for row in judged) for n in (1, k))
    mixed = fmean(0 < sum(row) < len(row) for row in judged)
    advice = _advice(one, solved=several * batch_size, mixed=mixed * batch_size)
    return f"pass@1 {one:.2f}, pass@{k} {several:.2f} of {len(judged)} problems: {advice}"


def _advice(one: float, *, solved: float, mixed: float) -> str:
    """solved, mixed: groups of a batch with a correct completion, and with a wrong one too."""
    if solved < 1:
        return "warm up first, with demonstrations ([[stages]] of the kind sft) or easier problems"
    if one >= SOLVED:
        return "nearly solved, choose harder problems"
    if mixed < 1:
        return "solved always or never, RL has little to learn from; raise sampling.temperature, or warm up"
    return "RL can help"
