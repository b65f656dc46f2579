"""The evaluator: what is measured is exactly the weights that were pinned, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import mlx.core as mx
import pytest
from mlx.utils import tree_map

from actors.evaluator import Evaluator, Pinned
from clotho.config.schema import EngineSection, EvalSection
from clotho.inference.greedy import greedy_completions
from clotho.runtime.compute_thread import ComputeExecutor
from clotho.runtime.queues import Queue
from protocols.accounting import LedgerState
from protocols.evaluation import EvalReport, HeldOut
from protocols.prompt import Problem
from protocols.queues import EndOfStream, QueueClosed
from protocols.sampling import Sampling
from protocols.step import PolicyUpdated, StepReport
from tests.actors.boxes import cancelled_midway, compute_thread, everything, filled, served_policy

SAMPLING = Sampling(max_tokens=4, ignore_eos=True)
GENERATOR = EngineSection(max_num_seqs=4)
PROMPTS = [(5, 9), (33, 2, 17), (60,), (7, 8, 9), (10, 11), (12,)]
KINDS = ["sum", "sum", "sum", "word", "word", "word"]


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """A compute thread."""
    with compute_thread() as running:
        yield running


class Scene:
    """An evaluator of a tiny policy on six problems, of which the first four count as answered correctly."""

    def __init__(self, executor: ComputeExecutor, directory: Path) -> None:
        self.executor = executor
        self.policy, _ = served_policy(executor, directory)
        self.judged: list[tuple[str, str]] = []
        self.judging, self.may_judge = anyio.Event(), anyio.Event()
        self.may_judge.set()
        self.kept: list[EvalReport] = []
        self.ungraded_types: set[str] = set()
        self.reports = Queue[EvalReport]("reports", capacity=20)
        self.told = self.reports.inbox()

    async def is_correct(self, problem: Problem, text: str) -> bool | None:
        """Return True for the first four problems, and None for ungraded types."""
        self.judged.append((problem.prompt, text))
        self.judging.set()
        await self.may_judge.wait()
        return None if problem.type in self.ungraded_types else problem.prompt in "0123"

    def moved(self, shift: float) -> Any:
        """The served parameters, every number moved."""

        def compute() -> Any:
            parameters = tree_map(lambda array: array + shift, self.policy.trainable())
            mx.eval(parameters)
            return parameters

        return self.executor.submit(compute).result()

    def update(self, step: int, shift: float = 0.0) -> PolicyUpdated:
        """The learner's word after a batch."""
        report = StepReport(
            step=step, version=step, fingerprint="", trained=(), discarded=(), staleness=(), update=None,
            train_seconds=0.0, wait_seconds=0.0,
        )  # fmt: skip
        return PolicyUpdated(
            report=report, parameters=self.moved(shift), optimizer={}, random_state=(), ledger=LedgerState(),
            bad_steps=0, train_seconds=0.0, trained_tokens=0,
        )  # fmt: skip

    def box(self, updates: Queue[PolicyUpdated], *, base: bool = True, start: int = 0, **settings: Any) -> Evaluator:
        """An evaluator of a run of ten steps, which begins or goes on at `start`."""
        pinned = Pinned(step=0, version=0, parameters=self.policy.trainable())
        return Evaluator(
            inbox=updates.inbox(),
            outbox=self.reports.outbox(),
            executor=self.executor,
            policy=self.policy,
            held_out=HeldOut(
                problems=[Problem(prompt=str(i), answer="", type=kind) for i, kind in enumerate(KINDS)],
                prompts=PROMPTS,
                is_correct=self.is_correct,
            ),
            sampling=SAMPLING,
            settings=EvalSection(**settings),
            engine=GENERATOR,
            base=pinned if base else None,
            start=Pinned(step=start, version=start, parameters=self.policy.trainable()),
            steps=10,
            reports=self.kept,
        )

    def greedy(self, parameters: Any) -> list[str]:
        """What these parameters answer."""
        steps = greedy_completions(
            self.policy, parameters, version=0, prompts=PROMPTS, sampling=SAMPLING, settings=GENERATOR
        )
        return [completion.text for completion in self.executor.submit_steps(steps).result()]


def steps(reports: Sequence[EvalReport]) -> list[tuple[int, bool]]:
    """What was measured: step, and whether as the last."""
    return [(report.step, report.final) for report in reports]


