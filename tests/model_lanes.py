"""Lanes: the compute path and the precision of the models that tests build.

`python -m pytest` runs the tests marked `lanes` in every lane, or in those of the mark, and all others as this machine
computes by default.
`python -m pytest --lane bfloat16` runs all tests of the packages that compute (`COMPUTING`) in one lane, none with a
parameter of the host path. The lanes other than the default compute without the host path (`attachments/cpu`), as on a
GPU, on models with the head size 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec import Struct
from numpy.typing import NDArray

from clotho.backend import SWITCH, backend_of

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

GROUP_SIZE = 64
"""Group size of quantized weights."""

COMPUTING = (
    "attachments/adapters/", "attachments/alarms/", "attachments/atropos/", "attachments/cpu/",
    "attachments/curriculum/", "attachments/dashboard/", "attachments/dialects/", "attachments/files/",
    "attachments/keys/", "attachments/kv_quantization/", "attachments/machine/", "attachments/remote/",
    "attachments/router_replay/", "attachments/speculation/", "attachments/tools/",
    "tests/actors/", "tests/e2e/", "tests/inference/", "tests/lanes/", "tests/models/", "tests/oracle/",
    "tests/profiles/", "tests/scoring/", "tests/serving/", "tests/training/", "tests/training_run/",
)  # fmt: skip
"""Folders of tests that build models or start runs."""

EMBEDDED = Path(__file__).parents[1] / "profiles" / "embedded"


class Lane(Struct, frozen=True, kw_only=True):
    """One way to compute.

    on_device: without the host path. bits: of the quantized weights; 0: not quantized.

    atol: largest difference of two log-probabilities of one token that two computations of the same value give, in
    nats. rtol: largest relative difference of two sums over a micro-batch, such as the gradient of one matrix. In
    float32 each test states its tolerance. float16 has 11 significant bits, and no exponent for large values. bfloat16
    has 8 significant bits: logits between 8 and 16 are multiples of
    2^-4, and every layer rounds its result to 2^-8 of it. In 4 bits, products are in bfloat16 too, and MLX's CPU
    kernels also add them in it. docs/numerics-internals.md has measurements.
    """

    name: str
    on_device: bool = True
    dtype: str = "float32"
    bits: int = 0
    atol: float = 0.0
    rtol: float = 0.0


DEFAULT = Lane(name="default", on_device=False)
LANES = {
    lane.name: lane
    for lane in (
        DEFAULT,
        Lane(name="float32"),
        Lane(name="float16", dtype="float16", atol=0.015, rtol=0.03),
        Lane(name="bfloat16", dtype="bfloat16", atol=0.1, rtol=0.15),
        Lane(name="4bit", dtype="bfloat16", bits=4, atol=0.1, rtol=0.25),
    )
}

_current = DEFAULT
_chosen = ExitStack()
"""The lane of `choose`, to the end of the process."""


def current() -> Lane:
    """Return the lane of the running test."""
    return _current


def atol(float32: float) -> float:
    """Return the absolute tolerance of log-probabilities. float32: the tolerance in that type."""
    return max(float32, _current.atol)


def rtol(float32: float) -> float:
    """Return the relative tolerance of a gradient or a loss. float32: the tolerance in that type."""
    return max(float32, _current.rtol)


def numpy(array: mx.array) -> NDArray[np.float32]:
    """Return an array of any floating type as float32: NumPy has no bfloat16."""
    import mlx.core as mx

    return np.array(array.astype(mx.float32))


def is_batch_invariant() -> bool:
    """Whether the results of a row are independent of the number of rows: on the CPU, and in float32 up to rounding."""
    import mlx.core as mx

    return _current.dtype == "float32" or bool(mx.default_device() == mx.Device(mx.cpu))


def choose(lane: Lane) -> None:
    """Use a lane for the rest of the process."""
    _chosen.enter_context(using(lane))


@contextmanager
def using(lane: Lane) -> Iterator[None]:
    """Use a lane within the block: for models of the tests, and for processes that the tests start."""
    global _current
    outer, _current = _current, lane
    with ExitStack() as stack:
        stack.callback(_restore, outer)
        if lane.on_device:
            stack.enter_context(device_path())
            stack.enter_context(patch("clotho.models.loading._target_dtype", _target_dtype))
        yield


@contextmanager
def device_path() -> Iterator[None]:
    """Compute with MLX only within the block, also in processes that the tests start."""
    try:
        with patch.dict("os.environ", {SWITCH: "0"}):
            backend_of.cache_clear()
            yield
    finally:
        backend_of.cache_clear()


def _restore(lane: Lane) -> None:
    global _current
    _current = lane


def _target_dtype(section: Any) -> mx.Dtype | None:
    """Return the type of computation as on a GPU: `auto` is the type of the checkpoint."""
    from clotho.models.loading import DTYPES

    return None if section.dtype == "auto" else DTYPES[section.dtype]


def skip_full_training(kind: str) -> None:
    """Skip a test of full training in a lane of quantized weights, which have no gradient."""
    if kind == "full" and _current.bits:
        pytest.skip("full training needs unquantized weights")


def skip_quantized() -> None:
    """Skip a test that trains embeddings or a head, or that quantizes the model itself, in a lane of quantized weights.

    The learner trains unquantized embeddings and heads only.
    """
    if _current.bits:
        pytest.skip("the test needs unquantized weights")


def sizes(**others: int) -> dict[str, int]:
    """Return sizes of a model whose head size and group size are 64; none in the default lane."""
    if not _current.on_device:
        return {}
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        **others,
    }


def converted(model: nn.Module) -> nn.Module:
    """Convert the weights of a float32 model to the precision of the lane, in place; returns the model.

    Skips the test if MLX cannot compute the model: expert layers in 16 bits on the CPU (GatherMM).
    """
    if _current.dtype != "float32":
        convert(model, _current.bits, _current.dtype)
        import mlx.core as mx
        from mlx_lm.models.switch_layers import SwitchLinear

        if mx.default_device() == mx.Device(mx.cpu) and any(isinstance(m, SwitchLinear) for m in model.modules()):
            pytest.skip("MLX computes expert layers on the CPU in float32 or quantized only")
    return model


def convert(model: nn.Module, bits: int = 0, dtype: str = "bfloat16") -> None:
    """Convert weights to a type of 16 bits, and quantize them as mlx-lm does if `bits` is not 0."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    keeps: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    model.update(
        tree_map_with_path(
            lambda name, array: (
                array.astype(getattr(mx, dtype)) if keeps(name) and mx.issubdtype(array.dtype, mx.floating) else array
            ),
            model.parameters(),
        )
    )
    if bits:
        _quantize(model, bits)
    mx.eval(model.parameters())


