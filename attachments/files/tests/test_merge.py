"""Merged models: their weights, their files, and the comparison with base model plus adapter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization
from gguf import GGUFReader
from mlx_lm import load
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file
from tokenizers.processors import TemplateProcessing

from attachments.adapters.tests.adapter_models import write_mlx_adapter
from attachments.files import merging
from attachments.files.merge import REPORT, comparison_prompts, merge
from attachments.files.merging import MergeSettings, Packing, full_weight, weights_of
from attachments.files.tests import hub_models
from attachments.files.tests.gguf_files import build, byte_level, write
from attachments.files.tests.hub_models import logits
from attachments.files.tests.test_convert import adapter, config, dora, embedding, set_config
from clotho.models.loading import open_base
from clotho.settings.model import ModelSection
from protocols.errors import ArtifactError
from tests.small_models import byte_tokenizer
from training_run.__main__ import main
from training_run.adapters.reading import read_adapter_of

ROOT = Path(__file__).parents[3]
FULL = MergeSettings(dtype="float32")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "experts": ("qwen3_moe", {}),
    "soft caps": ("gemma2", {}),
    "4 bits": ("llama", {"bits": 4}),
    "DoRA": ("llama", {}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base model for each case."""
    root = tmp_path_factory.mktemp("bases")
    return {name: hub_models.save(root / name, kind, **settings) for name, (kind, settings) in CASES.items()}


def expected(base: Path, source: Path) -> np.ndarray[Any, Any]:
    """The logits of base model plus adapter, as mlx-lm computes them in float32."""
    model, _ = load_model(base)
    model.set_dtype(mx.float32)
    return logits(load_adapters(model, str(source)))


