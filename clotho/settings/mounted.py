"""Settings that attachments add to the sections of the library and of a profile.

An attachment declares its settings in `attachments/<name>/sections.py`. The struct of a section lacks them; a profile
is decoded to a struct that extends it, and the attachment reads its settings from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec
from msgspec import Struct

P = TypeVar("P", bound=Struct)
T = TypeVar("T")

PathKind = Literal["input", "model", "code", "caller"]
"""What a path is relative to: the profile, if it is there, or else the working directory; the same, or else it is the
name of a repository; the profile, if it begins with `./` or `../` or is a file there, or else it is a name of Python;
always the working directory."""

NONE: Mapping[str, PathKind] = {}


class Setting(Struct, Generic[T], frozen=True, kw_only=True, eq=False):
    """One key of an attachment: its path, such as `engine.speculation`, the type of its value, and its default.

    attachment: the name of its folder. after: the key of the same table that it follows in lists; empty: the last.
    displaced_by: a layer that sets this key removes the value of lower layers, unless it sets one. unused_by: commands
    that do without the setting. used_by: commands that need it, although it is a table of its own. paths: keys whose
    values are paths, each with what they are relative to.
    """

    path: str
    kind: Any
    default: T
    attachment: str
    after: str = ""
    displaced_by: str = ""
    unused_by: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()
    paths: Mapping[str, PathKind] = NONE

    @property
    def table(self) -> str:
        """The path of the table that has the key; empty at the top."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def of(self, section: Struct) -> T:
        """Return the value in the struct of the table; the default if this struct does not have the key."""
        found: T = getattr(section, self.name, self.default)
        return found

    def put(self, section: P, value: T) -> P:
        """Return the struct of the table with another value."""
        if self.name in section.__struct_fields__:
            return msgspec.structs.replace(section, **{self.name: value})
        fields = {name: getattr(section, name) for name in section.__struct_fields__}
        kind = cast("type[P]", _extended(type(section), self))
        return kind(**fields, **{self.name: value})


@cache
def _extended(kind: type[Struct], setting: Setting[Any]) -> type[Struct]:
    return extended_struct(kind, [(setting.name, setting.kind, setting.default)])


def extended_struct(kind: type[Struct], fields: list[tuple[str, Any, Any]]) -> type[Struct]:
    """Return a subclass with more fields: name, type and default of each."""
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__,
        fields,
        bases=(kind,),
        module=kind.__module__,
        namespace={"__doc__": kind.__doc__},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=config.forbid_unknown_fields,
        tag=config.tag,
        tag_field=config.tag_field,
    )
