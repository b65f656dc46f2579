"""Results on held-out problems: means with intervals, avg@k and pass@k, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import anyio
import numpy as np
import pytest
from msgspec import structs

from protocols.evaluation import Estimate, Grade, ReferenceLoss
from protocols.prompt import Problem
from protocols.sampling import Completion, FinishReason
from training_run.evaluation.accuracy import (
    CONCURRENT_PROBLEMS,
    Judged,
    Outcome,
    accuracy,
    avg_at_k,
    compare,
    graded,
    mcnemar,
    mean_ratio,
    mean_share,
    mean_value,
    pass_at,
    pass_at_k,
    report_of,
    share_difference,
    value_difference,
)


def bootstrap(values: Any) -> tuple[float, float]:
    """The percentile interval of the mean over 10,000 resamples of the problems."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (10_000, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def ends(estimate: Estimate | None) -> tuple[float, float]:
    """Return the interval of an estimate that exists."""
    assert estimate is not None
    return estimate.low, estimate.high


def completion(text: str, *, tokens: int = 1, finish_reason: FinishReason = "stop") -> Completion:
    """Return a completion with this text."""
    return Completion(
        tokens=(1,) * tokens, logprobs=(0.0,) * tokens, versions=(0,) * tokens, text=text, finish_reason=finish_reason
    )


def judged(correct: bool | None, *, reward: float | None = None, tokens: int = 1) -> Judged:
    """Return a completion with this grade; it is truncated if it has nine tokens. `exact` is twice the reward."""
    grade = Grade(correct=correct, reward=reward, parts={} if reward is None else {"exact": 2 * reward})
    return Judged(
        completion=completion("", tokens=tokens, finish_reason="length" if tokens == 9 else "stop"), grade=grade
    )


def outcome(greedy: Judged, *samples: bool | None, kind: str = "sum", loss: tuple[float, int] | None = None) -> Outcome:
    """Return the outcome of a problem. samples: whether each sampled completion is correct."""
    return Outcome(
        problem=Problem(prompt="", answer="", type=kind),
        greedy=greedy,
        samples=tuple(judged(correct, reward=None if correct is None else float(correct)) for correct in samples),
        loss=None if loss is None else ReferenceLoss(nats=loss[0], tokens=loss[1]),
    )


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_of_a_share_agrees_with_a_bootstrap(rate: float, samples: int) -> None:
    """One outcome per problem, or the mean of several whose difficulty differs between problems."""
    rng = np.random.default_rng(3)
    difficulty = np.full(400, rate) if samples == 1 else rng.beta(4 * rate, 4 * (1 - rate), 400)
    shares = rng.binomial(samples, difficulty) / samples
    found = mean_share(shares.tolist())
    assert found
    assert found.value == pytest.approx(shares.mean())
    assert found.problems == 400
    assert ends(found) == pytest.approx(bootstrap(shares), abs=0.008)


def test_the_interval_of_one_outcome_per_problem_is_that_of_wilson() -> None:
    """Wilson (1927), for 8 of 10: 0.4902 to 0.9433; all correct or all wrong still have an interval."""
    assert ends(mean_share([1.0] * 8 + [0.0] * 2)) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert ends(mean_share([1.0] * 10)) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert ends(mean_share([0.0] * 10)) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_the_interval_of_a_mean_is_normal() -> None:
    """1, 2, 3, 6 have mean 3 and standard deviation sqrt(14 / 3), so 3 +- 1.96 * 1.0801; None does not count."""
    found = mean_value([1.0, None, 2.0, 3.0, 6.0])
    assert found
    assert (found.value, found.problems) == (3.0, 4)
    assert ends(found) == pytest.approx((0.8830, 5.1170), abs=1e-4)
    assert mean_value([2.0]) == Estimate(value=2.0, low=2.0, high=2.0, problems=1)


def test_the_interval_of_a_ratio_is_that_of_linearized_residuals() -> None:
    """Losses 2, 6 over 1, 3 tokens have no residual. 3, 5 have 1 and -1: 2 +- 1.96 * sqrt(2 / 1 * 2) / 4."""
    assert mean_ratio([(2.0, 1.0), (6.0, 3.0)]) == Estimate(value=2.0, low=2.0, high=2.0, problems=2)
    assert ends(mean_ratio([(3.0, 1.0), (5.0, 3.0)])) == pytest.approx((1.0200, 2.9800), abs=1e-4)


