"""The results of an evaluation as rows of a label, a value and a unit: for displays, summary and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from protocols.evaluation import Estimate, EvalReport
from training_run.records.terminal_text import number, percent

Unit = Literal["share", "value", "tokens"]


class EvaluationRow(NamedTuple):
    """One value of an evaluation. interval: of 95 %; None if the value has none."""

    label: str
    value: float
    unit: Unit
    interval: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """The value: shares in percent."""
        return written(self.value, self.unit)

    @property
    def text_with_interval(self) -> str:
        """The value with its interval, if it has one."""
        if self.interval is None:
            return self.text
        low, high = (written(end, self.unit) for end in self.interval)
        return f"{self.text} ({low} to {high})"


def written(value: float, unit: Unit) -> str:
    """Format a value: shares in percent, tokens with one decimal, other values with three."""
    return percent(value) if unit == "share" else number(value, ".1f" if unit == "tokens" else ".3f")


def changed(old: EvaluationRow | None, new: EvaluationRow | None) -> tuple[str, str, str]:
    """Return two values of one kind and their difference with its sign, shares in percentage points; `-` if missing."""
    difference = "-"
    if old is not None and new is not None:
        unit, delta = new.unit, new.value - old.value
        difference = f"{delta * 100:+.1f}" if unit == "share" else f"{delta:+.{1 if unit == 'tokens' else 3}f}"
    return old.text if old else "-", new.text if new else "-", difference


def accuracy_text(report: EvalReport) -> str:
    """Return accuracy and number of graded problems, and how many were ungraded or had a reward that failed."""
    counts = {"ungraded": report.ungraded, "with failed rewards": report.failed}
    beside = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{percent(report.accuracy)} of {report.problems}" + (f" ({beside})" if beside else "")


def rows(found: EvalReport, *, functions: bool) -> Iterator[EvaluationRow]:
    """Yield what was measured beside the accuracy; a value that does not exist has no row.

    functions: with one row per reward function.
    """
    yield from _estimate("reward", found.reward, "value")
    for name, value in found.rewards.items() if functions else ():
        yield from _estimate(f"reward {name}", value, "value")
    yield from _estimate("loss", found.loss, "value")
    yield from _estimate(f"avg@{found.samples}", found.avg, "share")
    for k, share in found.pass_at.items():
        yield from _estimate(f"pass@{k}", share, "share")
    yield from _estimate("sampled reward", found.sampled_reward, "value")
    if found.completion_length is not None:
        yield EvaluationRow("length", found.completion_length, "tokens")
    if found.truncated is not None:
        yield EvaluationRow("truncated", found.truncated, "share")


def _estimate(label: str, estimate: Estimate | None, unit: Unit) -> Iterator[EvaluationRow]:
    if estimate is not None:
        yield EvaluationRow(label, estimate.value, unit, (estimate.low, estimate.high))
