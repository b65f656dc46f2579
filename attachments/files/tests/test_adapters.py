"""Adapters of PEFT with weights in full: `modules_to_save`, and copies of weights of the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file

from attachments.adapters.tests.adapter_models import LIMITS
from attachments.files.convert import convert
from attachments.files.merge import merge
from attachments.files.merging import MergeSettings
from attachments.files.tests import hub_models
from attachments.files.tests.hub_models import logits
from attachments.files.tests.test_convert import TENSORS, adapter, set_config
from protocols.errors import AdapterRequestError, ArtifactError, ProfileError
from training_run.adapters.contents import adapter_targets
from training_run.adapters.formats import FormatName
from training_run.adapters.reading import read_adapter, read_adapter_of
from training_run.start.adapter_settings import adapter_values

HEAD, NORM, EMBEDDINGS = "lm_head.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
FULL = MergeSettings(dtype="float32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head has weights of its own."""
    return hub_models.save(tmp_path_factory.mktemp("base") / "llama", "llama")


def changed(base: Path, *names: str) -> dict[str, np.ndarray[Any, Any]]:
    """Weights of a model, changed."""
    weights = load_file(base / "model.safetensors")
    return {name: (1.5 * weights[name] + 0.1).astype(np.float32) for name in names}


def peft_adapter(place: Path, base: Path, weights: dict[str, np.ndarray[Any, Any]]) -> Path:
    """Write an adapter of PEFT with weights in full."""
    convert(adapter(place / "a", base, scale=0.5), place / "peft", "peft")
    file = place / "peft" / TENSORS["peft"]
    save_file(load_file(file) | {f"base_model.model.{name}": array for name, array in weights.items()}, file)
    modules = sorted({name.split(".")[-2] for name in weights if "base" not in name})
    return set_config(place / "peft", modules_to_save=modules)


def test_weights_in_full_replace_those_of_the_base_model(base: Path, tmp_path: Path) -> None:
    """As in PEFT: head and norms have the values of the file, other layers the matrices. Other types are rounded."""
    weights = changed(base, HEAD, NORM)
    source = peft_adapter(tmp_path, base, weights)
    fidelity = merge("", source, tmp_path / "merged", FULL)
    model = load_adapters(load_model(base)[0], str(tmp_path / "a"))
    plain = logits(model)
    model.update(tree_unflatten([(name, mx.array(array)) for name, array in weights.items()]))
    found = logits(load_model(tmp_path / "merged")[0])
    assert np.abs(found - logits(model)).max() <= 1e-4
    assert np.abs(found - plain).max() > 1e-2
    assert fidelity.mean_kl < 1e-6 < fidelity.adapter_kl
    merge("", source, tmp_path / "half", MergeSettings(dtype="bfloat16"))
    assert load_model(tmp_path / "half")[0].lm_head.weight.dtype == mx.bfloat16


@pytest.mark.parametrize("to", get_args(FormatName))
def test_no_format_of_adapters_stores_weights_in_full(to: FormatName, base: Path, tmp_path: Path) -> None:
    """Refused by name; the same for a run that starts from the adapter, and for a server."""
    source = peft_adapter(tmp_path, base, changed(base, HEAD))
    with pytest.raises(ArtifactError, match=r"lm_head\.weight") as error:
        convert(source, tmp_path / ("b.gguf" if to == "gguf" else "b"), to)
    assert error.value.reason == "inexpressible"
    with pytest.raises(ProfileError, match=r"lm_head\.weight"):
        adapter_values(str(source), str(base))
    with pytest.raises(AdapterRequestError, match="modules_to_save"):
        read_adapter(source, adapter_targets(load_model(base)[0]), LIMITS)


def test_copies_of_weights_of_the_base_model_change_nothing(base: Path, tmp_path: Path) -> None:
    """PEFT stores them beside an adapter of the head or of the embeddings."""
    own = load_file(base / "model.safetensors")
    source = peft_adapter(tmp_path, base, {"lm_head.base_layer.weight": own[HEAD], EMBEDDINGS: own[EMBEDDINGS]})
    assert read_adapter_of(source).weights == {}
    convert(set_config(source, modules_to_save=None), tmp_path / "back", "mlx")
    before, after = (load_file(tmp_path / name / TENSORS["mlx"]) for name in ("a", "back"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def refusal(source: Path, model: str = "") -> str:
    """The reason why an adapter cannot be read."""
    with pytest.raises(ArtifactError) as error:
        read_adapter_of(source, model)
    return str(error.value.reason)


def test_weights_that_the_base_model_cannot_take_are_refused(base: Path, tmp_path: Path) -> None:
    """Other shapes, values that are not finite, quantized layers, a head that shares its weights, an unknown base."""
    weights = changed(base, HEAD)
    for number, wrong in enumerate((weights[HEAD][:-1], weights[HEAD] * np.float32(np.inf))):
        assert refusal(peft_adapter(tmp_path / str(number), base, {HEAD: np.ascontiguousarray(wrong)})) == "base"
    source = peft_adapter(tmp_path, base, weights)
    shared = hub_models.save(tmp_path / "shared", "llama", tie_word_embeddings=True)
    quantized = hub_models.save(tmp_path / "quantized", "llama", bits=8)
    for model in (shared, quantized):
        assert refusal(source, str(model)) == "inexpressible"
    set_config(source, modules_to_save=["lm_head", "norm"])
    assert refusal(source) == "unreadable"
    set_config(source, base_model_name_or_path="owner/elsewhere")
    assert refusal(source) == "base"
