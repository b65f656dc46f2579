"""The command line: one flag for every key of a profile, made from the structs, and short names for some.

`--help`: every flag, by section, with what it takes, its default and what it means.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from textwrap import fill
from typing import Any, Literal

import msgspec
from msgspec import Struct

from clotho.config.flag_aliases import ALIASES, CONSTANTS, ELSEWHERE
from clotho.config.keys import REQUIRED, Key, Kind, Section, flag_key, sections, settable
from clotho.config.load import finite, shown
from clotho.config.nearest import nearest_flag
from protocols.errors import ProfileError

DEFAULT_PROFILE = "local-m3"

Switch = Literal["resume", "clean", "dry_run"]
SWITCHES: dict[Switch, str] = {
    "resume": "continue the run in the run directory from its last complete checkpoint",
    "clean": "delete what an earlier run left in the run directory",
    "dry_run": "print the resolved profile and a memory estimate, and exit",
}


class Arguments(Struct, frozen=True, kw_only=True):
    """What the command line asks for. overrides: by key path, as `load_profile` takes them."""

    profile: str = DEFAULT_PROFILE
    overrides: dict[str, Any] = {}
    resume: bool = False
    clean: bool = False
    dry_run: bool = False
    help: bool = False


class Given(Struct, kw_only=True):
    """What has been read so far: values by key path (or switch), and the flag each came from."""

    values: dict[str, Any] = {}
    flags: dict[str, str] = {}

    def put(self, path: str, value: Any, flag: str, *, adds: bool = False) -> None:
        """Keep a value. Raises ProfileError where another flag said otherwise; lists add up."""
        if adds and path in self.values:
            value = [*self.values[path], *value]
        elif path in self.values and self.values[path] != value:
            first = self.flags[path]
            what = f"{flag} is given twice" if first == flag else f"{first} and {flag} contradict each other"
            raise ProfileError(f"{what}: {shown(self.values[path])} and {shown(value)}")
        self.values[path], self.flags[path] = value, flag


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the command line (without the program's name). `--flag value` and `--flag=value`; `-` and `_` are the same.

    Switches and booleans may stand alone; a list is repeated, or written as TOML or JSON. Raises ProfileError for a
    flag that does not exist, a value that it does not take, or two flags that contradict each other.
    """
    if "--help" in argv or "-h" in argv:
        return Arguments(help=True)
    given = Given()
    rest = list(argv)
    while rest:
        _read_flag(rest, given)
    values = given.values
    if values.get("resume") and values.get("clean"):
        raise ProfileError("--resume continues a run and --clean deletes it: give one of the two")
    own = {name: values.pop(name) for name in ("profile", *SWITCHES) if name in values}
    for path, value in values.items():
        _check(settable()[path], value, given.flags[path])
    return Arguments(**own, overrides=values)


def _read_flag(rest: list[str], given: Given) -> None:
    """Take one flag and its value off the front of `rest`."""
    word = rest.pop(0)
    if not word.startswith("--") or word == "--":
        raise ProfileError(f"unexpected argument {word!r}: every setting is a flag, see --help")
    flag, equals, attached = word.partition("=")
    name = flag[2:].replace("-", "_")
    value = attached if equals else None
    constants = {constant.name.replace("-", "_"): constant for constant in CONSTANTS}
    aliases = {alias.name.replace("-", "_"): alias for alias in ALIASES}
    if name in SWITCHES:
        given.put(name, _boolean(flag, value, rest), flag)
    elif name == "profile":
        given.put(name, _text(flag, value, rest), flag)
    elif name in constants:
        constant = constants[name]
        chosen = constant.when_true if _boolean(flag, value, rest) else constant.when_false
        if chosen is None:
            raise ProfileError(f"{flag} false says nothing: use --{next(iter(constant.when_true))}")
        for path, setting in chosen.items():
            given.put(path, setting, flag)
    elif name in aliases:
        for path, text in aliases[name].settings(_text(flag, value, rest)).items():
            given.put(path, _converted(settable()[path], text, flag), flag)
    elif key := flag_key(name):
        setting = _boolean(flag, value, rest) if key.kind == "bool" else _converted(key, _text(flag, value, rest), flag)
        given.put(key.path, setting, flag, adds=key.kind == "list")
    else:
        raise ProfileError(_unknown(flag, name))


def _boolean(flag: str, value: str | None, rest: list[str]) -> bool:
    if value is None:
        value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
    if value not in ("true", "false"):
        raise ProfileError(f"{flag} must be true or false, not {value!r}")
    return value == "true"


