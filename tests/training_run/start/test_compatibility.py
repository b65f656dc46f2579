"""What a resumed run may change, and what not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocols.errors import CheckpointError
from training_run.profile.mounted import with_attachments
from training_run.profile.schema import Profile
from training_run.start.resume import refuse_if_incompatible

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "d"},
    "rewards": [{"name": "exact"}, {"name": "format"}],
}


def profile(**changes: Any) -> Profile:
    """A profile with these keys."""
    return msgspec.convert(BASE | changes, with_attachments(Profile))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 500, "run_dir": "elsewhere", "async": False},
        {"monitor": {"display": "none"}, "server": {"type": "http", "port": 1}, "checkpoint": {"interval": 1}},
        {"eval": {"type": "off"}, "engine": {"max_num_seqs": 3}, "queues": {"prompts": 1}},
        {"learner": {"micro_batch_tokens": 64, "max_bad_steps": 1}, "policy": {"grad_checkpoint": True}},
        {"learner": {"max_staleness": 8}},
        {"learner": {"layout": "packed"}, "collapse_detection": {"type": "stop", "window": 9}},
        {"rewards": [{"name": "exact", "run_in": "thread", "max_workers": 1}, {"name": "format"}]},
        {"rewards": [{"name": "exact", "memory_limit_mb": 9}, {"name": "format"}]},
        {"cluster": {"type": "ray", "address": "10.0.0.1:6379"}},
        {"cluster": {"type": "ray"}, "rewards": [{"name": "exact", "where": "cluster"}, {"name": "format"}]},
    ],
)
def test_how_a_run_is_run_may_change(changes: dict[str, Any]) -> None:
    """Its length, its display, its limits."""
    refuse_if_incompatible(profile(), profile(**changes), run=Path("runs/x"))


ENVIRONMENTS: dict[str, Any] = {"environments": [{"name": "e", "script": "e.py"}]}
STARTED = ENVIRONMENTS | {"atropos": {"type": "start", "python": "p"}}
CONNECTED = ENVIRONMENTS | {"atropos": {"type": "connect", "python": "q", "url": "http://127.0.0.1:1", "reset": False}}


@pytest.mark.parametrize(("old", "new"), [(STARTED, CONNECTED), (CONNECTED, STARTED)])
def test_a_resumed_run_may_start_the_api_server_or_connect_to_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    """The groups of the environments are the same."""
    refuse_if_incompatible(profile(**old), profile(**new), run=Path("runs/x"))


@pytest.mark.parametrize("kind", ["off", "mock"])
def test_a_resumed_run_may_not_change_the_source_of_its_groups(kind: str) -> None:
    """Environments and data.train have different problems."""
    with pytest.raises(CheckpointError, match=r"atropos\.type: connect -> "):
        refuse_if_incompatible(profile(**CONNECTED), profile(atropos={"type": kind}), run=Path("runs/x"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 3}, "seed: 0 -> 3"),
        ({"model": {"path": "other"}}, "model.path: m -> other"),
        ({"policy": {"method": {"type": "lora", "rank": 8, "scale": 2.0}}}, "policy.method.rank: 16 -> 8; "),
        ({"sampling": {"group_size": 4}}, "sampling.group_size: 8 -> 4"),
        ({"learner": {"batch_size": 2}}, "learner.batch_size: 16 -> 2"),
        ({"replay": {"type": "buffer", "capacity": 8}}, "replay.capacity: None -> 8"),
        ({"data": {"train": "other"}}, "data.train: d -> other"),
        ({"rewards": [{"name": "exact"}, {"name": "jaccard"}]}, "rewards.1.name: format -> jaccard"),
        ({"rewards": [{"name": "exact"}]}, "rewards.1.name: format -> None"),
    ],
)
def test_what_is_learnt_may_not_change(changes: dict[str, Any], words: str) -> None:
    """Every differing key is listed with both values. A fork is offered where it has the same weights."""
    with pytest.raises(CheckpointError) as caught:
        refuse_if_incompatible(profile(), profile(**changes), run=Path("runs/x"))
    assert words in str(caught.value)
    assert ("from its state" in str(caught.value)) != words.startswith(("model", "policy"))
