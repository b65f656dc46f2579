"""Measures the cost of one message: through a queue, through an actor, and to the compute thread and back.

    python -m bench actors_overhead [--repeats 5] [--out bench/results/actors_overhead.jsonl]

A message is a number, so only the transport is measured. `mailbox`: one task sends and one receives; with capacity 1
they wait for each other at every message; 16 is the default capacity of most queues. `actor`: a source, an actor and a
drain, two queues, under the supervisor, start and stop included. `compute thread`: a call is submitted to the idle
compute thread and its result is awaited on the event loop. The peer does the same with the standard library, in a
separate process; contenders alternate. Seconds are per message; the target is less than 50 microseconds. The decode
engine is not involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.charts import draw_bars
from bench.contenders.process import Contender, Metric, measure_interleaved
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "actors_overhead"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_messages"),
    Contender(name="asyncio", module="bench.contenders.asyncio_messages"),
)
METRICS = (Metric(name="message_seconds", unit="seconds", better="lower"),)
Case = dict[str, str | int | float]


def cases(messages: int) -> list[Case]:
    """All cases; calls to the compute thread are slower, so there are a fifth as many."""
    found: list[Case] = [
        {"path": path, "capacity": capacity, "messages": messages}
        for path in ("mailbox", "actor")
        for capacity in (1, 16)
    ]
    return [*found, {"path": "compute thread", "capacity": 1, "messages": messages // 5}]


def table(results: Sequence[Measurement]) -> str:
    """Format the results as Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Two bars per path."""
    short = [one for one in results if one.case["capacity"] != 16]
    draw_bars(short, "message_seconds", target, key="path", title="one message, capacity 1")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure every path; quick: fewer messages and two repeats."""
    messages, repeats = (5_000, 2) if quick else (50_000, repeats)
    return measure_interleaved(NAME, CONTENDERS, cases(messages), METRICS, repeats=repeats, command=COMMAND)


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=5,
    quick="measure fewer messages, two repeats",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
