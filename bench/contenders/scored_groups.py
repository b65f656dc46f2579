"""Groups of random completions with rewards, for updates of Clotho."""

from __future__ import annotations

import math

from bench.contenders.shapes import random_prompts
from bench.contenders.worker import Case
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion


def groups(case: Case) -> list[ScoredGroup]:
    """One group per prompt, every second completion rewarded."""
    size, length, vocabulary = case["group"], case["completion_tokens"], case["vocabulary"]
    prompts = random_prompts(case["prompts"], case["prompt_tokens"], vocabulary)
    return [_group(number, prompt, size, length, vocabulary) for number, prompt in enumerate(prompts)]


def _group(number: int, prompt: list[int], size: int, length: int, vocabulary: int) -> ScoredGroup:
    completions = tuple(
        Completion(
            tokens=tuple(tokens),
            logprobs=(-math.log(vocabulary),) * length,
            versions=(0,) * length,
            text="",
            finish_reason="length",
        )
        for tokens in random_prompts(size, length, vocabulary, seed=1 + number)
    )
    problem = Problem(prompt="")
    asked = Prompt(group_id=number, problem=problem, tokens=tuple(prompt), seed=0)
    rewards = tuple(float(index % 2) for index in range(size))
    return ScoredGroup(group=RolloutGroup(prompt=asked, completions=completions), rewards=rewards, parts={})
