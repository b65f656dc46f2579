"""Resume: finds the checkpoint, restores the run's state, and compares the histories with the checkpoint.

The histories are metrics.jsonl, evaluations.jsonl and rollouts.jsonl. Damage is repaired and reported. Nothing that a
checkpoint covers is lost without a message, and a run whose checkpoints are all lost does not start over by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from clotho.extension import Door, RowsDoor
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.machine import restore_random_state
from clotho.models.policy import Policy
from clotho.storage.atomic_files import copy_file, make_directory, new_directory, sync_directory
from clotho.training.update import PolicyLearner
from protocols.checkpoint import RunState
from protocols.errors import CheckpointError, RunDirectoryError, disk_errors_as
from protocols.evaluation import EvalReport
from protocols.summary import HistoryGap
from training_run.directory.best_checkpoint import INITIAL
from training_run.directory.checkpoints import (
    Checkpoint,
    LatestCheckpoint,
    checkpoint_path,
    checkpoint_steps,
    find_damage,
    latest_checkpoint,
    read_checkpoint,
    read_state,
    record_newest,
    recorded_newest,
    require_same_inputs,
)
from training_run.directory.integer_set import IntegerSet
from training_run.directory.jsonl import Scan, StepRecord, rewrite, scan
from training_run.directory.run_directory import RunDirectory, unbegun_fork
from training_run.directory.run_paths import chosen_checkpoint
from training_run.profile.keys import PROFILE_KEYS, SETTABLE, by_path
from training_run.profile.schema import Profile
from training_run.records.evaluation_history import MetricsRecord
from training_run.records.remedies import new_run_line
from training_run.records.summary import resume_command

REWIND: Door[[RunDirectory, int, Path | None], None] = Door("attachment.rewind")
"""Removes what the attachment has recorded in a run directory about later steps than the second argument.

