"""Settings that attachments add to the sections of the library and of a profile.

An attachment declares its settings in `attachments/<name>/sections.py`. The struct of a section lacks them; a profile
is decoded to a struct that extends it, and the attachment reads its settings from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from clotho.settings.bounds import Off

P = TypeVar("P", bound=Struct)
T = TypeVar("T")

PathKind = Literal["input", "model", "code", "caller"]
"""What a path is relative to: the profile, if it is there, or else the working directory; the same, or else it is the
name of a repository; the profile, if it begins with `./` or `../`, or else it is a name of Python; always the working
directory."""

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
    return _subclass(kind, [(setting.name, setting.kind, setting.default)])


def mount(kind: type[P], settings: Iterable[Setting[Any]], table: str = "") -> type[P]:
    """Return the struct with these settings in its tables: a subclass, whose tables are subclasses too.

    table: the path of the table that the struct describes; empty: it holds tables. Settings of tables that the struct
    lacks are left out. Of a union, each type but `off` gets them.
    """
    return cast("type[P]", _mounted(kind, f"{table}.".lstrip("."), tuple(settings)))


def without_settings(section: Struct, kind: type[P]) -> P:
    """Return the struct without the settings of attachments, which then have their defaults."""
    return kind(**{name: getattr(section, name) for name in kind.__struct_fields__})


@cache
def _mounted(kind: type[Struct], prefix: str, settings: tuple[Setting[Any], ...]) -> type[Struct]:
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.encode_name}."
        if any(setting.path.startswith(path) for setting in settings):
            tables = partial(_mounted, prefix=path, settings=settings)
            annotation, default = _replaced(field.type, tables), field.default
            if isinstance(default, Struct) and not isinstance(default, Off):
                default = msgspec.convert(msgspec.to_builtins(default), tables(type(default)))
            fields.append((field.name, annotation, msgspec.field(default=default, name=field.encode_name)))
    own = [one for one in settings if one.table == prefix.removesuffix(".")]
    fields += [(one.name, one.kind, one.default) for one in own]
    return _subclass(kind, fields) if fields else kind


def _subclass(kind: type[Struct], fields: list[tuple[str, Any, Any]]) -> type[Struct]:
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


def _replaced(annotation: Any, tables: Callable[[type[Struct]], type[Struct]]) -> Any:
    """An annotation with other structs."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[(_replaced(arguments[0], tables), *annotation.__metadata__)]
    if origin in (Union, UnionType):
        return reduce(or_, [_replaced(one, tables) for one in arguments])
    if isinstance(annotation, type) and issubclass(annotation, Struct) and not issubclass(annotation, Off):
        return tables(annotation)
    return annotation
