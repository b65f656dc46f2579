"""Makes rollout workers return wrong data: Python imports this module at its start if its directory is on the path.

A fault is a file of the directory `CLOTHO_TEST_FAULTS`, named like a function below. The first worker that replies
after the file was created takes the fault: it renames the file to `NAME.PID`. While that file exists, this worker
changes all of its replies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS = os.environ.get("CLOTHO_TEST_FAULTS")
MODULE = "attachments.cluster.worker_process"


def malformed(reply: bytes) -> bytes:
    """Return half of the message."""
    return reply[: len(reply) // 2]


def fingerprint(reply: bytes) -> bytes:
    """Name other weights."""
    return _changed(reply, lambda answer: answer.update(fingerprints=dict.fromkeys(answer["fingerprints"], "0" * 64)))


def shapes(reply: bytes) -> bytes:
    """Drop a completion."""
    return _changed(reply, lambda answer: answer["completions"].pop())


def tokens(reply: bytes) -> bytes:
    """Name a token that no vocabulary contains."""

    def change(answer: dict[str, Any]) -> None:
        for completion in answer["completions"]:
            completion["tokens"] = [10**9] * len(completion["tokens"])

    return _changed(reply, change)


def logprobs(reply: bytes) -> bytes:
    """Subtract 2 nats from every log-probability."""

    def change(answer: dict[str, Any]) -> None:
        for completion in answer["completions"]:
            completion["logprobs"] = [value - 2.0 for value in completion["logprobs"]]

    return _changed(reply, change)


def _changed(reply: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    import msgspec

    message = msgspec.msgpack.decode(reply, strict=False)
    if "answer" in message:
        change(message["answer"])
    return msgspec.msgpack.encode(message)


def _taken_fault() -> Callable[[bytes], bytes] | None:
    """Return the fault of this process, or take one that has no process."""
    for fault in (malformed, fingerprint, shapes, tokens, logprobs):
        own = Path(str(FAULTS), f"{fault.__name__}.{os.getpid()}")
        try:
            Path(str(FAULTS), fault.__name__).rename(own)
        except FileNotFoundError:
            if not own.exists():
                continue
        return fault
    return None


class _Finder(MetaPathFinder):
    """Changes the class of rollout workers when its module is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the usual specification of the module, with another loading step."""
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                outcome = module.RolloutWorker.outcome

                async def changed(self: Any, turn: int, position: int) -> bytes:
                    reply: bytes = await outcome(self, turn, position)
                    fault = _taken_fault()
                    return fault(reply) if fault else reply

                module.RolloutWorker.outcome = changed

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if FAULTS:
    sys.meta_path.insert(0, _Finder())
