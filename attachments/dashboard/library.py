"""What `dashboard` adds to the library: the page that shows a run, and its routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.extension import Extension

if TYPE_CHECKING:
    from collections.abc import Sequence

    import anyio
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from clotho.serving.parts import ServerParts
    from clotho.settings.server import HttpServer


class DashboardPages(Extension):
    """The page and its routes."""

    def loading_page(self, settings: HttpServer) -> ASGIApp | None:
        """Return the page that is shown while the model is loaded; None without a dashboard."""
        if not settings.dashboard:
            return None
        from attachments.dashboard.page_files import page_app

        return page_app()

    def server(self, parts: ServerParts) -> None:
        """Add the routes of the page, for the run of the server."""
        directory = parts.offered.run_directory
        if directory is None or not parts.offered.settings.dashboard:
            return
        from attachments.dashboard.routes import Dashboard, run_of_server

        def pages(stopped: anyio.Event) -> Sequence[Route]:
            return Dashboard([run_of_server(directory)], stopped).routes()

        parts.pages.append(pages)


EXTENSION = DashboardPages()
