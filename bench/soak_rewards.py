"""The reward function of the soak run: it adds nothing, except when a fault is requested.

A fault is a file in the directory that the environment variable `CLOTHO_SOAK_FAULTS` names. The file name is the kind
of fault. The first call that removes the file has the fault.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

VARIABLE = "CLOTHO_SOAK_FAULTS"
TIMEOUT_SECONDS = 5.0
"""Time limit of a call in the profile of the soak run."""


def _raise() -> float:
    raise RuntimeError("a reward of the soak run raises")


def _hang() -> float:
    time.sleep(4 * TIMEOUT_SECONDS)
    return 0.0


def _close_output() -> float:
    sys.stdout.close()
    sys.stderr.close()
    return 0.0


def _exit() -> float:
    os._exit(3)


def _segmentation_fault() -> float:
    ctypes.string_at(0)
    return 0.0


FAULTS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "reward raises": _raise,
        "reward hangs": _hang,
        "reward returns 1e308": lambda: 1e308,
        "reward returns NaN": lambda: math.nan,
        "reward returns text": lambda: "one",
        "reward closes its output": _close_output,
        "reward exits": _exit,
        "reward segfaults": _segmentation_fault,
    }
)


def reward(problem: object, completion: str) -> float:
    """0.0, or the fault that is requested."""
    directory = os.environ.get(VARIABLE)
    for name in os.listdir(directory) if directory else ():
        try:
            Path(directory or "", name).unlink()
        except FileNotFoundError:
            continue
        return FAULTS[name]()  # type: ignore[no-any-return]  # a fault may return what is not a number
    return 0.0
