"""Text search in rollouts.jsonl: the file is read in large blocks, and a later search reads only what is new to it.

Most records are excluded by a search for bytes in the block, without decoding. A record that can contain the text is
decoded and compared. The results of the latest texts are kept: the same text is then searched in new records only, and
a longer text in the records that contain the shorter one.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from attachments.dashboard.growing_file import read_part
from attachments.dashboard.histories import Groups, Integer

KEPT_TEXTS = 8
"""Number of the latest texts whose results are kept."""

BLOCK_BYTES = 1 << 22
"""Bytes that are read at a time; a longer record is read alone."""

CALL_BYTES = 1 << 24
"""Bytes after which a call of `advance` returns."""

MAX_GAP = 1 << 14
"""Bytes between two records that are read with them, because a second read costs more."""

PLAIN = re.compile(r"[ !#-.0-\[\]-~]+")
"""Characters that JSON writes as one byte. A slash is not among them, because some writers escape it."""

FOLDED = "ßİŉſǰẖẗẘẙẚẞ\N{KELVIN SIGN}ﬀﬁﬂﬃﬄﬅﬆ"
"""Characters outside ASCII for which `str.casefold` contains letters of ASCII."""

UNDECIDED = re.compile(rb"\\u|" + b"|".join(character.encode() for character in FOLDED))
"""Bytes of a record that has to be decoded: escapes, and characters of `FOLDED`."""


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
    """Rows whose record contains a text, among the rows before `end`. pending: earlier rows that are searched first."""

    rows: array[int]
    pending: Sequence[int]
    end: int


class TextSearch:
    """Searches the groups of a run. Texts are without upper case, as `str.casefold` returns them.

    Memory: `KEPT_TEXTS` results of at most 8 bytes per group, and one block with its copy in lower case.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._decoder = msgspec.json.Decoder(_Record)
        self._identity = groups.identity
        self._results: dict[str, _Result] = {}

    def advance(self, text: str) -> bool:
        """Search the next groups for a text. Returns whether there are more."""
        result, read = self._result(text), 0
        while result.pending or result.end < self._groups.end:
            if read >= CALL_BYTES:
                return True
            if rows := self._next_rows(result):
                read += self._search(text, rows, result)
        return False

    def group_ids(self, text: str) -> list[int]:
        """Return the groups that have been found so far."""
        ids, first = self._groups.column("group_id"), self._groups.first
        return [ids[row - first] for row in self._result(text).rows if row >= first]

    def _result(self, text: str) -> _Result:
        """Return the result of a text as the latest one; a new one begins with that of a part of the text."""
        if self._groups.identity != self._identity:
            self._results.clear()
            self._identity = self._groups.identity
        result = self._results.pop(text, None)
        if result is None:
            shorter = [found for part, found in self._results.items() if part in text and not found.pending]
            start = max(shorter, key=lambda found: (found.end, -len(found.rows)), default=None)
            result = _Result(
                rows=array("q"), pending=start.rows[:] if start else (), end=start.end if start else self._groups.first
            )
        self._results[text] = result
        while len(self._results) > KEPT_TEXTS:
            del self._results[next(iter(self._results))]
        return result

    def _next_rows(self, result: _Result) -> Sequence[int]:
        """Return the next rows to read in one block, which then count as searched; empty if these were dropped."""
        groups, first = self._groups, self._groups.first
        pending = result.pending
        following = pending if pending else range(max(result.end, first), groups.end)
        offsets, sizes = groups.column("offset"), groups.column("size")
        begin = count = 0
        while count < len(following):
            row = following[count] - first
            if row < 0:  # dropped since
                begin = count = count + 1
                continue
            last = following[count - 1] - first
            if count > begin and not (
                0 <= offsets[row] - offsets[last] - sizes[last] <= MAX_GAP
                and offsets[row] + sizes[row] - offsets[following[begin] - first] <= BLOCK_BYTES
            ):
                break
            count += 1
        if pending:
            result.pending = pending[count:]
        elif count:
            result.end = following[count - 1] + 1
        return following[begin:count]

    def _search(self, text: str, rows: Sequence[int], result: _Result) -> int:
        """Search the records of these rows, and return the number of bytes read."""
        groups, first = self._groups, self._groups.first
        ids, offsets, sizes = (groups.column(name) for name in ("group_id", "offset", "size"))
        start = offsets[rows[0] - first]
        size: int = offsets[rows[-1] - first] + sizes[rows[-1] - first] - start
        block = read_part(groups.file.path, start, size)
        if block is None:
            return size
        begins = [offsets[row - first] - start for row in rows]
        for at in _candidates(block, begins, text):
            row = rows[at]
            if self._contains(block[begins[at] : begins[at] + sizes[row - first]], ids[row - first], text):
                result.rows.append(row)
        return size

    def _contains(self, line: bytes, group_id: int, text: str) -> bool:
        try:
            record = self._decoder.decode(line)
        except (ValueError, RecursionError):
            return False
        texts = (record.prompt, record.answer, *(completion.text for completion in record.completions))
        return record.group_id == group_id and any(text in one.casefold() for one in texts)


def _candidates(block: bytes, begins: Sequence[int], text: str) -> Iterator[int]:
    """Yield the positions of the records that can contain a text, in order. begins: of the records in the block."""
    key = max(PLAIN.findall(text), key=len, default="").encode()
    if not key:
        yield from range(len(begins))
        return
    lowered = block.lower()
    found = lowered.find(key)
    other = _undecided(block, 0)
    while found >= 0 or other >= 0:
        at = bisect_right(begins, min(place for place in (found, other) if place >= 0)) - 1
        yield at
        if at + 1 == len(begins):
            return
        following = begins[at + 1]
        if 0 <= found < following:
            found = lowered.find(key, following)
        if 0 <= other < following:
            other = _undecided(block, following)


def _undecided(block: bytes, start: int) -> int:
    match = UNDECIDED.search(block, start)
    return match.start() if match else -1
