"""Checkpointer: writes checkpoints, and the adapter at the end of the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from anyio.to_thread import run_sync
from msgspec.structs import replace

from clotho.storage.adapters import write_adapter
from protocols.checkpoint import AdapterConfig, RunState
from protocols.queues import Inbox
from protocols.step import PolicyUpdated
from training_run.directory.best_checkpoint import BestCheckpointKeeper
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.directory.checkpoints import Snapshot, record_newest, write_checkpoint
from training_run.directory.jsonl import sync_files
from training_run.profile.schema import CheckpointSection
from training_run.supervision.latest import Latest, reached

log = structlog.get_logger(actor="checkpointer")

LOG_TIMEOUT_SECONDS = 10.0


class Checkpointer:
    """Writes a checkpoint every `interval` steps and after the last one.

    Arrays are immutable, so that the learner continues while a worker thread writes the files. A write error ends the
    run; earlier checkpoints stay intact.

    Before a checkpoint is written, its step must be in the log files (metrics.jsonl, rollouts.jsonl), and these files
    are synced to disk. After a kill or a power failure, a run then resumes with complete log files. The wait ends when
    the monitor ends, or after a timeout.

    The parts of attachments that would make every update large are built here, from small parts of all updates.
    """

    name = "checkpointer"

    def __init__(
        self,
        *,
        inbox: Inbox[PolicyUpdated],
        directory: Path,
        newest: Path,
        histories: Sequence[Path],
        adapter_directories: Sequence[Path],
        adapter_config: AdapterConfig,
        run_id: str,
        settings: CheckpointSection,
        best: BestCheckpointKeeper,
        state: Callable[[PolicyUpdated], RunState],
        logged: Latest[int],
        parameters: Any,
        loadable: Callable[[Any], Awaitable[tuple[Any, AdapterConfig]]],
        records: Callable[[int], dict[str, bytes]],
        parts: CheckpointParts,
    ) -> None:
        """newest: file that records the step of the newest checkpoint. histories: the log files.

        best: decides which checkpoints are never pruned.
        state: builds the part of a checkpoint that is not tensors. logged: last step in the log files.
        parameters: the weights at the start. loadable: converts parameters to those that mlx-lm loads.
        records: the files for readers in the checkpoint of a step, in any thread.
        parts: of attachments.
        """
        self._inbox = inbox
        self._directory, self._newest, self._histories = directory, newest, histories
        self._adapter_directories = adapter_directories
        self._adapter_config, self._settings, self._state = adapter_config, settings, state
        self._run_id, self._logged, self._best = run_id, logged, best
        self._parameters, self._loadable, self._records = parameters, loadable, records
        self._parts = parts

    async def run(self) -> None:
        """Write checkpoints until the updates end, then a last checkpoint if needed, then the adapter."""
        unwritten: PolicyUpdated | None = None
        async with self._inbox:
            async for update in self._inbox:
                self._parameters = update.parameters
                self._parts.take(update.parts)
                unwritten = update
                if self._settings.interval and update.report.step % self._settings.interval == 0:
                    await self._write(update)
                    unwritten = None
        if unwritten is not None:
            await self._write(unwritten)
        parameters, adapter_config = await self._loadable(self._parameters)
        adapter_config = replace(adapter_config, run_id=self._run_id)
        for directory in self._adapter_directories:
            await run_sync(write_adapter, directory, parameters, adapter_config)

    async def _write(self, update: PolicyUpdated) -> None:
        if not await reached(self._logged, update.report.step, timeout_seconds=LOG_TIMEOUT_SECONDS):
            log.warning("log_files_behind_checkpoint", step=update.report.step)
        state = self._state(update)
        await self._sync_histories()
        snapshot = Snapshot(
            parameters=update.parameters,
            optimizer=update.optimizer,
            state=state,
            adapter_config=self._adapter_config,
            parts=await run_sync(self._parts.whole, update.parts),
            records=await run_sync(self._records, update.report.step),
        )
        path = await run_sync(
            partial(
                write_checkpoint,
                self._directory,
                snapshot,
                keep_last=self._settings.keep_last,
                kept=self._best.kept,
            )
        )
        await run_sync(record_newest, self._newest, update.report.step)
        log.info("checkpoint_written", step=update.report.step, path=str(path))

    async def _sync_histories(self) -> None:
        """Sync the log files to disk. If the disk refuses, the run continues; a resumed run reports what is missing."""
        try:
            await run_sync(sync_files, self._histories)
        except OSError as error:
            log.warning("log_files_not_synced", error=error.strerror or str(error))
