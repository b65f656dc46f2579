"""SIGKILL at random times: the directory always holds a complete checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from clotho.storage.atomic_files import remove_leftovers
from training_run.directory.checkpoints import latest_checkpoint, read_state

WRITERS = """
import os, sys
from pathlib import Path
import mlx.core as mx
from training_run.directory.checkpoints import Snapshot, write_checkpoint
from tests.training_run.directory.made_checkpoints import ADAPTER, state
directory = Path(sys.argv[1])
for line in sys.stdin:
    if writer := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]), flush=True)
        continue
    print(os.getpid(), flush=True)
    tree = {"w": mx.random.normal((300, 1000))}
    mx.eval(tree)
    step = int(line)
    while True:
        step += 1
        write_checkpoint(directory, Snapshot(parameters=tree, optimizer=tree, state=state(step),
                         adapter_config=ADAPTER), keep_last=1)
        print(step, flush=True)
"""
"""Forks a process that writes checkpoints, for every line with the step before the first checkpoint.

Prints the process ID, the steps of the written checkpoints, and the exit status.
"""
KILLS = 5


def test_a_kill_never_loses_a_finished_checkpoint(tmp_path: Path) -> None:
    """After a write was reported, that checkpoint or a newer one is complete."""
    chance = random.Random(0)
    step = 0
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    ) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for _ in range(KILLS):
            writers.stdin.write(f"{step}\n")
            writers.stdin.flush()
            writer, reported = int(writers.stdout.readline()), int(writers.stdout.readline())
            threading.Event().wait(chance.uniform(0.0, 0.15))
            os.kill(writer, signal.SIGKILL)
            while (line := int(writers.stdout.readline())) > 0:
                reported = line
            assert line == -signal.SIGKILL
            remove_leftovers(tmp_path)
            found = latest_checkpoint(tmp_path)
            assert found.path is not None
            assert read_state(found.path).step >= reported
            assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
            step = read_state(found.path).step
