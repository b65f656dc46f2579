"""The interpreter that has atroposlib, which is not a dependency of the project."""

from __future__ import annotations

import os
from functools import cache

from attachments.atropos.commands import require_atroposlib
from tests.extras import ATROPOS


@cache
def python_with_atropos() -> str:
    """Return the interpreter. Its tests have the mark `needs_extra("atroposlib")`, which skips them without it."""
    python = os.environ[ATROPOS]
    require_atroposlib(python)
    return python
