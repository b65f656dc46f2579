"""The arbiter: which threads compute at the same time. It is the only place that knows.

Every thread that computes has a lane, and computes in turns: one decode step, one part of an update, one call. At most
`slots` turns run at once: one on a GPU, which computes one queue faster than two; one per core, and two at most, on the
CPU. A thread that waits for its turn holds nothing that others need, so turns are not interrupted, and the longest turn
is the longest wait.

* **Several slots**: decoding always has one, so nothing that is computed beside it delays a decode step. The other
  lanes share the rest, and have every slot while nothing is decoded.
* **One slot**: decoding gets `decode_share` of the time while other lanes have work (stride scheduling by wall-clock
  time), and `LONG_SHARE` while only long requests of clients are decoded. While a client waits for a first token,
  decode steps come first; the others get this time back, and it is limited to `URGENT_SECONDS`. Calls of the decode
  thread (a request, an abort, a weight swap) come before all other turns and count for no share.

Other lanes take turns among themselves by the time that they have used. A lane that was idle gets no credit for it.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from msgspec import Struct

from protocols.compute import ComputeTotals, Distribution
from protocols.errors import ClothoError, ExecutorStoppedError

WorkKind = Literal["update", "parity", "evaluation", "scoring"]
TurnKind = Literal["call", "decode"] | WorkKind
"""What a turn computes: a short call, a decode step, or a part of an update, of a parity check, of an evaluation, or of
the scoring of given tokens."""

KINDS: tuple[TurnKind, ...] = ("call", "decode", *get_args(WorkKind))
TURN_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of durations of turns."""

URGENT_SECONDS = 1.0
"""Largest time that other lanes may be owed for urgent decode steps."""

LONG_SHARE = 0.1
"""Largest fraction of the time for the long rows of clients: beside short rows, and with one slot beside other lanes.

Their tokens come later then, and all other work keeps nine tenths of its rate, whatever their number and length, but
for what their connections cost.
"""


class WorkCancelled(ClothoError, RuntimeError):
    """Work in another thread was cancelled there, and not by the waiting task."""


class TurnTimes(Struct, frozen=True, kw_only=True):
    """Durations of the turns of one kind, in seconds. longest: the longest one since the start."""

    seconds: Distribution
    longest: float


