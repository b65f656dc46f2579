"""The memory estimate of updates of models with recurrent layers, against what MLX really held."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.small_models import SCANNED
from tests.training_run.memory.test_estimate import estimate_by_peak

SHORT, LONG = 49, 1009
"""Numbers of completion tokens; prompts have 16."""

FASTEST = ("mamba2", SHORT, False), ("qwen3_5", SHORT, True)

CASES = product(sorted(SCANNED), (SHORT, LONG), (False, True))


@pytest.mark.parametrize(
    ("architecture", "completion", "grad_checkpoint"),
    [pytest.param(*case, marks=() if case in FASTEST else pytest.mark.slow) for case in CASES],
)
def test_the_estimate_of_an_update_is_1_to_1_3_times_the_peak(
    tmp_path: Path, architecture: str, completion: int, grad_checkpoint: bool
) -> None:
    """With and without gradient checkpointing; the chunks that are computed again together are counted."""
    ratio = estimate_by_peak(tmp_path, architecture, grad_checkpoint=grad_checkpoint, completion=completion)
    assert 1.0 <= ratio <= 1.3
