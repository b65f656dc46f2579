"""What `dashboard` adds to the library: the page that shows a run, and its routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.extension import Extension

if TYPE_CHECKING:
    from collections.abc import Sequence

    import anyio
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from clotho.serving.parts import Handlers, ServerParts

API = "/dashboard/api/runs"
STATIC = "/dashboard/static/"
"""The path of all files but the page itself. `clotho.serving.auth` opens it."""

KINDS = ("metrics", "evaluations", "timeline", "groups")
"""The histories of a run, as the API names them. All but the last are numbers over an axis."""


class DashboardPages(Extension):
    """The page and its routes."""

    def server(self, parts: ServerParts) -> None:
        """Add the routes of the page, for the run of the server."""
        directory = parts.offered.run_directory
        if directory is None or not parts.offered.settings.dashboard:
            return
        from clotho.serving.parts import Handlers

        def pages(stopped: anyio.Event) -> Sequence[Route]:
            return routes(Handlers("attachments.dashboard.routes:dashboard_of_server", directory, stopped))

        parts.pages.append(pages)


def page_app() -> ASGIApp:
    """Return an application that has the page and its files only."""
    from starlette.applications import Starlette

    from clotho.serving.errors import EXCEPTION_HANDLERS

    return Starlette(routes=page_routes(), exception_handlers=EXCEPTION_HANDLERS)


def page_routes() -> list[Route]:
    """Return the routes of the page and its files."""
    from starlette.routing import Route

    from clotho.serving.parts import Handlers

    files = Handlers("attachments.dashboard.page_files:PageFiles")
    return [Route("/", files.method("page")), Route(STATIC + "{name:path}", files.method("static"))]


def routes(dashboard: Handlers) -> list[Route]:
    """Return the routes of the page and of the API. dashboard: answers with the methods of `Dashboard`."""
    from starlette.routing import Route

    run = API + "/{run}"
    return [
        *page_routes(),
        Route(API, dashboard.method("runs")),
        Route(f"{run}/about", dashboard.method("about")),
        Route(f"{run}/rows", dashboard.method("rows")),
        *(Route(f"{run}/{kind}", dashboard.method("detail", kind=kind)) for kind in KINDS[:-1]),
        Route(f"{run}/groups/search", dashboard.method("search")),
        Route(f"{run}/groups/{{group:int}}", dashboard.method("group")),
        Route(f"{run}/groups/{{group:int}}/tokens", dashboard.method("tokens")),
    ]


EXTENSION = DashboardPages()
