"""Complete runs without the host path, in each precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lanes
from tests.e2e.pipeline_process import assert_recorded, lines, metrics, run

DEVICE_LANES = [lane for lane in lanes.LANES.values() if lane.on_device]


@pytest.mark.parametrize("device_lane", DEVICE_LANES, ids=lambda lane: lane.name)
def test_a_run_trains_and_resumes_in_every_lane(tmp_path: Path, device_lane: lanes.Lane) -> None:
    """Sampler and learner agree, every group ends once, and the resumed run continues at the next step."""
    with lanes.using(device_lane):
        first = run(tmp_path / "run", "--steps", "2", "--checkpoint.interval", "1")
        assert first.status == 0, first
        resumed = run(tmp_path / "run", "--steps", "3", "--checkpoint.interval", "1", "--resume")
    assert resumed.status == 0, resumed
    assert_recorded(tmp_path / "run", resumed.accounting, steps=3)
    assert "host: MLX kernels" in first.out or "GPU" in first.out
    assert any(line["update_applied"] for line in metrics(tmp_path / "run"))
    events = [line["event"] for line in lines(tmp_path / "run" / "log.jsonl")]
    assert "parity_check_failed" not in events
