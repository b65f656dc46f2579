"""What the machine says of itself."""

from __future__ import annotations

import os

from clotho.models.machine import describe_machine


def test_the_machine_is_described() -> None:
    """Every field holds something a person can use, and the BLAS is the one that was passed in."""
    machine = describe_machine(blas="openblas")
    assert machine.blas == "openblas"
    assert machine.backend in ("CPU", "Metal", "CUDA")
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory_bytes > 2**28
    assert machine.mlx_version[0].isdigit()
    assert all([machine.processor, machine.device, machine.system])
