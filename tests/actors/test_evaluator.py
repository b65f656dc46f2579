"""The evaluator measures pinned weights and never delays training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import mlx.core as mx
import pytest
from mlx.utils import tree_map
from msgspec.structs import replace

from actors.evaluator import Evaluator, Pinned
from clotho.lanes.compute_thread import Compute
from clotho.settings.engine import EngineSection
from protocols.evaluation import EvalReport, Grade, HeldOut
from protocols.prompt import Problem
from protocols.queues import EndOfStream, QueueClosed
from protocols.sampling import Completion, Sampling
from protocols.step import PolicyUpdated
from tests.actors.actor_helpers import cancel_when_blocked, filled_queue, policy_updated, receive_all, served_policy
from training_run.evaluation.held_out import PinnedSampler, held_out_requests
from training_run.profile.schema import HeldOutEvaluation
from training_run.supervision.queues import Queue

SAMPLING = Sampling(max_tokens=4, ignore_eos=True)
GENERATOR = EngineSection(max_num_seqs=4)
PROMPTS = [(5, 9), (33, 2, 17), (60,), (7, 8, 9), (10, 11), (12,)]
KINDS = ["sum", "sum", "sum", "word", "word", "word"]
REFERENCES = [(4, 8), (), (9, 9, 1), (), (), ()]


class EvaluatorHarness:
    """An evaluator of a tiny policy on six problems. The first four count as correct."""

    def __init__(self, compute: Compute, directory: Path) -> None:
        self.compute = compute
        self.policy, _ = served_policy(compute, directory)
        self.graded: list[tuple[str, str]] = []
        self.grading, self.grading_allowed = anyio.Event(), anyio.Event()
        self.grading_allowed.set()
        self.recorded_reports: list[EvalReport] = []
        self.ungraded_types: set[str] = set()
        self.reports = Queue[EvalReport]("reports", capacity=20)
        self.report_inbox = self.reports.inbox()

    async def grade(self, problem: Problem, completions: Sequence[Completion]) -> list[Grade]:
        """Grade the first four problems as correct, and ungraded types as None; the reward is the problem's number."""
        self.graded += ((problem.prompt, completion.text) for completion in completions)
        self.grading.set()
        await self.grading_allowed.wait()
        correct = None if problem.type in self.ungraded_types else problem.prompt in "0123"
        return [Grade(correct=correct, reward=float(problem.prompt), parts={"number": 1.0}) for _ in completions]

    def moved(self, shift: float) -> Any:
        """Return the served parameters with every value shifted."""

        def compute() -> Any:
            parameters = tree_map(lambda array: array + shift, self.policy.trainable())
            mx.eval(parameters)
            return parameters

        return self.compute.learner.submit(compute).result()

    def update(self, step: int, shift: float = 0.0) -> PolicyUpdated:
        """Return the update of a batch."""
        return policy_updated(self.moved(shift), step=step, version=step)

    def evaluator(
        self, updates: Queue[PolicyUpdated], *, base: bool = True, start: int = 0, **settings: Any
    ) -> Evaluator:
        """Return an evaluator of a run of ten steps that starts or resumes at `start`."""
        pinned = Pinned(step=0, version=0, parameters=self.policy.trainable())
        return Evaluator(
            inbox=updates.inbox(),
            outbox=self.reports.outbox(),
            thread=self.compute.evaluation,
            policy=self.policy,
            held_out=HeldOut(
                problems=[Problem(prompt=str(i), answer="", type=kind) for i, kind in enumerate(KINDS)],
                prompts=PROMPTS,
                references=REFERENCES,
                grade=self.grade,
            ),
            episodes=None,
            sampling=SAMPLING,
            seed=5,
            settings=HeldOutEvaluation(**settings),
            engine=GENERATOR,
            turn_seconds=0.0,
            base=pinned if base else None,
            start=Pinned(step=start, version=start, parameters=self.policy.trainable()),
            steps=10,
            reports=self.recorded_reports,
        )

    def greedy(self, parameters: Any) -> list[str]:
        """Return the greedy completions of these parameters."""
        requests = held_out_requests(PROMPTS, SAMPLING, samples=0, seed=0)

        def complete() -> list[list[Completion]]:
            return PinnedSampler(self.policy, GENERATOR).completions(parameters, requests, version=0)

        return [completion.text for (completion,) in self.compute.evaluation.submit(complete).result()]

    def nats(self, parameters: Any, prompt: tuple[int, ...], reference: tuple[int, ...]) -> float:
        """Return the negative log-likelihood of a reference, from one forward pass over the whole sequence."""

        def compute() -> float:
            tokens = mx.array([[*prompt, *reference]])
            model = self.policy.copy_model()
            model.use(parameters)
            logits_S_V = model.model(tokens)[0].astype(mx.float32)
            logp_S_V = logits_S_V - mx.logsumexp(logits_S_V, axis=-1, keepdims=True)
            return -sum(float(logp_S_V[len(prompt) - 1 + i, token].item()) for i, token in enumerate(reference))

        found: float = self.compute.learner.submit(compute).result()
        return found


