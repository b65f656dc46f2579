"""The scheduler of the decode engine: who is admitted, and in which order."""

from __future__ import annotations

from typing import Any

from clotho.inference.scheduler import ActiveRequest, PrefillJob, Row, Scheduler, client_rows
from protocols.sampling import SampleRequest, Sampling
from tests.inference.engine_helpers import make_engine, make_prompt, tick_until


def job(name: int, rows: int, *, background: bool, tokens: int = 10) -> PrefillJob:
    """A job of `rows` completions of `tokens` tokens, prompt included."""
    request = SampleRequest(prompt=(1,), sampling=Sampling(), seeds=tuple(range(rows)), background=background)
    active = ActiveRequest(name, request, lambda event: None, limit=tokens - 1, open=rows)
    return PrefillJob(active, (1,), [Row(active, index, serial=index + 1) for index in range(rows)])


def admitted(scheduler: Scheduler, **running: int) -> list[int]:
    """Names of the jobs that are admitted beside the running rows."""
    jobs = scheduler.admit(**{"running": 0, "longest": 0, **running})
    return [one.active.request_id for one in jobs]


def test_requests_of_clients_are_admitted_before_waiting_rollouts() -> None:
    """In order of arrival among themselves; rollouts keep their order too."""
    scheduler = Scheduler(max_num_seqs=64, kv_cache_tokens=10_000)
    for name, background in ((1, True), (2, True), (3, False), (4, True), (5, False)):
        scheduler.add(job(name, 4, background=background))
    assert admitted(scheduler) == [3, 5, 1, 2, 4]


def test_a_client_gets_a_row_while_rollouts_use_all_rows() -> None:
    """An eighth of the rows is added for clients; a further rollout waits, and so do further clients."""
    scheduler = Scheduler(max_num_seqs=16, kv_cache_tokens=10_000)
    assert client_rows(16) == 2
    scheduler.add(job(1, 1, background=True))
    for name in (2, 3, 4):
        scheduler.add(job(name, 1, background=False))
    assert admitted(scheduler, running=16, longest=10, background=16) == [2, 3]


def test_rows_for_clients_are_added_beside_rollouts_only() -> None:
    """Clients alone have `max_num_seqs` rows, and the KV cache limits every row."""
    scheduler = Scheduler(max_num_seqs=16, kv_cache_tokens=10_000)
    scheduler.add(job(1, 1, background=False))
    assert admitted(scheduler, running=16, longest=10) == []
    scheduler = Scheduler(max_num_seqs=16, kv_cache_tokens=160)
    scheduler.add(job(1, 1, background=False))
    assert admitted(scheduler, running=16, longest=10, background=16) == []


def test_the_rest_of_a_split_rollout_waits_behind_clients() -> None:
    """A rollout that was admitted in part returns to the head of the rollouts, not of the queue."""
    scheduler = Scheduler(max_num_seqs=4, kv_cache_tokens=10_000)
    first = job(1, 6, background=True)
    scheduler.add(first)
    scheduler.add(job(2, 1, background=True))
    assert admitted(scheduler) == [1]
    scheduler.add(job(3, 1, background=False))
    scheduler.entered(first)
    assert [one.active.request_id for one in scheduler.waiting] == [3, 1, 2]


def test_a_streaming_client_gets_its_first_token_beside_a_full_batch_of_rollouts() -> None:
    """In the engine: within three steps, although no rollout has ended and others wait."""
    engine = make_engine(max_num_seqs=8)
    events: list[Any] = []
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    for salt in range(4):
        rollout = SampleRequest(prompt=make_prompt(5, salt), sampling=sampling, seeds=(0, 1, 2, 3), background=True)
        engine.submit(rollout, lambda event: None)
    tick_until(engine, lambda: engine.running == 8)
    client = SampleRequest(prompt=make_prompt(9), sampling=sampling, seeds=(7,), stream=True)
    engine.submit(client, events.append)
    for _ in range(3):
        engine.tick()
    assert engine.running == 9
    assert events


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
