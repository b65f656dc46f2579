"""A custom objective whose native code crashes when a file exists. CLOTHO_TEST_CRASH: the path of the file."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import mlx.core as mx

from clotho.settings.objectives import Custom
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss
from tests.e2e.custom_objective import importance_weighted

CRASH = os.environ.get("CLOTHO_TEST_CRASH", "")


def objective(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """Importance sampling. Reads address 0 if the file exists.

    The call holds the interpreter lock: no thread changes its stack while the stacks are printed.
    """
    if Path(CRASH).is_file():
        ctypes.string_at(0)
    return importance_weighted(logp_N, tokens, settings)
