"""The keys of a profile, read from its structs.

Flags, error messages, `--help` and the reference page are generated from these keys. A struct is a table. A union of
structs with the tag field `type` is a table whose keys depend on its type. The path of the type is `TABLE.type`; the
flag `--TABLE` is short for `--TABLE.type`. A choice is the path of the type of a union.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo

from clotho.config.nearest import CUTOFF, similarity
from clotho.config.other_trainers import advice, by_name
from clotho.config.schema import Profile

Kind = Literal["bool", "int", "float", "text", "list", "tables"]

REQUIRED = msgspec.NODEFAULT
"""Stands for the default of a key without a default."""

TYPE = "type"
"""The tag field of every union."""

HANDICAP = 0.05
"""Keys of other tables are suggested only if their similarity is larger by this value."""

UNIONS = (types.UnionType, Union)


class Variant(Struct, frozen=True, kw_only=True):
    """A key under one combination of types. types: the type of each union, by choice."""

    types: dict[str, str]
    annotation: Any
    allowed: str
    default: Any
    help: str


class Key(Struct, frozen=True, kw_only=True):
    """One setting.

    path: `learner.batch_size`; `steps` at the top; `rewards.weight` in an array of tables; `learner.optimizer.type` for
        the type of a union.
    kind: how the text of a flag is parsed. item: how each item of a list is parsed.
    optional: whether `none` is allowed.
    variants: one for each combination of types that has the key; exactly one, without types, if every profile has it.
    """

    path: str
    kind: Kind
    item: Kind | None
    optional: bool
    variants: tuple[Variant, ...]

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The flag that sets the key."""
        return "--" + self.path.removesuffix(f".{TYPE}").replace("_", "-")

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        return " or ".join(dict.fromkeys(variant.allowed for variant in self.variants))

    @property
    def help(self) -> str:
        """The description; all descriptions if they differ between types."""
        return " ".join(dict.fromkeys(variant.help for variant in self.variants))

    @property
    def default(self) -> Any:
        """The default of the first type that has the key."""
        return self.variants[0].default

    @property
    def required(self) -> bool:
        """Whether every profile must set the key."""
        return self.default is REQUIRED and not self.variants[0].types


class Section(Struct, frozen=True, kw_only=True):
    """A table of the profile.

    name: path of the table; empty at the top. repeated: the table is an array of tables. types: description of each
    type of a union.
    """

    name: str
    title: str
    repeated: bool
    keys: tuple[Key, ...]
    types: dict[str, str]


@cache
def sections() -> tuple[Section, ...]:
    """All tables: the top of the file first, then in the order of the structs, nested tables after their parents."""
    walk = _Walk()
    walk.struct(Profile, "", {}, None)
    return tuple(
        Section(
            name=name,
            title=table.title,
            repeated=table.repeated,
            types=table.types,
            keys=tuple(_key(path, tuple(variants)) for path, variants in table.variants.items()),
        )
        for name, table in walk.tables.items()
    )


@cache
def keys() -> dict[str, Key]:
    """All keys by path, including keys inside arrays of tables."""
    return {key.path: key for section in sections() for key in section.keys}


@cache
def settable() -> dict[str, Key]:
    """The keys that have a flag, by path: keys outside arrays of tables, and each array of tables as a whole."""
    arrays = {section.name for section in sections() if section.repeated}
    found = {path: key for path, key in keys().items() if path.partition(".")[0] not in arrays}
    fields = {field.encode_name: field for field in msgspec.structs.fields(Profile)}
    return found | {name: _array_key(fields[name]) for name in arrays}


@cache
def choices() -> dict[str, tuple[str, ...]]:
    """The types of every union, by choice, for example `learner.optimizer.type`."""
    return {f"{section.name}.{TYPE}": tuple(section.types) for section in sections() if section.types}


def flag_key(name: str) -> Key | None:
    """The key that a flag sets. name: the flag without leading dashes, which is the path of a key or of a union."""
    return settable().get(name) or settable().get(f"{name}.{TYPE}")


