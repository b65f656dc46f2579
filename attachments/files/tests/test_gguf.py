"""Llama models in GGUF files, as llama.cpp's own library writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization

from attachments.files.gguf import LLAMA3, open_gguf
from attachments.files.tests.gguf_files import CONFIG, TOKENS_1_T, build, write
from protocols.errors import ModelError


def difference(path: Path, model: Any) -> float:
    """Return the largest difference of the logits of a file from those of a model."""
    loaded, _ = open_gguf(path)
    return float(np.abs(np.array(loaded(TOKENS_1_T) - model(TOKENS_1_T))).max())


@pytest.mark.parametrize(
    "change", [{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}, {"attention_bias": True}], ids=str
)
def test_a_file_without_quantization_computes_as_the_model_that_it_was_written_from(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """The rows of queries and keys are reordered, biases included; tied and untied heads load."""
    model = build(CONFIG | change)
    assert difference(write(tmp_path / "m.gguf", model, CONFIG | change), model) < 1e-4


@pytest.mark.parametrize(
    ("kind", "bits"), [(Quantization.Q4_0, 4), (Quantization.Q4_1, 4), (Quantization.Q8_0, 8)], ids=lambda v: str(v)
)
def test_quantized_weights_stay_quantized(tmp_path: Path, kind: Quantization, bits: int) -> None:
    """Dequantized, the weights equal those of llama.cpp's library; the configuration states the bits of each module."""
    import gguf

    model = build()
    loaded, config = open_gguf(write(tmp_path / "m.gguf", model, quantization=kind))
    projection = loaded.model.layers[1].mlp.down_proj
    restored = mx.dequantize(projection.weight, projection.scales, projection.biases, group_size=32, bits=bits)
    original = np.array(model.model.layers[1].mlp.down_proj.weight)
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
    assert np.allclose(np.array(restored.astype(mx.float32)), expected, atol=2e-3)
    assert config["quantization"]["model.layers.1.mlp.down_proj"] == {"group_size": 32, "bits": bits}
    assert config["quantization"]["bits"] == bits


def test_other_quantizations_become_float16(tmp_path: Path) -> None:
    """bfloat16 and float16 matrices load as they are."""
    model = build()
    loaded, config = open_gguf(write(tmp_path / "m.gguf", model, quantization=Quantization.F16))
    assert loaded.model.layers[0].mlp.up_proj.weight.dtype == mx.float16
    assert "quantization" not in config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotation_of_llama_3_is_recognised_by_its_divisors(tmp_path: Path, factor: float) -> None:
    """llama.cpp stores divisors of the frequencies; mlx-lm's Llama takes the rule that yields them."""
    config = CONFIG | {"rope_theta": 500_000.0, "rope_scaling": {**LLAMA3, "factor": factor}}
    model = build(config)
    rope = model.model.layers[0].self_attn.rope
    plain = 500_000.0 ** (np.arange(0, 16, 2) / 16)
    divisors = (np.array(rope._freqs) / plain).astype(np.float32)
    path = write(tmp_path / "m.gguf", model, config, tensors={"rope_freqs.weight": divisors})
    assert open_gguf(path)[1]["rope_scaling"]["factor"] == factor
    assert difference(path, model) < 1e-4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architecture": "gemma3"}, "gemma3"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"tensors": {"rope_freqs.weight": np.full(8, 3.0, np.float32)}}, "rope_freqs.weight"),
        ({"tensors": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "blk.0.attn_sinks.weight"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_loader_does_not_support_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    """The message is one line with the file and the unsupported part."""
    path = write(tmp_path / "m.gguf", build(), **settings)
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGUF", b"GGUF\x03\x00\x00\x00", b"PK\x03\x04" + bytes(64)])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    """A damaged header gives one line."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
