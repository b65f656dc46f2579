"""Reward functions of a user, good and bad, named in tests as `tests.rewards.sample_rewards:NAME`."""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from queue import SimpleQueue
from typing import Any

from protocols.prompt import Problem

FOREVER = threading.Event()
"""Never set: waiting for it is a hang outside of Python's reach."""

ENTERED: SimpleQueue[str] = SimpleQueue()
LEAVE = threading.Event()

not_a_function = 3


def enters(problem: Problem, completion: str) -> float:
    """Say that it was called, and wait for leave to end."""
    ENTERED.put(completion)
    LEAVE.wait(10)
    return 0.0


def length(problem: Problem, completion: str) -> float:
    """Give the number of characters."""
    return float(len(completion))


async def async_length(problem: Problem, completion: str) -> float:
    """Give the number of characters, after other tasks had a turn."""
    await asyncio.sleep(0)
    return float(len(completion))


async def same_loop(problem: Problem, completion: str) -> float:
    """Give a number that is equal for calls in one event loop, and the length."""
    return float(id(asyncio.get_running_loop()) + len(completion))


def none(problem: Problem, completion: str) -> None:
    """Never apply."""


def long_only(problem: Problem, completion: str) -> float | None:
    """Apply to completions of more than one character."""
    return float(len(completion)) if len(completion) > 1 else None


def boolean(problem: Problem, completion: str) -> bool:
    """Give True for long completions."""
    return len(completion) > 1


def fraction(problem: Problem, completion: str) -> Fraction:
    """Give a number that is no float."""
    return Fraction(len(completion), 2)


class Judge:
    """A callable object with state."""

    async def __call__(self, problem: Problem, completion: str) -> float:
        """Give the number of characters."""
        return float(len(completion))


compute_advantages = Judge()


def raises(problem: Problem, completion: str) -> float:
    """Fail."""
    raise ValueError("no opinion")


async def raises_async(problem: Problem, completion: str) -> float:
    """Fail."""
    raise ValueError("no opinion")


def unprintable(problem: Problem, completion: str) -> float:
    """Fail with an error that cannot even be shown."""

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
    """Raise what asyncio uses to cancel."""
    raise asyncio.CancelledError


def hangs(problem: Problem, completion: str) -> float:
    """Never return, out of reach of interruption."""
    FOREVER.wait()
    return 0.0


def spins(problem: Problem, completion: str) -> float:
    """Never return, in pure Python."""
    while True:
        pass


async def hangs_async(problem: Problem, completion: str) -> float:
    """Never return."""
    await asyncio.get_running_loop().create_future()
    return 0.0


async def blocks_its_loop(problem: Problem, completion: str) -> float:
    """Never return, nor let its event loop turn."""
    FOREVER.wait()
    return 0.0


def gives_nan(problem: Problem, completion: str) -> float:
    """Give no number."""
    return math.nan


def gives_infinity(problem: Problem, completion: str) -> float:
    """Give no finite number."""
    return -math.inf


def gives_huge(problem: Problem, completion: str) -> int:
    """Give a number too large for a float."""
    return 10**400


class BrokenNumber(Fraction):
    """A number without a value."""

    def __float__(self) -> float:
        """Fail."""
        raise RuntimeError("no value")


def gives_broken_number(problem: Problem, completion: str) -> Fraction:
    """Give a number of the user's own making."""
    return BrokenNumber(1, 2)


def gives_text(problem: Problem, completion: str) -> str:
    """Give text that looks like a number."""
    return "1.0"


def gives_list(problem: Problem, completion: str) -> list[float]:
    """Give a list."""
    return [1.0]


def gives_coroutine(problem: Problem, completion: str) -> Any:
    """Forget to await."""
    return async_length(problem, completion)


def one_argument(completion: str) -> float:
    """Break the contract."""
    return 0.0


def moody(problem: Problem, completion: str) -> Any:
    """Fail in a way that the problem's text determines, or give the length."""
    fates: list[Callable[[Problem, str], Any]] = [raises, gives_nan, gives_text, none, hangs, leaves]
    mood = hashlib.sha256(problem.prompt.encode()).digest()[0]
    return fates[mood](problem, completion) if mood < len(fates) else length(problem, completion)
