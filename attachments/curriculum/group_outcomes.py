"""How probable it is that the next group of a problem has a gradient, and how much of the problem is left to learn.

A step costs the same however many problems there are: only the problems of its groups change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct


class CurriculumState(Struct, frozen=True, kw_only=True):
    """The small part of what a curriculum has seen.

    dataset: fingerprint of the problems; evidence on other problems is not used. lowest, highest: rewards of the run;
    None before the first group.
    """

    dataset: str
    lowest: float | None = None
    highest: float | None = None


class CountedGroup(NamedTuple):
    """A group that the curriculum counted. problem: index of its problem."""

    problem: int
    successes: int
    completions: int


class CurriculumUpdate(Struct, frozen=True, kw_only=True):
    """What an update says: the state after it, and the groups that were counted for it, in order."""

    state: CurriculumState
    groups: tuple[CountedGroup, ...]


class CurriculumEvidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The large part: the last group of each problem, and how often groups had a gradient.

    Columns of little-endian numbers. problems: index of each problem with a group, ascending, uint32. statuses, ages:
    status after its last group, and the age of this group in steps, uint8; the greatest age stands for greater ones.
    successes, completions: of this group, uint16.
    cells: places in the table of types, statuses and ages that have groups, uint32. cell_ages: steps since a cell last
    changed, uint32. cell_groups, cell_gradients: weight of its groups, and of those with a gradient, at that time.
    groups, gradients: the same for all types together, by status and age, now. Weights are float64.
    """

    problems: bytes
    statuses: bytes
    ages: bytes
    successes: bytes
    completions: bytes
    cells: bytes
    cell_ages: bytes
    cell_groups: bytes
    cell_gradients: bytes
    groups: bytes
    gradients: bytes


