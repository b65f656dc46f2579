"""The command `view`: the dashboard of finished runs and of runs of other processes, in a browser or as one file."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
from msgspec.structs import replace
from rich.console import Console
from starlette.applications import Starlette
from starlette.middleware import Middleware

from attachments.dashboard.export import DEFAULT_MEGABYTES, export
from attachments.dashboard.paths import routes
from attachments.dashboard.run_files import is_live
from clotho.serving.auth import ClientMiddleware, Clients, LocalOriginMiddleware
from clotho.serving.errors import EXCEPTION_HANDLERS
from clotho.serving.limits import UnreadBodyMiddleware
from clotho.serving.parts import Handlers
from clotho.serving.server import BACKLOG, Connections, base_url, listen
from clotho.serving.struct_types import prepare_struct_types
from clotho.settings.server import HttpServer, is_loopback
from protocols.errors import ProfileError, RunDirectoryError, ServerError, did_you_mean, visible
from training_run.commands.command_line import CommandParser, new_file
from training_run.directory.checkpoints import MANIFEST
from training_run.directory.run_directory import LINES
from training_run.records.event_log import event_log
from training_run.records.terminal_text import memory, print_line, relative_path
from training_run.supervision.signals import SIGNALS

PORT = 8001
"""The port if none is given and if it is free; another free port otherwise."""


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser(
        "view",
        "Show runs in a browser: finished runs, and runs of other processes while they write. With several runs, the "
        "page compares them. Nothing in a run directory is changed.",
    )
    found.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory")
    found.add_argument("--export", metavar="FILE.html", help="write one self-contained file and end")
    found.add_argument(
        "--export-mb", metavar="N", type=int, default=DEFAULT_MEGABYTES, help="limit of the groups in the file, in MB"
    )
    found.add_argument("--server.host", dest="host", default="127.0.0.1", help="address to bind")
    found.add_argument("--server.port", dest="port", type=int, default=-1, help="port; 0: any free port")
    found.add_argument("--server.api-key", dest="api_key", default="", help="API key of clients")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Show the runs until a signal arrives, or write the file; return the exit status.

    Raises RunDirectoryError if a path is not a run directory, ProfileError and ServerError as the settings demand.
    """
    arguments = parser().parsed(argv, console)
    if arguments is None:
        return 0
    runs = [require_run(path.expanduser()) for path in arguments.runs]
    if arguments.export is not None:
        path = new_file(arguments.export)
        if not 0 <= arguments.export_mb <= 2000:
            raise ProfileError("--export-mb must be an integer from 0 to 2000")
        print_line(console, written(export(runs, path, limit_bytes=arguments.export_mb * 1_000_000), path))
        return 0
    settings = replace(HttpServer(), host=arguments.host, api_key=arguments.api_key, port=max(arguments.port, 0))
    if not -1 <= arguments.port <= 65535:
        raise ProfileError("--server.port must be an integer from 0 to 65535")
    with event_log(console), bound(settings, chosen=arguments.port >= 0) as listener:
        return anyio.run(show, runs, settings, listener, console)


def written(groups: Sequence[tuple[int, int]], path: Path) -> str:
    """Return the line about an exported file. groups: of each run, the numbers of included and of all groups."""
    counts = ", ".join(f"{included} of {total}" for included, total in groups)
    return f"wrote    {relative_path(str(path))}: {memory(path.stat().st_size)}, groups: {counts}"


def require_run(path: Path) -> Path:
    """Return the path of a run directory. Raises RunDirectoryError for any other path, with the most similar run."""
    try:
        own = () if (path / MANIFEST).is_file() else ("profile.toml", *LINES)  # a checkpoint is no run
        if any((path / name).is_file() for name in own):
            return path
        beside = list(path.parent.iterdir()) if path.parent.is_dir() else []
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"view: {visible(str(path), 200)} cannot be read: {visible(str(error), 200)}"
        ) from error
    hint = did_you_mean(str(path), [str(entry) for entry in beside if (entry / "profile.toml").is_file()])
    what = "contains no run" if exists else "does not exist"
    raise RunDirectoryError(f"view: {visible(str(path), 200)} {what}{hint or '; name the directory of a run'}")


def bound(settings: HttpServer, *, chosen: bool) -> socket.socket:
    """Return a listener. chosen: the user has given the port. Raises ServerError and ProfileError as `listen`."""
    if chosen:
        return listen(settings)
    try:
        return listen(replace(settings, port=PORT))
    except ServerError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
            raise
        return listen(settings)


async def show(runs: Sequence[Path], settings: HttpServer, listener: socket.socket, console: Console) -> int:
    """Serve the dashboard of the runs until a signal arrives; return the exit status 0."""
    stopped = anyio.Event()
    connections = Connections(application(runs, settings, stopped), send_seconds=settings.send_seconds)
    server = await asyncio.start_server(connections.handle, sock=listener, backlog=BACKLOG)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connections.watch)
        handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        with anyio.open_signal_receiver(*handled) as signals:
            for line in screen(runs, base_url(listener)):
                print_line(console, line)
            await anext(signals)
        stopped.set()
        server.close()
        await connections.end()
        tasks.cancel_scope.cancel()
    return 0


def screen(runs: Sequence[Path], address: str) -> Iterator[str]:
    """Return the lines that the command prints: the runs and the address."""
    for path in runs:
        yield f"run      {relative_path(str(path))}{', in progress' if is_live(path) else ''}"
    yield f"page     {address}/  (Ctrl-C ends)"


def application(runs: Sequence[Path], settings: HttpServer, stopped: anyio.Event) -> Starlette:
    """Return the application, with the access control of a run's server. stopped: ends the streams of events."""
    middleware = [Middleware(UnreadBodyMiddleware, send_seconds=settings.send_seconds)]
    if is_loopback(settings.host):
        middleware.append(Middleware(LocalOriginMiddleware, host=settings.host))
    middleware.append(Middleware(ClientMiddleware, clients=Clients(settings)))
    dashboard = Handlers("attachments.dashboard.routes:dashboard_of_paths", runs, stopped)
    prepare_struct_types()
    return Starlette(routes=routes(dashboard), middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)
