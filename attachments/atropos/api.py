"""An Atropos API server as a source of groups, and the explanation of why it has no batch."""

from __future__ import annotations

import time

import anyio
import httpx
import structlog
from msgspec import Raw

from attachments.atropos.client import (
    MAX_BODY_BYTES,
    ApiClient,
    BodyTooLarge,
    EnvironmentStatus,
    Info,
    NotAtropos,
    Registration,
    ServerUnavailable,
    Status,
)
from protocols.errors import ProfileError, RemoteError
from training_run.supervision.supervisor import Backoff

MAX_ENVIRONMENTS = 16
UNREGISTERED = -1
REGISTRATION_ATTEMPTS = 5
MAX_LOST_REGISTRATIONS = 8
"""Number of registrations that another trainer has replaced, or that the server never showed, until the run ends."""

EMPTY_POLLS_PER_CHECK = 16
"""Consecutive empty polls after which the trainer checks that the server still has its registration."""

log = structlog.get_logger(actor="atropos_fetcher")


async def describe_wait(client: ApiClient, batch_size: int) -> str:
    """Return one line that says why the server has no batch of `batch_size` sequences."""
    try:
        status = await client.status()
    except (ServerUnavailable, NotAtropos) as error:
        return f"the state of the server is unknown: {error}"
    return explain_wait(status, await _environments(client), batch_size)


def explain_wait(status: Status, environments: list[EnvironmentStatus], batch_size: int) -> str:
    """Return the most likely reason: no environment, unsuitable group sizes, a reserved share, too few groups."""
    if not environments:
        return "no environment is registered" + (f"; {_queued(status)}" if status.queue_size else "")
    largest = max(one.max_group_size for one in environments)
    if largest > 1 and batch_size % largest:
        return (
            f"groups of {largest} sequences cannot fill a batch of {batch_size}: set learner.batch_size x "
            f"sampling.group_size to a multiple of {largest}, or change the group_size of the environment"
        )
    empty = [str(number) for number, one in enumerate(environments) if not one.self_queue_size]
    if status.queue_size and empty and min(one.unallocated_fraction for one in environments) < 1.0:
        return (
            f"{_queued(status)}, none from environment {', '.join(empty)}, whose min_batch_allocation reserves a share"
        )
    if status.queue_size:
        sequences = status.queue_size * largest
        return f"{_queued(status)}, {_missing(sequences, batch_size)}; {_registered(environments)}"
    return f"no group is queued; {_registered(environments)}"


async def _environments(client: ApiClient) -> list[EnvironmentStatus]:
    """Return the state of each environment by number; the server responds with an error after the last one."""
    found: list[EnvironmentStatus] = []
    try:
        while len(found) < MAX_ENVIRONMENTS:
            found.append(await client.environment(len(found)))
    except (ServerUnavailable, NotAtropos):
        pass
    return found


def _queued(status: Status) -> str:
    return f"{status.queue_size} group{'s are' if status.queue_size != 1 else ' is'} queued"


def _missing(sequences: int, batch_size: int) -> str:
    if sequences < batch_size:
        return f"at most {sequences} of the {batch_size} sequences of a batch"
    return f"whose sizes do not add up to {batch_size} sequences yet (each size must divide the largest)"


def _registered(environments: list[EnvironmentStatus]) -> str:
    count = len(environments)
    more = "at least " if count == MAX_ENVIRONMENTS else ""
    return f"{more}{count} environment{'s have' if count != 1 else ' has'} registered"


