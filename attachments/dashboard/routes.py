"""The HTTP API of the dashboard, for one or more runs. The page is its only client (docs/dashboard-internals.md).

Files are read in worker threads, one call per run at a time and in blocks, so that the event loop never waits. A run is
read only when a request needs it, and at most once per `POLL_SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from attachments.dashboard.histories import Series, decoded
from attachments.dashboard.overview import about, state
from attachments.dashboard.page_files import compressed
from attachments.dashboard.paths import KINDS
from attachments.dashboard.run_files import RunFiles, is_live
from clotho.serving.errors import ApiError, overloaded
from clotho.serving.limits import until_disconnect
from protocols.errors import RunDirectoryError
from training_run.directory.jsonl import encode

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Time between two readings of the files of a run, and for which a request waits that asks what is new."""

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

    async def call(self, work: Callable[[RunFiles], T], *, reading: Collection[str] = ()) -> T:
        """Call `work` in a worker thread. reading: the histories that are read to their ends first."""
        for name in reading:
            await self._read(name)
        async with self._lock:
            return await to_thread.run_sync(work, self._files)

    async def is_live(self) -> bool:
        """Return whether a process continues the run."""
        return await to_thread.run_sync(self._live)

    async def rows(self, cursors: Mapping[str, str], *, has_ended: bool) -> bytes:
        """Return the state of the run, and the rows of some histories after a cursor of each."""
        live = not has_ended and await self.is_live()

        def read(files: RunFiles) -> bytes:
            found = {kind: files.histories[kind].after(cursor) for kind, cursor in cursors.items()}
            return encode({"state": state(files, is_live=live), **found})

        return await self.call(read, reading=KINDS)

    async def _read(self, name: str) -> None:
        if time.monotonic() - self._read_at[name] < POLL_SECONDS:
            return
        more = True
        while more:
            async with self._lock:  # between two blocks, other requests are answered
                more = await to_thread.run_sync(self._files.histories[name].advance)
        self._read_at[name] = time.monotonic()


class Dashboard:
    """Answers the requests of the API, for a fixed list of runs."""

    def __init__(self, runs: Sequence[FollowedRun], closing: anyio.Event) -> None:
        """closing: set when the server stops; requests that wait are then answered at once."""
        self._runs, self._closing = runs, closing
        self._searches = anyio.Semaphore(MAX_SEARCHES)

    async def runs(self, http: Request) -> Response:
        """List the runs."""
        runs = [
            {"id": str(number), "name": run.name, "path": run.path, "live": await run.is_live()}
            for number, run in enumerate(self._runs)
        ]
        return await answer(http, encode({"runs": runs}))

    async def about(self, http: Request) -> Response:
        """Return the settings of a run, and what the page shows of every run."""
        return await answer(http, await self._run(http).call(lambda files: encode(about(files))))

    async def rows(self, http: Request) -> Response:
        """Return what is new in a run since the cursors of the query; `wait` gives the run time for news."""
        run, query = self._run(http), http.query_params
        if "wait" in query:
            with anyio.move_on_after(POLL_SECONDS):
                await self._closing.wait()
        cursors = {kind: query[kind] for kind in KINDS if kind in query}
        has_ended = run.ends_with_server and self._closing.is_set()
        return await answer(http, await run.rows(cursors, has_ended=has_ended))

    async def detail(self, http: Request, *, kind: str) -> Response:
        """Return the lines of a history between `from` and `to`."""
        try:
            low, high = (float(http.query_params[end]) for end in ("from", "to"))
        except (KeyError, ValueError):
            raise ApiError(400, "from, to: must be numbers", param="from") from None

        def read(files: RunFiles) -> bytes:
            history = files.histories[kind]
            assert isinstance(history, Series)
            return encode(history.detail(low, high))

        return await answer(http, await self._run(http).call(read, reading=[kind]))

    async def group(self, http: Request) -> Response:
        """Return the record of a group."""
        group_id = http.path_params["group"]
        line = await self._run(http).call(lambda files: files.groups.record(group_id), reading=["groups"])
        if line is None:
            raise missing_group(group_id)
        return await answer(http, line)

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
            return await answer(http, encode({"completions": [], "reason": str(error)}))
        if found is None:
            raise missing_group(group_id)
        return await answer(http, found)

    async def search(self, http: Request) -> Response:
        """Return the groups whose texts contain a text."""
        run, text = self._run(http), http.query_params.get("text", "").casefold()
        if not 0 < len(text) <= MAX_SEARCH_CHARACTERS:
            raise ApiError(400, f"text: must have 1 to {MAX_SEARCH_CHARACTERS} characters", param="text")
        found = await until_disconnect(http.receive, self._found(run, text))
        return await answer(http, encode({"group_ids": found}))

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

    def _run(self, http: Request) -> FollowedRun:
        name = http.path_params["run"]
        if not name.isdecimal() or not name.isascii() or len(name) > 6 or int(name) >= len(self._runs):
            raise ApiError(404, "There is no run with this id; /dashboard/api/runs lists the runs.")
        return self._runs[int(name)]


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


async def answer(http: Request, body: bytes) -> Response:
    """Return a response of encoded JSON."""
    return await compressed(http, body, HEADERS, "application/json")


def missing_group(group_id: int) -> ApiError:
    """Return the error for a group without a record."""
    return ApiError(404, f"rollouts.jsonl has no record of group {group_id}.", code="no_group")
