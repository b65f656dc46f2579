"""docs/doctor.md describes every finding of the checks before a run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "clotho" / "preflight").glob("*.py"), ROOT / "clotho" / "commands" / "doctor.py"]
NAMED = re.compile(r'Finding\(\s*name="([a-z_]+)"|_refusal\(error, "([a-z_]+)"|refused\("[a-z]+", "([a-z_]+)"')
OF_SIGNAL = {"no_reward", "always_rewarded", "rewards_fail", "all_truncated", "truncated"}
"""Findings about completions that runs and `doctor` share (`clotho/monitoring/training_signal.py`)."""


def test_the_page_has_one_row_for_every_finding_and_no_other_rows() -> None:
    """In alphabetical order."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("## Findings")[2]
    rows = re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)
    named = {name for path in SOURCES for found in NAMED.findall(path.read_text(encoding="utf-8")) for name in found}
    refused = re.findall(r'_refusal\(\w+, "([a-z_]+)"', SOURCES[-1].read_text(encoding="utf-8"))
    assert rows == sorted((named | OF_SIGNAL | set(refused)) - {""})
