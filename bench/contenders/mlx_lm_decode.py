"""mlx-lm's `BatchGenerator` on groups of completions, all sequences decoded together."""

from __future__ import annotations

from typing import Any

from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from bench.contenders.decoding import timed, work
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve


def prepare(case: Case) -> MeasureOnce:
    """A new generator per run, as in `batch_generate`."""
    ready = work(case)
    prompts = ready.repeated
    sampler = make_sampler(1.0)

    def generate() -> int:
        generator: Any = BatchGenerator(
            ready.model,
            stop_tokens=[],
            sampler=sampler,
            completion_batch_size=ready.rows,
            prefill_batch_size=ready.rows,
        )
        generator.insert(prompts, [ready.new_tokens] * ready.rows)
        logp_N: list[float] = []
        while responses := generator.next_generated():
            logp_N += [memoryview(one.logprobs)[one.token] for one in responses]
        generator.close()
        return len(logp_N)

    return timed(ready, generate, prefilled=sum(len(prompt) - 1 for prompt in prompts))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_decode"], packages=["mlx", "mlx-lm"])