The third is a directory that keeps what is removed; None: nothing does. Raises OSError.
"""

ATTACHED_MAY_CHANGE: RowsDoor[str] = RowsDoor("attachment.MAY_CHANGE")
"""Keys of attachments, and their beginnings, that a resumed run may change."""

ATTACHED_MAY_DIFFER: Door[[str, Profile, Profile], bool] = Door("attachment.may_differ")
"""Whether a resumed run may have another value of a key beside these, with the old and the new profile."""


class RestoredHistories(Struct, frozen=True, kw_only=True):
    """Result of `restore_histories`. gaps: records that the checkpoint covers and that the files lack."""

    warnings: tuple[str, ...] = ()
    gaps: tuple[HistoryGap, ...] = ()


class ResumedRollout(Struct, frozen=True, kw_only=True):
    """The keys of rollouts.jsonl that a resumed run reads."""

    step: int
    group_id: int


def find_resume_point(directory: RunDirectory) -> LatestCheckpoint:
    """Find the newest intact checkpoint of a resumed run.

    Raises CheckpointError if the run has written checkpoints and none is intact; the checkpoint of the initial weights
    does not count. A run that ended before its first checkpoint starts over, with a warning if it had completed steps;
    CheckpointError is raised if the run has groups, but no file of its steps, and for a fork, which would start from
    other weights.
    With `--resume-step`, the checkpoint of this step is used, and CheckpointError is raised if it is not intact.
    """
    if not directory.resumed:
        return LatestCheckpoint()
    if directory.resume_step is not None:
        return _chosen(directory, directory.resume_step)
    found = latest_checkpoint(directory.checkpoints)
    newest = recorded_newest(directory.newest_checkpoint)
    step = read_state(found.path).step if found.path else INITIAL
    if step == INITIAL and (found.warnings or newest is not None):
        raise _no_checkpoint(directory, newest, found.warnings)
    if origin := unbegun_fork(directory.path):
        raise CheckpointError(
            f"{directory.path} is a fork that ended before its first checkpoint: start it again with "
            f"--fork {origin.path} in the place of --resume"
        )
    if found.path is None or step == INITIAL:
        return LatestCheckpoint(path=found.path, warnings=_starts_over(directory))
    if newest is not None and newest > step and not (directory.checkpoints / f"step-{newest:06d}").exists():
        lost = f"the checkpoint of step {newest} is gone: the run resumes from step {step}"
        return LatestCheckpoint(path=found.path, warnings=(*found.warnings, lost))
    return found


def _chosen(directory: RunDirectory, step: int) -> LatestCheckpoint:
    path = chosen_checkpoint(directory.checkpoints, step, "--resume-step")
    if damage := find_damage(path):
        raise CheckpointError(f"--resume-step {step}: checkpoint {path} is damaged: {damage}")
    return LatestCheckpoint(path=path)


def set_aside(directory: RunDirectory, step: int) -> tuple[str, ...]:
    """Move everything of a run that is later than a step to a new entry of `superseded/`; nothing is deleted.

    Later checkpoints are moved, newest first, so that a kill leaves a run that can be resumed; so are the records of
    attachments. The histories are copied, because `restore_histories` then reduces them to the step. Return a message
    if anything was later. Raises RunDirectoryError if the disk refuses.
    """
    later = [number for number in checkpoint_steps(directory.checkpoints) if number > step]
    histories = (directory.metrics, directory.evaluations, directory.rollouts)
    lines = sum(scan(path, step, StepRecord).later for path in histories)
    if not later and not lines:
        return ()
    with disk_errors_as(RunDirectoryError, f"what is later than step {step} cannot be moved to {directory.superseded}"):
        make_directory(directory.superseded)
        place = directory.superseded / f"{len(list(directory.superseded.iterdir())) + 1:03d}-after-step-{step:06d}"
        with new_directory(place) as unfinished:
            for path in histories:
                if path.is_file():
                    copy_file(path, unfinished / path.name)
            (unfinished / "checkpoints").mkdir()
        REWIND(directory, step, place)
        for number in later:
            moved = checkpoint_path(directory.checkpoints, number)
            moved.rename(place / "checkpoints" / moved.name)
        sync_directory(place / "checkpoints")
        sync_directory(directory.checkpoints)
        record_newest(directory.newest_checkpoint, step)
    moved_steps = f" ({IntegerSet(later)})" if later else ""
    return (
        f"the run continues from step {step}: {_counted(len(later), 'later checkpoint')}{moved_steps} and a copy of "
        f"the histories, with {_counted(lines, 'later line')}, are in {place}",
    )


def _no_checkpoint(directory: RunDirectory, newest: int | None, damage: Sequence[str]) -> CheckpointError:
    reached = f" of step {newest}" if newest else ""
    reason = damage[0] if damage else f"the newest one{reached} is gone"
    return CheckpointError(
        f"{directory.checkpoints} has no intact checkpoint ({reason}): restore the directory from a copy, or start "
        "over with --clean, which deletes the run"
    )


def _starts_over(directory: RunDirectory) -> tuple[str, ...]:
    """Return what a run that starts over drops. Raises CheckpointError if more of it is gone than its checkpoints."""
    steps, groups = (
        scan(directory.metrics, -1, MetricsRecord).later,
        scan(directory.rollouts, -1, ResumedRollout).later,
    )
    if groups and not directory.metrics.exists():  # a run creates this file first
        raise CheckpointError(
            f"{directory.path} has {_counted(groups, 'group')} in {directory.rollouts.name}, and neither "
            f"{directory.metrics.name} nor a checkpoint: restore them from a copy, or start over with --clean, which "
            "deletes the run"
        )
    if not steps and not groups:
        return ()
    dropped = f"the records of {_counted(steps, 'step')} and {_counted(groups, 'group')} are dropped"
    return (f"the run ended before its first checkpoint: it starts over, and {dropped}",)


async def restore(
    path: Path, compute: Compute, policy: Policy, learner: PolicyLearner, inputs: dict[str, str], *, begins: int = 0
) -> Checkpoint:
    """Read a checkpoint, and restore policy, learner and random state from it.

    inputs: fingerprints of the inputs of this process. begins: the step after which a stage begins, with a dataset of
    its own and a new learner; 0: the first. Raises CheckpointError if inputs differ, or if the checkpoint belongs to
    another policy.
    """
    state = read_state(path)
    anew = 0 < state.step == begins
    require_same_inputs(state, inputs | {"dataset": state.inputs.get("dataset", "")} if anew else inputs)
    return await finish(compute.learner.submit(lambda: _restore(path, policy, learner, anew=anew)))


def _restore(path: Path, policy: Policy, learner: PolicyLearner, *, anew: bool) -> Checkpoint:
    checkpoint = read_checkpoint(path, expected=policy.trainable(), adapter_config=policy.adapter_config)
    state = checkpoint.state
    policy.publish(checkpoint.parameters, version=state.version, step=state.step, fingerprint=state.fingerprint)
    try:
        if anew:
            learner.begin()
        else:
            learner.restore(checkpoint.optimizer)
    except ValueError as error:
        raise CheckpointError(f"cannot resume from {path}: {error}") from error
    restore_random_state(state.random_state)
    return checkpoint


def restore_histories(directory: RunDirectory, state: RunState | None, profile: Profile) -> RestoredHistories:
    """Truncate the histories to the step of the checkpoint, repair them, and compare them with the checkpoint.

    What attachments have recorded about later steps is deleted.

    metrics.jsonl must have each step once, rollouts.jsonl each group that has ended once, evaluations.jsonl the
    evaluations that it had when the checkpoint was written. Lines that are missing are reported; they are not needed
    to continue. All files are read before the first one is changed. Raises RunDirectoryError if one cannot be read
    or written.
    """
    step = state.step if state else -1
    metrics = scan(directory.metrics, step, MetricsRecord)
    evaluations = scan(directory.evaluations, step, EvalReport)
    rollouts = scan(directory.rollouts, step, ResumedRollout, lambda line: line.group_id)
    rewrite(metrics, step, MetricsRecord)
    rewrite(evaluations, step, EvalReport)
    rewrite(rollouts, step, ResumedRollout)
    _rewind(directory, step)
    warnings = [*_repairs(metrics), *_repairs(evaluations), *_repairs(rollouts)]
    replaced = any(section.mode == "replace" and section.at == "monitor" for section in profile.actors)
    if state is None or replaced:  # a custom monitor writes the histories in a form of its own
        return RestoredHistories(warnings=tuple(warnings))
    steps, evaluated = IntegerSet(ranges=[range(1, step + 1)] if step > 0 else ()), IntegerSet(state.evaluated)
    gaps: list[HistoryGap] = []
    warnings += _compare(metrics, "step", steps, gaps)
    warnings += _compare(evaluations, "evaluation", evaluated, gaps, may_have_more=True)
    if profile.monitor.rollouts:
        below = state.ledger.all_ended_below
        ended = IntegerSet(state.ledger.ended_above, ranges=[range(below)] if below else ())
        warnings += _compare(rollouts, "group", ended, gaps)
    return RestoredHistories(warnings=tuple(warnings), gaps=tuple(gaps))


def _compare(
    found: Scan, unit: str, covered: IntegerSet, gaps: list[HistoryGap], *, may_have_more: bool = False
) -> Iterator[str]:
    """Yield what a history lacks, has more than once, or has beyond the checkpoint; add what it lacks to `gaps`.

    unit: what one line records. covered: what the checkpoint covers. may_have_more: further records are no fault.
    """
    name = found.path.name
    if missing := covered - found.recorded:
        gaps.append(HistoryGap(file=name, unit=f"{unit}s", missing=len(missing)))
        lacks = f"{name} lacks" if found.exists else f"{name} is gone, and with it"
        yield f"{lacks} {len(missing)} of {_counted(len(covered), unit)} that the checkpoint covers: {missing}"
    unknown = found.recorded - covered
    further = () if may_have_more else (("more than once", found.repeated), ("unknown to the checkpoint", unknown))
    for what, numbers in further:
        if numbers:
            yield f"{name} has {_counted(len(numbers), unit)} {what}: {numbers}"


def _rewind(directory: RunDirectory, step: int) -> None:
    try:
        REWIND(directory, step, None)
    except OSError as error:
        where = error.filename or directory.path
        raise RunDirectoryError(f"{where} cannot be changed: {error.strerror or error}") from error


def _repairs(found: Scan) -> list[str]:
    """One message for each kind of damage that `rewrite` removed from a file."""
    name, messages = found.path.name, []
    if found.padding:
        messages.append(f"{name}: {found.padding} NUL bytes, which a power failure left, were removed")
    if found.invalid:
        count = _counted(len(found.invalid), "incomplete or invalid line")
        messages.append(f"{name}: {count} ({found.invalid_bytes} bytes) dropped: line {found.invalid}")
    return messages


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


MAY_DIFFER = (
    "steps",
    "async",
    "run_dir",
    "parity",
    "checkpoint",
    "eval",
    "server",
    "engine",
    "rollouts",
    "queues",
    "memory",
    "monitor",
    "tracking",
    "actors",
    "policy.grad_checkpoint",
    "learner.layout",
    "learner.max_bad_steps",
    "learner.max_equal_batches",
    "learner.max_failed_batches",
    "learner.max_staleness",
    "learner.max_turn_ms",
    "learner.micro_batch_tokens",
)
"""Keys and sections that a resumed run may change: the length of the run and its operation, not its results."""

REWARD_KEYS_THAT_MAY_DIFFER = re.compile(r"rewards\.\d+\.(run_in|where|max_workers|memory_limit_mb)")


OF_THE_WEIGHTS = re.compile(r"(model|policy\.method(?!\.dropout))\b.*")
"""Keys that a fork must not change either."""


def refuse_if_incompatible(old: Profile, new: Profile, *, run: Path, step: int | None = None) -> None:
    """Raise `CheckpointError` if keys differ that must not change; the message lists each as `key: old -> new`.

    The message has the command that resumes the run, and the one that starts a new run with the new settings: from its
    state unless the weights are others. run: the run directory. step: of the checkpoint that is resumed; None: the
    newest.
    """
    differing = {key: text for key, text in differences(old, new).items() if not _may_differ(key, old, new)}
    if differing:
        anew = any(map(OF_THE_WEIGHTS.fullmatch, differing))
        newest = next(iter(checkpoint_steps(run / "checkpoints")), None)
        begun = new_run_line(run, None if anew else newest if step is None else step, _changed(old, new))
        raise CheckpointError(
            f"cannot resume with other settings ({'; '.join(differing.values())}): resume with the settings of the "
            f"run, {resume_command(run / 'profile.toml')}, or start a new run{'' if anew else ' from its state'}, "
            f"{begun}"
        )


def differences(old: Profile, new: Profile) -> dict[str, str]:
    """Return the keys with different values, each with the text `key: old -> new`; API keys are hidden."""
    before, after = _keys(msgspec.to_builtins(old)), _keys(msgspec.to_builtins(new))
    return {
        key: f"{key}: {before.get(key)} -> {after.get(key)}" if not key.endswith("api_key") else f"{key}: changed"
        for key in sorted(before | after)
        if before.get(key) != after.get(key)
    }


def _changed(old: Profile, new: Profile) -> dict[str, Any]:
    """Return the new values of the settings that differ, by the key path of their flag."""
    before, after = (by_path(msgspec.to_builtins(profile), SETTABLE) for profile in (old, new))
    changed = [key for key in SETTABLE if key in after and after[key] != before.get(key) and key != "run_dir"]
    return {key: after[key] for key in PROFILE_KEYS.types_first(changed)}


def _may_differ(key: str, old: Profile, new: Profile) -> bool:
    if REWARD_KEYS_THAT_MAY_DIFFER.fullmatch(key):
        return True
    if any(key == allowed or key.startswith(f"{allowed}.") for allowed in (*MAY_DIFFER, *ATTACHED_MAY_CHANGE())):
        return True
    return any(ATTACHED_MAY_DIFFER(key, old, new))


def _keys(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys. Lists stay whole, except the rewards, whose keys contain their index."""
    if isinstance(node, dict):
        return {key: value for name, child in node.items() for key, value in _keys(child, f"{prefix}{name}.").items()}
    if isinstance(node, list | tuple) and any(isinstance(child, dict) for child in node):
        return _keys({str(index): child for index, child in enumerate(node)}, prefix)
    return {prefix.removesuffix("."): node}
