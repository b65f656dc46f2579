"""Memory pressure during a run, and how many sequences the decode engine decodes at once under it.

A machine that swaps is slower by an order of magnitude, and macOS ends processes when its memory is critical. The KV
cache of running sequences is the part of a run's memory that can shrink without an effect on what is learned.
"""

from __future__ import annotations

import ctypes
import platform
from collections import deque
from collections.abc import Callable
from typing import Literal

import psutil
import structlog
from msgspec import Struct

from clotho.models.machine import cgroup_headroom

log = structlog.get_logger(__name__)

Level = Literal["normal", "warning", "critical"]

PRESSURE_LEVEL = b"kern.memorystatus_vm_pressure_level"
LEVELS: dict[int, Level] = {1: "normal", 2: "warning", 4: "critical"}
"""Values of the sysctl `PRESSURE_LEVEL` of macOS."""

SCARCE, CRITICAL = 0.05, 0.02
"""Fractions of the memory: less available memory is a warning, or critical, if the kernel reports no level."""

CHECK_SECONDS = 5.0
SWAP_GROWTH = 256 * 2**20
"""Growth of the used swap, in bytes, within `SWAP_CHECKS` checks that counts as pressure."""
SWAP_CHECKS = 12

HOLD_CHECKS = 3
"""Checks after a change of the limit before it is lowered again: running sequences have to end first."""

CALM_CHECKS = 12
"""Consecutive checks without pressure after which the limit is raised; doubled each time that raising it failed."""
MOST_CALM_CHECKS = 16 * CALM_CHECKS

SMALLEST_SHARE = 8
"""The limit is never below this fraction of its maximum (1/8)."""


class MemoryReading(Struct, frozen=True, kw_only=True):
    """State of the machine's memory. swap_bytes: used swap of all programs. available_bytes: free without swapping.

    level: memory pressure as the kernel of macOS reports it; elsewhere by the fraction of memory that is available.
    by_kernel: whether the kernel reports the level.
    """

    level: Level
    swap_bytes: int
    available_bytes: int
    by_kernel: bool = False

    @property
    def swap_matters(self) -> bool:
        """Whether growing swap is pressure. macOS moves idle memory to the swap without any: there, its level says."""
        return self.level != "normal" or not self.by_kernel


def read_memory() -> MemoryReading:
    """Read swap and memory pressure. In a container with a memory limit, only memory below the limit is available."""
    memory, headroom = psutil.virtual_memory(), cgroup_headroom()
    available = memory.available if headroom is None else max(0, min(memory.available, headroom))
    level = kernel_level()
    return MemoryReading(
        level=level or _level(available / memory.total),
        swap_bytes=psutil.swap_memory().used,
        available_bytes=available,
        by_kernel=level is not None,
    )


def kernel_level() -> Level | None:
    """Return the memory pressure that the kernel of macOS reports; None on other systems."""
    if platform.system() != "Darwin":
        return None
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(PRESSURE_LEVEL, ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed else LEVELS.get(value.value)


def _level(available: float) -> Level:
    if available < CRITICAL:
        return "critical"
    return "warning" if available < SCARCE else "normal"


class RowsLimit:
    """Limit on the sequences that are decoded at once: halved under memory pressure, doubled after each calm minute.

    The pressure is critical if the level says so, or if the swap grows by `SWAP_GROWTH` within `SWAP_CHECKS` checks and
    the swap matters (`MemoryReading.swap_matters`). A level `warning` keeps the limit. After a change, the next waits.
    If pressure returns after the limit was raised, the next rise takes twice as long.

    value: the limit, at most `maximum`. reason: why the limit was changed last; empty before the first change.
    swap_growth: growth of the used swap, in bytes, over its lowest value of the last checks since a change.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = self.value = maximum
        self.reason: Literal["", "memory_pressure", "swap", "recovered"] = ""
        self.swap_growth = 0
        self._swap: deque[int] = deque(maxlen=SWAP_CHECKS)
        self._since_change = HOLD_CHECKS
        self._calm = 0
        self._calm_needed = CALM_CHECKS

    def observe(self, reading: MemoryReading) -> bool:
        """Adapt the limit to a reading. Returns whether the limit has changed."""
        self._swap.append(reading.swap_bytes)
        self._since_change += 1
        self.swap_growth = reading.swap_bytes - min(self._swap)
        swapping = self.swap_growth >= SWAP_GROWTH and reading.swap_matters
        critical = reading.level == "critical"
        self._calm = self._calm + 1 if reading.level == "normal" and not swapping else 0
        before = self.value
        if (critical or swapping) and self._since_change > HOLD_CHECKS:
            self._lower("memory_pressure" if critical else "swap")
        elif self._calm >= self._calm_needed and self.value < self.maximum:
            self._change(min(self.maximum, 2 * self.value), "recovered")
        return self.value != before

    def forget_swap(self) -> None:
        """Count growth of the swap from the next reading on."""
        self._swap.clear()

    def _lower(self, reason: Literal["memory_pressure", "swap"]) -> None:
        if self.reason == "recovered":
            self._calm_needed = min(MOST_CALM_CHECKS, 2 * self._calm_needed)
        smallest = max(1, self.maximum // SMALLEST_SHARE)
        if self.value > smallest:
            self._change(max(smallest, self.value // 2), reason)

    def _change(self, value: int, reason: Literal["memory_pressure", "swap", "recovered"]) -> None:
        self.value, self.reason = value, reason
        self._calm = self._since_change = 0
        self.forget_swap()


class MemoryWatch:
    """Reads the memory, and lowers and raises the concurrency of the decode engine.

    read: the current state of the memory. apply: called with a new limit. settled: whether the first batch is done,
    asked until it is; the swap that grew before counts only as what is there. An unreadable state is logged once, and
    the limit stays as it is.
    """

    def __init__(
        self,
        maximum: int,
        *,
        apply: Callable[[int], None],
        read: Callable[[], MemoryReading],
        settled: Callable[[], bool],
    ) -> None:
        """maximum: `engine.max_num_seqs`."""
        self._limit, self._apply, self._read, self._settled = RowsLimit(maximum), apply, read, settled
        self._has_settled = self._failed = False

    def check(self) -> None:
        """Read the memory once, and apply and log a change of the limit."""
        try:
            reading = self._read()
        except (psutil.Error, OSError, RuntimeError) as error:
            if not self._failed:
                self._failed = True
                log.warning("memory_unreadable", error=str(error))
            return
        limit = self._limit
        before = limit.value
        self._has_settled = self._has_settled or self._settled()
        if not self._has_settled:
            limit.forget_swap()
        if not limit.observe(reading):
            return
        self._apply(limit.value)
        report = log.warning if limit.value < before else log.info
        report(
            "concurrency_reduced" if limit.value < before else "concurrency_raised",
            key="engine.max_num_seqs",
            value=limit.value,
            before=before,
            maximum=limit.maximum,
            reason=limit.reason,
            level=reading.level,
            swap_mb=reading.swap_bytes // 2**20,
            swap_growth_mb=limit.swap_growth // 2**20,
            available_mb=reading.available_bytes // 2**20,
        )
