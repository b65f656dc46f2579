"""The real other side: an interpreter that has atroposlib, which is no dependency of ours."""

from __future__ import annotations

import os
from functools import cache

import pytest

from clotho.atropos.commands import require_atroposlib

VARIABLE = "CLOTHO_ATROPOS_PYTHON"


def python_with_atropos() -> str:
    """The interpreter; the test is skipped where the environment names none."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        pytest.skip(f"{VARIABLE} does not name an interpreter that has atroposlib")
    _require(python)
    return python


@cache
def _require(python: str) -> None:
    """What is named but does not work is a failure, not a reason to skip."""
    require_atroposlib(python)
