"""Compatibility of a resumed run with its profile: settings that determine the results must not change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from protocols.errors import CheckpointError
from training_run.attachment import installed_attachments
from training_run.directory.checkpoints import checkpoint_steps
from training_run.profile.keys import PROFILE_KEYS, SETTABLE
from training_run.profile.schema import Profile
from training_run.records.remedies import new_run_line
from training_run.records.summary import resume_command

MAY_DIFFER = (
    "steps",
    "async",
    "run_dir",
    "parity",
    "checkpoint",
    "eval",
    "server",
    "engine",
    "rollouts",
    "queues",
    "memory",
    "monitor",
    "tracking",
    "actors",
    "policy.grad_checkpoint",
    "learner.layout",
    "learner.max_bad_steps",
    "learner.max_equal_batches",
    "learner.max_failed_batches",
    "learner.max_staleness",
    "learner.max_turn_ms",
    "learner.micro_batch_tokens",
)
"""Keys and sections that a resumed run may change: the length of the run and its operation, not its results."""

REWARD_KEYS_THAT_MAY_DIFFER = re.compile(r"rewards\.\d+\.(run_in|where|max_workers|memory_limit_mb)")


def refuse_if_incompatible(old: Profile, new: Profile, *, run: Path, step: int | None = None) -> None:
    """Raise `CheckpointError` if keys differ that must not change; the message lists each as `key: old -> new`.

    The message has the command that resumes the run, and the one that starts a new run from its state with the new
    settings. run: the run directory. step: of the checkpoint that is resumed; None: the newest.
    """
    differing = [text for key, text in differences(old, new).items() if not _may_differ(key, old, new)]
    if differing:
        newest = next(iter(checkpoint_steps(run / "checkpoints")), None)
        forked = new_run_line(run, newest if step is None else step, _changed(old, new))
        raise CheckpointError(
            f"cannot resume with other settings ({'; '.join(differing)}): resume with the settings of the run, "
            f"{resume_command(run / 'profile.toml')}, or start a new run from its state, {forked}"
        )


def differences(old: Profile, new: Profile) -> dict[str, str]:
    """Return the keys with different values, each with the text `key: old -> new`; API keys are hidden."""
    before, after = _keys(msgspec.to_builtins(old)), _keys(msgspec.to_builtins(new))
    return {
        key: f"{key}: {before.get(key)} -> {after.get(key)}" if not key.endswith("api_key") else f"{key}: changed"
        for key in sorted(before | after)
        if before.get(key) != after.get(key)
    }


def _changed(old: Profile, new: Profile) -> dict[str, Any]:
    """Return the new values of the settings that differ, by the key path of their flag."""
    before, after = (_settings(msgspec.to_builtins(profile)) for profile in (old, new))
    changed = [key for key in SETTABLE if key in after and after[key] != before.get(key) and key != "run_dir"]
    return {key: after[key] for key in PROFILE_KEYS.types_first(changed)}


def _settings(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to the key paths of flags. Arrays of tables, and tables as values, stay whole."""
    if prefix.removesuffix(".") in SETTABLE or not isinstance(node, dict):
        return {prefix.removesuffix("."): node}
    return {key: value for name, child in node.items() for key, value in _settings(child, f"{prefix}{name}.").items()}


def _may_differ(key: str, old: Profile, new: Profile) -> bool:
    if REWARD_KEYS_THAT_MAY_DIFFER.fullmatch(key):
        return True
    if any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_DIFFER):
        return True
    return any(attachment.may_differ(key, old, new) for attachment in installed_attachments())


def _keys(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys. Lists stay whole, except the rewards, whose keys contain their index."""
    if isinstance(node, dict):
        return {key: value for name, child in node.items() for key, value in _keys(child, f"{prefix}{name}.").items()}
    if isinstance(node, list | tuple) and any(isinstance(child, dict) for child in node):
        return _keys({str(index): child for index, child in enumerate(node)}, prefix)
    return {prefix.removesuffix("."): node}
