"""What `dashboard` adds to the library: the page that shows a run, and its routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import anyio
    from starlette.routing import Route

    from clotho.serving.parts import ServerParts


def server(parts: ServerParts) -> None:
    """Add the routes of the page, for the run of the server."""
    directory = parts.offered.run_directory
    if directory is None or not parts.offered.settings.dashboard:
        return
    from attachments.dashboard.paths import routes
    from clotho.serving.parts import Handlers

    def pages(stopped: anyio.Event) -> Sequence[Route]:
        return routes(Handlers("attachments.dashboard.routes:dashboard_of_server", directory, stopped))

    parts.pages.append(pages)
