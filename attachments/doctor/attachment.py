"""The command that checks a profile before its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from training_run.attachment import Attachment


class Doctor(Attachment):
    """Checks machine, settings, model, template and problems."""

    commands: ClassVar[Mapping[str, str]] = {"doctor": "attachments.doctor.doctor"}


ATTACHMENT = Doctor()
