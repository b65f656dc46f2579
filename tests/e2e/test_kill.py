"""A run that is killed with SIGKILL and resumed loses no group."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clotho.storage.atomic_files import UNFINISHED
from tests.e2e.conftest import EVALUATED
from tests.e2e.pipeline_process import BATCH, PRINTED_STEPS, Run, RunResult, assert_recorded, lines, resume_flag, run
from training_run.directory.checkpoints import latest_checkpoint, read_state

TELLING = f'extends = "local-m3"\n{PRINTED_STEPS}'

STARTING_SECONDS, STEP_SECONDS = 3.0, 0.3
"""Some kills come within so long of the start, the others within so long of a line that the run printed."""


CHECKPOINT_SECONDS = 0.02
"""Other kills come within so long of the moment at which a checkpoint begins to be written, or is found complete."""


def killed_and_resumed(
    run_dir: Path, *flags: str, kills: int, record_property: Callable[[str, object], None]
) -> RunResult:
    """Run with kills at random moments: during the start, up to two steps after it, or while a checkpoint is written.

    Records how many kills left an unfinished checkpoint, and from which steps the run resumed.
    """
    profile = run_dir.parent / "telling.toml"
    profile.write_text(TELLING)
    lives = ("--profile", str(profile), *flags)
    moments = random.Random(kills)
    during_checkpoints, resumed = 0, []
    for _ in range(kills):
        before = checkpoints(run_dir)
        with Run(run_dir, *lives, *resume_flag(run_dir)) as running:
            steps = moments.choice([None, None, 0, 1, 2])
            if steps is None and moments.random() < 0.5:
                assert running.kill(after_seconds=moments.uniform(0.0, STARTING_SECONDS))
            elif steps is None:
                running.wait_until(partial(has_new_checkpoint, run_dir, before))
                assert running.kill(after_seconds=moments.uniform(0.0, CHECKPOINT_SECONDS))
            else:
                running.wait_for("machine")
                for _ in range(steps):
                    running.wait_for("step reported")
                assert running.kill(after_seconds=moments.uniform(0.0, STEP_SECONDS))
        during_checkpoints += any(name.startswith(".") for name in checkpoints(run_dir) - before)
        found = latest_checkpoint(run_dir / "checkpoints")
        assert found.warnings == ()
        resumed.append(read_state(found.path).step if found.path else 0)
    record_property("kills_during_checkpoints", during_checkpoints)
    record_property("resumed_from_steps", resumed)
    return run(run_dir, *lives, *resume_flag(run_dir))


def has_new_checkpoint(run_dir: Path, before: set[str]) -> bool:
    """Return whether there is a checkpoint, complete or not, that was not there before."""
    return bool(checkpoints(run_dir) - before)


def checkpoints(run_dir: Path) -> set[str]:
    """Return the names of the complete checkpoints, and, with a dot in front, of the unfinished ones."""
    patterns = ("step-*", f".step-*{UNFINISHED}*")
    return {path.name for pattern in patterns for path in (run_dir / "checkpoints").glob(pattern)}


def check_result(run_dir: Path, result: RunResult, *, steps: int) -> None:
    """Check the exit status, and the group accounting over all starts."""
    assert result.status == 0, result
    assert " lacks " not in result.out, "no history lacks what a checkpoint covers"
    accounting = result.accounting
    assert (accounting.prompted, accounting.carried_over) == (steps * BATCH, 0)
    assert_recorded(run_dir, accounting, steps=steps)
    assert sorted(group["group_id"] for group in lines(run_dir / "rollouts.jsonl")) == list(range(steps * BATCH))
    measured = [line["step"] for line in lines(run_dir / "evaluations.jsonl")]
    assert measured.count(0) == 1, "the base policy is measured once, in whichever life gets round to it"
    assert lines(run_dir / "metrics.jsonl")[-1]["step"] == steps
    assert measured[-1] == steps


def adapter_settings(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of the final adapter without the id of the run."""
    settings = json.loads((run_dir / "adapters" / "adapter_config.json").read_text())
    return {key: value for key, value in settings.items() if key != "run_id"}


@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_synchronous_run_ends_with_identical_bytes(
    tmp_path: Path, kills: int, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """The group accounting balances over all starts. Adapter and final evaluation equal those without interruption."""
    whole, steps = tmp_path / "whole", 4 * kills
    if kills == 1:
        synchronous = request.getfixturevalue("synchronous")
        whole, steps = synchronous.run_dir, synchronous.steps
    flags = ("--steps", str(steps), "--async", "false", "--checkpoint.interval", "1", *EVALUATED)
    if kills > 1:
        assert run(whole, *flags).status == 0
    result = killed_and_resumed(tmp_path / "run", *flags, kills=kills, record_property=record_property)
    check_result(tmp_path / "run", result, steps=steps)
    tensors, uninterrupted = (path / "adapters/adapters.safetensors" for path in (tmp_path / "run", whole))
    assert tensors.read_bytes() == uninterrupted.read_bytes()
    assert adapter_settings(tmp_path / "run") == adapter_settings(whole)
    found, expected = (lines(path / "evaluations.jsonl")[-1] for path in (tmp_path / "run", whole))
    assert found["samples"] == 2
    assert [found[key] for key in found if "time/" not in key] == [expected[key] for key in found if "time/" not in key]


@pytest.mark.slow
def test_a_killed_synchronous_run_with_a_curriculum_chooses_the_same_problems(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Replaced groups included. Adapter, problems and evidence equal those of an uninterrupted run bit for bit."""
    flags = ("--steps", "24", "--async", "false", "--checkpoint.interval", "1", "--data.curriculum", "success_rate",
             "--data.curriculum.sharpness", "4", "--learner.objective", "dapo")  # fmt: skip
    assert run(tmp_path / "whole", *flags).status == 0
    result = killed_and_resumed(tmp_path / "run", *flags, kills=6, record_property=record_property)
    assert result.status == 0, result
    assert result.accounting.carried_over == 0
    tensors, uninterrupted = (tmp_path / name / "adapters/adapters.safetensors" for name in ("run", "whole"))
    assert tensors.read_bytes() == uninterrupted.read_bytes()
    groups = [
        {line["group_id"]: (line["prompt"], line["outcome"]) for line in lines(tmp_path / name / "rollouts.jsonl")}
        for name in ("run", "whole")
    ]
    assert groups[0] == groups[1]
    checkpoints = [tmp_path / name / "checkpoints" / "step-000024" for name in ("run", "whole")]
    evidence = [(path / "curriculum.part.msgpack").read_bytes() for path in checkpoints]
    assert evidence[0] == evidence[1]


@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_asynchronous_run_loses_no_group(
    tmp_path: Path, kills: int, record_property: Callable[[str, object], None]
) -> None:
    """Groups in flight are prompted again, and each ends exactly once."""
    flags = ("--steps", str(4 * kills), "--checkpoint.interval", "1", "--checkpoint.keep-last", "1")
    result = killed_and_resumed(tmp_path / "run", *flags, kills=kills, record_property=record_property)
    check_result(tmp_path / "run", result, steps=4 * kills)
