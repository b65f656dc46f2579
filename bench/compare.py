"""Compare two sets of results and report what became slower or larger.

    python -m bench --compare BEFORE AFTER [--tolerance 0.1]

Each set is a results file or a directory of results files. Measurements are paired by benchmark, case, contender and
metric. A regression is a median that is worse by more than the tolerance and by more than the spread. The spread is the
distance from the lowest to the highest value, of the wider side. An improvement is the same in the other direction. The
exit status is 1 if there is a regression, 2 if there is nothing to compare, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.measurement import Measurement, read
from bench.tables import markdown, spread

Key = tuple[str, frozenset[tuple[str, str | int | float]], str, str]


class Change(Struct, frozen=True):
    """One measurement made twice."""

    before: Measurement
    after: Measurement

    @property
    def relative(self) -> float:
        """Relative growth of the median."""
        grown = self.after.median - self.before.median
        if not self.before.median:
            return math.copysign(math.inf, grown) if grown else 0.0
        return grown / abs(self.before.median)

    @property
    def worse(self) -> float:
        """How much worse the median became, in its unit; negative if it improved."""
        grown = self.after.median - self.before.median
        return grown if self.before.better == "lower" else -grown

    @property
    def spread(self) -> float:
        """Distance from the lowest to the highest value, of the wider side."""
        return max(max(side.values) - min(side.values) for side in (self.before, self.after))

    def verdict(self, tolerance: float) -> str:
        """Return `regression`, `improvement` or an empty string."""
        if abs(self.relative) <= tolerance or abs(self.worse) <= self.spread:
            return ""
        return "regression" if self.worse > 0 else "improvement"


class BadInputError(Exception):
    """There is nothing to compare; the message says why."""


def load(path: Path) -> dict[Key, Measurement]:
    """Read the measurements of a file, or of all matching files of a directory. Raises BadInputError."""
    if path.is_dir():
        return {key: one for file in sorted(path.glob("*.jsonl")) for key, one in _of_directory(file)}
    if not path.exists():
        raise BadInputError(f"{path} does not exist")
    try:
        return _by_key(read(path))
    except (msgspec.MsgspecError, OSError) as error:
        raise BadInputError(f"{path} is not a file of measurements: {error}") from error


def _of_directory(file: Path) -> Iterator[tuple[Key, Measurement]]:
    try:
        yield from load(file).items()
    except BadInputError as error:
        sys.stderr.write(f"bench: skipped: {error}\n")


def _by_key(measurements: Sequence[Measurement]) -> dict[Key, Measurement]:
    return {(one.question, frozenset(one.case.items()), one.contender, one.metric): one for one in measurements}


def pairs(before: Mapping[Key, Measurement], after: Mapping[Key, Measurement]) -> list[Change]:
    """Pair the measurements that both sides have. Raises BadInputError if there are none or if units differ."""
    found = [Change(before[key], after[key]) for key in before if key in after]
    if not found:
        raise BadInputError("the two sets have no measurement in common")
    for change in found:
        sides = (change.before, change.after)
        if len({(one.unit, one.better) for one in sides}) > 1:
            raise BadInputError(
                f"{change.before.question}: {change.before.metric} has another unit or direction on the other side"
            )
    return found


def table(changes: Sequence[Change], tolerance: float) -> str:
    """One row per pair: both medians with their range, the change of the median, and the verdict."""
    heading = ["question", "case", "contender", "metric", "before", "after", "change", ""]
    rows = []
    for change in changes:
        before, after = change.before, change.after
        case = ", ".join(f"{name} {value}" for name, value in before.case.items())
        cells = [before.question, case, before.contender, before.metric]
        cells += [spread(before.values, before.unit), spread(after.values, after.unit)]
        rows.append([*cells, f"{change.relative:+.1%}", change.verdict(tolerance)])
    return markdown(heading, rows, text_columns=4)


def differences(changes: Sequence[Change]) -> list[str]:
    """What else differs between the two sides: machine, BLAS, versions."""
    found: dict[str, None] = {}
    for change in changes:
        before, after = _surroundings(change.before), _surroundings(change.after)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                found[f"{name} {before.get(name, 'none')} before, {after.get(name, 'none')} after"] = None
    return list(found)


def _surroundings(one: Measurement) -> dict[str, str]:
    machine = one.fingerprint.machine
    mine = {"processor": machine.processor, "cores": str(machine.cores), "backend": machine.backend}
    mine |= {"BLAS": machine.blas, "MLX": machine.mlx_version, "mlx-lm": one.fingerprint.mlx_lm}
    return mine | {f"{package} of {one.contender}": version for package, version in one.versions.items()}


def main(argv: Sequence[str]) -> int:
    """Compare. Returns 1 if a metric regressed and 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m bench --compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.1, help="Relative change of the median that is ignored.")
    chosen = parser.parse_args(argv)
    try:
        before, after = load(chosen.before), load(chosen.after)
        changes = pairs(before, after)
    except BadInputError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    if differing := differences(changes):
        sys.stderr.write(f"bench: the measurement conditions differ: {'; '.join(differing)}\n")
    if alone := len(before) + len(after) - 2 * len(changes):
        sys.stderr.write(f"bench: {alone} measurements are in only one of the two sets\n")
    regressions = sum(change.verdict(chosen.tolerance) == "regression" for change in changes)
    allowed = f"are worse by more than {chosen.tolerance:.0%} and by more than the spread"
    sys.stdout.write(f"{table(changes, chosen.tolerance)}\n\n{regressions} of {len(changes)} {allowed}\n")
    return 1 if regressions else 0
