"""The command that evaluates with the harness of another project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from training_run.attachment import Attachment


class HarnessAttachment(Attachment):
    """`clotho harness lm_eval` and `clotho harness inspect`."""

    commands: ClassVar[Mapping[str, str]] = {"harness": "attachments.harness.command"}


ATTACHMENT = HarnessAttachment()
