"""Whom a server waits for, in words."""

from __future__ import annotations

import pytest

from clotho.atropos.api import in_words
from clotho.atropos.wire import EnvironmentStatus, Status


def environment(own: int = 0, largest: int = 1, unallocated: float = 1.0) -> EnvironmentStatus:
    """What the server says of one."""
    return EnvironmentStatus(self_queue_size=own, max_group_size=largest, unallocated_fraction=unallocated)


@pytest.mark.parametrize(
    ("queued", "environments", "expected"),
    [
        (0, [], "no environment is registered"),
        (3, [], "no environment is registered; 3 groups are queued"),
        (0, [environment(), environment()], "nothing is queued; 2 environments have registered"),
        (
            3,
            [environment(3, 8)],
            "3 groups are queued, at most 24 sequences of the 128 of a batch; 1 environment has registered",
        ),
        (
            40,
            [environment(3, 8)],
            "40 groups are queued, whose sizes do not yet come to 128 sequences (each size must divide the largest); "
            "1 environment has registered",
        ),
        (
            12,
            [environment(12, 8, 0.5), environment(0, 8, 0.5)],
            "12 groups are queued; environment 1 has none (min_batch_allocation waits for it)",
        ),
        (
            50,
            [environment(50, 6)],
            "groups of 6 sequences never fill a batch of 128: make learner.batch_size x sampling.group_size a multiple "
            "of 6, or change the group_size of the environment",
        ),
        (0, [environment()] * 16, "nothing is queued; at least 16 environments have registered"),
    ],
)
def test_the_likeliest_reason_is_told(queued: int, environments: list[EnvironmentStatus], expected: str) -> None:
    """With what there is to be done about it, where that is known."""
    assert in_words(Status(queue_size=queued), environments, 128) == expected
