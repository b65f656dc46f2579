"""Values of one reward function for the completions of a group: calls, checks of results, and errors."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Sequence
from numbers import Real

from msgspec import Struct

from clotho.rewards.registry import RewardFunction
from protocols.errors import ClothoError
from protocols.prompt import Problem

MAX_REWARD = 1e6
"""Largest absolute reward. Squares and sums of larger values lose all precision in float32 or overflow."""

MAX_TRACEBACK = 16_000
"""Characters of the traceback of a failed function."""

Values = tuple[float | None, ...]
"""One value per completion; None if the function does not apply."""


class RewardError(ClothoError, RuntimeError):
    """A reward function raised, exceeded a limit, ended its process or returned no valid number. Names the function.

    rewards: names of the functions that failed; empty if the caller knows them. traceback: of the function's exception.
    """

    def __init__(self, message: str, *, rewards: tuple[str, ...] = (), traceback: str = "") -> None:
        super().__init__(message)
        self.rewards, self.traceback = rewards, traceback


class Interrupted(BaseException):
    """Raised in the thread of an abandoned call. Takes effect at the next Python bytecode, not inside a C call."""


class Reward(Struct, frozen=True, kw_only=True):
    """A loaded reward function, and its name in the profile."""

    name: str
    function: RewardFunction


def call_all(reward: Reward, problem: Problem, texts: Sequence[str]) -> Values:
    """Call a synchronous function on every text. Raises RewardError."""
    return tuple(_value(reward, problem, text) for text in texts)


async def await_all(reward: Reward, problem: Problem, texts: Sequence[str]) -> Values:
    """Call an asynchronous function on every text, concurrently. Raises RewardError."""
    outcomes = await asyncio.gather(*(_async_value(reward, problem, text) for text in texts), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise outcome
        if isinstance(outcome, BaseException):
            raise _failure(reward, outcome) from outcome
    return tuple(outcome for outcome in outcomes if not isinstance(outcome, BaseException))


def too_large(value: float) -> bool:
    """Return whether a value is beyond `MAX_REWARD` in absolute size, or NaN."""
    return not abs(value) <= MAX_REWARD


def _value(reward: Reward, problem: Problem, text: str) -> float | None:
    process = os.getpid()
    try:
        value = reward.function(problem, text)
    except Interrupted:
        raise
    except BaseException as error:  # includes SystemExit: a reward function must not end the run
        raise _failure(reward, error) from error
    finally:
        _end_fork(process)
    return _number(reward.name, value)


async def _async_value(reward: Reward, problem: Problem, text: str) -> float | None:
    process = os.getpid()
    try:
        result = reward.function(problem, text)
        value = await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the event loop
        raise _failure(reward, error) from error
    finally:
        _end_fork(process)
    return _number(reward.name, value)


def _end_fork(process: int) -> None:
    """End the current process if the function forked it from `process`: it must not answer a second time."""
    if os.getpid() != process:
        os._exit(0)


def _failure(reward: Reward, error: BaseException) -> RewardError:
    return RewardError(
        f"reward {reward.name} raised {_describe(error)}", rewards=(reward.name,), traceback=_traceback(error)
    )


def _traceback(error: BaseException) -> str:
    """The end of the traceback, which has the exception."""
    try:
        return "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    except Exception:  # a user's exception whose str() fails
        return ""


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    if inspect.iscoroutine(value):
        value.close()
    if not isinstance(value, Real):
        raise RewardError(f"reward {name} returned {type(value).__name__}, not a number or None", rewards=(name,))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:  # a number type defined by the user
        message = f"reward {name} returned a number that raised {_describe(error)}"
        raise RewardError(message, rewards=(name,), traceback=_traceback(error)) from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name} returned {number}", rewards=(name,))
    if too_large(number):
        message = f"reward {name} returned {number!r}; a reward is at most {MAX_REWARD:g} in absolute size"
        raise RewardError(message, rewards=(name,))
    return number


def _describe(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:
        message = "(str() of the exception failed)"
    return f"{type(error).__name__}: {message}"[:300]
