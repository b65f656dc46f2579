"""Where a number was measured: machine, package versions and commit."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from clotho.process import load_blas
from protocols.compute import MachineDescription
from training_run.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent


class Fingerprint(Struct, frozen=True, kw_only=True):
    """Stored with every result. commit: ends in `+` if the working tree had changes."""

    machine: MachineDescription
    mlx_lm: str
    commit: str


def fingerprint() -> Fingerprint:
    """The fingerprint of this machine and checkout."""
    return Fingerprint(machine=describe_machine(blas=load_blas()), mlx_lm=version("mlx-lm"), commit=_commit())


@contextmanager
def working_tree(commit: str, *, clone: Path = ROOT) -> Iterator[Path]:
    """A temporary working tree of a commit. Raises subprocess.CalledProcessError if the clone does not have it."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit, root=clone)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree), root=clone)


def _commit() -> str:
    try:
        return _git("rev-parse", "--short=12", "HEAD") + (
            "+" if _git("status", "--porcelain", "-uno", "--", ".", ":!bench/results", ":!docs") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def describe_fingerprint(measured_on: Fingerprint) -> str:
    """Describe machine and MLX version of a measurement."""
    machine = measured_on.machine
    return f"{machine.processor}, {machine.cores} cores, MLX {machine.mlx_version} on {machine.backend}"
