"""Batch arithmetic of an Atropos API server: group sizes that fill a batch, and reserved shares.

A batch of the server holds an exact number of sequences. The server never divides a group. It hands out smaller groups
only when groups of one size fill up to the largest group size (atroposlib 0.4, `api/utils.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from math import nextafter

from attachments.atropos.sections import ATROPOS, ENVIRONMENTS, EnvironmentSection, RunningServer
from protocols.errors import ProfileError
from training_run.profile.schema import Profile

ROUNDING = 1e-9


def batch_sequences(profile: Profile) -> int:
    """Return the batch size that is registered with the server: learner.batch_size x sampling.group_size sequences."""
    return profile.learner.batch_size * profile.sampling.group_size


def group_size(environment: EnvironmentSection, profile: Profile) -> int:
    """Return the number of completions per prompt of an environment."""
    return environment.group_size or profile.sampling.group_size


def reserved_share(environment: EnvironmentSection, profile: Profile) -> float | None:
    """Return the share of every batch that the server reserves for an environment.

    The share is `min_batch_allocation` if it is set. Otherwise the environments without `min_batch_allocation` divide
    the rest of the batch in proportion to their weights. The share is rounded down to whole groups, because the server
    fills a share up to the next group, which would leave no room for the last environment.

    Returns None if no share can be reserved: there is only one environment, groups from other environments are possible
    (`atropos = "connect"`), or the other shares use the whole batch.
    """
    if environment.min_batch_allocation is not None:
        return _whole_groups(environment.min_batch_allocation, environment, profile)
    others = [other for other in ENVIRONMENTS.of(profile) if other.min_batch_allocation is None]
    left = 1.0 - sum(other.min_batch_allocation or 0.0 for other in ENVIRONMENTS.of(profile))
    if len(ENVIRONMENTS.of(profile)) == 1 or isinstance(ATROPOS.of(profile), RunningServer) or left <= 0.0:
        return None
    return _whole_groups(left * environment.weight / sum(other.weight for other in others), environment, profile)


def _whole_groups(share: float, environment: EnvironmentSection, profile: Profile) -> float:
    """Return the largest share of whole groups that is at most `share`; the server truncates batch x share."""
    batch, size = batch_sequences(profile), group_size(environment, profile)
    sequences = int(share * batch / size + ROUNDING) * size
    whole = sequences / batch
    return whole if int(batch * whole) == sequences else nextafter(whole, 1.0)


OPTION_KEYS = {"group_size": "group_size", "inference_weight": "weight", "min_batch_allocation": "min_batch_allocation"}
"""Flags of an environment's script that keys of [[environments]] set."""


def require_fillable(profile: Profile) -> None:
    """Environments can fill a batch, and their names, options and shares are valid; ProfileError otherwise."""
    if (complaint := next(chain(_settings(profile), _complaints(profile)), None)) is not None:
        raise ProfileError(f"environments: {complaint}")


def _settings(profile: Profile) -> Iterator[str]:
    names = Counter(["api-server", *(environment.name.casefold() for environment in ENVIRONMENTS.of(profile))])
    yield from (f"the name {name!r} is taken; every name must be different" for name in names if names[name] > 1)
    for environment in ENVIRONMENTS.of(profile):
        for option in environment.options:
            if key := OPTION_KEYS.get(option.removeprefix("env.")):
                yield f"{environment.name!r}: set {key} by its key, not as an option"


def _complaints(profile: Profile) -> Iterator[str]:
    listed = ENVIRONMENTS.of(profile)
    total = sum(environment.min_batch_allocation or 0.0 for environment in listed)
    if total > 1.0 + ROUNDING:
        yield f"min_batch_allocation adds up to {total:g}; it must be at most 1"
    batch, shares = batch_sequences(profile), {one.name: reserved_share(one, profile) for one in listed}
    for name, share in shares.items():
        if share is not None and int(batch * share) == 0:
            yield f"the share of {name!r} is less than one group of a batch: raise it"
        if share is None and sum(other or 0.0 for other in shares.values()) >= 1.0 - ROUNDING:
            yield f"min_batch_allocation of the others leaves no share for {name!r}"
    if len(listed) == 1 and listed[0].weight != 1.0 and not isinstance(ATROPOS.of(profile), RunningServer):
        yield f"weight has no effect: {listed[0].name!r} is the only one"
    if complaint := unfillable(batch, {one.name: group_size(one, profile) for one in listed}):
        yield complaint


def unfillable(batch: int, sizes: Mapping[str, int]) -> str | None:
    """Return the reason, in one line, why a batch of `batch` sequences can never be filled; None if it can.

    sizes: environment -> group size.
    """
    if not sizes:
        return None
    name, largest = max(sizes.items(), key=lambda item: item[1])
    if largest > batch:
        return (
            f"groups of {largest} ({name}) are larger than a batch of {batch} sequences (learner.batch_size x "
            "sampling.group_size): lower the group_size, or raise learner.batch_size"
        )
    if batch % largest:
        return (
            f"groups of {largest} ({name}) cannot fill a batch of exactly {batch} sequences (learner.batch_size x "
            f"sampling.group_size): choose a group_size that divides {batch}"
        )
    for other, size in sizes.items():
        if largest % size:
            return (
                f"groups of {size} ({other}) cannot be packed to the largest group size {largest} ({name}): "
                f"choose a group_size that divides {largest}"
            )
    return None


def max_queued_batches(batch: int, sizes: Mapping[str, int]) -> int:
    """Return `max_batches_offpolicy`: the number of queued batches at which an environment pauses.

    The value is 2 for groups of one size, so that no environment idles while the last groups of a batch are sampled.
    With several sizes the queue may hold groups that cannot be packed yet. The value is then larger: otherwise every
    environment could pause before a batch can be filled.
    """
    largest = max(sizes.values(), default=0)
    if all(size == largest for size in sizes.values()):
        return 2
    unpacked = sum(largest - size for size in set(sizes.values())) + len(sizes) * largest
    return 2 + -(-unpacked // batch)
