"""The description of the machine, its memory limit, and the random state of MLX in a checkpoint."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from clotho.backend import Backend
from clotho.models import machine
from clotho.models.machine import (
    cgroup_headroom,
    limit_mlx_memory,
    memory_limit,
    random_state,
    restore_random_state,
    uses_tf32,
)
from protocols.compute import MemoryLimit
from protocols.errors import ProfileError
from tests.models.simulated_devices import MAC_16_GB, simulate_gpu
from training_run.machine import describe_machine, wire_memory

GIB = 2**30


@pytest.mark.parametrize("rounds", [True, False])
def test_the_compute_line_says_whether_a_gpu_rounds_float32_products(
    monkeypatch: pytest.MonkeyPatch, rounds: bool
) -> None:
    """An M5 and recent NVIDIA GPUs do by default: inputs of large products have 11 significant bits."""

    def product(a: mx.array, b: mx.array) -> mx.array:
        bits = (mx.view(x, mx.uint32) + mx.array(2**12, mx.uint32) & mx.array(0xFFFFE000, mx.uint32) for x in (a, b))
        rounded = [mx.view(x, mx.float32) for x in bits]
        return rounded[0] @ rounded[1]

    uses_tf32.cache_clear()
    simulate_gpu(monkeypatch, MAC_16_GB)
    if rounds:
        monkeypatch.setattr(mx, "matmul", product)
    line = Backend().compute_path("Accelerate", decodes=False)
    uses_tf32.cache_clear()
    assert line == ("GPU: MLX, float32 products in TF32 (11 bits)" if rounds else "GPU: MLX")


def test_every_field_of_the_machine_has_a_value() -> None:
    """The BLAS is the one that was passed in."""
    machine = describe_machine(blas="openblas")
    assert machine.blas == "openblas"
    assert machine.backend in ("CPU", "Metal", "CUDA")
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory_bytes > 2**28
    assert machine.mlx_version[0].isdigit()
    assert all([machine.processor, machine.device, machine.system])


def test_on_macos_the_processor_is_the_chip_and_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has neither /proc nor CPU affinity."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "Apple M3"})
    machine = describe_machine(blas="Accelerate")
    assert (machine.processor, machine.cores) == ("Apple M3", os.cpu_count())


def test_a_restored_random_state_gives_the_same_numbers() -> None:
    """Dropout after a resume equals that of an uninterrupted run."""
    mx.random.seed(7)
    mx.eval(mx.random.uniform(shape=(5,)))
    state = random_state()
    expected = mx.random.uniform(shape=(5,)).tolist()
    mx.random.seed(99)
    restore_random_state(state)
    assert mx.random.uniform(shape=(5,)).tolist() == expected
    assert all(isinstance(word, int) for word in state)


@pytest.fixture
def control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of the control groups of Linux; the process is in no group at first, and uses the CPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "physical_memory", lambda: 16 * GIB)
    return tmp_path


def group(directory: Path, files: dict[str, str]) -> None:
    """Write the files of a control group."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def test_metal_recommends_less_than_the_installed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recommended working-set size is the limit, not the memory of the machine."""
    simulate_gpu(monkeypatch, MAC_16_GB)
    expected = MemoryLimit(bytes=11_453_251_584, source="metal", installed=16 * GIB)
    assert memory_limit() == expected


def test_a_gpu_with_its_own_memory_is_limited_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA reports it."""
    simulate_gpu(monkeypatch, {"device_name": "H100", "total_memory": 80 * GIB, "free_memory": 79 * GIB})
    assert memory_limit() == MemoryLimit(bytes=80 * GIB, source="gpu", installed=80 * GIB)


def test_the_cpu_is_limited_by_the_installed_memory(control_groups: Path) -> None:
    """Without a control group, or with groups that have no limit."""
    expected = MemoryLimit(bytes=16 * GIB, source="installed", installed=16 * GIB)
    assert (memory_limit(), cgroup_headroom()) == (expected, None)
    (control_groups / "membership").write_text("0::/job\n")
    unlimited = {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": "inactive_file 1\n"}
    group(control_groups / "cgroup" / "job", unlimited)
    assert (memory_limit(), cgroup_headroom()) == (expected, None)


def test_the_smallest_limit_of_a_control_group_and_its_ancestors_counts(control_groups: Path) -> None:
    """Version 2. Pages of files that can be dropped count as free."""
    (control_groups / "membership").write_text("0::/pod/job\n")
    root = control_groups / "cgroup"
    inner = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": f"inactive_file {GIB}\n"}
    outer = {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": "inactive_file 0\n"}
    group(root / "pod" / "job", inner)
    group(root / "pod", outer)
    assert memory_limit() == MemoryLimit(bytes=4 * GIB, source="cgroup", installed=16 * GIB)
    assert cgroup_headroom() == GIB


def test_control_groups_of_version_1_are_read(control_groups: Path) -> None:
    """A group of the host that the container does not see is skipped; its root is the container's group."""
    (control_groups / "membership").write_text("9:name=systemd:/\n4:cpu,memory:/host/path\n0::/\n")
    files = {"memory.limit_in_bytes": f"{2 * GIB}\n", "memory.usage_in_bytes": f"{GIB}\n"}
    group(control_groups / "cgroup" / "memory", {**files, "memory.stat": f"cache 1\ntotal_inactive_file {GIB // 2}\n"})
    assert memory_limit() == MemoryLimit(bytes=2 * GIB, source="cgroup", installed=16 * GIB)
    assert cgroup_headroom() == 3 * GIB // 2


@pytest.fixture
def mlx_limits() -> Iterator[int]:
    """The memory limit of MLX; it and the cache limit are restored afterwards."""
    memory, cache = mx.get_memory_limit(), mx.set_cache_limit(2**30)
    yield memory
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


def test_mlx_stays_below_the_limit_and_keeps_the_configured_cache(mlx_limits: int) -> None:
    """A limit above that of MLX does not raise it."""
    limit = MemoryLimit(bytes=3 * GIB, source="metal", installed=4 * GIB)
    limit_mlx_memory(limit, held=GIB, cache=GIB // 2)
    assert (mx.get_memory_limit(), mx.set_cache_limit(0)) == (3 * GIB, GIB // 2)
    larger = MemoryLimit(bytes=mlx_limits + 100 * GIB, source="metal", installed=mlx_limits + 200 * GIB)
    mx.set_memory_limit(mlx_limits)
    limit_mlx_memory(larger, held=GIB, cache=1)
    assert mx.get_memory_limit() == mlx_limits


@pytest.mark.usefixtures("mlx_limits")
@pytest.mark.parametrize(("held", "kept"), [(3 * GIB - 300 * 2**20, 300 * 2**20), (4 * GIB, 256 * 2**20)])
def test_the_cache_gets_what_the_run_leaves(held: int, kept: int) -> None:
    """What the run always holds and freed buffers stay below the limit together; 256 MiB for freed buffers remain."""
    limit_mlx_memory(MemoryLimit(bytes=3 * GIB, source="metal", installed=4 * GIB), held=held, cache=GIB)
    assert mx.set_cache_limit(0) == kept


def test_a_wired_limit_that_macos_refuses_is_an_error_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise MLX receives the limit in bytes."""
    given: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", given.append)
    wire_memory(2)
    assert given == [2 * 2**20]

    def refuse(_: int) -> int:
        raise ValueError("too\nlarge")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    with pytest.raises(ProfileError, match=r"memory\.wired_limit_mib") as caught:
        wire_memory(2)
    assert "\n" not in str(caught.value)
