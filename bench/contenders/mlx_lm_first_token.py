"""mlx-lm's `stream_generate`: seconds until its first token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model, random_prompts
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve


class SilentTokenizer:
    """The tokenizer interface of mlx-lm's wrapper, without end tokens and without text."""

    eos_token_id = None
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return no tokens."""
        return []

    def decode(self, tokens: Sequence[int]) -> str:
        """Return no text, so that detokenization costs nothing."""
        return ""

    def apply_chat_template(self) -> None:
        """Only looked up, never called."""

    def get_vocab(self) -> dict[str, int]:
        """Return an empty vocabulary."""
        return {}


def prepare(case: Case) -> MeasureOnce:
    """The model in evaluation mode; each run has its own cache."""
    model, config = named_model(case["model"])
    model.eval()
    (prompt,) = random_prompts(1, case["prompt_tokens"], config["vocab_size"])
    tokenizer: Any = TokenizerWrapper(SilentTokenizer())
    sampler = make_sampler(1.0)

    def once() -> Metrics:
        began = time.perf_counter()
        generator: Any = stream_generate(model, tokenizer, prompt, max_tokens=16, sampler=sampler)
        next(generator)
        seconds = time.perf_counter() - began
        generator.close()
        mx.synchronize(generation_stream)  # the next token was begun as well
        return {"seconds": seconds}

    return once


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_first_token"], packages=["mlx", "mlx-lm"])
