"""Properties of groups from environments: whatever a group contains, it is accepted or refused with a reason."""

from __future__ import annotations

import math
from typing import Any, get_args

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from attachments.atropos.client import BatchResponse, NotAtropos, _decoded
from attachments.atropos.tests.environment_groups import BOUNDS, PROMPT, ReaderHarness, complete_group
from attachments.atropos.tests.fake_api import FIELDS
from protocols.rollout import Discarded, DiscardReason, GroupOutcome, ScoredGroup

TIMEOUT_SECONDS = 60.0
"""Upper limit for reading one group. No assertion depends on it."""

integers = st.integers(-(2**70), 2**70) | st.sampled_from([-100, -1, 0, 1, 96, 97, 2**31, 2**63])
floats = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1.0, 0.0, -9999.0, 1e-3, 1e300, -1e308])
values = st.recursive(
    st.none() | st.booleans() | integers | floats | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
rows = st.lists(st.integers(0, BOUNDS.vocab_size - 1), min_size=2, max_size=12)
literals = st.sampled_from(
    [b"NaN", b"-Infinity", b"1e999", b"9" * 400, b'"\xff"', b"[" * 3000 + b"]" * 3000, b"", b"}"]
)


@st.composite
def plausible_groups(draw: st.DrawFn) -> dict[str, Any]:
    """A group whose rows fit together, with arbitrary tokens, masks and numbers."""
    tokens = draw(st.lists(rows.map(lambda row: [*PROMPT, *row]), min_size=1, max_size=4))
    masks = [[token if draw(st.booleans()) else -100 for token in row] for row in tokens]
    numbers = st.floats(-30.0, 0.0)
    logprobs = [[draw(numbers) if mask != -100 else 1.0 for mask in row] for row in masks]
    scores = [draw(st.floats(-1e7, 1e7)) for _ in tokens]
    return {
        "tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs, "env_id": draw(integers),
    }  # fmt: skip


CHANGES = ("replace", "remove", "row", "element", "shorten", "extend")


def changed(field: Any, change: str, draw: st.DrawFn) -> Any:
    """Return the field after one change; the same field if the change does not apply to its type."""
    filled = isinstance(field, list) and bool(field)
    match change:
        case "replace":
            return draw(values)
        case "row" if filled:
            return [draw(values), *field[1:]]
        case "element" if filled and isinstance(field[0], list) and field[0]:
            row = [*field[0]]
            row[draw(st.integers(0, len(row) - 1))] = draw(values)
            return [row, *field[1:]]
        case "shorten" if filled:
            return field[:-1]
        case "extend" if filled:
            return field * draw(st.sampled_from([2, 3, 70]))
    return field


@st.composite
def groups(draw: st.DrawFn) -> Raw:
    """A group of every field, with up to three fields changed or removed, as JSON text that can be damaged."""
    fields = complete_group() if draw(st.booleans()) else draw(plausible_groups())
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        name, change = draw(st.sampled_from([*FIELDS, "unknown"])), draw(st.sampled_from(CHANGES))
        fields[name] = changed(fields.get(name), change, draw)
        if change == "remove":
            del fields[name]
    return Raw(draw(damaged(msgspec.json.encode(fields))))


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The text itself, in one of four cases cut off, with another literal, or with other bytes inserted."""
    at = draw(st.integers(0, len(content)))
    match draw(st.integers(0, 11)):
        case 0:
            return content[:at]
        case 1:
            return content.replace(b"0.5", draw(literals), 1)
        case 2:
            return content[:at] + draw(st.binary(max_size=4)) + content[at:]
    return content


@st.composite
def readers(draw: st.DrawFn) -> ReaderHarness:
    """A reader with settings that change what a valid group is."""
    reference: dict[str, Any] = draw(st.sampled_from([{}, {"reference": "environment", "kl_beta": 0.1}]))
    return ReaderHarness(
        missing_logprobs=draw(st.sampled_from(["refuse", "recompute"])),
        advantage=draw(st.sampled_from(["group", "environment", "batch"])),
        distillation_weight=draw(st.sampled_from([0.0, 1.0])),
        **reference,
    )


def check_group(harness: ReaderHarness, raw: Raw, group_id: int) -> GroupOutcome:
    """Read a group twice. The outcome is a scored group that the learner can use, or a reason on one line."""

    async def outcomes() -> list[GroupOutcome]:
        with anyio.fail_after(TIMEOUT_SECONDS):
            return [await harness.outcome(raw, group_id=group_id + again) for again in range(2)]

    both = anyio.run(outcomes)
    for again, outcome in enumerate(both):
        prompt = outcome.prompt
        assert prompt.group_id == group_id + again
        assert len(prompt.source) <= 32
        if isinstance(outcome, Discarded):
            assert outcome.reason in get_args(DiscardReason)
            assert 0 < len(outcome.detail) < 200
            assert outcome.detail.isprintable()
        else:
            check_scored(outcome)
    return both[0]


def check_scored(outcome: ScoredGroup) -> None:
    """Every row of a scored group has one entry per token, and every number is finite."""
    completions = outcome.group.completions
    assert len(outcome.rewards) == len(completions)
    assert all(map(math.isfinite, outcome.rewards))
    assert any(completion.length for completion in completions)
    for completion in completions:
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
        assert all(0 <= token < BOUNDS.vocab_size for token in completion.tokens)
        assert all(math.isfinite(value) and value <= 0.0 for value in completion.logprobs)
    for rows in (outcome.token_advantages, outcome.reference_logprobs):
        assert not rows or [len(row) for row in rows] == [len(completion.tokens) for completion in completions]


profiles = pytest.mark.parametrize("profile", ["repeatable", pytest.param("many", marks=pytest.mark.slow)])


@profiles
def test_every_group_is_scored_or_refused_with_a_reason(profile: str) -> None:
    """Also if the same group is sent again, and under every setting that changes what a valid group is."""
    scored: list[bool] = []

    @settings.get_profile(profile)
    @given(readers(), groups(), st.integers(0, 2**40))
    def check(harness: ReaderHarness, raw: Raw, group_id: int) -> None:
        scored.append(isinstance(check_group(harness, raw, group_id), ScoredGroup))

    check()
    assert len(scored) >= settings.get_profile(profile).max_examples
    assert 0.05 < sum(scored) / len(scored) < 0.95


@profiles
def test_every_response_is_a_batch_or_not_of_an_api_server(profile: str) -> None:
    """A body that is not a batch raises NotAtropos, whatever its bytes are."""
    bodies = st.binary(max_size=200) | st.builds(
        lambda batch, cut: msgspec.json.encode({"batch": batch})[:cut], values | st.lists(values), st.integers(1, 400)
    )

    @settings.get_profile(profile)
    @given(bodies | literals)
    def check(body: bytes) -> None:
        try:
            delivery = _decoded(body, "GET /batch", BatchResponse)
        except NotAtropos:
            return
        assert delivery.batch is None or all(isinstance(raw, Raw) for raw in delivery.batch)

    check()
