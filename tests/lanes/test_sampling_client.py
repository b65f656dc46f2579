"""The sampling client returns results on the event loop and leaves no request behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import anyio
import pytest
from msgspec import structs

from clotho.inference.engine import DecodeEngine
from clotho.lanes import sampling_client
from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import EngineSampler
from clotho.settings.engine import EngineSection
from protocols.errors import ExecutorStoppedError, GenerationError, RequestError
from protocols.sampling import Completion, CompletionDone, SampleRequest, Sampling, TokenSampled
from tests.fakes import FakeEngine
from tests.small_models import tiny_source


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Yield a fake engine whose thread ends with the test."""
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def sampler(engine: FakeEngine) -> EngineSampler:
    """Return a sampling client of the fake engine."""
    return EngineSampler(engine.submit_call, engine)


def request(
    *, seeds: tuple[int, ...] = (1,), max_tokens: int = 12, prompt: tuple[int, ...] = (1, 2), stop: tuple[str, ...] = ()
) -> SampleRequest:
    """Return a request that ends by length or by a stop string."""
    ascii_only = tuple((token, -100.0) for token in range(128, 257))
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, stop=stop, logit_bias=ascii_only)
    return SampleRequest(prompt=prompt, sampling=sampling, seeds=seeds)


@pytest.fixture(params=["fake", "real"])
def any_sampler(request: pytest.FixtureRequest) -> Iterator[EngineSampler]:
    """Yield a sampling client of the fake engine and one of the real engine with a tiny model."""
    if request.param == "fake":
        fake = FakeEngine()
        yield EngineSampler(fake.submit_call, fake)
        fake.close()
        return
    compute = Compute(decode_share=0.5, slots=2)
    compute.start()
    real = compute.decode.submit(lambda: DecodeEngine(tiny_source("qwen3"), EngineSection())).result()
    compute.decode.attach(real)
    yield EngineSampler(compute.decode.submit, real)
    compute.stop()


