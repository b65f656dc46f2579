"""Checkpoints are complete or absent, exact, and the newest complete one is never lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from clotho.models.model_files import SAMPLE_BYTES, model_fingerprint, tokenizer_fingerprint
from clotho.storage import atomic_files
from clotho.storage.tensors import write_tensors
from protocols.accounting import LedgerState
from protocols.checkpoint import Part
from protocols.errors import CheckpointError, RunDirectoryError
from tests.training.policies_and_groups import same_bits
from tests.training_run.directory.made_checkpoints import ADAPTER, corrupt, names, parameters, snapshot, state
from training_run.directory import checkpoints
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.directory.checkpoints import (
    find_damage,
    latest_checkpoint,
    prune,
    read_checkpoint,
    read_state,
    record_newest,
    recorded_newest,
    require_same_inputs,
    write_checkpoint,
)


class Kept(Struct, frozen=True, kw_only=True):
    """What an attachment keeps."""

    number: float


def test_a_checkpoint_keeps_every_bit(tmp_path: Path) -> None:
    """State, parameters and optimizer, with their dtypes."""
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


def test_a_checkpoint_keeps_the_parts_of_attachments(tmp_path: Path) -> None:
    """Values and arrays, each in a file of its own; a part without arrays has one file."""
    arrays = {"a": mx.array([1.5, -0.0]), "b.c": mx.full((2, 1), 7, dtype=mx.uint8)}
    parts = {"one": Part(value=Kept(number=1 / 3), arrays=arrays), "two": Part(value=Kept(number=2.0))}
    path = write_checkpoint(tmp_path, replace(snapshot(1), parts=parts), keep_last=3)
    found = CheckpointParts(read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER).parts)
    one, two = found.saved("one", Kept), found.saved("two", Kept)
    assert one is not None
    assert two is not None
    assert (one.value, two.value) == (Kept(number=1 / 3), Kept(number=2.0))
    assert same_bits(dict(one.arrays), arrays)
    assert not two.arrays
    assert not (path / "two.part.safetensors").exists()
    corrupt(path / "one.part.msgpack")
    with pytest.raises(CheckpointError, match=r"one\.part\.msgpack does not match"):
        read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER)
    plain = write_checkpoint(tmp_path, snapshot(2), keep_last=3)
    assert read_checkpoint(plain, expected=parameters(), adapter_config=ADAPTER).parts == {}


def test_a_part_that_was_read_can_be_written_again_without_its_type(tmp_path: Path) -> None:
    """As a fork does, before any attachment has read it."""
    written = replace(snapshot(1), parts={"one": Part(value=Kept(number=1.0), arrays={"a": mx.array([1.0])})})
    first = write_checkpoint(tmp_path, written, keep_last=3)
    found = read_checkpoint(first, expected=parameters(), adapter_config=ADAPTER).parts
    second = write_checkpoint(tmp_path, replace(snapshot(2), parts=found), keep_last=3)
    for name in ("one.part.msgpack", "one.part.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_state_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier checkpoint stays the newest one."""
    first = write_checkpoint(tmp_path, snapshot(50), keep_last=3)
    monkeypatch.setattr(checkpoints, "JSON_LIMIT", 10_000)
    longer = replace(snapshot(60), state=state(60, in_flight=dict.fromkeys(range(1000), "environment")))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        write_checkpoint(tmp_path, longer, keep_last=3)
    assert names(tmp_path) == ["step-000050"]
    assert latest_checkpoint(tmp_path).path == first


def test_the_newest_checkpoint_is_found_and_the_oldest_are_removed(tmp_path: Path) -> None:
    """`keep_last` includes the newest; steps are compared as numbers."""
    assert latest_checkpoint(tmp_path / "absent").path is None
    for step in (999_999, 1_000_000, 1_000_001):
        write_checkpoint(tmp_path, snapshot(step), keep_last=2)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]
    assert latest_checkpoint(tmp_path).path == tmp_path / "step-1000001"


