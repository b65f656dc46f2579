"""Ours beside others in one small table, for the front page: the middle ratios of what the results say at length."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.fingerprint import describe_fingerprint
from bench.measurement import Measurement, ratios, read
from bench.tables import markdown

NAME = "summary"
GROUPS: dict[str, str | int] = {"prompts": 4, "group": 8, "prompt_tokens": 128}


class Line(NamedTuple):
    """A row: what is compared, by which question's metric, in the cases that have these values, with whom."""

    said: str
    question: str
    metric: str
    where: dict[str, str | int]
    peer: str


SIX, TWENTY_FIVE = GROUPS | {"model": "6m"}, GROUPS | {"model": "25m"}
LARGE = SIX | {"vocabulary": 32_768}
EQUAL: dict[str, str | int] = {"task": "equal work"}
SPEED = "tokens_per_second"
LINES = (
    Line("rollouts of groups, 6 M parameters, tokens/s", "decode", SPEED, SIX, "mlx-lm"),
    Line("", "decode", SPEED, SIX, "mlx-lm-lora, as its trainer calls it"),
    Line("", "decode", SPEED, SIX, "mlx-lm-lora"),
    Line("the same, 25 M", "decode", SPEED, TWENTY_FIVE, "mlx-lm"),
    Line("", "decode", SPEED, TWENTY_FIVE, "mlx-lm-lora"),
    Line("an update, 6 M, vocabulary 32,768, tokens/s", "update", SPEED, LARGE, "mlx-lm-lora"),
    Line("its peak memory", "update", "peak_bytes", LARGE, "mlx-lm-lora"),
    Line("twenty updates of 16 x 8, rollouts included, seconds", "wall_clock", "seconds", EQUAL, "mlx-lm-lora"),
    Line("", "wall_clock", "seconds", EQUAL, "trl"),
    Line("over HTTP, 64 clients, tokens/s", "http", SPEED, {"model": "embedded", "clients": 64}, "mlx_lm.server"),
)


def summary(directory: Path) -> str:
    """The table in Markdown, of the results in a directory; empty where nothing of it has been measured."""
    rows, first = [], None
    for line in LINES:
        results = read(directory / f"{line.question}.jsonl")
        pair = _pair(line, results)
        if pair is None:
            continue
        first = first or pair[0]
        found = ratios(*pair)
        cell = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        rows.append([line.said, line.peer, cell, f"`python -m bench {line.question}`"])
    if first is None:
        return ""
    table = markdown(["", "beside", "Clotho / theirs", "measured by"], rows, text_columns=2)
    return f"{table}\n\n{describe_fingerprint(first.fingerprint)}, {first.fingerprint.machine.blas}."


def _pair(line: Line, results: Sequence[Measurement]) -> tuple[Measurement, Measurement] | None:
    """Ours and the peer's, of the first case that fits and that both have."""
    fitting = [one for one in results if one.metric == line.metric and line.where.items() <= one.case.items()]
    for theirs in fitting:
        for ours in fitting:
            if (ours.contender, theirs.contender) == ("clotho", line.peer) and ours.case == theirs.case:
                return ours, theirs
    return None
