"""For whom an Atropos API server waits, in words."""

from __future__ import annotations

from clotho.atropos.client import ApiClient, NotAtropos, ServerAway
from clotho.atropos.wire import EnvironmentStatus, Status

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
