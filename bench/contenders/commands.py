"""Commands as users run them, each timed from process start to exit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.contenders.worker import Case, MeasureOnce, serve

ROOT = Path(__file__).resolve().parents[2]


def serve_commands(commands: Mapping[str, Sequence[str]], *, semantics: str, packages: Sequence[str]) -> None:
    """Answer cases that name one of the commands under `until`; commands are arguments of this interpreter."""

    def prepare(case: Case) -> MeasureOnce:
        arguments = commands[case["until"]]
        return lambda: run(arguments)

    serve(prepare, semantics=semantics, packages=packages)


def run(arguments: Sequence[str]) -> dict[str, float]:
    """Wall seconds and processor seconds. Raises RuntimeError if the command fails."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: exit status {process.returncode}")
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime}