def _quantize(model: nn.Module, bits: int) -> None:
    import mlx.nn as nn

    chosen: Callable[[str, nn.Module], bool | dict[str, Any]] = getattr(model, "quant_predicate", lambda *_: True)

    def quantized(name: str, module: nn.Module) -> bool | dict[str, Any]:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0
        return fits and chosen(name, module)

    nn.quantize(model, group_size=GROUP_SIZE, bits=bits, class_predicate=quantized)


def scaled(parameters: Any, factor: float) -> Any:
    """Multiply all weights of a parameter tree; those of a quantized weight are its scales and biases."""
    import mlx.core as mx
    from mlx.utils import tree_map

    return tree_map(lambda array: array * factor if mx.issubdtype(array.dtype, mx.floating) else array, parameters)


def flags() -> tuple[str, ...]:
    """Return the flags of `pipeline.py` for the embedded policy in the precision of the lane."""
    if _current.dtype == "float32":
        return ()
    path = ("--model.path", str(_quantized_policy(_current.bits))) if _current.bits else ()
    return ("--model.dtype", _current.dtype, *path)


@cache
def _quantized_policy(bits: int) -> Path:
    """Quantize the embedded policy with `mlx_lm.convert`, for this process; its head size is 32."""
    from mlx_lm import convert as convert_files

    directory = TemporaryDirectory(prefix="clotho-lane-")
    _chosen.enter_context(directory)
    path = Path(directory.name) / "policy"
    convert_files(str(EMBEDDED), mlx_path=str(path), quantize=True, q_bits=bits, q_group_size=GROUP_SIZE)
    return path
