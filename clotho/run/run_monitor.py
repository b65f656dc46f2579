"""The state of a run as seen from outside: metrics, health, and the final summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from msgspec import structs

from clotho.config.bounds import Off
from clotho.config.schema import HttpServer
from clotho.models.machine import peak_memory
from clotho.monitoring.summary import resume_command
from clotho.monitoring.terminal_text import relative_path
from clotho.run.accounting import GroupAccounting
from clotho.run.context import RunContext
from clotho.runtime.queues import Queue
from clotho.runtime.supervisor import ChildState, ChildStatus
from clotho.runtime.watchdog import EngineGuard
from clotho.serving.services import (
    EngineSnapshot,
    HealthReport,
    NullSampleLog,
    QueueSnapshot,
    RunSnapshot,
    ServerContext,
)
from protocols.summary import QueueGauge, RunGauges, RunSummary

log = structlog.get_logger(actor="pipeline")


class RunMonitor:
    """Reads the state that actors share through the context, and counts events that belong to no actor.

    All methods but the coroutines return at once.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        queues: Sequence[Queue[Any]],
        children: Callable[[], dict[str, ChildStatus]],
        events_lost: Callable[[], int] = lambda: 0,
    ) -> None:
        """queues: all queues of the run. children: status of the supervised actors, by name.

        events_lost: number of events that the event log could not write.
        """
        self._context, self._queues, self._children = context, queues, children
        self._events_lost = events_lost
        self._began = time.monotonic()
        self._stalled = False
        self._api_requests = 0

    def count_request(self) -> None:
        """Count a request that the HTTP server has admitted."""
        self._api_requests += 1

    def on_stall(self, seconds: float) -> None:
        """Record that the compute thread has made no progress for `seconds`."""
        self._stalled = True
        log.error("compute_thread_stalled", seconds=round(seconds, 1))

    def on_recovery(self) -> None:
        """Record that the compute thread makes progress again."""
        self._stalled = False
        log.warning("compute_thread_recovered")

    def gauges(self) -> RunGauges:
        """Current metrics for the display and metrics.jsonl."""
        context, swaps = self._context, self._context.swap_times
        rates = context.executor.rates()
        return RunGauges(
            queues=tuple(
                QueueGauge(name=queue.name, depth=queue.depth, capacity=queue.capacity) for queue in self._queues
            ),
            tokens_sampled=context.engine.stats().tokens_sampled,
            decode_seconds=rates.seconds,
            decode_rate_idle=rates.idle or None,
            decode_rate_learning=rates.learning or None,
            rows_running=context.engine.running,
            api_requests=self._api_requests,
            swaps=swaps.count,
            swap_seconds_last=swaps.last,
            swap_seconds_median=swaps.median,
            swap_seconds_max=swaps.longest,
            peak_memory_bytes=peak_memory(),
        )

    def health(self) -> HealthReport:
        """The state for /health. A stalled compute thread and a decode engine that restarts are outages.

        A failed temporary actor is not.
        """
        children = {name: status.state.value for name, status in self._children().items()}
        failed = sorted(name for name, state in children.items() if state == ChildState.FAILED)
        busy = max(0.0, time.monotonic() - self._context.executor.busy_since)
        if self._stalled:
            detail = f"the compute thread has made no progress for {busy:.0f} seconds"
            return HealthReport(status="stalled", detail=detail, children=children, progress_seconds=busy)
        if children.get(EngineGuard.name) == ChildState.RESTARTING:
            detail = f"{EngineGuard.name} restarts after a failure"
            return HealthReport(status="restarting", detail=detail, children=children, progress_seconds=busy)
        detail = f"failed: {', '.join(failed)}; the server and the training continue" if failed else ""
        return HealthReport(status="ok", detail=detail, children=children, progress_seconds=busy)

    def snapshot(self) -> RunSnapshot:
        """Current metrics for /metrics."""
        context, report = self._context, self._context.progress.last_report
        groups = context.ledger.state()
        rewards = [reward for group in report.trained for reward in group.scored.rewards] if report else []
        staleness = report.staleness if report else ()
        return RunSnapshot(
            engine=self._engine_snapshot(),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            staleness_mean=sum(staleness) / len(staleness) if staleness else None,
            staleness_max=max(staleness, default=None),
            learner_turn_seconds=report.longest_turn_seconds if report else None,
            swap_seconds=context.swap_times.last,
            groups_trained=groups.trained,
            discarded=groups.discarded,
            environments_trained={name: counts.trained for name, counts in groups.sources.items()},
            environments_discarded={name: counts.ended - counts.trained for name, counts in groups.sources.items()},
            queues=tuple(QueueSnapshot(**structs.asdict(queue.stats())) for queue in self._queues),
            restarts={name: status.restarts for name, status in self._children().items()},
            events_lost=self._events_lost(),
        )

    def _engine_snapshot(self) -> EngineSnapshot:
        stats = self._context.engine.stats()
        return EngineSnapshot(
            sequences_running=stats.running_rows,
            sequences_waiting=stats.waiting_rows,
            cache_usage=stats.cache_tokens / self._context.profile.engine.kv_cache_tokens,
            prefix_queries=stats.prefix_hits + stats.prefix_misses,
            prefix_hits=stats.prefix_hits,
            prefix_tokens=stats.prefix_cache_tokens,
            prefill_tokens=stats.prefill_tokens,
            decode_steps=stats.decode_steps,
            tokens_sampled=stats.tokens_sampled,
            finished=stats.finished,
            failed=stats.failed,
            listener_errors=stats.listener_errors,
        )

    def server_context(self, settings: HttpServer) -> ServerContext:
        """The HTTP server's interface to the run."""
        context, profile = self._context, self._context.profile
        return ServerContext(
            sampler=context.sampler,
            tokenizer=context.policy.tokenizer,
            settings=settings,
            sampling=profile.sampling,
            prompt_logprobs=context.prompt_logprobs,
            weights=lambda: context.weights.value,
            health=self.health,
            snapshot=self.snapshot,
            context_length=context.policy.context_length,
            vocab_size=context.policy.vocab_size,
            sample_log=NullSampleLog() if isinstance(profile.atropos, Off) else context.sample_log,
            record_supports=not isinstance(profile.atropos, Off),
        )

    def summary(self, accounting: GroupAccounting, *, complete: bool) -> RunSummary:
        """The end of the run. complete: every actor has returned."""
        context, progress = self._context, self._context.progress
        first = next((report for report in context.evaluations if report.step == 0 and not report.final), None)
        last = next((report for report in context.evaluations if report.final), None)
        return RunSummary(
            steps=progress.step,
            planned_steps=context.profile.steps,
            version=context.policy_learner.version,
            before=first or context.history.before,
            after=last or context.history.after,
            balance=accounting.balance(complete=complete),
            gauges=self.gauges(),
            training_seconds=progress.last_update - progress.began,
            update_seconds=progress.train_seconds,
            evaluation_seconds=sum(report.seconds for report in context.evaluations),
            total_seconds=time.monotonic() - self._began,
            base_model=relative_path(context.profile.model.path),
            adapter=relative_path(context.directory.adapters),
            resume_command=resume_command(context.directory.profile),
            history_gaps=context.history_gaps,
        )
