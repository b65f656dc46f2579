"""How many triplets of an adapter may be in use: AdaLoRA (arXiv:2303.10512), section 3.3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attachments.adalora.sections import AdaLora

Bools = NDArray[np.bool_]
Scores = NDArray[np.float64]


def budget(step: int, *, steps: int, first: int, last: int, settings: AdaLora) -> int:
    """Return b(t), the number of triplets that stay in update t = `step`, from 0, of T = `steps`.

    b(t) = b0 for t < t_i; bT for t >= T - t_f; and bT + (b0 - bT) (1 - (t - t_i) / (T - t_i - t_f))^3 between them,
    rounded. first, last: b0 and bT. t_i, t_f: `warmup_steps`, `final_steps`. Departure: equation 12 of the paper
    subtracts t_f in the numerator too, so that its budget begins above b0; this is the schedule of the authors' code.
    """
    if step < settings.warmup_steps:
        return first
    falling = steps - settings.warmup_steps - settings.final_steps
    done = (step - settings.warmup_steps) / falling if step < steps - settings.final_steps else 1.0
    return round(last + (first - last) * (1.0 - done) ** 3)


def best(scores: Sequence[Scores], count: int) -> list[Bools]:
    """Return which triplets are among the `count` best of all modules; of equal scores, the first ones.

    scores: one array for each module, of any shape; so are the results.
    """
    line = np.concatenate([one.reshape(-1) for one in scores])
    chosen = np.zeros(line.size, dtype=np.bool_)
    chosen[np.argsort(-line, kind="stable")[:count]] = True
    parts = np.split(chosen, np.cumsum([one.size for one in scores])[:-1])
    return [part.reshape(one.shape) for part, one in zip(parts, scores, strict=True)]
