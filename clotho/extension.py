"""The door of the library: what a folder of `attachments/` adds to it, and how the library finds the folders."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec


class Extension:
    """What one attachment adds to the library. Its `library.py` holds an instance, `EXTENSION`, which has no state.

    A subclass states what it adds; every method adds nothing by default. `library.py` imports no MLX and no web
    framework, and the modules that need them only when they are used, because it is imported at every start.
    """


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions of the attachments that are installed, by the names of their folders.

    An attachment without `library.py` adds nothing to the library.
    """
    attachments = find_spec("attachments")
    places = attachments.submodule_search_locations if attachments else None
    names = sorted(one.name for one in pkgutil.iter_modules(places or []) if one.ispkg)
    modules = [f"attachments.{name}.library" for name in names]
    return tuple(import_module(module).EXTENSION for module in modules if find_spec(module))