async def test_completions_are_in_the_order_of_their_seeds(any_sampler: EngineSampler) -> None:
    """Completion i belongs to seed i."""
    together = await any_sampler.complete(request(seeds=(5, 6, 7)))
    alone = [(await any_sampler.complete(request(seeds=(seed,))))[0] for seed in (5, 6, 7)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({completion.tokens for completion in together}) == 3


async def test_the_chunks_of_a_stream_add_up_to_its_completions(any_sampler: EngineSampler) -> None:
    """Tokens, log-probabilities and text of the stream equal those of the finished completion, with and without a stop
    string.
    """
    whole = await any_sampler.complete(request(seeds=(1, 2)))
    stop = whole[0].text[4:6]
    for stops in ((), (stop,)):
        sent = request(seeds=(1, 2), stop=stops)
        texts, sampled, done = {0: "", 1: ""}, {0: [], 1: []}, {}  # type: ignore[var-annotated]
        async for event in any_sampler.stream(sent):
            if isinstance(event, TokenSampled):
                sampled[event.index].append((event.token, event.logprob, event.version))
                texts[event.index] += event.text
            else:
                texts[event.index] += event.tail
                done[event.index] = event.completion
        for index, completion in done.items():
            assert sampled[index] == list(zip(completion.tokens, completion.logprobs, completion.versions, strict=True))
            assert texts[index] == completion.text
        assert [done[index].text for index in (0, 1)] == [
            one.text.split(stop)[0] if stops else one.text for one in whole
        ]
        assert done[0].stop_reason == (stop if stops else None)


async def test_every_parameter_of_a_request_reaches_the_engine(sampler: EngineSampler, engine: FakeEngine) -> None:
    """Except `stream`, which the client sets."""
    sent = structs.replace(request(), record_support=True, reuse_prefix=True)
    await sampler.complete(sent)
    async with aclosing(sampler.stream(sent)) as events:
        async for _ in events:
            pass
    assert engine.requests == [sent, structs.replace(sent, stream=True)]


async def test_the_engine_works_after_cancelled_and_refused_requests(any_sampler: EngineSampler) -> None:
    """Both engines: cancel one request, refuse one, and complete another."""
    with anyio.move_on_after(0.01):
        await any_sampler.complete(request(max_tokens=400, seeds=(1, 2, 3)))
    assert any_sampler.running == 0
    assert len(await any_sampler.complete(request())) == 1


async def test_requests_of_one_call_reach_the_engine_in_one_turn(sampler: EngineSampler, engine: FakeEngine) -> None:
    """The engine's batches do not depend on the timing of event loop and compute thread."""
    requests = [request(prompt=(number,)) for number in range(20)]
    results = await sampler.complete_all(requests)
    assert [sent.prompt for sent in engine.requests] == [sent.prompt for sent in requests]
    assert [len(group) for group in results] == [1] * 20


async def test_groups_arrive_as_they_finish_and_failures_stay_separate(
    sampler: EngineSampler, engine: FakeEngine
) -> None:
    """A refused request yields its error once. The others complete."""
    accept = engine.submit

    def refuse_nines(sent, listener):  # type: ignore[no-untyped-def]
        if sent.prompt == (9,):
            raise RequestError("no nines", param="prompt")
        return accept(sent, listener)

    engine.submit = refuse_nines  # type: ignore[method-assign]
    requests = [request(prompt=(1,), max_tokens=30), request(prompt=(9,)), request(prompt=(2,), max_tokens=3)]
    outcomes = [outcome async for outcome in sampler.groups(requests)]
    assert [position for position, _ in outcomes] == [1, 2, 0]
    assert isinstance(outcomes[0][1], RequestError)
    assert sampler.running == 0


async def test_cancelling_a_client_frees_its_rows(sampler: EngineSampler, engine: FakeEngine) -> None:
    """A cancelled `complete` leaves no row in the engine."""
    engine.allow(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.complete, request(seeds=(1, 2, 3)))
        await engine.wait_until(lambda: engine.running == 3)
        assert sampler.running == 1
        tasks.cancel_scope.cancel()
    await engine.wait_until(lambda: engine.running == 0)
    assert engine.aborted == [1]
    assert sampler.running == 0


async def test_a_request_cancelled_before_its_turn_never_starts(sampler: EngineSampler, engine: FakeEngine) -> None:
    """The engine does not receive it."""
    free = threading.Event()
    occupied = engine.submit_call(free.wait)
    with anyio.move_on_after(0):
        await sampler.complete(request())
    free.set()
    await anyio.to_thread.run_sync(occupied.result)
    await anyio.to_thread.run_sync(engine.submit_call(lambda: None).result)
    assert engine.requests == []


async def test_closing_a_stream_frees_its_rows(sampler: EngineSampler, engine: FakeEngine) -> None:
    """Leaving the iteration aborts the remaining completions."""
    engine.allow(5)
    async with aclosing(sampler.stream(request(max_tokens=1000))) as events:
        async for event in events:
            assert isinstance(event, TokenSampled)
            break
    await engine.wait_until(lambda: engine.running == 0)
    assert engine.aborted == [1]


async def test_a_finished_request_is_not_aborted(sampler: EngineSampler, engine: FakeEngine) -> None:
    """Only running requests are aborted."""
    events = [event async for event in sampler.stream(request())]
    assert isinstance(events[-1], CompletionDone)
    await anyio.to_thread.run_sync(engine.submit_call(lambda: None).result)
    assert engine.aborted == []


async def test_a_refusal_is_raised_at_the_client(sampler: EngineSampler, engine: FakeEngine) -> None:
    """RequestError with the name of the field."""
    engine.refusal = RequestError("too long", param="prompt")
    with pytest.raises(RequestError, match="too long") as caught:
        await sampler.complete(request())
    assert caught.value.param == "prompt"


async def test_a_failed_engine_raises_at_every_client(sampler: EngineSampler, engine: FakeEngine) -> None:
    """SampleFailed becomes GenerationError in `complete` and in a stream."""
    engine.allow(2)
    failures = []

    async def ask_whole() -> None:
        try:
            await sampler.complete(request(max_tokens=100))
        except GenerationError as error:
            failures.append(str(error))

    async def ask_stream() -> None:
        try:
            async for _ in sampler.stream(request(max_tokens=100)):
                pass
        except GenerationError as error:
            failures.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_whole)
        tasks.start_soon(ask_stream)
        await engine.wait_until(lambda: engine.running == 2)
        engine.submit_call(lambda: engine.fail("the tick raised"))
    assert failures == ["the tick raised"] * 2
    assert sampler.running == 0


async def test_a_stopped_compute_thread_raises_at_every_client(sampler: EngineSampler, engine: FakeEngine) -> None:
    """A request that never gets a turn raises ExecutorStoppedError."""
    started, free = threading.Event(), threading.Event()

    def occupy() -> None:
        started.set()
        free.wait()

    occupied = engine.submit_call(occupy)
    await anyio.to_thread.run_sync(started.wait)
    caught = []

    async def ask() -> None:
        try:
            await sampler.complete(request())
        except ExecutorStoppedError as error:
            caught.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        engine._pool.shutdown(wait=False, cancel_futures=True)
        free.set()
    occupied.result()
    assert len(caught) == 1
    assert sampler.running == 0


async def test_a_busy_client_receives_the_events_of_several_ticks_at_once(
    sampler: EngineSampler, engine: FakeEngine
) -> None:
    """In order. Not every event needs a wake-up."""
    engine.allow(1)
    async with aclosing(sampler.stream_all([request(seeds=(1, 2), max_tokens=5)])) as batches:
        first = await anext(batches)
        engine.allow(10)
        await engine.wait_until(lambda: engine.running == 0)
        rest = await anext(batches)
        assert [batch async for batch in batches] == []
    events = [event for _, event in (*first, *rest)]
    whole = await sampler.complete(request(seeds=(1, 2), max_tokens=5))
    for index, completion in enumerate(whole):
        tokens = [event.token for event in events if isinstance(event, TokenSampled) and event.index == index]
        assert tuple(tokens) == completion.tokens
    assert sum(isinstance(event, CompletionDone) for event in events) == 2


