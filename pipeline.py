"""A run of Clotho: the whole topology on one screen.

    Prompt            RolloutGroup         ScoredGroup             PolicyUpdated
    prompter ──▶ generator ──▶ scorer ──▶ learner ──┬──▶ broadcaster
                    ▲                    ▲          ├──▶ checkpointer ──▶ disk
                    │   atropos_fetcher ─┘          └──▶ evaluator ──▶ monitor
                    └────────── WeightsReady (newest wins)

The fetcher stands in the place of the three boxes before the learner where groups come from environments.
`python pipeline.py --profile local-m3`; `--help` lists every setting.
"""

from __future__ import annotations

import sys

from clotho.run.cli import prepare_or_exit

if __name__ == "__main__":  # before the imports below, which take a second
    prepared = prepare_or_exit(sys.argv[1:])

import gc
import socket
from contextlib import ExitStack

import structlog
from msgspec import structs
from rich.console import Console

from clotho import BLAS
from clotho.atropos.processes import AtroposServer, Environment
from clotho.config.schema import Profile
from clotho.monitoring.event_log import event_log
from clotho.monitoring.summary import print_summary
from clotho.run import build_actors as boxes
from clotho.run.context import RunContext
from clotho.run.startup import Components, assemble
from clotho.runtime.child import Child, permanent
from clotho.runtime.compute_thread import ComputeExecutor
from clotho.runtime.plugins import CustomActors
from clotho.runtime.queues import Queue
from clotho.runtime.signals import handle_signals
from clotho.runtime.supervisor import Ending, Supervisor
from clotho.runtime.watchdog import Guard, Watchdog
from clotho.serving.server import ApiServer, listen
from clotho.storage.run_directory import RunDirectory
from protocols.queues import Outbox
from protocols.rollout import GroupOutcome
from protocols.step import PolicyUpdated

log = structlog.get_logger(actor="pipeline")


def wire(parts: Components, session: RunContext) -> list[Child]:
    """The topology: every arrow, then every box with the ends it holds. Readers start before their writers."""
    profile, size = parts.profile, parts.profile.queues
    custom = CustomActors(profile.actors, session.services)
    scored, reports = custom.arrow("scored", size.scored), custom.arrow("reports", size.reports)
    audience = ["broadcaster", "checkpointer", *(["evaluator"] if profile.eval.enabled else [])]
    updates = {name: Queue[PolicyUpdated](f"updates.{name}", capacity=1) for name in audience}
    session.measure([box for arrow in (scored, reports) for box in arrow.mailboxes])
    session.measure(updates.values())

    flow = [custom.box("monitor", boxes.monitor(parts, session), inbox=reports.reader())]
    flow += [child for arrow in (reports, scored) for child in arrow.children]
    if profile.eval.enabled:
        measured = updates["evaluator"].reader()
        flow.append(custom.box("evaluator", boxes.evaluator(parts), inbox=measured, outbox=reports.writer()))
    kept, served = updates["checkpointer"].reader(), updates["broadcaster"].reader()
    flow.append(custom.box("checkpointer", boxes.checkpointer(parts, session), inbox=kept))
    flow.append(custom.box("broadcaster", boxes.broadcaster(parts, session), inbox=served))
    learned = [mailbox.writer() for mailbox in updates.values()]
    judged, told = scored.reader(), reports.writer()
    flow.append(custom.box("learner", boxes.learner(parts, session), inbox=judged, updates=learned, reports=told))
    if profile.atropos.enabled:
        flow.append(custom.box("atropos_fetcher", boxes.atropos_fetcher(parts, session), outbox=scored.writer()))
    else:
        flow += wire_own_prompts(parts, session, custom, scored.writer())
    session.observe(custom.boxes)
    return [*custom.free_standing(), *flow]


def wire_own_prompts(
    parts: Components, session: RunContext, custom: CustomActors, scored: Outbox[GroupOutcome]
) -> list[Child]:
    """The boxes before the learner, where the run asks its own dataset."""
    size = parts.profile.queues
    prompts, rollouts = custom.arrow("prompts", size.prompts), custom.arrow("rollouts", size.rollouts)
    session.measure([box for arrow in (prompts, rollouts) for box in arrow.mailboxes])
    answered, asked = rollouts.writer(), prompts.reader()
    return [
        *rollouts.children,
        *prompts.children,
        custom.box("scorer", boxes.scorer(parts), inbox=rollouts.reader(), outbox=scored),
        custom.box("generator", boxes.generator(parts, session), inbox=asked, outbox=answered),
        custom.box("prompter", boxes.prompter(parts, session), outbox=prompts.writer()),
    ]


def services(parts: Components, session: RunContext, listener: socket.socket | None) -> list[Child]:
    """What serves as long as the run goes on: the HTTP API, and who watches the compute thread."""
    watchdog = Watchdog(
        "watchdog",
        lambda: parts.executor.busy_since,
        limit_seconds=parts.profile.monitor.watchdog_seconds,
        on_stall=session.stall,
        on_recovered=session.recover,
    )
    guard = Guard("decode engine", parts.engine_broken)
    watched = [permanent(watchdog), permanent(guard)]
    if listener is None:
        return watched
    server = ApiServer(session.server_context(), listener=listener)
    session.api_requests = lambda: server.requests
    return [permanent(server, max_restarts=3), *watched]


def atropos(parts: Components, session: RunContext) -> tuple[list[Child], list[Child]]:
    """The processes of Atropos: its API server, which starts before the flow, and the environments, after it."""
    profile, logs = parts.profile, parts.directory.path / "atropos"
    server = AtroposServer(profile, directory=logs) if profile.atropos.python and not profile.atropos.url else None
    session.atropos_url = server.url if server else profile.atropos.url
    environments = [
        Environment(
            section,
            profile,
            server_url=session.atropos_url,
            server_starts=lambda: server.starts if server else 0,
            policy_url=session.address,
            directory=logs,
        )
        for section in profile.environments
    ]
    return [permanent(server)] if server else [], [permanent(environment) for environment in environments]


async def train(profile: Profile, directory: RunDirectory, console: Console) -> int:
    """Run a profile to its end; the exit status: 0, or 128 and the signal's number of a run that was stopped at once.

    Raises ClothoError for whatever is wrong with the profile or the run.
    """
    with ExitStack() as ends:
        listener = ends.enter_context(listen(profile.server)) if profile.server.enabled else None
        executor = ComputeExecutor(decode_share=profile.engine.decode_share)
        executor.start()
        ends.callback(executor.stop)
        parts = await assemble(profile, directory, executor)
        ends.callback(parts.rewards.close)
        ends.enter_context(event_log(directory.log, console))
        for warning in parts.warnings:
            log.warning(warning)
        if parts.resumed_from is not None:
            log.info("run_resumed", step=parts.resumed_from)
        session = RunContext(parts, console, blas=BLAS, listener=listener)
        servers, environments = atropos(parts, session)
        supervisor = Supervisor(
            [*services(parts, session, listener), *servers, *wire(parts, session), *environments],
            on_failure=session.report_failure,
            on_drain=session.drain,
        )
        session.children = supervisor.status
        gc.collect()
        gc.freeze()  # what was loaded stays; a full collection would halt decode and swaps for a tenth of a second
        async with handle_signals(supervisor) as signals:
            ending = await supervisor.run()
        log.info("run_statistics", **structs.asdict(session.snapshot()))
        print_summary(console, session.summary(complete=ending is not Ending.STOPPED))
        return signals.exit_status


if __name__ == "__main__":
    sys.exit(prepared.start(train))
