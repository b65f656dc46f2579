"""What the contenders of `decode` share: the case made ready, the clock, and the share of the machine's peak."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from bench.contenders.loop import Case, Metrics, Once
from bench.contenders.shapes import named_model, products, random_prompts

AS_CALLED = "MLX_LM_LORA_AS_CALLED"
"""Set in the environment of the contender that calls mlx-lm-lora's generation as its trainer does."""
SIDE = 2048
"""Of the matrices whose product is taken for the peak."""
REST = 0.3
"""Seconds after which the threads of a BLAS that has nothing to do have gone to sleep; MKL's look out for 0.2."""


class Work(NamedTuple):
    """A case made ready: `group` completions of `new_tokens` tokens for each prompt."""

    model: Any
    config: dict[str, Any]
    prompts: list[list[int]]
    group: int
    new_tokens: int

    @property
    def rows(self) -> int:
        """Completions."""
        return len(self.prompts) * self.group

    @property
    def repeated(self) -> list[list[int]]:
        """A prompt for each completion, groups together."""
        return [prompt for prompt in self.prompts for _ in range(self.group)]


def work(case: Case) -> Work:
    """Model and prompts of a case. vocabulary: of the model, where it is not the shape's own."""
    model, config = named_model(case["model"], vocabulary=case.get("vocabulary", 0))
    model.eval()
    prompts = random_prompts(case["prompts"], case["prompt_tokens"], config["vocab_size"])
    return Work(model, config, prompts, case["group"], case["new_tokens"])


def timed(work: Work, generate: Callable[[], int], *, prefilled: int) -> Once:
    """Run `generate`, which returns how many tokens it drew. prefilled: tokens of prompts that it computes.

    The last token of a prompt is not among them: it is computed to draw the first one. Raises RuntimeError if not all
    tokens were sampled.
    """
    weights = products(work.model)
    wanted = work.rows * work.new_tokens
    operations = 2 * (weights.blocks * (prefilled + wanted) + weights.head * wanted)
    peak = matrix_peak()

    def once() -> Metrics:
        began = time.perf_counter()
        sampled = generate()
        seconds = time.perf_counter() - began
        if sampled != wanted:
            raise RuntimeError(f"{sampled} tokens were sampled instead of {wanted}")
        _rest()
        return {
            "tokens_per_second": sampled / seconds,
            "microseconds_per_token": seconds / sampled * 1e6,
            "peak_fraction": operations / seconds / peak,
        }

    return once


@cache
def matrix_peak() -> float:
    """Operations per second of a large float32 product in this process, the best of five."""
    a = mx.random.normal((SIDE, SIDE))
    mx.eval(a)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(a @ a)
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)


def _rest() -> None:
    """Leave the cores to who comes next: where BLAS has threads of its own, they look out for work for a while."""
    if int(os.environ.get("MKL_NUM_THREADS", "1")) > 1:
        time.sleep(REST)
