"""Scoring of groups and held-out problems with the rewards of a profile."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Literal

import anyio
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from protocols.errors import ProfileError
from protocols.evaluation import Grade
from protocols.prompt import Problem
from protocols.rollout import Discarded, ScoredGroup
from tests.e2e.child_processes import wait_until_ended
from tests.rewards import sample_rewards
from tests.rewards.groups import answered, group, problem
from training_run.profile.data import RewardSection
from training_run.profile.load import load_profile
from training_run.rewards import calls
from training_run.rewards.overlong import Overlong
from training_run.rewards.runner import RewardRunner, expectations, expects_tag, rewards_of

HERE = "tests.rewards.sample_rewards:"
TRL = "tests.rewards.trl_rewards:"
CHOICE = problem("B", prompt="Which is larger? A) 1 B) 2", kind="comparison")


@contextmanager
def runner(*sections: RewardSection, concurrency: int = 8, keep_zero_variance: bool = False) -> Iterator[RewardRunner]:
    """Yield a runner and close it."""
    made = RewardRunner(sections, concurrency=concurrency, keep_zero_variance=keep_zero_variance)
    try:
        yield made
    finally:
        made.close()


def sample(
    name: str, *, timeout_seconds: float = 10.0, weight: float = 1.0, run_in: Literal["process", "thread"] = "thread"
) -> RewardSection:
    """Return the section of a sample reward."""
    return RewardSection(name=HERE + name, timeout_seconds=timeout_seconds, weight=weight, run_in=run_in)


async def test_a_reward_is_the_weighted_sum_of_its_components() -> None:
    """The group keeps every component by name, one value per completion."""
    with runner(RewardSection(name="format", weight=0.5), RewardSection(name="math_eval", weight=2.0)) as rewards:
        scored = await rewards.score(group(answered("42"), answered("41"), "<answer>42</answer>", ""))
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == (2.5, 0.5, 2.0, 0.0)
    assert scored.parts == {"format": (1.0, 1.0, 0.0, 0.0), "math_eval": (1.0, 0.0, 1.0, 0.0)}


async def test_advantages_of_turns_are_those_of_the_tokens() -> None:
    """The rewards are reported, and decide whether the group is discarded."""
    given = group(answered("42"), answered("41"))
    of_turns = [(float(n),) * len(one.tokens) for n, one in enumerate(given.completions)]
    graded = tuple(replace(one, advantages=row) for one, row in zip(given.completions, of_turns, strict=True))
    with runner(RewardSection(name="math_eval")) as rewards:
        scored = await rewards.score(replace(given, completions=graded))
    assert isinstance(scored, ScoredGroup)
    assert (scored.rewards, scored.token_advantages) == ((1.0, 0.0), tuple(of_turns))


async def test_a_group_says_which_completions_are_correct() -> None:
    """Every reward with `correct = true` that has a value must be 1; None where none has. Also if rewards are equal."""
    judges = [RewardSection(name=name, correct=True) for name in ("format", "math_eval")]
    with runner(*judges) as rewards:
        scored = await rewards.score(group(answered("42"), answered("41"), "<answer>42</answer>"))
        equal = await rewards.score(group(answered("42")))
    with runner(sample("length")) as rewards:
        unknown = await rewards.score(group("a", "bb"))
    assert isinstance(equal, Discarded)
    assert (scored.correct, equal.correct, unknown.correct) == ((True, False, False), (True,), (None, None))


async def test_components_that_do_not_apply_are_skipped() -> None:
    """A type that is not listed, or a function that returns None. The value in `parts` is None."""
    sections = (
        RewardSection(name="format"),
        RewardSection(name="math_eval", types=("arithmetic",)),
        RewardSection(name="choice_correctness", types=("comparison",)),
    )
    with runner(*sections, sample("long_only")) as rewards:
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


async def test_a_function_may_have_different_weights_for_different_types() -> None:
    """The section with the type of the problem applies."""
    light = RewardSection(name="exact", types=("arithmetic",), weight=1.0)
    heavy = RewardSection(name="exact", types=("comparison",), weight=3.0)
    with runner(light, heavy) as rewards:
        one = await rewards.score(group(answered("42"), ""))
        three = await rewards.score(group(answered("B"), "", of=CHOICE))
    assert (one.rewards, three.rewards) == ((1.0, 0.0), (3.0, 0.0))


@pytest.mark.parametrize("run_in", ["process", "thread"])
@pytest.mark.parametrize("name", ["length", "async_length", "judge", "boolean", "fraction"])
async def test_user_functions_may_be_synchronous_or_asynchronous(
    name: str, run_in: Literal["process", "thread"]
) -> None:
    """They return any real number, including booleans."""
    with runner(sample(name, run_in=run_in)) as rewards:
        scored = await rewards.score(group("a", "abc"))
    expected = {"boolean": (0.0, 1.0), "fraction": (0.5, 1.5)}.get(name, (1.0, 3.0))
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == expected
    assert all(type(value) is float for value in scored.rewards)


async def test_the_answer_is_found_where_the_section_says() -> None:
    """Sections of one function may differ in the place."""
    sections = (
        RewardSection(name="math_eval", types=("arithmetic",), answer_in="boxed"),
        RewardSection(name="math_eval", types=("words",), answer_in="hashes"),
    )
    with runner(*sections) as rewards:
        boxed = await rewards.score(group(r"\boxed{42}", "#### 42"))
        hashes = await rewards.score(group(r"\boxed{42}", "#### 42", of=problem("42", kind="words")))
    assert (boxed.rewards, hashes.rewards) == ((1.0, 0.0), (0.0, 1.0))


@pytest.mark.parametrize("run_in", ["process", "thread"])
async def test_functions_for_trl_score_a_group_at_once(run_in: Literal["process", "thread"]) -> None:
    """Token ids and the version that sampled the group reach the function. A column that no record has is refused."""
    sections = [RewardSection(name=f"{TRL}{name}", run_in=run_in) for name in ("ids_and_schedule", "reward_func")]
    made = RewardRunner(sections, max_steps=4)
    sampled = group(r"\boxed{42}", "42", of=replace(problem(), extra={"ground_truth": "42"}))
    completions = [replace(one, tokens=(1, 2), logprobs=(-1.0, -1.0), versions=(1, 2)) for one in sampled.completions]
    try:
        await made.start()
        outcome = await made.score(replace(sampled, completions=tuple(completions)))
        made.require_columns([problem(), sampled.prompt.problem])
        with pytest.raises(ProfileError, match=r"'ground_truth'.*did you mean ground_truths"):
            made.require_columns([replace(problem(), extra={"ground_truths": "42"})])
    finally:
        made.close()
    assert isinstance(outcome, ScoredGroup)
    assert list(outcome.parts.values()) == [(2.5, 2.5), (1.0, 0.0)]


@pytest.mark.parametrize("run_in", ["process", "thread"])
async def test_asynchronous_functions_run_in_one_event_loop(run_in: Literal["process", "thread"]) -> None:
    """A client that a function keeps open stays usable."""
    with runner(sample("same_loop", run_in=run_in)) as rewards:
        first = await rewards.score(group("a", "abc"))
        second = await rewards.score(group("a", "abc"))
    assert first.rewards == second.rewards


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("raises", "raised ValueError: no opinion"),
        ("raises_async", "raised ValueError: no opinion"),
        ("unprintable", "raised UnprintableError: (str() of the exception failed)"),
        ("leaves", "raised SystemExit: 3"),
        ("leaves_async", "raised SystemExit: 3"),
        ("cancels_itself", "raised CancelledError"),
        ("gives_nan", "returned nan"),
        ("gives_infinity", "returned -inf"),
        ("gives_huge", "returned inf"),
        ("gives_ten_million", "returned 10000000.0; a reward is at most"),
        ("gives_text", "returned str, not a number or None"),
        ("gives_broken_number", "returned a number that raised RuntimeError: no value"),
        ("gives_list", "returned list, not a number or None"),
        ("gives_coroutine", "returned coroutine, not a number or None"),
    ],
)
@pytest.mark.parametrize("run_in", ["process", "thread"])
async def test_a_failing_reward_discards_only_its_group(
    name: str, detail: str, run_in: Literal["process", "thread"]
) -> None:
    """The detail names the function and the reason; the next group is scored as usual."""
    with runner(sample(name, run_in=run_in)) as rewards:
        for _ in range(2):
            outcome = await rewards.score(group("a", "b", group_id=5))
            assert isinstance(outcome, Discarded)
            assert (outcome.reason, outcome.prompt.group_id, len(outcome.completions)) == ("reward_error", 5, 2)
            assert outcome.detail.startswith(f"reward {HERE}{name} {detail}")


@pytest.mark.parametrize("run_in", ["process", "thread"])
async def test_the_first_failure_of_a_function_is_logged_with_its_traceback(
    run_in: Literal["process", "thread"],
) -> None:
    """Once per function. Every group names the function that failed."""
    with runner(sample("raises", run_in=run_in), RewardSection(name="format")) as rewards, capture_logs() as events:
        outcomes = [await rewards.score(group("a", "b")) for _ in range(3)]
    assert [getattr(outcome, "failed_rewards", None) for outcome in outcomes] == [(f"{HERE}raises",)] * 3
    (event,) = [event for event in events if event["event"] == "reward_failed"]
    assert (event["reward"], event["log_level"]) == (f"{HERE}raises", "warning")
    assert event["exception"].startswith("Traceback (most recent call last)")
    assert "sample_rewards.py" in event["exception"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: a fork beside other threads
async def test_a_child_that_a_reward_forks_ends_when_the_reward_returns() -> None:
    """Also in a thread of the run: a second run must not continue in the child."""
    with runner(sample("forks")) as rewards:
        outcome = await rewards.score(group("a", "abc"))
    assert isinstance(outcome, ScoredGroup)
    assert wait_until_ended([sample_rewards.FORKED.get(timeout=10) for _ in range(2)])


@pytest.mark.parametrize("name", ["none", "long_only"])
async def test_a_completion_to_which_no_reward_applies_discards_its_group(name: str) -> None:
    """The completion has no reward."""
    with runner(sample(name)) as rewards:
        outcome = await rewards.score(group("aa", "b"))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "reward_error"
    assert "no reward applies to completion" in outcome.detail


async def test_a_problem_whose_type_has_no_rewards_is_discarded() -> None:
    """The detail names the type."""
    with runner(RewardSection(name="exact", types=("arithmetic",))) as rewards:
        outcome = await rewards.score(group("a", "b", of=CHOICE))
    assert isinstance(outcome, Discarded)
    assert outcome.detail == "no reward applies to completion 0 of a problem of type 'comparison'"


@pytest.mark.parametrize(("weight", "total"), [(1.5e308, "inf"), (-1e6, "-2000000.0")])
async def test_a_sum_beyond_one_million_is_an_error(weight: float, total: str) -> None:
    """The limit holds for the sum as for every value."""
    with runner(sample("length", weight=weight)) as rewards:
        outcome = await rewards.score(group("aa", "b"))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "reward_error"
    assert outcome.detail.startswith(f"the weighted sum of completion 0 is {total}; ")


@pytest.mark.parametrize(("weight", "scored"), [(5e5, True), (-5e5, True), (5.01e5, False)])
async def test_a_reward_of_one_million_is_the_limit(weight: float, scored: bool) -> None:
    """The limit itself is allowed."""
    with runner(sample("length", weight=weight)) as rewards:
        assert isinstance(await rewards.score(group("aa", "b")), ScoredGroup if scored else Discarded)


@pytest.mark.parametrize("texts", [("a",), ("a", "b"), ("abc", "xyz", "uvw")])
async def test_a_zero_variance_group_is_discarded(texts: tuple[str, ...]) -> None:
    """Also a group of one. The rewards are kept for the rollout log."""
    with runner(sample("length")) as rewards:
        outcome = await rewards.score(group(*texts))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "zero_variance"
    assert outcome.detail == f"all {len(texts)} rewards are {len(texts[0])}"
    assert outcome.rewards == (float(len(texts[0])),) * len(texts)
    assert len(outcome.completions) == len(texts)


async def test_zero_variance_groups_are_kept_on_request() -> None:
    """Failures still discard the group."""
    with runner(sample("length"), keep_zero_variance=True) as rewards:
        outcome = await rewards.score(group("a", "b"))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == (1.0, 1.0)
    with runner(sample("raises"), keep_zero_variance=True) as rewards:
        assert isinstance(await rewards.score(group("a", "b")), Discarded)


@pytest.mark.parametrize("name", ["hangs", "hangs_async", "spins", "blocks_its_loop"])
async def test_a_hanging_reward_is_abandoned_at_its_time_limit(name: str) -> None:
    """The event loop stays responsive, and the group is discarded."""
    with runner(sample(name, timeout_seconds=0.05)) as rewards, anyio.fail_after(60):
        outcome = await rewards.score(group("a", "b"))
    assert isinstance(outcome, Discarded)
    assert outcome.detail == f"reward {HERE}{name} took longer than 0.05 s"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt can hit a finalizer
async def test_hanging_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit the function is not called again, and no thread starts."""
    name = "blocks_its_loop"
    monkeypatch.setattr(calls, "MAX_HANGING_CALLS", 3)
    with runner(sample(name, timeout_seconds=0.01)) as rewards:
        for _ in range(3):
            await rewards.score(group("a", "b"))
        threads = threading.active_count()
        for _ in range(5):
            outcome = await rewards.score(group("a", "b"))
            assert isinstance(outcome, Discarded)
            assert outcome.detail == f"reward {HERE}{name} was not called: 3 earlier calls still hang"
        assert threading.active_count() == threads


