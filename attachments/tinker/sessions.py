"""Sessions of clients, and the requests whose results they have not read yet. All methods belong to the event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from attachments.tinker.bodies import Answer, CreateSession
from attachments.tinker.models import TrainedModel
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError
from protocols.errors import ClothoError, RequestError, visible

log = structlog.get_logger(actor="tinker")

KEPT_RESULTS, KEPT_BYTES = 256, 2**22
"""Results of a session that were read already, and are kept in case an answer is lost; the newest one in any case."""

KEPT_ENDED = 1024
"""Sessions that have ended and are still known as such."""

CANCELLED: Answer = {"error": "the request was cancelled", "category": "user"}

Key = tuple[str, int | None]
Work = Coroutine[Any, Any, Answer]
Written = tuple[bytes, str]
"""The body of a result, and its media type."""


async def _result_of(work: Work) -> Answer:
    """Await a result. What fails is a result too: the client's fault if the error says so."""
    try:
        return await work
    except ApiError as error:
        return {"error": str(error), "category": "user" if error.status < 500 else "server"}
    except (RequestError, ClothoError, ValueError) as error:
        return {"error": visible(str(error), 1000), "category": "user"}
    except Exception as error:
        log.exception("tinker_request_failed")
        message = f"internal error ({type(error).__name__}); the event log has the details"
        return {"error": message, "category": "server"}


class TinkerSession:
    """One client program. owner: the name of its API key; empty without one. name: for fair queues.

    models: in memory, by id. samplers: ids of its sampling sessions, the one that was used last at the end. By id of a
    request: those that are not finished, the newest results that nobody has read, and the newest that were read, as
    they were written. numbered: what was answered to the newest requests, by their numbers. seen: when it was last
    heard of, in seconds of the loop. ended: set when it ends.
    """

    def __init__(self, session_id: str, client: Client, fields: CreateSession) -> None:
        self.session_id, self.owner, self.fields = session_id, client.owner, fields
        self.name = f"{client.name}/{session_id}"
        self.models: dict[str, TrainedModel] = {}
        self.samplers: list[str] = []
        self.unfinished: dict[str, asyncio.Task[Answer]] = {}
        self.unread: OrderedDict[str, Answer] = OrderedDict()
        self.read: OrderedDict[str, Written] = OrderedDict()
        self.numbered: OrderedDict[Key, Answer] = OrderedDict()
        self.seen, self.timer = 0.0, None  # type: float, asyncio.TimerHandle | None
        self.ended = asyncio.Event()


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

    def create(self, client: Client, fields: CreateSession) -> TinkerSession:
        """Begin a session."""
        session = TinkerSession(secrets.token_hex(8), client, fields)
        self._open[session.session_id] = session
        self._touch(session)
        self._watch(session)
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
            unknown = "it is unknown: the server was started again, and keeps what was saved"
            reason = self._ended.get(session_id, unknown)
            raise ApiError(410, f"The session {visible(session_id, 40)!r} has ended: {reason}.", code="session_ended")
        if client.owner not in ("", session.owner):
            raise ApiError(404, "This session belongs to another API key.", code="not_found")
        self._touch(session)
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

    def _touch(self, session: TinkerSession) -> None:
        """Let the session live for another while."""
        session.seen = asyncio.get_running_loop().time()

    def _watch(self, session: TinkerSession) -> None:
        """End a session that was not heard of for long enough, or look again when it could be."""
        loop = asyncio.get_running_loop()
        if (end := session.seen + self._seconds) <= loop.time():
            self.end(session, f"it sent no heartbeat for {self._seconds:g} seconds")
        else:
            session.timer = loop.call_at(end, self._watch, session)

    def end(self, session: TinkerSession, reason: str) -> None:
        """End a session: its requests, its models in memory, and its samplers."""
        if self._open.pop(session.session_id, None) is None:
            return
        self._ended[session.session_id] = reason
        _keep_newest(self._ended, KEPT_ENDED)
        if session.timer is not None:
            session.timer.cancel()
        for task in session.unfinished.values():
            task.cancel()
        self._on_end(session)
        session.ended.set()
        log.info("session_ended", session=session.session_id, reason=reason)

    def promise(self, session: TinkerSession, key: Key, begin: Callable[[], Work], **told: Any) -> Answer:
        """Begin a request, and return what the client is told; one that comes again has begun before.

        key: what the request concerns, and its number there, by which it is known again; None: it has none. begin:
        queues the work, and returns what awaits its result. Raises ApiError with status 429 if too many requests of the
        session are open.
        """
        if key in session.numbered:  # the answer was lost on the way to the client
            return session.numbered[key]
        if len(session.unfinished) >= self._max_pending:
            raise ApiError(
                429,
                f"{self._max_pending} requests of this session are not finished (server.tinker.max_pending).",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        request_id = f"{session.session_id}:{secrets.token_hex(8)}"
        session.unfinished[request_id] = task = asyncio.create_task(_result_of(begin()))
        task.add_done_callback(partial(self._finished, session, request_id))
        answer = {"request_id": request_id, **told}
        if key[1] is not None:
            session.numbered[key] = answer
            _keep_newest(session.numbered, 2 * self._max_pending)
        return answer

    def _finished(self, session: TinkerSession, request_id: str, task: asyncio.Task[Answer]) -> None:
        if session.unfinished.pop(request_id, None) is not None:
            session.unread[request_id] = CANCELLED if task.cancelled() else task.result()
            _keep_newest(session.unread, self._max_pending)

    async def result(
        self, request_id: str, client: Client, seconds: float, write: Callable[[Answer], Written]
    ) -> Written | None:
        """Wait for a result, and return it as written; None if there is none after so many seconds.

        The newest results that were read are kept, in the form in which they were read first. Raises ApiError: 410 if
        the result is gone, or never was.
        """
        session = self.get(request_id.partition(":")[0], client)
        task, read = session.unfinished.get(request_id), session.read
        if task is not None:
            if not (await asyncio.wait([task], timeout=seconds))[0]:
                return None
            self._finished(session, request_id, task)  # its callback may run only after this
        if request_id in session.unread:
            read[request_id] = write(session.unread.pop(request_id))
            _keep_newest(read, KEPT_RESULTS)
            while len(read) > 1 and sum(len(content) for content, _ in read.values()) > KEPT_BYTES:
                read.popitem(last=False)
        if request_id not in read:
            raise ApiError(410, f"The request {visible(request_id, 60)!r} is gone.", code="gone")
        return read[request_id]

    def cancel(self, request_id: str, client: Client) -> None:
        """Stop a request; one that is gone is ignored."""
        with suppress(ApiError):
            if task := self.get(request_id.partition(":")[0], client).unfinished.get(request_id):
                task.cancel()


def _keep_newest(found: OrderedDict[Any, Any], count: int) -> None:
    while len(found) > count:
        found.popitem(last=False)
