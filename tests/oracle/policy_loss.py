"""The loss of a batch in plain Python loops and float64, written from the papers and from nothing else.

Stop-gradients are taken literally: a function of `logp` and `frozen`, two copies of the same numbers, of which only the
first is varied by finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from tests.learner_settings import short_names

Rows = list[list[float]]


class Example(Struct, frozen=True, kw_only=True):
    """One completion. group: its number; per token: the recorded numbers; learned: which tokens count."""

    group: int
    behaviour: list[float]
    proximal: list[float]
    reference: list[float]
    advantage: list[float]
    entropy: list[float]
    learned: list[bool]

    def indices(self) -> list[int]:
        """Tokens that count."""
        return [t for t, yes in enumerate(self.learned) if yes]


def clip(value: float, low: float, high: float) -> float:
    """Value, moved into [low, high]."""
    return max(low, min(high, value))


def sign_of(example: Example) -> float:
    """Mean advantage of the tokens that count."""
    return float(np.mean([example.advantage[t] for t in example.indices()]))


Token = Callable[[Example, int, list[float], list[float], list[float], Any], float]
"""loss of token t: (example, t, logp, frozen, anchor, settings)."""


def clipped(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """The clipped surrogate: -min(r A, clip(r) A), and at most c |A| for negative advantages."""
    r, A = math.exp(logp[t] - anchor[t]), e.advantage[t]
    gain = min(r * A, clip(r, 1 - s.clip_low, 1 + s.clip_high) * A)
    if s.dual_clip and A < 0:
        gain = max(gain, s.dual_clip * A)
    return -gain


def _sequence(log_s: float, A: float, s: Any) -> float:
    ratio = math.exp(log_s)
    return -min(ratio * A, clip(ratio, 1 - s.clip_low, 1 + s.clip_high) * A)


def gspo(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """The ratio of the whole sequence, its geometric mean per token."""
    return _sequence(float(np.mean([logp[u] - anchor[u] for u in e.indices()])), e.advantage[t], s)


def gspo_token(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """The same value; the gradient of each token's own log-probability."""
    mean = float(np.mean([frozen[u] - anchor[u] for u in e.indices()]))
    return _sequence(min(mean + logp[t] - frozen[t], 10.0), e.advantage[t], s)


