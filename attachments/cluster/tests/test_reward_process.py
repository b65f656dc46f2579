"""The process of a reward worker, without a cluster: what it answers, and the copy of the function's file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from attachments.cluster.messages import Ended, RewardFunction, RewardMessage, RewardReply
from attachments.cluster.reward_process import RewardProcess
from clotho.rewards.registry import RewardOptions
from clotho.rewards.values import Completions
from tests.rewards.groups import problem
from training_run.rewards.worker import Answer, Failure, Ready, Refused

SOURCE = b"""
import os

def reward(problem, completion):
    print("seen", completion)
    if completion == "last":
        os._exit(3)
    return None if completion == "none" else 1 / len(completion)
"""


def message(reply: bytes) -> RewardMessage:
    """Return the message of a reply."""
    return msgspec.msgpack.decode(reply, type=RewardReply).message


def completions(*texts: str) -> bytes:
    """Return a group with these completions."""
    return msgspec.msgpack.encode(Completions(problem=problem(), texts=texts))


@asynccontextmanager
async def process(name: str, source: bytes | None) -> AsyncIterator[RewardProcess]:
    """Yield the process of a function whose file is in no directory of this machine."""
    function = RewardFunction(
        name=name, options=RewardOptions(), memory_bytes=2**30, file_name="mine.py", source=source
    )
    made = RewardProcess(msgspec.msgpack.encode(function))
    yield made
    if made._process is not None:
        made._process.kill()


async def test_a_function_is_imported_from_the_content_of_its_file() -> None:
    """Values, failures and the end of the process have the forms of local workers; prints are part of the reply."""
    async with process("absent/mine.py:reward", SOURCE) as worker:
        ready = message(await worker.ready())
        assert isinstance(ready, Ready)
        assert not ready.asynchronous
        reply = msgspec.msgpack.decode(await worker.call(completions("ab", "none")), type=RewardReply)
        assert isinstance(reply.message, Answer)
        assert reply.message.values == (0.5, None)
        failure = message(await worker.call(completions("")))
        assert isinstance(failure, Failure)
        assert "absent/mine.py:reward raised ZeroDivisionError" in failure.message
        ended = message(await worker.call(completions("last")))
        assert isinstance(ended, Ended)
        assert "exit status 3" in ended.message


async def test_a_function_that_the_machine_lacks_is_refused() -> None:
    """The message names the function and the module."""
    async with process("module_of_another_machine:reward", None) as worker:
        refused = message(await worker.ready())
    assert isinstance(refused, Refused)
    assert "module_of_another_machine" in refused.message
