"""Calls of functions of a group, in the form of TRL, and the checks of what they return."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from msgspec.structs import replace

from clotho.rewards.registry import group_parameters, is_async
from clotho.rewards.values import Completions, Reward, RewardError, Values, await_all, call_all
from protocols.prompt import Problem
from tests.rewards import trl_rewards

COLUMNS = {"prompt": "2 + 2", "answer": 4, "task": "math", "ground_truth": "4", "my column": None}
PLAIN = Problem(prompt="2 + 2", answer="4", type="math", extra=COLUMNS)
CHAT = Problem(
    prompt="2 + 2",
    answer="4",
    type="math",
    messages=({"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2"}),
    extra={"answer": "4"},
)


async def values(
    name: str,
    *texts: str,
    of: Problem = PLAIN,
    tokens: tuple[tuple[int, ...], ...] = (),
    environment: tuple[float, ...] = (),
) -> Values:
    """Call a function of `trl_rewards` once, for a group with these texts."""
    function = getattr(trl_rewards, name)
    reward = Reward(name=name, function=function, group=group_parameters(function), max_steps=10)
    assert reward.group is not None
    completions = Completions(problem=of, texts=texts, tokens=tokens, version=5, environment=environment)
    return await await_all(reward, completions) if is_async(function) else call_all(reward, completions)


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("reward_len", ("aab", "abc"), (2.0, 3.0)),
        ("format_reward_func", ("<think>a</think><answer>4</answer>", "4"), (1.0, 0.0)),
        ("reward_func", (r"so \boxed{4}", r"so \boxed{5}"), (1.0, 0.0)), ("math_reward_func", ("4", "5"), (1.0, 0.0)),
        ("without_kwargs", ("4", "5"), (1.0, 0.0)), ("async_reward_func", ("a", "abc"), (1.0, 3.0)),
        ("scheduled", ("a", "abc"), (0.5, 1.5)), ("rank_in_group", ("abc", "a", "ab"), (1.0, 0.0, 0.5)),
        ("best_only", ("abc", "a"), (1.0, 0.0)), ("penalty", ("abc", "a"), (-1.5, -0.5)),
    ],
)  # fmt: skip
async def test_functions_for_trl_are_called_once_with_lists(
    name: str, texts: tuple[str, ...], expected: Values
) -> None:
    """Completions, prompts and columns of the dataset, each with one element per completion."""
    found = await values(name, *texts)
    assert found == expected
    assert all(type(value) is float for value in found)


async def test_token_ids_are_passed_to_functions_that_read_them() -> None:
    """One list per completion."""
    assert await values("reward_ids", "a", "b", tokens=((1, 2), (3,))) == (2.0, 1.0)


async def test_the_rewards_of_an_environment_are_passed_to_functions_that_read_them() -> None:
    """One per completion; a group without an environment has none."""
    assert await values("of_environment", "a", "b", environment=(1.0, 0.5)) == (2.0, 1.0)
    with pytest.raises(RewardError, match="environment_rewards"):
        await values("of_environment", "a", "b")


async def test_conversations_are_passed_as_messages() -> None:
    """If the dataset has conversations; a function that reads messages also works with a dataset of texts."""
    assert await values("correctness_reward_func", "4", "5", of=CHAT) == (2.0, 0.0)
    assert await values("correctness_reward_func", "4", "5", of=replace(PLAIN, extra={"answer": "4"})) == (2.0, 0.0)


async def test_a_column_that_a_record_lacks_is_none() -> None:
    """As in the library `datasets`; the function may return None for a completion that it does not apply to."""
    without = Problem(prompt="2 + 2", answer="", type="math")
    assert await values("math_reward_func", "4", of=without) == (None,)


def test_all_columns_are_passed_under_their_names() -> None:
    """Also columns whose names are no identifiers, and a column that has the name of an argument."""
    received: dict[str, Any] = {}

    def function(**kwargs: Any) -> list[float]:
        received.update(kwargs)
        return [0.0, 0.0]

    extra = {**COLUMNS, "completions": "a column"}
    reward = Reward(name="mine", function=function, group=group_parameters(function), max_steps=10)
    completions = Completions(problem=Problem(prompt="q", answer="4", type="math", extra=extra), texts=("a", "b"))
    assert call_all(reward, completions) == (0.0, 0.0)
    assert received.pop("trainer_state").max_steps == 10
    columns = {name: [value, value] for name, value in COLUMNS.items()}
    assert received == columns | {"prompts": ["q", "q"], "completions": ["a", "b"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "returned 1 values for 2 completions"),
        ("one_number", "returned float, not a list of 2 numbers"),
        ("not_numbers", "returned str, not a number or None"),
        ("raises", "raised ValueError: no opinion"),
    ],
)
async def test_other_results_are_errors(name: str, message: str) -> None:
    """The error names the function."""
    with pytest.raises(RewardError, match=f"reward {name} {message}") as caught:
        await values(name, "a", "b")
    assert caught.value.rewards == (name,)


def test_an_exception_that_cannot_be_printed_is_an_error_without_a_traceback() -> None:
    """Here the line of source of a syntax error is a number."""

    def fails(problem: Problem, completion: str) -> float:
        raise SyntaxError("wrong", ("file", 1, 1, 5))  # type: ignore[arg-type]

    reward = Reward(name="mine", function=fails, group=None, max_steps=10)
    with pytest.raises(RewardError, match="mine raised SyntaxError") as caught:
        call_all(reward, Completions(problem=PLAIN, texts=("a",)))
    assert caught.value.traceback == ""


@pytest.mark.parametrize("of_group", [False, True])
def test_a_coroutine_where_a_value_is_expected_is_an_error_and_is_closed(of_group: bool) -> None:
    """Otherwise Python warns that it was never awaited."""

    async def answer() -> float:
        return 1.0

    pending = answer()

    def function(completions: list[str], **_: Any) -> Any:
        return pending

    reward = Reward(
        name="mine",
        function=function if of_group else lambda problem, completion: pending,
        group=group_parameters(function) if of_group else None,
        max_steps=10,
    )
    with pytest.raises(RewardError, match="mine returned coroutine"):
        call_all(reward, Completions(problem=PLAIN, texts=("a",)))
    assert inspect.getcoroutinestate(pending) == inspect.CORO_CLOSED
