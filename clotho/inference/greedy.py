"""Greedy completions of one pinned policy version, computed in turns with everything else."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import mlx.nn as nn
from msgspec.structs import replace

from clotho.config.bounds import Off
from clotho.config.schema import EngineSection
from clotho.inference import DecodeEngine
from clotho.models.policy import Parameters, Policy
from clotho.models.tokenizer import ChatTokenizer
from clotho.models.turns import TurnBudget
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


def greedy(sampling: Sampling) -> Sampling:
    """The sampling parameters of a greedy completion with the same limits and penalties."""
    return replace(sampling, **NEUTRAL_FILTERS, temperature=0.0)


def complete_all(
    engine: DecodeEngine, requests: Sequence[SampleRequest], tick: Callable[[], object], *, rows: int
) -> Generator[None, None, list[list[Completion]]]:
    """Decode requests with an engine, one decode step per turn.

    tick: computes a decode step. rows: `engine.max_num_seqs`; twice as many completions are requested ahead.
    Returns the completions of each request, in the order of its seeds. Raises RequestError if a prompt does not fit,
    and RuntimeError if a request fails.
    """
    answers: dict[int, dict[int, Completion]] = {index: {} for index in range(len(requests))}
    failures: list[str] = []
    finished = 0

    def receive(index: int, event: SampleEvent) -> None:
        nonlocal finished
        match event:
            case CompletionDone():
                answers[index][event.index] = event.completion
                finished += 1
            case SampleFailed():
                failures.append(event.reason)

    submitted, started = 0, 0
    while submitted < len(requests) or engine.has_work:
        ahead = finished + 2 * rows  # a full batch, and as many waiting
        while submitted < len(requests) and started < ahead:
            request = requests[submitted]
            engine.submit(replace(request, background=True), partial(receive, submitted))
            submitted, started = submitted + 1, started + len(request.seeds)
        tick()
        if failures:
            raise RuntimeError(f"evaluation failed: {failures[0]}")
        yield
    return [[answers[index][i] for i in range(len(request.seeds))] for index, request in enumerate(requests)]


def greedy_completions(
    policy: Policy,
    parameters: Parameters,
    *,
    version: int,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    settings: EngineSection,
    turns: TurnBudget | None = None,
) -> Generator[None, None, list[Completion]]:
    """Decode every prompt greedily with `parameters`, independent of the served weights; one decode step per turn.

    Uses an engine of its own over the same base weights, so its KV caches and batches are separate from the served
    ones. turns: limits the duration of prefill in one turn. Returns the completions in the order of the prompts. Raises
    the errors of `complete_all`.
    """
    engine = DecodeEngine(PinnedWeights(policy, version), replace(settings, speculation=Off()), turns=turns)

    def tick() -> None:
        with policy.using(parameters):
            engine.tick()

    requests = [SampleRequest(prompt=prompt, sampling=greedy(sampling), seeds=(0,)) for prompt in prompts]
    completions = yield from complete_all(engine, requests, tick, rows=settings.max_num_seqs)
    return [completion for (completion,) in completions]
