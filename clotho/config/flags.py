"""The command line: a flag for every key of a profile, and the help texts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import Any, Literal

import msgspec
from msgspec import Struct

from clotho.config.keys import REQUIRED, Key, Kind, Section, choices, flag_key, sections, settable, types_of
from clotho.config.load import finite, shown
from clotho.config.nearest import did_you_mean, nearest
from clotho.config.other_trainers import accepted, advice
from protocols.errors import ProfileError

DEFAULT_PROFILE = "local-m3"

Switch = Literal["resume", "clean", "dry_run"]
SWITCHES: dict[Switch, str] = {
    "resume": "Continue the run in the run directory from its last complete checkpoint.",
    "clean": "Delete the earlier run in the run directory.",
    "dry_run": "Print the resolved profile and a memory estimate, and exit.",
}

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


class Given(Struct, kw_only=True):
    """The flags read so far: values by key path or switch, and the flag that set each value."""

    values: dict[str, Any] = {}
    flags: dict[str, str] = {}

    def put(self, path: str, value: Any, flag: str, *, adds: bool = False) -> None:
        """Store a value. adds: append to an existing list. Raises ProfileError if two flags contradict."""
        if adds and path in self.values:
            value = [*self.values[path], *value]
        elif path in self.values and self.values[path] != value:
            first = self.flags[path]
            what = f"{flag} is given twice" if first == flag else f"{first} and {flag} contradict each other"
            raise ProfileError(f"{what}: {shown(self.values[path])} and {shown(value)}")
        self.values[path], self.flags[path] = value, flag


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the command line (without the program's name).

    `--flag value` and `--flag=value` are equal; so are `-` and `_` in a flag. Switches and booleans need no value. A
    list is a repeated flag, or TOML or JSON. Raises ProfileError for an unknown flag, a value that is not allowed, or
    flags that contradict each other.
    """
    topic = _help_topic(argv)
    if topic is not None:
        return Arguments(help=topic)
    given = Given()
    rest = list(argv)
    while rest:
        _read_flag(rest, given)
    values = given.values
    if values.get("resume") and values.get("clean"):
        raise ProfileError("--resume continues a run and --clean deletes it: choose one")
    own = {name: values.pop(name) for name in ("profile", *SWITCHES) if name in values}
    for path, value in values.items():
        _check(settable()[path], value, given.flags[path])
    return Arguments(**own, overrides=values)


def _help_topic(argv: Sequence[str]) -> str | None:
    """The word after `--help`; None if the command line has no help flag."""
    for place, word in enumerate(argv):
        flag, _, topic = word.partition("=")
        if flag in HELP_FLAGS:
            following = argv[place + 1] if place + 1 < len(argv) and not argv[place + 1].startswith("-") else ""
            return ALL if flag == "--help-all" else (topic or following).replace("-", "_")
    return None


def _read_flag(rest: list[str], given: Given) -> None:
    """Remove the first flag and its value from `rest`, and store the value."""
    word = rest.pop(0)
    if not word.startswith("--") or word == "--":
        raise ProfileError(_unexpected(word, given))
    flag, equals, attached = word.partition("=")
    name = flag[2:].replace("-", "_")
    value = attached if equals else None
    if name in SWITCHES:
        given.put(name, _boolean(flag, value, rest), flag)
        return
    if name == "profile":
        given.put(name, _text(flag, value, rest), flag)
        return
    targets = _targets(name)
    if not targets:
        raise ProfileError(_unknown(flag, name))
    if targets[0].kind == "bool":
        given.put(targets[0].path, _boolean(flag, value, rest), flag)
        return
    text = _text(flag, value, rest)
    for key in targets:
        given.put(key.path, _converted(key, text, flag), flag, adds=key.kind == "list")


def _targets(name: str) -> list[Key]:
    """The keys that a flag sets; empty if there is no such flag."""
    key = flag_key(SHORT.get(name, name))
    return [key] if key else [settable()[path] for path in accepted().get(name, ())]


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
    """Convert the text of a flag to a value. Raises ProfileError if the key does not allow it."""
    if key.optional and text == "none":
        return None
    try:
        if key.path == "rewards" and not text.startswith(("[", "{")):
            return _named_rewards(text)
        if key.kind == "tables":
            return _structured(text)
        if key.kind != "list":
            return _scalar(key.kind, text)
        if text.startswith(("[", "{")) or key.item in ("list", "tables"):
            value = _structured(text)
            return value if isinstance(value, list) else [value]
        return [_scalar(key.item or "text", text)]
    except ValueError:
        hint = ", written as TOML or JSON" if key.kind in ("list", "tables") else ""
        raise ProfileError(f"{flag} must be {key.allowed}{hint}, not {shown(text)}") from None


