"""The arbiter: which lanes compute at the same time, and which is next."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import pytest

from clotho.lanes.arbiter import LONG_SHARE, URGENT_SECONDS, Arbiter, Lane, TurnKind
from protocols.errors import ExecutorStoppedError

LIMIT = 60.0
"""Seconds after which a test fails instead of waiting for ever."""


class Clock:
    """A clock that only turns advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Contest:
    """Threads that take turns of fixed durations, and the order of these turns by the names of the lanes.

    All lanes have work before the first turn, so that with one slot the order depends on the arbiter alone.
    """

    def __init__(self, arbiter: Arbiter, clock: Clock) -> None:
        self.arbiter, self.clock = arbiter, clock
        self.order: list[str] = []
        self._alone = threading.Lock()
        self._work: list[Callable[[], None]] = []

    def enter(self, lane: Lane, kind: TurnKind, *, turns: int, seconds: float, urgent: int = 0) -> None:
        """Let a thread take `turns` turns in a lane. urgent: number of the first decode steps that are urgent."""
        self.arbiter.set_work(lane, has_work=True)
        if urgent:
            self.arbiter.set_urgent(is_urgent=True)

        def work() -> None:
            for turn in range(turns):
                if urgent:
                    self.arbiter.set_urgent(is_urgent=turn < urgent)
                with lane.turn(kind):
                    assert self._alone.acquire(blocking=False), "two turns at once"
                    self.order.append(lane.name)
                    self.clock.now += seconds
                    self._alone.release()
            self.arbiter.set_work(lane, has_work=False)

        self._work.append(work)

    def run(self) -> list[str]:
        """Return the order of the turns when all threads have ended."""
        with ThreadPoolExecutor(len(self._work)) as pool:
            for future in [pool.submit(work) for work in self._work]:
                future.result(LIMIT)
        self._work.clear()
        return self.order


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


@pytest.fixture
def one(clock: Clock) -> Arbiter:
    """One slot, and equal shares."""
    return Arbiter(slots=1, decode_share=0.5, clock=clock)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads, which have ended after the test."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


def spans(order: list[str], name: str) -> list[int]:
    """Return the numbers of other turns between the turns of a lane."""
    places = [place for place, found in enumerate(order) if found == name]
    return [after - before - 1 for before, after in pairwise(places)]


def take(lane: Lane, kind: TurnKind = "update") -> None:
    """Take an empty turn."""
    with lane.turn(kind):
        pass


@pytest.mark.parametrize(
    ("share", "long_only", "expected"),
    [(0.25, False, 0.25), (0.5, False, 0.5), (0.75, False, 0.75), (0.5, True, LONG_SHARE)],
)
def test_with_one_slot_decoding_gets_its_share_of_the_time(
    clock: Clock, share: float, long_only: bool, expected: float
) -> None:
    """By time and not by number of turns: decode steps take 1 ms, and parts of an update 4 ms.

    Long requests alone get an eighth: rollouts that wait for the learner lose nothing else.
    """
    arbiter = Arbiter(slots=1, decode_share=share, clock=clock)
    arbiter.set_long_only(long_only=long_only)
    contest = Contest(arbiter, clock)
    contest.enter(arbiter.decode, "decode", turns=1000, seconds=0.001)
    contest.enter(arbiter.lane("learner", "update"), "update", turns=40, seconds=0.004)
    order = contest.run()
    last = len(order) - 1 - order[::-1].index("learner")
    steps = order[:last].count("decode")
    assert steps / (steps + 40 * 4) == pytest.approx(expected, abs=0.03)


