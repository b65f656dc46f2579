"""A run of Clotho: all actors, the queues between them, and the services beside them.

    Prompt            RolloutGroup         ScoredGroup             PolicyUpdated
    prompter ──▶ generator ──▶ scorer ──▶ learner ──┬──▶ broadcaster
                    ▲                    ▲          ├──▶ checkpointer ──▶ disk
                    │   atropos_fetcher ─┘          └──▶ evaluator ──▶ monitor
                    └────────── WeightsReady (newest value)

With groups from environments, the atropos_fetcher replaces the three actors before the learner.
`python pipeline.py --profile local-m3` runs a profile; `--help` lists the most used flags.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the imports below, which take a second
    from importlib import import_module

    from training_run.main import main

    sys.exit(main(load_train=lambda: import_module("pipeline").train))

import gc
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog
from msgspec import Struct, structs, to_builtins
from rich.console import Console

from actors.atropos_fetcher import AtroposFetcher
from actors.broadcaster import Broadcaster
from actors.checkpointer import Checkpointer
from actors.evaluator import Evaluator, Pinned
from actors.generator import Generator
from actors.learner import LearnerActor
from actors.monitor import Monitor
from actors.prompter import Prompter
from actors.scorer import Scorer
from clotho.lanes.compute_thread import Compute, finish
from clotho.lanes.sampling_client import GroupSampler
from clotho.models.machine import compute_slots
from clotho.process import load_blas
from clotho.serving.server import ApiServer, base_url, listen
from clotho.settings.bounds import Off
from clotho.settings.model import FullMethod
from clotho.settings.server import HttpServer
from protocols.accounting import GroupSource
from protocols.batches import GroupSupply
from protocols.evaluation import EvalReport
from protocols.prompt import Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup
from protocols.step import LearnerReport, PolicyUpdated
from protocols.summary import RunSummary
from training_run.accounting import GroupAccounting, group_source
from training_run.attached import Wired
from training_run.directory.jsonl import JsonlWriter
from training_run.directory.run_directory import RunDirectory
from training_run.profile.schema import HeldOutEvaluation, Profile
from training_run.records.display import RunFacts, make_display
from training_run.records.event_log import EventSink, event_log
from training_run.records.forecast import RunForecast
from training_run.records.summary import print_summary
from training_run.run import RunContext
from training_run.run_monitor import RunMonitor
from training_run.serving import SERVER_RESTARTS, report_failure
from training_run.start.loading_server import loading_page, while_loading
from training_run.start.preflight import log_findings
from training_run.start.starting_point import checkpoint_records
from training_run.start.startup import build_context
from training_run.supervision.custom_actors import Channel, CustomActors
from training_run.supervision.early_end import EarlyEnd
from training_run.supervision.idle_sleep import no_idle_sleep
from training_run.supervision.lost_groups import Flow, LostGroups
from training_run.supervision.process_signals import finish_computation
from training_run.supervision.queues import Queue
from training_run.supervision.signals import handle_signals
from training_run.supervision.supervisor import (
    Child,
    Ending,
    Supervisor,
    permanent,
    temporary,
)

log = structlog.get_logger(actor="pipeline")

FIRST_CHECK_SECONDS = 2.0
"""How long the first update waits for the checks of the first batch; they take about a millisecond."""

GRACE_SECONDS = 10.0
"""Minimum time for the clean-up of a stopped actor."""


class Wiring(Struct, frozen=True, kw_only=True, eq=False):
    """The actors of the flow, receivers before senders; the group source among them; and what observes the run.

    sampling: names of the actors before the learner. lost: the groups that custom actors have lost.
    """

    children: list[Child]
    sampling: list[str]
    lost: LostGroups
    source: GroupSource
    accounting: GroupAccounting
    monitor: RunMonitor


class Rollouts(Struct, frozen=True, kw_only=True, eq=False):
    """The actors before the learner, receivers first, and their channels. first: the channel behind the source."""

    children: list[Child]
    channels: list[Channel[Any]]
    source: Child
    first: Channel[Any]


def wire(
    context: RunContext,
    *,
    console: Console,
    supervisor: Supervisor,
    early_end: EarlyEnd,
    events: EventSink,
) -> Wiring:
    """Construct all actors of the flow with the ends of their queues.

    early_end: stops sampling. events: the event log.
    """
    profile, capacity = context.profile, context.profile.queues
    limit = profile.monitor.watchdog_seconds
    lost = LostGroups(limit_seconds=limit, report=context.findings.add, end=supervisor.drain)
    custom = CustomActors(profile.actors, context.services(), lost)
    scored: Channel[GroupOutcome] = custom.channel("scored", capacity.scored)
    reports: Channel[LearnerReport | EvalReport] = custom.channel("reports", capacity.reports)
    receivers = ["broadcaster", "checkpointer", *(["evaluator"] if isinstance(profile.eval, HeldOutEvaluation) else [])]
    updates = {name: Queue[PolicyUpdated](f"updates.{name}", capacity=1) for name in receivers}
    attached = context.attached
    updates |= attached.updates
    if attached.groups is not None:
        rollouts = wire_environments(context, custom, scored, attached.groups)
    else:
        rollouts = wire_rollouts(context, custom, scored, attached.sampler or context.sampler.client)
    source = group_source(context, rollouts.source.actor, rollouts.first.queues[0])
    group_channels: list[Channel[Any]] = [*rollouts.channels, scored]
    accounting = GroupAccounting(context, source, [queue for channel in group_channels for queue in channel.queues])
    channels: list[Channel[Any]] = [scored, reports, *rollouts.channels]
    queues = [queue for channel in channels for queue in (*channel.queues, *channel.copies)]
    run_monitor = RunMonitor(
        context,
        queues=[*queues, *updates.values()],
        children=supervisor.status,
        events_lost=lambda: events.lost,
    )
    facts = context.facts(blas=load_blas())
    wired = Wired(queues=[*queues, *updates.values()], facts=facts)
    flow = [
        *(recorder(wired) for recorder in attached.recorders),
        wire_monitor(context, custom, reports, run_monitor, console, facts),
        *reports.children,
        *scored.children,
        *attached.receivers,
        *wire_training(context, custom, scored, reports, updates, accounting, early_end),
        *lost.children,
        *rollouts.children,
    ]
    sampling = [*scored.children, *lost.children, *rollouts.children]
    moving = [*updates.values(), *(queue for channel in group_channels for queue in channel.queues)]
    lost.flow = Flow(context.progress, moving, sampling, is_draining=lambda: early_end.is_draining)
    return Wiring(
        children=[*custom.added(), *flow],
        sampling=[child.name for child in sampling],
        lost=lost,
        source=source,
        accounting=accounting,
        monitor=run_monitor,
    )


def wire_monitor(
    context: RunContext,
    custom: CustomActors,
    reports: Channel[LearnerReport | EvalReport],
    run_monitor: RunMonitor,
    console: Console,
    facts: RunFacts,
) -> Child:
    """The monitor. Without the default monitor, no actor waits for the log files."""
    settings, directory = context.profile.monitor, context.directory
    monitor = custom.observer(
        "monitor",
        Monitor,
        inbox=reports.inbox(),
        gauges=run_monitor.gauges,
        display=make_display(settings.display, console, facts, run_monitor.gauges),
        metrics=JsonlWriter(directory.metrics),
        evaluations=JsonlWriter(directory.evaluations),
        rollouts=JsonlWriter(directory.rollouts) if settings.rollouts else None,
        logged=context.logged,
        findings=context.findings,
        observers=context.attached.observers,
        measures=context.attached.measures,
        forecast=RunForecast(context.plan, began=context.history.seconds),
        first_step=context.progress.step,
        seconds_before=context.history.seconds,
    )
    if not isinstance(monitor.actor, Monitor):
        context.logged.close()
    return monitor


def wire_training(
    context: RunContext,
    custom: CustomActors,
    scored: Channel[GroupOutcome],
    reports: Channel[LearnerReport | EvalReport],
    updates: Mapping[str, Queue[PolicyUpdated]],
    accounting: GroupAccounting,
    early_end: EarlyEnd,
) -> list[Child]:
    """The learner, and the receivers of its updates."""
    profile, policy = context.profile, context.policy
    learner = custom.actor(
        "learner",
        LearnerActor,
        inbox=scored.inbox(),
        updates=[queue.outbox() for queue in updates.values()],
        reports=reports.outbox(),
        compute=context.compute,
        policy_learner=context.policy_learner,
        settings=structs.replace(profile.learner, max_staleness=profile.max_staleness),
        ledger=context.ledger,
        progress=context.progress,
        replacements=context.progress.replacements,
        logged=context.logged,
        hooks=context.attached.hooks,
        parts=context.attached.parts.collect,
        steps=profile.steps,
        synchronous=not profile.asynchronous,
        lag=profile.rollouts.lag,
        from_environments=context.attached.groups is not None,
        first_check_seconds=FIRST_CHECK_SECONDS,
        stop_sampling=early_end.stop_sampling,
    )
    broadcaster = custom.actor(
        "broadcaster",
        Broadcaster,
        inbox=updates["broadcaster"].inbox(),
        weights=context.weights,
        compute=context.compute,
        policy=policy,
        engine=context.sampler.engine,
        settings=profile.parity,
        engine_settings=profile.engine,
        temperature=profile.sampling.temperature,
        parity_prompt=context.prompts.prompt(0).tokens,
        swap_times=context.weights.swap_times,
        learner=profile.learner,
        dropout=0.0 if isinstance(profile.policy.method, FullMethod) else profile.policy.method.dropout,
        forcing=context.policy_learner.forcing,
    )
    path = profile.checkpoint.adapter_path
    checkpointer = custom.actor(
        "checkpointer",
        Checkpointer,
        inbox=updates["checkpointer"].inbox(),
        directory=context.directory.checkpoints,
        newest=context.directory.newest_checkpoint,
        histories=context.directory.histories,
        adapter_directories=[context.directory.adapters, *([Path(path).expanduser()] if path else [])],
        adapter_config=policy.adapter_config,
        run_id=context.directory.run_id,
        settings=profile.checkpoint,
        best=context.best,
        state=accounting.run_state,
        logged=context.logged,
        parameters=context.policy_learner.parameters,
        loadable=lambda parameters: finish(context.compute.learner.submit(lambda: policy.loadable(parameters))),
        records=checkpoint_records(profile, context.directory),
        parts=context.attached.parts,
    )
    evaluators = []
    if isinstance(profile.eval, HeldOutEvaluation):
        evaluators = [wire_evaluator(context, profile.eval, custom, updates["evaluator"], reports)]
    return [*evaluators, checkpointer, broadcaster, learner]


def wire_evaluator(
    context: RunContext,
    settings: HeldOutEvaluation,
    custom: CustomActors,
    updates: Queue[PolicyUpdated],
    reports: Channel[LearnerReport | EvalReport],
) -> Child:
    """The evaluator. After a resume it evaluates the base policy only if that was not done before."""
    profile, step, trained = context.profile, context.progress.step, context.policy_learner
    last = context.history.after
    start = Pinned(
        step=step,
        version=trained.version,
        parameters=trained.parameters,
        final=last is not None and last.step == step,
    )
    base = None if context.start.initial is None else Pinned(step=0, version=0, parameters=context.start.initial)
    return custom.actor(
        "evaluator",
        Evaluator,
        inbox=updates.inbox(),
        outbox=reports.outbox(),
        thread=context.compute.evaluation,
        policy=context.policy,
        held_out=context.held_out,
        episodes=context.attached.episodes,
        sampling=profile.sampling,
        seed=profile.seed,
        settings=settings,
        engine=profile.engine,
        turn_seconds=profile.learner.max_turn_ms / 1000.0,
        base=start if step == 0 and context.history.before is None else base,
        start=start,
        steps=profile.steps,
        reports=context.history.reports,
    )


def wire_rollouts(
    context: RunContext, custom: CustomActors, scored: Channel[GroupOutcome], sampler: GroupSampler
) -> Rollouts:
    """The actors that make groups from the run's own dataset."""
    profile, learner = context.profile, context.profile.learner
    prompts: Channel[Prompt | Discarded] = custom.channel("prompts", profile.queues.prompts)
    rollouts: Channel[RolloutGroup | Discarded] = custom.channel("rollouts", profile.queues.rollouts)
    limit, chooser = context.replaced_groups_limit, context.attached.chooser
    rule = context.staleness_rule
    scorer = custom.actor(
        "scorer",
        Scorer,
        inbox=rollouts.inbox(),
        outbox=scored.outbox(),
        rewards=context.scoring,
        concurrency=context.rewards.concurrency,
    )
    generator = custom.actor(
        "generator",
        Generator,
        inbox=prompts.inbox(),
        outbox=rollouts.outbox(),
        rule=rule,
        source=context.rollouts(sampler, group_size=profile.sampling.group_size),
        ended=context.ledger.ended,
        groups=limit,
        one_by_one=profile.rollouts.lag > 0,
    )
    prompter = custom.actor(
        "prompter",
        Prompter,
        outbox=prompts.outbox(),
        make=context.prompts.prompt if chooser is None else context.choose_prompt,
        group_ids=context.ledger.unended(None if limit else context.total_groups + context.progress.replacements.value),
        batch_size=learner.batch_size,
        replacements=context.progress.replacements,
        ended=context.ledger.ended,
        groups=limit,
        prompted_until=context.start.state.prompted if context.start.state else 0,
        may_start=rule.wait if chooser is not None and chooser.waits else None,
    )
    children = [*rollouts.children, *prompts.children, scorer, generator, prompter]
    return Rollouts(children=children, channels=[prompts, rollouts], source=prompter, first=prompts)


