"""The histories of a run in columns: metrics, evaluations, timeline, and the index of groups.

A history keeps the newest rows, within a limit on its cells. The index of groups has the offsets of their records. A
record is read from the file when it is requested.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from clotho.dashboard.growing_file import GrowingFile, Line, read_part

Row = dict[str, Any]
"""The values of one line by column."""

MAX_CELLS = 2_000_000
"""Number of cells of a history; beyond it, the oldest tenth of the rows is dropped."""

MAX_COLUMNS, MAX_DEPTH, MAX_NAME = 1000, 4, 200
"""Number of columns of a history, levels of nested objects in a line, and characters of a column's name."""

MAX_SWAPS = 64
"""Number of weight swaps in a line of the timeline."""

MAX_MARKS, MAX_MARKS_OF_STEP = 2000, 20
"""Number of marks in all metrics, and in one line."""

MAX_FINDINGS = 50
"""Number of findings whose texts are kept after they have ended."""

PROMPT_CHARACTERS, NAME_CHARACTERS = 80, 60
"""Characters of a prompt, and of a type or an environment, in the index of groups."""


Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Float = Annotated[float, Meta(ge=-1e12, le=1e12)]


class History:
    """A JSON Lines file, and its rows in columns. A line that is not a record is counted and skipped.

    first: number of rows before the first one that is kept. latest: the newest record. damaged: number of lines without
    a record.
    """

    def __init__(self, path: Path, *, max_cells: int = MAX_CELLS) -> None:
        self.file = GrowingFile(path)
        self._max_cells = max_cells
        self.latest: dict[str, Any] = {}
        self._clear()

    @property
    def identity(self) -> str:
        """Differs after the file was replaced: all rows are then new."""
        return self._identity

    @property
    def end(self) -> int:
        """Number of rows so far, dropped rows included."""
        return self.first + self._rows

    def advance(self) -> bool:
        """Read the next block of the file. Returns whether there can be more."""
        lines, more = self.file.read()
        if self.file.identity != self._identity:
            self._clear()
        for line in lines:
            row = self._decode(line)  # before the row has its number
            if row is None:
                self.damaged += bool(line.data.strip())
            else:
                self._append(row)
        self._drop()
        return more

    def read_all(self) -> None:
        """Read to the end of the file."""
        while self.advance():
            pass

    def columns(self, start: int = 0, end: int | None = None) -> dict[str, list[Any]]:
        """Return the columns of the rows from `start` to `end`; in a part, columns without values are missing."""
        begin, stop = max(0, start - self.first), self._rows if end is None else max(0, end - self.first)
        if begin == 0 and stop == self._rows:
            return dict(self._columns)
        parts = {name: values[begin:stop] for name, values in self._columns.items()}
        return {name: values for name, values in parts.items() if any(value is not None for value in values)}

    def body(self, start: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the part of an API response that has these rows."""
        return {"columns": self.columns(start, end), "damaged": self.damaged + self.file.skipped, "dropped": self.first}

    def column(self, name: str) -> list[Any]:
        """Return one column; empty if there is none."""
        return self._columns.get(name, [])

    def _decode(self, line: Line) -> Row | None:
        record = decoded(line.data)
        if record is None:
            return None
        self.latest = record
        return dict(flat(record))

    def _append(self, row: Row) -> None:
        for name, values in self._columns.items():
            values.append(row.pop(name, None))
        for name, value in row.items():
            if len(self._columns) < MAX_COLUMNS:
                self._columns[name] = [None] * self._rows + [value]
        self._rows += 1

    def _drop(self) -> None:
        """Drop the oldest rows if there are too many cells."""
        while self._rows * len(self._columns) > self._max_cells:
            count = max(1, self._rows // 10)
            for values in self._columns.values():
                del values[:count]
            self._rows -= count
            self.first += count

    def _clear(self) -> None:
        self._identity = self.file.identity
        self._columns: dict[str, list[Any]] = {}
        self._rows = self.first = self.damaged = 0
        self.latest = {}


class _Known(NamedTuple):
    """A finding with all fields, and the first and the last step of the last time at which it applied."""

    fields: dict[str, Any]
    first: Any
    last: Any


class Metrics(History):
    """metrics.jsonl. Marks are the steps at which a finding began, or the training was rolled back."""

    def ended_findings(self) -> list[dict[str, Any]]:
        """Return the findings that the latest line does not have, the newest first, with `first` and `last` step."""
        now = names_of_findings(self.latest)
        ended = (found for name, found in reversed(self._findings.items()) if name not in now)
        return [found.fields | {"first": found.first, "last": found.last} for found in ended]

    def body(self, start: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the columns and the marks."""
        stop = self.end if end is None else end
        marks = [mark for row, mark in self._marks if start <= row < stop]
        return {**super().body(start, end), "marks": marks}

    def _decode(self, line: Line) -> Row | None:
        before = names_of_findings(self.latest)
        row = super()._decode(line)
        if row is not None:
            self._marks += ((self.end, mark) for mark in marks_of(self.latest, before))
            del self._marks[:-MAX_MARKS]
            self._complete_findings(before)
        return row

    def _complete_findings(self, before: Collection[str]) -> None:
        """Add to the findings of the latest line what earlier lines have about them. before: names in the line before.

        Findings are kept by name, the newest last.
        """
        step, completed = self.latest.get("step"), list[dict[str, Any]]()
        for changes in _objects(self.latest.get("findings")):
            name = str(changes.get("name"))
            known = self._findings.pop(name, None) or _Known({}, step, step)
            found = _Known(known.fields | changes, known.first if name in before else step, step)
            self._findings[name] = found
            completed.append(found.fields)
        self.latest["findings"] = completed
        while len(self._findings) > MAX_FINDINGS:
            del self._findings[next(iter(self._findings))]

    def _clear(self) -> None:
        super()._clear()
        self._marks: list[tuple[int, dict[str, Any]]] = []
        self._findings: dict[str, _Known] = {}


class Evaluations(History):
    """evaluations.jsonl. The two ends of the interval of the accuracy are columns."""

    def _decode(self, line: Line) -> Row | None:
        row = super()._decode(line)
        interval = self.latest.get("accuracy_interval")
        if row is not None and isinstance(interval, list):
            ends = zip(("low", "high"), interval, strict=False)
            row |= {f"accuracy_interval/{end}": number(value) for end, value in ends if isinstance(value, int | float)}
        return row


class Timeline(History):
    """timeline.jsonl. Rows also have the times of weight swaps, which a response lists once for all rows."""

    def body(self, start: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the columns, and the times of the swaps."""
        found = super().body(start, end)
        times = found["columns"].pop("swaps", ())
        return {**found, "swaps": list(chain.from_iterable(listed for listed in times if listed))}

    def _decode(self, line: Line) -> Row | None:
        row = super()._decode(line)
        if row is None or not isinstance(row.get("t"), int | float):
            return None
        swaps = self.latest.get("swaps")
        times = swaps[:MAX_SWAPS] if isinstance(swaps, list) else ()
        row["swaps"] = [number(time) for time in times if isinstance(time, int | float)]
        waiting = self.latest.get("waiting")
        row["waiting"] = waiting[:MAX_NAME] if isinstance(waiting, str) else ""
        return row


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
    """rollouts.jsonl: a row per group, and the place of its record in the file."""

    def __init__(self, path: Path, *, max_cells: int = MAX_CELLS) -> None:
        super().__init__(path, max_cells=max_cells)
        self._decoder = msgspec.json.Decoder(_Group)

    def body(self, start: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the columns without the places of the records."""
        found = super().body(start, end)
        for name in ("offset", "size"):
            found["columns"].pop(name, None)
        return found

    def record(self, group_id: int) -> bytes | None:
        """Return the line of a group; None if there is none, or if the file has changed meanwhile."""
        row = self._row_of.get(group_id, -1) - self.first
        if row < 0:
            return None
        line = read_part(self.file.path, self._columns["offset"][row], self._columns["size"][row])
        record = None if line is None else decoded(line)
        return line if record is not None and record.get("group_id") == group_id else None

    def _decode(self, line: Line) -> Row | None:
        try:
            line.data.decode()  # texts are not decoded otherwise
            record = self._decoder.decode(line.data)
        except (ValueError, RecursionError):
            return None
        self._row_of[record.group_id] = self.end
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

    def _clear(self) -> None:
        super()._clear()
        self._row_of: dict[int, int] = {}

    def _drop(self) -> None:
        before = self.first
        super()._drop()
        if self.first > before:
            self._row_of = {group: row for group, row in self._row_of.items() if row >= self.first}


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
    return marks[:MAX_MARKS_OF_STEP]


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
