"""Greedy answers of one pinned version of the weights, computed in turns beside everything else."""

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

NO_FILTERS: dict[str, Any] = {
    name: parameter.neutral for name, parameter in PARAMETERS.items() if parameter.learner == "replays support"
}


class PinnedWeights:
    """The policy as an engine sees it, its version fixed."""

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
    """Answer every prompt greedily with `parameters`, whatever is served meanwhile; one decode tick per turn.

    An engine of its own, over the same base weights: neither its caches nor its batches touch those that serve.
    Returns completions in the order of the prompts. Raises RequestError if a prompt does not fit, RuntimeError if the
    engine gave one up.
    """
    engine = DecodeEngine(PinnedWeights(policy, version), settings)
    greedy = replace(sampling, **NO_FILTERS, temperature=0.0)
    answers: dict[int, Completion] = {}
    failures: list[str] = []

    def receive(index: int, event: SampleEvent) -> None:
        match event:
            case CompletionDone():
                answers[index] = event.completion
            case SampleFailed():
                failures.append(event.reason)

    asked = 0
    while asked < len(prompts) or engine.has_work:
        ahead = min(len(prompts), len(answers) + 2 * settings.max_num_seqs)  # a full batch, and as many in line
        while asked < ahead:
            engine.submit(SampleRequest(prompt=prompts[asked], sampling=greedy, seeds=(0,)), partial(receive, asked))
            asked += 1
        with policy.using(parameters):
            engine.tick()
        if failures:
            raise RuntimeError(f"evaluation failed: {failures[0]}")
        yield
    return [answers[index] for index in range(len(prompts))]
