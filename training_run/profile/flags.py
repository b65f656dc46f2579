"""The command line: a flag for every key of a profile, and the help texts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from textwrap import fill
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Struct, inspect

from clotho.settings.bounds import NonNegative, about
from clotho.settings.keys import REQUIRED, TYPE, Key, Keys, Section, array_items, members_of, shown
from protocols.errors import ProfileError, did_you_mean, visible
from training_run.profile.aliases import SHORT
from training_run.profile.keys import CHOICES, KEYS, PROFILE_KEYS, SECTIONS, SETTABLE, flag_of
from training_run.profile.other_words import ACCEPTED, ADVICE, TRANSLATE, IsOwn, Problem
from training_run.profile.program import program

T = TypeVar("T")


class Arguments(Struct, frozen=True, kw_only=True):
    """A parsed command line. overrides: settings by key path. help: the argument of `help_text`, or None."""

    profile: Annotated[str, about("Settings to start from: a name or a .toml file.")] = "local-m3"
    resume: Annotated[
        bool, about("Continue the run in the run directory from its last complete checkpoint; see --resume-step.")
    ] = False
    resume_step: Annotated[
        NonNegative | None, about("Continue the run from this checkpoint; what is later moves to superseded/.")
    ] = None
    fork: Annotated[
        str, about("Start from the state of another run: RUN or RUN@STEP; its profile applies without --profile.")
    ] = ""
    clean: Annotated[bool, about("Delete the earlier run in the run directory.")] = False
    dry_run: Annotated[
        bool | Literal["full"],
        about("Check and print changed settings, memory and dataset, and exit; full: all settings."),
    ] = False
    overrides: dict[str, Any] = {}
    help: str | None = None


OWN = {name: key for name, key in Keys(Arguments).settable.items() if key.help}
"""Flags that are not keys of a profile."""

RARE = frozenset({"resume_step", "fork"})
"""Flags in `OWN` that `--help` leaves to `--help-all`."""

COMMON = (
    "model.path", "data.train", "steps", "seed", "run_dir", "async", "rewards", "learner.objective",
    "learner.optimizer.learning_rate", "learner.batch_size", "sampling.group_size", "sampling.max_tokens",
    "policy.method.rank", "checkpoint.interval", "eval.interval", "server.port",
)  # fmt: skip
"""The keys that `--help` shows, besides the profile and the switches."""

TABLES = (inspect.StructType, inspect.DictType, inspect.TupleType)
"""Types of values that a flag gives as TOML or JSON."""

WIDTH, INDENT = 116, " " * 6
USAGE = f"usage: {program()} [--profile NAME] [--KEY VALUE ...]"


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the command line (without the program's name).

    `--flag value` and `--flag=value` are equal; so are `-` and `_` in a flag. Switches and booleans need no value. A
    list is a repeated flag, or TOML or JSON. Raises ProfileError for an unknown flag, a value that is not allowed, or
    flags that contradict each other. Arrays of tables are checked with the profile.
    """
    if (topic := help_topic(argv)) is not None:
        return Arguments(help=topic)
    values = parse_flags(argv, OWN)
    own = {name: values.pop(name) for name in OWN if name in values}
    own["resume"] = own.get("resume", False) or own.get("resume_step") is not None
    if own["resume"] and own.get("clean"):
        raise ProfileError("--resume continues a run and --clean deletes it: choose one")
    if own.get("fork"):
        _require_new_run(own, values)
    return Arguments(**own, overrides=values)


def _require_new_run(own: dict[str, Any], values: dict[str, Any]) -> None:
    """Check the flags beside --fork. Without --profile, the profile of the forked run applies."""
    if own["resume"]:
        raise ProfileError("--resume continues a run and --fork starts a new one: choose one")
    if values.get("policy.adapter"):
        raise ProfileError("--fork and --policy.adapter both give the initial weights: choose one")
    if "profile" not in own:
        from training_run.directory.run_paths import run_profile  # imports MLX, which other command lines do not need

        if "run_dir" not in values:
            raise ProfileError("--fork starts a new run with the profile of another: name its directory with --run-dir")
        own["profile"] = str(run_profile(own["fork"]))


