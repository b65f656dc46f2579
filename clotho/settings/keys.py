"""The keys of settings, read from their structs; tables are checked against them, and decoded to a struct.

A struct is a table. A union of structs with the tag field `type` is a table whose keys depend on its type. A choice is
the path of the type of a union, `TABLE.type`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, inspect

from clotho.settings.bounds import ZERO_IS_OFF
from clotho.settings.mounted import Setting
from protocols.errors import CUTOFF, ProfileError, did_you_mean, similarity, visible

P = TypeVar("P", bound=Struct)

NONE: Mapping[str, str] = {}

REQUIRED, TYPE = msgspec.NODEFAULT, "type"
"""The default of a key without a default, and the tag field of every union."""

HANDICAP, MAX_DEPTH, MAX_INTEGER = 0.15, 32, 2**53
"""Additional similarity that a suggestion of another table needs, and limits of values: levels and size of integers."""

OFF = frozenset({"off", "none"})
"""Words for what is not used. A union has the type `off`."""

Advice = Callable[[str, Callable[[str], str]], str | None]
"""Says which key replaces a name of another program; None for a name that no other program has. The function that it
gets spells a key."""

Planned = Callable[[str, str], str]
"""Says of the value of a choice that it is planned; empty for any other value."""

Described = tuple[inspect.Field, msgspec.structs.FieldInfo]
"""A field of a struct, as a type and as an annotation."""


class Variant(NamedTuple):
    """The default of a key under one combination of types. types: the type of each union around the key, by choice."""

    types: dict[str, str]
    default: Any


class Key(Struct, frozen=True, kw_only=True):
    """One setting. shape: of its value. variants: by types. attachment: folder that adds it; empty for the core."""

    path: str
    annotation: Any
    shape: inspect.Type
    help: str
    variants: list[Variant]
    attachment: str = ""

    @property
    def allowed(self) -> str:
        """The allowed values, in words: `an integer >= 1`, `one of keep, drain`."""
        return _in_words(self.shape)

    def variant(self, chosen: Mapping[str, str]) -> Variant | None:
        """The variant in a profile with these types; None if the profile does not have the key."""
        for variant in self.variants:
            if variant.types.items() <= chosen.items():
                return variant
        return None


class Section(Struct, frozen=True, kw_only=True):
    """A table, or an array of tables (repeated). types: their descriptions. attachment: adds it; empty: the core."""

    name: str
    title: str = ""
    repeated: bool = False
    types: dict[str, str] = {}
    keys: dict[str, Key] = {}
    attachment: str = ""


def read_sections(root: type[Struct], mounted: Mapping[str, Setting[Any]]) -> dict[str, Section]:
    """The tables of a struct by path (empty at the top), in the order of the fields, nested tables after parents.

    mounted: the settings of attachments by path, which take the places that they name.
    """
    tables: dict[str, Section] = {}

    def owner(path: str) -> str:
        """The attachment that adds a key; empty for one of the core."""
        above = (path.rsplit(".", levels)[0] for levels in range(path.count(".") + 1))
        return next((mounted[one].attachment for one in above if one in mounted), "")

    def section(path: str, *, title: str = "", repeated: bool = False) -> Section:
        return Section(name=path, title=title, repeated=repeated, attachment=owner(path))

    def visit(struct: Any, name: str, types: dict[str, str], defaults: Any, *, repeated: bool = False) -> None:
        """Add the keys of a table under one combination of types. defaults: an instance with the defaults, or None."""
        table = tables.setdefault(name, section(name, title=_title(struct), repeated=repeated))
        described = zip(struct.fields, msgspec.structs.fields(struct.cls), strict=True)
        for field, annotated in in_place(list(described), name, mounted):
            path, shape, annotation = f"{name}.{field.encode_name}".lstrip("."), field.type, annotated.type
            given = field.default_factory() if callable(field.default_factory) else field.default
            given = getattr(defaults, field.name) if type(defaults) is struct.cls else given
            text, holder, key_path, default = _extra(shape, "description"), table, path, given
            first, *others = members = members_of(shape)
            union = {str(member.tag): member for member in members if isinstance(member, inspect.StructType)}
            if isinstance(first, inspect.StructType) and not others and first.tag is None:
                visit(first, path, types, given)
                continue
            if items := array_items(shape):
                visit(items, path, types, None, repeated=True)
                text = tables[path].title
            elif union:
                holder, key_path = tables.setdefault(path, section(path)), f"{path}.{TYPE}"
                holder.types.update({tag: _title(member) for tag, member in union.items()})
                default = given if given is REQUIRED else type(given).__struct_config__.tag
                tags: Any = tuple(union)
                shape, annotation = inspect.LiteralType(tags), Literal[tags]
            added = owner(path)
            key = Key(path=key_path, annotation=annotation, shape=shape, help=text, variants=[], attachment=added)
            holder.keys.setdefault(key_path, key).variants.append(Variant(types, default))
            for tag, member in union.items():
                visit(member, path, {**types, key_path: tag}, given)

    visit(inspect.type_info(root), "", {}, None)
    return tables


def in_place(fields: list[Described], table: str, mounted: Mapping[str, Setting[Any]]) -> list[Described]:
    """The fields of a table in the order of lists: each setting of an attachment after the key that it names."""
    settings = {field[0].encode_name: mounted.get(f"{table}.{field[0].encode_name}".lstrip(".")) for field in fields}
    order = [field for field in fields if settings[field[0].encode_name] is None]
    waiting = [field for field in fields if field not in order]
    while waiting:
        names = [field.encode_name for field, _ in order]
        places = [(field, one.after) for field in waiting if (one := settings[field[0].encode_name])]
        found, after = next((place for place in places if place[1] in names), (waiting[0], names[-1]))
        order.insert(names.index(after) + 1, found)
        waiting.remove(found)
    return order


def is_default(default: Any, value: Any) -> bool:
    """Whether a value is the default of its key. Either may be a struct or a tuple, or their plain counterpart."""
    return default is not REQUIRED and msgspec.json.encode(value) == msgspec.json.encode(default)


class Keys:
    """The keys of a struct and of the tables in it.

    sections: tables by path. all: keys by path, including arrays of tables and the keys inside. settable: the keys
    outside arrays of tables, and each array of tables as a whole. choices: the types of every union, by choice, for
    example `learner.optimizer.type`; outer unions precede inner ones.
    """

    def __init__(
        self,
        root: type[Struct],
        *,
        mounted: Iterable[Setting[Any]] = (),
        absent: Mapping[str, str] = NONE,
        advice: Advice = lambda *_: None,
        planned: Planned = lambda *_: "",
        other_names: Mapping[str, str] = NONE,
    ) -> None:
        """mounted: the settings of attachments in the struct. absent: attachments that are not there, by their keys.

        other_names: paths of keys, by other paths that are accepted.
        """
        self.mounted = {setting.path: setting for setting in mounted}
        self.sections = read_sections(root, self.mounted)
        self.all = {path: key for section in self.sections.values() for path, key in section.keys.items()}
        self.settable = {
            path: key for path, key in self.all.items() if not self.sections[path.rpartition(".")[0]].repeated
        }
        self.choices = {
            f"{name}.{TYPE}": tuple(section.types) for name, section in self.sections.items() if section.types
        }
        self._absent, self._advice, self._planned = absent, advice, planned
        self.other_names = other_names

    def named(self, name: str) -> Key | None:
        """Return the settable key of a name: its path, or the path of a union for its type."""
        name = self.other_names.get(name, name)
        return self.settable.get(name) or self.settable.get(f"{name}.{TYPE}")

    def changed_rows(self, path: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the tables of an array without the keys that have their default."""
        defaults = {name: self.all[f"{path}.{name}"].variants[0].default for row in rows for name in row}
        return [{name: row[name] for name in row if not is_default(defaults[name], row[name])} for row in rows]

    def types_of(self, key: Key, choice: str) -> tuple[str, ...]:
        """Return the types of the union at `choice` that have the key; nothing if every type has it."""
        found = dict.fromkeys(variant.types[choice] for variant in key.variants if choice in variant.types)
        return () if found.keys() == set(self.choices[choice]) else tuple(found)

    def chosen_types(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the type of every union with these settings, by choice."""
        chosen: dict[str, str] = {}
        for path in self.choices:
            if (variant := self.all[path].variant(chosen)) is not None:
                chosen[path] = values.get(path, variant.default)
        return chosen

    def types_first(self, paths: Iterable[str]) -> list[str]:
        """Order paths: the types of outer unions, of inner unions, then all other keys."""
        return sorted(paths, key=lambda path: (path not in self.choices, path.count("."), path))

    def why_unavailable(self, key: Key, chosen: Mapping[str, str]) -> str | None:
        """Return the reason why there is no such key with these types; None if there is."""
        if key.variant(chosen):
            return None
        needed = {choice: self.types_of(key, choice) for choice in key.variants[0].types}
        choice = next(choice for choice, types in needed.items() if types and chosen.get(choice) not in types)
        union, having = choice.removesuffix(f".{TYPE}"), ", ".join(needed[choice])
        return f"{key.path} is not a setting of {union} {chosen.get(choice)!r}; it belongs to {having}"

    def require_known(self, path: str, label: str) -> None:
        """Raise ProfileError, with a suggestion, if there is no such key. label: where the key was found."""
        if path not in self.all:
            if lacking := self.lacking(path):
                raise ProfileError(f"{label}: {visible(path, 60)}: {lacking}")
            hint = self.suggestion(path, {*self.all, *filter(None, self.sections)})
            what = "key" if "." in path else "key or section"
            raise ProfileError(f"{label}: unknown {what} {visible(path, 60)}; {hint}")

    def lacking(self, path: str) -> str:
        """Return why a key of an attachment that is not there is refused; empty for any other key."""
        for key, attachment in self._absent.items():
            if f"{path}.".startswith(f"{key}."):
                return f"belongs to the attachment {attachment!r}, which this installation lacks"
        return ""

    def suggestion(self, path: str, candidates: Collection[str], spelled: Callable[[str], str] = str) -> str:
        """Return the end of the refusal of the unknown key, table or flag `path`. spelled: how a path is written.

        A name of another program leads to the corresponding key. Otherwise the most similar candidate is suggested, if
        possible of the same table or of one inside; if none is similar, the keys and types of the table are listed.
        """
        table, _, name = path.rpartition(".")
        if hint := self._advice(path, spelled) or self._advice(name, spelled):
            return hint
        parents = {candidate: candidate.removesuffix(f".{TYPE}").rpartition(".") for candidate in candidates}
        ranks = {c: similarity(name, last) - _handicap(parent, table) for c, (parent, _, last) in parents.items()}
        best = max(ranks, key=ranks.__getitem__)
        if ranks[best] >= CUTOFF:
            return f"did you mean {spelled(best)}?"
        beside = [c for c in sorted(candidates) if table in (parents[c][0], c.removesuffix(f".{TYPE}"))]
        types = {c: f" ({', '.join(self.choices[c])})" if c in self.choices else "" for c in beside}
        there = [f"{spelled(c)}{types[c]}" for c in beside if c != table]
        return f"there are: {', '.join(there)}" if there and (table or spelled is str) else "see --help"

    def with_own_word(self, key: Key, value: Any) -> Any:
        """Return a value in which `off` and `none` are what the key has for what is not used: a word, None, or 0."""
        if not isinstance(value, str) or value not in OFF:
            return value
        kinds = members_of(key.shape)
        words = {word for one in kinds if isinstance(one, inspect.LiteralType) for word in one.values}
        numbers = any(isinstance(one, inspect.IntType | inspect.FloatType) for one in kinds)
        if numbers and inspect.NoneType() in kinds:
            return None
        zero_is_off = isinstance(key.shape, inspect.Metadata) and key.shape.extra == ZERO_IS_OFF
        return 0 if zero_is_off else next(iter(words & OFF - {value}), value)

    def converted(self, key: Key, value: Any, where: str, *, text: bool = False) -> Any:
        """Return the value as the type of its key. text: numbers may be texts. Raises ProfileError about `where`."""
        value = self.with_own_word(key, value)
        flaw, found = _flaw(value), value
        try:
            found = flaw or msgspec.convert(value, key.annotation, strict=not text)
        except msgspec.ValidationError as error:
            raise ProfileError(where + self._mistake(key, value, str(error))) from None
        if flaw := flaw or _flaw(found):
            raise ProfileError(f"{where} must {flaw}, not {shown(value)}")
        return found

    def _mistake(self, key: Key, value: Any, error: str) -> str:
        """Which part of a value is wrong, and the allowed values. error: the message of msgspec."""
        place, name = re.findall(r"(?: - at `\$(?:\[(\d+)\])?(?:\.(\w+))?.*`)?$", error)[0]
        inside, items = f"[{place}]" if place else "", members_of(key.shape)[0]
        if missing := re.match(r"Object missing required field `(\w+)`", error):
            return f"{inside}.{missing[1]} is missing"
        allowed = key.allowed
        if place and isinstance(items, inspect.VarTupleType):
            value, allowed = value[int(place)], _in_words(items.item_type)
        if name and isinstance(value, dict) and (field := self.all.get(f"{key.path}.{name}")):
            value, inside, allowed = value.get(name), f"{inside}.{name}", field.allowed
        hint = ""
        if key.path in self.choices and isinstance(value, str):
            hint = self._planned(key.path, value) or did_you_mean(value, self.choices[key.path])
        return f"{inside} must be {allowed}, not {shown(value)}{hint}"


def _handicap(parent: str, table: str) -> float:
    """Return what similarity a key of the table `parent` loses as a suggestion for one of `table`."""
    return 0.0 if parent == table else HANDICAP / 2 if table and parent.startswith(f"{table}.") else HANDICAP


def shown(value: object) -> str:
    """A value for a message, in the form of TOML, shortened."""
    try:
        return visible(json.dumps(value, default=str, ensure_ascii=False), 60)
    except (RecursionError, ValueError):
        return "this value"


def _flaw(value: object, depth: int = 0) -> str:
    """What any value must be, if it is not; empty if there is no objection."""
    if isinstance(value, float) and not math.isfinite(value):
        return "be finite"
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"be between -{MAX_INTEGER} and {MAX_INTEGER}"
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        return "not contain NUL or bytes that are not UTF-8"
    if (value is None and depth) or depth > MAX_DEPTH:
        return f"not contain null or more than {MAX_DEPTH} levels"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, (_flaw(part, depth + 1) for part in inner)), "")


def members_of(shape: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types of a union, without descriptions; the type itself if it is not a union."""
    if isinstance(shape, inspect.Metadata):
        return members_of(shape.type)
    return tuple(members_of(part)[0] for part in shape.types) if isinstance(shape, inspect.UnionType) else (shape,)


def array_items(shape: inspect.Type) -> inspect.StructType | None:
    """The struct of an array of tables; None for other types."""
    items = getattr(members_of(shape)[0], "item_type", None)
    return items if isinstance(items, inspect.StructType) else None


def _in_words(shape: inspect.Type) -> str:
    if title := _extra(shape, "title"):
        return f"text of the form {title}"
    match shape:
        case inspect.Metadata():
            return _in_words(shape.type)
        case inspect.UnionType():
            return " or ".join(map(_in_words, shape.types))
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, shape.values))
        case inspect.VarTupleType():
            least = f", at least {shape.min_length}" if shape.min_length else ""
            return f"a list, each {_in_words(shape.item_type)}{least}"
        case inspect.TupleType():
            return f"[{', '.join(map(_in_words, shape.item_types))}]"
        case inspect.StrType():
            return "text, not empty" if shape.min_length else "text"
        case inspect.IntType() | inspect.FloatType():
            limits = {">=": shape.ge, ">": shape.gt, "<=": shape.le, "<": shape.lt}
            bounds = " and ".join(f"{sign} {limit:.12g}" for sign, limit in limits.items() if limit is not None)
            return f"{'an integer' if isinstance(shape, inspect.IntType) else 'a number'} {bounds}".strip()
    words: dict[type, str] = {inspect.BoolType: "true or false", inspect.NoneType: "none"}
    return words.get(type(shape), "a table")


