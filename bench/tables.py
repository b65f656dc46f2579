"""Format measurements as Markdown: one row per case, contenders side by side, and Clotho's ratio to each.

Most benchmarks call `report(results)`. `side_by_side` and `closing` are its parts, for benchmarks that add tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from bench.contenders.semantics import meaning
from bench.fingerprint import describe_fingerprint
from bench.measurement import Measurement, ratios

OURS = "clotho"
SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
}
"""Units that are written next to each number, largest first; all other units stand in the title."""

Case = tuple[tuple[str, str | int | float], ...]


def report(results: Sequence[Measurement], metrics: Sequence[str] = (), *, note: str = "") -> str:
    """One table per metric (all metrics if none are named), then `note`, then the measurement conditions."""
    tables = [side_by_side(results, metric) for metric in metrics or unique(one.metric for one in results)]
    return "\n\n".join([*tables, *([note] if note else []), closing(results)])


def side_by_side(results: Sequence[Measurement], metric: str, *, title: str = "") -> str:
    """One row per case: median (lowest to highest) of each contender, then Clotho's ratio to each peer, pair by pair.

    Values that are equal in all rows stand in the title. Raises ValueError if no result has the metric.
    """
    found = [one for one in results if one.metric == metric]
    if not found:
        raise ValueError(f"no result has the metric {metric}")
    by_case = _by_case(found)
    contenders = contenders_of(found)
    peers = [name for name in contenders if name != OURS] if OURS in contenders else []
    fixed, keys = _keys(list(by_case))
    heading = [*(key.replace("_", " ") for key in keys), *contenders, *(f"{OURS} / {name}" for name in peers)]
    rows = []
    for case, by_contender in by_case.items():
        cells = [_case_cell(dict(case).get(key, "")) for key in keys]
        cells += [_cell(by_contender.get(name)) for name in contenders]
        cells += [_ratio_cell(by_contender.get(OURS), by_contender.get(name)) for name in peers]
        rows.append(cells)
    return "\n".join([f"**{title or _title(found[0], fixed)}**", "", markdown(heading, rows, text_columns=len(keys))])


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """A Markdown table; columns after the first `text_columns` are right-aligned."""
    rule = "|" + "---|" * text_columns + "---:|" * (len(heading) - text_columns)
    return "\n".join(["| " + " | ".join(heading) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def closing(results: Sequence[Measurement]) -> str:
    """The meaning of the numbers, one bullet for contenders with the same; then machine, BLAS, commit and command."""
    explained: dict[str, list[str]] = {}
    for name in contenders_of(results):
        mine = [one for one in results if one.contender == name]
        versions = {package: number for one in mine for package, number in one.versions.items()}
        listed = ", ".join(f"{package} {number}" for package, number in versions.items())
        meanings = meaning(mine[0].question, name) or " ".join(unique(one.semantics for one in mine))
        explained.setdefault(meanings + (f" ({listed})" if listed else ""), []).append(f"`{name}`")
    bullets = [f"* {', '.join(names)}: {text}" for text, names in explained.items()]
    return "\n".join([*bullets, "", describe_conditions(results)])


def describe_conditions(results: Sequence[Measurement]) -> str:
    """Machine, BLAS, commit and command of measurements."""
    machines = unique(f"{describe_fingerprint(f)}, {f.machine.blas}" for f in (one.fingerprint for one in results))
    commits = unique(one.fingerprint.commit for one in results)
    commands = unique(f"`{one.command}`" for one in results)
    return f"{'; '.join(machines)}; commit {', '.join(commits)}. {', '.join(commands)}"


def spread(
    values: Sequence[float], unit: str, *, middle: Callable[[Sequence[float]], float] = statistics.median
) -> str:
    """Format the median, or another middle, and the lowest and highest value in parentheses if there are several."""
    scale, suffix = scale_of(middle(values), unit)
    first = f"{number(middle(values) / scale)}{suffix and ' ' + suffix}"
    if len(values) == 1:
        return first
    return f"{first} ({number(min(values) / scale)} to {number(max(values) / scale)})"


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """The divisor and the unit that suit a value; (1, "") for units that are not scaled."""
    scales = SCALES.get(unit, ((1.0, ""),))
    return next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])


def number(value: float) -> str:
    """Format a number with three significant digits and thousands separators; whole numbers are exact."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def contenders_of(results: Sequence[Measurement]) -> list[str]:
    """Names of the contenders in the results, Clotho first, the others in order of appearance."""
    return sorted(unique(one.contender for one in results), key=lambda name: name != OURS)


def unique(values: Iterable[str]) -> list[str]:
    """Each value once, in order of appearance."""
    return list(dict.fromkeys(values))


def _by_case(results: Sequence[Measurement]) -> dict[Case, dict[str, Measurement]]:
    found: dict[Case, dict[str, Measurement]] = {}
    for one in results:
        found.setdefault(tuple(one.case.items()), {})[one.contender] = one
    return found


def _keys(cases: Sequence[Case]) -> tuple[Case, list[str]]:
    """The settings that all cases share, and the names of those that differ. For a single case, all settings differ."""
    names = unique(name for case in cases for name, _ in case)
    shared = [(name, value) for name, value in cases[0] if all((name, value) in case for case in cases)]
    if len(cases) == 1 or len(shared) == len(names):
        return (), names
    return tuple(shared), [name for name in names if name not in dict(shared)]


def _title(one: Measurement, fixed: Case) -> str:
    words = [one.metric.replace("_", " ")]
    if one.unit not in SCALES and one.unit.replace("/s", "_per_second") != one.metric:
        words.append(f"in {one.unit}")
    words.append("(higher is better)" if one.better == "higher" else "(lower is better)")
    return "; ".join([" ".join(words), *(f"{name.replace('_', ' ')} {_case_cell(value)}" for name, value in fixed)])


def _case_cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _cell(one: Measurement | None) -> str:
    return "" if one is None else spread(one.values, one.unit)


def _ratio_cell(ours: Measurement | None, theirs: Measurement | None) -> str:
    if ours is None or theirs is None:
        return ""
    if len(ours.values) != len(theirs.values) or not all(theirs.values):
        return "no pairs"
    return spread(ratios(ours, theirs), "")
