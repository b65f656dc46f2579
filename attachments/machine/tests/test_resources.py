"""Readings of the machine: process and memory, and programs of the system, which may be missing, fail or hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from attachments.machine import resources
from attachments.machine.pressure import MemoryReading
from attachments.machine.resources import MAX_FAILURES, PROGRAM_READINGS, ResourceProbe, ResourceReading

MAC = {
    "pmset": """case "$*" in
"-g batt") echo "Now drawing from 'Battery Power'"; echo " -InternalBattery-0 (id=1) 85%; discharging" ;;
"-g therm") echo "CPU_Speed_Limit         = 60" ;;
*) echo " lowpowermode         1" ;;
esac""",
    "notifyutil": 'echo "com.apple.system.thermalpressurelevel 1"',
    "ioreg": """case "$*" in
*IOAccelerator) echo '"PerformanceStatistics" = {"Device Utilization %"=97,"Tiler Utilization %"=3}' ;;
*) echo '"PowerTelemetryData" = {"SystemLoad"=12345,"BatteryPower"=0}' ;;
esac""",
}
"""Programs of macOS, as shell scripts."""


def memory(swap_bytes: int = 100) -> MemoryReading:
    """Return a state of the memory without pressure."""
    return MemoryReading(level="normal", swap_bytes=swap_bytes, available_bytes=2**33)


Install = Callable[[dict[str, str]], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that makes shell scripts the only programs on PATH. It returns the file of their calls."""

    def programs(scripts: dict[str, str]) -> Path:
        calls = tmp_path / "calls"
        for name, script in scripts.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\necho $0 >> {calls}\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return calls

    return programs


def read(*, system: str, times: int = 1) -> ResourceReading:
    """Return the last of several readings."""
    probe = ResourceProbe(memory, system=system)
    return [probe.read() for _ in range(times)][-1]


def test_macos_reports_gpu_power_heat_battery_and_power_mode_without_root(install: Install) -> None:
    """A reduced speed limit is heavy thermal pressure, whatever the notification says."""
    install(MAC)
    found = read(system="Darwin")
    assert (found.gpu_share, found.power_watts, found.thermal) == (0.97, 12.345, "heavy")
    assert (found.on_battery, found.low_power) == (True, True)


def test_a_cool_mac_on_its_power_adapter_is_nominal(install: Install) -> None:
    """The usual output of the programs, which mentions no limit."""
    usual = {
        "pmset": """case "$*" in
"-g batt") echo "Now drawing from 'AC Power'" ;;
"-g therm") echo "Note: No thermal warning level has been recorded" ;;
*) echo " lowpowermode         0" ;;
esac""",
        "notifyutil": 'echo "com.apple.system.thermalpressurelevel 0"',
    }
    install(usual)
    found = read(system="Darwin")
    assert (found.thermal, found.on_battery, found.low_power, found.gpu_share) == ("nominal", False, False, None)


def test_nvidia_smi_reports_gpu_and_power(install: Install) -> None:
    """The GPU that works most, and the power of all."""
    install({"nvidia-smi": 'printf "97, 312.50\\n3, 40.50\\n"'})
    found = read(system="Linux")
    assert (found.gpu_share, found.power_watts) == (0.97, 353.0)


def test_values_of_missing_programs_are_none(install: Install) -> None:
    """Process and memory are known everywhere."""
    install({})
    found = read(system="Darwin")
    assert (found.gpu_share, found.power_watts, found.thermal, found.on_battery, found.low_power) == (None,) * 5
    assert found.resident_bytes is not None
    assert found.resident_bytes > 2**20
    assert (found.memory_level, found.swap_bytes, found.swap_change_bytes) == ("normal", 100, 0)


@pytest.mark.parametrize(("script", "calls"), [("exit 1", MAX_FAILURES), ("echo nonsense", MAX_FAILURES + 2)])
def test_a_program_that_fails_is_given_up(script: str, calls: int, install: Install) -> None:
    """After some failures in a row. The other values are still read. Output without a value is no failure."""
    called = install({"nvidia-smi": script})
    found = read(system="Linux", times=PROGRAM_READINGS * (MAX_FAILURES + 2))
    assert len(called.read_text().splitlines()) == calls
    assert found.gpu_share is None
    assert found.resident_bytes is not None


def test_a_program_that_hangs_is_ended(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time limit. The other values are still read."""
    monkeypatch.setattr(resources, "PROGRAM_SECONDS", 0.1)
    install({"nvidia-smi": "exec /bin/sleep 600"})
    found = read(system="Linux")
    assert found.gpu_share is None
    assert found.resident_bytes is not None


def test_programs_are_started_for_some_readings_only(install: Install) -> None:
    """Their values are kept in between."""
    calls = install({"nvidia-smi": 'echo "50, 100.0"'})
    found = read(system="Linux", times=PROGRAM_READINGS)
    assert len(calls.read_text().splitlines()) == 1
    assert found.gpu_share == 0.5


def test_cpu_share_and_swap_change_are_differences(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    """Of CPU seconds since the reading before, and of swap since the first reading."""
    install({})
    states = iter([memory(swap_bytes=100), memory(swap_bytes=600)])
    times = iter([SimpleNamespace(user=1.0, system=1.0), SimpleNamespace(user=12.0, system=5.0)])
    seconds = iter([100.0, 110.0])
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda _: next(times))
    probe = ResourceProbe(lambda: next(states), system="Linux", clock=lambda: next(seconds))
    first, second = probe.read(), probe.read()
    assert (first.cpu_share, second.cpu_share) == (None, 1.5)
    assert (first.swap_change_bytes, second.swap_change_bytes) == (0, 500)


def test_a_state_that_cannot_be_read_is_none(install: Install) -> None:
    """The other values are still read."""
    install({})

    def refuse() -> MemoryReading:
        raise psutil.AccessDenied(os.getpid())

    found = ResourceProbe(refuse, system="Linux").read()
    assert (found.swap_bytes, found.memory_level) == (None, None)
    assert found.resident_bytes is not None


def test_sensors_of_linux_report_battery_and_heat(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    """A sensor at its limit is heavy thermal pressure; a limit that no processor reaches is none."""
    install({})
    cool, hot = SimpleNamespace(current=60.0, high=90.0), SimpleNamespace(current=95.0, high=90.0)
    odd = SimpleNamespace(current=30.0, high=0.0)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=False), raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"cpu": [cool, odd]}, raising=False)
    found = read(system="Linux")
    assert (found.thermal, found.on_battery) == ("nominal", True)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"cpu": [cool, hot]}, raising=False)
    assert read(system="Linux").thermal == "heavy"
    assert read(system="Darwin").thermal != "heavy", "programs of macOS report them"
