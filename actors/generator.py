"""Generator: has the decode engine answer prompts, a batch of them at a time, as far ahead as the profile allows."""

from __future__ import annotations

from contextlib import aclosing, suppress

import anyio

from clotho.runtime.latest import Latest, wait_until
from clotho.runtime.sampling_client import GenerationError, Sampler
from protocols.errors import RequestError
from protocols.prompt import Prompt, completion_seeds
from protocols.queues import EndOfStream, Inbox, Outbox
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling
from protocols.step import WeightsReady


class Generator:
    """Prompts in, groups of completions out. What a stage before it has discarded is passed on.

    Law of lag: with `asked` groups before it, the next one may start when

        asked < (step + max_batches_ahead + 1) * batch_size + refills

    step: of the weights that serve; refills: groups so far that are replaced by others. This is AReaL's capacity rule
    (arXiv:2505.24298, section 5.1), accepted + running <= (eta + step + 1) * batch_size, where accepted groups are
    those that count towards a batch. max_batches_ahead = 0 is strictly on-policy. A slow group may be overtaken and learned
    from later: `learner.max_staleness` bounds its age.

    Prompts that may start at the same time are submitted together, at most `batch_size` in one call to the compute
    thread: the engine then sees the same batch composition in every run, which strict reproducibility needs, and
    computes their prompts side by side.
    """

    name = "generator"

    def __init__(
        self,
        *,
        inbox: Inbox[Prompt | Discarded],
        outbox: Outbox[RolloutGroup | Discarded],
        weights: Latest[WeightsReady],
        refills: Latest[int],
        sampler: Sampler,
        sampling: Sampling,
        group_size: int,
        batch_size: int,
        max_batches_ahead: int,
        ended: int = 0,
        groups: int | None = None,
    ) -> None:
        """ended: groups that had ended when this life of the run began, from which `asked` counts.

        groups: how many are asked in all, refills apart; None: until the prompts end.
        """
        self._inbox, self._outbox = inbox, outbox
        self._weights, self._refills, self._sampler = weights, refills, sampler
        self._sampling, self._group_size = sampling, group_size
        self._batch_size, self._batches_ahead = batch_size, max_batches_ahead
        self._asked, self._groups = ended, groups

    async def run(self) -> None:
        """Answer until the prompts end and the last group is out."""
        async with self._inbox, self._outbox, anyio.create_task_group() as tasks:
            async for first in self._inbox:
                await wait_until(lambda: self._capacity() > 0, self._weights, self._refills)
                if prompts := await self._release(first):
                    await tasks.start(self._answer, prompts)

    def _capacity(self) -> int:
        """How many more groups may start now."""
        ahead = self._weights.value.step + self._batches_ahead + 1
        return ahead * self._batch_size + self._refills.value - self._asked

    async def _release(self, first: Prompt | Discarded) -> list[Prompt]:
        """The prompts that start together, as soon as all of them are there; what was discarded takes its place."""
        together = min(self._capacity(), self._batch_size)
        if self._groups is not None:
            together = min(together, self._groups + self._refills.value - self._asked)
        prompts = await self._take(first)
        with suppress(EndOfStream):
            for _ in range(together - 1):
                prompts += await self._take(await self._inbox.receive())
        return prompts

    async def _take(self, message: Prompt | Discarded) -> list[Prompt]:
        self._asked += 1
        if isinstance(message, Discarded):
            await self._outbox.send(message)
            return []
        return [message]

    async def _answer(self, batch: list[Prompt], *, task_status: anyio.abc.TaskStatus[None]) -> None:
        requests = [
            SampleRequest(
                prompt=prompt.tokens,
                sampling=self._sampling,
                seeds=completion_seeds(prompt.seed, self._group_size),
                record_support=True,  # the learner evaluates the distribution that was sampled from
            )
            for prompt in batch
        ]
        task_status.started()
        async with aclosing(self._sampler.groups(requests)) as outcomes:  # cancelled, the engine is told at once
            async for index, outcome in outcomes:
                await self._outbox.send(_group(batch[index], outcome))


def _group(prompt: Prompt, outcome: list[Completion] | GenerationError | RequestError) -> RolloutGroup | Discarded:
    if isinstance(outcome, Exception):
        return Discarded(prompt=prompt, reason="generation_error", detail=str(outcome))
    return RolloutGroup(prompt=prompt, completions=tuple(outcome))