def wire_environments(
    context: RunContext, custom: CustomActors, scored: Channel[GroupOutcome], supply: GroupSupply[Any]
) -> Rollouts:
    """The actor that receives groups from environments."""
    profile, state = context.profile, context.start.state
    fetcher = custom.actor(
        "atropos_fetcher",
        AtroposFetcher,
        outbox=scored.outbox(),
        supply=supply,
        weights=context.weights,
        replacements=context.progress.replacements,
        first_group=state.prompted if state else 0,
        received=state.received if state else {},
        lost=state.in_flight if state else {},
        ended=context.ledger.ended,
        groups=context.total_groups,
        batch_size=profile.learner.batch_size,
        max_batches_ahead=profile.max_batches_ahead,
    )
    return Rollouts(children=[fetcher], channels=[], source=fetcher, first=scored)


def wire_services(context: RunContext, monitor: RunMonitor, listener: socket.socket | None) -> list[Child]:
    """The children beside the flow of groups: the HTTP server, guards of the engine, and those of attachments."""
    guards = [*monitor.serving.guards(context.profile.monitor), *context.attached.services]
    settings = context.profile.server
    if listener is None or isinstance(settings, Off):
        return guards
    server = ApiServer(monitor.server_context(settings), listener=listener, on_request=monitor.count_request)
    return [permanent(server, SERVER_RESTARTS), *guards]


