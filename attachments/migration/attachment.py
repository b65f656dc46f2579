"""The command that converts files of earlier systems to profiles."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {"import-profile": "attachments.migration.migration"}
