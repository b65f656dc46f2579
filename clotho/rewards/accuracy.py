"""Grading of completions, and accuracy with confidence intervals, for the evaluator and the command `eval`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from math import comb
from statistics import fmean

from msgspec import Struct

from protocols.prompt import Problem

Z95 = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""

IsCorrect = Callable[[Problem, str], Awaitable[bool | None]]
"""Whether a completion is correct; None if no reward with `correct = true` applies to the problem."""


class Estimate(Struct, frozen=True, kw_only=True):
    """A share between 0 and 1, or a difference of shares, with its interval of 95 %."""

    value: float
    low: float
    high: float


class Accuracy(Struct, frozen=True, kw_only=True):
    """A share over problems, overall and by type. ungraded: number of problems that cannot be graded."""

    problems: int
    ungraded: int
    overall: Estimate
    by_type: dict[str, Estimate]


async def grade(problems: Sequence[Problem], texts: Sequence[str], is_correct: IsCorrect) -> list[bool | None]:
    """Return whether each completion is correct, one completion per problem; None if it cannot be graded."""
    return [await is_correct(problem, text) for problem, text in zip(problems, texts, strict=True)]


def accuracy(problems: Sequence[Problem], shares: Sequence[float | None]) -> Accuracy:
    """Return the mean of a share per problem, such as `True` for a correct greedy completion; None is ungraded."""
    by_type: dict[str, list[float]] = defaultdict(list)
    for problem, share in zip(problems, shares, strict=True):
        if share is not None:
            by_type[problem.type].append(float(share))
    values = [share for found in by_type.values() for share in found]
    return Accuracy(
        problems=len(values),
        ungraded=len(problems) - len(values),
        overall=mean_share(values),
        by_type={kind: mean_share(found) for kind, found in sorted(by_type.items())},
    )


def mean_share(shares: Sequence[float]) -> Estimate:
    """Return the mean of one share per problem with Wilson's interval at the effective number of problems.

    n' = p (1 - p) / var, with the mean p and var = (sum of squared deviations) / n^2, is the number of independent
    binary outcomes with the same variance (Korn and Graubard, 1998). Binary outcomes have n' = n, and the interval is
    that of Wilson (1927). Shares without any variance have n' = n. Without problems the estimate is 0 in [0, 1].
    """
    if not shares:
        return Estimate(value=0.0, low=0.0, high=1.0)
    count, p = len(shares), fmean(shares)
    variance = sum((share - p) ** 2 for share in shares) / count**2
    n = p * (1 - p) / variance if variance > 0 else float(count)
    center = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    return Estimate(value=p, low=max(0.0, center - half), high=min(1.0, center + half))


def mean_difference(first: Sequence[float | None], second: Sequence[float | None]) -> Estimate:
    """Return the mean of second - first over the problems that have both, with the normal interval of paired values."""
    pairs = zip(first, second, strict=True)
    differences = [float(b) - float(a) for a, b in pairs if a is not None and b is not None]
    if not differences:
        return Estimate(value=0.0, low=-1.0, high=1.0)
    mean = fmean(differences)
    half = Z95 * math.sqrt(sum((d - mean) ** 2 for d in differences)) / len(differences)
    return Estimate(value=mean, low=max(-1.0, mean - half), high=min(1.0, mean + half))


def pass_at(k: int, *, correct: int, samples: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k completions is correct.

    1 - C(n - c, k) / C(n, k) for c correct completions among n (Chen et al., 2021, arXiv:2107.03374); 1 <= k <= n.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
