"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Checks in about 30 seconds that no part became slower by an order of magnitude. Only Clotho is measured.

    python -m bench quick

Each number is the better of two runs (one run for startup) and is compared with a limit. A limit is about ten times
worse than a slow two-core machine under load, so exit status 1 means a regression and not a busy machine. Use `python
-m bench --compare` for smaller changes. Everything except startup runs in this process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from bench.contenders import clotho_decode, clotho_swap, clotho_turns, clotho_update
from bench.contenders.worker import Case, MeasureOnce, Metrics
from bench.fingerprint import ROOT
from bench.tables import markdown, spread


class Limit(Struct, frozen=True, kw_only=True):
    """The worst accepted value of a metric. at_least: the value must not be lower; otherwise it must not be higher."""

    title: str
    prepare: Callable[[Case], MeasureOnce]
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
        """Whether a value respects the limit."""
        return value >= self.worst if self.at_least else value <= self.worst


def prepare_start(case: Case) -> MeasureOnce:
    """Prepare `--dry-run`: the program from start to exit."""

    def once() -> Metrics:
        began = time.perf_counter()
        command = [sys.executable, "pipeline.py", "--profile", case["profile"], "--dry-run"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return {"seconds": time.perf_counter() - began}

    return once


EMBEDDED: Case = {"model": "embedded", "vocabulary": 384, "prompt_tokens": 128}
LIMITS = (
    Limit(
        title="decoding, tokens/s",
        prepare=clotho_decode.prepare,
        case=EMBEDDED | {"prompts": 4, "group": 8, "new_tokens": 64},
        metric="tokens_per_second",
        unit="tokens/s",
        worst=200.0,
        at_least=True,
    ),
    Limit(
        title="one update of 8 x 128 completion tokens",
        prepare=clotho_update.prepare,
        case=EMBEDDED | {"prompts": 1, "group": 8, "completion_tokens": 128},
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
        title="one turn of an environment, without policy",
        prepare=clotho_turns.prepare,
        case={"environment": "Python", "episodes": 128, "workers": 2},
        metric="turn_seconds",
        unit="seconds",
        worst=20e-3,
    ),
    Limit(
        title="startup",
        prepare=prepare_start,
        case={"profile": "local-m3"},
        metric="seconds",
        unit="seconds",
        worst=30.0,
        runs=1,
    ),
)


def main(argv: Sequence[str]) -> int:
    """Measure. Returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m bench quick", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args(argv)
    rows, slipped = [], False
    for limit in LIMITS:
        value = limit.measured()
        kept = limit.keeps(value)
        slipped = slipped or not kept
        worst = f"at {'least' if limit.at_least else 'most'} {spread([limit.worst], limit.unit)}"
        rows.append([limit.title, spread([value], limit.unit), worst, "" if kept else "exceeded"])
    sys.stdout.write(markdown(["", "measured", "limit", ""], rows) + "\n")
    return int(slipped)
