"""The command line that all benchmarks share: repeats, quick mode and the results file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bench.measurement import Measurement, write


class Benchmark(Struct, frozen=True, kw_only=True):
    """command: `python -m bench ...`. about: the module docstring. repeats: the default. results: the results file.

    quick: help text of `--quick`. measure: takes the repeats and whether the mode is quick. table: formats the results.
    """

    command: str
    about: str | None
    repeats: int
    quick: str
    results: Path
    measure: Callable[[int, bool], list[Measurement]]
    table: Callable[[Sequence[Measurement]], str]


def run_benchmark(benchmark: Benchmark, argv: Sequence[str]) -> int:
    """Measure, replace the results file, and print the table."""
    parser = argparse.ArgumentParser(prog=benchmark.command, description=benchmark.about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=benchmark.repeats, help="Number of repeats after warmup.")
    parser.add_argument("--quick", action="store_true", help=f"{benchmark.quick[0].upper()}{benchmark.quick[1:]}.")
    parser.add_argument("--out", type=Path, default=benchmark.results, help="Results file to replace.")
    chosen = parser.parse_args(argv)
    results = benchmark.measure(chosen.repeats, chosen.quick)
    write(chosen.out, results)
    sys.stdout.write(benchmark.table(results) + "\n")
    return 0
