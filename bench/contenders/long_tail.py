"""Plug-ins that delay each group by the decoding of other completions, and that make rewards slow.

All training modes must do the same work, so the lengths of the others do not depend on the policy: they are lognormal
and a function of the seed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
from msgspec.structs import replace

from actors.generator import Generator
from clotho.lanes.sampling_client import EngineSampler
from protocols.errors import GenerationError, RequestError
from protocols.prompt import Problem, Prompt
from protocols.queues import Inbox, Outbox
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, SampleRequest
from training_run.groups.rollout_source import SingleTurn
from training_run.supervision.custom_actors import Services

SECONDS = 0.05
LONGEST = 384
"""Most tokens of a completion that accompanies another."""


def wait(problem: Problem, completion: str) -> float:
    """Return 0.0 after 50 ms: delays a group without an effect on its rewards."""
    time.sleep(SECONDS)
    return 0.0


def length(seed: int, *, median: float, sigma: float, longest: int) -> int:
    """Number of tokens of the completion with that seed."""
    sampled = np.random.default_rng(seed).lognormal(np.log(median), sigma)
    return int(np.clip(round(sampled), 1, longest))


class AccompaniedSampler:
    """Decodes another completion of its own length beside each completion; a group is complete when both are."""

    def __init__(self, sampler: EngineSampler, *, median: float, sigma: float) -> None:
        self._sampler, self._median, self._sigma = sampler, median, sigma

    async def groups(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[tuple[int, list[Completion] | GenerationError | RequestError], None]:
        """Same interface as `EngineSampler.groups`; raises the first failure."""
        others = [(group, seed) for group, request in enumerate(requests) for seed in request.seeds]
        everything = [*requests, *(self._other(requests[group], seed) for group, seed in others)]
        left = [1 + len(request.seeds) for request in requests]
        done: dict[int, list[Completion]] = {}
        async with aclosing(self._sampler.groups(everything)) as outcomes:
            async for position, outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
                group = position if position < len(requests) else others[position - len(requests)][0]
                if position == group:
                    done[group] = outcome
                left[group] -= 1
                if not left[group]:
                    yield group, done[group]

    def _other(self, request: SampleRequest, seed: int) -> SampleRequest:
        own = length(seed, median=self._median, sigma=self._sigma, longest=LONGEST)
        sampling = replace(request.sampling, max_tokens=own, ignore_eos=True)
        return replace(request, seeds=(seed,), sampling=sampling)


class Accompanied(Generator):
    """The generator with a sampler that decodes other completions beside those of the groups."""

    def __init__(
        self,
        *,
        name: str,
        services: Services,
        inbox: Inbox[Prompt | Discarded],
        outbox: Outbox[RolloutGroup | Discarded],
        median: float,
        sigma: float,
    ) -> None:
        assert services.replaced is not None
        sampler = AccompaniedSampler(services.sampler, median=median, sigma=sigma)
        sampling = services.profile.sampling
        source = SingleTurn(sampler, sampling=sampling, group_size=sampling.group_size)
        arguments = {**services.replaced.arguments, "inbox": inbox, "outbox": outbox, "source": source}
        super().__init__(**arguments)
        self.name = name