def has_failed(summary: RunSummary, lost: LostGroups, early_end: EarlyEnd) -> bool:
    """Whether a run that came to its end trained nothing, lost groups, ended early, or did not count every group."""
    if not summary.balance.holds:
        hint = "an actor in the place of the prompter or the learner counts otherwise"
        log.error("groups_not_counted", balance=str(summary.balance), hint=hint)
    return bool(summary.is_untrained or lost.count or early_end.causes or not summary.balance.holds)


async def train(profile: Profile, directory: RunDirectory, console: Console) -> int:
    """Run a profile to its end, and return the exit status.

    It is 0, 1 if no update was applied, groups were lost or sampling stopped early, or 128 plus the number of the
    signal that stopped the run. Raises ClothoError if the profile is invalid or the run fails.
    """
    with ExitStack() as stack:
        events = stack.enter_context(event_log(console))
        server = profile.server
        listener = stack.enter_context(listen(server)) if isinstance(server, HttpServer) else None
        compute = Compute(decode_share=profile.engine.decode_share, slots=compute_slots())
        compute.start()
        stack.callback(compute.stop)
        address = base_url(listener) if listener else ""
        slow_seconds = profile.monitor.watchdog_seconds
        loading = build_context(profile, directory, compute, stack, address=address, slow_seconds=slow_seconds)
        context = await while_loading(listener, server, loading, page=loading_page(server))
        stack.enter_context(no_idle_sleep(enabled=profile.monitor.prevent_sleep))
        events.open(directory.log)
        for warning in context.start.warnings:
            log.warning(warning)
        log_findings(context.start.findings)
        if context.start.origin is not None:
            log.info("run_started_from", **to_builtins(context.start.origin))
        elif context.resumed_from is not None:
            log.info("run_resumed", step=context.resumed_from)
        grace = server.shutdown_seconds if isinstance(server, HttpServer) else 0.0
        supervisor = Supervisor(on_failure=report_failure, grace_seconds=max(GRACE_SECONDS, grace))
        early_end = EarlyEnd(supervisor, limit_seconds=profile.monitor.drain_seconds)
        wiring = wire(context, console=console, supervisor=supervisor, early_end=early_end, events=events)
        early_end.watch(
            wiring.sampling,
            last_progress=lambda: context.progress.last_update,
            waiting_for=lambda: wiring.monitor.gauges().waiting_for,
        )
        children = [
            temporary(early_end),
            *wire_services(context, wiring.monitor, listener),
            *wiring.children,
            *context.attached.senders,
        ]

        def drain() -> None:
            early_end.drain_began()
            wiring.source.drain()
            log.warning("draining", hint="the run ends after the groups in flight; interrupt again to stop at once")

        gc.collect()
        gc.freeze()  # a full collection of the loaded objects would pause decoding and swaps for a tenth of a second
        async with handle_signals(supervisor) as signals:
            ending = await supervisor.run(children, on_drain=drain)
        log.info("run_statistics", **wiring.monitor.statistics())
        finished = ending is not Ending.STOPPED
        best = context.best.finish(profile.checkpoint.keep_last) if finished else context.best.update()
        complete = finished and not early_end.causes
        summary = wiring.monitor.summary(wiring.accounting, best=best, complete=complete)
        print_summary(console, summary)
        finish_computation(compute, signals)
        return signals.exit_status or int(has_failed(summary, wiring.lost, early_end))
