"""Attention layers with the kernel: which layers have it, and that a decode step stays what it is."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3

from attachments.metal import add_norm, attention, library, norm_rotation
from attachments.metal.attention import FusedAttention, fusible, install
from attachments.metal.backend import MetalBackend
from clotho.backend import Backend
from clotho.backend import backend as computing
from clotho.models.parameters import flat
from tests.inference.engine_helpers import SAMPLED, make_engine, make_prompt, run, submit_request
from tests.small_models import FixedSource, tiny, tiny_source

pytestmark = [pytest.mark.usefixtures("device_path"), pytest.mark.needs_float32]


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does."""
    assert type(computing()) is Backend


def by_operations(layer: Any, _: mx.array, q: mx.array, k: mx.array, offset: mx.array) -> list[mx.array]:
    """Stand for the kernel where there is no Metal."""
    return norm_rotation.in_operations(layer, q, k, offset)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Let operations of MLX compute what the kernel computes; returns the positions of its calls."""
    found: list[mx.array] = []

    def called(layer: Any, settings: mx.array, q: mx.array, k: mx.array, offset: mx.array) -> list[mx.array]:
        found.append(offset)
        return by_operations(layer, settings, q, k, offset)

    monkeypatch.setattr(attention, "norm_rotation", called)
    monkeypatch.setattr(norm_rotation, "norm_rotation", by_operations)
    return found


def completions(source: FixedSource) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Sample completions of two prompts in one batch."""
    engine = make_engine(source)
    answers = [submit_request(engine, make_prompt(length), SAMPLED, seeds=(1, 2)) for length in (5, 9)]
    run(engine)
    return [(one.tokens, one.logprobs) for answer in answers for one in answer.completions]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_decode_steps_compute_what_they_computed(family: str, calls: list[mx.array]) -> None:
    """Tokens and log-probabilities of rows at different positions are equal; every layer of every step is computed."""
    source = tiny_source(family)
    source.model.freeze()
    expected = completions(source)
    assert not calls
    MetalBackend().install_layers(source.model)
    assert completions(source) == expected
    assert [4, 4, 8, 8] in [offset.tolist() for offset in calls]


def test_sequences_are_left_to_mlx_lm(calls: list[mx.array]) -> None:
    """Prefill, teacher forcing and gradients compute several tokens, or have no cache of the decode engine."""
    model: Any = tiny("qwen3").freeze()
    MetalBackend().install_layers(model)
    for tokens in (1, 4):
        mx.eval(model(mx.zeros((2, tokens), dtype=mx.int32)))
    assert not calls


def test_layers_keep_their_parameters(calls: list[mx.array]) -> None:
    """Names and arrays of the model are those of mlx-lm."""
    model: Any = tiny("qwen3").freeze()
    before = flat(model.parameters())
    MetalBackend().install_layers(model)
    assert {type(layer.self_attn) for layer in model.layers} == {FusedAttention}
    after = flat(model.parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def rescaled(layer: Any) -> None:
    """Give a layer another rotation."""
    layer.rope = nn.RoPE(8, traditional=True)


def retyped(layer: Any) -> None:
    """Give a norm another type than its partner."""
    layer.q_norm.weight = layer.q_norm.weight.astype(mx.float16)


def opened(layer: Any) -> None:
    """Train a norm."""
    layer.k_norm.unfreeze()


@pytest.mark.parametrize("change", [rescaled, retyped, opened])
def test_other_layers_are_left_to_mlx_lm(change: Any) -> None:
    """Other rotations, norms of two types, and norms that are trained."""
    model: Any = tiny("qwen3").freeze()
    assert len(fusible(model)) == len(model.layers)
    change(model.layers[0].self_attn)
    assert len(fusible(model)) == len(model.layers) - 1


def test_other_architectures_are_left_to_mlx_lm() -> None:
    """The kernel computes the norms and the rotation of Qwen3."""
    assert fusible(tiny("llama").freeze()) == []


@pytest.mark.parametrize("failure", [0.5, float("nan"), RuntimeError("no compiler\nof Metal")])
def test_a_kernel_that_does_not_compute_the_same_is_not_used(
    failure: float | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where the kernel fails or differs, MLX's operations compute as before."""

    def found(_: Any) -> float:
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(norm_rotation, "difference", found)
    monkeypatch.setattr(add_norm, "difference", found)
    model: Any = tiny("qwen3").freeze()
    MetalBackend().install_layers(model)
    assert {type(layer.self_attn) for layer in model.layers} == {qwen3.Attention}
    assert {type(layer) for layer in model.layers} == {qwen3.TransformerBlock}


def test_an_installed_layer_is_not_installed_again() -> None:
    """A model can be given to the backend twice."""
    model: Any = tiny("qwen3").freeze()
    install(fusible(model))
    assert fusible(model) == []


@pytest.mark.parametrize("kind", [mx.gpu, mx.cpu])
def test_the_backend_is_offered_for_metal_only(kind: mx.DeviceType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a CPU, and not for CUDA, which is a GPU without Metal."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert library.backend(kind) is None
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert isinstance(library.backend(kind), MetalBackend if kind == mx.gpu else type(None))
