"""Packages that some tests need and the extra `test` lacks: extras of pyproject.toml, and atroposlib."""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ATROPOS = "CLOTHO_ATROPOS_PYTHON"
"""Names an interpreter that has atroposlib, whose requirements exclude those of the project."""

VERIFIERS = "CLOTHO_VERIFIERS_PYTHON"
"""Names an interpreter that has verifiers; without it, verifiers may be installed beside the project."""

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache
def is_installed(extra: str) -> bool:
    """Return whether all packages of an extra are installed."""
    if extra == "atroposlib":
        return bool(os.environ.get(ATROPOS))
    if extra == "verifiers" and os.environ.get(VERIFIERS):
        return True
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    names = [re.match(r"[\w.-]+", requirement) for requirement in project["optional-dependencies"][extra]]
    try:
        return all(distribution(name[0]) for name in names if name)
    except PackageNotFoundError:
        return False
