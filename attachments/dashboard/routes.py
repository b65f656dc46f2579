"""The HTTP API of the dashboard, for one or more runs. The page is its only client (docs/dashboard-internals.md).

Files are read in worker threads, one call per run at a time and in blocks, so that the event loop never waits. A run is
read only when a request needs it, and at most once per `POLL_SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attachments.dashboard.events import Cursor, EventReader, Position, event, position
from attachments.dashboard.histories import Series, decoded
from attachments.dashboard.library import KINDS
from attachments.dashboard.overview import constants, overview
from attachments.dashboard.run_files import RunFiles, is_live
from clotho.serving.errors import ApiError, overloaded
from clotho.serving.limits import until_disconnect
from clotho.serving.streaming import EventStream
from clotho.storage.json_text import encode
from protocols.errors import RunDirectoryError

T = TypeVar("T")

POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
MAX_STREAMS = 32
"""Streams of events that are open at once; a browser opens one per tab."""

MAX_SEARCHES = 2
"""Searches that run at once; others wait."""

SEARCH_WAIT_SECONDS = 10.0
MAX_SEARCH_CHARACTERS = 1000

HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class FollowedRun:
    """A run directory whose files are read again when a request needs them.

    name: shown to users. ends_with_server: the run is over when the server stops.
    """

    def __init__(
        self, directory: Path, *, name: str, path: str, live: Callable[[], bool], ends_with_server: bool = False
    ) -> None:
        """path: the directory, as users write it. live: returns whether a process continues the run."""
        self.name, self.path, self._live, self.ends_with_server = name, path, live, ends_with_server
        self._files = RunFiles(directory)
        self._lock = anyio.Lock()
        self._read_at = dict.fromkeys(KINDS, float("-inf"))
        self._ends = dict[str, Position]()
        self._first_ends = dict[str, Position]()

    async def call(self, work: Callable[[RunFiles], T], *, reading: Collection[str] = ()) -> T:
        """Call `work` in a worker thread. reading: the histories that are read to their ends first."""
        for name in reading:
            await self._read(name)
        async with self._lock:
            return await to_thread.run_sync(work, self._files)

    async def is_live(self) -> bool:
        """Return whether a process continues the run."""
        return await to_thread.run_sync(self._live)

    async def next_events(self, reader: EventReader) -> tuple[bytes, bool]:
        """Return the next events of a stream, and whether there are more."""
        shown = await self.overview()
        return await self.call(lambda _: reader.next(shown))

    async def overview(self) -> dict[str, Any]:
        """Return the overview of the run."""
        live = await self.is_live()
        work = partial(overview, name=self.name, is_live=live)
        return await self.call(work, reading=KINDS)

    async def read_all(self) -> None:
        """Read all histories to their ends."""
        for name in KINDS:
            await self._read(name)

    async def reader(self, last_id: str) -> EventReader:
        """Return the events of a new stream.

        last_id: id of the last event that the client has received. Without one, the stream begins where the histories
        ended when it was requested, or when they were first read. A response to a later request has all rows before.
        """
        known = dict(self._ends)
        await self.read_all()
        histories = self._files.histories
        if last_id:
            return EventReader(histories, Cursor.parse(last_id, len(histories)))
        return EventReader(histories, Cursor(tuple(known.get(name, self._first_ends[name]) for name in histories)))

    async def _read(self, name: str) -> None:
        while time.monotonic() - self._read_at[name] >= POLL_SECONDS:
            async with self._lock:
                if time.monotonic() - self._read_at[name] < POLL_SECONDS:
                    return
                history = self._files.histories[name]
                if not await to_thread.run_sync(history.advance):
                    self._read_at[name] = time.monotonic()
                    self._ends[name] = position(history)
                    self._first_ends.setdefault(name, self._ends[name])


class Dashboard:
    """Answers the requests of the API, for a fixed list of runs. streams: number of open streams of events."""

    def __init__(self, runs: Sequence[FollowedRun], closing: anyio.Event) -> None:
        """closing: set when the server stops; streams then end at once."""
        self._runs, self._closing = runs, closing
        self.streams = 0
        self._searches = anyio.Semaphore(MAX_SEARCHES)

    async def runs(self, _: Request) -> Response:
        """List the runs."""
        return answer({"runs": [await self._entry(number) for number in range(len(self._runs))], "export": False})

    async def _entry(self, number: int) -> dict[str, Any]:
        run = self._runs[number]
        return {"id": str(number), "name": run.name, "path": run.path, "live": await run.is_live()}

    async def overview(self, http: Request) -> Response:
        """Return the overview of a run."""
        return answer({**await self._run(http).overview(), **constants()})

    async def table(self, http: Request, *, kind: str) -> Response:
        """Return a history of a run, or the part between `from` and `to` in detail."""
        run, ends = self._run(http), [http.query_params.get(name) for name in ("from", "to")]
        try:
            low, high = (None if end is None else float(end) for end in ends)
        except ValueError:
            raise ApiError(400, "from, to: must be numbers", param="from") from None

        def read(files: RunFiles) -> bytes:
            history = files.histories[kind]
            if low is None or high is None or not isinstance(history, Series):
                return encode(history.body())
            return encode(history.detail(low, high))

        return raw(await run.call(read, reading=[kind]))

    async def group(self, http: Request) -> Response:
        """Return the record of a group."""
        group_id = http.path_params["group"]
        line = await self._run(http).call(lambda files: files.groups.record(group_id), reading=["groups"])
        if line is None:
            raise missing_group(group_id)
        return raw(line)

    async def tokens(self, http: Request) -> Response:
        """Return the values of the tokens of a group."""
        group_id = http.path_params["group"]

        def read(files: RunFiles) -> bytes | None:
            line = files.groups.record(group_id)
            record = None if line is None else decoded(line)
            return None if record is None else encode(files.tokens(record))

        try:
            found = await self._run(http).call(read, reading=["groups"])
        except RunDirectoryError as error:
            return answer({"completions": [], "reason": str(error)})
        if found is None:
            raise missing_group(group_id)
        return raw(found)

    async def search(self, http: Request) -> Response:
        """Return the groups whose texts contain a text."""
        run, text = self._run(http), http.query_params.get("text", "").casefold()
        if not 0 < len(text) <= MAX_SEARCH_CHARACTERS:
            raise ApiError(400, f"text: must have 1 to {MAX_SEARCH_CHARACTERS} characters", param="text")
        return answer({"group_ids": await until_disconnect(http.receive, self._found(run, text))})

    async def _found(self, run: FollowedRun, text: str) -> list[int]:
        try:
            with anyio.fail_after(SEARCH_WAIT_SECONDS):
                await self._searches.acquire()
        except TimeoutError:
            raise overloaded("Other searches are running; retry later.") from None
        try:
            await run.call(lambda _: None, reading=["groups"])
            while await run.call(lambda files: files.search.advance(text)):
                pass
            return await run.call(lambda files: files.search.group_ids(text))
        finally:
            self._searches.release()

    async def events(self, http: Request) -> Response:
        """Stream what changes in a run."""
        run = self._run(http)
        if self._closing.is_set() or self.streams >= MAX_STREAMS:
            raise overloaded(f"The dashboard has {MAX_STREAMS} streams at most; close another page.")
        if http.method == "HEAD":
            return Response(headers=HEADERS, media_type="text/event-stream")
        return DashboardStream(self, self._stream(run, http.headers.get("last-event-id", "")))

    async def _stream(self, run: FollowedRun, last_id: str) -> AsyncGenerator[bytes, None]:
        reader = await run.reader(last_id)
        spoken = time.monotonic()
        while not self._closing.is_set():
            events, more = await run.next_events(reader)
            now = time.monotonic()
            if events or now - spoken >= HEARTBEAT_SECONDS:
                spoken = now
                yield events or b": \n\n"
            if not more:
                with anyio.move_on_after(POLL_SECONDS):
                    await self._closing.wait()
                await run.read_all()
        if run.ends_with_server:
            yield event("overview", encode({"live": False}))
        yield event("end", b"{}")

    def _run(self, http: Request) -> FollowedRun:
        name = http.path_params["run"]
        if not name.isdecimal() or not name.isascii() or len(name) > 6 or int(name) >= len(self._runs):
            raise ApiError(404, "There is no run with this id; /dashboard/api/runs lists the runs.")
        return self._runs[int(name)]


class DashboardStream(EventStream):
    """A stream of events. It counts from its response on, and not from its first event, which limits a burst too."""

    def __init__(self, dashboard: Dashboard, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, HEADERS)
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        self._dashboard.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._dashboard.streams -= 1


def dashboard_of_server(directory: Path, closing: anyio.Event) -> Dashboard:
    """Return the dashboard of the run of this process, for its own server."""
    path = str(directory)
    run = FollowedRun(directory, name=directory.name, path=path, live=lambda: True, ends_with_server=True)
    return Dashboard([run], closing)


def dashboard_of_paths(paths: Sequence[Path], closing: anyio.Event) -> Dashboard:
    """Return the dashboard of the runs in directories, which may be finished or belong to other processes."""
    return Dashboard(
        [FollowedRun(path, name=path.resolve().name, path=str(path), live=partial(is_live, path)) for path in paths],
        closing,
    )


def answer(body: Any) -> Response:
    """Return a JSON response."""
    return raw(encode(body))


def raw(body: bytes) -> Response:
    """Return a response of encoded JSON."""
    return Response(body, headers=HEADERS, media_type="application/json")


def missing_group(group_id: int) -> ApiError:
    """Return the error for a group without a record."""
    return ApiError(404, f"rollouts.jsonl has no record of group {group_id}.", code="no_group")
