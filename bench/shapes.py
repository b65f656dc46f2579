"""Policies of random weights in the shape of Qwen3: what matters for speed and memory, without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from bench.contenders.shapes import Shape, configuration, random_model
from clotho.config.schema import PolicySection
from clotho.models.policy import Policy
from clotho.models.tokenizer import ChatTokenizer


class SilentTokenizer:
    """Ends nothing and says nothing: random tokens have no text."""

    eos_ids = frozenset[int]()

    def decode(self, tokens: Sequence[int]) -> str:
        """No text, so that none is paid for."""
        return ""

    def token_text(self, token: int) -> str:
        """No text."""
        return ""


def policy_of(model: Any, config: dict[str, Any], *, section: PolicySection | None = None, seed: int = 0) -> Policy:
    """A policy over a model of `bench.contenders.shapes`; without a section its bare weights, no adapter."""
    section = section or PolicySection(kind="full")
    tokenizer = cast(ChatTokenizer, SilentTokenizer())
    return Policy(model, tokenizer, section, config=config, seed=seed, keep_reference=False)


def random_policy(
    *, layers: int, width: int, heads: int, key_heads: int, feed_forward: int, vocabulary: int, seed: int = 0
) -> Policy:
    """A policy with an adapter over every linear layer of its blocks, embeddings tied, in float32."""
    shape = Shape(layers, width, heads, key_heads, feed_forward, vocabulary)
    return policy_of(random_model(shape, seed=seed), configuration(shape), section=PolicySection(), seed=seed)
