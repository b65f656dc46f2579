"""Results on held-out problems, for the evaluator and the command `eval`: means with confidence intervals of 95 %.

An interval describes the uncertainty from the choice of problems. The unit is the problem: completions of one problem
are not independent, so each problem enters with one value, the mean over its completions.

| value | interval |
|---|---|
| accuracy, avg@k, pass@k | Wilson's at the effective number of problems (`mean_share`) |
| reward, value of a function | normal (`mean_value`) |
| held-out loss | normal, of a ratio of sums (`mean_ratio`) |
| difference of shares of two policies | Newcombe's for paired shares (`share_difference`) |
| difference of other values | normal, of paired differences (`value_difference`) |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import comb
from statistics import fmean

import anyio
from msgspec import Struct

from protocols.evaluation import Estimate, EvalReport, Grade, GradeCompletions, ReferenceLoss
from protocols.prompt import Problem
from protocols.sampling import Completion

Z95 = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""

CONCURRENT_PROBLEMS = 4
"""Problems that are graded at the same time. The scorer of the run uses the same reward functions meanwhile."""


class Accuracy(Struct, frozen=True, kw_only=True):
    """A share over problems, overall and by type; None if no problem has one. ungraded: number of other problems."""

    problems: int
    ungraded: int
    overall: Estimate | None
    by_type: dict[str, Estimate]


class Judged(Struct, frozen=True, kw_only=True):
    """One completion with its grade."""

    completion: Completion
    grade: Grade


class Outcome(Struct, frozen=True, kw_only=True):
    """What one policy made of one problem. loss: of the reference completion; None if there is none."""

    problem: Problem
    greedy: Judged
    samples: tuple[Judged, ...] = ()
    loss: ReferenceLoss | None = None

    @property
    def failed(self) -> bool:
        """Whether a reward function failed on a completion."""
        return any(one.grade.failed for one in (self.greedy, *self.samples))

    @property
    def tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(one.completion.length for one in (self.greedy, *self.samples))

    @property
    def correct_samples(self) -> int | None:
        """Number of correct sampled completions; None if one of them cannot be graded."""
        correct = [one.grade.correct for one in self.samples]
        return None if None in correct else sum(map(bool, correct))


async def graded(
    problems: Sequence[Problem],
    completions: Sequence[Sequence[Completion]],
    grade: GradeCompletions,
    *,
    losses: Sequence[ReferenceLoss | None] = (),
) -> list[Outcome]:
    """Grade the completions of each problem: the first is the greedy one, the others are sampled.

    The sampled completions are graded as one group, or each alone if a reward function fails on the group. losses: of
    the reference completions; empty if they are not measured.
    """
    found: dict[int, Outcome] = {}
    slots = anyio.CapacityLimiter(CONCURRENT_PROBLEMS)

    async def judge(index: int) -> None:
        """Grade the completions of one problem."""
        first, *others = completions[index]
        async with slots:
            grades = [*await grade(problems[index], [first])]
            sampled = await grade(problems[index], others) if others else ()
            if len(others) > 1 and any(one.failed for one in sampled):
                sampled = [one for other in others for one in await grade(problems[index], [other])]
        judged = [Judged(completion=c, grade=g) for c, g in zip(completions[index], [*grades, *sampled], strict=True)]
        found[index] = Outcome(
            problem=problems[index],
            greedy=judged[0],
            samples=tuple(judged[1:]),
            loss=losses[index] if losses else None,
        )

    async with anyio.create_task_group() as tasks:
        for index in range(len(problems)):
            tasks.start_soon(judge, index)
    return [found[index] for index in range(len(problems))]


def accuracy(outcomes: Iterable[Outcome]) -> Accuracy:
    """Return the share of problems whose greedy completion is correct."""
    return share_by_type((one.problem.type, _is_correct(one)) for one in outcomes)


def avg_at_k(outcomes: Iterable[Outcome]) -> Accuracy:
    """Return the mean share of correct completions among the sampled completions of a problem."""
    return share_by_type((one.problem.type, avg_of(one)) for one in outcomes)


def pass_at_k(outcomes: Iterable[Outcome], k: int) -> Accuracy:
    """Return the mean of `pass_at` over problems."""
    return share_by_type((one.problem.type, pass_of(one, k)) for one in outcomes)


def avg_of(outcome: Outcome) -> float | None:
    """Return the share of correct completions among the sampled ones of a problem; None if it is ungraded."""
    correct = outcome.correct_samples
    return None if correct is None or not outcome.samples else correct / len(outcome.samples)


def pass_of(outcome: Outcome, k: int) -> float | None:
    """Return `pass_at` k for a problem; None if it is ungraded or has fewer than k sampled completions."""
    correct, samples = outcome.correct_samples, len(outcome.samples)
    return None if correct is None or k > samples else pass_at(k, correct=correct, samples=samples)


def report_of(
    outcomes: Sequence[Outcome], *, step: int = 0, version: int = 0, seconds: float = 0.0, final: bool = False
) -> EvalReport:
    """Return what an evaluation measures. The other arguments: as in the report."""
    found = accuracy(outcomes)
    lengths = [one.greedy.completion.length for one in outcomes]
    values: defaultdict[str, list[float]] = defaultdict(list)
    for one in outcomes:
        for name, value in one.greedy.grade.parts.items():
            values[name].append(value)
    losses = [one.loss for one in outcomes if one.loss is not None]
    samples = max((len(one.samples) for one in outcomes), default=0)
    shares = {str(k): pass_at_k(outcomes, k).overall for k in powers_of_two(samples)}
    return EvalReport(
        step=step,
        version=version,
        problems=found.problems,
        ungraded=found.ungraded,
        failed=sum(one.failed for one in outcomes),
        accuracy=found.overall.value if found.overall else None,
        interval=(found.overall.low, found.overall.high) if found.overall else None,
        by_type={kind: share.value for kind, share in found.by_type.items()},
        reward=mean_value(list(map(_reward, outcomes))),
        rewards={name: mean for name, one in sorted(values.items()) if (mean := mean_value(one))},
        loss=mean_ratio([(loss.nats, float(loss.tokens)) for loss in losses]),
        completion_length=fmean(lengths) if lengths else None,
        truncated=fmean(one.greedy.completion.finish_reason == "length" for one in outcomes) if outcomes else None,
        samples=samples,
        avg=avg_at_k(outcomes).overall if samples else None,
        pass_at={k: share for k, share in shares.items() if share is not None},
        sampled_reward=mean_value(list(map(sampled_reward, outcomes))),
        completion_tokens=sum(one.tokens for one in outcomes),
        seconds=seconds,
        final=final,
    )


def sampled_reward(outcome: Outcome) -> float | None:
    """Return the mean reward of the sampled completions of a problem that have one; None if none has."""
    rewards = [one.grade.reward for one in outcome.samples if one.grade.reward is not None]
    return fmean(rewards) if rewards else None


def share_by_type(shares: Iterable[tuple[str, float | None]]) -> Accuracy:
    """Return the mean of shares, overall and by type of problem. shares: type and share; None is ungraded."""
    by_type: defaultdict[str, list[float]] = defaultdict(list)
    ungraded = 0
    for kind, share in shares:
        if share is None:
            ungraded += 1
        else:
            by_type[kind].append(float(share))
    values = [share for found in by_type.values() for share in found]
    return Accuracy(
        problems=len(values),
        ungraded=ungraded,
        overall=mean_share(values),
        by_type={kind: mean for kind, found in sorted(by_type.items()) if (mean := mean_share(found))},
    )


def mean_share(shares: Sequence[float]) -> Estimate | None:
    """Return the mean of one share per problem with Wilson's interval at the effective number of problems.

    n' = p (1 - p) / var, with the mean p and var = (sum of squared deviations) / n^2, is the number of independent
    binary outcomes with the same variance (Korn and Graubard, 1998). Binary outcomes have n' = n, and the interval is
    that of Wilson (1927). Shares without any variance have n' = n. None without problems.
    """
    if not shares:
        return None
    count, p = len(shares), fmean(shares)
    variance = sum((share - p) ** 2 for share in shares) / count**2
    n = p * (1 - p) / variance if variance > 0 else float(count)
    center = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(max(0.0, p * (1 - p)) / n + Z95**2 / (4 * n**2))
    return Estimate(value=p, low=max(0.0, center - half), high=min(1.0, center + half), problems=count)


def mean_value(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean of one value per problem with the normal interval, mean +- z s / sqrt(n).

    s is the sample standard deviation. One value has an interval of width 0. None without values.
    """
    return mean_ratio([(value, 1.0) for value in values if value is not None])


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return R = (sum of x) / (sum of y) for one pair (x, y) per problem, with the normal interval of a ratio.

    The variance is n / (n - 1) * (sum of (x - R y)^2) / (sum of y)^2 (linearization; Cochran, 1977, section 2.11). One
    pair has an interval of width 0. None without pairs.
    """
    count, total = len(pairs), math.fsum(y for _, y in pairs)
    if not total:
        return None
    ratio = math.fsum(x for x, _ in pairs) / total
    half = 0.0
    if count > 1:
        squares = math.fsum((x - ratio * y) ** 2 for x, y in pairs)
        half = Z95 * math.sqrt(count / (count - 1) * squares) / total
    return Estimate(value=ratio, low=ratio - half, high=ratio + half, problems=count)


def pass_at(k: int, *, correct: int, samples: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k completions is correct.

    1 - C(n - c, k) / C(n, k) for c correct completions among n (Chen et al., 2021, arXiv:2107.03374); 1 <= k <= n.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def powers_of_two(limit: int) -> list[int]:
    """2, 4, 8, ... below `limit`, and `limit` itself, if it is at least 2. For one completion pass@1 is avg@k."""
    return [*(2**i for i in range(1, limit.bit_length()) if 2**i < limit), *([limit] if limit > 1 else [])]


class Comparison(Struct, frozen=True, kw_only=True):
    """Differences of a second policy to a first one on the same problems, second minus first.

    Each difference covers the problems for which both policies have a value; None if there are none. gained: number of
    problems that only the second policy solves greedily; lost: only the first. p_value: of McNemar's exact test, the
    probability of a split of `gained` and `lost` at least as uneven if both policies were equally accurate.
    """

    accuracy: Estimate | None
    gained: int
    lost: int
    p_value: float
    reward: Estimate | None
    rewards: Mapping[str, Estimate]
    loss: Estimate | None
    avg: Estimate | None
    pass_at: Mapping[str, Estimate]


def compare(first: Sequence[Outcome], second: Sequence[Outcome]) -> Comparison:
    """Return the differences between two policies. The outcomes have the same problems in the same order."""

    def both(value: Callable[[Outcome], float | None]) -> list[tuple[float, float]]:
        pairs = ((value(a), value(b)) for a, b in zip(first, second, strict=True))
        return [(float(a), float(b)) for a, b in pairs if a is not None and b is not None]

    loss_pairs = [(a.loss, b.loss) for a, b in zip(first, second, strict=True)]
    # the same tokens, so that the difference of the losses is a ratio with the differences of nats
    losses = [(b.nats - a.nats, float(a.tokens)) for a, b in loss_pairs if a is not None and b is not None]
    correct = both(_is_correct)
    gained, lost = sum(b > a for a, b in correct), sum(b < a for a, b in correct)
    names = sorted({name for one in (*first, *second) for name in one.greedy.grade.parts})
    samples = max((len(one.samples) for one in (*first, *second)), default=0)
    parts = {name: value_difference(both(partial(_part, name=name))) for name in names}
    passes = {str(k): share_difference(both(partial(pass_of, k=k))) for k in powers_of_two(samples)}
    return Comparison(
        accuracy=share_difference(correct),
        gained=gained,
        lost=lost,
        p_value=mcnemar(gained, lost),
        reward=value_difference(both(_reward)),
        rewards={name: found for name, found in parts.items() if found is not None},
        loss=mean_ratio(losses),
        avg=share_difference(both(avg_of)),
        pass_at={k: found for k, found in passes.items() if found is not None},
    )


def _is_correct(outcome: Outcome) -> bool | None:
    return outcome.greedy.grade.correct


def _reward(outcome: Outcome) -> float | None:
    return outcome.greedy.grade.reward


def _part(outcome: Outcome, name: str) -> float | None:
    return outcome.greedy.grade.parts.get(name)


def share_difference(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the mean difference of paired shares, second minus first, with Newcombe's hybrid score interval.

    Method 10 of Newcombe (1998, Statistics in Medicine 17, 2635): the distances of both means to the ends of their
    intervals (`mean_share`), combined at the correlation of the pairs. A positive covariance is reduced by 1 / (2 n),
    the continuity correction. For shares that are not binary, the same combination is the method of variance estimates
    recovery (Zou and Donner, 2008). None without pairs.
    """
    first, second = mean_share([a for a, _ in pairs]), mean_share([b for _, b in pairs])
    if first is None or second is None:
        return None
    below, above = second.value - second.low, second.high - second.value
    first_below, first_above = first.value - first.low, first.high - first.value
    r = _correlation(pairs, first.value, second.value)
    difference = second.value - first.value
    low = difference - math.sqrt(max(0.0, below**2 - 2 * r * below * first_above + first_above**2))
    high = difference + math.sqrt(max(0.0, above**2 - 2 * r * above * first_below + first_below**2))
    return Estimate(value=difference, low=max(-1.0, low), high=min(1.0, high), problems=len(pairs))


def _correlation(pairs: Sequence[tuple[float, float]], first: float, second: float) -> float:
    """Return the correlation of pairs with these means, continuity-corrected; 0 if one side has no variance."""
    n = len(pairs)
    variances = [sum((a - first) ** 2 for a, _ in pairs) / n, sum((b - second) ** 2 for _, b in pairs) / n]
    if not all(variances):
        return 0.0
    covariance = sum((a - first) * (b - second) for a, b in pairs) / n
    if covariance > 0:
        covariance = max(0.0, covariance - 1 / (2 * n))
    return covariance / math.sqrt(math.prod(variances))


def value_difference(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the mean difference of paired values, second minus first, with the normal interval (`mean_value`)."""
    return mean_value([b - a for a, b in pairs])


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: a fair coin decides each of the differing pairs."""
    n = gained + lost
    tail = sum(comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, float(2 * tail / 2**n))
