"""Evaluations of a run: one line of evaluations.jsonl per evaluation, and what a resumed run reads from its histories.

`EVALUATION_METRICS` describes every key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from protocols.errors import RunDirectoryError, visible
from protocols.evaluation import Estimate, EvalReport, HeldOutMeasures, SampledResults

EVALUATION_METRICS = {
    "step": "Step whose weights were evaluated; 0 is the initial policy.",
    "policy_version": "Version of these weights.",
    "accuracy": "Fraction of the graded held-out problems that greedy decoding answers correctly; null if none is "
    "graded.",
    "accuracy_interval": "Interval of 95 % of the accuracy (Wilson).",
    "accuracy_by_type": "Accuracy by type of problem.",
    "problems": "Number of graded problems: those that a reward with `correct = true` applies to.",
    "ungraded": "Number of problems that no reward with `correct = true` applies to.",
    "failed": "Number of problems with a reward function that failed on a completion.",
    "reward": "Mean reward of the greedy completions, weighted as in training: `value`, the ends `low` and `high` of "
    "its interval of 95 % (normal), and `problems`, the number of problems with a reward; null if there are none.",
    "rewards": "The same for the value of each reward function, by name and without weight.",
    "loss": "Held-out loss: mean negative log-likelihood of the reference completions, in nats per token, with the "
    "keys of `reward`; null if the dataset has none.",
    "completion_length/mean": "Mean number of tokens of the greedy completions.",
    "truncated_fraction": "Fraction of the greedy completions that reached `sampling.max_tokens` or the context "
    "length.",
    "samples": "Sampled completions per problem (k = `eval.samples`).",
    "avg_at_k": "Mean share of correct completions among the k sampled completions of a problem, with the keys of "
    "`reward` (interval: Wilson's at the effective number of problems); null without samples.",
    "pass_at": "By k, the probability that at least one of k sampled completions is correct (unbiased estimate), with "
    "the keys and interval of `avg_at_k`.",
    "sampled_reward": "Mean reward of the sampled completions, with the keys of `reward`; null without samples.",
    "completion_tokens": "Total number of tokens of the completions, sampled ones included.",
    "time/evaluation": "Seconds that the evaluation took.",
    "time/run": "Age of the run in seconds at the end of the evaluation.",
    "final": "Whether the evaluation follows the last update of the run.",
}
"""Every key of evaluations.jsonl."""


class EvaluationRecord(Struct, frozen=True, kw_only=True):
    """One line of evaluations.jsonl; `EVALUATION_METRICS` describes the keys."""

    step: int
    policy_version: int
    accuracy: float | None
    accuracy_interval: tuple[float, float] | None
    accuracy_by_type: dict[str, float]
    problems: int
    ungraded: int
    failed: int = 0
    reward: Estimate | None = None
    rewards: Mapping[str, Estimate] = {}
    loss: Estimate | None = None
    completion_length: float | None = msgspec.field(name="completion_length/mean", default=None)
    truncated_fraction: float | None = None
    samples: int = 0
    avg_at_k: Estimate | None = None
    pass_at: Mapping[str, Estimate] = {}
    sampled_reward: Estimate | None = None
    completion_tokens: int
    evaluation_seconds: float = msgspec.field(name="time/evaluation")
    run_seconds: float = msgspec.field(name="time/run")
    final: bool


def evaluation_record(report: EvalReport, *, run_seconds: float) -> EvaluationRecord:
    """Return the line of evaluations.jsonl for a report."""
    sampled = report.measures.sampled or SampledResults(samples=0)
    return EvaluationRecord(
        step=report.step,
        policy_version=report.version,
        accuracy=report.accuracy,
        accuracy_interval=report.interval,
        accuracy_by_type=report.by_type,
        problems=report.problems,
        ungraded=report.ungraded,
        failed=report.failed,
        reward=report.measures.reward,
        rewards=report.measures.rewards,
        loss=report.measures.loss,
        completion_length=report.measures.completion_length,
        truncated_fraction=report.measures.truncated,
        samples=sampled.samples,
        avg_at_k=sampled.avg,
        pass_at=sampled.pass_at,
        sampled_reward=sampled.reward,
        completion_tokens=report.completion_tokens,
        evaluation_seconds=report.seconds,
        run_seconds=run_seconds,
        final=report.final,
    )


class RunHistory(Struct, frozen=True, kw_only=True):
    """What the earlier processes of a run recorded, and the evaluations since.

    seconds: age of the run at the start. evaluations: all evaluations until then, oldest first. before: evaluation of
    the base policy; after: the newest evaluation with `final`; None if there is none. reports: of the evaluator, since
    the start.
    """

    seconds: float
    evaluations: tuple[EvalReport, ...] = ()
    before: EvalReport | None
    after: EvalReport | None
    reports: list[EvalReport] = msgspec.field(default_factory=list)


class _Age(Struct):
    seconds: float = msgspec.field(name="time/run", default=0.0)


def read_history(metrics: Path, evaluations: Path) -> RunHistory:
    """Read the history of a run from metrics.jsonl and evaluations.jsonl. Missing files mean a new run.

    Raises RunDirectoryError if a line is not valid.
    """
    try:
        records = [msgspec.json.decode(line, type=EvaluationRecord) for line in _lines(evaluations)]
        age = max((msgspec.json.decode(line, type=_Age).seconds for line in _lines(metrics)), default=0.0)
    except ValueError as error:
        raise RunDirectoryError(f"{metrics} or {evaluations.name} is not valid: {visible(str(error), 200)}") from error
    reports = [_report(record) for record in records]
    return RunHistory(
        seconds=max([age, *(record.run_seconds for record in records)]),
        evaluations=tuple(reports),
        before=next((report for report in reports if report.step == 0 and not report.final), None),
        after=next((report for report in reversed(reports) if report.final), None),
    )


def read_evaluations(evaluations: Path) -> tuple[EvaluationRecord, ...]:
    """Return the lines of evaluations.jsonl, without lines that are not valid."""
    found = []
    with suppress(OSError):
        for line in _lines(evaluations):
            with suppress(ValueError):
                found.append(msgspec.json.decode(line, type=EvaluationRecord))
    return tuple(found)


def evaluated_steps(evaluations: Path, *, until: int) -> tuple[int, ...]:
    """Return the step of each valid line of evaluations.jsonl up to the step `until`."""
    return tuple(record.step for record in read_evaluations(evaluations) if record.step <= until)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, one at a time: the metrics of a long run have hundreds of megabytes."""
    if path.exists():
        with path.open("rb") as file:
            yield from file


def measures(record: EvaluationRecord) -> HeldOutMeasures:
    """Return what a line of evaluations.jsonl has beside the accuracy."""
    sampled = SampledResults(
        samples=record.samples, avg=record.avg_at_k, pass_at=record.pass_at, reward=record.sampled_reward
    )
    return HeldOutMeasures(
        reward=record.reward,
        rewards=record.rewards,
        loss=record.loss,
        completion_length=record.completion_length,
        truncated=record.truncated_fraction,
        sampled=sampled if record.samples else None,
    )


def _report(record: EvaluationRecord) -> EvalReport:
    return EvalReport(
        step=record.step,
        version=record.policy_version,
        problems=record.problems,
        ungraded=record.ungraded,
        failed=record.failed,
        accuracy=record.accuracy,
        interval=record.accuracy_interval,
        by_type=record.accuracy_by_type,
        measures=measures(record),
        completion_tokens=record.completion_tokens,
        seconds=record.evaluation_seconds,
        final=record.final,
    )
