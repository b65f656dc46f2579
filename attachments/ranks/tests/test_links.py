"""Messages between ranks, heartbeats and deadlines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from attachments.ranks import links
from attachments.ranks.links import SUSPENDED_SECONDS, Link, Watch

PATIENCE_SECONDS = 60.0
"""Upper limit of a wait. No assertion depends on it."""


class Seen:
    """What a link reports."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.lost: SimpleQueue[tuple[int, str]] = SimpleQueue()


@contextmanager
def linked() -> Iterator[tuple[Link, Link, Seen, Seen]]:
    """Two links that are connected: rank 1 as rank 0 sees it, and rank 0 as rank 1 sees it."""
    first, second = socket.socketpair()
    seen = Seen(), Seen()
    both = [
        Link(
            rank,
            connection,
            receive=lambda sender, message, own=own: own.messages.put((sender, message)),  # type: ignore[misc]
            lost=lambda lost, reason, own=own: own.lost.put((lost, reason)),  # type: ignore[misc]
        )
        for rank, connection, own in ((1, first, seen[0]), (0, second, seen[1]))
    ]
    try:
        yield both[0], both[1], *seen
    finally:
        for link in both:
            link.close()


def test_messages_arrive_whole_and_in_order() -> None:
    """A message can be larger than the buffers of the connection."""
    messages = [b"first", bytes(3 << 20), b"last"]
    with linked() as (to_one, _, _, seen):
        for message in messages:
            to_one.send(message)
        assert [seen.messages.get(timeout=PATIENCE_SECONDS) for _ in messages] == [(0, m) for m in messages]


def test_a_closed_connection_is_reported_by_the_other_side() -> None:
    """The side that closes has expected it."""
    with linked() as (to_one, _, closing, seen):
        to_one.send(b"last")
        to_one.close()
        assert seen.lost.get(timeout=PATIENCE_SECONDS)[0] == 0
        assert seen.messages.get(timeout=PATIENCE_SECONDS) == (0, b"last")
        assert closing.lost.empty()


def watched(seconds: float) -> tuple[Watch, list[float], list[tuple[int | None, str]]]:
    """A watch with a clock that the test moves, and what it reports."""
    now, lost = [0.0], list[tuple[int | None, str]]()
    watch = Watch(
        hang_seconds=seconds,
        alive=lambda: None,
        lost=lambda rank, reason: lost.append((rank, reason)),
        clock=lambda: now[0],
    )
    return watch, now, lost


def test_a_rank_without_signs_of_life_is_lost() -> None:
    """Rank 1 is silent for longer than the limit."""
    watch, now, lost = watched(3.0)
    with linked() as (to_one, _, _, _):
        to_one.seen = 0.0
        watch.add(to_one)
        for now[0] in (1.0, 2.0, 3.0):
            watch.look()
        assert lost == []
        now[0] = 3.5
        to_one.seen = 0.0
        watch.look()
    assert [rank for rank, _ in lost] == [1]


def test_a_deadline_holds_until_its_block_ends() -> None:
    """An unknown rank is lost if the block is still running."""
    watch, now, lost = watched(60.0)
    with watch.deadline(1.0, "did not answer"):
        now[0] = 0.9
        watch.look()
        assert lost == []
        now[0] = 1.1
        watch.look()
        assert lost == [(None, "did not answer")]
    now[0] = 2.5
    watch.look()
    assert len(lost) == 1


def test_the_silence_during_an_own_suspension_means_nothing() -> None:
    """A machine that sleeps stops all its processes; deadlines move by the time that it slept."""
    watch, now, lost = watched(1.0)
    with watch.deadline(1.0, "did not answer"):
        now[0] = SUSPENDED_SECONDS + 100.0
        watch.look()
        now[0] += 0.5
        watch.look()
        assert lost == []
        now[0] += 1.0
        watch.look()
        assert len(lost) == 1


def test_a_link_gives_signs_of_life_without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side sees bytes although nothing is sent."""
    monkeypatch.setattr(links, "SIGN_SECONDS", 0.01)
    with linked() as (to_one, to_zero, _, seen):
        arrived = threading.Event()
        before = to_zero.seen
        while to_zero.seen == before:
            assert seen.lost.empty()
            arrived.wait(0.01)
        assert seen.messages.empty()
        assert to_one.seen > 0
