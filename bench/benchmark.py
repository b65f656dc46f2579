"""What all benchmarks share that compare contenders: repeats, quick mode, parts, the results file and the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bench.measurement import Measurement, read, results_path, write
from bench.tables import report

Measure = Callable[[int, bool], list[Measurement]]
"""Takes the repeats and whether the mode is quick."""


class Benchmark(Struct, frozen=True, kw_only=True):
    """name: of its module. about: the module's docstring. repeats: the default. quick: help text of `--quick`.

    table: formats the results. parts: parts of the benchmark that `--only` can select.
    """

    name: str
    about: str | None
    repeats: int
    quick: str
    measure: Measure
    table: Callable[[Sequence[Measurement]], str] = report
    parts: Mapping[str, Measure] = {}

    def read(self, path: Path | None = None) -> Sequence[Measurement]:
        """Read the results; an empty list if the file does not exist."""
        return read(path or results_path(self.name))

    def main(self, argv: Sequence[str]) -> int:
        """Measure, replace the results file, and print the table.

        With `--only`, replace only the results of the same cases and contenders, and print the table of the part.
        """
        parser = argparse.ArgumentParser(prog=f"python -m bench {self.name}", description=self.about)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("--repeats", type=int, default=self.repeats, help="Number of repeats after warmup.")
        parser.add_argument("--quick", action="store_true", help=f"{self.quick[0].upper()}{self.quick[1:]}.")
        parser.add_argument("--out", type=Path, default=results_path(self.name), help="Results file to replace.")
        if self.parts:
            parser.add_argument("--only", choices=list(self.parts), help="Measure this part only.")
        chosen = parser.parse_args(argv)
        if getattr(chosen, "only", None) is None:
            results = self.measure(chosen.repeats, chosen.quick)
            write(chosen.out, results)
        else:
            results = self.parts[chosen.only](chosen.repeats, chosen.quick)
            measured = [(one.case, one.contender) for one in results]
            others = [one for one in read(chosen.out) if (one.case, one.contender) not in measured]
            write(chosen.out, [*others, *results])
        sys.stdout.write(self.table(results) + "\n")
        return 0
