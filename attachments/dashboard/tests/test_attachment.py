"""The values of tokens that a run writes for its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.dashboard.attachment import WrittenTokenValues
from attachments.dashboard.token_values import TokenValueWriter, read_group
from protocols.step import GroupsEnded
from tests.training_run.records.display_examples import discarded, step


def writer(directory: Path) -> TokenValueWriter:
    """A writer of tokens without texts."""
    return TokenValueWriter(directory / "tokens", limit_bytes=1 << 20, texts=lambda tokens, text: [""] * len(tokens))


def test_groups_that_end_between_two_steps_are_written_with_the_next(tmp_path: Path) -> None:
    """Or at the end, if no step follows. A write without a report writes nothing."""
    observer = WrittenTokenValues(writer(tmp_path))
    observer.step(step(1, discarded=(discarded(1),)), {})
    observer.write()
    written = (tmp_path / "tokens" / "step-000001.safetensors").stat().st_mtime_ns
    observer.write()
    observer.groups(GroupsEnded(step=2, discarded=(discarded(7),)))
    observer.write()
    assert len(read_group(tmp_path, 2, 7)) == 2
    assert (tmp_path / "tokens" / "step-000001.safetensors").stat().st_mtime_ns == written


def test_values_that_cannot_be_written_are_lost_and_later_ones_are_not(tmp_path: Path) -> None:
    """The monitor reports the error under the name of the directory."""
    (tmp_path / "tokens").touch()
    observer = WrittenTokenValues(writer(tmp_path))
    observer.step(step(1, discarded=(discarded(1),)), {})
    with pytest.raises(OSError, match="tokens"):
        observer.write()
    (tmp_path / "tokens").unlink()
    observer.step(step(2, discarded=(discarded(2),)), {})
    observer.write()
    assert observer.name == "tokens"
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["step-000002.safetensors"]
