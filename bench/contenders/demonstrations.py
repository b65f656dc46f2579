"""Shared by the contenders of `sft`: random demonstrations of different lengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench.contenders.shapes import random_prompts
from bench.contenders.worker import Case


class Demonstrations(NamedTuple):
    """A batch of prompts, and of the answers that are learned."""

    prompts: list[list[int]]
    answers: list[list[int]]

    @property
    def tokens(self) -> int:
        """Number of learned tokens."""
        return sum(map(len, self.answers))


def demonstrations(case: Case) -> Demonstrations:
    """The batch of a case; equal cases have equal batches. Lengths are uniform, from 0.5 to 1.5 of the mean."""
    rng, count = np.random.default_rng(0), case["batch"]
    halves = [case["prompt_tokens"] // 2, case["completion_tokens"] // 2]
    prompts, answers = ([int(one) for one in rng.integers(half, 3 * half + 1, count)] for half in halves)
    tokens = iter(random_prompts(2 * count, 3 * max(halves), case["vocabulary"]))
    return Demonstrations([next(tokens)[:length] for length in prompts], [next(tokens)[:length] for length in answers])
