"""The commands that read and write files of other programs."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {name: f"attachments.files.{name}" for name in ("show", "convert", "merge", "push")}
