"""Many programs at once: none fails, and none starves."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from attachments.tinker.tests.load import Programs
from attachments.tinker.tests.tinker_server import tinker_server
from tests import saved_models

ROUNDS = 6


def test_programs_that_train_and_sample_at_once_have_equal_shares(tmp_path: Path) -> None:
    """When the first has made its rounds, every other one has made half as many; then all states are saved.

    Rounds of training are compared with each other, and rounds of sampling; each program has an adapter of its own.
    """
    saved_models.save(tmp_path / "model", dtype=mx.float32)
    with tinker_server(tmp_path / "model", tmp_path / "saved") as live:
        load = Programs(live.url, "policy", trainers=2, samplers=3, rounds=ROUNDS)
        load.ending.wait()
        made = {kind: [len(one) for one in load.made(kind)] for kind in ("train", "sample")}
        load.end()
    assert load.failures == []
    assert len(load.kept) == 2
    for kind, count in (("train", 2), ("sample", 3)):
        assert len(made[kind]) == count
        assert min(made[kind]) >= max(made[kind]) / 2, made
