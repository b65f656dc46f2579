"""Linear layers that read the same input: one product on the device path, without a second copy of their weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from bench.graph_counts import operations
from clotho.backend import Backend, backend
from clotho.models.joined_weights import JoinedLinear, JoinedQuantizedLinear, can_join, join
from clotho.models.parameters import flat
from clotho.models.policy import Policy
from clotho.settings.model import Lora, PolicySection
from tests.models.test_folded_lora import (
    NO_TOKENIZER,
    TOKENS_2_T,
    base,
    in_bfloat16,
    in_four_bits,
    largest_difference,
    make_policy,
)

pytestmark = [pytest.mark.usefixtures("device_path"), pytest.mark.needs_float32]

WIDTH = 64


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does."""
    assert type(backend()) is Backend


def linear(outputs: int, *, inputs: int = WIDTH, bias: bool = False, bits: int = 0, seed: int = 0) -> Any:
    """Return a frozen layer with random weights, quantized if `bits` is not 0."""
    mx.random.seed(seed)
    layer: Any = nn.Linear(inputs, outputs, bias=bias)
    if bits:
        layer = layer.to_quantized(group_size=32, bits=bits)
    mx.eval(layer.parameters())
    return layer.freeze()


@pytest.mark.parametrize("bits", [0, 4], ids=["plain", "quantized"])
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
def test_outputs_equal_those_of_each_layer(bits: int, bias: bool) -> None:
    """Bit for bit on the CPU, where an output does not depend on the number of outputs."""
    x = mx.random.normal((3, WIDTH))
    layers = [linear(outputs, bias=bias, bits=bits, seed=outputs) for outputs in (32, 8, 16)]
    expected = [layer(x) for layer in layers]
    mx.eval(expected)
    joined = JoinedLinear(layers)
    for found in (joined.parts(joined(x)), [layer(x) for layer in layers]):
        assert [array.shape for array in found] == [array.shape for array in expected]
        assert all(mx.allclose(a, b, rtol=1e-5, atol=1e-6).item() for a, b in zip(found, expected, strict=True))


def test_the_weights_are_held_once() -> None:
    """The weights of the layers are views of the joined ones: the memory in use is what it was."""
    layers = [linear(1024, inputs=512, seed=seed) for seed in range(3)]
    before = mx.get_active_memory()
    joined = JoinedLinear(layers)
    assert abs(mx.get_active_memory() - before) < layers[0].weight.nbytes // 8
    del joined
    assert abs(mx.get_active_memory() - before) < layers[0].weight.nbytes // 8


@pytest.mark.parametrize("convert", [in_bfloat16, in_four_bits])
def test_names_and_values_of_the_weights_are_those_of_the_model(convert: Any) -> None:
    """Whoever reads the weights of a layer (conversion, merging, fusing) finds its own rows."""
    policy = make_policy("qwen3", convert=convert)
    model, _ = base("qwen3", convert)
    expected = flat(model.parameters())
    found = {name.replace(".linear.", "."): array for name, array in flat(policy.model.parameters()).items()}
    assert all(mx.array_equal(found[name], array).item() for name, array in expected.items())
    assert all(name.endswith(("lora_a", "lora_b")) for name in found.keys() - expected.keys())


def test_a_block_has_four_quantized_products_and_four_additions_of_adapters() -> None:
    """Queries, keys and values; the output of attention; gate and up projection; down projection."""
    policy = make_policy("qwen3", convert=in_four_bits)
    found = operations([policy.model(TOKENS_2_T)])
    blocks, head = 2, 1
    assert found["AddMM"] == 4 * blocks
    assert found["QuantizedMatmul"] == 4 * blocks + head


def test_blocks_without_an_adapter_have_four_quantized_products_too() -> None:
    """A policy often has its adapter in the last blocks only."""
    policy = make_policy("qwen3", Lora(num_layers=1), convert=in_four_bits)
    found = operations([policy.model(TOKENS_2_T)])
    assert found["AddMM"] == 4
    assert found["QuantizedMatmul"] == 4 * 2 + 1
    assert {type(one) for one in policy.model.layers[0].modules() if "scales" in one} >= {JoinedQuantizedLinear}


@pytest.mark.parametrize("convert", [in_bfloat16, in_four_bits])
def test_logits_of_joined_blocks_equal_those_of_mlx_lm(convert: Any) -> None:
    """A base model that is served computes what mlx-lm computes; so does a copy of its modules."""
    plain, config = base("qwen3", convert)
    served, _ = base("qwen3", convert)
    policy = Policy(
        served, NO_TOKENIZER, PolicySection(method=Lora(num_layers=1)), config=config, seed=0, keep_reference=False
    )
    expected = plain(TOKENS_2_T)
    for model in (policy.model, policy.copy_model().model):
        assert largest_difference(model(TOKENS_2_T), expected) < 0.01


def test_a_layer_that_gets_another_input_computes_it() -> None:
    """The result for the last input is not used for another one."""
    layers = [linear(outputs, seed=outputs) for outputs in (8, 16)]
    x, other = mx.random.normal((3, WIDTH)), mx.random.normal((3, WIDTH))
    expected = [layers[0](x), layers[0](other), layers[1](other), layers[1](x)]
    join(layers)
    found = [layers[0](x), layers[0](other), layers[1](other), layers[1](x)]
    assert all(mx.allclose(a, b, atol=1e-5).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        linear(8, bits=4),
        linear(8, bias=True),
        linear(8, inputs=128),
        nn.Linear(WIDTH, 8, bias=False),
        nn.RMSNorm(WIDTH).freeze(),
    ],
    ids=["quantization", "bias", "inputs", "trainable weights", "class"],
)
def test_layers_of_different_forms_stay_apart(other: nn.Module) -> None:
    """Only frozen linear layers of one class, quantization, width and type have rows of one matrix."""
    assert can_join([linear(8), linear(16)])
    assert not can_join([linear(8), other])
    assert not can_join([linear(8)])
