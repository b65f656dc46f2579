"""The state of a Mac: display, power, sleep, wired limit and the last kernel panic, from the programs of macOS.

All programs run at the same time and share one time limit. A program that is missing, fails or is too slow leaves its
values unknown.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

from msgspec import Struct

LIMIT_SECONDS = 2.0
"""Time limit of all programs together."""

COMMANDS: Mapping[str, Sequence[str]] = {
    "assertions": ("pmset", "-g", "assertions"),
    "battery": ("pmset", "-g", "batt"),
    "settings": ("pmset", "-g"),
    "display": ("ioreg", "-w", "0", "-r", "-n", "IODisplayWrangler"),
    "kernel": ("sysctl", "machdep.cpu.brand_string", "iogpu.wired_limit_mb"),
    "version": ("sw_vers", "-productVersion"),
}
"""Programs by the name of what they tell."""

PANIC_REPORTS = Path("/Library/Logs/DiagnosticReports")
MAX_REPORT_BYTES = 256 * 1024
GPU_DRIVERS = ("IOGPU", "AGX")
"""Names in a panic report that blame the driver of the GPU."""

AWAKE_POWER_STATE = 4
"""`CurrentPowerState` of a display that is on; a dark or sleeping display has a lower state."""

HOLDS_DISPLAY = re.compile(r"pid (\d+)\(([^)]*)\):[^\n]*\b(?:PreventUserIdleDisplaySleep|NoDisplaySleep\w*) named")
"""A line of `pmset -g assertions` about a program that keeps the display on."""

SECONDS_PER_DAY = 86_400


class KernelPanic(Struct, frozen=True, kw_only=True):
    """The newest panic report. days: its age. names_gpu: whether it names the driver of the GPU."""

    file: str
    days: float
    names_gpu: bool


class MacState(Struct, frozen=True, kw_only=True):
    """State of a Mac; None means unknown.

    display_held_by: programs that keep the display on. wired_limit_mb: `iogpu.wired_limit_mb`; 0 is the default of
    macOS. sleep_minutes, display_sleep_minutes: time without input until Mac or display sleep; 0: never.
    """

    version: str = ""
    chip: str = ""
    display_awake: bool | None = None
    display_held_by: tuple[str, ...] = ()
    power: Literal["mains", "battery"] | None = None
    low_power_mode: bool | None = None
    sleep_minutes: int | None = None
    display_sleep_minutes: int | None = None
    wired_limit_mb: int | None = None
    panic: KernelPanic | None = None


def read_mac(*, limit_seconds: float = LIMIT_SECONDS, reports: Path = PANIC_REPORTS) -> MacState:
    """Read the state of this Mac. reports: directory of the panic reports."""
    texts = run_programs(COMMANDS, limit_seconds=limit_seconds)
    settings = dict(re.findall(r"^\s*(\w+)\s+(\d+)\b", texts["settings"], re.MULTILINE))
    kernel = dict(re.findall(r"^([\w.]+): (.*)$", texts["kernel"], re.MULTILINE))
    low_power = settings.get("lowpowermode", settings.get("powermode"))
    return MacState(
        version=texts["version"].strip(),
        chip=kernel.get("machdep.cpu.brand_string", "").strip(),
        display_awake=_display_awake(texts["display"], texts["assertions"]),
        display_held_by=_display_held_by(texts["assertions"]),
        power=_power(texts["battery"]),
        low_power_mode=None if low_power is None else low_power == "1",
        sleep_minutes=_number(settings.get("sleep")),
        display_sleep_minutes=_number(settings.get("displaysleep")),
        wired_limit_mb=_number(kernel.get("iogpu.wired_limit_mb")),
        panic=last_panic(reports),
    )


def run_programs(commands: Mapping[str, Sequence[str]], *, limit_seconds: float) -> dict[str, str]:
    """Run programs at the same time; return their standard output by name, empty for one that failed or was too slow.

    A program that is too slow is killed together with the programs that it started.
    """
    deadline = time.monotonic() + limit_seconds
    with ExitStack() as stack:
        files = {name: stack.enter_context(TemporaryFile()) for name in commands}
        running = {name: _start(command, files[name]) for name, command in commands.items()}
        ended = {name: _end(process, deadline) for name, process in running.items()}
        for file in files.values():
            file.seek(0)
        return {name: files[name].read().decode(errors="replace") if ended[name] else "" for name in commands}


def _start(command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        return None


def _end(process: subprocess.Popen[bytes] | None, deadline: float) -> bool:
    """Wait for a program until a time, and kill it then. Returns whether it has ended by itself."""
    if process is None:
        return False
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


def _display_awake(registry: str, assertions: str) -> bool | None:
    """Whether a display is on: by its power state, or because macOS then holds an assertion against sleep."""
    states = [int(state) for state in re.findall(r'"CurrentPowerState"\s*=\s*(\d+)', registry)]
    if any(state >= AWAKE_POWER_STATE for state in states):
        return True
    if "PreventUserIdle" in assertions:
        return "Prevent sleep while display is on" in assertions
    return False if states else None


def _display_held_by(assertions: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{name} ({pid})" for pid, name in HOLDS_DISPLAY.findall(assertions)))


def _power(battery: str) -> Literal["mains", "battery"] | None:
    if "'Battery Power'" in battery:
        return "battery"
    return "mains" if "'AC Power'" in battery else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def last_panic(reports: Path) -> KernelPanic | None:
    """Return the newest panic report of a directory; None without one, or if the directory cannot be read."""
    try:
        newest = max(reports.glob("*.panic"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return None
        with newest.open("rb") as file:
            text = file.read(MAX_REPORT_BYTES).decode(errors="replace")
        days = max(0.0, time.time() - newest.stat().st_mtime) / SECONDS_PER_DAY
    except OSError:
        return None
    return KernelPanic(file=newest.name, days=days, names_gpu=any(driver in text for driver in GPU_DRIVERS))
