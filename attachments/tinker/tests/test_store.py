"""What is saved for clients: how long, in which order, and what is said about it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attachments.tinker.bodies import LoraFields
from attachments.tinker.store import Kind, SavedCheckpoint, SavedRun, TinkerStore, expiry
from clotho.serving.errors import ApiError
from clotho.storage.atomic_files import UNFINISHED

RUN = SavedRun(model_id="ab:train:1", owner="ann", base_model="policy", lora=LoraFields(rank=4), created=1.0)


@pytest.fixture
def store(tmp_path: Path) -> TinkerStore:
    """A store with one run."""
    made = TinkerStore(tmp_path / "saved")
    made.add(RUN)
    return made


def saved(store: TinkerStore, name: str, *, kind: Kind = "weights", step: int = 0, **fields: Any) -> SavedCheckpoint:
    """Record a checkpoint without files."""
    found = SavedCheckpoint(run=RUN.model_id, kind=kind, name=name, step=step, **{"created": 1.0, **fields})
    store.place(found).mkdir(parents=True)
    store.change(found)
    return found


def test_a_checkpoint_is_removed_when_it_has_expired(store: TinkerStore) -> None:
    """Others are kept: those that expire later, and those that never do."""
    now = time.time()
    assert expiry(None) == 0.0
    assert expiry(3600) == pytest.approx(now + 3600, abs=60)
    late, never = saved(store, "late", created=2.0, expires=now + 3600), saved(store, "never")
    gone = saved(store, "gone", expires=now - 1)
    assert store.checkpoints(RUN.model_id) == [never, late], "the oldest first"
    assert not store.place(gone).exists()
    with pytest.raises(ApiError):
        store.find(gone.path, "ann")
    assert store.find(late.path, "ann") == late


def test_what_is_left_of_a_model_is_its_newest_state(store: TinkerStore) -> None:
    """With the steps that were lost. Weights for samplers continue no training."""
    store.count(RUN.model_id, 9)
    saved(store, "sampler", kind="sampler_weights", step=8)
    assert "never saved" in store.left(RUN.model_id, "ann")
    states = [saved(store, name, step=step) for name, step in (("a", 3), ("b", 7), ("c", 5))]
    text = store.left(RUN.model_id, "ann")
    assert "9 steps" in text
    assert states[1].path in text


def test_runs_are_those_of_an_owner_the_newest_first(store: TinkerStore) -> None:
    """The empty name sees all."""
    later, other = (replace(RUN, model_id=f"{name}:train:1", created=2.0) for name in ("cd", "ef"))
    other = replace(other, owner="bob", created=3.0)
    for run in (later, other):
        store.add(run)
    assert (store.runs("ann"), store.runs("bob"), store.runs("")) == ([later, RUN], [other], [other, later, RUN])


def test_what_a_killed_server_has_left_half_written_is_removed(store: TinkerStore) -> None:
    """With the weights that belonged to a session; checkpoints stay."""
    kept = saved(store, "kept")
    left = (
        store.scratch("old"),
        store.place(kept).parent / f".other{UNFINISHED}0",
        store.directory(RUN.model_id) / f".x{UNFINISHED}0",
    )
    for place in left:
        place.mkdir(parents=True)
    assert TinkerStore(store.root).checkpoints(RUN.model_id) == [kept]
    assert [place.exists() for place in left] == [False] * 3
