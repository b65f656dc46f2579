"""`real`: the same real model for all contenders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
from gguf import GGMLQuantizationType as Quantization

from bench import real
from bench.contenders.process import Contender, Metric
from bench.contenders.shapes import REAL, REAL_DIRECTORY, named_model
from bench.contenders.worker import Case
from bench.measurement import Measurement
from clotho.run.convert_gguf import convert
from tests.bench.made_measurements import measurement
from tests.models.gguf_files import TOKENS_1_T, build, byte_level, write


def test_contenders_read_the_converted_model_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is that of the environment variable; quantized weights are expanded."""
    model = build()
    file = write(tmp_path / "m.gguf", model, quantization=Quantization.Q8_0, tokenizer=byte_level("smollm"))
    convert(str(file), tmp_path / "model")
    monkeypatch.setenv(REAL_DIRECTORY, str(tmp_path / "model"))
    loaded, config = named_model(REAL)
    assert loaded.model.layers[0].mlp.up_proj.weight.dtype == mx.float32
    assert config["vocab_size"] == 300
    assert mx.allclose(loaded(TOKENS_1_T), model(TOKENS_1_T), atol=0.1).item()


def test_all_contenders_of_a_case_read_the_same_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is converted once. The table has a row for rollouts, and rows for speed and memory of the update."""
    directories: list[str] = []

    def made_up(
        question: str, contenders: Sequence[Contender], cases: Sequence[Case], metrics: Sequence[Metric], **_: object
    ) -> list[Measurement]:
        directories.extend(one.environment[REAL_DIRECTORY] for one in contenders)
        return [
            msgspec.structs.replace(
                measurement([1.0], contender=one.name, metric=metric.name), question=question, case=case
            )
            for one in contenders
            for case in cases
            for metric in metrics
        ]

    monkeypatch.setattr(real, "convert", lambda model, directory: directories.append(str(directory)))
    monkeypatch.setattr(real, "measure_interleaved", made_up)
    table = real.table(real.measure(1))
    assert len(directories) == 6
    assert len(set(directories)) == 1
    assert [table.count(f"| {task} |") for task in ("rollouts", "update")] == [1, 2]
