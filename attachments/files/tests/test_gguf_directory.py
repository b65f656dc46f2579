"""GGUF files of base models in directories: weights, settings, tokenizer, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_VERSION, GGUFReader
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from attachments.adapters.tests.adapter_models import write_mlx_adapter
from attachments.files.gguf import LLAMA3
from attachments.files.merge import merge
from attachments.files.merging import MergeSettings, Packing
from attachments.files.tests import gguf_bases, hub_models
from attachments.files.tests.gguf_files import byte_level, sentence_piece
from attachments.files.tests.hub_models import logits
from attachments.files.tests.test_convert import adapter, set_config
from clotho.models.loading import open_stored
from clotho.models.parameters import flat
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import ModelSection
from protocols.errors import ArtifactError
from training_run.__main__ import main

EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"
TO_GGUF = MergeSettings(format="gguf")
PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ROTATION: dict[str, Any] = {
    "max_position_embeddings": 16_384,
    "rope_theta": 500_000.0,
    "rope_scaling": {**LLAMA3, "factor": 8.0},
}
BASES: dict[str, Callable[[Path], Path]] = {
    "Llama with biases": lambda place: gguf_bases.save(
        place, byte_level("smollm"), tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "Llama 3 in bfloat16": lambda place: gguf_bases.save(place, llama3(), dtype=mx.bfloat16, **ROTATION),
    "Mistral": lambda place: gguf_bases.save(place, sentence_piece(), special=PIECES, model_type="mistral"),
    "Qwen2": lambda place: gguf_bases.save(
        place, byte_level("gpt-2"), model_type="qwen2", vocab_size=320, dtype=mx.float16
    ),
    "Qwen3 with a chat template": lambda _: EMBEDDED,
}


def llama3() -> Tokenizer:
    """A tokenizer in which a word of the vocabulary is one token, whatever the merges."""
    described = json.loads(byte_level("llama-bpe").to_str())
    described["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(described))


TEXTS = ("the policy serves  1234 requests", "isn't 東京 naïve?\n\n\tGröße", "<|start|>user\n<|im_end|>", "  a ")


@pytest.fixture(scope="module", params=BASES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in a directory."""
    return BASES[request.param](tmp_path_factory.mktemp("base") / "model")


def merged(base: Path, place: Path, settings: MergeSettings = TO_GGUF, *, scale: float = 0.5) -> Path:
    """Merge an adapter of all layers into a GGUF file; return the file."""
    source = adapter(place / "a", base, scale=scale)
    merge("", source, place / "merged.gguf", settings)
    return place / "merged.gguf"


def weights(files: Path) -> dict[str, mx.array]:
    """The stored weights of a model by the names of mlx-lm."""
    return flat(open_stored(files, ModelSection(path=str(files)))[0].parameters())


def test_a_file_has_the_weights_settings_and_tokens_of_a_merged_directory(base: Path, tmp_path: Path) -> None:
    """Every bit of the weights, in the type of the base model, and every token of texts and conversations."""
    file = merged(base, tmp_path)
    merge("", tmp_path / "a", tmp_path / "directory", MergeSettings())
    ours, theirs = weights(tmp_path / "directory"), weights(file)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)
    assert all(mx.array_equal(ours[name], theirs[name]).item() for name in ours)
    models = [open_stored(files, ModelSection(path=str(files)))[0] for files in (tmp_path / "directory", file)]
    assert np.array_equal(logits(models[0]), logits(models[1]))
    source, written = ChatTokenizer.from_files(base), ChatTokenizer.from_files(file)
    for text in TEXTS:
        assert written.encode(text) == source.encode(text)
        assert written.decode(written.encode(text)) == source.decode(source.encode(text))
    assert (written.eos_ids, written.chat_template) == (source.eos_ids, source.chat_template)


def test_the_weights_of_a_file_can_have_eight_bits(tmp_path: Path) -> None:
    """Also of a quantized base model, whose own quantization llama.cpp does not read."""
    base = gguf_bases.save(tmp_path / "base", byte_level("smollm"), bits=4)
    file = merged(base, tmp_path, MergeSettings(format="gguf", quantize=Packing(8, 32)))
    model, config = open_stored(file, ModelSection(path=str(file)))
    assert config["quantization"]["bits"] == 8
    expected = logits(load_adapters(load_model(base)[0], str(tmp_path / "a")))
    assert np.abs(logits(model) - expected).max() < 0.2
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert kinds["blk.1.ffn_up.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.1.attn_norm.weight"] == "F32"
    expanded = merged(base, tmp_path / "expanded", MergeSettings(format="gguf", dequantize=True, dtype="float32"))
    assert np.abs(logits(open_stored(expanded, ModelSection(path=str(expanded)))[0]) - expected).max() <= 1e-4


