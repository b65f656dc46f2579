"""The process of the soak run: starts, signals, faults of its output, and samples of its memory."""

from __future__ import annotations

import math
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT
from bench.soak_clients import HOST
from bench.soak_memory import MemoryInUse
from bench.soak_rewards import VARIABLE

START_SECONDS = 180.0
END_SECONDS = 300.0
WARM_UP_SECONDS = 120.0
MIN_MINUTES, MIN_SAMPLES = 5, 10
"""Minimum number of minutes after warmup, and of samples in a minute that counts."""

NORMAL_95 = 1.96
PAGE = resource.getpagesize()
MB = 1e6
MEMORY_FILE = "memory.jsonl"
"""Samples of `bench.soak_memory`, in the scratch directory."""

DISK_BYTES = 256 * 1024
IN_SMALL_DISK = 'mount -t tmpfs -o size={size} none "$0" && exec "$@" >"$0/output" 2>&1'


class Sample(NamedTuple):
    """seconds: since the start of the process. resident: bytes. descriptors: number of open files of the process.

    with_children: resident bytes of the process and of its child processes.
    """

    seconds: float
    resident: int
    with_children: int
    descriptors: int


class Growth(Struct, frozen=True, kw_only=True):
    """Growth of one quantity after warmup. by_minute: its median in each minute.

    per_hour: median slope of all pairs of minutes (Theil-Sen). low, high: its 95 % confidence interval (Sen 1968,
    doi:10.1080/01621459.1968.10480934), which treats the minutes as independent.
    """

    by_minute: tuple[float, ...]
    per_hour: float
    low: float
    high: float


class Life(Struct, frozen=True, kw_only=True):
    """One start of the process. end: "killed", "drained" or the exit status. output: where stdout and stderr went.

    resident, with_children: in MB; None for a short life. peak_resident: in MB, warmup included.
    in_use, arrays: `MemoryInUse.other` and `MemoryInUse.mlx`, in MB.
    """

    seconds: float
    end: str
    output: str
    steps: int
    peak_resident: float
    resident: Growth | None
    with_children: Growth | None
    descriptors: Growth | None
    in_use: Growth | None = None
    arrays: Growth | None = None


