"""Learner: consumes scored groups, a batch at a time, and computes the next policy from each batch."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import suppress

from msgspec import Struct

from actors.compute.executor import ComputeExecutor
from actors.compute.random_state import random_state
from actors.compute.update import PolicyLearner, Update
from actors.runtime.ends import Inbox, MailboxClosed, Outbox
from actors.runtime.futures import finish
from protocols.errors import DivergenceError
from protocols.ledger import Ledger
from protocols.profile import LearnerSection
from protocols.rollout import Discarded, DiscardReason
from protocols.score import GroupOutcome, ScoredGroup
from protocols.step import PolicyUpdated, StepReport, TrainedGroup


class Progress(Struct, kw_only=True):
    """How far the learner is; a checkpoint carries it over. step: batches consumed; bad_steps: not finite, in a row."""

    step: int = 0
    bad_steps: int = 0
    train_seconds: float = 0.0
    trained_tokens: int = 0


class Learner:
    """The box where the policy learns, and where every group ends: the only one that writes the ledger.

    A batch is `batch_size` groups, however each of them ended: what teaches nothing or comes too late is counted and
    left out, and the update is made from the rest. The last batch of a run may be smaller. Inside a batch, groups are
    ordered by their number, so that an update does not depend on which of them was answered first.
    """

    name = "learner"

    def __init__(
        self,
        *,
        inbox: Inbox[GroupOutcome],
        updates: Sequence[Outbox[PolicyUpdated]],
        reports: Outbox[StepReport],
        executor: ComputeExecutor,
        policy_learner: PolicyLearner,
        settings: LearnerSection,
        ledger: Ledger,
        progress: Progress,
    ) -> None:
        """updates: one arrow each to whoever needs the new weights; reports: to whoever only needs the numbers."""
        self._inbox, self._updates, self._reports = inbox, updates, reports
        self._executor, self._policy_learner = executor, policy_learner
        self._settings, self._ledger, self._progress = settings, ledger, progress
        self.last_report: StepReport | None = None
        self.began = self.last_update = time.monotonic()

    async def run(self) -> None:
        """Learn until the scored groups end; what is left then is one last, smaller batch."""
        self.began = self.last_update = time.monotonic()
        try:
            async with self._inbox:
                await self._learn()
        finally:
            self._reports.close()
            for outbox in self._updates:
                outbox.close()

    async def _learn(self) -> None:
        batch: list[GroupOutcome] = []
        began = time.monotonic()
        async for outcome in self._inbox:
            batch.append(outcome)
            if len(batch) == self._settings.batch_size:
                await self._consume(batch, wait_seconds=time.monotonic() - began)
                batch, began = [], time.monotonic()
        if batch:
            await self._consume(batch, wait_seconds=time.monotonic() - began)

    async def _consume(self, batch: list[GroupOutcome], *, wait_seconds: float) -> None:
        began = time.monotonic()
        version = self._policy_learner.version
        fresh, discarded = self._sort_out(sorted(batch, key=_group_id), version)
        update, state = await finish(self._executor.submit_steps(self._steps(fresh), learning=True))
        trained, refused = _ends(fresh, update)
        discarded += refused
        self._book(trained, discarded)
        self._count(update, time.monotonic() - began)
        report = StepReport(
            step=self._progress.step,
            version=self._policy_learner.version,
            fingerprint=self._policy_learner.fingerprint,
            trained=tuple(trained),
            discarded=tuple(discarded),
            staleness=tuple(version - group.scored.group.oldest_version for group in trained),
            update=update.metrics if update else None,
            train_seconds=time.monotonic() - began,
            wait_seconds=wait_seconds,
        )
        self.last_report, self.last_update = report, time.monotonic()
        await self._tell(report, state)
        if update and not update.finite and self._progress.bad_steps >= self._settings.max_bad_steps:
            raise DivergenceError(
                f"{self._progress.bad_steps} updates in a row were not finite, until step {report.step}; the weights "
                f"of version {report.version} stand: lower learner.learning_rate, or look at rollouts.jsonl"
            )

    def _steps(self, groups: list[ScoredGroup]) -> Generator[None, None, tuple[Update | None, tuple[int, ...]]]:
        """The update, and the random state right after it, both in the compute thread."""
        update = None
        if groups:
            update = yield from self._policy_learner.update(groups, step=self._progress.step)
        return update, random_state()

    def _sort_out(self, batch: list[GroupOutcome], version: int) -> tuple[list[ScoredGroup], list[Discarded]]:
        fresh: list[ScoredGroup] = []
        discarded: list[Discarded] = []
        for outcome in batch:
            if isinstance(outcome, Discarded):
                discarded.append(outcome)
                continue
            if not any(completion.tokens for completion in outcome.group.completions):
                discarded.append(_discard(outcome, "invalid", "no completion has a token"))
                continue
            age = version - outcome.group.oldest_version
            if age > self._settings.max_staleness:
                limit = self._settings.max_staleness
                discarded.append(_discard(outcome, "stale", f"{age} versions old, learner.max_staleness is {limit}"))
            else:
                fresh.append(outcome)
        return fresh, discarded

    def _book(self, trained: list[TrainedGroup], discarded: list[Discarded]) -> None:
        for group in trained:
            self._ledger.train(group.scored.group.prompt.group_id)
        for drop in discarded:
            self._ledger.discard(drop.prompt.group_id, drop.reason)

    def _count(self, update: Update | None, seconds: float) -> None:
        self._progress.step += 1
        self._progress.train_seconds += seconds
        if update is not None:
            self._progress.bad_steps = 0 if update.finite else self._progress.bad_steps + 1
            self._progress.trained_tokens += update.metrics.tokens if update.applied else 0

    async def _tell(self, report: StepReport, state: tuple[int, ...]) -> None:
        update = PolicyUpdated(
            report=report,
            parameters=self._policy_learner.parameters,
            optimizer=await finish(self._executor.submit(self._policy_learner.state)),
            random_state=state,
            ledger=self._ledger.state(),
            bad_steps=self._progress.bad_steps,
            train_seconds=self._progress.train_seconds,
            trained_tokens=self._progress.trained_tokens,
        )
        for outbox in self._updates:
            await outbox.send(update)
        with suppress(MailboxClosed):  # nobody who reads the numbers is left; learning goes on
            await self._reports.send(report)


def _group_id(outcome: GroupOutcome) -> int:
    return outcome.prompt.group_id if isinstance(outcome, Discarded) else outcome.group.prompt.group_id


def _ends(groups: list[ScoredGroup], update: Update | None) -> tuple[list[TrainedGroup], list[Discarded]]:
    """What becomes of the groups that an update was made from."""
    if update is None:
        return [], []
    if not update.finite:
        return [], [_discard(group, "not_finite", "loss or gradient was not finite") for group in groups]
    if not update.applied:
        return [], [_discard(group, "no_signal", "the gradient of the batch was exactly zero") for group in groups]
    pairs = zip(groups, update.advantages, strict=True)
    return [TrainedGroup(scored=group, advantages=advantages) for group, advantages in pairs], []


def _discard(scored: ScoredGroup, reason: DiscardReason, detail: str) -> Discarded:
    return Discarded(
        prompt=scored.group.prompt,
        reason=reason,
        detail=detail,
        completions=scored.group.completions,
        rewards=scored.rewards,
    )
