"""Matrix products with the BLAS of the process, on memory that is already allocated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.cpu import REFERENCE_BLAS, load_blas

Floats = NDArray[np.float32]

ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112
"""Constants of cblas.h."""


class Matrix(NamedTuple):
    """A matrix in memory. stride: elements from one row to the next, or from one column to the next if `by_columns`."""

    array: Floats
    address: int
    stride: int
    by_columns: bool

    @property
    def order(self) -> int:
        """The BLAS constant for the memory order."""
        return TRANSPOSE if self.by_columns else NO_TRANSPOSE


def matrix(array: Floats) -> Matrix:
    """Return the BLAS view of an array with two axes. Raises ValueError unless its rows or columns are contiguous."""
    rows, columns = array.shape
    row_stride, column_stride = (stride // array.itemsize for stride in array.strides)
    address = array.__array_interface__["data"][0]
    if array.dtype == np.float32 and column_stride == 1 and (row_stride >= columns or rows == 1):
        return Matrix(array, address, max(row_stride, columns), by_columns=False)
    if array.dtype == np.float32 and row_stride == 1 and (column_stride >= rows or columns == 1):
        return Matrix(array, address, max(column_stride, rows), by_columns=True)
    raise ValueError("a BLAS product needs float32 matrices with contiguous rows or columns that do not overlap")


def multiply(x: Matrix, w: Matrix, out: Matrix, *, scale: float = 1.0, add: bool = False) -> None:
    """Write scale * x w to `out`, whose rows are contiguous. add: add it to the values in `out` instead."""
    sgemm = _sgemm()
    if sgemm is None:
        product = x.array @ w.array
        np.multiply(product, scale, out=product)
        np.add(product, out.array if add else 0.0, out=out.array)
        return
    rows, columns = out.array.shape
    inner = w.array.shape[0]
    sgemm(
        *(ROW_MAJOR, x.order, w.order, rows, columns, inner),
        *(scale, x.address, x.stride, w.address, w.stride, 1.0 if add else 0.0, out.address, out.stride),
    )


@cache
def _sgemm() -> Callable[..., Any] | None:
    """Return `cblas_sgemm` of an optimised BLAS; None if there is none: NumPy is faster than the reference BLAS."""
    if load_blas() == REFERENCE_BLAS:
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