def growth(seconds: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Growth of all values after warmup; None if they are of fewer than `MIN_MINUTES` minutes.

    seconds: time of each value since the start of the process.
    """
    minutes: dict[int, list[float]] = {}
    for at, value in zip(seconds, values, strict=True):
        if at >= WARM_UP_SECONDS:
            minutes.setdefault(int((at - WARM_UP_SECONDS) // 60.0), []).append(value)
    medians = {minute: statistics.median(found) for minute, found in minutes.items() if len(found) >= MIN_SAMPLES}
    if len(medians) < MIN_MINUTES:
        return None
    slopes = sorted(
        60.0 * (medians[later] - medians[earlier]) / (later - earlier) for earlier, later in combinations(medians, 2)
    )
    count = len(medians)
    spread = NORMAL_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18.0)
    first, last = int((len(slopes) - spread) / 2.0), math.ceil((len(slopes) + spread) / 2.0)
    return Growth(
        by_minute=tuple(medians.values()),
        per_hour=statistics.median(slopes),
        low=slopes[max(0, first - 1)],
        high=slopes[min(len(slopes) - 1, last)],
    )


def small_disk_available() -> bool:
    """Whether this user may mount a file system in memory in a namespace of the process."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Process:
    """One life of the run under load.

    output: "pipe", "/dev/full", or "small disk", a file system in memory of `DISK_BYTES` that only this process sees.
    """

    def __init__(self, arguments: Sequence[str], scratch: Path, *, output: str, port: int) -> None:
        self.output, self._port, self._scratch = output, port, scratch
        self.disk = scratch / "disk"
        self.disk.mkdir(exist_ok=True)
        self.log = scratch / "output.log"
        command = [sys.executable, "pipeline.py", *arguments]
        if output == "small disk":
            script = IN_SMALL_DISK.format(size=DISK_BYTES)
            command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(self.disk), *command]
        self._reader: int | None = None
        writer: int | None = None
        if output == "pipe":
            self._reader, writer = os.pipe()
        with Path("/dev/full").open("wb") as full:
            self._popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {VARIABLE: str(scratch / "faults")},
                stdin=subprocess.DEVNULL,
                stdout=full if writer is None else writer,
                stderr=full if writer is None else writer,
            )
        if writer is not None:
            os.close(writer)
        if self._reader is not None:
            os.set_blocking(self._reader, False)
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    @property
    def pid(self) -> int:
        """The process id. `unshare` and `sh` replace themselves by the program."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._popen.poll()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def wait_until_serving(self) -> None:
        """Wait until the server is healthy. Raises RuntimeError if the process ends or takes too long."""
        while self.seconds < START_SECONDS:
            self.read_output()
            if self.status is not None:
                raise RuntimeError(f"the run ended with status {self.status} at its start; see {self.log}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://{HOST}:{self._port}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the run did not serve within {START_SECONDS:g} seconds; see {self.log}")

    def read_output(self) -> None:
        """Append the output of a pipe to the log of the soak."""
        if self._reader is not None:
            with suppress(BlockingIOError), self.log.open("ab") as log:
                while content := os.read(self._reader, 1 << 16):
                    log.write(content)

    def close_output(self) -> bool:
        """Close the reading end of the pipe. Returns False if there is none."""
        if self._reader is None:
            return False
        self.read_output()
        os.close(self._reader)
        self._reader = None
        return True

    def fill_disk(self, *, full: bool) -> bool:
        """Fill the file system of stdout and stderr, or make room again. Returns False if there is none."""
        if self.output != "small disk":
            return False
        filler = Path(f"/proc/{self.pid}/root{self.disk}") / "filler"
        if not full:
            filler.unlink(missing_ok=True)
            return True
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._popen.send_signal(number)

    def end(self) -> int:
        """Wait for the end and return the exit status; negative for a signal."""
        try:
            deadline = time.monotonic() + END_SECONDS
            while self.status is None and time.monotonic() < deadline:
                self.read_output()
                time.sleep(0.1)
            if self.status is None:
                raise RuntimeError(f"the run did not end within {END_SECONDS:g} seconds")
            self.read_output()
        finally:
            self.kill()
        return self._popen.returncode

    def kill(self) -> None:
        """End the process if it still runs, and close its output."""
        self._popen.kill()
        self._popen.wait()
        self.close_output()

    def sample(self) -> None:
        """Take a sample of memory and descriptors."""
        with suppress(OSError, ValueError):
            own = _resident(self.pid)
            children = sum(map(_resident, _descendants(self.pid)))
            descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
            self.samples.append(Sample(self.seconds, own, own + children, descriptors))

    def life(self, *, end: str, steps: int) -> Life:
        """The summary of this life."""
        seconds = [sample.seconds for sample in self.samples]
        in_use = self._memory_in_use()
        measured = [sample.at - self._began for sample in in_use]
        return Life(
            seconds=self.seconds,
            end=end,
            output=self.output,
            steps=steps,
            peak_resident=max((sample.resident for sample in self.samples), default=0) / MB,
            resident=growth(seconds, [sample.resident / MB for sample in self.samples]),
            with_children=growth(seconds, [sample.with_children / MB for sample in self.samples]),
            descriptors=growth(seconds, [float(sample.descriptors) for sample in self.samples]),
            in_use=growth(measured, [sample.other / MB for sample in in_use]),
            arrays=growth(measured, [sample.mlx / MB for sample in in_use]),
        )

    def _memory_in_use(self) -> list[MemoryInUse]:
        """The samples of this life that the process has written."""
        file = self._scratch / MEMORY_FILE
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        complete = [msgspec.json.decode(line, type=MemoryInUse) for line in lines if line.endswith(b"\n")]
        return [sample for sample in complete if sample.at >= self._began]


def _resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE
    except OSError:
        return 0


def _descendants(pid: int) -> list[int]:
    """Process ids of all descendants."""
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split():
                found += [int(child), *_descendants(int(child))]
    return found
