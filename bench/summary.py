"""The comparison tables of docs/benchmarks.md and, shorter, of README.md: median ratios of Clotho to each peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import peers
from bench.contenders.rollouts import RANK
from bench.fingerprint import describe_fingerprint
from bench.measurement import Measurement, ratios, read
from bench.tables import markdown

NAME = "summary"
KERNELS = "same-kernels"
CHECKPOINTED = "clotho, grad_checkpoint"
GROUPS: dict[str, str | int] = {"prompts": 4, "group": 8, "prompt_tokens": 128}


class Line(NamedTuple):
    """One row: label, benchmark, metric, the case values to select, and the peer. headline: README.md has the row.

    ours: the contender of Clotho.
    """

    note: str
    question: str
    metric: str
    where: Mapping[str, str | int]
    peer: str
    headline: bool = False
    ours: str = "clotho"


SIX, TWENTY_FIVE = GROUPS | {"model": "6m"}, GROUPS | {"model": "25m"}
LARGE = SIX | {"vocabulary": 32_768}
SPEED, BYTES = "tokens_per_second", "peak_bytes"
CLIENTS: dict[str, str | int] = {"model": "embedded", "clients": 64}
EQUAL_WORK = "seconds for 20 updates of 16 x 8 completions, rollouts included"
TO_LEARN = "seconds until 0.7 held-out accuracy, profile learn-m3"
ADAPTED: dict[str, str | int] = {"model": "6m", "adapter": f"rank {RANK}"}
REAL_UPDATE: dict[str, str | int] = {"task": "update"}
SAME_KERNELS = (
    Line("rollouts in tokens/s, 4 prompts x 8 completions", "decode", SPEED, ADAPTED | GROUPS, "mlx-lm", True),
    Line("the same, 32 different prompts", "decode", SPEED, ADAPTED | {"prompts": 32}, "mlx-lm", True),
    Line("the same, 4 prompts of 512 tokens x 8", "decode", SPEED, ADAPTED | {"prompt_tokens": 512}, "mlx-lm", True),
)
"""What MLX computes on both sides: the same operations as on a Mac, in another number."""

ON_LINUX = (
    Line("rollouts in tokens/s, model of 6 M parameters", "decode", SPEED, SIX, "mlx-lm", True),
    Line("", "decode", SPEED, SIX, "mlx-lm-lora, as its trainer calls it"),
    Line("", "decode", SPEED, SIX, "mlx-lm-lora"),
    Line("rollouts in tokens/s, model of 25 M parameters", "decode", SPEED, TWENTY_FIVE, "mlx-lm"),
    Line("", "decode", SPEED, TWENTY_FIVE, "mlx-lm-lora"),
    Line("one update in tokens/s, 6 M, vocabulary 32,768", "update", SPEED, LARGE, "mlx-lm-lora"),
    Line("peak memory of an update, 6 M, vocabulary 32,768", "update", BYTES, LARGE, "mlx-lm-lora", True),
    Line("the same, SmolLM2-135M", "real", BYTES, REAL_UPDATE, "mlx-lm-lora", True),
    Line("the same with `grad_checkpoint`", "real", BYTES, REAL_UPDATE, "mlx-lm-lora", True, CHECKPOINTED),
    Line(EQUAL_WORK, "peers", "seconds", {"task": "equal work"}, "mlx-lm-lora", True),
    Line("", "peers", "seconds", {"task": "equal work"}, "trl", True),
    Line(TO_LEARN, "peers", "seconds", {"task": "until 0.7"}, "mlx-lm-lora", True),
    Line("", "peers", "seconds", {"task": "until 0.7"}, "trl", True),
    Line("HTTP API in tokens/s, 64 clients", "serve", SPEED, CLIENTS | {"adapter_rank": 0}, "mlx_lm.server", True),
    Line("the same with an adapter", "serve", SPEED, CLIENTS | {"adapter_rank": 8}, "mlx_lm.server"),
)
"""What Clotho computes with the kernels of attachments/cpu."""


def table(directory: Path, lines: Sequence[Line], *, headlines: bool = False) -> str:
    """The table of lines in Markdown for the results of a directory; an empty string if nothing was measured.

    headlines: only the rows of README.md.
    """
    rows, machines = list[list[str]](), dict[str, list[str]]()
    for line in lines:
        if headlines and not line.headline:
            continue
        path = directory / f"{line.question}.jsonl"
        results = peers.read(path) if line.question == peers.NAME else read(path)
        pair = _pair(line, results)
        if pair is None:
            continue
        here = pair[0].fingerprint
        measured = machines.setdefault(f"{describe_fingerprint(here)}, {here.machine.blas}", [])
        if line.question not in measured:
            measured.append(line.question)
        found = ratios(*pair)
        cell = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        rows.append([line.note, line.peer, cell, f"`python -m bench {line.question}`"])
    if not rows:
        return ""
    text = markdown(["", "compared with", "Clotho / other", "measured by"], rows, text_columns=2)
    if len(machines) == 1:
        return f"{text}\n\n{next(iter(machines))}."
    places = "; ".join(f"{', '.join(measured)}: {machine}" for machine, measured in machines.items())
    return f"{text}\n\n{places}."


def _pair(line: Line, results: Sequence[Measurement]) -> tuple[Measurement, Measurement] | None:
    """The measurements of Clotho and the peer for the first matching case that both have.

    A line without an adapter has no case with one.
    """
    fitting = [one for one in results if one.metric == line.metric and line.where.items() <= one.case.items()]
    fitting = [one for one in fitting if ("adapter" in one.case) == ("adapter" in line.where)]
    for theirs in fitting:
        for ours in fitting:
            if (ours.contender, theirs.contender) == (line.ours, line.peer) and ours.case == theirs.case:
                return ours, theirs
    return None
