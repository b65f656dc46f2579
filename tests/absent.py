"""An installation without some attachments."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import pytest

from clotho import extension


def without(monkeypatch: pytest.MonkeyPatch, *attachments: str) -> None:
    """Let the library find nothing of these attachments, as if their folders were deleted."""
    installed = extension.attachment_modules
    names = tuple(name for name in extension.attachment_names() if name not in attachments)

    def left(name: str) -> Mapping[str, ModuleType]:
        """Return the modules of the other folders."""
        return {folder: module for folder, module in installed(name).items() if folder in names}

    monkeypatch.setattr(extension, "attachment_modules", left)
    monkeypatch.setattr("clotho.serving.errors.attachment_names", lambda: names)
