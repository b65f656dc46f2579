"""What makes groups of rollouts: completions of a prompt, or episodes of several turns if an attachment has some."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from clotho.lanes.sampling_client import GroupSampler, Refusal
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling, completion_seeds

Complete = Callable[[Sequence[SampleRequest]], Awaitable[Sequence[list[Completion] | Refusal]]]
"""Samples the completions of requests; an error concerns one request."""


class RolloutSource(Protocol):
    """Makes the groups of prompts."""

    def groups(self, prompts: Sequence[Prompt], /) -> AsyncGenerator[RolloutGroup | Discarded, None]:
        """Yield the group of each prompt when it has ended. Closing the generator aborts what has not ended."""
        ...


class Episodes(Protocol):
    """Makes episodes, conversations of several turns, for training and for evaluations."""

    def source(self, sampler: GroupSampler, group_size: int, /) -> RolloutSource:
        """Return what makes groups of episodes that a sampler samples."""
        ...

    async def held_out(
        self, problems: Sequence[Problem], sampling: Sampling, seeds: Sequence[tuple[int, ...]], complete: Complete, /
    ) -> list[list[Completion]]:
        """Return episodes of each problem, one for each of its seeds; one that failed has no tokens."""
        ...


class SingleTurn:
    """Samples completions. Each is a function of (weights, prompt, sampling, seed)."""

    def __init__(
        self, sampler: GroupSampler, *, sampling: Sampling, group_size: int, record_routes: bool = False
    ) -> None:
        """record_routes: as in `SampleRequest`."""
        self._sampler, self._sampling, self._group_size = sampler, sampling, group_size
        self._record_routes = record_routes

    async def groups(self, prompts: Sequence[Prompt]) -> AsyncGenerator[RolloutGroup | Discarded, None]:
        """Sample the groups of all prompts in one call."""
        requests = [
            SampleRequest(
                prompt=prompt.tokens,
                sampling=self._sampling,
                seeds=completion_seeds(prompt.seed, self._group_size),
                record_support=True,  # the learner evaluates the sampling distribution
                record_routes=self._record_routes,
                background=True,
            )
            for prompt in prompts
        ]
        async with aclosing(self._sampler.groups(requests)) as outcomes:  # cancellation aborts the requests
            async for index, outcome in outcomes:
                if isinstance(outcome, Exception):
                    yield Discarded(prompt=prompts[index], reason="generation_error", detail=str(outcome))
                else:
                    yield RolloutGroup(prompt=prompts[index], completions=tuple(outcome))
