"""Checkpoints: whole or absent, exact, and never the last good one lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from clotho.storage import atomic_files as durable_files
from clotho.storage.checkpoints import (
    Snapshot,
    latest,
    prune,
    read_checkpoint,
    read_state,
    refuse_other_inputs,
    write_checkpoint,
)
from protocols.accounting import LedgerState
from protocols.checkpoint import AdapterConfig, LoRAParameters, RunState
from protocols.errors import CheckpointError, RunDirectoryError
from protocols.step import ReplayGroup
from tests.training.learning import scored_group

ADAPTER = AdapterConfig(
    fine_tune_type="lora",
    num_layers=-1,
    lora_parameters=LoRAParameters(rank=2, scale=10.0, dropout=0.0, keys=("q_proj",)),
)


def state(step: int, **changes: Any) -> RunState:
    """A run after `step` batches."""
    base = RunState(
        step=step,
        version=step,
        fingerprint="f",
        ledger=LedgerState(all_ended_below=7, ended_above=(9, 12), trained=6, discarded={"stale": 3}),
        prompted=20,
        random_state=(0, 2**32 - 1),
        bad_steps=1,
        train_seconds=0.1 + 0.2,
        sampled_tokens=10**12,
        trained_tokens=5,
        inputs={"model": "m", "dataset": "d"},
    )
    return msgspec.structs.replace(base, **changes)


def parameters(value: float = 1.5) -> dict[str, Any]:
    """A small tree with an empty branch, as MLX makes them."""
    tree = {"layers": [{}, {"lora_a": mx.full((3, 2), value), "lora_b": mx.full((2, 3), value, dtype=mx.bfloat16)}]}
    mx.eval(tree)
    return tree


def snapshot(step: int, value: float = 1.5) -> Snapshot:
    """Something to write."""
    optimizer = {"step": mx.array(step, dtype=mx.uint64), "layers.1.lora_a.m": mx.full((3, 2), value)}
    mx.eval(optimizer)
    return Snapshot(parameters=parameters(value), optimizer=optimizer, state=state(step), adapter_config=ADAPTER)


def names(directory: Path) -> list[str]:
    """Everything in the directory, hidden entries too."""
    return sorted(path.name for path in directory.iterdir())


def corrupt(path: Path) -> None:
    """Change one byte in the middle of a file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def test_a_checkpoint_comes_back_exactly(tmp_path: Path) -> None:
    """State, parameters and optimizer, bit for bit, types included."""
    path = write_checkpoint(tmp_path, snapshot(50), keep_last=3)
    assert path.name == "step-000050"
    assert names(path) == [
        "MANIFEST.json",
        "adapter_config.json",
        "adapters.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    found = read_checkpoint(path, expected=parameters(0.0), adapter_config=ADAPTER)
    assert found.state == state(50) == read_state(path)
    layer = found.parameters["layers"][1]
    assert found.parameters["layers"][0] == {}
    assert mx.array_equal(layer["lora_a"], mx.full((3, 2), 1.5)).item()
    assert layer["lora_b"].dtype == mx.bfloat16
    assert found.optimizer["step"].item() == 50
    assert found.optimizer["step"].dtype == mx.uint64


def test_the_replay_buffer_comes_back_exactly(tmp_path: Path) -> None:
    """Every number and byte of its groups; a run without a buffer has no such file."""
    first, second = (
        ReplayGroup(
            scored=msgspec.structs.replace(
                scored_group([[1, 2], [3]], [0.1 + 0.2, -1e-300], logprob=-1 / 3, version=7, group_id=group_id),
                parts={"exact": (None, 1.0)},
                token_advantages=((0.1, 1e308), (5e-324,)),
            ),
            advantage=2 / 3,
            version=group_id,
        )
        for group_id in (4, 11)
    )
    supported = msgspec.structs.replace(first.scored.group.completions[0], supports=(b"\x00\xff\x00\x00", b""))
    group = msgspec.structs.replace(first.scored.group, completions=(supported, first.scored.group.completions[1]))
    first = msgspec.structs.replace(first, scored=msgspec.structs.replace(first.scored, group=group))
    path = write_checkpoint(tmp_path, msgspec.structs.replace(snapshot(1), replay=(first, second)), keep_last=3)
    found = read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER)
    assert found.replay == (first, second)
    corrupt(path / "replay.msgpack")
    with pytest.raises(CheckpointError, match=r"replay\.msgpack is not what was written"):
        read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER)
    plain = write_checkpoint(tmp_path, snapshot(2), keep_last=3)
    assert read_checkpoint(plain, expected=parameters(), adapter_config=ADAPTER).replay == ()


def test_the_newest_is_found_and_the_oldest_are_removed(tmp_path: Path) -> None:
    """keep_last counts the one just written; steps sort as numbers."""
    assert latest(tmp_path / "absent").path is None
    for step in (999_999, 1_000_000, 1_000_001):
        write_checkpoint(tmp_path, snapshot(step), keep_last=2)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]
    assert latest(tmp_path).path == tmp_path / "step-1000001"


