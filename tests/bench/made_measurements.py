"""Artificial measurements for tests."""

from __future__ import annotations

from typing import Literal

from bench.fingerprint import fingerprint
from bench.measurement import Measurement

HERE = fingerprint()


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
