"""The generator samples one group per prompt, a batch at a time, within the staleness bound."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest

from actors.generator import Generator
from clotho.runtime.latest import Latest
from clotho.runtime.queues import Queue
from clotho.runtime.sampling_client import Engine, Sampler, Submit
from protocols.errors import ExecutorStoppedError, RequestError
from protocols.prompt import Prompt, completion_seeds
from protocols.queues import EndOfStream, Inbox, Outbox, QueueClosed
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import SampleEvent, SampleRequest, Sampling
from protocols.step import WeightsReady
from tests.actors.boxes import everything, filled, prompt, run_and_receive
from tests.fakes import FakeEngine, draw

Outcome = RolloutGroup | Discarded
SAMPLING = Sampling(max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """A fake engine whose thread ends with the test."""
    fake = FakeEngine()
    yield fake
    fake.close()


class RecordingSampler(Sampler):
    """Remembers which groups were submitted together."""

    def __init__(self, submit: Submit, engine: Engine) -> None:
        super().__init__(submit, engine)
        self.together: list[list[int]] = []

    def groups(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, Any], None]:
        self.together.append([request.prompt[0] for request in requests])
        return super().groups(requests)


class Scene:
    """A generator over these messages, on a cell of weights that serve from step 0."""

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
    ) -> None:
        self.engine, self.weights, self.replacements = (
            engine,
            Latest[WeightsReady]("weights"),
            Latest[int]("replacements"),
        )
        self.serve(step)
        self.replacements.put(replacements)
        self.prompts = filled("prompts", messages, ended=ended)
        self.sampler = RecordingSampler(engine.submit_call, engine)
        self.rollouts = Queue[Outcome]("rollouts", capacity=capacity)
        self.outcomes: Inbox[Outcome] = self.rollouts.inbox()
        outbox: Outbox[Outcome] = self.rollouts.outbox()
        self.box = Generator(
            inbox=self.prompts.inbox(),
            outbox=outbox,
            weights=self.weights,
            replacements=self.replacements,
            sampler=self.sampler,
            sampling=SAMPLING,
            group_size=3,
            batch_size=batch_size,
            max_batches_ahead=ahead,
            ended=before,
            groups=groups,
        )

    def serve(self, step: int) -> None:
        """Put the weights of a step in service."""
        self.weights.put(WeightsReady(version=step, step=step, fingerprint=""))

    def asked(self) -> list[int]:
        """The groups that the engine was asked, in order."""
        return [request.prompt[0] for request in self.engine.asked]


def prompts(*group_ids: int) -> list[Prompt]:
    """Prompts whose first token is their group."""
    return [prompt(group_id, (group_id, 7)) for group_id in group_ids]


def groups(outcomes: Sequence[Outcome]) -> list[int]:
    """The groups of outcomes, ascending."""
    return sorted(outcome.prompt.group_id for outcome in outcomes)


async def test_every_prompt_becomes_one_group_drawn_from_its_own_seeds(engine: FakeEngine) -> None:
    """Each completion is a function of (prompt, sampling, seed); a last, smaller batch is answered too."""
    scene = Scene(engine, prompts(*range(6)))
    outcomes = await run_and_receive(scene.box.run, scene.outcomes)
    assert groups(outcomes) == list(range(6))
    for group in outcomes:
        assert isinstance(group, RolloutGroup)
        seeds = completion_seeds(group.prompt.seed, 3)
        asked = next(request for request in engine.asked if request.prompt == group.prompt.tokens)
        assert (asked.seeds, asked.sampling, asked.record_support) == (seeds, SAMPLING, True)
        for completion, seed in zip(group.completions, seeds, strict=True):
            assert completion.tokens == tuple(draw(asked, seed, position)[0] for position in range(6))


@pytest.mark.parametrize(("ahead", "batches"), [(0, 1), (1, 2), (2, 3)])
async def test_the_law_of_lag(engine: FakeEngine, ahead: int, batches: int) -> None:
    """The prompts of update s are begun once the weights of step s - max_batches_ahead serve, and no sooner."""
    scene = Scene(engine, prompts(*range(20)), ahead=ahead)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await engine.until(lambda: len(engine.asked) == 4 * batches)
        await anyio.wait_all_tasks_blocked()
        assert scene.asked() == list(range(4 * batches)), "whatever has been answered meanwhile"
        scene.serve(1)
        await engine.until(lambda: len(engine.asked) == 4 * (batches + 1))
        scene.serve(100)
        assert groups(await everything(scene.outcomes)) == list(range(20))


async def test_the_prompts_of_an_update_are_begun_together(engine: FakeEngine) -> None:
    """Not before the batch is whole: what the engine computes side by side must not depend on timing."""
    scene = Scene(engine, prompts(0, 1, 2), ended=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await anyio.wait_all_tasks_blocked()
        assert engine.asked == []
        tasks.cancel_scope.cancel()


async def test_a_resumed_run_counts_from_the_groups_that_had_ended(engine: FakeEngine) -> None:
    """9 ended in 2 batches of 4 with 1 refill: whole batches may start again, whatever their numbers."""
    scene = Scene(engine, prompts(3, 8, 10, 11, 12, 13, 14, 15, 16), ahead=0, step=2, before=9, replacements=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await engine.until(lambda: len(engine.asked) == 4)
        await anyio.wait_all_tasks_blocked()
        assert scene.asked() == [3, 8, 10, 11]
        scene.serve(3)
        await engine.until(lambda: len(engine.asked) == 8)
        await anyio.wait_all_tasks_blocked()
        scene.serve(4)
        assert groups(await everything(scene.outcomes)) == [3, 8, 10, 11, 12, 13, 14, 15, 16]
    assert scene.sampler.together == [[3, 8, 10, 11], [12, 13, 14, 15], [16]]


async def test_refills_start_without_new_weights(engine: FakeEngine) -> None:
    """So many as are replaced, together if they are needed at the same time, and no more."""
    scene = Scene(engine, prompts(*range(20)), ahead=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await engine.until(lambda: len(engine.asked) == 4)
        scene.replacements.put(1)
        await engine.until(lambda: len(engine.asked) == 5)
        await anyio.wait_all_tasks_blocked()
        scene.replacements.put(4)
        await engine.until(lambda: len(engine.asked) == 8)
        await anyio.wait_all_tasks_blocked()
        assert scene.sampler.together == [[0, 1, 2, 3], [4], [5, 6, 7]]
        scene.replacements.close()
        scene.serve(100)
        assert groups(await everything(scene.outcomes)) == list(range(20))


async def test_a_last_refill_does_not_wait_for_a_batch_that_never_comes(engine: FakeEngine) -> None:
    """The weights would allow more than is ever asked: the bound on the groups says so."""
    scene = Scene(engine, prompts(*range(5)), ahead=2, groups=4, replacements=1, ended=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await engine.until(lambda: len(engine.asked) == 5)
        assert scene.sampler.together == [[0, 1, 2, 3], [4]]
        tasks.cancel_scope.cancel()


async def test_what_the_engine_refuses_or_gives_up_is_discarded_with_the_reason(engine: FakeEngine) -> None:
    """The other groups go on, and so does the run."""
    engine.refusal = RequestError("too long", param="prompt")
    scene = Scene(engine, prompts(*range(8)))
    outcomes = await run_and_receive(scene.box.run, scene.outcomes)
    assert groups(outcomes) == list(range(8))
    assert {(o.reason, o.detail) for o in outcomes if isinstance(o, Discarded)} == {("generation_error", "too long")}
    engine.refusal = None
    engine.allow(2)
    scene = Scene(engine, prompts(0, 1, 2, 3))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await engine.until(lambda: engine.running == 12)
        engine.submit_call(lambda: engine.fail("the device is gone")).result()
        outcomes = await everything(scene.outcomes)
    assert groups(outcomes) == [0, 1, 2, 3]
    assert {o.detail for o in outcomes if isinstance(o, Discarded)} == {"the device is gone"}


async def test_what_a_stage_before_it_has_discarded_is_passed_on(engine: FakeEngine) -> None:
    """It is never asked, and the rest of its batch is."""
    asked = prompts(*range(8))
    lost = Discarded(prompt=asked[2], reason="invalid", detail="not today")
    scene = Scene(engine, [*asked[:2], lost, *asked[3:]])
    outcomes = await run_and_receive(scene.box.run, scene.outcomes)
    assert groups(outcomes) == list(range(8))
    assert [o for o in outcomes if isinstance(o, Discarded)] == [lost]
    assert scene.sampler.together == [[0, 1, 3], [4, 5, 6, 7]]


async def test_what_is_passed_on_obeys_the_law_of_lag_as_well(engine: FakeEngine) -> None:
    """A discarded group of the next batch would count towards this one, or not, by chance."""
    lost = [Discarded(prompt=one, reason="invalid", detail="not today") for one in prompts(*range(4, 8))]
    scene = Scene(engine, [*prompts(*range(4)), *lost, *prompts(8)], ahead=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        assert groups([await scene.outcomes.receive() for _ in range(4)]) == [0, 1, 2, 3]
        await anyio.wait_all_tasks_blocked()
        assert scene.rollouts.depth == 0
        scene.serve(1)
        assert [await scene.outcomes.receive() for _ in range(4)] == lost
        scene.serve(2)
        assert groups(await everything(scene.outcomes)) == [8]
    assert scene.sampler.together == [[0, 1, 2, 3], [8]]


async def test_cancelled_it_frees_the_rows_it_asked_for(engine: FakeEngine) -> None:
    """A run that is stopped leaves the engine to others."""
    engine.allow(0)
    scene = Scene(engine, prompts(0, 1, 2, 3), ended=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.box.run)
        await engine.until(lambda: engine.running == 12)
        tasks.cancel_scope.cancel()
    await engine.until(lambda: sorted(engine.aborted) == [1, 2, 3, 4])
    with pytest.raises(EndOfStream):
        await scene.outcomes.receive()


class Choosy(FakeEngine):
    """Refuses group 0, and decodes nothing of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.allow(0)

    def submit(self, request: SampleRequest, listener: Callable[[SampleEvent], None], /) -> int:
        self.refusal = RequestError("not this one", param="prompt") if request.prompt[0] == 0 else None
        return super().submit(request, listener)


