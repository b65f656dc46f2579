"""Checkpointer: the whole run on disk, whenever it is due, and the final adapter at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from anyio.to_thread import run_sync
from msgspec.structs import replace

from clotho.config.schema import CheckpointSection
from clotho.runtime.latest import Latest
from clotho.runtime.log_barrier import reached
from clotho.storage.adapters import write_adapter
from clotho.storage.checkpoints import Snapshot, write_checkpoint
from protocols.checkpoint import AdapterConfig, RunState
from protocols.queues import Inbox
from protocols.step import PolicyUpdated

log = structlog.get_logger(actor="checkpointer")


class Checkpointer:
    """The last box. Every `interval` steps, and after the last one, it writes all that a resumed run needs.

    Arrays never change once evaluated, so the learner goes on while they are written; files are written in a worker
    thread, so the compute thread does too. A disk that refuses ends the run with the earlier checkpoints intact.

    A checkpoint waits until the histories (metrics, rollouts) have reached its step: a run that is killed right after
    it resumes with every group on record. The wait ends with the monitor, and after a while in any case.
    """

    name = "checkpointer"

    def __init__(
        self,
        *,
        inbox: Inbox[PolicyUpdated],
        directory: Path,
        adapter_directories: Sequence[Path],
        adapter_config: AdapterConfig,
        run_id: str,
        settings: CheckpointSection,
        state: Callable[[PolicyUpdated], RunState],
        recorded: Latest[int],
        parameters: Any,
        loadable: Callable[[Any], Awaitable[tuple[Any, AdapterConfig]]],
    ) -> None:
        """state: what to keep beside the tensors. recorded: how far the monitor has come with the histories.

        parameters: the weights as this life of the run found them. loadable: what the final adapter's directory must
        hold of them, so that mlx-lm can load it.
        """
        self._inbox = inbox
        self._directory, self._adapter_directories = directory, adapter_directories
        self._adapter_config, self._settings, self._state = adapter_config, settings, state
        self._run_id = run_id
        self._recorded = recorded
        self._parameters, self._loadable = parameters, loadable

    async def run(self) -> None:
        """Write until the updates end, then once more if the last was not due, then the adapter."""
        unwritten: PolicyUpdated | None = None
        async with self._inbox:
            async for update in self._inbox:
                self._parameters = update.parameters
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
        if not await reached(self._recorded, update.report.step):
            log.warning("the histories do not keep up; the checkpoint is written without them", step=update.report.step)
        snapshot = Snapshot(
            parameters=update.parameters,
            optimizer=update.optimizer,
            state=self._state(update),
            adapter_config=self._adapter_config,
            replay=update.replay,
        )
        write = partial(write_checkpoint, self._directory, snapshot, keep_last=self._settings.keep_last)
        path = await run_sync(write)
        log.info("checkpoint", step=update.report.step, path=str(path))