def types_of(key: Key, choice: str) -> tuple[str, ...]:
    """The types of the union at `choice` that have the key; empty if every type has it."""
    found = dict.fromkeys(variant.types[choice] for variant in key.variants if choice in variant.types)
    return () if found.keys() == set(choices()[choice]) else tuple(found)


def chosen_types(values: Mapping[str, Any]) -> dict[str, str]:
    """The type of every union in a profile with these settings, by choice."""
    chosen: dict[str, str] = {}
    for path in choices():
        available = [variant for variant in keys()[path].variants if variant.types.items() <= chosen.items()]
        if available:
            chosen[path] = values.get(path, available[0].default)
    return chosen


def why_unavailable(path: str, values: Mapping[str, Any]) -> str | None:
    """The reason why a profile with these settings does not have the key `path`; None if it has the key."""
    key, chosen = keys()[path], chosen_types(values)
    if any(variant.types.items() <= chosen.items() for variant in key.variants):
        return None
    needed = {choice: types_of(key, choice) for choice in choices() if choice in key.variants[0].types}
    choice = next(choice for choice, allowed in needed.items() if allowed and chosen.get(choice) not in allowed)
    union = choice.removesuffix(f".{TYPE}")
    return f"{path} is not a setting of {union} {chosen.get(choice)!r}; it belongs to {', '.join(needed[choice])}"


def names(paths: Iterable[str]) -> str:
    """The paths, sorted, for a message."""
    return ", ".join(sorted(paths))


def nearest_key(path: str) -> str:
    """The suggestion for the unknown key or table `path`.

    A name of another trainer suggests the corresponding key. Otherwise keys of the same table are preferred to keys of
    other tables.
    """
    table, _, name = path.rpartition(".")
    if row := by_name().get(path) or by_name().get(name):
        return f"did you mean {' and '.join(row.keys)}?" if row.keys else advice(path) or advice(name) or ""
    same = {key.path: key.name for key in keys().values() if key.path.rpartition(".")[0] == table}
    elsewhere = [(key.path, key.name) for key in keys().values()]
    elsewhere += [(section.name, section.name.rpartition(".")[2]) for section in sections() if section.name]
    ranked = [(similarity(name, candidate), key) for key, candidate in same.items()]
    ranked += [(similarity(name, candidate) - HANDICAP, key) for key, candidate in elsewhere]
    best, key = max(ranked)
    if best >= CUTOFF:
        return f"did you mean {key}?"
    tables = names(section.name for section in sections() if section.name and "." not in section.name)
    return f"there are: {names(same)}" if same else f"sections: {tables}"


def in_words(annotation: Any) -> str:
    """The allowed values of a type, in words: `an integer >= 1`, `one of keep, drain`."""
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
        return f"text of the form {meta.title}" if meta.title else "text, not empty" if meta.min_length else "text"
    word = {bool: "true or false", int: "an integer", float: "a number"}.get(base, "a value")
    return word + (f" {' and '.join(bounds)}" if bounds else "")


def _list_in_words(base: Any, meta: Meta) -> str:
    arguments = get_args(base)
    if arguments[-1] is not Ellipsis:
        return f"[{', '.join(in_words(part) for part in arguments)}]"
    least = f", at least {meta.min_length}" if meta.min_length else ""
    return f"a list, each {in_words(arguments[0])}{least}"


class _Table(Struct, kw_only=True):
    """A section under construction: the variants of each key, by path."""

    title: str
    repeated: bool
    types: dict[str, str] = {}
    variants: dict[str, list[Variant]] = {}


