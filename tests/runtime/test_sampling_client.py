"""The sampler: what is asked on the loop comes back on the loop, and nothing asked is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import aclosing

import anyio
import pytest
from msgspec import structs

from clotho.config.schema import EngineSection
from clotho.inference import DecodeEngine
from clotho.runtime.compute_thread import ComputeExecutor
from clotho.runtime.sampling_client import GenerationError, Sampler
from protocols.errors import ExecutorStoppedError, RequestError
from protocols.sampling import CompletionDone, SampleRequest, Sampling, TokenSampled
from tests.fakes import FakeEngine
from tests.small_models import tiny_source


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """A fake engine whose thread ends with the test."""
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def sampler(engine: FakeEngine) -> Sampler:
    """A sampler in front of it."""
    return Sampler(engine.submit_call, engine)


def request(
    *, seeds: tuple[int, ...] = (1,), max_tokens: int = 12, prompt: tuple[int, ...] = (1, 2), stop: tuple[str, ...] = ()
) -> SampleRequest:
    """A request that only its length ends, or a stop string."""
    ascii_only = tuple((token, -100.0) for token in range(128, 257))
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, stop=stop, logit_bias=ascii_only)
    return SampleRequest(prompt=prompt, sampling=sampling, seeds=seeds)


@pytest.fixture(params=["fake", "real"])
def either(request: pytest.FixtureRequest) -> Iterator[Sampler]:
    """A sampler in front of the fake engine, and of the real one with a tiny model: one contract for both."""
    if request.param == "fake":
        fake = FakeEngine()
        yield Sampler(fake.submit_call, fake)
        fake.close()
        return
    executor = ComputeExecutor(decode_share=0.5)
    executor.start()
    real = executor.submit(lambda: DecodeEngine(tiny_source("qwen3"), EngineSection())).result()
    executor.attach(real)
    yield Sampler(executor.submit, real)
    executor.stop()


async def test_completions_come_in_the_order_of_their_seeds(either: Sampler) -> None:
    """Completion i belongs to seed i, whatever else runs."""
    together = await either.complete(request(seeds=(5, 6, 7)))
    alone = [(await either.complete(request(seeds=(seed,))))[0] for seed in (5, 6, 7)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({completion.tokens for completion in together}) == 3


async def test_a_stream_adds_up_to_its_completions(either: Sampler) -> None:
    """Tokens, log-probabilities and text of the stream equal those of the finished completion, stop string or not."""
    whole = await either.complete(request(seeds=(1, 2)))
    stop = whole[0].text[4:6]
    for stops in ((), (stop,)):
        asked = request(seeds=(1, 2), stop=stops)
        texts, sampled, done = {0: "", 1: ""}, {0: [], 1: []}, {}  # type: ignore[var-annotated]
        async for event in either.stream(asked):
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


async def test_every_setting_of_a_request_reaches_the_engine(sampler: Sampler, engine: FakeEngine) -> None:
    """All but `stream`, which is the sampler's to decide."""
    asked = structs.replace(request(), record_support=True, reuse_prefix=True)
    await sampler.complete(asked)
    async with aclosing(sampler.stream(asked)) as events:
        async for _ in events:
            pass
    assert engine.asked == [asked, structs.replace(asked, stream=True)]


async def test_cancelled_and_refused_requests_leave_an_engine_that_works(either: Sampler) -> None:
    """Either engine: cancel one, have one refused, and ask again."""
    with anyio.move_on_after(0.01):
        await either.complete(request(max_tokens=400, seeds=(1, 2, 3)))
    assert either.running == 0
    assert len(await either.complete(request())) == 1


async def test_requests_of_one_call_reach_the_engine_in_one_turn(sampler: Sampler, engine: FakeEngine) -> None:
    """The engine's batches must not depend on how the loop and the compute thread interleave."""
    requests = [request(prompt=(number,)) for number in range(20)]
    results = await sampler.complete_all(requests)
    assert [asked.prompt for asked in engine.asked] == [asked.prompt for asked in requests]
    assert [len(group) for group in results] == [1] * 20


async def test_groups_come_as_they_finish_and_failures_stay_apart(sampler: Sampler, engine: FakeEngine) -> None:
    """A refused request yields its error once; the others complete."""
    accept = engine.submit

    def refuse_nines(asked, listener):  # type: ignore[no-untyped-def]
        if asked.prompt == (9,):
            raise RequestError("no nines", param="prompt")
        return accept(asked, listener)

    engine.submit = refuse_nines  # type: ignore[method-assign]
    requests = [request(prompt=(1,), max_tokens=30), request(prompt=(9,)), request(prompt=(2,), max_tokens=3)]
    outcomes = [outcome async for outcome in sampler.groups(requests)]
    assert [position for position, _ in outcomes] == [1, 2, 0]
    assert isinstance(outcomes[0][1], RequestError)
    assert sampler.running == 0