def rloo(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """The probability ratio of the whole completion."""
    return _sequence(sum(logp[u] - anchor[u] for u in e.indices()), e.advantage[t], s)


def cispo(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """A clipped weight without gradient, times the log-probability."""
    return -clip(math.exp(frozen[t] - anchor[t]), 1 - s.clip_low, 1 + s.clip_high) * e.advantage[t] * logp[t]


def reinforce(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """The log-probability itself."""
    return -e.advantage[t] * logp[t]


def dppo_tv(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """Left out where the probability has already moved too far, in the direction of the advantage."""
    moved, A = math.exp(frozen[t]) - math.exp(e.behaviour[t]), e.advantage[t]
    too_far = (A > 0 and moved > s.clip_high) or (A < 0 and moved < -s.clip_low)
    log_ratio = logp[t] - e.behaviour[t]
    return (0.0 if too_far else -A * math.exp(log_ratio)) + float(s.quadratic_kl) * log_ratio**2


def sapo(e: Example, t: int, logp: list[float], frozen: list[float], anchor: list[float], s: Any) -> float:
    """A sigmoid gate instead of a clip."""
    A = e.advantage[t]
    tau = float(s.sapo_tau_pos if A > 0 else s.sapo_tau_neg)
    r = math.exp(logp[t] - anchor[t])
    return -A * 4 / tau / (1 + math.exp(-tau * (r - 1)))


TOKEN_LOSSES: dict[str, Token] = {
    **dict.fromkeys(("grpo", "dr_grpo", "bnpo", "dapo", "reinforce_plus_plus", "ppo_decoupled"), clipped),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "rloo": rloo,
    "cispo": cispo,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
    "sapo": sapo,
    "sft": reinforce,
}


def weights(e: Example, anchor: list[float], s: Any) -> list[float]:
    """What the mismatch of proximal policy and sampler makes of each token."""
    logs = [a - b for a, b in zip(anchor, e.behaviour, strict=True)]
    total, mean = sum(logs[t] for t in e.indices()), float(np.mean([logs[t] for t in e.indices()]))
    low, high = s.correction_low, s.correction_high
    each = [math.exp(x) for x in logs]
    whole, geometric = math.exp(total), math.exp(mean)
    return {
        "off": [1.0] * len(logs),
        "truncate": [clip(w, low, high) for w in each],
        "mask": [w if low <= w <= high else 0.0 for w in each],
        "truncate_sequence": [clip(whole, low, high)] * len(logs),
        "reject_sequence": [float(low <= whole <= high)] * len(logs),
        "reject_geometric": [float(low <= geometric <= high)] * len(logs),
    }[s.correction]


def kept(e: Example, frozen: list[float], s: Any) -> bool:
    """Whether a sequence counts at all: no outlier in it, and not off-policy with a negative advantage."""
    ratios = [math.exp(frozen[t] - e.behaviour[t]) for t in e.indices()]
    if s.outlier_low and min(ratios) < s.outlier_low:
        return False
    if s.outlier_high and max(ratios) > s.outlier_high:
        return False
    drift = float(np.mean([e.behaviour[t] - frozen[t] for t in e.indices()]))
    return not (s.off_policy_mask and sign_of(e) < 0 and drift > s.off_policy_mask)


def is_clipped(e: Example, t: int, logp: list[float], anchor: list[float], s: Any) -> bool:
    """Whether the objective limits a token: its loss is flat, or its weight is bounded."""
    A, logs = e.advantage[t], [a - b for a, b in zip(logp, anchor, strict=True)]
    own = [logs[u] for u in e.indices()]
    if s.objective in ("reinforce", "sapo"):
        return False
    if s.objective == "dppo_tv":
        moved = math.exp(logp[t]) - math.exp(e.behaviour[t])
        return (A > 0 and moved > s.clip_high) or (A < 0 and moved < -s.clip_low)
    log_ratio = {"gspo": np.mean(own), "gspo_token": np.mean(own), "rloo": np.sum(own)}.get(s.objective, logs[t])
    r = math.exp(float(log_ratio))
    if s.objective == "cispo":
        return not 1 - s.clip_low <= r <= 1 + s.clip_high
    return (A > 0 and r > 1 + s.clip_high) or (A < 0 and (r < 1 - s.clip_low or 0 < s.dual_clip < r))


def cuts(e: Example, logp: list[float], settings: Any) -> list[int]:
    """What limits each token at the first step: 3 a mask, 2 a rejection, 1 a clip, 2 a truncation, or 0."""
    s = short_names(settings)
    by_sampler = s.ratio_reference == "sampler"
    anchor = e.behaviour if by_sampler else logp
    given = [1.0] * len(logp) if by_sampler else weights(e, anchor, s)
    logs = [0.0 if by_sampler else a - b for a, b in zip(anchor, e.behaviour, strict=True)]
    whole = math.exp(sum(logs[t] for t in e.indices()))
    found = []
    for t, weight in enumerate(given):
        raw = {"truncate": math.exp(logs[t]), "truncate_sequence": whole}.get(s.correction, weight)
        if not e.learned[t] or not kept(e, logp, s):
            found.append(3)
        elif weight == 0:
            found.append(2)
        elif is_clipped(e, t, logp, anchor, s):
            found.append(1)
        else:
            found.append(2 if weight != raw else 0)
    return found


def gradient_shares(batch: Sequence[Example], logp: Rows, *, settings: Any, max_tokens: int) -> Rows:
    """|d loss / d logp| of every token at the first step, divided by the sum of the batch; by central differences."""
    rows = []
    for e, row in zip(batch, logp, strict=True):
        scale = share(e, batch, short_names(settings), max_tokens) / share(e, [e], short_names(settings), max_tokens)
        alone = partial(_loss_of_one, e, row, settings, max_tokens)
        rows.append([abs(scale * x) for x in slopes(alone, [row])[0]])
    total = sum(map(sum, rows))
    return [[x / total for x in row] for row in rows]


def _loss_of_one(e: Example, frozen: list[float], settings: Any, max_tokens: int, logp: Rows) -> float:
    """The loss of a batch of one example, at the first step, without entropy bonus."""
    none = [[0.0] * len(frozen)]
    return loss([e], logp, [frozen], none, settings=settings, max_tokens=max_tokens, several_steps=False)


def kl(e: Example, t: int, logp: list[float], sampler: list[float], s: Any) -> float:
    """Estimate of the divergence from the reference, by one token."""
    d = e.reference[t] - logp[t]
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "abs": abs(d)}[s.kl_estimator]
    return value * math.exp(logp[t] - sampler[t]) if s.kl_unbiased else value


def share(e: Example, batch: Sequence[Example], s: Any, max_tokens: int) -> float:
    """How much a token of this example counts in the loss of the batch."""
    own = len(e.indices())
    groups = {x.group for x in batch}
    in_group = sum(len(x.indices()) for x in batch if x.group == e.group)
    return {
        "token_mean": 1 / sum(len(x.indices()) for x in batch),
        "sequence_mean": 1 / (own * len(batch)),
        "token_sum": 1 / (max_tokens * len(batch)),
        "group_mean": 1 / (in_group * len(groups)),
    }[s.loss_aggregation]


def loss(
    batch: Sequence[Example],
    logp: Rows,
    frozen: Rows,
    entropy: Rows,
    *,
    settings: Any,
    max_tokens: int,
    several_steps: bool,
) -> float:
    """The whole loss. several_steps: the proximal policy is not the current one any more, but the recorded one."""
    names = short_names(settings)
    total = 0.0
    for e, row, still, entropies in zip(batch, logp, frozen, entropy, strict=True):
        proximal = e.proximal if several_steps else still
        anchor = e.behaviour if names.ratio_reference == "sampler" else proximal
        w = weights(e, anchor, names) if names.ratio_reference == "batch_start" else [1.0] * len(row)
        token_loss = TOKEN_LOSSES[names.objective]
        for t in e.indices():
            value = 0.0
            if kept(e, still, names):
                value += w[t] * token_loss(e, t, row, still, anchor, names)
            if names.kl_beta and names.kl_in == "loss":
                value += names.kl_beta * kl(e, t, row, e.behaviour, names)
            value -= names.entropy_weight * entropies[t]
            total += share(e, batch, names, max_tokens) * value
    return total


def slopes(value: Callable[[Rows], float], at: Rows, *, step: float = 1e-6) -> Rows:
    """Central differences of a function of rows of numbers."""
    result: Rows = []
    for i, row in enumerate(at):
        result.append([])
        for t in range(len(row)):
            sides = []
            for sign in (1.0, -1.0):
                moved = [list(r) for r in at]
                moved[i][t] += sign * step
                sides.append(value(moved))
            result[-1].append((sides[0] - sides[1]) / (2 * step))
    return result
