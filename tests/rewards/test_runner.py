from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from clotho.config.schema import RewardSection
from clotho.rewards import calling
from clotho.rewards.runner import RewardRunner
from protocols.errors import ProfileError
from protocols.rollout import Discarded
from protocols.score import ScoredGroup
from tests.rewards import sample_rewards
from tests.rewards.groups import answered, group, problem

HERE = "tests.rewards.sample_rewards:"
CHOICE = problem("B", prompt="Which is larger? A) 1 B) 2", kind="comparison")


@contextmanager
def runner(*sections: RewardSection, concurrency: int = 8, keep_equal: bool = False) -> Iterator[RewardRunner]:
    """Make a runner that leaves no threads behind."""
    made = RewardRunner(sections, concurrency=concurrency, keep_equal=keep_equal)
    try:
        yield made
    finally:
        made.close()


def mine(name: str, *, timeout_seconds: float = 10.0, weight: float = 1.0) -> RewardSection:
    """Make the section of a sample reward."""
    return RewardSection(name=HERE + name, timeout_seconds=timeout_seconds, weight=weight)


async def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    """The parts are kept beside it, by name, one value for each completion."""
    with runner(RewardSection(name="format", weight=0.5), RewardSection(name="math_eval", weight=2.0)) as rewards:
        scored = await rewards.score(group(answered("42"), answered("41"), "<answer>42</answer>", ""))
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == (2.5, 0.5, 2.0, 0.0)
    assert scored.parts == {"format": (1.0, 1.0, 0.0, 0.0), "math_eval": (1.0, 0.0, 1.0, 0.0)}


async def test_parts_that_do_not_apply_are_left_out_of_the_sum() -> None:
    """By the section's types, or because the function says None; they are None in `parts`."""
    sections = (
        RewardSection(name="format"),
        RewardSection(name="math_eval", types=("arithmetic",)),
        RewardSection(name="choice_correctness", types=("comparison",)),
    )
    with runner(*sections, mine("long_only")) as rewards:
        numeric = await rewards.score(group(answered("42"), "b"))
        choice = await rewards.score(group(answered("B"), answered("A"), of=CHOICE))
    assert isinstance(numeric, ScoredGroup)
    assert isinstance(choice, ScoredGroup)
    length = float(len(answered("42")))
    assert numeric.parts == {
        "format": (1.0, 0.0), "math_eval": (1.0, 0.0),
        "choice_correctness": (None, None), HERE + "long_only": (length, None)
    }  # fmt: skip
    assert numeric.rewards == (2.0 + length, 0.0)
    assert choice.parts["math_eval"] == (None, None)
    assert choice.rewards[0] - choice.rewards[1] == 1.0


async def test_one_function_may_stand_for_different_types_with_different_weights() -> None:
    """Each group is then rewarded by the section of its type."""
    light = RewardSection(name="exact", types=("arithmetic",), weight=1.0)
    heavy = RewardSection(name="exact", types=("comparison",), weight=3.0)
    with runner(light, heavy) as rewards:
        one = await rewards.score(group(answered("42"), ""))
        three = await rewards.score(group(answered("B"), "", of=CHOICE))
    assert (one.rewards, three.rewards) == ((1.0, 0.0), (3.0, 0.0))


@pytest.mark.parametrize("name", ["length", "async_length", "compute_advantages", "boolean", "fraction"])
async def test_functions_of_the_user_may_be_synchronous_or_not(name: str) -> None:
    """And give any real number, True and False included."""
    with runner(mine(name)) as rewards:
        scored = await rewards.score(group("a", "abc"))
    expected = {"boolean": (0.0, 1.0), "fraction": (0.5, 1.5)}.get(name, (1.0, 3.0))
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == expected
    assert all(type(value) is float for value in scored.rewards)


