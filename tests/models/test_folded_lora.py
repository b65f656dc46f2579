"""LoRA layers on the device path: equal to those of mlx-lm up to rounding, with few operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from bench.graph_counts import operations
from clotho.backend import SWITCH, Backend, backend, backend_of
from clotho.models.folded_lora import FoldedLoRALinear, FoldedLoRASwitchLinear
from clotho.models.lora import LINEAR, install_adapter
from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import Policy
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import Dora, Lora, PolicySection
from tests.small_models import tiny
from tests.training.policies_and_groups import model_with

pytestmark = [pytest.mark.usefixtures("device_path"), pytest.mark.needs_float32]

NO_TOKENIZER = cast(ChatTokenizer, None)
TOKENS_2_T = mx.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
FAMILIES = ("qwen3", "llama", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "mamba2", "lfm2", "falcon_h1")
LORA = Lora()
PARTIAL = Lora(target_modules=("q_proj", "v_proj"), num_layers=1)
MIXED_RANKS = Lora(rank=4, ranks=("k_proj=2", "down_proj=3"))
LARGE_RANKS = Lora(rank=32)

Convert = Callable[[nn.Module], None]


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does; the host path has no folded layers."""
    assert type(backend()) is Backend


def in_bfloat16(model: nn.Module) -> None:
    """Convert all weights to bfloat16."""
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())


def in_four_bits(model: nn.Module) -> None:
    """Quantize the linear layers and the experts, beside bfloat16 norms."""
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, module: isinstance(module, LINEAR))
    mx.eval(model.parameters())


def make_policy(family: str, method: Lora | Dora = LORA, convert: Convert | None = None, **section: Any) -> Policy:
    """Return a policy of a tiny model whose adapter changes the logits."""
    model, config = base(family, convert)
    policy = Policy(
        model, NO_TOKENIZER, PolicySection(method=method, **section), config=config, seed=0, keep_reference=False
    )
    policy.publish(moved(policy.trainable(), seed=1), version=1, step=1, fingerprint="1")
    return policy


