"""Readings of the machine during a run: process, memory, GPU, power and temperature, without root.

psutil reads process, swap and, on Linux, sensors. Programs of the system report the rest: `pmset`, `notifyutil` and
`ioreg` on macOS, `nvidia-smi` elsewhere. Each program has a time limit. A program that is missing, or that fails
several times in a row, is not started again.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import psutil
from msgspec import Struct
from msgspec.structs import replace

from attachments.machine.pressure import MemoryReading

READ_SECONDS = 10.0
"""Time between two readings."""

PROGRAM_READINGS = 3
"""Programs of the system are started for every third reading."""

PROGRAM_SECONDS = 3.0
"""Time limit of a program."""

MAX_FAILURES = 3
"""Failures in a row after which a program is not started again."""

REDUCED_SPEED = 90
"""A CPU speed limit below this percentage counts as heavy thermal pressure."""

HEAVY_LEVEL = 2
"""Level of the notification `THERMAL_LEVEL` of macOS: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping."""
THERMAL_LEVEL = "com.apple.system.thermalpressurelevel"

PLAUSIBLE_CELSIUS = (40.0, 130.0)
"""Limits of a temperature sensor outside of this range are not meant as limits."""


class ResourceReading(Struct, frozen=True, kw_only=True):
    """Use of the machine at one moment. None means that the machine does not report it, or not without root.

    resident_bytes, cpu_share: resident memory of the process, and its CPU seconds per second since the reading before;
    1 is one core. swap_bytes, available_bytes: of the machine. swap_change_bytes: since the first reading.
    memory_level: memory pressure. swap_matters: see `MemoryReading.swap_matters`. gpu_share: fraction of the time in
    which the GPU works. power_watts: of the GPU (NVIDIA) or of the whole machine (macOS). thermal: how much heat limits
    the speed. on_battery, low_power: power source and power mode of the system.
    """

    resident_bytes: int | None = None
    cpu_share: float | None = None
    swap_bytes: int | None = None
    swap_change_bytes: int | None = None
    available_bytes: int | None = None
    memory_level: Literal["normal", "warning", "critical"] | None = None
    swap_matters: bool = True
    gpu_share: float | None = None
    power_watts: float | None = None
    thermal: Literal["nominal", "moderate", "heavy"] | None = None
    on_battery: bool | None = None
    low_power: bool | None = None


Values = Mapping[str, Any]
"""Fields of `ResourceReading`."""


class SystemProgram(Struct, kw_only=True):
    """A program of the system. parse: the fields that its output contains. failures: in a row."""

    arguments: tuple[str, ...]
    parse: Callable[[str], Values]
    failures: int = 0

    def read(self) -> Values:
        """Run the program and return the fields; none if it fails or takes too long."""
        if self.failures >= MAX_FAILURES:
            return {}
        try:
            done = subprocess.run(
                self.arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROGRAM_SECONDS,
                check=True,
                text=True,
                errors="replace",
            )
            found = self.parse(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            self.failures += 1
            return {}
        self.failures = 0
        return found


class ResourceProbe:
    """Reads the resources of the machine and of this process. `read` may wait, and is called in one thread at a time.

    The reading keeps the values of programs until the programs are started again.
    """

    def __init__(
        self, memory: Callable[[], MemoryReading], *, clock: Callable[[], float] = time.monotonic, system: str = ""
    ) -> None:
        """memory: the current state of the memory. system: as `platform.system()`, which is the default."""
        self._memory, self._clock = memory, clock
        self._process = psutil.Process()
        self._is_mac = (system or platform.system()) == "Darwin"
        self._programs = _programs(is_mac=self._is_mac)
        self._readings, self._swap_at_start = 0, -1
        self._cpu_before: tuple[float, float] | None = None
        self._of_programs: dict[str, Any] = {}

    def read(self) -> ResourceReading:
        """Return the current reading. A value that cannot be read is None."""
        if self._readings % PROGRAM_READINGS == 0:
            self._of_programs = {}
            for program in self._programs:
                self._of_programs |= program.read()
        self._readings += 1
        reading = ResourceReading(**self._of_programs)
        for part in (self._of_process, self._of_memory, self._of_sensors):
            try:
                reading = replace(reading, **part())
            except (psutil.Error, OSError, RuntimeError, ValueError):
                continue
        return reading

    def _of_process(self) -> Values:
        times = self._process.cpu_times()
        now = (self._clock(), times.user + times.system)
        before, self._cpu_before = self._cpu_before, now
        seconds = now[0] - before[0] if before else 0.0
        share = (now[1] - before[1]) / seconds if before and seconds > 0 else None
        return {"resident_bytes": self._process.memory_info().rss, "cpu_share": share}

    def _of_memory(self) -> Values:
        memory = self._memory()
        if self._swap_at_start < 0:
            self._swap_at_start = memory.swap_bytes
        return {
            "memory_level": memory.level,
            "swap_matters": memory.swap_matters,
            "available_bytes": memory.available_bytes,
            "swap_bytes": memory.swap_bytes,
            "swap_change_bytes": memory.swap_bytes - self._swap_at_start,
        }

    def _of_sensors(self) -> Values:
        """Power source and temperatures on Linux; macOS reports them through programs."""
        if self._is_mac:
            return {}
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        found: dict[str, Any] = {} if battery is None else {"on_battery": battery.power_plugged is False}
        if hasattr(psutil, "sensors_temperatures"):
            sensors = [sensor for group in psutil.sensors_temperatures().values() for sensor in group]
            if levels := [_level(sensor.current, sensor.high) for sensor in sensors]:
                found["thermal"] = "heavy" if "heavy" in levels else "nominal"
        return found


def _level(celsius: float, limit: float | None) -> Literal["nominal", "heavy"]:
    low, high = PLAUSIBLE_CELSIUS
    return "heavy" if limit is not None and low < limit < high and celsius >= limit else "nominal"


def _programs(*, is_mac: bool) -> list[SystemProgram]:
    """Return the programs of the system that are installed."""
    known = [
        SystemProgram(arguments=("pmset", "-g", "batt"), parse=_battery),
        SystemProgram(arguments=("pmset", "-g"), parse=_power_mode),
        SystemProgram(arguments=("notifyutil", "-g", THERMAL_LEVEL), parse=_thermal_level),
        SystemProgram(arguments=("pmset", "-g", "therm"), parse=_speed_limit),
        SystemProgram(arguments=("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"), parse=_apple_gpu),
        SystemProgram(arguments=("ioreg", "-r", "-d", "1", "-w", "0", "-c", "AppleSmartBattery"), parse=_apple_power),
    ]
    query = ("--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits")
    if not is_mac:
        known = [SystemProgram(arguments=("nvidia-smi", *query), parse=_nvidia)]
    return [program for program in known if shutil.which(program.arguments[0])]


def _battery(text: str) -> Values:
    """Parse `Now drawing from 'Battery Power'`."""
    source = re.search(r"drawing from '([^']+)'", text)
    return {"on_battery": source[1] == "Battery Power"} if source else {}


def _power_mode(text: str) -> Values:
    """Parse `lowpowermode 1`, or `powermode 1` on machines with a high power mode."""
    mode = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d+)", text, re.M)
    return {"low_power": int(mode[1]) == 1} if mode else {}


def _thermal_level(text: str) -> Values:
    """Parse `com.apple.system.thermalpressurelevel 2`."""
    level = re.search(rf"{re.escape(THERMAL_LEVEL)}\s+(\d+)", text)
    if not level:
        return {}
    number = int(level[1])
    return {"thermal": "heavy" if number >= HEAVY_LEVEL else "moderate" if number else "nominal"}


def _speed_limit(text: str) -> Values:
    """Parse `CPU_Speed_Limit = 60`, which Macs report while they are throttled."""
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", text)
    return {"thermal": "heavy"} if limit and int(limit[1]) < REDUCED_SPEED else {}


def _apple_gpu(text: str) -> Values:
    """Parse `"Device Utilization %"=97` of the GPU that works most."""
    shares = [int(share) for share in re.findall(r'"Device Utilization %"\s*=\s*(\d+)', text)]
    return {"gpu_share": max(shares) / 100} if shares else {}


def _apple_power(text: str) -> Values:
    """Parse `"SystemLoad"=12345` (milliwatts) of the battery's power telemetry."""
    load = re.search(r'"SystemLoad"\s*=\s*(\d+)', text)
    return {"power_watts": int(load[1]) / 1000} if load and int(load[1]) else {}


def _nvidia(text: str) -> Values:
    """Parse one line `97, 312.45` per GPU."""
    rows = re.findall(r"^\s*(\d+)\s*,\s*([\d.]+)\s*$", text, re.M)
    if not rows:
        return {}
    return {"gpu_share": max(int(share) for share, _ in rows) / 100, "power_watts": sum(float(w) for _, w in rows)}
