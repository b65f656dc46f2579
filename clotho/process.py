"""The process: its BLAS and its malloc, which are set before MLX is imported, and the cores that it may use.

This module does not import MLX, so that `load_blas()` can run before the first `import mlx.core` of the process.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

REFERENCE_BLAS = "reference (slow: install the package mkl, or OpenBLAS)"
"""Name of the BLAS that MLX's CPU wheel for Linux contains."""


@cache
def load_blas() -> str:
    """Load an optimised BLAS for the whole process, once, and return its name.

    Call this before the first `import mlx.core`: on Linux the loader binds `cblas_sgemm` to the first library that is
    loaded globally, which makes MLX's matrix products about 50 times faster than the BLAS in its wheel. MKL (package
    `mkl`) is preferred to a system OpenBLAS. On macOS, MLX uses Accelerate.

    MKL runs in the mode whose results depend neither on the alignment of the arguments nor on the number of threads, so
    that equal runs are equal bit for bit. One core stays free for the event loop and for MLX's own kernels, because a
    matrix product that waits for a thread without a core is many times slower; see also `divide_cores`. Threads of MKL
    wait 1 ms for the next product before they sleep. Sleeping at once costs a third of the speed of small products (64
    x 576 by 576 x 1536 with two threads: 0.80 against 0.62 ms), and the default of 200 ms takes a core from others.
    Variables that are already set (MKL_NUM_THREADS, ...) are not changed.
    """
    if platform.system() == "Darwin":
        return "Accelerate"
    if "mlx.core" in sys.modules:
        return "as loaded with MLX"
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("MKL_THREADING_LAYER", "INTEL")
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, usable_cores() - 1)))
    for path in _candidates():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if setter := _mkl_threads():
            setter(max(1, usable_cores() - 1))
        if initialize := getattr(ctypes.CDLL(None), "MKL_Get_Max_Threads", None):
            initialize()  # sets a variable of the environment, which MLX reads in another thread when it starts g++
        return Path(path).name.split(".so")[0].removeprefix("lib")
    return REFERENCE_BLAS


DIVIDED_PARAMETERS = 32_000_000
"""Parameters of a model from which its products are divided over idle cores.

A synchronous run of SmolLM2-135M then takes 0.78 times as long with two cores, and one of a model of 0.5 million
parameters 1.15 times: its products are too small.
"""


def divide_cores(threads: int) -> None:
    """Let the products of each of `threads` threads, which compute at the same time, use an equal share of the cores.

    Only with MKL, whose results do not depend on the number of threads, and not if the environment sets that number.
    """
    if setter := _mkl_threads():
        setter(max(1, usable_cores() // max(1, threads)))


@cache
def _mkl_threads() -> Callable[[int], None] | None:
    """Return the function of MKL that sets its number of threads; None without MKL."""
    setter: Any = getattr(ctypes.CDLL(None), "MKL_Set_Num_Threads", None)
    if setter is None or "MKL_NUM_THREADS" in os.environ:
        return None
    setter.argtypes, setter.restype = [ctypes.c_int], None
    found: Callable[[int], None] = setter
    return found


def usable_cores() -> int:
    """Return the number of cores that this process may use, which containers and `taskset` can reduce."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


MALLOC = (("MALLOC_ARENA_MAX", -8, 1), ("MALLOC_MMAP_THRESHOLD_", -3, 2**20), ("MALLOC_TRIM_THRESHOLD_", -1, 2**26))
"""Variable of the environment, parameter of mallopt(3), and value."""


def configure_malloc() -> None:
    """Let glibc's malloc reuse and return freed memory. A variable that the environment sets is not changed.

    By default, each thread allocates from an arena of its own, and blocks below 32 MiB are taken from arenas. Both
    leave free memory that is neither reused nor returned, so that the resident memory of a run grows although its live
    memory does not. No effect without glibc. Call this before the first thread starts.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for variable, parameter, value in MALLOC:
            if variable not in os.environ:
                mallopt(parameter, value)


def _candidates() -> Iterator[str]:
    yield from sorted(str(path) for path in Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    if openblas := ctypes.util.find_library("openblas"):  # runs other programs, which takes a while
        yield openblas
