"""The histories of a run in columns: metrics, evaluations, timeline, and the index of groups.

The numbers of a long history are thinned (`thinning`); all lines of a range are read from the file when they are
requested. The index has the newest groups, within a limit on its cells, and the offsets of their records. Numbers of
events are counted over all lines.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta, Struct

from attachments.dashboard.growing_file import FileLine, GrowingFile, read_part
from attachments.dashboard.thinning import MAX_ROWS, ThinnedTable

Row = dict[str, Any]
"""The values of one line by column."""

MAX_CELLS = 2_000_000
"""Number of cells of the index of groups; beyond it, the oldest tenth of the rows is dropped."""

MAX_DEPTH, MAX_NAME = 4, 200
"""Levels of nested objects in a line, and characters of a column's name."""

MAX_DETAIL_BYTES = 1 << 26
"""Bytes of a file that are read again for a range; a larger range stays thinned."""

MAX_OUTCOMES = 100
"""Number of outcomes that are counted by name."""

MAX_MARKS, MAX_MARKS_OF_LINE = 20_000, 1000
"""Number of the newest marks in all lines of a file, and of the first ones in one line."""

MAX_FINDINGS = 50
"""Number of findings whose texts are kept after they have ended."""

CURSOR_LINES = re.compile(r"[0-9]{1,15}", re.ASCII)
"""The number of lines in a cursor."""

PLACES = ("offset", "size")
"""Columns of the index of groups with the places of the records."""

PROMPT_CHARACTERS, NAME_CHARACTERS = 80, 60
"""Characters of a prompt, and of a type or an environment, in the index of groups."""


Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Float = Annotated[float, Meta(ge=-1e12, le=1e12)]


