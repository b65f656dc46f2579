"""The registry of attachments: the folders of `attachments/` that are installed, and the doors by which they add.

A door belongs to the module that asks at it. A folder answers with what has the name of the door in its `library.py`,
or `attachment.py` for a run. These modules are imported at every start, so that they import what is expensive only
where it is used. Tables name functions as text, `module:name`, and `provided` imports them when they are used.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


class Door(Generic[Asked, Answer]):
    """A function that folders may have: a call returns the answers of those that have it, by their names."""

    def __init__(self, place: str) -> None:
        """place: the module of a folder and the name in it, such as `library.engine`."""
        self.place = place

    @property
    def functions(self) -> list[Callable[Asked, Answer]]:
        """The functions, to await them one after another."""
        return [*found(self.place).values()]

    def __call__(self, *args: Asked.args, **kwargs: Asked.kwargs) -> list[Answer]:
        """Ask every folder."""
        return [function(*args, **kwargs) for function in self.functions]

    def first(self: Door[Asked, Answer | None], *args: Asked.args, **kwargs: Asked.kwargs) -> Answer | None:
        """Return the first answer that is not None; the folders behind it are not asked. None without one."""
        answers = (function(*args, **kwargs) for function in self.functions)
        return next((answer for answer in answers if answer is not None), None)


class TableDoor(Generic[Answer]):
    """A table that folders may have. owners: attachments by the names of their rows, for `absence`."""

    def __init__(self, place: str, owners: Mapping[str, str] | None = None) -> None:
        """place: as of a `Door`."""
        self.place, self.owners = place, owners or {}

    def __call__(self) -> dict[str, Answer]:
        """Return the rows of all folders, by name."""
        return {name: row for table in found(self.place).values() for name, row in table.items()}

    def absence(self, name: str) -> str:
        """Return why the table has no row: its attachment is not installed. Empty for names of no attachment."""
        return needs(self.owners[name]) if name in self.owners else ""


class RowsDoor(Generic[Answer]):
    """A sequence that folders may have."""

    def __init__(self, place: str) -> None:
        """place: as of a `Door`."""
        self.place = place

    def __call__(self) -> list[Answer]:
        """Return the rows of all folders."""
        return [row for rows in found(self.place).values() for row in rows]


def found(place: str) -> dict[str, Any]:
    """Return what folders have at a place, such as `library.engine`, by the names of the folders."""
    module, _, name = place.partition(".")
    return {folder: vars(one)[name] for folder, one in attachment_modules(module).items() if name in vars(one)}


@cache
def attachment_names() -> tuple[str, ...]:
    """Return the names of the folders of `attachments/` that are installed, sorted."""
    return tuple(sorted(one.name for one in pkgutil.iter_modules(_places()) if one.ispkg))


@cache
def attachment_modules(name: str) -> Mapping[str, ModuleType]:
    """Import the modules of this name in the folders of `attachments/`; return them by folder, sorted."""
    return {
        folder: import_module(f"attachments.{folder}.{name}")
        for folder in attachment_names()
        if PathFinder.find_spec(f"attachments.{folder}.{name}", [os.path.join(place, folder) for place in _places()])
    }


def _places() -> list[str]:
    package = find_spec("attachments")
    return list(package.submodule_search_locations or ()) if package else []


def provided(place: str) -> Any:
    """Import what a row names as `module:name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def needs(attachment: str) -> str:
    """Return the refusal of what an attachment would provide."""
    return f"needs the attachment {attachment!r}, which this installation lacks"