def test_with_one_slot_a_call_is_the_next_turn_whatever_has_been_used(
    one: Arbiter, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    """Decoding is far ahead of its share; the call begins at the next pause of the learner."""
    learner, order = one.lane("learner", "update"), []
    one.set_work(one.decode, has_work=True)
    with one.decode.turn("decode"):
        clock.now += 100.0
    one.set_work(learner, has_work=True)
    with one.decode.turn("decode"):
        clock.now += 100.0

    def call() -> None:
        with one.decode.turn("call"):
            order.append("call")

    def update() -> None:
        with learner.turn("update"):
            waiting = pool.submit(call)
            while not one.decode.is_waiting:
                assert not waiting.done()
            learner.pause()
            order.append("update")

    pool.submit(update).result(LIMIT)
    assert order == ["call", "update"]


def test_calls_count_for_no_share(one: Arbiter, clock: Clock) -> None:
    """Decode steps and updates alternate after a call of 100 seconds, which is measured as a call."""
    contest = Contest(one, clock)
    contest.enter(one.decode, "decode", turns=20, seconds=0.01)
    contest.enter(one.lane("learner", "update"), "update", turns=20, seconds=0.01)
    with one.decode.turn("call"):
        clock.now += 100.0
    assert one.turn_times()["call"].longest == 100.0
    assert contest.run()[:20].count("decode") == 10


def test_with_one_slot_urgent_decode_steps_come_first_up_to_a_limit(one: Arbiter, clock: Clock) -> None:
    """Decoding exceeds its share by `URGENT_SECONDS`; then it gets its share, and no more."""
    contest = Contest(one, clock)
    contest.enter(one.decode, "decode", turns=4000, seconds=0.001, urgent=4000)
    contest.enter(one.lane("learner", "update"), "update", turns=200, seconds=0.01)
    order = contest.run()
    assert order.index("learner") * 0.001 == pytest.approx(URGENT_SECONDS, rel=0.02)
    later = spans(order, "learner")[:-1]
    assert sum(later) * 0.001 == pytest.approx(len(later) * 0.01, rel=0.05)


def test_the_other_lanes_get_back_what_urgent_decode_steps_took(one: Arbiter, clock: Clock) -> None:
    """As soon as no client waits for a first token, and then both sides alternate."""
    contest = Contest(one, clock)
    contest.enter(one.decode, "decode", turns=500, seconds=0.001, urgent=400)
    contest.enter(one.lane("learner", "update"), "update", turns=500, seconds=0.001)
    order = contest.run()
    assert "learner" not in order[:400]
    assert order[401:799].count("decode") <= 1
    assert max(spans(order[801:990], "decode")) <= 1


def test_the_other_lanes_begin_as_soon_as_no_client_waits(one: Arbiter, clock: Clock, pool: ThreadPoolExecutor) -> None:
    """A lane that waits for urgent decode steps learns that they are not urgent any more."""
    one.set_work(one.decode, has_work=True)
    one.set_urgent(is_urgent=True)
    learner = one.lane("learner", "update")
    one.set_work(learner, has_work=True)
    with one.decode.turn("decode"):
        clock.now += 0.001
    occupant = Occupant(pool, learner)
    for _ in range(200):  # until it waits, nearly always
        pool.submit(threading.get_ident).result(LIMIT)
    assert not occupant.is_inside
    one.set_urgent(is_urgent=False)
    occupant.inside().leave()


@pytest.mark.parametrize("idle", ["decode", "learner"])
def test_a_lane_that_was_idle_gets_no_credit(one: Arbiter, clock: Clock, idle: str) -> None:
    """After one side had all the time, both sides alternate."""
    learner, contest = one.lane("learner", "update"), Contest(one, clock)
    busy, kind = (learner, "update") if idle == "decode" else (one.decode, "decode")
    contest.enter(busy, kind, turns=100, seconds=1.0)  # type: ignore[arg-type]
    contest.run()
    contest.order.clear()
    contest.enter(one.decode, "decode", turns=20, seconds=1.0)
    contest.enter(learner, "update", turns=20, seconds=1.0)
    order = contest.run()
    assert max(spans(order[:38], "decode")) <= 1
    assert max(spans(order[:38], "learner")) <= 1


def test_an_idle_lane_beside_decoding_gets_no_credit(one: Arbiter, clock: Clock) -> None:
    """An evaluation that begins late takes turns with the learner, and does not catch up."""
    learner, evaluation = one.lane("learner", "update"), one.lane("evaluation", "evaluation")
    contest = Contest(one, clock)
    contest.enter(learner, "update", turns=100, seconds=1.0)
    contest.run()
    contest.order.clear()
    contest.enter(learner, "update", turns=20, seconds=1.0)
    contest.enter(evaluation, "evaluation", turns=20, seconds=1.0)
    order = contest.run()
    assert max(spans(order[:38], "learner")) <= 2
    assert order[:20].count("evaluation") == pytest.approx(10, abs=1)


def test_the_other_lanes_take_turns_by_the_time_that_they_used(one: Arbiter, clock: Clock) -> None:
    """A lane with turns of 3 seconds has one for three turns of 1 second of another."""
    contest = Contest(one, clock)
    contest.enter(one.lane("learner", "update"), "update", turns=20, seconds=3.0)
    contest.enter(one.lane("parity", "parity"), "parity", turns=60, seconds=1.0)
    order = contest.run()
    assert order[:72].count("learner") == pytest.approx(18, abs=1)
    assert max(spans(order[:72], "learner")) <= 4


@pytest.mark.parametrize("slots", [1, 2])
def test_a_lane_that_waits_outside_its_turn_holds_up_nobody(pool: ThreadPoolExecutor, slots: int) -> None:
    """The parity check waits for decode steps, and a lane that has used more time goes on meanwhile."""
    arbiter = Arbiter(slots=slots, decode_share=0.5)
    parity, learner = arbiter.lane("parity", "parity"), arbiter.lane("learner", "update")
    learner.used = 100.0
    arbiter.set_work(parity, has_work=True)

    def wait_outside() -> None:
        with parity.turn("parity"):
            with parity.outside():
                pool.submit(take, arbiter.decode, "decode").result(LIMIT)
                pool.submit(take, learner).result(LIMIT)
            assert parity.busy_since < math.inf

    pool.submit(wait_outside).result(LIMIT)
    assert arbiter.busy_since == math.inf


def test_outside_and_pause_have_no_effect_without_a_turn(one: Arbiter) -> None:
    """Code that divides its work can run outside of any compute thread's call."""
    lane = one.lane("learner", "update")
    with lane.outside():
        lane.pause()
    assert one.turn_times()["update"].seconds.counts == (0,) * len(one.turn_times()["update"].seconds.counts)


class Occupant:
    """A thread that keeps a turn until it may leave."""

    def __init__(self, pool: ThreadPoolExecutor, lane: Lane, kind: TurnKind = "update") -> None:
        self._lane, self._kind = lane, kind
        self._inside, self._leave = threading.Event(), threading.Event()
        self.future = pool.submit(self._occupy)

    def _occupy(self) -> None:
        with self._lane.turn(self._kind):
            self._inside.set()
            assert self._leave.wait(LIMIT)

    def inside(self) -> Occupant:
        """Wait until the turn has begun."""
        assert self._inside.wait(LIMIT)
        return self

    @property
    def is_inside(self) -> bool:
        """Whether the turn has begun."""
        return self._inside.is_set()

    def leave(self) -> None:
        """End the turn."""
        self._leave.set()
        self.future.result(LIMIT)


@pytest.mark.parametrize("slots", [2, 3])
def test_with_several_slots_others_never_hold_up_decoding(pool: ThreadPoolExecutor, slots: int) -> None:
    """Decode steps begin while others compute; these use all slots but one, whatever time they have used."""
    arbiter = Arbiter(slots=slots, decode_share=0.5)
    arbiter.set_work(arbiter.decode, has_work=True)
    others = [arbiter.lane(f"other {number}", "update") for number in range(slots)]
    for lane in others:
        arbiter.set_work(lane, has_work=True)
    inside = [Occupant(pool, lane).inside() for lane in others[:-1]]
    surplus = Occupant(pool, others[-1])
    for _ in range(200):
        take(arbiter.decode, "decode")
    assert not surplus.is_inside
    inside.pop().leave()
    surplus.inside()
    take(arbiter.decode, "decode")
    for one in (*inside, surplus):
        one.leave()


@pytest.mark.parametrize("slots", [2, 3])
def test_with_several_slots_others_have_all_of_them_while_nothing_is_decoded(
    pool: ThreadPoolExecutor, slots: int
) -> None:
    """Decoding that begins then waits for the end of one turn, and no longer."""
    arbiter = Arbiter(slots=slots, decode_share=0.5)
    others = [Occupant(pool, arbiter.lane(f"other {number}", "update")) for number in range(slots)]
    for one in others:
        one.inside()
    arbiter.set_work(arbiter.decode, has_work=True)
    decoding = Occupant(pool, arbiter.decode, "decode")
    others.pop().leave()
    decoding.inside()
    for one in (*others, decoding):
        one.leave()


def test_with_several_slots_the_lane_that_used_the_least_is_next(pool: ThreadPoolExecutor) -> None:
    """The first free slot is for the lane that has used less time, even if another one asked first."""
    arbiter = Arbiter(slots=2, decode_share=0.5)
    arbiter.set_work(arbiter.decode, has_work=True)
    lanes = [arbiter.lane(name, "update") for name in ("first", "second", "third")]
    occupant = Occupant(pool, lanes[0]).inside()
    lanes[1].used, lanes[2].used = 7.0, 6.0
    second = Occupant(pool, lanes[1])
    arbiter.set_work(lanes[2], has_work=True)
    occupant.leave()
    third = Occupant(pool, lanes[2]).inside()
    assert not second.is_inside
    arbiter.set_work(lanes[2], has_work=False)
    third.leave()
    second.inside().leave()


@pytest.mark.parametrize("slots", [1, 2])
def test_the_end_of_the_arbiter_wakes_all_that_wait(pool: ThreadPoolExecutor, slots: int) -> None:
    """Waiting threads get ExecutorStoppedError, and a present turn ends at its next pause."""
    arbiter = Arbiter(slots=slots, decode_share=0.5)
    arbiter.set_work(arbiter.decode, has_work=True)
    present, *others = [arbiter.lane(name, "update") for name in ("present", "other", "third")]
    begun, stopped = threading.Event(), threading.Event()

    def compute() -> None:
        with present.turn("update"):
            begun.set()
            assert stopped.wait(LIMIT)
            present.pause()

    if slots == 1:
        arbiter.set_work(arbiter.decode, has_work=False)
    futures: list[Future[None]] = [pool.submit(compute)]
    assert begun.wait(LIMIT)
    futures += [pool.submit(take, lane) for lane in others]
    arbiter.stop()
    stopped.set()
    for future in futures:
        with pytest.raises(ExecutorStoppedError):
            future.result(LIMIT)
    assert arbiter.busy_since == math.inf


def test_turns_are_measured_by_kind(one: Arbiter, clock: Clock) -> None:
    """Number, total and longest duration of the parts between pauses; kinds without a turn are zero."""
    lane = one.lane("parity", "parity")
    with lane.turn("parity"):
        clock.now += 0.5
        lane.pause()
        clock.now += 2.0
        with lane.outside():
            clock.now += 50.0
        clock.now += 0.25
    found = one.turn_times()
    assert (found["parity"].longest, found["parity"].seconds.total) == (2.0, 2.75)
    assert sum(found["parity"].seconds.counts) == 3
    assert found["update"].longest == sum(found["update"].seconds.counts) == 0


def test_the_longest_turn_of_an_update_is_measured_since_the_last_reading(one: Arbiter, clock: Clock) -> None:
    """Turns of other work do not count; reading resets the value."""
    for kind, seconds in (("update", 0.5), ("update", 2.0), ("update", 0.25), ("parity", 9.0)):
        with one.lane(kind, kind).turn(kind):  # type: ignore[arg-type]
            clock.now += seconds
    assert one.take_longest_update_turn() == 2.0
    assert one.take_longest_update_turn() == 0.0


def test_the_longest_present_turn_is_known(pool: ThreadPoolExecutor, clock: Clock) -> None:
    """`busy_since` is its start, for the watchdog."""
    arbiter = Arbiter(slots=2, decode_share=0.5, clock=clock)
    clock.now = 7.0
    first = Occupant(pool, arbiter.lane("learner", "update")).inside()
    clock.now = 8.0
    second = Occupant(pool, arbiter.decode, "decode").inside()
    assert arbiter.busy_since == 7.0
    first.leave()
    assert arbiter.busy_since == 8.0
    second.leave()
    assert arbiter.busy_since == math.inf


@pytest.mark.parametrize(("slots", "expected"), [(1, [1]), (2, [1, 2, 1])])
def test_cores_are_divided_among_the_lanes_that_compute_at_the_same_time(slots: int, expected: list[int]) -> None:
    """At most as many as there are slots, and only when the number changes."""
    arbiter, found = Arbiter(slots=slots, decode_share=0.5), list[int]()
    lanes = [arbiter.decode, arbiter.lane("learner", "update"), arbiter.lane("parity", "parity")]
    arbiter.divide_cores(found.append)
    for has_work in (True, False):
        for lane in lanes:
            arbiter.set_work(lane, has_work=has_work)
    assert found == expected


def test_lanes_with_work_are_known_by_kind(one: Arbiter) -> None:
    """Decoding is no other lane."""
    lane = one.lane("learner", "update")
    one.set_work(one.decode, has_work=True)
    assert not one.others_work
    one.set_work(lane, has_work=True)
    assert (one.others_work, one.works("update"), one.works("parity")) == (True, True, False)
    one.set_work(lane, has_work=False)
    assert not one.works("update")