def test_values_without_problems_are_missing() -> None:
    """None, never 0."""
    for estimate in (mean_share([]), mean_value([None]), mean_ratio([]), share_difference([]), value_difference([])):
        assert estimate is None
    nothing = [outcome(judged(None), None, None)]
    assert (accuracy(nothing).overall, avg_at_k(nothing).overall, pass_at_k(nothing, 2).overall) == (None, None, None)
    found = report_of(nothing)
    assert (found.reward, found.rewards, found.loss, found.avg, found.sampled_reward) == (
        None,
        {},
        None,
        None,
        None,
    )
    assert found.pass_at == {}
    assert report_of([]).completion_length is None


def test_pass_at_k_is_the_share_of_draws_with_a_correct_completion() -> None:
    """Counted over all draws of k completions without replacement, for all outcomes of six completions."""
    for outcomes in product([True, False], repeat=6):
        for k in range(1, 7):
            draws = [any(draw) for draw in combinations(outcomes, k)]
            assert pass_at(k, correct=sum(outcomes), samples=6) == pytest.approx(sum(draws) / len(draws))


def test_avg_and_pass_at_k_are_means_over_problems() -> None:
    """A problem with a completion that cannot be graded is ungraded. Problems, not completions, make the interval."""
    outcomes = [
        outcome(judged(True), True, True, False, False),
        outcome(judged(True), False, False, False, False),
        outcome(judged(True), True, True, True, True, kind="word"),
        outcome(judged(True), True, None, True, True),
    ]
    avg, two = avg_at_k(outcomes), pass_at_k(outcomes, 2)
    assert avg.overall == mean_share([0.5, 0.0, 1.0])
    assert (avg.problems, avg.ungraded, set(avg.by_type)) == (3, 1, {"sum", "word"})
    assert two.overall == mean_share([5 / 6, 0.0, 1.0])
    found = report_of(outcomes)
    assert (found.samples, found.avg, list(found.pass_at)) == (4, avg.overall, ["2", "4"])
    assert found.sampled_reward == mean_value([0.5, 0.0, 1.0, 1.0])


def test_further_measures_are_means_over_problems() -> None:
    """Rewards, length and truncation of greedy completions; the loss is a mean over tokens."""
    outcomes = [
        outcome(judged(True, reward=1.0, tokens=3), loss=(6.0, 4)),
        outcome(judged(False, reward=0.5, tokens=9), loss=(1.0, 1)),
        outcome(judged(None, tokens=3)),
    ]
    found = report_of(outcomes)
    assert found.reward == mean_value([1.0, 0.5])
    assert found.rewards == {"exact": mean_value([2.0, 1.0])}
    assert (found.completion_length, found.samples) == (5.0, 0)
    assert found.truncated == pytest.approx(1 / 3)
    assert found.loss
    assert found.loss.value == pytest.approx(7 / 5)
    assert found.loss.problems == 2
    assert (accuracy(outcomes).problems, accuracy(outcomes).ungraded) == (2, 1)


def test_tokens_of_an_environment_are_no_part_of_the_length() -> None:
    """The length of an episode is the number of tokens that the policy sampled."""
    episode = structs.replace(completion("", tokens=4), sampled=(True, False, False, True))
    one = outcome(structs.replace(judged(True), completion=episode))
    assert report_of([one]).completion_length == one.tokens == 2


def test_the_interval_of_a_difference_of_shares_is_that_of_newcombe() -> None:
    """Newcombe (1998), 36 both, 12 only the second, 2 only the first, 0 neither: 0.2, from 0.0569 to 0.3404."""
    pairs = [(1.0, 1.0)] * 36 + [(0.0, 1.0)] * 12 + [(1.0, 0.0)] * 2
    found = share_difference(pairs)
    assert found
    assert found.value == pytest.approx(0.2)
    assert found.problems == 50
    assert ends(found) == pytest.approx((0.0569, 0.3404), abs=1e-4)
    assert mcnemar(12, 2) == pytest.approx(2 * (1 + 14 + 91) / 2**14)
    assert (mcnemar(0, 0), mcnemar(3, 3), mcnemar(0, 1)) == (1.0, 1.0, 1.0)


