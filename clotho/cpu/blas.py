"""Matrix products with the BLAS that MLX uses, out of and into memory that is there already."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho import BLAS
from clotho.cpu.load_blas import SLOW

Floats = NDArray[np.float32]

BY_ROWS, AS_IT_IS, TRANSPOSED = 101, 111, 112
"""What BLAS calls the order of its arguments (cblas.h)."""


class Matrix(NamedTuple):
    """A matrix where it lies. stride: numbers from one row to the next, or from column to column if `by_columns`."""

    array: Floats
    address: int
    stride: int
    by_columns: bool

    @property
    def layout(self) -> int:
        """Its order in the words of BLAS."""
        return TRANSPOSED if self.by_columns else AS_IT_IS


def matrix(array: Floats) -> Matrix:
    """See an array of two axes as BLAS does. Raises ValueError unless its rows or its columns are contiguous."""
    rows, columns = array.shape
    down, along = (stride // array.itemsize for stride in array.strides)
    address = array.__array_interface__["data"][0]
    if array.dtype == np.float32 and along == 1 and (down >= columns or rows == 1):
        return Matrix(array, address, max(down, columns), by_columns=False)
    if array.dtype == np.float32 and down == 1 and (along >= rows or columns == 1):
        return Matrix(array, address, max(along, rows), by_columns=True)
    raise ValueError("BLAS multiplies float32 matrices whose rows or columns are contiguous and apart")


def multiply(x: Matrix, w: Matrix, out: Matrix, *, scale: float = 1.0, add: bool = False) -> None:
    """Write scale * x w into `out`, whose rows are contiguous, or add it to what is there."""
    sgemm = _sgemm()
    if sgemm is None:
        product = x.array @ w.array
        np.multiply(product, scale, out=product)
        np.add(product, out.array if add else 0.0, out=out.array)
        return
    rows, columns = out.array.shape
    inner = w.array.shape[0]
    sgemm(
        *(BY_ROWS, x.layout, w.layout, rows, columns, inner),
        *(scale, x.address, x.stride, w.address, w.stride, 1.0 if add else 0.0, out.address, out.stride),
    )


@cache
def _sgemm() -> Callable[..., Any] | None:
    """BLAS's product of the process, or None: NumPy's own is faster than the reference."""
    if BLAS == SLOW:
        return None
    try:
        sgemm = ctypes.CDLL(None).cblas_sgemm
    except AttributeError:
        return None
    number, address, size = ctypes.c_float, ctypes.c_void_p, ctypes.c_int
    sgemm.argtypes = [*[size] * 6, number, address, size, address, size, number, address, size]
    sgemm.restype = None
    found: Callable[..., Any] = sgemm
    return found
