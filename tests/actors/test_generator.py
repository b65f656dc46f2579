"""The generator samples one group per prompt, a batch at a time, within the staleness bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import anyio
import pytest

from actors.generator import Generator
from protocols.errors import ExecutorStoppedError, RequestError
from protocols.prompt import Prompt
from protocols.queues import EndOfStream, Inbox, Outbox, QueueClosed
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import SampleEvent, SampleRequest, Sampling, completion_seeds
from protocols.step import WeightsReady
from tests.actors.actor_helpers import RecordingSampler, filled_queue, prompt, receive_all, run_and_receive
from tests.fakes import FakeEngine, fake_token
from training_run.groups.progress import StalenessRule
from training_run.groups.rollout_source import SingleTurn
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue

Outcome = RolloutGroup | Discarded
SAMPLING = Sampling(max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """A fake engine whose thread ends with the test."""
    fake = FakeEngine()
    yield fake
    fake.close()


class GeneratorHarness:
    """A generator of these messages, with a weights cell that serves from step 0."""

    def __init__(
        self,
        engine: FakeEngine,
        messages: Sequence[Prompt | Discarded],
        *,
        batch_size: int = 4,
        ahead: int = 2,
        capacity: int = 100,
        ended: bool = True,
        step: int = 0,
        groups: int | None = None,
        before: int = 0,
        replacements: int = 0,
        one_by_one: bool = False,
    ) -> None:
        self.engine, self.weights, self.replacements = (
            engine,
            Latest[WeightsReady]("weights"),
            Latest[int]("replacements"),
        )
        self.serve(step)
        self.replacements.put(replacements)
        self.prompts = filled_queue("prompts", messages, ended=ended)
        self.sampler = RecordingSampler(engine.submit_call, engine)
        self.rollouts = Queue[Outcome]("rollouts", capacity=capacity)
        self.outcomes: Inbox[Outcome] = self.rollouts.inbox()
        outbox: Outbox[Outcome] = self.rollouts.outbox()
        self.generator = Generator(
            inbox=self.prompts.inbox(),
            outbox=outbox,
            rule=StalenessRule(
                weights=self.weights, replacements=self.replacements, batch_size=batch_size, max_batches_ahead=ahead
            ),
            source=SingleTurn(self.sampler, sampling=SAMPLING, group_size=3),
            ended=before,
            groups=groups,
            one_by_one=one_by_one,
        )

    def serve(self, step: int) -> None:
        """Announce the weights of a step."""
        self.weights.put(WeightsReady(version=step, step=step, fingerprint=""))

    def submitted(self) -> list[int]:
        """Return the submitted group ids in order."""
        return [request.prompt[0] for request in self.engine.requests]


def prompts(*group_ids: int) -> list[Prompt]:
    """Return prompts whose first token is the group id."""
    return [prompt(group_id, (group_id, 7)) for group_id in group_ids]


def groups(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the group ids of the outcomes in ascending order."""
    return sorted(outcome.prompt.group_id for outcome in outcomes)


async def test_every_prompt_yields_one_group_sampled_from_its_own_seeds(engine: FakeEngine) -> None:
    """Each completion is a function of prompt, sampling parameters and seed. A smaller last batch is sampled too."""
    harness = GeneratorHarness(engine, prompts(*range(6)))
    outcomes = await run_and_receive(harness.generator.run, harness.outcomes)
    assert groups(outcomes) == list(range(6))
    for group in outcomes:
        assert isinstance(group, RolloutGroup)
        seeds = completion_seeds(group.prompt.seed, 3)
        submitted = next(request for request in engine.requests if request.prompt == group.prompt.tokens)
        assert (submitted.seeds, submitted.sampling, submitted.record_support) == (seeds, SAMPLING, True)
        for completion, seed in zip(group.completions, seeds, strict=True):
            assert completion.tokens == tuple(fake_token(submitted, seed, position)[0] for position in range(6))


@pytest.mark.parametrize(("ahead", "batches"), [(0, 1), (1, 2), (2, 3)])
async def test_sampling_stays_within_max_batches_ahead(engine: FakeEngine, ahead: int, batches: int) -> None:
    """The prompts of update s are submitted when the weights of step s - max_batches_ahead serve."""
    harness = GeneratorHarness(engine, prompts(*range(20)), ahead=ahead)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        await engine.wait_until(lambda: len(engine.requests) == 4 * batches)
        await anyio.wait_all_tasks_blocked()
        assert harness.submitted() == list(range(4 * batches)), "independent of finished requests"
        harness.serve(1)
        await engine.wait_until(lambda: len(engine.requests) == 4 * (batches + 1))
        harness.serve(100)
        assert groups(await receive_all(harness.outcomes)) == list(range(20))