def _extra(shape: inspect.Type, name: str) -> str:
    return str((shape.extra_json_schema or {}).get(name, "")) if isinstance(shape, inspect.Metadata) else ""


def _title(struct: inspect.StructType) -> str:
    """The first paragraph of the docstring."""
    return " ".join((struct.cls.__doc__ or "").partition("\n\n")[0].split())


def flatten_table(keys: Keys, table: Mapping[str, Any], label: str, prefix: str = "") -> dict[str, Any]:
    """The settings of a table by key path. Raises ProfileError, with a suggestion, for an unknown key or section.

    `optimizer = "muon"` is short for `optimizer = { type = "muon" }`, and `objective = "module:function"` for the type
    `custom` with that function.
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        path = keys.other_names.get(prefix + name, prefix + name)
        section = keys.sections.get(path)
        if section is None:
            keys.require_known(path, label)
            custom = path == "learner.objective.type" and isinstance(value, str) and ":" in value
            named = {path: keys.with_own_word(keys.all[path], value)}
            flat |= {path: "custom", "learner.objective.function": value} if custom else named
        elif section.repeated:
            if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
                raise ProfileError(f"{label}: {path} must be a list of tables: [[{path}]], then one key per line")
            for key in (key for entry in value for key in entry):
                keys.require_known(f"{path}.{key}", label)
            flat[path] = value
        elif isinstance(value, dict) or (section.types and isinstance(value, str)):
            inner = value if isinstance(value, dict) else {TYPE: value}
            flat |= flatten_table(keys, inner, label, f"{path}.")
        else:
            raise ProfileError(f"{label}: {path} must be a section: [{path}], then one key per line")
    return flat


def implied_types(keys: Keys, values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield implied types: a key of a union that is `off` chooses the first type that has it. values: lower ones."""
    chosen = keys.chosen_types({**values, **given})
    for choice in keys.choices:
        if choice not in given and chosen.get(choice) == "off":
            below = [path for path in given if path.startswith(choice.removesuffix(TYPE)) and path in keys.all]
            yield from ((choice, keys.types_of(keys.all[path], choice)[0]) for path in below[:1])


