"""Custom components: a misbehaving reward, a failing inserted actor, and taps that print their progress."""

from __future__ import annotations

import sys
import threading
import zlib
from typing import Any, NoReturn

import anyio

from protocols.prompt import Problem
from protocols.rollout import Discarded
from protocols.step import StepReport

BEHAVIORS = ("raises", "nan", "hangs", "works", "works", "works")


def reward_behavior(prompt: str) -> str:
    """Return what the misbehaving reward does for a prompt, a pseudo-random function of the prompt."""
    return BEHAVIORS[zlib.crc32(prompt.encode()) % len(BEHAVIORS)]


def misbehaving_reward(problem: Problem, text: str) -> float:
    """Raise, return NaN, hang, or return a pseudo-random number in 0..1."""
    match reward_behavior(problem.prompt):
        case "raises":
            raise RuntimeError("raised by the test")
        case "nan":
            return float("nan")
        case "hangs":
            threading.Event().wait()
    return varied_reward(problem, text)


def varied_reward(problem: Problem, text: str) -> float:
    """Return a pseudo-random number in 0..1."""
    return zlib.crc32(text.encode()) % 100 / 100


def failing_reward(problem: Problem, text: str) -> float:
    """Raise."""
    raise RuntimeError("raised by the test")


class FailingStage:
    """An inserted actor that fails at its third message."""

    def __init__(self, *, name: str, services: Any, inbox: Any, outbox: Any) -> None:
        self.name, self._inbox, self._outbox = name, inbox, outbox

    async def run(self) -> None:
        """Pass two messages on, then raise."""
        passed = 0
        async with self._inbox, self._outbox:
            async for message in self._inbox:
                if passed == 2:
                    raise LookupError("raised by the test")
                await self._outbox.send(message)
                passed += 1


class DroppingStage:
    """An inserted actor that does not send its second group on."""

    def __init__(self, *, name: str, services: Any, inbox: Any, outbox: Any) -> None:
        self.name, self._inbox, self._outbox = name, inbox, outbox

    async def run(self) -> None:
        """Pass all other messages on."""
        received = 0
        async with self._inbox, self._outbox:
            async for message in self._inbox:
                received += 1
                if received != 2:
                    await self._outbox.send(message)


class StuckStage(DroppingStage):
    """An inserted actor that never sends its third group on, and waits for something else than its inbox."""

    async def run(self) -> None:
        """Pass two messages on."""
        async with self._inbox, self._outbox:
            for _ in range(2):
                await self._outbox.send(await self._inbox.receive())
            await anyio.sleep_forever()


class EngineBreaker:
    """A tap on the scored groups. After the first group, every step of the decode engine raises."""

    def __init__(self, *, name: str, services: Any, inbox: Any) -> None:
        self.name, self._inbox, self._engine = name, inbox, services.sampler._engine

    async def run(self) -> None:
        """Break the engine, and read until the groups end."""
        async with self._inbox:
            async for _ in self._inbox:
                self._engine._remove_ended = raise_defect


def raise_defect() -> NoReturn:
    """Fail."""
    raise LookupError("raised by the test")


class StepPrinter:
    """A tap on the reports that prints one line per step."""

    def __init__(self, *, name: str, services: Any, inbox: Any) -> None:
        self.name, self._inbox = name, inbox

    async def run(self) -> None:
        """Tell until the reports end."""
        async with self._inbox:
            async for report in self._inbox:
                if isinstance(report, StepReport):
                    sys.stdout.write("step reported\n")
                    sys.stdout.flush()


class GroupPrinter:
    """A tap on the scored groups that prints one line per group."""

    def __init__(self, *, name: str, services: Any, inbox: Any) -> None:
        self.name, self._inbox = name, inbox

    async def run(self) -> None:
        """Tell until the groups end."""
        async with self._inbox:
            async for one in self._inbox:
                prompt = one.prompt if isinstance(one, Discarded) else one.group.prompt
                sys.stdout.write(f"group scored {prompt.group_id}\n")
                sys.stdout.flush()
