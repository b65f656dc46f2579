"""The command line that all benchmarks share: repeats, quick mode, parts, and the results file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bench.measurement import Measurement, read, write


class Benchmark(Struct, frozen=True, kw_only=True):
    """command: `python -m bench ...`. about: the module docstring. repeats: the default. results: the results file.

    quick: help text of `--quick`. measure: takes the repeats and whether the mode is quick. table: formats the results.
    parts: functions like `measure` for parts of the benchmark that `--only` can select.
    """

    command: str
    about: str | None
    repeats: int
    quick: str
    results: Path
    measure: Callable[[int, bool], list[Measurement]]
    table: Callable[[Sequence[Measurement]], str]
    parts: Mapping[str, Callable[[int, bool], list[Measurement]]] = {}


def run_benchmark(benchmark: Benchmark, argv: Sequence[str]) -> int:
    """Measure, replace the results file, and print the table.

    With `--only`, replace only the results of the same cases and contenders, and print the table of the part.
    """
    parser = argparse.ArgumentParser(prog=benchmark.command, description=benchmark.about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=benchmark.repeats, help="Number of repeats after warmup.")
    parser.add_argument("--quick", action="store_true", help=f"{benchmark.quick[0].upper()}{benchmark.quick[1:]}.")
    parser.add_argument("--out", type=Path, default=benchmark.results, help="Results file to replace.")
    if benchmark.parts:
        parser.add_argument("--only", choices=list(benchmark.parts), help="Measure this part only.")
    chosen = parser.parse_args(argv)
    if getattr(chosen, "only", None) is None:
        results = benchmark.measure(chosen.repeats, chosen.quick)
        write(chosen.out, results)
    else:
        results = benchmark.parts[chosen.only](chosen.repeats, chosen.quick)
        measured = [(one.case, one.contender) for one in results]
        others = [one for one in read(chosen.out) if (one.case, one.contender) not in measured]
        write(chosen.out, [*others, *results])
    sys.stdout.write(benchmark.table(results) + "\n")
    return 0
