"""How probable it is that the next group of a problem has a gradient, and how much of the problem is left to learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

HALF_LIFE = 50.0
"""Steps after which a group counts half in the probabilities."""


class OutcomeRecords(NamedTuple):
    """All evidence. P: problems with a group, ascending. T: types.

    statuses_P, steps_P: status after the last group, and the step of this group.
    successes_P, completions_P: number of successes and of completions in this group.
    groups_T_S_A, gradients_T_S_A: weight of the groups, and of those with a gradient, by type, status and age.
    """

    problems_P: Indices
    statuses_P: Indices
    steps_P: Indices
    successes_P: Indices
    completions_P: Indices
    groups_T_S_A: Floats
    gradients_T_S_A: Floats


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

    These are the posterior means of Beta distributions. After every step, W and G are multiplied by
    2^(-1 / HALF_LIFE).
    """

    def __init__(self, types: Sequence[str]) -> None:
        """types: type of each problem."""
        self.names = tuple(dict.fromkeys(types))
        position = {name: index for index, name in enumerate(self.names)}
        self._type_N: Indices = np.array([position[name] for name in types], dtype=np.int64)
        self._status_N: Indices = np.full(len(types), UNSEEN, dtype=np.int64)
        self._step_N: Indices = np.zeros(len(types), dtype=np.int64)
        self._successes_N: Indices = np.zeros(len(types), dtype=np.int64)
        self._completions_N: Indices = np.zeros(len(types), dtype=np.int64)
        self._groups_T_S_A = np.zeros((len(self.names), len(PRIOR), AGES))
        self._gradients_T_S_A = np.zeros_like(self._groups_T_S_A)
        self._step = 0
        self._shares_T_S_A, self._failure_N = self._shares(), self._failures()

    def gradient_probability(self, problems: Indices | slice = slice(None)) -> Floats:
        """The probability that the next group of each of some problems has a gradient."""
        age_N = self._ages(problems)
        found: Floats = self._shares_T_S_A[self._type_N[problems], self._status_N[problems], age_N]
        return found

    def success_rates(self) -> Floats:
        """The success rate of the last group of each problem; without a group, the mean of its type, or 1/2."""
        return self._of_last_groups(self._successes_N / np.maximum(1, self._completions_N))

    def failure_rates(self, problems: Indices | slice = slice(None)) -> Floats:
        """The failure rate of each of some problems: (failures + 1) / (completions + 2) in the last group.

        This is the posterior mean under a uniform prior. Without a group, the mean of the type, or 1/2.
        """
        found: Floats = self._failure_N[problems]
        return found

    def _of_last_groups(self, value_N: Floats) -> Floats:
        """Values of problems with a group; for the others, the mean of their type, or 1/2."""
        seen_N = self._status_N != UNSEEN
        seen_T = np.bincount(self._type_N, weights=seen_N, minlength=len(self.names))
        total_T = np.bincount(self._type_N, weights=value_N * seen_N, minlength=len(self.names))
        mean_T = np.divide(total_T, seen_T, out=np.full(len(self.names), 0.5), where=seen_T > 0)
        found_N: Floats = np.where(seen_N, value_N, mean_T[self._type_N])
        return found_N

    def end_step(self, groups: Sequence[tuple[int, int, int]]) -> None:
        """Record the groups of a step. groups: problem, successes and completions of each."""
        self._step += 1
        for counts in (self._groups_T_S_A, self._gradients_T_S_A):
            counts *= 2.0 ** (-1.0 / HALF_LIFE)
        for problem, successes, completions in groups:
            place = self._type_N[problem], self._status_N[problem], self._ages(problem)
            self._groups_T_S_A[place] += 1.0
            self._gradients_T_S_A[place] += 0 < successes < completions
            self._status_N[problem] = _status(int(self._status_N[problem]), successes, completions)
            self._step_N[problem] = self._step
            self._successes_N[problem], self._completions_N[problem] = successes, completions
        self._shares_T_S_A, self._failure_N = self._shares(), self._failures()

    def records(self) -> OutcomeRecords:
        """All evidence, for a checkpoint. Steps are relative to the present one."""
        problems_P = np.flatnonzero(self._status_N != UNSEEN).astype(np.int64)
        return OutcomeRecords(
            problems_P=problems_P,
            statuses_P=self._status_N[problems_P],
            steps_P=self._step_N[problems_P] - self._step,
            successes_P=self._successes_N[problems_P],
            completions_P=self._completions_N[problems_P],
            groups_T_S_A=self._groups_T_S_A.copy(),
            gradients_T_S_A=self._gradients_T_S_A.copy(),
        )

    def restore(self, records: OutcomeRecords) -> None:
        """Replace all evidence."""
        self._status_N[:] = UNSEEN
        self._status_N[records.problems_P] = records.statuses_P
        self._step_N[records.problems_P] = records.steps_P + self._step
        self._successes_N[records.problems_P] = records.successes_P
        self._completions_N[records.problems_P] = records.completions_P
        self._groups_T_S_A[:], self._gradients_T_S_A[:] = records.groups_T_S_A, records.gradients_T_S_A
        self._shares_T_S_A, self._failure_N = self._shares(), self._failures()

    def _ages(self, problems: Indices | slice | int) -> Indices:
        """The interval of the age of the status; 0 for problems without a group."""
        age_N = np.where(self._status_N[problems] == UNSEEN, 1, np.maximum(1, self._step - self._step_N[problems]))
        interval_N: Indices = np.minimum(AGES - 1, np.log2(age_N).astype(np.int64))
        return interval_N

    def _failures(self) -> Floats:
        failures_N = self._completions_N - self._successes_N
        return self._of_last_groups((failures_N + 1) / (self._completions_N + 2))

    def _shares(self) -> Floats:
        groups_S, gradients_S = self._groups_T_S_A.sum((0, 2)), self._gradients_T_S_A.sum((0, 2))
        share_S = (gradients_S + PRIOR_GROUPS * PRIOR) / (groups_S + PRIOR_GROUPS)
        groups_S_A, gradients_S_A = self._groups_T_S_A.sum(0), self._gradients_T_S_A.sum(0)
        share_S_A = (gradients_S_A + PRIOR_GROUPS * share_S[:, None]) / (groups_S_A + PRIOR_GROUPS)
        share_T_S_A: Floats = (self._gradients_T_S_A + PRIOR_GROUPS * share_S_A) / (self._groups_T_S_A + PRIOR_GROUPS)
        return share_T_S_A


def _status(before: int, successes: int, completions: int) -> int:
    if successes == 0:
        return FAILED_AGAIN if before in (FAILED, FAILED_AGAIN) else FAILED
    if successes == completions:
        return SOLVED_AGAIN if before in (SOLVED, SOLVED_AGAIN) else SOLVED
    return SELDOM if 2 * successes < completions else OFTEN