async def test_asynchronous_functions_keep_one_event_loop() -> None:
    """A client that they hold open stays usable, and it is not the loop of the pipeline."""
    with runner(mine("same_loop")) as rewards:
        first = await rewards.score(group("a", "abc"))
        second = await rewards.score(group("a", "abc"))
    assert first.rewards == second.rewards


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("raises", "raised ValueError: no opinion"),
        ("raises_async", "raised ValueError: no opinion"),
        ("unprintable", "raised UnprintableError: (its message cannot be shown)"),
        ("leaves", "raised SystemExit: 3"),
        ("leaves_async", "raised SystemExit: 3"),
        ("cancels_itself", "raised CancelledError"),
        ("gives_nan", "returned nan"),
        ("gives_infinity", "returned -inf"),
        ("gives_huge", "returned inf"),
        ("gives_text", "returned str, not a number or None"),
        ("gives_broken_number", "returned a number that raised RuntimeError: no value"),
        ("gives_list", "returned list, not a number or None"),
        ("gives_coroutine", "returned coroutine, not a number or None"),
    ],
)
async def test_a_reward_that_fails_discards_its_group_and_nothing_else(name: str, detail: str) -> None:
    """The detail says which function and why; the next group is judged as if nothing had been."""
    with runner(mine(name)) as rewards:
        for _ in range(2):
            outcome = await rewards.score(group("a", "b", group_id=5))
            assert isinstance(outcome, Discarded)
            assert (outcome.reason, outcome.prompt.group_id, len(outcome.completions)) == ("reward_error", 5, 2)
            assert outcome.detail.startswith(f"reward {HERE}{name} {detail}")


@pytest.mark.parametrize("name", ["none", "long_only"])
async def test_a_completion_to_which_nothing_applies_discards_its_group(name: str) -> None:
    """No reward could stand for it."""
    with runner(mine(name)) as rewards:
        outcome = await rewards.score(group("aa", "b"))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "reward_error"
    assert "no reward applies to completion" in outcome.detail


async def test_a_problem_of_a_type_without_rewards_is_discarded() -> None:
    """The detail names the type."""
    with runner(RewardSection(name="exact", types=("arithmetic",))) as rewards:
        outcome = await rewards.score(group("a", "b", of=CHOICE))
    assert isinstance(outcome, Discarded)
    assert outcome.detail == "no reward applies to completion 0 of a problem of type 'comparison'"


async def test_a_sum_beyond_the_range_of_floats_is_an_error() -> None:
    """Finite parts may have an infinite sum."""
    with runner(mine("length", weight=1.5e308)) as rewards:
        outcome = await rewards.score(group("aa", "b"))
    assert isinstance(outcome, Discarded)
    assert outcome.detail == "the weighted sum of completion 0 is inf"


@pytest.mark.parametrize("texts", [("a",), ("a", "b"), ("abc", "xyz", "uvw")])
async def test_equal_rewards_are_no_signal(texts: tuple[str, ...]) -> None:
    """A group of one included; the rewards are kept for the record."""
    with runner(mine("length")) as rewards:
        outcome = await rewards.score(group(*texts))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "no_signal"
    assert outcome.detail == f"all {len(texts)} rewards are {len(texts[0])}"
    assert outcome.rewards == (float(len(texts[0])),) * len(texts)
    assert len(outcome.completions) == len(texts)


async def test_equal_rewards_are_kept_where_they_still_compare() -> None:
    """With the rest of the batch, for instance; what fails is discarded as ever."""
    with runner(mine("length"), keep_equal=True) as rewards:
        outcome = await rewards.score(group("a", "b"))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == (1.0, 1.0)
    with runner(mine("raises"), keep_equal=True) as rewards:
        assert isinstance(await rewards.score(group("a", "b")), Discarded)


@pytest.mark.parametrize("name", ["hangs", "hangs_async", "spins", "blocks_its_loop"])
async def test_a_reward_that_hangs_is_given_up_at_its_time_limit(name: str) -> None:
    """The event loop stays free, and the group is discarded."""
    with runner(mine(name, timeout_seconds=0.05)) as rewards, anyio.fail_after(10):
        outcome = await rewards.score(group("a", "b"))
    assert isinstance(outcome, Discarded)
    assert outcome.detail == f"reward {HERE}{name} took longer than 0.05 s"


