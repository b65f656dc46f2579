"""Models that are decoded on the host: those of known parts whose logits come out the same, and no others."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3
from mlx_lm.tuner.dora import DoRALinear
from structlog.testing import capture_logs

from attachments.cpu.backend import is_supported, make_host_decoder
from attachments.cpu.blas import Floats
from attachments.cpu.decoder import HostDecoder
from attachments.cpu.layers import install_cpu_layers
from attachments.cpu.tests.supported_models import SUPPORTED, adapt, plain_source, scaled_parts
from clotho.inference.cache_layout import CacheLayout
from tests.small_models import tiny


class OtherBlock(qwen3.TransformerBlock):
    """A block that may compute anything."""


def layout_of(architecture: str = "qwen3", **overrides: Any) -> CacheLayout:
    """The caches of a tiny model."""
    return CacheLayout(plain_source(architecture, **overrides).model)


def taken(model: nn.Module) -> bool:
    """Whether a model is decoded on the host; what is refused on sight is not computed first."""
    layout = CacheLayout(model)
    with capture_logs() as logged:
        found = make_host_decoder(layout.model) is not None
    assert not logged
    assert found == is_supported(layout.model)
    return found


@pytest.mark.needs_cpu_path
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_known_transformers_in_float32_are_taken(architecture: str) -> None:
    """As they are, with an adapter, and with the layers of the CPU backend."""
    model = plain_source(architecture).model
    assert taken(model)
    adapt(model)
    assert taken(model)
    install_cpu_layers(model)
    assert taken(model)


@pytest.mark.needs_cpu_path
def test_rotations_that_are_merely_slower_are_taken() -> None:
    """Linear scaling of positions changes no part of the model."""
    assert taken(plain_source("llama", rope_scaling={"rope_type": "linear", "factor": 2.0}).model)


@pytest.mark.parametrize(
    "architecture", ["gemma2", "gemma3_text", "mixtral", "mamba2", "falcon_h1", "lfm2", "kimi_linear"]
)
def test_other_architectures_are_not(architecture: str) -> None:
    """The host knows none of their blocks."""
    assert not taken(tiny(architecture))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.needs_cpu_path
@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": LLAMA3},
        {"rope_traditional": True},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    ],
    ids=["frequencies of Llama 3", "rotation by neighbours", "a sliding window"],
)
def test_llamas_with_parts_of_another_kind_are_not(overrides: dict[str, Any]) -> None:
    """Their rotations and windows are the model's own affair."""
    assert taken(plain_source("llama").model)
    assert not taken(plain_source("llama", **overrides).model)


def test_narrow_and_quantised_models_are_not() -> None:
    """BLAS multiplies float32; one narrow layer is enough."""
    narrow, partly, packed = (plain_source("qwen3", intermediate_size=64).model for _ in range(3))
    narrow.set_dtype(mx.bfloat16)
    last: Any = partly["model"]
    last.layers[-1].mlp.down_proj.set_dtype(mx.float16)
    nn.quantize(packed, group_size=32, bits=4)
    assert [taken(model) for model in (narrow, partly, packed)] == [False] * 3


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_adapters_of_another_kind_are_not(name: str) -> None:
    """DoRA scales every output by a norm that changes as it learns."""
    model = plain_source("qwen3").model
    inner: Any = model["model"]
    attention = inner.layers[1].self_attn
    attention[name] = DoRALinear.from_base(attention[name], r=2)
    assert not taken(model)


@pytest.mark.needs_float32
def test_other_layers_in_known_places_are_not() -> None:
    """A block of a user's own, embeddings that are more than a table, or a norm of another kind."""
    block, embeddings, norms = (plain_source("qwen3").model for _ in range(3))
    inner: Any = block["model"]
    inner.layers[1].__class__ = OtherBlock
    inner = embeddings["model"]
    inner.embed_tokens = nn.QuantizedEmbedding.from_embedding(inner.embed_tokens, group_size=32, bits=8)
    inner = norms["model"]
    inner.layers[1].input_layernorm = nn.LayerNorm(inner.layers[1].input_layernorm.weight.size)
    assert [taken(model) for model in (block, embeddings, norms)] == [False] * 3


@pytest.mark.needs_cpu_path
@pytest.mark.parametrize(("noise", "difference"), [(0.02, 0.02), (np.nan, np.inf)])
def test_a_model_whose_numbers_would_differ_is_refused_with_a_warning(
    noise: float, difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two per cent are no rounding, nor is what is not a number."""
    parts = HostDecoder.parts

    def noisy(self: HostDecoder, *given: Any) -> Generator[None, None, Floats]:
        found_B_V = yield from parts(self, *given)
        sign_V = np.where(np.arange(found_B_V.shape[1]) % 2, 1.0, -1.0).astype(np.float32)
        result: Floats = found_B_V + np.float32(noise) * found_B_V.std() * sign_V
        return result

    monkeypatch.setattr(HostDecoder, "parts", noisy)
    with capture_logs() as logged:
        assert make_host_decoder(layout_of().model) is None
    assert [entry["log_level"] for entry in logged] == ["warning"]
    assert logged[0]["difference"] == pytest.approx(difference, rel=1e-3)


@pytest.mark.needs_cpu_path
def test_a_difference_of_rounding_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order differ in their last digits."""
    monkeypatch.setattr(HostDecoder, "parts", scaled_parts(np.float32(1.0001)))
    assert taken(plain_source("qwen3").model)


@pytest.mark.needs_cpu_path
def test_a_layers_own_constants_are_followed() -> None:
    """A scale of scores and an epsilon that differ from layer to layer."""
    model = plain_source("qwen3").model
    inner: Any = model["model"]
    inner.layers[1].self_attn.scale *= 2.0
    inner.layers[0].input_layernorm.eps = 0.5
    assert taken(model)


@pytest.mark.needs_cpu_path
def test_what_looks_known_but_computes_otherwise_is_found_out() -> None:
    """One layer rotates faster than the others: all parts are known, and the logits are not."""
    model = plain_source("qwen3").model
    inner: Any = model["model"]
    inner.layers[1].self_attn.rope.base = 10.0
    layout = CacheLayout(model)
    assert is_supported(layout.model)
    with capture_logs() as logged:
        assert make_host_decoder(layout.model) is None
    assert [entry["log_level"] for entry in logged] == ["warning"]
