"""Has anything slipped by an order of magnitude: ours only, the smallest cases, in half a minute at most.

    python -m bench quick

Each number is the better of two runs (of one, for start-up), and is held against a limit: about ten times worse than
what a slow machine of two cores gives with other work beside. So status 1 means a slip and never a busy machine; to see
less than that there is `python -m bench --compare`. Everything but start-up is measured in this process, by the
programs that measure us elsewhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from bench import scaling
from bench.contenders import clotho_decode, clotho_learn, clotho_messages, clotho_swap
from bench.contenders.loop import Case, Metrics, Once
from bench.fingerprint import ROOT
from bench.tables import markdown, spread


class Limit(Struct, frozen=True, kw_only=True):
    """What a metric of a case must not be worse than. at_least: it must not be lower; else, not higher."""

    title: str
    prepare: Callable[[Case], Once]
    case: Case
    metric: str
    unit: str
    worst: float
    at_least: bool = False
    runs: int = 2

    def measured(self) -> float:
        """The better of the runs."""
        once = self.prepare(self.case)
        values = [once()[self.metric] for _ in range(self.runs)]
        return max(values) if self.at_least else min(values)

    def keeps(self, value: float) -> bool:
        """Whether a value is no worse."""
        return value >= self.worst if self.at_least else value <= self.worst


def prepare_start(case: Case) -> Once:
    """The program from its command to its exit, when it only says what it would do."""

    def once() -> Metrics:
        began = time.perf_counter()
        command = [sys.executable, "pipeline.py", "--profile", case["profile"], "--dry-run"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return {"seconds": time.perf_counter() - began}

    return once


LIMITS = (
    Limit(
        title="decoding, tokens/s",
        prepare=clotho_decode.prepare,
        case=scaling.decoding("embedded"),
        metric="tokens_per_second",
        unit="tokens/s",
        worst=200.0,
        at_least=True,
    ),
    Limit(
        title="one update of 8 completions of 128 tokens",
        prepare=clotho_learn.prepare,
        case=scaling.learning("embedded"),
        metric="seconds",
        unit="seconds",
        worst=5.0,
    ),
    Limit(
        title="weight swap",
        prepare=clotho_swap.prepare,
        case={"model": "embedded", "weights": "lora"},
        metric="swap_seconds",
        unit="seconds",
        worst=3e-3,
    ),
    Limit(
        title="one message through an actor",
        prepare=clotho_messages.prepare,
        case={"path": "actor", "capacity": 16, "messages": 2000},
        metric="message_seconds",
        unit="seconds",
        worst=2e-4,
    ),
    Limit(
        title="start-up",
        prepare=prepare_start,
        case={"profile": "local-m3"},
        metric="seconds",
        unit="seconds",
        worst=30.0,
        runs=1,
    ),
)


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(prog="python -m bench quick", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args(argv)
    rows, slipped = [], False
    for limit in LIMITS:
        value = limit.measured()
        kept = limit.keeps(value)
        slipped = slipped or not kept
        worst = f"at {'least' if limit.at_least else 'most'} {spread([limit.worst], limit.unit)}"
        rows.append([limit.title, spread([value], limit.unit), worst, "" if kept else "slipped"])
    sys.stdout.write(markdown(["", "measured", "limit", ""], rows) + "\n")
    return int(slipped)
