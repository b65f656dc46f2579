"""Fuzzing of the group reader, and limits of its memory."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from attachments.atropos.reader import MAX_NAMES
from attachments.atropos.tests.environment_groups import PROMPT, ReaderHarness, complete_group, conversations
from protocols.rollout import Discarded, ScoredGroup

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    -100,
    96,
    97,
    2**31,
    -(2**63),
    10**25,
    0.5,
    1.0,
    1e-3,
    1e300,
    "",
    "x",
    "\x1b[2J",
    [],
    [[]],
    {},
]
GROUPS = 300
LITERALS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400, b'"\xff"', b"[" * 2000 + b"]" * 2000, b"", b"}"]


def mutate(value: Any, random: Random) -> Any:
    """Change one part of a value: replace, remove, repeat, or descend."""
    if isinstance(value, dict) and value and random.random() < 0.95:
        key = random.choice(list(value))
        return (
            {k: v for k, v in value.items() if k != key}
            if random.random() < 0.1
            else value | {key: mutate(value[key], random)}
        )
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        kind = random.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return value[:at] + [value[at]] * random.choice([2, 3, 70]) + value[at + 1 :]
        return [*value[:at], mutate(value[at], random), *value[at + 1 :]]
    return copy.copy(random.choice(VALUES))


def mutated(random: Random) -> Raw:
    """Return a complete group with a few changes, also in its JSON text."""
    fields: Any = complete_group() | {"scores": [random.random() for _ in range(3)]}
    for _ in range(random.choice([0, 1, 1, 1, 2, 5])):
        fields = mutate(fields, random)
    content = msgspec.json.encode(fields)
    kind = random.random()
    at = random.randrange(len(content)) if content else 0
    if kind < 0.05:
        content = content[:at]
    elif kind < 0.1:
        content = content[:at] + random.randbytes(random.choice([1, 4])) + content[at + 1 :]
    elif kind < 0.2:
        content = content.replace(b"0.5", random.choice(LITERALS), 1)
    return Raw(content)


@pytest.mark.parametrize("seed", range(5))
async def test_every_group_is_scored_or_discarded_with_a_reason(seed: int) -> None:
    """A valid group after many mutated groups is read correctly."""
    random = Random(seed)
    reference: dict[str, Any] = random.choice([{}, {"reference": "environment", "kl_beta": 0.1}])
    harness = ReaderHarness(
        missing_logprobs=random.choice(["refuse", "recompute"]),
        advantage=random.choice(["group", "environment", "batch"]),
        distillation_weight=random.choice([0.0, 1.0]),
        **reference,
    )
    harness.record(PROMPT, (40, 41), client_label="arithmetic")
    ends = {"scored": 0, "discarded": 0}
    for number in range(GROUPS):
        outcome = await harness.outcome(mutated(random), group_id=number)
        if isinstance(outcome, ScoredGroup):
            ends["scored"] += 1
        else:
            ends["discarded"] += 1
            assert 0 < len(outcome.detail) < 200
            assert outcome.detail.isprintable()
            assert (outcome.prompt.group_id, len(outcome.prompt.source) <= 32) == (number, True)
    assert min(ends.values()) > GROUPS // 10
    good = await harness.outcome(complete_group() | {"scores": [3.0, 1.0, 2.0]})
    assert isinstance(good, ScoredGroup)
    assert good.rewards == (3.0, 1.0, 2.0)


async def test_the_number_of_hashes_and_names_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest hashes are removed; further names are `other`."""
    monkeypatch.setattr("attachments.atropos.reader.MAX_RECENT_GROUPS", 150)
    harness, names = ReaderHarness(advantage="batch"), set()
    for number in range(250):
        fields = conversations((PROMPT, (40 + number % 50,)), scores=[float(number)], env_id=number % 200)
        outcome = await harness.outcome(fields)
        assert not isinstance(outcome, Discarded)
        names.add(outcome.group.prompt.source)
    assert len(harness.reader._recent) == 150
    assert len(names) == MAX_NAMES + 1
    assert "other" in names
