"""The kernel for a sum and its norm, and the blocks that use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from attachments.metal import add_norm as kernels
from attachments.metal import blocks
from attachments.metal.add_norm import SOURCE, in_operations, threads_of
from attachments.metal.blocks import FusedBlock, fusible_blocks, install_blocks
from attachments.metal.tests.lanes_of_a_kernel import Argument, execute
from clotho.backend import Backend, backend
from clotho.models.parameters import flat
from tests.inference.engine_helpers import SAMPLED, make_engine, make_prompt, run, submit_request
from tests.small_models import FixedSource, tiny, tiny_source

pytestmark = [pytest.mark.usefixtures("device_path"), pytest.mark.needs_float32]

ROWS = 3


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does."""
    assert type(backend()) is Backend


@pytest.mark.parametrize(("size", "dtype"), [(1000, mx.float32), (64, mx.float16), (1024, mx.float16)])
def test_the_source_computes_what_mlx_computes(size: int, dtype: mx.Dtype, tmp_path: Path) -> None:
    """Compiled as C++: a row has one SIMD group or several, and a size that its threads need not divide."""
    norm = nn.RMSNorm(size, eps=1e-5)
    mx.random.seed(1)
    norm.weight = (1.0 + 0.3 * mx.random.normal((size,))).astype(dtype)
    x, r = mx.random.normal((2, ROWS, 1, size)).astype(dtype)
    kind = {mx.float32: "float", mx.float16: "_Float16"}[dtype]
    arguments = [
        Argument("x", "const T*", np.array(x)),
        Argument("r", "const T*", np.array(r)),
        Argument("w", "const T*", np.array(norm.weight)),
        Argument("eps", "const float*", np.array([norm.eps], np.float32)),
        Argument("total", "T*", (ROWS, 1, size)),
        Argument("normed", "T*", (ROWS, 1, size)),
    ]
    threads = threads_of(size)
    constants = f"using T = {kind}; constexpr uint SIZE = {size}, THREADS = {threads};"
    out = np.array(x).dtype.type
    total, normed = execute(SOURCE, constants, arguments, groups=(ROWS, 1), out=out, at=tmp_path, threads=threads)
    expected = in_operations(norm, x, r)
    assert np.array_equal(total, np.array(expected[0]))
    tolerance = {mx.float32: 2e-6, mx.float16: 8e-3}[dtype]
    np.testing.assert_allclose(normed.astype(np.float32), np.array(expected[1].astype(mx.float32)), atol=tolerance)


@pytest.mark.parametrize(("size", "threads"), [(64, 32), (1024, 128), (5120, 640), (100_000, 1024)])
def test_a_row_has_whole_simd_groups(size: int, threads: int) -> None:
    """Up to the largest group that Metal computes."""
    assert threads_of(size) == threads


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let operations of MLX compute what the kernel computes; returns the shapes of its calls."""
    found: list[tuple[int, ...]] = []

    def called(norm: Any, eps: mx.array, x: mx.array, r: mx.array) -> list[mx.array]:
        found.append(tuple(x.shape))
        assert eps.item() == pytest.approx(norm.eps)
        return in_operations(norm, x, r)

    monkeypatch.setattr(blocks, "add_norm", called)
    monkeypatch.setattr(kernels, "add_norm", called)
    return found


def completions(source: FixedSource) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Sample completions of two prompts in one batch."""
    engine = make_engine(source)
    answers = [submit_request(engine, make_prompt(length), SAMPLED, seeds=(1, 2)) for length in (5, 9)]
    run(engine)
    return [(one.tokens, one.logprobs) for answer in answers for one in answer.completions]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_decode_steps_compute_what_they_computed(family: str, calls: list[tuple[int, ...]]) -> None:
    """Tokens and log-probabilities are equal; sequences are left to mlx-lm, and parameters keep their names."""
    source = tiny_source(family)
    model: Any = source.model
    model.freeze()
    expected, names = completions(source), flat(model.parameters()).keys()
    install_blocks(fusible_blocks(model))
    assert completions(source) == expected
    assert calls
    assert {shape[1] for shape in calls} == {1}
    assert flat(model.parameters()).keys() == names
    calls.clear()
    mx.eval(model(mx.zeros((2, 4), dtype=mx.int32)))
    assert not calls


def test_the_kernel_is_compared_with_operations(calls: list[tuple[int, ...]]) -> None:
    """With a stand-in of the same operations, the difference is 0."""
    model: Any = tiny("qwen3").freeze()
    assert kernels.difference(model.layers[0]) == 0.0
    assert len(calls) == 1


def test_blocks_that_train_their_norms_and_other_architectures_are_left_to_mlx_lm() -> None:
    """And blocks that have the kernel already."""
    model: Any = tiny("qwen3").freeze()
    model.layers[0].post_attention_layernorm.unfreeze()
    found = fusible_blocks(model)
    assert len(found) == len(model.layers) - 1
    install_blocks(found)
    assert {type(block) for block in found} == {FusedBlock}
    assert fusible_blocks(model) == []
    assert fusible_blocks(tiny("llama").freeze()) == []
