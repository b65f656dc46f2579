"""Samples the messages of many episodes together."""

from __future__ import annotations

import asyncio

from msgspec import structs

from clotho.lanes.sampling_client import Refusal
from protocols.sampling import Completion, SampleRequest, Sampling
from training_run.groups.rollout_source import Complete

Waiting = tuple[SampleRequest, asyncio.Future[Completion]]


class Rounds:
    """Requests of episodes that begin together. Those with the same prompt become one request, whose prefill is shared.

    The first messages of all episodes are sampled in one call. If `always`, later messages are too: a round waits until
    every episode has asked or ended, so that the batches of the engine do not depend on how fast environments are.
    """

    def __init__(self, complete: Complete, episodes: int, *, always: bool) -> None:
        self._complete, self._live, self._always = complete, episodes, always
        self._first = True
        self._waiting: dict[int, Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def sample(self, index: int, request: SampleRequest) -> Completion:
        """Return the completion of a request with one seed. index: of the episode. Raises a `Refusal`."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[index] = request, future
        self._start_if_due()
        return await future

    def leave(self) -> None:
        """Count an episode that has ended."""
        self._live -= 1
        self._start_if_due()

    async def close(self) -> None:
        """Abort what is being sampled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_if_due(self) -> None:
        complete = len(self._waiting) >= self._live
        if not self._waiting or not (complete or not (self._first or self._always)):
            return
        waiting = [self._waiting[index] for index in sorted(self._waiting)]
        self._waiting, self._first = {}, False
        task = asyncio.create_task(self._sample(waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sample(self, waiting: list[Waiting]) -> None:
        merged: dict[tuple[tuple[int, ...], Sampling], list[Waiting]] = {}
        for request, future in waiting:
            merged.setdefault((request.prompt, request.sampling), []).append((request, future))
        members = list(merged.values())
        requests = [structs.replace(one[0][0], seeds=tuple(request.seeds[0] for request, _ in one)) for one in members]
        try:
            outcomes = await self._complete(requests)
        except BaseException as error:
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        for one, outcome in zip(members, outcomes, strict=True):
            _deliver([future for _, future in one], outcome)


def _deliver(futures: list[asyncio.Future[Completion]], outcome: list[Completion] | Refusal) -> None:
    for position, future in enumerate(futures):
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome[position])
