"""Where a run starts: at step 0, at a checkpoint of its own, or at a checkpoint of another run (a fork).

A run that trains an adapter, and a fork, write their initial state as their first checkpoint before any rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from anyio.to_thread import run_sync
from msgspec import Struct
from msgspec.structs import replace

from clotho.lanes.compute_thread import Compute, finish
from clotho.models.machine import random_state, restore_random_state
from clotho.models.parameters import fingerprint
from clotho.models.policy import Policy
from clotho.settings.model import FullMethod
from clotho.storage.adapters import TENSORS, read_adapter, read_adapter_config
from clotho.storage.atomic_files import digest_file, replace_file
from clotho.training.update import PolicyLearner
from protocols.accounting import LedgerState
from protocols.checkpoint import AdapterConfig, Origin, Part, RunState
from protocols.errors import CheckpointError, ClothoError, RunDirectoryError, disk_errors_as
from protocols.evaluation import EvalReport
from protocols.finding import Finding
from protocols.summary import HistoryGap
from training_run.directory.checkpoints import (
    Checkpoint,
    LatestCheckpoint,
    Snapshot,
    read_checkpoint,
    record_newest,
    records_of,
    write_checkpoint,
)
from training_run.directory.jsonl import copy_until
from training_run.directory.run_directory import RunDirectory, read_run_id
from training_run.directory.run_paths import run_of
from training_run.profile.load import load_profile, resolved_toml
from training_run.profile.schema import Profile
from training_run.records.evaluation_history import MetricsRecord
from training_run.stages import recorded_profile
from training_run.start.resume import (
    ResumedRollout,
    differences,
    find_resume_point,
    refuse_if_incompatible,
    restore,
    restore_histories,
    set_aside,
)


class StartingPoint(Struct, frozen=True, kw_only=True, eq=False):
    """Where a run starts.

    state: the checkpoint; None at step 0 of a new run. parts: its parts of attachments, by name.
    initial: parameters at step 0, as far as the process knows them. origin: what the run started from; None if it
    started from the base model alone. gaps: records that the checkpoint covers and the histories lack.
    warnings: to be logged when the run starts. findings: of the checks at the start.
    """

    state: RunState | None
    parts: Mapping[str, Part[msgspec.Raw]] = {}
    initial: Any | None = None
    origin: Origin | None = None
    gaps: tuple[HistoryGap, ...] = ()
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


class Fork(NamedTuple):
    """A checkpoint of another run that the policy was loaded from. warnings: state that does not fit the settings."""

    checkpoint: Checkpoint
    warnings: tuple[str, ...] = ()


def publish_first_checkpoint(policy: Policy, path: Path) -> None:
    """Serve the weights of the checkpoint of step 0 as version 0, in a compute thread. Raises CheckpointError."""
    tree = read_adapter(path, policy.trainable(), policy.adapter_config)
    policy.publish(tree, version=0, step=0, fingerprint=fingerprint(tree))


def publish_fork(policy: Policy, path: Path) -> Fork:
    """Serve the weights of another run's checkpoint, in a compute thread.

    Raises CheckpointError if the checkpoint is damaged, or if its trainable parameters are not those of the policy.
    """
    config = _with_dropout_of(read_adapter_config(path), policy.adapter_config)
    try:
        checkpoint = read_checkpoint(path, expected=policy.trainable(), adapter_config=config)
    except CheckpointError as error:
        raise CheckpointError(f"--fork: {error}") from error
    state = checkpoint.state
    policy.publish(checkpoint.parameters, version=state.version, step=state.step, fingerprint=state.fingerprint)
    return Fork(checkpoint)


def restore_learner(learner: PolicyLearner, fork: Fork) -> Fork:
    """Restore the learner's state of a fork; a state that does not fit the settings is replaced by a new one."""
    try:
        learner.restore(fork.checkpoint.optimizer)
    except (KeyError, ValueError) as error:
        text = f"the optimizer state of the forked run does not fit the settings and starts anew: {error}"
        return fork._replace(warnings=(*fork.warnings, text))
    return fork


def _with_dropout_of(found: AdapterConfig, wanted: AdapterConfig) -> AdapterConfig:
    """Return the policy's configuration with the dropout of a file: dropout may change, because no weight has it."""
    if found.lora_parameters is None or wanted.lora_parameters is None:
        return wanted
    dropout = found.lora_parameters.dropout
    return replace(wanted, lora_parameters=replace(wanted.lora_parameters, dropout=dropout))


async def begin(
    profile: Profile,
    directory: RunDirectory,
    compute: Compute,
    policy: Policy,
    learner: PolicyLearner,
    *,
    fork: Fork | None,
    origin: Origin | None,
    inputs: dict[str, str],
) -> StartingPoint:
    """Take the run directory into use, and restore or write the state that the run starts from.

    origin: the adapter whose weights are served; None without one. inputs: fingerprints of model, tokenizer and
    dataset. Raises CheckpointError or RunDirectoryError.
    """
    if directory.resumed and directory.profile.exists():
        before = load_profile(str(directory.profile))
        whole = recorded_profile(profile, directory)
        refuse_if_incompatible(before, whole, run=directory.path, step=directory.resume_step)
    directory.begin()
    initial = policy.trainable() if fork is None else None
    found = LatestCheckpoint() if fork is not None else find_resume_point(directory)
    state: RunState | None = None
    parts: Mapping[str, Part[msgspec.Raw]] = {}
    warnings = found.warnings
    if fork is not None:
        parts = fork.checkpoint.parts
        state, origin, warnings = await _begin_fork(profile, directory, compute, policy, learner, fork, inputs)
    elif found.path is not None:
        begins = directory.stage.first_step if directory.stage is not None else 0
        checkpoint = await restore(found.path, compute, policy, learner, inputs, begins=begins)
        state, parts, origin = checkpoint.state, checkpoint.parts, None
    elif origin is not None or not isinstance(profile.policy.method, FullMethod):
        snapshot = await finish(compute.learner.submit(lambda: _snapshot(policy, learner, None, inputs)))
        if origin is not None:
            await run_sync(write_origin, directory.lineage, origin)
        await run_sync(lambda: _write_first(directory, snapshot, profile))
    if directory.resume_step is not None:
        warnings += await run_sync(set_aside, directory, directory.resume_step)
    restored = restore_histories(directory, state, profile)
    return StartingPoint(
        state=state,
        parts=parts,
        initial=initial,
        origin=origin,
        gaps=restored.gaps,
        warnings=(*warnings, *restored.warnings),
    )