class _Walk:
    """Visits every field of every struct below the profile, under every combination of types."""

    def __init__(self) -> None:
        self.tables: dict[str, _Table] = {}

    def struct(
        self, struct: type[Struct], name: str, types: dict[str, str], default: Any, *, repeated: bool = False
    ) -> None:
        """Add the keys of the table `name`. default: an instance whose values are the defaults, or None."""
        table = self.tables.setdefault(name, _Table(title=_first_sentence(struct), repeated=repeated))
        prefix = f"{name}." if name else ""
        nested: list[tuple[FieldInfo, tuple[type[Struct], ...], Any]] = []
        for field in msgspec.structs.fields(struct):
            value = getattr(default, field.name) if type(default) is struct else _default(field)
            if members := _structs(field.type) or _array_items(field.type):
                nested.append((field, members, value))
                continue
            text = _without_meta(field.type)[1].description or ""
            self._add(table, prefix + field.encode_name, types, field.type, value, text)
        for field, members, value in nested:
            self._nested(field, members, prefix + field.encode_name, types, value)

    def _nested(
        self, field: FieldInfo, members: tuple[type[Struct], ...], path: str, types: dict[str, str], default: Any
    ) -> None:
        if members[0].__struct_config__.tag is None:
            self.struct(members[0], path, types, default, repeated=bool(_array_items(field.type)))
            return
        text = _without_meta(field.type)[1].description or ""
        tags = {str(member.__struct_config__.tag): member for member in members}
        table = self.tables.setdefault(path, _Table(title="", repeated=False))
        table.types |= {tag: _first_sentence(member) for tag, member in tags.items()}
        default_tag = REQUIRED if default is REQUIRED else type(default).__struct_config__.tag
        choice = f"{path}.{TYPE}"
        self._add(table, choice, types, Literal[tuple(tags)], default_tag, text)
        for tag, member in tags.items():
            self.struct(member, path, {**types, choice: tag}, default)

    @staticmethod
    def _add(table: _Table, path: str, types: dict[str, str], annotation: Any, default: Any, text: str) -> None:
        variant = Variant(types=types, annotation=annotation, allowed=in_words(annotation), default=default, help=text)
        table.variants.setdefault(path, []).append(variant)


def _key(path: str, variants: tuple[Variant, ...]) -> Key:
    parts = _parts(variants[0].annotation)
    kind, item = _kind(next(part for part in parts if part is not types.NoneType))
    return Key(path=path, kind=kind, item=item, optional=types.NoneType in parts, variants=variants)


def _array_key(field: FieldInfo) -> Key:
    title = _first_sentence(_array_items(field.type)[0])
    default = _default(field)
    variant = Variant(types={}, annotation=field.type, allowed=in_words(field.type), default=default, help=title)
    return Key(path=field.encode_name, kind="list", item="tables", optional=False, variants=(variant,))


def _kind(annotation: Any) -> tuple[Kind, Kind | None]:
    base, _ = _without_meta(annotation)
    if get_origin(base) is tuple:
        return "list", _kind(get_args(base)[0])[0]
    if get_origin(base) is dict or (isinstance(base, type) and issubclass(base, Struct)):
        return "tables", None
    scalar: dict[Any, Kind] = {bool: "bool", int: "int", float: "float"}
    return scalar.get(base, "text"), None


def _default(field: FieldInfo) -> Any:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; the type itself if it is not a union."""
    base, _ = _without_meta(annotation)
    return get_args(base) if get_origin(base) in UNIONS else (base,)


def _structs(annotation: Any) -> tuple[type[Struct], ...]:
    """The structs of a nested table; empty for a key."""
    parts = [_without_meta(part)[0] for part in _parts(annotation)]
    return tuple(parts) if all(isinstance(part, type) and issubclass(part, Struct) for part in parts) else ()


def _array_items(annotation: Any) -> tuple[type[Struct], ...]:
    """The struct of an array of tables; empty for other types."""
    base, _ = _without_meta(annotation)
    return _structs(get_args(base)[0]) if get_origin(base) is tuple else ()


def _without_meta(annotation: Any) -> tuple[Any, Meta]:
    """A type without its annotations, and the annotations combined."""
    if get_origin(annotation) is not Annotated:
        return annotation, Meta()
    base, *metas = get_args(annotation)
    fields = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length", "title", "description")
    given = {name: value for meta in metas for name in fields if (value := getattr(meta, name)) is not None}
    return base, Meta(**given)


def _first_sentence(struct: type[Struct]) -> str:
    first = inspect.cleandoc(struct.__doc__ or "").partition("\n\n")[0]
    return re.sub(r"^\[+[\w.]+\]+ ", "", " ".join(first.split()))
