"""Every dataset of Reasoning Gym: it loads by name, is repeatable, and its scorer accepts the reference answer.

docs/datasets.md lists the exceptions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clotho.data.gym_library import Job, Refused
from clotho.data.reasoning_gym import BLOCK, GymProcesses

PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"
PROBLEMS = 5
"""Problems per dataset."""

SCORES = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import msgspec
from clotho.data.gym_library import Entry, create, library, score
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
        if isinstance(made, Refused):
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