@pytest.mark.parametrize("name", ["hangs", "blocks_its_loop"])
async def test_hanging_calls_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many that cannot be stopped, the function is not called again, and no thread is added."""
    monkeypatch.setattr(calling, "MAX_HANGING", 3)
    with runner(mine(name, timeout_seconds=0.01)) as rewards:
        for _ in range(3):
            await rewards.score(group("a", "b"))
        threads = threading.active_count()
        for _ in range(5):
            outcome = await rewards.score(group("a", "b"))
            assert isinstance(outcome, Discarded)
            assert outcome.detail == f"reward {HERE}{name} was not called: 3 earlier calls of it still hang"
        assert threading.active_count() == threads


@pytest.mark.parametrize("name", ["hangs_async", "spins"])
async def test_hanging_calls_that_can_be_stopped_leave_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they never count towards the bound."""
    monkeypatch.setattr(calling, "MAX_HANGING", 2)
    with runner(mine(name, timeout_seconds=0.05)) as rewards:
        for _ in range(4):
            outcome = await rewards.score(group("a", "b"))
            assert isinstance(outcome, Discarded)
            assert "took longer" in outcome.detail


async def test_no_more_calls_than_allowed_are_under_way_at_once() -> None:
    """Others wait until one has ended."""
    with runner(mine("enters"), concurrency=2) as rewards:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(rewards.score, group("a"))
            await anyio.wait_all_tasks_blocked()
            assert sample_rewards.ENTERED.qsize() == 2
            sample_rewards.LEAVE.set()
    assert sample_rewards.ENTERED.qsize() == 4


async def test_waiting_for_a_turn_does_not_count_against_the_time_limit() -> None:
    """Three calls, one at a time, have all of their time each."""
    ends = []
    with runner(mine("hangs_async", timeout_seconds=0.05), concurrency=1) as rewards:

        async def one() -> None:
            await rewards.score(group("a", "b"))
            ends.append(anyio.current_time())

        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
    assert all(end - start >= 0.05 * (i + 1) for i, end in enumerate(ends))
    assert len(ends) == 3


async def test_correct_is_what_every_applicable_judge_calls_correct() -> None:
    """Rewards not marked `correct` have no say, and weights no part in it."""
    sections = (
        RewardSection(name="format"),
        RewardSection(name="math_eval", correct=True, weight=0.1),
        RewardSection(name="choice_correctness", correct=True),
    )
    with runner(*sections) as rewards:
        assert await rewards.is_correct(problem("42"), "<answer>42</answer>")
        assert not await rewards.is_correct(problem("42"), answered("41"))
        assert await rewards.is_correct(CHOICE, answered("B"))
        assert not await rewards.is_correct(CHOICE, answered("A"))
        assert not await rewards.is_correct(problem("Paris"), answered("Paris")), "no compute_advantages applies"


async def test_partial_credit_is_not_correct() -> None:
    """Only the value 1 is."""
    with runner(RewardSection(name="jaccard", correct=True)) as rewards:
        assert not await rewards.is_correct(problem("a b"), answered("a"))
        assert await rewards.is_correct(problem("a b"), answered("b a"))


async def test_nothing_is_correct_without_a_judge() -> None:
    """A reward that is not marked `correct` is none, whatever it says."""
    with runner(RewardSection(name="exact")) as rewards:
        assert not await rewards.is_correct(problem("42"), answered("42"))


@pytest.mark.parametrize("name", ["raises", "gives_nan", "hangs_async"])
async def test_a_judge_that_fails_calls_nothing_correct(name: str) -> None:
    """Evaluation goes on."""
    section = RewardSection(name=HERE + name, correct=True, timeout_seconds=0.05)
    with runner(section) as rewards:
        assert not await rewards.is_correct(problem(), answered("42"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([RewardSection(name="math")], "did you mean 'math_eval'"),
        ([RewardSection(name="exact", weight=math.inf)], "must be finite"),
        ([RewardSection(name="exact", weight=math.nan)], "must be finite"),
        ([RewardSection(name="exact"), RewardSection(name="exact", types=("a",))], "stands twice"),
        ([RewardSection(name="exact", types=("a", "b")), RewardSection(name="exact", types=("b",))], "stands twice"),
    ],
)
def test_sections_that_cannot_be_meant_are_refused(sections: list[RewardSection], message: str) -> None:
    """At the start of the run, not at the first group."""
    with pytest.raises(ProfileError, match=message):
        RewardRunner(tuple(sections))
