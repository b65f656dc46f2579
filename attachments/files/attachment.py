"""The commands that read and write files of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from training_run.attachment import Attachment


class Files(Attachment):
    """Shows, converts, merges and publishes models and adapters."""

    commands: ClassVar[Mapping[str, str]] = {
        name: f"attachments.files.{name}" for name in ("show", "convert", "merge", "push")
    }


ATTACHMENT = Files()