def test_equal_outcomes_have_an_interval_around_zero() -> None:
    """Ten of twenty problems solved by both policies do not show that the policies are equally accurate."""
    low, high = ends(share_difference([(1.0, 1.0)] * 10 + [(0.0, 0.0)] * 10))
    assert -0.2 < low < -0.05
    assert high == pytest.approx(-low)


@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_of_a_difference_agrees_with_a_bootstrap_of_pairs(samples: int) -> None:
    """One outcome per problem, or the share of several."""
    rng = np.random.default_rng(5)
    difficulty = rng.beta(1, 1, 400)
    first = rng.binomial(samples, difficulty) / samples
    second = rng.binomial(samples, difficulty**0.7) / samples
    found = share_difference(list(zip(first.tolist(), second.tolist(), strict=True)))
    assert found
    assert found.value == pytest.approx((second - first).mean())
    assert ends(found) == pytest.approx(bootstrap(second - first), abs=0.008)


def test_a_comparison_covers_the_problems_with_values_of_both_policies() -> None:
    """Second minus first."""
    first = [
        outcome(judged(False, reward=0.0), False, False, loss=(4.0, 2)),
        outcome(judged(True, reward=1.0), True, False, loss=(9.0, 3)),
        outcome(judged(None)),
    ]
    second = [
        outcome(judged(True, reward=1.0), True, False, loss=(2.0, 2)),
        outcome(judged(True, reward=0.5), True, True, loss=(6.0, 3)),
        outcome(judged(True, reward=1.0), True, True),
    ]
    found = compare(first, second)
    assert (found.gained, found.lost, found.p_value) == (1, 0, 1.0)
    assert found.accuracy == share_difference([(0.0, 1.0), (1.0, 1.0)])
    assert found.reward == mean_value([1.0, -0.5])
    assert found.rewards == {"exact": mean_value([2.0, -1.0])}
    assert found.avg == share_difference([(0.0, 0.5), (0.5, 1.0)])
    assert found.pass_at == {"2": share_difference([(0.0, 1.0), (1.0, 1.0)])}
    assert found.loss
    assert found.loss.value == pytest.approx(-1.0)


async def test_sampled_completions_are_graded_as_a_group_or_alone_after_a_failure() -> None:
    """One completion on which a function fails does not change the grades of the others."""
    calls: list[tuple[str, int]] = []

    async def grade(problem: Problem, completions: Sequence[Completion]) -> list[Grade]:
        calls.append((problem.prompt, len(completions)))
        failed = ("exact",) if any(one.text == "bad" for one in completions) else ()
        return [Grade(correct=not failed, reward=None if failed else 1.0, failed=failed) for _ in completions]

    problems = [Problem(prompt=name, answer="", type="") for name in "ab"]
    texts = [["good", "good", "good"], ["good", "bad", "good"]]
    found = await graded(problems, [[completion(text) for text in row] for row in texts], grade)
    assert [one.failed for one in found] == [False, True]
    assert [one.correct_samples for one in found] == [2, 1]
    assert [count for name, count in calls if name == "a"] == [1, 2]
    assert [count for name, count in calls if name == "b"] == [1, 2, 1, 1]


async def test_a_few_problems_are_graded_at_once_in_their_order() -> None:
    """The reward functions of the run serve the scorer too."""
    running, most = 0, 0

    async def grade(problem: Problem, completions: Sequence[Completion]) -> list[Grade]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await anyio.lowlevel.checkpoint()
        running -= 1
        return [Grade(correct=problem.answer == one.text) for one in completions]

    problems = [Problem(prompt="", answer=str(i % 2), type="") for i in range(9)]
    found = await graded(problems, [[completion("1")] for _ in problems], grade)
    assert [one.greedy.grade.correct for one in found] == [i % 2 == 1 for i in range(9)]
    assert most == CONCURRENT_PROBLEMS
