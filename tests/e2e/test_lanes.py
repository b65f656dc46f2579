"""Complete runs without the host path, in each precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import model_lanes
from tests.e2e.pipeline_process import FEW_PROBLEMS, assert_recorded, metrics, run

DEVICE_LANES = [
    pytest.param(lane, id=lane.name, marks=() if lane.name == "float32" else pytest.mark.slow)
    for lane in model_lanes.LANES.values()
    if lane.on_device
]


FEW = (
    "--server.port", "0", *FEW_PROBLEMS, "--learner.batch-size", "2", "--sampling.group-size", "4",
    "--sampling.max-tokens", "64", "--eval.problems", "4", "--checkpoint.interval", "1",
)  # fmt: skip
"""MLX multiplies 16-bit and quantized weights slowly on the CPU."""


@pytest.mark.parametrize("device_lane", DEVICE_LANES)
def test_a_run_trains_and_resumes_in_every_lane(tmp_path: Path, device_lane: model_lanes.Lane) -> None:
    """Sampler and learner agree, every group ends once, and the resumed run continues at the next step."""
    with model_lanes.using(device_lane):
        first = run(tmp_path / "run", "--steps", "1", small=FEW)
        assert first.status == 0, first
        resumed = run(tmp_path / "run", "--steps", "2", "--resume", small=FEW)
    assert resumed.status == 0, resumed
    assert_recorded(tmp_path / "run", resumed.accounting, steps=2)
    assert "host: MLX kernels" in first.out or "GPU" in first.out
    recorded = metrics(tmp_path / "run")
    assert any(line["update_applied"] for line in recorded)
    mismatches = [line["mismatch_kl"] for line in recorded if line["mismatch_kl"] is not None]
    assert mismatches
    assert max(mismatches) < (1e-3 if device_lane.dtype == "float32" else 1e-2)
