"""The command line that questions have in common: how often, whether quickly, and where the results go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bench.measurement import Measurement, write


class Question(Struct, frozen=True, kw_only=True):
    """command: `python -m bench ...`. about: the module's documentation. repeats: by default. results: their file.

    quick: what `--quick` leaves, for the help. measure: of the repeats, and whether quickly. table: what is shown.
    """

    command: str
    about: str | None
    repeats: int
    quick: str
    results: Path
    measure: Callable[[int, bool], list[Measurement]]
    table: Callable[[Sequence[Measurement]], str]


def answer(question: Question, argv: Sequence[str]) -> int:
    """Measure, replace the file of results, and show them."""
    parser = argparse.ArgumentParser(prog=question.command, description=question.about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=question.repeats)
    parser.add_argument("--quick", action="store_true", help=question.quick)
    parser.add_argument("--out", type=Path, default=question.results)
    chosen = parser.parse_args(argv)
    results = question.measure(chosen.repeats, chosen.quick)
    write(chosen.out, results)
    sys.stdout.write(question.table(results) + "\n")
    return 0
