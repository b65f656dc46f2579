"""Policies with random weights in Qwen3 shapes: enough to measure speed and memory without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from bench.contenders.shapes import random_prompts
from clotho.models.policy import Policy
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import FullMethod, PolicySection
from protocols.sampling import SampleRequest, Sampling


class SilentTokenizer:
    """A tokenizer without end tokens and without text, for random tokens."""

    eos_ids = frozenset[int]()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return no text, so that detokenization costs nothing."""
        return ""

    def token_text(self, token: int) -> str:
        """Return no text."""
        return ""


def make_policy(model: Any, config: dict[str, Any], *, section: PolicySection | None = None, seed: int = 0) -> Policy:
    """Build a policy from a model of `bench.contenders.shapes`; without a section it has no adapter."""
    section = section or PolicySection(method=FullMethod())
    tokenizer = cast(ChatTokenizer, SilentTokenizer())
    return Policy(model, tokenizer, section, config=config, seed=seed, keep_reference=False)


def unending(policy: Policy, rows: int, *, prompt: int = 16) -> SampleRequest:
    """A request of completions that go on to the end of the context, after a prompt of random tokens."""
    sampling = Sampling(max_tokens=policy.context_length - prompt, ignore_eos=True)
    (tokens,) = random_prompts(1, prompt, policy.vocab_size)
    return SampleRequest(prompt=tuple(tokens), sampling=sampling, seeds=tuple(range(rows)))