def base(family: str, convert: Convert | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny base model and its configuration."""
    model = tiny(family, intermediate_size=64, **({"moe_intermediate_size": 32} if family == "qwen3_moe" else {}))
    if convert is not None:
        convert(model)
    return model, {"model_type": family, "vocab_size": 64, "max_position_embeddings": 512}


def usual_model(policy: Policy, family: str, method: Lora, convert: Convert | None = None) -> nn.Module:
    """Return the same model with the LoRA layers of mlx-lm and the weights of the policy."""
    model, _ = base(family, convert)
    install_adapter(model, method, seed=0)
    assert not any(isinstance(module, FoldedLoRALinear | FoldedLoRASwitchLinear) for module in model.modules())
    model.update(nested(flat(policy.trainable())))
    return model


def moved(parameters: Parameters, *, seed: int) -> Parameters:
    """Return random parameters near the given ones."""
    mx.random.seed(seed)
    tree: Parameters = tree_map(lambda array: array + 0.02 * mx.random.normal(array.shape), parameters)
    mx.eval(tree)
    return tree


def largest_difference(some: mx.array, others: mx.array) -> float:
    """Return the largest absolute difference relative to the largest value."""
    difference = mx.max(mx.abs(some.astype(mx.float32) - others.astype(mx.float32)))
    return float(np.array(difference / mx.max(mx.abs(others.astype(mx.float32)))))


def gradient(model: nn.Module, parameters: Parameters) -> dict[str, mx.array]:
    """Return the gradient of a scalar that depends on all logits."""

    def loss(traced: Parameters) -> mx.array:
        model.update(traced)
        return mx.mean(nn.losses.cross_entropy(model(TOKENS_2_T).astype(mx.float32), TOKENS_2_T))

    arrays = flat(mx.grad(loss)(nested(flat(parameters))))
    model.update(parameters)
    mx.eval(arrays)
    return arrays


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_those_of_mlx_lm(family: str) -> None:
    """Every architecture of the test models, mixtures of experts and state-space models included."""
    policy = make_policy(family)
    usual = usual_model(policy, family, Lora())
    assert largest_difference(policy.model(TOKENS_2_T), usual(TOKENS_2_T)) < 1e-5


@pytest.mark.parametrize("method", [PARTIAL, MIXED_RANKS, LARGE_RANKS], ids=["partial", "ranks", "large"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_partial_targets_and_unequal_ranks_equal_those_of_mlx_lm(family: str, method: Lora) -> None:
    """Layers without an adapter stay as they are, and each layer uses its own columns of the shared product."""
    if family == "qwen3_moe" and method is MIXED_RANKS:
        method = Lora(rank=4, ranks=("k_proj=2", "switch_mlp.up_proj=3"))
    policy = make_policy(family, method)
    usual = usual_model(policy, family, method)
    assert largest_difference(policy.model(TOKENS_2_T), usual(TOKENS_2_T)) < 1e-5


@pytest.mark.parametrize(
    ("family", "convert"), [("qwen3", in_bfloat16), ("qwen3", in_four_bits), ("qwen3_moe", in_four_bits)]
)
def test_16_bit_logits_equal_those_of_mlx_lm_up_to_rounding(family: str, convert: Convert) -> None:
    """Both forms round to bfloat16, whose relative precision is 2^-8."""
    method = Lora(rank=8, scale=10.0)
    policy = make_policy(family, method, convert=convert)
    usual = usual_model(policy, family, method, convert)
    some, others = policy.model(TOKENS_2_T), usual(TOKENS_2_T)
    assert some.dtype == others.dtype
    assert 0.0 < largest_difference(some, others) < 0.05


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "falcon_h1"])
def test_float32_gradients_equal_those_of_mlx_lm(family: str, checkpointed: bool) -> None:
    """Within 2e-6 of the norm of the gradient, for every parameter of the adapter."""
    policy = make_policy(family, grad_checkpoint=checkpointed)
    usual = usual_model(policy, family, Lora())
    usual.train()
    expected = gradient(usual, policy.trainable())
    model = policy.copy_model()
    with model.training_mode():
        found = gradient(model.model, policy.trainable())
    assert found.keys() == expected.keys()
    norm = float(np.sqrt(sum(np.square(np.array(array)).sum() for array in expected.values())))
    for name, array in expected.items():
        assert np.linalg.norm(np.array(found[name] - array)) < 2e-6 * norm, name


def test_gradients_of_a_16_bit_model_are_float32() -> None:
    """The optimizer keeps float32 weights, and gradients flow through the conversion to bfloat16."""
    policy = make_policy("qwen3", convert=in_four_bits)
    model = policy.copy_model()
    with model.training_mode():
        found = gradient(model.model, policy.trainable())
    assert {array.dtype for array in found.values()} == {mx.float32}
    assert all(float(mx.abs(array).max()) > 0 for array in found.values())


def test_dropout_samples_the_masks_of_mlx_lm() -> None:
    """In training each layer draws its own mask; otherwise dropout has no effect."""
    method = Lora(dropout=0.5)
    policy = make_policy("qwen3", method)
    usual = usual_model(policy, "qwen3", method)
    assert largest_difference(policy.model(TOKENS_2_T), usual(TOKENS_2_T)) < 1e-5
    results = []
    for model in (policy.model, usual):
        model.train()
        mx.random.seed(5)
        results.append(model(TOKENS_2_T))
    assert largest_difference(*results) < 1e-5
    assert largest_difference(results[0], policy.model(TOKENS_2_T)) > 1e-2


@pytest.mark.parametrize(
    ("family", "convert"),
    [
        ("qwen3", None),
        ("qwen3", in_bfloat16),
        ("qwen3", in_four_bits),
        ("qwen3_moe", None),
        ("qwen3_moe", in_four_bits),
    ],
)
def test_converted_weights_compute_the_same_bits_as_float32_weights(family: str, convert: Convert | None) -> None:
    """The decode engine uses the weights converted at the swap, and the learner converts its own in each call."""
    policy = make_policy(family, convert=convert)
    served = policy.model(TOKENS_2_T)
    copies: Parameters = tree_map(lambda array: mx.array(np.array(array)), policy.trainable())
    converted = model_with(policy, copies)(TOKENS_2_T)
    assert mx.array_equal(served, converted).item()


def test_a_weight_swap_changes_the_logits_at_once() -> None:
    """After `publish` or `use`, no layer uses the converted weights of the previous version."""
    policy = make_policy("qwen3", convert=in_four_bits)
    first, new = policy.trainable(), moved(policy.trainable(), seed=2)
    before = policy.model(TOKENS_2_T)
    copied = policy.copy_model()
    copied.fold()
    copied.use(new)
    ahead = copied.model(TOKENS_2_T)
    policy.publish(new, version=2, step=2, fingerprint="2")
    after = policy.model(TOKENS_2_T)
    copied.use(first)
    again = copied.model(TOKENS_2_T)
    assert mx.array_equal(ahead, after).item()
    assert mx.array_equal(before, again).item()
    assert not mx.array_equal(before, after).item()


def test_a_copy_releases_the_converted_weights_and_converts_its_own() -> None:
    """A copy that computes with its own parameters keeps no conversion of the served ones."""
    policy = make_policy("qwen3", convert=in_four_bits)
    new = moved(policy.trainable(), seed=2)
    copied = policy.copy_model()
    copied.use(new)
    plain = copied.model(TOKENS_2_T)
    copied.fold()
    folded = copied.model(TOKENS_2_T)
    assert mx.array_equal(plain, folded).item()
    served = [group._folded for group in policy._served._folded.groups]
    assert not any(group._folded in served for group in policy.copy_model()._folded.groups)
    assert all(group._folded is not None for group in copied._folded.groups)


def test_a_failed_forward_pass_leaves_nothing_behind() -> None:
    """A product that was computed before the failure is not used by a later pass with other weights."""
    policy = make_policy("qwen3")
    x = mx.random.normal((2, 3, policy.model.args.hidden_size))
    attention = policy.model.layers[0].self_attn
    attention.q_proj(x)
    policy.publish(moved(policy.trainable(), seed=2), version=2, step=2, fingerprint="2")
    found = (attention.k_proj(x), attention.q_proj(x))
    expected = (attention.k_proj(x + 0), attention.q_proj(x + 0))
    assert all(mx.array_equal(one, other).item() for one, other in zip(found, expected, strict=True))


def test_layers_with_the_same_input_share_one_product() -> None:
    """Per block: one product with A for queries, keys and values, one for gate and up projection, and two others."""
    policy = make_policy("qwen3", convert=in_four_bits)
    found = operations([policy.model(TOKENS_2_T)])
    blocks = 2
    attention_and_head = 2 * blocks
    assert found["Matmul"] <= 4 * blocks + attention_and_head


def test_the_adapter_keeps_the_parameters_and_modules_of_mlx_lm() -> None:
    """Names, shapes and types are those of mlx-lm, so that its adapter files stay readable."""
    policy = make_policy("qwen3_moe", convert=in_four_bits)
    usual = usual_model(policy, "qwen3_moe", Lora(), in_four_bits)
    expected = {name: (array.shape, array.dtype) for name, array in flat(usual.trainable_parameters()).items()}
    assert {name: (a.shape, a.dtype) for name, a in flat(policy.trainable()).items()} == expected
    kinds = {type(module) for module in policy.model.modules() if isinstance(module, LoRALinear | LoRASwitchLinear)}
    assert kinds == {FoldedLoRALinear, FoldedLoRASwitchLinear}


def test_dora_layers_stay_those_of_mlx_lm() -> None:
    """DoRA normalizes whole weights in each call, so it has no converted form."""
    policy = make_policy("qwen3", Dora())
    assert {type(module) for module in policy.model.modules() if "lora_a" in module} == {DoRALinear}


@pytest.mark.needs_cpu_path
def test_float32_layers_on_the_host_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU backend has its own layers, and its NumPy decoder reads the weights of mlx-lm's."""
    monkeypatch.delenv(SWITCH)
    backend_of.cache_clear()
    policy = make_policy("qwen3_moe", Lora(dropout=0.1))
    folded = (FoldedLoRALinear, FoldedLoRASwitchLinear)
    assert not any(isinstance(module, folded) for module in policy.model.modules())
