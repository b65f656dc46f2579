"""Reasoning Gym: its datasets load by name and settings, are repeatable, and score the answers of their problems.

The rules are checked with a stand-in and, if it is installed, with the library; a slow test checks every dataset of the
library. docs/datasets.md lists the exceptions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attachments.reasoning_gym.gym_library import (
    INSTALL,
    Entry,
    GymError,
    Job,
    JobRefused,
    create,
    generate,
    library,
    score,
)
from attachments.reasoning_gym.reasoning_gym import BLOCK, GymProcesses
from attachments.reasoning_gym.tests import fake_reasoning_gym

PAGE = Path(__file__).parents[3] / "docs" / "datasets.md"
PROBLEMS = 5
"""Problems per dataset."""

SCORES = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import msgspec
from attachments.reasoning_gym.gym_library import Entry, create, library, score
if not (problems := json.load(sys.stdin)):
    print(json.dumps({name: name in library().curricula for name in library().datasets}))
else:
    found = []
    for dataset, level, entries in problems:
        made = create(dataset, {}, level)
        found.append([score(made, entry, entry.answer or "") for entry in msgspec.convert(entries, list[Entry])])
    print(json.dumps(found))
"""


def in_library(problems: list[Any]) -> Any:
    """The scores of the reference answers in another process; without problems, the datasets with a curriculum."""
    done = subprocess.run(
        [sys.executable, "-c", SCORES, json.dumps(sys.path)],
        input=json.dumps(problems).encode(), stdout=subprocess.PIPE, check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def listed(marker: str) -> set[str]:
    """The names in code format in the paragraph of docs/datasets.md that begins with `marker`."""
    (paragraph,) = [part for part in PAGE.read_text(encoding="utf-8").split("\n\n") if part.startswith(marker)]
    return set(re.findall(r"`(\w+)`", paragraph))


def job(name: str, level: int | None = None) -> Job:
    """The first problems of a dataset."""
    return Job(dataset=name, settings={}, level=level, seed=11, size=BLOCK, count=PROBLEMS)


@pytest.fixture(params=["stand-in", pytest.param("library", marks=pytest.mark.needs_extra("reasoning-gym"))])
def gym(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the stand-in, and the library itself."""
    if request.param == "library":
        yield
        return
    with fake_reasoning_gym.installed():
        yield


@pytest.fixture
def stand_in() -> Iterator[None]:
    """Use the stand-in alone, for datasets that the library does not have."""
    with fake_reasoning_gym.installed():
        yield


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("dataset", "settings", "level", "key", "says"),
    [
        ("chain_smu", {}, None, "dataset", "chain_sum"),
        ("composite", {}, None, "", "data.train"),
        ("chain_sum", {"max_digit": 2}, None, "settings", "max_digits"),
        ("chain_sum", {"seed": 2}, None, "settings", "the seed of the run"),
        ("chain_sum", {"size": 2}, None, "settings", "key size"),
        ("chain_sum", {"max_digits": 0}, None, "settings", "max_digits must be >= min_digits"),
        ("chain_sum", {"max_digits": "many"}, None, "settings", "TypeError"),
        ("chain_sum", {}, 99, "level", "levels 0 to"),
        ("acre", {}, 0, "level", "no curriculum"),
    ],
)
def test_a_dataset_that_cannot_be_created_names_the_key_that_is_wrong(
    dataset: str, settings: dict[str, Any], level: int | None, key: str, says: str
) -> None:
    """In one line, with the nearest name or what the library says."""
    with pytest.raises(GymError) as caught:
        create(dataset, settings, level)
    assert caught.value.key == key
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize("dataset", ["chain_sum", "complex_arithmetic"])
def test_problems_depend_on_the_seed_alone_and_accept_their_answers(dataset: str) -> None:
    """Generators that use a global random state too, and scorers that compare tuples after a way through JSON."""
    asked = Job(dataset=dataset, settings={}, level=None, seed=11, size=BLOCK, count=3)
    entries = generate(asked)
    assert generate(asked) == entries
    assert generate(msgspec.structs.replace(asked, seed=12)) != entries
    assert len({entry.question for entry in entries}) == 3
    assert all(bool(entry.literal) == (dataset == "complex_arithmetic") for entry in entries)
    made = create(dataset, {}, None)
    for entry in msgspec.json.decode(msgspec.json.encode(entries), type=list[Entry]):
        assert score(made, entry, entry.answer or "") == 1.0
        assert score(made, entry, "nothing") < 1.0


@pytest.mark.usefixtures("gym")
def test_settings_replace_those_of_the_level() -> None:
    """Ranges of a level extend from the lowest level to it."""
    configurations = [
        create("chain_sum", settings, 1, seed=5, size=7).config
        for settings in ({}, {"max_digits": 3}, {"min_digits": 2})
    ]
    assert [(one.min_digits, one.max_digits) for one in configurations] == [(1, 2), (1, 3), (2, 2)]
    assert {(one.seed, one.size) for one in configurations} == {(5, 7)}


@pytest.mark.usefixtures("stand_in")
def test_lists_become_tuples_and_texts_members_if_the_default_is_one() -> None:
    """Profiles have neither."""
    found = create("styled", {"styles": ["plain", "words"], "first": "words"}, None).config
    assert (found.styles, found.first) == (tuple(fake_reasoning_gym.Style), fake_reasoning_gym.Style.WORDS)


@pytest.mark.usefixtures("stand_in")
def test_a_dataset_with_fewer_problems_gives_those_that_it_has() -> None:
    """An answer may be missing. A generator that fails at its first problem is refused with the reason."""
    entries = generate(job("acre"))
    assert [(entry.question, entry.answer, entry.metadata) for entry in entries] == [(q, None, {}) for q in "abc"]
    with pytest.raises(GymError, match="no word of 1 styles") as caught:
        generate(job("styled"))
    assert caught.value.key == ""


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one of its own requirements is missing."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    library.cache_clear()
    with pytest.raises(GymError) as caught:
        create("chain_sum", {}, None)
    assert INSTALL in str(caught.value)


@pytest.mark.slow
@pytest.mark.needs_extra("reasoning-gym")
def test_every_dataset_is_repeatable_and_accepts_its_reference_answers() -> None:
    """Two processes generate the same problems, which another process scores; also at level 0 of the curriculum."""
    curricula = in_library([])
    names = sorted(curricula)
    jobs = [*map(job, names), *(job(name, level=0) for name in names if curricula[name])]
    with GymProcesses() as first, GymProcesses() as second:
        found, again = first.answers(jobs), second.answers(jobs)
    problems, refused = [], []
    for one, made, twin in zip(jobs, found, again, strict=True):
        if isinstance(made, JobRefused):
            refused.append((one.dataset, one.level, made.key))
            continue
        assert made == twin, one
        assert len(made.entries) == PROBLEMS, one
        for entry in made.entries:
            assert entry.question.strip(), one
        problems.append((one.dataset, one.level, msgspec.to_builtins(made.entries)))
    assert refused == [("knight_swap", 0, "level")]
    scores = zip(problems, in_library(problems), strict=True)
    below = {dataset for (dataset, _, _), found in scores if any(score != 1.0 for score in found)}
    assert below == listed("The problems of")
    assert f"{len(names)} kinds" in PAGE.read_text(encoding="utf-8")