async def _begin_fork(
    profile: Profile,
    directory: RunDirectory,
    compute: Compute,
    policy: Policy,
    learner: PolicyLearner,
    fork: Fork,
    inputs: dict[str, str],
) -> tuple[RunState, Origin, tuple[str, ...]]:
    """Copy the histories of the forked run up to its step, and write the first checkpoint of the new run.

    Return the state of that checkpoint, what the run started from, and warnings.
    """
    source = directory.fork
    assert source is not None
    before = fork.checkpoint.state
    changed = tuple(sorted(name for name in inputs if before.inputs.get(name) != inputs[name]))
    origin = await run_sync(lambda: _fork_origin(source, profile, before, changed))
    state = replace(before, inputs=inputs)

    def snapshot() -> Snapshot:
        restore_random_state(state.random_state)
        return replace(_snapshot(policy, learner, state, inputs), parts=fork.checkpoint.parts)

    written = await finish(compute.learner.submit(snapshot))
    await run_sync(partial(_write_fork, directory, written, origin, profile))
    warned = (f"the fork has other inputs than the forked run: {', '.join(changed)}",) if changed else ()
    return state, origin, (*fork.warnings, *warned)


def _snapshot(
    policy: Policy,
    learner: PolicyLearner,
    state: RunState | None,
    inputs: dict[str, str],
) -> Snapshot:
    """Return the checkpoint of the weights that are served now, in the learner's thread. state: None at step 0."""
    return Snapshot(
        parameters=policy.trainable(),
        optimizer=learner.state(),
        state=state
        or RunState(
            step=0,
            version=policy.version,
            fingerprint=policy.fingerprint,
            ledger=LedgerState(),
            prompted=0,
            random_state=random_state(),
            bad_steps=0,
            train_seconds=0.0,
            sampled_tokens=0,
            trained_tokens=0,
            inputs=inputs,
        ),
        adapter_config=policy.adapter_config,
    )


def checkpoint_records(profile: Profile, directory: RunDirectory) -> Callable[[int], dict[str, bytes]]:
    """Return the function of a step that gives the records of its checkpoint: the profile without API keys, metrics."""
    text = resolved_toml(recorded_profile(profile, directory), mask_secrets=True)
    return partial(records_of, text, directory.metrics)


def _write_first(directory: RunDirectory, snapshot: Snapshot, profile: Profile) -> None:
    snapshot = replace(snapshot, records=checkpoint_records(profile, directory)(snapshot.state.step))
    write_checkpoint(directory.checkpoints, snapshot, keep_last=profile.checkpoint.keep_last)
    record_newest(directory.newest_checkpoint, snapshot.state.step)


def _write_fork(directory: RunDirectory, snapshot: Snapshot, origin: Origin, profile: Profile) -> None:
    """Write lineage, histories and checkpoint of a fork, in this order; the checkpoint relies on the histories."""
    write_origin(directory.lineage, origin)
    run = run_of(Path(origin.path))
    if run is not None:
        step = snapshot.state.step
        copy_until(run / directory.metrics.name, directory.metrics, step, MetricsRecord)
        copy_until(run / directory.evaluations.name, directory.evaluations, step, EvalReport)
        if profile.monitor.rollouts:
            copy_until(run / directory.rollouts.name, directory.rollouts, step, ResumedRollout)
    _write_first(directory, snapshot, profile)


def _fork_origin(checkpoint: Path, profile: Profile, state: RunState, inputs: tuple[str, ...]) -> Origin:
    run = run_of(checkpoint)
    settings: tuple[str, ...] = ()
    run_id = ""
    if run is not None:
        run_id = read_run_id(run)
        try:
            before = load_profile(str(run / "profile.toml"))
        except ClothoError:
            settings = ("the profile of the forked run cannot be read",)
        else:
            own = {"run_dir", "policy.adapter"}
            settings = tuple(text for key, text in differences(before, profile).items() if key not in own)
    return Origin(
        kind="fork",
        path=str(checkpoint.absolute()),
        sha256=digest_file(checkpoint / TENSORS).sha256,
        step=state.step,
        run_id=run_id,
        settings=settings,
        inputs=inputs,
    )


def write_origin(path: Path, origin: Origin) -> None:
    """Write `lineage.json`. Raises RunDirectoryError if the disk refuses."""
    with disk_errors_as(RunDirectoryError, f"{path} cannot be written"):
        replace_file(path, [msgspec.json.format(msgspec.json.encode(origin), indent=2) + b"\n"])