async def test_the_event_loop_is_woken_once_per_tick(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of requests, and although the event loop runs between the events of the tick."""
    sampler, loop = EngineSampler(engine.submit_call, engine), asyncio.get_running_loop()
    deliver, advance, deliveries = sampler._deliver, engine._advance, list[int]()

    def counted() -> None:
        deliveries.append(len(sampler._arrived))
        deliver()

    def advance_and_let_the_loop_run(row: Any, listener: Any) -> bool:
        ended, turned = advance(row, listener), threading.Event()
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(10)
        return ended

    monkeypatch.setattr(sampler, "_deliver", counted)
    monkeypatch.setattr(engine, "_advance", advance_and_let_the_loop_run)
    engine.allow(0)
    async with anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(sampler.complete_all, [request(max_tokens=1, seeds=(1, 2))])
        await engine.wait_until(lambda: engine.running == 60)
        engine.allow(1)
    assert deliveries == [60]


async def test_the_memory_of_a_stream_that_is_not_read_is_bounded(
    sampler: EngineSampler, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens beyond the bound are dropped. Their text is in the tail of the completion, which has all tokens."""
    monkeypatch.setattr(sampling_client, "MAX_UNREAD_TOKENS", 7)
    sent = request(seeds=(1, 2), max_tokens=50)
    whole = await sampler.complete(sent)
    engine.allow(1)
    async with aclosing(sampler.stream_all([sent])) as batches:
        events = [event for _, event in await anext(batches)]
        engine.allow(100)
        await engine.wait_until(lambda: engine.running == 0)
        waiting = [event for _, event in await anext(batches)]
        assert len(waiting) == 7 + 2
        events += waiting
        assert [batch async for batch in batches] == []
    texts, done = {0: "", 1: ""}, {}
    for event in events:
        if isinstance(event, TokenSampled):
            texts[event.index] += event.text
        else:
            texts[event.index] += event.tail
            done[event.index] = event.completion
    assert [done[index].tokens for index in (0, 1)] == [completion.tokens for completion in whole]
    assert [texts[index] for index in (0, 1)] == [completion.text for completion in whole]


async def test_the_memory_of_many_unread_streams_is_bounded(
    sampler: EngineSampler, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream holds at most the permitted number of tokens, one end per completion, and the text of the rest."""
    monkeypatch.setattr(sampling_client, "MAX_UNREAD_TOKENS", 7)
    inboxes: list[Any] = []

    class KnownInbox(sampling_client._Inbox):
        def __init__(self) -> None:
            super().__init__()
            inboxes.append(self)

    monkeypatch.setattr(sampling_client, "_Inbox", KnownInbox)
    sent = request(seeds=(1, 2), max_tokens=60)
    engine.allow(60)
    whole = await sampler.complete(sent)
    inboxes.clear()
    async with AsyncExitStack() as stack:
        for _ in range(20):
            batches = await stack.enter_async_context(aclosing(sampler.stream_all([sent])))
            engine.allow(1)
            await anext(batches)
            engine.allow(59)
            await engine.wait_until(lambda: engine.running == 0)
        await engine.wait_until(lambda: all(not inbox._dropped for inbox in inboxes))
        assert len(inboxes) == 20
        held = [item[1] for inbox in inboxes for item in inbox._items]
        assert sum(isinstance(event, TokenSampled) for event in held) == 20 * 7
        ends = [event for event in held if isinstance(event, CompletionDone)]
        assert len(held) == 20 * 7 + len(ends)
        assert len(ends) == 20 * 2
        texts = [len(completion.text) for completion in whole]
        assert sum(len(end.tail) for end in ends) <= 20 * sum(texts)


async def test_alternatives_count_towards_the_tokens_that_wait() -> None:
    """A token with 20 alternatives takes the memory of 21 tokens."""
    alternatives = tuple((token, -1.0) for token in range(20))
    inbox = sampling_client._Inbox()
    for token in range(1000):
        event = TokenSampled(index=0, token=token, logprob=-1.0, version=0, text="a", top_logprobs=alternatives)
        inbox.put((0, event))
    assert len(await inbox.take()) == -(-sampling_client.MAX_UNREAD_TOKENS // 21)


async def test_another_event_loop_is_refused_while_requests_run(sampler: EngineSampler, engine: FakeEngine) -> None:
    """A delivery to the wrong event loop would wake nobody."""

    def ask_elsewhere() -> list[Completion]:
        return anyio.run(sampler.complete, request(max_tokens=2))

    engine.allow(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.complete, request())
        await engine.wait_until(lambda: engine.running == 1)
        with pytest.raises(RuntimeError, match="event loop"), anyio.fail_after(10):
            await anyio.to_thread.run_sync(ask_elsewhere, abandon_on_cancel=True)
        engine.allow(100)
