"""What does one message cost: through a mailbox, through an actor, and to the compute thread and back.

    python -m bench actors_overhead [--repeats 5] [--out bench/results/actors_overhead.jsonl]

A message is a number, so that nothing but its way is measured. `mailbox`: one task sends, another receives, and each
waits for the other where the capacity says so; 1 makes them wait for every message, 16 is what the profile gives most
arrows. `actor`: source, actor and drain, two mailboxes, under the supervisor; its start and its end count. `compute
thread`: a call is handed to the thread that owns MLX, here without other work, and its result is awaited on the event
loop. The same is done with the standard library alone, in a process of its own, by turns. Seconds are per message; less
than 50 microseconds is the aim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.answering import Question, answer
from bench.charts import draw_bars
from bench.contenders.process import Contender, Metric, by_turns
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "actors_overhead"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_messages"),
    Contender(name="asyncio", module="bench.contenders.asyncio_messages"),
)
METRICS = (Metric(name="message_seconds", unit="seconds", better="lower"),)
Case = dict[str, str | int | float]


def cases(messages: int) -> list[Case]:
    """Calls to a thread cost more than messages on the loop: a fifth as many are enough."""
    found: list[Case] = [
        {"path": path, "capacity": capacity, "messages": messages}
        for path in ("mailbox", "actor")
        for capacity in (1, 16)
    ]
    return [*found, {"path": "compute thread", "capacity": 1, "messages": messages // 5}]


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """The results in Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """A pair of bars for every path."""
    short = [one for one in results if one.case["capacity"] != 16]
    draw_bars(short, "message_seconds", target, key="path", title="one message, capacity 1")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Every way of sending; quick: fewer messages, two repeats."""
    messages, repeats = (5_000, 2) if quick else (50_000, repeats)
    return by_turns(NAME, CONTENDERS, cases(messages), METRICS, repeats=repeats, command=COMMAND)


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=5,
    quick="fewer messages, two repeats",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(answer, QUESTION)
