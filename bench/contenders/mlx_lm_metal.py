"""mlx-lm's `BatchGenerator` on the models of `metal`, with the same adapter in mlx-lm's form."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from bench.contenders.metal_model import (
    RANK,
    SCALE,
    WARM_UP,
    counted_configuration,
    first_token_metrics,
    measure_steps,
    metal_configuration,
    packed_model,
    random_adapter,
)
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import random_prompts
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.graph_counts import counted_evaluations


def adapted(config: dict[str, Any]) -> Any:
    """The model with LoRA layers of mlx-lm."""
    model = packed_model(config)
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            module.lora_a = random_adapter(module.lora_a.shape, f"{name}.lora_a")
            module.lora_b = random_adapter(module.lora_b.shape, f"{name}.lora_b")
    mx.eval(model.parameters())
    model.eval()
    return model


@lru_cache(maxsize=1)
def _model(name: str) -> tuple[Any, int]:
    config = metal_configuration(name)
    return adapted(config), config["vocab_size"]


def _decoding(model: Any, prompts: list[list[int]], *, steps: int) -> Any:
    """A generator whose sequences have all been prefilled."""
    rows = len(prompts)
    generator: Any = BatchGenerator(
        model,
        stop_tokens=[],
        sampler=make_sampler(1.0),
        completion_batch_size=rows,
        prefill_batch_size=rows,
    )
    generator.insert(prompts, [steps] * rows)
    while len(generator.next_generated()) < rows:
        pass
    return generator


def decode(case: Case) -> Metrics:
    """Decode steps of all rows together, without their prefill."""
    model, vocabulary = _model(case["model"])
    rows, group = case["rows"], min(case["rows"], case["group"])
    prompts = random_prompts(rows // group, case["prompt_tokens"], vocabulary)
    repeated = [prompt for prompt in prompts for _ in range(group)]
    generator = _decoding(model, repeated, steps=case["steps"] + WARM_UP + 8)
    try:
        return measure_steps(generator.next_generated, rows=rows, steps=case["steps"], seconds=case["seconds"])
    finally:
        generator.close()


def first_token(case: Case) -> Metrics:
    """From the insertion of one prompt to its first token."""
    model, vocabulary = _model(case["model"])
    prompts = random_prompts(1, case["prompt_tokens"], vocabulary)

    def once() -> float:
        began = time.perf_counter()
        generator = _decoding(model, prompts, steps=16)
        seconds = time.perf_counter() - began
        generator.close()
        return seconds

    return first_token_metrics(once, seconds=case["seconds"])


def graph(case: Case) -> Metrics:
    """Operations of a decode step, on a narrow model of the same depth."""
    config = counted_configuration(case["model"])
    model = adapted(config)
    generator = _decoding(model, random_prompts(case["rows"], 16, config["vocab_size"]), steps=16)
    generator.next_generated()
    with counted_evaluations() as started:
        generator.next_generated()
    generator.close()
    return {"nodes": sum(one.nodes for one in started), "kernels": sum(one.kernels for one in started)}


PHASES = {"decode": decode, "first_token": first_token, "graph": graph}


def prepare(case: Case) -> MeasureOnce:
    """The phase that the case names."""
    return lambda: PHASES[case["phase"]](case)


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_metal"], packages=["mlx", "mlx-lm"])
