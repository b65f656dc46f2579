"""`pipeline.py show` describes runs, checkpoints, adapters and models, and their differences."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from msgspec.structs import replace

from attachments.files import descriptions
from protocols.errors import RunDirectoryError
from tests.saved_models import save
from tests.training_run.built_context import tiny_profile
from tests.training_run.directory.made_checkpoints import snapshot
from training_run.__main__ import main
from training_run.directory.checkpoints import records_of, write_checkpoint
from training_run.profile.load import write_profile

EVALUATION = {
    "policy_version": 0, "accuracy_by_type": {}, "problems": 8, "ungraded": 0, "completion_tokens": 8,
    "time/evaluation": 0.5, "time/run": 1.0, "final": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of eight steps, two checkpoints of it, its base model, and an adapter of PEFT."""
    directory = tmp_path_factory.mktemp("show")
    write_profile(tiny_profile(directory), _made(directory / "run") / "profile.toml")
    run = directory / "run"
    metrics = [{"step": step, "loss": step / 8, "policy_version": step, "time/run": 9.0} for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    evaluations: list[dict[str, Any]] = [EVALUATION | {"step": step, "accuracy": step / 10} for step in (0, 4, 8)]
    evaluations[-1] |= {"reward": {"value": 0.5, "low": 0.25, "high": 0.75, "problems": 8}, "loss": None}
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    (run / "best.json").write_text('{"step": 8, "accuracy": 0.8, "problems": 8}')
    (run / "lineage.json").write_text('{"kind": "adapter", "path": "adapters/a", "sha256": "0a"}')
    (run / ".run_id").write_text("0123\n")
    for step in (4, 8):
        write_checkpoint(run / "checkpoints", snapshot(step), keep_last=9)
    peft = _made(directory / "peft")
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (4, 64), "B": (64, 4)}
    tensors = {name.format(layer, matrix): mx.zeros(shapes[matrix]) for layer in (0, 1) for matrix in "AB"}
    mx.save_safetensors(str(peft / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"]}
    (peft / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return the JSON that the command prints."""
    assert main(["show", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_described(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its progress, settings, newest metrics, evaluations, checkpoints and lineage."""
    found = shown(capsys, str(place / "run"))
    assert (found["kind"], found["run_id"], found["step"], found["planned_steps"]) == ("run", "0123", 8, 10)
    assert found["metrics"] == {"loss": 1.0}
    assert found["policy"] == {"method": "lora", "rank": 2, "scale": 2.0, "target_modules": []}
    assert found["evaluations"]["first"]["accuracy"] == 0.0
    assert found["evaluations"]["last"]["reward"] == {"value": 0.5, "low": 0.25, "high": 0.75, "problems": 8}
    assert "loss" not in found["evaluations"]["last"]
    assert found["evaluations"]["best"]["step"] == 8
    assert (found["checkpoints"]["steps"], found["checkpoints"]["incomplete"]) == ([4, 8], [])
    assert found["lineage"] == {"kind": "adapter", "path": "adapters/a", "sha256": "0a"}


@pytest.mark.parametrize("name", ["run@4", "run/checkpoints/step-000004"])
def test_a_checkpoint_is_described(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """With the metrics and the accuracy of its step."""
    found = shown(capsys, str(place / name))
    assert (found["kind"], found["step"], found["damage"], found["is_best"]) == ("checkpoint", 4, None, False)
    assert found["metrics"] == {"loss": 0.5}
    assert found["evaluation"] == {"step": 4, "accuracy": 0.4, "problems": 8, "ungraded": 0}
    size = (place / "run/checkpoints/step-000004/optimizer.safetensors").stat().st_size
    assert found["files"]["optimizer.safetensors_bytes"] == size


def test_an_adapter_of_peft_is_described(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the absolute scale, which is alpha / sqrt(rank) for rsLoRA."""
    found = shown(capsys, str(place / "peft"))
    assert (found["format"], found["method"], found["rank"], found["scale"]) == ("peft", "lora rslora", 4, 4.0)
    assert (found["modules"], found["layers"], found["parameters"]) == (["self_attn.q_proj"], "0 to 1", 1024)


def test_a_model_is_described(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantized weight counts once; the type is that of the other weights."""
    full, quantized = save(place / "full", bits=0), save(place / "packed", bits=4)
    capsys.readouterr()
    plain, packed = shown(capsys, str(full)), shown(capsys, str(quantized))
    assert (plain["architecture"], plain["layers"], plain["quantization"]) == ("qwen3", 2, None)
    assert (packed["quantization"]["bits"], packed["parameters"]) == (4, plain["parameters"])
    assert packed["bytes"] < plain["bytes"]
    assert packed["dtype"] == plain["dtype"] == "F32"


def test_two_paths_show_what_differs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal values are not listed. The table has one column for each path."""
    left, right = f"{place / 'run'}@4", f"{place / 'run'}@8"
    found = shown(capsys, left, right)
    assert found["differences"]["step"] == [4, 8]
    assert found["differences"]["evaluation.accuracy"] == [0.4, 0.8]
    assert "kind" not in found["differences"]
    assert main(["show", left, right]) == 0
    table = capsys.readouterr().out
    assert "metrics.loss" in table
    assert "policy_version" in table
    assert main(["show", left, left]) == 0
    assert "no differences" in capsys.readouterr().out


def test_the_table_and_the_help_have_one_line_for_each_value(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of foreign files are escaped."""
    hostile = _made(place / "hostile")
    mx.save_safetensors(str(hostile / "adapters.safetensors"), {"x\x1b.lora_a": mx.zeros((2, 2))})
    config = {"fine_tune_type": "lora\x1b[2J", "lora_parameters": {"rank": 2, "scale": 1.0}}
    (hostile / "adapter_config.json").write_text(json.dumps(config))
    for words in ([str(hostile)], [str(hostile), "--json"]):
        assert main(["show", *words]) == 0
        assert "\x1b" not in capsys.readouterr().out
    assert main(["show", "--help"]) == 0
    assert "PATH [PATH]" in capsys.readouterr().out


def make_pipe(path: Path) -> None:
    """Replace a file by a pipe, which a reader could wait for."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no header": ("adapter", lambda path: (path / "adapters.safetensors").write_bytes(b"\xff" * 64)),
    "no tensors": ("adapter", lambda path: (path / "adapters.safetensors").unlink()),
    "a pipe": ("adapter", lambda path: make_pipe(path / "adapter_config.json")),
    "a pipe as a history": ("run", lambda path: make_pipe(path / "metrics.jsonl")),
    "not an object": ("adapter", lambda path: (path / "adapter_config.json").write_text("[" * 100_000)),
    "a huge text": ("adapter", lambda path: os.truncate(path / "adapter_config.json", 1 << 40)),
    "no profile": ("run", lambda path: (path / "profile.toml").write_text("steps = [")),
    "no state": ("run/checkpoints/step-000004", lambda path: (path / "state.json").write_text("{}")),
    "no configuration": ("base", lambda path: (path / "config.json").write_text("{")),
    "no weights": ("base", lambda path: (path / "model.safetensors").write_bytes(b"\x01")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_give_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Nothing is written, and no file is read without a limit."""
    write_profile(tiny_profile(tmp_path), _made(tmp_path / "run") / "profile.toml")
    path = write_checkpoint(tmp_path / "run" / "checkpoints", snapshot(4), keep_last=9)
    adapter = _made(tmp_path / "adapter")
    for file in ("adapters.safetensors", "adapter_config.json"):
        (adapter / file).write_bytes((path / file).read_bytes())
    where, damage = DAMAGE[name]
    damage(tmp_path / where)
    assert main(["show", str(tmp_path / where)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("clotho: ")
    assert output.err.count("\n") == 1


def test_an_error_of_the_disk_is_one_of_the_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is already one of the program stays as it is."""
    own = RunDirectoryError("what it says")
    for error in (OSError(errno.EIO, os.strerror(errno.EIO)), own):
        monkeypatch.setattr(descriptions, "read_best", Mock(side_effect=error))
        with pytest.raises(RunDirectoryError) as caught:
            descriptions.describe(str(place / "run"))
        assert (caught.value is own) == (error is own)


@pytest.mark.parametrize("words", [[], ["a", "b", "c"], ["--what", "a"], ["/no/such/path"], ["/"], ["x" * 5000]])
def test_a_wrong_command_line_gives_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No path, too many, an unknown flag, a path that does not exist or has nothing to describe."""
    assert main(["show", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_directory_of_checkpoints_is_listed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its newest complete checkpoint; the directory need not be in a run."""
    found = shown(capsys, str(place / "run" / "checkpoints"))
    assert (found["kind"], found["steps"], found["incomplete"], found["newest"]["step"]) == (
        "checkpoints",
        [4, 8],
        [],
        8,
    )
    copied = place / "copied"
    shutil.copytree(place / "run" / "checkpoints" / "step-000004", copied / "step-000004")
    (copied / "step-000006").mkdir()
    found = shown(capsys, str(copied))
    assert (found["steps"], found["incomplete"], found["newest"]["step"]) == ([4, 6], [6], 4)


def test_a_copied_checkpoint_has_the_settings_and_metrics_of_its_step(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its own records. An older checkpoint without records is described without them."""
    run = place / "run"
    records = records_of((run / "profile.toml").read_text(), run / "metrics.jsonl", 4)
    for number, contents in enumerate((records, {})):
        path = write_checkpoint(tmp_path / str(number), replace(snapshot(4), records=contents), keep_last=9)
        found = shown(capsys, str(path))
        assert found["metrics"] == ({"loss": 0.5} if contents else {})
        assert found.get("learner", {}).get("batch_size") == (2 if contents else None)
