"""Losses of preferences in plain Python loops and float64, written from the papers and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from msgspec import Struct


class Judged(Struct, frozen=True, kw_only=True):
    """One completion of a pair. policy, reference: log-probabilities of its tokens; better: of the two."""

    pair: int
    better: bool
    policy: list[float]
    reference: list[float]


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + math.exp(-x))


def log_ratio(one: Judged) -> float:
    """Return log pi(y) - log ref(y)."""
    return sum(one.policy) - sum(one.reference)


def dpo(w: Judged, v: Judged, s: Any) -> float:
    """Equation 7, with the labels exchanged in a share of the pairs, and the cross-entropy of the better one."""
    h = s.beta * (log_ratio(w) - log_ratio(v))
    smooth = -(1 - s.label_smoothing) * math.log(sigmoid(h)) - s.label_smoothing * math.log(sigmoid(-h))
    return float(smooth - s.nll_weight * fmean(w.policy))


def ipo(w: Judged, v: Judged, s: Any) -> float:
    """A square, of log-ratios per token."""
    h = log_ratio(w) / len(w.policy) - log_ratio(v) / len(v.policy)
    return float((h - 1 / (2 * s.beta)) ** 2)


def orpo(w: Judged, v: Judged, s: Any) -> float:
    """Cross-entropy and the ratio of odds, of the geometric mean of the probabilities of tokens."""
    p, q = math.exp(fmean(w.policy)), math.exp(fmean(v.policy))
    return -math.log(p) - float(s.odds_weight) * math.log(sigmoid(math.log(p / (1 - p)) - math.log(q / (1 - q))))


def simpo(w: Judged, v: Judged, s: Any) -> float:
    """Means and a margin."""
    return -math.log(sigmoid(s.beta * fmean(w.policy) - s.beta * fmean(v.policy) - s.target_margin))


OF_PAIRS = {"dpo": dpo, "ipo": ipo, "orpo": orpo, "simpo": simpo}


def loss(name: str, completions: Sequence[Judged], settings: Any, *, reference_point: float) -> float:
    """Return the mean loss of pairs; of `kto`, that of completions."""
    if name == "kto":
        values = []
        for one in completions:
            sign, weight = (1, settings.desirable_weight) if one.better else (-1, settings.undesirable_weight)
            values.append(weight * (1 - sigmoid(sign * settings.beta * (log_ratio(one) - reference_point))))
        return fmean(values)
    better = {one.pair: one for one in completions if one.better}
    worse = {one.pair: one for one in completions if not one.better}
    return fmean(OF_PAIRS[name](better[pair], worse[pair], settings) for pair in better)
