"""An installation without some attachments."""

from __future__ import annotations

import pytest

from clotho import extension


def without(monkeypatch: pytest.MonkeyPatch, *attachments: str) -> None:
    """Let the library find no extension of these attachments, as if their folders were deleted."""
    left = tuple(one for one in extension.extensions() if one.attachment not in attachments)
    monkeypatch.setattr(extension, "extensions", lambda: left)
