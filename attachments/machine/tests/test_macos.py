"""The state of a Mac comes from its programs, which are read at the same time and within a time limit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from attachments.machine.macos import MacState, last_panic, read_mac, run_programs
from attachments.machine.tests import simulated_mac


def test_every_value_is_read_from_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A display that a program keeps on, a battery, the low power mode, the wired limit and a panic report."""
    monkeypatch.setenv("PATH", str(simulated_mac.install(tmp_path / "bin")))
    (tmp_path / "Kernel_2026-11-01.panic").write_text('{"string": "panic(cpu 1): IOGPUGroupMemory underflow"}')
    found = read_mac(reports=tmp_path, limit_seconds=20.0)
    assert found.panic is not None
    assert (found.panic.names_gpu, found.panic.days < 1) == (True, True)
    assert found == MacState(
        version="26.1", chip="Apple M3", display_awake=True, display_held_by=("caffeinate (98217)",), power="battery",
        low_power_mode=True, sleep_minutes=10, display_sleep_minutes=5, wired_limit_mb=15360, panic=found.panic,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "awake"),
    [
        ({"pmset -g assertions": simulated_mac.ASLEEP}, False),
        ({"ioreg -w 0 -r -n IODisplayWrangler": '"IOPowerManagement" = {"CurrentPowerState"=4}'}, True),
        ({"ioreg -w 0 -r -n IODisplayWrangler": '"IOPowerManagement" = {"CurrentPowerState"=1}'}, False),
        ({}, None),
    ],
    ids=["no assertion", "power state 4", "power state 1", "no program"],
)
def test_the_display_is_on_by_its_power_state_or_its_assertion(
    texts: dict[str, str], awake: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any program, every value is unknown."""
    monkeypatch.setenv("PATH", str(simulated_mac.install(tmp_path / "bin", texts)))
    found = read_mac(reports=tmp_path / "none", limit_seconds=20.0)
    assert (found.display_awake, found.power, found.wired_limit_mb, found.panic) == (awake, None, None, None)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """The other programs have their output; the time limit is that of all programs together."""
    pid = tmp_path / "pid"
    hanging = f"sleep 600 & echo $! > {pid}; wait"
    texts = run_programs(
        {"hanging": ("sh", "-c", hanging), "other": ("echo", "text"), "missing": ("no-such-program",)},
        limit_seconds=0.2,
    )
    assert texts == {"hanging": "", "other": "text\n", "missing": ""}
    child = int(pid.read_text())
    while is_running(child):
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_directory_without_reports_has_no_panic(tmp_path: Path) -> None:
    """The same holds for a directory that does not exist; a report about another fault does not blame the GPU."""
    assert last_panic(tmp_path) is None
    assert last_panic(tmp_path / "none") is None
    (tmp_path / "Kernel_1.panic").write_text("watchdog timeout")
    found = last_panic(tmp_path)
    assert found is not None
    assert found.names_gpu is False
