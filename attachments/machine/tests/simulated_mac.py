"""Programs of macOS that print recorded texts, and machine states for the checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attachments.machine.machine import MachineState, RunNeeds
from attachments.machine.macos import MacState

ASSERTIONS = """2026-11-02 13:20:57 -0600
Assertion status system-wide:
   PreventUserIdleDisplaySleep    1
   PreventUserIdleSystemSleep     1
Listed by owning process:
   pid 98217(caffeinate): [0x00045477000194b3] 00:00:03 PreventUserIdleDisplaySleep named: "caffeinate command-line tool"
   pid 80(powerd): [0x00044f2f00019216] 00:22:34 PreventUserIdleSystemSleep named: "Powerd - Prevent sleep while display is on"
"""  # noqa: E501
ASLEEP = """Assertion status system-wide:
   PreventUserIdleDisplaySleep    0
   PreventUserIdleSystemSleep     0
"""
BATTERY = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t61%; discharging; 2:10 remaining\n"
MAINS = "Now drawing from 'AC Power'\n"
SETTINGS = """System-wide power settings:
Currently in use:
 standby              1
 lowpowermode         1
 sleep                10 (sleep prevented by powerd)
 displaysleep         5
"""
KERNEL = "machdep.cpu.brand_string: Apple M3\niogpu.wired_limit_mb: 15360\n"

TEXTS: Mapping[str, str] = {
    "pmset -g assertions": ASSERTIONS,
    "pmset -g batt": BATTERY,
    "pmset -g": SETTINGS,
    "sysctl machdep.cpu.brand_string iogpu.wired_limit_mb": KERNEL,
    "sw_vers -productVersion": "26.1\n",
}
"""What each command of a Mac with every fault prints."""


def install(directory: Path, texts: Mapping[str, str] = TEXTS) -> Path:
    """Write the programs to a directory for PATH, and return it."""
    directory.mkdir()
    programs: dict[str, str] = {}
    for number, (command, text) in enumerate(texts.items()):
        program, _, arguments = command.partition(" ")
        (directory / f"{number}.txt").write_text(text)
        programs[program] = programs.get(program, "") + f"'{arguments}') exec /bin/cat '{directory}/{number}.txt';;\n"
    for program, cases in programs.items():
        path = directory / program
        path.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 1;;\nesac\n')
        path.chmod(0o755)
    return directory


def machine(*, mac: MacState | None = None, available: int = 12 << 30, swap: int = 0) -> MachineState:
    """Return the state of a machine with 16 GiB."""
    return MachineState(
        system="Linux" if mac is None else "Darwin",
        memory_bytes=16 << 30,
        available_bytes=available,
        swap_bytes=swap,
        disk_bytes=100 << 30,
        blas="Accelerate",
        mac=mac,
    )


def needs(*, uses_gpu: bool = True, quantized: bool = False) -> RunNeeds:
    """Return the needs of a run with 8 GiB."""
    return RunNeeds(memory_bytes=8 << 30, disk_bytes=1 << 30, max_turn_ms=250.0, uses_gpu=uses_gpu, quantized=quantized)
