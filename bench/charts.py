"""Draw measurements as charts: medians and spread, with one fixed color per contender."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.fingerprint import describe_fingerprint
from bench.measurement import Measurement
from bench.tables import contenders_of, scale_of

COLOURS = {
    "clotho": "#1f6feb",
    "mlx-lm": "#2da44e",
    "mlx_lm.server": "#2da44e",
    "mlx-lm-lora": "#d1740f",
    "trl": "#8250df",
}
OTHERS = ("#bf3989", "#57606a", "#1b7c83", "#9a6700")
"""Colors of contenders without a fixed color, assigned in alphabetical order."""

GREY = "#57606a"


def draw_lines(
    results: Sequence[Measurement], metric: str, key: str, target: Path, *, title: str = "", logarithmic: bool = False
) -> None:
    """One line per contender against one number of the case; the range from lowest to highest is shaded.

    Raises ValueError if two measurements of one contender share that number.
    """
    chosen = _scaled(one for one in results if one.metric == metric)
    _refuse_repeats(chosen, key)

    def plot(axes: Any, name: str, colour: str) -> None:
        mine = sorted((one for one in chosen if one.contender == name), key=lambda one: float(one.case[key]))
        numbers = [float(one.case[key]) for one in mine]
        axes.plot(numbers, [one.median for one in mine], "o-", color=colour, lw=1.5, ms=4, label=name)
        lowest, highest = [min(one.values) for one in mine], [max(one.values) for one in mine]
        axes.fill_between(numbers, lowest, highest, color=colour, alpha=0.18, lw=0)

    def arrange(axes: Any) -> None:
        ticks = sorted({float(one.case[key]) for one in chosen})
        if logarithmic:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,.10g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel=key.replace("_", " "), ylim=(0, None))

    _draw(chosen, target, title, plot, arrange)


def draw_bars(results: Sequence[Measurement], metric: str, target: Path, *, key: str = "", title: str = "") -> None:
    """One bar per contender and case; whiskers show lowest and highest. `key`: the case value that labels the bars."""
    chosen = _scaled(one for one in results if one.metric == metric)
    if key:
        _refuse_repeats(chosen, key)
    groups = list(dict.fromkeys(_group(one, key) for one in chosen))
    names = contenders_of(chosen)
    width = 0.8 / len(names)

    def plot(axes: Any, name: str, colour: str) -> None:
        mine = [one for one in chosen if one.contender == name]
        shift = (names.index(name) - (len(names) - 1) / 2) * width
        places = [groups.index(_group(one, key)) + shift for one in mine]
        below = [one.median - min(one.values) for one in mine]
        above = [max(one.values) - one.median for one in mine]
        axes.bar(places, [one.median for one in mine], width * 0.92, color=colour, label=name)
        axes.errorbar(
            places, [one.median for one in mine], [below, above], fmt="none", ecolor="#24292f", lw=1, capsize=3
        )

    def arrange(axes: Any) -> None:
        axes.set_xticks(range(len(groups)), groups)
        axes.set_xlim(-0.55, len(groups) - 0.45)
        axes.set(xlabel=key.replace("_", " "))

    _draw(chosen, target, title, plot, arrange)


def colours(names: Sequence[str]) -> dict[str, str]:
    """A color for each contender; well-known contenders have the same color on every chart."""
    strangers = sorted(name for name in names if name not in COLOURS)
    return {name: COLOURS.get(name) or OTHERS[strangers.index(name) % len(OTHERS)] for name in names}


def _scaled(results: Iterable[Measurement]) -> list[Measurement]:
    """Convert the values to the unit that suits the largest of them."""
    found = list(results)
    scale, suffix = scale_of(max((one.median for one in found), default=0.0), found[0].unit if found else "")
    return [replace(one, values=[value / scale for value in one.values], unit=suffix or one.unit) for one in found]


def _group(one: Measurement, key: str) -> str:
    return str(one.case[key]) if key else ", ".join(f"{name} {value}" for name, value in one.case.items())


def _refuse_repeats(chosen: Sequence[Measurement], key: str) -> None:
    places = [(one.contender, one.case[key]) for one in chosen]
    if len(set(places)) < len(places):
        raise ValueError(f"several cases have the same {key}; select the other settings before drawing")


def _draw(
    chosen: Sequence[Measurement],
    target: Path,
    title: str,
    plot: Callable[[Any, str, str], None],
    arrange: Callable[[Any], None],
) -> None:
    """Draw one figure: `plot` adds a contender in its color, `arrange` sets up the horizontal axis."""
    if not chosen:
        raise ValueError(f"nothing to draw in {target.name}")
    first = chosen[0]
    with figure(target) as axes:
        for name, colour in colours(contenders_of(chosen)).items():
            plot(axes, name, colour)
        arrange(axes)
        metric = first.metric.replace("_", " ")
        axes.set(ylabel=metric if first.unit in metric else f"{metric}, {first.unit}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.set_title(f"{title or first.question}: {first.better} is better", loc="left", fontsize=10)
        machine = axes.get_xlabel(), describe_fingerprint(first.fingerprint)
        axes.set_xlabel("\n".join(part for part in machine if part), fontsize=9, color=GREY)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(fontsize=9)


@contextmanager
def figure(target: Path, *, height: float = 4.0) -> Iterator[Any]:
    """Yield the axes of a figure, which is written at the end of the block. Equal contents give equal files."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "clotho"
    drawn, axes = plt.subplots(figsize=(8, height), layout="constrained")
    yield axes
    target.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(target, metadata={"Date": None})
    plt.close(drawn)
