"""What a server is built from: its interface to the program, and what the attachments add to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import anyio
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clotho import extension
from clotho.serving.answering import Answering
from clotho.serving.auth import Clients
from clotho.serving.bodies import RequestBodies
from clotho.serving.chat_extension import ChatExtension
from clotho.serving.limits import ConcurrencyLimit
from clotho.serving.metrics import ServerMetrics
from clotho.serving.services import HealthReport, ServedModel, ServerContext
from protocols.errors import ProfileError

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """One method of one path: the route, and what openapi.json says about it.

    path, also: as Starlette writes them; openapi.json leaves `also` out. about: a summary; empty: openapi.json leaves
    the endpoint out. requests, responses: structs of the body, each one alternative; without responses, the response is
    text. streams: the response can be a stream of server-sent events. query: name of each query parameter -> its JSON
    schema. binary: the body of the request is bytes. access: which clients it is for; `own`: it concerns what belongs
    to the client. admitted: a POST request waits for admission, and its body is read before.
    """

    method: Literal["GET", "POST", "PUT"]
    path: str
    handle: Handler
    about: str = ""
    requests: tuple[type, ...] = ()
    responses: tuple[type, ...] = ()
    also: tuple[str, ...] = ()
    streams: bool = False
    query: dict[str, Any] = {}  # noqa: RUF012, never changed
    binary: bool = False
    access: Literal["all", "own", "admin"] = "all"
    admitted: bool = True


class ModelSource(Protocol):
    """Serves models beside those of the program."""

    def models(self) -> Sequence[ServedModel]:
        """Return the models that requests can name now."""
        ...

    async def load_chosen(self, name: str, path: Path, read: Callable[[Path], Any], /) -> None:
        """Serve a model that the operator names, until the server ends. read: reads the path in a compute thread."""
        ...


class ServerParts:
    """The parts of one server. Each attachment adds its own when the server is constructed, and keeps its state there.

    offered: the interface to the program. endpoints: routes beside those of the library. sources: of further models.
    pauses: each returns why requests wait; empty: they do not. chat: serves the fields of tools, grammars and
    reasoning. pages: each returns routes that openapi.json leaves out; its argument is set when the server stops.
    bodies: reads the bodies of requests that do not wait for admission.

    When all attachments have added theirs: context: the interface to the program, as requests see it. clients,
    answering, metrics: shared by all endpoints. limit: of the running server.
    """

    def __init__(self, offered: ServerContext) -> None:
        """Raise ProfileError if the file of API keys is not valid."""
        settings = offered.settings
        self.offered = offered
        self.bodies = RequestBodies(max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
        self.endpoints: list[Endpoint] = []
        self.sources: list[ModelSource] = []
        self.pauses: list[Callable[[], str]] = []
        self.chat = ChatExtension()
        self.pages: list[Callable[[anyio.Event], Sequence[Route]]] = []
        for one in extension.extensions():
            one.server(self)
        self.context = structs.replace(offered, models=self._models, health=self._health, chat=self.chat)
        self.clients = Clients(settings)
        self.limit = ConcurrencyLimit(settings.max_concurrent)
        self.metrics = ServerMetrics(self.context, lambda: self.limit, self.clients.quotas)
        self.answering = Answering(self.context, self.metrics)

    def _models(self) -> Sequence[ServedModel]:
        return (*self.offered.models(), *(model for source in self.sources for model in source.models()))

    def _health(self) -> HealthReport:
        report = self.offered.health()
        reasons = [reason for pause in self.pauses if (reason := pause())]
        if report.status != "ok" or not reasons:
            return report
        return structs.replace(report, status="paused", detail="; ".join(filter(None, [*reasons, report.detail])))

    async def load_chosen(self, name: str, path: Path, read: Callable[[Path], Any]) -> None:
        """Serve a model that the operator names. read: reads the path in a compute thread. Raises ProfileError."""
        if not self.sources:
            raise ProfileError(f"--adapter: {extension.needs('adapters')}")
        await self.sources[0].load_chosen(name, path, read)
