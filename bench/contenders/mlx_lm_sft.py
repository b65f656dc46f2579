"""mlx-lm's supervised fine-tuning: its `train`, whose second iteration is measured; the first one compiles the step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx_lm.tuner.trainer import TrainingArgs, iterate_batches, train

from bench.contenders.demonstrations import demonstrations
from bench.contenders.mlx_lm_lora_update import adapted
from bench.contenders.rollouts import RATE, measuring
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve


def prepare(case: Case) -> MeasureOnce:
    """A model with an adapter, its optimizer, and one batch that every run trains on."""
    model, optimizer, batch = adapted(case), optim.Adam(learning_rate=RATE), demonstrations(case)
    dataset = [([*prompt, *answer], len(prompt)) for prompt, answer in zip(*batch, strict=True)]

    def once() -> Metrics:
        found: list[Metrics] = []

        def batches(**options: Any) -> Iterator[tuple[mx.array, mx.array]]:
            """Yield the batch twice; the trainer asks again when it has evaluated its step."""
            both = iterate_batches(**options)  # type: ignore[no-untyped-call]
            yield next(both)
            with measuring(batch.tokens) as metrics:
                yield next(both)
            found.append(metrics)

        with tempfile.TemporaryDirectory() as directory:
            adapter = Path(directory, "adapters.safetensors")
            settings = TrainingArgs(batch_size=case["batch"], iters=3, steps_per_report=4, adapter_file=str(adapter))
            train(model, optimizer, dataset, args=settings, iterate_batches=batches)
        return found[0]

    return once


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_sft"], packages=["mlx", "mlx-lm"])