def help_topic(argv: Sequence[str]) -> str | None:
    """The argument of `help_text` that a command line requests; None if it requests no help."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        flag, _, topic = word.partition("=")
        if flag in ("-h", "--help", "--help-all"):
            topic = topic or ("" if following.startswith("-") else following)
            return "all" if flag == "--help-all" else topic.replace("-", "_")
    return None


def parse_flags(argv: Sequence[str], own: Mapping[str, Key], command: str = "") -> dict[str, Any]:
    """The values of flags by key path. own: flags of the command that no profile has.

    Flags of other trainers are replaced, and a line on standard error has the words for them. Raises ProfileError.
    """
    return understood(
        argv,
        lambda words: parsed_flags(words, own),
        command=command,
        own=lambda flag, values: _is_valid(flag, values, own),
        problem=lambda words: problem_of(words, own),
    )


def understood(
    argv: Sequence[str],
    parse: Callable[[Sequence[str]], T],
    *,
    command: str,
    own: IsOwn,
    problem: Problem = lambda words: "",
) -> T:
    """Parse a command line; if that is refused, parse it again with the words of other programs replaced.

    command, own, problem: as of `TRANSLATE`. Raises ProfileError.
    """
    try:
        return parse(argv)
    except ProfileError:
        if (words := TRANSLATE.first(argv, command, own, problem)) is None:
            raise
    return parse(words)


def _key_of(name: str, own: Mapping[str, Key]) -> Key | None:
    return own.get(name) or PROFILE_KEYS.named(SHORT.get(name, name))


def _is_valid(flag: str, values: Sequence[str], own: Mapping[str, Key]) -> bool:
    """Whether a flag exists, and has no value that its key does not take."""
    if (key := _key_of(flag[2:].replace("-", "_"), own)) is None:
        return False
    try:
        for text in values if len(values) == 1 else ():
            _value(key, text, flag)
    except ProfileError:
        return False
    return True


def problem_of(words: Sequence[str], own: Mapping[str, Key] = OWN) -> str:
    """Why words of a command line are not valid; empty if they are."""
    try:
        parsed_flags(words, own)
    except ProfileError as error:
        return str(error)
    return ""


def parsed_flags(argv: Sequence[str], own: Mapping[str, Key]) -> dict[str, Any]:
    """The values of flags of Clotho by key path. Raises ProfileError."""
    values: dict[str, Any] = {}
    flags: dict[str, str] = {}
    words = list(reversed(argv))
    while words:
        flag, equals, text = words.pop().partition("=")
        key = _target(flag, [*flags], own)
        if not equals:
            follows = bool(words) and not words[-1].startswith("--")
            if not follows and not _is(key, inspect.BoolType):
                raise ProfileError(f"{flag} needs a value")
            text = words.pop() if follows else "true"
        path, value = key.path, _value(key, text, flag)
        if isinstance(value, list | tuple) and path in values:
            value = (*values[path], *value)
        elif values.get(path, value) != value:
            what = "is given twice" if flags[path] == flag else f"and {flag} contradict each other"
            raise ProfileError(f"{flags[path]} {what}: {shown(values[path])} and {shown(value)}")
        values[path], flags[path] = value, flag
    return values


def _target(flag: str, before: list[str], own: Mapping[str, Key]) -> Key:
    """The key that a flag sets. before: paths of the flags before it. Raises ProfileError for an unknown flag."""
    name = flag[2:].replace("-", "_")
    if flag[:2] != "--" or not name:
        last = SETTABLE.get(before[-1]) if before else None
        repeat = (
            f"repeat {flag_of(last.path)} for every value of the list"
            if last and _is(last, inspect.VarTupleType)
            else ""
        )
        hint = ADVICE.first(flag, flag_of) or repeat or "every setting is a flag, see --help"
        raise ProfileError(f"unexpected argument {visible(flag, 60)!r}: {hint}")
    if key := _key_of(name, own):
        return key
    if lacking := PROFILE_KEYS.lacking(name):
        raise ProfileError(f"{visible(flag, 60)}: {lacking}")
    table = name.rpartition(".")[0]
    hint = f"did you mean {flag_of(table)}?" if table in SETTABLE else ""
    known = [*SETTABLE, *own, *SHORT, *(() if table else chain(*ACCEPTED()))]
    hint = hint or PROFILE_KEYS.suggestion(name, known, flag_of)
    raise ProfileError(f"unknown flag {visible(flag, 60)}; {hint}")


def _is(key: Key, kind: type[inspect.Type]) -> bool:
    return isinstance(members_of(key.shape)[0], kind)


def _value(key: Key, text: str, flag: str) -> Any:
    """The value that the text of a flag stands for. Raises ProfileError."""
    first, *optional = members_of(key.shape)
    items = getattr(first, "item_type", None)
    value: Any = text
    if text == "none" and any(isinstance(member, inspect.NoneType) for member in optional):
        return None
    if key.path == "rewards" and not text.startswith(("[", "{")):
        return [{"name": name, "correct": name != "format"} for name in text.split(",")]
    if _is_named(key) and not text.startswith(("[", "{")):
        return [{"name": name} for name in text.split(",")]
    if isinstance(items or first, TABLES) or (items and text.startswith("[")):
        try:
            with suppress(tomllib.TOMLDecodeError):
                value = tomllib.loads(f"value = {text}")["value"]
            value = json.loads(text) if value is text else value
        except (ValueError, RecursionError):
            hint = _singular(key, text)
            raise ProfileError(
                f"{flag} must be {key.allowed}, written as TOML or JSON, not {shown(text)}{hint}"
            ) from None
    value = [value] if items and not isinstance(value, list) else value
    custom = key.path == "learner.objective.type" and ":" in text
    return value if custom or array_items(key.shape) else PROFILE_KEYS.converted(key, value, flag, text=True)


def _singular(key: Key, text: str) -> str:
    """The end of a refusal that names the key of one word whose plural was given, such as `stage`; else empty."""
    one = key.path.removesuffix("s")
    takes = one != key.path and one in SETTABLE and not problem_of([flag_of(one), text], {})
    return f"; did you mean {flag_of(one)} {text}?" if takes else ""


def _is_named(key: Key) -> bool:
    """Whether a value is an array of tables that need a name and nothing else."""
    inside = array_items(key.shape)
    return inside is not None and [one.encode_name for one in inside.fields if one.required] == ["name"]


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that set these keys: `parse_flags` reads them back.

    API keys, and the defaults in arrays of tables, are left out.
    """
    words: list[str] = []
    for path, value in values.items():
        if path.endswith("api_key"):
            continue
        plain = msgspec.to_builtins(value)
        if array_items(SETTABLE[path].shape):
            plain = PROFILE_KEYS.changed_rows(path, plain)
        text = plain if isinstance(plain, str) else "none" if plain is None else json.dumps(plain, ensure_ascii=False)
        words += [flag_of(path), text]
    return words


