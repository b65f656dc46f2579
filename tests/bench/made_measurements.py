"""Artificial measurements and trials for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import structs

from bench.contenders.process import Contender
from bench.contenders.worker import Case
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, Metric
from bench.studies.runner import Point, Trial, average

HERE = fingerprint()
Calls = list[tuple[Sequence[Contender], Sequence[Case], int]]
"""Contenders, cases and repeats of measurements."""


def measurement(
    values: list[float],
    *,
    contender: str = "clotho",
    metric: str = "rate",
    unit: str = "tokens/s",
    better: Literal["higher", "lower"] = "higher",
    versions: dict[str, str] | None = None,
    **case: str | float,
) -> Measurement:
    """One metric of one contender in one case."""
    return Measurement(
        question="decode",
        case=case,
        contender=contender,
        metric=metric,
        unit=unit,
        better=better,
        values=values,
        semantics=f"What {contender} does.",
        versions={"mlx": "0.32.4"} if versions is None else versions,
        command="python -m bench decode",
        fingerprint=HERE,
    )


def made_up(calls: Calls) -> Callable[..., list[Measurement]]:
    """Return a replacement of `measure_interleaved` that records its arguments; every value is 1."""

    def measure(
        question: str,
        contenders: Sequence[Contender],
        cases: Sequence[Case],
        metrics: Sequence[Metric],
        *,
        repeats: int,
        **_: Any,
    ) -> list[Measurement]:
        calls.append((contenders, cases, repeats))
        return [
            structs.replace(
                measurement([1.0] * repeats, contender=who.name, metric=metric.name, unit=metric.unit, **case),
                question=question,
            )
            for case in cases
            for who in contenders
            for metric in metrics
        ]

    return measure


def made_trial(accuracies: Sequence[float], *, arm: str = "one", seed: int = 0) -> Trial:
    """A trial with evaluations every ten updates."""
    curve = tuple(Point(10 * n, 1.0 * n, 80 * n, accuracy) for n, accuracy in enumerate(accuracies))
    values = {"before": accuracies[0], "after": accuracies[-1], "average": average(curve)}
    return Trial(arm=arm, flags=(), seed=seed, curve=curve, values=values, command="", fingerprint=HERE)
