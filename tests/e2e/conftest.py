"""Two complete runs that several tests inspect."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import Struct

from tests.e2e.pipeline_process import SMALL, RunResult, run

HELD_OUT = 32
"""Held-out problems of the asynchronous run. With few problems, all completions could have the same reward."""

SECRET = "s3cret-api-key-of-these-tests"
"""The API key of the asynchronous run."""

EVALUATED = ("--eval.samples", "2")
"""Settings of both runs that are not settings of the weights."""


class CompletedRun(Struct, frozen=True, kw_only=True):
    """A run that ended with exit status 0."""

    run_dir: Path
    result: RunResult
    steps: int


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    """Return the default asynchronous run of 6 updates."""
    run_dir = tmp_path_factory.mktemp("asynchronous") / "run"
    flags = ("--checkpoint.interval", "2", *EVALUATED, "--server.api-key", SECRET)
    small = (*SMALL[:-1], str(HELD_OUT))
    result = run(run_dir, "--profile", "local-m3", "--steps", "6", *flags, small=small)
    assert result.status == 0, result
    return CompletedRun(run_dir=run_dir, result=result, steps=6)


@pytest.fixture(scope="session")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    """Return the on-policy run of 4 updates without an interruption, whose evaluations are those of `EVALUATED`."""
    run_dir = tmp_path_factory.mktemp("synchronous") / "run"
    result = run(run_dir, "--steps", "4", "--async", "false", *EVALUATED)
    assert result.status == 0, result
    return CompletedRun(run_dir=run_dir, result=result, steps=4)
