"""What an Atropos API server sends, as it stands in JSON: strict in types, lenient about fields nobody knows.

Every group of a batch is decoded by itself, so that a malformed one harms no other.

Why a group is refused, on one short line that may be shown anywhere.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

LONGEST = 80


class Refused(Exception):
    """A group that is not learned from; the message names field and index."""


def shown(text: str) -> str:
    """At most `LONGEST` characters of foreign text, each of them visible."""
    cut = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return "".join(character if character.isprintable() else "·" for character in cut)


Integer = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
T = TypeVar("T")
ABSENT = Raw(b"null")


class Parameters(Struct, frozen=True, kw_only=True):
    """How a group was sampled, or is to be treated (`generation_params`, `group_overrides`)."""

    temperature: float | None = None


class Override(Parameters, frozen=True, kw_only=True):
    """The same of one sequence. set_advantage_to_zero: nothing is learned from it."""

    set_advantage_to_zero: bool | None = None


class WireGroup(Struct, frozen=True, kw_only=True):
    """One group: G sequences of T tokens each; [] means null wherever a field may be null.

    masks: -100, or the token where it is trained. inference_logprobs: 1.0 where it is not.
    distill_token_ids, distill_logprobs: [G][T][K], decoded only where they are used. images: anything.
    """

    tokens: list[list[Integer]]
    masks: list[list[Integer]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    generation_params: Parameters | None = None
    group_overrides: Parameters | None = None
    overrides: list[Override | None] | None = None
    env_id: int | None = None
    images: Raw = ABSENT
    distill_token_ids: Raw = ABSENT
    distill_logprobs: Raw = ABSENT


class Delivery(Struct, frozen=True, kw_only=True):
    """The answer to GET /batch. status: "error" where the server knows of no trainer, and message says so."""

    batch: list[Raw] | None
    status: str | None = None
    message: str | None = None


class Info(Struct, frozen=True, kw_only=True):
    """The answer to GET /info. batch_size: -1 while no trainer is registered."""

    batch_size: int
    max_token_len: int


class Status(Struct, frozen=True, kw_only=True):
    """The answer to GET /status. queue_size: groups that are in no batch yet."""

    queue_size: int


class EnvironmentStatus(Struct, frozen=True, kw_only=True):
    """The answer to GET /status-env. self_queue_size: the environment's own, in groups of its size.

    max_group_size: of all groups in the queue. unallocated_fraction: 1 less what `min_batch_allocation` reserves.
    """

    self_queue_size: int
    max_group_size: int = 1
    unallocated_fraction: float = 1.0


class _Sender(Struct, frozen=True, kw_only=True):
    env_id: int | None = None


def decode_group(raw: Raw) -> WireGroup:
    """Decode one group; raises Refused."""
    return decode(raw, WireGroup, "")


def sender(raw: Raw) -> int | None:
    """Return the environment of a group that may be malformed elsewhere."""
    try:
        return msgspec.json.decode(raw, type=_Sender).env_id
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def decode(raw: Raw, kind: type[T], field: str) -> T:
    """Decode a field of a group, or the whole where `field` is empty; raises Refused."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        message, _, path = str(error).partition(" - at ")
        place = (field + path.strip("`").removeprefix("$")).removeprefix(".")
        raise Refused(shown(f"{place or 'the group'}: {message}")) from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise Refused(shown(f"{field or 'the group'} is not JSON that can be read ({type(error).__name__})")) from error
