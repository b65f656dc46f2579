"""Models and clocks of `metal`: random 4-bit weights in known shapes, and an adapter on every linear layer.

The weights are random codes. Nothing is quantized here, so that the shape of a model of 1.7 B parameters is made within
seconds and without its 16-bit weights. Scales are those of a trained model: activations keep their size from block to
block, and logits have a standard deviation of `LOGITS`. Speed and memory do not depend on the values; rounding does.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.contenders.shapes import Shape, configuration
from bench.contenders.worker import Metrics

SHAPES = {
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 3072, 151_936),
    "Qwen3-1.7B": Shape(28, 2048, 16, 8, 6144, 151_936),
    "tiny": Shape(2, 128, 2, 1, 256, 1024),
}
_HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6,
    "tie_word_embeddings": True, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6,
    "tie_word_embeddings": True, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "hybrid": _HYBRID | {
        "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151_936, "linear_num_value_heads": 16,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "experts": _EXPERTS | {
        "hidden_size": 2048, "num_hidden_layers": 6, "intermediate_size": 6144, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "tiny hybrid": _HYBRID | {
        "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 1024, "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
    "tiny experts": _EXPERTS | {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 1024, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}  # fmt: skip
"""Configurations of other architectures. hybrid: 3 layers of the gated delta rule for each layer of attention, 0.7
billion weights. experts: 6 of the 48 layers of Qwen3-30B-A3B, with all experts."""

HEAD_SIZE = {"tiny": 64}
"""Width of an attention head; 128 for all other models."""

RANK, SCALE = 8, 10.0
BITS, GROUP = 4, 64
LOGITS = 4.0
"""Standard deviation of the logits: the largest is about 18, where bfloat16 has steps of 0.125."""
CODES_DEVIATION = math.sqrt((2 ** (2 * BITS) - 1) / 12)
"""Standard deviation of uniform codes of `BITS` bits."""
ADAPTER_DEVIATION = 0.005
"""Standard deviation of the B matrices: the adapter adds about a tenth to the output of a layer."""

FIRST_TOKENS = 5
"""Number of requests whose first token is timed."""

WARM_UP = 3
"""Decode steps before the clock starts."""


def metal_configuration(name: str) -> dict[str, Any]:
    """The model configuration for mlx-lm."""
    if name in OTHERS:
        return OTHERS[name]
    return configuration(SHAPES[name]) | {"head_dim": HEAD_SIZE.get(name, 128)}


def counted_configuration(name: str) -> dict[str, Any]:
    """A narrow model of the same depth: the number of operations does not depend on the widths."""
    tiny = SHAPES["tiny"]._replace(layers=SHAPES[name].layers)
    return configuration(tiny) | {"head_dim": HEAD_SIZE["tiny"]}


def packed_model(config: dict[str, Any], *, seed: int = 0) -> Any:
    """The model with random 4-bit weights and bfloat16 elsewhere, evaluated."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model: Any = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=GROUP, bits=BITS, class_predicate=_is_quantized)
    numbers = np.random.default_rng(seed)
    for _, module in model.named_modules():
        if "scales" in module:
            _fill(module, numbers)
    mx.eval(model.parameters())
    model.eval()
    return model


def _is_quantized(_: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0


def _fill(module: Any, numbers: np.random.Generator) -> None:
    """Give a quantized layer random codes, with a mean of zero."""
    inputs = module.scales.shape[-1] * GROUP
    size = LOGITS if isinstance(module, nn.QuantizedEmbedding) else 1.0
    scale = size / math.sqrt(inputs) / CODES_DEVIATION
    module.weight = mx.array(numbers.integers(0, 2**32, module.weight.shape, dtype=np.uint32))
    module.scales = mx.full(module.scales.shape, scale, dtype=mx.bfloat16)
    module.biases = mx.full(module.biases.shape, -scale * (2**BITS - 1) / 2, dtype=mx.bfloat16)


def random_adapter(shape: tuple[int, ...], name: str) -> mx.array:
    """A matrix of an adapter, equal for equal names: `lora_a` as mlx-lm initializes it, `lora_b` not zero.

    With the initial zeros, an adapter that is not used would go unnoticed.
    """
    numbers = np.random.default_rng(list(name.encode()))
    inputs = shape[0] if len(shape) == 2 else shape[-1]  # matrices of experts are (experts, outputs, inputs)
    deviation = ADAPTER_DEVIATION if name.endswith("lora_b") else 1.0 / math.sqrt(3 * inputs)
    return mx.array(numbers.normal(0.0, deviation, shape).astype(np.float32))


class HostTimes:
    """CPU time of the calling thread in decode steps, in seconds: until the graph is given to MLX, and in total."""

    def __init__(self) -> None:
        self.built: list[float] = []
        self.total: list[float] = []
        self._given = 0.0

    def run(self, step: Callable[[], object]) -> None:
        """Measure a step."""
        self._given = 0.0
        began = time.thread_time()
        step()
        ended = time.thread_time()
        self.built.append((self._given or ended) - began)
        self.total.append(ended - began)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Recognize the moment inside the context at which a step gives its graph to MLX."""
        usual: Any = mx.async_eval

        def given(*trees: Any) -> None:
            self._given = self._given or time.thread_time()
            usual(*trees)

        with patch.object(mx, "async_eval", given):
            yield


def measure_steps(step: Callable[[], object], *, rows: int, steps: int, seconds: float) -> Metrics:
    """Measure up to `steps` decode steps of `rows` rows within about `seconds`; one step at least.

    partial: 1 if fewer steps were measured.
    """
    limit = time.perf_counter() + seconds
    for _ in range(WARM_UP):
        if time.perf_counter() < limit:
            step()
    times = HostTimes()
    with times.recording():
        began = time.perf_counter()
        while not times.total or (len(times.total) < steps and time.perf_counter() < limit):
            times.run(step)
        elapsed = time.perf_counter() - began
    return {
        "tokens_per_second": rows * len(times.total) / elapsed,
        "build_seconds": statistics.median(times.built),
        "host_seconds": statistics.median(times.total),
        "partial": float(len(times.total) < steps),
    }


def first_token_metrics(once: Callable[[], float], *, seconds: float) -> Metrics:
    """The median time to the first token of up to `FIRST_TOKENS` requests within about `seconds`, after one more."""
    limit = time.perf_counter() + seconds
    once()
    found: list[float] = []
    while not found or (len(found) < FIRST_TOKENS and time.perf_counter() < limit):
        found.append(once())
    return {"first_token_seconds": statistics.median(found), "partial": float(len(found) < FIRST_TOKENS)}
