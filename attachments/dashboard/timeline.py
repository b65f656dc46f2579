"""The timeline of a run: about once per second, what the compute threads did, where groups are, and what is missing.

The recorder writes timeline.jsonl and facts.json. It reads counters that the run has anyway, and writes in a worker
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import anyio
import msgspec
import structlog
from anyio import to_thread
from anyio.abc import TaskStatus
from msgspec import Struct

from clotho import __version__
from clotho.storage.atomic_files import replace_file
from training_run.directory.jsonl import JsonlWriter, encode
from training_run.directory.run_directory import RunDirectory
from training_run.records.display import RunFacts, machine_lines
from training_run.records.waiting import GroupsInFlight, GroupStages
from training_run.run import RunContext
from training_run.supervision.queues import Queue

log = structlog.get_logger(actor="timeline")

INTERVAL_SECONDS = 1.0

MAX_BYTES = 8 << 20
"""Size of timeline.jsonl. Beyond it, neighbouring lines are merged to half as many, of equal duration."""


class TimelineLine(Struct, frozen=True, kw_only=True):
    """One line of timeline.jsonl.

    t: age of the run in seconds, summed over restarts. decode, learn, other: seconds of the compute threads since the
    line before, by kind of turn. overlap: seconds in which two of them computed. swaps: when weight swaps ended since
    then, as `t`. version: policy version that is served. step: number of batches consumed. rows: sequences that are
    being decoded. queues: depth of each queue. groups: where the groups in flight are. waiting: what the learner waits
    for; empty while it computes.
    """

    t: float
    decode: float
    learn: float
    other: float
    swaps: tuple[float, ...]
    version: int
    step: int
    rows: int
    queues: dict[str, int]
    groups: GroupStages
    waiting: str
    overlap: float = 0.0

    def joined(self, following: TimelineLine) -> TimelineLine:
        """Return the line for the time of both lines: sums of times, all swaps, and the state of the later line."""
        return msgspec.structs.replace(
            following,
            decode=self.decode + following.decode,
            learn=self.learn + following.learn,
            other=self.other + following.other,
            swaps=self.swaps + following.swaps,
            overlap=self.overlap + following.overlap,
        )


class RunObserver:
    """Reads the lines of the timeline from the state of a run."""

    def __init__(self, context: RunContext, queues: Sequence[Queue[Any]]) -> None:
        """queues: all queues of the run, those of a channel in the order in which messages pass them."""
        self._context, self._queues, self._groups = context, queues, GroupsInFlight(context, queues)
        self._began = time.monotonic()
        self._totals, self._swaps = context.compute.arbiter.totals(), context.weights.swap_times.count

    def line(self) -> TimelineLine:
        """Return the line for the time since the last call."""
        context, totals, swaps = self._context, self._context.compute.arbiter.totals(), self._context.weights.swap_times
        spent, ended = totals.since(self._totals), swaps.ended_after(self._swaps)
        self._totals, self._swaps = totals, swaps.count
        stages = self._groups.stages()
        return TimelineLine(
            t=self._age(time.monotonic()),
            decode=round(spent.decode, 6),
            learn=round(spent.update, 6),
            other=round(spent.other, 6),
            swaps=tuple(map(self._age, ended)),
            version=context.weights.value.version,
            step=context.progress.step,
            rows=context.sampler.engine.stats().running_rows,
            queues={queue.name: queue.depth for queue in self._queues},
            groups=stages,
            overlap=round(spent.overlap, 6),
            waiting="" if context.progress.updating else self._groups.waiting_for(stages),
        )

    def _age(self, moment: float) -> float:
        return round(self._context.history.seconds + moment - self._began, 3)


class TimelineRecorder:
    """Writes timeline.jsonl while the run goes on. A file that cannot be written is reported once."""

    name = "timeline"

    def __init__(
        self,
        directory: RunDirectory,
        facts: RunFacts,
        line: Callable[[], TimelineLine],
        *,
        seconds_before: float = 0.0,
        max_bytes: int = MAX_BYTES,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        """line: returns the next line. seconds_before: age of a resumed run; later lines of the file are removed."""
        self._path, self._facts_path, self._facts = directory.timeline, directory.facts, facts
        self._line, self._seconds_before = line, seconds_before
        self._max_bytes, self._interval = max_bytes, interval_seconds
        self._failed = False

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write a line per interval until cancelled, and a last one then."""
        try:
            await to_thread.run_sync(self._begin)
        except OSError as error:
            self._report(error)
            task_status.started()
            return
        task_status.started()
        try:
            while True:
                await anyio.sleep(self._interval)
                await self._write()
        finally:
            await self._write()
            self._writer.close()

    async def _write(self) -> None:
        """Write the next line. A cancellation waits for the end of the write."""
        line = self._line()
        with anyio.CancelScope(shield=True):
            try:
                await to_thread.run_sync(self._append, line)
                self._failed = False
            except OSError as error:
                self._report(error)

    def _append(self, line: TimelineLine) -> None:
        self._writer.append(line)
        if self._writer.size > self._max_bytes:
            self._halve()

    def _report(self, error: OSError) -> None:
        if not self._failed:
            log.warning("write_failed", file=self._path.name, error=error.strerror or str(error))
        self._failed = True

    def _begin(self) -> None:
        """Write the facts, remove lines that the resumed run repeats, and open the file."""
        replace_file(self._facts_path, [encode(facts_of(self._facts))])
        if self._path.exists():
            kept = [line for line in read_timeline(self._path.read_bytes()) if line.t <= self._seconds_before]
            replace_file(self._path, _encoded(kept))
        self._writer = JsonlWriter(self._path)

    def _halve(self) -> None:
        """Merge neighbouring lines. If that fails, it is attempted again after `max_bytes` more.

        The lines of the whole run get about the same duration: pairs of neighbours would be merged again each time, and
        little would be left of the beginning. Durations are powers of 2, so that earlier ones fit in.
        """
        before, self._max_bytes = self._max_bytes, self._writer.size + self._max_bytes
        lines = list(read_timeline(self._path.read_bytes()))
        duration = INTERVAL_SECONDS
        while lines and lines[-1].t > duration * len(lines) / 2:
            duration *= 2
        merged = groupby(lines, key=lambda line: line.t // duration)
        replace_file(self._path, _encoded(reduce(TimelineLine.joined, neighbours) for _, neighbours in merged))
        self._writer.close()
        self._writer = JsonlWriter(self._path)
        self._max_bytes = before


def timeline_recorder(context: RunContext, facts: RunFacts, queues: Sequence[Queue[Any]]) -> TimelineRecorder:
    """Return the recorder of a run. queues: as in `RunObserver`."""
    observer = RunObserver(context, queues)
    return TimelineRecorder(context.directory, facts, observer.line, seconds_before=context.history.seconds)


def read_timeline(content: bytes) -> Iterator[TimelineLine]:
    """Yield the lines of a timeline; lines that are not valid are left out."""
    decoder = msgspec.json.Decoder(TimelineLine)
    for line in content.splitlines():
        try:
            yield decoder.decode(line)
        except (ValueError, RecursionError):
            continue


def facts_of(facts: RunFacts) -> dict[str, Any]:
    """Return the contents of facts.json."""
    policy = facts.policy
    return {
        "model": facts.model,
        "machine": next(machine_lines(facts.machine, facts.compute_path)).removeprefix("machine").strip(),
        "compute_path": facts.compute_path,
        "parameters": policy.parameters,
        "trainable_parameters": policy.trainable_parameters,
        "context_length": policy.context_length,
        "dtype": policy.dtype,
        "address": facts.address,
        "started": time.time(),
        "clotho": __version__,
    }


def _encoded(lines: Iterable[TimelineLine]) -> Iterator[bytes]:
    return (encode(line) + b"\n" for line in lines)