@pytest.mark.parametrize(
    "file", ["adapters.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json", "MANIFEST.json"]
)
def test_a_changed_byte_in_any_file_is_detected(tmp_path: Path, file: str) -> None:
    """The damaged checkpoint is skipped with a warning, and reading it fails."""
    for step in (10, 20):
        write_checkpoint(tmp_path, snapshot(step), keep_last=3)
    damaged = tmp_path / "step-000020"
    corrupt(damaged / file)
    found = latest_checkpoint(tmp_path)
    assert found.path == tmp_path / "step-000010"
    assert len(found.warnings) == 1
    assert "step-000020 is damaged" in found.warnings[0]
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(damaged, expected=parameters(), adapter_config=ADAPTER)


@pytest.mark.parametrize("file", ["adapters.safetensors", "state.json", "MANIFEST.json"])
def test_a_missing_file_is_detected(tmp_path: Path, file: str) -> None:
    """The checkpoint is skipped."""
    write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    (tmp_path / "step-000020" / file).unlink()
    found = latest_checkpoint(tmp_path)
    assert found.path is None
    assert f"{file} is missing" in found.warnings[0]


def test_pruning_keeps_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """Even if newer checkpoints are damaged and `keep_last` is 1."""
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, snapshot(step), keep_last=9)
    corrupt(tmp_path / "step-000030" / "adapters.safetensors")
    prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-000020", "step-000030"]
    corrupt(tmp_path / "step-000020" / "state.json")
    prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-000020", "step-000030"]


@pytest.mark.parametrize("name", ["a\0b", "/etc/passwd", "..", "state.json/x"])
def test_a_manifest_cannot_name_a_file_outside_its_directory(tmp_path: Path, name: str) -> None:
    """The checkpoint is damaged, and no such file is read."""
    path = write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    manifest = msgspec.json.decode((path / "MANIFEST.json").read_bytes())
    manifest["files"].append({"name": name, "size": 0, "sha256": ""})
    (path / "MANIFEST.json").write_bytes(msgspec.json.encode(manifest))
    damage = find_damage(path)
    assert damage is not None
    assert "is not a file of the checkpoint" in damage
    assert damage.isprintable()


@pytest.mark.parametrize("file", ["state.json", "adapters.safetensors", "one.part.msgpack", "one.part.safetensors"])
def test_a_manifest_lists_every_file_that_is_read(tmp_path: Path, file: str) -> None:
    """A file without a digest could be damaged unnoticed."""
    parts = {"one": Part(value=Kept(number=1.0), arrays={"a": mx.array([1.0])})}
    path = write_checkpoint(tmp_path, replace(snapshot(20), parts=parts), keep_last=3)
    manifest = msgspec.json.decode((path / "MANIFEST.json").read_bytes())
    manifest["files"] = [entry for entry in manifest["files"] if entry["name"] != file]
    (path / "MANIFEST.json").write_bytes(msgspec.json.encode(manifest))
    assert find_damage(path) == f"MANIFEST.json does not list {file}"


@pytest.mark.parametrize("file", ["state.json", "MANIFEST.json", "adapters.safetensors"])
def test_special_files_in_a_checkpoint_are_damage(tmp_path: Path, file: str) -> None:
    """A named pipe and a device have no end; neither is read."""
    path = write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    (path / file).unlink()
    os.mkfifo(path / file)
    assert find_damage(path) is not None
    (path / file).unlink()
    (path / file).symlink_to("/dev/zero")
    assert find_damage(path) is not None
    assert latest_checkpoint(tmp_path).path is None


def test_the_group_accounting_of_a_state_adds_up(tmp_path: Path) -> None:
    """Each group that has ended was trained on or discarded."""
    ledger = LedgerState(all_ended_below=7, ended_above=(9,), trained=6, discarded={"stale": 3})
    write_checkpoint(tmp_path, replace(snapshot(20), state=state(20, ledger=ledger)), keep_last=3)
    with pytest.raises(CheckpointError, match="does not add up"):
        read_state(tmp_path / "step-000020")


