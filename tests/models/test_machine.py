"""The description of the machine, and the random state of MLX in a checkpoint."""

from __future__ import annotations

import os

import mlx.core as mx

from clotho.models.machine import describe_machine, random_state, restore_random_state


def test_every_field_of_the_machine_has_a_value() -> None:
    """The BLAS is the one that was passed in."""
    machine = describe_machine(blas="openblas")
    assert machine.blas == "openblas"
    assert machine.backend in ("CPU", "Metal", "CUDA")
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory_bytes > 2**28
    assert machine.mlx_version[0].isdigit()
    assert all([machine.processor, machine.device, machine.system])


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
