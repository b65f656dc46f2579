"""docs/doctor.md describes every finding of the checks before a run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCTOR = ROOT / "attachments" / "doctor" / "doctor.py"
SOURCES = [
    *DOCTOR.parent.glob("*.py"),
    ROOT / "attachments" / "alarms" / "rehearsal.py",
    ROOT / "attachments" / "machine" / "machine.py",
]
NAMED = re.compile(r'Finding\(\s*name="([a-z_]+)"|_refusal\(error, "([a-z_]+)"|refused\("[a-z]+", "([a-z_]+)"')
SHARED = {
    *("no_reward", "always_rewarded", "constant_reward_part", "rewards_fail", "all_truncated", "truncated"),
    *("low_power_mode", "on_battery"),
}
"""Findings that runs and `doctor` share: of completions, and of power."""


def test_the_page_has_one_row_for_every_finding_and_no_other_rows() -> None:
    """In alphabetical order."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("## Findings")[2]
    rows = re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)
    named = {name for path in SOURCES for found in NAMED.findall(path.read_text(encoding="utf-8")) for name in found}
    refused = re.findall(r'_refusal\(\w+, "([a-z_]+)"', DOCTOR.read_text(encoding="utf-8"))
    assert rows == sorted((named | SHARED | set(refused)) - {""})
