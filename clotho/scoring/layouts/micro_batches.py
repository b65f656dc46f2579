"""Split sequences into micro-batches deterministically, and build the table of sampled tokens of each micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from clotho.extension import Door
from clotho.scoring.layouts.rows import TOKEN_BUCKET, Layout, Placement, bucket, place_packed, place_padded
from clotho.scoring.layouts.shared_prefix import place_shared
from clotho.scoring.sequences import MicroBatch, RouteInputs, TeacherRows, TokenTable, TrainingSequence

Number = TypeVar("Number", np.int32, np.float32)


def token_table(sequences: Sequence[TrainingSequence], positions: Sequence[NDArray[np.int32]]) -> TokenTable:
    """Concatenate the sampled tokens of all sequences. positions: of the hidden states that predict them, (T,) each.

    Either all sequences have supports or none has, and likewise log-probabilities of a reference and of a teacher, and
    teachers. Raises ValueError if the support of a sampled token is empty.
    """
    sampled = [np.flatnonzero(_sampled_T(sequence)) for sequence in sequences]
    padding = -sum(map(len, sampled)) % TOKEN_BUCKET

    def row_N(parts: Sequence[NDArray[Number]], *, zero: bool = False) -> NDArray[Number]:
        joined = np.concatenate([part[at] for part, at in zip(parts, sampled, strict=True)])
        return np.concatenate([joined, np.full(padding, 0 if zero else joined[0], dtype=joined.dtype)])

    def same_N(value: float, sequence: TrainingSequence, dtype: type[Number]) -> NDArray[Number]:
        return np.full(len(sequence.tokens), value, dtype=dtype)

    references = [sequence.reference_T for sequence in sequences if sequence.reference_T is not None]
    taught = [sequence.teacher_logp_T for sequence in sequences if sequence.teacher_logp_T is not None]
    has_temperatures = any(sequence.temperature for sequence in sequences)
    return TokenTable(
        position_N=row_N(positions),
        target_N=row_N([np.asarray(sequence.tokens, dtype=np.int32) for sequence in sequences]),
        sequence_N=row_N([same_N(index, sequence, np.int32) for index, sequence in enumerate(sequences)]),
        rollout_logp_N=row_N([sequence.rollout_logp_T for sequence in sequences]),
        version_N=row_N([sequence.version_T for sequence in sequences]),
        advantage_N=row_N([sequence.advantage_T for sequence in sequences]),
        loss_mask_N=row_N([sequence.loss_mask_T for sequence in sequences], zero=True),
        loss_weight_N=row_N([sequence.loss_weight_T for sequence in sequences], zero=True),
        support_N_K=_supports(sequences, sampled),
        temperature_N=row_N([same_N(s.temperature, s, np.float32) for s in sequences]) if has_temperatures else None,
        reference_N=row_N(references) if references else None,
        teacher=_teacher(sequences, sampled, padding),
        teacher_logp_N=row_N(taught) if taught else None,
    )


def _sampled_T(sequence: TrainingSequence) -> NDArray[np.bool_]:
    return np.ones(len(sequence.tokens), dtype=bool) if sequence.sampled_mask_T is None else sequence.sampled_mask_T


def _supports(sequences: Sequence[TrainingSequence], sampled: Sequence[NDArray[np.intp]]) -> NDArray[np.int32] | None:
    supports = [s.supports[t] for s, at in zip(sequences, sampled, strict=True) if s.supports for t in at]
    if not supports:
        return None
    if not all(supports):
        raise ValueError("a recorded support contains at least the sampled token")
    padding = -len(supports) % TOKEN_BUCKET
    rows = [np.frombuffer(support, dtype="<u4") for support in [*supports, *[supports[0]] * padding]]
    support_N_K = np.full((len(rows), bucket(max(map(len, rows)))), -1, dtype=np.int32)
    for row_K, tokens in zip(support_N_K, rows, strict=True):
        row_K[: len(tokens)] = tokens
    return support_N_K


def _teacher(
    sequences: Sequence[TrainingSequence], sampled: Sequence[NDArray[np.intp]], padding: int
) -> TeacherRows | None:
    """Concatenate the rows of all teachers, padded to the widest."""
    parts = [(s.teacher, at) for s, at in zip(sequences, sampled, strict=True) if s.teacher is not None]
    if not parts:
        return None
    N, K = sum(len(at) for _, at in parts) + padding, max(teacher.token_T_K.shape[1] for teacher, _ in parts)
    rows = TeacherRows(np.full((N, K), -1, dtype=np.int32), np.zeros((N, K), dtype=np.float32))
    start = 0
    for teacher, at in parts:
        for row_N_K, part_T_K in zip(rows, teacher, strict=True):
            row_N_K[start : start + len(at), : part_T_K.shape[1]] = part_T_K[at]
        start += len(at)
    return rows


MAX_SHARED_COST = 7 / 8
"""Prompts are shared if that computes at most this fraction of the positions of padded rows; two passes cost extra."""


def place_cheapest(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Share prompts if that computes considerably fewer positions than padded rows."""
    padded, shared = (list(place(sequences, order, budget)) for place in (place_padded, place_shared))
    sharing = sum(part.tokens for part in shared) <= MAX_SHARED_COST * sum(part.tokens for part in padded)
    return iter(shared if sharing else padded)


