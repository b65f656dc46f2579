"""The worker process of a reward function: imports the function, and answers one call at a time over a socket.

`worker_process` starts it as a guarded process. The worker sends `Ready` or `Refused`, then one
`Answer` or `Failure` for each `CallRequest`. It ends when the socket closes, and when its parent process ends.

A synchronous function is called in the main thread. An asynchronous function is called in an event loop that exists for
the life of the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os

import msgspec
from msgspec import Struct

from clotho.rewards.registry import GroupParameters, RewardOptions, group_parameters, is_async, load_reward
from clotho.rewards.values import Completions, Reward, RewardError, Values, await_all, call_all
from protocols.errors import ProfileError
from training_run.supervision.guarded_process import (
    ProcessSettings,
    WorkerChannel,
    end_descendants,
    exit_if_forked,
    guard,
)

ORPHAN_SECONDS = 5.0
"""Time from the time limit of a call to the end of a process that nobody ended."""


class WorkerSettings(ProcessSettings, frozen=True, kw_only=True):
    """Parent -> worker. name: of the function. options: what it is loaded with. file: as of `load_reward`."""

    name: str
    options: RewardOptions
    file: str = ""


class CallRequest(Struct, frozen=True, kw_only=True):
    """Parent -> worker. number: serial number of the call."""

    number: int
    completions: Completions


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The function is imported. group: parameters of a function of a group."""

    asynchronous: bool
    group: GroupParameters | None


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The function cannot be used; `message` is the text of the ProfileError."""

    message: str


class Answer(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The values of a call."""

    number: int
    values: Values


class Failure(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The call failed. message: text of the RewardError. traceback: of the function's exception."""

    number: int
    message: str
    traceback: str = ""


WorkerMessage = Ready | Refused | Answer | Failure


def main(settings_json: str) -> None:
    """Serve calls until the parent closes the socket."""
    settings = msgspec.json.decode(settings_json, type=WorkerSettings)
    process = os.getpid()
    guard(settings)
    channel = WorkerChannel(settings.descriptor)
    try:
        function = load_reward(settings.name, settings.options, file=settings.file)
    except ProfileError as error:
        exit_if_forked(process)
        channel.send(Refused(message=str(error)))
        return
    exit_if_forked(process)
    group, asynchronous = group_parameters(function), is_async(function)
    reward = Reward(name=settings.name, function=function, group=group, max_steps=settings.options.max_steps)
    channel.send(Ready(asynchronous=asynchronous, group=group))
    if asynchronous:
        asyncio.run(_serve_asynchronous(channel, reward, settings.options.timeout_seconds))
    else:
        _serve(channel, reward, settings.options.timeout_seconds)
    end_descendants(process)


def _serve(channel: WorkerChannel, reward: Reward, timeout_seconds: float) -> None:
    with open(os.devnull, "w") as nowhere:
        while (call := channel.receive(CallRequest)) is not None:
            # Ends a process that holds the GIL forever and has lost its parent; it needs no GIL itself.
            faulthandler.dump_traceback_later(timeout_seconds + ORPHAN_SECONDS, exit=True, file=nowhere)
            channel.send(_answer(reward, call))
            faulthandler.cancel_dump_traceback_later()


def _answer(reward: Reward, call: CallRequest) -> Answer | Failure:
    try:
        return Answer(number=call.number, values=call_all(reward, call.completions))
    except RewardError as error:
        return Failure(number=call.number, message=str(error), traceback=error.traceback)


async def _serve_asynchronous(channel: WorkerChannel, reward: Reward, timeout_seconds: float) -> None:
    """Serve calls in an event loop, which also runs between calls."""
    async for call in channel.arriving(CallRequest):
        channel.send(await _answer_asynchronous(reward, call, timeout_seconds))


async def _answer_asynchronous(reward: Reward, call: CallRequest, timeout_seconds: float) -> Answer | Failure:
    try:
        async with asyncio.timeout(timeout_seconds):
            return Answer(number=call.number, values=await await_all(reward, call.completions))
    except TimeoutError:
        return Failure(number=call.number, message=f"reward {reward.name} took longer than {timeout_seconds:g} s")
    except RewardError as error:
        return Failure(number=call.number, message=str(error), traceback=error.traceback)
