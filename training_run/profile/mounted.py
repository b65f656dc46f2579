"""The settings of this installation's attachments, and the structs of a profile with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from clotho.extension import attachment_modules
from clotho.settings.bounds import Off
from clotho.settings.mounted import Setting, extended_struct
from training_run.profile.schema import Profile

P = TypeVar("P", bound=Struct)

ATTACHED = {
    "agent": "agents",
    "atropos": "atropos",
    "cluster": "cluster",
    "collapse_detection": "alarms",
    "critic": "critic",
    "data.curriculum": "curriculum",
    "data.reasoning_gym": "reasoning_gym",
    "data.verifiers": "verifiers",
    "distillation": "distillation",
    "distributed": "ranks",
    "engine.kv_quantization": "kv_quantization",
    "engine.speculation": "speculation",
    "environments": "atropos",
    "generator": "remote",
    "monitor.token_values_mb": "dashboard",
    "policy.rank_budget": "adalora",
    "preference": "preference",
    "replay": "replay",
    "restarts": "restarts",
    "server.accept_weights": "remote",
    "server.allow_pause": "dialects",
    "server.api_keys_file": "keys",
    "server.reasoning_parser": "tools",
    "server.tinker": "tinker",
    "server.tool_parser": "tools",
    "server.weights_root": "remote",
    "sessions": "sessions",
    "sft": "sft",
    "stage": "stages",
    "stages": "stages",
    "trackers": "trackers",
}
"""The attachment of each key that an attachment adds to a profile: a key of an absent one is refused by its name."""

SETTINGS: tuple[Setting[Any], ...] = tuple(
    setting for module in attachment_modules("sections").values() for setting in module.SETTINGS
)
"""The settings of the attachments that are installed."""


def with_attachments(kind: type[P], table: str = "") -> type[P]:
    """Return a struct of tables of a profile, or the struct of one table, with the settings of attachments."""
    return mount(kind, SETTINGS, table)


def unused_by(command: str) -> set[str]:
    """Return the paths of the settings of attachments that a command does without."""
    return {setting.path for setting in SETTINGS if command in setting.unused_by}


def used_by(command: str) -> set[str]:
    """Return the tables of attachments that a command needs beside those of the program."""
    return {setting.path for setting in SETTINGS if command in setting.used_by}


def left_out(profile: Profile, command: str) -> Profile:
    """Return the profile with the defaults of the sections that a command does without."""
    for setting in SETTINGS:
        if command in setting.unused_by and not setting.table:
            profile = setting.put(profile, setting.default)
    return profile


def absent_keys() -> dict[str, str]:
    """Return the keys of `ATTACHED` whose attachment is not installed."""
    there = {setting.path for setting in SETTINGS}
    return {key: attachment for key, attachment in ATTACHED.items() if key not in there}


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
    return extended_struct(kind, fields) if fields else kind


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
