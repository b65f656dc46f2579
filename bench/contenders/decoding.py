"""Shared by the contenders of `decode`: preparation of the case, the clock, and the fraction of peak performance."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from bench.contenders.shapes import named_model, products, random_prompts
from bench.contenders.worker import Case, MeasureOnce, Metrics

AS_CALLED = "MLX_LM_LORA_AS_CALLED"
"""Environment variable that selects the batch size of mlx-lm-lora's trainer."""
SIGMA = 1.02
"""Standard deviation of the logarithm of lognormal lengths; the mean is then 1.7 times the median."""
SIDE = 2048
"""Side length of the matrices whose product measures the peak."""
REST = 0.3
"""Seconds until the threads of an idle BLAS sleep; MKL's threads spin for 0.2 seconds."""


class Work(NamedTuple):
    """A prepared case: `group` completions for each prompt.

    lengths: number of tokens of the completions, by prompt. at_once: number of completions that are decoded together.
    """

    model: Any
    config: dict[str, Any]
    prompts: list[list[int]]
    group: int
    lengths: list[int]
    at_once: int

    @property
    def rows(self) -> int:
        """Number of completions."""
        return len(self.prompts) * self.group

    @property
    def repeated(self) -> list[list[int]]:
        """One prompt per completion, groups together."""
        return [prompt for prompt in self.prompts for _ in range(self.group)]


def work(case: Case) -> Work:
    """Model and prompts of a case. vocabulary: overrides the vocabulary of the shape."""
    model, config = named_model(case["model"], vocabulary=case.get("vocabulary", 0))
    model.eval()
    prompts = random_prompts(case["prompts"], case["prompt_tokens"], config["vocab_size"])
    at_once = case.get("at_once", case["prompts"] * case["group"])
    return Work(model, config, prompts, case["group"], lengths(case), at_once)


def lengths(case: Case) -> list[int]:
    """Numbers of tokens: `new_tokens`; if the case has the key `longest`, lognormal with this median and maximum."""
    count, median = case["prompts"], case["new_tokens"]
    if "longest" not in case:
        return [median] * count
    sampled_N = np.random.default_rng(0).lognormal(np.log(median), SIGMA, count)
    return [int(length) for length in np.clip(np.round(sampled_N), 1, case["longest"])]


def adapter_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, mx.array]:
    """Random numbers for the matrices of an adapter, equal for equal names and shapes; evaluated."""
    keys = mx.random.split(mx.random.key(0), len(shapes))
    weights = {
        name: 0.02 * mx.random.normal(shapes[name], key=key) for name, key in zip(sorted(shapes), keys, strict=True)
    }
    mx.eval(weights)
    return weights


def timed(work: Work, generate: Callable[[], int], *, prefilled: int) -> MeasureOnce:
    """Time `generate`, which returns the number of sampled tokens. prefilled: prompt tokens that it prefills.

    The last token of a prompt is not counted as prefilled, because decoding the first token computes it. Raises
    RuntimeError if the number of tokens differs.
    """
    weights = products(work.model)
    wanted = work.group * sum(work.lengths)
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
    """Operations per second of a large float32 matrix product in this process, the best of five."""
    a = mx.random.normal((SIDE, SIDE))
    mx.eval(a)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(a @ a)
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)


def _rest() -> None:
    """Wait until the BLAS threads of this process stop spinning, so that the next contender has the cores."""
    if int(os.environ.get("MKL_NUM_THREADS", "1")) > 1:
        time.sleep(REST)
