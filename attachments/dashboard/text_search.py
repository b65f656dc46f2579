"""Text search in rollouts.jsonl. The results of the latest texts are kept: a later search reads only what is new."""

from __future__ import annotations

from array import array
from itertools import islice

import msgspec
from msgspec import Struct

from attachments.dashboard.growing_file import read_part
from attachments.dashboard.histories import Groups, Integer

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
