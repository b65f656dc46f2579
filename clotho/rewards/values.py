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
    """A loaded reward function and its name in the profile. group: parameters of a function of a group; otherwise None.

    max_steps: for `TrainerState`.
    """

    name: str
    function: RewardFunction
    group: GroupParameters | None = None
    max_steps: int = 0


def call_all(reward: Reward, completions: Completions) -> Values:
    """Call a synchronous function on all completions. Raises RewardError."""
    if reward.group is None:
        return tuple(_value(reward, completions.problem, text) for text in completions.texts)
    process = os.getpid()
    try:
        return _group_values(reward, completions, _call_group(reward, completions))
    except (Interrupted, RewardError):
        raise
    except BaseException as error:  # includes SystemExit: a reward function must not end the run
        raise _failure(reward, error) from error
    finally:
        _end_fork(process)


async def await_all(reward: Reward, completions: Completions) -> Values:
    """Call an asynchronous function on all completions, concurrently. Raises RewardError."""
    if reward.group is not None:
        return await _await_group(reward, completions)
    calls = (_async_value(reward, completions.problem, text) for text in completions.texts)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
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


WRONG_FORM = (TypeError, AttributeError, LookupError)
"""What a function raises that reads messages and receives texts."""


def _call_group(reward: Reward, completions: Completions) -> Any:
    first: Exception | None = None
    for arguments in _arguments(reward, completions):
        try:
            return reward.function(**arguments)
        except WRONG_FORM as error:
            first = first or error
    raise first or RuntimeError("a group has at least one form of arguments")


async def _await_group(reward: Reward, completions: Completions) -> Values:
    process = os.getpid()
    first: Exception | None = None
    try:
        for arguments in _arguments(reward, completions):
            try:
                return _group_values(reward, completions, await reward.function(**arguments))
            except WRONG_FORM as error:
                first = first or error
    except (asyncio.CancelledError, RewardError):
        raise
    except BaseException as error:  # SystemExit would end the event loop
        raise _failure(reward, error) from error
    finally:
        _end_fork(process)
    raise _failure(reward, first or RuntimeError("a group has at least one form of arguments")) from first


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
        message = (
            f"reward {reward.name} returned {type(result).__name__}, not a list of {len(completions.texts)} numbers"
        )
        raise RewardError(message, rewards=(reward.name,))
    if len(found) != len(completions.texts):
        message = f"reward {reward.name} returned {len(found)} values for {len(completions.texts)} completions"
        raise RewardError(message, rewards=(reward.name,))
    return tuple(_number(reward.name, value) for value in found)


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
