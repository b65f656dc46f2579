"""The report of `metal`: tables, one block to paste, and the rows of README's table of Macs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.figures import write_between
from bench.fingerprint import ROOT, Fingerprint
from bench.measurement import Measurement, read
from bench.tables import SCALES, closing, markdown, number, side_by_side, spread

NOT_MEASURED = "not_measured"
COMPARED = ("tokens_per_second", "first_token_seconds", "build_seconds", "host_seconds", "nodes", "kernels")
"""Metrics with a table of their own, beside mlx-lm."""

README = ROOT / "README.md"
MACS = "macs"
"""Name of the markers of the table in README.md."""

DENSE = "Qwen3-0.6B"
LIMITED = "limit_bytes"

Where = Mapping[str, str | int]
FIGURES: Mapping[str, tuple[str, Where]] = {
    "decode at 1 row": ("tokens_per_second", {"phase": "decode", "rows": 1}),
    "4 rows": ("tokens_per_second", {"phase": "decode", "rows": 4}),
    "32 rows": ("tokens_per_second", {"phase": "decode", "rows": 32}),
    "first token": ("first_token_seconds", {"phase": "first_token"}),
    "update": ("seconds", {"phase": "update"}),
    "largest difference of sampler and learner": ("largest_nats", {"phase": "parity", "rows": 32}),
}
"""Columns of README's table: metric and settings of each figure, all of `DENSE`."""


def report(results: Sequence[Measurement]) -> str:
    """Tables of the results: beside others, then Clotho alone, then what was not measured; last the block to paste."""
    measured = [one for one in results if one.metric != NOT_MEASURED]
    compared = [metric for metric in COMPARED if metric in {one.metric for one in measured}]
    tables = [_heading(results[0].fingerprint), *(side_by_side(measured, metric) for metric in compared)]
    if alone := [one for one in measured if one.metric not in COMPARED]:
        rows = [[what(one), one.contender, one.metric.replace("_", " "), value(one)] for one in alone]
        tables.append(markdown(["case", "contender", "metric", "value"], rows, text_columns=3))
    if missing := [one for one in results if one.metric == NOT_MEASURED]:
        rows = [[what(one), one.contender, one.semantics] for one in missing]
        tables.append(markdown(["not measured", "contender", "reason"], rows, text_columns=3))
    return "\n\n".join([*tables, closing(measured), "To paste into a report:", block(results)])


def _heading(measured_on: Fingerprint) -> str:
    machine = measured_on.machine
    where = f"{machine.processor} ({machine.device}), {machine.system}, backend {machine.backend}"
    if machine.backend == "CPU":
        return f"{where}: without a GPU, only nodes and kernels say anything about Metal."
    return where


def what(one: Measurement) -> str:
    """The case of a measurement in words."""
    keys = ("model", "phase", "profile", "step", "rows", "source", "partial")
    words = [
        f"{key} {one.case[key]}" if key in ("rows", "step") else str(one.case[key]) for key in keys if key in one.case
    ]
    return ", ".join("partial" if word == "yes" else word for word in words)


def value(one: Measurement) -> str:
    """The value of a measurement with its unit."""
    unit = "" if one.unit in SCALES or one.unit == one.metric else f" {one.unit}"
    return spread(one.values, one.unit) + unit


def block(results: Sequence[Measurement]) -> str:
    """The state of the machine and the figures of README's table, by contender, as one block of text."""
    here = results[0].fingerprint
    state = next((dict(one.case) for one in results if one.metric == LIMITED), {})
    state.pop("phase", None)
    lines = [
        f"{here.machine.processor}, {number(here.machine.memory_bytes / 2**30)} GiB, {here.machine.system}",
        f"MLX {here.machine.mlx_version} on {here.machine.backend}, mlx-lm {here.mlx_lm}, commit {here.commit}",
        *([", ".join(f"{key} {text}" for key, text in state.items())] if state else []),
    ]
    names = dict.fromkeys(one.contender for one in results)
    for model in dict.fromkeys(str(one.case["model"]) for one in results if "model" in one.case):
        for name in names:
            found = [f"{column} {cell}" for column, cell in figures(results, model, name).items() if cell]
            if found:
                lines.append(f"{model}, {name}: {', '.join(found)}")
    lines += [f"{what(one)}: {one.metric} {value(one)}" for one in results if one.case.get("phase") == "learning"]
    return "\n".join(["```text", *lines, "```"])


def figures(results: Sequence[Measurement], model: str, contender: str) -> dict[str, str]:
    """The figures of `FIGURES`; empty where nothing was measured."""
    mine = [one for one in results if (one.case.get("model"), one.contender) == (model, contender)]
    found = {}
    for column, (metric, where) in FIGURES.items():
        fitting = [one for one in mine if one.metric == metric and where.items() <= one.case.items()]
        found[column] = value(fitting[0]) if fitting else ""
    return found


def readme_table(files: Sequence[Sequence[Measurement]]) -> str:
    """A row for each file and contender, of the figures of `DENSE`."""
    rows = []
    for results in files:
        machine = results[0].fingerprint.machine
        where = f"{machine.processor}, {number(machine.memory_bytes / 2**30)} GiB"
        for name in dict.fromkeys(one.contender for one in results):
            found = figures(results, DENSE, name)
            if any(found.values()):
                rows.append([where, name, *found.values()])
    if not rows:
        rows = [["no Mac yet", *[""] * (len(FIGURES) + 1)]]
    return markdown(["Mac", "", *FIGURES], rows, text_columns=2)


def write_report(files: Sequence[Path], page: Path = README) -> str:
    """Write README's table of Macs from files of results; return their reports.

    Raises ValueError for a file without results, and msgspec.MsgspecError for one of another format.
    """
    found = [read(file) for file in files]
    for file, results in zip(files, found, strict=True):
        if not results:
            raise ValueError(f"{file} has no results")
    write_between(page, MACS, readme_table(found))
    return "\n\n".join(map(report, found))
