"""The paths of the page and of its API."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from clotho.serving.errors import EXCEPTION_HANDLERS
from clotho.serving.parts import Handlers

API = "/dashboard/api/runs"
STATIC = "/dashboard/static/"
"""The path of all files but the page itself. `clotho.serving.auth` opens it."""

KINDS = ("metrics", "evaluations", "timeline", "groups")
"""The histories of a run, as the API names them. All but the last are numbers over an axis."""


def page_app() -> ASGIApp:
    """Return an application that has the page and its files only."""
    return Starlette(routes=page_routes(), exception_handlers=EXCEPTION_HANDLERS)


def page_routes() -> list[Route]:
    """Return the routes of the page and its files."""
    files = Handlers("attachments.dashboard.page_files:PageFiles")
    return [Route("/", files.method("page")), Route(STATIC + "{name:path}", files.method("static"))]


def routes(dashboard: Handlers) -> list[Route]:
    """Return the routes of the page and of the API. dashboard: answers with the methods of `Dashboard`."""
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
