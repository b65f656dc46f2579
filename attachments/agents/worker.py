"""The worker process of an environment: leads episodes, and answers one request of the run at a time.

An episode is a task that waits between two messages. A worker therefore has many episodes, and computes one at a time:
if it ends or hangs, the episode of the last request is the cause.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from typing import Any

import msgspec

from attachments.agents.environment import described, play, required_columns
from attachments.agents.messages import (
    Answer,
    Begin,
    Continue,
    Describe,
    Described,
    EnvironmentSettings,
    Forget,
    Loaded,
    Request,
)
from clotho.user_code import load_named
from protocols.errors import ProfileError, error_text
from training_run.episodes.messages import Ask, EpisodeEnded, Failed, PolicyTurn
from training_run.supervision.guarded_process import WorkerChannel, end_descendants, exit_if_forked, guard

MAX_TRACEBACK = 16_000
REQUESTS: Any = Request


class PlayedEpisode:
    """One episode in the worker: a task that waits for the policy's next message."""

    def __init__(self, target: Any, begin: Begin) -> None:
        self._events: asyncio.Queue[Answer] = asyncio.Queue()
        self._turns: asyncio.Queue[PolicyTurn] = asyncio.Queue()
        self._task = asyncio.create_task(self._play(target, begin))

    async def _play(self, target: Any, begin: Begin) -> None:
        try:
            self._events.put_nowait(await play(target, begin.problem, self._ask))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the worker
            text = f"{type(error).__name__}: {error_text(error)}"
            end = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
            self._events.put_nowait(Failed(message=text, traceback=end))

    async def _ask(self, ask: Ask) -> PolicyTurn:
        self._events.put_nowait(ask)
        return await self._turns.get()

    def go_on(self, turn: PolicyTurn) -> None:
        """Pass a message of the policy on."""
        self._turns.put_nowait(turn)

    async def event(self, limit_seconds: float) -> Answer:
        """Wait for what the episode does next."""
        try:
            async with asyncio.timeout(limit_seconds):
                return await self._events.get()
        except TimeoutError:
            self.cancel()
            return Failed(message=f"took longer than {limit_seconds:g} s")

    def cancel(self) -> None:
        """End the episode."""
        self._task.cancel()


async def serve(channel: WorkerChannel, target: Any, limit_seconds: float) -> None:
    """Answer requests until the run closes the socket."""
    episodes: dict[int, PlayedEpisode] = {}
    process = os.getpid()
    async for request in channel.arriving(REQUESTS):
        found = await answer(request, episodes, target, limit_seconds)
        exit_if_forked(process)
        channel.send(found)


async def answer(request: Request, episodes: dict[int, PlayedEpisode], target: Any, limit_seconds: float) -> Answer:
    """Return the answer to a request."""
    match request:
        case Describe():
            try:
                return Described(tools=described(target), required=required_columns(target))
            except Exception as error:
                return Failed(message=error_text(error))
        case Forget():
            if (episode := episodes.pop(request.number, None)) is not None:
                episode.cancel()
            return EpisodeEnded()
        case Begin():
            episodes[request.number] = PlayedEpisode(target, request)
        case Continue():
            episodes[request.number].go_on(request.turn)
    found = await episodes[request.number].event(limit_seconds)
    if not isinstance(found, Ask):
        del episodes[request.number]
    return found


def main(settings_json: str) -> None:
    """Serve episodes until the run closes the socket."""
    settings = msgspec.json.decode(settings_json, type=EnvironmentSettings)
    process = os.getpid()
    guard(settings)
    channel = WorkerChannel(settings.descriptor)
    try:
        target = load_named(settings.environment, "agent.environment")
    except ProfileError as error:
        channel.send(Failed(message=str(error)))
        return
    exit_if_forked(process)
    channel.send(Loaded())
    asyncio.run(serve(channel, target, settings.step_seconds))
    end_descendants(process)
