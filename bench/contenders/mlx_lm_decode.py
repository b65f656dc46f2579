"""mlx-lm's `BatchGenerator` on groups of completions, all sequences decoded together."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.utils import linear_to_lora_layers

from bench.contenders.decoding import adapter_weights, timed, work
from bench.contenders.rollouts import RANK, SCALE
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve


def adapt(model: Any) -> None:
    """Give the model the adapter of the other contender, in mlx-lm's own layers."""
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    named: Any = tree_flatten(model.trainable_parameters())
    model.update(tree_unflatten(list(adapter_weights({name: array.shape for name, array in named}).items())))
    model.eval()
    mx.eval(model.parameters())


def prepare(case: Case) -> MeasureOnce:
    """A new generator per run, as in `batch_generate`."""
    ready = work(case)
    if "adapter" in case:
        adapt(ready.model)
    prompts = ready.repeated
    sampler = make_sampler(1.0)

    def generate() -> int:
        generator: Any = BatchGenerator(
            ready.model,
            stop_tokens=[],
            sampler=sampler,
            completion_batch_size=ready.at_once,
            prefill_batch_size=ready.at_once,
        )
        generator.insert(prompts, [tokens for tokens in ready.lengths for _ in range(ready.group)])
        logp_N: list[float] = []
        while responses := generator.next_generated():
            logp_N += [memoryview(one.logprobs)[one.token] for one in responses]
        generator.close()
        return len(logp_N)

    return timed(ready, generate, prefilled=sum(len(prompt) - 1 for prompt in prompts))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_decode"], packages=["mlx", "mlx-lm"])