@pytest.mark.parametrize(
    "file", ["adapters.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json", "MANIFEST.json"]
)
def test_one_changed_byte_is_noticed_in_every_file(tmp_path: Path, file: str) -> None:
    """The damaged one is stepped over with a warning, and refused when named."""
    for step in (10, 20):
        write_checkpoint(tmp_path, snapshot(step), keep_last=3)
    damaged = tmp_path / "step-000020"
    corrupt(damaged / file)
    found = latest(tmp_path)
    assert found.path == tmp_path / "step-000010"
    assert len(found.warnings) == 1
    assert "step-000020 is damaged" in found.warnings[0]
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(damaged, expected=parameters(), adapter_config=ADAPTER)


@pytest.mark.parametrize("file", ["adapters.safetensors", "state.json", "MANIFEST.json"])
def test_a_missing_file_is_noticed(tmp_path: Path, file: str) -> None:
    """A checkpoint without one of its files is no checkpoint."""
    write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    (tmp_path / "step-000020" / file).unlink()
    found = latest(tmp_path)
    assert found.path is None
    assert f"{file} is missing" in found.warnings[0]


def test_pruning_never_removes_the_newest_whole_one(tmp_path: Path) -> None:
    """However many damaged ones are newer, and however few may stay."""
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, snapshot(step), keep_last=9)
    corrupt(tmp_path / "step-000030" / "adapters.safetensors")
    prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-000020", "step-000030"]
    corrupt(tmp_path / "step-000020" / "state.json")
    prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-000020", "step-000030"]


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever file the disk fills up: one clear error, nothing half written, nothing lost."""
    write_checkpoint(tmp_path, snapshot(10), keep_last=1)
    write_file = durable_files.write_file
    for failing in ("adapters.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"):

        def fill_up(path: Path, chunks: Any, failing: str = failing) -> Any:
            if path.name == failing:
                path.write_bytes(b"half")
                raise OSError(28, "No space left on device")
            return write_file(path, chunks)

        for module in ("adapters", "checkpoints"):
            monkeypatch.setattr(f"clotho.storage.{module}.write_file", fill_up)
        with pytest.raises(RunDirectoryError, match=r"No space left on device; earlier checkpoints are untouched"):
            write_checkpoint(tmp_path, snapshot(20), keep_last=1)
        assert names(tmp_path) == ["step-000010"]
    assert latest(tmp_path).path == tmp_path / "step-000010"


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    """A run resumed from before a damaged checkpoint comes past its step again."""
    write_checkpoint(tmp_path, snapshot(20, value=1.0), keep_last=3)
    corrupt(tmp_path / "step-000020" / "adapters.safetensors")
    path = write_checkpoint(tmp_path, snapshot(20, value=2.0), keep_last=3)
    found = read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER)
    assert mx.array_equal(found.parameters["layers"][1]["lora_a"], mx.full((3, 2), 2.0)).item()
    assert names(tmp_path) == ["step-000020"]


def test_a_kill_between_the_two_renames_of_a_replacement_is_undone(tmp_path: Path) -> None:
    """What made way for a successor that never came is put back; what is half done goes."""
    path = write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    path.rename(tmp_path / f".step-000020{durable_files.REPLACED}abcd")
    shutil.copytree(tmp_path / f".step-000020{durable_files.REPLACED}abcd", tmp_path / ".step-000020.unfinished-ab")
    assert latest(tmp_path).path is None
    durable_files.tidy(tmp_path)
    assert names(tmp_path) == ["step-000020"]
    assert latest(tmp_path).path == path


def test_another_policy_is_refused(tmp_path: Path) -> None:
    """Another rank, or other tensors, are named."""
    path = write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    assert ADAPTER.lora_parameters is not None
    other = msgspec.structs.replace(ADAPTER, lora_parameters=msgspec.structs.replace(ADAPTER.lora_parameters, rank=9))
    with pytest.raises(CheckpointError, match="rank is 2, not 9"):
        read_checkpoint(path, expected=parameters(), adapter_config=other)
    with pytest.raises(CheckpointError, match=r"layers\.2\.w is missing"):
        read_checkpoint(
            path, expected={"layers": [*parameters()["layers"], {"w": mx.ones((1,))}]}, adapter_config=ADAPTER
        )


def test_changed_inputs_are_refused_by_name() -> None:
    """A dataset that was edited would give group numbers another meaning."""
    refuse_other_inputs(state(1), {"model": "m", "dataset": "d"})
    with pytest.raises(CheckpointError, match="changed since the run began: dataset"):
        refuse_other_inputs(state(1), {"model": "m", "dataset": "e"})
    with pytest.raises(CheckpointError, match="tokenizer"):
        refuse_other_inputs(state(1), {"model": "m", "dataset": "d", "tokenizer": "t"})


@pytest.mark.parametrize("name", ["with space", "ünïcödé", "a" * 100])
def test_unusual_paths_work(tmp_path: Path, name: str) -> None:
    """Spaces, other scripts and links."""
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / name)
    write_checkpoint(tmp_path / "link", snapshot(1), keep_last=1)
    assert latest(tmp_path / name).path == tmp_path / name / "step-000001"
