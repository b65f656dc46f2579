"""The state of the machine that a measurement on Metal depends on, as the settings of a case."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution

from attachments.machine.macos import MacState, read_mac, run_programs
from bench.measurement import Case
from clotho.process import usable_cores

COMMANDS = {
    "cores": ("sysctl", "hw.perflevel0.physicalcpu", "hw.perflevel1.physicalcpu"),
    "gpu": ("ioreg", "-r", "-d", "1", "-w", "0", "-c", "AGXAccelerator"),
    "thermal": ("pmset", "-g", "therm"),
}
"""Programs of macOS by the name of what they tell."""

LIMIT_SECONDS = 5.0
"""Time limit of all programs together."""

UNKNOWN = "unknown"


def machine_state() -> Case:
    """Return what can be known: `unknown` for the rest; without values of macOS on another system."""
    state: Case = dict(_everywhere())
    if platform.system() == "Darwin":
        state.update(_of_mac(read_mac(limit_seconds=LIMIT_SECONDS)))
    return state


def _everywhere() -> Iterator[tuple[str, str | int]]:
    yield "cores", usable_cores()
    for package in ("mlx", "mlx-metal"):
        with suppress(PackageNotFoundError):
            yield f"{package} wheel", _tag(package)
    yield "TF32 variable", os.environ.get("MLX_ENABLE_TF32", "not set")


def _tag(package: str) -> str:
    """Return for which systems the installed wheel of a package was built: wheels differ in their kernels."""
    text = distribution(package).read_text("WHEEL") or ""
    found = re.search(r"^Tag: \S+?-\S+?-(\S+)$", text, re.MULTILINE)
    return found[1] if found else UNKNOWN


def _of_mac(state: MacState) -> Iterator[tuple[str, str | int]]:
    texts = run_programs(COMMANDS, limit_seconds=LIMIT_SECONDS)
    numbers = re.findall(r"^hw\.perflevel\d\.physicalcpu: (\d+)$", texts["cores"], re.MULTILINE)
    gpu = re.search(r'"gpu-core-count"\s*=\s*(\d+)', texts["gpu"])
    yield "macOS", state.version or UNKNOWN
    yield "performance and efficiency cores", " + ".join(numbers) or UNKNOWN
    yield "GPU cores", int(gpu[1]) if gpu else UNKNOWN
    yield "power", state.power or UNKNOWN
    yield "low power mode", _word(state.low_power_mode)
    yield "display", {True: "on", False: "off", None: UNKNOWN}[state.display_awake]
    yield "thermal", _thermal(texts["thermal"])
    yield "wired limit in MB", UNKNOWN if state.wired_limit_mb is None else state.wired_limit_mb or "default"


def _word(value: bool | None) -> str:
    return {True: "yes", False: "no", None: UNKNOWN}[value]


def _thermal(text: str) -> str:
    """Return the limits that macOS sets because of heat, such as a CPU speed of 80 percent."""
    limits: Mapping[str, str] = dict(re.findall(r"^\s*(CPU_\w+|GPU_\w+|Thermal\w+)\s*=\s*(\d+)", text, re.MULTILINE))
    if limits:
        return ", ".join(f"{name} {value}" for name, value in limits.items())
    return "no warning" if "No thermal warning" in text else UNKNOWN
