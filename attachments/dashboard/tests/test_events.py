"""Server-sent events: new rows, continuation, replaced files, limits, and the end of the server."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from attachments.dashboard import routes
from attachments.dashboard.events import MAX_ROWS, Cursor, EventReader
from attachments.dashboard.histories import Series
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from attachments.dashboard.tests.viewed_runs import EVENTS, following, lines, read_until, viewing


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, so that tests need not wait."""
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of eight groups."""
    return write_run(tmp_path / "run", RunShape(groups=8, steps=2, token_steps=0))


def append(path: Path, *records: object) -> None:
    """Append lines to a file."""
    with path.open("ab") as file:
        file.write(lines(records))


async def test_a_stream_begins_with_the_overview_and_has_new_rows_only(run: Path) -> None:
    """One event per file, with the columns of its new lines."""
    async with viewing(run) as viewed, following(viewed.http) as stream:
        (first,) = await read_until(stream, "overview")
        assert first.data["step"] == 2
        append(run / "metrics.jsonl", {"step": 3, "loss": 0.5})
        append(run / "rollouts.jsonl", {"group_id": 8, "step": 3, "outcome": "trained"})
        found = {one.name: one.data for one in await read_until(stream, "metrics", "groups", "overview")}
        assert found["metrics"]["columns"] == {"step": [3], "loss": [0.5]}
        assert found["groups"]["columns"]["group_id"] == [8]
        assert found["overview"]["step"] == 3
        assert "profile" not in found["overview"]  # it has not changed


async def test_a_stream_continues_after_the_last_event(run: Path) -> None:
    """A page that was disconnected misses nothing; the id is valid for another server too."""
    async with viewing(run) as viewed, following(viewed.http) as stream:
        last = (await read_until(stream, "overview"))[-1].id
    append(run / "evaluations.jsonl", {"step": 3, "accuracy": 0.5})
    async with viewing(run) as viewed, following(viewed.http, last) as stream:
        found = await read_until(stream, "overview")
        assert [one.name for one in found] == ["evaluations", "overview"]
        assert found[0].data["columns"]["step"] == [3]


@pytest.mark.parametrize("last", ["x", "1-0:5", "1-0:1,1-0:1,1-0:1,1-0:1", "," * 50, "1-0:99999999999999999999"])
async def test_an_unknown_id_makes_the_page_load_everything_again(run: Path, last: str) -> None:
    """Also the id of a run whose files were replaced."""
    async with viewing(run) as viewed, following(viewed.http, last) as stream:
        found = await read_until(stream, "overview")
        assert [one.data["kind"] for one in found if one.name == "reset"] == [
            "metrics", "evaluations", "timeline", "groups",
        ]  # fmt: skip


async def test_a_replaced_file_is_announced(run: Path) -> None:
    """A resumed run cuts its files to the step of the checkpoint."""
    async with viewing(run) as viewed, following(viewed.http) as stream:
        await read_until(stream, "overview")
        shutil.copy(run / "metrics.jsonl", run / "new")
        first = (run / "new").read_bytes().splitlines(keepends=True)[0]
        (run / "new").write_bytes(first)
        (run / "new").replace(run / "metrics.jsonl")
        found = await read_until(stream, "reset", "overview")
        assert next(one for one in found if one.name == "reset").data == {"kind": "metrics"}
        assert (await viewed.get("metrics"))["columns"]["step"] == [1]


async def test_the_end_of_the_server_ends_streams_at_once(run: Path) -> None:
    """A run of another process is not over."""
    async with viewing(run) as viewed, following(viewed.http) as stream:
        await read_until(stream, "overview")
        viewed.stopped.set()
        assert [one.name for one in await read_until(stream, "end")] == ["end"]


async def test_the_number_of_streams_is_limited(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed stream makes room for another one."""
    monkeypatch.setattr(routes, "MAX_STREAMS", 1)
    async with viewing(run) as viewed:
        async with following(viewed.http) as stream:
            await read_until(stream, "overview")
            refused = await viewed.http.get(EVENTS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        with anyio.fail_after(10):
            while True:
                async with viewed.http.stream("GET", EVENTS) as response:
                    if response.status_code == 200:
                        break


async def test_a_burst_of_streams_is_limited(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are requested at once are counted before their first events."""
    monkeypatch.setattr(routes, "MAX_STREAMS", 3)
    statuses = list[int]()

    async def request() -> None:
        async with viewed.http.stream("GET", EVENTS) as response:
            statuses.append(response.status_code)
            while len(statuses) < 8:
                await anyio.lowlevel.checkpoint()

    async with viewing(run) as viewed, anyio.create_task_group() as group:
        with anyio.fail_after(20):
            for _ in range(8):
                group.start_soon(request)
            while len(statuses) < 8:
                await anyio.lowlevel.checkpoint()
    assert sorted(statuses) == [200] * 3 + [503] * 5


async def test_a_quiet_stream_has_heartbeats(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment, so that a proxy does not close the connection."""
    monkeypatch.setattr(routes, "HEARTBEAT_SECONDS", 0.02)
    async with viewing(run) as viewed, viewed.http.stream("GET", EVENTS) as response:
        async for line in response.aiter_lines():
            if line.startswith(":"):
                break


def test_many_new_rows_are_divided_into_events(tmp_path: Path) -> None:
    """Memory of a stream is bounded; together the events have every row once."""
    path = tmp_path / "lines"
    history = Series(path, max_rows=3 * MAX_ROWS)
    path.write_bytes(b"")
    history.read_all()
    reader = EventReader({"metrics": history}, Cursor.at_end({"metrics": history}))
    path.write_bytes(lines([{"step": step} for step in range(2 * MAX_ROWS + 5)]))
    history.read_all()
    steps, more = list[int](), True
    while more:
        found, more = reader.next({})
        data = found.partition(b"data: ")[2]
        steps += msgspec.json.decode(data)["columns"]["step"]
    assert steps == list(range(2 * MAX_ROWS + 5))
