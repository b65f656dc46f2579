"""What `speculation` adds to the library: batches that verify drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.speculation.sections import SPECULATION
from clotho.settings.bounds import Off

if TYPE_CHECKING:
    from clotho.inference.parts import EngineParts


def engine(parts: EngineParts) -> None:
    """Let an engine verify drafts, if its settings name a source."""
    if isinstance(SPECULATION.of(parts.settings), Off):
        return
    from attachments.speculation.speculative_batch import SpeculativeBatches

    parts.batches = SpeculativeBatches(parts.settings)