async def test_one_by_one_a_batch_is_submitted_when_the_batch_before_has_been_sampled(engine: FakeEngine) -> None:
    """The rows of the engine are those of one batch, whatever the timing. The bound on batches ahead still holds."""
    engine.allow(0)
    harness = GeneratorHarness(engine, prompts(*range(20)), ahead=2, one_by_one=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        for prompted in (4, 8, 12):
            await engine.wait_until(lambda expected=prompted: len(engine.requests) == expected)  # type: ignore[misc]
            await anyio.wait_all_tasks_blocked()
            assert harness.submitted() == list(range(prompted))
            engine.allow(SAMPLING.max_tokens)
            for _ in range(4):
                await harness.outcomes.receive()
        await anyio.wait_all_tasks_blocked()
        assert len(engine.requests) == 12
        tasks.cancel_scope.cancel()


async def test_the_prompts_of_an_update_are_submitted_together(engine: FakeEngine) -> None:
    """Submission waits for the whole batch, so that the engine's batches do not depend on timing."""
    harness = GeneratorHarness(engine, prompts(0, 1, 2), ended=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        await anyio.wait_all_tasks_blocked()
        assert engine.requests == []
        tasks.cancel_scope.cancel()


async def test_a_resumed_run_counts_the_groups_that_have_ended(engine: FakeEngine) -> None:
    """9 groups ended in 2 batches of 4 with 1 replacement. The next batch consists of 4 groups with any ids."""
    harness = GeneratorHarness(
        engine, prompts(3, 8, 10, 11, 12, 13, 14, 15, 16), ahead=0, step=2, before=9, replacements=1
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        await engine.wait_until(lambda: len(engine.requests) == 4)
        await anyio.wait_all_tasks_blocked()
        assert harness.submitted() == [3, 8, 10, 11]
        harness.serve(3)
        await engine.wait_until(lambda: len(engine.requests) == 8)
        await anyio.wait_all_tasks_blocked()
        harness.serve(4)
        assert groups(await receive_all(harness.outcomes)) == [3, 8, 10, 11, 12, 13, 14, 15, 16]
    assert harness.sampler.submissions == [[3, 8, 10, 11], [12, 13, 14, 15], [16]]


async def test_replacements_are_sampled_without_new_weights(engine: FakeEngine) -> None:
    """As many groups as were replaced, submitted together if they are needed at the same time."""
    harness = GeneratorHarness(engine, prompts(*range(20)), ahead=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        await engine.wait_until(lambda: len(engine.requests) == 4)
        harness.replacements.put(1)
        await engine.wait_until(lambda: len(engine.requests) == 5)
        await anyio.wait_all_tasks_blocked()
        harness.replacements.put(4)
        await engine.wait_until(lambda: len(engine.requests) == 8)
        await anyio.wait_all_tasks_blocked()
        assert harness.sampler.submissions == [[0, 1, 2, 3], [4], [5, 6, 7]]
        harness.replacements.close()
        harness.serve(100)
        assert groups(await receive_all(harness.outcomes)) == list(range(20))


async def test_a_last_replacement_does_not_wait_for_another_batch(engine: FakeEngine) -> None:
    """The served weights would allow a further batch, but the number of groups of the run is reached."""
    harness = GeneratorHarness(engine, prompts(*range(5)), ahead=2, groups=4, replacements=1, ended=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        await engine.wait_until(lambda: len(engine.requests) == 5)
        assert harness.sampler.submissions == [[0, 1, 2, 3], [4]]
        tasks.cancel_scope.cancel()


async def test_groups_that_the_engine_refuses_or_fails_are_discarded(engine: FakeEngine) -> None:
    """Each has its reason. The other groups and the run continue."""
    engine.refusal = RequestError("too long", param="prompt")
    harness = GeneratorHarness(engine, prompts(*range(8)))
    outcomes = await run_and_receive(harness.generator.run, harness.outcomes)
    assert groups(outcomes) == list(range(8))
    assert {(o.reason, o.detail) for o in outcomes if isinstance(o, Discarded)} == {("generation_error", "too long")}
    engine.refusal = None
    engine.allow(2)
    harness = GeneratorHarness(engine, prompts(0, 1, 2, 3))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        await engine.wait_until(lambda: engine.running == 12)
        engine.submit_call(lambda: engine.fail("the device is gone")).result()
        outcomes = await receive_all(harness.outcomes)
    assert groups(outcomes) == [0, 1, 2, 3]
    assert {o.detail for o in outcomes if isinstance(o, Discarded)} == {"the device is gone"}


async def test_groups_discarded_by_an_earlier_actor_are_forwarded(engine: FakeEngine) -> None:
    """They are not sampled. The rest of their batch is."""
    submitted = prompts(*range(8))
    lost = Discarded(prompt=submitted[2], reason="invalid", detail="not today")
    harness = GeneratorHarness(engine, [*submitted[:2], lost, *submitted[3:]])
    outcomes = await run_and_receive(harness.generator.run, harness.outcomes)
    assert groups(outcomes) == list(range(8))
    assert [o for o in outcomes if isinstance(o, Discarded)] == [lost]
    assert harness.sampler.submissions == [[0, 1, 3], [4, 5, 6, 7]]


async def test_forwarded_groups_stay_within_max_batches_ahead(engine: FakeEngine) -> None:
    """A discarded group of the next batch must not count towards the current batch."""
    lost = [Discarded(prompt=one, reason="invalid", detail="not today") for one in prompts(*range(4, 8))]
    harness = GeneratorHarness(engine, [*prompts(*range(4)), *lost, *prompts(8)], ahead=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        assert groups([await harness.outcomes.receive() for _ in range(4)]) == [0, 1, 2, 3]
        await anyio.wait_all_tasks_blocked()
        assert harness.rollouts.depth == 0
        harness.serve(1)
        assert [await harness.outcomes.receive() for _ in range(4)] == lost
        harness.serve(2)
        assert groups(await receive_all(harness.outcomes)) == [8]
    assert harness.sampler.submissions == [[0, 1, 2, 3], [8]]


async def test_a_cancelled_generator_aborts_its_requests(engine: FakeEngine) -> None:
    """The engine's rows become free for other clients."""
    engine.allow(0)
    harness = GeneratorHarness(engine, prompts(0, 1, 2, 3), ended=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.generator.run)
        await engine.wait_until(lambda: engine.running == 12)
        tasks.cancel_scope.cancel()
    await engine.wait_until(lambda: sorted(engine.aborted) == [1, 2, 3, 4])
    with pytest.raises(EndOfStream):
        await harness.outcomes.receive()


class SelectiveEngine(FakeEngine):
    """An engine that refuses group 0 and never finishes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.allow(0)

    def submit(self, request: SampleRequest, listener: Callable[[SampleEvent], None], /) -> int:
        self.refusal = RequestError("not this one", param="prompt") if request.prompt[0] == 0 else None
        return super().submit(request, listener)


@pytest.mark.parametrize("end", ["cancelled", "deserted"])
async def test_a_generator_that_ends_with_a_full_outbox_aborts_its_requests(end: str) -> None:
    """Both after a cancellation and after its reader has closed."""
    engine = SelectiveEngine()
    harness = GeneratorHarness(engine, prompts(0, 1, 2, 3), ended=False, capacity=1)
    harness.rollouts.outbox().send_nowait(Discarded(prompt=prompt(99), reason="invalid", detail="in the way"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_until_reader_closes, harness.generator)
        await engine.wait_until(lambda: engine.running == 9)
        await anyio.wait_all_tasks_blocked()
        if end == "cancelled":
            tasks.cancel_scope.cancel()
        else:
            harness.outcomes.close()
    assert harness.rollouts.depth == 1
    await engine.wait_until(lambda: sorted(engine.aborted) == [1, 2, 3])
    engine.close()


async def run_until_reader_closes(generator: Generator) -> None:
    """Run the generator and accept QueueClosed."""
    with pytest.raises(ExceptionGroup) as caught:
        await generator.run()
    assert caught.group_contains(QueueClosed)


async def test_a_stopped_compute_thread_is_a_failure_of_the_generator(engine: FakeEngine) -> None:
    """The groups are not discarded, because no further group could be sampled."""
    engine.close()
    harness = GeneratorHarness(engine, prompts(0, 1, 2, 3))
    with pytest.raises(ExceptionGroup) as caught:
        await harness.generator.run()
    assert caught.group_contains(ExecutorStoppedError)
    with pytest.raises(EndOfStream):
        await harness.outcomes.receive()
