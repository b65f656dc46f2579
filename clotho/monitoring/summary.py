"""The end of a run on the screen: what was learned, where every group went, how long it took, where the adapter lies.

What memory a run would take, as a table.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clotho.monitoring.terminal_text import duration, memory, milliseconds, number, percent, size, visible
from protocols.accounting import Balance
from protocols.summary import MemoryEstimate, MemoryPart, RunSummary

LABEL = 13


def print_summary(console: Console, summary: RunSummary) -> None:
    """Write the table and the lines below it; lines are never broken, so that they can be copied."""
    plain = console.options.ascii_only
    if summary.before is not None or summary.after is not None:
        console.print(accuracy_table(summary, ascii_only=plain))
    for label, text in summary_lines(summary):
        console.print(Text(visible(f"{label:<{LABEL}}{text}", 4000, ascii_only=plain)), soft_wrap=True)


def accuracy_table(summary: RunSummary, *, ascii_only: bool = False) -> Table:
    """Held-out accuracy before and after, overall and by kind of problem."""
    before, after = summary.before, summary.after
    table = Table(title=Text("held-out accuracy"), title_justify="left", safe_box=True)
    table.add_column(Text("problems"), overflow="fold")
    for heading, report in (("before", before), ("after", after)):
        where = f"{heading} (step {report.step})" if report else heading
        table.add_column(Text(where), justify="right")
    table.add_column(Text("change"), justify="right")
    rows = [("all", before.accuracy if before else None, after.accuracy if after else None)]
    kinds = sorted({*(before.by_type if before else ()), *(after.by_type if after else ())})
    rows += [
        (kind, before.by_type.get(kind) if before else None, after.by_type.get(kind) if after else None)
        for kind in kinds
    ]
    for kind, was, is_now in rows:
        change = f"{(is_now - was) * 100:+.1f}" if was is not None and is_now is not None else "-"
        shown = [Text(percent(share) if share is not None else "-") for share in (was, is_now)]
        table.add_row(Text(visible(kind, 40, ascii_only=ascii_only)), *shown, Text(change))
    return table


def summary_lines(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """The lines below the table: label and text."""
    yield "groups", str(summary.balance)
    if summary.balance.by_reason:
        yield "discarded", _reasons(summary.balance)
    for environment, balance in summary.balance.sources.items():
        discarded = f" ({_reasons(balance)})" if balance.by_reason else ""
        yield "environment", f"{environment}: {balance.in_words('received')}{discarded}"
    gauges = summary.gauges
    yield (
        "time",
        f"training {duration(summary.training_seconds)} (by turns: decoding {duration(gauges.decode_seconds)}, updates "
        f"from start to end {duration(summary.update_seconds)}), evaluation {duration(summary.evaluation_seconds)}, "
        f"total {duration(summary.total_seconds)}",
    )
    rate = gauges.tokens_sampled / summary.total_seconds if summary.total_seconds > 0 else None
    yield (
        "decoding",
        f"{size(gauges.tokens_sampled)} tokens, {number(rate, '.0f')} tokens/s over the whole run; alone "
        f"{number(gauges.decode_rate_idle, '.0f')}, while learning {number(gauges.decode_rate_learning, '.0f')}"
        + _share(gauges.decode_rate_learning, gauges.decode_rate_idle),
    )
    yield (
        "weight swaps",
        f"{gauges.swaps}, median {milliseconds(gauges.swap_seconds_median)}, longest "
        f"{milliseconds(gauges.swap_seconds_max)}",
    )
    yield "memory", f"{memory(gauges.peak_memory_bytes)} at most"
    yield "adapter", summary.adapter
    model, adapter = shlex.quote(summary.base_model), shlex.quote(summary.adapter)
    yield "load it", f"mlx_lm.chat --model {model} --adapter-path {adapter}"


def _reasons(balance: Balance) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(balance.by_reason.items()))


def _share(part: float | None, whole: float | None) -> str:
    return f" ({part / whole * 100:.0f} %)" if part is not None and whole else ""


def print_estimate(console: Console, estimate: MemoryEstimate, parts: Sequence[MemoryPart], machine_bytes: int) -> None:
    """Write the parts, largest first, and what they come to; machine_bytes: of memory that there is."""
    table = Table(title=Text("memory, estimated"), title_justify="left", safe_box=True)
    table.add_column(Text("part"))
    table.add_column(Text("at most"), justify="right")
    table.add_column(Text("smaller with"), overflow="fold")
    for part in sorted(parts, key=lambda part: -part.bytes):
        table.add_row(Text(part.component), Text(memory(part.bytes)), Text(part.change, style="dim"))
    console.print(table)
    console.print(Text(f"total        {memory(estimate.total)} of {memory(machine_bytes)}"), soft_wrap=True)
    console.print(Text(f"minimum      {memory(estimate.minimum)}, with the KV cache of one sequence"), soft_wrap=True)
    turns = "the backward pass, the optimizer's step and decoding take turns, so the parts may add up to more"
    console.print(Text(turns), style="dim", soft_wrap=True)
    if estimate.shipped_shape:
        shape = (
            "the model is not on this machine: its shape is taken from the configuration that ships with the project"
        )
        console.print(Text(shape), style="dim", soft_wrap=True)
