"""mlx-lm-lora's `generate_grpo` on groups of completions.

Its `batch_size` is both the number of prompts per call and the number of sequences that decode together. Its trainer
passes the number of prompts of an update, so only that many completions decode together. With the number of completions
it is faster; that is measured unless the environment variable `AS_CALLED` is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mlx_lm_lora.trainer.grpo_trainer import generate_grpo

from bench.contenders.decoding import AS_CALLED, timed, work
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve


class SilentTokenizer:
    """A tokenizer without end tokens and without text."""

    eos_token_ids = frozenset[int]()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return no text, so that detokenization costs nothing."""
        return ""


def prepare(case: Case) -> MeasureOnce:
    """The same model and prompts for every run."""
    ready = work(case)
    batch_size = len(ready.prompts) if AS_CALLED in os.environ else ready.rows

    def generate() -> int:
        completions, _, _ = generate_grpo(
            model=ready.model,
            tokenizer=SilentTokenizer(),
            prompt_tokens=ready.prompts,
            max_tokens=max(ready.lengths),
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
    variant = ", as its trainer calls it" if AS_CALLED in os.environ else ""
    serve(prepare, semantics=SEMANTICS[f"mlx_lm_lora_decode{variant}"], packages=["mlx", "mlx-lm", "mlx-lm-lora"])
