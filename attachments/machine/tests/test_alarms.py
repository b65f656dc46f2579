"""Alarms about the machine during a run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from attachments.machine.alarms import MachineCheck
from attachments.machine.resources import ResourceReading

HEALTHY = ResourceReading(
    resident_bytes=2**30,
    cpu_share=2.0,
    swap_bytes=2**30,
    swap_change_bytes=2**20,
    available_bytes=2**33,
    memory_level="normal",
    thermal="moderate",
    on_battery=False,
    low_power=False,
)


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (replace(HEALTHY, swap_change_bytes=2**30), "swap_growing"),
        (replace(HEALTHY, memory_level="warning"), "memory_pressure"),
        (replace(HEALTHY, memory_level="critical"), "memory_pressure"),
        (replace(HEALTHY, thermal="heavy"), "thermal_pressure"),
        (replace(HEALTHY, low_power=True), "low_power_mode"),
        (replace(HEALTHY, on_battery=True), "on_battery"),
        (replace(HEALTHY, swap_change_bytes=2**30, swap_matters=False), None),
        (ResourceReading(), None),
    ],
    ids=["swap", "pressure", "critical pressure", "heat", "low power", "battery", "swap of a calm Mac", "nothing"],
)
def test_a_state_of_the_machine_that_slows_the_run_is_a_finding(reading: ResourceReading, expected: str | None) -> None:
    """It lasts as long as the state."""
    check = MachineCheck()
    for _ in range(2):
        check.take(reading)
    assert [finding.name for finding in check.findings()] == ([expected] if expected else [])
    assert all(finding.advice and finding.consequence for finding in check.findings())
    check.take(HEALTHY)
    assert list(check.findings()) == []


def test_one_reading_with_memory_pressure_is_no_finding() -> None:
    """A moment of pressure slows nothing."""
    check = MachineCheck()
    check.take(replace(HEALTHY, memory_level="warning"))
    assert list(check.findings()) == []
