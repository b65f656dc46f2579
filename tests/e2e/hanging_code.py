"""Custom components that hang: while the module is imported, or in the compute thread when a file exists.

CLOTHO_TEST_HANG: name of the part that hangs; a path names a file, which the test creates.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from clotho.settings.objectives import Custom
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss
from tests.e2e.custom_objective import importance_weighted

HANG = os.environ.get("CLOTHO_TEST_HANG", "")


def hang() -> None:
    """Wait in native code for an hour."""
    ctypes.CDLL(None).sleep(3600)


if HANG == "import":
    hang()


def reward(problem: object, completion: str) -> float:
    """Return 0."""
    return 0.0


class Tap:
    """A tap on the reports, which is never constructed."""

    def __init__(self, *, name: str, services: Any, inbox: Any) -> None:
        raise NotImplementedError


def objective(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """Importance sampling. Hangs if the file exists, or in the warmup step."""
    if HANG == "warmup" or Path(HANG).is_file():
        sys.stdout.write("hanging\n")
        sys.stdout.flush()
        hang()
    return importance_weighted(logp_N, tokens, settings)
