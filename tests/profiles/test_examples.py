"""The example of every form of dataset in `profiles/examples` loads with the settings that docs/datasets.md names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training_run.groups.prompts import inspect_dataset
from training_run.profile.load import load_profile

EXAMPLES = Path(__file__).parents[2] / "profiles" / "examples"
EMBEDDED = EXAMPLES.parent / "embedded"
SETTINGS: dict[str, dict[str, Any]] = {
    "problems.json": {},
    "problems.jsonl": {},
    "problems.parquet": {},
    "problems.arrow": {},
    "problems.csv": {"prompt_key": "question", "answer_key": "solution", "type_key": "topic"},
    "conversations.jsonl": {"default_type": "math"},
    "worked_answers.jsonl": {
        "prompt_key": "question", "answer_pattern": r"####\s*(.+)", "default_type": "math",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_an_example_dataset_loads_with_its_settings(name: str) -> None:
    """All problems are rendered with the chat template of the embedded policy, and none occurs twice."""
    settings = {f"data.{key}": value for key, value in SETTINGS[name].items()}
    profile = load_profile("local-m3", {"data.train": str(EXAMPLES / name), **settings})
    dataset, prompts = inspect_dataset(profile, EMBEDDED)
    assert prompts is not None
    assert sum(dataset.problems.values()) + dataset.heldout == (4 if name.startswith("problems") else 3)
    assert (dataset.duplicates, dataset.overlap, prompts.removed) == (0, 0, 0)


def test_every_example_is_tried() -> None:
    """And no other file is in the directory."""
    assert {path.name for path in EXAMPLES.iterdir()} == set(SETTINGS)