def _named_rewards(text: str) -> list[dict[str, Any]]:
    """Rewards from names: `--rewards format,my_rewards:score`. Weights are 1; `correct` is true except for `format`."""
    return [{"name": name, "correct": name != "format"} for name in text.split(",")]


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
        raise ValueError("a profile cannot contain null")
    return value


def _holds_none(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_holds_none, inner))


def _check(key: Key, value: Any, flag: str) -> None:
    """Refuse a value out of range, naming the flag. Tables are checked with the profile."""
    if value is None or key.item == "tables" or (key.path == "learner.objective.type" and ":" in value):
        return
    if not any(_converts(value, variant.annotation) for variant in key.variants):
        hint = did_you_mean(value, choices()[key.path]) if key.path in choices() else ""
        raise ProfileError(f"{flag} must be {key.allowed}, not {shown(value)}{hint}")
    if not finite(value):
        raise ProfileError(f"{flag} must be {key.allowed}, and finite, not {shown(value)}")


def _converts(value: Any, annotation: Any) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return True


def _unexpected(word: str, given: Given) -> str:
    """The error message for a word that is neither a flag nor a value."""
    if hint := advice(word.partition("=")[0]):
        return f"unexpected argument {word!r}: {hint}"
    last = settable().get(next(reversed(given.values), ""))
    if last is not None and last.kind == "list":
        return f"unexpected argument {word!r}: repeat {last.flag} for every value of the list"
    return f"unexpected argument {word!r}: every setting is a flag, see --help"


SLIP = 0.8
"""Similarity from which an unknown flag is taken for a misspelt short flag, whatever other keys resemble it."""


def _unknown(flag: str, name: str) -> str:
    if hint := advice(name) or advice(name.rpartition(".")[2]):
        return f"unknown flag {flag}: {hint}"
    short = {other: f"--{other.replace('_', '-')}" for other in ("profile", *SWITCHES, *SHORT)}
    short |= {key.name: key.flag for key in settable().values() if "." not in key.path}
    if (guess := nearest(name, short, cutoff=SLIP)) is not None:
        return f"unknown flag {flag}; did you mean {short[guess]}?"
    candidates: dict[str, str] = {}
    if "." not in name:
        candidates |= {key.name: key.flag for key in settable().values() if key.name != "type"}
    candidates |= {key.flag[2:]: key.flag for key in settable().values()}
    candidates |= short | {other: f"--{other.replace('_', '-')}" for other in accepted()}
    guess = nearest(name, candidates)
    return f"unknown flag {flag}; " + (f"did you mean {candidates[guess]}?" if guess else "see --help")


WIDTH = 116
INDENT = " " * 6
USAGE = "usage: python pipeline.py [--profile NAME|FILE.toml] [--KEY VALUE ...]"


def help_text(topic: str = "", width: int = WIDTH) -> str:
    """The help text of the common flags (``), of every flag (`all`), or of the flags of one table or key.

    Lines are wrapped at `width`. Raises ProfileError if there is no such table or key.
    """
    if topic == "":
        return _common_help(width)
    found = [section for section in sections() if topic == ALL or f"{section.name}.".startswith(f"{topic}.")]
    if found:
        parts = [_section_help(section, width) for section in found]
        if topic == ALL:
            parts = [USAGE, "\n".join(_own_flags(width)), *parts]
        return "\n\n".join(parts) + "\n"
    if (key := flag_key(SHORT.get(topic, topic))) is not None:
        return _key_help(key, width) + "\n"
    raise ProfileError(f"--help {topic}: no section or key of this name{did_you_mean(topic, _topics())}; see --help")


