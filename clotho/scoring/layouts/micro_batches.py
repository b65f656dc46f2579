"""Sequences in, micro-batches out: on the host, and the same way every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from clotho.scoring.layouts.packed import place_packed
from clotho.scoring.layouts.packing import Layout, Placement
from clotho.scoring.layouts.padded import place_padded
from clotho.scoring.layouts.prompt_groups import place_shared
from clotho.scoring.layouts.token_table import token_table
from clotho.scoring.sequences import MicroBatch, TrainingSequence

WORTH_SHARING = 7 / 8
"""Shared prefixes are taken for at most so many of the positions of padded rows: two passes have their own price."""


def place_cheapest(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Share prompts where that leaves clearly fewer positions to compute, else pad."""
    padded, shared = (list(place(sequences, order, budget)) for place in (place_padded, place_shared))
    sharing = sum(part.tokens for part in shared) <= WORTH_SHARING * sum(part.tokens for part in padded)
    return iter(shared if sharing else padded)


LAYOUTS: dict[str, Layout] = {
    "padded": place_padded,
    "packed": place_packed,
    "shared": place_shared,
    "auto": place_cheapest,
}


def build_micro_batches(sequences: Sequence[TrainingSequence], *, layout: str, budget: int) -> tuple[MicroBatch, ...]:
    """Cut sequences into micro-batches of at most `budget` positions that the blocks compute, padding included.

    A sequence longer than the budget gets a micro-batch of its own. layout: a key of `LAYOUTS`. Sequences with
    recorded supports, or with a teacher, do not come together with others. Prompts hold at least one token, completions
    at least one that was drawn. Equal input gives equal output, and which micro-batches there are depends on tokens,
    supports and teachers alone.
    """
    return tuple(
        MicroBatch(
            table=token_table([sequences[member] for member in placement.members], placement.positions),
            members=placement.members,
            inputs=placement.inputs,
        )
        for placement in _placements(sequences, layout, budget)
    )


def _placements(sequences: Sequence[TrainingSequence], layout: str, budget: int) -> Iterator[Placement]:
    order = sorted(range(len(sequences)), key=lambda index: -sequences[index].inputs)
    for kind in product((False, True), repeat=2):
        part = [index for index in order if _kind(sequences[index]) == kind]
        if part:
            yield from LAYOUTS[layout](sequences, part, budget)


def _kind(sequence: TrainingSequence) -> tuple[bool, bool]:
    return sequence.teacher is not None, bool(sequence.supports)
