"""A process that starts another one again when it is lost, and the other's end of the connection to it.

The supervisor starts the process, listens to what it tells, and passes signals on to it. The module uses the standard
library only, because a supervisor lives beside a process that needs the memory.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

POLL_SECONDS = 0.1
SUSPENDED_SECONDS = 2.0
"""A process whose periodic check is this late was suspended itself; silence of others in this time means nothing."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Facts(NamedTuple):
    """What a process has told its supervisor.

    restarts: how often it may be started again. hang_seconds: time without a heartbeat after which it is ended; 0: not
    known yet. run_directory: empty until the run can be resumed. problem: why the process ends. ended: whether the run
    has ended. turn_ms: longest turn of an update.
    """

    restarts: int = 0
    hang_seconds: float = 0.0
    run_directory: str = ""
    problem: str = ""
    ended: bool = False
    turn_ms: float = 0.0


class SupervisedProcess:
    """A process, as its supervisor sees it. facts: what it has told, or why the supervisor has ended it."""

    def __init__(self, command: Sequence[str], *, variable: str, start_seconds: float = math.inf) -> None:
        """variable: of the environment, with the file descriptor of the connection to the supervisor.

        start_seconds: time until the first heartbeat. Without a limit, the process needs none at any time.
        """
        self.facts = Facts()
        self._start_seconds, self._buffer = start_seconds, b""
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {variable: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection.settimeout(POLL_SECONDS)

    def send(self, number: int) -> None:
        """Send a signal to the process, if it has not ended. One without its first heartbeat is killed instead."""
        is_deaf = self._start_seconds < math.inf and not self.facts.hang_seconds
        self._process.send_signal(signal.SIGKILL if is_deaf else number)

    def wait(self) -> int:
        """Wait for the end of the process, and end it if a heartbeat is missing; return its status."""
        limit = self._start_seconds
        seen = looked = time.monotonic()
        while self._process.poll() is None:
            heard, now = self._listen(), time.monotonic()
            if heard or now - looked > SUSPENDED_SECONDS:
                seen = now
            looked, limit = now, self.facts.hang_seconds or limit
            if now - seen > limit:
                self.facts = self.facts._replace(problem=f"sent no heartbeat for {limit:g} s")
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
            self.facts = self.facts._replace(**json.loads(line))
        return True


class SupervisorLink:
    """The supervisor, as its process sees it."""

    def __init__(self, variable: str, *, on_end: Callable[[], None]) -> None:
        """variable: as of `SupervisedProcess`. on_end: called in a thread if the supervisor ends before this process.

        Processes that this one starts do not inherit the connection.
        """
        number = int(os.environ[variable])
        os.set_inheritable(number, False)
        self._connection = socket.socket(fileno=number)
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, args=(on_end,), name="supervisor", daemon=True).start()

    def alive(self) -> None:
        """Send a heartbeat."""
        self._write(b"\n")

    def tell(self, **facts: object) -> None:
        """Tell fields of `Facts`."""
        self._write(json.dumps(facts).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock, suppress(OSError):
            self._connection.sendall(line)

    def _watch(self, on_end: Callable[[], None]) -> None:
        with suppress(OSError):
            while self._connection.recv(1):
                pass
        on_end()


class PassedSignals:
    """Passes signals on to a process.

    received: number of the last signal, 0 before. A process whose supervisor has received one is not started again.
    process: None until it is started.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        """numbers: of the signals to pass on; other ones of `PASSED_ON` are ignored. So is SIGHUP under `nohup`."""
        self.received = 0
        self.process: SupervisedProcess | None = None
        for number in PASSED_ON:
            ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            signal.signal(number, self._pass_on if number in numbers and not ignored else signal.SIG_IGN)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.process is not None:
            self.process.send(number)


def program(arguments: Sequence[str]) -> list[str]:
    """Return the command of this process without its `arguments`."""
    words = sys.orig_argv[1:]
    return [sys.executable, *words[: len(words) - len(arguments)]]


def resumed(arguments: Sequence[str], run_directory: str) -> list[str]:
    """Return the arguments that continue the run of a command line.

    A fork takes its profile from the run that it forked, unless the command line has one; so does its continuation.
    """
    kept, removed = without(arguments, "resume", "resume_step", "clean", "fork")
    if "fork" in removed and not any(word.partition("=")[0] == "--profile" for word in kept):
        kept += ["--profile", os.path.join(run_directory, "profile.toml")]
    return [*kept, "--resume"]


def without(arguments: Sequence[str], *flags: str) -> tuple[list[str], set[str]]:
    """Return the arguments without these flags and their values, and which of them there were."""
    kept, removed, words = list[str](), set[str](), list(arguments)
    while words:
        flag, equals, _ = (word := words.pop(0)).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in flags:
            removed.add(name)
            if not equals and words and not words[0].startswith("--"):
                words.pop(0)
        else:
            kept.append(word)
    return kept, removed


def was_killed(status: int) -> bool:
    """Whether a signal ended a process with this status that nobody sends to end it."""
    return status < 0 and status != -signal.SIGTERM


def exit_status(status: int, received: int) -> int:
    """Return the exit status of a supervisor. status: of its process. received: by the supervisor, 0 for none."""
    if received and status < 0:
        return 128 + received
    return status if status >= 0 else 128 - status


def ending(status: int) -> str:
    """Return how a process with this status ended, as the rest of a sentence."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"


def say(text: str) -> None:
    """Write a line to standard error."""
    with suppress(OSError):
        sys.stderr.write(f"clotho: {text}\n")
        sys.stderr.flush()