def default_in_words(key: Key) -> str:
    """The default of a key in words: the first default, and other defaults with their types."""
    candidates = [_defaults_by_type(key, choice) for choice in _choices(key)]
    if not candidates:
        return _in_words(key.default)
    by_type, exceptions = min(candidates, key=lambda found: len(found[1]))
    by_value: dict[str, list[str]] = {}
    for name, value in by_type.items():
        by_value.setdefault(value, []).append(name)
    first, *others = by_value
    more = [f"{value} for {', '.join(by_value[value])}" for value in others]
    return "; ".join([first, *more, *(f"{value} for {types}" for types, value in exceptions.items())])


def _defaults_by_type(key: Key, choice: str) -> tuple[dict[str, str], dict[str, str]]:
    """The most frequent default for each type of one union, and the other defaults by the types of all unions."""
    values: dict[str, list[str]] = {}
    for variant in key.variants:
        values.setdefault(variant.types[choice], []).append(_in_words(variant.default))
    frequent = {name: max(found, key=found.count) for name, found in values.items()}
    exceptions = {
        " with ".join(variant.types[union] for union in _choices(key)): value
        for variant in key.variants
        if (value := _in_words(variant.default)) != frequent[variant.types[choice]]
    }
    return frequent, exceptions


def _choices(key: Key) -> list[str]:
    """The unions on whose types a key depends, innermost first."""
    return [choice for choice in reversed(choices()) if choice in key.variants[0].types]


def availability(key: Key) -> str:
    """A sentence that names the types that have a key; empty if every type has it."""
    for choice in _choices(key):
        if having := types_of(key, choice):
            lacking = [name for name in choices()[choice] if name not in having]
            which, types = ("Only", list(having)) if len(having) <= len(lacking) + 1 else ("Not", lacking)
            return f"{which} with {choice.removesuffix('.type')} = {' or '.join(types)}."
    return ""


def _in_words(default: Any) -> str:
    if default is REQUIRED:
        return "required"
    if isinstance(default, str) and default:
        return default
    return "none" if default is None else shown(default)


def _topics() -> list[str]:
    return [section.name for section in sections() if section.name] + [key.flag[2:] for key in settable().values()]


def _common_help(width: int) -> str:
    tables = [section.name for section in sections() if section.name and "." not in section.name]
    lines = [USAGE, *_own_flags(width, _first_sentence)]
    lines += [_key_help(key, width, _first_sentence) for path in COMMON if (key := flag_key(path))]
    more = f"--help-all shows every flag, --help SECTION the flags of one section: {', '.join(tables)}."
    return "\n".join([*lines, fill(more, width)]) + "\n"


def _own_flags(width: int, summary: Callable[[str], str] = str) -> Iterable[str]:
    yield _entry("--profile", "a name or a .toml file", DEFAULT_PROFILE, "The settings to start from.", width)
    for name, text in SWITCHES.items():
        yield _entry("--" + name.replace("_", "-"), "a switch", "", summary(text), width)


def _section_help(section: Section, width: int) -> str:
    name = f"[[{section.name}]]" if section.repeated else f"[{section.name}]" if section.name else "top of the file"
    lines = [fill(f"{name}  {section.title}".strip(), width, subsequent_indent="  ")]
    for kind, text in section.types.items():
        lines.append(fill(f"{kind}: {text}", width, initial_indent="  ", subsequent_indent=INDENT))
    if section.repeated:
        lines.append(f"  --{section.name} '[{{{section.keys[0].name} = ...}}, ...]'   tables, as TOML or JSON, of:")
    return "\n".join([*lines, *(_key_help(key, width) for key in section.keys)])


def _key_help(key: Key, width: int, summary: Callable[[str], str] = str) -> str:
    flag = key.flag if key.path in settable() else f"  {key.name}"
    short = next((f"--{name}" for name, path in SHORT.items() if path == key.path), flag)
    text = " ".join(filter(None, (summary(key.help), availability(key))))
    return _entry(short, key.allowed, default_in_words(key), text, width)


def _entry(flag: str, allowed: str, default: str, text: str, width: int) -> str:
    head = f"  {flag}  {allowed}" + (f"  ({default})" if default else "")
    head = fill(head, width, subsequent_indent=INDENT, break_on_hyphens=False, drop_whitespace=True)
    return f"{head}\n{fill(text, width, initial_indent=INDENT, subsequent_indent=INDENT)}"


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].removesuffix(".") + "."
