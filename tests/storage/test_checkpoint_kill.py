"""SIGKILL at random times: the directory always holds a complete checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from clotho.storage.atomic_files import remove_leftovers
from clotho.storage.checkpoints import latest_checkpoint, read_state

WRITER = """
import sys
from pathlib import Path
import mlx.core as mx
from clotho.storage.checkpoints import Snapshot, write_checkpoint
from tests.storage.made_checkpoints import ADAPTER, state
directory, step = Path(sys.argv[1]), int(sys.argv[2])
tree = {"w": mx.random.normal((300, 1000))}
mx.eval(tree)
while True:
    step += 1
    write_checkpoint(directory, Snapshot(parameters=tree, optimizer=tree, state=state(step), adapter_config=ADAPTER),
                     keep_last=1)
    print(step, flush=True)
"""
KILLS = 5


def test_a_kill_never_loses_a_finished_checkpoint(tmp_path: Path) -> None:
    """After a write was reported, that checkpoint or a newer one is complete."""
    chance = random.Random(0)
    step = 0
    for _ in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(step)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        assert writer.stdout is not None
        reported = int(writer.stdout.readline())
        try:
            writer.wait(timeout=chance.uniform(0.0, 0.15))
        except subprocess.TimeoutExpired:
            writer.send_signal(signal.SIGKILL)
        reported = max([reported, *(int(line) for line in writer.stdout.read().split())])
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        remove_leftovers(tmp_path)
        found = latest_checkpoint(tmp_path)
        assert found.path is not None
        assert read_state(found.path).step >= reported
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        step = read_state(found.path).step
