"""The command `sample`, which writes the best completions of a policy as a dataset of demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from training_run.attachment import Attachment


class Rejection(Attachment):
    """Rejection sampling (Yuan et al., arXiv:2308.01825; STaR, arXiv:2203.14465)."""

    commands: ClassVar[Mapping[str, str]] = {"sample": "attachments.rejection.sample"}


ATTACHMENT = Rejection()
