"""Where every random choice of a run comes from: counters hashed with the run's seed; nothing need be stored."""

from __future__ import annotations

from hashlib import blake2b


def derive(seed: int, *path: int | str) -> int:
    """A 64-bit seed that is a pure function of `seed` and `path`; different paths give unrelated seeds.

    The first 8 bytes of BLAKE2b over the decimal forms, joined by slashes.
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def group_seed(run_seed: int, group_id: int) -> int:
    """The seed of one group of a run."""
    return derive(run_seed, "group", group_id)


def completion_seeds(seed: int, count: int) -> tuple[int, ...]:
    """One seed per completion of a group."""
    return tuple(derive(seed, "completion", index) for index in range(count))
