"""Generator: has the decode engine answer prompts, a batch of them at a time, as far ahead as the profile allows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import anyio

from actors.runtime.ends import Inbox, Outbox
from actors.runtime.latest import Latest
from actors.sampler import GenerationError, Sampler
from protocols.errors import RequestError
from protocols.prompt import Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling
from protocols.seeds import completion_seeds
from protocols.weights import WeightsReady


class Generator:
    """Prompts in, groups of completions out. What a stage before it has discarded is passed on.

    Prompts of the same update are submitted together, in one call to the compute thread: the engine then sees the same
    batch composition in every run, which strict reproducibility needs, and computes their prompts side by side.

    Law of lag: the prompts of update s start once the weights of step s - batches_ahead serve, or later ones. 0 is
    strictly on-policy; n bounds how far sampling runs ahead, as AReaL's capacity rule does (arXiv:2505.24298, section
    5.1). A slow group may be overtaken and learnt from later: `learner.max_staleness` bounds its age.
    """

    name = "generator"

    def __init__(
        self,
        *,
        inbox: Inbox[Prompt | Discarded],
        outbox: Outbox[RolloutGroup | Discarded],
        weights: Latest[WeightsReady],
        sampler: Sampler,
        sampling: Sampling,
        group_size: int,
        batch_size: int,
        batches_ahead: int,
    ) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._weights, self._sampler = weights, sampler
        self._sampling, self._group_size = sampling, group_size
        self._batch_size, self._batches_ahead = batch_size, batches_ahead

    async def run(self) -> None:
        """Answer until the prompts end and the last group is out."""
        async with self._inbox, self._outbox, anyio.create_task_group() as tasks:
            async for batch in self._batches():
                earliest = batch[0].group_id // self._batch_size - self._batches_ahead
                await self._weights.wait_until(partial(_serves, earliest))
                await tasks.start(self._answer, batch)

    async def _batches(self) -> AsyncIterator[list[Prompt]]:
        """Runs of prompts that belong to the same update."""
        batch: list[Prompt] = []
        async for prompt in self._inbox:
            if isinstance(prompt, Discarded):
                await self._outbox.send(prompt)
                continue
            if batch and prompt.group_id // self._batch_size != batch[0].group_id // self._batch_size:
                yield batch
                batch = []
            batch.append(prompt)
            if len(batch) == self._batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    async def _answer(self, batch: list[Prompt], *, task_status: anyio.abc.TaskStatus[None]) -> None:
        requests = [
            SampleRequest(
                prompt=prompt.tokens,
                sampling=self._sampling,
                seeds=completion_seeds(prompt.seed, self._group_size),
            )
            for prompt in batch
        ]
        task_status.started()
        async with aclosing(self._sampler.groups(requests)) as outcomes:  # cancelled, the engine is told at once
            async for index, outcome in outcomes:
                await self._outbox.send(_group(batch[index], outcome))


def _serves(step: int, ready: WeightsReady) -> bool:
    return ready.step >= step


def _group(prompt: Prompt, outcome: list[Completion] | GenerationError | RequestError) -> RolloutGroup | Discarded:
    if isinstance(outcome, Exception):
        return Discarded(prompt=prompt, reason="generation_error", detail=str(outcome))
    return RolloutGroup(prompt=prompt, completions=tuple(outcome))