def steps(reports: Sequence[EvalReport]) -> list[tuple[int, bool]]:
    """Return the step and the `final` flag of each evaluation."""
    return [(report.step, report.final) for report in reports]


async def test_base_and_final_evaluations_use_their_own_weights(compute: Compute, tmp_path: Path) -> None:
    """The served weights change in between. The reports count problems in total and per type."""
    harness = EvaluatorHarness(compute, tmp_path)
    last = harness.update(2, shift=0.5)
    evaluator = harness.evaluator(filled_queue("updates", [harness.update(1, shift=0.25), last]))
    await evaluator.run()
    reports = await receive_all(harness.report_inbox)
    assert steps(reports) == [(0, False), (2, True)]
    assert harness.recorded_reports == reports
    for report in reports:
        assert report.problems == 6
        assert report.accuracy == pytest.approx(4 / 6)
        assert report.by_type == {"sum": 1.0, "word": pytest.approx(1 / 3)}
        assert report.completion_tokens == 24
    texts = [text for _, text in harness.graded]
    assert texts == harness.greedy(harness.policy.trainable()) + harness.greedy(last.parameters)
    assert texts[:6] != texts[6:]


async def test_rewards_and_the_loss_of_references_are_measured(compute: Compute, tmp_path: Path) -> None:
    """With pinned weights. Only problems with a reference completion count towards the loss, by token."""
    harness = EvaluatorHarness(compute, tmp_path)
    update = harness.update(1, shift=0.25)
    await harness.evaluator(filled_queue("updates", [update]), base=False).run()
    (report,) = await receive_all(harness.report_inbox)
    found = report
    assert found.reward
    assert found.reward.value == pytest.approx(2.5)
    assert found.reward.problems == 6
    assert {name: value.value for name, value in found.rewards.items()} == {"number": 1.0}
    assert (found.completion_length, found.truncated, found.samples) == (4.0, 1.0, 0)
    nats = sum(harness.nats(update.parameters, PROMPTS[i], REFERENCES[i]) for i in (0, 2))
    assert found.loss
    assert found.loss.value == pytest.approx(nats / 5, rel=1e-3)
    assert found.loss.problems == 2


async def test_sampled_completions_have_the_same_seeds_in_every_evaluation(compute: Compute, tmp_path: Path) -> None:
    """Equal weights give equal values, also in another run of the evaluator, as after a resume."""
    harness, again = EvaluatorHarness(compute, tmp_path), EvaluatorHarness(compute, tmp_path)
    again.policy = harness.policy
    reports = []
    for one, base in ((harness, True), (again, False)):
        await one.evaluator(filled_queue("updates", [harness.update(3)]), base=base, samples=2).run()
        reports += await receive_all(one.report_inbox)
    first, final, resumed = reports
    for earlier in (first, final):
        assert replace(earlier, step=3, version=3, seconds=resumed.seconds, final=True) == resumed
    assert harness.graded[18:] == again.graded
    assert final.completion_tokens == 6 * (1 + 2) * 4
    assert final.avg
    assert (final.samples, list(final.pass_at)) == (2, ["2"])
    assert final.avg.value == pytest.approx(4 / 6)
    by_problem = [[text for prompt, text in again.graded if prompt == str(i)] for i in range(6)]
    assert any(a != b for _, a, b in by_problem), "the seeds of one problem differ"


