"""A few completions before the first update: drawn, scored and checked for a learning signal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing

from clotho.monitoring.training_signal import TrainingSignal
from clotho.runtime.sampling_client import GroupSampler
from clotho.training.batch_collector import discard
from protocols.errors import visible
from protocols.finding import Finding
from protocols.prompt import Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling, completion_seeds
from protocols.step import GroupsEnded

GROUPS, COMPLETIONS = 4, 4
"""Number of prompts, and of completions per prompt, that are drawn."""

MOSTLY = 0.9
"""Share of truncated completions that counts as nearly all."""

EXPLAINED = frozenset({"no_reward", "all_truncated", "truncated"})
"""Findings that truncation explains."""

MAX_SHOWN = 300
"""Characters of a completion that a finding shows."""


async def draw(
    sampler: GroupSampler, prompts: Sequence[Prompt], sampling: Sampling, *, count: int = COMPLETIONS
) -> list[RolloutGroup]:
    """Draw `count` completions of each prompt, with the sampling distribution of the rollouts.

    Raises RequestError or GenerationError.
    """
    requests = [
        SampleRequest(
            prompt=prompt.tokens,
            sampling=sampling,
            seeds=completion_seeds(prompt.seed, count),
            record_support=True,
            background=True,
        )
        for prompt in prompts
    ]
    found: dict[int, RolloutGroup] = {}
    async with aclosing(sampler.groups(requests)) as outcomes:
        async for position, outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            found[position] = RolloutGroup(prompt=prompts[position], completions=tuple(outcome))
    return [found[position] for position in sorted(found)]


def completion_findings(outcomes: Sequence[GroupOutcome], expected: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about scored groups. expected: what each reward function expects of a completion, by name."""
    signal = TrainingSignal(expected)
    ended = tuple(
        outcome if isinstance(outcome, Discarded) else discard(outcome, "zero_variance", "") for outcome in outcomes
    )
    signal.observe(GroupsEnded(step=1, discarded=ended))
    drawn = [(group.prompt, completion) for group in ended for completion in group.completions]
    truncated = [(prompt, completion) for prompt, completion in drawn if completion.finish_reason == "length"]
    cut = bool(drawn) and len(truncated) >= MOSTLY * len(drawn)
    yield from (finding for finding in signal.findings() if not (cut and finding.name in EXPLAINED))
    if cut:
        prompt, completion = truncated[0]
        yield Finding(
            name="all_truncated",
            severity="error",
            fact=f"{len(truncated)} of {len(drawn)} completions reached the token limit",
            consequence="a completion without an end rarely earns a reward, and its last tokens teach nothing",
            advice="raise sampling.max_tokens, ask for shorter answers in data.system, or check that the model samples "
            "its end token",
            example=visible(f"{prompt.problem.prompt} -> {completion.text}", MAX_SHOWN, keep_end=100),
        )


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


def examples(outcomes: Sequence[GroupOutcome], *, limit: int = 16) -> Iterator[tuple[str, str, float | None, str]]:
    """Yield prompt, completion, reward and stop reason of the first completions."""
    for outcome in outcomes:
        group = outcome if isinstance(outcome, Discarded) else outcome.group
        for index, completion in enumerate(group.completions):
            if limit <= 0:
                return
            limit -= 1
            reward = outcome.rewards[index] if outcome.rewards else None
            yield group.prompt.problem.prompt, completion.text, reward, completion.finish_reason
