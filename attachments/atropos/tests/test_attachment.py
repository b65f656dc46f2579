"""What environments add to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attachments.atropos import attachment
from attachments.atropos.mock import MockAtropos
from attachments.atropos.sample_log import SampleLog
from protocols.errors import ProfileError
from tests.training_run.built_context import open_context, tiny_profile
from training_run.memory.need import memory_need
from training_run.profile.rules import has_own_groups
from training_run.supervision.custom_actors import require_positions

MOCK: dict[str, Any] = {"atropos": "mock", "server": {"type": "http", "port": 0}}
ADDED = {"factory": "a:B", "mode": "add"}


async def test_environments_take_the_place_of_the_groups_of_the_run(tmp_path: Path) -> None:
    """The run gets a source of groups, and a log of what clients sample."""
    profile = tiny_profile(tmp_path, **MOCK)
    async with open_context(profile) as run:
        assert run.attached.groups is not None
        assert isinstance(run.attached.groups.source, MockAtropos)
        assert isinstance(run.attached.samples, SampleLog)
        assert run.attached.senders == []
        await run.attached.groups.source.close()
    assert not has_own_groups(profile)


async def test_a_run_without_environments_makes_its_own_groups(tmp_path: Path) -> None:
    """Nothing is recorded of what clients sample."""
    profile = tiny_profile(tmp_path)
    async with open_context(profile) as run:
        assert run.attached.groups is None
        assert run.attached.samples is None
    assert has_own_groups(profile)


def test_the_length_of_sequences_bounds_the_memory(tmp_path: Path) -> None:
    """Environments send whole sequences, of any number of turns."""
    for atropos, tokens in (({"type": "mock", "max_tokens": 77}, 77), ("off", None)):
        profile = tiny_profile(tmp_path, **{**MOCK, "atropos": atropos})
        assert memory_need(profile.engine, profile).sequence_tokens == tokens


def test_an_address_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    """Before anything is loaded."""
    sections: dict[str, Any] = {**MOCK, "atropos": {"type": "connect", "url": "http://host:99999"}}
    with pytest.raises(ProfileError, match=r"atropos\.url"):
        attachment.check(tiny_profile(tmp_path, **sections))


def test_no_custom_actor_has_the_name_of_an_environment(tmp_path: Path) -> None:
    """Names are unique within a run; the API server has one too."""
    sections: dict[str, Any] = {
        **MOCK,
        "atropos": {"type": "connect", "url": "http://host:1", "python": "python"},
        "environments": [{"name": "one", "script": "one.py"}],
    }
    for name in attachment.children(tiny_profile(tmp_path, **sections)):
        with pytest.raises(ProfileError, match=name):
            require_positions(tiny_profile(tmp_path, **sections, actors=[ADDED | {"name": name}]))
