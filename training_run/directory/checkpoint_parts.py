"""Parts of attachments in checkpoints: those that a resumed run starts from, and what the next checkpoints get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from protocols.checkpoint import Part
from protocols.errors import CheckpointError, visible

S = TypeVar("S", bound=msgspec.Struct)

MESSAGE_LIMIT = 300
"""Largest number of characters of an error in a message."""


class CheckpointParts:
    """The parts of a run, by the names of the attachments.

    Settings decide, and state follows: a part that the settings of a resumed run do not use is dropped.
    """

    def __init__(self, found: Mapping[str, Part[msgspec.Raw]]) -> None:
        """found: those of the checkpoint that the run starts from."""
        self._found = found
        self._states: dict[str, Callable[[], Part[object] | None]] = {}

    def saved(self, name: str, kind: type[S]) -> Part[S] | None:
        """Return the part that an attachment has saved; None without one.

        kind: type of its value. Raises CheckpointError if the value is not of this type.
        """
        part = self._found.get(name)
        if part is None:
            return None
        try:
            value = msgspec.msgpack.decode(part.value, type=kind)
        except (ValueError, RecursionError) as error:
            reason = visible(str(error), MESSAGE_LIMIT)
            raise CheckpointError(f"the part '{name}' of the checkpoint cannot be used: {reason}") from error
        return Part(value=value, arrays=part.arrays)

    def save(self, name: str, state: Callable[[], Part[object] | None]) -> None:
        """Save a part with every checkpoint. state: called in the event loop after every batch; None: nothing now."""
        self._states[name] = state

    def collect(self) -> dict[str, Part[object]]:
        """Return the parts of this moment."""
        return {name: part for name, state in self._states.items() if (part := state()) is not None}
