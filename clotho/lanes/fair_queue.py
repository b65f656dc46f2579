"""A queue that is fair between clients: start-time fair queueing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_ACCOUNTS = 1024
"""Maximum number of clients without waiting items whose account is kept."""


@dataclass(eq=False, slots=True)
class Account(Generic[T]):
    """One client. finish: finish tag of the newest item that was taken. items: (arrival number, cost, item)."""

    finish: float = 0.0
    items: deque[tuple[int, float, T]] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """Items of several clients, each with a positive cost.

    Start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996). Item k of client c with
    cost l(c, k) has the tags

        start(c, k) = max(v, finish(c, k - 1)),    finish(c, k) = start(c, k) + l(c, k)

    where the virtual time v at the arrival of an item is the start tag of the item that was taken last. `take` returns
    the item with the lowest start tag; of equal tags, the one that arrived first. Items of one client keep their order.

    Bound: while an item with the start tag s waits, the items that are taken of any other client cost (less refunds) at
    most s - v, with v at its arrival, plus the largest cost of one item of that client. An item of a client with
    finish <= v therefore waits for at most one item of each other client. Of clients that have waiting items all the
    time, equal costs are taken, up to the largest cost of one item of each.

    An empty queue forgets all tags: without waiting items, no client was served at the expense of another one.

    length: number of waiting items.
    """

    def __init__(self) -> None:
        self.length = 0
        self._accounts: dict[str, Account[T]] = {}
        self._virtual_time = 0.0
        self._arrivals = 0

    def __iter__(self) -> Iterator[T]:
        """Yield the waiting items client by client; those of one client in order."""
        for account in self._waiting():
            yield from (item for _, _, item in account.items)

    def _waiting(self) -> Iterator[Account[T]]:
        return (account for account in self._accounts.values() if account.items)

    @property
    def clients(self) -> int:
        """Number of clients with waiting items."""
        return sum(1 for _ in self._waiting())

    def waiting(self, client: str) -> int:
        """Return the number of waiting items of a client."""
        account = self._accounts.get(client)
        return len(account.items) if account is not None else 0

    def put(self, client: str, item: T, cost: float) -> Account[T]:
        """Add an item behind the other items of its client, and return the account of the client."""
        account = self._accounts.setdefault(client, Account())
        if not account.items:
            account.finish = max(account.finish, self._virtual_time)
        account.items.append((self._arrivals, cost, item))
        self._arrivals += 1
        self.length += 1
        return account

    def _next(self) -> Account[T]:
        return min(self._waiting(), key=lambda account: (account.finish, account.items[0][0]))

    def peek(self) -> T:
        """Return the item that `take` returns next. Raises ValueError if the queue is empty."""
        return self._next().items[0][2]

    def take(self) -> T:
        """Remove and return the next item. Raises ValueError if the queue is empty."""
        account = self._next()
        _, cost, item = account.items.popleft()
        self._virtual_time = account.finish
        account.finish += cost
        self.length -= 1
        self._forget()
        return item

    def refund(self, account: Account[T], cost: float) -> None:
        """Return a part of the cost of a taken item, which it did not use; a forgotten account has no effect.

        The finish tag of the client does not fall below the virtual time, so the bound holds.
        """
        account.finish = max(min(account.finish, self._virtual_time), account.finish - cost)

    def remove(self, concerns: Callable[[T], bool]) -> None:
        """Remove the items for which `concerns` returns True."""
        for account in self._waiting():
            account.items = deque(entry for entry in account.items if not concerns(entry[2]))
        self.length = sum(len(account.items) for account in self._accounts.values())
        self._forget()

    def clear(self) -> None:
        """Remove all items, and forget all clients."""
        self._accounts.clear()
        self._virtual_time, self.length = 0.0, 0

    def _forget(self) -> None:
        """Forget clients without waiting items: all if the queue is empty, the oldest if they are too many."""
        if not self.length:
            self.clear()
        excess = len(self._accounts) - self.clients - MAX_ACCOUNTS
        if excess > 0:
            idle = [client for client, account in self._accounts.items() if not account.items]
            for client in idle[:excess]:
                del self._accounts[client]
