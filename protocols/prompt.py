"""Prompter -> generator: one question to be answered by a group of completions.

Where every random choice of a run comes from: counters hashed with the run's seed; nothing need be stored.
"""

from __future__ import annotations

from hashlib import blake2b

from msgspec import Struct


class Problem(Struct, frozen=True, kw_only=True):
    """One line of a dataset. `type` names the kind of problem and selects the rewards that apply to it."""

    prompt: str
    answer: str
    type: str


class Prompt(Struct, frozen=True, kw_only=True, tag=True):
    """Prompter -> generator. Group `group_id` of the run; a pure function of (profile, seed, group_id).

    group_id: serial number, from 0.
    tokens: the rendered chat prompt, as the policy's tokenizer encodes it; never empty.
    seed: every random choice inside the group derives from it.
    source: the environment that the group comes from; empty where the run itself asked it.
    """

    group_id: int
    problem: Problem
    tokens: tuple[int, ...]
    seed: int
    source: str = ""


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
