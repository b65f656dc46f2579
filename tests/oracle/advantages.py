"""Advantages in plain loops, from the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def deviation(values: Sequence[float], kind: str) -> float:
    """Standard deviation about the mean; the sample's divides by one less, and is 0 for a single value."""
    count = len(values) - (kind == "sample")
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / count) if count else 0.0


def advantages(kind: str, rewards: Sequence[Sequence[float]], *, spread: str, epsilon: float) -> list[list[float]]:
    """For a batch of groups."""
    everything = [r for group in rewards for r in group]
    centred = [[r - mean(group) for r in group] for group in rewards]
    if kind == "group":
        return [[c / (deviation(g, spread) + epsilon) for c in row] for g, row in zip(rewards, centred, strict=True)]
    if kind == "mean":
        return centred
    if kind == "max_rl":
        above = [[r - min([0.0, *g]) for r in g] for g in rewards]
        return [[(r - mean(g)) / mean(g) if len(set(g)) > 1 else 0.0 for r in g] for g in above]
    if kind == "leave_one_out":
        return [[r - (sum(g) - r) / (len(g) - 1) if len(g) > 1 else 0.0 for r in g] for g in rewards]
    if kind == "batch":
        return [[(r - mean(everything)) / (deviation(everything, spread) + epsilon) for r in g] for g in rewards]
    if kind == "batch_scaled":
        return [[c / (deviation(everything, spread) + epsilon) for c in row] for row in centred]
    flat = [c for row in centred for c in row]
    return [[c / (deviation(flat, spread) + epsilon) for c in row] for row in centred]


def least_variance(rewards: Sequence[float], weights: Sequence[float], *, spread: str, epsilon: float) -> list[float]:
    """For one group, with the weight of each reward in the baseline."""
    baseline = sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)
    return [(r - baseline) / (deviation(rewards, spread) + epsilon) for r in rewards]
