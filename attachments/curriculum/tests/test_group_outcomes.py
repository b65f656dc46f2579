"""The probability that the next group of a problem has a gradient."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import starmap

import numpy as np
import pytest
from msgspec.structs import replace

from attachments.curriculum.curriculum import Curriculum
from attachments.curriculum.group_outcomes import (
    HALF_LIFE,
    OLDEST,
    PRIOR,
    PRIOR_GROUPS,
    CountedGroup,
    Floats,
    GroupOutcomes,
)
from attachments.curriculum.sections import SuccessRateCurriculum
from protocols.rollout import Discarded
from tests.actors.actor_helpers import prompt
from training_run.groups.order import ProblemOrder


def record(outcomes: GroupOutcomes, groups: Iterable[tuple[int, int, int]]) -> None:
    """Record groups: problem, successes, completions."""
    outcomes.end_step(starmap(CountedGroup, groups))


def everything(types: Sequence[str]) -> tuple[GroupOutcomes, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the outcomes of problems of these types, and the indices of all problems."""
    return GroupOutcomes(types), np.arange(len(types))


def test_without_evidence_the_prior_of_the_status_holds() -> None:
    """A problem without a group is in between."""
    outcomes, all_problems = everything(["a"] * 7)
    record(outcomes, [(1, 0, 8), (2, 8, 8), (3, 1, 8), (4, 4, 8), (5, 0, 8), (6, 8, 8)])
    unseen, failed, solved, seldom, often, failed_again, solved_again = range(7)
    found = outcomes.gradient_probability(all_problems)
    assert PRIOR[0] == 0.5
    assert found[failed] == found[failed_again] < found[unseen] < found[seldom] == found[often]
    assert found[solved] == found[solved_again] < found[unseen]
    record(outcomes, [(failed_again, 0, 8), (solved_again, 8, 8)])
    found = outcomes.gradient_probability(all_problems)
    assert found[failed_again] < found[failed]
    assert found[solved_again] < found[solved]


def test_the_probability_is_a_posterior_mean_of_the_groups_of_the_run() -> None:
    """By hand: two groups of problems without a group, one of which has a gradient."""
    outcomes, _ = everything(["a", "a", "a", "b"])
    record(outcomes, [(0, 3, 8), (1, 0, 8)])
    w = PRIOR_GROUPS
    status = (1 + w * PRIOR[0]) / (2 + w)
    age = (1 + w * status) / (2 + w)
    found = outcomes.gradient_probability(np.array([2, 3]))
    assert found == pytest.approx([(1 + w * age) / (2 + w), age])


def test_old_groups_count_less_and_old_statuses_have_a_probability_of_their_own() -> None:
    """Problems that are mixed become solved: what was mixed long ago has no gradient."""
    outcomes, all_problems = everything(["a"] * 60)
    for step in range(60):
        soon, late = [(step - 1, 4, 8)] if step >= 1 else [], [(step - 20, 8, 8)] if step >= 20 else []
        record(outcomes, [(step, 4, 8), *soon, *late])
    found = outcomes.gradient_probability(all_problems)
    assert found[59] > 0.8
    assert found[40] < 0.3


def test_a_type_without_gradients_does_not_need_a_group_of_each_problem() -> None:
    """Problems without a group have the probability of their type."""
    outcomes, all_problems = everything(["hard"] * 100 + ["useful"] * 100)
    for step in range(5):
        record(outcomes, [group for i in range(4 * step, 4 * step + 4) for group in ((i, 0, 8), (100 + i, 4, 8))])
    found = outcomes.gradient_probability(all_problems)
    assert found[99] < 0.2 < 0.8 < found[199]


def test_the_success_rate_is_that_of_the_last_group() -> None:
    """That of the type for a problem without a group, and 1/2 without any group. Problems are counted by it."""
    outcomes, _ = everything(["a", "a", "a", "b"])
    assert (outcomes.success_rate(), outcomes.problems_by_rate()) == (0.5, [0, 0, 4, 0, 0])
    record(outcomes, [(0, 2, 8), (1, 8, 8)])
    record(outcomes, [(0, 4, 8)])
    assert outcomes.success_rate() == (0.5 + 1.0 + 0.75 + 0.5) / 4
    assert outcomes.problems_by_rate() == [0, 0, 2, 1, 1]


def test_the_failure_rate_is_a_posterior_mean_of_the_last_group() -> None:
    """A solved problem keeps some: a group of two says little. That of the type for a problem without a group."""
    outcomes, all_problems = everything(["a", "a", "a", "b"])
    record(outcomes, [(0, 2, 8), (1, 2, 2)])
    record(outcomes, [(0, 4, 8)])
    assert outcomes.failure_rates(all_problems).tolist() == [0.5, 0.25, 0.375, 0.5]


def random_groups(random: np.random.Generator, problems: int) -> list[tuple[int, int, int]]:
    """Return the groups of a step, of sizes that are usual and not."""
    sizes = random.choice([1, 2, 5, 8, 16, 37], size=4).tolist()
    return [(int(random.integers(problems)), int(random.integers(size + 1)), size) for size in sizes]


