"""Findings about the state of the machine during a run: memory, swap, heat and power."""

from __future__ import annotations

from collections.abc import Iterator

from attachments.machine.resources import ResourceReading
from protocols.finding import LESS_MEMORY, Finding
from training_run.supervision.hooks import Check

SWAP_GROWTH = 256 * 2**20
"""Growth of the used swap since the start, in bytes, that is a finding."""

PRESSURE_READINGS = 2
"""Readings in a row with memory pressure that are a finding."""


def power_findings(*, on_battery: bool, low_power: bool) -> Iterator[Finding]:
    """Yield the findings about the power supply and the power mode, at the start and during a run."""
    if low_power:
        yield Finding(
            name="low_power_mode",
            fact="the low power mode is on",
            consequence="processor and GPU run at about half of their speed",
            advice="turn the mode off: sudo pmset -a lowpowermode 0",
        )
    if on_battery:
        yield Finding(
            name="on_battery",
            fact="the machine runs on its battery",
            consequence="the speed can be reduced, and the run stops when the battery is empty",
            advice="connect the power adapter",
        )


class MachineCheck(Check):
    """Checks the readings of the machine."""

    def __init__(self) -> None:
        self._reading = ResourceReading()
        self._pressed = 0

    def take(self, reading: ResourceReading) -> None:
        """Take a reading into account."""
        self._reading = reading
        self._pressed = self._pressed + 1 if reading.memory_level in ("warning", "critical") else 0

    def findings(self) -> Iterator[Finding]:
        """Yield the findings that apply now."""
        yield from self._memory()
        reading = self._reading
        if reading.thermal == "heavy":
            yield Finding(
                name="thermal_pressure",
                fact="the system reports heavy thermal pressure",
                consequence="processor and GPU run at a reduced speed",
                advice="improve the ventilation, or lower engine.max_num_seqs",
                remedy=LESS_MEMORY,
            )
        yield from power_findings(on_battery=reading.on_battery or False, low_power=reading.low_power or False)

    def _memory(self) -> Iterator[Finding]:
        reading = self._reading
        advice = "close other programs, or lower engine.max_num_seqs, learner.micro_batch_tokens or sampling.max_tokens"
        if self._pressed >= PRESSURE_READINGS and reading.memory_level is not None:
            available = f": {reading.available_bytes / 2**30:.1f} GiB available" if reading.available_bytes else ""
            critical = reading.memory_level == "critical"
            yield Finding(
                name="memory_pressure",
                severity="error" if critical else "warning",
                fact=f"the memory pressure is at the level {reading.memory_level}{available}",
                consequence="the system can end the run" if critical else "the run will be slowed down by swap",
                advice=advice,
                remedy=LESS_MEMORY,
            )
        if reading.swap_matters and (growth := reading.swap_change_bytes or 0) >= SWAP_GROWTH:
            yield Finding(
                name="swap_growing",
                fact=f"the used swap grew by {growth / 2**30:.1f} GiB since the start",
                consequence="reading memory back from the disk is slower by orders of magnitude",
                advice=advice,
                remedy=LESS_MEMORY,
            )
