"""The commands that read and write files of other programs, and the formats of their adapters."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {name: f"attachments.files.{name}" for name in ("show", "convert", "merge", "push")}
ADAPTER_FORMATS = {name: f"attachments.files.adapters:read_{name}" for name in ("gguf", "npz", "peft")}
