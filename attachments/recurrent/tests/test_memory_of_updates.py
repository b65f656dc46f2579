"""The memory estimate of updates of models with recurrent layers, against what MLX really held."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_models import SCANNED
from tests.training_run.memory.test_estimate import estimate_by_peak

FASTEST = ("mamba2", False), ("qwen3_5", True)
MOST = {("qwen3_5_moe", True): 1.4}
"""Largest ratio of estimate and peak; 1.3 of others."""

CASES = [(architecture, recomputed) for architecture in sorted(SCANNED) for recomputed in (False, True)]


@pytest.mark.parametrize(
    ("architecture", "grad_checkpoint"),
    [pytest.param(*case, marks=() if case in FASTEST else pytest.mark.slow) for case in CASES],
)
def test_the_estimate_of_an_update_is_1_to_1_3_times_the_peak(
    tmp_path: Path, architecture: str, grad_checkpoint: bool
) -> None:
    """With and without gradient checkpointing; the chunks that are computed again together are counted."""
    ratio = estimate_by_peak(tmp_path, architecture, grad_checkpoint=grad_checkpoint)
    assert 1.0 <= ratio <= MOST.get((architecture, grad_checkpoint), 1.3)
