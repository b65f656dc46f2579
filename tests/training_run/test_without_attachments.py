"""A run whose installation lacks attachments that extend the library."""

from __future__ import annotations

import pytest

from tests.absent import without
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile


@pytest.mark.parametrize("absent", ["adapters", "files", "graders", "reasoning_gym", "speculation"])
def test_the_profile_of_a_run_loads_and_its_memory_is_estimated(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default profile uses none of these attachments."""
    expected = load_profile("local-m3", {})
    without(monkeypatch, absent)
    profile = load_profile("local-m3", {})
    assert profile == expected
    assert estimate_memory(profile.model, profile).total > 0
