"""Which groups an Atropos API server can put together to batches.

Its batches hold an exact number of sequences, groups are never divided, and smaller groups are handed out only where
groups of one size fill up to the largest (atroposlib 0.4, `api/utils.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nextafter

from clotho.config.schema import EnvironmentSection, Profile

ROUNDING = 1e-9


def batch_sequences(profile: Profile) -> int:
    """What the server is told of a batch: sequences, as many as `learner.batch_size` groups of the usual size have."""
    return profile.learner.batch_size * profile.sampling.group_size


def group_size(environment: EnvironmentSection, profile: Profile) -> int:
    """Completions per prompt of an environment."""
    return environment.group_size or profile.sampling.group_size


def reserved(environment: EnvironmentSection, profile: Profile) -> float | None:
    """Share of every batch that the server keeps for an environment: its `min_batch_allocation`, or that of its weight.

    It is of whole groups: the server fills a share up to the next group, and would leave nothing for the last
    environment. Weights divide what is not reserved otherwise; None where they cannot, for there is one environment,
    others may come from elsewhere, or nothing is left.
    """
    if environment.min_batch_allocation is not None:
        return _whole_groups(environment.min_batch_allocation, environment, profile)
    others = [other for other in profile.environments if other.min_batch_allocation is None]
    left = 1.0 - sum(other.min_batch_allocation or 0.0 for other in profile.environments)
    if len(profile.environments) == 1 or profile.atropos.url or left <= 0.0:
        return None
    return _whole_groups(left * environment.weight / sum(other.weight for other in others), environment, profile)


def _whole_groups(share: float, environment: EnvironmentSection, profile: Profile) -> float:
    """The largest share of whole groups that is no larger; the server rounds its product with the batch down."""
    batch, size = batch_sequences(profile), group_size(environment, profile)
    sequences = int(share * batch / size + ROUNDING) * size
    whole = sequences / batch
    return whole if int(batch * whole) == sequences else nextafter(whole, 1.0)


def unfillable(batch: int, sizes: Mapping[str, int]) -> str | None:
    """Say on one line why a batch of so many sequences can never be filled, and what to change; None if it can.

    sizes: of groups, by environment.
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
            f"groups of {largest} ({name}) never fill a batch of {batch} sequences (learner.batch_size x "
            f"sampling.group_size), which the server fills exactly: choose a group_size that divides {batch}"
        )
    for other, size in sizes.items():
        if largest % size:
            return (
                f"groups of {size} ({other}) never fill up to those of {largest} ({name}), as the server wants it: "
                f"choose a group_size that divides {largest}"
            )
    return None


def batches_queued(batch: int, sizes: Mapping[str, int]) -> int:
    """After how many batches on the server environments should pause: `max_batches_offpolicy`.

    Two, so that nobody idles while the last groups of a batch are made; more where groups of several sizes may lie
    there that fill nothing yet, lest everybody pauses and nothing is ever filled.
    """
    largest = max(sizes.values(), default=0)
    if all(size == largest for size in sizes.values()):
        return 2
    unpacked = sum(largest - size for size in set(sizes.values())) + len(sizes) * largest
    return 2 + -(-unpacked // batch)
