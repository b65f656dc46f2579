"""Draw the charts of the documentation and write the generated tables into README.md and docs/.

python -m bench figures
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from bench import curriculum, environments, methods, remote, soak
from bench.fingerprint import ROOT, describe_fingerprint
from bench.learning import RESULTS, LearningRun
from bench.summary import NAME as SUMMARY
from bench.summary import summary

IMAGES = ROOT / "docs" / "images"
PAGES: tuple[tuple[Any, str], ...] = (
    (methods, "numerics-internals.md"),
    (environments, "atropos.md"),
    (curriculum, "datasets.md"),
    (soak, "reliability.md"),
    (remote, "remote.md"),
)
"""Benchmarks whose table stands between markers of their name on a page of the documentation."""

SUMMARY_PAGE, BENCHMARKS_PAGE = "benchmarks.md", "benchmark-tables.md"
OBJECTIVES_PAGE, OBJECTIVES = "numerics.md", "objectives"
PAGE_ORDER = (
    "decode",
    "first_token",
    "update",
    "real",
    "gym",
    "http",
    "serve",
    "visitors",
    "swap",
    "save",
    "adapters",
    "speculation",
    "overlap",
    "startup_training",
    "time_to_accuracy",
)
"""Benchmarks on docs/benchmark-tables.md, in the order of the page."""
STYLES = {"async": ("#1f6feb", "-", "asynchronous"), "sync": ("#d1740f", "--", "synchronous (--async false)")}


def read_runs(path: Path) -> list[LearningRun]:
    """Read the runs of a results file; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=LearningRun) for line in path.read_bytes().splitlines()]


def draw_learning(runs: Sequence[LearningRun], target: Path) -> None:
    """Draw held-out accuracy against seconds of training, one line per run."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "clotho"
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    named: set[str] = set()
    for run in runs:
        colour, line, name = STYLES[run.mode]
        points = [(seconds, accuracy) for _, seconds, accuracy in run.curve]
        axes.plot(*zip(*points, strict=True), line, color=colour, lw=1.3, label=None if name in named else name)
        named.add(name)
    axes.axhline(0.9, color="#888888", lw=0.8, ls=":")
    axes.set(xlabel="seconds of training", ylabel="held-out accuracy, greedy", ylim=(0, 1.02), xlim=(0, None))
    machine = describe_fingerprint(runs[0].fingerprint)
    axes.set_title(f"local-m3, {len({run.seed for run in runs})} seeds, {machine}", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def measured(runs: Sequence[LearningRun]) -> str:
    """Format the runs as a Markdown table: medians over the seeds, and ranges for accuracy and time."""
    modes = [mode for mode in STYLES if any(run.mode == mode for run in runs)]
    rows = ["| | " + " | ".join(STYLES[mode][2] for mode in modes) + " |", "|---|" + "---|" * len(modes)]
    by_mode = [[run for run in runs if run.mode == mode] for mode in modes]
    for label, value in ROWS:
        rows.append(f"| {label} | " + " | ".join(value(group) for group in by_mode) + " |")
    seeds, first = len(by_mode[0]), runs[0]
    return "\n".join(
        [*rows, "", f"{seeds} seeds, {describe_fingerprint(first.fingerprint)}, {first.fingerprint.machine.blas}."]
    )


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _rates(runs: Sequence[LearningRun]) -> str:
    """Decode rate alone and during updates; a synchronous run samples no rollouts during updates."""
    alone = statistics.median(run.decode_rate_idle or 0 for run in runs)
    beside = statistics.median(run.decode_rate_learning or 0 for run in runs)
    if not beside:
        return f"{alone:,.0f} tokens/s; none"
    return f"{alone:,.0f} tokens/s; {beside:,.0f} ({beside / alone:.0%})"


ROWS: tuple[tuple[str, Callable[[Sequence[LearningRun]], str]], ...] = (
    ("held-out accuracy before", lambda runs: f"{runs[0].before:.3f}"),
    ("held-out accuracy after, lowest to highest", lambda runs: _range([run.after for run in runs], ".3f")),
    ("seconds of training", lambda runs: _range([run.seconds for run in runs], ".1f")),
    ("updates; completion tokens", lambda r: f"{r[0].steps}; {statistics.median(run.tokens for run in r):,.0f}"),
    ("weight swap, median", lambda runs: f"{statistics.median(run.swap_median for run in runs) * 1e3:.3f} ms"),
    ("weight swap, longest", lambda runs: f"{max(run.swap_longest for run in runs) * 1e3:.3f} ms"),
    ("decode rate without updates; during updates", _rates),
)


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text between the two markers `name` of a page. Raises ValueError if a marker is missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    page = path.read_text(encoding="utf-8")
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def illustrated(question: Any, results: Sequence[Any]) -> str:
    """The table of a benchmark, below its chart if it draws one."""
    table: str = question.table(results)
    if not hasattr(question, "draw"):
        return table
    question.draw(results, IMAGES / f"{question.NAME}.svg")
    return f"![{question.NAME}](images/{question.NAME}.svg)\n\n{table}"


def main(argv: Sequence[str]) -> int:
    """Regenerate every chart and table that has results. Returns 1 and names the others if some have none."""
    argparse.ArgumentParser(prog="python -m bench figures", description=__doc__).parse_args(argv)
    missing = []
    if runs := read_runs(RESULTS):
        draw_learning(runs, IMAGES / "learning.svg")
        write_between(ROOT / "README.md", "measured", measured(runs))
    else:
        missing.append("learning")
    if beside_others := summary(RESULTS.parent):
        write_between(ROOT / "docs" / SUMMARY_PAGE, SUMMARY, beside_others)
        write_between(ROOT / "README.md", SUMMARY, summary(RESULTS.parent, headlines=True))
    if outcomes := methods.read():
        write_between(ROOT / "docs" / OBJECTIVES_PAGE, OBJECTIVES, methods.objectives(outcomes))
    benchmarks = [(import_module(f"bench.{name}"), BENCHMARKS_PAGE) for name in PAGE_ORDER]
    for question, page in (*PAGES, *benchmarks):
        if results := question.read():
            write_between(ROOT / "docs" / page, question.NAME, illustrated(question, results))
        else:
            missing.append(question.NAME)
    if missing:
        sys.stderr.write(f"bench: no results, unchanged: {', '.join(missing)} (run python -m bench NAME)\n")
    return 1 if missing else 0
