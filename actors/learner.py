"""Learner -> broadcaster, checkpointer, evaluator, monitor: one policy update per batch of scored groups."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from math import inf

import structlog
from msgspec.structs import replace

from clotho.lanes.compute_thread import Compute, finish
from clotho.models.machine import random_state
from clotho.settings.learner import LearnerSection
from clotho.training.update import PolicyLearner, Update
from protocols.checkpoint import Part
from protocols.errors import ClothoError, DivergenceError
from protocols.queues import Inbox, Outbox, QueueClosed
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from protocols.step import FirstBatch, GroupsEnded, LearnerReport, PolicyUpdated, StepReport, TrainedGroup
from training_run.groups.batch_collector import BatchCollector, FruitlessBatches, discard_unusable
from training_run.groups.ledger import Ledger
from training_run.groups.progress import LearnerProgress
from training_run.supervision.hooks import UpdateHook, Verdict
from training_run.supervision.latest import Latest, reached

log = structlog.get_logger(actor="learner")

LOG_TIMEOUT_SECONDS = 10.0
MAX_DISCARDED_HELD = 256
"""Number of discarded groups of an incomplete batch that are held before they are reported."""


class LearnerActor:
    """Updates the policy, and records in the ledger how each group ended.

    A batch is `batch_size` groups, including groups that are discarded (zero variance, stale, failed); the update uses
    the other groups. With dynamic sampling, discarded groups are replaced, so that the update has `batch_size` groups.
    Groups are replaced at once or, in synchronous runs, after all groups of the round have ended. Groups from
    environments cannot be requested: a batch is then always `batch_size` groups that can be trained on, and groups
    that arrive after the last batch are discarded. The last batch may be smaller. Groups in a batch are sorted by id,
    so that the update does not depend on the order of arrival.

    With a lag, a group waits until the groups of `lag` further batches have arrived, or the inbox has ended. As the
    generator samples a batch only after the update that makes room for it, every batch is then exactly `lag` updates
    old, except the first ones, of which no older weights exist.
    """

    name = "learner"

    def __init__(
        self,
        *,
        inbox: Inbox[GroupOutcome],
        updates: Sequence[Outbox[PolicyUpdated]],
        reports: Outbox[LearnerReport],
        compute: Compute,
        policy_learner: PolicyLearner,
        settings: LearnerSection,
        ledger: Ledger,
        progress: LearnerProgress,
        replacements: Latest[int],
        logged: Latest[int],
        steps: int,
        synchronous: bool,
        from_environments: bool,
        first_check_seconds: float = 0.0,
        lag: int = 0,
        hooks: Sequence[UpdateHook] = (),
        parts: Callable[[], Mapping[str, Part[object]]] = dict,
        stop_sampling: Callable[[str], None] = lambda cause: None,
    ) -> None:
        """updates: one outbox per receiver of new weights. reports: the monitor's queue.

        replacements: number of groups to replace since the run began; closed after the last of `steps` batches.
        logged: last step in the log files.
        synchronous: replace groups after all groups of the round have ended.
        from_environments: the groups come from environments.
        first_check_seconds: how long the first update waits for the monitor to check the groups of the first batch; 0:
        these groups are not sent.
        lag: number of batches that arrive between a batch and its update.
        hooks: take part in every update. parts: collects what attachments keep in the checkpoint of a batch.
        stop_sampling: ends the inbox for a cause, because batch after batch has no learning signal.
        """
        self._inbox, self._updates, self._reports = inbox, updates, reports
        self._compute, self._policy_learner = compute, policy_learner
        self._settings, self._ledger, self._progress = settings, ledger, progress
        self._replacements, self._logged = replacements, logged
        self._hooks, self._parts, self._steps = hooks, parts, steps
        self._synchronous, self._from_environments = synchronous, from_environments
        self._first_check_seconds, self._held_groups = first_check_seconds, lag * settings.batch_size
        self._stop_sampling = stop_sampling
        self._fruitless = FruitlessBatches(
            max_failed=settings.max_failed_batches,
            max_equal=settings.max_equal_batches,
            batch_size=settings.batch_size,
        )
        self._rolled_back_at = 0
        progress.began = progress.last_update = time.monotonic()

    async def run(self) -> None:
        """Train until the inbox ends; the remaining groups are a last, smaller batch."""
        self._progress.began = self._progress.last_update = time.monotonic()
        self._progress.computed_before = self._compute.arbiter.totals()
        try:
            async with self._inbox:
                await self._train()
        finally:
            self._replacements.close()
            self._reports.close()
            for outbox in self._updates:
                outbox.close()

    async def _train(self) -> None:
        batch, began = self._next_batch(), time.monotonic()
        async with aclosing(self._outcomes()) as outcomes:
            async for outcome in outcomes:
                batch.add(sorted_out := self._sort_out(outcome))
                if self._from_environments and (cause := self._fruitless.add_one(sorted_out)):
                    self._stop_sampling(cause)
                if more := batch.request_replacements():
                    self._replacements.put(self._replacements.value + more)
                if self._first_check_seconds and batch.ended >= self._settings.batch_size:
                    await self._wait_for_check(batch)
                if batch.complete and not self._over:
                    await self._consume(batch, wait_seconds=time.monotonic() - began)
                    batch, began = self._next_batch(), time.monotonic()
                elif len(batch.discarded) >= MAX_DISCARDED_HELD:
                    await self._end_early(batch)
        if self._over:
            await self._end_early(batch)
        elif batch.fresh or (batch.ended and not self._from_environments):
            await self._consume(batch, wait_seconds=time.monotonic() - began)
        else:
            await self._end_early(batch)

    async def _outcomes(self) -> AsyncGenerator[GroupOutcome, None]:
        """The groups in the order of arrival, each after the groups of the lag."""
        held = deque[GroupOutcome]()
        async for outcome in self._inbox:
            held.append(outcome)
            if len(held) > self._held_groups:
                yield held.popleft()
        while held:
            yield held.popleft()

    @property
    def _over(self) -> bool:
        """Whether all batches are done, although environments may still send groups."""
        return self._from_environments and self._progress.step >= self._steps

    def _sort_out(self, outcome: GroupOutcome) -> GroupOutcome:
        if self._over and isinstance(outcome, ScoredGroup):
            return outcome.discarded("surplus", "the run had trained on all its batches")
        version = self._policy_learner.version
        return discard_unusable(outcome, version=version, settings=self._settings, oldest=self._rolled_back_at)

    def _next_batch(self) -> BatchCollector:
        """An empty batch. After the last batch, no more groups are requested."""
        size, limit = self._settings.batch_size, float(self._settings.batch_size)
        ratio = self._settings.objective.dynamic_sampling_max_ratio
        if ratio or self._from_environments:
            if self._progress.step < self._steps:
                limit = inf if self._from_environments else int(ratio * size)
            else:
                self._replacements.close()
        return BatchCollector(size=size, limit=limit, rounds=self._synchronous)

    async def _wait_for_check(self, batch: BatchCollector) -> None:
        """Let the monitor check the first groups of the run before the first update."""
        seconds, self._first_check_seconds = self._first_check_seconds, 0.0
        with suppress(QueueClosed):  # the monitor has ended
            groups: tuple[GroupOutcome, ...] = (*batch.fresh, *batch.discarded)
            await self._reports.send(FirstBatch(step=self._progress.step + 1, groups=groups))
            await reached(self._logged, self._progress.step, timeout_seconds=seconds)

    async def _end_early(self, batch: BatchCollector) -> None:
        """Record and report the discarded groups of an incomplete batch, to bound memory."""
        if discarded := batch.take_discarded():
            self._record([], list(discarded))
            with suppress(QueueClosed):
                await self._reports.send(GroupsEnded(step=self._progress.step + 1, discarded=discarded))

    async def _consume(self, batch: BatchCollector, *, wait_seconds: float) -> None:
        began = time.monotonic()
        step, version = self._progress.step, self._policy_learner.version
        if batch.limited:
            log.warning("dynamic_sampling_limit_reached", prompted=batch.requested, trainable=len(batch.fresh))
        fresh = sorted(batch.fresh, key=_group_id)
        replayed = [group for hook in self._hooks for group in hook.extra(step=step, version=version)] if fresh else []
        self._progress.updating = True
        update, state = await finish(self._compute.learner.submit(lambda: self._update(fresh, replayed)))
        self._progress.updating = False
        trained, refused = _ends(fresh, update)
        discarded = [*sorted(batch.discarded, key=_group_id), *refused]
        self._record(trained, discarded)
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
            longest_turn_seconds=self._compute.arbiter.take_longest_update_turn(),
            wait_seconds=wait_seconds,
            replaced=batch.replaced,
            replayed=len(replayed),
            metrics={name: value for hook in self._hooks for name, value in hook.metrics().items()},
        )
        verdicts = [hook.assess(report) for hook in self._hooks]
        findings = tuple(finding for verdict in verdicts for finding in verdict.findings)
        report = await self._roll_back(replace(report, collapse_findings=findings), verdicts)
        self._progress.last_report, self._progress.last_update = report, time.monotonic()
        self._progress.computing = self._compute.arbiter.totals().since(self._progress.computed_before)
        await self._send(report, state)
        groups: list[GroupOutcome] = [*fresh, *batch.discarded]
        if not self._from_environments and (cause := self._fruitless.add(groups)):
            self._stop_sampling(cause)
        if failure := self._failure(report, verdicts, update):
            await reached(
                self._logged, report.step, timeout_seconds=LOG_TIMEOUT_SECONDS
            )  # the log files then include this batch
            raise failure

    def _failure(self, report: StepReport, verdicts: list[Verdict], update: Update | None) -> ClothoError | None:
        """The error that ends the run after this batch, if any."""
        for verdict in verdicts:
            if verdict.error is not None:
                return verdict.error
        if update and not update.finite and self._progress.bad_steps >= self._settings.max_bad_steps:
            return DivergenceError(
                f"{self._progress.bad_steps} consecutive updates were not finite, the last one at step {report.step}; "
                f"the weights of version {report.version} stay in use; lower the learning rate, or read rollouts.jsonl"
            )
        return None

    async def _roll_back(self, report: StepReport, verdicts: list[Verdict]) -> StepReport:
        """Return to an earlier policy if a hook says so. Groups of the policy that is left are not trained on."""
        found = next(((verdict.back_to, verdict.rate) for verdict in verdicts if verdict.back_to is not None), None)
        if found is None:
            return report
        to, rate = found
        await finish(self._compute.learner.submit(lambda: self._policy_learner.roll_back(to, rate=rate)))
        for hook in self._hooks:
            hook.rolled_back()
        self._progress.bad_steps = 0
        self._rolled_back_at = self._policy_learner.version
        log.warning("policy_rolled_back", step=report.step, version=self._policy_learner.version)
        return replace(
            report,
            version=self._policy_learner.version,
            fingerprint=self._policy_learner.fingerprint,
            rolled_back=True,
        )

    def _update(
        self, groups: Sequence[ScoredGroup], replayed: Sequence[ScoredGroup]
    ) -> tuple[Update | None, tuple[int, ...]]:
        """Compute the update, and read the random state after it, in the learner's thread."""
        update = None
        if groups:
            for hook in self._hooks:
                groups = hook.judged(groups)
            update = self._policy_learner.update(groups, step=self._progress.step, replayed=replayed)
        return update, random_state()

    def _record(self, trained: list[TrainedGroup], discarded: list[Discarded]) -> None:
        for group in trained:
            prompt = group.scored.group.prompt
            self._ledger.train(prompt.group_id, source=prompt.source)
        for drop in discarded:
            self._ledger.discard(drop.prompt.group_id, drop.reason, source=drop.prompt.source)
        for hook in self._hooks:
            hook.ended(trained, discarded, version=self._policy_learner.version)

    def _count(self, update: Update | None, seconds: float) -> None:
        self._progress.step += 1
        self._progress.train_seconds += seconds
        if update is not None:
            self._progress.bad_steps = 0 if update.finite else self._progress.bad_steps + 1
            self._progress.trained_tokens += update.metrics.trained_tokens if update.applied else 0

    async def _send(self, report: StepReport, state: tuple[int, ...]) -> None:
        update = PolicyUpdated(
            report=report,
            parameters=self._policy_learner.parameters,
            optimizer=await finish(self._compute.learner.submit(self._policy_learner.state)),
            random_state=state,
            ledger=self._ledger.state(),
            bad_steps=self._progress.bad_steps,
            train_seconds=self._progress.train_seconds,
            trained_tokens=self._progress.trained_tokens,
            parts=self._parts(),
        )
        for outbox in self._updates:
            await outbox.send(update)
        with suppress(QueueClosed):  # the monitor has ended
            await self._reports.send(report)


def _group_id(outcome: GroupOutcome) -> int:
    return outcome.prompt.group_id


def _ends(groups: list[ScoredGroup], update: Update | None) -> tuple[list[TrainedGroup], list[Discarded]]:
    """Return the outcome of each group of an update."""
    if update is None:
        return [], []
    if not update.finite:
        return [], [group.discarded("not_finite", "loss or gradient was not finite") for group in groups]
    if not update.applied:
        return [], [group.discarded("zero_variance", "the gradient of the batch was exactly zero") for group in groups]
    rows = zip(groups, update.advantages, update.tokens or ((),) * len(groups), strict=True)
    return [TrainedGroup(scored=group, advantages=advantages, tokens=tokens) for group, advantages, tokens in rows], []
