"""Settings that are valid and far from what trains well."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.doctor.versions import setting_findings
from tests.training_run.built_context import tiny_profile


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ({"type": "lora", "scale": 10.0}, False),
        ({"type": "lora", "scale": 1000.0}, True),
        ({"type": "lora", "scale": 0.01}, True),
        ({"type": "dora", "rank": 1, "alpha": 256.0, "scale": None}, True),
        ({"type": "lora", "rank": 512, "alpha": 32.0, "scale": None}, False),
        ({"type": "full"}, False),
    ],
    ids=["default", "high", "low", "alpha", "high rank", "no adapter"],
)
def test_an_adapter_scale_far_from_the_usual_ones_is_a_finding(
    method: dict[str, object], found: bool, tmp_path: Path
) -> None:
    """The scale is `policy.method.scale`, or `alpha` divided by the rank."""
    given = {key: value for key, value in method.items() if value is not None}
    plain = {"type": "lora"} if given["type"] == "full" else {}
    profile = tiny_profile(tmp_path, policy={"method": plain | given}, collapse_detection="off")
    assert [finding.name for finding in setting_findings(profile)] == ["lora_scale_unusual"] * found
