"""When ranks take a process over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from attachments.ranks import attachment
from attachments.ranks.supervision import CONNECTION, RANK


@pytest.mark.parametrize(("rank", "hosts", "connection"), [("0", 1, ""), ("0", 2, "3")], ids=["alone", "rank 0"])
def test_the_process_of_the_run_is_left_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, hosts: int, connection: str
) -> None:
    """A single process of `mlx.launch`, and rank 0 under its supervisor."""
    (tmp_path / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in range(hosts)]))
    monkeypatch.setenv(RANK, rank)
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    if connection:
        monkeypatch.setenv(CONNECTION, connection)
    assert attachment.launch(["--steps", "1"]) is None


def test_the_process_of_mlx_launch_becomes_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts the process of the rank, with the arguments of the run, and returns its status."""
    (tmp_path / "hosts.json").write_text(json.dumps([["127.0.0.1:1"], ["127.0.0.1:2"]]))
    monkeypatch.setenv(RANK, "1")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    given: list[Sequence[str]] = []

    def supervise(argv: Sequence[str]) -> int:
        given.append(argv)
        return 7

    monkeypatch.setattr("attachments.ranks.supervision.supervise", supervise)
    assert attachment.launch(["--steps", "1"]) == 7
    assert given == [["--steps", "1"]]
