"""A base model that is quantized at load equals one that mlx_lm.convert quantized before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import convert

from clotho.models.loading import load_base
from clotho.models.parameters import flat
from clotho.models.policy import load_policy
from clotho.settings.bounds import Off
from clotho.settings.model import ModelSection, QuantizeAtLoad
from protocols.checkpoint import BaseQuantization
from protocols.errors import ModelError
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, MIXTURE, save
from tests.training_run.built_context import tiny_profile
from training_run.memory.estimate import serving_memory

pytestmark = pytest.mark.needs_cpu_path


def stored(directory: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Write a model in float32 whose configuration states bfloat16, the type in which mlx-lm quantizes it."""
    save(directory, config | {"torch_dtype": "bfloat16"}, dtype=mx.float32)
    return directory


def weights(path: Path, quantize: Off | QuantizeAtLoad = Off()) -> dict[str, mx.array]:  # noqa: B008
    """Return the loaded weights of a model."""
    model, _, _ = load_base(ModelSection(path=str(path), quantize=quantize))
    return flat(model.parameters())


@pytest.mark.parametrize(
    ("config", "section"),
    [
        (CONFIG, QuantizeAtLoad()), (CONFIG, QuantizeAtLoad(bits=8, group_size=32)), (CONFIG, QuantizeAtLoad(bits=3)),
        (CONFIG, QuantizeAtLoad(mode="mxfp4")), (CONFIG, QuantizeAtLoad(mode="nvfp4")),
        (CONFIG, QuantizeAtLoad(mode="mxfp8")), (MIXTURE, QuantizeAtLoad(group_size=32)),
    ],
    ids=["affine", "8 bits", "3 bits", "mxfp4", "nvfp4", "mxfp8", "experts"],
)  # fmt: skip
def test_the_weights_equal_those_of_mlx_lm_bit_for_bit(
    tmp_path: Path, config: dict[str, Any], section: QuantizeAtLoad
) -> None:
    """Quantized weights, scales, biases, and the layers that stay in full precision."""
    source = stored(tmp_path / "full", config)
    convert(
        str(source), str(tmp_path / "prepared"), quantize=True, q_bits=section.bits, q_group_size=section.group_size,
        q_mode=section.mode,
    )  # fmt: skip
    ours, theirs = weights(source, section), weights(tmp_path / "prepared")
    assert ours.keys() == theirs.keys()
    assert any(name.endswith(".scales") for name in ours)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        assert mx.array_equal(array, theirs[name]).item(), name


def refusal(path: Path, **settings: Any) -> str:
    """Return the message of a refused quantization, which is one line."""
    with pytest.raises(ModelError) as caught:
        load_base(ModelSection(path=str(path), **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path) -> None:
    """Bits and group sizes that a mode lacks, a quantized model, both conversions, and widths that do not divide."""
    full = save(tmp_path / "full", bits=0)
    assert "model.quantize.bits = 7" in refusal(full, quantize=QuantizeAtLoad(bits=7))
    assert "model.quantize.bits = 8" in refusal(full, quantize=QuantizeAtLoad(bits=8, mode="mxfp4"))
    assert "model.quantize.group_size = 48" in refusal(full, quantize=QuantizeAtLoad(group_size=48))
    assert "model.dequantize" in refusal(full, quantize=QuantizeAtLoad(), dequantize=True)
    width = refusal(full, quantize=QuantizeAtLoad(group_size=128))
    assert "model.quantize.group_size = 128" in width
    assert "64 inputs of " in width
    assert "use 32 or 64" in width
    quantized = save(tmp_path / "quantized", bits=4)
    assert "already quantized (4 bits)" in refusal(quantized, quantize=QuantizeAtLoad())


def test_the_policy_trains_an_adapter_and_records_the_quantization(tmp_path: Path) -> None:
    """Full training is refused. The estimate counts the quantized weights."""
    path = str(stored(tmp_path / "full"))
    section = ModelSection(path=path, quantize=QuantizeAtLoad(bits=4, group_size=32))
    policy = load_policy(section, policy_settings(), seed=0, keep_reference=False)
    recorded = policy.adapter_config.base_quantization
    assert recorded == BaseQuantization(bits=4, group_size=32, mode="affine")
    assert policy.description.quantization_bits == 4
    with pytest.raises(ModelError):
        load_policy(section, policy_settings(kind="full"), seed=0, keep_reference=False)
    profile = tiny_profile(tmp_path)
    bytes_of = [
        serving_memory(model, profile.engine, profile.sampling).base for model in (section, ModelSection(path=path))
    ]
    assert bytes_of[0] < bytes_of[1] / 3
