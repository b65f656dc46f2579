"""Conversion of a GGUF file to a model directory, which mlx-lm loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from gguf import GGMLQuantizationType as Quantization

from clotho.commands.convert_gguf import main
from clotho.config.schema import ModelSection
from clotho.models.policy import load_policy
from clotho.storage.adapters import write_adapter
from tests.learner_settings import policy_settings
from tests.models.gguf_files import TOKENS_1_T, build, byte_level, write


def file_and_directory(tmp_path: Path, quantization: Quantization) -> tuple[Path, Path]:
    """A GGUF file, and the directory that the command writes."""
    metadata = {"tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    file = write(
        tmp_path / "m.gguf", build(), quantization=quantization, tokenizer=byte_level("smollm"), metadata=metadata
    )
    assert main([str(file), str(tmp_path / "new" / "model")]) == 0
    return file, tmp_path / "new" / "model"


@pytest.mark.parametrize("quantization", [Quantization.Q4_1, Quantization.Q8_0, Quantization.F16], ids=str)
def test_mlx_lm_computes_with_the_directory_as_clotho_with_the_file(tmp_path: Path, quantization: Quantization) -> None:
    """With the adapter of a policy of the file. Quantized weights stay quantized."""
    file, directory = file_and_directory(tmp_path, quantization)
    section = ModelSection(path=str(file))
    policy = load_policy(section, policy_settings(kind="lora"), seed=0, keep_reference=False)
    write_adapter(tmp_path / "adapters", policy.trainable(), policy.adapter_config)
    model, tokenizer, *_ = mlx_lm.load(str(directory), adapter_path=str(tmp_path / "adapters"))
    model.set_dtype(mx.float32)
    assert mx.allclose(model(TOKENS_1_T), policy.model(TOKENS_1_T), atol=1e-4).item()
    assert tuple(tokenizer.encode("the policy<|end|>")) == policy.tokenizer.encode("the policy<|end|>")
    assert tokenizer.eos_token_ids == policy.tokenizer.eos_ids
    render: Any = tokenizer.apply_chat_template  # unannotated
    assert render([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_an_existing_directory_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and one line, as for a missing file and for a directory."""
    file = write(tmp_path / "m.gguf", build(), tokenizer=byte_level("smollm"))
    (tmp_path / "old").mkdir()
    for arguments in ([str(file), str(tmp_path / "old")], [str(tmp_path / "x.gguf"), str(tmp_path / "new")]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list((tmp_path / "old").iterdir()) == []
