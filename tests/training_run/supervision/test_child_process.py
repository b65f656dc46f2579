"""Child processes: one stream for both outputs, and a whole process group that ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import psutil

from training_run.supervision.child_process import end_child, start_child

PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
print(sys.argv[1], file=sys.stderr, flush=True)
time.sleep(600)
"""


async def test_a_child_writes_to_a_file_and_ends_with_its_own_children(tmp_path: Path) -> None:
    """Standard output and standard error are one stream; nothing of the process group stays."""
    path = tmp_path / "output"
    output = os.open(path, os.O_WRONLY | os.O_CREAT)
    child = await start_child([sys.executable, "-c", PARENT, "to stderr"], output=output)
    os.close(output)
    with anyio.fail_after(60):
        while "to stderr" not in path.read_text():  # noqa: ASYNC110 - the process tells nobody
            await anyio.sleep(0.01)
    grandchild = int(path.read_text().split()[0])
    assert psutil.pid_exists(grandchild)
    await end_child(child)
    assert child.returncode is not None
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
