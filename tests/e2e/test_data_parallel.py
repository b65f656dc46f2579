"""Runs with two ranks over the ring of `mx.distributed`, whose processes are killed and stopped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from attachments.ranks.supervision import CONNECTION, RANK
from tests.e2e.pipeline_process import REPOSITORY, SMALL, RunResult, assert_recorded
from tests.e2e.pipeline_process import run as run_alone

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 600.0
"""Upper limit of a run. No assertion depends on it."""

FLAGS = ("--eval.interval", "0", "--checkpoint.interval", "2")


def free_port() -> int:
    """Return a port such that it and the next one are free."""
    while True:
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            second.bind(("127.0.0.1", port + 1))
            return port


class Launched:
    """`mlx.launch` with two ranks of a run. All its processes end with the `with` block."""

    def __init__(self, run_dir: Path, *flags: str) -> None:
        self.run_dir = run_dir
        self._out = tempfile.TemporaryFile("a+", encoding="utf-8")  # noqa: SIM115, closed by __exit__; its readers move no writer
        launcher = Path(sys.executable).with_name("mlx.launch")
        self.process = subprocess.Popen(
            [
                *(str(launcher), "-n", "2", "--backend", "ring", "--starting-port", str(free_port()), "--"),
                *(sys.executable, "pipeline.py", "--run-dir", str(run_dir), *SMALL, *FLAGS, *flags),
            ],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.process.pid).children(recursive=True)
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._out.close()

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank, which its supervisor has started."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                variables = process.environ()
                if CONNECTION in variables and variables[RANK] == str(number) and "pipeline.py" in process.cmdline():
                    return process
        raise AssertionError(f"rank {number} has no process: {self.output()}")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        due = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < due, self.output()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
                raise AssertionError(f"the run ended before the condition held: {self.output()}")

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is recorded."""
        path = self.run_dir / "metrics.jsonl"
        self.wait_until(lambda: path.is_file() and len(path.read_bytes().splitlines()) >= step)

    def finish(self) -> RunResult:
        """Wait for the end."""
        status = self.process.wait(PATIENCE_SECONDS)
        return RunResult(status=status, out=self.output(), err="")

    def output(self) -> str:
        """Return the output so far."""
        self._out.seek(0)
        return self._out.read()


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a name."""
    found = [json.loads(line) for line in (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in found if event["event"] == name]


def test_two_ranks_learn_the_weights_of_one(tmp_path: Path) -> None:
    """The adapters differ by less than 1e-6 of their norm, with a reference policy and several optimizer steps."""
    flags = ("--steps", "3", "--async", "false", "--learner.kl-penalty", "loss", "--learner.num-minibatches", "2")
    alone = run_alone(tmp_path / "one", *FLAGS, *flags)
    assert alone.status == 0, alone.err
    with Launched(tmp_path / "two", *flags) as running:
        together = running.finish()
    assert together.status == 0, together.out
    assert events(tmp_path / "two", "ranks_joined")[0]["ranks"] == 2
    one, two = (load_file(tmp_path / name / "adapters" / "adapters.safetensors") for name in ("one", "two"))
    norm = np.sqrt(sum(float(np.square(array).sum()) for array in one.values()))
    difference = np.sqrt(sum(float(np.square(array - two[name]).sum()) for name, array in one.items()))
    assert norm > 0
    assert difference < 1e-6 * norm


def test_a_rank_gets_its_share_of_the_work(tmp_path: Path) -> None:
    """`distributed.shares`; every line of metrics.jsonl has the work of each rank."""
    flags = ("--steps", "3", "--distributed.shares", "[1.0, 3.0]")
    with Launched(tmp_path / "run", *flags) as running:
        result = running.finish()
    assert result.status == 0, result.out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        first, second = line["learner_ranks"]["0"], line["learner_ranks"]["1"]
        assert 0 < 1.5 * first["positions"] < second["positions"]
        assert second["bytes_sent"] > 0
        assert line["time/wait_for_ranks"] > 0


@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL), (0, signal.SIGSTOP)],
    ids=["rank 1 killed", "rank 1 stopped", "rank 0 killed", "rank 0 stopped"],
)
def test_a_run_goes_on_from_its_checkpoint_after_a_rank_is_lost(
    tmp_path: Path, rank: int, number: signal.Signals, record_property: Callable[[str, object], None]
) -> None:
    """The loss is reported with the rank, every group ends once, and every step is recorded once."""
    run_dir = tmp_path / "run"
    with Launched(run_dir, "--steps", "8") as running:
        running.wait_for_step(4)
        lost, before = running.rank(rank), time.monotonic()
        lost.send_signal(number)
        running.wait_until(lambda: f"clotho: rank {rank} " in running.output())
        record_property("reported_seconds", time.monotonic() - before)
        result = running.finish()
    assert result.status == 0, result.out
    assert_recorded(run_dir, result.accounting, steps=8)
    assert len(events(run_dir, "ranks_joined")) == 2
    if rank != 0:
        assert [event["rank"] for event in events(run_dir, "rank_lost")] == [rank]


def test_a_run_ends_when_no_restart_is_left(tmp_path: Path) -> None:
    """`distributed.restarts` limits the restarts; the run can be resumed by hand."""
    run_dir = tmp_path / "run"
    with Launched(run_dir, "--steps", "60", "--distributed.restarts", "0") as running:
        running.wait_for_step(2)
        running.rank(1).kill()
        result = running.finish()
    assert "distributed.restarts" in result.out
    again = run_alone(run_dir, *FLAGS, "--steps", "4", "--resume")
    assert again.status == 0, again.err


def test_a_run_of_two_ranks_is_drained_by_a_signal(tmp_path: Path) -> None:
    """SIGTERM to the supervisor of rank 0; the other rank ends with it, and nothing is started again."""
    run_dir = tmp_path / "run"
    with Launched(run_dir, "--steps", "60") as running:
        running.wait_for_step(2)
        supervisor = running.rank(0).parent()
        assert supervisor is not None
        supervisor.terminate()
        result = running.finish()
    assert result.accounting.carried_over == 0
    assert "restart" not in result.out
