"""The timeline of a run: its lines, its limit, a resumed run, and a disk that refuses."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from attachments.dashboard.timeline import RunObserver, TimelineLine, TimelineRecorder, read_timeline
from tests.training_run.built_context import open_context, tiny_profile
from tests.training_run.records.display_examples import facts
from training_run.directory.run_directory import RunDirectory, open_run
from training_run.records.waiting import GroupStages
from training_run.supervision.queues import Queue


def line(second: int, **changes: Any) -> TimelineLine:
    """Return a line."""
    made = TimelineLine(
        t=float(second),
        decode=0.5,
        learn=0.25,
        other=0.125,
        swaps=(second - 0.5,),
        version=second,
        step=second,
        rows=4,
        queues={"scored": second},
        groups=GroupStages(waiting=second),
        waiting="",
    )
    return replace(made, **changes)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    """Yield an empty run directory."""
    found = open_run(tmp_path / "run", resume=False, clean=False)
    yield found
    found.close()


async def record(directory: RunDirectory, count: int, **arguments: Any) -> list[TimelineLine]:
    """Record `count` lines with the seconds 1, 2, 3, ..., and return the lines of the file."""
    seconds, enough = iter(range(1, 10**6)), anyio.Event()

    def next_line() -> TimelineLine:
        second = next(seconds)
        if second >= count:
            enough.set()
        return line(second)

    recorder = TimelineRecorder(directory, facts(), next_line, interval_seconds=0.0, **arguments)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        await enough.wait()
        tasks.cancel_scope.cancel()
    return list(read_timeline(directory.timeline.read_bytes()))


async def test_lines_are_written_until_the_end(directory: RunDirectory) -> None:
    """The last one when the recorder is cancelled; facts about the run are beside them."""
    lines = await record(directory, 5)
    assert [one.t for one in lines[:5]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert lines[1] == line(2)
    written = msgspec.json.decode(directory.facts.read_bytes())
    assert (written["model"], written["address"]) == (facts().model, facts().address)


async def test_a_large_file_is_halved(directory: RunDirectory) -> None:
    """Times and swaps are kept; the newest lines have the highest resolution."""
    lines = await record(directory, 60, max_bytes=4000)
    assert directory.timeline.stat().st_size <= 4000 + 250
    last = int(lines[-1].t)
    assert last >= 60
    assert sum(one.decode for one in lines) == 0.5 * last
    assert [time for one in lines for time in one.swaps] == [second - 0.5 for second in range(1, last + 1)]
    steps = [later.t - one.t for one, later in itertools.pairwise(lines)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


async def test_the_beginning_of_a_long_run_keeps_its_share_of_the_lines(directory: RunDirectory) -> None:
    """However often the file was too large, no line stands for much more time than the others."""
    lines = await record(directory, 400, max_bytes=8000)
    ends = [0.0, *(one.t for one in lines)]
    longest = max(later - earlier for earlier, later in itertools.pairwise(ends))
    assert longest <= 4 * ends[-1] / len(lines)


async def test_a_resumed_run_removes_what_it_repeats(directory: RunDirectory) -> None:
    """Time never goes back; lines that are not valid are removed."""
    directory.timeline.write_bytes(
        b"".join(msgspec.json.encode(line(second)) + b"\n" for second in (10, 20, 30)) + b'{"t": 40'
    )
    lines = await record(directory, 1, seconds_before=25.0)
    assert [one.t for one in lines[:3]] == [10.0, 20.0, 1.0]


async def test_a_file_that_cannot_be_written_is_reported_once(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording goes on, and the lines after it are whole. A part of a line is completed, or removed."""
    failures = iter(range(10))
    original = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        failed = next(failures, None)
        if failed is None:
            return original(descriptor, data, offset)
        return original(descriptor, data[:10], offset) if failed % 2 else raise_full()

    def raise_full() -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with capture_logs() as logs:
        lines = await record(directory, 15)
    assert [entry["event"] for entry in logs] == ["write_failed"]
    assert [one.t for one in lines[:3]] == [6.0, 7.0, 8.0]


async def test_a_directory_that_cannot_be_written_ends_the_recorder_only(directory: RunDirectory) -> None:
    """The run goes on without a timeline."""
    directory.timeline.mkdir()
    recorder = TimelineRecorder(directory, facts(), lambda: line(1))
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            await tasks.start(recorder.run)
    assert [entry["event"] for entry in logs] == ["write_failed"]


async def test_the_observer_counts_groups_by_place(tmp_path: Path) -> None:
    """From the numbers of messages; copies for taps do not count."""
    names = ("prompts", "prompts.1", "rollouts", "scored", "scored.tapped", "scored.tap1", "updates.checkpointer")
    queues = {name: Queue[int](name, capacity=9) for name in names}
    async with open_context(tiny_profile(tmp_path)) as context:
        observer = RunObserver(context, list(queues.values()))
        for name, sent, received in (
            ("prompts", 8, 7), ("prompts.1", 7, 6), ("rollouts", 4, 4), ("scored", 3, 3), ("scored.tapped", 3, 2),
            ("scored.tap1", 3, 0),
        ):  # fmt: skip
            outbox, inbox = queues[name].outbox(), queues[name].inbox()
            for number in range(sent):
                await outbox.send(number)
            for _ in range(received):
                await inbox.receive()
        context.ledger.train(0)
        context.weights.swap_times.add(0.001)
        found = observer.line()
        assert found.groups == GroupStages(queued=2, decoding=2, scoring=1, waiting=2)
        assert found.queues["scored.tap1"] == 3
        assert found.waiting == "groups that are decoded"
        assert len(found.swaps) == 1
        assert observer.line().swaps == ()
        context.progress.updating = True
        assert observer.line().waiting == ""
