"""mlx-lm's `stream_generate`: seconds until its first token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from bench.contenders.loop import Case, Metrics, Once, serve
from bench.contenders.shapes import named_model, random_prompts

SEMANTICS = (
    "From calling stream_generate until it yields the first token, before anybody reads its log-probability; more "
    "tokens are asked for, and the generator is closed then."
)


class SilentTokenizer:
    """What mlx-lm's wrapper asks of a tokenizer; ends nothing and says nothing."""

    eos_token_id = None
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """No tokens."""
        return []

    def decode(self, tokens: Sequence[int]) -> str:
        """No text, so that none is paid for."""
        return ""

    def apply_chat_template(self) -> None:
        """Looked at, and never called."""

    def get_vocab(self) -> dict[str, int]:
        """No token has a name."""
        return {}


def prepare(case: Case) -> Once:
    """The model in evaluation mode; each run has a cache of its own."""
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
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
