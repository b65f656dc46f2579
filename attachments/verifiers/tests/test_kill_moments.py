"""A run with a taskset that is killed at twenty moments: the run itself, or the process that plays the tasks."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from attachments.verifiers.tests.test_profile import GAME
from tests.e2e.child_processes import descendants, kill
from tests.e2e.pipeline_process import LONGEST_SECONDS, Run, assert_recorded, lines, metrics, newest, resume_flag, run
from tests.extras import VERIFIERS

MOMENTS = 20
PLAYS = '"tasks_file":""'
"""Part of the command of the process that plays tasks."""

PATIENCE_SECONDS = 3600.0
"""Upper limit of a start of the run. No assertion depends on it."""


@pytest.mark.slow  # six starts of the run and fifteen of the process
@pytest.mark.needs_extra("verifiers")
def test_a_run_with_a_taskset_that_is_killed_at_twenty_moments_loses_no_group(tmp_path: Path) -> None:
    """Each group ends once over all lives. Episodes of a process that was killed have failed, which is counted."""
    run_dir, choose, killed = tmp_path / "run", random.Random(7), 0
    flags = (*GAME, "--data.verifiers.python", os.environ.get(VERIFIERS, ""), "--eval", "off", "--learner.batch-size",
             "4", "--sampling.group-size", "4", "--checkpoint.interval", "1")  # fmt: skip
    while killed < MOMENTS:
        with Run(
            run_dir, *flags, "--steps", "1000", *resume_flag(run_dir), small=(), patience_seconds=PATIENCE_SECONDS
        ) as running:
            players = choose.randint(2, 4)
            while True:
                wanted = newest(run_dir) + choose.randint(1, 2)
                running.wait_until(lambda: newest(run_dir) >= wanted)  # noqa: B023, called in this iteration only
                if not players or killed == MOMENTS - 1:
                    break
                for pid, command in descendants(running.process.pid).items():
                    if PLAYS in command:
                        kill(pid)
                        players, killed = players - 1, killed + 1
            assert running.kill(after_seconds=choose.uniform(0.0, LONGEST_SECONDS))
            killed += 1
    steps = newest(run_dir) + 2
    result = run(run_dir, *flags, "--steps", str(steps), "--resume", small=())
    assert result.status == 0, result.err
    assert_recorded(run_dir, result.accounting, steps=steps)
    assert sum(line["verifiers/failed"] for line in metrics(run_dir)) > 0
    groups = lines(run_dir / "rollouts.jsonl")
    assert all(group["completions"] for group in groups if group["outcome"] == "trained")
    assert metrics(run_dir)[-1]["verifiers/forked"] == 0
