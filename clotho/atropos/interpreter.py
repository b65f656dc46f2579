"""The interpreter that has atroposlib: found, and looked at before a run depends on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from clotho.config.schema import Profile
from protocols.errors import ProfileError

PATIENCE_SECONDS = 60.0
HAS_ATROPOSLIB = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('atroposlib') else 3)"
LACKS = 3


def find_interpreter(python: str) -> str:
    """Its path, whatever the working directory becomes; links stay, for a virtual environment's python is one."""
    name = os.path.expanduser(python)
    return os.path.abspath(name) if os.sep in name else shutil.which(name) or name


def require_atroposlib(python: str) -> None:
    """Raise ProfileError, on one line with the command that helps, unless this interpreter has atroposlib."""
    path = Path(find_interpreter(python))
    if not path.is_file():
        raise ProfileError(f"atropos.python: there is no {python}; to make one: {_make(python)}")
    if not os.access(path, os.X_OK):
        raise ProfileError(f"atropos.python: {python} is not a program that can be run")
    try:
        asked = subprocess.run(
            [path, "-c", HAS_ATROPOSLIB], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(f"atropos.python: {python} cannot be run: {error}") from error
    if asked.returncode == LACKS:
        raise ProfileError(f"atropos.python: {python} has no atroposlib: {python} -m pip install atroposlib")
    if asked.returncode:
        raise ProfileError(f"atropos.python: {python} is no Python that works: it ended with {asked.returncode}")


def require_environments(profile: Profile) -> None:
    """Raise ProfileError unless everything is there that a profile's environments are run with."""
    if not profile.atropos.python:
        return
    require_atroposlib(profile.atropos.python)
    for section in profile.environments:
        if not Path(section.script).is_file():
            raise ProfileError(f"environments: {section.name!r}: there is no script {section.script}")


def _make(python: str) -> str:
    place = Path(python).parent
    environment = place.parent if place.name == "bin" else Path(".atropos")
    return f"python3 -m venv {environment} && {environment}/bin/pip install atroposlib"
