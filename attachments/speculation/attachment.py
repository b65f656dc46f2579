"""What speculation adds to the estimate of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.speculation.sections import SPECULATION, Drafts, ModelDrafts
from training_run.attachment import Attachment

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed


class SpeculationRuns(Attachment):
    """`engine.speculation` of a profile."""

    def memory(self, need: MemoryNeed) -> None:
        """Compute several tokens of a row per step, and hold a draft model."""
        settings = SPECULATION.of(need.engine)
        if isinstance(settings, Drafts):
            need.step_tokens += settings.max_draft
        if isinstance(settings, ModelDrafts):
            need.draft_model = settings.path


ATTACHMENT = SpeculationRuns()