class History(ABC):
    """A JSON Lines file that is read as it grows. A line that is not a record is counted and skipped.

    end: number of lines with a record so far. first: number of these that are not kept. latest: the newest record.
    damaged: number of lines without a record.
    """

    end: int
    first: int
    damaged: int
    latest: dict[str, Any]

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self._clear()

    @property
    def identity(self) -> str:
        """Differs after the file was replaced: all rows are then new."""
        return self._identity

    def advance(self) -> bool:
        """Read the next block of the file. Returns whether there can be more."""
        lines, more = self.file.read()
        if self.file.identity != self._identity:
            self._clear()
        for line in lines:
            if self._add(line):
                self.end += 1
            else:
                self.damaged += bool(line.data.strip())
            self._end_offset = line.offset + len(line.data) + 1
        return more

    def read_all(self) -> None:
        """Read to the end of the file."""
        while self.advance():
            pass

    def body(self, start: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the API response with the rows after the line number `start`, up to the line number `end`."""
        rows = self._part(start, self.end if end is None else end)
        return {**rows, "damaged": self.damaged + self.file.skipped}

    def after(self, cursor: str) -> dict[str, Any]:
        """Return the API response for a client that has the rows up to a cursor: `IDENTITY:LINES`.

        `whole` says that the response has all rows, because the cursor is empty or of other contents of the file.
        """
        identity, _, digits = cursor.rpartition(":")
        start = int(digits) if identity == self.identity and CURSOR_LINES.fullmatch(digits) else -1
        is_known = 0 <= start <= self.end
        return {
            **self.body(start if is_known else 0),
            "cursor": f"{self.identity}:{self.end}",
            "whole": not is_known,
        }

    @abstractmethod
    def _add(self, line: FileLine) -> bool:
        """Append the row of a line. Returns False if the line is not a record."""

    @abstractmethod
    def _part(self, start: int, end: int) -> dict[str, Any]:
        """Return the rows from `start` to `end`, and what belongs to them."""

    def _clear(self) -> None:
        self._identity = self.file.identity
        self.end = self.first = self.damaged = self._end_offset = 0
        self.latest = {}


class Series(History):
    """A file of numbers over `axis`, an ascending column. A long one is thinned.

    Marks are what lines have beside numbers, each with the number of its line.
    """

    axis: ClassVar[str] = "step"
    latest_of: ClassVar[Collection[str]] = ("step", "policy_version", "time/run", "final")
    sums_of: ClassVar[Collection[str]] = ()

    def __init__(self, path: Path, *, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        super().__init__(path)

    @property
    def names(self) -> Collection[str]:
        """The names of the columns of numbers."""
        return self._table.names

    def newest(self, name: str, count: int) -> list[float | None]:
        """Return the newest numbers of a column, one per line; empty if there is no such column."""
        return self._table.newest(name, count)

    def detail(self, low: float, high: float) -> dict[str, Any]:
        """Return the API response with the lines from `low` to `high` on the axis, read from the file again.

        They are thinned as the whole file is, and less, because they are fewer. A range of more than `MAX_DETAIL_BYTES`
        has the rows of the whole file.
        """
        rows = self._table.rows_between(self.axis, low, high)
        if not rows:
            return self.body(self.end)
        ends, offsets = self._table.ends, self._table.offsets
        start = ends[rows.start - 1] if rows.start else 0
        offset = offsets[rows.start]
        size = (offsets[rows.stop] if rows.stop < len(offsets) else self._end_offset) - offset
        data = read_part(self.file.path, offset, size) if size <= MAX_DETAIL_BYTES else None
        if data is None:
            return self.body(start, ends[rows.stop - 1])
        table = self._new_table()
        for line in data.split(b"\n"):
            record = decoded(line)
            if record is not None and (row := self._row(record)) is not None:
                table.append(row, self._texts(record), 0)
        return table.part(0, len(table.ends) and table.ends[-1])

    def _add(self, line: FileLine) -> bool:
        record = decoded(line.data)
        row = None if record is None else self._row(record)
        if record is None or row is None:
            return False
        marks = self._observe(record)
        self._marks += ((self.end, mark) for mark in marks[:MAX_MARKS_OF_LINE])
        self._lost_marks += max(0, len(marks) - MAX_MARKS_OF_LINE) + max(0, len(self._marks) - MAX_MARKS)
        del self._marks[:-MAX_MARKS]
        self.latest = record
        self._table.append(row, self._texts(record), line.offset)
        return True

    def _part(self, start: int, end: int) -> dict[str, Any]:
        marks = [mark for row, mark in self._marks if start <= row < end]
        return {**self._table.part(start, end), "marks": marks, "lost_marks": self._lost_marks}

    def _row(self, record: Mapping[str, Any]) -> Row | None:
        """Return the numbers of a record by column; None if it is not a record of this file."""
        return dict(flat(record))

    def _texts(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return the columns of texts."""
        return {}

    def _observe(self, record: dict[str, Any]) -> list[Any]:
        """Take the next record into account, and return its marks. `latest` is the record before."""
        return []

    def _new_table(self) -> ThinnedTable:
        return ThinnedTable(max_rows=self._max_rows, latest=self.latest_of, sums=self.sums_of)

    def _clear(self) -> None:
        super()._clear()
        self._table = self._new_table()
        self._marks: list[tuple[int, Any]] = []
        self._lost_marks = 0


class _Known(NamedTuple):
    """A finding with all fields, and the first and the last step of the last time at which it applied."""

    fields: dict[str, Any]
    first: Any
    last: Any


class Metrics(Series):
    """metrics.jsonl. Marks are the steps at which a finding began, or the training was rolled back.

    outcomes: number of ended groups by outcome.
    """

    def ended_findings(self) -> list[dict[str, Any]]:
        """Return the findings that the latest line does not have, the newest first, with `first` and `last` step."""
        now = names_of_findings(self.latest)
        ended = (found for name, found in reversed(self._findings.items()) if name not in now)
        return [found.fields | {"first": found.first, "last": found.last} for found in ended]

    def _observe(self, record: dict[str, Any]) -> list[Any]:
        discarded = record.get("groups/discarded_by_reason")
        reasons = discarded.items() if isinstance(discarded, dict) else ()
        for name, value in (("trained", record.get("groups/trained")), *reasons):
            if isinstance(value, int):
                count(self.outcomes, name, value)
        before = names_of_findings(self.latest)
        marks = marks_of(record, before)
        self._complete_findings(record, before)
        return marks

    def _complete_findings(self, record: dict[str, Any], before: Collection[str]) -> None:
        """Add to the findings of a record what earlier ones have about them. before: names in the record before.

        Findings are kept by name, the newest last.
        """
        step, completed = record.get("step"), list[dict[str, Any]]()
        for changes in _objects(record.get("findings")):
            name = str(changes.get("name"))
            known = self._findings.pop(name, None) or _Known({}, step, step)
            found = _Known(known.fields | changes, known.first if name in before else step, step)
            self._findings[name] = found
            completed.append(found.fields)
        record["findings"] = completed
        while len(self._findings) > MAX_FINDINGS:
            del self._findings[next(iter(self._findings))]

    def _clear(self) -> None:
        super()._clear()
        self.outcomes = Counter[str]()
        self._findings: dict[str, _Known] = {}


class Evaluations(Series):
    """evaluations.jsonl. The two ends of the interval of the accuracy are columns. earliest: the first record."""

    earliest: dict[str, Any]

    def _row(self, record: Mapping[str, Any]) -> Row:
        row, interval = dict(flat(record)), record.get("accuracy_interval")
        if isinstance(interval, list):
            ends = zip(("low", "high"), interval, strict=False)
            row |= {f"accuracy/{end}": number(value) for end, value in ends if isinstance(value, int | float)}
        return row

    def _observe(self, record: dict[str, Any]) -> list[Any]:
        self.earliest = self.earliest or record
        return []

    def _clear(self) -> None:
        super()._clear()
        self.earliest = {}


class Timeline(Series):
    """timeline.jsonl. Marks are the times of weight swaps."""

    axis = "t"
    latest_of = ("t", "step", "version")
    sums_of = ("decode", "learn", "other")

    def _row(self, record: Mapping[str, Any]) -> Row | None:
        row = dict(flat(record))
        return row if isinstance(row.get("t"), int | float) else None

    def _texts(self, record: Mapping[str, Any]) -> dict[str, str]:
        waiting = record.get("waiting")
        return {"waiting": waiting[:MAX_NAME] if isinstance(waiting, str) else ""}

    def _observe(self, record: dict[str, Any]) -> list[Any]:
        swaps = record.get("swaps")
        return [number(time) for time in swaps if isinstance(time, int | float)] if isinstance(swaps, list) else []


class _Completion(Struct, frozen=True):
    """The keys of a completion that the index needs."""

    reward: Float | None = None
    tokens: Integer = 0
    first_version: Integer | None = None
    last_version: Integer | None = None
    finish_reason: str = ""


class _Group(Struct, frozen=True):
    """The keys of a line of rollouts.jsonl that the index needs."""

    group_id: Integer
    step: Integer
    outcome: str = ""
    reason: str | None = None
    prompt: str = ""
    type: str = ""
    environment: str = ""
    completions: tuple[_Completion, ...] = ()


class Groups(History):
    """rollouts.jsonl: a row per group, and the place of its record in the file.

    outcomes: number of all groups by outcome.
    """

    _columns: dict[str, list[Any]]
    _row_of: dict[int, int]

    def __init__(self, path: Path, *, max_cells: int = MAX_CELLS) -> None:
        self._max_cells = max_cells
        self._decoder = msgspec.json.Decoder(_Group)
        super().__init__(path)

    def advance(self) -> bool:
        """Read the next block of the file, and drop the oldest groups if there are too many."""
        more = super().advance()
        if self.end - self.first and (self.end - self.first) * len(self._columns) > self._max_cells:
            self._drop()
        return more

    def column(self, name: str) -> list[Any]:
        """Return one column; empty if there is none."""
        return self._columns.get(name, [])

    def record(self, group_id: int) -> bytes | None:
        """Return the line of a group; None if there is none, or if the file has changed meanwhile."""
        row = self._row_of.get(group_id, -1) - self.first
        if row < 0:
            return None
        line = read_part(self.file.path, self._columns["offset"][row], self._columns["size"][row])
        record = None if line is None else decoded(line)
        return line if record is not None and record.get("group_id") == group_id else None

    def _part(self, start: int, end: int) -> dict[str, Any]:
        """Return the columns without the places of the records, and the number of groups that are not kept."""
        begin, stop = max(0, start - self.first), max(0, end - self.first)
        columns = {name: values[begin:stop] for name, values in self._columns.items() if name not in PLACES}
        return {"columns": columns, "dropped": self.first}

    def _add(self, line: FileLine) -> bool:
        try:
            line.data.decode()  # texts are not decoded otherwise
            record = self._decoder.decode(line.data)
        except (ValueError, RecursionError):
            return False
        self._row_of[record.group_id] = self.end
        for name, value in self._row(record, line).items():
            self._columns.setdefault(name, []).append(value)
        count(self.outcomes, self._columns["outcome"][-1], 1)
        return True

    def _row(self, record: _Group, line: FileLine) -> Row:
        completions = record.completions
        rewards = [completion.reward for completion in completions if completion.reward is not None]
        versions = [
            version
            for completion in completions
            for version in (completion.first_version, completion.last_version)
            if version is not None
        ]
        return {
            "group_id": record.group_id,
            "step": record.step,
            "outcome": "trained" if record.outcome == "trained" else (record.reason or "discarded")[:NAME_CHARACTERS],
            "type": record.type[:NAME_CHARACTERS],
            "environment": record.environment[:NAME_CHARACTERS],
            "completions": len(completions),
            "reward_mean": fmean(rewards) if rewards else None,
            "reward_spread": max(rewards) - min(rewards) if rewards else None,
            "length_mean": fmean(completion.tokens for completion in completions) if completions else None,
            "version_min": min(versions, default=None),
            "version_max": max(versions, default=None),
            "truncated": sum(completion.finish_reason == "length" for completion in completions),
            "prompt": record.prompt[:PROMPT_CHARACTERS],
            "offset": line.offset,
            "size": len(line.data),
        }

    def _drop(self) -> None:
        """Drop the oldest groups until there are few enough."""
        kept = min(self._max_cells // len(self._columns), 9 * (self.end - self.first) // 10)
        self.first = self.end - kept
        for values in self._columns.values():
            del values[: len(values) - kept]
        self._row_of = {group: row for group, row in self._row_of.items() if row >= self.first}

    def _clear(self) -> None:
        super()._clear()
        self._columns, self._row_of = {}, {}
        self.outcomes = Counter[str]()


def count(outcomes: Counter[str], name: str, value: int) -> None:
    """Add to the number of an outcome. The number of names is limited: those beyond it are `other`."""
    outcomes[name if name in outcomes or len(outcomes) < MAX_OUTCOMES else "other"] += value


def decoded(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it has none."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None


def names_of_findings(record: Mapping[str, Any]) -> set[str]:
    """Return the names of the findings in a line of metrics.jsonl."""
    return {str(finding.get("name")) for finding in _objects(record.get("findings"))}


def marks_of(record: Mapping[str, Any], before: Collection[str]) -> list[dict[str, Any]]:
    """Return the marks of a line of metrics.jsonl. before: names of the findings in the line before it."""
    step = record.get("step")
    marks = [
        {"step": step, "kind": "finding", "name": str(found.get("name")), "severity": str(found.get("severity"))}
        for found in _objects(record.get("findings"))
        if str(found.get("name")) not in before
    ]
    if record.get("rolled_back") is True:
        marks.append({"step": step, "kind": "rollback", "name": ""})
    return marks


def _objects(values: object) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def flat(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float | int | None]]:
    """Yield the numbers of a record by name; names of nested values are joined by `/`. True is 1, False is 0."""
    for key, value in record.items():
        name = prefix + key
        if len(name) > MAX_NAME:
            continue
        if isinstance(value, bool | int | float):
            yield name, number(value)
        elif value is None:
            yield name, None
        elif isinstance(value, dict) and depth < MAX_DEPTH:
            yield from flat(value, f"{name}/", depth + 1)


def number(value: bool | int | float) -> float | int | None:
    """Return a number that JSON and its readers can represent; None for any other number."""
    if isinstance(value, float):
        return value
    if abs(value) < 2**53:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return None
