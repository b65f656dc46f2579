"""Environments of the tests. Uses only the standard library, as those of users may."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any


class Calculator:
    """Tools, and a reward for the right answer."""

    def reset(self, target: int = 0, greeting: str | None = None) -> str | None:
        """Begin."""
        self.target, self.reward, self.done = target, 0.0, False
        return greeting

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    async def submit(self, value: int) -> str:
        """Submit the result.

        Args:
            value: the result.
        """
        await asyncio.sleep(0)
        self.reward, self.done = float(value == self.target), True
        return "thanks"


class Talk:
    """A conversation without tools; what it does depends on the column `does`."""

    def reset(self, does: str = "", **_: Any) -> None:
        """Begin."""
        self.does, self.turns = does, 0

    def step(self, text: str) -> str | None:
        """Answer, or misbehave."""
        self.turns += 1
        match self.does:
            case "raises":
                raise RuntimeError("no")
            case "hangs":
                time.sleep(600)
            case "exits":
                os._exit(3)
            case "forks":
                if os.fork() == 0:
                    return "from the copy"
            case "floods":
                sys.stdout.write("x" * 200_000 + "\n")
        return f"{self.does} {self.turns}: {text}"

    def reward(self) -> float:
        """Return the number of turns, or what is no number."""
        return float("nan") if self.does == "nan" else float(self.turns)


class Drifting(Talk):
    """An environment that does not repeat its answers, and whose worker an episode can end."""

    def step(self, text: str) -> str | None:
        """Answer with the number of the process."""
        return f"{os.getpid()}" if self.does != "exits" else super().step(text)


class Overrated(Talk):
    """Gives more rewards than the policy writes messages."""

    turn_rewards = (1.0,) * 9


class Graded(Talk):
    """Gives the policy the number that each of its messages is."""

    def step(self, text: str) -> str | None:
        """Note the number."""
        self.turn_rewards = [*getattr(self, "turn_rewards", ()), float(text)]
        return super().step(text)


async def twice(problem: Any, chat: Any) -> float:
    """Lead a conversation: two questions."""
    first = await chat("one?")
    second = await chat("two?")
    return len(first.content) + len(second.content) / 10


async def summarizes(problem: Any, chat: Any) -> float:
    """Begin the conversation anew after two messages, with a summary of them."""
    await chat("one?")
    second = await chat("two?")
    summary = {"role": "assistant", "content": f"I said {second.content}"}
    await chat("go", summary, "three?", begin=True)
    return 3.0


async def silent(problem: Any, chat: Any) -> float:
    """Ask twice without a message."""
    await chat()
    await chat()
    return 1.0


async def odd(problem: Any, chat: Any) -> float:
    """Send a message without content."""
    await chat()
    await chat({"role": "user"})
    return 1.0


async def endless(problem: Any, chat: Any) -> float:
    """Ask for ever."""
    while True:
        await chat("more?")


def double(value: int) -> int:
    """Double a number.

    Args:
        value: the number.
    """
    return 2 * value


TOOLS = [double]


class Needing:
    """An environment that needs a column."""

    def reset(self, colour: str, *, size: int = 1, **_: Any) -> None:
        """Begin."""


def needing() -> Needing:
    """Return an object."""
    return Needing()


class Undescribed:
    """A tool without types."""

    def tool(self, value):  # type: ignore[no-untyped-def]
        """Do."""