async def test_cancelling_the_asker_frees_the_rows(sampler: Sampler, engine: FakeEngine) -> None:
    """A cancelled `complete` leaves no row behind."""
    engine.allow(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.complete, request(seeds=(1, 2, 3)))
        await engine.until(lambda: engine.running == 3)
        assert sampler.running == 1
        tasks.cancel_scope.cancel()
    await engine.until(lambda: engine.running == 0)
    assert engine.aborted == [1]
    assert sampler.running == 0


async def test_a_request_withdrawn_before_its_turn_never_starts(sampler: Sampler, engine: FakeEngine) -> None:
    """The engine is not asked on behalf of somebody who has left."""
    free = threading.Event()
    occupied = engine.submit_call(free.wait)
    with anyio.move_on_after(0):
        await sampler.complete(request())
    free.set()
    await anyio.to_thread.run_sync(occupied.result)
    await anyio.to_thread.run_sync(engine.submit_call(lambda: None).result)
    assert engine.asked == []


async def test_closing_a_stream_frees_the_row(sampler: Sampler, engine: FakeEngine) -> None:
    """Leaving the loop over a stream aborts what is left of it."""
    engine.allow(5)
    async with aclosing(sampler.stream(request(max_tokens=1000))) as events:
        async for event in events:
            assert isinstance(event, TokenSampled)
            break
    await engine.until(lambda: engine.running == 0)
    assert engine.aborted == [1]


async def test_a_finished_request_is_not_aborted(sampler: Sampler, engine: FakeEngine) -> None:
    """Abort is for what still runs."""
    events = [event async for event in sampler.stream(request())]
    assert isinstance(events[-1], CompletionDone)
    await anyio.to_thread.run_sync(engine.submit_call(lambda: None).result)
    assert engine.aborted == []


async def test_a_refusal_reaches_the_asker(sampler: Sampler, engine: FakeEngine) -> None:
    """What the engine refuses is RequestError, with its field."""
    engine.refusal = RequestError("too long", param="prompt")
    with pytest.raises(RequestError, match="too long") as caught:
        await sampler.complete(request())
    assert caught.value.param == "prompt"


async def test_a_failed_engine_reaches_every_asker(sampler: Sampler, engine: FakeEngine) -> None:
    """SampleFailed is GenerationError in `complete` and in the middle of a stream."""
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
        await engine.until(lambda: engine.running == 2)
        engine.submit_call(lambda: engine.fail("the tick raised"))
    assert failures == ["the tick raised"] * 2
    assert sampler.running == 0


async def test_a_compute_thread_that_ends_leaves_nobody_waiting(sampler: Sampler, engine: FakeEngine) -> None:
    """A request whose turn never comes ends in ExecutorStoppedError."""
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


async def test_an_asker_that_was_busy_gets_the_events_of_several_ticks_at_once(
    sampler: Sampler, engine: FakeEngine
) -> None:
    """In the order in which they came; it need not be woken for each of them."""
    engine.allow(1)
    async with aclosing(sampler.stream_all([request(seeds=(1, 2), max_tokens=5)])) as batches:
        first = await anext(batches)
        engine.allow(10)
        await engine.until(lambda: engine.running == 0)
        rest = await anext(batches)
        assert [batch async for batch in batches] == []
    told = [event for _, event in (*first, *rest)]
    whole = await sampler.complete(request(seeds=(1, 2), max_tokens=5))
    for index, completion in enumerate(whole):
        tokens = [event.token for event in told if isinstance(event, TokenSampled) and event.index == index]
        assert tuple(tokens) == completion.tokens
    assert sum(isinstance(event, CompletionDone) for event in told) == 2


async def test_one_hop_serves_a_whole_tick(engine: FakeEngine) -> None:
    """However many requests are decoded, the loop is woken at most once while it has not drained."""
    sampler = Sampler(engine.submit_call, engine)
    engine.allow(0)
    hops = 0
    deliver = sampler._deliver

    def counting() -> None:
        nonlocal hops
        hops += 1
        deliver()

    sampler._deliver = counting  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(sampler.complete_all, [request(max_tokens=1, seeds=(1, 2))])
        await engine.until(lambda: engine.running == 60)
        engine.allow(1)
        await engine.until(lambda: engine.running == 0)
    assert hops <= 31
