"""What attachments add to the library, and how the library refuses what an absent one would add."""

from __future__ import annotations

import pytest

from clotho.extension import OWNERS, absence, extension_rewards, extensions, generators, provided
from clotho.generators import Generators, epoch_weights, prefix_of, rewards_of
from clotho.rewards.registry import load_reward
from clotho.rewards.weighted_sum import Rewards
from clotho.settings.data import DataSection
from protocols.errors import DatasetError, ProfileError
from tests.absent import without


def test_every_name_of_a_table_is_known_with_its_attachment() -> None:
    """Whether or not the attachment is installed; the names of the tables differ from each other."""
    found = [
        (name, one.attachment) for one in extensions() for table in (one.generators(), one.rewards()) for name in table
    ]
    assert dict(found) == OWNERS
    assert len(found) == len(OWNERS)


def test_every_row_names_something_that_can_be_imported() -> None:
    """As text, so that nothing is imported before it is used."""
    places = [row.load for row in extension_rewards().values()]
    places += [place for row in generators().values() for place in (row.open, row.weights)]
    assert all(callable(provided(place)) for place in places)


@pytest.mark.parametrize(
    ("name", "attachment"), [("judge", "graders"), ("math_verify", "graders"), ("reasoning_gym", "reasoning_gym")]
)
def test_a_reward_of_an_absent_attachment_is_refused_by_its_name(
    name: str, attachment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of no attachment are unknown; the functions of the library are there."""
    without(monkeypatch, attachment)
    with pytest.raises(ProfileError) as caught:
        load_reward(name)
    assert absence(name) in str(caught.value)
    assert f"'{attachment}'" in absence(name)
    assert absence("zzz") == ""
    assert callable(load_reward("exact"))


def test_a_sum_of_rewards_refuses_names_of_absent_attachments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profile does."""
    without(monkeypatch, "graders")
    with pytest.raises(ProfileError, match="needs the attachment 'graders'"):
        Rewards(math_verify=1.0)


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
