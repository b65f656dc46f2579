"""A run of `local-m3` with everything that observes it, or with nothing of it.

Observed: the default run with its monitor, log files, per-token values, timeline, server and dashboard, and one client
in a process of its own that follows the events of the dashboard. Not observed: no server, no timeline, and in the place
of the monitor an actor that counts tokens, so that nothing is written about the steps.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
from anyio.abc import TaskStatus

from attachments.dashboard import timeline
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from protocols.step import StepReport
from training_run.__main__ import main

OBSERVED = "CLOTHO_BENCH_OBSERVED"
"""Environment variable: `0` for runs that are not observed."""

FIRST = 4
"""Steps before the measurement begins."""

PROFILE = """extends = "local-m3"

[[actors]]
name = "counter"
factory = "bench.contenders.clotho_observed:Counter"
"""
TAP, REPLACEMENT = 'mode = "tap"\nat = "reports"\n', 'mode = "replace"\nat = "monitor"\n'
NOTHING = ("--server", "off", "--monitor.rollouts", "false", "--monitor.token-values-mb", "0")

Step = tuple[float, int]
"""Time of a report, and the tokens of its completions."""

_steps: list[Step] = []


class Counter:
    """Counts the tokens of every step, beside the monitor or in its place."""

    def __init__(self, *, name: str, services: Any, inbox: Any) -> None:
        self.name, self._inbox = name, inbox

    async def run(self) -> None:
        """Count until the reports end."""
        async with self._inbox:
            async for report in self._inbox:
                self._count(report)

    def _count(self, report: object) -> None:
        if isinstance(report, StepReport):
            _steps.append((time.perf_counter(), tokens_of(report)))


def tokens_of(report: StepReport) -> int:
    """Return the number of tokens of the completions that ended with a step."""
    groups: list[Any] = [*(one.scored.group for one in report.trained), *report.discarded]
    return sum(completion.length for group in groups for completion in group.completions)


class Idle:
    """Takes the place of the timeline."""

    name = "timeline"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Do nothing until the end of the run."""
        task_status.started()
        await anyio.sleep_forever()


def prepare(case: Case) -> MeasureOnce:
    """Return a function that runs the program once in this process."""
    run_once = unobserved if os.environ.get(OBSERVED) == "0" else observed
    flags = ("--eval", "off", "--monitor.display", "none", "--async", case["async"], "--steps", str(case["steps"]))

    def once() -> Metrics:
        _steps.clear()
        run_once(flags)
        return {"rate": rate(_steps)}

    return once


def observed(flags: Sequence[str]) -> None:
    """Run with everything, and with a client. Raises RuntimeError if the client received no event."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    client = subprocess.Popen([sys.executable, "-m", "bench.contenders.event_client", port], stdout=subprocess.PIPE)
    try:
        run([*flags, "--server.port", port], TAP)
        events = int(client.communicate(timeout=60)[0] or 0)
    finally:
        client.kill()
        client.wait()
    if not events:
        raise RuntimeError("the client received no event of the dashboard")


def unobserved(flags: Sequence[str]) -> None:
    """Run without monitor, log files, timeline and server."""
    with patch.object(timeline, "timeline_recorder", lambda *_: Idle()):
        run([*flags, *NOTHING], REPLACEMENT)


def run(flags: Sequence[str], mode: str) -> None:
    """Run the program in a temporary run directory. Raises RuntimeError if its exit status is not 0."""
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory, "profile.toml")
        profile.write_text(PROFILE + mode, encoding="utf-8")
        status = main(["--profile", str(profile), "--run-dir", f"{directory}/run", *flags])
    gc.unfreeze()
    if status:
        raise RuntimeError(f"the run ended with status {status}")


def rate(steps: Sequence[Step]) -> float:
    """Return the tokens per second after the first steps."""
    (began, _), *later = steps[FIRST - 1 :]
    return sum(tokens for _, tokens in later) / (later[-1][0] - began)


if __name__ == "__main__":
    # The program imports `Counter` from the module of this name, whose list of steps is not that of `__main__`.
    from bench.contenders import clotho_observed

    serve(clotho_observed.prepare, semantics=SEMANTICS["clotho_observed"], packages=["mlx", "mlx-lm"])
