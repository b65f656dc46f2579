"""Clotho's decode engine with adapters: groups of completions whose rows use the base model or different adapters."""

from __future__ import annotations

import os
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from attachments.adapters.adapter_store import AdapterStore
from attachments.adapters.adapter_weights import EngineAdapters
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model, random_prompts
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.shapes import make_policy
from clotho.inference.engine import DecodeEngine
from clotho.settings.engine import EngineSection
from clotho.settings.server import AdaptersSection
from protocols.sampling import POLICY, SampleRequest, Sampling
from training_run.adapters.contents import Adapter
from training_run.adapters.formats import Matrix, Target

BATCH = "CLOTHO_BENCH_ADAPTERS"
"""Environment variable with the number of adapters in the batch, and `+base` if half of the rows use none."""

RANKS = (4, 6, 8, 8, 10, 12, 16, 16)
ONE_RANK = 10
"""Rank of the single adapter: the mean of `RANKS`."""


def contents_of(store: AdapterStore, rank: int, seed: int) -> Adapter:
    """Return random matrices for every linear layer of the blocks."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, target in store.targets.items():
        if ".layers." in name:
            for matrix in ("lora_a", "lora_b"):
                arrays[f"{name}.{matrix}"] = _matrix(target, matrix, rank, random)
    scales = dict.fromkeys({name.rpartition(".")[0] for name in arrays}, 1.0)
    return Adapter(arrays=arrays, scales=scales, ranks=dict.fromkeys(scales, rank), path=Path())


def _matrix(
    target: Target, matrix: Matrix, rank: int, random: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (0.01 * random.standard_normal(target.shape(matrix, rank))).astype(np.float32)


def prepare(case: Case) -> MeasureOnce:
    """An engine with loaded adapters, and one prompt for each group of rows."""
    model, config = named_model(case["model"])
    if case.get("dtype"):
        model.set_dtype(getattr(mx, case["dtype"]))
        mx.eval(model.parameters())
    policy = make_policy(model, config)
    engine = DecodeEngine(policy, EngineSection(), AdaptersSection())
    adapters = EngineAdapters.of(engine)
    assert adapters is not None
    count, _, with_base = os.environ[BATCH].partition("+")
    ranks = RANKS if int(count) == len(RANKS) else (ONE_RANK,) * int(count)
    names = [f"adapter-{number}" for number in range(len(ranks))]
    for name, rank in zip(names, ranks, strict=True):
        adapters.load_adapter(name, contents_of(adapters.store, rank, seed=rank))
    prompts = random_prompts(case["prompts"], case["prompt_tokens"], config["vocab_size"])
    weights = [names[number % len(names)] if names else POLICY for number in range(len(prompts))]
    if with_base:
        weights = [weights[number // 2] if number % 2 else POLICY for number in range(len(prompts))]
    sampling = Sampling(max_tokens=case["new_tokens"], ignore_eos=True)
    rows = case["prompts"] * case["group"]

    def once() -> Metrics:
        for number, (prompt, name) in enumerate(zip(prompts, weights, strict=True)):
            seeds = tuple(range(number * case["group"], (number + 1) * case["group"]))
            request = SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=seeds, weights=name)
            engine.submit(request, lambda _: None)
        while engine.running < rows:
            engine.tick()
        before, began = engine.stats().tokens_sampled, time.perf_counter()
        while engine.has_work:
            engine.tick()
        return {"tokens_per_second": (engine.stats().tokens_sampled - before) / (time.perf_counter() - began)}

    return once


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_adapters"], packages=["mlx", "mlx-lm"])
