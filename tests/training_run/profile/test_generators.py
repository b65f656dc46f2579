"""Datasets that attachments generate, and how they are refused without their attachment."""

from __future__ import annotations

import pytest

from clotho.extension import provided
from protocols.errors import DatasetError
from training_run.attachment import installed_attachments
from training_run.profile.data import DataSection
from training_run.profile.generators import PREFIXES, Generators, epoch_weights, prefix_of, rewards_of


def test_every_prefix_is_known_with_its_attachment() -> None:
    """A row names its functions as text, so that nothing is imported before it is used."""
    rows = [(prefix, row, one) for one in installed_attachments() for prefix, row in one.generators.items()]
    assert {prefix: type(one).__module__.split(".")[1] for prefix, _, one in rows} == PREFIXES
    assert all(callable(provided(place)) for _, row, _ in rows for place in (row.open, row.weights))


def test_problems_of_an_absent_attachment_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of such a dataset is still no path of a file; a file is read as before."""
    data = DataSection(train="reasoning_gym:gcd")
    monkeypatch.setattr("training_run.profile.generators.installed_attachments", lambda: ())
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
