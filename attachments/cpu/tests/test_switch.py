"""The switch of the CPU backend: with CLOTHO_CPU_KERNELS=0, MLX's own kernels compute the same."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import attachments.cpu
from attachments.cpu.kv_cache import HostKVCache
from attachments.cpu.supported import make_host_decoder
from clotho.inference.kv_cache import BatchKVCache
from protocols.sampling import Completion, Sampling
from tests.inference.engine_helpers import make_engine, run, submit_request
from tests.small_models import tiny_source

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def completions(cache: type) -> list[Completion]:
    """Sample eight completions with an engine, and check which KV cache it uses."""
    engine = make_engine(tiny_source())
    assert isinstance(engine._forced._make_caches(1), cache)
    answer = submit_request(engine, PROMPT, Sampling(max_tokens=12, ignore_eos=True), seeds=range(8))
    run(engine)
    return answer.completions


@pytest.mark.needs_cpu_path
def test_log_probabilities_agree_with_and_without_the_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens are sampled from the same seeds, at the same log-probabilities up to rounding."""
    numpy = completions(HostKVCache)
    monkeypatch.setattr(attachments.cpu, "KERNELS_ENABLED", False)
    assert make_host_decoder(tiny_source().model) is None
    mlx = completions(BatchKVCache)
    assert [one.tokens for one in mlx] == [one.tokens for one in numpy]
    for one, other in zip(mlx, numpy, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True), (None, True)])
def test_the_environment_variable_is_read_at_import(value: str | None, enabled: bool) -> None:
    """Only 0 turns the kernels off, and the description of the compute path says so."""
    code = (
        "import attachments.cpu, mlx.core as mx; mx.set_default_device(mx.cpu);"
        "print(attachments.cpu.computes_on_host(), attachments.cpu.compute_path('blas'))"
    )
    variables = {name: text for name, text in os.environ.items() if name != attachments.cpu.SWITCH}
    if value is not None:
        variables[attachments.cpu.SWITCH] = value
    run_code = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    path = "host: NumPy/BLAS decode, blas" if enabled else "host: MLX kernels (CLOTHO_CPU_KERNELS=0), blas"
    assert run_code.stdout.split(maxsplit=1) == [str(enabled), path + "\n"]
