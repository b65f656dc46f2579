"""Generates docs/configuration.md from the profile's structs: `python -m clotho.config.reference_page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clotho.config.effects import EFFECTS
from clotho.config.flags import SHORT, availability, default_in_words
from clotho.config.keys import Key, Section, sections
from clotho.config.other_trainers import accepted
from clotho.config.rules import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

A run is described by a profile, a TOML file: `python pipeline.py --profile local-m3` takes `profiles/local-m3.toml`,
`--profile path/to/mine.toml` any other. Every key is also a flag, and flags win: `--learner.batch-size 8`.
`--dry-run` shows the resolved profile, `--help SECTION` the flags of one section, and `--help-all` this page in short.

* **Layers.** `extends = "local-m3"` at the top of a profile puts it on top of another: key by key, lists replaced as
  a whole. Flags are the topmost layer. A layer that sets `policy.method.scale` removes `policy.method.alpha` of lower
  layers, and a layer that sets `alpha` removes `scale`. A layer that sets `data.train` removes `data.heldout`. The
  value `none` removes a key that may be absent: `--policy.method.scale none`.
* **Types.** A choice that has settings of its own is a table with the key `type`, such as `[learner.optimizer]`. Each
  type has its own keys, and the defaults of an objective are the values of its paper. `--learner.optimizer muon` is
  short for `--learner.optimizer.type muon`, and so is `optimizer = "muon"` in a profile. A layer that changes the type
  replaces the whole table.
* **Nothing is ignored.** A key that does not exist, is out of range, or has no effect in this combination is an error
  that names the file, the key, what is allowed and the nearest valid key. Where a *higher* layer takes a key's effect
  away, the key falls back to its default instead, and with it what depends on it: `--async false` works on top of any
  profile.
* **Paths.** `model.path`, `data.train`, `data.heldout` and the scripts of `[[environments]]` in a profile are relative
  to the profile's own directory if they start with `./` or `../`, or exist there; other data files and scripts are
  relative to the working directory, and any other model is a repository of the Hugging Face hub. Given by flag, they
  are relative to the working directory. `run_dir`, `checkpoint.adapter_path` and `atropos.python` are always relative
  to the working directory.
* **Flags.** `--flag value` or `--flag=value`; `-` and `_` are the same; booleans may stand alone. Lists are repeated
  (`--sampling.stop a --sampling.stop b`) or written as TOML or JSON (`--sampling.stop '["a", "b"]'`), arrays of tables
  always so: `--rewards '[{name = "format", weight = 0.2}, {name = "math_eval", correct = true}]'`. For rewards, a
  list of names is enough: `--rewards format,my_rewards:score`. The same setting given twice with different values is an
  error.
* **Records.** `RUN_DIR/profile.toml` is the resolved profile: loading it gives the same run. If it holds an API key,
  only its owner can read it.
"""

BETWEEN = "A profile that breaks one of these rules is refused; the message names the keys and what to change."


def configuration_page() -> str:
    """The page, as Markdown."""
    parts = [
        INTRODUCTION,
        *(_section(section) for section in sections()),
        _between(),
        _effects(),
        _other_names(),
    ]
    return "\n".join(parts)


def _section(section: Section) -> str:
    heading = f"[[{section.name}]]" if section.repeated else f"[{section.name}]"
    title = f"## `{heading}`" if section.name else "## Top of the file"
    kinds = [f"* `{name}`: {text}" for name, text in section.types.items()]
    rows = [
        f"| `{key.name}` | {_cell(key.allowed)} | `{_cell(default_in_words(key))}` | {_cell(_meaning(key))} |"
        for key in section.keys
    ]
    parts = [title, "", *([section.title, ""] if section.title else []), *kinds, *([""] if kinds else [])]
    return "\n".join([*parts, "| key | allowed | default | meaning |", "|---|---|---|---|", *rows, ""])


def _meaning(key: Key) -> str:
    return " ".join(filter(None, (key.help, availability(key))))


def _between() -> str:
    rows = [f"* {' '.join((rule.__doc__ or '').split())}" for rule in RULES]
    return "\n".join(["## Between settings", "", BETWEEN, "", *rows, ""])


def _effects() -> str:
    rows = [
        f"| {_paths(rule.keys.split())} | {_paths(rule.decided_by.split())} | {_cell(rule.because)} |"
        for rule in EFFECTS
    ]
    return "\n".join(
        ["## Keys that need another", "", "| keys | decided by | refused because |", "|---|---|---|", *rows, ""]
    )


def _other_names() -> str:
    rows = [f"| `--{name}` | {_paths([path])} |" for name, path in SHORT.items()]
    rows += [f"| `--{name.replace('_', '-')}` | {_paths(paths)} |" for name, paths in accepted().items()]
    return "\n".join(["## Flags with another name", "", "| flag | sets |", "|---|---|", *rows, ""])


def _paths(paths: Sequence[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(configuration_page(), encoding="utf-8")
