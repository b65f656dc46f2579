"""Matrix products with the BLAS of the process, on memory that is already allocated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.process import REFERENCE_BLAS, load_blas

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


def part(whole: Matrix, rows: slice, columns: slice) -> Matrix:
    """Return a part of a matrix with contiguous rows, faster than `matrix`. Both slices have a start."""
    address = whole.address + (rows.start * whole.stride + columns.start) * whole.array.itemsize
    return Matrix(whole.array[rows, columns], address, whole.stride, by_columns=False)


def multiply(x: Matrix, w: Matrix, out: Matrix, *, scale: float = 1.0, add: bool = False) -> None:
    """Write scale * x w to `out`, whose rows are contiguous. add: add it to the values in `out` instead."""
    sgemm = _sgemm()
    if sgemm is None:
        product = x.array @ w.array
        np.multiply(product, scale, out=product)
        np.add(product, out.array if add else 0.0, out=out.array)
        return
    sgemm(*_arguments(x, w, out, scale, add))


class Product(NamedTuple):
    """A product for `prepared`: the arguments of `multiply`."""

    x: Matrix
    w: Matrix
    out: Matrix
    scale: float = 1.0
    add: bool = False


INTEGER, FLOAT, ADDRESS = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
ARGUMENTS: tuple[Any, ...] = (*[INTEGER] * 6, FLOAT, ADDRESS, INTEGER, ADDRESS, INTEGER, FLOAT, ADDRESS, INTEGER)
"""Types of the arguments of `cblas_sgemm`."""


def prepared(products: Sequence[Product]) -> Callable[[], None]:
    """Return a function that computes independent products, with less overhead per product than `multiply`.

    The caller keeps the matrices alive. The products are one call of `cblas_sgemm_batch` if the BLAS has it.
    """
    if not products:
        return _nothing
    if _sgemm() is None:
        return partial(_multiply_all, tuple(products))
    batch, rows = _sgemm_batch(), [_arguments(*product) for product in products]
    if batch is None:
        sgemm: Any = ctypes.CDLL(None)["cblas_sgemm"]
        sgemm.restype = None
        calls = [tuple(kind(value) for kind, value in zip(ARGUMENTS, row, strict=True)) for row in rows]
        return partial(_call_all, sgemm, calls)
    columns = list(zip(*rows, strict=True))[1:]
    arrays = [_c_array(kind, column) for kind, column in zip(ARGUMENTS[1:], columns, strict=True)]
    return partial(batch, INTEGER(ROW_MAJOR), *arrays, INTEGER(len(rows)), _c_array(INTEGER, (1,) * len(rows)))


@lru_cache(maxsize=1024)
def _c_array(kind: Any, values: tuple[int | float, ...]) -> Any:
    """Return an array of C, which is not modified: blocks of a model share all arrays but those of their weights."""
    return (kind * len(values))(*values)


def _nothing() -> None:
    """Compute no products."""


def _multiply_all(products: Sequence[Product]) -> None:
    for x, w, out, scale, add in products:
        multiply(x, w, out, scale=scale, add=add)


def _call_all(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> None:
    for arguments in calls:
        function(*arguments)


def _arguments(x: Matrix, w: Matrix, out: Matrix, scale: float, add: bool) -> tuple[int | float, ...]:
    """Return the arguments of `cblas_sgemm`."""
    rows, columns = out.array.shape
    return (
        *(ROW_MAJOR, x.order, w.order, rows, columns, w.array.shape[0]),
        *(scale, x.address, x.stride, w.address, w.stride, 1.0 if add else 0.0, out.address, out.stride),
    )


@cache
def _sgemm_batch() -> Callable[..., Any] | None:
    """Return `cblas_sgemm_batch` of MKL; None for another BLAS."""
    if not load_blas().startswith("mkl"):
        return None
    batch: Any = getattr(ctypes.CDLL(None), "cblas_sgemm_batch", None)
    if batch is not None:
        batch.restype = None
    found: Callable[..., Any] | None = batch
    return found


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
