"""The command that evaluates with the harness of another project."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {"harness": "attachments.harness.command"}
