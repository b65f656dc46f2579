"""A supervisor: what it notices about its process, and with which arguments it starts the process again."""

from __future__ import annotations

import math
import signal
import sys

import pytest

from training_run.supervision.restarting import Facts, SupervisedProcess, ending, exit_status, resumed, was_killed

VARIABLE = "TEST_SUPERVISOR"

TELL = f"""
import json, os, socket, sys, time
connection = socket.socket(fileno=int(os.environ["{VARIABLE}"]))
connection.sendall(json.dumps(FACTS).encode() + b"\\n")
"""


def process(facts: dict[str, object], then: str, *, start_seconds: float = 60.0) -> SupervisedProcess:
    """Start a process that tells its supervisor facts, and then runs a line of Python."""
    command = [sys.executable, "-S", "-E", "-c", TELL.replace("FACTS", repr(facts)) + then]
    return SupervisedProcess(command, variable=VARIABLE, start_seconds=start_seconds)


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


def test_a_supervisor_learns_the_facts_of_its_process() -> None:
    """Facts that are told before the end of the process are known after it."""
    facts = Facts(restarts=3, hang_seconds=60.0, run_directory="/d", problem="lost rank 1", ended=True, turn_ms=250.0)
    found = process(facts._asdict(), "sys.exit(75)")
    assert found.wait() == 75
    assert found.facts == facts


def test_a_process_without_signs_of_life_is_killed() -> None:
    """The limit applies as soon as the process has told it."""
    found = process({"hang_seconds": 0.2}, "time.sleep(600)")
    assert found.wait() == -signal.SIGKILL
    assert "no heartbeat" in found.facts.problem


def test_signals_are_passed_on_except_before_a_first_heartbeat_is_due() -> None:
    """While a process joins others, it hears no signal: it is killed."""
    waits = "time.sleep(600)"
    for start_seconds, expected in ((math.inf, -signal.SIGTERM), (60.0, -signal.SIGKILL)):
        found = process({}, waits, start_seconds=start_seconds)
        found.send(signal.SIGTERM)
        assert found.wait() == expected


@pytest.mark.parametrize(
    ("status", "killed", "received", "expected"),
    [
        (0, False, 0, 0),
        (2, False, 0, 2),
        (-signal.SIGABRT, True, 0, 128 + signal.SIGABRT),
        (-signal.SIGKILL, True, 0, 128 + signal.SIGKILL),
        (-signal.SIGTERM, False, 0, 128 + signal.SIGTERM),
        (-signal.SIGKILL, True, signal.SIGINT, 128 + signal.SIGINT),
        (0, False, signal.SIGTERM, 0),
    ],
)
def test_a_supervisor_ends_with_the_status_that_a_shell_shows(
    status: int, killed: bool, received: int, expected: int
) -> None:
    """Nobody starts a process again that somebody has terminated."""
    assert was_killed(status) is killed
    assert exit_status(status, received) == expected


def test_the_end_of_a_process_is_named() -> None:
    """By its status or its signal; Linux has signals without a name."""
    assert [ending(status) for status in (3, -signal.SIGABRT, -60)] == [
        "ended with status 3", "was ended by SIGABRT", "was ended by signal 60",
    ]  # fmt: skip