@pytest.mark.parametrize("name", ["hangs_async", "spins"])
async def test_interruptible_hanging_calls_do_not_count_towards_the_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their threads end."""
    monkeypatch.setattr(calls, "MAX_HANGING_CALLS", 2)
    with runner(sample(name, timeout_seconds=0.05)) as rewards, anyio.fail_after(60):
        abandoned = 0
        while abandoned < 4:  # on a busy machine, the function is not called until an interrupted thread has ended
            outcome = await rewards.score(group("a", "b"))
            assert isinstance(outcome, Discarded)
            abandoned += "took longer" in outcome.detail
            await anyio.lowlevel.checkpoint()


async def test_concurrency_is_limited() -> None:
    """Further calls wait. Groups and held-out problems have one limit."""
    entered = sample_rewards.ENTERED
    with runner(sample("enters"), concurrency=2) as rewards:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(rewards.score, group("a"))
                tasks.start_soon(rewards.grade, problem(), group("a").completions)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(60):
                while entered.qsize() < 2:
                    await anyio.lowlevel.checkpoint()
            assert entered.qsize() == 2
            sample_rewards.LEAVE.set()
    assert entered.qsize() == 4


def test_a_run_without_rewards_scores_groups_like_one_with_functions() -> None:
    """As many at once as one function by default."""
    with closing(RewardRunner(())) as rewards:
        assert rewards.concurrency == 8


@pytest.mark.parametrize(("overrides", "concurrency"), [({"rollouts.scoring": 3}, 3), ({}, 8)])
def test_the_profile_limits_the_groups_that_are_scored_at_once(overrides: dict[str, int], concurrency: int) -> None:
    """Without `rollouts.scoring`, as many as the largest `max_workers` can use, and at least 8."""
    with closing(rewards_of(load_profile("local-m3", overrides))) as rewards:
        assert rewards.concurrency == concurrency


async def test_types_without_a_correct_reward_are_listed() -> None:
    """By the `types` of the sections; a section without types applies to all."""
    limited = RewardSection(name="math_eval", correct=True, types=("arithmetic",))
    with runner(RewardSection(name="format"), limited) as rewards:
        assert rewards.types_without_correct(["comparison", "arithmetic", "comparison"]) == ("comparison",)
    with runner(RewardSection(name="exact", correct=True)) as rewards:
        assert rewards.types_without_correct(["comparison"]) == ()


async def correct(rewards: RewardRunner, of: Problem, *texts: str) -> list[bool | None]:
    """Return whether these completions of a held-out problem are correct."""
    return [grade.correct for grade in await rewards.grade(of, group(*texts).completions)]


async def test_a_completion_is_correct_if_every_applicable_correct_reward_is_one() -> None:
    """Rewards without `correct` and the weights do not matter."""
    sections = (
        RewardSection(name="format"),
        RewardSection(name="math_eval", correct=True, weight=0.1),
        RewardSection(name="choice_correctness", correct=True),
    )
    with runner(*sections) as rewards:
        assert await correct(rewards, problem("42"), "<answer>42</answer>", answered("41")) == [True, False]
        assert await correct(rewards, CHOICE, answered("B"), answered("A")) == [True, False]
        assert await correct(rewards, problem("Paris"), answered("Paris")) == [None]


async def test_partial_credit_is_not_correct() -> None:
    """Only the value 1 is."""
    with runner(RewardSection(name="jaccard", correct=True)) as rewards:
        of = problem("red green")
        assert await correct(rewards, of, answered("red"), answered("green red")) == [False, True]


async def test_correctness_is_undefined_without_a_correct_reward() -> None:
    """The result is None, not False."""
    with runner(RewardSection(name="exact")) as rewards:
        assert await correct(rewards, problem("42"), answered("42")) == [None]


async def test_a_held_out_completion_has_the_reward_that_training_would_give() -> None:
    """The weighted sum of the functions that apply, with the length penalty; a completion without a value has none."""
    sections = (RewardSection(name="format", weight=0.5), RewardSection(name="math_eval", weight=2.0, correct=True))
    texts = (answered("42"), "<answer>42</answer>", "")
    penalty = Overlong(max_tokens=1, buffer=1, penalty=0.25)
    with closing(RewardRunner(sections, overlong=penalty)) as rewards:
        scored, graded = await rewards.score(group(*texts)), await rewards.grade(problem(), group(*texts).completions)
    assert isinstance(scored, ScoredGroup)
    assert tuple(grade.reward for grade in graded) == scored.rewards == (2.25, 1.75, -0.25)
    assert [grade.parts for grade in graded][1] == {"format": 0.0, "math_eval": 1.0, "overlong": -0.25}
    with runner(sample("none")) as rewards:
        assert await rewards.grade(problem(), group("a").completions) == [Grade(correct=None)]


@pytest.mark.parametrize("name", ["raises", "gives_nan", "hangs_async"])
async def test_a_failing_reward_leaves_a_completion_without_reward(name: str) -> None:
    """It counts as incorrect if the function has `correct = true`. Evaluation continues with the other functions."""
    for judges, expected in ((True, False), (False, True)):
        failing = RewardSection(name=HERE + name, correct=judges, timeout_seconds=0.05, run_in="thread")
        with runner(RewardSection(name="exact", correct=True), failing) as rewards:
            (grade,) = await rewards.grade(problem(), group(answered("42")).completions)
        assert (grade.correct, grade.reward, grade.failed) == (expected, None, (HERE + name,))
        assert grade.parts == {"exact": 1.0}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([RewardSection(name="math")], "did you mean math_eval"),
        ([RewardSection(name=f"{HERE}length", run_in="thread", max_workers=2)], "rewards.max_workers .* no effect"),
        ([RewardSection(name="exact", memory_limit_mb=100)], "rewards.memory_limit_mb .* no effect"),
        ([RewardSection(name="exact", run_in="process")], "rewards.run_in"),
        ([RewardSection(name="math_verify", run_in="thread")], "rewards.run_in"),
        ([RewardSection(name=f"{HERE}length", run_in="thread", where="cluster")], "rewards.run_in"),
        ([RewardSection(name="format", answer_in="boxed")], "rewards.answer_in .* no effect"),
        ([RewardSection(name="judge", answer_in="text")], "rewards.answer_in .* no effect"),
        ([RewardSection(name="no_such:f", answer_in="text")], "rewards.answer_in .* no effect"),
        ([RewardSection(name="exact", settings={"url": "x"})], "rewards.settings .* no effect"),
        ([RewardSection(name="no_such:f", settings={"url": "x"})], "rewards.settings .* no effect"),
        ([RewardSection(name="no_colon.py", run_in="process")], "is unknown"),
        ([RewardSection(name="exact", weight=math.inf)], "must be finite"),
        ([RewardSection(name="exact", weight=math.nan)], "must be finite"),
        ([RewardSection(name="exact"), RewardSection(name="exact", types=("a",))], "is listed twice"),
        ([RewardSection(name="exact", types=("a", "b")), RewardSection(name="exact", types=("b",))], "is listed twice"),
    ],
)
def test_invalid_sections_are_refused(sections: list[RewardSection], message: str) -> None:
    """At the start of the run, before the first group."""
    with pytest.raises(ProfileError, match=message):
        RewardRunner(tuple(sections))


def test_what_a_reward_expects_follows_the_place_of_the_answer() -> None:
    """One text per name; the texts of two sections with the same name are joined."""
    sections = [
        RewardSection(name="format"),
        RewardSection(name="exact", types=("a",), answer_in="boxed"),
        RewardSection(name="exact", types=("b",), answer_in="hashes"),
        RewardSection(name="mine:reward"),
    ]
    found = expectations(sections)
    assert found.keys() == {"format", "exact"}
    assert "boxed" in found["exact"]
    assert "####" in found["exact"]
    assert [expects_tag(section) for section in [*sections, RewardSection(name="exact")]] == [
        True, False, False, False, True
    ]  # fmt: skip
