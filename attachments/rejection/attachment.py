"""The command `sample`, which writes the best completions of a policy as a dataset of demonstrations."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {"sample": "attachments.rejection.sample"}
