"""The products of decode steps use idle cores, and give them back at the next step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho import cpu
from clotho.cpu import DIVIDED_PARAMETERS, IDLE_CORES, load_blas
from clotho.cpu.blas import Floats
from clotho.models.machine import core_division
from clotho.runtime.arbiter import Arbiter
from tests.cpu.supported_models import Rows, adapt, plain_source
from tests.inference.engine_helpers import make_prompt

pytestmark = [
    pytest.mark.needs_cpu_path,
    pytest.mark.skipif(not load_blas().startswith("mkl"), reason="only MKL divides its products"),
]

CORES, SMALL = 4, DIVIDED_PARAMETERS - 1


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may use `CORES` cores and has no idle ones; it sets the number of MKL's threads itself."""
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu, "usable_cores", lambda: CORES)
    monkeypatch.setattr(IDLE_CORES, "_decode_threads", 1)
    cpu._mkl_function.cache_clear()


def threads() -> int:
    """How many threads a product in this thread may use."""
    found: Any = ctypes.CDLL(None).MKL_Get_Max_Threads
    return int(found())


def threads_of_a_step() -> int:
    """How many threads a product of a decode step uses."""
    with IDLE_CORES.decoding():
        return threads()


def test_steps_use_the_cores_of_threads_without_work_and_no_core_twice() -> None:
    """A lane that begins to work gets its share with the next step, and its end gives it back. Others have one core."""
    arbiter, before = Arbiter(slots=2, decode_share=0.5), threads()
    learner = arbiter.lane("learner", "update")
    arbiter.divide_cores(core_division(SMALL))
    arbiter.set_work(arbiter.decode, has_work=True)
    assert threads_of_a_step() == CORES
    arbiter.set_work(learner, has_work=True)
    assert threads_of_a_step() == CORES // 2
    arbiter.set_work(learner, has_work=False)
    assert threads_of_a_step() == CORES
    assert threads() == before


def test_a_step_that_fails_gives_the_cores_back() -> None:
    """Products outside of steps have as many threads as before."""
    before = threads()
    IDLE_CORES.divide_decoding(1)
    with pytest.raises(ZeroDivisionError), IDLE_CORES.decoding():
        raise ZeroDivisionError
    assert threads() == before


@pytest.mark.parametrize("rows", [1, 5, 48])
def test_logits_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    """Bit for bit, with an adapter, for few rows and many."""
    model = plain_source("qwen3").model
    adapt(model)
    mx.eval(model.parameters())

    def logits(computing: int) -> Floats:
        IDLE_CORES.divide_decoding(computing)
        decoding = Rows(model, rows)
        decoding.enter(range(rows), make_prompt(9, 0))
        return np.stack([decoding.step() for _ in range(3)])

    np.testing.assert_array_equal(logits(computing=1), logits(computing=CORES))


def test_a_number_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither large nor small models change the number of threads that the user has set."""
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    before = threads()
    divisions: list[Callable[[int], None]] = [core_division(parameters) for parameters in (SMALL, DIVIDED_PARAMETERS)]
    for divide in divisions:
        divide(1)
    assert (threads(), threads_of_a_step()) == (before, before)
