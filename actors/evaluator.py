"""Evaluator -> monitor: accuracy, rewards and loss on held-out problems."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct
from msgspec.structs import replace

from clotho.lanes.compute_thread import ComputeThread, finish
from clotho.models.policy import Policy
from clotho.models.turns import TurnBudget
from clotho.scoring.prompt_logprobs import PromptScorer
from clotho.settings.engine import EngineSection
from protocols.evaluation import EvalReport, HeldOut, ReferenceLoss
from protocols.queues import Inbox, Outbox, QueueClosed
from protocols.sampling import Completion, SampleRequest, Sampling
from protocols.step import PolicyUpdated
from training_run.evaluation.accuracy import Outcome, graded, report_of
from training_run.evaluation.held_out import PinnedSampler, held_out_completions, reference_losses
from training_run.groups.rollout_source import Episodes
from training_run.profile.schema import HeldOutEvaluation
from training_run.supervision.queues import Queue


class Pinned(Struct, frozen=True, kw_only=True):
    """Weights to evaluate. Arrays are immutable, so that no copy is needed."""

    step: int
    version: int
    parameters: Any
    final: bool = False


class Evaluator:
    """Evaluates the policy before the first update, every `interval` steps, and after the last update.

    The learner never waits for an evaluation. While one is running, the next one waits; evaluations that become due
    meanwhile are skipped. The last update of the run is always evaluated, on all problems.
    """

    name = "evaluator"

    def __init__(
        self,
        *,
        inbox: Inbox[PolicyUpdated],
        outbox: Outbox[EvalReport],
        thread: ComputeThread,
        policy: Policy,
        held_out: HeldOut,
        episodes: Episodes | None,
        sampling: Sampling,
        seed: int,
        settings: HeldOutEvaluation,
        engine: EngineSection,
        turn_seconds: float,
        base: Pinned | None,
        start: Pinned,
        steps: int,
        reports: list[EvalReport],
    ) -> None:
        """base: the policy before its first update; None if it was evaluated before a resume.

        episodes: as in `Attached`.

        sampling: of training; greedy completions have temperature 0 and no filters. seed: of sampled completions.
        thread: computes, with a model and an engine of its own. turn_seconds: limits the duration of prefill, and of
        the loss of reference completions, in one turn.
        start: the weights at the start; `final` if the last evaluation before a resume evaluated these weights.
        reports: every report is appended to this list.
        """
        self._inbox, self._outbox = inbox, outbox
        self._thread, self._policy, self._held_out = thread, policy, held_out
        self._episodes = episodes
        self._sampling, self._seed, self._settings, self._engine = sampling, seed, settings, engine
        self._turns = TurnBudget(turn_seconds, thread.lane)
        self._sampler: PinnedSampler | None = None
        self._scorer: PromptScorer | None = None
        self._base, self._newest, self._steps = base, start, steps
        self._reports = reports

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Evaluate until the updates end and the last one is evaluated.

        Ready when the base policy is evaluated, so that training starts afterwards.
        """
        due = Queue[Pinned]("evaluations", capacity=1)
        async with self._inbox, self._outbox, anyio.create_task_group() as tasks:
            tasks.start_soon(self._collect, due.outbox())
            if self._base is not None:
                await self._report(self._base)
                self._base = None  # frees its weights
            task_status.started()
            async for pinned in due.inbox():
                await self._report(pinned)

    async def _report(self, pinned: Pinned) -> None:
        report = await self._evaluate(pinned)
        self._reports.append(report)
        with suppress(QueueClosed):  # the monitor has ended
            await self._outbox.send(report)

    async def _collect(self, due: Outbox[Pinned]) -> None:
        async with due:
            async for update in self._inbox:
                self._newest = Pinned(
                    step=update.report.step, version=update.report.version, parameters=update.parameters
                )
                if self._is_due(self._newest.step):
                    with suppress(anyio.WouldBlock):
                        due.send_nowait(self._newest)
            if not self._newest.final:
                await due.send(replace(self._newest, final=True))

    def _is_due(self, step: int) -> bool:
        interval = self._settings.interval
        return interval > 0 and step % interval == 0 and step < self._steps

    async def _evaluate(self, pinned: Pinned) -> EvalReport:
        began = time.monotonic()
        everything = pinned.final or pinned.step == 0
        count = self._settings.problems if everything else self._settings.problems_between or self._settings.problems
        outcomes = await self._outcomes(pinned, len(self._held_out.problems[: count or None]))
        seconds = time.monotonic() - began
        return report_of(outcomes, step=pinned.step, version=pinned.version, seconds=seconds, final=pinned.final)

    async def _outcomes(self, pinned: Pinned, count: int) -> list[Outcome]:
        """Sample, score and grade the first `count` problems."""
        held_out, prompts = self._held_out, self._held_out.prompts[:count]
        problems, samples = held_out.problems[:count], self._settings.samples

        async def complete(requests: Sequence[SampleRequest]) -> list[list[Completion]]:
            return await finish(self._thread.submit(lambda: self._complete(pinned, requests)))

        found = await held_out_completions(
            problems,
            prompts,
            self._sampling,
            complete,
            episodes=self._episodes,
            samples=samples,
            seed=self._seed,
        )
        losses: list[ReferenceLoss | None] = []
        if any(references := held_out.references[:count]):
            losses = await finish(self._thread.submit(lambda: self._losses(pinned, prompts, references)))
        return await graded(problems, found, held_out.grade, losses=losses)

    def _complete(self, pinned: Pinned, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """Decode, in the thread of evaluations."""
        if self._sampler is None:
            self._sampler = PinnedSampler(self._policy, self._engine, self._turns)
        return self._sampler.completions(pinned.parameters, requests, version=pinned.version)

    def _losses(
        self, pinned: Pinned, prompts: Sequence[tuple[int, ...]], references: Sequence[tuple[int, ...]]
    ) -> list[ReferenceLoss | None]:
        """Score reference completions, in the thread of evaluations."""
        scorer = self._scorer = self._scorer or PromptScorer(
            self._policy.copy_model(), chunk=self._engine.prefill_chunk, turns=self._turns
        )
        return reference_losses(
            lambda tokens: scorer.score(pinned.parameters, tokens, version=pinned.version),
            prompts,
            references,
            context_length=self._policy.context_length,
        )
