"""The files of one run directory, and whether a process continues the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from attachments.dashboard.growing_file import read_small
from attachments.dashboard.histories import Evaluations, Groups, History, Metrics, Timeline
from attachments.dashboard.library import KINDS
from attachments.dashboard.text_search import TextSearch
from attachments.dashboard.token_values import read_group
from protocols.errors import RunDirectoryError
from training_run.directory.run_directory import LOCK, TIMELINE

CLOCK_ERROR_SECONDS = 2.0
"""Largest difference between the clocks of processes and of the file system."""


class RunFiles:
    """The files of one run directory, read as far as the last call of `advance`. Used by one thread at a time.

    histories: by kind. search: in the texts of the groups.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metrics = Metrics(directory / "metrics.jsonl")
        self.evaluations = Evaluations(directory / "evaluations.jsonl")
        self.timeline = Timeline(directory / TIMELINE)
        self.groups = Groups(directory / "rollouts.jsonl")
        self.search = TextSearch(self.groups)
        histories: tuple[History, ...] = (self.metrics, self.evaluations, self.timeline, self.groups)
        self.histories = dict(zip(KINDS, histories, strict=True))

    def tokens(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the per-token values of a group; null for a completion without values.

        record: the line of rollouts.jsonl. Raises RunDirectoryError, which says why, if there are none.
        """
        step, group_id = record.get("step"), record.get("group_id")
        if not isinstance(step, int) or not isinstance(group_id, int):
            raise RunDirectoryError("the line of the group in rollouts.jsonl has no step or no number")
        return {"completions": read_group(self.directory, step, group_id)}


def is_live(directory: Path) -> bool:
    """Return whether a process of this machine owns a run directory.

    The lock is not tested by locking, because a run that starts at this moment would be refused.
    """
    path = directory / LOCK
    recorded = (read_small(path, 32) or b"").strip()
    if not recorded.isdigit() or int(recorded) == 0:
        return False
    try:
        return bool(psutil.Process(int(recorded)).create_time() <= os.stat(path).st_mtime + CLOCK_ERROR_SECONDS)
    except (psutil.Error, OSError, OverflowError):
        return False
