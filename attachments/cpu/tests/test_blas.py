"""Products through BLAS are those of NumPy."""

from __future__ import annotations

import os
import platform

import numpy as np
import pytest

from attachments.cpu import blas as products
from attachments.cpu.blas import Floats, Product, matrix, multiply, part, prepared
from clotho.process import load_blas


@pytest.fixture(params=["BLAS", "NumPy"], autouse=True)
def computed_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with the process's BLAS, where there is one, and without."""
    if request.param == "NumPy":
        monkeypatch.setattr(products, "_sgemm", lambda: None)


def numbers(rows: int, columns: int, *, by_columns: bool = False, seed: int = 0) -> Floats:
    """Random ones, with contiguous rows or columns."""
    shape = (columns, rows) if by_columns else (rows, columns)
    sampled = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return sampled.T if by_columns else sampled


@pytest.mark.parametrize("w_by_columns", [False, True])
@pytest.mark.parametrize("x_by_columns", [False, True])
def test_operands_may_lie_by_rows_or_by_columns(x_by_columns: bool, w_by_columns: bool) -> None:
    """The product is the same, and what stood in the result before, finite or not, does not matter."""
    for rows, inner, columns in ((5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 1)):
        x = numbers(rows, inner, by_columns=x_by_columns)
        w = numbers(inner, columns, by_columns=w_by_columns, seed=1)
        out = np.full((rows, columns), np.nan, np.float32)
        multiply(matrix(x), matrix(w), matrix(out))
        np.testing.assert_allclose(out, x.astype(np.float64) @ w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("w_by_columns", [False, True])
def test_parts_of_wider_matrices_are_multiplied_where_they_lie(w_by_columns: bool) -> None:
    """Rows may be longer than the part: its neighbours are neither read nor written."""
    wide_x, wide_w = numbers(4, 11), numbers(9, 9, by_columns=w_by_columns, seed=1)
    x, w = wide_x[:, 2:7], wide_w[3:8, 1:4]
    wide_out = np.full((4, 8), 7.0, np.float32)
    multiply(matrix(x), matrix(w), matrix(wide_out[:, 4:7]))
    np.testing.assert_allclose(wide_out[:, 4:7], x.astype(np.float64) @ w, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(wide_out[:, [0, 1, 2, 3, 7]], 7.0)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("scale", [1.0, -2.5, 0.0])
def test_products_are_scaled_and_added_to_what_is_there(scale: float, add: bool) -> None:
    """The scale is the product's alone, not that of what is there."""
    x, w, before = numbers(3, 6), numbers(6, 4, by_columns=True, seed=1), numbers(3, 4, seed=2)
    out = before.copy()
    multiply(matrix(x), matrix(w), matrix(out), scale=scale, add=add)
    expected = scale * (x.astype(np.float64) @ w) + (before if add else 0.0)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4)), np.zeros((4, 4), np.int32), np.zeros((8, 8), np.float32)[::2, ::2], np.zeros(4, np.float32)],
    ids=["float64", "integers", "every other row and column", "one axis"],
)
def test_what_blas_cannot_read_is_refused(array: Floats) -> None:
    """It would take other numbers for it."""
    with pytest.raises(ValueError, match=r".+"):
        matrix(array)


def test_a_part_of_a_matrix_is_the_view_of_its_slice() -> None:
    """Rows, columns and both; also single ones."""
    whole = matrix(numbers(5, 7)[:, 1:])
    for rows, columns in ((slice(1, 4), slice(0, None)), (slice(0, None), slice(2, 5)), (slice(3, 5), slice(5, 6))):
        found, expected = part(whole, rows, columns), matrix(whole.array[rows, columns])
        assert found[1:] == expected[1:]
        np.testing.assert_array_equal(found.array, expected.array)


def test_on_macos_no_library_is_loaded_and_no_variable_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX uses Accelerate, and macOS has no CPU affinity to count threads with."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    before = dict(os.environ)
    assert load_blas.__wrapped__() == "Accelerate"
    assert dict(os.environ) == before


@pytest.mark.parametrize("one_call", [True, False])
def test_prepared_products_are_those_of_multiply(one_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call of a BLAS that has batches of products, or one after the other; of different shapes."""
    if not one_call:
        monkeypatch.setattr(products, "_sgemm_batch", lambda: None)
    outs = [(np.full((rows, 4), 3.0, np.float32), np.full((rows, 4), 3.0, np.float32)) for rows in (1, 5, 2)]
    given = [
        Product(matrix(numbers(len(out), inner)), matrix(numbers(inner, 4, seed=1)), matrix(out), scale, add)
        for (out, _), inner, scale, add in zip(outs, (3, 8, 1), (1.0, -2.0, 0.5), (False, True, True), strict=True)
    ]
    compute = prepared(given)
    compute()
    for product, (out, expected) in zip(given, outs, strict=True):
        multiply(product.x, product.w, matrix(expected), scale=product.scale, add=product.add)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
    prepared([])()
