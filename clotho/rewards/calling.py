"""Calling reward functions on the completions of one group: time limit, checked results, bounded hangs."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from numbers import Real

import anyio
from msgspec import Struct

from clotho.rewards.registry import RewardFunction
from clotho.rewards.workers import Call, Interrupted, WorkerLoop, WorkerThreads
from protocols.errors import ClothoError
from protocols.prompt import Problem

MAX_HANGING = 32
"""Abandoned calls of one function that may still run; while there are more, it is not called again."""

Values = tuple[float | None, ...]


class RewardError(ClothoError, RuntimeError):
    """A reward function raised, exceeded its time limit, or returned no finite number. Names the function."""


class Reward(Struct, frozen=True, kw_only=True):
    """A loaded reward function and the name that messages give it."""

    name: str
    function: RewardFunction


class Caller:
    """Calls some reward functions, one after another, under one time limit for a whole group of completions.

    threads: for synchronous functions, called completion by completion in one thread: one change of thread per group.
    With `loop` instead there is one asynchronous function, called on all completions at once.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        timeout_seconds: float,
        threads: WorkerThreads,
        loop: WorkerLoop | None = None,
    ) -> None:
        self.rewards = tuple(rewards)
        self._timeout_seconds = timeout_seconds
        self._threads = threads
        self._loop = loop
        self._hanging: list[Call[list[Values]]] = []

    async def __call__(self, problem: Problem, texts: Sequence[str]) -> list[Values]:
        """Return each function's value for each text. Raises RewardError."""
        names = ", ".join(reward.name for reward in self.rewards)
        self._hanging = [call for call in self._hanging if call.alive]
        if len(self._hanging) >= MAX_HANGING:
            raise RewardError(f"reward {names} was not called: {len(self._hanging)} earlier calls of it still hang")
        call = self._start(problem, texts)
        try:
            with anyio.fail_after(self._timeout_seconds):
                return await asyncio.wrap_future(call.future)
        except TimeoutError:
            self._hanging.append(call)
            raise RewardError(f"reward {names} took longer than {self._timeout_seconds:g} s") from None
        finally:
            if not call.future.done():
                call.abandon()

    def _start(self, problem: Problem, texts: Sequence[str]) -> Call[list[Values]]:
        if self._loop is not None:
            return self._loop.start(lambda: _awaited(self.rewards[0], problem, texts))
        return self._threads.start(lambda: [_called(reward, problem, texts) for reward in self.rewards])


def _called(reward: Reward, problem: Problem, texts: Sequence[str]) -> Values:
    return tuple(_value(reward, problem, text) for text in texts)


async def _awaited(reward: Reward, problem: Problem, texts: Sequence[str]) -> list[Values]:
    outcomes = await asyncio.gather(*(_async_value(reward, problem, text) for text in texts), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise outcome
        if isinstance(outcome, BaseException):
            raise _failure(reward, outcome) from outcome
    return [tuple(outcome for outcome in outcomes if not isinstance(outcome, BaseException))]


def _value(reward: Reward, problem: Problem, text: str) -> float | None:
    try:
        value = reward.function(problem, text)
    except Interrupted:
        raise
    except BaseException as error:  # also SystemExit: no reward function ends the run
        raise _failure(reward, error) from error
    return _number(reward.name, value)


async def _async_value(reward: Reward, problem: Problem, text: str) -> float | None:
    try:
        result = reward.function(problem, text)
        value = await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the event loop it runs in
        raise _failure(reward, error) from error
    return _number(reward.name, value)


def _failure(reward: Reward, error: BaseException) -> RewardError:
    return RewardError(f"reward {reward.name} raised {_described(error)}")


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    if inspect.iscoroutine(value):
        value.close()
    if not isinstance(value, Real):
        raise RewardError(f"reward {name} returned {type(value).__name__}, not a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:  # a number type of the user's own
        raise RewardError(f"reward {name} returned a number that raised {_described(error)}") from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name} returned {number}")
    return number


def _described(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message}"[:300]
