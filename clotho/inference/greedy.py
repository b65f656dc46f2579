"""Greedy completions of one pinned policy version, computed in turns with everything else."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import mlx.nn as nn
from msgspec.structs import replace

from clotho.config.schema import EngineSection
from clotho.inference import DecodeEngine
from clotho.models.policy import Parameters, Policy
from clotho.models.tokenizer import ChatTokenizer
from protocols.sampling import (
    PARAMETERS,
    Completion,
    CompletionDone,
    SampleEvent,
    SampleFailed,
    SampleRequest,
    Sampling,
)

NEUTRAL_FILTERS: dict[str, Any] = {
    name: parameter.neutral for name, parameter in PARAMETERS.items() if parameter.learner == "replays support"
}


class PinnedWeights:
    """The model that an engine serves, with a fixed policy version."""

    def __init__(self, policy: Policy, version: int) -> None:
        self.version = version
        self.model: nn.Module = policy.model
        self.tokenizer: ChatTokenizer = policy.tokenizer
        self.vocab_size = policy.vocab_size
        self.context_length = policy.context_length


def greedy_completions(
    policy: Policy,
    parameters: Parameters,
    *,
    version: int,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    settings: EngineSection,
) -> Generator[None, None, list[Completion]]:
    """Decode every prompt greedily with `parameters`, independent of the served weights; one decode step per turn.

    Uses an engine of its own over the same base weights, so its KV caches and batches are separate from the served
    ones. Returns the completions in the order of the prompts. Raises RequestError if a prompt does not fit, and
    RuntimeError if a request fails.
    """
    engine = DecodeEngine(PinnedWeights(policy, version), settings)
    greedy = replace(sampling, **NEUTRAL_FILTERS, temperature=0.0)
    answers: dict[int, Completion] = {}
    failures: list[str] = []

    def receive(index: int, event: SampleEvent) -> None:
        match event:
            case CompletionDone():
                answers[index] = event.completion
            case SampleFailed():
                failures.append(event.reason)

    submitted = 0
    while submitted < len(prompts) or engine.has_work:
        ahead = min(len(prompts), len(answers) + 2 * settings.max_num_seqs)  # a full batch, and as many waiting
        while submitted < ahead:
            engine.submit(
                SampleRequest(prompt=prompts[submitted], sampling=greedy, seeds=(0,), background=True),
                partial(receive, submitted),
            )
            submitted += 1
        with policy.using(parameters):
            engine.tick()
        if failures:
            raise RuntimeError(f"evaluation failed: {failures[0]}")
        yield
    return [answers[index] for index in range(len(prompts))]
