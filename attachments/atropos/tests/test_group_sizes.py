"""Group sizes: which fill a batch, checked against the real server's packing where it is at hand."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from typing import Any

import pytest
from msgspec import convert

from attachments.atropos.group_sizes import max_queued_batches, require_fillable, reserved_share, unfillable
from attachments.atropos.sections import ATROPOS, ENVIRONMENTS, RunningServer
from attachments.atropos.tests.atroposlib_python import python_with_atropos
from protocols.errors import ProfileError
from training_run.profile.mounted import with_attachments
from training_run.profile.schema import Profile

BATCH = 24
PROFILE = with_attachments(Profile)

REST = {"model": {"path": "m"}, "data": {"train": "d"}, "rewards": [{"name": "exact"}]}

PACK = """
import json, sys
from atroposlib.api.utils import grab_exact_from_heterogeneous_queue as grab
batch, cases = json.loads(sys.stdin.read())
def left(sizes):
    queue = [{"tokens": [[0]] * size} for size in sizes]
    taken = True
    while taken:
        taken, queue = grab(queue, batch)
    return sum(len(group["tokens"]) for group in queue)
print(json.dumps([left(sizes) for sizes in cases]))
"""
"""Of queues of groups, given by their sizes: how many sequences the server's own packing cannot hand out."""


def unpacked(queues: list[list[int]]) -> list[int]:
    """Ask atroposlib."""
    command = [python_with_atropos(), "-c", PACK]
    asked = subprocess.run(command, input=json.dumps([BATCH, queues]), capture_output=True, text=True, check=True)
    found: list[int] = json.loads(asked.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("batch", "sizes", "says"),
    [
        (16, {"a": 32}, "groups of 32 (a) are larger than a batch of 16 sequences"),
        (100, {"a": 8}, "groups of 8 (a) cannot fill a batch of exactly 100 sequences"),
        (24, {"a": 8, "b": 3}, "groups of 3 (b) cannot be packed to the largest group size 8 (a)"),
        (12, {"a": 4, "b": 8}, "groups of 8 (b) cannot fill a batch of exactly 12 sequences"),
    ],
)
def test_sizes_that_never_fill_a_batch_are_named(batch: int, sizes: dict[str, int], says: str) -> None:
    """With the environment, and what to change."""
    text = unfillable(batch, sizes)
    assert text is not None
    assert text.startswith(says)
    assert "\n" not in text


@pytest.mark.parametrize("sizes", [{}, {"a": 8}, {"a": 24}, {"a": 8, "b": 4, "c": 1}, {"a": 6, "b": 3, "c": 2}])
def test_sizes_that_fill_a_batch_are_let_pass(sizes: dict[str, int]) -> None:
    """Divisors of the largest, which divides the batch."""
    assert unfillable(BATCH, sizes) is None


@pytest.mark.needs_extra("atroposlib")
def test_the_server_hands_out_what_the_rule_lets_pass() -> None:
    """In any order of arrival, all but what does not make up a batch yet: atroposlib's packing says so itself."""
    possible = (1, 2, 3, 4, 5, 6, 8, 12, 24, 32)
    mixtures = [sizes for count in (1, 2, 3) for sizes in itertools.combinations(possible, count)]
    passed = [sizes for sizes in mixtures if unfillable(BATCH, {str(size): size for size in sizes}) is None]
    assert len(passed) > 20
    queues = [random.Random(0).choices(sizes, k=200) for sizes in passed]
    for sizes, left in zip(passed, unpacked(queues), strict=True):
        assert left < BATCH + sum(max(sizes) - size for size in sizes)


@pytest.mark.needs_extra("atroposlib")
def test_the_server_keeps_what_the_rule_refuses() -> None:
    """Threes beside an eight are never handed out while it waits for others; nor is a batch overfull or underfull."""
    assert unpacked([[8] + [3] * 100, [32], [5] * 100]) == [308, 32, 500]


def test_environments_pause_after_two_batches_of_one_size() -> None:
    """So that the last groups of a batch are made at full width."""
    assert max_queued_batches(128, {"a": 8, "b": 8}) == 2
    assert max_queued_batches(128, {}) == 2


def test_unpacked_groups_do_not_make_everybody_pause() -> None:
    """Beyond two batches there is room for what of each size may lie there without filling anything."""
    sizes = {"a": 8, "b": 4, "c": 2}
    assert (max_queued_batches(8, sizes) - 2) * 8 >= (8 - 4) + (8 - 2)


def profile_of(environments: list[dict[str, float]]) -> Any:
    """Return a profile that starts these environments."""
    named = [{"name": f"e{i}", "script": "e.py", **keys} for i, keys in enumerate(environments)]
    return convert({**REST, "atropos": {"type": "start", "python": "p"}, "environments": named}, PROFILE)


@pytest.mark.parametrize(
    ("environments", "shares"),
    [
        ([{}], [None]),
        ([{}, {}], [0.5, 0.5]),
        ([{"weight": 3.0}, {}], [0.75, 0.25]),
        ([{"weight": 3.0}, {}, {"min_batch_allocation": 0.2}], [9 / 16, 3 / 16, 3 / 16]),
        ([{"weight": 3.0, "min_batch_allocation": 0.1}, {}], [1 / 16, 14 / 16]),
        ([{"min_batch_allocation": 1.0}, {}], [1.0, None]),
    ],
)
def test_weights_divide_what_is_not_reserved_otherwise(
    environments: list[dict[str, float]], shares: list[float | None]
) -> None:
    """Of a batch; where there is but one environment, or others that nobody here knows, nothing is reserved."""
    profile = profile_of(environments)
    assert [reserved_share(one, profile) for one in ENVIRONMENTS.of(profile)] == pytest.approx(shares)
    joined = ATROPOS.put(profile, RunningServer(url="http://127.0.0.1:1"))
    own = zip(ENVIRONMENTS.of(profile), shares, strict=True)
    given = [share if one.min_batch_allocation else None for one, share in own]
    assert [reserved_share(one, joined) for one in ENVIRONMENTS.of(joined)] == pytest.approx(given)


@pytest.mark.parametrize(
    "environments",
    [
        [{"min_batch_allocation": 0.7}, {"min_batch_allocation": 0.4}], [{"min_batch_allocation": 1.0}, {}],
        [{"weight": 99.0}, {}], [{"weight": 2.0}], [{}, {"group_size": 3}], [{"group_size": 256}],
    ],
)  # fmt: skip
def test_environments_that_cannot_fill_a_batch_are_refused(environments: list[dict[str, float]]) -> None:
    """Shares above 1, a share without a group, a weight without effect, and groups that do not fit."""
    with pytest.raises(ProfileError, match=r"^environments: "):
        require_fillable(profile_of(environments))


@pytest.mark.parametrize(
    "environments",
    [[], [{}], [{}, {"weight": 3.0, "group_size": 4}], [{"min_batch_allocation": 0.7}, {"min_batch_allocation": 0.3}]],
)
def test_environments_that_fill_a_batch_are_accepted(environments: list[dict[str, float]]) -> None:
    """With shares and group sizes that fit."""
    require_fillable(profile_of(environments))