def merged_logits(directory: Path) -> np.ndarray[Any, Any]:
    """The logits of a merged model in mlx-lm."""
    loaded: Any = load(str(directory))
    return logits(loaded[0])


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_computes_base_plus_adapter(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Within 1e-4 in float32, as mlx-lm loads it. The comparison finds no difference."""
    base = bases[case]
    source = dora(tmp_path / "a", base) if case == "DoRA" else adapter(tmp_path / "a", base, scale=0.5)
    settings = MergeSettings(dtype="float32", dequantize=case == "4 bits")
    fidelity = merge("", source, tmp_path / "merged", settings)
    plain = logits(load_model(base)[0])
    assert np.abs(merged_logits(tmp_path / "merged") - expected(base, source)).max() <= 1e-4
    if case != "DoRA":  # a new DoRA adapter changes nothing
        assert np.abs(plain - expected(base, source)).max() > 1e-2
        assert fidelity.mean_kl < 1e-6 < fidelity.adapter_kl
        assert fidelity.greedy_agreement == 1.0
        assert fidelity.weights.relative_error < 1e-4


def test_an_adapter_of_a_base_that_its_run_quantized_is_merged_with_that_base(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """The weights that the adapter was trained on are those of the quantized base, and not those of the files."""
    source = adapter(tmp_path / "a", bases["biases"], scale=0.5)
    set_config(source, base_quantization={"bits": 4, "group_size": 16, "mode": "nvfp4"})
    merge("", source, tmp_path / "merged", MergeSettings(dequantize=True, dtype="float32"))
    model, _ = load_model(bases["biases"])
    nn.quantize(model, group_size=16, bits=4, mode="nvfp4")
    assert np.abs(merged_logits(tmp_path / "merged") - logits(load_adapters(model, str(source)))).max() <= 1e-4


def test_an_adapter_of_tied_embeddings_changes_the_head_too(bases: dict[str, Path], tmp_path: Path) -> None:
    """As in mlx-lm, which computes the head with the embeddings and their adapter."""
    base = bases["tied embeddings"]
    source = adapter(tmp_path / "a", base, scale=0.1)
    embedding(source)
    keys = [*config(source)["lora_parameters"]["keys"], "model.embed_tokens"]
    set_config(source, lora_parameters={"rank": 4, "scale": 0.1, "dropout": 0.0, "keys": keys})
    merge("", source, tmp_path / "merged", FULL)
    assert np.abs(merged_logits(tmp_path / "merged") - expected(base, source)).max() <= 1e-4


def test_a_small_change_that_four_bits_lose_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """Nothing is written. More bits keep it, and the loss can be accepted."""
    base = bases["4 bits"]
    source = adapter(tmp_path / "a", base, scale=0.01)
    with pytest.raises(ArtifactError) as error:
        merge("", source, tmp_path / "merged", MergeSettings())
    assert error.value.reason == "rounding"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    lost = merge("", source, tmp_path / "lost", MergeSettings(), accept_loss=True)
    kept = merge("", source, tmp_path / "kept", MergeSettings(dequantize=True, dtype="float32"))
    assert not lost.keeps_change
    assert 0.5 < lost.weights.relative_error < 1.0
    assert lost.mean_kl > lost.adapter_kl / 2
    assert kept.keeps_change


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_weights_that_do_not_change_stay_as_they_are(bits: int, tmp_path: Path) -> None:
    """The grid of a group of the base model represents such weights without an error; a new grid would move them."""
    base = hub_models.save(tmp_path / "base", "llama", bits=bits)
    source = adapter(tmp_path / "a", base, scale=0.0)
    fidelity = merge("", source, tmp_path / "merged", MergeSettings(), accept_loss=True)
    assert fidelity.mean_kl == 0.0
    assert merged_logits(tmp_path / "merged").tobytes() == logits(load_model(base)[0]).tobytes()


def test_every_group_has_the_grid_with_the_least_error(bases: dict[str, Path], tmp_path: Path) -> None:
    """No group has a larger error than `mx.quantize` gives it, or than the old grid, which is at most the change."""
    base, packing = bases["4 bits"], Packing(4, 32)
    source = adapter(tmp_path / "a", base, scale=0.02)
    merge("", source, tmp_path / "merged", MergeSettings(), accept_loss=True)
    merge("", source, tmp_path / "exact", MergeSettings(dequantize=True, dtype="float32"))
    wanted, merged, old = (weights_of(load_model(path)[0]) for path in (tmp_path / "exact", tmp_path / "merged", base))
    for name in (name for name, found in merged.packings.items() if found and "proj" in name):
        weight = full_weight(wanted.arrays[name], None)
        anew = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, group_size=32, bits=4), strict=True))
        best, fresh, kept = (
            (full_weight(arrays, packing) - weight).reshape(-1, 32).square().sum(axis=1)
            for arrays in (merged.arrays[name], anew, old.arrays[name])
        )
        assert mx.all(best <= mx.minimum(fresh, kept) * (1 + 1e-5)).item()
        assert mx.all(best.sum() < 0.9 * fresh.sum()).item()


def test_only_layers_with_an_adapter_are_quantized_again(bases: dict[str, Path], tmp_path: Path) -> None:
    """A second quantization of other layers would change them."""
    base = bases["4 bits"]
    source = adapter(tmp_path / "a", base, scale=1.0)
    tensors = load_file(source / "adapters.safetensors")
    save_file({name: array for name, array in tensors.items() if "q_proj" in name}, source / "adapters.safetensors")
    merge("", source, tmp_path / "merged", MergeSettings(), accept_loss=True)
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {"q_proj"}
    assert load_model(tmp_path / "merged")[1]["quantization"] == load_model(base)[1]["quantization"]


def test_all_layers_can_be_quantized(bases: dict[str, Path], tmp_path: Path) -> None:
    """With 8 bits, mlx-lm loads a model whose distribution is close."""
    source = adapter(tmp_path / "a", bases["tied embeddings"], scale=0.5)
    fidelity = merge("", source, tmp_path / "merged", MergeSettings(quantize=Packing(8, 32)))
    model, loaded = load_model(tmp_path / "merged")
    assert loaded["quantization"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert model.model.embed_tokens.bits == 8
    assert 0 < fidelity.mean_kl < fidelity.adapter_kl / 2
    assert np.abs(logits(model) - expected(bases["tied embeddings"], source)).max() < 0.5


def test_an_architecture_can_choose_the_bits_of_a_layer(tmp_path: Path) -> None:
    """mlx-lm stores the router of a mixture of Qwen3 in 8 bits."""
    base = hub_models.save(tmp_path / "base", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    source = adapter(tmp_path / "a", base, scale=0.5)
    merge("", source, tmp_path / "merged", MergeSettings(quantize=Packing(4, 32)), accept_loss=True)
    model, _ = load_model(tmp_path / "merged")
    assert model.layers[0].mlp.gate.bits == 8
    assert model.layers[0].mlp.switch_mlp.up_proj.bits == 4


def test_the_comparison_is_the_kl_divergence_of_the_tokens(bases: dict[str, Path], tmp_path: Path) -> None:
    """Computed here with mlx-lm and NumPy on the same prompts."""
    base = bases["biases"]
    source = adapter(tmp_path / "a", base, scale=0.3)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "12 3"}\n{"prompt": "4"}\n{"prompt": "567 89"}\n')
    found = merge("", source, tmp_path / "merged", MergeSettings(dtype="bfloat16"), dataset=str(data), prompts=2)
    tokenizer = load(str(base))[1]
    prompts = [tokenizer.encode(text) for text in ("12 3", "4")]

    def log_probabilities(model: Any, prompt: list[int]) -> np.ndarray[Any, Any]:
        model.set_dtype(mx.float32)
        values = np.array(model(mx.array([prompt]))[0]).astype(np.float64)
        found: np.ndarray[Any, Any] = values - np.log(np.exp(values).sum(-1, keepdims=True))
        return found

    kl, same = [], []
    for prompt in prompts:
        ours = log_probabilities(load_adapters(load_model(base)[0], str(source)), prompt)
        theirs = log_probabilities(load_model(tmp_path / "merged")[0], prompt)
        kl += list((np.exp(ours) * (ours - theirs)).sum(-1))
        same += list(ours.argmax(-1) == theirs.argmax(-1))
    assert (found.prompts, found.tokens) == (2, len(kl))
    assert found.mean_kl == pytest.approx(np.mean(kl), rel=0.02, abs=1e-7)
    assert found.greedy_agreement == pytest.approx(np.mean(same))


def test_hugging_face_gets_its_names_and_one_layer_per_expert(bases: dict[str, Path], tmp_path: Path) -> None:
    """Other architectures, whose names differ, and quantized weights are refused."""
    source = adapter(tmp_path / "a", bases["experts"], scale=0.5)
    merge("", source, tmp_path / "merged", MergeSettings(format="hf", dtype="float32"))
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.3.down_proj.weight"].shape == (32, 16)
    assert not any("switch_mlp" in name for name in tensors)
    assert np.abs(merged_logits(tmp_path / "merged") - expected(bases["experts"], source)).max() <= 1e-4
    other = hub_models.save(tmp_path / "lfm2", "lfm2")
    for base in (other, bases["4 bits"]):
        with pytest.raises(ArtifactError) as error:
            merge("", adapter(tmp_path / base.name, base), tmp_path / "new", MergeSettings(format="hf"))
        assert error.value.reason == "inexpressible"
    assert not (tmp_path / "new").exists()


def test_large_models_are_written_in_several_files(bases: dict[str, Path], tmp_path: Path) -> None:
    """With an index, as mlx-lm and transformers read it."""
    source = adapter(tmp_path / "a", bases["biases"], scale=0.5)
    with patch.object(merging, "SHARD_BYTES", 2**15):
        merge("", source, tmp_path / "merged", FULL)
    files = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert len(files) > 1
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(
        array.nbytes for file in files for array in load_file(tmp_path / "merged" / file).values()
    )
    assert np.abs(merged_logits(tmp_path / "merged") - expected(bases["biases"], source)).max() <= 1e-4


@pytest.mark.parametrize("quantization", [Quantization.F32, Quantization.Q8_0], ids=str)
def test_a_gguf_file_stays_one(quantization: Quantization, tmp_path: Path) -> None:
    """Its metadata, tokenizer and other tensors are copied; changed tensors keep their type unless dequantized."""
    model = build()
    metadata = {"tokenizer.ggml.pre": "smollm"}
    base = write(
        tmp_path / "base.gguf", model, quantization=quantization, tokenizer=byte_level("smollm"), metadata=metadata
    )
    source = set_config(write_mlx_adapter(tmp_path / "a", model, rank=4, scale=0.5), model=str(base))
    found = merge("", source, tmp_path / "merged.gguf", MergeSettings(format="gguf"))
    opened, _ = open_base(tmp_path / "merged.gguf", ModelSection(path=str(base), dtype="float32"))
    stored, _ = open_base(base, ModelSection(path=str(base), dtype="float32"))
    difference = np.abs(logits(opened) - logits(load_adapters(stored, str(source)))).max()
    assert difference <= (1e-4 if quantization == Quantization.F32 else 0.2)
    assert found.keeps_change
    before, after = GGUFReader(base), GGUFReader(tmp_path / "merged.gguf")
    assert {tensor.name: tensor.tensor_type for tensor in before.tensors} == {
        tensor.name: tensor.tensor_type for tensor in after.tensors
    }
    keys = [key for key in before.fields if not key.startswith("GGUF.")]
    assert all(before.fields[key].contents() == after.fields[key].contents() for key in keys)
    settings = MergeSettings(format="gguf", dequantize=True, dtype="float32")
    assert merge("", source, tmp_path / "full.gguf", settings).mean_kl < 1e-6


def test_the_command_reports_and_never_overwrites(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--clean` replaces the output of an earlier merge only. Mistakes are one line, with exit status 2."""
    source, out = adapter(tmp_path / "a", bases["biases"], scale=0.5), tmp_path / "merged"
    words = ["merge", "--adapter", str(source), "--output", str(out), "--dtype", "float32"]
    assert main(words) == 0
    assert "mean KL" in capsys.readouterr().out
    report = json.loads((out / REPORT).read_text())
    assert report["fidelity"]["greedy_agreement"] == 1.0
    assert main(words) == 2
    assert main([*words, "--clean"]) == 0
    (out / REPORT).unlink()
    new = ["merge", "--adapter", str(source), "--output", str(tmp_path / "new")]
    capsys.readouterr()
    for wrong in (
        [*words, "--clean"],
        [*new, "--dequantize", "--quantize-bits", "4"],
        [*new, "--quantize-bits", "7"],
        [*new, "--quantize-bits", "4", "--format", "hf"],
        [*new, "--format", "gguf"],
        [*new[:-1], str(tmp_path / "new.gguf"), "--format", "gguf"],
        [*new, "--prompts", "0"],
        [*new, "--model", str(bases["experts"])],
        [*new, "--dataset", str(tmp_path / "nothing.jsonl")],
    ):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1
    set_config(source, model="owner/elsewhere")
    assert main(new) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.needs_linux(reason="the unit of the largest memory is KiB")
def test_a_model_of_three_gigabytes_is_merged_in_less_than_one(tmp_path: Path) -> None:
    """The largest memory of the process, with the comparison."""
    script = str(Path(__file__).with_name("large_model.py"))
    subprocess.run([sys.executable, script, str(tmp_path)], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    command = [sys.executable, "pipeline.py", "merge", "--adapter", tmp_path / "adapter", "--output", tmp_path / "out"]
    measured = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    result = subprocess.run(
        [sys.executable, "-c", measured, *map(str, command)], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) > 2.9e9
    assert int(result.stdout.split()[-1]) * 1024 < 1e9


@pytest.mark.parametrize("template", [None, "<{{ messages[0]['content'] }}>"])
def test_an_answer_continues_its_prompt(
    template: str | None, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of the model stands before a prompt, and never between prompt and answer."""
    tokenizer = byte_tokenizer(chat_template=template)
    tokenizer.hugging_face._tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    monkeypatch.setattr("attachments.files.merge.ChatTokenizer.of_model", lambda *_: tokenizer)
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"prompt": "Q", "answer": "AB"}))
    source = adapter(tmp_path / "a", bases["biases"])
    read, section = read_adapter_of(source, ""), ModelSection(path=str(bases["biases"]))
    (source / "profile.toml").write_text(f'extends = "local-m3"\ndata = {{ train = "{data}", system = "" }}\n')
    (tokens,) = comparison_prompts(read, section, "", source, 1)
    assert bytes(tokens[-2:]) == b"AB"
    assert tokens[:-2] == (tuple(b"<Q>") if template else (256, *b"Q"))