def test_sums_that_change_with_the_groups_are_those_over_all_problems() -> None:
    """The slow twin computes success rates and weights from the list of all groups."""
    types, random = [f"type {index % 5}" for index in range(30)], np.random.default_rng(0)
    outcomes, all_problems = everything(types)
    last: dict[int, tuple[int, int]] = {}
    for _ in range(200):
        groups = random_groups(random, len(types))
        record(outcomes, groups)
        last.update({problem: (successes, size) for problem, successes, size in groups})
        of_type = defaultdict[str, list[float]](list)
        for problem, (successes, size) in last.items():
            of_type[types[problem]].append(successes / size)
        means = {name: float(np.mean(of_type[name])) if of_type[name] else 0.5 for name in types}
        rates = [last[i][0] / last[i][1] if i in last else means[types[i]] for i in range(len(types))]
        assert outcomes.success_rate() == pytest.approx(np.mean(rates), rel=1e-12)
        assert sum(outcomes.problems_by_rate()) == len(types)
        if len(last) == len(types):
            assert outcomes.problems_by_rate() == np.histogram(rates, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])[0].tolist()
            failures = [
                (size - successes + 1) / (size + 2) for successes, size in map(last.__getitem__, range(len(types)))
            ]
            assert outcomes.failure_rates(all_problems) == pytest.approx(failures, rel=1e-15)


def test_the_weight_of_a_group_halves_every_half_life() -> None:
    """Of a type without further groups too."""
    outcomes, all_problems = everything(["a", "a", "b", "b"])
    record(outcomes, [(0, 4, 8), (2, 0, 8)])
    for _ in range(int(HALF_LIFE)):
        record(outcomes, [])
    w = PRIOR_GROUPS
    status = (0.5 + w * PRIOR[0]) / (1.0 + w)
    age = (0.5 + w * status) / (1.0 + w)
    found = outcomes.gradient_probability(all_problems)[[1, 3]]
    assert found == pytest.approx([(0.5 + w * age) / (0.5 + w), w * age / (0.5 + w)])


def test_restored_evidence_gives_the_same_probabilities_from_then_on() -> None:
    """Bit for bit, also in a process with another number of steps, and for groups older than the oldest age."""
    types, random = [f"type {index % 3}" for index in range(20)], np.random.default_rng(1)
    outcomes, all_problems = everything(types)
    record(outcomes, [(0, 1, 3), (1, 8, 8)])
    for number in range(2 * OLDEST):
        record(outcomes, [] if number % 3 else random_groups(random, 18))
    other = GroupOutcomes(types)
    record(other, [])
    other.restore(outcomes.evidence())
    for _ in range(30):
        found: list[tuple[Floats, Floats]] = [
            (one.gradient_probability(all_problems), one.failure_rates(all_problems)) for one in (outcomes, other)
        ]
        assert [part.tobytes() for part in found[0]] == [part.tobytes() for part in found[1]]
        assert outcomes.success_rate() == other.success_rate()
        assert outcomes.problems_by_rate() == other.problems_by_rate()
        assert outcomes.evidence() == other.evidence()
        groups = random_groups(random, 20)
        for one in (outcomes, other):
            record(one, groups)


def test_evidence_takes_ten_bytes_for_a_problem() -> None:
    """And none for problems and types without a group."""
    outcomes, _ = everything([str(index // 100) for index in range(10_000)])
    before = sum(map(len, columns(outcomes)))
    record(outcomes, [(index, 1, 2) for index in range(100)])
    record(outcomes, [(index, 0, 2) for index in range(1000)])
    problems, cells = 1000, 10 + 1
    assert sum(map(len, columns(outcomes))) - before == 10 * problems + 24 * cells


def columns(outcomes: GroupOutcomes) -> list[bytes]:
    """Return the columns of the evidence."""
    evidence = outcomes.evidence()
    return [getattr(evidence, name) for name in evidence.__struct_fields__]


@pytest.mark.parametrize(
    "damage",
    [
        {"problems": b"\x09\0\0\0"}, {"problems": b"\x01"}, {"statuses": b"\x07"}, {"ages": b""},
        {"successes": b"\x09\0"}, {"cells": b"\xff\xff\xff\xff"}, {"cell_groups": b""}, {"groups": b""},
    ],
    ids=lambda damage: next(iter(damage)),
)  # fmt: skip
def test_evidence_that_does_not_fit_is_refused(damage: dict[str, bytes]) -> None:
    """Columns of different lengths, and problems, statuses or cells that do not exist."""
    outcomes, _ = everything(["a", "b"])
    record(outcomes, [(1, 2, 8)])
    with pytest.raises(ValueError, match=r"value|problems|buffer"):
        GroupOutcomes(["a", "b"]).restore(replace(outcomes.evidence(), **damage))


def test_a_step_reads_only_the_problems_of_its_groups() -> None:
    """Among 500,000 problems, a step of the curriculum needs no array over all of them."""
    problems = 500_000
    order = ProblemOrder(["a", "b"] * (problems // 2), weights={}, seed=0, shuffle=True)
    subject = Curriculum(["a", "b"] * (problems // 2), order, SuccessRateCurriculum(), seed=0, dataset="problems")
    order.index(0)
    tracemalloc.start()
    for group_id in range(8):
        subject.choose(group_id)
        subject.record([Discarded(prompt=prompt(group_id), reason="stale", detail="", rewards=(0.0, 1.0))])
        report = subject.end_step()
        subject.update()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(report.problems.values()) == problems
    assert peak < problems / 2
