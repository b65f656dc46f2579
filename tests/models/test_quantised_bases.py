"""QLoRA (arXiv:2305.14314): adapters learn over packed weights of every width, which never change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_map

from clotho.backend import Backend, backend
from clotho.models.parameters import flat
from clotho.models.policy import Policy, load_policy
from clotho.models.policy_model import PolicyModel
from clotho.settings.model import ModelSection, PolicySection
from clotho.storage.adapters import write_adapter
from tests.inference.engine_helpers import GREEDY, complete_alone, reference_logprobs
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, MIXTURE, TOKENS_1_T, save
from tests.small_models import FixedSource, byte_tokenizer

pytestmark = pytest.mark.needs_float32

PROMPT = (5, 9, 33, 2, 17, 60)


def loss(model: nn.Module) -> mx.array:
    """Mean negative log-probability of a fixed sequence."""
    logits = model(TOKENS_1_T[:, :-1])
    return nn.losses.cross_entropy(logits, TOKENS_1_T[:, 1:], reduction="mean")


def value(policy: Policy | PolicyModel) -> float:
    """The loss as a number."""
    return float(np.array(loss(policy.model)))


def step(policy: Policy) -> None:
    """One step down the gradient, published."""
    model = policy.copy_model()

    def of(parameters: Any) -> mx.array:
        model.use(parameters)
        return loss(model.model)

    with model.training_mode():
        gradient = mx.grad(of)(policy.trainable())
    found = tree_map(lambda array, by: array - 0.003 * by, policy.trainable(), gradient)
    mx.eval(found)
    policy.publish(found, version=policy.version + 1, step=policy.step + 1, fingerprint="")


def packed(policy: Policy) -> dict[str, bytes]:
    """Every bit of the base."""
    trained = flat(policy.trainable())
    arrays = {name: array for name, array in flat(policy.model.parameters()).items() if name not in trained}
    return {name: bytes(memoryview(array)) for name, array in arrays.items()}  # type: ignore[arg-type]


def mixture_of_widths(name: str, module: Any) -> bool | dict[str, Any]:
    """Down projections in 6 bits of smaller groups, values in 8, the head and embeddings not at all, the rest in 3."""
    if not hasattr(module, "to_quantized") or "embed" in name:
        return False
    if "down_proj" in name:
        return {"group_size": 32, "bits": 6, "mode": "affine"}
    return {"group_size": 64, "bits": 8, "mode": "affine"} if "v_proj" in name else True


def learns_and_serves(base: Path, directory: Path, kind: Any) -> Policy:
    """Two steps lower the loss, no bit of the base changes, the engine and mlx-lm compute what was trained."""
    policy = load_policy(ModelSection(path=str(base)), policy_settings(kind=kind), seed=0, keep_reference=True)
    before, first = packed(policy), value(policy)
    step(policy)
    step(policy)
    assert value(policy) < first
    assert packed(policy) == before
    reference = policy.copy_model()
    reference.use_reference()
    assert value(reference) == pytest.approx(first, rel=1e-5)
    source = FixedSource(model=policy.model, tokenizer=byte_tokenizer(), vocab_size=64)
    completion = complete_alone(source, PROMPT, GREEDY)
    expected = reference_logprobs(policy.model, PROMPT, completion, GREEDY)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    write_adapter(directory, policy.trainable(), policy.adapter_config)
    loaded = mlx_lm.load(str(base), adapter_path=str(directory))[0]
    tolerance = 1e-5 if type(backend()) is Backend else 0.0  # the device path rounds A B otherwise
    assert mx.allclose(loaded(TOKENS_1_T), policy.model(TOKENS_1_T), rtol=0.0, atol=tolerance).item()
    return policy


@pytest.mark.parametrize(
    ("bits", "kind"), [(2, "lora"), (3, "lora"), (4, "lora"), (6, "lora"), (8, "lora"), (4, "dora")]
)
def test_adapters_learn_over_weights_of_every_width(tmp_path: Path, bits: int, kind: str) -> None:
    """And what is packed is told by the description."""
    policy = learns_and_serves(save(tmp_path / "base", bits=bits), tmp_path / "adapter", kind)
    assert policy.description.quantization_bits == bits


def test_experts_learn_over_packed_weights_too(tmp_path: Path) -> None:
    """Stacked expert weights in 4 bits."""
    learns_and_serves(save(tmp_path / "base", MIXTURE, bits=4), tmp_path / "adapter", "lora")


def test_layers_of_different_widths_are_one_base(tmp_path: Path) -> None:
    """mlx-lm's configuration names each layer that differs; unpacked ones stand beside packed ones."""
    base = save(tmp_path / "base", bits=3, mixed=mixture_of_widths)
    written = json.loads((base / "config.json").read_text())["quantization"]
    assert written["model.layers.0.mlp.down_proj"]["bits"] == 6
    policy = learns_and_serves(base, tmp_path / "adapter", "lora")
    block = policy.model.layers[0]
    assert (block.mlp.down_proj.linear.bits, block.self_attn.v_proj.linear.bits) == (6, 8)
    assert policy.description.quantization_bits == 3
    plain = load_policy(
        ModelSection(path=str(base), dequantize=True), PolicySection(), seed=0, keep_reference=False
    ).description
    assert plain.parameters == policy.description.parameters
    assert plain.parameters == CONFIG["vocab_size"] * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 160) + 64
