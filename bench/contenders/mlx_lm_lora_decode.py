"""mlx-lm-lora's `generate_grpo` on groups of completions.

Its `batch_size` is both the prompts that are taken at a time and the rows that decode together. Its trainer passes the
prompts of an update, so that of their completions only so many decode at once; with as many as there are completions
it is faster, and that is what is measured unless the environment says `AS_CALLED`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mlx_lm_lora.trainer.grpo_trainer import generate_grpo

from bench.contenders.decoding import AS_CALLED, timed, work
from bench.contenders.loop import Case, Once, serve

SHARED = "the prompt of a group is computed once; no log-probabilities are returned, and no text is made."
SEMANTICS = f"generate_grpo with batch_size as large as the number of rows, which is its fastest; {SHARED}"
SEMANTICS_AS_CALLED = (
    f"generate_grpo with batch_size the number of prompts, as its trainer calls it: so many rows decode together; "
    f"{SHARED}"
)


class SilentTokenizer:
    """Ends nothing and says nothing."""

    eos_token_ids = frozenset[int]()

    def decode(self, tokens: Sequence[int]) -> str:
        """No text, so that none is paid for."""
        return ""


def prepare(case: Case) -> Once:
    """The same model and prompts for every run."""
    ready = work(case)
    batch_size = len(ready.prompts) if AS_CALLED in os.environ else ready.rows

    def generate() -> int:
        completions, _, _ = generate_grpo(
            model=ready.model,
            tokenizer=SilentTokenizer(),
            prompt_tokens=ready.prompts,
            max_tokens=ready.new_tokens,
            group_size=ready.group,
            batch_size=batch_size,
            end_token="",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
        )
        return sum(completion.size for completion in completions)

    return timed(ready, generate, prefilled=sum(len(prompt) - 1 for prompt in ready.prompts))


if __name__ == "__main__":
    semantics = SEMANTICS_AS_CALLED if AS_CALLED in os.environ else SEMANTICS
    serve(prepare, semantics=semantics, packages=["mlx", "mlx-lm", "mlx-lm-lora"])