class AtroposApi:
    """The registration of one trainer with the server, and its polling for batches.

    The server's step count is ignored: the server counts batches when it forms them, and returns the newest first. A
    restarted server has no registration, so the trainer registers again with its own step. Groups that were sent before
    the first registration make that registration ineffective and cannot be delivered. Only in this case the server is
    cleared even without `reset`.
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
        """reset: clear the state of a previous trainer. transport: replaces the network in tests."""
        self._client = ApiClient(url, transport)
        self._registration, self._reset = registration, reset
        self._backoff = Backoff(max_seconds=poll_seconds)
        self._unavailable_since: float | None = None
        self._empty_polls = self._lost_registrations = 0

    async def open(self, *, step: int) -> None:
        """Register the trainer. Raises ProfileError if no Atropos API server responds, or if it has another trainer.

        Raises RemoteError if the server does not keep the registration.
        """
        while True:
            try:
                await self._reset_if_registered()
                await self._register(step)
            except ServerUnavailable as error:
                await self._wait(str(error))
            except NotAtropos as error:
                raise ProfileError(
                    f"atropos.url {self._client.shown} is not an Atropos API server ({error}): "
                    "start one with `run-api` and set its address (the default port 8000 is also that of the policy's "
                    "own HTTP API)"
                ) from error
            else:
                return self._mark_available()

    async def batch(self, *, step: int) -> list[Raw] | None:
        """Return the next batch; None if there is none yet or it was too large. Waits while the server is unavailable.

        Raises ProfileError if another trainer has registered and `reset` is false, and RemoteError if the server does
        not keep the registration: two trainers with `reset` would replace each other's without end.
        """
        while True:
            try:
                if self._unavailable_since is not None:
                    await self._register(step)
                groups = await self._poll()
            except (ServerUnavailable, NotAtropos) as error:
                await self._wait(str(error))
            else:
                self._mark_available()
                return groups

    async def waiting_for(self) -> str:
        """Return one line that says why there is no batch."""
        return await describe_wait(self._client, self._registration.batch_size)

    async def close(self) -> None:
        """Close the connections. The protocol has no deregistration."""
        await self._client.close()

    async def _poll(self) -> list[Raw] | None:
        try:
            delivery = await self._client.batch()
        except BodyTooLarge:
            log.error("batch_dropped", reason="the response is too large", max_bytes=MAX_BODY_BYTES)
            return None
        if delivery.status == "error":
            raise ServerUnavailable("the server has no registered trainer")
        if delivery.batch:
            self._empty_polls = 0
            return delivery.batch
        self._empty_polls += 1
        if self._empty_polls % EMPTY_POLLS_PER_CHECK == 0 and not self._matches(await self._client.info()):
            raise ServerUnavailable("the server has lost the registration")
        return None

    async def _reset_if_registered(self) -> None:
        """Clear the state of a previous trainer if `reset` is set."""
        if self._reset and (await self._client.info()).batch_size != UNREGISTERED:
            log.warning(
                "atropos_server_reset",
                url=self._client.shown,
                reason="another trainer was registered",
                hint="restart the environments that were connected",
            )
            await self._client.reset()

    async def _register(self, step: int) -> None:
        for _ in range(REGISTRATION_ATTEMPTS):
            await self._client.register(self._registration, step=step)
            info = await self._client.info()
            if self._matches(info):
                return
            if info.batch_size != UNREGISTERED:
                if not self._reset:
                    raise ProfileError(self._conflict(info))
                self._count_lost(info)
            await self._client.reset()
        self._count_lost(info)
        raise ServerUnavailable("the server does not accept the registration")

    def _count_lost(self, info: Info) -> None:
        """Count a registration that the server has not kept. info: what the server has instead."""
        self._lost_registrations += 1
        if self._lost_registrations < MAX_LOST_REGISTRATIONS:
            return
        other = "has no registration"
        if info.batch_size != UNREGISTERED:
            other = f"has batches of {info.batch_size} sequences with fewer than {info.max_token_len} tokens"
        raise RemoteError(
            f"the Atropos API server at {self._client.shown} has not kept {self._lost_registrations} registrations of "
            f"this run, and {other}: another trainer may use it; start one server per run, and continue with --resume"
        )

    def _matches(self, info: Info) -> bool:
        wanted = self._registration
        return (info.batch_size, info.max_token_len) == (wanted.batch_size, wanted.max_token_len)

    def _conflict(self, info: Info) -> str:
        wanted = self._registration
        return (
            f"the trainer registered with the Atropos API server at {self._client.shown} has batches of "
            f"{info.batch_size} sequences with fewer than {info.max_token_len} tokens; this run needs "
            f"{wanted.batch_size} sequences with fewer than {wanted.max_token_len} tokens: restart the server, or set "
            "atropos.reset = true"
        )

    async def _wait(self, reason: str) -> None:
        if self._unavailable_since is None:
            self._unavailable_since = time.monotonic()
            self._backoff.reset()
            log.warning(
                "atropos_server_unavailable",
                url=self._client.shown,
                reason=reason,
                hint="start it with `run-api --host HOST --port PORT` of that address; the run waits for it",
            )
        await anyio.sleep(self._backoff.next_seconds())

    def _mark_available(self) -> None:
        if self._unavailable_since is not None:
            seconds = round(time.monotonic() - self._unavailable_since, 1)
            self._unavailable_since = None
            log.info("atropos_server_available", url=self._client.shown, seconds=seconds)
