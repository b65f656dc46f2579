"""A resumed run continues at its newest intact checkpoint, and reports everything that its files lack."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attachments.dashboard.token_values import token_file, token_files
from protocols.accounting import LedgerState
from protocols.checkpoint import RunState
from protocols.errors import CheckpointError
from protocols.summary import HistoryGap
from tests.training_run.built_context import tiny_profile
from tests.training_run.directory.made_checkpoints import corrupt, snapshot, state
from training_run.directory.checkpoints import record_newest, write_checkpoint
from training_run.directory.run_directory import RunDirectory, open_run
from training_run.profile.schema import Profile
from training_run.start.resume import RestoredHistories, find_resume_point, restore_histories

STEPS, GROUPS = 3, 8
STATE = replace(
    state(STEPS), ledger=LedgerState(all_ended_below=7, ended_above=(9,), trained=6, discarded={"stale": 2}),
    evaluated=(0, 2, 3),
)  # fmt: skip
ENDED = (0, 1, 2, 3, 4, 5, 6, 9)
EVALUATION = {
    "policy_version": 0, "accuracy": 0.25, "accuracy_interval": [0.0, 1.0], "accuracy_by_type": {}, "problems": 2,
    "ungraded": 0, "completion_tokens": 8, "time/evaluation": 0.5, "time/run": 1.0, "final": False,
}  # fmt: skip


def checkpointed(path: Path, *steps: int) -> RunDirectory:
    """Return a run directory that is resumed, with these checkpoints and a line of metrics for each of ten steps."""
    for step in steps:
        write_checkpoint(path / "checkpoints", snapshot(step), keep_last=9)
        record_newest(path / ".newest_checkpoint", step)
    path.mkdir(exist_ok=True)
    write_lines(path / "metrics.jsonl", [{"step": step, "time/run": 1.0} for step in range(1, 11)])
    directory = open_run(path, resume=True, clean=False)
    directory.close()
    return directory


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def refusal(directory: RunDirectory) -> CheckpointError:
    """Return the error of a run that cannot be resumed. Nothing in the directory changes."""
    before = sorted((path, path.stat().st_mtime_ns) for path in directory.path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        find_resume_point(directory)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    assert "--clean" in str(caught.value)
    assert sorted((path, path.stat().st_mtime_ns) for path in directory.path.rglob("*")) == before
    return caught.value


def test_a_run_resumes_at_its_newest_checkpoint(tmp_path: Path) -> None:
    """A new run starts at step 0."""
    found = find_resume_point(checkpointed(tmp_path, 4, 8))
    assert (found.path, found.warnings) == (tmp_path / "checkpoints" / "step-000008", ())
    new = open_run(tmp_path / "new", resume=False, clean=False)
    assert find_resume_point(new).path is None
    new.close()


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    """The one before is used."""
    directory = checkpointed(tmp_path, 4, 8)
    corrupt(tmp_path / "checkpoints" / "step-000008" / "state.json")
    found = find_resume_point(directory)
    assert found.path == tmp_path / "checkpoints" / "step-000004"
    assert ["step-000008" in warning for warning in found.warnings] == [True]


def test_a_run_without_an_intact_checkpoint_is_refused(tmp_path: Path) -> None:
    """It does not start over by itself, because its histories and its training would be lost."""
    directory = checkpointed(tmp_path, 4, 8)
    for step in (4, 8):
        corrupt(tmp_path / "checkpoints" / f"step-{step:06d}" / "state.json")
    assert "step-000008" in str(refusal(directory))
    (tmp_path / ".newest_checkpoint").unlink()
    refusal(directory)


def test_a_run_whose_checkpoints_are_gone_is_refused(tmp_path: Path) -> None:
    """The run directory records that a checkpoint was written, so that a missing directory is noticed."""
    directory = checkpointed(tmp_path, 4, 8)
    shutil.rmtree(tmp_path / "checkpoints")
    assert "step 8" in str(refusal(directory))
    (tmp_path / ".newest_checkpoint").write_bytes(bytes(3))
    refusal(directory)


def test_a_run_that_ended_before_its_first_checkpoint_starts_over_with_a_warning(tmp_path: Path) -> None:
    """The warning has the numbers of steps and groups whose records are dropped. Without records there is none."""
    directory = checkpointed(tmp_path)
    write_lines(directory.rollouts, [{"group_id": 0, "step": 1}])
    found = find_resume_point(directory)
    assert found.path is None
    assert ["10 steps" in warning and "1 group " in warning for warning in found.warnings] == [True]
    directory.metrics.unlink()
    directory.rollouts.unlink()
    assert find_resume_point(directory).warnings == ()


def test_a_run_of_which_only_the_groups_are_left_is_refused(tmp_path: Path) -> None:
    """Checkpoints, the record of the newest one, and the file of the steps are gone, which no kill can cause."""
    directory = checkpointed(tmp_path)
    write_lines(directory.rollouts, [{"group_id": 0, "step": 1}])
    directory.metrics.unlink()
    assert "1 group " in str(refusal(directory))
    write_lines(directory.rollouts, [])
    assert find_resume_point(directory).warnings == ()


def test_a_missing_newest_checkpoint_is_reported(tmp_path: Path) -> None:
    """The run resumes from the one before."""
    directory = checkpointed(tmp_path, 4, 8)
    shutil.rmtree(tmp_path / "checkpoints" / "step-000008")
    found = find_resume_point(directory)
    assert found.path == tmp_path / "checkpoints" / "step-000004"
    assert ["step 8" in warning and "step 4" in warning for warning in found.warnings] == [True]


def test_a_renamed_checkpoint_does_not_become_the_newest(tmp_path: Path) -> None:
    """The name must agree with the state. If there is no other checkpoint, the message has the right name."""
    directory = checkpointed(tmp_path, 4, 8)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-000004").rename(checkpoints / "step-999999")
    found = find_resume_point(directory)
    assert found.path == checkpoints / "step-000008"
    assert ["step-999999" in warning and "step-000004" in warning for warning in found.warnings] == [True]
    shutil.rmtree(checkpoints / "step-000008")
    assert "step-000004" in str(refusal(directory))


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """Return a profile with a rollout log."""
    return tiny_profile(tmp_path)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Return a run directory whose histories are complete up to `STATE`, with lines of later steps."""
    path = tmp_path / "run"
    path.mkdir()
    write_lines(path / "metrics.jsonl", [{"step": step, "time/run": 1.0} for step in range(1, STEPS + 3)])
    write_lines(path / "evaluations.jsonl", [{"step": step, **EVALUATION} for step in (0, 2, 3, 3, 4)])
    groups = [{"group_id": group, "step": 1 + number // 3} for number, group in enumerate(ENDED)]
    write_lines(path / "rollouts.jsonl", [*groups, {"group_id": 8, "step": STEPS + 1}])
    run = open_run(path, resume=True, clean=False)
    run.close()
    return run


def test_complete_histories_are_truncated_without_a_message(directory: RunDirectory, profile: Profile) -> None:
    """The files then end at the step of the checkpoint. An evaluation that ended after the checkpoint is kept."""
    assert restore_histories(directory, STATE, profile) == RestoredHistories()
    assert [len(path.read_bytes().splitlines()) for path in directory.histories[:3]] == [STEPS, 4, GROUPS]


def test_per_token_values_of_later_steps_are_deleted(directory: RunDirectory, profile: Profile) -> None:
    """The resumed run writes them again. A run that starts over deletes all."""
    tokens = directory.path / "tokens"
    tokens.mkdir()
    for step in (STEPS - 1, STEPS, STEPS + 1):
        token_file(tokens, step).touch()
    restore_histories(directory, STATE, profile)
    assert list(token_files(tokens)) == [STEPS - 1, STEPS]
    restore_histories(directory, None, profile)
    assert list(token_files(tokens)) == []


def drop_line(number: int) -> Callable[[Path], object]:
    """Return a function that removes a line of a file."""

    def drop(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))

    return drop


def tear_line(number: int) -> Callable[[Path], object]:
    """Return a function that removes the second half of a line with its newline."""

    def tear(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        lines[number] = lines[number][: len(lines[number]) // 2]
        path.write_bytes(b"".join(lines))

    return tear


def pad(path: Path) -> None:
    """Replace the last covered line of metrics.jsonl and all later ones by NUL bytes and a newline."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: STEPS - 1]) + bytes(4096) + b"\n")


@pytest.mark.parametrize(
    ("name", "damage", "missing", "messages"),
    [
        ("metrics.jsonl", drop_line(1), 1, ["covers: 2"]),
        ("metrics.jsonl", tear_line(0), 2, ["line 1", "covers: 1-2"]),
        ("metrics.jsonl", tear_line(STEPS + 1), 0, [f"line {STEPS + 2}"]),
        ("metrics.jsonl", pad, 1, ["4096 NUL", "covers: 3"]),
        ("metrics.jsonl", Path.unlink, 3, ["is gone"]),
        ("rollouts.jsonl", drop_line(7), 1, ["covers: 9"]),
        ("rollouts.jsonl", Path.unlink, 8, ["covers: 0-6, 9"]),
        ("evaluations.jsonl", drop_line(1), 1, ["covers: 2"]),
        ("evaluations.jsonl", Path.unlink, 3, ["is gone"]),
    ],
)
def test_missing_records_are_reported(
    directory: RunDirectory,
    profile: Profile,
    name: str,
    damage: Callable[[Path], object],
    missing: int,
    messages: list[str],
) -> None:
    """With the file and the steps or groups. Damage after the checkpoint is repaired, and nothing is missing."""
    damage(directory.path / name)
    restored = restore_histories(directory, STATE, profile)
    assert [name in line and message in line for line, message in zip(restored.warnings, messages, strict=True)] == [
        True
    ] * len(messages)
    unit = {"metrics.jsonl": "steps", "rollouts.jsonl": "groups", "evaluations.jsonl": "evaluations"}[name]
    assert restored.gaps == ((HistoryGap(file=name, unit=unit, missing=missing),) if missing else ())
    again = restore_histories(directory, STATE, profile)
    assert again.gaps == restored.gaps, "each resume reports what is missing"
    assert len(again.warnings) == bool(missing), "damage is repaired once"


def test_repeated_and_unknown_records_are_reported(directory: RunDirectory, profile: Profile) -> None:
    """They are kept, and no record is missing."""
    with directory.rollouts.open("a") as file:
        file.write('{"group_id": 3, "step": 1}\n{"group_id": 7, "step": 2}\n')
    restored = restore_histories(directory, STATE, profile)
    assert (len(restored.warnings), restored.gaps) == (2, ())
    assert "more than once: 3" in restored.warnings[0]
    assert restored.warnings[1].endswith(": 7")


@pytest.mark.parametrize(
    "sections",
    [
        {"monitor": {"rollouts": False}},
        {"actors": [{"name": "m", "factory": "m:M", "mode": "replace", "at": "monitor"}]},
    ],
)
def test_histories_that_the_run_does_not_write_are_not_compared(
    directory: RunDirectory, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """The rollout log can be off, and a custom monitor writes files of its own."""
    directory.rollouts.unlink()
    assert restore_histories(directory, STATE, tiny_profile(tmp_path, **sections)) == RestoredHistories()


def test_a_run_that_starts_over_empties_its_histories(directory: RunDirectory, profile: Profile) -> None:
    """There is no checkpoint to compare with."""
    assert restore_histories(directory, None, profile) == RestoredHistories()
    assert [path.read_bytes() for path in directory.histories[:3]] == [b"", b"", b""]


def test_many_missing_records_are_shortened(directory: RunDirectory, profile: Profile) -> None:
    """A message lists at most five ranges."""
    ended = tuple(range(100, 140, 2))
    wide: RunState = replace(STATE, ledger=replace(STATE.ledger, ended_above=ended))
    restored = restore_histories(directory, wide, profile)
    assert "100, 102, 104, 106, 108 and 15 more" in restored.warnings[0]
