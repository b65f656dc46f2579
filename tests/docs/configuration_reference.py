"""Generates docs/configuration.md from the profile's structs: `python -m tests.docs.configuration_reference`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attachments.atropos.group_sizes import require_fillable
from attachments.migration.other_trainers import Row, accepted
from clotho.settings.keys import Key, Section
from tests.docs.pages import DOCS
from training_run.profile.aliases import SHORT
from training_run.profile.flags import attached, attached_key, availability, default_in_words
from training_run.profile.keys import KEYS, SECTIONS
from training_run.profile.rules import (
    contradictions,
    learnable_distribution,
    one_setting_per_slot,
    rules_without_effect,
)
from training_run.supervision.custom_actors import require_positions

PAGE = DOCS / "configuration.md"

INTRODUCTION = """\
# Configuration

A profile is a TOML file that describes a run. `clotho --profile local-m3` uses `profiles/local-m3.toml`;
`--profile path/to/mine.toml` uses your own file. Every key is also a flag, such as `--learner.batch-size 8`, and a flag
overrides the profile. `--dry-run` checks a profile without a run and prints the settings that differ from the defaults,
`--dry-run full` prints all. `--help SECTION` prints the flags of one section, and `--help-all` prints all flags.

## The twelve keys that you will change
"""

MAIN = {
    "steps": "more, as long as the held-out accuracy rises",
    "model.path": "your model: a directory, a GGUF file, or a repository of the Hugging Face hub",
    "data.train": "your problems ([datasets](datasets.md))",
    "data.system": "tells the model the form that the rewards expect",
    "rewards": "what is rewarded ([rewards](rewards.md))",
    "sampling.max_tokens": "higher if many completions are truncated; KV caches grow with it",
    "sampling.group_size": "higher if most groups have zero variance",
    "learner.batch_size": "groups per update: higher for a steadier reward, lower for more updates per hour",
    "learner.optimizer.learning_rate": "the first to tune ([measured values](recipes.md#learning-rate-and-steps))",
    "policy.method.rank": "size of the adapter",
    "engine.kv_cache_tokens": "lower if the run does not fit into memory, higher for more rollouts at once",
    "eval.interval": "how often the held-out accuracy is measured; evaluations take time",
}
"""Keys that most profiles set, with the reason to change them."""

DETAILS = """\
## Profiles and flags

* **Layers.** A profile with `extends = "local-m3"` is a layer on top of that profile, with all of its settings. Layers
  are combined key by key; a list is replaced as a whole. Flags are the highest layer. A layer that sets
  `policy.method.scale` removes `policy.method.alpha` of lower layers, and vice versa; a layer that sets `data.train`
  removes `data.heldout`. `none` removes an optional key: `--policy.method.scale none`.
* **Types.** A choice with its own settings is a table with the key `type`, such as `[learner.optimizer]`. Each
  type has its own keys, and the defaults of an objective are the values of its paper. `--learner.optimizer muon` is
  short for `--learner.optimizer.type muon`, and so is `optimizer = "muon"` in a profile. A layer that changes the type
  keeps the settings of lower layers that both types have with the same default; other settings of the old type are
  dropped. `--learner.schedule constant` keeps `warmup_steps` and drops `min_learning_rate`. Two exceptions: an
  objective is the recipe of one paper, so that no setting passes to another objective, and a learning rate belongs to
  its optimizer.
* **No setting is ignored.** An unknown key, a value out of range and a setting without effect are errors. The message
  names the file, the key, the allowed values and the nearest valid key. If the settings of a *higher* layer leave a
  key of a lower layer without effect, the key returns to its default instead: `--async false` works on top of any
  profile.
* **Paths.** `model.path`, `data.train`, `data.heldout` and the scripts of `[[environments]]` in a profile are relative
  to the profile's own directory if they start with `./` or `../`, or exist there; other data files and scripts are
  relative to the working directory, and any other model is a repository of the Hugging Face hub. The same holds for the
  file of `./file.py:name` in `name` of `[[rewards]]` and in `agent.environment`. Paths in flags are
  relative to the working directory. `run_dir`, `checkpoint.adapter_path` and `atropos.python` are always relative to
  the working directory.
