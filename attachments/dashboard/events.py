"""Server-sent events of a run: what its files contain since a position.

A stream has no queue: each client has a position, and the next events are read from the histories when the client has
accepted the last ones. A client that does not read is disconnected by the server (`server.send_seconds`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from attachments.dashboard.histories import History
from clotho.storage.json_text import encode

MAX_ROWS = 2000
"""Number of rows of an event."""

ALWAYS = ("live",)
"""Keys that every event of the overview has."""

CURSOR = re.compile(r"([0-9a-f]{1,16}-[0-9]{1,9}):([0-9]{1,15})")


class Position(NamedTuple):
    """A position in a history: the identity of its file, and a number of rows."""

    identity: str
    row: int


def position(history: History) -> Position:
    """Return the position after all rows that have been read."""
    return Position(history.identity, history.end)


class Cursor(Struct, frozen=True):
    """The position of a client in every history. As text, it is the id of an event."""

    positions: tuple[Position, ...]

    @classmethod
    def at_end(cls, histories: Mapping[str, History]) -> Cursor:
        """Return the position after all rows that have been read."""
        return cls(tuple(map(position, histories.values())))

    @classmethod
    def parse(cls, text: str, count: int) -> Cursor | None:
        """Return the cursor of an id; None if it is not one of `count` positions."""
        found = [match for part in text.split(",", count) if (match := CURSOR.fullmatch(part))]
        return cls(tuple(Position(match[1], int(match[2])) for match in found)) if len(found) == count else None

    def __str__(self) -> str:
        return ",".join(f"{identity}:{row}" for identity, row in self.positions)


class EventReader:
    """The events of one client. cursor: the position after the events that were returned."""

    def __init__(self, histories: Mapping[str, History], cursor: Cursor | None) -> None:
        """cursor: where the client continues; None: every history is sent as replaced."""
        self._histories = histories
        self.cursor = cursor or Cursor((Position("", 0),) * len(histories))
        self._overview: dict[str, bytes] = {}

    def next(self, overview: Mapping[str, Any]) -> tuple[bytes, bool]:
        """Return the events since the last call, and whether there are more.

        overview: of the run. Its event has the keys that have changed, and `ALWAYS`; the first one has all keys.
        """
        events = list(self._rows())
        encoded = {key: encode(value) for key, value in overview.items()}
        changed = {key: value for key, value in encoded.items() if self._overview.get(key) != value}
        self._overview = encoded
        if changed:
            changed |= {key: encoded[key] for key in ALWAYS if key in encoded}
            body = b",".join(encode(key) + b":" + value for key, value in changed.items())
            events.append(event("overview", b"{" + body + b"}", str(self.cursor)))
        ends = Cursor.at_end(self._histories)
        return b"".join(events), ends != self.cursor

    def _rows(self) -> Iterator[bytes]:
        for number, (kind, history) in enumerate(self._histories.items()):
            identity, row = self.cursor.positions[number]
            if identity != history.identity or row > history.end:
                self._move(number, position(history))
                yield event("reset", encode({"kind": kind}), str(self.cursor))
            elif row < history.end:
                end = min(max(row, history.first) + MAX_ROWS, history.end)
                data = encode(history.body(row, end))
                self._move(number, Position(identity, end))
                yield event(kind, data, str(self.cursor))

    def _move(self, number: int, position: Position) -> None:
        positions = list(self.cursor.positions)
        positions[number] = position
        self.cursor = Cursor(tuple(positions))


def event(name: str, data: bytes, event_id: str = "") -> bytes:
    """Encode one server-sent event. data: JSON on one line."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\n".encode() + b"data: " + data + b"\n\n"
