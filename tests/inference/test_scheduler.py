"""The scheduler of the decode engine: who is admitted, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from clotho.inference.kv_budget import KVBudget, Load, Loads
from clotho.inference.scheduler import ActiveRequest, PrefillJob, Row, Scheduler, client_rows
from clotho.lanes.fair_queue import FairQueue
from protocols.errors import RequestError
from protocols.sampling import SampleFailed, SampleRequest, Sampling
from tests.inference.engine_helpers import make_engine, make_prompt, submit_request, tick_until


def job(name: int, rows: int, *, background: bool = False, tokens: int = 10, client: str = "") -> PrefillJob:
    """A job of `rows` completions of `tokens` tokens, prompt included."""
    request = SampleRequest(
        prompt=(1,),
        sampling=Sampling(max_tokens=tokens - 1),
        seeds=tuple(range(rows)),
        background=background,
        client=client,
    )
    active = ActiveRequest(name, request, lambda event: None, limit=tokens - 1, open=rows)
    return PrefillJob(active, (1,), [Row(active, index, serial=index + 1) for index in range(rows)])


def make_scheduler(max_num_seqs: int, kv_cache_tokens: int = 10_000, rollout_share: float = 0.5) -> Scheduler:
    """A scheduler with the limits of an engine."""
    return Scheduler(max_num_seqs, KVBudget(kv_cache_tokens, rollout_share, max_num_seqs), rollout_share)


def admitted(scheduler: Scheduler, running: int = 0, longest: int = 0, background: int = 0) -> list[int]:
    """Names of the jobs that are admitted beside the running rows, all of which are short."""
    jobs = scheduler.admit(Loads(Load(running, longest, background)))
    return [one.active.request_id for one in jobs]


def test_requests_of_clients_are_admitted_before_waiting_rollouts() -> None:
    """In order of arrival among themselves; rollouts keep their order too."""
    scheduler = make_scheduler(max_num_seqs=64)
    for name, background in ((1, True), (2, True), (3, False), (4, True), (5, False)):
        scheduler.add(job(name, 4, background=background))
    assert admitted(scheduler) == [3, 5, 1, 2, 4]


def test_a_client_gets_a_row_while_rollouts_use_all_rows() -> None:
    """An eighth of the rows is added for clients; a further rollout waits, and so do further clients."""
    scheduler = make_scheduler(max_num_seqs=16)
    assert client_rows(16) == 2
    scheduler.add(job(1, 1, background=True))
    for name in (2, 3, 4):
        scheduler.add(job(name, 1, background=False))
    assert admitted(scheduler, running=16, longest=10, background=16) == [2, 3]


def test_rows_for_clients_are_added_beside_rollouts_only() -> None:
    """Clients alone have `max_num_seqs` rows, and the KV cache limits every row."""
    scheduler = make_scheduler(max_num_seqs=16)
    scheduler.add(job(1, 1, background=False))
    assert admitted(scheduler, running=16, longest=10) == []
    scheduler = make_scheduler(max_num_seqs=16, kv_cache_tokens=160)
    scheduler.add(job(1, 1, background=False))
    assert admitted(scheduler, running=16, longest=10, background=16) == []


def test_the_rest_of_a_split_rollout_waits_behind_clients() -> None:
    """A rollout that was admitted in part returns to the head of the rollouts, not of the queue."""
    scheduler = make_scheduler(max_num_seqs=4)
    first = job(1, 6, background=True)
    scheduler.add(first)
    scheduler.add(job(2, 1, background=True))
    assert admitted(scheduler) == [1]
    scheduler.add(job(3, 1, background=False))
    scheduler.entered(first)
    assert [one.active.request_id for one in scheduler.waiting] == [3, 1, 2]


def test_clients_are_admitted_in_turn_by_the_tokens_that_they_request() -> None:
    """The requests of one client wait behind each other: a new client waits for one of them, not for all."""
    scheduler = make_scheduler(max_num_seqs=1)
    for name in (1, 2, 3, 4):
        scheduler.add(job(name, 1, client="many", tokens=200))
    assert scheduler.waiting_clients == 1
    order = [finish_one(scheduler)]
    for name in (5, 6, 7, 8):
        scheduler.add(job(name, 1, client="few", tokens=100))
    assert scheduler.waiting_clients == 2
    order += [finish_one(scheduler) for _ in range(7)]
    assert order == [1, 2, 5, 6, 3, 7, 8, 4]


def finish_one(scheduler: Scheduler) -> int:
    """Admit the next request, let it enter and leave the batch, and return its name."""
    (first,) = scheduler.admit(Loads())
    scheduler.entered(first)
    return first.active.request_id


def test_a_request_that_never_started_gets_no_refund() -> None:
    """A client cannot gain a turn by requests that it aborts while they wait."""
    scheduler = make_scheduler(max_num_seqs=1)
    for name in (1, 2):
        scheduler.add(job(name, 1, client="a", tokens=100))
    scheduler.add(job(3, 1, client="b", tokens=100))
    aborted = job(4, 1, client="a", tokens=1000)
    scheduler.add(aborted)
    assert [finish_one(scheduler) for _ in range(3)] == [1, 2, 3]
    scheduler.add(job(5, 1, client="b", tokens=100))
    scheduler.forget({aborted.active})
    scheduler.refund(aborted.active, 1000)
    scheduler.add(job(6, 1, client="a", tokens=100))
    assert [finish_one(scheduler), finish_one(scheduler)] == [5, 6]
    assert not scheduler.has_waiting


def test_waiting_rollouts_keep_their_share_of_the_rows_from_clients() -> None:
    """Clients have all rows while no rollout waits; then they get no further row beyond their share."""
    scheduler = make_scheduler(max_num_seqs=8, rollout_share=0.5)
    for name in range(12):
        scheduler.add(job(name, 1, client=f"client {name}"))
    assert len(admitted(scheduler)) == 8
    for held in list(scheduler.entering):
        scheduler.entered(held)
    for name in (20, 21, 22):
        scheduler.add(job(name, 2, background=True))
    assert admitted(scheduler, running=6, longest=10) == [20]
    assert admitted(scheduler, running=3, longest=10) == [8, 21]
    scheduler = make_scheduler(max_num_seqs=8, rollout_share=0.5)
    scheduler.add(job(20, 1, background=True))
    scheduler.add(job(30, 1))
    assert admitted(scheduler, running=7, longest=10) == [20, 30]


def test_long_rows_take_no_rows_of_others() -> None:
    """They have as many of their own, and who waits for one of these lets others pass."""
    scheduler = make_scheduler(max_num_seqs=8)
    long = job(1, 1, tokens=400)
    long.further = 300
    scheduler.add(long)
    scheduler.add(job(2, 1))
    scheduler.add(job(3, 4, background=True))
    loads = Loads(Load(4, 10), Load(8, 300, most=300))
    assert [one.active.request_id for one in scheduler.admit(loads)] == [3, 2]
    assert not scheduler.waits_for_cache
    loads = Loads(Load(4, 10), Load(7, 300, most=300))
    assert [one.active.request_id for one in scheduler.admit(loads)] == [1]


def test_a_row_joins_the_long_rows_at_once_only_if_its_tokens_fit() -> None:
    """Beside short rows that hold most of the cache, it waits in the queue."""
    scheduler = make_scheduler(max_num_seqs=8, kv_cache_tokens=1000)
    assert scheduler.has_room_for_long(400, Loads())
    assert not scheduler.has_room_for_long(400, Loads(Load(4, 200)))


def test_a_share_of_0_prefers_clients_always() -> None:
    """A share of 1 leaves clients one row."""
    for share, expected in ((0.0, [1, 2, 3, 4]), (1.0, [1, 9, 2, 3])):
        scheduler = make_scheduler(max_num_seqs=4, rollout_share=share)
        for name in (1, 2, 3, 4):
            scheduler.add(job(name, 1))
        scheduler.add(job(9, 1, background=True))
        assert admitted(scheduler) == expected


def test_a_request_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the param `queue`, which the server answers with status 503. The running request is not affected."""
    monkeypatch.setattr("clotho.inference.engine.LIMIT_CHECK_SECONDS", 0.0)
    engine = make_engine(max_num_seqs=1)
    running = submit_request(engine, make_prompt(5), Sampling(max_tokens=20, ignore_eos=True), wait_seconds=1e6)
    engine.tick()
    waiting = submit_request(engine, make_prompt(6), wait_seconds=1e-9)
    patient = submit_request(engine, make_prompt(7))
    tick_until(engine, lambda: bool(waiting.events))
    (refusal,) = waiting.events
    assert isinstance(refusal, SampleFailed)
    assert refusal.param == "queue"
    tick_until(engine, lambda: not engine.has_work)
    assert len(running.completions[0].tokens) == 20
    assert len(patient.completions) == 1
    assert engine.stats().timed_out == {"queue": 1}