* **Flags.** `--flag value` and `--flag=value` are equal, and so are `-` and `_` in a flag. A boolean flag needs no
  value. For a list, repeat the flag (`--sampling.stop a --sampling.stop b`), or write TOML or JSON
  (`--sampling.stop '["a", "b"]'`). An array of tables is always TOML or JSON:
  `--rewards '[{name = "format", weight = 0.2}, {name = "math_eval", correct = true}]'`. Rewards may also be a list of
  names: `--rewards format,my_rewards:score`. Two different values for one setting are an error.
* **Records.** `RUN_DIR/profile.toml` is the resolved profile, without the settings of attachments that have their
  defaults; loading it gives the same run. If it contains an API key, only its owner can read it.

The rest of this page is the reference of all keys.
"""

BETWEEN = "A profile that breaks one of these rules is refused; the message names the keys and what to change."


def configuration_page() -> str:
    """The page in Markdown."""
    parts = [
        INTRODUCTION,
        _main(),
        DETAILS,
        *(_section(section) for section in SECTIONS.values()),
        _between(),
        _effects(),
        _other_names(),
    ]
    return "\n".join(parts)


def _main() -> str:
    rows = [f"| `{path}` | `{default_in_words(KEYS[path])}` | {reason} |" for path, reason in MAIN.items()]
    return "\n".join(["| key | default | change it |", "|---|---|---|", *rows, ""])


def _section(section: Section) -> str:
    heading = f"[[{section.name}]]" if section.repeated else f"[{section.name}]"
    title = f"## `{heading}`" if section.name else "## Top of the file"
    kinds = [f"* `{name}`: {text}" for name, text in section.types.items()]
    rows = [
        f"| `{path.rpartition('.')[2]}` | {_cell(key.allowed)} | `{_cell(default_in_words(key))}` "
        f"| {_cell(_meaning(key))} |"
        for path, key in section.keys.items()
    ]
    described = " ".join(filter(None, (section.title, attached(section.attachment))))
    parts = [title, "", *([described, ""] if described else []), *kinds, *([""] if kinds else [])]
    return "\n".join([*parts, "| key | allowed | default | meaning |", "|---|---|---|---|", *rows, ""])


def _meaning(key: Key) -> str:
    return " ".join(filter(None, (key.help, availability(key), attached_key(key))))


def _between() -> str:
    rows = [f"| {_paths(_shown(rule.keys))} | {_cell(_reason(rule.reason))} |" for rule in contradictions()]
    checks = (learnable_distribution, one_setting_per_slot, require_positions, require_fillable)
    others = [f"* {' '.join((check.__doc__ or '').split())}" for check in checks]
    return "\n".join(
        [
            "## Rules between keys",
            "",
            BETWEEN,
            "",
            "| keys | rule |",
            "|---|---|",
            *rows,
            "",
            "Besides:",
            "",
            *others,
            "",
        ]
    )


def _effects() -> str:
    rows = [
        f"| {_paths(_shown(rule.keys))} | {_paths(_shown(rule.decided_by))} | {_cell(_reason(rule.reason))} |"
        for rule in rules_without_effect()
    ]
    return "\n".join(
        ["## Keys that need another", "", "| keys | decided by | refused because |", "|---|---|---|", *rows, ""]
    )


def _shown(keys: str) -> list[str]:
    return [key.removesuffix(".type") for key in keys.split()]


def _reason(text: str) -> str:
    """The reason without the values of a profile."""
    return re.sub(r" = {v\[[\w.]+\]}", "", text).replace("{}", "VALUE").replace("{{", "{").replace("}}", "}")


def _other_names() -> str:
    rows = [f"| `--{name}` | {_paths([path])} |" for name, path in SHORT.items()]
    rows += [
        f"| `--{name.replace('_', '-')}` | {_set_by(rows)} |" for name, rows in accepted().items() if "." not in name
    ]
    return "\n".join(["## Flags with another name", "", "| flag | sets |", "|---|---|", *rows, ""])


def _set_by(rows: Sequence[Row]) -> str:
    """What an accepted name sets: keys, with the values that a row of the table is for."""
    found = dict.fromkeys(
        _paths(row.keys) or ("`--profile`" if row.new else "nothing") for row in rows if not row.command
    )
    return " or ".join(found)


def _paths(paths: Sequence[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(configuration_page(), encoding="utf-8")
