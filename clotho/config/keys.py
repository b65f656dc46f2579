"""The keys of a profile, read from its structs: what flags, error messages, `--help` and the manual are made of."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from clotho.config.schema import Profile

Kind = Literal["bool", "int", "float", "text", "list", "tables"]

REQUIRED = msgspec.NODEFAULT
"""The default of a key that must be given."""


UNIONS = (types.UnionType, Union)


class Key(Struct, frozen=True, kw_only=True):
    """One setting.

    path: `learner.learning_rate`; `steps` at the top; `rewards.weight` inside an array of tables.
    kind: how a flag's text is read; item: the same for the items of a list.
    allowed: what may stand there, in words. optional: may be left without any value.
    help: from the section's docstring.
    """

    path: str
    type: Any
    kind: Kind
    item: Kind | None
    allowed: str
    optional: bool
    default: Any
    help: str

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition(".")[2]


class Section(Struct, frozen=True, kw_only=True):
    """A table of the profile: `name` is empty at the top; `repeated` where it is an array of tables."""

    name: str
    title: str
    repeated: bool
    keys: tuple[Key, ...]


@cache
def sections() -> tuple[Section, ...]:
    """Every section, the top of the file first, then in the order of the struct."""
    top: list[Key] = []
    tables: list[Section] = []
    for field in msgspec.structs.fields(Profile):
        struct, repeated = _struct_of(field.type)
        if struct is None:
            top.append(_key("", field, key_help(Profile)))
            continue
        prefix = f"{field.encode_name}."
        keys = tuple(_key(prefix, inner, key_help(struct)) for inner in msgspec.structs.fields(struct))
        tables.append(Section(name=field.encode_name, title=_title(struct), repeated=repeated, keys=keys))
    return (Section(name="", title=_title(Profile), repeated=False, keys=tuple(top)), *tables)


@cache
def keys() -> dict[str, Key]:
    """Every key by its path, those inside arrays of tables included."""
    return {key.path: key for section in sections() for key in section.keys}


@cache
def settable() -> dict[str, Key]:
    """What one flag sets, by path: every key outside arrays of tables, and each array of tables as a whole."""
    found: dict[str, Key] = {}
    for section in sections():
        if section.repeated:
            found[section.name] = _tables_key(section)
        else:
            found.update({key.path: key for key in section.keys})
    return found


def key_help(struct: type[Struct]) -> dict[str, str]:
    """The `key: text` and `key, key: text` lines of a struct's docstring and of its bases', by key."""
    found: dict[str, str] = {}
    for parent in reversed(struct.__mro__):
        if not (isinstance(parent, type) and issubclass(parent, Struct)):
            continue
        lines = inspect.cleandoc(parent.__doc__ or "").splitlines()
        entry: list[str] = []
        for line in lines:
            if match := re.match(r"([a-z]\w*(?:, [a-z]\w*)*): (.*)", line):
                entry = match[1].split(", ")
                found.update(dict.fromkeys(entry, match[2]))
            elif line.startswith("    ") and entry:
                found.update({name: f"{found[name]} {line.strip()}" for name in entry})
            else:
                entry = []
    return found


def in_words(annotation: Any) -> str:
    """What a type allows, as an error message or a manual says it: `an integer >= 1`, `one of keep, drain`."""
    base, meta = _without_meta(annotation)
    bounds = [
        f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value}"
        for sign, value in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
        if value is not None
    ]
    if get_origin(base) is tuple:
        return _list_in_words(base, meta)
    if get_origin(base) in UNIONS:
        return " or ".join("none" if part is types.NoneType else in_words(part) for part in get_args(base))
    if get_origin(base) is Literal:
        return "one of " + ", ".join(get_args(base))
    if (isinstance(base, type) and issubclass(base, Struct)) or get_origin(base) is dict:
        return "a table"
    if base is str:
        form = f" of the form {meta.description}" if meta.description else ", not empty" if meta.min_length else ""
        return f"text{form}"
    word = {bool: "true or false", int: "an integer", float: "a number"}.get(base, "a value")
    return word + (f" {' and '.join(bounds)}" if bounds else "")


def _list_in_words(base: Any, meta: msgspec.Meta) -> str:
    arguments = get_args(base)
    if arguments[-1] is not Ellipsis:
        return f"[{', '.join(in_words(part) for part in arguments)}]"
    least = f", at least {meta.min_length}" if meta.min_length else ""
    return f"a list, each {in_words(arguments[0])}{least}"


def _without_meta(annotation: Any) -> tuple[Any, msgspec.Meta]:
    if get_origin(annotation) is Annotated:
        base, *metas = get_args(annotation)
        return base, next((meta for meta in metas if isinstance(meta, msgspec.Meta)), msgspec.Meta())
    return annotation, msgspec.Meta()


def _struct_of(annotation: Any) -> tuple[type[Struct] | None, bool]:
    """The section's struct and whether there may be several; (None, False) where it is a plain key."""
    base, _ = _without_meta(annotation)
    if isinstance(base, type) and issubclass(base, Struct):
        return base, False
    if get_origin(base) is tuple and isinstance(item := get_args(base)[0], type) and issubclass(item, Struct):
        return item, True
    return None, False


def _key(prefix: str, field: msgspec.structs.FieldInfo, helps: dict[str, str]) -> Key:
    base, _ = _without_meta(field.type)
    parts = get_args(base) if get_origin(base) in UNIONS else (base,)
    optional = types.NoneType in parts
    kind, item = _kind(next(part for part in parts if part is not types.NoneType))
    default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    return Key(
        path=prefix + field.encode_name,
        type=field.type,
        kind=kind,
        item=item,
        allowed=in_words(field.type),
        optional=optional,
        default=default,
        help=helps.get(field.encode_name, ""),
    )


def _kind(annotation: Any) -> tuple[Kind, Kind | None]:
    base, _ = _without_meta(annotation)
    if get_origin(base) is tuple:
        item = _kind(get_args(base)[0])[0]
        return "list", item
    if get_origin(base) is dict or (isinstance(base, type) and issubclass(base, Struct)):
        return "tables", None
    scalar: dict[Any, Kind] = {bool: "bool", int: "int", float: "float"}
    return scalar.get(base, "text"), None


def _tables_key(section: Section) -> Key:
    field = next(f for f in msgspec.structs.fields(Profile) if f.encode_name == section.name)
    default = () if field.default is not msgspec.NODEFAULT else REQUIRED
    return Key(
        path=section.name,
        type=field.type,
        kind="list",
        item="tables",
        allowed=in_words(field.type),
        optional=False,
        default=default,
        help=section.title,
    )


def _title(struct: type[Struct]) -> str:
    first = inspect.cleandoc(struct.__doc__ or "").splitlines()[0]
    return re.sub(r"^\[+\w+\]+ ", "", first)


def names(paths: Iterable[str]) -> str:
    """Paths as a message lists them."""
    return ", ".join(sorted(paths))
