"""`--help`: every flag, by section, with what it takes, its default and what it means."""

from __future__ import annotations

from textwrap import fill

from clotho.config.flag_aliases import ALIASES, CONSTANTS
from clotho.config.flags import DEFAULT_PROFILE, SWITCHES
from clotho.config.keys import REQUIRED, Key, Section, sections
from clotho.config.profile_decode import shown

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
        flag = f"  {key.name}" if section.repeated else _flag(key.path)
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
