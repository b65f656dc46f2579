"""The machine at the start of a run: its state, and findings about memory, disk, power and display."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from msgspec import Struct

from attachments.machine.alarms import power_findings
from attachments.machine.pressure import read_memory
from clotho.models.machine import backend_name, physical_memory
from clotho.process import REFERENCE_BLAS
from protocols.finding import LESS_MEMORY, Change, Finding, Remedy
from protocols.summary import MemoryEstimate
from training_run.memory.report import beside_macos
from training_run.profile.schema import Profile
from training_run.records.terminal_text import memory, number

if TYPE_CHECKING:
    from attachments.machine.macos import MacState

GIB = 2**30

MUCH_SWAP = GIB
"""Bytes of used swap that are a finding in any case."""

SOME_SWAP = 64 * 2**20
"""Bytes of used swap that are a finding if the available memory is less than the run needs."""

LEAST_DISK = GIB // 2
"""Bytes of free disk space that a run needs for its log files."""

RECENT_DAYS = 14.0
"""Age of the kernel panics that are a finding."""


DENSE = (Change(key="model.dequantize", value="true"), Change(key="model.quantize", value="off"))
"""Settings without quantized weights: of a quantized model, and of one that is quantized at load."""


class MachineState(Struct, frozen=True, kw_only=True):
    """State of the machine when it was read. disk_bytes: free space for the run directory; None if unknown.

    mac: None on other systems than macOS.
    """

    system: str
    memory_bytes: int
    available_bytes: int
    swap_bytes: int
    disk_bytes: int | None
    blas: str
    mac: MacState | None = None


class RunNeeds(Struct, frozen=True, kw_only=True):
    """What a run needs of the machine. memory_bytes: estimated peak. disk_bytes: checkpoints and log files.

    max_turn_ms: `learner.max_turn_ms`. uses_gpu: whether MLX computes on a GPU. quantized: whether weights stay
    quantized.
    """

    memory_bytes: int
    disk_bytes: int
    max_turn_ms: float
    uses_gpu: bool
    quantized: bool = False


def read_machine(run_dir: Path, *, blas: str, system: str = "") -> MachineState:
    """Read the state of this machine. system: name of the system; empty: this one."""
    system = system or platform.system()
    try:
        reading = read_memory()
        available, swap = reading.available_bytes, reading.swap_bytes
    except (psutil.Error, OSError, RuntimeError):
        available, swap = physical_memory(), 0
    return MachineState(
        system=system,
        memory_bytes=physical_memory(),
        available_bytes=available,
        swap_bytes=swap,
        disk_bytes=_free_disk(run_dir),
        blas=blas,
        mac=_read_mac() if system == "Darwin" else None,
    )


def _free_disk(run_dir: Path) -> int | None:
    """Return the free bytes of the file system that holds, or will hold, a directory."""
    for directory in (run_dir, *run_dir.absolute().parents):
        try:
            return shutil.disk_usage(directory).free
        except OSError:
            continue
    return None


def disk_needed(estimate: MemoryEstimate, keep_last: int) -> int:
    """Return the bytes of the checkpoints that a run keeps at once, and of its log files.

    Beside the `keep_last` newest checkpoints, there are the best one, one that is being written, and the adapter.
    """
    return (keep_last + 3) * (estimate.trained + estimate.optimizer + estimate.rollback) + LEAST_DISK


def needs_of(profile: Profile, estimate: MemoryEstimate) -> RunNeeds:
    """Return what the run of a profile needs of the machine."""
    return RunNeeds(
        memory_bytes=estimate.total,
        disk_bytes=disk_needed(estimate, profile.checkpoint.keep_last),
        max_turn_ms=profile.learner.max_turn_ms,
        uses_gpu=backend_name() != "CPU",
        quantized=estimate.quantized,
    )


def described(state: MachineState, system: str) -> str:
    """Describe memory, swap, disk and, on macOS, display and power. system: name and version."""
    disk = "unknown" if state.disk_bytes is None else memory(state.disk_bytes)
    parts = [system, f"{memory(state.available_bytes)} available", f"{memory(state.swap_bytes)} of swap in use"]
    parts.append(f"{disk} of disk space free")
    if (mac := state.mac) is not None:
        display = {True: "on", False: "asleep", None: "unknown"}[mac.display_awake]
        parts += [f"macOS {mac.version or 'unknown'}", f"display {display}", f"power {mac.power or 'unknown'}"]
        idle = [number(minutes, "d") for minutes in (mac.sleep_minutes, mac.display_sleep_minutes)]
        parts.append(f"sleep after {idle[0]} min without input, display sleep after {idle[1]} min")
        parts.append(f"iogpu.wired_limit_mb {number(mac.wired_limit_mb, 'd')}")
        panic = "none" if mac.panic is None else f"{mac.panic.days:.0f} days ago ({mac.panic.file})"
        parts.append(f"last kernel panic {panic}")
    return ", ".join(parts)


def machine_findings(state: MachineState, needs: RunNeeds) -> Iterator[Finding]:
    """Yield the findings about the machine."""
    yield from _memory(state, needs)
    if state.disk_bytes is not None and state.disk_bytes < needs.disk_bytes:
        yield Finding(
            name="disk_space_low",
            fact=f"{_gib(state.disk_bytes)} of disk space are free, and the run needs up to {_gib(needs.disk_bytes)}",
            consequence="a checkpoint that cannot be written is lost",
            advice="free disk space, choose another --run-dir, or lower checkpoint.keep_last",
            remedy=Remedy(action="resume", changes=(Change(key="checkpoint.keep_last", factor=0.5),)),
        )
    if state.blas == REFERENCE_BLAS and not needs.uses_gpu:
        yield Finding(
            name="slow_blas",
            fact="MLX computes with the reference BLAS of its wheel",
            consequence="matrix products are about 50 times slower than with an optimised BLAS",
            advice="pip install mkl, or apt install libopenblas0-pthread",
        )
    if needs.quantized and not needs.uses_gpu:
        yield Finding(
            name="slow_quantized",
            fact="the weights are quantized, and MLX multiplies by them without BLAS on a CPU",
            consequence="a product with 32 rows takes about 30 times as long as with float32 weights",
            advice="set model.dequantize = true, or remove [model.quantize], if the memory suffices",
            remedy=Remedy(action="start", changes=DENSE),
        )
    if state.mac is not None:
        yield from _mac(state.mac, state, needs)


def _memory(state: MachineState, needs: RunNeeds) -> Iterator[Finding]:
    shared = state.mac is not None or not needs.uses_gpu  # other GPUs have memory of their own
    short = shared and state.available_bytes < needs.memory_bytes
    if state.swap_bytes >= MUCH_SWAP or (short and state.swap_bytes >= SOME_SWAP):
        yield Finding(
            name="swap_in_use",
            fact=f"{_gib(state.swap_bytes)} of swap are in use before the run has started, and "
            f"{_gib(state.available_bytes)} of memory are available",
            consequence="a run that swaps is slower by an order of magnitude",
            advice="close other programs, or lower engine.kv_cache_tokens and learner.micro_batch_tokens; "
            "--dry-run shows the memory of each part",
            remedy=LESS_MEMORY,
        )
    if short:
        yield Finding(
            name="memory_occupied",
            fact=f"{_gib(state.available_bytes)} of memory are available, and the run needs up to "
            f"{_gib(needs.memory_bytes)}",
            consequence="the system swaps, or ends a process, when the caches of the run are full",
            advice="close other programs, or lower engine.kv_cache_tokens and engine.max_num_seqs",
            remedy=LESS_MEMORY,
        )


def _read_mac() -> MacState:
    from attachments.machine.macos import read_mac

    return read_mac()


def _mac(mac: MacState, state: MachineState, needs: RunNeeds) -> Iterator[Finding]:
    if mac.display_awake and needs.uses_gpu:
        held = f", kept on by {', '.join(mac.display_held_by)}" if mac.display_held_by else ""
        yield Finding(
            name="display_awake",
            fact=f"the display is on{held}",
            consequence="macOS ends GPU work that delays the display (Impacting Interactivity), or panics; a turn of "
            f"the learner takes up to learner.max_turn_ms = {needs.max_turn_ms:g}",
            advice="let the display sleep (pmset displaysleepnow), or start the run over ssh; keep the Mac awake with "
            "caffeinate -is, never with caffeinate -d; if the run is ended, lower learner.max_turn_ms and "
            "learner.micro_batch_tokens",
        )
    if mac.panic is not None and mac.panic.days <= RECENT_DAYS and mac.panic.names_gpu:
        yield Finding(
            name="kernel_panic",
            fact=f"macOS panicked {mac.panic.days:.0f} days ago, and the report {mac.panic.file} names the GPU driver",
            consequence="the run can end with a restart of the Mac; its last checkpoint remains",
            advice="let the display sleep, set sudo sysctl iogpu.wired_limit_mb=0, lower checkpoint.interval, and "
            "update macOS",
        )
    most = beside_macos(state.memory_bytes)
    left = state.memory_bytes - (mac.wired_limit_mb or 0) * 2**20
    if left < state.memory_bytes - most:
        yield Finding(
            name="wired_limit_high",
            fact=f"iogpu.wired_limit_mb = {mac.wired_limit_mb} leaves {_gib(max(0, left))} to macOS",
            consequence="macOS panics when the GPU takes the memory that it needs itself",
            advice=f"sudo sysctl iogpu.wired_limit_mb={most // 2**20}",
        )
    yield from power_findings(on_battery=mac.power == "battery", low_power=mac.low_power_mode or False)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
