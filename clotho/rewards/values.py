"""Values of one reward function for the completions of a group: calls, checks of results, and errors.

A function of (problem, completion) is called once per completion. A function of a group is called once, with keyword
arguments as by GRPOTrainer of TRL: lists with one element per completion, and `trainer_state`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from msgspec import Struct

from clotho.rewards.registry import ARGUMENTS, GroupParameters, RewardFunction
from protocols.errors import ClothoError, Interrupted
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


class Completions(Struct, frozen=True, kw_only=True):
    """The completions of one group, as reward functions receive them.

    tokens: token ids of each completion; empty if they are unknown or the function does not read them. version: the
    newest policy version that sampled a token. environment: reward of the environment of each completion; None if it
    gave none. Empty if there was no environment.
    """

    problem: Problem
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] = ()
    version: int = 0
    environment: Values = ()


class TrainerState(Struct, frozen=True, kw_only=True):
    """The argument `trainer_state` of a function of a group, with two attributes of TRL's.

    global_step: the policy version that sampled the group. max_steps: `steps` of the profile; 0 outside of a run.
    """

    global_step: int
    max_steps: int


class Reward(Struct, frozen=True, kw_only=True):
    """A loaded reward function. group: parameters of one over a group, else None. max_steps: see `TrainerState`."""

    name: str
    function: RewardFunction
    group: GroupParameters | None = None
    max_steps: int = 0


def call_all(reward: Reward, completions: Completions) -> Values:
    """Call a synchronous function on all completions. Raises RewardError."""
    if reward.group is None:
        return tuple(_value(reward, completions.problem, text) for text in completions.texts)
    first: Exception | None = None
    with _reported(reward, passed=Interrupted):
        for arguments in _arguments(reward, completions):
            try:
                return _group_values(reward, completions, reward.function(**arguments))
            except WRONG_FORM as error:
                first = first or error
        raise first or RuntimeError(NO_FORM)


async def await_all(reward: Reward, completions: Completions) -> Values:
    """Call an asynchronous function on all completions, concurrently. Raises RewardError."""
    if reward.group is None:
        calls = (_async_value(reward, completions.problem, text) for text in completions.texts)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        with _reported(reward):
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        return tuple(outcome for outcome in outcomes if not isinstance(outcome, BaseException))
    first: Exception | None = None
    with _reported(reward, passed=asyncio.CancelledError):
        for arguments in _arguments(reward, completions):
            try:
                return _group_values(reward, completions, await reward.function(**arguments))
            except WRONG_FORM as error:
                first = first or error
        raise first or RuntimeError(NO_FORM)


def too_large(value: float) -> bool:
    """Return whether a value is beyond `MAX_REWARD` in absolute size, or NaN."""
    return not abs(value) <= MAX_REWARD


WRONG_FORM = (TypeError, AttributeError, LookupError)
"""What a function raises that reads messages and receives texts."""

NO_FORM = "a group has at least one form of arguments"


@contextmanager
def _reported(reward: Reward, *, passed: type[BaseException] = RewardError) -> Iterator[None]:
    """Raise RewardError for what a function raises, except `passed`, and end a process that the function has forked."""
    process = os.getpid()
    try:
        yield
    except (RewardError, passed):
        raise
    except BaseException as error:  # includes SystemExit: a function ends neither the run nor an event loop
        raise _failure(reward, error) from error
    finally:
        if os.getpid() != process:
            os._exit(0)  # a child must not answer a second time


def _value(reward: Reward, problem: Problem, text: str) -> float | None:
    with _reported(reward, passed=Interrupted):
        return _number(reward.name, reward.function(problem, text))


async def _async_value(reward: Reward, problem: Problem, text: str) -> float | None:
    with _reported(reward, passed=asyncio.CancelledError):
        result = reward.function(problem, text)
        return _number(reward.name, await result if inspect.isawaitable(result) else result)


def _arguments(reward: Reward, completions: Completions) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments of a call, first in the form of the dataset: texts, or lists of messages.

    Many functions for TRL read messages, because their scripts convert texts to messages. If the dataset has texts,
    the second form has messages. A column that a record lacks is None, as in the library `datasets`.
    """
    problem, count, group = completions.problem, len(completions.texts), reward.group
    if group is None:
        return
    columns = dict.fromkeys(set(group.required) - ARGUMENTS) | problem.extra
    arguments: dict[str, Any] = {name: [value] * count for name, value in columns.items()}
    if completions.tokens:
        arguments["completion_ids"] = [list(tokens) for tokens in completions.tokens]
    if completions.environment:
        arguments["environment_rewards"] = list(completions.environment)
    arguments["trainer_state"] = TrainerState(global_step=completions.version, max_steps=reward.max_steps)
    for messages in (True,) if problem.messages else (False, True):
        conversation = list(problem.messages) or [{"role": "user", "content": problem.prompt}]
        prompt = conversation if messages else problem.prompt
        texts = [[{"role": "assistant", "content": text}] if messages else text for text in completions.texts]
        arguments |= {"prompts": [prompt] * count, "completions": texts}
        yield {name: value for name, value in arguments.items() if group.accepts(name)}


def _group_values(reward: Reward, completions: Completions, result: Any) -> Values:
    """Check the list that a function of a group returned; arrays and tensors are lists too. Raises RewardError."""
    if inspect.iscoroutine(result):
        result.close()
    found = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(found, list | tuple):
        message = f"{type(result).__name__}, not a list of {len(completions.texts)} numbers"
    elif len(found) != len(completions.texts):
        message = f"{len(found)} values for {len(completions.texts)} completions"
    else:
        return tuple(_number(reward.name, value) for value in found)
    raise RewardError(f"reward {reward.name} returned {message}", rewards=(reward.name,))


def _failure(reward: Reward, error: BaseException) -> RewardError:
    return RewardError(
        f"reward {reward.name} raised {_describe(error)}", rewards=(reward.name,), traceback=_traceback(error)
    )


def _traceback(error: BaseException) -> str:
    """The end of the traceback, which has the exception."""
    try:
        return "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    except Exception:  # a user's exception with an attribute of a wrong type
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
    if too_large(number):
        limit = f"; a reward is at most {MAX_REWARD:g} in absolute size" if math.isfinite(number) else ""
        raise RewardError(f"reward {name} returned {number!r}{limit}", rewards=(name,))
    return number


def _describe(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:
        message = "(str() of the exception failed)"
    return f"{type(error).__name__}: {message}"[:300]