def help_text(topic: str = "", commands: Iterable[str] = (), width: int = WIDTH) -> str:
    """The help text of the common flags (``), every flag (`all`), or one table or key; ProfileError if unknown."""
    own = [
        " | ".join([USAGE, "|".join(commands)]),
        *(key_help(key, width) for name, key in OWN.items() if topic == "all" or name not in RARE),
    ]
    if topic == "":
        top = ", ".join(name for name in SECTIONS if name and "." not in name)
        more = fill(f"--help-all shows every flag, --help SECTION the flags of one section: {top}.", width)
        return (
            "\n".join([*own, *(key_help(key, width) for path in COMMON if (key := PROFILE_KEYS.named(path))), more])
            + "\n"
        )
    found = [section for name, section in SECTIONS.items() if topic == "all" or f"{name}.".startswith(f"{topic}.")]
    parts = [*(["\n".join(own)] if topic == "all" else []), *(_section_help(section, width) for section in found)]
    if not parts and (key := PROFILE_KEYS.named(SHORT.get(topic, topic))) is not None:
        parts = [key_help(key, width)]
    if not parts and (lacking := PROFILE_KEYS.lacking(topic)):
        raise ProfileError(f"--help {visible(topic, 60)}: {lacking}")
    if not parts:
        hint = did_you_mean(topic, [*filter(None, SECTIONS), *SETTABLE])
        raise ProfileError(f"--help {visible(topic, 60)}: no section or key of this name{hint}; see --help")
    return "\n\n".join(parts) + "\n"


def _section_help(section: Section, width: int) -> str:
    name = f"[{section.name}]" if section.name else "top of the file"
    name = f"[{name}] or --{section.name} '[{{...}}, ...]' in TOML or JSON" if section.repeated else name
    title = f"{name}  {section.title} {attached(section.attachment)}".strip()
    lines = [fill(title, width, subsequent_indent="  ")]
    for kind, text in section.types.items():
        lines.append(fill(f"{kind}: {text}", width, initial_indent="  ", subsequent_indent=INDENT))
    return "\n".join([*lines, *(key_help(key, width) for key in section.keys.values())])


def key_help(key: Key, width: int = WIDTH) -> str:
    """Flag, allowed values, default and description of a key."""
    flag = flag_of(next((name for name, path in SHORT.items() if path == key.path), key.path))
    name = f"  {key.path.rpartition('.')[2]}" if key.path in KEYS and key.path not in SETTABLE else flag
    head = f"  {name}  {key.allowed}  ({default_in_words(key)})"
    text = " ".join(filter(None, (key.help, availability(key), attached_key(key))))
    head = fill(head, width, subsequent_indent=INDENT, break_on_hyphens=False)
    return f"{head}\n{fill(text, width, initial_indent=INDENT, subsequent_indent=INDENT)}"


def attached(attachment: str) -> str:
    """A sentence that names the attachment of a key or a table; empty for the core."""
    return f"Attachment: {attachment}." if attachment else ""


def attached_key(key: Key) -> str:
    """A sentence that names the attachment of a key in a table of the core; empty for any other key."""
    section = SECTIONS.get(key.path.rpartition(".")[0])
    return "" if section and section.attachment else attached(key.attachment)


def default_in_words(key: Key) -> str:
    """The default of a key in words: the first default, and other defaults with their types."""
    values = [(variant.types, _in_words(variant.default)) for variant in key.variants]
    described = []
    for choice in reversed(values[0][0]):
        tags: dict[str, list[str]] = {}
        for types, value in values:
            tags.setdefault(types[choice], []).append(value)
        usual = {tag: max(found, key=found.count) for tag, found in tags.items()}
        rare = {" with ".join(reversed(types.values())): v for types, v in values if v != usual[types[choice]]}
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
        if having := PROFILE_KEYS.types_of(key, choice):
            lacking = [name for name in CHOICES[choice] if name not in having]
            which, types = ("Only", list(having)) if len(having) <= len(lacking) + 1 else ("Not", lacking)
            return f"{which} with {choice.removesuffix(f'.{TYPE}')} = {' or '.join(types)}."
    return ""
