"""Which models are refused which layouts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models import gpt2
from mlx_lm.models.cache import ChunkedKVCache

from clotho.models.attention import AttentionLayers
from clotho.models.head import split_model
from clotho.scoring.layouts.forward import check_layout
from tests.small_models import ARCHITECTURES, tiny

STATEFUL = {"mamba2", "lfm2", "falcon_h1"}


def prove(model: nn.Module, layout: str) -> AttentionLayers:
    """Split the model, and prove the layout."""
    return check_layout(model, split_model(model, 64), 64, layout=layout)


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - STATEFUL))
def test_attention_takes_any_layout(architecture: str, layout: str) -> None:
    """Dense or of experts, with windows or without; one model computes scores itself, in groups of heads."""
    model = tiny(architecture)
    assert prove(model, layout) == ((0,) * len(model.layers), 5 if architecture == "gemma2" else None, 0)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_rounding_in_sixteen_bits_is_no_difference(layout: str) -> None:
    """A model in bfloat16 computes the same all the same."""
    model = tiny("qwen3")
    model.set_dtype(mx.bfloat16)
    assert prove(model, layout).caches == (0, 0)


@pytest.mark.parametrize(
    ("architecture", "arrays"),
    [
        ("mamba2", (2, 2)),
        ("lfm2", (1, 0)),
        ("qwen3_5", (2, 0)),
        ("kimi_linear", (4, 0)),
        ("falcon_h1", ((2, 0), (2, 0))),
    ],
)
def test_prompts_are_shared_with_the_states_of_recurrent_layers(architecture: str, arrays: tuple[Any, ...]) -> None:
    """Completions begin with the state after their prompt, whose padding does not change it; also beside attention."""
    assert prove(tiny(architecture), "shared").caches == arrays


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_layers_with_another_kind_of_cache_are_refused(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The message says why, and what to choose."""
    model = tiny("qwen3")
    caches: Any = ChunkedKVCache
    monkeypatch.setattr(type(model), "make_cache", lambda _: [caches(8)], raising=False)
    with pytest.raises(ValueError, match=rf'learner.layout = "{layout}".*keys and values.*"padded" or "auto"'):
        prove(model, layout)


def gpt() -> nn.Module:
    """A model with a learned embedding for every position."""
    sizes = {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "layer_norm_epsilon": 1e-5}
    arguments = gpt2.ModelArgs.from_dict({"model_type": "gpt2", "vocab_size": 64, **sizes})  # type: ignore[no-untyped-call]
    model: nn.Module = gpt2.Model(arguments)
    model.update(tree_map(lambda array: array * 4.0 if array.ndim == 2 else array, model.parameters()))
    return model


def test_absolute_positions_are_refused_in_packed_rows_alone() -> None:
    """A packed sequence does not begin at position 0; a completion begins right after its prompt."""
    assert prove(gpt(), "shared").caches == (0, 0)
    with pytest.raises(ValueError, match=r"packed.*logits differ by .* begin at position 0"):
        prove(gpt(), "packed")


class TiresWithDistance(nn.Module):
    """Attends less the farther the row reaches, from position 1000 on."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = attention

    def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
        far = getattr(cache, "offset", 0) > 1000
        result: mx.array = self.attention(x, mask, cache)
        return 0.5 * result if far else result


def test_what_depends_on_far_positions_is_refused_in_packed_rows() -> None:
    """Some models scale attention by the position, once it is beyond thousands of tokens."""
    model = tiny("qwen3")
    for layer in model.layers:
        layer.self_attn = TiresWithDistance(layer.self_attn)
    with pytest.raises(ValueError, match="begin at position 131072"):
        prove(model, "packed")


class Peeks(nn.Module):
    """Its blocks take a mask and do not heed it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = attention

    def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
        result: mx.array = self.attention(x, "causal", cache)
        return result


def peeking() -> nn.Module:
    """Return a model that ignores its mask."""
    model = tiny("qwen3")
    for layer in model.layers:
        layer.self_attn = Peeks(layer.self_attn)
    return model


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_a_model_that_ignores_its_mask_is_refused(layout: str) -> None:
    """It runs without an error, but computes something else."""
    with pytest.raises(ValueError, match="logits differ"):
        prove(peeking(), layout)


def test_models_whose_head_cannot_be_separated_are_refused() -> None:
    """Then there are no hidden states to choose from."""
    with pytest.raises(ValueError, match="cannot be separated"):
        check_layout(tiny("qwen3"), None, 64, layout="shared")
