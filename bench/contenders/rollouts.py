"""Shared by the contenders of `update` and `sft`: the rollouts, and the measurement on MLX."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx

from bench.contenders.shapes import random_prompts
from bench.contenders.worker import Case, Metrics

RATE = 1e-5
"""Learning rate of all contenders."""
RANK, SCALE = 8, 10.0
"""Of the adapter, which sits on every linear layer of every block; the scale is absolute."""


class Rollouts(NamedTuple):
    """Random completions, grouped by prompt; every second completion of a group is rewarded."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: list[float]

    @property
    def group(self) -> int:
        """Completions per prompt."""
        return len(self.completions) // len(self.prompts)

    @property
    def prompt_of(self) -> list[int]:
        """The index of the prompt of each completion."""
        return [number for number in range(len(self.prompts)) for _ in range(self.group)]

    @property
    def tokens(self) -> int:
        """Number of completion tokens, all of which are trained on."""
        return sum(map(len, self.completions))


def rollouts(case: Case) -> Rollouts:
    """The rollouts of a case; equal cases have equal rollouts."""
    count, group, vocabulary = case["prompts"], case["group"], case["vocabulary"]
    groups = [random_prompts(group, case["completion_tokens"], vocabulary, seed=1 + number) for number in range(count)]
    return Rollouts(
        prompts=random_prompts(count, case["prompt_tokens"], vocabulary),
        completions=[tokens for completions in groups for tokens in completions],
        rewards=[float(index % 2) for _ in range(count) for index in range(group)],
    )


def measured(update: Callable[[], None], tokens: int) -> Metrics:
    """Measure one update on MLX that evaluates all its results."""
    with measuring(tokens) as found:
        update()
    return found


@contextmanager
def measuring(tokens: int) -> Iterator[Metrics]:
    """Measure what the block computes on MLX. Yields the metrics, which are there when it has ended.

    peak_bytes: peak memory minus the memory before (weights, optimizer state, rollouts).
    """
    found: Metrics = {}
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    began, used = time.perf_counter(), time.process_time()
    yield found
    seconds, used = time.perf_counter() - began, time.process_time() - used
    found |= metrics(seconds, tokens, mx.get_peak_memory() - held) | {"tokens_per_processor_second": tokens / used}


def metrics(seconds: float, tokens: int, peak_bytes: int) -> Metrics:
    """The metrics that every contender reports."""
    return {"tokens_per_second": tokens / seconds, "seconds": seconds, "peak_bytes": peak_bytes}
