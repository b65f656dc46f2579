"""The supervisor of a rank, and the rank's end of the connection to its supervisor.

`mlx.launch` starts a supervisor per rank. The supervisor starts the process of the rank, and starts it again if the
rank was lost: its process was killed, it sent no heartbeat, or it ended because another rank was lost. Collectives
that do not end cannot be cancelled; they end with their process. The module uses the standard library only, because a
supervisor lives beside a process that needs the memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

RANK = "MLX_RANK"
"""Environment variable with the rank of this process; `mlx.launch` sets it."""
CONNECTION = "CLOTHO_SUPERVISOR"
"""Environment variable with the file descriptor of the connection to the supervisor."""

RANK_LOST = 75
"""Exit status of a rank that ends because another rank was lost, or did not join."""

START_SECONDS = 240.0
"""Time until the first heartbeat of a rank, which comes when all ranks have joined."""
POLL_SECONDS = 0.1
SUSPENDED_SECONDS = 2.0
"""A process whose periodic check is this late was suspended itself; silence of others in this time means nothing."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

    arguments: of the program, without its name. Rank 0 is started again with `--resume` if it has a checkpoint.
    """
    words = sys.orig_argv[1:]
    program = [sys.executable, *words[: len(words) - len(arguments)]]
    signals = _Signals()
    restarts = 0
    while True:
        process = RankProcess([*program, *arguments])
        signals.process = process
        status = process.wait()
        if signals.received and status < 0:
            return 128 + signals.received
        if signals.received or process.ended or not is_lost(status):
            return status if status >= 0 else 128 - status
        restarts += 1
        what = f"rank {rank()} {process.problem or _ending(status)}"
        if restarts > process.restarts:
            _say(f"{what}; it is not started again after {process.restarts} restarts (distributed.restarts)")
            return 1
        if process.run_directory:
            arguments = resumed(arguments, process.run_directory)
        _say(f"{what}; restart {restarts} of {process.restarts}")


class _Signals:
    """Passes signals on to the process of rank 0, which drains or stops the run; other ranks end with rank 0.

    received: number of the last signal, 0 before. A rank whose supervisor has received one is not started again.
    """

    def __init__(self) -> None:
        self.received = 0
        self.process: RankProcess | None = None
        for number in PASSED_ON:
            if rank() == 0 or number == signal.SIGTERM:
                signal.signal(number, self._pass_on)
            else:
                signal.signal(number, signal.SIG_IGN)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.process is not None:
            self.process.send(number)


class RankProcess:
    """The process of a rank, as its supervisor sees it.

    restarts, run_directory: as the process told; the directory is empty until the run can be resumed. ended: the
    process told that the run has ended.
    problem: what was wrong, if the process told it, or if the supervisor ended the process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.restarts, self.run_directory, self.problem, self.ended = 0, "", "", False
        self._hang_seconds, self._buffer = 0.0, b""
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {CONNECTION: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection.settimeout(POLL_SECONDS)

    def send(self, number: int) -> None:
        """Send a signal to the process, if it has not ended. While it joins, it cannot handle signals and is killed."""
        self._process.send_signal(number if self._hang_seconds else signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the process, and end it if it sends no heartbeat; return its status."""
        limit = START_SECONDS
        seen = looked = time.monotonic()
        while self._process.poll() is None:
            heard, now = self._listen(), time.monotonic()
            if heard or now - looked > SUSPENDED_SECONDS:
                seen = now
            looked, limit = now, self._hang_seconds or limit
            if now - seen > limit:
                self.problem = f"sent no heartbeat for {limit:g} s"
                self._process.kill()
                self._process.wait()
        while self._listen():
            pass
        self._connection.close()
        return self._process.returncode

    def _listen(self) -> bool:
        """Read what the process says; return False if it said nothing for a moment."""
        try:
            received = self._connection.recv(65536)
        except TimeoutError:
            return False
        except OSError:
            received = b""
        if not received:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_SECONDS)
            return False
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in filter(None, lines):
            told: dict[str, Any] = json.loads(line)
            self.restarts = told.get("restarts", self.restarts)
            self._hang_seconds = told.get("hang_seconds", self._hang_seconds)
            self.run_directory = told.get("run_directory", self.run_directory)
            self.problem = told.get("problem", self.problem)
            self.ended = told.get("ended", self.ended)
        return True


class RankSupervisor:
    """The supervisor, as the process of the rank sees it."""

    def __init__(self, *, on_end: Callable[[], None]) -> None:
        """on_end: called in a thread if the supervisor ends before this process."""
        number = int(os.environ[CONNECTION])
        os.set_inheritable(number, False)
        self._connection = socket.socket(fileno=number)
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, args=(on_end,), name="supervisor", daemon=True).start()

    def alive(self) -> None:
        """Send a heartbeat."""
        self._write(b"\n")

    def tell(self, **facts: object) -> None:
        """Tell facts about this rank: `hang_seconds`, `restarts`, `run_directory`, `problem`, `ended`."""
        self._write(json.dumps(facts).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock, suppress(OSError):
            self._connection.sendall(line)

    def _watch(self, on_end: Callable[[], None]) -> None:
        with suppress(OSError):
            while self._connection.recv(1):
                pass
        on_end()


def resumed(arguments: Sequence[str], run_directory: str) -> list[str]:
    """Return the arguments that continue the run of a command line.

    A fork takes its profile from the run that it forked, unless the command line has one; so does its continuation.
    """
    kept, words = [], list(arguments)
    forked = False
    while words:
        flag, equals, _ = (word := words.pop(0)).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in ("resume", "resume_step", "clean", "fork"):
            forked |= name == "fork"
            if not equals and words and not words[0].startswith("--"):
                words.pop(0)
        else:
            kept.append(word)
    if forked and not any(word.partition("=")[0] == "--profile" for word in kept):
        kept += ["--profile", os.path.join(run_directory, "profile.toml")]
    return [*kept, "--resume"]


def is_lost(status: int) -> bool:
    """Whether a process with this status is started again: another rank was lost, or a signal ended the process."""
    return status == RANK_LOST or (status < 0 and status != -signal.SIGTERM)


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"clotho: {text}\n")
        sys.stderr.flush()
