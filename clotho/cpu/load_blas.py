"""Load an optimised BLAS before MLX, on Linux, where the CPU wheel of MLX bundles the reference one.

The loader binds `cblas_sgemm` to the first library that was loaded globally, so this must run before the first
`import mlx.core` of the process: matrix products become some 50 times faster. macOS uses Accelerate already.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

SLOW = "reference (slow: install the package mkl, or OpenBLAS)"
"""The name of the BLAS that the CPU wheel of MLX bundles."""


def _candidates() -> Iterator[str]:
    yield from sorted(str(path) for path in Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    if openblas := ctypes.util.find_library("openblas"):  # asks other programs, which takes a while
        yield openblas


def load_blas() -> str:
    """Make an optimised BLAS the process-wide one; return its name for the log.

    MKL (package `mkl`) is preferred, then a system OpenBLAS; `reference` where neither can be loaded. MKL is asked
    for results that do not depend on the alignment of its arguments, without which equal runs differ in last bits.
    One core is left to the event loop and to what MLX computes itself: a product that waits for a thread which has no
    core is many times slower. Variables that are set already (MKL_NUM_THREADS ...) are left alone.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    if "mlx.core" in sys.modules:
        return "as loaded with MLX"
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("MKL_THREADING_LAYER", "INTEL")
    threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", threads)
    for path in _candidates():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return Path(path).name.split(".so")[0].removeprefix("lib")
    return SLOW
