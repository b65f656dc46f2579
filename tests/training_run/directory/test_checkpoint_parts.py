"""Parts of attachments in checkpoints: read with their type, and collected at the moment of an update."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Struct

from protocols.checkpoint import Part
from protocols.errors import CheckpointError
from training_run.directory.checkpoint_parts import CheckpointParts, Keeper
from training_run.start.startup import unknown_parts


class Kept(Struct, frozen=True, kw_only=True):
    """What an attachment keeps."""

    number: int


def read(value: object) -> dict[str, Part[msgspec.Raw]]:
    """Return the part `one` of a checkpoint that was read."""
    return {"one": Part(value=msgspec.Raw(msgspec.msgpack.encode(value)), arrays={"a": 1})}


def test_an_attachment_finds_what_it_has_saved() -> None:
    """Value and arrays; None if the checkpoint has no such part."""
    parts = CheckpointParts(read(Kept(number=3)))
    found = parts.saved("one", Kept)
    assert found is not None
    assert (found.value, found.arrays) == (Kept(number=3), {"a": 1})
    assert parts.saved("other", Kept) is None


@pytest.mark.parametrize("value", [{"number": "x"}, [], None])
def test_a_part_of_another_type_is_refused_by_name(value: object) -> None:
    """It is not replaced by a new state."""
    with pytest.raises(CheckpointError, match="'one'"):
        CheckpointParts(read(value)).saved("one", Kept)


def test_parts_are_those_of_the_moment() -> None:
    """Each collection asks again. A part that has nothing to keep is left out, and so is one that nobody saves."""
    numbers = iter([1, 2])
    parts = CheckpointParts(read(Kept(number=3)))
    parts.save("counted", lambda: Part(value=Kept(number=next(numbers))))
    parts.save("empty", lambda: None)
    assert [{name: part.value for name, part in parts.collect().items()} for _ in range(2)] == [
        {"counted": Kept(number=1)},
        {"counted": Kept(number=2)},
    ]


def test_a_part_whose_attachment_is_absent_is_a_warning_that_names_it() -> None:
    """A part of an attachment that is installed is none: its settings decide whether it is used."""
    (warning,) = unknown_parts(["replay", "absent_attachment"])
    assert "'absent_attachment'" in warning


def test_a_keeper_builds_a_part_from_the_parts_of_all_updates() -> None:
    """The others are kept as they are in the last update."""

    class Sum(Keeper[Kept]):
        def __init__(self) -> None:
            self.total = 0

        def take(self, value: Kept) -> None:
            self.total += value.number

        def whole(self, value: Kept) -> Part[Kept]:
            return Part(value=Kept(number=self.total))

    parts, numbers = CheckpointParts({}), iter([1, 2])
    parts.save("sum", lambda: Part(value=Kept(number=next(numbers))), keeper=Sum())
    parts.save("plain", lambda: Part(value=Kept(number=9)))
    for _ in range(2):
        update = parts.collect()
        parts.take(update)
    whole = {name: part.value for name, part in parts.whole(update).items()}
    assert whole == {"sum": Kept(number=3), "plain": Kept(number=9)}
