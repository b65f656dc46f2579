"""Directories of the environments and of the embedded policy."""

from __future__ import annotations

from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / "profiles" / "environments"
EMBEDDED = ENVIRONMENTS.parent / "embedded"
