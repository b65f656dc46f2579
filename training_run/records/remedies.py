"""Command lines of the remedies of findings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import ceil, floor, inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from clotho.settings.server import HttpServer
from protocols.errors import ClothoError
from protocols.finding import CHECK, Change, Finding
from training_run.directory.checkpoints import checkpoint_steps
from training_run.profile.flags import as_flags, parse_flags
from training_run.profile.keys import flag_of
from training_run.profile.load import load_profile, value_at
from training_run.profile.program import program
from training_run.profile.schema import Profile
from training_run.records.terminal_text import relative_path

Loaded = Callable[[Mapping[str, Any]], Profile]
"""Loads the settings that a remedy changes, with settings by key path as their highest layer. Raises ProfileError."""


def command_line(argv: Sequence[str]) -> str:
    """Return the line that starts the program with these arguments, as its user has started it."""
    return f"{program()} {shlex.join(argv)}"


def new_run_dir(run_dir: Path) -> str:
    """Return a run directory beside another one that does not exist yet: `RUN-2`, `RUN-3`, ..."""
    number = 2
    while (found := run_dir.with_name(f"{run_dir.name}-{number}")).exists():
        number += 1
    return relative_path(found)


def new_run_line(run_dir: Path, step: int | None, values: Mapping[str, Any]) -> str:
    """Return the command line of a new run with the settings of another one.

    step: of the checkpoint of the other run from which the new run continues; None: it starts anew. values: settings
    that differ, by key path.
    """
    run = relative_path(run_dir)
    source = ["--profile", f"{run}/profile.toml"] if step is None else ["--fork", f"{run}@{step}"]
    return command_line([*source, "--run-dir", new_run_dir(run_dir), *as_flags(values)])


def accepted_change(changes: Sequence[Change], load: Loaded) -> dict[str, Any]:
    """Return the first change that the settings accept and that changes them, by key path; empty if there is none."""
    try:
        present = load({})
        tree = msgspec.to_builtins(present)
    except ClothoError:
        return {}
    for change in changes:
        text = change.value or _scaled(value_at(tree, change.of or change.key), change.factor)
        try:
            values = parse_flags([flag_of(change.key), text], {})
            if text and load(values) != present:
                return values
        except ClothoError:
            continue
    return {}


def _scaled(value: Any, factor: float) -> str:
    """Return a number times a factor as text; empty for other values. Integers are rounded away from their value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, int):
        return str(ceil(value * factor) if factor > 1 else floor(value * factor))
    return f"{value * factor:.3g}"


class RunCommands:
    """Completes the findings of a run with command lines that continue it, fork it, or start it anew.

    Used from the event loop. The settings of a run are those of its `profile.toml`.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._profile = run_dir, run_dir / "profile.toml"
        self._changes: dict[tuple[Change, ...], dict[str, Any]] = {}

    def complete(self, finding: Finding) -> Finding:
        """Return the finding with its command. Without an accepted change the command is a check."""
        remedy, profile = finding.remedy, relative_path(self._profile)
        changes = self._accepted(remedy.changes)
        if remedy.action == "check" or (remedy.changes and not changes):
            argv = ["doctor", "--profile", profile, *self._free_port]
            return replace(finding, remedy=CHECK, command=command_line(argv))
        steps = checkpoint_steps(self._run_dir / "checkpoints")
        is_over = bool(steps) and steps[0] >= self._load({}).steps
        if remedy.action == "resume" and not is_over:
            return replace(finding, command=command_line(["--profile", profile, "--resume", *as_flags(changes)]))
        before = inf if remedy.before_step is None else remedy.before_step
        step = next((step for step in steps if step < before), None) if remedy.action == "fork" else None
        done = replace(remedy, action="start" if step is None else "fork", from_step=step)
        return replace(finding, remedy=done, command=new_run_line(self._run_dir, step, changes))

    def _load(self, values: Mapping[str, Any]) -> Profile:
        return load_profile(str(self._profile), values)

    def _accepted(self, changes: tuple[Change, ...]) -> dict[str, Any]:
        if changes not in self._changes:
            self._changes[changes] = accepted_change(changes, self._load)
        return self._changes[changes]

    @cached_property
    def _free_port(self) -> list[str]:
        """Return the flag with which `doctor` does not find the port of this run occupied."""
        try:
            server = self._load({}).server
        except ClothoError:
            return []
        return ["--server.port", "0"] if isinstance(server, HttpServer) and server.port else []