def test_pruning_ignores_a_renamed_checkpoint_and_entries_that_are_not_directories(tmp_path: Path) -> None:
    """A run with such entries still writes checkpoints, and keeps the newest ones by their state."""
    for step in (10, 20):
        write_checkpoint(tmp_path, snapshot(step), keep_last=9)
    (tmp_path / "step-000010").rename(tmp_path / "step-999999")
    (tmp_path / "step-000001").write_text("a file")
    (tmp_path / "step-000002").symlink_to(tmp_path / "step-000020")
    write_checkpoint(tmp_path, snapshot(30), keep_last=1)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000030", "step-999999"]
    assert latest_checkpoint(tmp_path).path == tmp_path / "step-000030"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_any_sync_keeps_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Whichever sync of a checkpoint fails: one error. The next attempt succeeds."""
    write_checkpoint(tmp_path, snapshot(10), keep_last=2)
    synced = 0
    for failing in count():
        disk = RefusingDisk(code, after=failing)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", disk)
            try:
                write_checkpoint(tmp_path, snapshot(20 + failing), keep_last=2)
            except RunDirectoryError as error:
                assert os.strerror(code) in str(error)  # noqa: PT017, the loop ends at the attempt without an error
            else:
                synced = failing
                break
        found = latest_checkpoint(tmp_path)
        assert found.path is not None
        assert found.warnings == ()
        assert not [name for name in names(tmp_path) if "unfinished" in name]
    assert synced >= 7, "five files and two directories"
    assert latest_checkpoint(tmp_path).path == tmp_path / f"step-{20 + synced:06d}"


class RefusingDisk:
    """Replacement for os.fsync that fails after some calls."""

    def __init__(self, code: int, *, after: int) -> None:
        self._code, self._left, self._sync = code, after, os.fsync

    def __call__(self, descriptor: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise OSError(self._code, os.strerror(self._code))
        self._sync(descriptor)


def test_the_step_of_the_newest_checkpoint_is_recorded(tmp_path: Path) -> None:
    """Without a file there was no checkpoint. A file without a step still tells that there was one."""
    path = tmp_path / ".newest_checkpoint"
    assert recorded_newest(path) is None
    record_newest(path, 4)
    record_newest(path, 1_000_000)
    assert recorded_newest(path) == 1_000_000
    for damaged in (b"", bytes(8), b"x", b"-5"):
        path.write_bytes(damaged)
        assert recorded_newest(path) == 0


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file fails: one error, no partial checkpoint."""
    write_checkpoint(tmp_path, snapshot(10), keep_last=1)
    for failing in ("adapters.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"):

        def fill_up(original: Callable[..., Any], path: Path, content: Any, failing: str = failing) -> Any:
            if path.name == failing:
                path.write_bytes(b"half")
                raise OSError(28, "No space left on device")
            return original(path, content)

        for module in ("clotho.storage.adapters", "training_run.directory.checkpoints"):
            for function in (atomic_files.write_file, write_tensors):
                monkeypatch.setattr(f"{module}.{function.__name__}", partial(fill_up, function))
        with pytest.raises(RunDirectoryError, match=r"earlier checkpoints are unchanged: No space left on device"):
            write_checkpoint(tmp_path, snapshot(20), keep_last=1)
        assert names(tmp_path) == ["step-000010"]
    assert latest_checkpoint(tmp_path).path == tmp_path / "step-000010"


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    """A run that resumes before a damaged checkpoint reaches its step again."""
    write_checkpoint(tmp_path, snapshot(20, value=1.0), keep_last=3)
    corrupt(tmp_path / "step-000020" / "adapters.safetensors")
    path = write_checkpoint(tmp_path, snapshot(20, value=2.0), keep_last=3)
    found = read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER)
    assert mx.array_equal(found.parameters["layers"][1]["lora_a"], mx.full((3, 2), 2.0)).item()
    assert names(tmp_path) == ["step-000020"]


