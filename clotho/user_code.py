"""Imports code of the user that a profile names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from protocols.errors import ProfileError, did_you_mean


def load_named(name: str, key: str, *, file: str = "") -> Any:
    """Return what `module:name` or `path/to/file.py:name` names.

    key: of the profile, for errors. file: a copy of the file, to import in its place. Raises ProfileError.
    """
    written, _, attribute = name.rpartition(":")
    place = file or written
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else import_user_module(place)
    except (Exception, SystemExit) as error:
        raise ProfileError(f"{key} {name!r}: cannot import {place!r}: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        functions = [word for word, value in vars(module).items() if callable(value)]
        raise ProfileError(
            f"{key} {name!r}: module {module.__name__!r} has no {attribute!r}{did_you_mean(attribute, functions)}"
        )
    return getattr(module, attribute)


def import_user_module(name: str) -> ModuleType:
    """Import a module; modules in the working directory are found. Raises what the import raises."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a Python file; a second import of the same file returns the same module."""
    path = path.expanduser().resolve()
    module_name = f"user_file:{path}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
