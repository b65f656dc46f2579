"""What a server is built from: its interface to the program, and what the attachments add to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import anyio
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clotho.extension import Door, needs, provided
from clotho.serving.auth import Clients
from clotho.serving.bodies import RequestBodies
from clotho.serving.errors import ERRORS
from clotho.serving.limits import ConcurrencyLimit
from clotho.serving.metrics import ServerMetrics
from clotho.serving.services import HealthReport, ServedModel, ServerContext
from clotho.serving.struct_types import prepare_struct_types
from protocols.errors import ProfileError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from clotho.serving.answering import Answering

Handler = Callable[[Request], Awaitable[Response]]


class Handlers:
    """The methods of an object that answer requests. Its module is imported at the first request of any of them."""

    def __init__(self, place: str, *parts: Any) -> None:
        """place: `module:name` of its class. parts: what the class is called with."""
        self._place, self._parts = place, parts

    @cached_property
    def loaded(self) -> Any:
        """The object."""
        found = provided(self._place)(*self._parts)
        prepare_struct_types()  # bodies are decoded in several threads
        return found

    @property
    def is_loaded(self) -> bool:
        """Whether a request has asked for any of them."""
        return "loaded" in vars(self)

    def method(self, name: str, **fixed: Any) -> Handler:
        """Return what answers by the method of this name, called with the request and `fixed`."""
        return partial(self._answer, name, **fixed)

    async def _answer(self, name: str, http: Request, **fixed: Any) -> Response:
        answer: Callable[..., Awaitable[Response]] = getattr(self.loaded, name)
        return await answer(http, **fixed)


class Endpoint(NamedTuple):
    """One method of one path: the route, and what openapi.json says about it.

    path, also: as Starlette writes them; openapi.json leaves `also` out. about: a summary; empty: openapi.json leaves
    the endpoint out. requests, responses: structs of the body as `module:name`, each one alternative; without
    responses, the response is text. errors: the `ErrorFormat` of its errors, as `module:name`. streams: the response
    can be a stream of server-sent events. query: name of each query parameter -> its JSON schema. binary: the body of
    the request is bytes. access: which clients it is for; `own`: it concerns what belongs to the client. admitted: a
    POST request waits for admission, and its body is read before.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    handle: Handler
    about: str = ""
    requests: tuple[str, ...] = ()
    responses: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    errors: str = ERRORS
    streams: bool = False
    query: dict[str, Any] = {}  # noqa: RUF012, never changed
    binary: bool = False
    access: Literal["all", "own", "admin"] = "all"
    admitted: bool = True


class ModelSource(Protocol):
    """Serves models beside those of the program."""

    def models(self) -> Sequence[ServedModel]:
        """Return the models that requests can name now."""

    async def load_chosen(self, name: str, path: Path, read: Callable[[Path], Any], /) -> None:
        """Serve a model that the operator names, until the server ends. read: reads the path in a compute thread."""


class ServerParts:
    """The parts of one server. Each attachment adds its own when the server is constructed, and keeps its state there.

    offered: the interface to the program. endpoints: routes beside those of the library. sources: of further models.
    pauses: each returns why requests wait; empty: they do not. chat: `module:name` of the
    `ChatExtension` that serves the fields of tools, grammars and reasoning. pages: each returns routes that
    openapi.json leaves out; its argument is set when the server stops. gauges: each returns metrics for /metrics.
    bodies: reads the bodies of requests that do not wait for admission.

    When all attachments have added theirs: context: the interface to the program, as requests see it. clients, metrics:
    shared by all endpoints. limit, served: of the running server; its endpoints are all that it has.
    """

    def __init__(self, offered: ServerContext) -> None:
        """Raise ProfileError if the file of API keys is not valid."""
        settings = offered.settings
        self.offered = offered
        self.bodies = RequestBodies(max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
        self.endpoints: list[Endpoint] = []
        self.sources: list[ModelSource] = []
        self.pauses: list[Callable[[], str]] = []
        self.chat = offered.chat
        self.pages: list[Callable[[anyio.Event], Sequence[Route]]] = []
        self.gauges: list[Callable[[], Iterable[Metric]]] = []
        SERVER(self)
        self.context = structs.replace(
            offered, models=self._models, health=self._health, chat=self.chat, measure=self._measure
        )
        self.clients = Clients(settings)
        self.served: Sequence[Endpoint] = ()
        self.limit = ConcurrencyLimit(settings.max_concurrent)
        self.metrics = ServerMetrics(self.context, lambda: self.limit, self.clients.quotas)

    @cached_property
    def answering(self) -> Answering:
        """The steps that answer a request, shared by all endpoints."""
        from clotho.serving.answering import Answering

        provided(self.chat)
        prepare_struct_types()  # bodies are decoded in several threads
        return Answering(self.context, self.metrics)

    def _measure(self, timed_out: Mapping[str, int]) -> Iterator[Metric]:
        yield from self.offered.measure(timed_out)
        yield from (metric for gauges in self.gauges for metric in gauges())

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
            raise ProfileError(f"--adapter: {needs('adapters')}")
        await self.sources[0].load_chosen(name, path, read)


SERVER: Door[[ServerParts], None] = Door("library.server")
"""Adds to the parts of a server; called once per server. What they share belongs to the parts."""
