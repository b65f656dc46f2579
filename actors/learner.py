"""Learner: consumes scored groups, a batch at a time, and computes the next policy from each batch."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from math import inf

import structlog
from msgspec import Struct
from msgspec.structs import replace

from clotho.config.schema import LearnerSection
from clotho.models.machine import random_state
from clotho.monitoring.collapse_detection import CollapseMonitor, CollapseResponse
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.runtime.latest import Latest
from clotho.runtime.log_barrier import reached
from clotho.training.batch_collector import FormingBatch, discard, sort_out
from clotho.training.ledger import Ledger
from clotho.training.replay import ReplayBuffer
from clotho.training.update import PolicyLearner, Update
from protocols.errors import ClothoError, DivergenceError
from protocols.queues import Inbox, Outbox, QueueClosed
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from protocols.step import GroupsEnded, PolicyUpdated, StepReport, TrainedGroup

log = structlog.get_logger(actor="learner")

DISCARDED_KEPT = 256
"""So many discarded groups of one batch are kept until it is complete."""


class Progress(Struct, kw_only=True):
    """How far the learner is; a checkpoint carries it over. step: batches consumed; bad_steps: not finite, in a row."""

    step: int = 0
    bad_steps: int = 0
    train_seconds: float = 0.0
    trained_tokens: int = 0


class Learner:
    """The box where the policy learns, and where every group ends: the only one that writes the ledger.

    A batch is `batch_size` groups, however each of them ended: what teaches nothing or comes too late is counted and
    left out, and the update is made from the rest. With `dynamic_sampling` others are asked in its place, so that the
    update has `batch_size` groups: at once, or, for runs that can be repeated, when all that were asked have ended.
    What environments send is never asked, so there a batch is always `batch_size` groups that can be learned from, and
    what still comes after the last batch is discarded. The last batch of a run may be smaller. Inside a batch, groups
    are ordered by their number, so that an update does not depend on which of them was answered first.
    """

    name = "learner"

    def __init__(
        self,
        *,
        inbox: Inbox[GroupOutcome],
        updates: Sequence[Outbox[PolicyUpdated]],
        reports: Outbox[StepReport | GroupsEnded],
        executor: ComputeExecutor,
        policy_learner: PolicyLearner,
        settings: LearnerSection,
        ledger: Ledger,
        progress: Progress,
        refills: Latest[int],
        recorded: Latest[int],
        replay: ReplayBuffer,
        collapse: CollapseMonitor,
        steps: int,
        rounds: bool,
        unasked: bool,
    ) -> None:
        """updates: one arrow each to whoever needs the new weights; reports: to whoever only needs the numbers.

        refills: tells how many groups so far have to be replaced; closed after the last of `steps` batches.
        recorded: how far the monitor has come with the histories.
        rounds: refill a batch when everything asked for it has ended.
        unasked: the groups come from environments.
        """
        self._inbox, self._updates, self._reports = inbox, updates, reports
        self._executor, self._policy_learner = executor, policy_learner
        self._settings, self._ledger, self._progress = settings, ledger, progress
        self._refills, self._recorded = refills, recorded
        self._replay, self._steps, self._rounds, self._unasked = replay, steps, rounds, unasked
        self._collapse, self._rolled_back_at = collapse, 0
        self.last_report: StepReport | None = None
        self.began = self.last_update = time.monotonic()

    async def run(self) -> None:
        """Learn until the scored groups end; what is left then is one last, smaller batch."""
        self.began = self.last_update = time.monotonic()
        try:
            async with self._inbox:
                await self._learn()
        finally:
            self._refills.close()
            self._reports.close()
            for outbox in self._updates:
                outbox.close()

    async def _learn(self) -> None:
        batch, began = self._next_batch(), time.monotonic()
        async for outcome in self._inbox:
            batch.add(self._sort_out(outcome))
            if more := batch.refill():
                self._refills.put(self._refills.value + more)
            if batch.complete and not self._over:
                await self._consume(batch, wait_seconds=time.monotonic() - began)
                batch, began = self._next_batch(), time.monotonic()
            elif len(batch.discarded) >= DISCARDED_KEPT:
                await self._end_early(batch)
        if self._over:
            await self._end_early(batch)
        elif batch.fresh or (batch.ended and not self._unasked):
            await self._consume(batch, wait_seconds=time.monotonic() - began)
        else:
            await self._end_early(batch)

    @property
    def _over(self) -> bool:
        """Whether nothing more is learned, though environments may still send."""
        return self._unasked and self._progress.step >= self._steps

    def _sort_out(self, outcome: GroupOutcome) -> GroupOutcome:
        if self._over and isinstance(outcome, ScoredGroup):
            return discard(outcome, "surplus", "the run had learned from all its batches")
        version = self._policy_learner.version
        return sort_out(outcome, version=version, settings=self._settings, oldest=self._rolled_back_at)

    def _next_batch(self) -> FormingBatch:
        """An empty batch; after the last one nothing is asked any more."""
        size, limit = self._settings.batch_size, float(self._settings.batch_size)
        if self._settings.dynamic_sampling or self._unasked:
            if self._progress.step < self._steps:
                limit = inf if self._unasked else int(self._settings.dynamic_limit * size)
            else:
                self._refills.close()
        return FormingBatch(size=size, limit=limit, rounds=self._rounds)

    async def _end_early(self, batch: FormingBatch) -> None:
        """Enter what was discarded so far into the books: whoever sends nothing else must not fill the memory."""
        if discarded := batch.take_out_discarded():
            self._book([], list(discarded))
            with suppress(QueueClosed):
                await self._reports.send(GroupsEnded(step=self._progress.step + 1, discarded=discarded))

    async def _consume(self, batch: FormingBatch, *, wait_seconds: float) -> None:
        began = time.monotonic()
        step, version = self._progress.step, self._policy_learner.version
        if batch.limited:
            log.warning("dynamic sampling has come to its limit", asked=batch.asked, learnable=len(batch.fresh))
        fresh = sorted(batch.fresh, key=_group_id)
        replayed = self._replay.draw(version=version, step=step) if fresh else ()
        update, state = await finish(self._executor.submit_steps(self._update(fresh, replayed), learning=True))
        trained, refused = _ends(fresh, update)
        discarded = [*sorted(batch.discarded, key=_group_id), *refused]
        self._book(trained, discarded)
        self._replay.add(trained, version=self._policy_learner.version)
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
            replaced=batch.refilled,
            replayed=len(replayed),
        )
        response = self._collapse.assess(report)
        report = replace(report, collapse_warnings=response.warnings)
        if response.action == "rollback":
            report = await self._roll_back(report)
        elif update is not None and update.applied:
            self._policy_learner.observe_health(healthy=not response.warnings)
        self.last_report, self.last_update = report, time.monotonic()
        await self._tell(report, state)
        if failure := self._failure(report, response, update):
            await reached(self._recorded, report.step)  # whoever asks why finds this batch on record
            raise failure

    def _failure(self, report: StepReport, response: CollapseResponse, update: Update | None) -> ClothoError | None:
        """Why the run must end with this batch, if it must."""
        if response.action == "stop":
            return self._collapse.error(report)
        if update and not update.finite and self._progress.bad_steps >= self._settings.max_bad_steps:
            return DivergenceError(
                f"{self._progress.bad_steps} updates in a row were not finite, until step {report.step}; the weights "
                f"of version {report.version} stand: lower learner.learning_rate, or look at rollouts.jsonl"
            )
        return None

    async def _roll_back(self, report: StepReport) -> StepReport:
        """Go back to the last good policy; what a bad one drew is neither learned from nor replayed."""
        await finish(self._executor.submit(lambda: self._policy_learner.roll_back(rate=self._collapse.rollback_rate)))
        self._replay.clear()
        self._progress.bad_steps = 0
        self._rolled_back_at = self._policy_learner.version
        log.warning("went back to the last good policy", step=report.step, version=self._policy_learner.version)
        return replace(
            report,
            version=self._policy_learner.version,
            fingerprint=self._policy_learner.fingerprint,
            rolled_back=True,
        )

    def _update(
        self, groups: Sequence[ScoredGroup], replayed: Sequence[ScoredGroup]
    ) -> Generator[None, None, tuple[Update | None, tuple[int, ...]]]:
        """The update, and the random state right after it, both in the compute thread."""
        update = None
        if groups:
            update = yield from self._policy_learner.update(groups, step=self._progress.step, replayed=replayed)
        return update, random_state()

    def _book(self, trained: list[TrainedGroup], discarded: list[Discarded]) -> None:
        for group in trained:
            prompt = group.scored.group.prompt
            self._ledger.train(prompt.group_id, source=prompt.source)
        for drop in discarded:
            self._ledger.discard(drop.prompt.group_id, drop.reason, source=drop.prompt.source)

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
            replay=self._replay.groups(),
            collapse=self._collapse.state(),
            rollbacks=self._collapse.rollbacks,
        )
        for outbox in self._updates:
            await outbox.send(update)
        with suppress(QueueClosed):  # nobody who reads the numbers is left; learning goes on
            await self._reports.send(report)


def _group_id(outcome: GroupOutcome) -> int:
    return outcome.prompt.group_id if isinstance(outcome, Discarded) else outcome.group.prompt.group_id


def _ends(groups: list[ScoredGroup], update: Update | None) -> tuple[list[TrainedGroup], list[Discarded]]:
    """What becomes of the groups that an update was made from."""
    if update is None:
        return [], []
    if not update.finite:
        return [], [discard(group, "not_finite", "loss or gradient was not finite") for group in groups]
    if not update.applied:
        return [], [discard(group, "zero_variance", "the gradient of the batch was exactly zero") for group in groups]
    pairs = zip(groups, update.advantages, strict=True)
    return [TrainedGroup(scored=group, advantages=advantages) for group, advantages in pairs], []