def decode_table(keys: Keys, values: Mapping[str, Any], kind: type[P], label_of: Callable[[str], str]) -> P:
    """Build a struct of tables with these keys. label_of: origin of a setting. Raises ProfileError."""
    checked, chosen = dict[str, Any](), keys.chosen_types(values)
    for path in keys.types_first(values):
        label, key = label_of(path), keys.settable[path]
        checked[path] = keys.converted(key, values[path], f"{label}: {path.removesuffix(f'.{TYPE}')}")
        if (why := keys.why_unavailable(key, chosen)) is not None:
            raise ProfileError(f"{label}: {why}")
    tree, chosen = dict[str, Any](), keys.chosen_types(checked)
    for path, key in sorted(keys.settable.items(), key=lambda setting: "." not in setting[0]):
        if path.partition(".")[0] in kind.__struct_encode_fields__ and (variant := key.variant(chosen)) is not None:
            value = checked.get(path, variant.default)
            if value is REQUIRED:
                what = f"[[{path}]]" if array_items(key.shape) else path
                raise ProfileError(f"{label_of(path.rpartition('.')[0])}: {what} is missing: {key.help}")
            *tables, name = path.split(".")
            reduce(lambda table, part: table.setdefault(part, {}), tables, tree)[name] = value
    return msgspec.convert(tree, kind)
