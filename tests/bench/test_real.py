"""`real`: the same real model for all contenders, parts that are measured alone, and learning by seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from gguf import GGMLQuantizationType as Quantization

from attachments.files.convert import convert_model
from attachments.files.tests.gguf_files import TOKENS_1_T, build, byte_level, write
from bench import real
from bench.contenders import clotho_train
from bench.contenders.process import Contender
from bench.contenders.shapes import REAL, REAL_DIRECTORY, named_model
from bench.measurement import Measurement, read
from bench.runs import Record
from clotho.settings.bounds import Off
from tests.bench.made_measurements import made_up
from training_run.profile.flags import parse_arguments
from training_run.profile.load import load_profile


def test_contenders_read_the_converted_model_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is that of the environment variable; quantized weights are expanded."""
    model = build()
    file = write(tmp_path / "m.gguf", model, quantization=Quantization.Q8_0, tokenizer=byte_level("smollm"))
    convert_model(str(file), tmp_path / "model")
    monkeypatch.setenv(REAL_DIRECTORY, str(tmp_path / "model"))
    loaded, config = named_model(REAL)
    assert loaded.model.layers[0].mlp.up_proj.weight.dtype == mx.float32
    assert config["vocab_size"] == 300
    assert mx.allclose(loaded(TOKENS_1_T), model(TOKENS_1_T), atol=0.1).item()


@pytest.fixture
def directories(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the measurement by `made_up`, and records the model directory of every contender."""
    found: list[str] = []

    def measured(question: str, contenders: Sequence[Contender], *given: Any, **options: Any) -> list[Measurement]:
        found.extend(one.environment[REAL_DIRECTORY] for one in contenders if REAL_DIRECTORY in one.environment)
        return made_up([])(question, contenders, *given, **options)

    monkeypatch.setattr(real, "convert_model", lambda model, directory: found.append(str(directory)))
    monkeypatch.setattr(real, "measure_interleaved", measured)
    return found


def test_all_contenders_of_a_case_read_the_same_directory(directories: list[str]) -> None:
    """The model is converted for them."""
    real.measure(["rollouts"], repeats=1, seeds=(), quick=False)
    assert len(directories) == 4
    assert len(set(directories)) == 1


@pytest.mark.usefixtures("directories")
def test_parts_are_measured_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results of other parts stay in the file, and the table has all of them."""
    out = tmp_path / "real.jsonl"
    for parts in (["rollouts", "equal-work"], ["update"], ["update"]):
        assert real.main(["--part", *parts, "--repeats", "2", "--out", str(out)]) == 0
    found = [(one.case["task"], one.contender, one.metric, len(one.values)) for one in read(out)]
    both = ("clotho", "mlx-lm-lora")
    three = (*both, "clotho, grad_checkpoint")
    assert sorted(found) == sorted(
        [
            *(("rollouts", one, "tokens_per_second", 2) for one in ("clotho", "mlx-lm", "mlx-lm-lora")),
            *(("update", one, metric, 2) for one in three for metric in ("tokens_per_second", "seconds", "peak_bytes")),
            *(("equal work", one, "seconds", 2) for one in both),
        ]
    )
    table = real.table(read(out))
    assert capsys.readouterr().out.endswith(table + "\n")
    assert table.count("**") == 2 * 4


def test_learning_reports_accuracy_before_and_after_for_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of the profile per seed. Seconds start at the first prompt and end at the last update."""
    started: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> Record:
        started.append(arguments)
        seed = len(started)
        steps = [
            {"step": 1, "time/run": 12.0, "time/update": 3.0, "time/wait_for_rollouts": 4.0},
            {"step": 2, "time/run": 20.0 + seed, "time/update": 3.0, "time/wait_for_rollouts": 4.0},
        ]
        evaluations = [{"step": 0, "accuracy": 0.25}, {"step": 2, "accuracy": 0.7 + seed / 100}]
        return Record(metrics=steps, log=[], profile={}, launched=0.0, evaluations=evaluations)

    monkeypatch.setattr(real, "run_pipeline", run)
    results = real.measure(["learning"], repeats=9, seeds=[5, 6], quick=False)
    found = {one.metric: one.values for one in results}
    assert found == {"accuracy_before": [0.25, 0.25], "accuracy": [0.71, 0.72], "seconds": [16.0, 17.0]}
    assert [arguments[:4] for arguments in started] == [["--profile", "smollm2", "--seed", seed] for seed in "56"]
    assert "0.25" in real.table(results)


def test_the_flags_of_equal_work_are_valid() -> None:
    """The shipped profile with the settings of the case."""
    words = clotho_train.arguments(real.EQUAL, 1, real.OURS.environment[clotho_train.FLAGS].split())
    profile = load_profile(words[1], parse_arguments(words[2:]).overrides)
    assert (profile.seed, profile.steps, profile.learner.batch_size, profile.sampling.group_size) == (1, 3, 8, 8)
    assert isinstance(profile.eval, Off)
