"""mlx-lm's `BatchGenerator` on groups of completions, all rows decoded together."""

from __future__ import annotations

from typing import Any

from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from bench.contenders.decoding import timed, work
from bench.contenders.loop import Case, Once, serve

SEMANTICS = (
    "BatchGenerator with completion_batch_size and prefill_batch_size as large as the number of rows, which is its "
    "fastest; every row computes its own copy of the prompt, for it knows no groups; from making the generator to the "
    "last token, the log-probability of each token read in place from the row of the vocabulary that it returns."
)


def prepare(case: Case) -> Once:
    """A new generator each time, as `batch_generate` makes one."""
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
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