def _text(flag: str, value: str | None, rest: list[str]) -> str:
    if value is None:
        if not rest or rest[0].startswith("--"):
            raise ProfileError(f"{flag} needs a value")
        value = rest.pop(0)
    return value


def _converted(key: Key, text: str, flag: str) -> Any:
    """The value that a flag's text stands for. Raises ProfileError where it cannot."""
    if key.optional and text == "none":
        return None
    try:
        if key.kind != "list":
            return _scalar(key.kind, text)
        if text.startswith(("[", "{")) or key.item in ("list", "tables"):
            value = _structured(text)
            return value if isinstance(value, list) else [value]
        return [_scalar(key.item or "text", text)]
    except ValueError:
        hint = ", written as TOML or JSON" if key.kind == "list" else ""
        raise ProfileError(f"{flag} must be {key.allowed}{hint}, not {shown(text)}") from None


def _scalar(kind: Kind, text: str) -> Any:
    match kind:
        case "int":
            return int(text)
        case "float":
            return float(text)
        case "bool":
            return {"true": True, "false": False}[text]
        case _:
            return text


def _structured(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = json.loads(text)
    if _holds_none(value):
        raise ValueError("null has no meaning in a profile")
    return value


def _holds_none(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_holds_none, inner))


def _check(key: Key, value: Any, flag: str) -> None:
    """Refuse a value out of range here, where the flag's name is still known; tables are left to the profile."""
    if value is None or key.item == "tables":
        return
    if not any(_converts(value, variant.annotation) for variant in key.variants):
        raise ProfileError(f"{flag} must be {key.allowed}, not {shown(value)}")
    if not finite(value):
        raise ProfileError(f"{flag} must be {key.allowed}, and finite, not {shown(value)}")


def _converts(value: Any, annotation: Any) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return True


def _unknown(flag: str, name: str) -> str:
    if instead := ELSEWHERE.get(name.replace("_", "-")):
        return f"unknown flag {flag}: {instead}"
    guess = nearest_flag(name, ("profile", *SWITCHES, *(constant.name for constant in CONSTANTS)))
    return f"unknown flag {flag}; " + (f"did you mean --{guess.replace('_', '-')}?" if guess else "see --help")


INDENT = " " * 6

INTRODUCTION = (
    "Train a language model by reinforcement learning and serve it. Every key of a profile is a flag. In brackets: "
    "what holds where the profile says nothing; --dry-run shows what it says."
)


def help_text(width: int = 100) -> str:
    """The whole schema of flags as plain text, no line longer than `width` where words allow."""
    parts = [
        "usage: python pipeline.py [--profile NAME|FILE.toml] [--KEY VALUE ...]",
        fill(INTRODUCTION, width),
        _entry("--profile", "a name or a .toml file", DEFAULT_PROFILE, "the settings to start from", width),
        *(_entry(_flag(name), "a switch", "", text, width) for name, text in SWITCHES.items()),
        *(_section(section, width) for section in sections()),
        _short_names(width),
    ]
    return "\n\n".join(parts) + "\n"


def default_in_words(key: Key) -> str:
    """A key's default as `--help` and the manual show it."""
    if key.default is REQUIRED:
        return "required"
    return "none" if key.default is None else shown(key.default)


def _section(section: Section, width: int) -> str:
    name = f"[[{section.name}]]" if section.repeated else f"[{section.name}]" if section.name else "top of the file"
    lines = [f"{name}  {section.title}"]
    if section.repeated:
        lines.append(f"  --{section.name} '[{{{section.keys[0].name} = ...}}, ...]'   tables, as TOML or JSON, of:")
    for key in section.keys:
        flag = f"  {key.name}" if section.repeated else key.flag
        lines.append(_entry(flag, key.allowed, default_in_words(key), key.help, width))
    return "\n".join(lines)


def _entry(flag: str, allowed: str, default: str, text: str, width: int) -> str:
    head = f"  {flag}  {allowed}" + (f"  ({default})" if default else "")
    return f"{head}\n{fill(text, width, initial_indent=INDENT, subsequent_indent=INDENT)}"


def _short_names(width: int) -> str:
    lines = ["short names, and those of earlier trainers"]
    for alias in ALIASES:
        meaning = " and ".join(alias.keys) + (f" ({alias.note})" if alias.note else "")
        lines.append(f"  --{alias.name}  {meaning}")
    lines += [f"  --{constant.name}  {constant.note}" for constant in CONSTANTS]
    return "\n".join(lines)


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")
