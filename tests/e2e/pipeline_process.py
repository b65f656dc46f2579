"""Small runs of the program, in processes of their own or in this one, and the files they write."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from tests import model_lanes
from training_run.__main__ import main
from training_run.directory.checkpoints import checkpoint_steps

REPOSITORY = Path(__file__).parents[2]
BATCH = 4
PROBLEMS = Path(__file__).parent / "problems"
FEW_PROBLEMS = ("--data.train", str(PROBLEMS / "train.jsonl"), "--data.heldout", str(PROBLEMS / "heldout.jsonl"))
"""The first problems of the embedded dataset: to render all of them takes as long as the rest of the start."""
SMALL = (
    "--server.port", "0", *FEW_PROBLEMS, "--learner.batch-size", str(BATCH), "--sampling.group-size", "4",
    "--learner.micro-batch-tokens", "1024", "--eval.problems", "4",
)  # fmt: skip
UNEVALUATED = (*SMALL[:-2], "--eval", "off")
"""For runs whose evaluations nobody reads: they are a fourth of a run of one step."""

PRINTED_STEPS = """
[[actors]]
name = "telling"
factory = "tests.e2e.custom_components:StepPrinter"
mode = "tap"
at = "reports"
"""
"""Part of a profile: a line is printed after every step."""
PATIENCE_SECONDS = 240.0
"""Upper limit of a run. No assertion depends on it."""

LONGEST_SECONDS = 0.4
"""Largest time between what a moment waits for and the kill, about that of two steps."""

ACCOUNTING_LINE = re.compile(r"prompted (\d+) = trained (\d+) \+ discarded (\d+) \+ carried over (\d+)")


class GroupAccounting(Struct, frozen=True, kw_only=True):
    """The group accounting line of a run, whose balance holds."""

    prompted: int
    trained: int
    discarded: int
    carried_over: int


class RunResult(Struct, frozen=True, kw_only=True):
    """The exit status and the output of a run."""

    status: int
    out: str
    err: str

    @property
    def accounting(self) -> GroupAccounting:
        """Return the group accounting line."""
        found = ACCOUNTING_LINE.findall(self.out)
        assert len(found) == 1, f"one line that balances is expected:\n{self.out}\n{self.err}"
        prompted, trained, discarded, carried_over = map(int, found[0])
        assert prompted == trained + discarded + carried_over
        return GroupAccounting(prompted=prompted, trained=trained, discarded=discarded, carried_over=carried_over)


class Run:
    """`python pipeline.py` in a process of its own with redirected output. The `with` block kills it at its end."""

    def __init__(
        self,
        run_dir: Path,
        *flags: str,
        environment: dict[str, str] | None = None,
        small: tuple[str, ...] = SMALL,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.run_dir = run_dir
        self._err = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115, closed by __exit__
        self.process = subprocess.Popen(
            [sys.executable, "pipeline.py", "--run-dir", str(run_dir), *lane_flags(flags), *small, *flags],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONIOENCODING": "utf-8"} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
            encoding="utf-8",
        )
        self._out: list[str] = []
        self._watch = threading.Timer(patience_seconds, self.process.kill)
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._err.close()

    def wait_for(self, text: str) -> str:
        """Read until a line contains `text`, and return the line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._out.append(line)
            if text in line:
                return line
        raise AssertionError(f"the run ended before it printed {text!r}: {self.finish()}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def finish(self) -> RunResult:
        """Read to the end of the output."""
        assert self.process.stdout is not None
        self._out += self.process.stdout.readlines()
        status = self.process.wait()
        self._err.seek(0)
        return RunResult(status=status, out="".join(self._out), err=self._err.read())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is checked every millisecond."""
        while not condition():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.001)
                raise AssertionError(f"the run ended before the condition held: {self.finish()}")

    def kill(self, *, after_seconds: float) -> bool:
        """Send SIGKILL after this time, and return False if the run ended before."""
        try:
            self.process.wait(after_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return True
        return False


def run(
    run_dir: Path, *flags: str, environment: dict[str, str] | None = None, small: tuple[str, ...] = SMALL
) -> RunResult:
    """Run to the end: in this process, which has loaded the modules, or with an environment in a process of its own."""
    if environment is not None:
        with Run(run_dir, *flags, environment=environment, small=small) as running:
            return running.finish()
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["--run-dir", str(run_dir), *lane_flags(flags), *small, *flags])
    return RunResult(status=status, out=out.getvalue(), err=err.getvalue())


def continued(whole: Path, run_dir: Path, *flags: str, step: int) -> bytes:
    """Run a copy of a complete run again from its checkpoint of this step; return the bytes of the final adapter."""
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "adapters")
    result = run(run_dir, *flags, "--resume-step", str(step), small=())
    assert result.status == 0, result.err
    return adapter(run_dir)


def killed_and_continued(run_dir: Path, *flags: str, step: int) -> bytes:
    """Kill a run when its checkpoint of this step is there, and resume it; return the bytes of the final adapter."""
    with Run(run_dir, *flags, small=()) as running:
        running.wait_until(lambda: (run_dir / "checkpoints" / f"step-{step:06d}").is_dir())
        running.kill(after_seconds=0.0)
    result = run(run_dir, *flags, "--resume", small=())
    assert result.status == 0, result.err
    return adapter(run_dir)


def newest(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; -1 without one."""
    return max(checkpoint_steps(run_dir / "checkpoints"), default=-1)


def killed_at_moments(run_dir: Path, *flags: str, moments: int, choose: random.Random) -> bytes:
    """Kill a run at random moments, resume what each kill leaves, and let the run end; return the final adapter.

    While it starts, between steps and in them. The run must have steps for all moments: up to two for each, and those
    of `LONGEST_SECONDS`.
    """
    for _ in range(moments):
        wanted = newest(run_dir) + choose.randint(0, 2)
        with Run(run_dir, *flags, *resume_flag(run_dir), small=()) as running:
            running.wait_until(lambda: newest(run_dir) >= wanted)  # noqa: B023, called in this iteration only
            assert running.kill(after_seconds=choose.uniform(0.0, LONGEST_SECONDS))
    result = run(run_dir, *flags, "--resume", small=())
    assert result.status == 0, result.err
    return adapter(run_dir)


def lane_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags of the model in the current lane; none if `flags` choose a model."""
    return () if any(flag.startswith("--model") for flag in flags) else model_lanes.flags()


def resume_flag(run_dir: Path) -> tuple[str, ...]:
    """Return `--resume` if the directory holds a run; a start that was cut off early leaves an empty directory."""
    holds_run = run_dir.is_dir() and any(not entry.name.startswith(".") for entry in run_dir.iterdir())
    return ("--resume",) if holds_run else ()


def lines(path: Path) -> list[dict[str, Any]]:
    """Return all records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def adapter(run_dir: Path) -> bytes:
    """Return the bytes of the final adapter."""
    return (run_dir / "adapters" / "adapters.safetensors").read_bytes()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return lines(run_dir / "metrics.jsonl")


def assert_recorded(run_dir: Path, accounting: GroupAccounting, *, steps: int) -> None:
    """Check that the files agree with the group accounting: each step once, each group once, and equal counts."""
    recorded = metrics(run_dir)
    assert [line["step"] for line in recorded] == list(range(1, steps + 1))
    groups = lines(run_dir / "rollouts.jsonl")
    assert len({group["group_id"] for group in groups}) == len(groups) == accounting.trained + accounting.discarded
    trained = [group for group in groups if group["outcome"] == "trained"]
    assert len(trained) == accounting.trained == sum(line["groups/trained"] for line in recorded)
    assert accounting.discarded == sum(line["groups/discarded"] for line in recorded)
    for line in recorded:
        result = [group for group in groups if group["step"] == line["step"]]
        assert len(result) == line["groups/trained"] + line["groups/discarded"]