def other(change: Callable[[Tokenizer], object]) -> Callable[[Path], Path]:
    """A base model whose tokenizer differs from those of llama.cpp."""

    def save(place: Path) -> Path:
        tokenizer = byte_level("smollm")
        change(tokenizer)
        return gguf_bases.save(place, tokenizer)

    return save


def splits_at_blanks(tokenizer: Tokenizer) -> None:
    """Split text in another way."""
    blanks = pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([blanks, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def lower_case(tokenizer: Tokenizer) -> None:
    """Normalize texts."""
    tokenizer.normalizer = normalizers.Lowercase()


def first_blank_only(place: Path) -> Path:
    """Place a blank before the first text only, and not after control tokens."""
    tokenizer = sentence_piece()
    described = json.loads(tokenizer.to_str())
    described["normalizer"] = None
    described["pre_tokenizer"] = {
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False,
    }  # fmt: skip
    return gguf_bases.save(place, Tokenizer.from_str(json.dumps(described)), special=PIECES)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "architecture": (lambda place: hub_models.save(place, "gemma2"), "gemma2"),
    "experts": (lambda place: hub_models.save(place, "mixtral"), "mixtral"),
    "type of tokenizer": (lambda place: hub_models.save(place, "llama"), "WordLevel"),
    "split": (other(splits_at_blanks), "splits text"),
    "normalizer": (other(lower_case), "Lowercase"),
    "first blank": (first_blank_only, "blanks"),
    "rotation": (
        lambda place: gguf_bases.save(
            place, byte_level("smollm"), rope_scaling={"rope_type": "dynamic", "factor": 2.0}
        ),
        "rope_scaling",
    ),
    "quantization": (lambda place: gguf_bases.save(place, byte_level("smollm"), bits=8), "dequantize"),
    "more tokens than embeddings": (
        lambda place: gguf_bases.save(place, byte_level("smollm"), vocab_size=256),
        "256 rows",
    ),
}


@pytest.mark.parametrize(("save", "named"), REFUSED.values(), ids=REFUSED)
def test_what_llama_cpp_does_not_have_is_refused_by_name(
    save: Callable[[Path], Path], named: str, tmp_path: Path
) -> None:
    """Nothing is written."""
    base = save(tmp_path / "base")
    with pytest.raises(ArtifactError, match=named) as error:
        merged(base, tmp_path)
    assert error.value.reason == "inexpressible"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "base"]


def test_rows_without_a_token_get_unused_tokens(tmp_path: Path) -> None:
    """llama.cpp needs as many tokens as the embeddings have rows."""
    base = gguf_bases.save(tmp_path / "base", byte_level("smollm"), vocab_size=320)
    fields = GGUFReader(merged(base, tmp_path)).fields
    assert fields["general.quantization_version"].contents() == GGML_QUANT_VERSION
    tokens, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    assert len(tokens) == len(kinds) == len(set(tokens)) == 320
    assert kinds[300:] == [5] * 20


def test_the_command_writes_a_file_that_a_run_can_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--model merged.gguf` passes a dry run with the data of the policy. Other bits than 4 and 8 are refused."""
    model: Any = load_model(EMBEDDED)[0]
    source = set_config(write_mlx_adapter(tmp_path / "a", model, scale=0.5), model=str(EMBEDDED))
    words = ["merge", "--adapter", str(source), "--output", str(tmp_path / "m.gguf"), "--format", "gguf"]
    for wrong in (["--quantize-bits", "6"], ["--quantize-bits", "8", "--group-size", "64"]):
        assert main([*words, *wrong]) == 2
    assert main(words) == 0
    assert main([*words, "--quantize-bits", "8", "--clean"]) == 0
    assert main(["--profile", "local-m3", "--model", str(tmp_path / "m.gguf"), "--dry-run"]) == 0
    assert capsys.readouterr().err.count("\n") == 2
