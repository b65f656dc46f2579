"""The children beside the flow of groups: the HTTP server, guards of engine and machine, and what Atropos needs."""

from __future__ import annotations

import socket

from attachments.atropos.batch_source import running_url
from attachments.atropos.processes import AtroposServer, Environment
from clotho.serving.server import ApiServer
from clotho.settings.bounds import Off
from training_run.attachment import engine_watches
from training_run.profile.schema import StartedServer
from training_run.run import RunContext
from training_run.run_monitor import RunMonitor
from training_run.supervision.supervisor import Child, RestartPolicy, permanent
from training_run.supervision.watchdog import ENGINE_RESTARTS

SERVER_RESTARTS = RestartPolicy(max_restarts=3)


def wire_services(context: RunContext, monitor: RunMonitor, listener: socket.socket | None) -> list[Child]:
    """The HTTP server, the watchdog of the compute threads, the guard of the engine, and what attachments add."""
    guards = [
        permanent(monitor.serving.watchdog(context.profile.monitor)),
        *engine_watches(context.compute, context.engine),
        permanent(context.engine_guard(), ENGINE_RESTARTS),
        *context.attached.services,
    ]
    settings = context.profile.server
    if listener is None or isinstance(settings, Off):
        return guards
    server = ApiServer(monitor.server_context(settings), listener=listener, on_request=monitor.count_request)
    return [permanent(server, SERVER_RESTARTS), *guards]


def wire_atropos(context: RunContext) -> tuple[AtroposServer | None, list[Child]]:
    """The Atropos API server, if the run starts one, and the processes of the environments."""
    profile, logs = context.profile, context.directory.path / "atropos"
    atropos = profile.atropos
    server = AtroposServer(atropos.python, directory=logs) if isinstance(atropos, StartedServer) else None
    environments = [
        Environment(
            section,
            profile,
            server_url=server.url if server else running_url(profile),
            server_starts=lambda: server.starts if server else 0,
            policy_url=context.address,
            directory=logs,
        )
        for section in profile.environments
    ]
    return server, [permanent(environment) for environment in environments]
