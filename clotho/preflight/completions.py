"""A few completions before the first update: drawn, scored and checked for a learning signal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing

from clotho.monitoring.training_signal import TrainingSignal
from clotho.runtime.sampling_client import GroupSampler
from protocols.errors import visible
from protocols.finding import Finding
from protocols.prompt import Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling, completion_seeds

GROUPS, COMPLETIONS = 4, 4
"""Number of prompts, and of completions per prompt, that are drawn."""

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
    """Return the findings about scored groups. expected: what each reward function expects of a completion, by name."""
    signal = TrainingSignal(expected)
    signal.observe_groups(outcomes)
    return signal.findings()


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