async def test_problems_without_a_correct_reward_are_counted_as_ungraded(compute: Compute, tmp_path: Path) -> None:
    """They do not count towards the accuracy, and their type has none. Without any graded problem it is None."""
    harness = EvaluatorHarness(compute, tmp_path)
    harness.ungraded_types = {"word"}
    await harness.evaluator(filled_queue("updates", [])).run()
    for report in await receive_all(harness.report_inbox):
        assert (report.problems, report.ungraded, report.accuracy, report.by_type) == (3, 3, 1.0, {"sum": 1.0})
    none = EvaluatorHarness(compute, tmp_path)
    none.ungraded_types = {"word", "sum"}
    await none.evaluator(filled_queue("updates", []), base=False, samples=1).run()
    (report,) = await receive_all(none.report_inbox)
    assert (report.problems, report.ungraded, report.accuracy, report.interval) == (0, 6, None, None)
    assert (report.samples, report.avg) == (1, None)


async def test_evaluations_in_between_use_fewer_problems(compute: Compute, tmp_path: Path) -> None:
    """`problems_between` problems every `interval` steps, and `problems` before and after.

    Both take the first problems of the file.
    """
    harness = EvaluatorHarness(compute, tmp_path)
    updates = Queue[PolicyUpdated]("updates", capacity=1)
    writer = updates.outbox()
    evaluator = harness.evaluator(updates, interval=2, problems=3, problems_between=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(evaluator.run)
        assert (await harness.report_inbox.receive()).problems == 3
        for step in (1, 2):
            await writer.send(harness.update(step))
        assert [(r.step, r.problems, r.accuracy) for r in [await harness.report_inbox.receive()]] == [(2, 1, 1.0)]
        writer.close()
    assert [(r.step, r.problems, r.final) for r in await receive_all(harness.report_inbox)] == [(2, 3, True)]


async def test_a_running_evaluation_never_blocks_the_learner(compute: Compute, tmp_path: Path) -> None:
    """One evaluation may wait. Further ones are skipped, except the final one."""
    harness = EvaluatorHarness(compute, tmp_path)
    harness.grading_allowed = anyio.Event()
    updates = Queue[PolicyUpdated]("updates", capacity=1)
    writer, evaluator = updates.outbox(), harness.evaluator(updates, interval=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(evaluator.run)
        await harness.grading.wait()
        for step in (1, 2, 3, 4):
            await writer.send(harness.update(step))
        writer.close()
        await anyio.wait_all_tasks_blocked()
        assert updates.depth == 0
        harness.grading_allowed.set()
    assert steps(await receive_all(harness.report_inbox)) == [(0, False), (1, False), (4, True)]


async def test_a_resumed_run_evaluates_only_its_end(compute: Compute, tmp_path: Path) -> None:
    """The base policy is already evaluated. A run that had ended is evaluated once."""
    harness = EvaluatorHarness(compute, tmp_path)
    await harness.evaluator(filled_queue("updates", []), base=False, start=7).run()
    assert steps(await receive_all(harness.report_inbox)) == [(7, True)]


async def test_an_evaluator_without_a_reader_continues(compute: Compute, tmp_path: Path) -> None:
    """The reports are still recorded for the final summary."""
    harness = EvaluatorHarness(compute, tmp_path)
    harness.report_inbox.close()
    evaluator = harness.evaluator(filled_queue("updates", [harness.update(1)]))
    await evaluator.run()
    assert steps(harness.recorded_reports) == [(0, False), (1, True)]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_failed_or_cancelled_evaluator_closes_its_ends(compute: Compute, tmp_path: Path, end: str) -> None:
    """A held-out prompt beyond the context is a failure. A cancellation abandons the evaluation."""
    harness = EvaluatorHarness(compute, tmp_path)
    updates = filled_queue("updates", [harness.update(1)], ended=False)
    evaluator = harness.evaluator(updates)
    if end == "failed":
        evaluator._held_out = HeldOut(
            problems=evaluator._held_out.problems, prompts=[(5,) * 128] * 6, references=[()] * 6, grade=harness.grade
        )
        with pytest.raises(ExceptionGroup, match="unhandled"):
            await evaluator.run()
    else:
        harness.grading_allowed = anyio.Event()
        await cancel_when_blocked(evaluator.run)
    with pytest.raises(EndOfStream):
        await harness.report_inbox.receive()
    with pytest.raises(QueueClosed):
        updates.inbox()
