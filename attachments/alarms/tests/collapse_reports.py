"""Step reports for the tests of the collapse detection, built from a few statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup, ScoredGroup
from protocols.sampling import Completion
from protocols.step import StepReport, TrainedGroup, UpdateMetrics
from tests.training_run.records.recorded_runs import Line

GROUPS, SIZE = 16, 4
GOOD = Line(1.0, 0.05, 0.99, 0.002, 20.0, 0.0, 0.0, None)
"""A healthy batch."""


def completion(tokens: int = 3, *, truncated: bool = False) -> Completion:
    """Return a completion of `tokens` tokens."""
    return Completion(
        tokens=(0,) * tokens,
        logprobs=(0.0,) * tokens,
        versions=(0,) * tokens,
        text="",
        finish_reason="length" if truncated else "stop",
    )


def prompt(number: int = 0) -> Prompt:
    """Return the prompt of a group."""
    return Prompt(group_id=number, problem=Problem(prompt="", answer="", type="x"), tokens=(0,), seed=0)


def scored(
    rewards: Sequence[float],
    parts: Mapping[str, tuple[float | None, ...]] | None = None,
    completions: Sequence[Completion] | None = None,
) -> ScoredGroup:
    """Return a scored group."""
    group = RolloutGroup(prompt=prompt(), completions=tuple(completions or [completion() for _ in rewards]))
    return ScoredGroup(group=group, rewards=tuple(rewards), parts=dict(parts or {}))


def discarded(group: ScoredGroup) -> Discarded:
    """Return the same group, discarded."""
    return Discarded(
        prompt=group.group.prompt,
        reason="zero_variance",
        detail="",
        completions=group.group.completions,
        rewards=group.rewards,
        parts=group.parts,
    )


def metrics(line: Line, *, kl: float = 0.0, kl_beta: float = 0.0, applied: bool = True) -> UpdateMetrics:
    """Return the metrics of an update."""
    return UpdateMetrics(
        loss=0.0,
        kl=kl,
        entropy=line.entropy,
        clip_fraction=0.0,
        mismatch_kl=0.0,
        ratio_mean=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        trained_tokens=100,
        update_applied=applied,
        ess=line.ess,
        rejected_fraction=0.0,
        kl_beta=kl_beta,
        entropy_coef=0.0,
        optimizer_steps=1,
        update_kl=line.update_kl,
    )


def report(
    trained: Sequence[ScoredGroup] = (), discarded: Sequence[Discarded] = (), update: UpdateMetrics | None = None
) -> StepReport:
    """Return the report of a step."""
    return StepReport(
        step=1,
        version=1,
        fingerprint="f",
        trained=tuple(TrainedGroup(scored=group, advantages=(0.0,) * len(group.rewards)) for group in trained),
        discarded=tuple(discarded),
        staleness=(0,) * len(trained),
        update=update,
        train_seconds=0.0,
        wait_seconds=0.0,
    )


def batch(line: Line, *, groups: int = GROUPS, spread: float = 0.15) -> StepReport:
    """Return a batch with the statistics of `line`; half of its groups are trained on, half discarded.

    The mean rewards of the groups differ from the mean by `spread`. The lowest reward is 0.
    """
    made = []
    count = groups * SIZE
    for number in range(groups):
        places = range(number * SIZE, (number + 1) * SIZE)
        form_only = [place < round(line.empty_form * count) for place in places]
        truncated = [count - place <= round(line.truncated * count) for place in places]
        mean = line.reward + (spread if number % 2 else -spread)
        made.append(
            scored(
                (0.0, *[mean * SIZE / (SIZE - 1)] * (SIZE - 1)),
                {"format": (1.0,) * SIZE, "exact": tuple(0.0 if empty else 1.0 for empty in form_only)},
                [completion(round(line.length), truncated=cut) for cut in truncated],
            )
        )
    return report(made[: groups // 2], [discarded(group) for group in made[groups // 2 :]], metrics(line))
