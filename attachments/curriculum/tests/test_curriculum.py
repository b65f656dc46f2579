"""The curriculum by success rate chooses problems whose completions both succeed and fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import structlog
from msgspec import structs

from attachments.curriculum.curriculum import Curriculum, CurriculumReport
from attachments.curriculum.group_outcomes import CountedGroup, SavedCurriculum
from attachments.curriculum.sections import SuccessRateCurriculum
from protocols.prompt import Problem
from protocols.rollout import Discarded, GroupOutcome
from tests.actors.actor_helpers import prompt
from training_run.groups.order import ProblemOrder

GROUP_SIZE = 8
TYPES = ["solved"] * 50 + ["hard"] * 50 + ["useful"] * 100
"""Half of the problems are useless."""

RATES = {"solved": 1.0, "hard": 0.0, "useful": 0.5}


def checkpoint(subject: Curriculum) -> SavedCurriculum:
    """Return what a checkpoint keeps."""
    return SavedCurriculum(state=subject.update().state, evidence=subject.outcomes.evidence())


def curriculum(
    types: Sequence[str] = TYPES,
    *,
    after: SavedCurriculum | None = None,
    weights: Mapping[str, float] | None = None,
    dataset: str = "d",
    **settings: Any,
) -> Curriculum:
    """Return a curriculum of problems of these types."""
    order = ProblemOrder(types, weights=weights or {}, seed=3, shuffle=True)
    chosen = SuccessRateCurriculum(**settings)
    return Curriculum(types, order, chosen, seed=3, dataset=dataset, saved=after)


def outcome(group_id: int, correct: Sequence[bool | None], rewards: Sequence[float], kind: str = "t") -> GroupOutcome:
    """Return a scored group. correct: whether the rewards with `correct = true` accept each completion."""
    problem = Problem(prompt="q", answer="a", type=kind)
    return Discarded(
        prompt=structs.replace(prompt(group_id), problem=problem),
        reason="stale",
        detail="",
        rewards=tuple(rewards),
        correct=tuple(correct),
    )


def sampled(group_id: int, rate: float) -> GroupOutcome:
    """Return a group whose completions succeed with this probability, as a function of the group id."""
    values = (np.random.default_rng(group_id).random(GROUP_SIZE) < rate).tolist()
    return outcome(group_id, values, list(map(float, values)))


def train(
    subject: Curriculum, steps: Iterable[int], *, types: Sequence[str] = TYPES, batch: int = 4
) -> tuple[list[int], list[CurriculumReport]]:
    """Run steps of a batch of groups, and return the chosen problems and the reports."""
    chosen, reports = [], []
    for step in steps:
        groups = range(step * batch, (step + 1) * batch)
        indices = [subject.choose(group_id) for group_id in groups]
        subject.record(sampled(group_id, RATES[types[index]]) for group_id, index in zip(groups, indices, strict=True))
        reports.append(subject.end_step())
        chosen += indices
    return chosen, reports


def test_useless_problems_are_soon_avoided() -> None:
    """After 20 steps, most of their share of one half is gone, although most problems were never seen."""
    chosen, reports = train(curriculum(sharpness=2.0), range(60))
    late = Counter(TYPES[index] for index in chosen[80:])
    assert late["useful"] > 0.85 * late.total()
    assert len(set(chosen[:80])) > 40
    for name in ("zero_variance_expected", "zero_variance_observed"):
        shares = [getattr(report, name) for report in reports]
        assert np.mean(shares[:3]) > 2 * np.mean(shares[20:])
        assert np.mean(shares[20:]) < 0.15
    assert np.mean([r.zero_variance_expected for r in reports[30:]]) == pytest.approx(
        np.mean([r.zero_variance_observed for r in reports[30:]]), abs=0.1
    )


def test_of_problems_with_equal_gradients_the_one_with_more_failures_is_preferred() -> None:
    """Groups with one success and with one failure both have a gradient; their draws differ by the failure rates."""
    types = ["seldom"] * 20 + ["often"] * 20
    subject, counts = curriculum(types, candidates=8), Counter[str]()
    for step in range(150):
        indices = [subject.choose(4 * step + i) for i in range(4)]
        counts.update(types[index] for index in indices)
        for group_id, index in enumerate(indices, start=4 * step):
            values = [float(i == 0) if types[index] == "seldom" else float(i > 0) for i in range(GROUP_SIZE)]
            subject.record([outcome(group_id, [value == 1.0 for value in values], values)])
        subject.end_step()
    assert counts["seldom"] / counts["often"] == pytest.approx(8 / 2, rel=0.3)


def test_problems_that_become_solved_make_room_for_others() -> None:
    """The evidence is forgotten, and a share of the groups explores."""
    types = ["first"] * 20 + ["second"] * 20
    subject, chosen = curriculum(types), []
    for step in range(80):
        rates = {"first": 0.5, "second": 0.0} if step < 30 else {"first": 1.0, "second": 0.5}
        indices = [subject.choose(4 * step + i) for i in range(4)]
        subject.record(sampled(4 * step + i, rates[types[index]]) for i, index in enumerate(indices))
        subject.end_step()
        chosen.append(sum(types[index] == "second" for index in indices))
    assert sum(chosen[10:30]) < 20 < 50 < sum(chosen[60:])


def test_no_problem_is_starved() -> None:
    """Every problem gets groups, also one that was never solved."""
    types = ["useful"] * 9 + ["hard"]
    chosen, _ = train(curriculum(types, explore=0.2, candidates=10), range(200), types=types)
    assert set(chosen) == set(range(10))
    assert Counter(chosen)[9] < 40


def test_weights_of_types_decide_how_often_a_problem_is_a_candidate() -> None:
    """Weight 0 excludes a type; weight 3 triples the share of a type, if nothing else differs."""
    types = ["a"] * 20 + ["b"] * 20 + ["c"] * 20
    subject = curriculum(types, weights={"a": 3.0, "c": 0.0}, candidates=8)
    counts = Counter[str]()
    for group_id in range(400):
        counts[types[subject.choose(group_id)]] += 1
        subject.record([outcome(group_id, [], [])])
        subject.end_step()
    assert counts["c"] == 0
    assert 2.3 < counts["a"] / counts["b"] < 3.9


def test_a_problem_in_flight_is_not_chosen_again() -> None:
    """Unless all candidates are in flight."""
    subject = curriculum(["t"] * 6)
    assert sorted(subject.choose(group_id) for group_id in range(6)) == list(range(6))
    assert subject.choose(6) in range(6)


def test_one_candidate_is_the_order_of_problems() -> None:
    """The order without a curriculum."""
    subject, order = curriculum(candidates=1), ProblemOrder(TYPES, weights={}, seed=3, shuffle=True)
    assert [subject.choose(group_id) for group_id in range(20)] == [order.index(group_id) for group_id in range(20)]


def test_a_restored_curriculum_continues_bit_for_bit() -> None:
    """From the state after any step, whatever had been chosen since; groups may be recorded in any order."""
    whole = curriculum()
    before, _ = train(whole, range(10))
    kept = checkpoint(whole)
    chosen, reports = train(whole, range(10, 20))
    resumed = curriculum(after=kept)
    assert train(resumed, range(10, 20)) == (chosen, reports)
    assert checkpoint(resumed) == checkpoint(whole)
    assert train(curriculum(), range(10))[0] == before
    backwards = curriculum(after=kept)
    indices = [backwards.choose(group_id) for group_id in range(40, 44)]
    for group_id, index in reversed([*zip(range(40, 44), indices, strict=True)]):
        backwards.record([sampled(group_id, RATES[TYPES[index]])])
    backwards.end_step()
    assert backwards.choose(44) == chosen[4]


def test_a_state_of_other_problems_is_not_used() -> None:
    """With a warning: a fork may have another dataset."""
    subject = curriculum()
    train(subject, range(5))
    with structlog.testing.capture_logs() as logs:
        other = curriculum(after=checkpoint(subject), dataset="other")
    assert [line["log_level"] for line in logs] == ["warning"]
    assert checkpoint(other) == checkpoint(curriculum(dataset="other"))


@pytest.mark.parametrize(
    ("correct", "rewards", "successes"),
    [
        ([True, False, False], [0.2, 1.2, 0.7], 1),
        ([None, None, None], [0.1, 0.3, 0.4], 2),
        ([None, None, None], [0.7, 0.7, 0.7], 0),
        ([True, None, None], [0.0, 0.0, 5.0], 2),
    ],
    ids=["a reward with correct = true decides", "above the middle", "equal", "each completion for itself"],
)
def test_success_is_a_correct_answer_or_a_reward_above_the_middle(
    correct: list[bool | None], rewards: list[float], successes: int
) -> None:
    """The middle of the lowest and the highest reward of the run."""
    subject = curriculum(["t"])
    subject.choose(0)
    subject.record([outcome(0, correct, rewards)])
    subject.end_step()
    state, groups = subject.update().state, subject.update().groups
    assert groups == (CountedGroup(problem=0, successes=successes, completions=len(rewards)),)
    assert (state.lowest, state.highest) == (min(rewards), max(rewards))


def test_groups_without_rewards_only_end() -> None:
    """So do groups that the curriculum has not chosen. The problem may then be chosen again."""
    subject = curriculum(["t"])
    subject.choose(0)
    subject.record([outcome(0, [], []), outcome(1, [True], [1.0])])
    report = subject.end_step()
    assert (report.zero_variance_expected, report.zero_variance_observed) == (None, None)
    assert (report.success_rate, report.problems["0.4-0.6"]) == (0.5, 1)
    assert subject.outcomes.evidence().problems == b""
