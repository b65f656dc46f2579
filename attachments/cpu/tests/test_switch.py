"""When the CPU backend is in use, and what MLX's own kernels compute instead: the same."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attachments.cpu import library
from attachments.cpu.backend import CpuBackend
from attachments.cpu.kv_cache import HostKVCache
from clotho.backend import SWITCH, backend_of
from clotho.inference.kv_cache import BatchKVCache
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import make_engine, run, submit_request
from tests.small_models import tiny_source

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def completions(cache: type) -> list[Completion]:
    """Sample eight completions with an engine, and check which KV cache it uses."""
    engine = make_engine(tiny_source())
    assert isinstance(engine.make_caches(1), cache)
    answer = submit_request(engine, PROMPT, Sampling(max_tokens=12, ignore_eos=True), seeds=range(8))
    run(engine)
    return answer.completions


@pytest.mark.needs_cpu_path
def test_log_probabilities_agree_with_and_without_the_cpu_kernels() -> None:
    """The same tokens are sampled from the same seeds, at the same log-probabilities up to rounding."""
    numpy = completions(HostKVCache)
    with model_lanes.device_path():
        mlx = completions(BatchKVCache)
    assert [one.tokens for one in mlx] == [one.tokens for one in numpy]
    for one, other in zip(mlx, numpy, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True), (None, True)])
def test_the_environment_variable_turns_the_backend_off(
    value: str | None, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only 0 does, and the description of the compute path says so."""
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    found = backend_of.__wrapped__(mx.cpu)
    assert (type(found) is CpuBackend) == enabled
    path = "host: NumPy/BLAS decode, blas" if enabled else "host: MLX kernels (CLOTHO_CPU_KERNELS=0), blas"
    assert mx.default_device() != mx.Device(mx.cpu) or found.compute_path("blas", decodes=enabled) == path


def test_on_a_gpu_mlx_computes() -> None:
    """Its kernels are fast already, and its memory is far."""
    assert library.backend(mx.gpu) is None
