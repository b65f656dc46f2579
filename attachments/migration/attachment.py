"""The command that converts files of earlier systems to profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from training_run.attachment import Attachment


class Migration(Attachment):
    """Earlier systems, which a run does not know."""

    commands: ClassVar[Mapping[str, str]] = {"import-profile": "attachments.migration.migration"}


ATTACHMENT = Migration()
