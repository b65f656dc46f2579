"""The fair queue: no client waits for more than its share of the others."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clotho.lanes import fair_queue
from clotho.lanes.fair_queue import Account, FairQueue


class Item(NamedTuple):
    """client: who waits. number: order among the items of the client."""

    client: str
    number: int
    cost: int


CLIENTS = st.sampled_from("abcde")
COSTS = st.integers(1, 1000)
ARRIVALS = st.lists(st.tuples(CLIENTS, COSTS), min_size=1, max_size=40)


class Traffic:
    """A queue with the items that were put into it."""

    def __init__(self) -> None:
        self.queue = FairQueue[Item]()
        self.numbers: Counter[str] = Counter()
        self.accounts: dict[str, Account[Item]] = {}

    def put(self, client: str, cost: int) -> Item:
        """Add an item."""
        item = Item(client, self.numbers[client], cost)
        self.numbers[client] += 1
        self.accounts[client] = self.queue.put(client, item, cost)
        return item

    def take(self) -> Item:
        """Remove the next item, which `peek` has announced."""
        announced = self.queue.peek()
        item = self.queue.take()
        assert item is announced
        return item


@settings(max_examples=40)
@given(ARRIVALS, st.lists(st.booleans(), max_size=80))
def test_every_item_is_taken_once_and_clients_keep_their_order(
    arrivals: list[tuple[str, int]], takes: list[bool]
) -> None:
    """Whatever the order of arrivals and takes."""
    traffic, taken, waiting = Traffic(), list[Item](), list(arrivals)
    for take in takes:
        if take and traffic.queue.length:
            taken.append(traffic.take())
        elif waiting:
            traffic.put(*waiting.pop())
    while traffic.queue.length:
        taken.append(traffic.take())
    assert len(taken) == len(set(taken)) == sum(traffic.numbers.values())
    for client in traffic.numbers:
        numbers = [item.number for item in taken if item.client == client]
        assert numbers == sorted(numbers)


@settings(max_examples=40)
@given(ARRIVALS, st.integers(0, 30), ARRIVALS, st.lists(st.floats(0.0, 0.99), min_size=40, max_size=40))
def test_an_item_of_a_new_client_waits_for_one_item_of_every_other_client(
    before: list[tuple[str, int]], takes: int, after: list[tuple[str, int]], unused: list[float]
) -> None:
    """The bound of the docstring for finish <= v, with refunds, and while others send further items."""
    traffic, overtaking = Traffic(), Counter[str]()
    for client, cost in before:
        traffic.put(client, cost)
    for _ in range(min(takes, traffic.queue.length)):
        traffic.take()
    new = traffic.put("new", 1_000_000)
    for (client, cost), part in zip([*after, *[("a", 1)] * 40], [*unused, *[0.5] * 40], strict=False):
        traffic.put(client, cost)
        item = traffic.take()
        if item is new:
            break
        traffic.queue.refund(traffic.accounts[item.client], part * item.cost)
        overtaking[item.client] += 1
    else:
        pytest.fail("the item of the new client was never taken")
    assert max(overtaking.values(), default=0) <= 1


@settings(max_examples=40)
@given(st.lists(COSTS, min_size=20, max_size=20), st.lists(COSTS, min_size=20, max_size=20))
def test_clients_that_always_wait_are_served_equal_costs(costs_a: list[int], costs_b: list[int]) -> None:
    """Up to the largest cost of one item of each."""
    traffic, served = Traffic(), Counter[str]()
    for cost_a, cost_b in zip(costs_a, costs_b, strict=True):
        traffic.put("a", cost_a)
        traffic.put("b", cost_b)
    while traffic.queue.waiting("a") and traffic.queue.waiting("b"):
        item = traffic.take()
        served[item.client] += item.cost
        assert abs(served["a"] - served["b"]) <= max(costs_a) + max(costs_b)


def test_a_refund_admits_the_next_item_earlier() -> None:
    """A client that uses a tenth of its costs has ten items for one item of a client that uses all."""
    traffic, taken = Traffic(), Counter[str]()
    for _ in range(60):
        traffic.put("brief", 100)
        traffic.put("long", 100)
    for _ in range(44):
        item = traffic.take()
        taken[item.client] += 1
        if item.client == "brief":
            traffic.queue.refund(traffic.accounts["brief"], 90)
    assert taken == {"brief": 40, "long": 4}


@pytest.mark.parametrize("withdrawn", [0, 1])
def test_an_empty_queue_forgets_its_clients_and_their_refunds(withdrawn: int) -> None:
    """A client that was served while nobody else waited owes nothing, and keeps no credit.

    It does not matter whether the last items were taken or removed.
    """
    traffic = Traffic()
    for _ in range(1 + withdrawn):
        traffic.put("a", 1000)
    old = traffic.accounts["a"]
    traffic.take()
    traffic.queue.remove(lambda item: item.client == "a")
    for client in "abab":
        traffic.put(client, 10)
    traffic.queue.refund(old, 999)
    assert [traffic.take().client for _ in range(4)] == ["a", "b", "a", "b"]


def test_removed_items_are_not_charged() -> None:
    """A client that withdraws its items has its turn as before."""
    traffic = Traffic()
    for client in "aaab":
        traffic.put(client, 10)
    traffic.queue.remove(lambda item: item.client == "a")
    assert (traffic.queue.length, traffic.queue.clients, traffic.queue.waiting("a")) == (1, 1, 0)
    traffic.put("a", 10)
    assert [item.client for item in (traffic.take(), traffic.take())] == ["b", "a"]
    with pytest.raises(ValueError, match="empty"):
        traffic.queue.take()


def test_the_accounts_of_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a queue that is never empty, the oldest clients without waiting items are forgotten."""
    monkeypatch.setattr(fair_queue, "MAX_ACCOUNTS", 8)
    traffic = Traffic()
    traffic.put("always", 1)
    for number in range(100):
        traffic.put("always", 1)
        traffic.put(f"visitor {number}", 1_000)
        traffic.take()
        traffic.take()
    assert traffic.queue.length > 0
    assert len(traffic.queue._accounts) == traffic.queue.clients + 8
