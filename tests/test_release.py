"""What a release needs agrees: version, changelog, and the checks before a commit."""

from __future__ import annotations

import re
from pathlib import Path

from clotho import __version__

ROOT = Path(__file__).parents[1]


def test_the_changelog_has_a_section_for_the_version() -> None:
    """With a date, below what is not released yet. The release workflow asks for it too."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", sections[1])


def test_the_checks_before_a_commit_are_those_of_ci() -> None:
    """Word for word, so that a commit that passes them is not refused for its form."""
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    commands = {line.partition(" &")[0] for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()}
    assert len(hooks) == 3
    assert set(hooks) <= commands
