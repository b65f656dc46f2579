"""Number of operations in the graph of a decode step or of a micro-batch, as Metal would run them.

The number of operations bounds the speed of small models on a GPU: each operation costs the host time to encode, and
each kernel costs the device time to start. The counts depend on the depth of a model and not on its widths, and they
are the same on every machine.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten

from attachments.metal import add_norm, norm_rotation
from attachments.metal.attention import fusible, install
from attachments.metal.blocks import fusible_blocks, install_blocks
from bench.shapes import unending
from clotho.inference.engine import DecodeEngine
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection

VIEWS = frozenset(
    {
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Checkpoint",
        "CustomTransforms",
        "ExpandDims",
        "Flatten",
        "NumberOfElements",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    }
)
"""Operations without a kernel: views of their inputs, and nodes that only change the order or the gradient."""

OPERATION = re.compile(r'^\{ \d+ \[label ="([^"]*)", shape=rectangle\]; \}$', re.MULTILINE)


class GraphCounts(NamedTuple):
    """Number of operations of a graph, and number of operations with a kernel of their own."""

    nodes: int
    kernels: int


def operations(arrays: Sequence[mx.array]) -> Counter[str]:
    """Return the operations that must run before `arrays` are known, by name. The arrays are not evaluated."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return Counter(OPERATION.findall(graph.getvalue()))


def count(arrays: Sequence[mx.array]) -> GraphCounts:
    """Count the operations that must run before `arrays` are known. The arrays are not evaluated."""
    found = operations(arrays)
    found.pop("Depends", None)
    return GraphCounts(found.total(), sum(number for name, number in found.items() if name not in VIEWS))


@contextmanager
def fused_operations() -> Iterator[None]:
    """Let norms, rotations, attention and dequantization be one operation each inside the context, as on Metal.

    The CPU backend builds them from many operations. Arrays of the context have the right shapes and types, and
    meaningless values. Attention over several queries stays unfused, as in a gradient on Metal.
    """
    usual: Any = mx.fast.scaled_dot_product_attention

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        if queries.shape[-2] > 1:
            return cast(mx.array, usual(queries, keys, values, **options))
        mask = options.get("mask")
        return _one_operation(queries, keys, values, *([mask] if isinstance(mask, mx.array) else []))

    def dequantized(w: mx.array, /, scales: mx.array, biases: mx.array | None = None, **options: Any) -> mx.array:
        result = mx.zeros((*scales.shape[:-1], scales.shape[-1] * options["group_size"]), scales.dtype)
        mx.eval(result)
        return _one_operation(result, w, scales, *([] if biases is None else [biases]))

    with (
        patch.multiple(mx.fast, rms_norm=_one_operation, rope=_one_operation, scaled_dot_product_attention=attention),
        patch.object(mx, "dequantize", dequantized),
    ):
        yield


@contextmanager
def metal_kernels() -> Iterator[None]:
    """Let a kernel of `attachments.metal` be one operation inside the context; its results are meaningless."""

    def launched(*, inputs: Sequence[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        sizes = [math.prod(shape) for shape in output_shapes]
        result = mx.zeros(sum(sizes), output_dtypes[0])
        mx.eval(result)
        parts = mx.split(_one_operation(result, *inputs), list(accumulate(sizes))[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, output_shapes, strict=True)]

    with patch.object(norm_rotation, "kernel", lambda: launched), patch.object(add_norm, "kernel", lambda: launched):
        yield


def _one_operation(x: mx.array, *inputs: Any, **_: Any) -> mx.array:
    """Return an array like `x` by one operation, whose gradient is one more, and which waits for all inputs."""
    arrays = [array for array in inputs if isinstance(array, mx.array)]
    return mx.depends([mx.sin(x)], arrays)[0] if arrays else mx.sin(x)


@contextmanager
def counted_evaluations() -> Iterator[list[GraphCounts]]:
    """Within the block, count every graph that `mx.async_eval` starts, with fused operations, before it is computed."""
    started: list[GraphCounts] = []
    usual: Any = mx.async_eval

    def counted(*trees: Any) -> None:
        leaves: Any = tree_flatten(list(trees))
        started.append(count([leaf for _, leaf in leaves if isinstance(leaf, mx.array)]))
        usual(*trees)

    with fused_operations(), patch.object(mx, "async_eval", counted):
        yield started


def decode_step(policy: Policy, *, rows: int) -> GraphCounts:
    """Count the operations of one decode step with sampling, for `rows` rows of equal length, as on Metal.

    The policy must decode on the device path. The policy may not be used afterwards: its engine holds meaningless
    values.
    """
    install(fusible(policy.model))
    install_blocks(fusible_blocks(policy.model))
    with metal_kernels():
        engine = DecodeEngine(policy, EngineSection(max_num_seqs=rows))
        engine.submit(unending(policy, rows), lambda _: None)
        while engine.running < rows:
            engine.tick()
        engine.tick()
        with counted_evaluations() as started:
            engine.tick()
    (step,) = started
    return step
