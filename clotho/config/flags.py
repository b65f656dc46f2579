"""The command line: a flag for every key of a profile, and the help texts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from msgspec import Struct, inspect

from clotho.config import keys
from clotho.config.keys import REQUIRED, TYPE, Key, Section, Variant, converted, flag_of, members_of, shown
from clotho.config.nearest import did_you_mean
from clotho.config.other_trainers import accepted, advice
from protocols.errors import ProfileError, visible

DEFAULT_PROFILE = "local-m3"


def _own(name: str, annotation: Any, text: str, default: Any = False) -> Key:
    """A flag that is not a key of profiles."""
    shape = inspect.type_info(annotation)
    return Key(path=name, annotation=annotation, shape=shape, help=text, variants=[Variant({}, default)])


OWN = {
    "profile": _own("profile", str, "Settings to start from: a name or a .toml file.", DEFAULT_PROFILE),
    "resume": _own("resume", bool, "Continue the run in the run directory from its last complete checkpoint."),
    "clean": _own("clean", bool, "Delete the earlier run in the run directory."),
    "dry_run": _own("dry_run", bool, "Print the resolved profile and a memory estimate, and exit."),
}
"""Flags that are not keys of a profile."""

SHORT = {"model": "model.path", "dataset": "data.train"}
"""Short names of flags, with their keys."""

COMMON = (
    "model.path", "data.train", "steps", "seed", "run_dir", "async", "rewards", "learner.objective",
    "learner.optimizer.learning_rate", "learner.batch_size", "sampling.group_size", "sampling.max_tokens",
    "policy.method.rank", "checkpoint.interval", "eval.interval", "server.port",
)  # fmt: skip
"""The keys that `--help` shows, besides the profile and the switches."""

HELP_FLAGS = ("-h", "--help", "--help-all")
ALL = "all"
TABLES = (inspect.StructType, inspect.DictType, inspect.TupleType)
"""Types of values that a flag gives as TOML or JSON."""


class Arguments(Struct, frozen=True, kw_only=True):
    """A parsed command line.

    overrides: settings by key path, as `load_profile` takes them.
    help: None, `` for the common flags, `all`, or the path of a table or a key.
    """

    profile: str = DEFAULT_PROFILE
    overrides: dict[str, Any] = {}
    resume: bool = False
    clean: bool = False
    dry_run: bool = False
    help: str | None = None


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the command line (without the program's name).

    `--flag value` and `--flag=value` are equal; so are `-` and `_` in a flag. Switches and booleans need no value. A
    list is a repeated flag, or TOML or JSON. Raises ProfileError for an unknown flag, a value that is not allowed, or
    flags that contradict each other. Arrays of tables are checked with the profile.
    """
    topic = _help_topic(argv)
    if topic is not None:
        return Arguments(help=topic)
    values: dict[str, Any] = {}
    flags: dict[str, str] = {}
    words = list(reversed(argv))
    while words:
        flag, equals, text = words.pop().partition("=")
        targets = _targets(flag, [*flags])
        if not equals:
            follows = bool(words) and not words[-1].startswith("--")
            if not follows and not _is(targets[0], inspect.BoolType):
                raise ProfileError(f"{flag} needs a value")
            text = words.pop() if follows else "true"
        for key in targets:
            path, value = key.path, _value(key, text, flag)
            if isinstance(value, list | tuple) and path in values:
                value = (*values[path], *value)
            elif values.get(path, value) != value:
                what = "is given twice" if flags[path] == flag else f"and {flag} contradict each other"
                raise ProfileError(f"{flags[path]} {what}: {shown(values[path])} and {shown(value)}")
            values[path], flags[path] = value, flag
    own = {name: values.pop(name) for name in OWN if name in values}
    if own.get("resume") and own.get("clean"):
        raise ProfileError("--resume continues a run and --clean deletes it: choose one")
    return Arguments(**own, overrides=values)


def _help_topic(argv: Sequence[str]) -> str | None:
    """The word after `--help`; None if the command line has no help flag."""
    for place, word in enumerate(argv):
        flag, _, topic = word.partition("=")
        if flag in HELP_FLAGS:
            following = argv[place + 1] if place + 1 < len(argv) and not argv[place + 1].startswith("-") else ""
            return ALL if flag == "--help-all" else (topic or following).replace("-", "_")
    return None


def _targets(flag: str, before: list[str]) -> list[Key]:
    """The keys that a flag sets. before: paths of the flags before it. Raises ProfileError for an unknown flag."""
    name = flag[2:].replace("-", "_")
    if flag[:2] != "--" or not name:
        last = keys.settable().get(before[-1]) if before else None
        hint = f"repeat {last.flag} for every value of the list" if last and _is(last, inspect.VarTupleType) else ""
        hint = advice(flag, flag_of) or hint or "every setting is a flag, see --help"
        raise ProfileError(f"unexpected argument {visible(flag, 60)!r}: {hint}")
    if key := OWN.get(name) or keys.flag_key(SHORT.get(name, name)):
        return [key]
    if name in accepted():
        return [keys.settable()[path] for path in accepted()[name]]
    table = name.rpartition(".")[0]
    candidates = [*keys.settable(), *OWN, *SHORT, *(() if table else accepted())]
    hint = keys.suggestion(name, candidates, flag_of) or "see --help"
    hint = f"did you mean {flag_of(table)}?" if table in keys.settable() else hint
    raise ProfileError(f"unknown flag {visible(flag, 60)}; {hint}")


