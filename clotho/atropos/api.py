"""An Atropos API server as a source of groups: registered with, and waited for whenever it is away.

For whom an Atropos API server waits, in words.
"""

from __future__ import annotations

import time

import anyio
import httpx
import structlog
from msgspec import Raw

from clotho.atropos.client import LARGEST_BODY, ApiClient, BodyTooLarge, NotAtropos, Registration, ServerAway
from clotho.atropos.source import Pauses
from clotho.atropos.wire import EnvironmentStatus, Info, Status
from protocols.errors import ProfileError

MOST_ENVIRONMENTS = 16


async def describe(client: ApiClient, batch_size: int) -> str:
    """Ask the server why there is no batch of so many sequences; one line."""
    try:
        status = await client.status()
    except (ServerAway, NotAtropos) as error:
        return f"the server cannot say why: {error}"
    return in_words(status, await _environments(client), batch_size)


def in_words(status: Status, environments: list[EnvironmentStatus], batch_size: int) -> str:
    """The likeliest reason first: nobody is there, sizes that never fit, a reserved share, too little so far."""
    if not environments:
        return "no environment is registered" + (f"; {_queued(status)}" if status.queue_size else "")
    largest = max(one.max_group_size for one in environments)
    if largest > 1 and batch_size % largest:
        return (
            f"groups of {largest} sequences never fill a batch of {batch_size}: make learner.batch_size x "
            f"sampling.group_size a multiple of {largest}, or change the group_size of the environment"
        )
    missing = [str(number) for number, one in enumerate(environments) if not one.self_queue_size]
    if status.queue_size and missing and min(one.unallocated_fraction for one in environments) < 1.0:
        return f"{_queued(status)}; environment {', '.join(missing)} has none (min_batch_allocation waits for it)"
    if status.queue_size:
        most = status.queue_size * largest
        return f"{_queued(status)}, {_at_most(most, batch_size)}; {_registered(environments)}"
    return f"nothing is queued; {_registered(environments)}"


async def _environments(client: ApiClient) -> list[EnvironmentStatus]:
    """Those that the server knows, by number; it answers an error beyond the last."""
    found: list[EnvironmentStatus] = []
    try:
        while len(found) < MOST_ENVIRONMENTS:
            found.append(await client.environment(len(found)))
    except (ServerAway, NotAtropos):
        pass
    return found


def _queued(status: Status) -> str:
    return f"{status.queue_size} group{'s are' if status.queue_size != 1 else ' is'} queued"


def _at_most(most: int, batch_size: int) -> str:
    if most < batch_size:
        return f"at most {most} sequences of the {batch_size} of a batch"
    return f"whose sizes do not yet come to {batch_size} sequences (each size must divide the largest)"


def _registered(environments: list[EnvironmentStatus]) -> str:
    count = len(environments)
    more = "at least " if count == MOST_ENVIRONMENTS else ""
    return f"{more}{count} environment{'s have' if count != 1 else ' has'} registered"


UNREGISTERED = -1
ATTEMPTS = 5
NOTHINGS = 16
"""Answers of "nothing yet" in a row after which it is checked that the server still knows this trainer."""

log = structlog.get_logger(actor="atropos_fetcher")


class AtroposApi:
    """One trainer's dealings with the server.

    What the server says of steps is not heeded: it counts batches when it forms them, and hands them out last first. A
    server that was started again knows nobody: it is registered with anew, from the trainer's own step. Groups that
    were sent before any trainer had registered keep a registration from counting, and can never be handed out: then,
    and only then, a server is cleared even without `reset`.
    """

    def __init__(
        self,
        url: str,
        *,
        registration: Registration,
        reset: bool,
        poll_seconds: float = 1.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """reset: clear what the server holds of another trainer. transport: in place of the network."""
        self._client = ApiClient(url, transport)
        self._registration, self._reset = registration, reset
        self._pauses = Pauses(longest=poll_seconds)
        self._away_since: float | None = None
        self._nothings = 0

    async def open(self, *, step: int) -> None:
        """Register. Raises ProfileError where no Atropos API server answers, or one that serves another trainer."""
        while True:
            try:
                await self._take_over()
                await self._register(step)
            except ServerAway as error:
                await self._wait(str(error))
            except NotAtropos as error:
                raise ProfileError(
                    f"atropos.url {self._client.shown} is not an Atropos API server ({error}): "
                    "start one with `run-api`, and give its address (both it and the policy's own API listen on port "
                    "8000 unless told otherwise)"
                ) from error
            else:
                return self._is_back()

    async def batch(self, *, step: int) -> list[Raw] | None:
        """Take the next batch; None: nothing yet, or one too large to be read. What is away is waited for.

        Raises ProfileError where another trainer has taken the server over, and `reset` is false.
        """
        while True:
            try:
                if self._away_since is not None:
                    await self._register(step)
                groups = await self._take()
            except (ServerAway, NotAtropos) as error:
                await self._wait(str(error))
            else:
                self._is_back()
                return groups

    async def waiting_for(self) -> str:
        """Say why there is no batch."""
        return await describe(self._client, self._registration.batch_size)

    async def close(self) -> None:
        """Give up the connections; to the server a trainer never says goodbye."""
        await self._client.close()

    async def _take(self) -> list[Raw] | None:
        try:
            delivery = await self._client.batch()
        except BodyTooLarge:
            log.error("a batch was dropped: it is too large", most_bytes=LARGEST_BODY)
            return None
        if delivery.status == "error":
            raise ServerAway("it does not know this trainer")
        if delivery.batch:
            self._nothings = 0
            return delivery.batch
        self._nothings += 1
        if self._nothings % NOTHINGS == 0 and (await self._client.info()).batch_size == UNREGISTERED:
            raise ServerAway("it does not know this trainer any more")
        return None

    async def _take_over(self) -> None:
        """Clear what another trainer has left."""
        if self._reset and (await self._client.info()).batch_size != UNREGISTERED:
            log.warning(
                "the Atropos API server had a trainer before: cleared; environments that were connected end, "
                "and must be started again",
                url=self._client.shown,
            )
            await self._client.reset()

    async def _register(self, step: int) -> None:
        for _ in range(ATTEMPTS):
            await self._client.register(self._registration, step=step)
            info = await self._client.info()
            if self._fits(info):
                return
            if info.batch_size != UNREGISTERED and not self._reset:
                raise ProfileError(self._conflict(info))
            await self._client.reset()
        raise ServerAway("it does not take the registration")

    def _fits(self, info: Info) -> bool:
        wanted = self._registration
        return (info.batch_size, info.max_token_len) == (wanted.batch_size, wanted.max_token_len)

    def _conflict(self, info: Info) -> str:
        wanted = self._registration
        return (
            f"the Atropos API server at {self._client.shown} is registered for batches of {info.batch_size} sequences "
            f"of fewer than {info.max_token_len} tokens, and this run needs {wanted.batch_size} of fewer than "
            f"{wanted.max_token_len}: start the server again, or let atropos.reset = true clear it"
        )

    async def _wait(self, reason: str) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._pauses.reset()
            log.warning("waiting for the Atropos API server", url=self._client.shown, reason=reason)
        await anyio.sleep(self._pauses.next())

    def _is_back(self) -> None:
        if self._away_since is not None:
            seconds = round(time.monotonic() - self._away_since, 1)
            self._away_since = None
            log.info("the Atropos API server answers again", url=self._client.shown, seconds=seconds)
