"""The state of a run as seen from outside: metrics, health, and the final summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from msgspec import structs
from prometheus_client.core import Metric

from clotho.process import usable_cores
from clotho.serving.metrics import counter, gauge, gauges
from clotho.serving.services import NullSampleLog, ServedModel, ServerContext
from clotho.settings.model import FullMethod
from clotho.settings.server import HttpServer
from protocols.accounting import LedgerState
from protocols.checkpoint import BestCheckpoint
from protocols.sampling import BASE
from protocols.step import StepReport, WeightsReady
from protocols.summary import QueueGauge, RunGauges, RunSummary
from training_run.accounting import GroupAccounting
from training_run.directory.checkpoints import checkpoint_path
from training_run.machine import peak_memory
from training_run.records.summary import resume_command
from training_run.records.terminal_text import relative_path
from training_run.records.waiting import GroupsInFlight
from training_run.run import RunContext
from training_run.serving import ServingState, names_of
from training_run.supervision.queues import Queue, QueueStats
from training_run.supervision.supervisor import ChildStatus


def training_metrics(groups: LedgerState, report: StepReport | None, swap_seconds: float | None) -> Iterator[Metric]:
    """Yield what the learner has done. A value that has not been measured yet is left out.

    report: of the last step. swap_seconds: duration of the last weight swap.
    """
    rewards = [reward for group in report.trained for reward in group.scored.rewards] if report else []
    staleness = report.staleness if report else ()
    turn = report.longest_turn_seconds if report else None
    for name, help_text, value in (
        ("reward_mean", "Mean reward of the last batch.", fmean(rewards) if rewards else None),
        ("staleness_mean", "Mean staleness of the last batch, in versions.", fmean(staleness) if staleness else None),
        ("staleness_max", "Largest staleness of the last batch, in versions.", max(staleness, default=None)),
        ("learner_turn_seconds", "Longest turn of the last update.", turn),
        ("swap_seconds", "Duration of the last weight swap.", swap_seconds),
    ):
        if value is not None:
            yield gauge(f"clotho_{name}", help_text, value)
    yield counter("clotho_groups_trained", "Groups trained on.", {"": groups.trained})
    yield counter("clotho_groups_discarded", "Groups discarded.", groups.discarded, by="reason")
    if sources := groups.sources:
        trained = {name: counts.trained for name, counts in sources.items()}
        discarded = {name: counts.ended - counts.trained for name, counts in sources.items()}
        yield counter(
            "clotho_environment_groups_trained", "Groups of an environment trained on.", trained, by="environment"
        )
        yield counter(
            "clotho_environment_groups_discarded", "Groups of an environment discarded.", discarded, by="environment"
        )


def queue_metrics(queues: Sequence[QueueStats]) -> Iterator[Metric]:
    """Yield depth, totals and waiting times of each queue."""
    for name, help_text, values in (
        ("depth", "Messages in a queue.", {one.name: one.depth for one in queues}),
        ("capacity", "Capacity of a queue, in messages.", {one.name: one.capacity for one in queues}),
    ):
        yield gauges(f"clotho_queue_{name}", help_text, values)
    producers = {one.name: one.send_wait_seconds for one in queues}
    consumers = {one.name: one.receive_wait_seconds for one in queues}
    for name, help_text, totals in (
        ("sent_messages", "Messages sent to a queue.", {one.name: one.sent for one in queues}),
        ("received_messages", "Messages taken from a queue.", {one.name: one.received for one in queues}),
        ("send_wait_seconds", "Time that producers waited for room in a queue.", producers),
        ("receive_wait_seconds", "Time that consumers waited for a message of a queue.", consumers),
    ):
        yield counter(f"clotho_queue_{name}", help_text, totals, by="queue")


class RunMonitor:
    """Reads the state that actors share through the context, and counts events that belong to no actor.

    serving: the state of the served engine. All methods return at once.
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
        self._context, self._queues, self._events_lost = context, queues, events_lost
        self._groups = GroupsInFlight(context, queues)
        self._began = time.monotonic()
        self._api_requests = 0
        self.serving = ServingState(
            context.sampler,
            children=children,
            continues="the server and the training continue",
        )

    def count_request(self) -> None:
        """Count a request that the HTTP server has admitted."""
        self._api_requests += 1

    def gauges(self) -> RunGauges:
        """Current metrics for the display and metrics.jsonl."""
        context, swaps = self._context, self._context.weights.swap_times
        rates, stats = context.compute.decode.rates(), context.sampler.engine.stats()
        return RunGauges(
            queues=tuple(
                QueueGauge(name=queue.name, depth=queue.depth, capacity=queue.capacity) for queue in self._queues
            ),
            tokens_sampled=stats.tokens_sampled + context.attached.sampled_elsewhere(),
            tokens_decoded=stats.tokens_sampled,
            decode_steps=stats.decode_steps,
            decode_seconds=rates.seconds,
            decode_rate_idle=rates.idle or None,
            decode_rate_learning=rates.learning or None,
            decode_share_learning=rates.share or None,
            rows_running=stats.running_rows,
            rows_limit=stats.rows_limit,
            api_requests=self._api_requests,
            cache_holders=stats.cache_holders,
            groups_scored_at_once=context.rewards.concurrency,
            scorer_full_seconds=context.rewards.full_seconds,
            swaps=swaps.count,
            swap_seconds_last=swaps.last,
            swap_seconds_median=swaps.median,
            swap_seconds_max=swaps.longest,
            peak_memory_bytes=peak_memory(),
            findings=context.findings.now,
            waiting_for="" if context.progress.updating else self._groups.waiting_for(),
        )

    def statistics(self) -> dict[str, Any]:
        """Return the waiting times of the queues and the counters of the engine, for the end of the event log."""
        queues = [structs.asdict(queue.stats()) for queue in self._queues]
        return {"queues": queues, "engine": structs.asdict(self._context.sampler.engine.stats())}

    def metrics(self, model: str, timed_out: Mapping[str, int]) -> Iterator[Metric]:
        """Yield metrics for /metrics. model, timed_out: as `engine_metrics`."""
        yield from self.serving.metrics(model, timed_out)
        context, swaps = self._context, self._context.weights.swap_times
        yield from training_metrics(context.ledger.state(), context.progress.last_report, swaps.last)
        yield from queue_metrics([queue.stats() for queue in self._queues])
        yield counter("clotho_log_events_lost", "Events that could not be logged.", {"": self._events_lost()})
        for measure in context.attached.metrics:
            yield from measure()

    def server_context(self, settings: HttpServer) -> ServerContext:
        """The HTTP server's interface to the run."""
        context, profile = self._context, self._context.profile
        adapted = not isinstance(profile.policy.method, FullMethod)
        path, files = relative_path(profile.model.path), context.policy.files
        policy = ServedModel(
            id=settings.model_name, parent=path if adapted else None, root=path, weights=lambda: context.weights.value
        )
        base = ServedModel(
            id=path,
            aliases=names_of(profile.model.path, files) - {path},
            root=path,
            weights=partial(WeightsReady, version=0, step=0, fingerprint=context.inputs["model"]),
            source=BASE,
        )
        fixed = (policy, base) if context.policy.keeps_base else (policy,)
        return ServerContext(
            models=lambda: fixed,
            engine=self.serving.engine_access(),
            base_model=path,
            sampler=context.sampler.client,
            tokenizer=context.policy.tokenizer,
            settings=settings,
            sampling=profile.sampling,
            prompt_logprobs=self.serving.score,
            weights=lambda: context.weights.value,
            health=lambda: structs.replace(self.serving.health(), findings=context.findings.now),
            context_length=context.policy.context_length,
            vocab_size=context.policy.vocab_size,
            measure=partial(self.metrics, settings.model_name),
            sample_log=context.attached.samples or NullSampleLog(),
            record_supports=context.attached.samples is not None,
            record_routes=context.attached.samples is not None and profile.learner.router_replay != "off",
            run_directory=context.directory.path,
        )

    def summary(self, accounting: GroupAccounting, *, best: BestCheckpoint | None = None, complete: bool) -> RunSummary:
        """The end of the run. best: the best checkpoint. complete: every actor has returned."""
        context, progress = self._context, self._context.progress
        first = next((report for report in context.history.reports if report.step == 0 and not report.final), None)
        last = next((report for report in context.history.reports if report.final), None)
        between = [report for report in context.history.reports if report.step > 0 and not report.final]
        return RunSummary(
            steps=progress.step,
            planned_steps=context.profile.steps,
            version=context.policy_learner.version,
            before=first or context.history.before,
            after=last or context.history.after,
            balance=accounting.balance(complete=complete),
            gauges=self.gauges(),
            training_seconds=progress.last_update - progress.began,
            computing=progress.computing,
            cores=usable_cores(),
            evaluation_seconds=sum(report.seconds for report in between),
            other_evaluation_seconds=sum(report.seconds for report in context.history.reports if report not in between),
            total_seconds=time.monotonic() - self._began,
            base_model=relative_path(context.profile.model.path),
            adapter=relative_path(context.directory.adapters),
            best=best,
            best_path=relative_path(checkpoint_path(context.directory.checkpoints, best.step)) if best else "",
            resume_command=resume_command(context.directory.profile),
            history_gaps=context.start.gaps,
            findings=context.findings.now,
            files=tuple(context.directory.written()),
            is_adapter=not isinstance(context.profile.policy.method, FullMethod),
            run_dir=relative_path(context.directory.path),
            profile=relative_path(context.directory.profile),
            balances={name: balance() for name, balance in context.attached.balances.items()},
        )
