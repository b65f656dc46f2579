"""Our policy update over groups of random completions, in this process, as the compute thread takes its passes."""

from __future__ import annotations

import math
import time

from bench.contenders.loop import Case, Metrics, Once, serve
from bench.contenders.shapes import named_model, random_prompts
from bench.shapes import policy_of
from clotho.config.schema import LearnerSection, PolicySection, SamplingSection
from clotho.training.update import PolicyLearner, Update
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup
from protocols.sampling import Completion
from protocols.score import ScoredGroup

SEMANTICS = (
    "One policy update with the profile's default settings: gradient and optimizer step for an adapter over every "
    "linear layer of the blocks, per token of the completions; that of the prompts is not counted apart."
)


def prepare(case: Case) -> Once:
    """A learner, and a batch that it learns from again and again."""
    model, config = named_model(case["model"], vocabulary=case["vocabulary"])
    learner = PolicyLearner(
        policy_of(model, config, section=PolicySection()),
        LearnerSection(),
        SamplingSection(max_tokens=case["completion_tokens"]),
        steps=1000,
    )
    batch = groups(case)
    tokens = case["prompts"] * case["group"] * case["completion_tokens"]

    def once() -> Metrics:
        began = time.perf_counter()
        update = finished(learner, batch)
        seconds = time.perf_counter() - began
        if not update.applied:
            raise RuntimeError("nothing was learned")
        return {"seconds": seconds, "microseconds_per_token": seconds / tokens * 1e6}

    return once


def groups(case: Case) -> list[ScoredGroup]:
    """As many groups as prompts, every second completion rewarded."""
    size, length, vocabulary = case["group"], case["completion_tokens"], case["vocabulary"]
    prompts = random_prompts(case["prompts"], case["prompt_tokens"], vocabulary)
    return [_group(number, prompt, size, length, vocabulary) for number, prompt in enumerate(prompts)]


def finished(learner: PolicyLearner, batch: list[ScoredGroup]) -> Update:
    """The update, taken to its end without a pause."""
    passes = learner.update(batch)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            update: Update = end.value
            return update


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
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
