"""The supervisor of a rank: what it notices about the process, and how it starts the rank again."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from attachments.ranks.supervision import RANK_LOST, RankProcess, has_other_ranks, is_lost, resumed

TELL = """
import json, os, socket, sys, time
connection = socket.socket(fileno=int(os.environ["CLOTHO_SUPERVISOR"]))
connection.sendall(json.dumps(FACTS).encode() + b"\\n")
"""


def process(facts: dict[str, object], then: str) -> RankProcess:
    """Start a process that tells its supervisor facts, and then runs a line of Python."""
    return RankProcess([sys.executable, "-S", "-E", "-c", TELL.replace("FACTS", repr(facts)) + then])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--steps", "8"], ["--steps", "8", "--resume"]),
        (["--clean", "--steps", "8"], ["--steps", "8", "--resume"]),
        (["--resume", "--steps=8"], ["--steps=8", "--resume"]),
        (["--resume-step", "4", "--seed", "1"], ["--seed", "1", "--resume"]),
        (["--resume_step=4"], ["--resume"]),
        (["--fork", "a", "--profile", "p"], ["--profile", "p", "--resume"]),
        (["--fork=a", "--run-dir", "d"], ["--run-dir", "d", "--profile", "/runs/d/profile.toml", "--resume"]),
    ],
)
def test_a_run_is_continued_with_its_own_arguments(given: list[str], expected: list[str]) -> None:
    """Flags that start a run differently are replaced by `--resume`; a fork keeps the profile of its source."""
    assert resumed(given, "/runs/d") == expected


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
        (RANK_LOST, True),
        (-signal.SIGKILL, True),
        (-signal.SIGSEGV, True),
        (-signal.SIGTERM, False),
        (0, False),
        (2, False),
    ],
)
def test_a_lost_rank_is_started_again_and_an_ended_one_is_not(status: int, expected: bool) -> None:
    """The run decides about its own failures; nobody starts a process again that somebody has terminated."""
    assert is_lost(status) is expected


def test_a_supervisor_learns_the_facts_of_its_rank() -> None:
    """Facts that are told before the end of the process are known after it."""
    facts = {"restarts": 3, "hang_seconds": 60.0, "run_directory": "/runs/d", "problem": "lost rank 1", "ended": True}
    found = process(facts, f"sys.exit({RANK_LOST})")
    assert found.wait() == RANK_LOST
    assert (found.restarts, found.run_directory, found.problem, found.ended) == (3, "/runs/d", "lost rank 1", True)


def test_a_process_without_signs_of_life_is_killed() -> None:
    """The limit applies as soon as the process has told it."""
    found = process({"hang_seconds": 0.2}, "time.sleep(600)")
    assert found.wait() == -signal.SIGKILL
    assert "no heartbeat" in found.problem