@pytest.mark.parametrize("end", ["cancelled", "deserted"])
async def test_ended_while_it_waits_for_room_it_frees_them_too(end: str) -> None:
    """Whether it is stopped, or its reader has gone: nobody goes on sampling for nobody."""
    engine = Choosy()
    scene = Scene(engine, prompts(0, 1, 2, 3), ended=False, capacity=1)
    scene.rollouts.outbox().send_nowait(Discarded(prompt=prompt(99), reason="invalid", detail="in the way"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_until_deserted, scene.box)
        await engine.until(lambda: engine.running == 9)
        await anyio.wait_all_tasks_blocked()
        if end == "cancelled":
            tasks.cancel_scope.cancel()
        else:
            scene.outcomes.close()
    assert scene.rollouts.depth == 1
    await engine.until(lambda: sorted(engine.aborted) == [1, 2, 3])
    engine.close()


async def run_until_deserted(box: Generator) -> None:
    """Run it, and expect that it ends so, if it ends by itself."""
    with pytest.raises(ExceptionGroup) as caught:
        await box.run()
    assert caught.group_contains(QueueClosed)


async def test_a_compute_thread_that_has_ended_is_a_failure(engine: FakeEngine) -> None:
    """The groups are not discarded: nobody can answer any more."""
    engine.close()
    scene = Scene(engine, prompts(0, 1, 2, 3))
    with pytest.raises(ExceptionGroup) as caught:
        await scene.box.run()
    assert caught.group_contains(ExecutorStoppedError)
    with pytest.raises(EndOfStream):
        await scene.outcomes.receive()
