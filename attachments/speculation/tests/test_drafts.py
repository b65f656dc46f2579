"""Drafts: what earlier completions and the row's own tokens propose, within limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attachments.speculation import drafts
from attachments.speculation.drafts import Drafted, HistoryDrafter, HistoryStore, PromptLookupDrafter
from clotho.inference.scheduler import ActiveRequest, Row
from protocols.sampling import SampleRequest, Sampling

PROMPT = (9, 8, 7)


def make_row(serial: int = 1, prompt: tuple[int, ...] = PROMPT, **options: Any) -> Row:
    """Return a row of a request in the background."""
    request = SampleRequest(prompt=prompt, sampling=Sampling(), seeds=(1,), **({"background": True} | options))
    return Row(ActiveRequest(serial, request, lambda _: None, limit=64, open=1), 0, serial=serial)


def history_of(*completions: tuple[int, ...], **options: Any) -> HistoryDrafter:
    """Return a drafter that has observed these completions of one prompt."""
    drafter = HistoryDrafter(1000)
    for completion in completions:
        row = make_row(**options)
        row.tokens = list(completion)
        drafter.finished(row)
    return drafter


def propose(drafter: HistoryDrafter | PromptLookupDrafter, row: Row, *tokens: int, most: int = 4) -> list[int]:
    """Return the draft of a row that has sampled these tokens."""
    return list(drafter.propose([Drafted(5, row, np.array(tokens, dtype=np.int32), most)]).get(5, ()))


def test_a_draft_follows_the_earlier_completion_that_agrees() -> None:
    """From the first token on, token by token; it ends where the completion ended."""
    drafter, row = history_of((1, 2, 3, 4, 5, 6)), make_row(2)
    assert propose(drafter, row) == [1, 2, 3, 4]
    assert propose(drafter, row, 1, 2, 3) == [4, 5, 6]
    assert propose(drafter, row, 1, 2, 3, 4, 5, 6) == []


def test_completions_vote() -> None:
    """The majority is proposed. A draft ends where too few completions would agree with all of it."""
    drafter = history_of((1, 2, 3), (1, 2, 3), (1, 5, 6), (4, 2, 8))
    assert propose(drafter, make_row(2)) == [1, 2, 3]
    assert propose(drafter, make_row(3), 1, 5) == [6]
    even = history_of((1,), (2,), (3,), (4,))
    assert propose(even, make_row(2)) == []


def test_a_row_that_differs_continues_where_its_newest_two_tokens_occurred() -> None:
    """And has no draft if they never did."""
    drafter, row = history_of((1, 2, 3, 4, 5)), make_row(2)
    assert propose(drafter, row, 7) == []
    assert propose(drafter, row, 7, 2, 3) == [4, 5]


def test_rows_of_a_group_learn_from_those_that_have_ended() -> None:
    """The history of a prompt grows while rows of the prompt run."""
    drafter, row = history_of(), make_row(2)
    assert propose(drafter, row) == []
    other = make_row(3)
    other.tokens = [1, 2, 3]
    drafter.finished(other)
    assert propose(drafter, row, 1, 2) == [3]


def test_only_rollouts_are_stored_and_other_weights_have_their_own() -> None:
    """Completions of clients are not drafts of others."""
    assert propose(history_of((1, 2, 3), background=False), make_row(2)) == []
    drafter = history_of((1, 2, 3))
    assert propose(drafter, make_row(2, weights="@base")) == []
    assert propose(drafter, make_row(3, prompt=(9, 8))) == []


def test_the_store_is_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used prompt leaves first, and a prompt keeps the newest completions."""
    store = HistoryStore(20)
    for prompt in ((1,), (2,), (1,), (3,)):
        store.add("@policy", prompt, (5, 6, 7, 8, 9))
    assert [len(store.of("@policy", (number,)).starts) for number in (1, 2, 3)] == [2, 0, 1]
    assert store.tokens == 18
    monkeypatch.setattr(drafts, "MAX_COMPLETIONS", 4)
    store = HistoryStore(1000)
    for token in range(5):
        store.add("@policy", (1,), (token,))
    history = store.of("@policy", (1,))
    assert [history.tokens[start] for start in history.starts] == [2, 3, 4]
    assert store.tokens == len(history.tokens) == 6
    store.add("@policy", (1,), range(2000))
    assert store.tokens == 6
    monkeypatch.setattr(drafts, "MAX_PROMPTS", 2)
    for number in range(9):
        store.of("@policy", (number,))
    assert (len(store), store.tokens) == (2, 0)


def test_prompt_lookup_proposes_what_followed_the_longest_match() -> None:
    """The newest occurrence counts. A repetition continues beyond the end."""
    drafter = PromptLookupDrafter()
    assert propose(drafter, make_row(1, (1, 2, 3, 4, 5, 1, 2)), most=3) == [3, 4, 5]
    assert propose(drafter, make_row(2, (1, 2, 3, 7, 2, 3, 8, 1)), 2, 3, most=2) == [7, 2]
    assert propose(drafter, make_row(3, (5,)), 1, 2, 1, 2, most=5) == [1, 2, 1, 2, 1]
    assert propose(drafter, make_row(4, (1, 2, 3))) == []


def test_a_row_that_left_is_forgotten() -> None:
    """A later row never continues with the places of another."""
    for drafter in (history_of((1, 2, 3)), PromptLookupDrafter()):
        row = make_row(2)
        propose(drafter, row, 1, 2)
        drafter.left(row)
        drafter.left(row)
        assert not drafter._rows
