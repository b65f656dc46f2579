"""Where a number was measured: machine, package versions and commit."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from clotho.cpu import load_blas
from clotho.models.machine import describe_machine
from protocols.summary import MachineDescription

ROOT = Path(__file__).resolve().parent.parent


class Fingerprint(Struct, frozen=True, kw_only=True):
    """Stored with every result. commit: ends in `+` if the working tree had changes."""

    machine: MachineDescription
    mlx_lm: str
    commit: str


def fingerprint() -> Fingerprint:
    """The fingerprint of this machine and checkout."""
    return Fingerprint(machine=describe_machine(blas=load_blas()), mlx_lm=version("mlx-lm"), commit=_commit())


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno", "--", ".", ":!bench/results", ":!docs") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_fingerprint(measured_on: Fingerprint) -> str:
    """Describe machine and MLX version of a measurement."""
    machine = measured_on.machine
    return f"{machine.processor}, {machine.cores} cores, MLX {machine.mlx_version} on {machine.backend}"
