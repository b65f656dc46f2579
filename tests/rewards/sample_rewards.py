"""User reward functions, valid and invalid, with the names `tests.rewards.sample_rewards:NAME`."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from queue import SimpleQueue
from typing import Any

from protocols.prompt import Problem

FOREVER = threading.Event()
"""Never set. A wait for this event hangs inside a C call."""

ENTERED: SimpleQueue[str] = SimpleQueue()
LEAVE = threading.Event()

FORKED: SimpleQueue[int] = SimpleQueue()

not_a_function = 3


def forks(problem: Problem, completion: str) -> float:
    """Fork, and return in both processes."""
    if child := os.fork():
        FORKED.put(child)
    return float(len(completion))


def enters(problem: Problem, completion: str) -> float:
    """Report the call, and wait for `LEAVE`."""
    ENTERED.put(completion)
    LEAVE.wait(10)
    return 0.0


TOGETHER = threading.Barrier(12)


def waits_for_twelve(problem: Problem, completion: str) -> float:
    """Return when twelve calls are in progress."""
    TOGETHER.wait()
    return float(len(completion))


def length(problem: Problem, completion: str) -> float:
    """Return the number of characters."""
    return float(len(completion))


async def async_length(problem: Problem, completion: str) -> float:
    """Return the number of characters after a switch to other tasks."""
    await asyncio.sleep(0)
    return float(len(completion))


async def same_loop(problem: Problem, completion: str) -> float:
    """Return the identity of the event loop plus the length."""
    return float(id(asyncio.get_running_loop()) + len(completion))


def none(problem: Problem, completion: str) -> None:
    """Never apply."""


def long_only(problem: Problem, completion: str) -> float | None:
    """Apply to completions of more than one character."""
    return float(len(completion)) if len(completion) > 1 else None


def boolean(problem: Problem, completion: str) -> bool:
    """Return True for more than one character."""
    return len(completion) > 1


def fraction(problem: Problem, completion: str) -> Fraction:
    """Return a number that is not a float."""
    return Fraction(len(completion), 2)


class Judge:
    """A callable object with state."""

    async def __call__(self, problem: Problem, completion: str) -> float:
        """Return the number of characters."""
        return float(len(completion))


judge = Judge()


def raises(problem: Problem, completion: str) -> float:
    """Fail."""
    raise ValueError("no opinion")


async def raises_async(problem: Problem, completion: str) -> float:
    """Fail."""
    raise ValueError("no opinion")


def unprintable(problem: Problem, completion: str) -> float:
    """Raise an exception whose `str()` fails."""

    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise UnprintableError


def leaves(problem: Problem, completion: str) -> float:
    """Try to end the process."""
    sys.exit(3)


async def leaves_async(problem: Problem, completion: str) -> float:
    """Try to end the process."""
    sys.exit(3)


async def cancels_itself(problem: Problem, completion: str) -> float:
    """Raise the cancellation exception of asyncio."""
    raise asyncio.CancelledError


def hangs(problem: Problem, completion: str) -> float:
    """Hang in a C call."""
    FOREVER.wait()
    return 0.0


def spins(problem: Problem, completion: str) -> float:
    """Loop forever in Python."""
    while True:
        pass


async def hangs_async(problem: Problem, completion: str) -> float:
    """Never return."""
    await asyncio.get_running_loop().create_future()
    return 0.0


async def blocks_its_loop(problem: Problem, completion: str) -> float:
    """Block the event loop forever."""
    FOREVER.wait()
    return 0.0


def gives_nan(problem: Problem, completion: str) -> float:
    """Return NaN."""
    return math.nan


def gives_infinity(problem: Problem, completion: str) -> float:
    """Return minus infinity."""
    return -math.inf


def gives_huge(problem: Problem, completion: str) -> int:
    """Return an integer beyond the range of floats."""
    return 10**400


def gives_ten_million(problem: Problem, completion: str) -> int:
    """Return a number beyond the limit."""
    return 10_000_000


class BrokenNumber(Fraction):
    """A number whose conversion to float fails."""

    def __float__(self) -> float:
        """Fail."""
        raise RuntimeError("no value")


def gives_broken_number(problem: Problem, completion: str) -> Fraction:
    """Return a user-defined number."""
    return BrokenNumber(1, 2)


def gives_text(problem: Problem, completion: str) -> str:
    """Return a string."""
    return "1.0"


def gives_list(problem: Problem, completion: str) -> list[float]:
    """Return a list."""
    return [1.0]


def gives_coroutine(problem: Problem, completion: str) -> Any:
    """Return a coroutine without awaiting it."""
    return async_length(problem, completion)


def one_argument(completion: str) -> float:
    """Accept one argument only."""
    return 0.0


def unreliable(problem: Problem, completion: str) -> Any:
    """Fail in a way that depends on the prompt, or return the length."""
    behaviors: list[Callable[[Problem, str], Any]] = [raises, gives_nan, gives_text, none, hangs, leaves]
    index = hashlib.sha256(problem.prompt.encode()).digest()[0]
    return behaviors[index](problem, completion) if index < len(behaviors) else length(problem, completion)
