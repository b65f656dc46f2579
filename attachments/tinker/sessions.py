"""Sessions of clients, and the requests whose results they have not read yet. All methods belong to the event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog
from msgspec import Struct

from attachments.tinker.bodies import CreateSession, FailedRequest, Promise
from attachments.tinker.models import TrainedModel
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError
from protocols.errors import ClothoError, RequestError, visible

log = structlog.get_logger(actor="tinker")

KEPT_RESULTS = 256
"""Results of a session that were read already, and are kept in case an answer is lost. The newest ones."""

KEPT_ENDED = 1024
"""Sessions that have ended and are still known as such."""


class Pending:
    """A request whose result the client will ask for."""

    def __init__(self, session: TinkerSession, work: Coroutine[Any, Any, Struct]) -> None:
        self.session = session
        self.task = asyncio.create_task(_result_of(work))

    async def within(self, seconds: float) -> Struct | None:
        """Wait for the result; None if there is none after so many seconds."""
        done, _ = await asyncio.wait([self.task], timeout=seconds)
        if not done:
            return None
        if self.task.cancelled():
            return FailedRequest(error="the request was cancelled", category="user")
        return self.task.result()


async def _result_of(work: Coroutine[Any, Any, Struct]) -> Struct:
    """Await a result. What fails is a result too: the client's fault if the error says so."""
    try:
        return await work
    except ApiError as error:
        return FailedRequest(error=str(error), category="user" if error.status < 500 else "server")
    except (RequestError, ClothoError, ValueError) as error:
        return FailedRequest(error=visible(str(error), 1000), category="user")
    except Exception as error:
        log.exception("tinker_request_failed")
        message = f"internal error ({type(error).__name__}); the event log has the details"
        return FailedRequest(error=message, category="server")


class TinkerSession:
    """One client program. owner: the name of its API key; empty without one. name: for fair queues.

    models: in memory, by id. samplers: ids of its sampling sessions. numbered: the newest requests by their numbers.
    ended: set when it ends.
    """

    def __init__(self, session_id: str, client: Client, fields: CreateSession) -> None:
        self.session_id, self.owner, self.fields = session_id, client.owner, fields
        self.name = f"{client.name}/{session_id}"
        self.created = time.time()
        self.models: dict[str, TrainedModel] = {}
        self.samplers: list[str] = []
        self.requests: OrderedDict[str, Pending] = OrderedDict()
        self.numbered: OrderedDict[tuple[str, int | None], Promise] = OrderedDict()
        self.timer: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()

    @property
    def unfinished(self) -> int:
        """Number of requests without a result."""
        return sum(not one.task.done() for one in self.requests.values())


