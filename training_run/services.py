"""The children beside the flow of groups: the HTTP server, guards of the engine, and those of attachments."""

from __future__ import annotations

import socket

from clotho.serving.server import ApiServer
from clotho.settings.bounds import Off
from training_run.run import RunContext
from training_run.run_monitor import RunMonitor
from training_run.supervision.supervisor import Child, RestartPolicy, permanent

SERVER_RESTARTS = RestartPolicy(max_restarts=3)


def wire_services(context: RunContext, monitor: RunMonitor, listener: socket.socket | None) -> list[Child]:
    """The HTTP server, the watchdog of the compute threads, the guard of the engine, and what attachments add."""
    guards = [
        *monitor.serving.guards(context.profile.monitor),
        *context.attached.services,
    ]
    settings = context.profile.server
    if listener is None or isinstance(settings, Off):
        return guards
    server = ApiServer(monitor.server_context(settings), listener=listener, on_request=monitor.count_request)
    return [permanent(server, SERVER_RESTARTS), *guards]
