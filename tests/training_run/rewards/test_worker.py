"""The program of a worker process: what it sends before the first call."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import json, msgpack

from clotho.rewards.registry import RewardOptions
from training_run.rewards.worker import Ready, Refused, WorkerMessage, WorkerSettings
from training_run.supervision.guarded_process import LENGTH_BYTES, boot


@pytest.mark.parametrize(
    ("code", "message"),
    [("reward = 3", Refused), ("def reward(problem, completion): return 0.0", Ready)],
    ids=["refused", "ready"],
)
def test_a_module_that_forks_during_its_import_answers_once(
    code: str, message: type[WorkerMessage], tmp_path: Path
) -> None:
    """The child ends without an answer of its own, whether the function can be used or not."""
    file = tmp_path / "mine.py"
    file.write_text(f"import os\nos.fork()\n{code}\n")
    ours, theirs = socket.socketpair()
    settings = WorkerSettings(
        name=f"{file}:reward",
        options=RewardOptions(),
        path=sys.path,
        parent=os.getpid(),
        descriptor=theirs.fileno(),
        memory_bytes=2**32,
    )
    with ours, ours.makefile("rb") as received:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", boot("training_run.rewards.worker"), json.encode(settings).decode()],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.shutdown(socket.SHUT_WR)
        with process:
            length = int.from_bytes(received.read(LENGTH_BYTES), "little")
            assert isinstance(msgpack.decode(received.read(length), type=WorkerMessage), message)
            assert received.read() == b""