def _is(key: Key, kind: type[inspect.Type]) -> bool:
    return isinstance(members_of(key.shape)[0], kind)


def _value(key: Key, text: str, flag: str) -> Any:
    """The value that the text of a flag stands for. Raises ProfileError."""
    first, *optional = members_of(key.shape)
    items = first.item_type if isinstance(first, inspect.VarTupleType) else None
    value: Any = text
    if text == "none" and optional:
        return None
    if key.path == "rewards" and not text.startswith(("[", "{")):
        return [{"name": name, "correct": name != "format"} for name in text.split(",")]
    if isinstance(items or first, TABLES) or (items and text.startswith("[")):
        try:
            value = _structured(text)
        except (ValueError, RecursionError):
            raise ProfileError(f"{flag} must be {key.allowed}, written as TOML or JSON, not {shown(text)}") from None
    value = [value] if items and not isinstance(value, list) else value
    custom = key.path == "learner.objective.type" and ":" in text
    return value if custom or keys.is_array(key) else converted(key, value, flag, text=True)


def _structured(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return json.loads(text)


WIDTH = 116
INDENT = " " * 6
USAGE = "usage: python pipeline.py [--profile NAME|FILE.toml] [--KEY VALUE ...]"


def help_text(topic: str = "", width: int = WIDTH) -> str:
    """The help text of the common flags (``), of every flag (`all`), or of the flags of one table or key.

    Lines are wrapped at `width`. Raises ProfileError if there is no such table or key.
    """
    tables = [section.name for section in keys.sections() if section.name]
    if topic == "":
        common = [*OWN.values(), *(key for path in COMMON if (key := keys.flag_key(path)))]
        top = ", ".join(name for name in tables if "." not in name)
        more = fill(f"--help-all shows every flag, --help SECTION the flags of one section: {top}.", width)
        return "\n".join([USAGE, *(_key_help(key, width, brief=True) for key in common), more]) + "\n"
    found = [section for section in keys.sections() if topic == ALL or f"{section.name}.".startswith(f"{topic}.")]
    parts = [_section_help(section, width) for section in found]
    if topic == ALL:
        parts = [USAGE, "\n".join(_key_help(key, width) for key in OWN.values()), *parts]
    if not parts and (key := keys.flag_key(SHORT.get(topic, topic))) is not None:
        parts = [_key_help(key, width)]
    if not parts:
        hint = did_you_mean(topic, [*tables, *keys.settable()])
        raise ProfileError(f"--help {visible(topic, 60)}: no section or key of this name{hint}; see --help")
    return "\n\n".join(parts) + "\n"


def _section_help(section: Section, width: int) -> str:
    name = f"[[{section.name}]]" if section.repeated else f"[{section.name}]" if section.name else "top of the file"
    lines = [fill(f"{name}  {section.title}".strip(), width, subsequent_indent="  ")]
    for kind, text in section.types.items():
        lines.append(fill(f"{kind}: {text}", width, initial_indent="  ", subsequent_indent=INDENT))
    if section.repeated:
        lines.append(f"  --{section.name} '[{{...}}, ...]'   tables, as TOML or JSON, of:")
    return "\n".join([*lines, *(_key_help(key, width) for key in section.keys.values())])


def _key_help(key: Key, width: int, *, brief: bool = False) -> str:
    """Flag, allowed values, default and description of a key. brief: only the first sentence of the description."""
    known = key.path in keys.settable() or key.path in OWN
    flag = next((flag_of(name) for name, path in SHORT.items() if path == key.path), key.flag)
    head = f"  {flag if known else '  ' + key.path.rpartition('.')[2]}  {key.allowed}  ({default_in_words(key)})"
    text = key.help.partition(". ")[0].removesuffix(".") + "." if brief else key.help
    text = f"{text} {availability(key)}".strip()
    head = fill(head, width, subsequent_indent=INDENT, break_on_hyphens=False)
    return f"{head}\n{fill(text, width, initial_indent=INDENT, subsequent_indent=INDENT)}"


def default_in_words(key: Key) -> str:
    """The default of a key in words: the first default, and other defaults with their types."""
    values = [(variant.types, _in_words(variant.default)) for variant in key.variants]
    described = []
    for choice in reversed(values[0][0]):
        tags: dict[str, list[str]] = {}
        for types, value in values:
            tags.setdefault(types[choice], []).append(value)
        usual = {tag: max(found, key=found.count) for tag, found in tags.items()}
        rare = {
            " with ".join(reversed(types.values())): value for types, value in values if value != usual[types[choice]]
        }
        described.append((len(rare), usual, rare))
    if not described:
        return values[0][1]
    _, usual, rare = min(described, key=lambda found: found[0])
    first, *others = dict.fromkeys(usual.values())
    more = [f"{value} for {', '.join(tag for tag in usual if usual[tag] == value)}" for value in others]
    return "; ".join([first, *more, *(f"{value} for {types}" for types, value in rare.items())])


def _in_words(default: Any) -> str:
    if default is REQUIRED:
        return "required"
    return default if isinstance(default, str) and default else "none" if default is None else shown(default)


def availability(key: Key) -> str:
    """A sentence that names the types that have a key; empty if every type has it."""
    for choice in reversed(key.variants[0].types):
        if having := keys.types_of(key, choice):
            lacking = [name for name in keys.choices()[choice] if name not in having]
            which, types = ("Only", list(having)) if len(having) <= len(lacking) + 1 else ("Not", lacking)
            return f"{which} with {choice.removesuffix(f'.{TYPE}')} = {' or '.join(types)}."
    return ""
