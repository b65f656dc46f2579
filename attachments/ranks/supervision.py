"""The supervisor of a rank.

`mlx.launch` starts a supervisor per rank. The supervisor starts the process of the rank, and starts it again if the
rank was lost: its process was killed, it sent no heartbeat, or it ended because another rank was lost. Collectives
that do not end cannot be cancelled; they end with their process. The module uses the standard library only, because a
supervisor lives beside a process that needs the memory.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence

from training_run.supervision.restarting import (
    PASSED_ON,
    PassedSignals,
    SupervisedProcess,
    ending,
    exit_status,
    program,
    resumed,
    say,
    was_killed,
)

RANK = "MLX_RANK"
"""Environment variable with the rank of this process; `mlx.launch` sets it."""
CONNECTION = "CLOTHO_SUPERVISOR"
"""Environment variable with the file descriptor of the connection to the supervisor."""

RANK_LOST = 75
"""Exit status of a rank that ends because another rank was lost, or did not join."""

START_SECONDS = 240.0
"""Time until the first heartbeat of a rank, which comes when all ranks have joined. Until then, it hears no signal."""


def has_other_ranks(environment: Mapping[str, str]) -> bool:
    """Whether `mlx.launch` started this process as one of several ranks."""
    if RANK not in environment:
        return False
    if "MLX_JACCL_COORDINATOR" in environment or int(environment.get("MLX_WORLD_SIZE", 1)) > 1:
        return True
    try:
        with open(environment.get("MLX_HOSTFILE", os.devnull), encoding="utf-8") as file:
            return len(json.loads(file.read() or "[]")) > 1
    except (OSError, ValueError):
        return False


def is_rank() -> bool:
    """Whether this is the process of a rank, which a supervisor started."""
    return CONNECTION in os.environ


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ[RANK])


def supervise(arguments: Sequence[str]) -> int:
    """Run this rank until it ends, starting it again when it is lost; return its exit status.

    arguments: of the program, without its name. Rank 0 is started again with `--resume` if it has a checkpoint. Signals
    are passed on to rank 0, which drains or stops the run; other ranks end with rank 0.
    """
    command = program(arguments)
    signals = PassedSignals(PASSED_ON if rank() == 0 else (signal.SIGTERM,))
    restarts = 0
    while True:
        process = SupervisedProcess([*command, *arguments], variable=CONNECTION, start_seconds=START_SECONDS)
        signals.process = process
        status = process.wait()
        facts = process.facts
        if signals.received or facts.ended or not is_lost(status):
            return exit_status(status, signals.received)
        restarts += 1
        what = f"rank {rank()} {facts.problem or ending(status)}"
        if restarts > facts.restarts:
            say(f"{what}; it is not started again after {facts.restarts} restarts (distributed.restarts)")
            return 1
        if facts.run_directory:
            arguments = resumed(arguments, facts.run_directory)
        say(f"{what}; restart {restarts} of {facts.restarts}")


def is_lost(status: int) -> bool:
    """Whether a process with this status is started again: another rank was lost, or a signal ended the process."""
    return status == RANK_LOST or was_killed(status)
