"""Conservation of prompts."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from training_run.groups.ledger import Ledger


def test_a_group_that_ends_twice_is_an_error() -> None:
    """Nothing is trained on twice, and nothing is both trained on and discarded."""
    ledger = Ledger()
    ledger.train(3)
    with pytest.raises(ValueError, match="group 3 has already ended"):
        ledger.discard(3, "stale")
    ledger.train(0)
    with pytest.raises(ValueError, match="group 0"):
        ledger.train(0)


def test_the_books_stay_small_when_groups_end_in_order() -> None:
    """Only groups that overtook an older one are remembered."""
    ledger = Ledger()
    for group_id in range(1000):
        ledger.train(group_id)
    assert ledger.state().all_ended_below == 1000
    assert ledger.state().ended_above == ()


def test_books_resumed_at_any_point_ask_exactly_what_had_not_ended() -> None:
    """Whatever the order of endings, a resumed run asks each remaining group once."""
    order = list(range(60))
    random.Random(0).shuffle(order)
    for cut in range(61):
        ledger = Ledger()
        for group_id in order[:cut]:
            ledger.train(group_id)
        resumed = Ledger(ledger.state())
        assert sorted(resumed.unended(60)) == sorted(order[cut:])
        assert resumed.ended == cut


def test_without_a_bound_what_can_be_asked_has_no_end() -> None:
    """NullSampleLog knows beforehand how many groups a batch takes that is refilled."""
    ledger = Ledger()
    ledger.train(1)
    ledger.discard(3, "zero_variance")
    assert list(islice(ledger.unended(), 5)) == [0, 2, 4, 5, 6]
    assert ledger.ended == 2


def test_the_line_balances_only_if_what_is_held_was_counted() -> None:
    """asked = trained + discarded + carried over; anything else shows."""
    ledger = Ledger()
    ledger.train(0)
    ledger.discard(1, "zero_variance")
    assert ledger.balance(prompted=4, carried_over=2).holds
    assert str(ledger.balance(prompted=4, carried_over=2)) == "prompted 4 = trained 1 + discarded 1 + carried over 2"
    assert not ledger.balance(prompted=4, carried_over=1).holds


def test_every_environment_has_books_of_its_own() -> None:
    """By name, over lives of the run; groups that the run asked itself are in nobody's."""
    ledger = Ledger()
    ledger.train(0, source="a")
    ledger.discard(1, "stale", source="a")
    ledger.discard(2, "stale", source="b")
    ledger.train(3)
    resumed = Ledger(ledger.state())
    resumed.discard(4, "lost", source="a")
    balance = resumed.balance(prompted=5, carried_over=0, received={"a": 3, "b": 1, "c": 0})
    assert [(name, str(own)) for name, own in balance.sources.items()] == [
        ("a", "prompted 3 = trained 1 + discarded 2 + carried over 0"),
        ("b", "prompted 1 = trained 0 + discarded 1 + carried over 0"),
        ("c", "prompted 0 = trained 0 + discarded 0 + carried over 0"),
    ]
    assert balance.sources["a"].by_reason == {"stale": 1, "lost": 1}
    assert balance.holds


def test_a_group_that_an_environment_lost_shows_in_the_books_of_the_run() -> None:
    """Though the sums over all environments agree."""
    ledger = Ledger()
    ledger.train(0, source="a")
    ledger.train(1, source="a")
    balance = ledger.balance(prompted=2, carried_over=0, received={"a": 1, "b": 1})
    assert not balance.holds
    assert (
        balance.sources["a"].in_words("received")
        == "received 1 \N{NOT EQUAL TO} trained 2 + discarded 0 + carried over 0"
    )
