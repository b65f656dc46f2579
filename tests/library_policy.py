"""The embedded policy, loaded once for all tests of the library in a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import clotho

EMBEDDED = Path(__file__).parents[1] / "profiles" / "embedded"
SAMPLING = clotho.Sampling(max_tokens=12)
QUESTIONS = ("What is 2 + 3?", "What is 53 + 5 - 7?", "What comes next? 37, 43, 50, 58")


@cache
def policy() -> clotho.Policy:
    """Return the policy with an adapter of rank 4."""
    return clotho.load(str(EMBEDDED), method=clotho.LoRA(rank=4, scale=2.0))


@cache
def groups() -> tuple[tuple[tuple[int, ...], tuple[clotho.Completion, ...], tuple[float, ...]], ...]:
    """Return prompts with four completions each, and rewards."""
    prompts = [policy().chat(question) for question in QUESTIONS]
    with clotho.Sampler(policy()) as sampler:
        found = sampler.sample(prompts, SAMPLING, n=4)
    return tuple(
        (prompt, tuple(completions), (0.0, 1.0, 0.25, 0.5)) for prompt, completions in zip(prompts, found, strict=True)
    )


def data() -> list[clotho.Datum]:
    """Return one datum for each completion, with advantages of both signs."""
    return [
        clotho.Datum(prompt, completion, reward - 0.4)
        for prompt, completions, rewards in groups()
        for completion, reward in zip(completions, rewards, strict=True)
    ]
