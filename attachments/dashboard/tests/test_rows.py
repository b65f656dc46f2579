"""What is new in a run: rows after a cursor, replaced files, waiting, and the end of the server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from attachments.dashboard import routes
from attachments.dashboard.paths import KINDS
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from attachments.dashboard.tests.viewed_runs import Viewed, lines, viewing

ALL = "rows?" + "&".join(f"{kind}=" for kind in KINDS)


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read often, so that tests need not wait."""
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of eight groups."""
    return write_run(tmp_path / "run", RunShape(groups=8, steps=2, token_steps=0))


def append(path: Path, *records: object) -> None:
    """Append lines to a file."""
    with path.open("ab") as file:
        file.write(lines(records))


async def news(viewed: Viewed, before: dict[str, Any]) -> dict[str, Any]:
    """Return what is new since a response."""
    cursors = "&".join(f"{kind}={found['cursor']}" for kind, found in before.items() if kind != "state")
    found: dict[str, Any] = await viewed.get(f"rows?{cursors}")
    return found


async def test_a_cursor_gives_the_state_and_new_rows_only(run: Path) -> None:
    """Of the histories that the request names."""
    async with viewing(run) as viewed:
        first = await viewed.get(ALL)
        assert [found["whole"] for kind, found in first.items() if kind != "state"] == [True] * 4
        append(run / "metrics.jsonl", {"step": 3, "loss": 0.5})
        append(run / "rollouts.jsonl", {"group_id": 8, "step": 3, "outcome": "trained"})
        found = await news(viewed, first)
        assert found["metrics"]["columns"] == {"step": [3], "loss": [0.5]}
        assert not found["metrics"]["whole"]
        assert found["groups"]["columns"]["group_id"] == [8]
        assert "t" not in found["timeline"]["columns"]
        assert found["state"]["step"] == 3
        assert list(await viewed.get("rows?metrics=")) == ["state", "metrics"]


async def test_a_cursor_is_valid_for_another_server(run: Path) -> None:
    """A page that was disconnected misses nothing."""
    async with viewing(run) as viewed:
        before = await viewed.get(ALL)
    append(run / "evaluations.jsonl", {"step": 3, "accuracy": 0.5})
    async with viewing(run) as viewed:
        assert (await news(viewed, before))["evaluations"]["columns"]["step"] == [3]


@pytest.mark.parametrize(
    "cursor", ["x", "1-0:5", "1-0:1,1-0:1", ":", "-1", "9" * 5000, "IDENTITY:9", "IDENTITY:\u0661"]
)
async def test_an_unknown_cursor_gives_all_rows(run: Path, cursor: str) -> None:
    """Also one beyond the end of the file, or with digits that are not ASCII."""
    async with viewing(run) as viewed:
        identity = (await viewed.get("rows?metrics="))["metrics"]["cursor"].partition(":")[0]
        found = (await viewed.get(f"rows?metrics={cursor.replace('IDENTITY', identity)}"))["metrics"]
        assert (found["whole"], found["columns"]["step"]) == (True, [1, 2])


async def test_a_replaced_file_is_given_whole(run: Path) -> None:
    """A resumed run cuts its files to the step of the checkpoint."""
    async with viewing(run) as viewed:
        before = await viewed.get(ALL)
        shutil.copy(run / "metrics.jsonl", run / "new")
        (run / "new").write_bytes((run / "new").read_bytes().splitlines(keepends=True)[0])
        (run / "new").replace(run / "metrics.jsonl")
        found = (await news(viewed, before))["metrics"]
        assert (found["whole"], found["columns"]["step"]) == (True, [1])


async def test_a_request_that_waits_is_answered_when_the_server_ends(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another process is not over."""
    (run / ".lock").write_text("1")
    monkeypatch.setattr("attachments.dashboard.routes.is_live", lambda _: True)
    async with viewing(run) as viewed, anyio.create_task_group() as tasks:
        monkeypatch.setattr(routes, "POLL_SECONDS", 1000.0)
        answers = list[dict[str, Any]]()

        async def wait() -> None:
            answers.append(await viewed.get("rows?wait=1"))

        tasks.start_soon(wait)
        await viewed.get("about")
        viewed.stopped.set()
        with anyio.fail_after(20):
            while not answers:
                await anyio.lowlevel.checkpoint()
        assert answers[0]["state"]["live"]


async def test_data_are_compressed_for_clients_that_accept_it(run: Path) -> None:
    """As the files of the page are."""
    async with viewing(run) as viewed:
        for accepted, encoding in (("gzip", "gzip"), ("identity", None)):
            answer = await viewed.http.get(f"/dashboard/api/runs/0/{ALL}", headers={"accept-encoding": accepted})
            assert answer.headers.get("content-encoding") == encoding
            assert len(answer.json()["groups"]["columns"]["group_id"]) == 8
