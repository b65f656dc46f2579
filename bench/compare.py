"""What changed between two sets of results, and whether anything became slower or larger.

    python -m bench --compare BEFORE AFTER [--tolerance 0.1]

Each is a file of results or a directory of them. Measurements are paired by question, case, contender and metric. A
regression is a median that is worse by more than the tolerance, and by more than the spread: the distance from lowest
to highest value, of the two sides the larger. An improvement is the same the other way round. The status is 1 if there
is any regression, 2 if there is nothing to compare, and else 0.
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
    """The same thing measured twice."""

    before: Measurement
    after: Measurement

    @property
    def relative(self) -> float:
        """By how much the median grew, as a share of what it was."""
        grown = self.after.median - self.before.median
        if not self.before.median:
            return math.copysign(math.inf, grown) if grown else 0.0
        return grown / abs(self.before.median)

    @property
    def worse(self) -> float:
        """By how much the median became worse, in its unit; negative where it became better."""
        grown = self.after.median - self.before.median
        return grown if self.before.better == "lower" else -grown

    @property
    def spread(self) -> float:
        """From lowest to highest value, of the two sides the larger."""
        return max(max(side.values) - min(side.values) for side in (self.before, self.after))

    def verdict(self, tolerance: float) -> str:
        """Whether it is a regression or an improvement; nothing if it is neither."""
        if abs(self.relative) <= tolerance or abs(self.worse) <= self.spread:
            return ""
        return "regression" if self.worse > 0 else "improvement"


class BadInputError(Exception):
    """There is nothing to compare; the message says why."""


def load(path: Path) -> dict[Key, Measurement]:
    """The measurements of a file, or of all files of a directory that have any. Raises BadInputError."""
    if path.is_dir():
        return {key: one for file in sorted(path.glob("*.jsonl")) for key, one in _of_directory(file)}
    if not path.exists():
        raise BadInputError(f"there is no {path}")
    try:
        return _by_key(read(path))
    except (msgspec.MsgspecError, OSError) as error:
        raise BadInputError(f"{path} does not have measurements: {error}") from error


def _of_directory(file: Path) -> Iterator[tuple[Key, Measurement]]:
    try:
        yield from load(file).items()
    except BadInputError as error:
        sys.stderr.write(f"bench: left out: {error}\n")


def _by_key(measurements: Sequence[Measurement]) -> dict[Key, Measurement]:
    return {(one.question, frozenset(one.case.items()), one.contender, one.metric): one for one in measurements}


def pairs(before: Mapping[Key, Measurement], after: Mapping[Key, Measurement]) -> list[Change]:
    """What both have. Raises BadInputError if that is nothing, or if they do not agree on what is better."""
    found = [Change(before[key], after[key]) for key in before if key in after]
    if not found:
        raise BadInputError("the two have no measurement in common")
    for change in found:
        sides = (change.before, change.after)
        if len({(one.unit, one.better) for one in sides}) > 1:
            raise BadInputError(f"{change.before.question}: {change.before.metric} has changed its meaning")
    return found


def table(changes: Sequence[Change], tolerance: float) -> str:
    """A row per pair: both medians with lowest and highest, the change of the median, and the verdict."""
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
    """Compare; 1 if anything became worse, 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m bench --compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.1, help="share of the median that is not yet a change")
    chosen = parser.parse_args(argv)
    try:
        before, after = load(chosen.before), load(chosen.after)
        changes = pairs(before, after)
    except BadInputError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    if differing := differences(changes):
        sys.stderr.write(f"bench: the two were not measured alike: {'; '.join(differing)}\n")
    if alone := len(before) + len(after) - 2 * len(changes):
        sys.stderr.write(f"bench: {alone} measurements are in one of the two only\n")
    regressions = sum(change.verdict(chosen.tolerance) == "regression" for change in changes)
    allowed = f"worse by more than {chosen.tolerance:.0%} and than the spread"
    sys.stdout.write(f"{table(changes, chosen.tolerance)}\n\n{regressions} of {len(changes)} {allowed}\n")
    return 1 if regressions else 0