LAYOUTS: dict[str, Layout] = {
    "padded": place_padded,
    "packed": place_packed,
    "shared": place_shared,
    "auto": place_cheapest,
}


MICRO_BATCH_ROUTES: Door[
    [Sequence[TrainingSequence], Callable[[Sequence[TrainingSequence]], list[NamedTuple]], bool], list[RouteInputs]
] = Door("library.micro_batch_routes")
"""Returns the routes of the micro-batches of sequences, of which some have routes; None: they are not used.

Called with the sequences, what returns the inputs of the same micro-batches for other tokens (equal prompts stay
equal), and `replays` of `build_micro_batches`.
"""


def build_micro_batches(
    sequences: Sequence[TrainingSequence],
    *,
    layout: str,
    budget: int,
    whole_groups: bool = False,
    replays: bool = False,
) -> tuple[MicroBatch, ...]:
    """Split sequences into micro-batches of at most `budget` positions, padding included.

    A sequence longer than the budget gets a micro-batch of its own. whole_groups: the sequences of a group stay in one
    micro-batch, which a group longer than the budget has alone. layout: a key of `LAYOUTS`. Sequences with recorded
    supports, or with a teacher, are not mixed with others. Prompts have at least one token, completions at least one
    sampled token. Equal input gives equal output; the split depends on tokens, supports and teachers only. replays:
    whether the learner takes the routes of the sequences.
    """
    place = _of_whole_groups(layout) if whole_groups else LAYOUTS[layout]
    batches = tuple(
        MicroBatch(
            table=token_table([sequences[member] for member in placement.members], placement.positions),
            members=placement.members,
            group_B=_numbered([sequences[member].group for member in placement.members]),
            inputs=placement.inputs,
        )
        for placement in _placements(sequences, place, budget)
    )
    if all(sequence.route_I_E is None for sequence in sequences):
        return batches

    def inputs_of(others: Sequence[TrainingSequence]) -> list[NamedTuple]:
        return [placement.inputs for placement in _placements(others, place, budget)]

    routed = MICRO_BATCH_ROUTES.first(sequences, inputs_of, replays)
    if routed is None:
        return batches
    return tuple(micro._replace(routes=routes) for micro, routes in zip(batches, routed, strict=True))


def positions(micro: MicroBatch) -> int:
    """Return the number of positions that the blocks compute for a micro-batch, padding included."""
    return sum(array.size for name, array in micro.inputs._asdict().items() if name.startswith("tokens"))


def _numbered(groups: Sequence[int]) -> NDArray[np.int32]:
    return np.unique(groups, return_inverse=True)[1].astype(np.int32)


def _of_whole_groups(layout: str) -> Layout:
    """Return a layout that adds group after group to a micro-batch, the longest first, while the budget allows."""

    def place(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
        """Yield micro-batches of whole groups."""
        groups: dict[int, list[int]] = {}
        for member in order:
            groups.setdefault(sequences[member].group, []).append(member)
        members: list[int] = []
        placed: Placement | None = None
        for group in groups.values():
            together = sorted([*members, *group], key=order.index)
            (larger,) = LAYOUTS[layout](sequences, together, sys.maxsize)
            if placed is not None and larger.tokens > budget:
                yield placed
                together = group
                (larger,) = LAYOUTS[layout](sequences, together, sys.maxsize)
            members, placed = together, larger
        if placed is not None:
            yield placed

    return place


def _placements(sequences: Sequence[TrainingSequence], layout: Layout, budget: int) -> Iterator[Placement]:
    order = sorted(range(len(sequences)), key=lambda index: -sequences[index].inputs)
    for kind in product((False, True), repeat=3):
        part = [index for index in order if _kind(sequences[index]) == kind]
        if part:
            yield from layout(sequences, part, budget)


def _kind(sequence: TrainingSequence) -> tuple[bool, bool, bool]:
    return sequence.teacher is not None, sequence.teacher_logp_T is not None, bool(sequence.supports)