async def test_before_and_after_are_measured_on_their_own_weights(executor: ComputeExecutor, tmp_path: Path) -> None:
    """Whatever serves meanwhile; the numbers count problems, in all and of each kind."""
    scene = Scene(executor, tmp_path)
    last = scene.update(2, shift=0.5)
    box = scene.box(filled("updates", [scene.update(1, shift=0.25), last]))
    await box.run()
    reports = await everything(scene.told)
    assert steps(reports) == [(0, False), (2, True)]
    assert scene.kept == reports
    for report in reports:
        assert report.problems == 6
        assert report.accuracy == pytest.approx(4 / 6)
        assert report.by_type == {"sum": 1.0, "word": pytest.approx(1 / 3)}
        assert report.completion_tokens == 24
    texts = [text for _, text in scene.judged]
    assert texts == scene.greedy(scene.policy.trainable()) + scene.greedy(last.parameters)
    assert texts[:6] != texts[6:]


async def test_problems_without_a_correct_reward_are_counted_as_ungraded(
    executor: ComputeExecutor, tmp_path: Path
) -> None:
    """They do not count towards the accuracy, and their types have none."""
    scene = Scene(executor, tmp_path)
    scene.ungraded_types = {"word"}
    await scene.box(filled("updates", [])).run()
    for report in await everything(scene.told):
        assert (report.problems, report.ungraded, report.accuracy, report.by_type) == (3, 3, 1.0, {"sum": 1.0})


async def test_in_between_fewer_problems_may_do(executor: ComputeExecutor, tmp_path: Path) -> None:
    """`problems_between` every `interval` steps; `problems` before and after; the first ones of the file."""
    scene = Scene(executor, tmp_path)
    updates = Queue[PolicyUpdated]("updates", capacity=1)
    writer = updates.outbox()
    box = scene.box(updates, interval=2, problems=3, problems_between=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        assert (await scene.told.receive()).problems == 3
        for step in (1, 2):
            await writer.send(scene.update(step))
        assert [(r.step, r.problems, r.accuracy) for r in [await scene.told.receive()]] == [(2, 1, 1.0)]
        writer.close()
    assert [(r.step, r.problems, r.final) for r in await everything(scene.told)] == [(2, 3, True)]


async def test_the_learner_never_waits_for_a_measurement(executor: ComputeExecutor, tmp_path: Path) -> None:
    """While one is running one more may wait; what becomes due beyond that is left out, except the last."""
    scene = Scene(executor, tmp_path)
    scene.may_judge = anyio.Event()
    updates = Queue[PolicyUpdated]("updates", capacity=1)
    writer, box = updates.outbox(), scene.box(updates, interval=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        await scene.judging.wait()
        for step in (1, 2, 3, 4):
            await writer.send(scene.update(step))
        writer.close()
        await anyio.wait_all_tasks_blocked()
        assert updates.depth == 0
        scene.may_judge.set()
    assert steps(await everything(scene.told)) == [(0, False), (1, False), (4, True)]


async def test_a_resumed_run_measures_its_end_only(executor: ComputeExecutor, tmp_path: Path) -> None:
    """The base policy has been measured before; a run that had ended is measured as it stands."""
    scene = Scene(executor, tmp_path)
    await scene.box(filled("updates", []), base=False, start=7).run()
    assert steps(await everything(scene.told)) == [(7, True)]


async def test_nobody_left_to_read_the_numbers_is_no_reason_to_stop(executor: ComputeExecutor, tmp_path: Path) -> None:
    """They are still kept, for the table at the end."""
    scene = Scene(executor, tmp_path)
    scene.told.close()
    box = scene.box(filled("updates", [scene.update(1)]))
    await box.run()
    assert steps(scene.kept) == [(0, False), (1, True)]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_however_it_ends_it_closes_its_ends(executor: ComputeExecutor, tmp_path: Path, end: str) -> None:
    """A held-out prompt that does not fit is a failure; being stopped gives the measurement up."""
    scene = Scene(executor, tmp_path)
    updates = filled("updates", [scene.update(1)], ended=False)
    box = scene.box(updates)
    if end == "failed":
        box._held_out = HeldOut(
            problems=box._held_out.problems, prompts=[(5,) * 128] * 6, is_correct=box._held_out.is_correct
        )
        with pytest.raises(ExceptionGroup, match="unhandled"):
            await box.run()
    else:
        scene.may_judge = anyio.Event()
        await cancelled_midway(box.run)
    with pytest.raises(EndOfStream):
        await scene.told.receive()
    with pytest.raises(QueueClosed):
        updates.inbox()
