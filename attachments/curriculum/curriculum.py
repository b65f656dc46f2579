"""The curriculum by success rate: chooses the problem of every group, so that the policy learns most from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import structlog
from msgspec import Struct, structs

from attachments.curriculum.group_outcomes import (
    INTERVALS,
    CountedGroup,
    CurriculumState,
    CurriculumUpdate,
    Floats,
    GroupOutcomes,
    Indices,
    SavedCurriculum,
)
from attachments.curriculum.sections import SuccessRateCurriculum
from protocols.checkpoint import Part
from protocols.errors import CheckpointError
from protocols.rollout import Discarded, GroupOutcome, are_equal, bounded
from protocols.sampling import derive
from protocols.step import TrainedGroup
from training_run.attached import Attached
from training_run.directory.checkpoint_parts import Keeper
from training_run.groups.order import ProblemOrder
from training_run.supervision.hooks import Chooser, UpdateHook

log = structlog.get_logger(__name__)


class Choice(NamedTuple):
    """The problem of a group. zero_variance: probability that all or none of its completions succeed."""

    problem: int
    zero_variance: float


class Scored(NamedTuple):
    """A scored group. correct: what the rewards with `correct = true` say about each completion; None if nothing."""

    group_id: int
    rewards: tuple[float, ...]
    correct: tuple[bool | None, ...]


class CurriculumReport(Struct, frozen=True, kw_only=True):
    """The choice of problems in one step, as metrics.jsonl has it, each key with the prefix `curriculum/`."""

    zero_variance_expected: float | None
    zero_variance_observed: float | None
    success_rate: float
    problems: dict[str, int]


class Curriculum:
    """Chooses problems whose groups probably have both successes and failures, and of which much is left to learn.

    Candidates of group g are the next places of the order of problems (`candidates` per group, epochs and weights of
    types as without a curriculum). With the probability `explore`, the problem is drawn uniformly from the candidates;
    otherwise in proportion to q^sharpness f, with the probability q that its completions both succeed and fail, and its
    failure rate f (`GroupOutcomes`). q alone prefers problems that are nearly solved: the policy becomes certain, and
    problems that fail never have a gradient again. Problems of groups that have not ended are chosen only if there are
    no other candidates.

    A completion succeeds if the rewards with `correct = true` accept it, as in evaluation. If none of them applies, it
    succeeds if its reward is above the middle between the lowest and the highest reward of the run so far.

    The choice is a function of (dataset, seed, group_id, groups that were recorded before). Groups are counted at the
    end of a step in order of their ids, so that it does not depend on the order of arrival.
    """

    def __init__(
        self,
        types: Sequence[str],
        order: ProblemOrder,
        settings: SuccessRateCurriculum,
        *,
        seed: int,
        dataset: str,
        saved: SavedCurriculum | None = None,
    ) -> None:
        """types, order: of the problems. dataset: fingerprint of the problems. saved: of a checkpoint.

        Raises CheckpointError if the evidence is damaged.
        """
        self._order, self._settings = order, settings
        self._seed, self._dataset = seed, dataset
        self._candidates = min(settings.candidates, order.epoch_length)
        self.outcomes = GroupOutcomes(types)
        self._chosen: dict[int, Choice] = {}
        self._ended: list[int] = []
        self._scored: list[Scored] = []
        self._lowest: float | None = None
        self._highest: float | None = None
        self._counted: tuple[CountedGroup, ...] = ()
        if saved is not None:
            self._restore(saved)

    def choose(self, group_id: int) -> int:
        """Return the index of the problem of a group, and remember it until the group has ended."""
        random = np.random.default_rng(derive(self._seed, "curriculum", group_id))
        start = group_id * self._candidates
        places = [self._order.index(place) for place in range(start, start + self._candidates)]
        taken = {choice.problem for choice in self._chosen.values()}
        candidates: Indices = np.array([index for index in places if index not in taken] or places, dtype=np.int64)
        gradient = self.outcomes.gradient_probability(candidates)
        explores = random.random() < self._settings.explore
        weights = gradient**self._settings.sharpness * self.outcomes.failure_rates(candidates)
        position = _draw(random, np.ones(len(candidates)) if explores else weights)
        self._chosen[group_id] = Choice(int(candidates[position]), 1 - float(gradient[position]))
        return int(candidates[position])

    def record(self, outcomes: Iterable[GroupOutcome]) -> None:
        """Record groups that have ended. Discarded groups that were scored count like trained ones."""
        for outcome in outcomes:
            prompt = outcome.prompt
            self._ended.append(prompt.group_id)
            if prompt.group_id in self._chosen and outcome.rewards and bounded(outcome.rewards):
                correct = outcome.correct or (None,) * len(outcome.rewards)
                self._scored.append(Scored(prompt.group_id, outcome.rewards, correct))

    def end_step(self) -> CurriculumReport:
        """Count the groups that were recorded since the last step."""
        scored = sorted(self._scored)
        for group in scored:
            self._lowest = min(*group.rewards, *(() if self._lowest is None else (self._lowest,)))
            self._highest = max(*group.rewards, *(() if self._highest is None else (self._highest,)))
        self._counted = tuple(
            CountedGroup(
                problem=self._chosen[group.group_id].problem,
                successes=sum(map(self._succeeds, group.rewards, group.correct)),
                completions=len(group.rewards),
            )
            for group in scored
        )
        self.outcomes.end_step(self._counted)
        report = self._report(scored)
        for group_id in self._ended:
            self._chosen.pop(group_id, None)
        self._ended, self._scored = [], []
        return report

    def update(self) -> CurriculumUpdate:
        """Return what the last step changed, at the end of the step."""
        state = CurriculumState(dataset=self._dataset, lowest=self._lowest, highest=self._highest)
        return CurriculumUpdate(state=state, groups=self._counted)

    def _restore(self, saved: SavedCurriculum) -> None:
        if saved.state.dataset != self._dataset:
            log.warning("curriculum_starts_anew", reason="the checkpoint is of other problems")
            return
        try:
            self.outcomes.restore(saved.evidence)
        except ValueError as error:
            raise CheckpointError(f"the curriculum of the checkpoint cannot be used: {error}") from error
        self._lowest, self._highest = saved.state.lowest, saved.state.highest

    def _succeeds(self, reward: float, correct: bool | None) -> bool:
        if correct is not None or self._lowest is None or self._highest is None:
            return bool(correct)
        return reward > (self._lowest + self._highest) / 2

    def _report(self, scored: Sequence[Scored]) -> CurriculumReport:
        intervals = [f"{i / INTERVALS:.1f}-{(i + 1) / INTERVALS:.1f}" for i in range(INTERVALS)]
        equal = [are_equal(group.rewards) for group in scored]
        expected = [self._chosen[group.group_id].zero_variance for group in scored]
        return CurriculumReport(
            zero_variance_expected=fmean(expected) if expected else None,
            zero_variance_observed=fmean(equal) if equal else None,
            success_rate=self.outcomes.success_rate(),
            problems=dict(zip(intervals, self.outcomes.problems_by_rate(), strict=True)),
        )


def _draw(random: np.random.Generator, weights: Floats) -> int:
    """Draw an index in proportion to its weight; uniformly if no weight is positive."""
    total = np.cumsum(weights)
    if not total[-1] > 0:
        return int(random.integers(len(weights)))
    return min(int(np.searchsorted(total, random.random() * total[-1], side="right")), len(weights) - 1)


NAME = "curriculum"
"""Name of its part in checkpoints."""


def take_part(attached: Attached, curriculum: Curriculum) -> None:
    """Let a curriculum choose the problems of a run that has not begun."""
    hook = CurriculumHook(curriculum)
    attached.chooser = CurriculumChooser(curriculum)
    attached.hooks.append(hook)
    attached.parts.save(NAME, hook.part, keeper=EvidenceKeeper(deepcopy(curriculum.outcomes)))


class CurriculumChooser(Chooser):
    """Lets a curriculum choose the problem of every group, when all groups have ended that may end before."""

    waits = True

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum

    def choose(self, group_id: int) -> int:
        """Return the index of the problem of a group."""
        return self.curriculum.choose(group_id)


class CurriculumHook(UpdateHook):
    """Tells a curriculum how groups have ended."""

    def __init__(self, curriculum: Curriculum) -> None:
        self._curriculum = curriculum

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        """Record the groups."""
        self._curriculum.record([*(group.scored for group in trained), *discarded])

    def metrics(self) -> dict[str, Any]:
        """Count the groups of the step, and return how their problems were chosen."""
        report = structs.asdict(self._curriculum.end_step())
        return {f"curriculum/{name}": value for name, value in report.items()}

    def part(self) -> Part[CurriculumUpdate]:
        """Return what the step changed."""
        return Part(value=self._curriculum.update())


class EvidenceKeeper(Keeper[CurriculumUpdate]):
    """Counts the groups of every update as the curriculum does, because the evidence on all problems is large."""

    def __init__(self, outcomes: GroupOutcomes) -> None:
        """outcomes: a copy of those of the curriculum, at the start."""
        self._outcomes = outcomes

    def take(self, value: CurriculumUpdate) -> None:
        """Count the groups of an update."""
        self._outcomes.end_step(value.groups)

    def whole(self, value: CurriculumUpdate) -> Part[SavedCurriculum]:
        """Return the evidence after the update."""
        return Part(value=SavedCurriculum(state=value.state, evidence=self._outcomes.evidence()))
