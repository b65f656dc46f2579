"""The files of one run directory, the search in their texts, and whether a process continues the run."""

from __future__ import annotations

import os
from array import array
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from attachments.dashboard.growing_file import read_part, read_small
from attachments.dashboard.histories import Evaluations, Groups, History, Integer, Metrics, Timeline
from attachments.dashboard.paths import KINDS
from attachments.dashboard.token_values import read_group
from protocols.errors import RunDirectoryError
from training_run.directory.run_directory import LOCK, TIMELINE

KEPT_TEXTS = 8
"""Number of the latest texts whose results are kept."""

CALL_BYTES = 1 << 22
"""Bytes after which a call of `advance` returns; a longer record is read alone."""


class _Text(Struct, frozen=True):
    """The text of a completion."""

    text: str = ""


class _Record(Struct, frozen=True):
    """The texts of a line of rollouts.jsonl."""

    group_id: Integer
    prompt: str = ""
    answer: str = ""
    completions: tuple[_Text, ...] = ()


class _Result(Struct, kw_only=True):
    """Rows whose record contains a text, among the rows before `end`."""

    rows: array[int]
    end: int


class TextSearch:
    """Searches the groups of a run. Texts are without upper case, as `str.casefold` returns them.

    Memory: `KEPT_TEXTS` results of at most 8 bytes per group, and the records of one call.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._decoder = msgspec.json.Decoder(_Record)
        self._identity = groups.identity
        self._results: dict[str, _Result] = {}

    def advance(self, text: str) -> bool:
        """Search the next groups for a text. Returns whether there are more."""
        groups, result = self._groups, self._result(text)
        first = groups.first
        result.end = max(result.end, first)
        offsets, sizes = groups.column("offset"), groups.column("size")
        rows = range(result.end - first, groups.end - first)
        if not rows:
            return False
        start = offsets[rows.start]
        fits = (row for row in rows if offsets[row] + sizes[row] - start > CALL_BYTES)
        stop = max(next(fits, rows.stop), rows.start + 1)
        block = read_part(groups.file.path, start, offsets[stop - 1] + sizes[stop - 1] - start)
        for row, group in enumerate(islice(groups.column("group_id"), rows.start, stop), rows.start):
            begin = offsets[row] - start
            if block is not None and self._contains(block[begin : begin + sizes[row]], group, text):
                result.rows.append(row + first)
        result.end = stop + first
        return result.end < groups.end

    def group_ids(self, text: str) -> list[int]:
        """Return the groups that have been found so far."""
        ids, first = self._groups.column("group_id"), self._groups.first
        return [ids[row - first] for row in self._result(text).rows if row >= first]

    def _result(self, text: str) -> _Result:
        """Return the result of a text as the latest one."""
        if self._groups.identity != self._identity:
            self._results.clear()
            self._identity = self._groups.identity
        result = self._results.pop(text, None)
        self._results[text] = result = result or _Result(rows=array("q"), end=0)
        while len(self._results) > KEPT_TEXTS:
            del self._results[next(iter(self._results))]
        return result

    def _contains(self, line: bytes, group_id: int, text: str) -> bool:
        try:
            record = self._decoder.decode(line)
        except (ValueError, RecursionError):
            return False
        texts = (record.prompt, record.answer, *(completion.text for completion in record.completions))
        return record.group_id == group_id and any(text in one.casefold() for one in texts)


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