class SavedCurriculum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of a curriculum."""

    state: CurriculumState
    evidence: CurriculumEvidence


Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

UNSEEN, FAILED, FAILED_AGAIN, SOLVED, SOLVED_AGAIN, SELDOM, OFTEN = range(7)
"""Status of a problem after its last group: no group yet; all completions failed, for the first time or again; all
succeeded, for the first time or again; less than half succeeded; half or more did, but not all."""

PRIOR = np.array([0.5, 0.25, 0.1, 0.25, 0.1, 0.8, 0.8])
"""Probability of a gradient by status, before there is evidence."""

PRIOR_GROUPS = 4.0
"""Weight, in groups, of an estimate in the finer estimate below it."""

AGES = 8
"""Number of intervals of the age of a status. Interval i begins at 2^i steps; the last one has no end."""

OLDEST = 2 ** (AGES - 1)
"""Age of a status, in steps, above which greater ages are the same."""

HALF_LIFE = 50.0
"""Steps after which a group counts half in the probabilities."""

INTERVALS = 5
"""Number of intervals of the success rate in which problems are counted."""

UNIT = 4 * math.lcm(*range(1, 33))
"""Rates are summed as integers, in units of 1 / UNIT, so that a sum does not depend on the order in which groups were
added and removed. The sizes of usual groups divide it: the rates of their completions are then exact."""


@dataclass(slots=True)
class TypeRates:
    """Sums over the problems of one type with a group. rates, failures: success and failure rates, in units."""

    unseen: int
    seen: int = 0
    rates: int = 0
    failures: int = 0

    @property
    def mean(self) -> int:
        """The mean success rate, in units; one half without a group."""
        return self.rates // self.seen if self.seen else UNIT // 2


class GroupOutcomes:
    """The last group of every problem, and how often groups have a gradient.

    A group has a gradient if some of its completions succeed and some fail. The success rate of a problem changes with
    the policy, also without groups of its own, so the probability of a gradient is not computed from an old success
    rate. It is measured: q is the share of groups with a gradient among groups of problems of the same type, with the
    same status before the group, and with a status of about the same age (an interval that doubles). Where there are
    few such groups, coarser shares count more (w = PRIOR_GROUPS, W: weight of the groups, G: with a gradient):

        q(status)            = (G + w PRIOR)          / (W + w)        all groups with the status
        q(status, age)       = (G + w q(status))      / (W + w)        of this age
        q(status, age, type) = (G + w q(status, age)) / (W + w)        of this type

    These are the posterior means of Beta distributions. W and G of a group n steps ago are 2^(-n / HALF_LIFE).

    Array names end in N for all problems, and in T, S and A for types, statuses and ages. W and G by type are those of
    the step in which they last changed.
    """

    def __init__(self, types: Iterable[str]) -> None:
        """types: type of each problem."""
        position: dict[str, int] = {}
        self._type_N: Indices = np.array([position.setdefault(name, len(position)) for name in types], dtype=np.int64)
        problems, kinds = len(self._type_N), len(position)
        self._status_N = np.full(problems, UNSEEN, dtype=np.uint8)
        self._step_N = np.zeros(problems, dtype=np.int32)
        self._successes_N = np.zeros(problems, dtype=np.uint16)
        self._completions_N = np.zeros(problems, dtype=np.uint16)
        self._groups_T_S_A = np.zeros((kinds, len(PRIOR), AGES))
        self._gradients_T_S_A = np.zeros_like(self._groups_T_S_A)
        self._changed_T_S_A = np.zeros(self._groups_T_S_A.shape, dtype=np.int64)
        self._groups_S_A = np.zeros((len(PRIOR), AGES))
        self._gradients_S_A = np.zeros_like(self._groups_S_A)
        self._step = 0
        self._failure_T = np.full(kinds, 0.5)
        self._of_type = [TypeRates(unseen=int(size)) for size in np.bincount(self._type_N, minlength=kinds)]
        self._intervals = [0] * INTERVALS
        self._intervals[_interval(UNIT // 2, UNIT)] = problems
        self._rates = problems * (UNIT // 2)

    def gradient_probability(self, problems: Indices) -> Floats:
        """The probability that the next group of each of some problems has a gradient."""
        status_S, age_A = self._status_N[problems], self._ages(problems)
        share_S = _share(self._gradients_S_A.sum(1), self._groups_S_A.sum(1), PRIOR)
        share_S_A = _share(self._gradients_S_A, self._groups_S_A, share_S[:, None])
        place = self._type_N[problems], status_S, age_A
        kept = 2.0 ** ((self._changed_T_S_A[place] - self._step) / HALF_LIFE)
        return _share(self._gradients_T_S_A[place] * kept, self._groups_T_S_A[place] * kept, share_S_A[status_S, age_A])

    def failure_rates(self, problems: Indices) -> Floats:
        """The failure rate of each of some problems: (failures + 1) / (completions + 2) in the last group.

        This is the posterior mean under a uniform prior. Without a group, the mean of the type, or 1/2.
        """
        completions, successes = (
            part[problems].astype(np.float64) for part in (self._completions_N, self._successes_N)
        )
        rates = (completions - successes + 1.0) / (completions + 2.0)
        found: Floats = np.where(self._status_N[problems] == UNSEEN, self._failure_T[self._type_N[problems]], rates)
        return found

    def success_rate(self) -> float:
        """Mean success rate of the last groups of all problems; without a group, the mean of the type, or 1/2."""
        return self._rates / (UNIT * len(self._type_N))

    def problems_by_rate(self) -> list[int]:
        """Number of problems by the success rate of `success_rate`, in equal intervals from 0 to 1."""
        return list(self._intervals)

    def end_step(self, groups: Iterable[CountedGroup]) -> None:
        """Record the groups of a step."""
        self._step += 1
        for counts in (self._groups_S_A, self._gradients_S_A):
            counts *= 2.0 ** (-1.0 / HALF_LIFE)
        for group in groups:
            self._count(group)

    def _count(self, group: CountedGroup) -> None:
        problem, successes, completions = group.problem, group.successes, group.completions
        kind, status = int(self._type_N[problem]), int(self._status_N[problem])
        (age,), gradient = self._ages(np.array([problem])), 0 < successes < completions
        place = kind, status, age
        kept = 2.0 ** ((self._changed_T_S_A[place] - self._step) / HALF_LIFE)
        self._groups_T_S_A[place] = self._groups_T_S_A[place] * kept + 1.0
        self._gradients_T_S_A[place] = self._gradients_T_S_A[place] * kept + gradient
        self._changed_T_S_A[place] = self._step
        self._groups_S_A[status, age] += 1.0
        self._gradients_S_A[status, age] += gradient
        if status != UNSEEN:
            self._add_rates(kind, int(self._successes_N[problem]), int(self._completions_N[problem]), problems=-1)
        self._add_rates(kind, successes, completions, problems=1)
        self._status_N[problem] = _status(status, successes, completions)
        self._step_N[problem] = self._step
        self._successes_N[problem], self._completions_N[problem] = successes, completions

    def _add_rates(self, kind: int, successes: int, completions: int, *, problems: int) -> None:
        """Add problems of a type whose last group had these counts to the sums; fewer than 0: remove them."""
        rates = self._of_type[kind]
        self._add_to_mean(rates.mean, -rates.unseen)
        rate = UNIT * successes // completions
        self._rates += problems * rate
        self._intervals[_interval(successes, completions)] += problems
        rates.unseen -= problems
        rates.seen += problems
        rates.rates += problems * rate
        rates.failures += problems * (UNIT * (completions - successes + 1) // (completions + 2))
        self._add_to_mean(rates.mean, rates.unseen)
        self._failure_T[kind] = rates.failures / (UNIT * rates.seen) if rates.seen else 0.5

    def _add_to_mean(self, mean: int, problems: int) -> None:
        """Add problems without a group, which have the mean of their type."""
        self._rates += problems * mean
        self._intervals[_interval(mean, UNIT)] += problems

    def evidence(self) -> CurriculumEvidence:
        """All evidence, for a checkpoint. This reads all problems."""
        problems = np.flatnonzero(self._status_N != UNSEEN)
        cells = np.flatnonzero(self._groups_T_S_A)
        return CurriculumEvidence(
            problems=problems.astype("<u4").tobytes(),
            statuses=self._status_N[problems].tobytes(),
            ages=np.minimum(self._step - self._step_N[problems], OLDEST).astype("u1").tobytes(),
            successes=self._successes_N[problems].astype("<u2").tobytes(),
            completions=self._completions_N[problems].astype("<u2").tobytes(),
            cells=cells.astype("<u4").tobytes(),
            cell_ages=(self._step - self._changed_T_S_A.reshape(-1)[cells]).astype("<u4").tobytes(),
            cell_groups=self._groups_T_S_A.reshape(-1)[cells].astype("<f8").tobytes(),
            cell_gradients=self._gradients_T_S_A.reshape(-1)[cells].astype("<f8").tobytes(),
            groups=self._groups_S_A.astype("<f8").tobytes(),
            gradients=self._gradients_S_A.astype("<f8").tobytes(),
        )

    def restore(self, evidence: CurriculumEvidence) -> None:
        """Take over the evidence of a checkpoint, before the first group.

        Raises ValueError if it is not that of as many problems and types.
        """
        problems = _column(evidence.problems, "<u4", below=len(self._type_N))
        statuses = _column(evidence.statuses, "u1", count=len(problems), below=len(PRIOR))
        ages = _column(evidence.ages, "u1", count=len(problems))
        successes = _column(evidence.successes, "<u2", count=len(problems))
        completions = _column(evidence.completions, "<u2", count=len(problems))
        if np.any(np.diff(problems) <= 0) or np.any(successes > completions) or np.any(completions == 0):
            raise ValueError("problems that are not in order, or groups with more successes than completions")
        self._status_N[problems], self._step_N[problems] = statuses, self._step - ages
        self._successes_N[problems], self._completions_N[problems] = successes, completions
        counts = np.stack([self._type_N[problems], successes, completions])
        for (kind, won, of), number in zip(*_distinct(counts), strict=True):
            self._add_rates(kind, won, of, problems=number)
        cells = _column(evidence.cells, "<u4", below=self._groups_T_S_A.size)
        self._changed_T_S_A.reshape(-1)[cells] = self._step - _column(evidence.cell_ages, "<u4", count=len(cells))
        self._groups_T_S_A.reshape(-1)[cells] = _column(evidence.cell_groups, "<f8", count=len(cells))
        self._gradients_T_S_A.reshape(-1)[cells] = _column(evidence.cell_gradients, "<f8", count=len(cells))
        for totals_S_A, data in ((self._groups_S_A, evidence.groups), (self._gradients_S_A, evidence.gradients)):
            totals_S_A[:] = _column(data, "<f8", count=totals_S_A.size).reshape(totals_S_A.shape)

    def _ages(self, problems: Indices) -> Indices:
        """The interval of the age of the status; 0 for problems without a group."""
        age = np.where(self._status_N[problems] == UNSEEN, 1, np.maximum(1, self._step - self._step_N[problems]))
        interval: Indices = np.minimum(AGES - 1, np.log2(age).astype(np.int64))
        return interval


def _share(gradients: Floats, groups: Floats, coarser: Floats) -> Floats:
    found: Floats = (gradients + PRIOR_GROUPS * coarser) / (groups + PRIOR_GROUPS)
    return found


def _status(before: int, successes: int, completions: int) -> int:
    if successes == 0:
        return FAILED_AGAIN if before in (FAILED, FAILED_AGAIN) else FAILED
    if successes == completions:
        return SOLVED_AGAIN if before in (SOLVED, SOLVED_AGAIN) else SOLVED
    return SELDOM if 2 * successes < completions else OFTEN


def _interval(part: int, whole: int) -> int:
    return min(INTERVALS - 1, INTERVALS * part // whole)


def _distinct(columns: Indices) -> tuple[list[list[int]], list[int]]:
    """Return the distinct columns, and how often each occurs."""
    distinct, counts = np.unique(columns, axis=1, return_counts=True)
    return distinct.T.tolist(), counts.tolist()


def _column(data: bytes, kind: str, *, count: int | None = None, below: int | None = None) -> npt.NDArray[Any]:
    """Return the numbers of a column. Raises ValueError if they are not `count`, or not all smaller than `below`."""
    found = np.frombuffer(data, kind)
    if count is not None and len(found) != count:
        raise ValueError(f"{len(found)} values instead of {count}")
    if below is not None and np.any(found >= below):
        raise ValueError(f"a value of {below} or more")
    return found.astype(np.float64 if kind == "<f8" else np.int64)
