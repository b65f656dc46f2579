"""What is remembered between groups."""

from __future__ import annotations

from typing import Any

from clotho.atropos.reader import MOST_NAMES, EnvironmentNames, RecentGroups
from clotho.atropos.wire import WireGroup, decode_group
from tests.atropos.groups import group, raw


def wire(**fields: Any) -> WireGroup:
    """A group as it was decoded."""
    return decode_group(raw(group((40, 41), (42,)) | fields))


def test_the_same_group_is_known_again_whoever_sends_it() -> None:
    """Tokens, masks, scores and log-probabilities decide; nothing else does."""
    recent = RecentGroups()
    assert not recent.saw(wire())
    assert recent.saw(wire(env_id=8, messages=[], overrides=[{}, {}]))


def test_what_differs_is_another_group() -> None:
    """Rewards, log-probabilities, and where one row ends and the next begins."""
    recent = RecentGroups()
    assert not recent.saw(wire())
    assert not recent.saw(wire(scores=[1.0, 0.0]))
    assert not recent.saw(wire(inference_logprobs=[[1, 1, 1, -2, -2], [1, 1, 1, -3]]))
    assert not recent.saw(wire(tokens=[[5, 9, 33, 40], [41, 5, 9, 33, 42]]))


def test_a_label_names_an_environment_for_good() -> None:
    """Under its number, until it asks under another; a number nobody has is no name."""
    names = EnvironmentNames()
    assert names.name(0) == "environment 0"
    assert names.name(0, "arithmetic") == "arithmetic"
    assert names.name(0) == "arithmetic"
    assert names.name(0, "guessing") == "guessing"
    assert names.name(0) == "guessing"
    assert [names.name(number) for number in (None, -1, 10**12)] == ["environment"] * 3


def test_names_do_not_grow_without_end() -> None:
    """Those that were given out stay."""
    names = EnvironmentNames()
    given = [names.name(number, f"label{number}") for number in range(3 * MOST_NAMES)]
    assert given[MOST_NAMES - 1 : MOST_NAMES + 1] == [f"label{MOST_NAMES - 1}", "other"]
    assert set(given[MOST_NAMES:]) == {"other"}
    assert names.name(5) == "label5"
