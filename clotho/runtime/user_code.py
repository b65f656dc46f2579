"""Code of the user's own, named in a profile: imported from wherever the run was started."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """Import a module, also one that lies in the working directory; raises whatever importing it raises."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    return importlib.import_module(name)