class Tally:
    """Counts values by buckets. longest: the largest value so far; 0 without one."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """bounds: as of a `Distribution`."""
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self._total = self.longest = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times
        self.longest = max(self.longest, value)

    def distribution(self) -> Distribution:
        """Return the values so far."""
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


class Lane:
    """The turns of one thread, which alone calls the methods.

    has_work: the thread computes, or waits for a turn. is_waiting: it waits for a turn. busy_since: start of the
    present turn, in seconds of the clock of the arbiter; math.inf without one. kind: of the present or the next turn,
    or else of the latest. used: seconds of all turns, and of the time that the lane gets no credit for.
    """

    def __init__(self, arbiter: Arbiter, name: str, kind: TurnKind) -> None:
        self.name, self.has_work, self.is_waiting, self.busy_since, self.used = name, False, False, math.inf, 0.0
        self.kind = kind
        self._arbiter = arbiter
        self._cancelled: Callable[[], bool] = lambda: False

    @contextmanager
    def turn(self, kind: TurnKind, *, cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Compute inside the context, in a turn. cancelled: the next `pause` ends it. Raises ExecutorStoppedError."""
        self.kind, self._cancelled = kind, cancelled
        self._arbiter.begin(self)
        try:
            yield
        finally:
            if self.busy_since < math.inf:
                self._arbiter.end(self, self.kind)

    def pause(self) -> None:
        """End the turn, and begin the next one when it is this lane's. Without a turn, this has no effect.

        Raises WorkCancelled if the work was cancelled, and ExecutorStoppedError after the end of the arbiter.
        """
        if self.busy_since == math.inf:
            return
        self._arbiter.end(self, self.kind)
        if self._cancelled():
            raise WorkCancelled("the work was cancelled")
        self._arbiter.begin(self)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Wait for something else inside the context, without a turn, so that no other lane waits for this one."""
        if self.busy_since == math.inf:
            yield
            return
        self._arbiter.end(self, self.kind)
        self._arbiter.set_work(self, has_work=False)
        try:
            yield
        finally:
            self._arbiter.set_work(self, has_work=True)
            self._arbiter.begin(self)


class Arbiter:
    """Grants turns to lanes; see the module. Public methods are thread-safe."""

    def __init__(self, *, slots: int, decode_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """decode_share: fraction of the time for decode steps with one slot, between 0 and 1, exclusive."""
        self.slots, self._decode_share, self.clock = slots, decode_share, clock
        self._divide: Callable[[int], None] = lambda threads: None
        self._computing = 0
        self._changed = threading.Condition()
        self._stopped = self._is_urgent = self._long_only = False
        self.decode = Lane(self, "decode", "decode")
        self._others: list[Lane] = []
        self._decode_used = self._others_used = 0.0
        self._turns = {kind: Tally(TURN_SECONDS) for kind in KINDS}
        self._longest_update = self._overlap_seconds = 0.0
        self._overlap_began = math.inf

    def lane(self, name: str, kind: WorkKind) -> Lane:
        """Return a new lane beside decoding."""
        lane = Lane(self, name, kind)
        self._others.append(lane)
        return lane

    def divide_cores(self, divide: Callable[[int], None]) -> None:
        """Call `divide` now and whenever another number of threads (1 or more) computes at the same time."""
        with self._changed:
            self._divide, self._computing = divide, 0
            self._divide_cores()

    def _divide_cores(self) -> None:
        working = self.decode.has_work + sum(lane.has_work for lane in self._others)
        if (computing := max(1, min(self.slots, working))) != self._computing:
            self._computing = computing
            self._divide(computing)

    def stop(self) -> None:
        """Grant no more turns: threads that wait for one get ExecutorStoppedError."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def busy_since(self) -> float:
        """Start of the longest present turn, in seconds of `clock`; math.inf between turns. For watchdogs."""
        return min(lane.busy_since for lane in (self.decode, *self._others))

    def turn_times(self) -> dict[TurnKind, TurnTimes]:
        """Return the durations of turns by kind, of all kinds."""
        return {kind: TurnTimes(seconds=one.distribution(), longest=one.longest) for kind, one in self._turns.items()}

    def totals(self) -> ComputeTotals:
        """Return what has been computed so far."""
        spent = {kind: one.distribution().total for kind, one in self._turns.items()}
        decode, update = spent.pop("decode"), spent.pop("update")
        return ComputeTotals(
            decode=decode,
            update=update,
            other=sum(spent.values()),
            overlap=self._overlap_seconds,
            processor=time.process_time(),
        )

    def take_longest_update_turn(self) -> float:
        """Return the duration in seconds of the longest turn of an update since the last call."""
        longest, self._longest_update = self._longest_update, 0.0
        return longest

    def works(self, kind: WorkKind) -> bool:
        """Whether a lane beside decoding has work of this kind."""
        return any(lane.has_work and lane.kind == kind for lane in self._others)

    @property
    def others_work(self) -> bool:
        """Whether any lane beside decoding has work."""
        return any(lane.has_work for lane in self._others)

    def set_work(self, lane: Lane, *, has_work: bool) -> None:
        """Record that a thread begins or ends to have work."""
        if has_work is lane.has_work:
            return
        with self._changed:
            lane.has_work = has_work
            if has_work:
                self._forget_idle_time(lane)
            self._divide_cores()
            self._changed.notify_all()

    def set_urgent(self, *, is_urgent: bool) -> None:
        """Record whether a client waits for the first token of what is decoded."""
        if is_urgent is self._is_urgent:
            return
        with self._changed:
            self._is_urgent = is_urgent
            self._changed.notify_all()

    def set_long_only(self, *, long_only: bool) -> None:
        """Record whether the next decode steps are of long requests alone. Only the thread that decodes calls this."""
        self._long_only = long_only

    def _forget_idle_time(self, lane: Lane) -> None:
        busy = [other.used for other in self._others if other.has_work and other is not lane]
        if lane is not self.decode and busy:
            lane.used = max(lane.used, min(busy))
        if self.decode.has_work and (lane is self.decode or not busy):
            self._decode_used = self._others_used = max(self._decode_used, self._others_used)

    def begin(self, lane: Lane) -> None:
        """Wait for the turn of a lane."""
        with self._changed:
            lane.is_waiting = True
            while not self._stopped and not self._may_begin(lane):
                self._changed.wait()
            lane.is_waiting = False
            if self._stopped:
                raise ExecutorStoppedError("the computation was stopped")
            lane.busy_since = now = self.clock()
            if len(self._inside()) == 2:
                self._overlap_began = now

    def end(self, lane: Lane, kind: TurnKind) -> None:
        """End the turn of a lane."""
        with self._changed:
            now = self.clock()
            seconds = now - lane.busy_since
            if len(self._inside()) == 2:
                self._overlap_seconds += now - self._overlap_began
            lane.busy_since = math.inf
            lane.used += seconds
            if lane is not self.decode:
                self._others_used += seconds / (1.0 - self._decode_share)
            elif kind != "call":
                self._decode_used += seconds / self._share_of_decoding
            self._turns[kind].add(seconds)
            if kind == "update":
                self._longest_update = max(self._longest_update, seconds)
            self._changed.notify_all()

    @property
    def _share_of_decoding(self) -> float:
        """Share of decoding, where the others have 1 - `decode_share`."""
        share = (1.0 - self._decode_share) * LONG_SHARE / (1.0 - LONG_SHARE)
        return min(share, self._decode_share) if self._long_only else self._decode_share

    def _may_begin(self, lane: Lane) -> bool:
        inside = self._inside()
        decodes = self.decode in inside
        free = self.slots - len(inside)
        if free <= 0:
            return False
        if self.slots == 1 and self._contended and self._decoding_is_next() is not (lane is self.decode):
            return False
        if lane is self.decode:
            return True
        if self.slots > 1 and self.decode.has_work and not decodes:
            free -= 1
        before = [one for one in self._others if one.has_work and one not in inside and one.used < lane.used]
        return len(before) < free

    def _inside(self) -> list[Lane]:
        """Return the lanes that have a turn."""
        return [lane for lane in (self.decode, *self._others) if lane.busy_since < math.inf]

    @property
    def _contended(self) -> bool:
        return self.decode.has_work and self.others_work

    def _decoding_is_next(self) -> bool:
        """Whether a call waits, or decoding has used less of its share, or is urgent and has not used much more."""
        if self.decode.is_waiting and self.decode.kind == "call":
            return True
        ahead = (self._decode_used - self._others_used) * (1.0 - self._decode_share)
        return ahead <= 0.0 or (self._is_urgent and ahead < URGENT_SECONDS)
