"""Clotho's policy update on groups of random completions, one step at a time, as the learner's thread runs it."""

from __future__ import annotations

import math
import time

from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model, random_prompts
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.shapes import make_policy
from clotho.settings.engine import SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.settings.model import PolicySection
from clotho.training.update import PolicyLearner
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion


def prepare(case: Case) -> MeasureOnce:
    """A learner and one batch that every run trains on."""
    model, config = named_model(case["model"], vocabulary=case["vocabulary"])
    learner = PolicyLearner(
        make_policy(model, config, section=PolicySection()),
        LearnerSection(),
        SamplingSection(max_tokens=case["completion_tokens"]),
        steps=1000,
    )
    batch = groups(case)
    tokens = case["prompts"] * case["group"] * case["completion_tokens"]

    def once() -> Metrics:
        began = time.perf_counter()
        update = learner.update(batch)
        seconds = time.perf_counter() - began
        if not update.applied:
            raise RuntimeError("the update was not applied")
        return {"seconds": seconds, "microseconds_per_token": seconds / tokens * 1e6}

    return once


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
    problem = Problem(prompt="", answer="", type="")
    asked = Prompt(group_id=number, problem=problem, tokens=tuple(prompt), seed=0)
    rewards = tuple(float(index % 2) for index in range(size))
    return ScoredGroup(group=RolloutGroup(prompt=asked, completions=completions), rewards=rewards, parts={})


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_scaling"], packages=["mlx", "mlx-lm"])
