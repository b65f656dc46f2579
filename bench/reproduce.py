"""Measure a table of the documentation again, and show it beside the stored one.

    python -m bench reproduce TABLE [--quick] [--out FILE]

The stored results are not touched: the new ones are in another file. Measurements of contenders are also compared one
by one, as by `--compare`. Without a table, the tables and their pages are listed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench import compare, figures
from bench.__main__ import module_of
from bench.fingerprint import ROOT
from bench.measurement import Measurement, results_path

QUICK = {"soak": ("--minutes", "0.5"), "rounding": ()}
"""Flags of the quick form of programs without `--quick`."""

CALCULATED = ("rounding",)
"""Tables that depend on no measurement: they have no file of results."""


def stored_table(name: str) -> str:
    """The table of a benchmark as its page has it."""
    page = (ROOT / figures.PAGES[name]).read_text(encoding="utf-8")
    return page.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0].strip()


def arguments(name: str, out: Path, *, quick: bool) -> list[str]:
    """The command line of the benchmark that measures a table again. out: file of the new results."""
    file = [] if name in CALCULATED else ["--out", str(out)]
    return [*(QUICK.get(name, ("--quick",)) if quick else ()), *file]


def reproduce(name: str, out: Path, *, quick: bool) -> int:
    """Print the stored table and the new one. Returns the exit status of the benchmark, or 1 for a regression.

    A quick measurement has other cases: it shows that the command runs, and is not compared.
    """
    question = import_module(module_of(name))
    sys.stdout.write(f"stored in {figures.PAGES[name]}:\n\n{stored_table(name)}\n\nmeasured now:\n\n")
    sys.stdout.flush()
    status: int = question.main(arguments(name, out, quick=quick))
    if status or quick or name in CALCULATED or not all(isinstance(one, Measurement) for one in question.read(out)):
        return status
    sys.stdout.write("\ncompared:\n\n")
    return compare.main([str(results_path(name)), str(out)])


def main(argv: Sequence[str]) -> int:
    """List the tables, or measure one again."""
    parser = argparse.ArgumentParser(prog="python -m bench reproduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("table", nargs="?", choices=sorted(figures.PAGES), help="Name of the table.")
    parser.add_argument("--quick", action="store_true", help="The quick form of the benchmark, in seconds or minutes.")
    parser.add_argument("--out", type=Path, help="File for the new results; it must not exist.")
    chosen = parser.parse_args(argv)
    if chosen.table is None:
        sys.stdout.writelines(f"{name:22}{page}\n" for name, page in sorted(figures.PAGES.items()))
        return 0
    if chosen.out is not None and chosen.out.exists():
        parser.error(f"--out: {chosen.out} exists: choose another file")
    with tempfile.TemporaryDirectory() as scratch:
        return reproduce(chosen.table, chosen.out or Path(scratch) / f"{chosen.table}.jsonl", quick=chosen.quick)
