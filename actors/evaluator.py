"""Evaluator -> monitor: greedy accuracy on held-out problems."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct
from msgspec.structs import replace

from clotho.config.schema import EngineSection, HeldOutEvaluation
from clotho.inference.greedy import greedy_completions
from clotho.models.policy import Policy
from clotho.models.turns import TurnBudget
from clotho.rewards.accuracy import accuracy, grade
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.runtime.queues import Queue
from protocols.evaluation import EvalReport, HeldOut
from protocols.queues import Inbox, Outbox, QueueClosed
from protocols.sampling import Completion, Sampling
from protocols.step import PolicyUpdated


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
        executor: ComputeExecutor,
        policy: Policy,
        held_out: HeldOut,
        sampling: Sampling,
        settings: HeldOutEvaluation,
        engine: EngineSection,
        turns: TurnBudget,
        base: Pinned | None,
        start: Pinned,
        steps: int,
        reports: list[EvalReport],
    ) -> None:
        """base: the policy before its first update; None if it was evaluated before a resume.

        turns: limits the duration of prefill in one turn.
        start: the weights at the start; `final` if the last evaluation before a resume evaluated these weights.
        reports: every report is appended to this list.
        """
        self._inbox, self._outbox = inbox, outbox
        self._executor, self._policy, self._held_out = executor, policy, held_out
        self._sampling, self._settings, self._engine, self._turns = sampling, settings, engine, turns
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
        problems = self._held_out.problems[: count or None]
        completions: list[Completion] = await finish(
            self._executor.submit_steps(
                greedy_completions(
                    self._policy,
                    pinned.parameters,
                    version=pinned.version,
                    prompts=self._held_out.prompts[: len(problems)],
                    sampling=self._sampling,
                    settings=self._engine,
                    turns=self._turns,
                ),
                kind="evaluation",
            )
        )
        texts = [completion.text for completion in completions]
        found = accuracy(problems, await grade(problems, texts, self._held_out.is_correct))
        return EvalReport(
            step=pinned.step,
            version=pinned.version,
            problems=found.problems,
            ungraded=found.ungraded,
            accuracy=found.overall.value,
            interval=(found.overall.low, found.overall.high),
            by_type={kind: share.value for kind, share in found.by_type.items()},
            completion_tokens=sum(len(completion.tokens) for completion in completions),
            seconds=time.monotonic() - began,
            final=pinned.final,
        )
