"""Suggestions for names that do not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocols.errors import did_you_mean, nearest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("gsop", "gspo"), ("GRPO", "grpo"), ("leave-one-out", "leave_one_out"), ("xyz", None), ("", None)],
)
def test_the_most_similar_name_is_suggested_if_one_is_similar(word: str, expected: str | None) -> None:
    """Case, `-` and `_` do not count."""
    assert nearest(word, ["grpo", "gspo", "leave_one_out"]) == expected


def test_a_cutoff_of_zero_always_suggests_a_name() -> None:
    """Without candidates there is none."""
    assert nearest("xyz", ["grpo"], cutoff=0.0) == "grpo"
    assert nearest("xyz", [], cutoff=0.0) is None


def test_the_end_of_a_refusal_is_empty_without_a_similar_name() -> None:
    """It starts with a semicolon otherwise."""
    assert did_you_mean("gsop", ["grpo", "gspo"]) == "; did you mean gspo?"
    assert did_you_mean("xyz", ["grpo", "gspo"]) == ""


def test_only_one_module_compares_names() -> None:
    """Every other module asks this one, so that suggestions have one cut-off."""
    importers = [
        str(path.relative_to(ROOT))
        for place in ("actors", "attachments", "clotho", "protocols", "training_run")
        for path in (ROOT / place).rglob("*.py")
        if re.search(r"^ *(?:import|from)\b.*\bdifflib\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert importers == ["protocols/errors.py"]
