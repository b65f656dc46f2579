"""Summary at the end of a run, and the tables of `--dry-run`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocols.accounting import Balance
from protocols.compute import ComputeTotals
from protocols.evaluation import EvalReport
from protocols.summary import DatasetReport, HistoryGap, MemoryEstimate, MemoryPart, PromptReport, RunSummary
from training_run.profile.program import program
from training_run.records.held_out_rows import EvaluationRow, changed, rows
from training_run.records.terminal_text import (
    duration,
    memory,
    milliseconds,
    number,
    percent,
    relative_path,
    share,
    size,
    terminal_text,
    wrapped,
)

LABEL_WIDTH = 13
LINE_LIMIT = 4000


def print_summary(console: Console, summary: RunSummary) -> None:
    """Print what was learned, the accuracy table, the next commands, and the figures of the run.

    Prose is wrapped at words; commands and the balance of the groups are not.
    """
    _print_lines(console, result_lines(summary))
    if summary.before is not None or summary.after is not None:
        console.print(accuracy_table(summary, ascii_only=console.options.ascii_only))
    console.print()
    _print_lines(console, command_lines(summary))
    console.print()
    _print_lines(console, figure_lines(summary))


class SummaryLine(NamedTuple):
    """One line of the summary. is_whole: it is not wrapped, so that it can be copied or searched."""

    label: str
    text: str
    is_whole: bool = False


def _print_lines(console: Console, lines: Iterable[SummaryLine]) -> None:
    for label, text, is_whole in lines:
        line = terminal_text(f"{label:<{LABEL_WIDTH}}{text}", LINE_LIMIT, ascii_only=console.options.ascii_only)
        first, *others = [line] if is_whole else wrapped(line, console.width, indent=LABEL_WIDTH)
        console.print(Text(first[:LABEL_WIDTH], "bold").append(first[LABEL_WIDTH:], "not bold"), soft_wrap=True)
        for part in others:
            console.print(Text(part), soft_wrap=True)


def accuracy_table(summary: RunSummary, *, ascii_only: bool = False) -> Table:
    """Return the held-out accuracy before and after training, overall and by type of problem, and other measures."""
    before, after = summary.before, summary.after
    table = Table(title=Text("held-out accuracy"), title_justify="left", safe_box=True)
    table.add_column(Text("problems"), overflow="fold")
    for heading, report in (("before", before), ("after", after)):
        title = f"{heading} (step {report.step})" if report else heading
        table.add_column(Text(title), justify="right")
    table.add_column(Text("change"), justify="right")
    for part in (_accuracies, partial(rows, functions=True)):
        old, new = ({row.label: row for row in part(report)} if report else {} for report in (before, after))
        for label in dict.fromkeys([*old, *new]):
            name = Text(terminal_text(label, 40, ascii_only=ascii_only))
            table.add_row(name, *map(Text, changed(old.get(label), new.get(label))))
        table.add_section()
    return table


def _accuracies(report: EvalReport) -> Iterator[EvaluationRow]:
    """Yield the accuracy of an evaluation, overall and by type of problem in alphabetical order."""
    if report.accuracy is not None:
        yield EvaluationRow("all", report.accuracy, "share")
        yield from (EvaluationRow(name, accuracy, "share") for name, accuracy in sorted(report.by_type.items()))


def result_lines(summary: RunSummary) -> Iterator[SummaryLine]:
    """Yield what was learned and what was not, the findings, and the best checkpoint."""
    yield SummaryLine("learned", _learned(summary))
    if summary.steps < summary.planned_steps:
        yield SummaryLine("stopped", f"after step {summary.steps} of {summary.planned_steps}")
    if summary.is_untrained:
        trained = "adapter is the initial one" if summary.is_adapter else "weights are those of the base model"
        yield SummaryLine("untrained", f"no update was applied, so the {trained}")
    for finding in summary.findings:
        yield SummaryLine(finding.severity, f"{finding.fact}; {finding.consequence}; {finding.advice}")
        if finding.command:
            yield SummaryLine(finding.use, finding.command, is_whole=True)
    if equal := summary.balance.by_reason.get("zero_variance", 0):
        ended = summary.balance.trained + summary.balance.discarded
        yield SummaryLine("no signal", f"{equal} of {ended} groups had equal rewards and therefore no training signal")
    if summary.after and summary.after.ungraded:
        count = summary.after.ungraded
        yield SummaryLine(
            "ungraded", f"{count} held-out problems, because no reward with correct = true applies to them"
        )
    if summary.after and summary.after.failed:
        yield SummaryLine(
            "failed", f"a reward function on {summary.after.failed} held-out problems; log.jsonl has the errors"
        )
    if (best := summary.best) is not None:
        accuracy = f"held-out accuracy {percent(best.accuracy)} of {best.problems} problems"
        yield SummaryLine("best", f"step {best.step}, {accuracy}: {summary.best_path}")


def figure_lines(summary: RunSummary) -> Iterator[SummaryLine]:
    """Yield the groups, times, rates, memory and files of the run."""
    yield from _group_lines(summary)
    yield from _speed_lines(summary)
    yield SummaryLine("files", f"{', '.join(summary.files)} in {summary.run_dir}")
    yield SummaryLine("adapter" if summary.is_adapter else "weights", summary.adapter)


def _group_lines(summary: RunSummary) -> Iterator[SummaryLine]:
    """Yield how the groups of the run ended."""
    yield SummaryLine("groups", str(summary.balance), is_whole=True)
    if summary.balance.by_reason:
        yield SummaryLine("discarded", _reasons(summary.balance))
    for gap in summary.history_gaps:
        yield SummaryLine("records", _gap(gap, summary))
    parts = [("environment", f"{name}: ", "received", one) for name, one in summary.balance.sources.items()]
    for label, name, verb, balance in [*parts, *((name, "", "begun", one) for name, one in summary.balances.items())]:
        yield SummaryLine(label, f"{name}{balance.in_words(verb)}", is_whole=True)
        if balance.by_reason:
            yield SummaryLine("", f"discarded: {_reasons(balance)}")


def _speed_lines(summary: RunSummary) -> Iterator[SummaryLine]:
    """Yield times, rates and memory."""
    gauges, evaluation = summary.gauges, summary.evaluation_seconds
    beside = f", evaluation {duration(evaluation)} beside it" if evaluation else ""
    yield SummaryLine(
        "time",
        f"total {duration(summary.total_seconds)}: training {duration(summary.training_seconds)}{beside}, evaluation "
        f"before and after {duration(summary.other_evaluation_seconds)}",
    )
    if summary.training_seconds > 0:
        yield SummaryLine("computing", _computing(summary.computing, summary.training_seconds, summary.cores))
    rate = gauges.tokens_sampled / summary.total_seconds if summary.total_seconds > 0 else None
    alone, during = (number(one, ".0f") for one in (gauges.decode_rate_idle, gauges.decode_rate_learning))
    yield SummaryLine(
        "decoding",
        f"{size(gauges.tokens_sampled)} tokens; per second: {number(rate, '.0f')} over the run with its evaluations, "
        f"{alone} while decoding alone, {during} during updates" + _share(gauges.decode_share_learning),
    )
    yield SummaryLine(
        "weight swaps",
        f"{gauges.swaps}, median {milliseconds(gauges.swap_seconds_median)}, longest "
        f"{milliseconds(gauges.swap_seconds_max)}",
    )
    yield SummaryLine("memory", f"peak {memory(gauges.peak_memory_bytes)}")


def _computing(totals: ComputeTotals, seconds: float, cores: int) -> str:
    """What the compute threads did in the training; what is near 100 % limits the run."""
    decode, update, other, overlap = (
        share(min(1.0, part / seconds)) for part in (totals.decode, totals.update, totals.other, totals.overlap)
    )
    idle = share(max(0.0, 1.0 - totals.busy / seconds))
    return (
        f"{totals.processor / seconds:.2f} of {cores} cores in the training; decoding {decode} of the time, updates "
        f"{update}, other work {other}, two at once {overlap}, none {idle}"
    )


def _learned(summary: RunSummary) -> str:
    """What the evaluations before and after training show."""
    before, after = summary.before, summary.after
    if summary.version == 0:
        return "nothing, because no update was applied"
    if before is None or after is None:
        return "unknown, because the policy was not evaluated before and after training"
    if before.accuracy is None or after.accuracy is None or before.interval is None or after.interval is None:
        return "unknown, because no held-out problem could be graded"
    (low, high), (new_low, new_high) = before.interval, after.interval
    change = after.accuracy - before.accuracy
    word = "rose" if change > 0 else "fell" if change < 0 else "is unchanged"
    overlap = low <= new_high and new_low <= high
    return (
        f"the held-out accuracy {word}: {percent(before.accuracy)} (from {percent(low)} to {percent(high)}) before, "
        f"{percent(after.accuracy)} (from {percent(new_low)} to {percent(new_high)}) after; the intervals of 95 % "
        + ("overlap, so that the change can be chance" if overlap else "do not overlap")
    )


def command_lines(summary: RunSummary) -> Iterator[SummaryLine]:
    """Yield the commands that a user needs next."""
    if summary.steps < summary.planned_steps:
        yield _command("continue it", summary.resume_command)
    model, adapter = shlex.quote(summary.base_model), shlex.quote(summary.adapter)
    if summary.base_model.lower().endswith(".gguf"):  # mlx-lm reads models from directories only
        yield _command("convert it", f"{program()} convert {model} base --to mlx")
        model = "base"
    yield _command("load it", f"mlx_lm.chat --model {model} --adapter-path {adapter}")
    run, profile = shlex.quote(summary.run_dir), shlex.quote(summary.profile)
    yield _command("look at it", f"{program()} view {run}")
    if summary.is_untrained:
        yield _command("find out", f"{program()} doctor --profile {profile}")
        return
    if not summary.is_adapter:  # `eval` and `serve` read such weights as a model
        trained = shlex.quote(f"{summary.run_dir}-model")
        yield _command("export it", f"mlx_lm.fuse --model {model} --adapter-path {adapter} --save-path {trained}")
        yield _command("evaluate it", f"{program()} eval --profile {profile} --model {trained}")
        yield _command("serve it", f"{program()} serve --model {trained}")
        return
    yield _command("evaluate it", f"{program()} eval --profile {profile} --adapter {adapter}")
    yield _command(
        "serve it", f"{program()} serve --model {shlex.quote(summary.base_model)} --adapter policy={adapter}"
    )
    yield _command("export it", f"{program()} convert {run} {shlex.quote(f'{summary.run_dir}.gguf')} --to gguf")


def _command(label: str, text: str) -> SummaryLine:
    return SummaryLine(label, text, is_whole=True)


def resume_command(profile: Path) -> str:
    """Return the command line that continues the run with this resolved profile (`RUN_DIR/profile.toml`)."""
    return f"{program()} --profile {shlex.quote(relative_path(profile))} --resume"


def _reasons(balance: Balance) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(balance.by_reason.items()))


def _gap(gap: HistoryGap, summary: RunSummary) -> str:
    """What a history file lacks; for files with one record per step or group, out of how many."""
    totals = {"steps": summary.steps, "groups": summary.balance.trained + summary.balance.discarded}
    total = totals.get(gap.unit)
    if total is None:
        return f"{gap.file} lacks {gap.missing} {gap.unit}"
    return f"{gap.file} has {total - gap.missing} of these {total} {gap.unit}"


def _share(share: float | None) -> str:
    return f" in {share * 100:.0f} % of the time" if share is not None else ""


def print_estimate(
    console: Console, estimate: MemoryEstimate, parts: Sequence[MemoryPart], limit_bytes: int, limit: str
) -> None:
    """Print the parts of an estimate, largest first, and the total. limit_bytes, limit: memory limit and source."""
    table = Table(title=Text("estimated memory"), title_justify="left", safe_box=True)
    table.add_column(Text("part"))
    table.add_column(Text("peak"), justify="right")
    table.add_column(Text("reduced by"), overflow="fold")
    for part in sorted(parts, key=lambda part: -part.bytes):
        table.add_row(Text(part.component), Text(memory(part.bytes)), Text(part.change, style="dim"))
    console.print(table)
    console.print(Text(f"total        {memory(estimate.total)} of {memory(limit_bytes)}: {limit}"), soft_wrap=True)
    console.print(Text(f"minimum      {memory(estimate.minimum)}, with the KV cache of one sequence"), soft_wrap=True)
    if estimate.freed:
        kept = (
            f"{memory(estimate.freed)} at most, which MLX keeps for reuse beside the total, and returns near the limit"
        )
        console.print(Text(f"freed        {kept}"), soft_wrap=True)
    note = "the sum of the parts may be larger, because backward pass, optimizer step and decoding alternate"
    console.print(Text(note), style="dim", soft_wrap=True)
    if estimate.shipped_shape:
        note = "the model is not on this machine; the estimate uses the configuration that ships with the project"
        console.print(Text(note), style="dim", soft_wrap=True)


def print_dataset(console: Console, dataset: DatasetReport, prompts: PromptReport | None) -> None:
    """Print problems by type, repeated problems, and the prompts; these need the tokenizer of the model."""
    lines = [
        ("dataset", f"{sum(dataset.problems.values())} problems for training, {dataset.heldout} held out"),
        *(("", f"{count} of type {kind}") for kind, count in sorted(dataset.problems.items())),
        ("repeated", f"{dataset.duplicates} prompts for training, {dataset.overlap} held-out prompts in training"),
    ]
    if prompts is not None:
        problems = sum(dataset.problems.values()) - prompts.removed
        of = f" ({prompts.measured} of {problems} were rendered)" if prompts.measured < problems else ""
        lines += [
            ("removed", f"{prompts.removed} problems for training, {prompts.removed_heldout} held-out problems"),
            ("prompts", f"{prompts.shortest} to {prompts.longest} tokens, median {prompts.median:g}{of}"),
            ("first prompt", prompts.first),
        ]
    for label, text in lines:
        shown = terminal_text(f"{label:<{LABEL_WIDTH}}{text}", LINE_LIMIT, ascii_only=console.options.ascii_only)
        console.print(Text(shown), soft_wrap=True)
