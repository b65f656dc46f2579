"""The supervisor of a rank: which process it looks after, and which end of it is followed by another start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from attachments.ranks.supervision import RANK_LOST, has_other_ranks, is_lost


@pytest.mark.parametrize(
    ("hosts", "variables", "expected"),
    [
        ('[["127.0.0.1:1"], ["127.0.0.1:2"]]', {"MLX_RANK": "0"}, True),
        ("\n", {"MLX_RANK": "0"}, False),
        ('[["127.0.0.1:1"], ["127.0.0.1:2"]]', {}, False),
        ("", {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "127.0.0.1:1"}, True),
        ("", {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2"}, True),
        ("", {"MLX_RANK": "0", "MLX_WORLD_SIZE": "1"}, False),
    ],
)
def test_a_process_without_other_ranks_is_an_ordinary_run(
    tmp_path: Path, hosts: str, variables: dict[str, str], expected: bool
) -> None:
    """`mlx.launch -n 1` writes an empty host file."""
    (tmp_path / "hosts").write_text(hosts, encoding="utf-8")
    assert has_other_ranks({"MLX_HOSTFILE": str(tmp_path / "hosts"), **variables}) is expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (RANK_LOST, True), (-signal.SIGKILL, True), (-signal.SIGSEGV, True), (-signal.SIGTERM, False), (0, False),
        (2, False),
    ],
)  # fmt: skip
def test_a_lost_rank_is_started_again_and_an_ended_one_is_not(status: int, expected: bool) -> None:
    """The run decides about its own failures; nobody starts a process again that somebody has terminated."""
    assert is_lost(status) is expected