def test_a_kill_between_the_two_renames_is_undone(tmp_path: Path) -> None:
    """The replaced directory is restored, and the unfinished one is removed."""
    path = write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    path.rename(tmp_path / f".step-000020{atomic_files.REPLACED}abcd")
    shutil.copytree(tmp_path / f".step-000020{atomic_files.REPLACED}abcd", tmp_path / ".step-000020.unfinished-ab")
    assert latest_checkpoint(tmp_path).path is None
    atomic_files.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-000020"]
    assert latest_checkpoint(tmp_path).path == path


def test_a_checkpoint_of_another_policy_is_refused(tmp_path: Path) -> None:
    """The message names the different rank or tensor."""
    path = write_checkpoint(tmp_path, snapshot(20), keep_last=3)
    assert ADAPTER.lora_parameters is not None
    other = replace(ADAPTER, lora_parameters=replace(ADAPTER.lora_parameters, rank=9))
    with pytest.raises(CheckpointError, match="rank is 2, not 9"):
        read_checkpoint(path, expected=parameters(), adapter_config=other)
    with pytest.raises(CheckpointError, match=r"layers\.2\.w is missing"):
        read_checkpoint(
            path, expected={"layers": [*parameters()["layers"], {"w": mx.ones((1,))}]}, adapter_config=ADAPTER
        )


def test_changed_inputs_are_refused_by_name() -> None:
    """Model, tokenizer and dataset must be the same."""
    require_same_inputs(state(1), {"model": "m", "dataset": "d"})
    with pytest.raises(CheckpointError, match="inputs changed since the start of the run: dataset"):
        require_same_inputs(state(1), {"model": "m", "dataset": "e"})
    with pytest.raises(CheckpointError, match="tokenizer"):
        require_same_inputs(state(1), {"model": "m", "dataset": "d", "tokenizer": "t"})


def test_the_model_fingerprint_covers_configuration_and_weights(tmp_path: Path) -> None:
    """Changes of the tokenizer or of other files do not matter."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 * SAMPLE_BYTES))
    before = model_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("")
    assert model_fingerprint(tmp_path) == before
    for position in (0, 3 * SAMPLE_BYTES - 1):
        contents = bytearray(3 * SAMPLE_BYTES)
        contents[position] = 1
        weights.write_bytes(contents)
        assert model_fingerprint(tmp_path) != before
    weights.write_bytes(bytes(3 * SAMPLE_BYTES))
    (tmp_path / "config.json").write_text("{ }")
    assert model_fingerprint(tmp_path) != before


def test_the_tokenizer_fingerprint_covers_vocabulary_and_template(tmp_path: Path) -> None:
    """The chat template determines the prompts."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("a")
    before = tokenizer_fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("b")
    assert tokenizer_fingerprint(tmp_path) != before


def test_the_fingerprints_of_a_gguf_file_do_not_depend_on_its_name(tmp_path: Path) -> None:
    """Weights are sampled at the end of the file, metadata and tokenizer at its beginning."""
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(bytes(3 * SAMPLE_BYTES))
    two.write_bytes(bytes(3 * SAMPLE_BYTES))
    assert model_fingerprint(one) == model_fingerprint(two)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)
    two.write_bytes(bytes(3 * SAMPLE_BYTES - 1) + b"1")
    assert model_fingerprint(one) != model_fingerprint(two)
    two.write_bytes(b"1" + bytes(3 * SAMPLE_BYTES - 1))
    assert model_fingerprint(one) != model_fingerprint(two)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(two)


def test_the_tokenizer_fingerprint_covers_a_chat_template_of_the_profile(tmp_path: Path) -> None:
    """A file that replaces the template of the model, for a directory and for a GGUF file."""
    template, model, gguf = tmp_path / "chat.jinja", tmp_path / "model", tmp_path / "model.gguf"
    template.write_text("{{ messages }}")
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    gguf.write_bytes(b"GGUF")
    for files in (model, gguf):
        assert tokenizer_fingerprint(files) != tokenizer_fingerprint(files, str(template))
