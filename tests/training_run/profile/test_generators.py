"""Datasets that attachments generate, and how they are refused without their attachment."""

from __future__ import annotations

import pytest

from clotho.extension import found, provided
from protocols.errors import DatasetError
from tests.absent import without
from training_run.profile.data import DataSection
from training_run.profile.generators import GENERATORS, Generators, epoch_weights, prefix_of, rewards_of


def test_every_prefix_is_known_with_its_attachment() -> None:
    """A row names its functions as text, so that nothing is imported before it is used."""
    owners = {prefix: folder for folder, rows in found(GENERATORS.place).items() for prefix in rows}
    assert owners == GENERATORS.owners
    assert all(callable(provided(place)) for row in GENERATORS().values() for place in (row.open, row.weights))


def test_problems_of_an_absent_attachment_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of such a dataset is still no path of a file; a file is read as before."""
    data = DataSection(train="reasoning_gym:gcd")
    without(monkeypatch, "reasoning_gym")
    with Generators(data) as opened, pytest.raises(DatasetError, match="needs the attachment 'reasoning_gym'"):
        opened.problems(data.train, seed=0)
    with pytest.raises(DatasetError, match="needs the attachment 'reasoning_gym'"):
        epoch_weights(data, [])
    assert prefix_of(data.train)
    assert rewards_of(data.train) == ()


def test_other_datasets_are_not_generated_and_keep_their_type_weights() -> None:
    """Files, directories, and repositories of the hub."""
    assert [prefix_of(name) for name in ("x.jsonl", "openai/gsm8k", "C:x", None)] == ["", "", "", ""]
    assert epoch_weights(DataSection(train="x.jsonl", type_weights={"a": 2.0}), []) == {"a": 2.0}