def passes_over_the_queue(requests: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often an engine reads its waiting requests while they are submitted, and then all ended at once."""
    passes = 0

    def counted(queue: FairQueue[PrefillJob]) -> Iterator[PrefillJob]:
        nonlocal passes
        passes += 1
        return items(queue)

    items = FairQueue.__iter__
    engine = make_engine(max_num_seqs=1)
    with monkeypatch.context() as patch:
        patch.setattr(FairQueue, "__iter__", counted)
        answers = [submit_request(engine, make_prompt(5), client=f"client {number}") for number in range(requests)]
        engine.abort_clients(None)
        engine.tick()
    assert {one.finish_reason for answer in answers for one in answer.completions} == {"abort"}
    assert len(answers) == sum(len(answer.completions) for answer in answers)
    assert not engine.has_work
    return passes


def test_a_request_costs_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its submission nor its end reads all waiting requests."""
    assert passes_over_the_queue(64, monkeypatch) == passes_over_the_queue(4, monkeypatch)


def test_waiting_rows_of_clients_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows count until they are in the batch or dropped; those of rollouts never count."""
    monkeypatch.setattr("clotho.inference.scheduler.MAX_WAITING_ROWS", 8)
    scheduler = make_scheduler(max_num_seqs=2)
    jobs = [job(1, 2, client="a"), job(2, 2, client="a"), job(3, 2, client="b"), job(4, 50, background=True)]
    dropped = [*jobs[1].rows, *jobs[3].rows]
    for one in jobs:
        scheduler.add(one)
    scheduler.check(2)
    with pytest.raises(RequestError):
        scheduler.check(3)
    assert admitted(scheduler) == [1]
    with pytest.raises(RequestError):
        scheduler.check(3)
    scheduler.entered(jobs[0])
    scheduler.check(4)
    assert scheduler.forget({jobs[1].active, jobs[3].active}) == dropped
    scheduler.check(6)
    with pytest.raises(RequestError):
        scheduler.check(7)
    assert admitted(scheduler) == [3]
    scheduler.entered(jobs[2])
    scheduler.check(8)
    scheduler.add(job(5, 2, client="a"))
    scheduler.clear()
    scheduler.check(8)


def test_an_answer_that_takes_too_long_ends_with_its_tokens_so_far() -> None:
    """The finish reason is `length`, and the request streams its tokens until then."""
    engine = make_engine(max_num_seqs=4)
    sampling = Sampling(max_tokens=1_000_000, ignore_eos=True)
    late = submit_request(engine, make_prompt(5), sampling, (1, 2), stream=True, answer_seconds=0.02)
    tick_until(engine, lambda: not engine.has_work, most=1_000_000)
    assert [one.finish_reason for one in late.completions] == ["length", "length"]
    assert [len(one.tokens) for one in late.completions] == [len(late.streamed(index)) for index in (0, 1)]
    assert engine.stats().timed_out == {"answer": 1}


def test_a_lower_limit_lets_running_rows_finish_and_admits_fewer() -> None:
    """In the engine: eight rows become two, and eight again when the limit is raised; every completion is complete."""
    engine = make_engine(max_num_seqs=8)
    ended: list[Any] = []
    for salt in range(8):
        request = SampleRequest(
            prompt=make_prompt(5, salt), sampling=Sampling(max_tokens=12, ignore_eos=True), seeds=(0, 1, 2, 3)
        )
        engine.submit(request, ended.append)
    tick_until(engine, lambda: engine.running == 8)
    engine.limit_rows(2)
    tick_until(engine, lambda: engine.running == 2)
    assert engine.stats().rows_limit == 2
    most = 0
    while len(ended) < 14:
        engine.tick()
        most = max(most, engine.running)
    assert most == 2
    engine.limit_rows(1000)
    assert engine.stats().rows_limit == 8
    tick_until(engine, lambda: engine.running == 8)
    tick_until(engine, lambda: len(ended) == 32)
    assert {len(event.completion.tokens) for event in ended} == {12}
