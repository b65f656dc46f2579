"""Parts of attachments in checkpoints: those that a resumed run starts from, and what the next checkpoints get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from protocols.checkpoint import Part
from protocols.errors import CheckpointError, visible

S = TypeVar("S", bound=msgspec.Struct)

MESSAGE_LIMIT = 300
"""Largest number of characters of an error in a message."""


class Keeper(Generic[S]):
    """Builds a part that is too large for every update from the small parts of all updates; in the checkpointer."""

    def take(self, value: S) -> None:
        """Take the small part of an update into account. Called for every update, in the event loop."""

    def whole(self, value: S) -> Part[object]:
        """Return the part for the checkpoint of the last update. value: its small part. Called in a thread."""
        return Part(value=value)


class CheckpointParts:
    """The parts of a run, by the names of the attachments.

    Settings decide, and state follows: a part that the settings of a resumed run do not use is dropped.
    """

    def __init__(self, found: Mapping[str, Part[msgspec.Raw]]) -> None:
        """found: those of the checkpoint that the run starts from."""
        self._found = found
        self._states: dict[str, Callable[[], Part[object] | None]] = {}
        self._keepers: dict[str, Keeper[Any]] = {}

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

    def save(self, name: str, state: Callable[[], Part[object] | None], *, keeper: Keeper[Any] | None = None) -> None:
        """Save a part with every checkpoint.

        state: called in the event loop after every batch; None: nothing now. keeper: builds the part of a checkpoint
        from these parts.
        """
        self._states[name] = state
        if keeper is not None:
            self._keepers[name] = keeper

    def collect(self) -> dict[str, Part[object]]:
        """Return the parts of this moment, for an update."""
        return {name: part for name, state in self._states.items() if (part := state()) is not None}

    def take(self, parts: Mapping[str, Part[object]]) -> None:
        """Pass the parts of an update to their keepers."""
        for name, part in parts.items():
            if name in self._keepers:
                self._keepers[name].take(part.value)

    def whole(self, parts: Mapping[str, Part[object]]) -> dict[str, Part[object]]:
        """Return what the checkpoint of the last update keeps. parts: those of the update."""
        keepers = self._keepers
        return {name: keepers[name].whole(part.value) if name in keepers else part for name, part in parts.items()}
