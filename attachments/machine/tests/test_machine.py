"""Findings about the machine: memory, swap, disk, BLAS, and on a Mac display, power, wired limit and panics."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from attachments.machine import machine as checks
from attachments.machine.machine import MachineState, disk_needed, machine_findings, needs_of, read_machine
from attachments.machine.macos import KernelPanic, MacState
from attachments.machine.tests.simulated_mac import machine, needs
from clotho.process import REFERENCE_BLAS
from protocols.summary import MemoryEstimate
from tests.training_run.built_context import tiny_profile

GIB = 2**30


def names(state: MachineState, *, uses_gpu: bool = True) -> list[str]:
    """The names of the findings."""
    return [finding.name for finding in machine_findings(state, needs(uses_gpu=uses_gpu))]


def test_a_machine_with_enough_of_everything_has_no_finding() -> None:
    """A Mac with a sleeping display on mains power, and a Linux machine."""
    assert names(machine()) == []
    assert names(machine(mac=MacState(display_awake=False, power="mains", low_power_mode=False))) == []
    assert names(machine(mac=MacState())) == []


@pytest.mark.parametrize(
    ("available", "swap", "uses_gpu", "expected"),
    [
        (12 * GIB, GIB, True, ["swap_in_use"]),
        (12 * GIB, GIB // 2, True, []),
        (4 * GIB, 0, False, ["memory_occupied"]),
        (4 * GIB, GIB // 2, False, ["swap_in_use", "memory_occupied"]),
        (4 * GIB, GIB // 2, True, []),
    ],
    ids=["much swap", "some swap, enough memory", "little memory", "both", "GPU with its own memory"],
)
def test_swap_counts_if_it_is_much_or_memory_is_short(
    available: int, swap: int, uses_gpu: bool, expected: list[str]
) -> None:
    """The run needs 8 GiB."""
    assert names(machine(available=available, swap=swap), uses_gpu=uses_gpu) == expected


@pytest.mark.parametrize(
    ("mac", "expected"),
    [
        (MacState(display_awake=True), "display_awake"),
        (MacState(power="battery"), "on_battery"),
        (MacState(low_power_mode=True), "low_power_mode"),
        (MacState(wired_limit_mb=15 * 1024), "wired_limit_high"),
        (MacState(panic=KernelPanic(file="a.panic", days=3.0, names_gpu=True)), "kernel_panic"),
    ],
)
def test_each_fault_of_a_mac_has_its_finding(mac: MacState, expected: str) -> None:
    """One fault is one finding."""
    assert names(machine(mac=mac)) == [expected]


def test_old_panics_and_panics_of_other_drivers_are_no_finding() -> None:
    """The wired limit of 12 GiB leaves a quarter of 16 GiB to macOS."""
    old = KernelPanic(file="a.panic", days=30.0, names_gpu=True)
    other = KernelPanic(file="a.panic", days=1.0, names_gpu=False)
    assert names(machine(mac=MacState(panic=old))) == names(machine(mac=MacState(panic=other))) == []
    assert names(machine(mac=MacState(wired_limit_mb=12 * 1024))) == []


def test_a_display_matters_only_to_a_gpu() -> None:
    """On the CPU, no GPU work delays the display."""
    assert names(machine(mac=MacState(display_awake=True)), uses_gpu=False) == []


def test_a_full_disk_and_a_slow_blas_are_findings() -> None:
    """The reference BLAS matters only on the CPU."""
    assert names(replace(machine(), disk_bytes=0)) == ["disk_space_low"]
    assert names(replace(machine(), disk_bytes=None)) == []
    assert names(replace(machine(), blas=REFERENCE_BLAS), uses_gpu=False) == ["slow_blas"]
    assert names(replace(machine(), blas=REFERENCE_BLAS)) == []


@pytest.mark.parametrize(("uses_gpu", "quantized", "expected"), [
    (False, True, ["slow_quantized"]), (False, False, []), (True, True, []),
])  # fmt: skip
def test_quantized_weights_are_slow_on_a_cpu_only(*, uses_gpu: bool, quantized: bool, expected: list[str]) -> None:
    """MLX has kernels for them on a GPU."""
    found = list(machine_findings(machine(), needs(uses_gpu=uses_gpu, quantized=quantized)))
    assert [finding.name for finding in found] == expected


def test_the_needs_of_a_run_say_whether_its_weights_stay_quantized(tmp_path: Path) -> None:
    """As its memory estimate does."""
    profile = tiny_profile(tmp_path)
    assert needs_of(profile, MemoryEstimate(quantized=True)).quantized
    assert not needs_of(profile, MemoryEstimate()).quantized


def test_the_state_of_this_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory need not exist; the programs of macOS are used only there."""
    found = read_machine(tmp_path / "runs" / "new", blas="mkl_rt", system="Linux")
    assert found.mac is None
    assert found.disk_bytes is not None
    assert 0 < found.available_bytes <= found.memory_bytes
    monkeypatch.setattr("attachments.machine.macos.read_mac", lambda: MacState(power="mains"))
    assert read_machine(tmp_path, blas="Accelerate", system="Darwin").mac == MacState(power="mains")


def test_the_disk_holds_all_checkpoints_of_a_moment() -> None:
    """The newest ones, the best one, one that is being written, and the adapter."""
    estimate = MemoryEstimate(
        base=0, trained=GIB, optimizer=2 * GIB, reference=0, rollback=0, midway=0, caches=0, prefixes=0, gradients=0,
        activations=0, logits=0, update=0, decode=0,
    )  # fmt: skip
    assert disk_needed(estimate, keep_last=3) == 18 * GIB + checks.LEAST_DISK