class TinkerSessions:
    """The sessions of one server."""

    def __init__(
        self,
        *,
        heartbeat_seconds: float,
        max_pending: int,
        on_end: Callable[[TinkerSession], None],
        explain: Callable[[str, str], str],
    ) -> None:
        """on_end: frees what belongs to a session. explain: says what is left of a model, to its owner."""
        self._seconds, self._max_pending, self._on_end = heartbeat_seconds, max_pending, on_end
        self._explain = explain
        self._open: dict[str, TinkerSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._requests: dict[str, Pending] = {}

    def create(self, client: Client, fields: CreateSession) -> TinkerSession:
        """Begin a session."""
        session = TinkerSession(secrets.token_hex(8), client, fields)
        self._open[session.session_id] = session
        self.touch(session)
        log.info("session_began", session=session.session_id, sdk=visible(fields.sdk_version, 40))
        return session

    def open(self, owner: str) -> list[TinkerSession]:
        """Return the sessions of an owner; of all, for the empty name."""
        return [one for one in self._open.values() if owner in ("", one.owner)]

    def get(self, session_id: str, client: Client) -> TinkerSession:
        """Return a session, which counts as a sign of life.

        Raises ApiError: 410 if it has ended, also if the server was started again since, 404 for another client's.
        """
        session = self._open.get(session_id)
        if session is None:
            reason = self._ended.get(
                session_id, "it is unknown: the server was started again, and keeps what was saved"
            )
            raise ApiError(410, f"The session {visible(session_id, 40)!r} has ended: {reason}.", code="session_ended")
        if client.owner not in ("", session.owner):
            raise ApiError(404, "This session belongs to another API key.", code="not_found")
        self.touch(session)
        return session

    def of_model(self, model_id: str, client: Client) -> tuple[TinkerSession, TrainedModel]:
        """Return a model in memory and its session. Raises ApiError: 410 for one that is not, 404 for another's."""
        session_id = model_id.partition(":")[0]
        session = self.get(session_id, client) if session_id in self._open else None
        if session is None or model_id not in session.models:
            left = self._explain(model_id, client.owner)
            message = f"The model {visible(model_id, 128)!r} is not in memory. {left}"
            raise ApiError(410, message, code="not_in_memory")
        return session, session.models[model_id]

    def touch(self, session: TinkerSession) -> None:
        """Let the session live for another while."""
        if session.timer is not None:
            session.timer.cancel()
        reason = f"it sent no heartbeat for {self._seconds:g} seconds"
        session.timer = asyncio.get_running_loop().call_later(self._seconds, self.end, session, reason)

    def end(self, session: TinkerSession, reason: str) -> None:
        """End a session: its requests, its models in memory, and its samplers."""
        if self._open.pop(session.session_id, None) is None:
            return
        self._ended[session.session_id] = reason
        while len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)
        if session.timer is not None:
            session.timer.cancel()
        for request_id, pending in session.requests.items():
            pending.task.cancel()
            self._requests.pop(request_id, None)
        self._on_end(session)
        session.ended.set()
        log.info("session_ended", session=session.session_id, reason=reason)

    def begin(
        self,
        session: TinkerSession,
        work: Coroutine[Any, Any, Struct],
        *,
        model_id: str | None = None,
        sequences: int = 0,
    ) -> Promise:
        """Start a request of a session, and return what the client is told.

        sequences: number of completions that it samples.
        """
        request_id = f"{session.session_id}:{secrets.token_hex(8)}"
        session.requests[request_id] = self._requests[request_id] = Pending(session, work)
        names = [f"{request_id}:{index}" for index in range(sequences)]
        return Promise(request_id=request_id, model_id=model_id, sample_sequence_ids=names or None)

    def once(self, session: TinkerSession, key: tuple[str, int | None], begin: Callable[[], Promise]) -> Promise:
        """Begin a request, unless one of the same number began before: its answer was lost on the way to the client.

        key: what the request concerns, and its number there; None: it has none. Raises ApiError with status 429 if too
        many requests of the session are open.
        """
        if key in session.numbered:
            return session.numbered[key]
        if session.unfinished >= self._max_pending:
            raise ApiError(
                429,
                f"{self._max_pending} requests of this session are not finished (server.tinker.max_pending).",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        promise = begin()
        if key[1] is not None:
            session.numbered[key] = promise
            while len(session.numbered) > 2 * self._max_pending:
                session.numbered.popitem(last=False)
        return promise

    def pending(self, request_id: str, client: Client) -> Pending:
        """Return a request. Raises ApiError: 410 if its result is gone, or never was."""
        found = self._requests.get(request_id)
        if found is None:
            self.get(request_id.partition(":")[0], client)
            raise ApiError(410, f"The request {visible(request_id, 60)!r} is gone.", code="gone")
        self.get(found.session.session_id, client)
        return found

    def was_read(self, request_id: str) -> None:
        """Keep the newest results that clients have read, and forget the others."""
        session = self._requests[request_id].session
        session.requests.move_to_end(request_id)
        read = [one for one, pending in session.requests.items() if pending.task.done()]
        for old in read[:-KEPT_RESULTS]:
            del session.requests[old]
            self._requests.pop(old, None)

    def cancel(self, request_id: str, client: Client) -> None:
        """Stop a request; one that is gone is ignored."""
        with suppress(ApiError):
            self.pending(request_id, client).task.cancel()
