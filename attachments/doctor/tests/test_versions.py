"""Versions of libraries are compared with a table of known faults."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from attachments.doctor.versions import installed_versions, known_bad, version_findings


def test_the_installed_versions_have_no_known_fault() -> None:
    """MLX and mlx-lm are among these."""
    installed = installed_versions()
    assert {"mlx", "mlx-lm"} <= installed.keys()
    assert list(version_findings(installed)) == []


@pytest.mark.parametrize(
    ("package", "version", "count"),
    [("mlx", "0.31.1", 1), ("mlx", "0.31.2", 2), ("mlx", "0.32.0", 0), ("mlx-lm", "0.31.3", 1), ("numpy", "1.0", 0)],
)
def test_a_version_in_a_range_of_the_table_is_a_finding(package: str, version: str, count: int) -> None:
    """The advice is a command that installs another version."""
    found = list(version_findings({package: version}))
    assert [finding.name for finding in found] == ["version_known_bad"] * count
    assert all(finding.advice.startswith("pip install -U ") for finding in found)


def test_every_row_has_a_source_and_a_remedy_outside_of_its_range() -> None:
    """A row without a source is a rumour."""
    for row in known_bad():
        assert row.source.startswith("https://")
        lowest = row.remedy.rpartition(">=")[2].strip("'")
        assert not SpecifierSet(row.versions).contains(lowest)
