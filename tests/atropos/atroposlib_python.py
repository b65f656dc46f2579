"""The interpreter that has atroposlib, which is not a dependency of the project."""

from __future__ import annotations

import os
from functools import cache

import pytest

from clotho.atropos.commands import require_atroposlib

VARIABLE = "CLOTHO_ATROPOS_PYTHON"


def python_with_atropos() -> str:
    """Return the interpreter; skip the test if the environment variable is not set."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        pytest.skip(f"{VARIABLE} does not name an interpreter that has atroposlib")
    _require(python)
    return python


@cache
def _require(python: str) -> None:
    """Fail if the environment variable names an interpreter without atroposlib."""
    require_atroposlib(python)
